"""Responses in OpenAI's format: completions and chat, in one piece or as a stream.

The constant head of a stream's events is encoded once per call. A stream always ends with `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.runtime.gateway.calls import FINISHES, GenerationCall, details, samples_of
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.openai import OpenAIOptions
from trimtab.runtime.gateway.response_format import flag, sse, to_json
from trimtab.runtime.gateway.tokenizing import PoolTokenizer, TextStream
from trimtab.runtime.rollout.sampling import Chunk, Completion, ForwardedAnswer, Sample

DONE = b"data: [DONE]\n\n"


class OpenAIFormat:
    """Response to one call."""

    def __init__(self, call: GenerationCall, output_options: OpenAIOptions, tokenizer: PoolTokenizer) -> None:
        self.call, self._output, self._tokenizer = call, output_options, tokenizer
        extra = call.params[0].extra
        self._special = not flag(extra, "skip_special_tokens", True)
        self._keep_stop = flag(extra, "include_stop_str_in_output", False) or flag(extra, "no_stop_trim", False)
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
