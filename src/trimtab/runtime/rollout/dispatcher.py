"""Sends requests to engines: each attempt is a stream from one engine and ends in exactly one event.

What must never happen: an attempt whose end is not reported (its worker would count as busy for ever, and its memory
could never be released); tokens of a superseded attempt in an answer; an answer that continues past a stop string
because it was interrupted in the middle of it; a cut that changes the answer; two segments at once.

An event for each token costs an engine's HTTP front more than the GPU needs for the token. So an answer comes in pieces
of `resume_every` tokens, which is what a lost engine costs: by a stream with that interval where the engine takes one,
else in segments: requests for so many tokens, each with the prompt and the answer so far, which the engine has in its
prefix cache. Only answers that may be resumed are cut. All others come whole, unless the caller streams.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.core.frozen import Frozen, Message
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import ANSWERED, End, RolloutRules
from trimtab.runtime.engines.engine import (
    ROUTED_EXPERTS,
    STREAMS,
    Engine,
    EngineCall,
    EngineError,
    EngineGoneError,
    FinishReason,
    ForwardRequest,
    PieceSupport,
    StreamDelta,
)
from trimtab.runtime.engines.http_engine import NoSuchPathError, http_engine
from trimtab.runtime.engines.tokenizer import tokenizer_of
from trimtab.runtime.rollout.leases import EngineLeases
from trimtab.runtime.rollout.machine_loop import RequestAttempt, RolloutCore
from trimtab.runtime.rollout.sampling import PendingRequest

HALF = "\ufffd"  # how a text ends whose last character is not complete
MAX_BRIDGES = 4  # tokens asked one by one to complete a character
FIRST_TOKENS = 32  # of a piece, before the speed of an engine is known
INTERVAL_TOKENS = 128  # of an event; fewer cost the engine, more save next to nothing
PHASES = 8  # lengths of first segments


class WeightsChangedError(EngineError):
    """The version of the weights that made some tokens is unknown."""


class PiecePlan(Message):
    """How one attempt asks its engine."""

    piece: int | None  # tokens of a delta (`GenerateRequest.piece`)
    segment: int | None = None  # tokens of a call; None: all that are left
    first: int | None = None  # the same, of the first call

    def tokens(self, calls: int, left: int) -> int:
        """Tokens to ask for, after so many calls."""
        if self.segment is None:
            return left
        return min(left, self.first or self.segment) if calls == 0 else min(left, self.segment)


class PiecePlanner:
    """Chooses the pieces of each attempt."""

    def __init__(self, rules: RolloutRules) -> None:
        self._rules = rules
        self._phase = 0

    def every(self, token_rate: float | None) -> int | None:
        """Tokens of a piece on an engine that makes so many tokens a second for one request; None: no limit."""
        bounds = [] if self._rules.resume_every is None else [int(self._rules.resume_every)]
        if self._rules.resume_every_s is not None:
            bounds.append(FIRST_TOKENS if token_rate is None else max(1, int(token_rate * self._rules.resume_every_s)))
        return min(bounds, default=None)

    def plan(
        self, support: PieceSupport, *, streams: bool, may_cut: bool, left: int, token_rate: float | None = None
    ) -> PiecePlan:
        if streams or not support.whole:
            return PiecePlan(1)
        every = self.every(token_rate) if may_cut else None
        if every is None or left <= every:
            return PiecePlan(None)
        if support.interval or every == 1 or 1 < support.every <= every:
            return PiecePlan(every if support.repeats else min(every, INTERVAL_TOKENS))
        # Requests that begin together would all be cut at the same step, and leave the engine idle meanwhile. A few
        # groups are better than many: steps that read prompts are slower than steps that only decode.
        self._phase = self._phase % PHASES + 1
        return PiecePlan(None, every, -(-every * self._phase // PHASES))


class StopMatch(Frozen):
    """A stop string across the interruption: its begin in the text before, its end in the text after."""

    word: str
    begins: int  # characters from the beginning of the text before
    ends: int  # characters after the interruption; 0 or less: it was already complete


class StopStringBuffer:
    """Holds back the first deltas after an interruption until they cannot be part of a spanning stop string.

    An engine that continues from prompt plus partial answer looks for stop strings only in its own output. One that
    began before the interruption and ends after it would be missed, and the answer would run on. So the first text is
    held back until it is longer than any stop string could reach, and searched together with the text before. A stop
    string may also have been complete at the interruption without being reported: the text before is searched first.
    """

    def __init__(self, before: str, stop: Sequence[str]) -> None:
        self.held: list[StreamDelta] = []
        self._before = before
        self._stop = stop
        self._reach = max((len(word) for word in stop), default=0) - 1
        self._text = ""

    @property
    def open(self) -> bool:
        return len(self._text) < self._reach

    def hold(self, piece: StreamDelta) -> StopMatch | None:
        """Adds a delta; returns a stop string that is complete now."""
        self.held.append(piece)
        self._text += piece.text or ""
        return self.found(self._text)

    def before(self) -> StopMatch | None:
        """The first stop string that was complete at the interruption."""
        places = [(at + len(word), at, word) for word in self._stop if (at := self._before.find(word)) >= 0]
        if not places:
            return None
        end, at, word = min(places)
        return StopMatch(word, at, end - len(self._before))

    def found(self, after: str) -> StopMatch | None:
        """The first stop string that begins before the interruption and ends within this text."""
        tail = self._before[-self._reach :] if self._reach > 0 else ""
        joined, skipped = tail + after, len(self._before) - len(tail)
        places = []
        for word in self._stop:
            at = joined.find(word)
            if 0 <= at < len(tail) < at + len(word):
                places.append((at + len(word), at, word))
        if not places:
            return None
        end, at, word = min(places)
        return StopMatch(word, skipped + at, end - len(tail))


class Dispatcher:
    """Sends, aborts and answers requests."""

    def __init__(self, core: RolloutCore, leases: EngineLeases) -> None:
        self._core, self._leases = core, leases
        self._planner = PiecePlanner(core.machine.rules)
        core.handlers |= {
            e.SendRequest: self._send,
            e.AbortAttempt: self._abort,
            e.AnswerRequest: self._answer,
            e.RefuseRequest: self._refuse,
        }

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _send(self, send: e.SendRequest) -> None:
        core = self._core
        pending = core.pending.get(send.request)
        if pending is None:
            self._leases.send(send)
            return
        pending.begin(send.attempt, send.worker, send.resumed)
        if send.attempt > 1:
            core.counters["moved" if send.resumed else "restarted"] += 1
        attempt = RequestAttempt(pending, send.attempt, send.worker, f"{send.request}@{send.attempt}", version=None)
        core.attempts[send.request, send.attempt] = attempt
        attempt.task = core.spawn(self._run_attempt(attempt, send), f"attempt-{attempt.engine_request_id}")

    def _abort(self, abort: e.AbortAttempt) -> None:
        attempt = self._core.attempts.get((abort.request, abort.attempt))
        if attempt is None:
            if not self._leases.abort(abort):  # it has ended: its event is under way, or preceded a worker's loss
                self._core.handle_event_soon(e.AbortDone(abort.request, abort.attempt, 0))
            return
        attempt.aborting = True
        self._core.spawn(self._abort_attempt(attempt, abort.deadline), f"abort-{attempt.engine_request_id}")

    def _answer(self, answer: e.AnswerRequest) -> None:
        core = self._core
        pending = core.pending.get(answer.request)
        if pending is None and self._leases.is_lease(answer.request):
            self._leases.answer(answer)
            return
        core.counters[f"answered_{answer.end.value}"] += 1
        if pending is None:
            return
        if answer.end is End.failed:
            self._note_failed(answer, pending)
        if not (pending.spec.key and self._has_other_waiters(answer)):
            del core.pending[answer.request]
        if pending.spec.key:
            self._keep_answer(answer, pending)
        pending.answer(answer.end, answer.spans, answer.reason)

    def _note_failed(self, answer: e.AnswerRequest, pending: PendingRequest) -> None:
        view = self._core.machine.request(answer.request)
        self._core.failed.append(
            {
                "at": self._core.clock(),
                "request": answer.request,
                "class": pending.spec.class_,
                "worker": pending.worker,
                "code": answer.reason.code.value,
                "sentence": answer.reason.sentence,
                "breaks": 0 if view is None else view.breaks,
            }
        )

    def _has_other_waiters(self, answer: e.AnswerRequest) -> bool:
        """Whether only this client left, and others with the same key still wait."""
        view = None if answer.of else self._core.machine.request(answer.request)
        return view is not None and view.state not in ANSWERED

    def _keep_answer(self, answer: e.AnswerRequest, pending: PendingRequest) -> None:
        """Answers of requests with a key are kept for later requests with the same key."""
        keyed_answers = self._core.keyed_answers
        if not answer.of:
            keyed_answers[answer.request] = pending
            while len(keyed_answers) > self._core.machine.rules.answers_kept:
                del keyed_answers[next(iter(keyed_answers))]
        elif (first := keyed_answers.get(answer.of) or self._core.pending.get(answer.of)) is not None:
            copy_answer(first, pending)

    def _refuse(self, refuse: e.RefuseRequest) -> None:
        if self._leases.is_lease(refuse.request):
            self._leases.refuse(refuse)
            return
        self._core.counters["refused"] += 1
        pending = self._core.pending.pop(refuse.request, None)
        if pending is not None:
            pending.refuse(refuse.reason, refuse.retry_after_s)

    # ---- one attempt -----------------------------------------------------------------------------------------------

    async def _run_attempt(self, attempt: RequestAttempt, send: e.SendRequest) -> None:
        event: e.RolloutEvent
        try:
            event = await self._stream(attempt, send)
        except asyncio.CancelledError:
            # By an abort that the engine did not confirm in time, or because the pool stops.
            event = e.AbortDone(send.request, send.attempt, self._tokens_made(attempt))
            if not attempt.aborting:
                self._core.attempts.pop((send.request, send.attempt), None)
                raise
        except WeightsChangedError as error:
            event = e.AttemptFailed(send.request, send.attempt, self._tokens_made(attempt), error.what, outdated=True)
            if attempt.aborting:
                event = e.AbortDone(send.request, send.attempt, self._tokens_made(attempt))
        except (EngineError, InputError, InfeasibleError) as error:
            lost, refused = self._lost_adapter(attempt, error), not isinstance(error, EngineError)
            refused |= attempt.pending.forward is not None and isinstance(error, NoSuchPathError)
            if refused and not lost:  # every engine would refuse it
                event = e.AttemptFailed(send.request, send.attempt, self._tokens_made(attempt), str(error), fatal=True)
            else:
                gone = isinstance(error, EngineGoneError) and error.reached
                event = self._attempt_failed(attempt, error.what, gone=gone)
        except Exception as error:
            event = self._attempt_failed(attempt, f"{type(error).__name__}: {error}")
            self._core.warn(send.worker, f"{attempt.engine_request_id}: {error!r}")
        self._core.attempts.pop((send.request, send.attempt), None)
        self._core.handle_event(event)

    async def _stream(self, attempt: RequestAttempt, send: e.SendRequest) -> e.RolloutEvent:
        """Fetches the answer, in one call of the engine or in segments."""
        engine, pending, handle = self._engine(send.worker), attempt.pending, self._core.handles[send.worker]
        cache_key, lora = f"trimtab-{send.version}", pending.params.lora
        if lora is not None:
            cache_key = f"{cache_key}-{lora}"
            loads = http_engine(engine, "load LoRA adapters")
            await loads.load_adapter(lora, self._core.adapters[lora])
            attempt.adapters = loads.adapters
        if pending.forward is not None:
            call = replace(pending.forward, id=attempt.engine_request_id, cache_key=cache_key)
            reply = await self._call(attempt, engine, call, None)
            return reply if isinstance(reply, e.AttemptFinished) else self._ended(attempt, reply)
        support: PieceSupport = getattr(engine, "pieces", STREAMS)
        plan = self._plan(attempt, support, send)
        calls = bridges = 0
        while True:
            buffer = await self._stop_buffer(attempt, engine) if pending.ids else None
            if buffer is not None and (stopped := buffer.before()) is not None:
                await self._finish_at_stop(attempt, buffer, stopped, engine)
                return e.AttemptFinished(send.request, send.attempt, pending.made, End.stop, attempt.version)
            left = send.max_tokens - pending.made
            asked = plan.tokens(calls, left)
            if support.context is not None and pending.made:
                asked = min(asked, support.context - len(pending.prompt) - len(pending.ids))
                if asked <= 0:
                    return self._ended(attempt, FinishReason.full)
            # After half a character an engine may search the prompt for stop strings: it is completed without them.
            bridge = buffer is not None and pending.before.endswith(HALF) and bridges < MAX_BRIDGES
            asked, bridges = (1, bridges + 1) if bridge else (asked, 0)
            request = pending.params.engine_request(
                attempt.engine_request_id, (*pending.prompt, *pending.ids) if pending.ids else pending.prompt, asked,
                min(max(0, send.min_tokens - pending.made), asked), plan.piece, cache_key, stops=not bridge,
                raw=pending.takes_raw and plan.segment is None and not pending.ids,
            )  # fmt: skip
            before, began = pending.made, self._core.clock()
            outcome = await self._call(attempt, engine, request, None if bridge else buffer)
            if isinstance(outcome, e.AttemptFinished):
                return outcome
            made, took_s = pending.made - before, self._core.clock() - began
            if made > 1 and took_s > 0:
                rate = handle.token_rate
                handle.token_rate = made / took_s if rate is None else 0.8 * rate + 0.2 * made / took_s
            if outcome is not FinishReason.length or asked == left or made < asked:
                if pending.cuts and outcome in (FinishReason.stop, FinishReason.length):
                    await self._join_text(attempt, engine, outcome)
                return self._ended(attempt, outcome)
            if attempt.aborting:
                return e.AbortDone(send.request, send.attempt, pending.made)
            pending.read()
            pending.cut()
            calls += 1

    def _plan(self, attempt: RequestAttempt, support: PieceSupport, send: e.SendRequest) -> PiecePlan:
        pending, handle = attempt.pending, self._core.handles[send.worker]
        reads_text = not pending.params.stop or tokenizer_of(handle.engine) is not None
        streams = pending.chunks is not None and ROUTED_EXPERTS not in pending.params.extra
        plan = self._planner.plan(
            support, streams=streams, may_cut=pending.params.may_cut(reads_text=reads_text),
            left=send.max_tokens, token_rate=handle.token_rate,
        )  # fmt: skip
        attempt.segments = plan.segment is not None
        return plan

    def _lost_adapter(self, attempt: RequestAttempt, error: TrimtabError) -> bool:
        """Whether the engine does not know the request's LoRA adapter any more: its process was replaced unseen."""
        lora = attempt.pending.params.lora
        if attempt.adapters is None or not lora or lora not in error.what:
            return False
        attempt.adapters.discard(lora)
        return "does not exist" in error.what or "loaded" in error.what

    async def _call(
        self, attempt: RequestAttempt, engine: Engine, request: EngineCall, buffer: StopStringBuffer | None
    ) -> e.AttemptFinished | FinishReason | None:
        """One call of the engine: how it finished, or an end by a stop string across the cut before it."""
        finish, updates = None, self._weight_updates(attempt)
        self._name_version(attempt)
        async with contextlib.aclosing(_deltas(engine, request)) as pieces:
            async for piece in pieces:
                self._require_current(attempt)
                if request.piece != 1 and (piece.token_ids or piece.extra or piece.raw):
                    self._require_weights(attempt, updates)
                finish = piece.finish or finish
                if buffer is None:
                    self._take(attempt, piece)
                else:
                    attempt.silent = True
                    stopped = buffer.hold(piece)
                    if stopped is not None:
                        await self._finish_at_stop(attempt, buffer, stopped, engine)
                        return e.AttemptFinished(
                            attempt.pending.spec.id, attempt.number, attempt.pending.made, End.stop, attempt.version
                        )
                    if buffer.open and finish is None:
                        continue
                    for held_piece in buffer.held:
                        self._take(attempt, held_piece)
                    buffer, attempt.silent = None, False
                if finish is None or attempt.segments:  # else they are reported with the end
                    self._core.report_tokens(attempt)
        return finish

    def _name_version(self, attempt: RequestAttempt) -> None:
        """Engines report the weights that they were started with by a name, not by a number."""
        handle, worker = self._core.handles.get(attempt.worker), self._core.machine.state.workers.get(attempt.worker)
        if handle is not None and worker is not None and handle.state is not None and handle.state.version is not None:
            attempt.named = {handle.state.version: worker.version}

    def _weight_updates(self, attempt: RequestAttempt) -> int:
        handle = self._core.handles.get(attempt.worker)
        return -1 if handle is None else handle.weight_updates

    def _require_weights(self, attempt: RequestAttempt, updates: int) -> None:
        """Tokens of a piece need a single version of the weights."""
        if self._weight_updates(attempt) != updates:
            raise WeightsChangedError(
                "the weights changed while it ran, and it is not known which made its tokens", engine=attempt.worker
            )

    def _require_current(self, attempt: RequestAttempt) -> None:
        """Tokens of a superseded attempt must not reach the answer."""
        if attempt.pending.attempt != attempt.number:
            raise EngineError("the attempt was superseded", engine=attempt.worker)

    def _take(self, attempt: RequestAttempt, piece: StreamDelta) -> None:
        if piece.version is not None and (piece.token_ids or piece.raw):
            version = version_number(piece.version)
            version = attempt.named.get(piece.version) if version is None else version
            if version != attempt.version:
                self._core.report_now(attempt)  # the tokens so far are of another version
                attempt.version = version
        attempt.pending.take(piece)
        if piece.missing:  # at once: an answer with a gap must never be resumed
            self._core.handle_event(
                e.TokensStreamed(attempt.pending.spec.id, attempt.number, attempt.pending.made, None, restart=True)
            )

    def _ended(self, attempt: RequestAttempt, finish: FinishReason | None) -> e.RolloutEvent:
        name, number, made = attempt.pending.spec.id, attempt.number, self._tokens_made(attempt)
        if finish in (FinishReason.stop, FinishReason.length, FinishReason.full):
            end = End.stop if finish is FinishReason.stop else End.length
            return e.AttemptFinished(name, number, made, end, attempt.version)
        if finish is FinishReason.aborted_elsewhere:
            handle = self._core.handles.get(attempt.worker)
            paused = handle is not None and getattr(handle.engine, "shut", False)
            return e.AbortedExternally(name, number, made, paused=paused)
        if attempt.aborting:
            return e.AbortDone(name, number, made)
        return self._attempt_failed(
            attempt, "it was aborted by this adapter" if finish else "its stream ended without a finish"
        )

    def _attempt_failed(self, attempt: RequestAttempt, why: str, *, gone: bool = False) -> e.RolloutEvent:
        name, made = attempt.pending.spec.id, self._tokens_made(attempt)
        if attempt.aborting:
            return e.AbortDone(name, attempt.number, made)
        return e.AttemptFailed(name, attempt.number, made, why, engine_died=gone)

    def _tokens_made(self, attempt: RequestAttempt) -> int:
        return attempt.pending.made if attempt.pending.attempt == attempt.number else 0

    def _engine(self, worker: str) -> Engine:
        handle = self._core.handles.get(worker)
        if handle is None or handle.engine is None:
            raise EngineError("it has no engine", engine=worker)
        return handle.engine

    async def _abort_attempt(self, attempt: RequestAttempt, deadline: float) -> None:
        """Aborts at the engine; closes the stream if that takes too long."""
        task = attempt.task
        assert task is not None
        handle = self._core.handles.get(attempt.worker)
        left_s = max(0.0, 0.8 * (deadline - self._core.clock()))
        if handle is not None and handle.engine is not None:
            wanted = attempt.pending.spec.id in self._core.pending
            if wanted and attempt.segments and not getattr(handle.engine, "pieces", STREAMS).partial:
                await asyncio.wait({task}, timeout=left_s / 2)  # an abort would lose what the segment has made
                left_s /= 2
            with contextlib.suppress(TrimtabError, asyncio.TimeoutError, OSError):  # the stream is closed below
                await asyncio.wait_for(handle.engine.abort([attempt.engine_request_id]), left_s / 2)
        await asyncio.wait({task}, timeout=left_s / 2)
        if not task.done():
            task.cancel()

    # ---- stop strings across an interruption -------------------------------------------------------------------------

    async def _stop_buffer(self, attempt: RequestAttempt, engine: Engine) -> StopStringBuffer | None:
        """Text so far of a resumed answer: engines hold back text, which an abort loses."""
        pending = attempt.pending
        if pending.cuts and not pending.params.stop:
            return None
        tokenizer = tokenizer_of(engine)
        if tokenizer is not None:
            try:
                before = await tokenizer.detokenize(tuple(pending.ids))
            except EngineError:
                if pending.params.stop:
                    raise
            else:
                self._require_current(attempt)
                pending.before = before
                pending.send_held_text()
        return StopStringBuffer(pending.before, pending.params.stop) if pending.params.stop else None

    async def _join_text(self, attempt: RequestAttempt, engine: Engine, finish: FinishReason) -> None:
        """Writes the text anew if a cut may have gone through a character: what engines write then differs."""
        pending, tokenizer = attempt.pending, tokenizer_of(engine)
        if tokenizer is None or pending.params.stop or pending.text.isascii():
            return
        ids = pending.ids[:-1] if finish is FinishReason.stop else pending.ids
        with contextlib.suppress(EngineError, InputError):
            text = await tokenizer.detokenize(ids)
            self._require_current(attempt)
            pending.rewrite(text)

    async def _finish_at_stop(
        self, attempt: RequestAttempt, buffer: StopStringBuffer, stopped: StopMatch, engine: Engine
    ) -> None:
        """Ends the answer with the token that completed the stop string, as without the interruption."""
        pending = attempt.pending
        ids = (*pending.ids, *(token for held in buffer.held for token in held.token_ids))
        last, tokenizer = len(ids), tokenizer_of(engine)
        while tokenizer is not None and last > 1:
            if stopped.word not in (await tokenizer.detokenize(ids[: last - 1]))[stopped.begins :]:
                break
            last -= 1
        self._require_current(attempt)
        for held in buffer.held:
            pending.take(held)
        pending.truncate(last, pending.before[: stopped.begins], stopped.word)


def _deltas(engine: Engine, request: EngineCall) -> AsyncGenerator[StreamDelta, None]:
    if isinstance(request, ForwardRequest):
        return http_engine(engine, "take requests as they are").forward(request)
    return engine.generate(request)


def copy_answer(first: PendingRequest, to: PendingRequest) -> None:
    """Copies an answer to another request with the same key."""
    tokens = len(first.ids)
    to.ids = list(first.ids)
    # The first may have been requested without them: every token still has an entry.
    to.logprobs = list(first.logprobs) if len(first.logprobs) == tokens else [None] * tokens
    to.best = list(first.best) if len(first.best) == tokens else [()] * tokens
    to.before, to.texts, to.missing, to.stopped_by = first.text, [], first.missing, first.stopped_by
    to.workers, to.moves, to.restarts = list(first.workers), first.moves, first.restarts
    to.extra = first.extra
    to.send_all()


def version_number(version: str | None) -> int | None:
    """Number of a version reported by an engine; None if it is no number."""
    return int(version) if version is not None and version.isdecimal() else None
