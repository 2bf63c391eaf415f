"""Request API of a pool: whole answers, streams, and leases.

Every request ends in exactly one answer, refusal or cancellation; a caller that leaves cancels its requests. A
streaming client sees each token once, and either learns that an answer was restarted or never sees it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

from trimtab.core.errors import InputError, UnreachableError, nearest
from trimtab.core.frozen import Message
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import DEFAULT_CLASS, End, RequestSpec
from trimtab.runtime.engines.engine import ForwardRequest
from trimtab.runtime.engines.tokenizer import tokenizer_of
from trimtab.runtime.rollout.leases import EngineLeases, Lease
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.rollout.sampling import (
    Chunk,
    ChunkSink,
    Completion,
    ForwardedAnswer,
    PendingRequest,
    RefusedError,
    Sample,
    SamplingParams,
    checked_prompt,
    forwarded_tokens,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_PARAMS = SamplingParams()
BYTES_PER_TOKEN = 4  # of a forwarded body
MAX_PROMPT_TOKENS = 32_768  # as which a forwarded body counts at most: images are many bytes, and few tokens


class RequestOptions(Message):
    """How a request is scheduled, as in `RequestSpec`."""

    class_: str = DEFAULT_CLASS
    group: str = ""
    session: str = ""
    version: int | None = None
    at_least: int | None = None
    spans: bool = True
    key: str = ""
    deadline_s: float | None = None
    raw: bool = False  # whole answers may come as the engine wrote them: `Sample.raw`


class CallArguments(TypedDict, total=False):
    """Options for all requests of a call, as keyword arguments."""

    class_: str
    version: int | None
    at_least: int | None
    deadline_s: float | None


class RequestArguments(CallArguments, total=False):
    """Options of one request, as keyword arguments."""

    group: str
    session: str
    key: str
    raw: bool


class RequestApi:
    """Client half of a pool. Options of its calls are those of `RequestOptions`."""

    def __init__(self, core: RolloutCore, leases: EngineLeases) -> None:
        self._core = core
        self._leases = leases
        self._numbers = itertools.count(1)
        self._running = False

    def _require_running(self) -> None:
        if not self._running:
            raise InputError("the rollout pool is not running", hint="async with RolloutPool(...) as pool: ...")

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = NO_PARAMS,
        *,
        groups: Sequence[str] | None = None,
        sessions: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        spans: bool = True,
        **common: Unpack[CallArguments],
    ) -> list[Completion]:
        """Answers all prompts, in order. Failed samples report it themselves; a full queue is waited for.

        `groups` names prompts with a common prefix (default: each prompt its own, shared by its n samples); `sessions`
        conversations, whose turns stay on one engine while it serves. `spans` False: an answer comes from a single
        version of the weights. `keys`: the same key gets the same answer.
        """
        self._require_running()
        for name, given in (("groups", groups), ("sessions", sessions), ("keys", keys)):
            if given is not None and len(given) != len(prompts):
                raise InputError(
                    f"{len(given)} {name} for {len(prompts)} prompts", hint=f"give {name} of the same length"
                )
        ids = [checked_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        call = next(self._numbers)
        rows: list[list[asyncio.Future[Sample]]] = []
        pending: list[PendingRequest] = []
        try:
            for at, prompt in enumerate(ids):
                group = groups[at] if groups is not None else f"p{call}.{at}"
                session = "" if sessions is None else sessions[at]
                rows.append([])
                for index in range(params.n):
                    key = "" if keys is None else (keys[at] if params.n == 1 else f"{keys[at]}/{index}")
                    options = RequestOptions(group=group, session=session, spans=spans, key=key, **common)
                    request = self._submit(prompt, params, index, None, options)
                    pending.append(request)
                    rows[-1].append(
                        request.answered if not request.answered.done() else self._retry_if_refused(request, options)
                    )
            # Flat first: Python 3.10 has no await in a nested comprehension.
            answered = iter([await future for row in rows for future in row])
            return [Completion(tuple(itertools.islice(answered, len(row)))) for row in rows]
        except BaseException:
            for request in pending:
                self.cancel(request.spec.id)
            for future in (future for row in rows for future in row):
                future.cancel()
            raise

    async def forward(self, path: str, body: Mapping[str, Any], **given: Unpack[RequestArguments]) -> ForwardedAnswer:
        """Sends a call to an engine as it is, for what only engines understand: tools, images, their own fields.

        The reply comes whole and from a single version of the weights: a call whose engine is lost, drained or
        refitted is sent again from the start. `model` becomes the engine's own name, unless it is an adapter of the
        pool. Raises InputError if the engine refuses it; a full queue is waited for. A reply that another client
        aborted says so in its finish reason.
        """
        options = RequestOptions(spans=False, **given)
        request = self.submit_forward(path, body, options)
        answered = self._retry_if_refused(request, options) if request.answered.done() else request.answered
        try:
            return ForwardedAnswer.of(await answered)
        except BaseException:
            self.cancel(request.spec.id)
            raise

    def submit_forward(self, path: str, body: Mapping[str, Any], options: RequestOptions) -> PendingRequest:
        """`forward` without waiting: its sample is for `ForwardedAnswer.of`; `answered` raises if the queue is full."""
        self._require_running()
        if not path.startswith("/") or not isinstance(body, Mapping) or body.get("stream"):
            hint = "a path of the engine, and a JSON object without stream: the reply comes whole"
            raise InputError(f"this call of {path} cannot be forwarded", hint=hint)
        try:
            size = len(msgspec.json.encode(body))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the body for {path} is no JSON: {error}") from None
        named = body.get("model") or body.get("lora_path")
        lora = named if isinstance(named, str) and named in self._core.adapters else None
        return self._submit(
            (), SamplingParams(forwarded_tokens(body), resume=False, lora=lora), 0, None, replace(options, spans=False),
            ForwardRequest("", path, dict(body), lora=lora), min(size // BYTES_PER_TOKEN, MAX_PROMPT_TOKENS),
        )  # fmt: skip

    def _retry_if_refused(self, refused: PendingRequest, options: RequestOptions) -> asyncio.Future[Sample]:
        """The answer; a refused request is retried in a task."""
        if refused.answered.exception() is None:
            return refused.answered
        return self._core.spawn_for(self._retry_until_accepted(refused, options), f"retry-{refused.spec.id}")

    async def _retry_until_accepted(self, first: PendingRequest, options: RequestOptions) -> Sample:
        """Submits again after each refusal, until the deadline."""
        core, pending = self._core, first
        class_ = next(known for known in core.machine.rules.classes if known.name == options.class_)
        allowed_s = options.deadline_s if options.deadline_s is not None else class_.deadline_s
        until = None if allowed_s is None else core.clock() + allowed_s
        while True:
            try:
                return await pending.answered
            except RefusedError as refused:
                left_s = None if until is None else until - core.clock()
                if left_s is not None and left_s <= refused.retry_after_s:
                    return Sample(pending.spec.id, (), End.failed, refused.reason)
                await asyncio.sleep(refused.retry_after_s)
            except asyncio.CancelledError:
                self.cancel(pending.spec.id)
                raise
            left_s = None if until is None else max(0.0, until - core.clock())
            pending = self._submit(
                pending.prompt, pending.params, pending.index, None, replace(options, deadline_s=left_s),
                pending.forward, pending.spec.prompt_tokens,
            )  # fmt: skip

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        restarts: Literal["tell", "hold"] = "tell",
        spans: bool = True,
        **given: Unpack[RequestArguments],
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the samples of one prompt. Closing the generator cancels them.

        Raises RefusedError or InputError before the first chunk. `restarts="hold"` is for clients that cannot take
        tokens back: an answer that may restart from the prompt is sent only when it is complete.
        """
        self._require_running()
        ids, chunks = checked_prompt(prompt, "prompt"), asyncio.Queue[Chunk]()
        pending: list[PendingRequest] = []
        try:
            pending += self._submit_all(ids, params, range(params.n), chunks, RequestOptions(spans=spans, **given))
            gate = RestartGate(pending) if restarts == "hold" else None
            left = len(pending)
            while left:
                arrived = [await chunks.get(), *(chunks.get_nowait() for _ in range(chunks.qsize()))]
                for chunk in merge_chunks(arrived):
                    for each in gate.passes(chunk) if gate is not None else (chunk,):
                        left -= each.sample is not None
                        yield each
        finally:
            for request in pending:
                self.cancel(request.spec.id)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        samples: Sequence[int] | None = None,
        chunks: ChunkSink | None = None,
        spans: bool = True,
        checked: bool = False,
        **given: Unpack[RequestArguments],
    ) -> list[PendingRequest]:
        """Submits without waiting: await `answered` of each sample; `cancel(request.spec.id)` ends it.

        Raises RefusedError, with none submitted, if the queue is full. `samples`: only these of the n. `chunks` takes
        what comes of them, the last with the sample. `checked`: the prompt has token ids and nothing else.
        """
        self._require_running()
        ids = prompt if checked and prompt else checked_prompt(prompt, "prompt")
        which = range(params.n) if samples is None else samples
        return self._submit_all(ids, params, which, chunks, RequestOptions(spans=spans, **given))

    def _submit_all(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        samples: Sequence[int],
        chunks: ChunkSink | None,
        options: RequestOptions,
    ) -> list[PendingRequest]:
        key = options.key
        if params.n > 1 and not options.group:
            options = replace(options, group=f"p{next(self._numbers)}")
        pending: list[PendingRequest] = []
        try:
            for index in samples:
                own = options if params.n == 1 or not key else replace(options, key=f"{key}/{index}")
                request = self._submit(prompt, params, index, chunks, own)
                pending.append(request)
                if request.answered.done():
                    request.answered.result()  # raises if it was refused
        except BaseException:
            for request in pending:
                self.cancel(request.spec.id)
            raise
        return pending

    def _submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        index: int,
        chunks: ChunkSink | None,
        options: RequestOptions,
        forward: ForwardRequest | None = None,
        prompt_tokens: int = 0,
    ) -> PendingRequest:
        core, own = self._core, params.sample(index)
        if own.lora is not None and own.lora not in core.adapters:
            near = nearest(own.lora, core.adapters)
            hint = f"did you mean {near}?" if near else "await pool.load_adapter(name, path) adds one"
            raise InputError(f"there is no adapter {own.lora}", hint=hint)
        spec = RequestSpec(
            f"r{next(self._numbers)}",
            len(prompt) or prompt_tokens,
            own.max_tokens,
            own.min_tokens,
            options.class_,
            options.group,
            options.version,
            options.at_least,
            own.may_resume(reads_text=not own.stop or self._have_tokenizers()),
            options.spans,
            options.key,
            None if options.deadline_s is None else core.clock() + options.deadline_s,
            session=options.session,
        )
        answered: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        raw = options.raw and not options.key and chunks is None
        pending = core.pending[spec.id] = PendingRequest(
            spec, prompt, own, index, answered, chunks, forward=forward, takes_raw=raw
        )
        core.known_ids = prompt or core.known_ids
        try:
            core.handle_event(e.RequestArrived(spec))
        except BaseException:
            core.pending.pop(spec.id, None)
            raise
        return pending

    def _have_tokenizers(self) -> bool:
        engines = (handle.engine for handle in self._core.handles.values())
        return all(tokenizer_of(engine) is not None for engine in engines if engine is not None)

    def cancel(self, request: str) -> None:
        """Harmless after the answer."""
        if request in self._core.pending and self._running:
            self._core.handle_event(e.RequestCancelled(request))

    async def acquire(
        self,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        prompt_tokens: int = 0,
        tokens: int = 0,
        version: int | None = None,
        at_least: int | None = None,
        for_s: float = 600.0,
        wait_s: float = 60.0,
    ) -> Lease:
        """Leases an engine to a caller that talks to it directly, for at most `for_s`."""
        self._require_running()
        spec = RequestSpec(
            f"l{next(self._numbers)}",
            prompt_tokens,
            max(1, tokens),
            class_=class_,
            group=group,
            version=version,
            at_least=at_least,
            resumable=False,
            deadline=self._core.clock() + wait_s + for_s,
            watched=False,
        )
        return await self._leases.acquire(spec, wait_s)


def merge_chunks(chunks: list[Chunk]) -> list[Chunk]:
    """Merges adjacent chunks of the same sample, for readers that fell behind."""
    out = chunks[:1]
    for chunk in chunks[1:]:
        last = out[-1]
        if chunk.index != last.index or chunk.restarted or last.restarted or last.sample is not None:
            out.append(chunk)
            continue
        out[-1] = Chunk(
            chunk.index,
            last.token_ids + chunk.token_ids,
            chunk.logprobs if last.logprobs is None else last.logprobs + (chunk.logprobs or ()),
            chunk.best if last.best is None else last.best + (chunk.best or ()),
            last.text + chunk.text,
            sample=chunk.sample,
        )
    return out


class RestartGate:
    """Holds back chunks that may be retracted: those of requests that would restart from the prompt.

    Chunks of resumable requests pass at once. If such a request restarts all the same (because of unidentified
    tokens), its tokens must repeat those already sent; otherwise the stream ends with an error.
    """

    def __init__(self, pending: Sequence[PendingRequest]) -> None:
        self._held: dict[int, list[Chunk]] = {
            request.index: []
            for request in pending
            if not (request.spec.resumable and request.spec.spans and request.spec.version is None)
        }
        self._given: dict[int, list[int]] = {request.index: [] for request in pending}
        self._repeat: dict[int, int] = {}  # sent tokens that were repeated so far

    def passes(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """Chunks that the client sees now."""
        index = chunk.index
        if index in self._held:
            held = self._held[index]
            if chunk.restarted:
                held.clear()
                return ()
            held.append(chunk)
            if chunk.sample is None:
                return ()
            self._held[index] = []
            return tuple(held)
        if chunk.restarted:
            self._repeat[index] = 0
            return ()
        if index in self._repeat and chunk.sample is None:
            return self._again(chunk)
        self._given[index] += chunk.token_ids
        return (chunk,)

    def _again(self, chunk: Chunk) -> tuple[Chunk, ...]:
        given, at = self._given[chunk.index], self._repeat[chunk.index]
        known = given[at : at + len(chunk.token_ids)]
        if list(chunk.token_ids[: len(known)]) != known:
            raise UnreachableError(
                "the answer was restarted and differs from what was already sent",
                hint="retry; with log-probabilities an answer can be resumed instead",
            )
        self._repeat[chunk.index] = at + len(known)
        new = chunk.token_ids[len(known) :]
        if not new:
            return ()
        del self._repeat[chunk.index]
        given += new
        logprobs = None if chunk.logprobs is None else chunk.logprobs[len(known) :]
        best = None if chunk.best is None else chunk.best[len(known) :]
        return (Chunk(chunk.index, new, logprobs, best, chunk.text),)
