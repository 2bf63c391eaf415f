"""What is asked of a run from outside, by files in its folder: taken once and whole, and never by one that is gone."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

import run_report_samples as samples
from dashboard_pages import Growing
from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.render.html.run.story import RunStory
from trimtab.rollout import EngineRollout
from trimtab.runtime.run import folder as run_folder
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.folder import event_log_path, load_path, read_event_log, read_load
from trimtab.runtime.run.job_file import load_run
from trimtab.runtime.run.run import Run
from waiting import until

WAIT_S = 240.0
JOB = """
cluster: {nodes: 1, gpus_per_node: 2}
workflow:
  batches: 2
  components:
    rollout: {seconds: {1: 0.1, 2: 0.06}, emulate: {noise: 0.02}}
    trainer: {after: rollout, seconds: {1: 0.1, 2: 0.06}, emulate: {noise: 0.02}}
run: {iterations: 100000, loop: {mode: advise, least_iterations: 2}}
"""


def test_an_ask_is_taken_once_oldest_first_and_what_is_half_written_is_not_there(tmp_path: Path) -> None:
    for number in range(3):
        run_folder.send_request(tmp_path, run_folder.RUN_QUEUE, {"ask": "replan", "why": str(number)})
    place = tmp_path / run_folder.REQUESTS / run_folder.RUN_QUEUE
    (place / ".99999999999999999999-0.json.1.tmp").write_text('{"ask": "rep')
    (place / "odd.json").write_text("[1]")
    (place / "torn.json").write_text('{"ask": "rep')
    assert [one.get("why") for one in run_folder.take_requests(tmp_path, run_folder.RUN_QUEUE)] == [
        "0",
        "1",
        "2",
        None,
        None,
    ]
    assert run_folder.take_requests(tmp_path, run_folder.RUN_QUEUE) == []
    assert len(list(place.iterdir())) == 1
    run_folder.clear_requests(tmp_path)
    assert not (tmp_path / run_folder.REQUESTS).exists()


def test_a_run_that_is_gone_or_does_not_look_is_asked_for_nothing(tmp_path: Path) -> None:
    for _ in range(run_folder.MAX_WAITING):
        run_folder.send_request(tmp_path, run_folder.RUN_QUEUE, {})
    with pytest.raises(UnreachableError, match="64 requests wait already"):
        run_folder.send_request(tmp_path, run_folder.RUN_QUEUE, {})
    held = {"owner": "run", "host": socket.gethostname(), "pid": os.getpid(), "born": -1}
    (tmp_path / "lock").write_text(json.dumps(held))
    with pytest.raises(UnreachableError, match="ended, or was killed"):
        run_folder.send_request(tmp_path, run_folder.workers_queue("rollout"), {})
    (tmp_path / "lock").write_text(json.dumps({**held, "host": "another machine"}))
    run_folder.send_request(tmp_path, run_folder.workers_queue("rollout"), {})
    with pytest.raises(InputError, match="no component"):
        run_folder.workers_queue("../../elsewhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run_folder.send_request(tmp_path / "file", run_folder.RUN_QUEUE, {})


def test_the_page_of_a_run_that_was_killed_says_so_and_offers_nothing(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    source = DashboardSource(run.folder)
    source.look()
    assert "drain-worker" in source.whole()["changes"]
    held = {"owner": "run", "host": socket.gethostname(), "pid": os.getpid(), "born": -1}
    (run.folder / "lock").write_text(json.dumps(held))
    told = source.look()
    assert told is not None
    assert "its process is gone" in told["panels"]["standing"]
    assert told["changes"] == []
    run.tell("ended", state="stopped", code="BY_HAND", reason="Ctrl-C", iteration=5)
    source.look()
    with pytest.raises(UnreachableError, match="the run has ended"):
        source.change("replan", {})
    story = source.story("worker", "rollout w0")
    assert story is not None
    assert story["offers"] == []


def test_a_run_answers_what_the_dashboard_of_another_process_asks_and_forgets_what_was_asked_before(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    folder = tmp_path / "run"
    run_folder.send_request(folder, run_folder.RUN_QUEUE, {"ask": "replan", "why": "of yesterday"})
    run = Run(load_run(tmp_path / "job.yaml"), folder)
    thread = threading.Thread(target=run.run)
    thread.start()
    try:
        source = until(lambda: folder.exists() and DashboardSource(folder))

        def shown() -> str:
            source.look()
            return str(source.whole()["panels"]["events"])

        until(lambda: "the first plan" in shown())
        assert source.whole()["panels"]["standing"] == "Running."
        assert "requested" in source.change("replan", {})
        run_folder.send_request(folder, run_folder.RUN_QUEUE, {"ask": "a cake"})
        until(lambda: "is the plan still right? (asked on the dashboard)" in shown())
        until(lambda: "not understood" in shown())
        assert source.board is not None
        asked_at = len(source.board.story.decisions)
        until(lambda: shown() and source.board is not None and len(source.board.story.decisions) > asked_at)
        assert "of yesterday" not in shown()
        with pytest.raises(InputError, match="is not available here"):
            source.change("drain-worker", {"worker": "rollout-1"})
    finally:
        run.stop()
        thread.join(WAIT_S)
    source.look()
    with pytest.raises(UnreachableError, match="the run has ended"):
        source.change("replan", {})
    assert not (folder / run_folder.REQUESTS).exists()


def test_a_worker_is_drained_and_serves_again_as_asked_and_a_refusal_is_told_with_its_reason(tmp_path: Path) -> None:
    place = Place("rollout", gpus=2, devices=(0, 1), near=Path(__file__).parents[2] / "helpers", folder=tmp_path)
    rollout = EngineRollout(place=place, ask="engines_for_runs:Asking", engine="engines_for_runs:Slow")
    whom = run_folder.workers_queue("rollout")

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in rollout.workers()}

    try:
        until(lambda: set(states().values()) == {"active"})
        assert until(lambda: read_load(load_path(tmp_path, "rollout"))) == {"rollout-1": (0, 64), "rollout-2": (0, 64)}
        run_folder.send_request(tmp_path, whom, {"ask": "drain", "worker": "rollout-1", "why": "asked in a test"})
        until(lambda: states()["rollout-1"] != "active")
        run_folder.send_request(tmp_path, whom, {"ask": "drain", "worker": "rollout-2"})
        run_folder.send_request(tmp_path, whom, {"ask": "drain", "worker": "nobody"})
        run_folder.send_request(tmp_path, whom, {"ask": "drain", "worker": "rollout-2", "deadline_s": "soon"})
        run_folder.send_request(tmp_path, whom, {"ask": "drain", "worker": "rollout-2", "deadline_s": float("nan")})

        def told(code: str) -> list[str]:
            lines, _ = read_event_log(event_log_path(tmp_path, "rollout"))
            return [f"{one['worker']}: {one['reason']}" for one in lines if one["code"] == code]

        until(lambda: len(told("REFUSED")) == 3)
        assert told("REFUSED")[0].startswith("rollout-2: refused: worker rollout-2 cannot be lent out")
        assert told("TAKEN")[0] == "rollout-1: asked in a test"
        assert states()["rollout-2"] == "active"
        run_folder.send_request(tmp_path, whom, {"ask": "resume", "worker": "rollout-1"})
        until(lambda: states()["rollout-1"] == "active")
    finally:
        rollout.close()
    assert not load_path(tmp_path, "rollout").exists()


def test_loads_that_nobody_writes_any_more_are_not_shown(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    path = load_path(run.folder, "rollout")
    path.write_text('{"w0": [7, 16]}')
    source = DashboardSource(run.folder)
    source.look()
    assert "7 of 16" in source.whole()["panels"]["workers"]
    path.write_text('{"w0": "odd"}')
    told = source.look()
    assert told is not None
    assert set(told) == {"panels"}
    assert set(told["panels"]) == {"workers"}
    assert "of 16" not in source.whole()["panels"]["workers"]
    path.write_text('{"w0": [7, 16]}')
    source.look()
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert source.look() is not None
    assert "7 of 16" not in source.whole()["panels"]["workers"]


@pytest.mark.parametrize("given", [True, -1, 1e9, "soon", float("nan")])
def test_a_deadline_is_a_number_of_seconds(tmp_path: Path, given: object) -> None:
    source = DashboardSource(Growing(tmp_path / "run").start().folder)
    source.look()
    with pytest.raises(TrimtabError, match="deadline_s is a number of seconds"):
        source.change("drain-worker", {"worker": "rollout w0", "deadline_s": given})
    with pytest.raises(InputError, match="no such worker"):
        source.change("drain-worker", {"worker": "rollout w9"})


def test_a_move_that_was_broken_off_and_is_told_on_is_one_move() -> None:
    story = RunStory()
    at = {"at": samples.AT, "t_s": 1.0}
    for event in (
        {"event": "move", "move": 2, "state": "begun", "changes": []},
        {"event": "move", "move": 2, "state": "rolling back", "stage": "place", "reason": "a node was lost"},
        {"event": "resumed", "after": 0, "void": 0},
        {"event": "move", "move": 2, "state": "rolling back", "stage": "place", "reason": "a node was lost"},
        {"event": "move", "move": 2, "state": "rolled back", "took_s": 0.0},
    ):
        story.take({**event, **at})
    assert [(move.id, move.state) for move in story.moves] == [(2, "rolled back")]
