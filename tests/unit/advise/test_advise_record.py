"""What `trimtab advise` has seen is kept and remembered: nothing is told twice, whenever it is stopped and started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advise_world import CASES, NEMO, RLINF, VERL, Case, Told, measured, nemo_blocks, profile, verl_console, verl_jsonl
from trimtab.cli.app import run
from trimtab.core.errors import InputError
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import RunLog
from trimtab.formats.logs.follow_costs import RunConfig
from trimtab.model.run import ReplanRules
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.render.html.run.story import read_story
from trimtab.render.text.advise import as_data
from trimtab.runtime.advise.analysis import AdviceTracker, FollowEvent
from trimtab.runtime.advise.follower import ClusterSample, Follower, FollowFrame, RestartHook, open_tail
from trimtab.runtime.advise.record import FollowRecord, default_folder
from trimtab.runtime.advise.samples import EngineMetricsReader

PATIENCE_S = 240.0
RULES = ReplanRules(assumed_move_s=120.0)
ids = [case.framework for case in CASES]


class Seen:
    """What one start of the command told."""

    def __init__(self, frame: FollowFrame, record: FollowRecord) -> None:
        self.frame = frame
        self.news: list[FollowEvent] = list(frame.news)
        self.past = record.past

    def whats(self) -> list[tuple[str, int]]:
        return [(one.what, one.step) for one in self.news]


def look(
    folder: Path,
    log: Path,
    case: Case = VERL,
    *,
    overrides: tuple[str, ...] = (),
    around: ClusterSample | None = None,
    once: bool = False,
) -> Seen:
    """Start the command on a log as it is, look once, and stop."""
    framework = logs.FRAMEWORKS[case.framework]
    config = RunConfig(case.path(log.parent), (*case.overrides, *overrides))
    known = measured(case.points) if case.points else None
    advising = AdviceTracker(framework, config, known, RULES, 2)
    with open_tail([log]) as tail, closing(FollowRecord(folder, [log], config.path, config.overrides)) as record:
        follower = Follower(tail, RunLog(framework), advising, EngineMetricsReader([]), at_most_s=0.0, record=record)
        frame = follower.once() if once else next(follower.frames())
        if around is not None:
            frame = replace(frame, around=around)
        record.write_frame(frame, follower.advising, as_data(frame, follower.history))
        return Seen(frame, record)


def events(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one for one in lines if not kind or one["event"] == kind]


def numbers(folder: Path) -> list[int]:
    return [one["iteration"]["number"] for one in events(folder, "iteration")]


def rows(told: Told) -> list[str]:
    return verl_jsonl(told).splitlines(keepends=True)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_an_advised_run_is_a_run_for_report_top_and_dashboard(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    log.write_text(case.write(case.told(saves=20)))
    seen = look(folder, log, case, once=True)
    story = read_story(folder)
    assert not story.unparsed_lines
    assert [one.iteration.number for one in story.iterations] == list(range(1, 61))
    assert story.end_s == pytest.approx(sum(one.iteration.wall_s for one in story.iterations))
    assert [one.iteration.extra for one in story.iterations[:3]] == [("warm-up",), ("warm-up",), ()]
    assert set(story.components) == set(case.seconds)
    last = story.iterations[-1].iteration
    bars = {bar.component: bar.end - bar.start for bar in story.bars if bar.iteration == 60 and bar.doing == "run"}
    assert bars == {one.component: pytest.approx(min(one.busy_s, last.wall_s), abs=1e-4) for one in last.components}
    (advised,) = [one for one in story.timeline_events if one.kind == "advice"]
    assert [advised.title.partition(": ")[2], advised.code] == [seen.news[0].advice.plan.describe(), "DRIFTED"]  # type: ignore[union-attr]
    at = next(one.end_s for one in story.iterations if one.iteration.number == seen.news[0].step)
    assert advised.t_s == pytest.approx(at)
    # What was expected follows what was measured, though the log was read in one go.
    assert story.decisions[-1].numbers["iteration_s"] > 1.1 * story.decisions[0].numbers["iteration_s"]
    for words in (["show", str(folder), "--report", str(folder / "report.html")], ["show", str(folder)]):
        assert run(words) == 0
    shown = capsys.readouterr().out
    assert "60 iterations" in shown
    assert f"advice since step {seen.news[0].step}" in shown
    with closing(DashboardSource(folder)) as source:
        told = source.look()
        assert told is not None
        panels = told["whole"]["panels"]
        assert "Add to the run" in panels["advice"]
        assert told["whole"]["changes"] == []  # a log can be asked for nothing
        assert source.look() is None


def test_waits_are_drawn_as_gpus_in_use_and_never_as_own_time(tmp_path: Path) -> None:
    log, folder, config = tmp_path / "run.log", tmp_path / "seen", tmp_path / "nemo.yaml"
    config.write_text(
        NEMO.config.replace("colocated: {enabled: true}", "colocated: {enabled: false, resources: {gpus_per_node: 4}}")
        .replace("env: {reward_model: {enabled: true, resources: {num_nodes: 1, gpus_per_node: 2}}}\n", "")
        .replace("num_generations_per_prompt: 8", "num_generations_per_prompt: 8, async_grpo: {enabled: true}")
    )
    told = Told({"exposed": 2.0, "logprobs": 12.0, "policy": 45.0}, noisy=False, steps=14)
    log.write_text(nemo_blocks(told))
    case = Case("nemo_rl", config.read_text(), (), told.seconds, None, "policy", 1.0, nemo_blocks)
    look(folder, log, case, once=True)
    story = read_story(folder)
    last = story.iterations[-1].iteration
    waited = {one.component: (one.busy_s, one.wait_s) for one in last.components}
    assert waited["generation"] == (0.0, 2.0)
    assert waited["policy"] == (45.0, 0.0)
    spans = {bar.component: bar.end - bar.start for bar in story.bars if bar.iteration == last.number}
    assert spans["generation"] == pytest.approx(last.wall_s)
    assert spans["policy"] == pytest.approx(45.0)
    with closing(DashboardSource(folder)) as source:
        whole = source.look()
        assert whole is not None
        assert "waiting, not a cost" in whole["whole"]["panels"]["advice"]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_same_advice_is_not_given_again_by_a_command_that_is_started_anew(case: Case, tmp_path: Path) -> None:
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    log.write_text(case.write(case.told()))
    first = look(folder, log, case)
    assert [one.what for one in first.news] == ["advised"]
    before = len(events(folder, "decided"))
    again = look(folder, log, case)
    assert again.news == []
    assert again.frame.picture.advice is not None  # it stands, and is shown
    assert again.frame.picture.advice.overrides == first.news[0].advice.overrides  # type: ignore[union-attr]
    assert sorted(numbers(folder)) == list(range(1, 61))
    assert len(events(folder, "decided")) == before


def test_advice_that_comes_back_is_said_to_be_that_of_before(tmp_path: Path) -> None:
    def on_and_off(step: int) -> dict[str, float]:
        return {"rollout": 3.0 if 15 < step <= 35 or step > 60 else 1.0}

    log, folder = tmp_path / "run.log", tmp_path / "seen"
    log.write_text(RLINF.write(Told(RLINF.seconds, on_and_off, steps=85)))
    seen = look(folder, log, RLINF)
    assert [one.what for one in seen.news] == ["advised", "withdrawn", "stands again"]
    assert seen.news[2].sentence.startswith(f"that of step {seen.news[0].step}: ")
    titles = [one.title for one in read_story(folder).timeline_events]
    assert any(title.startswith("the advice is void") for title in titles)


def test_a_folder_cut_off_at_any_byte_tells_everything_once(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(verl_jsonl(VERL.told(steps=42)))
    look(tmp_path / "whole", log)
    data = (tmp_path / "whole" / "events.jsonl").read_bytes()
    folder = tmp_path / "cut"
    for cut in (0, data.index(b"\n"), len(data) // 3, data.index(b'"advised"', 400) + 5, len(data) - 1):
        folder.mkdir(exist_ok=True)
        (folder / "events.jsonl").write_bytes(data[:cut])
        (folder / "summary.json").write_bytes(b'{"advised": tr')
        seen = look(folder, log)
        assert len(seen.news) <= 1, cut
        assert sorted(numbers(folder)) == list(range(1, 43)), cut
        assert len([one for one in events(folder, "news") if one["what"] == "advised"]) == 1, cut
    assert look(folder, log).news == []


def test_steps_that_were_written_while_nobody_looked_are_told_when_somebody_does(tmp_path: Path) -> None:
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    told = rows(VERL.told())
    log.write_text("".join(told[:20]))
    assert look(folder, log).news == []
    log.write_text("".join(told))
    assert [one.what for one in look(folder, log).news] == ["advised"]
    assert numbers(folder) == list(range(1, 61))
    # A restart that truncated the log in the meantime: what follows is run again.
    log.write_text("".join(rows(VERL.steady(9, steps=12))))
    look(folder, log)
    story = read_story(folder)
    assert [one.iteration.number for one in story.iterations] == list(range(1, 13))
    assert [one.title for one in story.timeline_events if one.kind == "resumed"] == [
        "resumed after iteration 0; 60 iterations after that are run again"
    ]


# ---- the user's command ----------------------------------------------------------------------------------------------


def hooked(folder: Path, log: Path, told: list[str], *, status: int = 0) -> str:
    """Follow a log that grows past a checkpoint, with a command; how often it was run."""
    framework = logs.FRAMEWORKS["verl"]
    config = RunConfig(VERL.path(log.parent), VERL.overrides)
    advising = AdviceTracker(framework, config, measured(VERL.points or {}), RULES, 2)
    ran = log.parent / "ran"
    with open_tail([log]) as tail, closing(FollowRecord(folder, [log], config.path, config.overrides)) as record:
        follower = Follower(
            tail, RunLog(framework), advising, EngineMetricsReader([]), every_s=0.05, at_most_s=60, record=record
        )
        follower.least_gain = 0.05
        command = f"echo x >> {ran}; exit {status}"
        follower.hook = RestartHook(command, "config.yaml", 60.0, record.past.ran_for, record.record_hook_start)
        for at, frame in enumerate(follower.frames()):
            record.write_frame(frame, follower.advising, as_data(frame, follower.history))
            if at == 0:
                with log.open("a") as file:
                    file.write("".join(told))
            enough = sum(len(one.steps) for one in [frame]) == 0 and at > 3 and not follower.hook.runs
            if enough or at > 400:
                break
    return ran.read_text() if ran.exists() else ""


def test_the_users_command_is_not_run_again_for_the_same_advice_after_a_restart_of_ours(tmp_path: Path) -> None:
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    told = rows(VERL.told(saves=10, steps=80))
    log.write_text("".join(told[:45]))
    assert hooked(folder, log, told[45:55], status=3) == "x\n"
    assert hooked(folder, log, told[55:], status=3) == "x\n"  # the checkpoints at 60, 70 and 80 come and go
    assert [one["what"] for one in events(folder, "news") if one["what"].startswith("hook")] == [
        "hook started",
        "hook ended",
    ]


@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "appended"])
@pytest.mark.parametrize("seen_by_us", [True, False], ids=["seen", "unseen"])
def test_after_the_users_command_a_restart_of_ours_knows_the_placement_in_place(
    truncated: bool, seen_by_us: bool, tmp_path: Path
) -> None:
    """The run was started anew with the advice, whether while we looked or while nobody did."""
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    told = rows(VERL.told(saves=50))
    log.write_text("".join(told[:45]))
    advised = look(folder, log).news[0].advice
    assert advised is not None
    assert hooked(folder, log, told[45:50]) == "x\n"
    sizes = {one.name: len(one.gpus) for one in advised.plan.components}
    points = VERL.points or {}
    now = {name: points[name][min(points[name], key=lambda gpus: abs(gpus - sizes[name]))] for name in points}
    again = "".join(rows(Told(now, lambda step: {"reward": VERL.to}, steps=14, seed=7)))
    log.write_text(again if truncated else log.read_text() + again)
    if seen_by_us:
        look(folder, log)
    seen = look(folder, log)
    assert [one.gpus for one in seen.frame.picture.sharing] == [16, 8]
    assert seen.frame.picture.advice is None
    assert not [one for one in seen.news if one.what != "restarted"]
    # The user says otherwise: what is told on the command line holds.
    other = look(folder, log, overrides=("trainer.nnodes=3",))
    assert [one.gpus for one in other.frame.picture.sharing] == [24]


def test_a_command_is_not_run_where_that_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = tmp_path / "run.log", tmp_path / "seen"
    told = rows(VERL.told(saves=50))
    log.write_text("".join(told[:45]))
    monkeypatch.setattr("trimtab.runtime.run.folder.RunFolder.all_written", lambda self: False)
    assert hooked(folder, log, told[45:50]) == ""
    assert any("cannot be recorded" in one["reason"] for one in events(folder, "news"))


# ---- engines, nodes, folders -----------------------------------------------------------------------------------------


def test_engines_and_nodes_that_come_and_go_are_told_once(tmp_path: Path) -> None:
    from trimtab.runtime.advise.samples import EngineSample, NodeUtilization

    log, folder = tmp_path / "run.log", tmp_path / "seen"
    log.write_text(verl_console(VERL.steady(1, steps=14)))
    url, node = "http://10.0.0.1:8000", NodeUtilization("one", 8, 0, busy=((0, 0.9), (1, 0.4)))
    fine = ClusterSample((EngineSample(url, 12.0, 3.0, 0.5, 900.0),), (node,), (0.25,))
    gone = ClusterSample((EngineSample(url, fault="connection refused", silent_s=31.0),), "it went away", ())
    for around in (fine, fine, gone, gone, fine):
        look(folder, log, around=around)
        with closing(DashboardSource(folder)) as source:
            whole = source.look()
            assert whole is not None
            panel = whole["whole"]["panels"]["around"]
            silent = around is gone
            assert ("does not answer for 31.0 s" in panel) is silent
            assert ("it went away" in panel) is silent
            assert ("90 %, 40 %" in panel) is not silent
            assert ("25 % of the time" in panel) is not silent
    assert [one["state"] for one in events(folder, "worker")] == ["serving", "lost", "serving"]
    assert events(folder, "worker")[1]["reason"] == "connection refused"


def test_nodes_of_the_cluster_that_join_or_go_are_told_and_silence_is_no_loss(tmp_path: Path) -> None:
    from trimtab.runtime.advise.samples import NodeUtilization

    log, folder = tmp_path / "run.log", tmp_path / "seen"
    log.write_text(verl_console(VERL.steady(1, steps=4)))
    one, two = NodeUtilization("one", 8, 0), NodeUtilization("two", 8, 8)
    seen = look(folder, log)
    framework = logs.FRAMEWORKS["verl"]
    advising = AdviceTracker(framework, RunConfig(VERL.path(tmp_path), VERL.overrides), None, RULES, 2)
    with closing(FollowRecord(folder, [log], VERL.path(tmp_path), VERL.overrides)) as record:
        for nodes in ((one,), (one,), (one, two), "it does not answer", "it does not answer", (two,)):
            record.write_frame(replace(seen.frame, around=ClusterSample(nodes=nodes)), advising, {})
    assert [event["reason"] for event in events(folder, "told")] == [
        "node two is there (8 GPUs)",
        "it does not answer",
        "the cluster answers again",
        "node one is gone",
    ]


def test_the_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    log, other = tmp_path / "run.log", tmp_path / "other.log"
    log.write_text(verl_jsonl(VERL.steady(1, steps=14)))
    other.write_text(verl_jsonl(VERL.steady(2, steps=14)))
    look(tmp_path / "seen", log)
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "events.jsonl").write_text('{"event": "began", "job": "grpo", "iterations": 4}\n')
    before = (ours / "events.jsonl").read_bytes()
    for folder, followed in ((tmp_path / "seen", other), (ours, log)):
        with pytest.raises(InputError, match="another run"):
            look(folder, followed)
    assert (ours / "events.jsonl").read_bytes() == before
    with (
        closing(FollowRecord(tmp_path / "seen", [log], Path("config.yaml"), ())),
        pytest.raises(InputError, match="another"),
    ):
        look(tmp_path / "seen", log)
    assert default_folder([log]) == default_folder([log])
    assert default_folder([log]) != default_folder([other])


def test_nothing_is_written_where_the_runs_own_files_are(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / "events.jsonl"  # a name that we use too
    log.write_text(verl_jsonl(VERL.steady(1, steps=3)))
    before = log.read_bytes()
    for folder, followed in ((log.parent, log), (log.parent, log.parent), (log.parent / "seen", log.parent)):
        with pytest.raises(InputError, match="own files"):
            FollowRecord(folder, [followed], tmp_path / "config.yaml", ())
    assert log.read_bytes() == before
    assert os.listdir(log.parent) == ["events.jsonl"]


def test_a_folder_in_which_nothing_came_to_stand_is_not_left_behind(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("nothing yet\n")
    look(tmp_path / "runs" / "seen", log)
    assert not (tmp_path / "runs").exists()


def test_killed_at_any_moment_it_goes_on_where_it_was_and_the_run_never_notices(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    log = place / "run.log"
    told = rows(VERL.told())
    log.write_text("".join(told[:12]))
    command = [
        sys.executable, "-m", "trimtab", "advise", str(VERL.path(tmp_path)), *VERL.overrides, "--follow", str(log),
        "--profile", str(profile(tmp_path, VERL.points or {})), "--restart-s", "120", "--every", "0.05",
        "--folder", "seen",
    ]  # fmt: skip
    folder = tmp_path / "seen"
    said = ""
    for upto in (30, 48, 60):
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as one:
            with log.open("a") as file:
                file.write("".join(told[len(log.read_text().splitlines()) : upto]))
            deadline = time.monotonic() + PATIENCE_S
            while not (folder / "events.jsonl").exists() or upto not in _whole(folder):
                assert one.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            one.send_signal(signal.SIGKILL)
            assert one.stdout is not None
            said += one.stdout.read()
    assert sorted(numbers(folder)) == list(range(1, 61))
    assert said.count("advice: reward takes") <= 1
    assert len([one for one in events(folder, "news") if one["what"] == "advised"]) == 1
    assert log.read_text() == "".join(told)
    assert os.listdir(place) == ["run.log"]


def _whole(folder: Path) -> list[int]:
    lines = (folder / "events.jsonl").read_bytes().split(b"\n")[:-1]
    return [one["iteration"]["number"] for line in lines if (one := json.loads(line))["event"] == "iteration"]
