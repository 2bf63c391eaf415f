"""Background work of a rollout pool: no loop dies of a surprise, every instruction has an outcome, nothing is waited
for that nothing does."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from engine_stubs import VllmStub
from gateway_scenes import BEARER, Front, play_stubs
from rollout_commands import python
from rollout_scenes import PROMPT, Scene, play
from trimtab.cli.engine import serve as rollout_serve
from trimtab.core.errors import UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.rollout.schema import AttachedEngine
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.rollout import RolloutRules
from trimtab.render.text import rollout as rollout_text
from trimtab.rollout import RolloutPool, SamplingParams, WorkerState
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.procs.background import RestartPolicy
from trimtab.runtime.rollout import journal as journaling
from trimtab.runtime.rollout.launch.launcher import EngineProcessState
from trimtab.runtime.rollout.launch.process_engine import EngineProcess
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.store import journal as journal_file
from trimtab.runtime.store.journal import ROLLOUT_EVENTS, read_journal
from waiting import until_async

WELL = Reason(ReasonCode.sent, "as asked")


def row(pool: RolloutPool, name: str) -> dict[str, Any] | None:
    return next((one for one in pool.status()["background"] if one["name"] == name), None)


# ---- looking after engines -----------------------------------------------------------------------------------------


def test_an_engine_is_looked_after_again_after_a_surprise() -> None:
    async def act(scene: Scene) -> None:
        engine, worker = scene.pool.engine(scene.names[0]), scene.names[0]
        assert engine is not None
        really, left = engine.ready, [3]

        async def ready() -> Any:
            if left[0]:
                left[0] -= 1
                raise ValueError("a surprise")
            return await really()

        engine.ready = ready  # type: ignore[method-assign]
        await until_async(lambda: not left[0])
        failed = row(scene.pool, f"watch {worker}")
        assert failed is not None
        assert failed["last_error"] == "ValueError: a surprise"
        scene.stubs[0].die()
        await scene.becomes(0, WorkerState.lost, within_s=50)

    play(act, kinds=("vllm",))


def test_an_engine_that_can_never_be_looked_at_is_lost_and_not_active_for_ever() -> None:
    async def act(scene: Scene) -> None:
        engine = scene.pool.engine(scene.names[0])

        async def ready() -> Any:
            raise ValueError("a surprise")

        scene.pool.background._policy = RestartPolicy(max_failures=2, backoff_s=0.01)
        engine.ready = ready  # type: ignore[union-attr,method-assign]
        scene.pool._core.handles[scene.names[0]].health_task.cancel()  # type: ignore[union-attr]
        await until_async(lambda: scene.pool._core.handles[scene.names[0]].health_task.done())  # type: ignore[union-attr]
        scene.pool._health.begin(scene.names[0])
        await scene.becomes(0, WorkerState.lost, within_s=50)
        assert "a surprise" in scene.reason(0)
        await until_async(lambda: (row(scene.pool, f"watch {scene.names[0]}") or {}).get("state") == "failed")

    play(act, kinds=("vllm",))


# ---- instructions --------------------------------------------------------------------------------------------------


async def test_an_instruction_that_cannot_be_carried_out_does_not_drop_the_others_nor_the_timer() -> None:
    told, done = [], []
    instructions: dict[type, list[Any]] = {
        e.WorkerReturned: [e.Warn(WELL, "a"), e.WorkerAction("a", 3, cast(Any, "probe"), 9.0, WELL), e.Warn(WELL, "b")]
    }

    class Machine:
        def handle(self, event: Any, now: float) -> list[Any]:
            told.append(event)
            return instructions.pop(type(event), [])

        def next_deadline(self) -> float | None:
            return 0.0 if not any(isinstance(one, e.RolloutTick) for one in told) else None

    def act(instruction: e.WorkerAction) -> None:
        raise ValueError("a surprise")

    core = RolloutCore(
        cast(RolloutMachine, Machine()), handlers={e.Warn: lambda warn: done.append(warn.worker), e.WorkerAction: act}
    )
    core.listeners.append(lambda what, now: cast(None, 1 / 0))
    core.handle_event(e.WorkerReturned("a"))
    assert done == ["a", "b"]
    await until_async(lambda: {e.ActionFailed, e.RolloutTick} <= set(map(type, told)))
    [failed] = [one for one in told if isinstance(one, e.ActionFailed)]
    assert (failed.worker, failed.attempt) == ("a", 3)
    assert "a surprise" in failed.why
    assert core.counters["instructions_failed"] == 1
    assert core.counters["listeners_failed"]


async def test_a_tick_that_fails_is_told_again() -> None:
    ticks: list[float] = []

    class Machine:
        def handle(self, event: Any, now: float) -> list[Any]:
            ticks.append(now)
            if len(ticks) < 3:
                raise ValueError("a surprise")
            return []

        def next_deadline(self) -> float | None:
            return 0.0 if len(ticks) < 3 else None

    core = RolloutCore(cast(RolloutMachine, Machine()))
    core._arm()
    await until_async(lambda: len(ticks) == 3)
    assert core.counters["ticks_failed"] == 2


async def test_the_timer_is_set_anew_only_for_an_earlier_deadline_and_a_later_one_is_no_tick() -> None:
    ticks: list[float] = []
    due: list[float | None] = [None]

    class Machine:
        def handle(self, event: Any, now: float) -> list[Any]:
            ticks.append(now)
            due[0] = None
            return []

        def next_deadline(self) -> float | None:
            return due[0]

    core = RolloutCore(cast(RolloutMachine, Machine()))
    begin = core.clock()
    due[0] = begin + 0.05
    core._arm()
    first = core._timer
    due[0] = begin + 0.2
    core._arm()
    assert core._timer is first
    due[0] = begin + 1_000.0
    await until_async(lambda: core._timer is not first)
    assert not ticks, "nothing was due"
    due[0] = core.clock() + 0.01
    core._arm()
    await until_async(lambda: len(ticks) == 1)
    core.stop_timer()


def broken_once(pool: RolloutPool, kind: type) -> list[Any]:
    """The next instruction of this kind finds a handler that raises."""
    handlers, before, hit = pool._core.handlers, pool._core.handlers[kind], []

    def raises(instruction: Any) -> None:
        handlers[kind] = before
        hit.append(instruction)
        raise ValueError("a surprise")

    handlers[kind] = raises
    return hit


def test_a_request_that_could_not_be_sent_is_sent_again() -> None:
    async def act(scene: Scene) -> None:
        hit = broken_once(scene.pool, e.SendRequest)
        assert (await scene.one(4)).ok
        assert hit

    play(act, kinds=("vllm",))


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_whose_answer_could_not_be_given_is_told(streams: bool) -> None:
    async def act(scene: Scene) -> None:
        broken_once(scene.pool, e.AnswerRequest)
        params = SamplingParams(max_tokens=4)
        if streams:
            chunks = [one async for one in scene.pool.stream(PROMPT, params)]
            sample = chunks[-1].sample
        else:
            [[sample]] = [one.samples for one in await scene.pool.generate([PROMPT], params)]
        assert sample is not None
        assert not sample.ok
        assert "a surprise" in sample.reason.sentence

    play(act, kinds=("vllm",))


def test_an_act_that_ends_in_a_surprise_has_failed() -> None:
    async def act(scene: Scene) -> None:
        heard: list[Any] = []
        scene.pool.add_listener(lambda what, now: heard.append(what))

        async def surprise(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a surprise")

        engine = scene.pool.engine(scene.names[0])
        engine.sleep = surprise  # type: ignore[union-attr,method-assign]
        scene.pool.drain(scene.names[0], 0.0)
        await until_async(lambda: any(isinstance(one, e.ActionFailed) for one in heard))
        [failed] = [one for one in heard if isinstance(one, e.ActionFailed)]
        assert "a surprise" in failed.why

    play(act, kinds=("vllm", "vllm"))


# ---- what is waited for and nothing does ---------------------------------------------------------------------------


def test_an_attempt_that_no_task_carries_out_is_failed_and_done_again() -> None:
    rules = {"stall_s": 10_000.0}

    async def act(scene: Scene) -> None:
        core = scene.pool._core
        before = core.handlers[e.SendRequest]
        core.handlers[e.SendRequest] = lambda send: core.handlers.update({e.SendRequest: before})  # forgotten
        assert (await asyncio.wait_for(scene.one(4), 50)).ok
        assert core.counters["reconciled"] == 1

    play(act, kinds=("vllm",), rules=RolloutRules(**rules), reconcile_s=0.05)


def test_an_act_that_no_task_carries_out_has_failed() -> None:
    async def act(scene: Scene) -> None:
        core, heard = scene.pool._core, []
        scene.pool.add_listener(lambda what, now: heard.append(what))
        before = core.handlers[e.WorkerAction]
        core.handlers[e.WorkerAction] = lambda act: core.handlers.update({e.WorkerAction: before})
        scene.pool.drain(scene.names[0], 0.0)
        await until_async(lambda: any(isinstance(one, e.ActionFailed) for one in heard))
        assert core.counters["reconciled"] == 1

    play(act, kinds=("vllm", "vllm"), rules=RolloutRules(sleep_s=10_000.0), reconcile_s=0.05)


def test_a_client_that_the_machine_does_not_know_is_told() -> None:
    async def act(scene: Scene) -> None:
        core = scene.pool._core
        before = core.handlers[e.AnswerRequest]
        core.handlers[e.AnswerRequest] = lambda answer: core.handlers.update({e.AnswerRequest: before})  # forgotten
        sample = await asyncio.wait_for(scene.one(4), 50)
        assert not sample.ok

    play(act, kinds=("vllm",), reconcile_s=0.05)


def test_what_runs_as_it_should_is_not_reconciled() -> None:
    async def act(scene: Scene) -> None:
        assert all([(await scene.one(60)).ok for _ in range(3)])
        async with await scene.pool.acquire(prompt_tokens=1, tokens=1):
            looks = row(scene.pool, "reconcile")
            assert looks is not None
            await asyncio.sleep(0.5)
        assert not scene.pool._core.counters["reconciled"]

    play(act, kinds=("vllm",), reconcile_s=0.02)


# ---- the journal -----------------------------------------------------------------------------------------------------


def test_the_journal_of_a_pool_that_runs_long_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journaling, "COMPACT_EVENTS", 20)
    monkeypatch.setattr(journaling, "LOOK_S", 0.02)

    def snapshots() -> list[Path]:
        return sorted(tmp_path.glob("snapshot-*"))

    async def act(scene: Scene) -> None:
        [first] = snapshots()

        async def more() -> None:
            while snapshots() in ([], [first]):
                assert (await scene.one(4)).ok

        await asyncio.wait_for(more(), 50)
        assert not first.exists()
        assert len(list(tmp_path.glob("journal-*"))) <= 2

    play(act, kinds=("vllm",), journal=tmp_path)
    found = read_journal(tmp_path, kinds=ROLLOUT_EVENTS)
    assert found.snapshot is not None
    machine = RolloutMachine.load(found.snapshot)
    for now, event in found.events:
        machine.handle(event, now)
    machine.check()


def test_an_old_journal_is_read_beside_the_event_loop_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        assert (await scene.one(4)).ok

    play(act, kinds=("vllm",), journal=tmp_path)
    read, opened = journal_file.read_journal, []

    def reading(*args: Any, **more: Any) -> Any:
        opened.append(threading.current_thread())
        return read(*args, **more)

    monkeypatch.setattr(journal_file, "read_journal", reading)

    async def look(scene: Scene) -> None:
        assert len(opened) == 1
        assert threading.main_thread() not in opened
        assert scene.pool._journal._journal._found is None  # type: ignore[union-attr]

    play(look, kinds=("vllm",), journal=tmp_path)


# ---- joins and starts ------------------------------------------------------------------------------------------------


def test_an_address_that_does_not_answer_holds_up_no_other_that_joins() -> None:
    other = VllmStub()

    async def act(front: Front) -> None:
        front.pool._deadlines = EngineDeadlines(call_s=45.0)
        reached, hangs = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reached.set()
            await hangs.wait()
            writer.close()

        async with other.up(), await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            dead = asyncio.create_task(front.post("/workers", {"url": url}, headers=BEARER))
            await asyncio.wait_for(reached.wait(), 40)
            got = await front.post("/workers", {"url": other.url}, headers=BEARER)
            assert got.status == 202, got.text
            assert not dead.done()
            hangs.set()
            assert (await dead).status == 503

    play_stubs([VllmStub()], act, model_name="tiny")


async def test_processes_are_looked_at_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[threading.Thread] = []
    monkeypatch.setattr(
        EngineProcess,
        "probe",
        lambda self, port: looked.append(threading.current_thread()) or EngineProcessState("it ended"),
    )
    pool = SimpleNamespace(died=lambda worker, why: None)
    launcher = ProcessLauncher(cast(Any, pool), python("import time; time.sleep(600)", stop_s=0.1), logs=tmp_path)
    try:
        with pytest.raises(UnreachableError, match="it ended"):
            await launcher.start("a", 0, None)
    finally:
        await launcher.close()
    assert looked
    assert threading.main_thread() not in looked


# ---- what people see -------------------------------------------------------------------------------------------------


def test_the_status_that_people_read_names_a_loop_that_failed() -> None:
    async def act(scene: Scene) -> None:
        async def surprise() -> None:
            raise ValueError("a surprise")

        await asyncio.wait({scene.pool.background.once("follow weights", surprise())})
        data = rollout_text.status_data(scene.pool.status(), "http://localhost:1", "job.yaml")
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(rollout_text.picture(data))
        said = console.export_text()
        assert "background: follow weights failed once and is failed: ValueError: a surprise" in said
        assert "watch" not in said, "what runs as it should is for --format json"

    play(act, kinds=("vllm",))


def test_an_engine_of_the_file_that_joined_by_itself_meanwhile_does_not_end_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_serve, "RETRY_S", 0.01)

    async def act(scene: Scene) -> None:
        url = scene.pool.url(scene.names[0])
        really = scene.pool.attach

        async def attach(*args: Any, **more: Any) -> str:
            scene.pool.attach = really  # type: ignore[method-assign]
            raise UnreachableError("not there yet")

        scene.pool.attach = attach  # type: ignore[method-assign]
        settings = cast(Any, SimpleNamespace(engines=()))
        crew = rollout_serve.ServedEngines(scene.pool, settings, {})
        engine = AttachedEngine(url=url.replace("127.0.0.1", "localhost"), name="other", limit=8)
        await asyncio.wait_for(crew._attach(engine, "job.yaml:3"), 50)
        assert [one.worker for one in scene.pool.workers()] == scene.names

    play(act, kinds=("vllm",))
