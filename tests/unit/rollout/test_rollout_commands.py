"""`trimtab engine`: a real gateway with real llama.cpp servers behind it, and the commands that look and change."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import engine_servers
from tiny_gguf import tiny_gguf
from trimtab.cli.app import run
from trimtab.cli.engine import serve as rollout_serve
from trimtab.render import live as live_view
from trimtab.render.text import rollout as rollout_text
from trimtab.runtime.procs.processes import descendants
from waiting import until

EXAMPLE = Path(__file__).parents[3] / "examples" / "rollout" / "tiny_engine.py"
WAIT_S = 240.0

JOB = """\
rollout:
  engines:
    - {{url: "{first}", name: first, limit: 8}}
    - {{url: "{second}", name: second, limit: 8}}
    - kind: llamacpp
      command: {python} {engine} --host {{host}} --port {{port}} --model {{model}}
      model: {model}
      name: own
      limit: 4
      stop_s: 5
  rules: {{suspect_s: 1, lost_s: 3}}
  gateway: {{port: 0, stop_s: 20}}
elastic_config:
  policy: static
  min_workers: 1
  max_workers: 3
  monitoring_interval: 0.2
  drain_timeout: 5
"""


class Served:
    """One `trimtab engine serve` process."""

    def __init__(self, job: Path, place: Path, **more: str) -> None:
        self.place, self.log = place, job.with_suffix(".log")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trimtab", "engine", "serve", str(job)],
                stdout=out,
                stderr=out,
                env={**os.environ, "TRIMTAB_ROLLOUT_DIR": str(place), **more},
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        until(lambda: "listening on " in self.said or self.process.poll() is not None)
        return self.said.partition("listening on ")[2].split()[0]

    def ask(self, path: str, body: Any = None, timeout_s: float = WAIT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def states(self) -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.ask("/status")["workers"]}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


@contextmanager
def serving(job: Path, text: str, **more: str) -> Iterator[Served]:
    job.write_text(text)
    served = Served(job, job.parent / "run", **more)
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[engine_servers.LlamaServer]]:
    with engine_servers.servers(2, tmp_path_factory.mktemp("engines"), slots=4) as started:
        yield started


@pytest.fixture(scope="module")
def served(engines: list[engine_servers.LlamaServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    text = JOB.format(
        first=engines[0].url, second=engines[1].url, python=sys.executable, engine=EXAMPLE, model=tiny_gguf()
    )
    with serving(folder / "job.yaml", text) as one:
        until(lambda: list(one.states().values()) == ["active"] * 3)
        yield one


@pytest.fixture
def call(served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `trimtab engine ...` here, against the gateway that runs."""
    monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(served.place))

    def command(*arguments: object) -> tuple[int, str, str]:
        code = run(["engine", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


PROMPT = {"input_ids": [40, 41, 42], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def test_serve_says_where_it_listens_and_keeps_its_token_to_itself(served: Served) -> None:
    (token,) = served.place.glob("*.token")
    (told,) = served.place.glob("*.json")
    for path in (token, told):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(token) in served.said
    assert token.read_text().strip() not in served.said
    assert token.read_text().strip() not in told.read_text()
    assert json.loads(told.read_text())["url"] == served.url
    until(lambda: "first active" in served.said)  # changes are printed a moment after they can be asked for
    assert served.ask("/generate", PROMPT)["meta_info"]["completion_tokens"] == 4


def test_status_shows_workers_with_their_states_and_reasons(call: Callable[..., Any], served: Served) -> None:
    code, out, err = call("list")
    assert (code, err) == (0, "")
    for words in (served.url, "first", "second", "own", "active", "CURRENT", "version 0, confirmed on 3 of 3"):
        assert words in out
    code, out, _ = call("list", "--format", "json")
    data = json.loads(out)
    assert {one["name"]: one["state"] for one in data["workers"]} == served.states()
    assert data["gateway"]["url"] == served.url
    assert {"queue", "steps", "scaling", "load", "metrics", "counters", "warnings"} <= set(data)
    assert all({"reason", "ago_s", "before", "workers"} <= set(one) for one in data["steps"])


def test_status_of_a_name_tells_its_story(call: Callable[..., Any]) -> None:
    code, out, _ = call("show", "first")
    assert code == 0
    assert "first is active" in out
    assert "JOINED" in out
    code, _, err = call("show", "frist")
    assert code == 2
    assert "there is no engine or request frist" in err
    assert "did you mean first?" in err


def test_a_drained_worker_takes_nothing_until_it_is_resumed(call: Callable[..., Any], served: Served) -> None:
    code, out, _ = call("drain", "second", "--deadline", "2s", "--reason", "its GPU is needed")
    assert code == 0
    assert "second drains" in out
    until(lambda: served.states()["second"] == "inactive")
    assert "its GPU is needed" in call("show", "second")[1]
    code, out, _ = call("doctor", "--format", "json")
    assert code == 0
    before = {one["name"]: one["served"] for one in served.ask("/status")["workers"]}["second"]
    for _ in range(4):
        served.ask("/generate", PROMPT)
    assert {one["name"]: one["served"] for one in served.ask("/status")["workers"]}["second"] == before
    assert call("undrain", "second")[0] == 0
    until(lambda: served.states()["second"] == "active")


def test_draining_so_that_nobody_is_left_is_refused_with_status_3(call: Callable[..., Any], served: Served) -> None:
    assert call("drain", "second")[0] == 0
    assert call("drain", "own-1")[0] == 0
    until(lambda: sorted(served.states().values()) == ["active", "inactive", "inactive"])
    code, _, err = call("drain", "first")
    assert code == 3
    assert "at least 1 must" in err
    for name in ("second", "own-1"):
        assert call("undrain", name)[0] == 0
    until(lambda: set(served.states().values()) == {"active"})


def test_a_number_set_by_hand_wins_until_it_is_released(call: Callable[..., Any], served: Served) -> None:
    code, out, _ = call("scale", 1, "--for", "10m", "--reason", "a look")
    assert code == 0
    assert "set by hand to 1 for 10 min more: a look" in out
    until(lambda: list(served.states().values()).count("active") == 1)
    assert "SET_BY_HAND" not in call("doctor")[1]  # one worker: nothing is left to give up
    assert "BY_HAND: a look" in call("list")[1]
    code, out, _ = call("scale", "--auto", "--format", "json")
    assert (code, json.loads(out)["scaling"]["by_hand"]) == (0, None)
    until(lambda: set(served.states().values()) == {"active"})
    code, _, err = call("scale", 9)
    assert code == 2
    assert "1 to 3" in err


def test_the_doctor_finds_the_engine_that_was_killed(
    call: Callable[..., Any], served: Served, engines: list[engine_servers.LlamaServer]
) -> None:
    assert call("doctor")[0] == 0
    engines[1].kill()
    until(lambda: served.states()["second"] == "lost")
    code, out, _ = call("doctor")
    assert code == 4
    assert "ENGINE_LOST" in out
    assert "restart it at the same address" in out
    code, out, _ = call("doctor", "--format", "json")
    data = json.loads(out)
    assert (code, data["health"], data["findings"][0]["who"]) == (4, "fault", ["second"])


def test_ctrl_c_lets_requests_end_and_leaves_nothing_behind(served: Served) -> None:
    family = descendants(served.process.pid)
    assert family, "its own engine is a process of it"
    long = {"input_ids": [40, 41], "sampling_params": {"max_new_tokens": 600, "temperature": 0, "ignore_eos": True}}

    def begun() -> subprocess.Popen[bytes] | None:
        """A client whose request runs; None if it was answered before that was seen."""
        client = subprocess.Popen(
            [sys.executable, "-c", _ASK, f"{served.url}/generate", json.dumps(long)], stdout=subprocess.PIPE
        )
        until(lambda: served.ask("/status")["load"]["running"] >= 1 or client.poll() is not None)
        if client.poll() is not None:
            client.communicate()
            return None
        return client

    client = until(begun)
    served.process.send_signal(signal.SIGINT)
    assert json.loads(client.communicate()[0])["meta_info"]["completion_tokens"] == 600
    assert served.process.wait(WAIT_S) == 0
    assert "stopped" in served.said
    until(lambda: not any(one.alive for one in family))
    assert not [*served.place.glob("*.json"), *served.place.glob("*.token")]
    assert "Traceback" not in served.said


_ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600).read().decode())
"""


def test_an_engine_that_comes_later_is_awaited_and_a_second_ctrl_c_waits_for_nobody(
    engines: list[engine_servers.LlamaServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, second), text = (
        engines,
        "rollout: {{follow_weights: true, engines: ['{0}', '{1}'], gateway: {{port: 0, stop_s: 600}}}}",
    )
    assert not second.alive
    with serving(tmp_path / "job.yaml", text.format(first.url, second.url), TRIMTAB_ROLLOUT_TOKEN="t" * 20) as one:
        until(lambda: "not reachable" in one.said)
        until(lambda: list(one.states().values()) == ["active"])
        monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(one.place))
        assert run(["engine", "doctor"]) == 4
        assert "ENGINE_AWAITED" in capsys.readouterr().out
        engines[1] = engine_servers.wait_up(engine_servers.again(second))
        until(lambda: list(one.states().values()) == ["active"] * 2)
        assert "the token is TRIMTAB_ROLLOUT_TOKEN" in one.said
        first.freeze()
        engines[1].freeze()
        try:
            asking = subprocess.Popen(
                [sys.executable, "-c", _ASK, f"{one.url}/generate", json.dumps(PROMPT)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            until(lambda: sum(one.ask("/status")["requests"].values()) == 1)
            one.process.send_signal(signal.SIGTERM)
            until(lambda: "stopping" in one.said)
            one.process.send_signal(signal.SIGINT)
            assert one.process.wait(WAIT_S) == 130
            asking.wait(WAIT_S)
        finally:
            first.thaw()
            engines[1].thaw()
    assert not [*one.place.glob("*.json")]


@pytest.mark.long
@pytest.mark.parametrize("count", ["2", "nodes"])
def test_engines_on_slots_of_a_pool_are_started_and_leave_them_free(count: str, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    import trimtab

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False})
    try:
        with trimtab.connect(cluster.address) as session:
            session.pool("gpus", {"gpu": 2})
            engine = (
                f"{{kind: llamacpp, command: '{sys.executable} {EXAMPLE} --host {{host}} --port {{port}} "
                f"--model {{model}}', model: {tiny_gguf()}, name: slot, count: {count}, pool: gpus, stop_s: 5}}"
            )
            text = f"rollout: {{ray: '{cluster.address}', engines: [{engine}], gateway: {{port: 0}}}}"
            with serving(tmp_path / "job.yaml", text) as one:
                until(lambda: list(one.states().values()) == ["active"] * 2)
                assert session.status()["pools"]["gpus"]["used"]["gpu"] == 2
                assert one.ask("/generate", PROMPT)["meta_info"]["completion_tokens"] == 4
                one.process.send_signal(signal.SIGINT)
                assert one.process.wait(WAIT_S) == 0
            until(lambda: not session.status()["pools"]["gpus"]["used"].get("gpu"))
    finally:
        cluster.shutdown()


# ---- what is wrong is said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["list"], 4, "no rollout gateway of this user runs here"),
        (["list", "--url", "http://127.0.0.1:9"], 4, "cannot be reached"),
        (["list", "--url", "nowhere"], 2, "not a gateway address"),
        (["drain", "a", "--deadline", "soon"], 4, "no rollout gateway"),
        (["scale"], 2, "either a number of engines or --auto"),
        (["scale", "3", "--auto"], 2, "either a number of engines or --auto"),
        (["scale", "--auto", "--for", "1m"], 2, "--for needs a number"),
        (["scale", "3", "--for", "ever"], 2, "a time such as 90s"),
        (["doctor", "nothing.yaml"], 2, "there is no file nothing.yaml"),
        (["serve", "nothing.yaml"], 2, "there is no file nothing.yaml"),
    ],
)
def test_errors_have_a_status_and_say_what_to_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(tmp_path))
    assert run(["engine", *arguments]) == code
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout: {engines: [{kind: vllm, model: m, command: [vllm, serve]}]}", "job.yaml:1: rollout.engines[0]"),
        ("rollout: {engines: [{command: 'x {prot}'}]}", "did you mean {port}?"),
        ("rollout: {engines: [{command: 'x {port}', pool: p, nodes: 2, gpus: 1}]}", "no {rank}, {nodes}, {head}"),
        ("rollout: {engines: 'http://127.0.0.1:9', gateway: {worker_hosts: ['10.0.0.0/99']}}", "worker_hosts"),
        ("rollout: {engines: 'http://8.8.8.8:9', gateway: {port: 0}}", "not a private address"),
    ],
)
def test_serve_refuses_what_cannot_be_before_or_as_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, words: str
) -> None:
    monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(tmp_path / "run"))
    (tmp_path / "job.yaml").write_text(text)
    assert run(["engine", "serve", str(tmp_path / "job.yaml")]) == 2
    assert words in capsys.readouterr().err
    assert not [*(tmp_path / "run").glob("*.json"), *(tmp_path / "run").glob("*.token")]


def test_a_port_that_is_taken_is_said_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(tmp_path / "run"))
    (tmp_path / "job.yaml").write_text("rollout: {engines: 'http://127.0.0.1:9'}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["engine", "serve", str(tmp_path / "job.yaml"), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}" in said
    assert "ending" not in said
    assert not [*(tmp_path / "run").iterdir()]


def test_the_doctor_examines_a_job_file_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("rollout: {engines: [{kind: vllm, model: m, count: 2}]}")
    assert run(["engine", "doctor", str(job)]) == 0
    assert "no problems found" in capsys.readouterr().out
    job.write_text("rollout: {engines: ['http://8.8.8.8:1']}\nelastic_config: {min_stable_period: 0}")
    assert run(["engine", "doctor", str(job)]) == 3
    out = capsys.readouterr().out
    assert "EXPOSED" in out
    assert "a single look at the load" in out


def test_files_of_gateways_that_are_gone_are_not_believed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIMTAB_ROLLOUT_DIR", str(tmp_path))
    gone = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "born": 1.0, "job": "j", "token_file": ""}
    (tmp_path / "rollout-9.json").write_text(json.dumps(gone))
    (tmp_path / "rollout-8.json").write_text("half")
    assert run(["engine", "list"]) == 4
    assert not (tmp_path / "rollout-9.json").exists()
    assert "no rollout gateway of this user" in capsys.readouterr().err


REASON = {"code": "QUEUED", "sentence": "no worker has room\nand more"}
ONE = {
    "name": "a", "kind": "vllm", "state": "draining", "since_s": 61.0, "version": None, "running": 3, "limit": 8,
    "outstanding_tokens": 900, "served": 7, "reason": REASON, "doing": "sleep", "paused": True,
}  # fmt: skip
PICTURE = {
    "gateway": {"url": "http://g", "job": None},
    "now": time.time(),
    "version": 3,
    "workers": [ONE] * 70,
    "queue": [{"class": "eval", "priority": 2, "waiting": 4, "limit": 9, "oldest_s": 3.0, "reason": REASON}],
    "steps": [{"at": 1.0, "ago_s": 5.0, "before": 1, "workers": 2, "reason": REASON, "expects": "2 serve"}],
    "scaling": {"by_hand": None, "holds": {"validation": 2}, "decision": None},
    "range": {"least": 1, "most": 2},
    "load": {"queued": 4, "running": 3, "draining": 3, "fresh": False},
    "metrics": {"load_ratio": 1.2, "total_capacity": 8},
    "elastic": {"policy": "threshold"},
    "counters": {"answered_stop": 5, "moved": 2},
    "warnings": [
        {"ago_s": 9.0, "worker": "a", "sentence": "it is slow\nvery"},
        {"ago_s": 999.0, "worker": "", "sentence": "old"},
    ],
}  # fmt: skip


def test_on_a_terminal_the_picture_is_drawn_again_and_warnings_do_not_tear_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = io.StringIO()
    screen = Console(file=page, force_terminal=True, width=120)
    monkeypatch.setattr(live_view, "out", screen)
    monkeypatch.setattr(live_view, "Console", lambda **_: screen)
    monkeypatch.setattr(rollout_serve, "REFRESH_EVERY_S", 0.01)
    drawn = 0

    async def watched() -> None:
        over = asyncio.Event()

        def look() -> dict[str, Any]:
            nonlocal drawn
            drawn += 1
            logging.getLogger("trimtab.rollout").warning("torn")
            if drawn == 3:
                over.set()
            return PICTURE

        await rollout_serve.watch(look, over, ["Ctrl-C ends it"])

    asyncio.run(watched())
    assert drawn == 3
    assert page.getvalue().count("http://g") >= 3
    assert "torn" not in caplog.text
    logging.getLogger("trimtab.rollout").warning("heard again")
    assert "heard again" in caplog.text


def test_the_picture_has_queues_steps_and_warnings() -> None:
    page = io.StringIO()
    Console(file=page, width=200).print(rollout_text.picture(PICTURE, ["Ctrl-C ends it"]))
    for words in (
        "1.20 of capacity 8", "some engines are stale", "kept ready: 2 by validation", "5 stop, 2 moved", "and 6 more",
        "draining (paused, sleep)", "no worker has room ...", "eval", "1 to 2", "not known yet",
        "a: it is slow (9 s ago)", "Ctrl-C ends it",
    ):  # fmt: skip
        assert words in page.getvalue()
    assert "old (" not in page.getvalue()
    later = {**PICTURE, "workers": [{**ONE, "state": "inactive"}], "version": 4, "steps": []}
    lines = rollout_text.change_lines({**PICTURE, "workers": [ONE, {**ONE, "name": "b"}]}, later)
    assert [line.partition(" ")[2] for line in lines] == [
        "a inactive: no worker has room",
        "b is gone",
        "weights are version 4",
    ]
