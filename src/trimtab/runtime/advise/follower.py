"""Follows a run until it is told to stop: reads what is new, asks who can be asked, and lets the user's command run.

Every look takes what there is and ends; between two looks it sleeps. It ends by itself when its time is over or when
the log has said nothing for long. What was in the log before it began is learned from and never acted upon: the user's
command runs only at a checkpoint that is written while it looks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.core.errors import InputError
from trimtab.formats.logs.follow import LoggedStep, RunLog
from trimtab.runtime.advise.analysis import AdviceTracker, FollowEvent, RunPicture
from trimtab.runtime.advise.cluster import ClusterWatch, NodeUtilization
from trimtab.runtime.advise.engines import EngineMetricsReader, EngineSample
from trimtab.runtime.advise.hook import HookResult, RestartHook
from trimtab.runtime.advise.record import FollowRecord, RecordedPast, mark_of
from trimtab.runtime.advise.replanner import Advice
from trimtab.runtime.advise.tail import LogTail
from trimtab.runtime.procs.nvml import local_gpu_utilization


@dataclass(frozen=True)
class ClusterSample:
    """What else was asked: engines, the cluster's nodes (or why they are not known), this machine's GPUs."""

    engines: tuple[EngineSample, ...] = ()
    nodes: tuple[NodeUtilization, ...] | str | None = None
    gpus: tuple[float, ...] = ()


@dataclass(frozen=True)
class FollowFrame:
    """One look: what is known, what is new, and which steps are."""

    picture: RunPicture
    news: tuple[FollowEvent, ...]
    steps: tuple[LoggedStep, ...]
    around: ClusterSample
    ended: str | None = None  # why nothing more is looked at


@dataclass
class Follower:
    """One run that is followed. Seconds of `every_s`, `at_most_s` and `silent_s` are by the clock."""

    tail: LogTail
    log: RunLog
    advising: AdviceTracker
    engines: EngineMetricsReader
    cluster: ClusterWatch | None = None
    hook: RestartHook | None = None
    least_gain: float = 0.1
    every_s: float = 2.0
    at_most_s: float = math.inf
    silent_s: float = 7200.0
    gpus: Callable[[], tuple[float, ...]] = local_gpu_utilization
    record: FollowRecord | None = None  # what was seen before, by whoever followed this run
    history: list[FollowEvent] = field(default_factory=list)
    _hooked: Advice | None = None  # what the user's command was run for last

    def once(self) -> FollowFrame:
        """All of a log that is finished."""
        steps = [*self._read(), *self.log.end()]
        self._require_steps(steps)
        news = self._caught_up(steps)
        news += self.advising.end()
        self.history += news
        return self._frame(news, steps, "the log was read to its end")

    def frames(self) -> Iterator[FollowFrame]:
        """Look again and again; what was there before comes with the first frame."""
        began = heard = time.monotonic()
        steps = [*self._read(), *self.log.settle(), *self.log.settle()]
        news = self._caught_up(steps)
        told = [one for one in news if self.record is not None and self.record.knows(one)]  # by whoever looked before
        seen = bool(steps)
        while True:
            now = time.monotonic()
            ended = None
            if steps:
                heard, seen = now, True
            if now - began >= self.at_most_s:
                ended = f"{self.at_most_s:g} s are over"
            elif now - heard >= self.silent_s:
                if not seen:
                    self._require_steps([])
                ended = f"the log has told no step for {self.silent_s:g} s"
            self.history += news
            yield self._frame([one for one in news if one not in told], steps, ended)
            told = []
            if ended is not None:
                return
            time.sleep(max(0.0, min(self.every_s, began + self.at_most_s - time.monotonic())))
            steps = [*self._read(), *self.log.settle()]
            news = [one for step in steps for one in self._live(step)] + self._heard_of_hook()

    def _caught_up(self, steps: Sequence[LoggedStep]) -> list[FollowEvent]:
        """What the log holds already. Where an advised placement is in place since some step, it is read so."""
        if self.record is None:
            return self._taken_up(self.advising, steps)
        self.advising.given.update(self.record.past.given)
        overrides, at = self._put_in_place(self.record.past, steps)
        if at is None:
            news = self._taken_up(self.advising, steps)
            if (advice := _advice_in(news, overrides)) is not None:  # the next start of the run has it
                self.advising.carried_out(advice)
            return news
        before = self.advising.anew(())
        news = self._taken_up(before, steps[:at])
        if (advice := _advice_in(news, overrides)) is not None:
            before.carried_out(advice)
            self.advising = before
        else:  # what came before is not in the log any more, or led to other advice
            if self.record.past.taken is None:
                first = mark_of(self.log.framework, steps[at]) if steps else (0, 0.0)
                self.record.takes_over(overrides, first)
            self.advising, news = self.advising.anew(overrides), []
        return news + self._taken_up(self.advising, steps[at:])

    def _put_in_place(self, past: RecordedPast, steps: Sequence[LoggedStep]) -> tuple[tuple[str, ...], int | None]:
        """Overrides that the user's command has put in place, and where the steps under them begin; None: not yet."""
        marks = [mark_of(self.log.framework, step) for step in steps]
        if past.taken is not None:
            overrides, since = past.taken
            return overrides, marks.index(since) if since in marks else 0
        if not past.done_for:
            return (), None
        known = [mark in past.steps for mark in marks]
        if not any(known):  # the log was started anew
            return past.done_for, 0
        fresh = (at for at, step in enumerate(steps) if step.restart and not known[at])
        return past.done_for, next(fresh, None)

    def _taken_up(self, advising: AdviceTracker, steps: Sequence[LoggedStep]) -> list[FollowEvent]:
        """Weigh steps that were in the log before."""
        found = []
        for step in steps:
            news = advising.take(step)
            if self.record is not None:
                self.record.step(advising, step, [one for one in news if not self.record.knows(one)])
            found += news
        return found

    def _read(self) -> list[LoggedStep]:
        steps = []
        for name, data in self.tail.read():
            if data is None:
                self.log.anew(name)
            else:
                steps += self.log.take(name, data)
        return steps

    def _live(self, step: LoggedStep) -> list[FollowEvent]:
        """A step that ended while we look: it may be the checkpoint that the user's command waits for."""
        news = self.advising.take(step)
        if self.record is not None:
            self.record.step(self.advising, step, news)
        advice = self.advising.adviser.advice if self.advising.adviser else None
        if self.hook is None or advice is None or not step.saved or not self.hook.wanted(advice):
            return news
        if advice.gain < self.least_gain:
            return news
        said = f"a checkpoint is written and {advice.gain:.0%} is to be gained: your command is run"
        news.append(FollowEvent("hook started", step.number, said, advice))
        self._hooked = advice
        failed = self.hook.start(advice, step.number)
        if failed is not None:
            news.append(self._hook_ended(failed))
        return news

    def _heard_of_hook(self) -> list[FollowEvent]:
        end = self.hook.ended() if self.hook is not None else None
        if end is None:
            return []
        if end.done and self._hooked is not None:
            self.advising.carried_out(self._hooked)
        return [self._hook_ended(end)]

    def _hook_ended(self, end: HookResult) -> FollowEvent:
        if self.record is not None:
            self.record.hook_ended(self._hooked, end.step, end.sentence, done=end.done)
        return FollowEvent("hook ended", end.step, end.sentence)

    def _require_steps(self, steps: list[LoggedStep]) -> None:
        if steps:
            return
        framework = self.log.framework
        raise InputError(
            f"no step with timings of {framework.name} is in the log ({self.log.lines} lines were read)",
            where=", ".join(str(path) for path in self.tail.paths),
            hint=f"read are: {framework.reads}",
        )

    def _frame(self, news: list[FollowEvent], steps: list[LoggedStep], ended: str | None) -> FollowFrame:
        nodes = self.cluster.seen() if self.cluster is not None else None
        around = ClusterSample(self.engines.look(time.monotonic()), nodes, self.gpus())
        return FollowFrame(self.advising.picture(self._notes()), tuple(news), tuple(steps), around, ended)

    def _notes(self) -> list[str]:
        """What was left out of the log, or doubted."""
        log, notes = self.log, []
        if self.tail.anew:
            notes.append(f"a file of the log was started anew {_times(self.tail.anew)}")
        if self.tail.gone:
            notes.append(f"not there at the moment: {', '.join(sorted(str(path) for path in self.tail.gone))}")
        if self.tail.not_read:
            notes.append(f"logs of other ranks are not read: {len(self.tail.not_read)} of them")
        if log.others:
            notes.append(f"told by several processes, and counted once: {_times(log.others)}")
        if log.joined.repeated:
            notes.append(f"logged again with the same values, and counted once: {_times(log.joined.repeated)}")
        if log.joined.cut_off:
            notes.append(f"cut off in the log, and left out: {_times(log.joined.cut_off)}")
        return notes


def _advice_in(news: Sequence[FollowEvent], overrides: tuple[str, ...]) -> Advice | None:
    return next((one.advice for one in news if one.advice is not None and one.advice.overrides == overrides), None)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
