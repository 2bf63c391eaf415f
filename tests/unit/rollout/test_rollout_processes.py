"""Engines as processes of this machine: real llama.cpp servers that are started, ended, killed and orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_answers import answer, greedy, run
from rollout_commands import HERE, llama, python
from tiny_gguf import tiny_gguf
from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.rollout import RolloutPool, RolloutRules, SamplingParams, WorkerState
from trimtab.runtime.procs.ports import free_ports
from trimtab.runtime.procs.processes import ProcessIdentity, descendants, gone, process
from trimtab.runtime.rollout.launch.launcher import EngineCommand, Launcher
from trimtab.runtime.rollout.launch.process_engine import EngineProcess
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.launch.start import engines_as_processes
from waiting import until, until_async

PROMPT = (5, 6, 7, 8)
WAIT_S = 240.0


@dataclass
class Heard:
    """A pool that only listens."""

    deaths: list[tuple[str, str]] = field(default_factory=list)

    def died(self, worker: str, why: str) -> None:
        self.deaths.append((worker, why))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not this launcher's business")


Play = Callable[[ProcessLauncher, Heard], Awaitable[None]]


def scene(play: Play, folder: Path, command: EngineCommand | None = None, **settings: Any) -> None:
    """Nothing is left behind, whatever the play did."""

    async def whole() -> None:
        heard = Heard()
        launcher = ProcessLauncher(heard, command or llama(stop_s=5.0), logs=folder, **settings)
        assert isinstance(launcher, Launcher)
        try:
            await play(launcher, heard)
        finally:
            await launcher.close()

    with nothing_left():
        run(whole())


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process more afterwards than before."""
    before = descendants(os.getpid())
    yield
    assert not [one for one in descendants(os.getpid()) if one not in before]


def family(launcher: ProcessLauncher, worker: str) -> list[ProcessIdentity]:
    """The guard and all below it."""
    guard = launcher._running[worker].pid
    return [process(guard), *descendants(guard)]


# Starting.


def test_an_engine_serves_when_it_is_said_to_be_started(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        started = await launcher.start("w0", 0, None)
        assert started.engine.kind == "llamacpp"
        assert started.version == 0
        assert (await started.engine.ready()).up
        assert len((await answer(started.engine, greedy("a", PROMPT, 5))).ids) == 5
        them = family(launcher, "w0")
        await launcher.stop("w0")
        assert not gone(them, 0.0)
        assert not heard.deaths, "it was asked to end"
        await launcher.stop("w0")
        await launcher.stop("nobody")

    scene(play, tmp_path)


def test_two_engines_side_by_side_have_ports_of_their_own(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        one, two = await asyncio.gather(launcher.start("w0", 0, None), launcher.start("w1", 0, None))
        assert one.url != two.url
        both = await asyncio.gather(*(answer(each.engine, greedy("a", PROMPT, 8)) for each in (one, two)))
        assert both[0].ids == both[1].ids

    scene(play, tmp_path)


def test_an_engine_is_started_with_the_trainers_weights_where_their_path_is_known(tmp_path: Path) -> None:
    other = tiny_gguf(shift=0.5)

    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        first = await launcher.start("w0", 3, None)
        assert first.version == 0, "without a path it has the command's own model, whatever was wished for"
        before = await answer(first.engine, greedy("a", PROMPT, 12))
        again = await launcher.restart("w0", 4, str(other))
        assert again.version == 4
        after = await answer(again.engine, greedy("b", PROMPT, 12))
        assert before.ids != after.ids
        assert not heard.deaths

    scene(play, tmp_path)


def test_a_command_that_cannot_be_run_says_so_at_once(tmp_path: Path) -> None:
    command = EngineCommand("none", command=("/no/such/engine", "{port}"))

    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        with pytest.raises(UnreachableError, match=r"could not be run[\s\S]*No such file"):
            await launcher.start("w0", 0, None)

    scene(play, tmp_path, command)


def test_an_engine_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = python("print('early'); raise SystemExit('out of memory on device 3')")

    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        with pytest.raises(UnreachableError, match=r"status 1[\s\S]*out of memory on device 3"):
            await launcher.start("w0", 0, None)
        assert launcher.log_of("w0").read_text().startswith("early")
        assert not heard.deaths, "it never lived as far as the pool is concerned"

    scene(play, tmp_path, command)


LISTENS = """
import http.server, sys
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Well).serve_forever()
"""


def test_a_health_page_that_answers_is_no_engine_that_serves(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        with pytest.raises(UnreachableError, match="does not serve after 1 s"):
            await launcher.start("w0", 0, None)

    scene(play, tmp_path, python(LISTENS, start_s=1.0, stop_s=1.0))


def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        task = asyncio.create_task(launcher.start("w0", 0, None))
        await until_async(lambda: "w0" in launcher._running and len(family(launcher, "w0")) > 1)
        them = family(launcher, "w0")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await launcher.stop("w0")
        assert not gone(them, 0.0)

    scene(play, tmp_path, python("import time; time.sleep(600)"))


def test_a_port_that_somebody_else_took_is_given_up_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.runtime.rollout.launch import processes

    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        first = await launcher.start("w0", 0, None)
        taken = int(first.url.rpartition(":")[2])
        given, honest = [[taken, 0]], processes.free_ports
        monkeypatch.setattr(processes, "free_ports", lambda host, count: given.pop() if given else honest(host, count))
        second = await launcher.start("w1", 0, None)
        assert not given
        assert second.url != first.url, "what answers at the first port is not what was started"

    scene(play, tmp_path, taken_command())


def taken_command() -> EngineCommand:
    """A server that ends where its port is taken, as most do."""
    code = (
        "import socket, sys, runpy\n"
        "one = socket.socket(); one.bind((sys.argv[2], int(sys.argv[3]))); one.close()\n"
        "sys.path.insert(0, sys.argv[4]); sys.argv[0] = 'serve'; args = sys.argv[1:4]\n"
        "import rollout_commands; rollout_commands.serve(*args)\n"
    )
    line = (sys.executable, "-c", code, "{model}", "{host}", "{port}", str(Path(HERE).parent))
    return EngineCommand(str(tiny_gguf()), command=line, stop_s=5.0)


# Ending.


def test_a_process_that_ends_by_itself_is_told_with_its_status(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        await launcher.start("w0", 0, None)
        [engine] = descendants(launcher._running["w0"].pid)
        os.kill(engine.pid, signal.SIGKILL)
        await until_async(lambda: heard.deaths)
        [(worker, why)] = heard.deaths
        assert worker == "w0"
        assert "SIGKILL" in why
        assert (await launcher.start("w0", 0, None)).engine, "and it can be had again"
        assert len(heard.deaths) == 1

    scene(play, tmp_path)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print('I stay', flush=True))
child = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
print("deaf", flush=True)
while True: time.sleep(1)
"""


def test_an_engine_that_ignores_its_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        task = asyncio.create_task(launcher.start("w0", 0, None))
        log = launcher.log_of("w0")
        await until_async(lambda: log.exists() and "deaf" in log.read_text() and len(family(launcher, "w0")) == 3)
        them = family(launcher, "w0")
        process = launcher._running["w0"]
        assert await process.end_async()
        assert not gone(them, 0.0)
        assert "I stay" in log.read_text(), "it was asked before it was killed"
        with pytest.raises(UnreachableError, match="SIGKILL"):
            await task

    scene(play, tmp_path, python(STUBBORN, stop_s=0.3))


def test_engines_end_when_the_process_of_the_pool_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(HERE).parent)!r})
from rollout_commands import llama
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.launch.start import engines_as_processes
async def main():
    launcher = ProcessLauncher(None, llama(), logs={str(tmp_path)!r})
    await launcher.start("w0", 0, None)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout is not None
        assert pool.stdout.readline() == "up\n"
        them = descendants(pool.pid)
        assert len(them) == 2, "a guard and an engine"
        pool.kill()
    assert not gone(them, WAIT_S)


def test_an_engine_ends_also_when_its_guard_is_killed(tmp_path: Path) -> None:
    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        await launcher.start("w0", 0, None)
        them = family(launcher, "w0")
        os.kill(them[0].pid, signal.SIGKILL)
        await until_async(lambda: heard.deaths)
        await until_async(lambda: not any(one.alive for one in them))

    scene(play, tmp_path)


# Under a rollout pool.


LISTENS_AND_WAITS = """
import socket, sys, time
at = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_an_engine_whose_connections_ended_is_given_time_to_end(tmp_path: Path) -> None:
    [port] = free_ports("127.0.0.1", 1)
    guard = EngineProcess([sys.executable, "-c", LISTENS_AND_WAITS, str(port)], {}, tmp_path / "log", stop_s=5.0)
    try:
        until(lambda: guard.probe(port).listens, "the engine listens")
        assert guard.exit_reason(port, 300.0) == "", "it listens: nothing is awaited"
        [engine] = descendants(guard.pid)
        os.kill(guard.pid, signal.SIGSTOP)  # so late is it that the engine's end is not seen yet
        os.kill(engine.pid, signal.SIGKILL)
        until(lambda: not guard.probe(port).listens, "the engine's end")
        assert guard.exit_reason() == ""
        timer = threading.Timer(0.2, os.kill, (guard.pid, signal.SIGCONT))
        timer.start()
        assert "SIGKILL" in guard.exit_reason(port, 60.0)
        timer.join()
    finally:
        guard.end()


def test_a_pool_starts_refits_restarts_and_stops_its_processes(tmp_path: Path) -> None:
    rules = RolloutRules(
        min_workers=1,
        max_workers=2,
        monitor_s=0.1,
        drain_s=2.0,
        abort_s=1.0,
        back_off_s=0.1,
        suspect_s=0.5,
        probe_s=2.0,
    )
    greedily = SamplingParams(max_tokens=30, temperature=0.0)
    other = str(tiny_gguf(shift=0.5))

    async def one_answer(pool: RolloutPool) -> Any:
        [answer] = await pool.generate([PROMPT], greedily)
        assert answer.samples[0].ok
        return answer.samples[0]

    async def play() -> None:
        async with RolloutPool(rules, look_s=0.2) as pool:
            launcher = engines_as_processes(pool, llama(stop_s=5.0), 2, logs=tmp_path)
            before = await one_answer(pool)
            assert await pool.until(lambda: len(active(pool)) == 2)
            async with pool.refit(1) as refit:
                await refit.load(other)
            assert active(pool) == ["engine-1", "engine-2"]
            after = await one_answer(pool)
            assert after.token_ids != before.token_ids
            assert [span.version for span in after.spans] == [1]
            [engine] = descendants(launcher._running["engine-1"].pid)
            os.kill(engine.pid, signal.SIGKILL)
            await until_async(lambda: "engine-1" not in active(pool))
            assert await pool.until(lambda: len(active(pool)) == 2)
            assert {(await one_answer(pool)).token_ids for _ in range(4)} == {after.token_ids}, "with the new weights"
            pool.scale(1, why="the test")
            await until_async(lambda: len(launcher._running) == 1)
        assert not launcher._running

    with nothing_left():
        run(play())


def active(pool: RolloutPool) -> list[str]:
    return [one.worker for one in pool.workers() if one.state is WorkerState.active]


# Devices and commands.


def test_each_engine_has_devices_of_its_own(tmp_path: Path) -> None:
    code = "import os; raise SystemExit('devices ' + os.environ['CUDA_VISIBLE_DEVICES'])"

    async def play(launcher: ProcessLauncher, heard: Heard) -> None:
        both = await asyncio.gather(*(launcher.start(f"w{at}", 0, None) for at in (0, 1)), return_exceptions=True)
        assert sorted(str(fault).split("devices ")[1].splitlines()[0] for fault in both) == ["0,1", "2"]
        launcher._device_of.update(w0="2", w1="0,1")
        with pytest.raises(InfeasibleError, match="all 2 sets of devices"):
            await launcher.start("w2", 0, None)
        assert launcher.devices_of("w1") == "0,1"
        launcher._device_of.clear()

    scene(play, tmp_path, python(code), devices=("2", "0,1"))


def test_commands_that_cannot_be_are_refused() -> None:
    for wrong, said in (
        ({"kind": "vlm"}, "did you mean vllm"),
        ({}, "neither a kind nor a command"),
        ({"command": "serve --port {prot}"}, "did you mean {port}"),
        ({"command": "serve {model}"}, "no {port}"),
        ({"kind": "vllm", "start_s": 0}, "above 0"),
    ):
        with pytest.raises(InputError) as fault:
            EngineCommand("m", **wrong)  # type: ignore[arg-type]
        assert said in str(fault.value)


def test_a_command_line_is_filled_in_and_json_in_it_is_left_alone() -> None:
    command = EngineCommand("base", "vllm", arguments=("--override", '{"a": {"b": 1}}', "--seed", "{version}"))
    line = command.line(name="w", host="10.0.0.1", port=81, version=7, path="/weights/7")
    assert line[:4] == ["vllm", "serve", "/weights/7", "--host"]
    assert line[-4:] == ["--override", '{"a": {"b": 1}}', "--seed", "7"]
    assert command.settings == {"VLLM_SERVER_DEV_MODE": "1"}
    assert command.started_version(7, None) == 0
    fixed = EngineCommand("base", command="serve base --port {port}", version=2)
    assert fixed.started_version(7, "/weights/7") == 2, "a command that names no weights starts with its own"


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (
            "vllm",
            ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "82"],
            ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "82", "--headless"],
        ),
        (
            "sglang",
            ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "10.0.0.1:82"],
            ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:82"],
        ),
    ],
)
def test_the_usual_command_of_a_kind_knows_how_its_ranks_meet(kind: str, first: list[str], second: list[str]) -> None:
    plain = EngineCommand("base", kind)
    command = plain.over(2)
    assert plain.over(1) is plain
    assert command.over(2) is command, "once is enough"
    for rank, host, expected in ((0, "10.0.0.1", first), (1, "10.0.0.2", second)):
        place: dict[str, Any] = {"name": "w", "host": host, "port": 81, "version": 0, "path": None}
        line = command.line(**place, rank=rank, nodes=2, head="10.0.0.1", dist_port=82)
        assert line == [*plain.line(**place), *expected]


def test_a_command_of_ones_own_over_several_nodes_says_where_its_ranks_go() -> None:
    own = EngineCommand("base", command="serve {port} {rank} {nodes} {head} {dist_port}").over(2)
    line = own.line(name="w", host="b", port=81, version=0, path=None, rank=1, nodes=2, head="a", dist_port=82)
    assert line == ["serve", "81", "1", "2", "a", "82"]
    alone = own.line(name="w", host="b", port=81, version=0, path=None, dist_port=83)
    assert alone == ["serve", "81", "0", "1", "b", "83"]
    for command, missing in (
        (EngineCommand("m", command="serve {port}"), "{rank}, {nodes}, {head}, {dist_port}"),
        (EngineCommand("m", "vllm", "vllm serve {port} {rank} {head}"), "{nodes}, {dist_port}"),
        (EngineCommand("m", "llamacpp"), "{rank}, {nodes}, {head}, {dist_port}"),
    ):
        with pytest.raises(InputError, match="over 2 nodes") as fault:
            command.over(2)
        assert f"no {missing}," in fault.value.what
    with pytest.raises(InputError, match="at least 1"):
        own.over(0)


def test_an_engine_that_is_ended_by_force_gets_no_time_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)\n"
    code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); signal.pause()"
    engine = EngineProcess([sys.executable, "-c", code], {}, tmp_path / "log", stop_s=WAIT_S, own_session=False)
    them = until(lambda: (found := descendants(engine.pid)) and len(found) == 2 and found, "the engine and its child")
    assert engine.end(force=True)
    assert "SIGKILL" in engine.exit_reason(), "the engine's own end, told by its guard"
    assert not gone(them, 0.0)


def test_an_engine_does_not_get_the_tokens_of_trimtab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIMTAB_ROLLOUT_TOKEN", "TRIMTAB_HOOK_TOKEN", "TRIMTAB_DASHBOARD_TOKEN"):
        monkeypatch.setenv(name, "a-token-that-changes-things")
    monkeypatch.setenv("TRIMTAB_KEPT", "yes")
    script = "import os; print({k: v for k, v in os.environ.items() if k.startswith('TRIMTAB_')}, flush=True)"
    engine = EngineProcess([sys.executable, "-c", script], {"TRIMTAB_GIVEN": "too"}, tmp_path / "log", stop_s=5.0)
    try:
        assert engine._popen.wait(WAIT_S) == 0
        assert engine.log_tail() == "{'TRIMTAB_KEPT': 'yes', 'TRIMTAB_GIVEN': 'too'}"
    finally:
        engine.end()
