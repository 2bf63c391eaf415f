"""Chrome traces by the rules of the Trace Event Format: what Perfetto opens and shows as it is."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import plans_for_pictures as samples
import run_report_samples
from trimtab.cli.app import run
from trimtab.model.plan import Plan
from trimtab.render.chrome_trace import ChromeTrace, TraceSlice, plan_trace, run_trace
from trimtab.render.html.run.story import read_story

ROOT = Path(__file__).parents[3]
PLANS = [samples.shared(), samples.full_answer().best]


def checked(text: str) -> list[dict[str, Any]]:
    """The events of a trace, held against the format."""
    trace = json.loads(text)
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    named: dict[str, set[Any]] = defaultdict(set)
    for event in events:
        assert event["ph"] in "MXi"
        assert type(event["pid"]) is type(event["tid"]) is type(event["ts"]) is int
        assert event["ts"] >= 0
        assert event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            if event["name"].endswith("_name"):
                assert event["args"]["name"]
                named[event["name"]].add((event["pid"], event["tid"])[: 2 if event["name"] == "thread_name" else 1])
        elif event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
        else:
            assert event["s"] in ("g", "p", "t")
    slices = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"],) for event in events} <= named["process_name"]
    assert {(event["pid"], event["tid"]) for event in slices} <= named["thread_name"]
    by_thread = defaultdict(list)
    for event in slices:
        by_thread[event["pid"], event["tid"]].append(event)
    for thread in by_thread.values():  # slices of a thread must nest: here none overlaps another
        thread.sort(key=lambda event: event["ts"])
        for before, after in pairwise(thread):
            assert before["ts"] + before["dur"] <= after["ts"]
    return events


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_a_plan_has_every_bar_of_its_timeline_in_microseconds(plan: Plan) -> None:
    slices = [event for event in checked(plan_trace(plan, "a plan")) if event["ph"] == "X"]
    found = sorted((event["name"], event["cat"], event["ts"], event["ts"] + event["dur"]) for event in slices)
    assert found == sorted(
        (bar.component, bar.doing, round(bar.start * 1e6), round(bar.end * 1e6)) for bar in plan.timeline
    )


def test_a_run_has_its_nodes_as_processes_and_what_happened_as_marks(tmp_path: Path) -> None:
    story = read_story(run_report_samples.eventful(tmp_path / "run"))
    events = checked(run_trace(story))
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {node.name for node in story.nodes} <= names
    marks = [event for event in events if event["ph"] == "i"]
    assert len(marks) == len(story.timeline_events)
    assert max(event["ts"] for event in marks) <= round(story.end_s * 1e6)


def test_slices_that_overlap_are_put_on_threads_of_their_own() -> None:
    trace = ChromeTrace()
    trace.thread("node", "GPU 0", [TraceSlice(0.0, 2.0, "a", "run", {}), TraceSlice(1.0, 3.0, "b", "run", {})])
    trace.thread("node", "GPU 1", [TraceSlice(0.0, 1.0, "c", "run", {}), TraceSlice(1.0, 3.0, "d", "run", {})])
    slices = {event["name"]: event["tid"] for event in checked(trace.text()) if event["ph"] == "X"}
    assert len({slices["a"], slices["b"], slices["c"]}) == 3
    assert slices["c"] == slices["d"]


def test_the_commands_write_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, path = ROOT / "src" / "trimtab" / "examples" / "grpo.yaml", tmp_path / "trace.json"
    assert run(["plan", str(job), "--no-sensitivity", "--trace", str(path)]) == 0
    assert {event["name"] for event in checked(path.read_text()) if event["ph"] == "X"} >= {"rollout", "trainer"}
    folder = run_report_samples.eventful(tmp_path / "run")
    assert run(["show", str(folder), "--trace", str(path)]) == 0
    assert any(event["ph"] == "i" for event in checked(path.read_text()))
    assert "trace written to" in capsys.readouterr().err
