"""Timelines as Chrome traces: JSON that Perfetto and chrome://tracing open. Times are microseconds from the start.

A process is a node (or the plan), a thread its GPUs. Slices of one thread must nest, so bars that overlap in part are
put on several threads of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trimtab.model.plan import Plan
from trimtab.render.html.kit.timeline import plan_chart
from trimtab.render.html.run.story import RunStory
from trimtab.render.html.run.timeline import run_chart


class TraceSlice(NamedTuple):
    """An activity in seconds; `kind` is run, switch or sync."""

    start: float
    end: float
    name: str
    kind: str
    facts: Mapping[str, Any]


class ChromeTrace:
    """The events of a trace, process by process."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[int, int] = {}

    def process(self, name: str) -> int:
        pid = self._processes.get(name)
        if pid is None:
            pid = self._processes[name] = len(self._processes) + 1
            self._threads[pid] = 0
            self._name("process", pid, 0, name, pid)
        return pid

    def thread(self, process: str, name: str, slices: Iterable[TraceSlice]) -> None:
        """Adds slices; those that begin before another has ended go to a further thread."""
        pid = self.process(process)
        lanes: list[tuple[int, float]] = []
        for item in sorted(slices, key=lambda item: (item.start, item.end)):
            at = next((at for at, (_, until) in enumerate(lanes) if until <= item.start), len(lanes))
            if at == len(lanes):
                self._threads[pid] += 1
                lanes.append((self._threads[pid], 0.0))
                self._name("thread", pid, self._threads[pid], name, self._threads[pid])
            tid = lanes[at][0]
            lanes[at] = tid, item.end
            times = {"ts": _us(item.start), "dur": _us(item.end) - _us(item.start)}
            about = {"name": item.name, "cat": item.kind, "args": dict(item.facts)}
            self._events.append({"ph": "X", "pid": pid, "tid": tid, **times, **about})

    def mark(self, process: str, at: float, name: str, kind: str, facts: Mapping[str, Any]) -> None:
        pid = self.process(process)
        place = {"ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": _us(at)}
        self._events.append({**place, "name": name, "cat": kind, "args": dict(facts)})

    def text(self) -> str:
        data = {"displayTimeUnit": "ms", "traceEvents": self._events}
        return json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"

    def _name(self, what: str, pid: int, tid: int, name: str, order: int) -> None:
        for key, args in ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": order})):
            self._events.append({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": key, "args": args})


def plan_trace(plan: Plan, title: str) -> str:
    """One iteration of a plan: a thread per group of GPUs and per component on CPUs."""
    trace, chart = ChromeTrace(), plan_chart(plan, title)
    for row in chart.rows:
        slices = (TraceSlice(bar.start, bar.end, bar.key, bar.look, _given(note=bar.note)) for bar in row.bars)
        trace.thread(title, f"{row.label}: {row.detail}" if row.detail else row.label, slices)
    for span in chart.spans:
        trace.mark(title, span.start, span.label or "iteration", "iteration", {"seconds": span.end - span.start})
    return trace.text()


def run_trace(story: RunStory) -> str:
    """A run so far: a process per node, a thread per block of GPUs that does the same, marks for what happened."""
    trace, chart = ChromeTrace(), run_chart(story)
    for track in chart.tracks:
        for node, first, last in track.rows:
            slices = [
                TraceSlice(bar.start, bar.end, bar.component, bar.doing, _facts(bar.iteration, bar.plan, bar.void))
                for bar in track.bars
            ]
            if node < 0:
                for component in dict.fromkeys(item.name for item in slices):
                    trace.thread("CPU", component, [item for item in slices if item.name == component])
            else:
                gpus = f"GPU {first}" if first == last else f"GPUs {first}-{last}"
                trace.thread(chart.nodes[node].name, gpus, slices)
    for event in chart.marks:
        trace.mark("events", event.t_s, event.title, event.kind, _given(code=event.code, reason=event.reason))
    return trace.text()


def _facts(iteration: int, plan: int, void: bool) -> dict[str, Any]:
    return {"iteration": iteration, "plan": plan, **({"void": True} if void else {})}


def _given(**facts: str) -> dict[str, str]:
    return {key: value for key, value in facts.items() if value}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
