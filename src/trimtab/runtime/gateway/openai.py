"""OpenAI API as in vLLM: reads completions and chat requests.

A field is understood here, passed on to the engines (`engine_fields`), or refused by name. Token ids are used
unchanged; text and conversations are converted by an engine's tokenizer and template. With `return_token_ids` an
answer has its ids, as in vLLM. An answer aborted by another client ends with `abort`; one of several that failed ends
with `error`. A chat with tools, or with parts that are not text, goes to an engine as it is: only that has the parsers
and processors. A model that is the name of an adapter of the pool selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from trimtab.runtime.engines.tokenizer import RENDER_OPTIONS
from trimtab.runtime.gateway import engine_fields as extras
from trimtab.runtime.gateway.calls import GenerationCall
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.fields import BodyFields
from trimtab.runtime.gateway.headers import RequestTerms
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.rollout.sampling import SamplingParams

COMMON = (
    "model", "n", "stream", "stream_options", "logprobs", "stop", "stop_token_ids", "seed", "max_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "user", "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip
COMPLETIONS = (*COMMON, "prompt")
CHAT = (*COMMON, "messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
        "continue_final_message", "chat_template", "chat_template_kwargs")  # fmt: skip
FORWARDED_CHAT = (*CHAT, "tools", "tool_choice", "parallel_tool_calls")

ServedKinds = Callable[[], Collection[str]]
"""Kinds of engines that are up; called only if needed."""

PoolAdapters = Callable[[], Collection[str]]
"""Names of the LoRA adapters of the pool."""

MAX_LOGPROBS = 20
MAX_SAMPLES = 1_024
MAX_PROMPTS = 4_096
MAX_ANSWERS = 8_192  # prompts times samples
CHAT_PATH = "/v1/chat/completions"
FORWARDING = ("vllm", "sglang")  # kinds of engines that take calls as they are
_NOT_FORWARDED = ("model", "stream", "stream_options", "request_id", "best_of", "priority")
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
_BY_TRIMTAB = {
    "priority": "x-trimtab-class chooses a class, which has a priority",
    "lora_path": "an adapter of the pool is chosen by its name as the model",
}


@dataclass(frozen=True)
class OpenAIOptions:
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
        """Model name for clients."""
        return self._model_name or await self._tokenizer.model()

    async def completions(
        self, body: Any, terms: RequestTerms, kinds: ServedKinds
    ) -> tuple[GenerationCall, OpenAIOptions]:
        """Body of `/v1/completions`."""
        fields = BodyFields(body)
        prompts = await self._prompts(fields)
        logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
        max_tokens = fields.integer("max_tokens", 16, 1)
        return await self._read(fields, terms, kinds, prompts, logprobs, max_tokens, COMPLETIONS)

    async def chat(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> tuple[GenerationCall, OpenAIOptions]:
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
        else:
            call.prompts = [await self._tokenizer.render(messages, options)]
        return call, output_options

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
        params = replace(_params(fields, kinds, logprobs, max_tokens, known), lora=lora)
        require_few_answers(fields, "n", len(prompts) * params.n)
        given = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if given and known is COMPLETIONS:
            await self._tokenizer.check_known(given, fields, "prompt")
        ids = [await self._tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return GenerationCall(ids, [params] * len(ids), terms, stream), output_options

    async def _model(self, fields: BodyFields) -> tuple[str, str | None]:
        """Name of the model, and of the adapter if it is one."""
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
        if len(found) > MAX_PROMPTS:
            raise fields.wrong("prompt", f"{len(found)} prompts in one call; the maximum is {MAX_PROMPTS}")
        if "" in found or () in found:
            raise fields.wrong("prompt", "an empty prompt")
        return found


def _params(
    fields: BodyFields, kinds: ServedKinds, logprobs: int | None, max_tokens: int, known: tuple[str, ...]
) -> SamplingParams:
    n = fields.integer("n", 1, 1, MAX_SAMPLES)
    if fields.rest.get("best_of") == n:
        fields.take("best_of")
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    stop, stop_ids = fields.strings("stop"), fields.ids("stop_token_ids")
    min_tokens = fields.integer("min_tokens", 0, 0)
    if min_tokens > max_tokens:
        raise fields.wrong("min_tokens", f"{min_tokens} is more than max_tokens, which is {max_tokens}")
    temperature, top_p = fields.number("temperature", 1.0, 0.0), fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise fields.wrong("top_p", "0 leaves no token to choose from")
    top_k = max(0, fields.integer("top_k", 0, -1))
    for name in _NO_EFFECT:
        fields.take(name)
    extra = take_engine_extras(fields, None if known is FORWARDED_CHAT else kinds, known)
    return SamplingParams(
        max_tokens, min_tokens, temperature, top_p, top_k, n, stop, stop_ids, seed, logprobs, extra,
        extras.may_resume(extra, seed, stop, kinds()) if extra else None,
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
