"""OpenAI API as in vLLM: completions and chat, answered in one piece or as a stream.

A field is understood here, passed on to the engines (`engine_fields`), or refused by name. Token ids are used
unchanged; text and conversations are converted by an engine's tokenizer and template. With `return_token_ids` an
answer has its ids, as in vLLM. An answer aborted by another client ends with `abort`; one of several that failed ends
with `error`. A chat with tools, or with parts that are not text, goes to an engine as it is: only that has the parsers
and processors. A model that is the name of an adapter of the pool selects it.

The constant head of a stream's events is encoded once per call. A stream always ends with `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.frozen import Message
from trimtab.runtime.engines.tokenizer import RENDER_OPTIONS
from trimtab.runtime.gateway import fields as extras
from trimtab.runtime.gateway.exchange import Refusal, sse, to_json
from trimtab.runtime.gateway.fields import BodyFields, RequestTerms, ServedKinds
from trimtab.runtime.gateway.serving import FINISHES, GenerationCall, details, samples_of
from trimtab.runtime.gateway.tokenizing import PoolTokenizer, TextStream
from trimtab.runtime.rollout.sampling import Chunk, Completion, ForwardedAnswer, Sample, SamplingParams

COMMON = (
    "model", "n", "stream", "stream_options", "logprobs", "stop", "stop_token_ids", "seed", "max_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "user", "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip
COMPLETIONS = (*COMMON, "prompt")
CHAT = (*COMMON, "messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
        "continue_final_message", "chat_template", "chat_template_kwargs")  # fmt: skip
FORWARDED_CHAT = (*CHAT, "tools", "tool_choice", "parallel_tool_calls")

PoolAdapters = Callable[[], Collection[str]]
"""Names of the LoRA adapters of the pool."""

DONE = b"data: [DONE]\n\n"
MAX_LOGPROBS = 20
MAX_SAMPLES = 1_024
MAX_PROMPTS = 4_096
MAX_ANSWERS = 8_192  # prompts times samples
_ALL_TOKENS = 1 << 30  # SGLang's value for no limit of top_k
CHAT_PATH = "/v1/chat/completions"
FORWARDING = ("vllm", "sglang")  # kinds of engines that take calls as they are
_NOT_FORWARDED = ("model", "stream", "stream_options", "request_id", "best_of", "priority")
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
_BY_TRIMTAB = {
    "priority": "x-trimtab-class chooses a class, which has a priority",
    "lora_path": "an adapter of the pool is chosen by its name as the model",
}


class OpenAIOptions(Message):
    """What a response contains."""

    chat: bool
    model: str
    logprobs: int | None = None  # None: off; else how many top tokens at each position
    token_ids: bool = False
    names_as_ids: bool = False  # tokens are written `token_id:17`
    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # with every event of a stream


class OpenAIReader:
    """Reads request bodies."""

    def __init__(
        self, tokenizer: PoolTokenizer, model_name: str, default_max_tokens: int, adapters: PoolAdapters
    ) -> None:
        self._tokenizer, self._model_name, self._default_max_tokens = tokenizer, model_name, default_max_tokens
        self._adapters = adapters

    async def model(self) -> str:
        return self._model_name or await self._tokenizer.model()

    async def completions(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> OpenAIFormat:
        """Body of `/v1/completions`."""
        fields = BodyFields(body)
        prompts = await self._prompts(fields)
        logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
        max_tokens = fields.integer("max_tokens", 16, 1)
        call, options = await self._read(fields, terms, kinds, prompts, logprobs, max_tokens, COMPLETIONS)
        return OpenAIFormat(call, options, self._tokenizer)

    async def chat(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> OpenAIFormat:
        """Body of `/v1/chat/completions`."""
        fields = BodyFields(body)
        messages = _messages(fields)
        forwards = _only_for_engines(fields, messages, kinds)
        options = {
            name: value
            for name in ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
            if (value := fields.take(name)) is not None
        }
        for kind in kinds() if options else ():
            for name in options.keys() - RENDER_OPTIONS.get(kind, options.keys()):
                raise fields.wrong(name, f"{kind} engines have no such option for their templates")
        best = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
        wanted = fields.boolean("logprobs")
        if best is not None and not wanted:
            raise fields.wrong("top_logprobs", "needs logprobs: true")
        max_tokens = fields.integer("max_completion_tokens", None, 1)
        older = fields.integer("max_tokens", None, 1)
        max_tokens = max_tokens or older or self._default_max_tokens
        # Everything else is checked before an engine is called.
        call, output_options = await self._read(
            fields, terms, kinds, [(0,)], (best or 0) if wanted else None, max_tokens,
            FORWARDED_CHAT if forwards else CHAT,
        )  # fmt: skip
        if forwards:
            whole = {name: value for name, value in body.items() if value is not None and name not in _NOT_FORWARDED}
            limit = {} if "max_completion_tokens" in whole else {"max_tokens": max_tokens}
            lora = {"model": call.params[0].lora} if call.params[0].lora else {}
            call.forward, call.params = (CHAT_PATH, {**whole, **limit, **lora}), [replace(call.params[0], n=1)]
            return ForwardedFormat(call, output_options, self._tokenizer)
        call.prompts = [await self._tokenizer.render(messages, options)]
        return OpenAIFormat(call, output_options, self._tokenizer)

    async def _read(
        self,
        fields: BodyFields,
        terms: RequestTerms,
        kinds: ServedKinds,
        prompts: list[tuple[int, ...] | str],
        logprobs: int | None,
        max_tokens: int,
        known: tuple[str, ...],
    ) -> tuple[GenerationCall, OpenAIOptions]:
        stream = fields.boolean("stream")
        options = BodyFields(fields.take("stream_options") or {}, within="stream_options")
        usage, running = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
        for name in options.rest:
            raise options.wrong(name, "there is no such option")
        model, lora = await self._model(fields)
        output_options = OpenAIOptions(
            known is not COMPLETIONS,
            model,
            logprobs,
            fields.boolean("return_token_ids"),
            fields.boolean("return_tokens_as_token_ids"),
            usage,
            running,
        )
        if fields.rest.get("best_of") == fields.rest.get("n", 1):
            fields.take("best_of")
        for name in _NO_EFFECT:
            fields.take(name)
        served = None if known is FORWARDED_CHAT else kinds
        params = replace(sampling_params(fields, kinds, served, logprobs, max_tokens, known), lora=lora)
        require_few_answers(fields, "n", len(prompts) * params.n)
        ids = await token_ids(self._tokenizer, prompts, fields, "prompt" if known is COMPLETIONS else "")
        return GenerationCall(ids, [params] * len(ids), terms, stream), output_options

    async def _model(self, fields: BodyFields) -> tuple[str, str | None]:
        wanted = fields.text("model")
        if wanted in self._adapters():
            return wanted, wanted
        if not wanted and self._model_name:
            return self._model_name, None
        model = await self.model()
        if wanted and wanted != model:
            raise Refusal(
                404, f"there is no model {wanted!r} here; {model!r} is", param="model", code="model_not_found"
            )
        return model, None

    async def _prompts(self, fields: BodyFields) -> list[tuple[int, ...] | str]:
        """Text, texts, ids or lists of ids; texts are tokenized later."""
        prompt = fields.take("prompt")
        if prompt is None:
            raise fields.wrong("prompt", "is missing")
        if isinstance(prompt, str):
            found: list[tuple[int, ...] | str] = [prompt]
        elif not isinstance(prompt, list) or not prompt:
            raise fields.wrong("prompt", "a text, texts, token ids, or lists of token ids; not empty")
        elif all(isinstance(text, str) for text in prompt):
            found = list(prompt)
        else:
            found = list(fields.prompts("prompt", prompt))
        return checked_prompts(fields, "prompt", found)


def checked_prompts(fields: BodyFields, name: str, found: list[tuple[int, ...] | str]) -> list[tuple[int, ...] | str]:
    if len(found) > MAX_PROMPTS:
        raise fields.wrong(name, f"{len(found)} prompts in one call; the maximum is {MAX_PROMPTS}")
    if "" in found or () in found:
        raise fields.wrong(name, "an empty prompt")
    return found


async def token_ids(
    tokenizer: PoolTokenizer, prompts: Sequence[tuple[int, ...] | str], fields: BodyFields, name: str
) -> list[tuple[int, ...]]:
    """Prompts as token ids; those given as ids in the field `name` are checked, texts are tokenized."""
    given = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if given and name:
        await tokenizer.check_known(given, fields, name)
    return [await tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def sampling_params(
    fields: BodyFields,
    kinds: ServedKinds,
    served: ServedKinds | None,  # kinds of engines that further fields are passed on to; None: they get the whole body
    logprobs: int | None,
    max_tokens: int,
    known: tuple[str, ...],
    *,
    prefix: str = "",
    new: str = "",  # within the names of limits
    seed_name: str = "seed",
) -> SamplingParams:
    """Sampling parameters of OpenAI's API or SGLang's."""
    n = fields.integer("n", 1, 1, MAX_SAMPLES)
    seed = fields.integer(seed_name, None, -(2**63), 2**63 - 1)
    stop, stop_ids = fields.strings("stop"), fields.ids("stop_token_ids")
    min_tokens = fields.integer(f"min_{new}tokens", 0, 0)
    if min_tokens > max_tokens:
        raise fields.wrong(f"min_{new}tokens", f"{min_tokens} is more than max_{new}tokens, which is {max_tokens}")
    temperature, top_p = fields.number("temperature", 1.0, 0.0), fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise fields.wrong("top_p", "0 leaves no token to choose from")
    top_k = fields.integer("top_k", 0, -1)
    extra = take_engine_extras(fields, served, known, prefix)
    return SamplingParams(
        max_tokens, min_tokens, temperature, top_p, 0 if top_k in (-1, _ALL_TOKENS) else top_k, n, stop, stop_ids, seed,
        logprobs, extra, extras.may_resume(extra, seed, stop, kinds()) if extra else None,
    )  # fmt: skip


def require_few_answers(fields: BodyFields, name: str, answers: int) -> None:
    if answers > MAX_ANSWERS:
        raise fields.wrong(name, f"{answers} answers in one call; the maximum is {MAX_ANSWERS}")


def take_engine_extras(
    fields: BodyFields, kinds: ServedKinds | None, known: tuple[str, ...], prefix: str = ""
) -> dict[str, Any]:
    """Fields of a body that are passed on to the engines; with no kinds, an engine gets the whole body."""
    fields.neutral(extras.NEUTRAL)
    for name in fields.rest.keys() & _BY_TRIMTAB.keys():
        raise fields.wrong(name, _BY_TRIMTAB[name])
    if kinds is None:
        for name, value in fields.rest.items():
            extras.require_bounded(name, value)
        return {}
    return extras.engine_extras(fields.rest, kinds(), known, prefix) if fields.rest else {}


def _only_for_engines(fields: BodyFields, messages: list[dict[str, Any]], kinds: ServedKinds) -> bool:
    """Whether a chat has tools, or parts that are not text."""
    tools = fields.take("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise fields.wrong("tools", "a list of tools")
    why = "tools" if tools else ""
    for place, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts):
            why = why or f"messages[{place}].content"
    if why:
        require_forwarding(fields, why, kinds, FORWARDING)
    return bool(why)


def require_forwarding(fields: BodyFields, name: str, kinds: ServedKinds, forwarding: Collection[str]) -> None:
    """Refuses what the engines that are up cannot take as it is."""
    for kind in sorted(set(kinds()) - set(forwarding)):
        raise fields.wrong(name, f"{kind} engines cannot take it; {' and '.join(forwarding)} engines can")


def _messages(fields: BodyFields) -> list[dict[str, Any]]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "a list of messages, at least one")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fields.wrong(f"messages[{place}]", "an object with a role and a content")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise fields.wrong(f"messages[{place}].content", "a text, or a list of parts")
    return messages


class OpenAIFormat:
    """Response to one call."""

    def __init__(self, call: GenerationCall, output_options: OpenAIOptions, tokenizer: PoolTokenizer) -> None:
        self.call, self._output, self._tokenizer = call, output_options, tokenizer
        extra = call.params[0].extra
        self._special = not extra.get("skip_special_tokens", True)
        self._keep_stop = bool(extra.get("include_stop_str_in_output") or extra.get("no_stop_trim"))
        kind = "chat.completion" if output_options.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if output_options.chat else 'cmpl'}-{call.id}",
            "object": kind,
            "created": call.created,
            "model": output_options.model,
        }
        self._event_head = ""
        if call.stream:
            head = {**self._head, "object": "chat.completion.chunk"} if output_options.chat else self._head
            self._event_head = f'data: {to_json(head)[:-1]},"choices":[{{"index":'
        self._flows: dict[int, TextStream] = {}  # of answers that have begun
        self._made: dict[int, int] = {}  # tokens so far
        self._ended: set[int] = set()
        self._offsets: dict[int, int] = {}  # characters so far, for log-probabilities

    # ---- in one piece ----------------------------------------------------------------------------------------------

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        call, choices = self.call, []
        for place, completion in enumerate(completions):
            for index, sample in enumerate(completion.samples):
                choices.append(await self._choice(call.number(place, index), place, sample))
        answer = {**self._head, "choices": choices, "usage": self._usage(samples_of(completions))}
        if self._output.token_ids and self._output.chat:
            answer["prompt_token_ids"] = list(call.prompts[0])
        return answer

    async def _choice(self, number: int, place: int, sample: Sample) -> dict[str, Any]:
        output_options = self._output
        text = await self._tokenizer.text_of(sample, special=self._special, keep_stop=self._keep_stop)
        choice: dict[str, Any] = {"index": number}
        if output_options.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = await self._logprobs(number, sample)
        choice["finish_reason"], choice["stop_reason"] = FINISHES[sample.end], sample.stopped_by
        if output_options.token_ids:
            choice["token_ids"] = list(sample.token_ids)
            if not output_options.chat:
                choice["prompt_token_ids"] = list(self.call.prompts[place])
        if self.call.terms.details or not sample.ok:
            choice["trimtab"] = details(sample)
        return choice

    def _usage(self, samples: Sequence[Sample]) -> dict[str, int]:
        return _usage(
            sum(map(len, self.call.prompts)), sum(len(sample.token_ids) + sample.missing for sample in samples)
        )

    # ---- as a stream -----------------------------------------------------------------------------------------------

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        number, output_options, sample = self.call.number(prompt, chunk.index), self._output, chunk.sample
        flow, first = self._flows.get(number), ""
        if flow is None:
            flow = self._flows[number] = TextStream(self._tokenizer, special=self._special, keep_stop=self._keep_stop)
            first = self._first(number, prompt)
        text = await flow.more(chunk)
        self._made[number] = self._made.get(number, 0) + len(chunk.token_ids)
        if not (text or chunk.token_ids or sample):
            return first.encode()
        logprobs = to_json(await self._logprobs(number, chunk)) if output_options.logprobs is not None else "null"
        content = f'{{"content":{to_json(text)}}}' if output_options.chat else to_json(text)
        more = ""
        if output_options.token_ids:
            more = f',"token_ids":{to_json(list(chunk.token_ids))}'
        if sample is not None:
            self._ended.add(number)
            self._made[number] = len(sample.token_ids) + sample.missing
            more += f',"stop_reason":{to_json(sample.stopped_by)}'
            if self.call.terms.details or not sample.ok:
                more += f',"trimtab":{to_json(details(sample))}'
        finish = f'"{FINISHES[sample.end]}"' if sample is not None else "null"
        name = "delta" if output_options.chat else "text"
        return (
            f'{first}{self._event_head}{number},"{name}":{content},"logprobs":{logprobs},"finish_reason":{finish}{more}}}]'
            f"{self._running_usage()}}}\n\n"
        ).encode()

    def _first(self, number: int, prompt: int) -> str:
        """What precedes the first text of an answer: its role in a chat, and prompt ids if requested."""
        ids = to_json(list(self.call.prompts[prompt])) if self._output.token_ids else ""
        if self._output.chat:
            prompt_ids = f',"prompt_token_ids":{ids}' if ids else ""
            delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            return f"{self._event_head}{number},{delta}}}]{prompt_ids}}}\n\n"
        if not ids:
            return ""
        nothing = '"text":"","logprobs":null,"finish_reason":null'
        return f'{self._event_head}{number},{nothing},"prompt_token_ids":{ids}}}]}}\n\n'

    def _running_usage(self) -> str:
        if not self._output.running_usage:
            return ""
        return f',"usage":{to_json(self._stream_usage())}'

    def _stream_usage(self) -> Any:
        return _usage(sum(map(len, self.call.prompts)), sum(self._made.values()))

    def aborted(self, why: str) -> bytes:
        empty = '"delta":{}' if self._output.chat else '"text":""'
        details_json = to_json({"reason": {"code": "CANCELLED", "sentence": why}})
        unfinished = [
            number
            for place, params in enumerate(self.call.params)
            for index in range(params.n)
            if (number := self.call.number(place, index)) not in self._ended
        ]
        return "".join(
            f'{self._event_head}{number},{empty},"logprobs":null,"finish_reason":"abort","trimtab":{details_json}}}]}}\n\n'
            for number in unfinished
        ).encode()

    def fault(self, refusal: Refusal) -> bytes:
        return sse(to_json(refusal.openai()))

    def end(self) -> bytes:
        """Usage if requested, and the end."""
        if not self._output.usage:
            return DONE
        head = {**self._head, "object": "chat.completion.chunk" if self._output.chat else "text_completion"}
        return sse(to_json({**head, "choices": [], "usage": self._stream_usage()})) + DONE

    # ---- log-probabilities -----------------------------------------------------------------------------------------

    async def _logprobs(self, number: int, source: Sample | Chunk) -> dict[str, Any] | None:
        if self._output.logprobs is None:
            return None
        ids, logprobs = source.token_ids, source.logprobs or (None,) * len(source.token_ids)
        best = source.best or ((),) * len(ids)
        every = [*ids, *(token for ranking in best for token, _ in ranking)]
        if self._output.names_as_ids:
            names = {token: f"token_id:{token}" for token in every}
        else:
            names = dict(zip(every, await self._tokenizer.names(every), strict=True))
        if self._output.chat:
            return {
                "content": [
                    {
                        **_named(names[token], value),
                        "top_logprobs": [_named(names[other], its) for other, its in ranking],
                    }
                    for token, value, ranking in zip(ids, logprobs, best, strict=True)
                ]
            }
        offset, offsets = self._offsets.get(number, 0), []
        for token in ids:
            offsets.append(offset)
            offset += len(names[token])
        self._offsets[number] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": list(logprobs),
            "tokens": [names[token] for token in ids],
            "top_logprobs": [{names[token]: value for token, value in ranking} for ranking in best]
            if self._output.logprobs
            else None,
        }


class ForwardedFormat(OpenAIFormat):
    """Response to a chat that went to an engine as it is: the engine's own, under the id and model of this gateway."""

    _usage_said: Any = None

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._reply(completions[0].samples[0])

    def _reply(self, sample: Sample) -> dict[str, Any]:
        reply = dict(ForwardedAnswer.of(sample).body)
        more = {"trimtab": details(sample)} if self.call.terms.details else {}
        return {**reply, **self._head, "choices": [{**choice, **more} for choice in reply.get("choices") or ()]}

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """All of a stream, once the answer is there: a delta with the message of each choice, and its end."""
        assert chunk.sample is not None
        reply = self._reply(chunk.sample)
        self._usage_said = reply.get("usage")
        events = []
        for at, choice in enumerate(reply["choices"]):
            said = choice.pop("message", None) or {}
            message = {"role": "assistant"} | {name: value for name, value in said.items() if value not in (None, [])}
            if "tool_calls" in message:
                message["tool_calls"] = [{"index": index, **tool} for index, tool in enumerate(message["tool_calls"])]
            begin = {"index": at, "delta": message, "logprobs": choice.get("logprobs"), "finish_reason": None}
            events += [begin, {**choice, "index": at, "delta": {}, "logprobs": None}]
        head = f'{to_json({**self._head, "object": "chat.completion.chunk"})[:-1]},"choices":['
        return b"".join(sse(f"{head}{to_json(event)}]{self._running_usage()}}}") for event in events)

    def _stream_usage(self) -> Any:
        return self._usage_said


def _named(name: str, value: float | None) -> dict[str, Any]:
    # The format has no null here; -9999 stands for a value that the engine did not report.
    return {"token": name, "logprob": -9999.0 if value is None else value, "bytes": list(name.encode())}


def _usage(prompt: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
