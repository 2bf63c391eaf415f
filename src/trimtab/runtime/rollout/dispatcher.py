"""Requests on their way: each attempt is a stream from one engine, and ends in exactly one piece of news.

What must never happen: an attempt whose end is not told (its worker would count as busy for ever, and its memory could
never be released); tokens of an attempt that is not the current one in an answer; an answer that runs on past a stop
string because it was cut in the middle of it.
"""

from __future__ import annotations

import asyncio
import contextlib

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import ANSWERED, End
from trimtab.runtime.engines.engine import Engine, EngineError, EngineGoneError, FinishReason, StreamDelta
from trimtab.runtime.engines.texts import texts_of
from trimtab.runtime.rollout.machine_loop import RequestAttempt, RolloutCore
from trimtab.runtime.rollout.pending_request import PendingRequest
from trimtab.runtime.rollout.stop_strings import StopMatch, StopStringBuffer


class Dispatcher:
    """Sends, cuts and answers."""

    def __init__(self, core: RolloutCore) -> None:
        self._core = core
        core.handlers |= {
            e.SendRequest: self._send,
            e.AbortAttempt: self._abort,
            e.AnswerRequest: self._answer,
            e.RefuseRequest: self._refuse,
        }

    # ---- out -------------------------------------------------------------------------------------------------------

    def _send(self, send: e.SendRequest) -> None:
        core = self._core
        asked = core.asked[send.request]
        asked.begin(send.attempt, send.worker, send.resumed)
        if send.attempt > 1:
            core.counters["moved" if send.resumed else "restarted"] += 1
        attempt = RequestAttempt(asked, send.attempt, send.worker, f"{send.request}@{send.attempt}", version=None)
        core.attempts[send.request, send.attempt] = attempt
        attempt.task = core.spawn(self._fly(attempt, send), f"attempt-{attempt.order}")

    def _abort(self, abort: e.AbortAttempt) -> None:
        attempt = self._core.attempts.get((abort.request, abort.attempt))
        if attempt is None:  # it has ended, and that is being told or was before its worker was lost
            self._core.soon(e.AbortDone(abort.request, abort.attempt, 0))
            return
        attempt.cut = True
        self._core.spawn(self._cut(attempt, abort.deadline), f"cut-{attempt.order}")

    def _answer(self, answer: e.AnswerRequest) -> None:
        core = self._core
        core.counters[f"answered_{answer.end.value}"] += 1
        asked = core.asked.get(answer.request)
        if asked is None:
            return
        if answer.end is End.failed:
            self._note_failed(answer, asked)
        if not (asked.spec.key and self._wanted_by_others(answer)):
            del core.asked[answer.request]
        if asked.spec.key:
            self._keyed(answer, asked)
        asked.answer(answer.end, answer.spans, answer.reason)

    def _note_failed(self, answer: e.AnswerRequest, asked: PendingRequest) -> None:
        view = self._core.machine.request(answer.request)
        self._core.failed.append(
            {
                "at": self._core.clock(),
                "request": answer.request,
                "class": asked.spec.class_,
                "worker": asked.worker,
                "code": answer.reason.code.value,
                "sentence": answer.reason.sentence,
                "breaks": 0 if view is None else view.breaks,
            }
        )

    def _wanted_by_others(self, answer: e.AnswerRequest) -> bool:
        """Whether only this client has left, and others who gave the same key still wait for it."""
        view = None if answer.of else self._core.machine.request(answer.request)
        return view is not None and view.state not in ANSWERED

    def _keyed(self, answer: e.AnswerRequest, asked: PendingRequest) -> None:
        """Answers of requests with a key are kept, for whoever asks with it again."""
        kept = self._core.kept
        if not answer.of:
            kept[answer.request] = asked
            while len(kept) > self._core.machine.rules.answers_kept:
                del kept[next(iter(kept))]
        elif (first := kept.get(answer.of) or self._core.asked.get(answer.of)) is not None:
            copied(first, asked)

    def _refuse(self, refuse: e.RefuseRequest) -> None:
        self._core.counters["refused"] += 1
        asked = self._core.asked.pop(refuse.request, None)
        if asked is not None:
            asked.refuse(refuse.reason, refuse.retry_after_s)

    # ---- one attempt -----------------------------------------------------------------------------------------------

    async def _fly(self, attempt: RequestAttempt, send: e.SendRequest) -> None:
        news: e.RolloutEvent
        try:
            news = await self._stream(attempt, send)
        except asyncio.CancelledError:
            # By a cut that the engine did not confirm in time, or because all is closing.
            news = e.AbortDone(send.request, send.attempt, self._made(attempt))
            if not attempt.cut:
                self._core.attempts.pop((send.request, send.attempt), None)
                raise
        except EngineError as error:
            news = self._broke(attempt, error.what, gone=isinstance(error, EngineGoneError) and error.reached)
        except (InputError, InfeasibleError) as error:  # it would be refused everywhere
            news = e.AttemptFailed(send.request, send.attempt, self._made(attempt), str(error), fatal=True)
        except Exception as error:
            news = self._broke(attempt, f"{type(error).__name__}: {error}")
            self._core.warn(send.worker, f"{attempt.order}: {error!r}")
        self._core.attempts.pop((send.request, send.attempt), None)
        self._core.tell(news)

    async def _stream(self, attempt: RequestAttempt, send: e.SendRequest) -> e.RolloutEvent:
        engine, asked = self._engine(send.worker), attempt.asked
        order = asked.params.order(
            attempt.order, (*asked.prompt, *asked.ids), send.max_tokens, min(send.min_tokens, send.max_tokens)
        )
        across = await self._across(attempt, engine)
        if across is not None and (stopped := across.before()) is not None:
            await self._stop_across(attempt, across, stopped, engine)
            return e.AttemptFinished(send.request, send.attempt, 0, End.stop)
        finish = None
        async with contextlib.aclosing(engine.generate(order)) as pieces:
            async for piece in pieces:
                self._require_current(attempt)
                finish = piece.finish or finish
                if across is None:
                    self._take(attempt, piece)
                else:
                    attempt.silent = True
                    stopped = across.hold(piece)
                    if stopped is not None:
                        await self._stop_across(attempt, across, stopped, engine)
                        return e.AttemptFinished(send.request, send.attempt, asked.made, End.stop)
                    if across.open and finish is None:
                        continue
                    for held in across.held:
                        self._take(attempt, held)
                    across, attempt.silent = None, False
                self._core.tokens_came(attempt)
        return self._ended(attempt, finish)

    def _require_current(self, attempt: RequestAttempt) -> None:
        """Nothing of an attempt that the machine has given up gets into the answer, which another one writes by now."""
        if attempt.asked.attempt != attempt.number:
            raise EngineError("it was given up", engine=attempt.worker)

    def _take(self, attempt: RequestAttempt, piece: StreamDelta) -> None:
        if piece.version is not None:
            attempt.version = number_of(piece.version)
        attempt.asked.take(piece)
        if piece.missing:  # at once: an answer that has a gap must never be carried on from
            self._core.tell(
                e.TokensStreamed(attempt.asked.spec.id, attempt.number, attempt.asked.made, None, restart=True)
            )

    def _ended(self, attempt: RequestAttempt, finish: FinishReason | None) -> e.RolloutEvent:
        name, number, made = attempt.asked.spec.id, attempt.number, self._made(attempt)
        if finish in (FinishReason.stop, FinishReason.length, FinishReason.full):
            end = End.stop if finish is FinishReason.stop else End.length
            return e.AttemptFinished(name, number, made, end, attempt.version)
        if finish is FinishReason.aborted_elsewhere:
            return e.AbortedExternally(name, number, made)
        if attempt.cut:
            return e.AbortDone(name, number, made)
        return self._broke(attempt, "it was aborted here" if finish else "its stream ended without a finish")

    def _broke(self, attempt: RequestAttempt, why: str, *, gone: bool = False) -> e.RolloutEvent:
        name, made = attempt.asked.spec.id, self._made(attempt)
        if attempt.cut:
            return e.AbortDone(name, attempt.number, made)
        return e.AttemptFailed(name, attempt.number, made, why, engine_died=gone)

    def _made(self, attempt: RequestAttempt) -> int:
        return attempt.asked.made if attempt.asked.attempt == attempt.number else 0

    def _engine(self, worker: str) -> Engine:
        hand = self._core.hands.get(worker)
        if hand is None or hand.engine is None:
            raise EngineError("it has no engine", engine=worker)
        return hand.engine

    async def _cut(self, attempt: RequestAttempt, deadline: float) -> None:
        """Ask the engine to end it; where that takes too long, the stream is closed from here."""
        task = attempt.task
        assert task is not None
        hand = self._core.hands.get(attempt.worker)
        left_s = max(0.0, 0.8 * (deadline - self._core.clock()))
        if hand is not None and hand.engine is not None:
            with contextlib.suppress(TrimtabError, asyncio.TimeoutError, OSError):  # its stream is closed below
                await asyncio.wait_for(hand.engine.abort([attempt.order]), left_s / 2)
        await asyncio.wait({task}, timeout=left_s / 2)
        if not task.done():
            task.cancel()

    # ---- stop strings across a cut -----------------------------------------------------------------------------------

    async def _across(self, attempt: RequestAttempt, engine: Engine) -> StopStringBuffer | None:
        """What the answer reads so far, where it goes on from a cut; engines hold text back that a cut then loses."""
        asked = attempt.asked
        if not asked.base:
            return None
        texts = texts_of(engine)
        if texts is not None:
            try:
                before = await texts.detokenize(tuple(asked.ids))
            except EngineError:
                if asked.params.stop:
                    raise
            else:
                self._require_current(attempt)
                asked.before = before
                asked.give_rest()
        return StopStringBuffer(asked.before, asked.params.stop) if asked.params.stop else None

    async def _stop_across(
        self, attempt: RequestAttempt, across: StopStringBuffer, stopped: StopMatch, engine: Engine
    ) -> None:
        """The answer ends with the token that completed the stop string, as it would have without the cut."""
        asked = attempt.asked
        ids = (*asked.ids, *(one for held in across.held for one in held.token_ids))
        last, texts = len(ids), texts_of(engine)
        while texts is not None and last > 1:
            if stopped.word not in (await texts.detokenize(ids[: last - 1]))[stopped.begins :]:
                break
            last -= 1
        self._require_current(attempt)
        for held in across.held:
            asked.take(held)
        asked.cut(last, asked.before[: stopped.begins], stopped.word)


def copied(first: PendingRequest, to: PendingRequest) -> None:
    """The answer of a request to another that has the same key."""
    tokens = len(first.ids)
    to.ids = list(first.ids)
    # The first may have been asked without them: each token has a place all the same.
    to.logprobs = list(first.logprobs) if len(first.logprobs) == tokens else [None] * tokens
    to.best = list(first.best) if len(first.best) == tokens else [()] * tokens
    to.before, to.texts, to.missing, to.stopped_by = first.text, [], first.missing, first.stopped_by
    to.workers, to.moves, to.restarts = list(first.workers), first.moves, first.restarts
    to.give_all()


def number_of(version: str | None) -> int | None:
    """The trainer's number of a version that an engine reports; None where it is none."""
    return int(version) if version is not None and version.isdecimal() else None
