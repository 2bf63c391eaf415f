"""SGLang API: `/generate`, with `meta_info`.

One prompt or a batch, as text or token ids, with common parameters or one set per prompt. Stream events are cumulative,
as SGLang's are. `weight_version` is the version of the last token, and `weight_versions` those of all spans. What else
an SGLang engine says, such as cached prompt tokens, goes along where the answer is passed on as it wrote it. A prompt
with images, audio or video goes to an SGLang engine as it is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from trimtab.core.frozen import Message
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.rollout import End
from trimtab.runtime.engines.engine import ROUTED_EXPERTS, RawAnswer
from trimtab.runtime.gateway import fields as extras
from trimtab.runtime.gateway.exchange import Refusal, refusal_for_sample, sse, to_json
from trimtab.runtime.gateway.fields import BodyFields, RequestTerms, ServedKinds
from trimtab.runtime.gateway.openai import (
    DONE,
    FORWARDING,
    MAX_LOGPROBS,
    PoolAdapters,
    checked_prompts,
    require_few_answers,
    require_forwarding,
    sampling_params,
    token_ids,
)
from trimtab.runtime.gateway.serving import GenerationCall, details, new_id
from trimtab.runtime.gateway.tokenizing import PoolTokenizer, TextStream
from trimtab.runtime.rollout.sampling import Chunk, Completion, ForwardedAnswer, Sample, SamplingParams

KNOWN = (
    "text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "lora_path", ROUTED_EXPERTS,
)  # fmt: skip
MEDIA = ("image_data", "video_data", "audio_data")
SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "n", "stop", "stop_token_ids", "sampling_seed",
)  # fmt: skip


_OURS = frozenset({"id", "prompt_tokens", "completion_tokens", "e2e_latency", "weight_version", "weight_versions"})


class SglangOptions(Message):
    """What a response contains."""

    single: bool  # one prompt, not in a list
    names: tuple[str, ...]  # the client's id of each prompt's request
    logprobs: bool = False
    token_texts: bool = False  # text of tokens with log-probabilities


class SglangReader:
    """Reads request bodies."""

    def __init__(self, tokenizer: PoolTokenizer, adapters: PoolAdapters) -> None:
        self._tokenizer, self._adapters = tokenizer, adapters

    async def generate(self, body: Any, terms: RequestTerms, kinds: ServedKinds) -> SglangFormat:
        """Body of `/generate`."""
        fields = BodyFields(body)
        single, prompts = _prompts(fields)
        call_id = new_id()
        names = _names(fields, call_id, single, len(prompts))
        logprobs = fields.boolean("return_logprob")
        start = fields.integer("logprob_start_len", -1)
        if logprobs and start != -1:
            raise fields.wrong("logprob_start_len", "log-probabilities of prompts are not supported; only -1")
        best = fields.integer("top_logprobs_num", 0, 0, MAX_LOGPROBS)
        with_text = fields.boolean("return_text_in_logprobs")
        stream = fields.boolean("stream")
        params = _all_params(fields, kinds, best if logprobs else None, len(prompts))
        if fields.boolean(ROUTED_EXPERTS):
            require_forwarding(fields, ROUTED_EXPERTS, kinds, FORWARDING)
            params = [replace(each, extra={**each.extra, ROUTED_EXPERTS: True}, resume=None) for each in params]
        lora = fields.text("lora_path")
        if lora:
            if lora not in self._adapters():
                raise fields.wrong("lora_path", f"there is no adapter {lora!r} here")
            params = [replace(each, lora=lora) for each in params]
        media = [name for name in MEDIA if fields.take(name)]
        require_few_answers(fields, "sampling_params.n", len(prompts) * params[0].n)
        fields.neutral(extras.NEUTRAL | _NEUTRAL)
        for name in fields.rest:
            raise fields.wrong(name, "unknown field, which cannot be passed on")
        options = SglangOptions(single, names, logprobs, with_text)
        if media:
            require_forwarding(fields, media[0], kinds, ("sglang",))
            if stream or not single or params[0].n > 1:
                raise fields.wrong(media[0], "goes with one prompt and one sample, and not as a stream")
            await token_ids(
                self._tokenizer, [each for each in prompts if not isinstance(each, str)], fields, "input_ids"
            )
            whole = {name: value for name, value in body.items() if value is not None and name not in ("rid", "stream")}
            call = GenerationCall([()], params, terms, id=call_id, forward=("/generate", whole))
        else:
            ids = await token_ids(self._tokenizer, prompts, fields, "input_ids")
            raw = not (stream or terms.details or with_text)
            call = GenerationCall(ids, params, terms, stream, call_id, raw=raw)
        return SglangFormat(call, options, self._tokenizer)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "return_hidden_states": (False,),
    "return_sampling_mask": (False,),
    "return_prompt_token_ids": (False,),
    "return_entropy": (False,),
    "return_bytes": (False,),
    "background": (False,),
    "no_logs": (True, False),
    "session_params": ({},),
    "token_ids_logprob": ([],),
}


def _prompts(fields: BodyFields) -> tuple[bool, list[tuple[int, ...] | str]]:
    text, ids = fields.take("text"), fields.take("input_ids")
    if (text is None) == (ids is None):
        raise Refusal(400, "give either text or input_ids", param="text", code="invalid_value")
    name, given = ("text", text) if ids is None else ("input_ids", ids)
    found: list[tuple[int, ...] | str]
    if isinstance(given, str) and name == "text":
        single, found = True, [given]
    elif not isinstance(given, list) or not given:
        raise fields.wrong(name, "is empty" if given == [] else "is neither a prompt nor a list of them")
    elif name == "text":
        if not all(isinstance(text, str) for text in given):
            raise fields.wrong(name, "a text, or a list of texts")
        single, found = False, list(given)
    else:
        single, found = not isinstance(given[0], list), list(fields.prompts(name, given))
    return single, checked_prompts(fields, name, found)


def _names(fields: BodyFields, call_id: str, single: bool, prompts: int) -> tuple[str, ...]:
    rid = fields.take("rid")
    if rid is None:
        return (call_id,) if single else tuple(f"{call_id}-{place}" for place in range(prompts))
    found = [rid] if isinstance(rid, str) else rid
    if not isinstance(found, list) or len(found) != prompts or not all(isinstance(name, str) for name in found):
        raise fields.wrong("rid", "a string for each prompt")
    return tuple(found)


def _all_params(fields: BodyFields, kinds: ServedKinds, logprobs: int | None, prompts: int) -> list[SamplingParams]:
    given = fields.take("sampling_params")
    if not isinstance(given, list):
        return [_params(given or {}, kinds, logprobs, "sampling_params")] * prompts
    if len(given) != prompts:
        raise fields.wrong("sampling_params", f"{len(given)} sets of parameters for {prompts} prompts")
    found = [_params(each, kinds, logprobs, f"sampling_params[{place}]") for place, each in enumerate(given)]
    if len({params.n for params in found}) > 1:
        raise fields.wrong("sampling_params", "n is the same for all prompts of one call")
    return found


def _params(given: Any, kinds: ServedKinds, logprobs: int | None, within: str) -> SamplingParams:
    fields = BodyFields(given, within=within)
    max_tokens = fields.integer("max_new_tokens", 128, 1)
    return sampling_params(
        fields, kinds, kinds, logprobs, max_tokens, SAMPLING, prefix=f"{within}.", new="new_", seed_name="sampling_seed"
    )


class SglangFormat:
    """Response to one call."""

    def __init__(self, call: GenerationCall, output_options: SglangOptions, tokenizer: PoolTokenizer) -> None:
        self.call, self._output, self._tokenizer = call, output_options, tokenizer
        self._began = time.monotonic()
        extra = call.params[0].extra
        self._special = not extra.get("skip_special_tokens", True)
        self._keep_stop = bool(extra.get("no_stop_trim"))
        self._flows: dict[int, _SampleStream] = {}
        self._many = not output_options.single or call.params[0].n > 1

    async def whole(self, completions: Sequence[Completion]) -> Any:
        if self.call.forward is not None:
            return self._forwarded(completions[0].samples[0])
        found = []
        for place, completion in enumerate(completions):
            for index, sample in enumerate(completion.samples):
                if sample.raw is not None:
                    found.append(await self._raw(place, index, sample, sample.raw))
                    continue
                text = await self._tokenizer.text_of(sample, special=self._special, keep_stop=self._keep_stop)
                meta = await self._meta(place, index, sample)
                found.append({"text": text, "output_ids": list(sample.token_ids), "meta_info": meta})
        return found if self._many else found[0]

    async def _raw(self, place: int, index: int, sample: Sample, raw: RawAnswer) -> Any:
        meta = {name: msgspec.Raw(value) for name, value in raw.meta.items() if name not in _OURS}
        if self._output.logprobs:
            meta.setdefault("input_token_logprobs", msgspec.Raw(b"[]"))
        meta = await self._meta(place, index, sample) | meta
        return {"text": msgspec.Raw(raw.text), "output_ids": msgspec.Raw(raw.ids), "meta_info": meta}

    def _forwarded(self, sample: Sample) -> Any:
        reply = ForwardedAnswer.of(sample).body
        more = {"trimtab": details(sample)} if self.call.terms.details else {}
        return {**reply, "meta_info": {**reply.get("meta_info", {}), "id": self._name(0, 0), **more}}

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """The whole answer so far."""
        number = self.call.number(prompt, chunk.index)
        flow = self._flows.get(number)
        if flow is None:
            text = TextStream(self._tokenizer, special=self._special, keep_stop=self._keep_stop)
            flow = self._flows[number] = _SampleStream(prompt, chunk.index, text)
        flow.take(chunk, await flow.text.more(chunk))
        if chunk.sample is None and not self._output.logprobs:
            return self._goes_on(number, flow)
        return await self._said(number, flow, chunk.sample)

    def _goes_on(self, number: int, flow: _SampleStream) -> bytes:
        """An intermediate event. It repeats all tokens so far, so their JSON is kept."""
        where = f',"index":{number}' if self._many else ""
        return (
            f'data: {{"text":"{flow.text_json}","output_ids":[{flow.ids_json[1:]}],"meta_info":{{'
            f'"id":{to_json(self._name(flow.prompt, flow.index))},"finish_reason":null,'
            f'"prompt_tokens":{len(self.call.prompts[flow.prompt])},"completion_tokens":{len(flow.ids)},'
            f'"e2e_latency":{time.monotonic() - self._began}}}{where}}}\n\n'
        ).encode()

    async def _said(self, number: int, flow: _SampleStream, sample: Sample | None) -> bytes:
        meta = await self._meta(flow.prompt, flow.index, sample or flow.so_far())
        if sample is None:
            meta["finish_reason"] = None
        return self._event(number, flow.text.text, flow.ids if sample is None else list(sample.token_ids), meta)

    def _event(self, number: int, text: str, ids: list[int], meta: dict[str, Any]) -> bytes:
        where = {"index": number} if self._many else {}
        return sse(to_json({"text": text, "output_ids": ids, "meta_info": meta, **where}))

    def aborted(self, why: str) -> bytes:
        events = []
        for place, params in enumerate(self.call.params):
            for index in range(params.n):
                number = self.call.number(place, index)
                flow = self._flows.get(number)
                if flow is not None and flow.ended:
                    continue
                meta = {
                    "id": self._name(place, index),
                    "finish_reason": {"type": "abort", "message": why},
                    "prompt_tokens": len(self.call.prompts[place]),
                    "completion_tokens": 0 if flow is None else len(flow.ids),
                }
                text, ids = ("", []) if flow is None else (flow.text.text, flow.ids)
                events.append(self._event(number, text, ids, meta))
        return b"".join(events)

    def fault(self, refusal: Refusal) -> bytes:
        return sse(to_json(refusal.plain()))

    def end(self) -> bytes:
        return DONE

    def _name(self, place: int, index: int) -> str:
        name = self._output.names[place]
        return name if self.call.params[place].n == 1 else f"{name}-{index}"

    async def _meta(self, place: int, index: int, sample: Sample) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._name(place, index),
            "finish_reason": _finish(sample),
            "prompt_tokens": len(self.call.prompts[place]),
            "completion_tokens": len(sample.token_ids) + sample.missing,
            "e2e_latency": time.monotonic() - self._began,
            **sample.extra,
        }
        if sample.spans:
            meta["weight_version"] = str(sample.spans[-1].version)
            ends = itertools.accumulate(span.tokens for span in sample.spans)
            meta["weight_versions"] = [
                {"version": str(span.version), "start": end - span.tokens, "end": end}
                for span, end in zip(sample.spans, ends, strict=True)
            ]
        if self._output.logprobs and sample.raw is None:
            await self._add_logprobs(meta, sample)
        if sample.request and (self.call.terms.details or not sample.ok):
            meta["trimtab"] = details(sample)
        return meta

    async def _add_logprobs(self, meta: dict[str, Any], sample: Sample) -> None:
        ids, logprobs = sample.token_ids, sample.logprobs or (None,) * len(sample.token_ids)
        best = sample.best or ()
        every = [*ids, *(token for ranking in best for token, _ in ranking)]
        names: dict[int, str] = {}
        if self._output.token_texts:
            names = dict(zip(every, await self._tokenizer.names(every), strict=True))
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [value, token, names.get(token)] for token, value in zip(ids, logprobs, strict=True)
        ]
        if self.call.params[0].logprobs:
            meta["output_top_logprobs"] = [
                [[value, token, names.get(token)] for token, value in places] for places in best
            ]


class _SampleStream:
    """A streaming answer."""

    def __init__(self, prompt: int, index: int, text: TextStream) -> None:
        self.prompt, self.index, self.text = prompt, index, text
        self.ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._best: list[Any] = []
        self.text_json = ""  # text so far, as JSON without quotes
        self.ids_json = ""  # each with a leading comma
        self.ended = False

    def take(self, chunk: Chunk, text: str) -> None:
        self.text_json += to_json(text)[1:-1]
        self.ids_json += "".join([f",{token}" for token in chunk.token_ids])
        self.ids += chunk.token_ids
        self._logprobs += chunk.logprobs or ()
        self._best += chunk.best or ()
        self.ended = chunk.sample is not None

    def so_far(self) -> Sample:
        """As an unfinished sample."""
        return replace(_GOES_ON, token_ids=tuple(self.ids), logprobs=tuple(self._logprobs), best=tuple(self._best))


_GOES_ON = Sample("", (), End.length, Reason(ReasonCode.sent, ""))


def _finish(sample: Sample) -> dict[str, Any]:
    if sample.end is End.length:
        return {"type": "length", "length": len(sample.token_ids) + sample.missing}
    if sample.end is End.stop:
        matched = sample.stopped_by
        if matched is None and sample.token_ids:
            matched = sample.token_ids[-1]  # the end token
        return {"type": "stop", "matched": matched}
    finish: dict[str, Any] = {"type": "abort", "message": sample.reason.sentence}
    if sample.end is End.failed:
        # SGLang's way to report a failure.
        finish |= {"status_code": refusal_for_sample(sample).status, "err_type": sample.reason.code.value}
    return finish
