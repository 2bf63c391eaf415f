"""The timeline of a running run: increments for open pages, and all of it for a new page.

Made by the report's drawing code. An increment costs as much as is new, however long the run is: the run may be in this
very process. Where the past changed (void iterations, out-of-order events, a component's first GPUs) everything is sent
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.render.html.run.facts import ReportBar, ReportEvent
from trimtab.render.html.run.story import RunStory
from trimtab.render.html.run.timeline import LANES, RunChart, TimelineTrack, chart_data, legend, run_chart

_WHOLE = ("keys", "nodes", "cpu", "lanes", "moves", "open", "end")  # sent whole whenever they change


class LiveTimeline:
    """Follows one story."""

    def __init__(self, story: RunStory) -> None:
        self._story = story
        self._begin()

    def _begin(self) -> None:
        self._bars = self._story.bars  # replaced when the past changes, otherwise only appended to
        self._bar_count = self._mark_count = 0
        self._sent: dict[str, Any] = {"cpu": []}
        self._starts: dict[str, float] = {}  # of the last bar of each track
        self._looks: dict[tuple[str, str, bool], ReportBar] = {}
        self._kinds: dict[tuple[str, str], ReportEvent] = {}
        self.used_gpu_s = 0.0

    def whole(self) -> dict[str, Any]:
        """The whole timeline."""
        data = chart_data(run_chart(self._story))
        _name(data, self._story.timeline_events, 0)
        return data

    def news(self) -> dict[str, Any]:
        """What to add since the last call; with `anew` it replaces everything."""
        story = self._story
        changed = story.bars is not self._bars or list(story.on_cpu) != self._sent["cpu"]
        message = None if changed and self._bar_count else self._added()
        if message is None:
            self._begin()
            message = {**(self._added() or {}), "anew": True}
        return message

    def _added(self) -> dict[str, Any] | None:
        """The increment; None where it does not come after what was sent."""
        story = self._story
        bars, marks = story.bars[self._bar_count :], story.timeline_events[self._mark_count :]
        chart = run_chart(replace(story, bars=bars, timeline_events=marks))
        data = chart_data(chart)
        starts = {str(track["rows"]): track["bars"] for track in data["tracks"]}
        if any(found[0] < self._starts.get(rows, 0.0) for rows, found in starts.items()):
            return None
        _name(data, marks, self._mark_count)
        self._starts.update({rows: found[-5] for rows, found in starts.items()})
        self._looks.update({(bar.component, bar.doing, bar.void): bar for bar in bars})
        for mark in marks:
            self._kinds.setdefault((mark.lane, mark.kind), mark)
        self._bar_count, self._mark_count = len(story.bars), len(story.timeline_events)
        self.used_gpu_s += chart.used_gpu_s
        used = {lane for lane, _ in self._kinds}
        data["lanes"] = [[lane, words] for lane, words in LANES.items() if lane in used]
        message = {name: data[name] for name in _WHOLE if self._sent.get(name) != data[name]}
        if not self._sent.get("keys"):
            message["shapes"] = data["shapes"]
        self._sent = {name: data[name] for name in _WHOLE}
        return message | {name: data[name] for name in ("tracks", "marks") if data[name]}

    @property
    def available_gpu_s(self) -> float:
        return self._small().available_gpu_s

    @property
    def legend(self) -> str:
        return legend(self._small()) if self._story.components or self._kinds else ""

    def _small(self) -> RunChart:
        """A chart with one bar and one mark of each kind."""
        story = self._story
        tracks = (TimelineTrack(((0, 0, 0),), tuple(self._looks.values())),)
        kinds = tuple(self._kinds.values())
        return RunChart(story.components, tuple(story.nodes), story.on_cpu, tracks, kinds, (), story.end_s)


def _name(data: Mapping[str, Any], timeline_events: list[ReportEvent], first: int) -> None:
    """Give marks stable numbers: the order in which they arrived."""
    order = sorted(range(len(timeline_events)), key=lambda at: timeline_events[at].t_s)
    for mark in data["marks"]:
        mark[6] = first + order[mark[6]]
