"""Record of a followed run, in the format of a run folder: for the dashboard, for reports, and for restarts.

    lock            one `trimtab advise` at a time
    events.jsonl    steps, placements, advice, changes of engines and nodes, and results of the user's command
    summary.json    all that is known now; replaced atomically

Append-only, so a kill leaves whole lines. A restarted command reads the run's log from its beginning again; what is in
the folder already is neither written nor shown again, and the user's command is not run again for the same advice.
Nothing is written anywhere else. Times are those of the run's steps one after another: its log has no others.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from trimtab.core.codec import encode
from trimtab.core.errors import InputError
from trimtab.core.ranks import ranks_text
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.follow_costs import WEIGHT_SYNC
from trimtab.formats.logs.records import LogFramework
from trimtab.formats.logs.records import StepRecord as LogRecord
from trimtab.model.plan import TimelineBar
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.runtime.advise.analysis import AdviceTracker, FollowEvent
from trimtab.runtime.advise.replanner import Advice
from trimtab.runtime.run.folder import EVENTS, RunFolder, discard_unused, read_events
from trimtab.runtime.run.measurements import bars_facts, plan_facts
from trimtab.runtime.run.replanner import nodes_facts

if TYPE_CHECKING:
    from trimtab.runtime.advise.follower import ClusterSample, FollowFrame
    from trimtab.runtime.advise.samples import EngineSample

log = logging.getLogger(__name__)

WARM_UP = "warm-up"
SIDE_BY_SIDE = 1.02  # components whose times add up to more than this times their step ran side by side
HOOK_STARTED, HOOK_ENDED = "HOOK_STARTED", "HOOK_ENDED"
_ADVICE = ("advised", "changed", "stands again")

Overrides = tuple[str, ...]
StepMark = tuple[int, float]
"""Identifies a step: its number and how long it took."""


@dataclass
class RecordedPast:
    """What the folder recorded before this command was started."""

    steps: set[StepMark] = field(default_factory=set)
    shown: set[tuple[str, int, Overrides]] = field(default_factory=set)  # events that were shown
    given: dict[Overrides, int] = field(default_factory=dict)  # advice that was ever shown, and its step
    current_overrides: Overrides = ()  # of the last advice shown, unless withdrawn
    ran_for: set[Overrides] = field(default_factory=set)  # by the user's command
    done_for: Overrides = ()  # the user's command succeeded, and no start of the run was seen since
    taken: tuple[Overrides, StepMark] | None = None  # the run has this placement since that step
    call: Any = None  # configuration and overrides of the command
    follows: Any = None
    has_begun: bool = False
    last: int = 0  # number of the last step
    clock_s: float = 0.0
    placement: str = ""
    is_advised: bool = False
    workers: dict[str, str] = field(default_factory=dict)
    bad_lines: int = 0  # lines that could not be parsed

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        self.clock_s = max(self.clock_s, float(event.get("t_s") or 0.0))
        if kind == "began":
            self.has_begun = True
            self.is_advised = bool(event.get("advised"))
            self.follows, self.call = event.get("follows"), event.get("call")
        elif kind == "reopened":
            self.called(event["call"])
        elif kind == "iteration":
            step = event["iteration"]
            self.steps.add((int(step["number"]), float(step["wall_s"])))
            self.last = int(step["number"])
        elif kind == "plan":
            self.placement = json.dumps([event["groups"], event.get("predicted_s")])
        elif kind == "worker":
            self.workers[str(event["worker"])] = str(event["state"])
        elif kind == "news":
            self._write_event(event)
        elif kind == "taken":
            self.taken, self.done_for = (tuple(event["overrides"]), (int(event["step"]), float(event["wall_s"]))), ()
            self.current_overrides = ()

    def called(self, call: Any) -> None:
        """The command was restarted; with another configuration, the user states the placement anew."""
        if call != self.call:
            self.taken, self.done_for, self.current_overrides = None, (), ()
        self.call = call

    def _write_event(self, event: Mapping[str, Any]) -> None:
        what, overrides = str(event["what"]), tuple(map(str, event.get("overrides") or ()))
        self.shown.add((what, int(event["step"]), overrides))
        if what in _ADVICE:
            self.current_overrides = overrides
            self.given.setdefault(overrides, int(event["step"]))
        elif what == "withdrawn":
            self.current_overrides = ()
        elif what == "hook started":
            self.ran_for.add(overrides)
        elif what == "hook ended" and event.get("done"):
            self.done_for = overrides


def default_folder(follows: Sequence[Path]) -> Path:
    """The default folder: the same for the same log, however often it is followed."""
    names = [str(path.resolve()) for path in follows]
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in follows[0].resolve().stem)[:40]
    return Path("runs") / f"advise-{stem or 'run'}-{crc32(chr(0).join(names).encode()):08x}"


class FollowRecord:
    """The folder of one followed run; locked until `close`."""

    def __init__(self, path: Path, follows: Sequence[Path], config: Path, overrides: Sequence[str]) -> None:
        self.path = path
        _require_apart(path.resolve(), [log_path.resolve() for log_path in follows])
        there = (path / EVENTS).exists()
        followed = [str(log_path.resolve()) for log_path in follows]
        if there:
            self._require_ours(path, _read(path), followed)
        self._made_parent = not path.parent.exists()
        self._folder = RunFolder(path, resume=there)
        self.past, self._now = _read(path), _read(path)  # read again under the lock
        if self.past.bad_lines:
            log.warning("lines of %s that could not be understood are left out: %d", path / EVENTS, self.past.bad_lines)
        self._waiting: list[tuple[LoggedStep, FollowEvent | None]] = []  # steps whose timers are not settled yet
        self._since_start = 0
        self._summary: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}  # of the cluster, as text
        self._cluster_fault = ""  # why the cluster does not answer
        call = {"config": str(config.resolve()), "overrides": list(overrides)}
        self._opening: dict[str, Any] | None = {"event": "reopened", "call": call}  # written with the first event
        if not self.past.has_begun:
            more = {"advised": True, "job": follows[0].name, "follows": followed}
            self._opening = {"event": "began", "call": call, **more}
        self.past.called(call)

    @staticmethod
    def _require_ours(path: Path, past: RecordedPast, followed: list[str]) -> None:
        if past.is_advised and past.follows == followed:
            return
        if not past.has_begun and not past.steps:
            return  # killed before its first line was complete
        raise InputError(
            "this folder belongs to another run", where=str(path), hint="give a --folder of its own, or none at all"
        )

    @property
    def fault(self) -> str | None:
        return self._folder.fault

    def close(self) -> None:
        """Release the lock. A folder without events is removed."""
        self._folder.close()
        discard_unused(self.path)
        if self._made_parent:
            with contextlib.suppress(OSError):  # it is not empty
                self.path.parent.rmdir()

    # ---- known from before ---------------------------------------------------------------------------------------

    def knows(self, news: FollowEvent) -> bool:
        """Whether this event was shown before the command was started."""
        overrides = news.advice.overrides if news.advice is not None else ()
        if news.what in _ADVICE and overrides == self.past.current_overrides:
            return True
        return (news.what, news.step, overrides) in self.past.shown

    # ---- written -------------------------------------------------------------------------------------------------

    def record_hook_start(self, advice: Advice, step: int) -> bool:
        """Record that the user's command is run for this advice; returns whether that is written."""
        sentence = f"your command is run for {advice.plan.describe()}"
        self._write_event(FollowEvent("hook started", step, sentence, advice), {})
        return self._folder.all_written()

    def hook_ended(self, advice: Advice | None, step: int, sentence: str, *, done: bool) -> None:
        self._write_event(FollowEvent("hook ended", step, sentence, advice), {"done": done})

    def record_taken(self, overrides: Overrides, since: StepMark) -> None:
        """Record that the run has an advised placement since a step, or since its log begins."""
        self._append("taken", overrides=list(overrides), step=since[0], wall_s=since[1])

    def step(self, advising: AdviceTracker, step: LoggedStep, news: Sequence[FollowEvent]) -> None:
        """Record a step and its events. A known one is skipped."""
        self._waiting.append((step, next((event for event in news if event.what == "restarted"), None)))
        if advising.reading is not None:
            self._flush(advising)
        for event in news:
            if event.what != "restarted":
                self._write_event(event, {})

    def write_frame(self, frame: FollowFrame, advising: AdviceTracker, summary: Mapping[str, Any]) -> None:
        """Record the summary, and engines and nodes that came or went."""
        if frame.ended:
            self._flush(advising)
        self._write_cluster(frame.around, advising.framework)
        facts = {"advised": True, "state": frame.ended or "followed", **summary}
        if self._opening is None and facts != self._summary:
            self._folder.summarise(facts)
            self._summary = facts

    def stopped(self, why: str) -> None:
        """Following ends; the run may go on."""
        if self._opening is None:
            self._append("told", code="LEFT", reason=f"trimtab advise has stopped following: {why}")

    def _flush(self, advising: AdviceTracker) -> None:
        waiting, self._waiting = self._waiting, []
        for step, restarted in waiting:
            wall_s = step_wall_s(advising.framework, step)
            self._since_start = 1 if step.restart else self._since_start + 1
            if step.number < 1 or (step.number, wall_s) in self._now.steps:
                continue
            if step.restart or step.number <= self._now.last:
                self._append("resumed", after=step.number - 1)
            if restarted is not None:
                self._write_event(restarted, {})
                if restarted.advice is not None:
                    self.record_taken(restarted.advice.overrides, (step.number, wall_s))
            self._placement(advising)
            self._step(advising, step, wall_s)

    def _placement(self, advising: AdviceTracker) -> None:
        """Record the placement if it changed, or if its predicted time is known now."""
        if not advising.groups:
            return
        if advising.adviser is not None:
            facts = plan_facts(advising.adviser.plan)
        else:
            groups = [{"components": list(names), "gpus": ranks_text(gpus)} for names, gpus in advising.groups]
            words = " | ".join(f"{', '.join(names)} {len(gpus)}" for names, gpus in advising.groups)
            facts = {"plan": words, "predicted_s": None, "groups": groups, "costs_s": {}}
        if json.dumps([facts["groups"], facts["predicted_s"]]) == self._now.placement:
            return
        why = "judged" if facts["predicted_s"] is not None else "placed"
        if advising.cluster is not None and not self._now.placement:
            self._append("cluster", why="first", leaving=[], deadline=None, nodes=nodes_facts(advising.cluster))
        self._append("plan", why=why, iteration=max(self._now.last + 1, 1), **facts)

    def _step(self, advising: AdviceTracker, step: LoggedStep, wall_s: float) -> None:
        reading = advising.reading
        waits = {**(reading.waits if reading is not None else {})}
        seconds = advising.seconds(step)
        measured = tuple(
            ComponentTiming(
                component=name,
                busy_s=0.0 if name in waits else taken,
                gpus=advising.gpus(name) or 0,
                wait_s=taken if name in waits else 0.0,
            )
            for name, taken in seconds.items()
            if name != WEIGHT_SYNC
        )
        extra = step.extra if self._since_start > advising.warmup else (*step.extra, WARM_UP)
        begin_s = self._now.clock_s
        bars = list(step_bars(advising, seconds, waits, begin_s, begin_s + wall_s))
        shown = {"tokens": reading.length(step) if reading is not None else None}
        shown["reward"] = step.values.get(advising.framework.reward)
        self._append(
            "iteration",
            at_s=begin_s + wall_s,
            iteration=encode(Iteration(step.number, wall_s, measured, extra)),
            here_s=0.0,
            metrics={"answers": {name: value for name, value in shown.items() if value is not None}},
            sync_s=seconds.get(WEIGHT_SYNC, 0.0),
            bars=bars_facts(bars),
        )
        if step.saved:
            self._append("saved", iteration=step.number)
        if advising.adviser is not None:
            adviser = advising.adviser
            code, sentence = adviser.reason.code.value, adviser.reason.sentence
            what = "stay" if adviser.advice is None else "advised"
            numbers = {"iteration_s": adviser.seconds_now()}
            self._append("decided", what=what, iteration=step.number, code=code, reason=sentence, numbers=numbers)

    def _write_event(self, event: FollowEvent, more: Mapping[str, Any]) -> None:
        advice = event.advice
        overrides = [] if advice is None else list(advice.overrides)
        self._append("news", what=event.what, step=event.step, overrides=overrides, reason=event.sentence, **more)
        if advice is not None and event.what in _ADVICE:
            numbers = {"iteration_s": advice.iteration_s, "new_iteration_s": advice.new_iteration_s}
            self._append(
                "decided", what="advise", iteration=event.step, code=advice.reason.code.value, reason=event.sentence,
                numbers=numbers, plan=advice.plan.describe(), overrides=overrides,
            )  # fmt: skip
        elif event.what != "restarted":
            code = {"hook started": HOOK_STARTED, "hook ended": HOOK_ENDED, "withdrawn": "WITHDRAWN"}.get(
                event.what, ""
            )
            sentence = f"the advice is void: {event.sentence}" if event.what == "withdrawn" else event.sentence
            self._append("told", code=code, reason=sentence)

    def _write_cluster(self, around: ClusterSample, framework: LogFramework) -> None:
        """Record engines and nodes that came or went; utilization is in the summary only."""
        for engine in around.engines:
            self._write_engine(engine, "generation" if "generation" in framework.parts else "rollout")
        if around.nodes is None:
            return
        if isinstance(around.nodes, str):
            if self._nodes and around.nodes != self._cluster_fault:
                self._append("told", code="CLUSTER", reason=around.nodes)
                self._cluster_fault = around.nodes
            return
        if self._cluster_fault:
            self._append("told", code="CLUSTER", reason="the cluster answers again")
            self._cluster_fault = ""
        before, self._nodes = self._nodes, {}
        for node in around.nodes:
            state = "will go" if node.draining else "is there"
            self._nodes[node.name] = f"node {node.name} {state} ({node.gpus:g} GPUs)"
        for name in dict.fromkeys((*before, *self._nodes)) if before else ():
            if before.get(name) != self._nodes.get(name):
                self._append("told", code="CLUSTER", reason=self._nodes.get(name) or f"node {name} is gone")

    def _write_engine(self, engine: EngineSample, component: str) -> None:
        name, state = engine.url.partition("://")[2], "serving" if engine.fault is None else "lost"
        if self._now.workers.get(name) == state:
            return
        facts: dict[str, Any] = (
            {"code": "ANSWERS"} if engine.fault is None else {"code": "SILENT", "reason": engine.fault}
        )
        self._append("worker", component=component, worker=name, state=state, **facts)

    def _append(self, event: str, *, at_s: float | None = None, **facts: Any) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._append(**opening)
        facts = {"t_s": round(self._now.clock_s if at_s is None else at_s, 6), **facts}
        self._folder.append_event(event, **facts)
        self._now.take({"event": event, **facts})


def step_mark(framework: LogFramework, step: LoggedStep) -> StepMark:
    return step.number, step_wall_s(framework, step)


def step_wall_s(framework: LogFramework, step: LoggedStep) -> float:
    """Seconds of a step, periodic work included; without a total, the sum of its timers."""
    total = step.values.get(framework.prefix + framework.total, 0.0)
    if total > 0:
        return total
    record = LogRecord(step.number, dict(step.values))
    return sum(max(0.0, logs.seconds_of(framework, name, record) or 0.0) for name in framework.parts)


def step_bars(
    advising: AdviceTracker, seconds: Mapping[str, float], waits: Mapping[str, str], begin_s: float, end_s: float
) -> Iterator[TimelineBar]:
    """Bars of a step: components one after another, as the log has no clock; groups side by side if they must be.

    GPUs of components whose timers contain waiting are drawn busy all through.
    """
    known = {name: taken for name, taken in seconds.items() if name not in waits and taken > 0}
    groups = [names for names, _ in advising.groups]
    unknown = [names for names in groups if all(name in waits for name in names)]
    side_by_side = sum(known.values()) > SIDE_BY_SIDE * (end_s - begin_s)
    for some in groups if side_by_side else [tuple(known)]:
        mine = {name: known[name] for name in some if name in known}
        at = max(begin_s, end_s - sum(mine.values()))  # time without a timer comes first
        for name, taken in mine.items():
            end = min(at + taken, end_s)
            if name == WEIGHT_SYNC:
                yield from (TimelineBar(names[0], "sync", at, end) for names in groups if names not in unknown)
            elif end > at:
                yield TimelineBar(name, "run", at, end)
            at = end
    if end_s > begin_s:
        yield from (TimelineBar(names[0], "run", begin_s, end_s) for names in unknown)


def _require_apart(folder: Path, follows: Sequence[Path]) -> None:
    """Refuse a folder among the run's own files."""
    for log_path in follows:
        if folder in (log_path, log_path.parent) or log_path in folder.parents:
            raise InputError(
                "the run's own files are here, and nothing is written to them",
                where=str(folder),
                hint="name a --folder elsewhere",
            )


def _read(path: Path) -> RecordedPast:
    """Read a folder; incomplete or malformed lines are skipped."""
    past = RecordedPast()
    try:
        past.bad_lines = len(read_events(path, past.take)[1])
    except FileNotFoundError:
        pass
    except OSError as fault:
        raise InputError(f"the folder cannot be read: {fault.strerror or fault}", where=str(path)) from None
    return past
