"""Asking a pool: prompts in, answers out, whole or as they come, and leases for those who ask engines themselves.

Every request that is asked here ends in exactly one answer, refusal or cancellation; a caller that goes away cancels
what it asked. A client that streams sees each token once, and learns when an answer began again, or never sees that it
did.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from trimtab.core.errors import InputError, UnreachableError
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import DEFAULT_CLASS, End, RequestSpec
from trimtab.runtime.engines.tokenizer import tokenizer_of
from trimtab.runtime.rollout.leases import EngineLeases, Lease
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.rollout.pending_request import PendingRequest
from trimtab.runtime.rollout.sampling import Chunk, Completion, RefusedError, Sample, SamplingParams, checked_prompt

NO_PARAMS = SamplingParams()


class RequestApi:
    """The half of a pool that clients see."""

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
        class_: str = DEFAULT_CLASS,
        groups: Sequence[str] | None = None,
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        keys: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Answers to all prompts, in their order. A sample that failed says so itself; a full queue is waited for.

        `groups` names prompts that begin alike (each prompt is its own otherwise, which its n samples share).
        `spans` False: no answer is made by two versions of the weights. `keys`: the same key gets the same answer.
        """
        self._require_running()
        for name, given in (("groups", groups), ("keys", keys)):
            if given is not None and len(given) != len(prompts):
                raise InputError(f"{len(given)} {name} for {len(prompts)} prompts", hint=f"one of {name} for each")
        ids = [checked_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        call = next(self._numbers)
        rows: list[list[asyncio.Future[Sample]]] = []
        pending: list[PendingRequest] = []
        try:
            for at, prompt in enumerate(ids):
                group = groups[at] if groups is not None else f"p{call}.{at}"
                rows.append([])
                for index in range(params.n):
                    key = "" if keys is None else (keys[at] if params.n == 1 else f"{keys[at]}/{index}")
                    how = (class_, group, version, at_least, spans, key, deadline_s)
                    one = self._submit(prompt, params, index, None, *how)
                    pending.append(one)
                    rows[-1].append(one.answered if not one.answered.done() else self._retry_if_refused(one, how))
            return [Completion(tuple([await one for one in row])) for row in rows]
        except BaseException:
            for one in pending:
                self.cancel(one.spec.id)
            for future in (future for row in rows for future in row):
                future.cancel()
            raise

    def _retry_if_refused(self, refused: PendingRequest, how: tuple[Any, ...]) -> asyncio.Future[Sample]:
        """Its answer, also where there was no room for it yet; none is made for one that was answered at once."""
        if refused.answered.exception() is None:
            return refused.answered
        return self._core.spawn_for(self._retry_until_accepted(refused, how), f"patience-{refused.spec.id}")

    async def _retry_until_accepted(self, first: PendingRequest, how: tuple[Any, ...]) -> Sample:
        """Ask again whenever there may be room, until its deadline."""
        core, pending = self._core, first
        class_ = next(one for one in core.machine.rules.classes if one.name == how[0])
        allowed_s = how[-1] if how[-1] is not None else class_.deadline_s
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
            pending = self._submit(pending.prompt, pending.params, pending.index, None, *(*how[:-1], left_s))

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        key: str = "",
        deadline_s: float | None = None,
        restarts: Literal["tell", "hold"] = "tell",
    ) -> AsyncGenerator[Chunk, None]:
        """What comes of one prompt's samples, as it comes. Closing the generator cancels them.

        Raises RefusedError or InputError before the first chunk. `restarts="hold"` is for clients that cannot take a
        token back: what may begin again from the prompt comes only when it is whole.
        """
        self._require_running()
        ids, chunks = checked_prompt(prompt, "prompt"), asyncio.Queue[Chunk]()
        pending: list[PendingRequest] = []
        try:
            how = (class_, group, version, at_least, spans, key, deadline_s)
            pending += self._submit_all(ids, params, range(params.n), chunks, *how)
            gate = _RestartGate(pending) if restarts == "hold" else None
            left = len(pending)
            while left:
                for chunk in merge_chunks([await chunks.get(), *_queued(chunks)]):
                    for each in gate.passes(chunk) if gate is not None else (chunk,):
                        left -= each.sample is not None
                        yield each
        finally:
            for one in pending:
                self.cancel(one.spec.id)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams = NO_PARAMS,
        *,
        class_: str = DEFAULT_CLASS,
        group: str = "",
        version: int | None = None,
        at_least: int | None = None,
        spans: bool = True,
        key: str = "",
        deadline_s: float | None = None,
        samples: Sequence[int] | None = None,
    ) -> list[PendingRequest]:
        """Ask without waiting: `await one.answered` for each of the n samples, `cancel(one.spec.id)` ends it.

        Raises RefusedError, with none of them asked, where the queue is full. `samples`: only these of the n.
        """
        self._require_running()
        ids, which = checked_prompt(prompt, "prompt"), range(params.n) if samples is None else samples
        return self._submit_all(ids, params, which, None, class_, group, version, at_least, spans, key, deadline_s)

    def _submit_all(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        samples: Sequence[int],
        chunks: asyncio.Queue[Chunk] | None,
        class_: str,
        group: str,
        version: int | None,
        at_least: int | None,
        spans: bool,
        key: str,
        deadline_s: float | None,
    ) -> list[PendingRequest]:
        group = group or (f"p{next(self._numbers)}" if params.n > 1 else "")
        pending: list[PendingRequest] = []
        try:
            for index in samples:
                own = key if params.n == 1 or not key else f"{key}/{index}"
                one = self._submit(
                    prompt, params, index, chunks, class_, group, version, at_least, spans, own, deadline_s
                )
                pending.append(one)
                if one.answered.done():
                    one.answered.result()  # raises where it was refused
        except BaseException:
            for one in pending:
                self.cancel(one.spec.id)
            raise
        return pending

    def _submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        index: int,
        chunks: asyncio.Queue[Chunk] | None,
        class_: str,
        group: str,
        version: int | None,
        at_least: int | None,
        spans: bool,
        key: str,
        deadline_s: float | None,
    ) -> PendingRequest:
        core, own = self._core, params.sample(index)
        spec = RequestSpec(
            f"r{next(self._numbers)}",
            len(prompt),
            own.max_tokens,
            own.min_tokens,
            class_,
            group,
            version,
            at_least,
            own.may_resume(reads_text=not own.stop or self._have_tokenizers()),
            spans,
            key,
            None if deadline_s is None else core.clock() + deadline_s,
        )
        answered: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        pending = core.pending[spec.id] = PendingRequest(spec, prompt, own, index, answered, chunks)
        core.probe_token = prompt[0]
        try:
            core.handle_event(e.RequestArrived(spec))
        except BaseException:
            core.pending.pop(spec.id, None)
            raise
        return pending

    def _have_tokenizers(self) -> bool:
        """Whether every engine could say what tokens read."""
        engines = [one.engine for one in self._core.handles.values() if one.engine is not None]
        return all(tokenizer_of(engine) is not None for engine in engines)

    def cancel(self, request: str) -> None:
        """It is not wanted any more; harmless where it is answered."""
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
        """A place on an engine for a caller that talks to it by itself; about so many tokens, for so long at most."""
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


def _queued(chunks: asyncio.Queue[Chunk]) -> list[Chunk]:
    """What lies in the queue already."""
    return [chunks.get_nowait() for _ in range(chunks.qsize())]


def merge_chunks(chunks: list[Chunk]) -> list[Chunk]:
    """Neighbours of one sample in one piece: a reader who was busy gets what came meanwhile at once."""
    out = chunks[:1]
    for one in chunks[1:]:
        last = out[-1]
        if one.index != last.index or one.restarted or last.restarted or last.sample is not None:
            out.append(one)
            continue
        out[-1] = Chunk(
            one.index,
            last.token_ids + one.token_ids,
            one.logprobs if last.logprobs is None else last.logprobs + (one.logprobs or ()),
            one.best if last.best is None else last.best + (one.best or ()),
            last.text + one.text,
            sample=one.sample,
        )
    return out


class _RestartGate:
    """Keeps back what may be taken back: chunks of requests that would begin again from the prompt.

    A request that may resume is passed on as it comes. Should it begin again all the same (its tokens could not be
    named), what comes anew must be what was given out, token by token; else the client is told the truth by an error.
    """

    def __init__(self, pending: Sequence[PendingRequest]) -> None:
        self._held: dict[int, list[Chunk]] = {
            one.index: [] for one in pending if not (one.spec.resumable and one.spec.spans and one.spec.version is None)
        }
        self._given: dict[int, list[int]] = {one.index: [] for one in pending}
        self._repeat: dict[int, int] = {}  # tokens that were given out and come again

    def passes(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """What the client sees now."""
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
                "the answer began again and came out otherwise, after some of it was given out",
                hint="ask again; with log-probabilities it can be carried on instead",
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
