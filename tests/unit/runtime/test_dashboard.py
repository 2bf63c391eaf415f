"""What the dashboard knows of a run that grows, and what an open page is told of it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import run_report_samples as samples
from dashboard_pages import Growing
from trimtab.cli import app as cli
from trimtab.core.errors import InputError
from trimtab.render.html.dashboard import panels as dashboard
from trimtab.render.html.dashboard.board import RunBoard
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.render.text.top import picture
from trimtab.runtime.run.folder import EventTail


def applied(before: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """What a page shows after it was told something, as its script does it."""
    if "whole" in told:
        return json.loads(json.dumps(told["whole"]))
    state = {**before, **{key: told[key] for key in ("note", "notes", "changes") if key in told}}
    state["panels"] = {**before["panels"], **told.get("panels", {})}
    added = told.get("timeline", {})
    line = {**before["timeline"]}
    for key in ("keys", "nodes", "cpu", "lanes", "moves", "open", "end"):
        line[key] = added.get(key, line[key])
    if added.get("anew"):
        line = {**line, "tracks": [], "marks": []}
    tracks = {json.dumps(track["rows"]): list(track["bars"]) for track in line["tracks"]}
    for track in added.get("tracks", ()):
        bars = tracks.setdefault(json.dumps(track["rows"]), [])
        for at in range(0, len(track["bars"]), 5):
            start = max(track["bars"][at], bars[-4] if bars else 0)
            if track["bars"][at + 1] > start:
                bars += [start, *track["bars"][at + 1 : at + 5]]
    line["marks"] = [*line["marks"], *added.get("marks", ())]
    state["timeline"] = {**line, "tracks": [{"rows": json.loads(key), "bars": bars} for key, bars in tracks.items()]}
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for state in (one, other):
        state["timeline"]["tracks"].sort(key=lambda track: json.dumps(track["rows"]))
        state["timeline"]["marks"].sort(key=lambda mark: mark[6])
    assert one == other


def test_a_page_that_was_told_every_change_shows_what_one_that_is_opened_now_shows(tmp_path: Path) -> None:
    lines = (samples.eventful(tmp_path / "done") / "events.jsonl").read_text().splitlines(keepends=True)
    growing = tmp_path / "growing"
    growing.mkdir()
    source = DashboardSource(growing)
    shown: dict[str, Any] = {}
    for at in range(0, len(lines), 7):
        with open(growing / "events.jsonl", "a") as file:
            file.writelines(lines[at : at + 7])
        told = source.look()
        assert told is not None
        shown = applied(shown, json.loads(json.dumps(told)))
        fresh = DashboardSource(growing)
        fresh.look()
        same(json.loads(json.dumps(shown)), json.loads(json.dumps(fresh.whole())))
        same(json.loads(json.dumps(shown)), json.loads(json.dumps(source.whole())))
    assert source.look() is None


def test_a_change_is_small_beside_the_whole(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    source = DashboardSource(run.folder)
    source.look()
    run.iteration(6)
    told = source.look()
    assert told is not None
    assert set(told) == {"panels", "timeline"}
    assert sum(len(track["bars"]) for track in told["timeline"]["tracks"]) <= 5 * 8


def test_stories_of_a_task_a_worker_a_node_a_component_a_move_and_a_mark(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    run.preempt()
    run.join_and_move()
    source = DashboardSource(run.folder)
    source.look()
    state = source.whole()
    task = source.story("task", "rollout-w1")
    assert task is not None
    assert ["evicted", "1 time"] in task["facts"]
    assert task["chapters"][0][1:] == [
        "rollout-w1 (run-grpo): evicted",
        "PRIORITY: eval-1 of priority 12 takes its slot from priority 8",
    ]
    worker = source.story("worker", "rollout w1")
    assert worker is not None
    assert [chapter[1].rpartition(" ")[2] for chapter in worker["chapters"]] == ["serving", "draining"]
    node = source.story("node", "gamma")
    assert node is not None
    assert ["runs", "reference on GPU 0-3; trainer on GPU 0-3"] in node["facts"]
    assert "joined" in node["chapters"][0][1]
    move = source.story("move", "1")
    assert move is not None
    assert dict(move["facts"])["state"] == "arrived"
    assert dict(move["facts"])["stages"].startswith("drain 0 s, save 400 ms")
    component = source.story("component", "rollout")
    assert component is not None
    assert dict(component["facts"])["runs on"] == "6 GPUs of alpha, beta"
    evicted = next(mark for mark in state["timeline"]["marks"] if mark[2] == "evicted")
    found = source.story("mark", str(evicted[6]))
    assert found is not None
    assert (found["kind"], found["name"]) == ("task", "rollout-w1")
    assert source.story("node", "nobody") is None
    assert source.story("mark", "9" * 30) is None
    assert source.story("__class__", "x") is None


def test_what_is_told_late_does_not_take_the_place_of_what_is_newer(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    board = RunBoard()
    for line in run.lines:
        board.take(json.loads(line))
    late = {
        "event": "worker",
        "at": samples.AT,
        "t_s": 0.5,
        "component": "rollout",
        "worker": "w0",
        "state": "starting",
    }
    board.take({**late, "t_s": run.t, "state": "active"})
    board.take(late)
    assert board.workers["rollout w0"].state == "active"
    told = board.story_of("worker", "rollout w0")
    assert told is not None
    assert len(told["chapters"]) == 3


def test_torn_lines_wait_odd_ones_are_counted_and_a_shorter_file_is_another_run(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    events = run.folder / "events.jsonl"
    source = DashboardSource(run.folder)
    source.look()
    with open(events, "a") as file:
        file.write('{"event": "told", "at": 1, "code": "X", ')
        file.flush()
        assert source.look() is None
        file.write('"reason": "whole now"}\nnot json\n[1]\n{"event": "plan"}\n')
    state = source.look()
    assert state is not None
    assert "whole now" in state["panels"]["events"]
    assert state["notes"] == ["3 lines of events.jsonl could not be parsed"]
    text = events.read_text()
    events.write_text("".join(text.splitlines(keepends=True)[:3]))
    again = source.look()
    assert again is not None
    assert again == {"whole": source.whole()}
    assert again["whole"]["notes"] == []
    os.unlink(events)
    gone = source.look()
    assert gone is not None
    assert gone["whole"]["timeline"]["tracks"] == []


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        EventTail(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file, not the folder"):
        DashboardSource(tmp_path / "file")
    with pytest.raises(InputError, match="neither a run nor a cluster"):
        DashboardSource(None)
    source = DashboardSource(tmp_path)
    with pytest.raises(InputError, match="is not available here"):
        source.change("replan", {})


def test_names_from_outside_are_only_text_on_the_page(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    name = "<img src=x onerror=alert(1)>\"'&"
    run.begin([[name, 4, name]], job=name)
    run.plan("first", 1, samples.plan_of(((name,), "0-3"), costs={name: 1.0}, predicted=1.0))
    for what in ("task", "worker"):
        run.tell(what, task=name, pool=name, what=name, component=name, worker=name, state=name, code=name, reason=name)
    samples.move(run, 1, 1, samples.plan_of(((name,), "0-3"), costs={name: 1.0}, predicted=1.0))
    source = DashboardSource(run.folder)
    source.look()
    state = source.whole()
    for html in state["panels"].values():
        assert "<img" not in html
    assert name not in "".join(state["panels"].values())


def test_everything_the_page_asks_for_is_in_the_package() -> None:
    page = dashboard.files()["/"][1].decode()
    for _, path in [part.split('"')[:2] for part in page.replace("href=", "src=").split("src=")[1:]]:
        assert path in dashboard.files() or path.startswith(("#", "data:")), path
    everything = b"".join(content for _, content in dashboard.files().values())
    assert b"http://" not in everything.replace(b"http://www.w3.org/", b"")
    assert b"https://" not in everything
    assert len(everything) < 100_000


def test_top_says_once_how_it_stands_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Growing(tmp_path / "run").start()
    run.preempt()
    run.join_and_move()
    assert cli.run(["show", str(run.folder)]) == 0
    said = capsys.readouterr().out
    assert "8 of 40 iterations" in said
    assert "plan: rollout 6 | reference, trainer 6" in said
    assert "rollout-w1" in said
    assert "evicted" in said
    assert "nodes: 3 with 12 GPUs" in said
    assert "▁" in said
    assert cli.run(["show", str(tmp_path / "nowhere")]) == 2
    assert cli.run(["show"]) == 2
    assert cli.run(["show", str(run.folder), "--every", "0"]) == 2
    assert cli.run(["show", "--dashboard"]) == 2
    assert "name a run or a cluster" in capsys.readouterr().err


def test_top_on_a_terminal_fits_on_its_screen(tmp_path: Path) -> None:
    source = DashboardSource(samples.eventful(tmp_path / "run", ends=False))
    source.look()
    page = io.StringIO()
    console = Console(file=page, width=100, height=40, force_terminal=True, color_system=None)
    console.print(picture(source, 40))
    lines = page.getvalue().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run").start()
    command = [sys.executable, "-m", "trimtab", "show", str(run.folder), "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert line.startswith("dashboard: http://127.0.0.1:"), line
        with urllib.request.urlopen(line.split()[1] + "state", timeout=20) as answer:
            assert json.load(answer)["title"] == "run"
        serving.send_signal(signal.SIGTERM)
        _, said = serving.communicate(timeout=30)
        assert serving.returncode == 0
        assert "the token to change something is in" in said
        assert "Traceback" not in said
    finally:
        serving.kill()
        serving.wait()
