"""Follows a run until stopped: reads new log steps, samples engines and cluster, and runs the user's command.

Each poll reads what is there and ends; between two polls it sleeps. It ends by itself after `at_most_s`, or when the
log has been silent for `silent_s`. Steps logged before it began are learned from and never acted upon: the user's
command runs only at a checkpoint that is written while following.

That command restarts the run with advised settings. It is run once for each advice, with a deadline, gets the advice in
its environment, and its output goes to standard error, so that standard output holds only the answer. It is never run
twice for the same overrides, whatever its result; and it survives an interrupt of trimtab, because a restart that is
cut in half is worse than either.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep, RunLog
from trimtab.formats.write_back import shell_words
from trimtab.runtime.advise.analysis import AdviceTracker, FollowEvent, RunPicture
from trimtab.runtime.advise.record import FollowRecord, RecordedPast, step_mark
from trimtab.runtime.advise.replanner import Advice
from trimtab.runtime.advise.samples import ClusterWatch, EngineMetricsReader, EngineSample, NodeUtilization
from trimtab.runtime.procs.gpus import gpu_utilization
from trimtab.runtime.store.files import FileTail

STANDARD_ERROR = 2
END_S = 5.0  # between SIGTERM and SIGKILL
_HINT = "name the run's console log, its JSON lines, or the folder of its event files"
_RANK = re.compile(r"(?i)(rank|worker|proc|process)[_.-]?(\d+)")


class HookResult(Frozen):
    """Result of the command. `status` is None if it could not be started or timed out."""

    step: int
    sentence: str
    status: int | None

    @property
    def done(self) -> bool:
        return self.status == 0


class RestartHook:
    """Runs the user's command, at most one at a time.

    `ran` are overrides that it was run for before; `starts` records, before it is run, what it is run for, and returns
    whether that was written: a command whose run could not be remembered is not run.
    """

    def __init__(
        self,
        command: str,
        config: str,
        at_most_s: float,
        ran: Iterable[tuple[str, ...]] = (),
        starts: Callable[[Advice, int], bool] = lambda advice, step: True,
    ) -> None:
        self._command = command
        self._config = config
        self._at_most_s = at_most_s
        self._ran = set(ran)
        self._starts = starts
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._step = 0

    @property
    def runs(self) -> bool:
        return self._process is not None

    def wanted(self, advice: Advice) -> bool:
        """Whether the command was not run for this advice yet."""
        return self._process is None and advice.overrides not in self._ran

    def start(self, advice: Advice, step: int) -> HookResult | None:
        """Run the command; returns a result only if it cannot be started."""
        self._ran.add(advice.overrides)
        self._step = step
        if not self._starts(advice, step):
            return HookResult(step, "the command was not run: its start cannot be recorded", None)
        environment = {
            **os.environ,
            "TRIMTAB_CONFIG": self._config,
            "TRIMTAB_OVERRIDES": " ".join(shell_words(advice.settings)),
            "TRIMTAB_PLAN": advice.plan.describe(),
            "TRIMTAB_GAIN": f"{advice.gain:.4f}",
            "TRIMTAB_STEP": str(step),
        }
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,
                start_new_session=True,  # Ctrl-C is for trimtab
            )
        except OSError as error:
            return HookResult(step, f"the command could not be started: {error.strerror}", None)
        self._deadline = time.monotonic() + self._at_most_s
        return None

    def ended(self) -> HookResult | None:
        """The result of the command, once it has ended or timed out."""
        process = self._process
        if process is None:
            return None
        status = process.poll()
        if status is not None:
            self._process = None
            how = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
            return HookResult(self._step, f"the command {how}", status)
        if time.monotonic() < self._deadline:
            return None
        self._process = None
        _kill(process)
        return HookResult(self._step, f"the command took longer than {self._at_most_s:g} s and was ended", None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return


@dataclass
class LogTail:
    """The files of one run. A folder stands for the logs in it, including new ones."""

    paths: Sequence[Path]
    restarts: int = 0  # times that a file was started anew
    skipped_ranks: tuple[Path, ...] = ()  # other ranks' logs of the same steps
    _tails: dict[Path, FileTail] = field(default_factory=dict)

    def files(self) -> list[Path]:
        """The files in reading order; InputError without any."""
        found: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                found.extend(self._folder(path))
            else:
                found.append(path)
        return list(dict.fromkeys(found))

    def _folder(self, path: Path) -> list[Path]:
        try:
            inside = logs.files_of(path)
        except InputError:
            if any(file.parent == path for file in self._tails):
                return [file for file in self._tails if file.parent == path]
            raise
        kept = first_ranks(inside)
        self.skipped_ranks = tuple(file for file in inside if file not in kept)
        return kept

    def check(self) -> None:
        """Raise InputError if a path cannot be followed."""
        for path in self.files():
            try:
                mode = path.stat().st_mode
            except OSError as error:
                raise InputError(f"the log {path} cannot be read: {error.strerror}", hint=_HINT) from None
            if not stat.S_ISREG(mode):
                raise InputError(f"{path} is no file that can be followed", hint=_HINT)

    @property
    def gone(self) -> set[Path]:
        return {path for path, tail in self._tails.items() if tail.gone}

    def read(self) -> Iterator[tuple[str, bytes | None]]:
        """(name, bytes) of new data, file by file; None for bytes: the file begins anew."""
        for path in self.files():
            tail = self._tails.setdefault(path, FileTail(path))
            try:
                for data in tail.read():
                    self.restarts += data is None
                    yield str(path), data
            except OSError:
                tail.gone = True

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def first_ranks(files: Sequence[Path]) -> list[Path]:
    """Of files that differ only in a rank or worker number, the first: the others log the same steps."""
    lowest: dict[str, tuple[int, Path]] = {}
    for path in files:
        found = _RANK.search(path.name)
        key = path.name if found is None else f"{path.name[: found.start(2)]}*{path.name[found.end(2) :]}"
        number = 0 if found is None else int(found[2])
        if key not in lowest or number < lowest[key][0]:
            lowest[key] = number, path
    kept = {path for _, path in lowest.values()}
    return [path for path in files if path in kept]


@contextlib.contextmanager
def open_tail(paths: Sequence[Path]) -> Iterator[LogTail]:
    tail = LogTail(paths)
    try:
        tail.check()
        yield tail
    finally:
        tail.close()


class ClusterSample(Frozen):
    """Engines, the cluster's nodes (or why they are not known), this machine's GPUs."""

    engines: tuple[EngineSample, ...] = ()
    nodes: tuple[NodeUtilization, ...] | str | None = None
    gpus: tuple[float, ...] = ()


class FollowFrame(Frozen):
    """One poll: what is known, new events, and new steps."""

    picture: RunPicture
    news: tuple[FollowEvent, ...]
    steps: tuple[LoggedStep, ...]
    around: ClusterSample
    ended: str | None = None  # why following ended


@dataclass
class Follower:
    """One followed run. `every_s`, `at_most_s` and `silent_s` are wall time."""

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
    gpus: Callable[[], tuple[float, ...]] = lambda: tuple(gpu_utilization() or ())
    record: FollowRecord | None = None  # what earlier commands recorded of this run
    history: list[FollowEvent] = field(default_factory=list)
    _hook_advice: Advice | None = None  # advice that the user's command was run for last

    def once(self) -> FollowFrame:
        steps = [*self._read(), *self.log.end()]
        self._require_steps(steps)
        news = self._catch_up(steps)
        news += self.advising.end()
        self.history += news
        return self._frame(news, steps, "the log was read to its end")

    def frames(self) -> Iterator[FollowFrame]:
        """Poll repeatedly; the first frame covers what was in the log before."""
        began = last_step_at = time.monotonic()
        steps = [*self._read(), *self.log.settle(), *self.log.settle()]
        news = self._catch_up(steps)
        known = [event for event in news if self.record is not None and self.record.knows(event)]
        seen = bool(steps)
        while True:
            now = time.monotonic()
            ended = None
            if steps:
                last_step_at, seen = now, True
            if now - began >= self.at_most_s:
                ended = f"{self.at_most_s:g} s are over"
            elif now - last_step_at >= self.silent_s:
                if not seen:
                    self._require_steps([])
                ended = f"no step was logged for {self.silent_s:g} s"
            self.history += news
            yield self._frame([event for event in news if event not in known], steps, ended)
            known = []
            if ended is not None:
                return
            time.sleep(max(0.0, min(self.every_s, began + self.at_most_s - time.monotonic())))
            steps = [*self._read(), *self.log.settle()]
            news = [event for step in steps for event in self._take_live(step)] + self._poll_hook()

    def _catch_up(self, steps: Sequence[LoggedStep]) -> list[FollowEvent]:
        """Replay the existing log. If an advised placement is in place since some step, it is read under that."""
        if self.record is None:
            return self._replay(self.advising, steps)
        self.advising.given.update(self.record.past.given)
        overrides, at = self._taken_overrides(self.record.past, steps)
        if at is None:
            news = self._replay(self.advising, steps)
            if (advice := _advice_in(news, overrides)) is not None:  # the next start of the run has it
                self.advising.hook_succeeded(advice)
            return news
        before = self.advising.restarted_with(())
        news = self._replay(before, steps[:at])
        if (advice := _advice_in(news, overrides)) is not None:
            before.hook_succeeded(advice)
            self.advising = before
        else:  # the steps before are not in the log any more, or led to other advice
            if self.record.past.taken is None:
                first = step_mark(self.log.framework, steps[at]) if steps else (0, 0.0)
                self.record.record_taken(overrides, first)
            self.advising, news = self.advising.restarted_with(overrides), []
        return news + self._replay(self.advising, steps[at:])

    def _taken_overrides(self, past: RecordedPast, steps: Sequence[LoggedStep]) -> tuple[tuple[str, ...], int | None]:
        """Overrides that the user's command applied, and the index of the first step under them; None: not yet."""
        marks = [step_mark(self.log.framework, step) for step in steps]
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

    def _replay(self, advising: AdviceTracker, steps: Sequence[LoggedStep]) -> list[FollowEvent]:
        """Evaluate steps that were in the log before."""
        found = []
        for step in steps:
            news = advising.take(step)
            if self.record is not None:
                self.record.step(advising, step, [event for event in news if not self.record.knows(event)])
            found += news
        return found

    def _read(self) -> list[LoggedStep]:
        steps = []
        for name, data in self.tail.read():
            if data is None:
                self.log.file_replaced(name)
            else:
                steps += self.log.take(name, data)
        return steps

    def _take_live(self, step: LoggedStep) -> list[FollowEvent]:
        """Evaluate a new step: it may be the checkpoint that the user's command waits for."""
        news = self.advising.take(step)
        if self.record is not None:
            self.record.step(self.advising, step, news)
        advice = self.advising.adviser.advice if self.advising.adviser else None
        if self.hook is None or advice is None or not step.saved or not self.hook.wanted(advice):
            return news
        if advice.gain < self.least_gain:
            return news
        sentence = f"a checkpoint is written and {advice.gain:.0%} is to be gained: your command is run"
        news.append(FollowEvent("hook started", step.number, sentence, advice))
        self._hook_advice = advice
        failed = self.hook.start(advice, step.number)
        if failed is not None:
            news.append(self._hook_ended(failed))
        return news

    def _poll_hook(self) -> list[FollowEvent]:
        end = self.hook.ended() if self.hook is not None else None
        if end is None:
            return []
        if end.done and self._hook_advice is not None:
            self.advising.hook_succeeded(self._hook_advice)
        return [self._hook_ended(end)]

    def _hook_ended(self, end: HookResult) -> FollowEvent:
        if self.record is not None:
            self.record.hook_ended(self._hook_advice, end.step, end.sentence, done=end.done)
        return FollowEvent("hook ended", end.step, end.sentence)

    def _require_steps(self, steps: list[LoggedStep]) -> None:
        if steps:
            return
        framework = self.log.framework
        raise InputError(
            f"no step with timings of {framework.name} is in the log ({self.log.lines} lines were read)",
            where=", ".join(str(path) for path in self.tail.paths),
            hint=f"supported: {framework.supported_logs}",
        )

    def _frame(self, news: list[FollowEvent], steps: list[LoggedStep], ended: str | None) -> FollowFrame:
        nodes = self.cluster.seen() if self.cluster is not None else None
        around = ClusterSample(self.engines.sample(time.monotonic()), nodes, self.gpus())
        return FollowFrame(self.advising.picture(self._notes()), tuple(news), tuple(steps), around, ended)

    def _notes(self) -> list[str]:
        """What was skipped in the log, or is doubtful."""
        log, notes = self.log, []
        if self.tail.restarts:
            notes.append(f"a file of the log was started anew {_times(self.tail.restarts)}")
        if self.tail.gone:
            notes.append(f"not there at the moment: {', '.join(sorted(str(path) for path in self.tail.gone))}")
        if self.tail.skipped_ranks:
            notes.append(f"logs of other ranks are not read: {len(self.tail.skipped_ranks)} of them")
        if log.duplicates:
            notes.append(f"logged by several processes, and counted once: {_times(log.duplicates)}")
        if log.joined.repeated:
            notes.append(f"logged again with the same values, and counted once: {_times(log.joined.repeated)}")
        if log.joined.cut_off:
            notes.append(f"cut off in the log, and left out: {_times(log.joined.cut_off)}")
        return notes


def _advice_in(news: Sequence[FollowEvent], overrides: tuple[str, ...]) -> Advice | None:
    return next(
        (event.advice for event in news if event.advice is not None and event.advice.overrides == overrides), None
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
