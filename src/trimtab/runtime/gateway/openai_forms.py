"""How answers look in OpenAI's dialect: completions and chat, in one piece or as events of a stream.

Events of a stream have the same head and tail, so those are written once for each call; an event is its text between
them. A stream ends with `[DONE]`, whatever happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.runtime.gateway.answer_forms import flag, sse, to_json
from trimtab.runtime.gateway.calls import FINISHES, GenerationCall, details, samples_of
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.openai import OpenAIOptions
from trimtab.runtime.gateway.tokenizing import PoolTokenizer, TextStream
from trimtab.runtime.rollout.sampling import Chunk, Completion, Sample

DONE = b"data: [DONE]\n\n"


class OpenAIFormat:
    """One call's."""

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
        self._flows: dict[int, TextStream] = {}  # of answers that have begun to stream
        self._made: dict[int, int] = {}  # their tokens so far
        self._ended: set[int] = set()
        self._offsets: dict[int, int] = {}  # characters so far, where log-probabilities say places

    # ---- in one piece ----------------------------------------------------------------------------------------------

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The body of the answer."""
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
        return _usage(sum(map(len, self.call.prompts)), sum(len(one.token_ids) + one.missing for one in samples))

    # ---- as a stream -----------------------------------------------------------------------------------------------

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """One event for a chunk."""
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
        said = f'{{"content":{to_json(text)}}}' if output_options.chat else to_json(text)
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
            f'{first}{self._event_head}{number},"{name}":{said},"logprobs":{logprobs},"finish_reason":{finish}{more}}}]'
            f"{self._running_usage()}}}\n\n"
        ).encode()

    def _first(self, number: int, prompt: int) -> str:
        """What comes before the first text of an answer: its role in a chat, its prompt's ids where asked for."""
        ids = to_json(list(self.call.prompts[prompt])) if self._output.token_ids else ""
        if self._output.chat:
            asked = f',"prompt_token_ids":{ids}' if ids else ""
            delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            return f"{self._event_head}{number},{delta}}}]{asked}}}\n\n"
        if not ids:
            return ""
        nothing = '"text":"","logprobs":null,"finish_reason":null'
        return f'{self._event_head}{number},{nothing},"prompt_token_ids":{ids}}}]}}\n\n'

    def _running_usage(self) -> str:
        if not self._output.running_usage:
            return ""
        return f',"usage":{to_json(_usage(sum(map(len, self.call.prompts)), sum(self._made.values())))}'

    def aborted(self, why: str) -> bytes:
        """Ends the answers that have not ended."""
        said = '"delta":{}' if self._output.chat else '"text":""'
        told = to_json({"reason": {"code": "CANCELLED", "sentence": why}})
        unfinished = [
            number
            for place, params in enumerate(self.call.params)
            for index in range(params.n)
            if (number := self.call.number(place, index)) not in self._ended
        ]
        return "".join(
            f'{self._event_head}{number},{said},"logprobs":null,"finish_reason":"abort","trimtab":{told}}}]}}\n\n'
            for number in unfinished
        ).encode()

    def fault(self, refusal: Refusal) -> bytes:
        """An error within the stream."""
        return sse(to_json(refusal.openai()))

    def end(self) -> bytes:
        """The usage where it was asked for, and the end."""
        if not self._output.usage:
            return DONE
        usage = _usage(sum(map(len, self.call.prompts)), sum(self._made.values()))
        head = {**self._head, "object": "chat.completion.chunk" if self._output.chat else "text_completion"}
        return sse(to_json({**head, "choices": [], "usage": usage})) + DONE

    # ---- log-probabilities -----------------------------------------------------------------------------------------

    async def _logprobs(self, number: int, of: Sample | Chunk) -> dict[str, Any] | None:
        if self._output.logprobs is None:
            return None
        ids, logprobs = of.token_ids, of.logprobs or (None,) * len(of.token_ids)
        best = of.best or ((),) * len(ids)
        every = [*ids, *(one for ranking in best for one, _ in ranking)]
        if self._output.names_as_ids:
            names = {one: f"token_id:{one}" for one in every}
        else:
            names = dict(zip(every, await self._tokenizer.names(every), strict=True))
        if self._output.chat:
            return {
                "content": [
                    {
                        **_named(names[one], value),
                        "top_logprobs": [_named(names[other], its) for other, its in ranking],
                    }
                    for one, value, ranking in zip(ids, logprobs, best, strict=True)
                ]
            }
        offset, offsets = self._offsets.get(number, 0), []
        for one in ids:
            offsets.append(offset)
            offset += len(names[one])
        self._offsets[number] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": list(logprobs),
            "tokens": [names[one] for one in ids],
            "top_logprobs": [{names[one]: value for one, value in ranking} for ranking in best]
            if self._output.logprobs
            else None,
        }


def _named(name: str, value: float | None) -> dict[str, Any]:
    # What an engine hid has no figure; the dialect has no null here, and this one is as good as nothing.
    return {"token": name, "logprob": -9999.0 if value is None else value, "bytes": list(name.encode())}


def _usage(prompt: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
