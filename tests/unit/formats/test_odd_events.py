"""One odd line in a run's `events.jsonl`: every reader leaves it out, says so once, and goes on."""

from __future__ import annotations

import http.client
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dashboard_pages import serving
from run_report_samples import eventful
from trimtab.cli.app import run as command
from trimtab.model.run_events import read_event
from trimtab.render.html.run.story import read_story
from trimtab.runtime.advise.record import FollowRecord
from trimtab.runtime.run.folder import event_log_path, read_event_log, read_run

BIG = 999_999_999_999_999
ODD: dict[str, dict[str, Any]] = {
    "a number of an iteration": {"event": "iteration", "iteration": {"number": BIG, "wall_s": 1.0}},
    "an iteration of a plan": {"event": "plan", "iteration": BIG, "plan": "x", "groups": []},
    "an iteration of a decision": {"event": "decided", "iteration": BIG, "what": "advise", "code": "X", "reason": "x"},
    "an iteration of a move": {"event": "move", "iteration": BIG, "move": 7, "state": "begun"},
    "GPUs of a node": {"event": "cluster", "nodes": [["zeta", BIG, "H200"]], "leaving": [], "why": "joined"},
    "GPUs of nodes together": {"event": "cluster", "nodes": [["a", 60_000, ""], ["b", 60_000, ""]], "why": "joined"},
    "a time": {"event": "saved", "iteration": 3, "t_s": 1e300},
    "a bar": {"event": "iteration", "iteration": {"number": 41, "wall_s": 1.0}, "bars": [["rollout", "run", 0, 1e200]]},
    "a number of 400 digits": {"event": "saved", "iteration": 10**400},
    "a lone surrogate": {"event": "task", "task": "\ud800", "what": "running"},
}


def spoilt(folder: Path, *odd: dict[str, Any]) -> Path:
    """A run of 40 iterations with odd lines in the middle."""
    path = eventful(folder) / "events.jsonl"
    lines = path.read_text().splitlines()
    lines[len(lines) // 2 : len(lines) // 2] = map(json.dumps, odd)
    path.write_text("".join(f"{line}\n" for line in lines))
    return folder


def asked(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_dashboard_answers_and_counts_odd_lines(tmp_path: Path) -> None:
    with serving(spoilt(tmp_path / "run", *ODD.values())) as server:
        status, state = asked(server.port, "/state")
        assert status == 200
        assert state["fault"] == ""
        assert state["notes"] == [f"{len(ODD)} lines of events.jsonl could not be parsed"]
        assert asked(server.port, "/story?kind=component&name=rollout")[0] == 200


def test_top_and_the_report_go_on_without_odd_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spoilt(tmp_path / "run", *ODD.values())
    assert command(["show", str(folder)]) == 0
    assert "40 of 40 iterations" in capsys.readouterr().out
    assert command(["show", str(folder), "--report", str(tmp_path / "report.html")]) == 0
    assert len(read_story(folder).unparsed_lines) == len(ODD)


@pytest.mark.parametrize("odd", ODD)
def test_a_run_that_is_resumed_or_planned_from_leaves_the_odd_line_out(tmp_path: Path, odd: str) -> None:
    past = read_run(spoilt(tmp_path / "run", ODD[odd]))
    assert [one.number for one in past.iterations] == list(range(1, 41))
    assert len(past.unclear) == 1
    assert past.left_out == f"line {past.unclear[0]} of events.jsonl could not be understood and is left out"


def test_an_advised_run_leaves_odd_lines_out_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "run.log"
    log.write_text("")
    folder = tmp_path / "advised"
    FollowRecord(folder, [log], tmp_path / "c.yaml", ()).close()
    lines = [{"event": "began", "advised": True, "follows": [str(log.resolve())], "call": None}, *ODD.values()]
    (folder / "events.jsonl").parent.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "[\n")
    with caplog.at_level(logging.WARNING):
        FollowRecord(folder, [log], tmp_path / "c.yaml", ()).close()
    said = [one.getMessage() for one in caplog.records if "could not be understood" in one.getMessage()]
    assert len(said) == 1
    assert said[0].endswith(f": {len(ODD) + 1}")


def test_the_diary_of_engines_is_read_past_an_odd_line(tmp_path: Path) -> None:
    good = {"at": 1.0, "worker": "w0", "state": "serving", "running": 0, "code": "JOINED", "reason": "x"}
    odd = ["{", "7", json.dumps({**good, "at": "soon"}), json.dumps({**good, "running": None}), '{"at": NaN}']
    lines = [json.dumps(good), *odd, json.dumps({**good, "worker": "w1", "component": "other"})]
    event_log_path(tmp_path, "rollout").write_text("".join(f"{line}\n" for line in lines))
    found, _ = read_event_log(event_log_path(tmp_path, "rollout"))
    assert found == [good, {**good, "worker": "w1"}]


def test_what_a_trainer_reports_may_be_as_large_as_it_likes() -> None:
    event = {"event": "iteration", "iteration": {"number": 1, "wall_s": 1}, "metrics": {"trainer": {"loss": 1e200}}}
    assert read_event(json.dumps(event)) == event
