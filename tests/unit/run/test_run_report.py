"""The report of a run: what is read of its folder, what the pictures hold, and what the page says."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_local import chain, emulated

import run_report_samples as samples
from run_report_samples import NODES, SEPARATE, WIDER, Writing, plan_of
from trimtab.cli.app import run as command
from trimtab.core.errors import InputError
from trimtab.render.html.kit.assets import script
from trimtab.render.html.kit.lines import CurveChart, ReportCurve, curves_svg, thinned
from trimtab.render.html.kit.page import page_head
from trimtab.render.html.run.figures import (
    MAX_LINES,
    costs,
    expected,
    expected_errors,
    group_equal,
    has_virtual_clock,
    idle_shares,
    metric_names,
    promise_errors,
    status_sentence,
    summary_lines,
)
from trimtab.render.html.run.report import SCRIPT, run_report
from trimtab.render.html.run.story import RunStory, read_story
from trimtab.render.html.run.timeline import RunChart, chart_data, run_chart, static_svg
from trimtab.runtime.run.emulated import VirtualClock
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.run import Run


def page_of(story: RunStory, **more: Any) -> str:
    return run_report(story, title="run", command="trimtab show run --report report.html", **more)


def words_of(story: RunStory) -> list[str]:
    return summary_lines(story, run_chart(story), costs(story, idle_shares(story)), metric_names(story))


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> RunStory:
    return read_story(samples.eventful(tmp_path_factory.mktemp("runs") / "run"))


def rows_of(chart: RunChart) -> dict[tuple[int, int], list[tuple[float, float, str, int]]]:
    """Slow and obvious: what is on each row, in order."""
    rows: dict[tuple[int, int], list[tuple[float, float, str, int]]] = {}
    for track in chart.tracks:
        for node, first, last in track.rows:
            for row in range(first, last + 1):
                rows.setdefault((node, row), []).extend(
                    (bar.start, bar.end, bar.component, bar.iteration) for bar in track.bars
                )
    return {row: sorted(found) for row, found in rows.items()}


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_every_iteration_counts_once_and_void_ones_stay_visible(eventful: RunStory) -> None:
    assert [one.iteration.number for one in eventful.iterations] == list(range(1, 41))
    assert [one.iteration.number for one in eventful.done if one.void] == [26, 27]
    assert {bar.iteration for bar in eventful.bars if bar.void} == {26, 27}
    assert {bar.iteration for bar in eventful.bars if not bar.void} == set(range(1, 41))


def test_plans_moves_and_decisions_are_told_with_reasons_and_numbers(eventful: RunStory) -> None:
    assert [plan.why for plan in eventful.plans] == ["first", "move", "move"]
    assert [(move.id, move.state, move.forced) for move in eventful.moves] == [
        (1, "rolled back", False),
        (2, "arrived", False),
        (3, "arrived", True),
    ]
    rolled, arrived, _ = eventful.moves
    assert [stage for stage, _, _ in rolled.stages] == ["drain", "save", "release", "place"]
    assert rolled.cost_s == pytest.approx(0.4 + 0.2 + 1.1 + 0.7)
    assert rolled.outcome == "load failed: no space left on device"
    assert arrived.numbers["gain_s"] == 0.8
    assert (arrived.before, arrived.after) == (SEPARATE["plan"], WIDER["plan"])
    runs = group_equal(eventful.decisions)
    assert sum(count for _, _, count in runs) == len(eventful.decisions) == 43
    assert (runs[0][0].code, runs[0][2]) == ("TOO_FEW", 8)


def test_ranks_of_a_plan_count_through_the_nodes_of_its_time(eventful: RunStory) -> None:
    first, wider, fewer = eventful.plans
    assert first.gpu_slots("trainer") == tuple(("beta", gpu) for gpu in range(4))
    assert wider.gpu_slots("rollout") == (*(("alpha", g) for g in range(4)), ("beta", 0), ("beta", 1))
    assert wider.gpu_slots("trainer") == (("beta", 2), ("beta", 3), *(("gamma", g) for g in range(4)))
    assert fewer.gpu_slots("rollout") == tuple(("alpha", gpu) for gpu in range(4))
    assert wider.gpu_slots("reward") == ()


def test_a_plan_keeps_its_seats_if_nodes_change_between_the_decision_and_the_plan(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    run.tell("move", move=1, state="begun", iteration=0, plan=SEPARATE, changes=[])
    run.tell("cluster", why="lost", nodes=[NODES[1], ["new", 4, ""]], leaving=[], deadline=None)
    run.tell("move", move=1, state="arrived", iteration=0)
    run.plan("move", 1, SEPARATE)
    run.plan("lost", 1, SEPARATE)
    story = read_story(run.write())
    assert [plan.gpu_slots("rollout")[0] for plan in story.plans] == [("alpha", 0), ("alpha", 0), ("beta", 0)]


@pytest.mark.parametrize("told", [True, False])
def test_a_move_that_the_run_died_in_ends_where_it_is_resumed(tmp_path: Path, told: bool) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    run.iteration(1)
    run.tell("move", move=1, state="begun", iteration=1, plan=SEPARATE, changes=[])
    run.t += 2
    run.tell("resumed", after=1, void=0)
    if told:
        run.tell(
            "move", move=1, state="rolled back", took_s=0.0, code="ROLLED_BACK", reason="resumed in the midst of it"
        )
    run.iteration(2)
    [move] = read_story(run.write()).moves
    assert move.state == ("rolled back" if told else "interrupted")
    assert move.ended_s == pytest.approx(move.began_s + 2, abs=1e-3)


def test_nodes_have_the_times_in_which_they_were_there(eventful: RunStory) -> None:
    presence = {node.name: node.presence for node in eventful.nodes}
    assert presence["alpha"] == [(0.0, None)]
    assert presence["beta"][0][0] == 0.0
    assert presence["beta"][0][1] == presence["gamma"][0][1]
    assert 0 < presence["gamma"][0][0] < presence["gamma"][0][1]


def test_a_node_that_comes_back_has_two_lives(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    for at, nodes in ((5.0, NODES[:1]), (9.0, NODES)):
        run.t = at
        run.tell("cluster", why="lost", nodes=nodes, leaving=[], deadline=None)
    story = read_story(run.write())
    assert story.nodes[1].presence == [(0.0, 5.0), (9.0, None)]


def test_what_happened_stands_in_lanes_with_codes_and_reasons(eventful: RunStory) -> None:
    found = {(one.lane, one.kind) for one in eventful.timeline_events}
    assert found >= {
        ("nodes", "joined"), ("nodes", "draining"), ("nodes", "lost"), ("tasks", "evicted"), ("workers", "left"),
        ("workers", "range"), ("run", "lost"), ("run", "resumed"), ("run", "saved"), ("moves", "rollback"),
        ("moves", "advice"), ("run", "told"), ("run", "ended"),
    }  # fmt: skip
    evicted = next(one for one in eventful.timeline_events if one.kind == "evicted")
    assert (evicted.code, "takes its slot" in evicted.reason, evicted.strong) == ("PRIORITY", True, True)
    assert any(one.title == "nodes beta, gamma will leave in 30 s" for one in eventful.timeline_events)


def test_workers_are_marked_when_they_come_and_go_and_only_listed_in_between(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    states = ("starting", "active", "stale", "active", "draining", "inactive", "starting", "active", "lost")
    for state in states:
        run.tell("worker", component="rollout", worker="w0", state=state, code="", reason="")
    story = read_story(run.write())
    told = [one for one in story.timeline_events if "worker w0" in one.title]
    assert len(told) == len(states)
    assert [one.title.split()[-1] for one in told if one.lane == "workers"] == [
        "starting",
        "draining",
        "starting",
        "lost",
    ]
    assert any("workers started 2 times and stopped 2 times" in line.lower() for line in words_of(story))


# ---- odd folders -----------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    folder = samples.eventful(tmp_path / "run")
    whole = read_story(folder)
    data = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(data + b'{"event": "iterat')
    torn = read_story(folder)
    assert (torn.unparsed_lines, len(torn.iterations), torn.end_s) == ([], 40, whole.end_s)
    (folder / "events.jsonl").write_bytes(data[: len(data) // 2])
    half = read_story(folder)
    assert half.unparsed_lines == []
    assert 0 < len(half.iterations) < 40
    assert "It has not ended" in page_of(half)


def test_unknown_events_are_passed_over_and_odd_lines_are_left_out_and_said(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    run.iteration(1)
    run.tell("weather", rain=True)
    run.lines += ["not json", "[1, 2]", '{"event": "iteration", "iteration": {"number": "two"}}', '{"no": "event"}']
    run.lines += ['{"event": "plan", "groups": [{"components": ["a"], "gpus": "0-99999999999"}], "plan": "a"}']
    run.iteration(2)
    story = read_story(run.write())
    assert len(story.iterations) == 2
    assert story.unparsed_lines == [6, 7, 8, 9, 10]
    assert "5 lines of events.jsonl could not be parsed" in page_of(story)


def test_a_folder_where_nothing_can_be_understood_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("what\nis this\n")
    with pytest.raises(InputError, match="no line can be parsed"):
        read_story(tmp_path)


@pytest.mark.parametrize("events", ["", '{"event": "began", "at": 1.0, "job": "grpo", "iterations": 9, "t_s": 0.0}\n'])
def test_an_empty_run_is_a_page_too(tmp_path: Path, events: str) -> None:
    (tmp_path / "events.jsonl").write_text(events)
    story = read_story(tmp_path)
    page = page_of(story)
    assert page.rstrip().endswith("</html>")
    assert ("No events yet" in page) == (not events)
    assert words_of(story)[0] in ("No iteration has ended yet.", "No iteration of 9 has ended yet.")


def test_a_run_that_goes_on_is_reported_as_far_as_it_is(tmp_path: Path) -> None:
    story = read_story(samples.eventful(tmp_path / "run", ends=False))
    assert status_sentence(story).startswith("It has not ended")
    assert chart_data(run_chart(story))["open"] is True
    assert "40 iterations in" in page_of(story)


@pytest.mark.parametrize("with_t_s", [True, False])
def test_a_run_resumed_by_another_process_goes_on_where_it_stopped(tmp_path: Path, with_t_s: bool) -> None:
    run = Writing(tmp_path, with_t_s=with_t_s)
    run.begin(NODES, iterations=8)
    run.plan("first", 1, SEPARATE)
    for number in range(1, 6):
        run.iteration(number)
    stopped_s, run.t = run.t, 0.0  # the clock of the new process begins anew
    run.tell("cluster", why="first", nodes=NODES, leaving=[], deadline=None)
    run.tell("resumed", after=3, void=2)
    run.plan("first", 4, SEPARATE)
    for number in range(4, 9):
        run.iteration(number)
    run.tell("ended", state="done", code="COMPLETED", reason="all 8 iterations are done", iteration=8)
    story = read_story(run.write())
    assert [one.iteration.number for one in story.iterations] == list(range(1, 9))
    assert [one.iteration.number for one in story.done if one.void] == [4, 5]
    assert story.end_s == pytest.approx(stopped_s + run.t, abs=1e-3)
    resumed = next(one for one in story.timeline_events if one.kind == "resumed")
    assert resumed.t_s == pytest.approx(stopped_s, abs=1e-3)
    assert "2 iterations after that are run again" in resumed.title
    for bars in rows_of(run_chart(story)).values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(bars))
    assert any("2 iterations run again" in line for line in words_of(story))


def test_a_run_in_one_process_says_that_its_times_are_those_of_the_plan(tmp_path: Path) -> None:
    Run(emulated(chain(gpus=4), iterations=6), tmp_path / "run", LocalExecutor(VirtualClock())).run()
    story = read_story(tmp_path / "run")
    assert has_virtual_clock(story)
    assert story.end_s == pytest.approx(story.wall_s)
    page = page_of(story)
    assert "Times are those of the plan" in page
    assert "Time is that of the plan" in page
    assert all(abs(error) < 1e-6 for error in expected_errors(story))
    assert [abs(error) < 1e-6 for _, error in promise_errors(story)] == [True]
    assert [plan.predicted_s for plan in story.plans] == [pytest.approx(story.iterations[-1].iteration.wall_s)]


def test_costs_that_only_stand_for_unknown_ones_promise_nothing(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, plan_of((("rollout", "trainer"), "0"), costs={"rollout": 1.0, "trainer": 1.0}, predicted=2.0))
    run.iteration(1)
    run.plan("measured", 2, SEPARATE)
    run.iteration(2)
    run.iteration(3)
    story = read_story(run.write())
    assert [story.prediction(number) for number in (0, 1)] == [None, 2.9]
    assert [number for number, _ in promise_errors(story)] == [1]
    # Also where one of them is stated, as long as the others were measured first.
    run.lines[2] = run.lines[2].replace('"rollout": 1.0', '"rollout": 1.5')
    assert read_story(run.write()).prediction(0) is None


def test_a_run_without_any_word_of_nodes_has_the_gpus_of_its_plans(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.tell("began", job="x", iterations=2, seed=0)
    run.plan("first", 1, SEPARATE)
    run.iteration(1)
    run.plan("move", 2, WIDER)
    run.iteration(2)
    story = read_story(run.write())
    assert [(node.name, node.gpus) for node in story.nodes] == [("", 12)]
    assert {row for row in rows_of(run_chart(story)) if row[0] == 0} == {(0, gpu) for gpu in range(12)}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 12))
def test_whatever_is_odd_in_the_events_the_report_is_made(
    tmp_path_factory: pytest.TempPathFactory, seed: int, times: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("odd")
    lines = [json.loads(line) for line in EVENTFUL]
    for _ in range(times):
        event = rng.choice(lines)
        key = rng.choice(list(event))
        choice = rng.randrange(4)
        if choice == 0:
            del event[key]
        elif choice == 1:
            event[key] = rng.choice([None, True, -3, 1e308, float("nan"), "<b>", [], {}, [[1]], {"a": None}])
        elif choice == 2:
            lines.insert(rng.randrange(len(lines)), dict(event))
        else:
            lines.remove(event)
        lines = [one for one in lines if one]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    story = read_story(folder)
    page = page_of(story)
    assert page.rstrip().endswith("</html>")
    assert "<b>" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).replace("<body>", "")
    assert [one.iteration.number for one in story.iterations] == sorted({n.iteration.number for n in story.iterations})


def eventful_lines() -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return (samples.eventful(Path(folder) / "run") / "events.jsonl").read_text().splitlines()


EVENTFUL = eventful_lines()


# ---- the timeline ----------------------------------------------------------------------------------------------------


def test_a_row_does_one_thing_at_a_time_and_only_while_its_node_is_there(eventful: RunStory) -> None:
    chart = run_chart(eventful)
    rows = rows_of(chart)
    assert {row for row in rows if row[0] >= 0} == {(node, gpu) for node in range(3) for gpu in range(4)}
    for (node, _), bars in rows.items():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(bars))
        if node >= 0:
            presence = [(a, chart.end_s if b is None else b) for a, b in chart.nodes[node].presence]
            assert all(any(a - 1e-6 <= bar[0] and bar[1] <= b + 1e-6 for a, b in presence) for bar in bars)


def test_busy_and_idle_add_up_to_the_time_that_gpus_were_there(eventful: RunStory) -> None:
    chart = run_chart(eventful)
    busy = sum(end - start for (node, _), bars in rows_of(chart).items() if node >= 0 for start, end, _, _ in bars)
    assert chart.used_gpu_s == pytest.approx(busy)
    there = sum(
        node.gpus * ((chart.end_s if until is None else until) - since)
        for node in chart.nodes
        for since, until in node.presence
    )
    assert chart.available_gpu_s == pytest.approx(there)
    assert busy < there


def test_a_component_on_fewer_gpus_than_its_group_has_leaves_the_others_idle(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    run.iteration(1)
    event = json.loads(run.lines[-1])
    for measured in event["iteration"]["components"]:
        measured["gpus"] = 2 if measured["component"] == "rollout" else measured["gpus"]
    run.lines[-1] = json.dumps(event)
    rows = rows_of(run_chart(read_story(run.write())))
    assert [any(bar[2] == "rollout" for bar in rows[0, gpu] if bar[1] - bar[0] > 0.5) for gpu in range(4)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_the_data_of_the_script_hold_every_bar_and_mark(eventful: RunStory) -> None:
    chart = run_chart(eventful)
    data = json.loads(json.dumps(chart_data(chart), allow_nan=False))
    assert sum(len(track["bars"]) for track in data["tracks"]) == 5 * sum(len(track.bars) for track in chart.tracks)
    assert len(data["marks"]) == len(eventful.timeline_events)
    assert {mark[2] for mark in data["marks"]} <= set(data["shapes"])
    assert [lane for lane, _ in data["lanes"]] == ["moves", "nodes", "tasks", "workers", "run"]
    assert sum(bool(look & 4) for track in data["tracks"] for look in track["bars"][3::5]) > 0


def test_a_large_run_is_no_large_picture(tmp_path: Path) -> None:
    story = read_story(samples.large(tmp_path, bars=4000))
    chart = run_chart(story)
    assert story.gpus == 256
    assert len(chart.tracks) < 12
    drawn = static_svg(chart, 960, "p", "run")
    assert drawn.count("<path") < 4000 + len(chart.marks)
    assert len(drawn) < 1_500_000


def test_what_was_expected_is_held_against_the_iteration_after(tmp_path: Path) -> None:
    run = Writing(tmp_path)
    run.begin(NODES)
    run.plan("first", 1, SEPARATE)
    for number in range(1, 5):
        run.iteration(number)
        run.tell("decided", iteration=number, what="stay", code="NO_GAIN", reason="", numbers={"iteration_s": 2.0})
    story = read_story(run.write())
    assert expected(story) == [(number, 2.0) for number in range(1, 5)]
    assert expected_errors(story) == [pytest.approx(one.iteration.wall_s / 2 - 1) for one in story.iterations[1:]]
    assert "predicted by the costs measured just before" in page_of(story)


def test_idle_shares_are_those_of_the_group(eventful: RunStory) -> None:
    idle = idle_shares(eventful)
    # Before the first move rollout and the trainers take turns by their data: what one works the other is idle.
    for number in range(2, 10):
        rollout, trainer, reference = (dict(idle[name])[number] for name in ("rollout", "trainer", "reference"))
        assert trainer == reference
        assert rollout + trainer == pytest.approx(1.0, abs=0.12)
    assert dict(idle["rollout"])[36] == pytest.approx(dict(idle["trainer"])[36])


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_says_it_in_ten_lines_at_most(eventful: RunStory) -> None:
    lines = words_of(eventful)
    assert len(lines) <= MAX_LINES
    said = "\n".join(lines)
    for part in (
        "40 iterations in", "2 moves done", "1 rolled back (load failed", "42 × stay", "rollout is 1.3",
        "1 node joined, 2 nodes left, 1 task evicted, workers started 3 times", "2 iterations run again",
        "reward.reward rose",
    ):  # fmt: skip
        assert part in said


def test_the_page_has_plans_moves_decisions_and_curves(eventful: RunStory) -> None:
    page = page_of(eventful)
    for heading in (
        "Timeline", "What happened", "Plans", "Moves", "Decisions", "Predicted against measured", "Cost of components",
        "Idle share", "Reward", "Figures",
    ):  # fmt: skip
        assert f">{heading}</h2>" in page
    assert page.count("reward.reward</h3>") == 1
    assert "iterations 1 to 20" in page
    assert "eval-1 of priority 12 takes its slot from priority 8" in page
    assert "stay × 8" in page
    assert "gamma 0-3" in page


def test_metrics_are_rewards_or_those_asked_for(eventful: RunStory) -> None:
    assert metric_names(eventful) == ["reward.reward"]
    assert metric_names(eventful, ["trainer.loss", "perfect"]) == ["trainer.loss", "reward.perfect"]
    page = page_of(eventful, metrics=["trainer.loss"])
    assert "trainer.loss</h3>" in page
    assert "reward.reward</h3>" not in page
    assert "None of the requested metrics" in page_of(eventful, metrics=["no"])


def test_names_and_reasons_never_become_markup(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>&\"'<b>"
    run = Writing(tmp_path)
    run.begin([[bad, 8, bad]], job=bad)
    plan = plan_of(((bad,), "0-3"), costs={bad: 1.0, "trainer": 0.2}, predicted=2.0)
    run.plan(bad, 1, plan)
    run.iteration(1)
    run.tell("decided", iteration=1, what=bad, code=bad, reason=bad, numbers={}, plan=plan)
    run.tell("move", move=1, state="begun", iteration=1, code=bad, reason=bad, changes=[[bad, bad, [], []]], plan=plan)
    run.tell("move", move=1, state="stage", stage=bad, took_s=1.0)
    run.tell("task", task=bad, pool=bad, what=bad, code=bad, reason=bad)
    run.tell("worker", component=bad, worker=bad, state=bad, code=bad, reason=bad)
    run.tell("lost", component=bad, why=bad, after=0, void=1)
    run.tell("iteration", iteration={"number": 1, "wall_s": 1.0}, metrics={bad: {f"reward{bad}": 1.0}}, bars=[])
    run.tell("ended", state=bad, code=bad, reason=bad, iteration=0)
    page = run_report(read_story(run.write()), title=bad, command=bad)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<b>" not in page.replace("<body>", "")
    assert "alert(1)</script>" not in page


def test_nothing_is_loaded_and_only_our_script_may_run(eventful: RunStory) -> None:
    page = page_of(eventful)
    assert "default-src 'none'" in page
    assert "'sha256-" in page
    assert "</" not in script(SCRIPT)
    assert re.findall(r"(?:https?:)?//[a-z]", page.replace("http://www.w3.org/2000/svg", "")) == []
    assert "sha256" in page_head("other")


def test_a_curve_keeps_its_extremes_and_shows_one_far_out_at_the_edge() -> None:
    points = [(x / 100, float(x % 37)) for x in range(5000)]
    kept = thinned(points)
    assert len(kept) <= 4 * 51
    for column in range(50):
        mine = [y for x, y in points if int(x) == column]
        shown = [y for x, y in kept if int(x) == column]
        assert (min(shown), max(shown)) == (min(mine), max(mine))
    curve = ReportCurve("measured", tuple((float(i), 100.0 if i == 1 else 1.0) for i in range(1, 40)))
    drawn = curves_svg(CurveChart("t", (curve,), "seconds", "d"), 960, "p")
    assert "100.0 s" in drawn
    assert "100 s<" not in drawn  # the axis is made for the others


@pytest.mark.parametrize("points", [(), ((3.0, 0.0),), ((1.0, -2.0), (2.0, -2.0)), ((1.0, 1e-9), (2.0, 1e9))])
@pytest.mark.parametrize("unit", ["seconds", "share", "number"])
def test_curves_of_little_or_of_much_are_drawn(points: Any, unit: Any) -> None:
    drawn = curves_svg(CurveChart("t", (ReportCurve("c", points),), unit, "d", ((1.0, "plan"),)), 420, "p")
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("info", "")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_one_file_and_says_what_the_run_did(tmp_path: Path, capsys: Any) -> None:
    folder = samples.eventful(tmp_path / "grpo")
    assert command(["show", str(folder), "--report", str(folder / "report.html")]) == 0
    said = capsys.readouterr()
    assert "40 iterations in" in said.out
    assert "<h1>grpo</h1>" in (folder / "report.html").read_text(encoding="utf-8")
    other = tmp_path / "x.html"
    assert (
        command(["show", str(folder), "--report", str(other), "--metric", "loss", "--metric", "no", "-f", "json"]) == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["iterations"] == 40
    assert "no metric no in this run" in said.err
    assert "trainer.loss</h3>" in other.read_text(encoding="utf-8")


def test_a_folder_without_a_run_ends_in_2(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    for name, what in (
        ("none", "there is no such folder"),
        (".", "there is no run in this folder"),
        ("file", "a file"),
    ):
        assert command(["show", str(tmp_path / name), "--report", str(tmp_path / "report.html")]) == 2
        assert what in capsys.readouterr().err
    folder = samples.eventful(tmp_path / "run")
    assert command(["show", str(folder), "--report", str(tmp_path / "no" / "x.html")]) == 2
