"""Processes of tasks on a real Ray: started, told, saved, ended for certain, found again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from trimtab.core.errors import InputError
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import CreatePlacementGroup
from trimtab.model.pool import BundlePlacement, PlacementStrategy
from trimtab.runtime.controller.rpc import ParkError, TaskPayload, TaskStartError, TaskWorker, WorkerDiedError
from trimtab.runtime.procs.processes import born
from trimtab.runtime.workers import task_workers as door
from trimtab.runtime.workers.environments import WarmWorkerKind
from trimtab.runtime.workers.node_agent import NodeAgent
from trimtab.runtime.workers.placement_groups import PlacementGroupError
from trimtab.runtime.workers.task_workers import TaskWorkerManager
from trimtab.runtime.workers.worker_process import run_dir
from waiting import until_async

CPU = Resources.of(cpu=1)
WAIT_S = 240.0  # of everything that is waited for here; never reached
shared: dict[str, Any] = {}  # the loop and the world of this file


BY_VALUE = (sys.modules[__name__], sys.modules["waiting"])  # workers cannot import what lies among the tests


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    for module in BY_VALUE:
        cloudpickle.register_pickle_by_value(module)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="somebody",
    )
    loop = asyncio.new_event_loop()
    opening = opened("shared")
    world = loop.run_until_complete(opening.__aenter__())
    loop.run_until_complete(world.warm(2))
    shared.update(loop=loop, world=world)
    yield
    loop.run_until_complete(opening.__aexit__(None, None, None))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    ray.shutdown()
    for module in BY_VALUE:
        cloudpickle.unregister_pickle_by_value(module)


@dataclass
class World:
    """A Members object, one node, and what it reported."""

    members: TaskWorkerManager
    controller: str
    node: str
    deaths: list[tuple[TaskWorker, str]] = field(default_factory=list)

    async def group(self, *bundles: Resources, name: str = "g", wait_s: float = WAIT_S) -> list[BundlePlacement]:
        wanted = CreatePlacementGroup(
            name, "pool", bundles, (self.node,) * len(bundles), PlacementStrategy.strict_pack, time.monotonic() + wait_s
        )
        await self.members.create_group(wanted, time.monotonic)
        return [BundlePlacement(name, index, self.node) for index in range(len(bundles))]

    async def start(self, kind: Any, *args: Any, **asked: Any) -> TaskWorker:
        return (await self.start_all(1, kind, *args, **asked))[0]

    async def start_all(
        self,
        world: int,
        kind: Any,
        *args: Any,
        task: str = "task",
        attempt: int = 1,
        places: list[BundlePlacement] | None = None,
        bundle: Resources = CPU,
        state: Any = None,
        timeout_s: float = WAIT_S,
        **payload: Any,
    ) -> list[TaskWorker]:
        places = places or [BundlePlacement("none", 0, self.node)] * world
        started, self.how = await self.members.start(
            task, attempt, "pool", places, [bundle] * len(places), made(kind, *args, **payload), state, timeout_s
        )
        return started

    async def call(self, member: TaskWorker, method: str, *args: Any) -> Any:
        return await self.members.handle(member).call.remote(method, *args)

    async def warm(self, count: int) -> None:
        await self.members.warm({self.node: {WarmWorkerKind(): count}})
        await until_async(lambda: self.members.warm_counts()[self.node]["ready"] == count)


def made(kind: Any, *args: Any, **payload: Any) -> TaskPayload:
    return TaskPayload(cloudpickle.dumps((kind, args, {})), **payload)


def world_of(story: Callable[[World], Coroutine[Any, Any, Any]]) -> None:
    """Tell a story with the Members that this file shares, which have hosts warm; afterwards nothing of it is left."""
    world = shared["world"]

    async def tell() -> None:
        try:
            await asyncio.wait_for(story(world), 2 * WAIT_S)
        finally:
            await world.members._end(list(world.members._live.values()))
            for one in (await world.members.groups()).values():
                await world.members.remove_group(one.group, one.pool)
            world.deaths.clear()

    shared["loop"].run_until_complete(tell())


def own_world_of(
    story: Callable[[World], Coroutine[Any, Any, Any]], controller: str | None = None, leave: bool = False
) -> Any:
    """Tell a story with fresh Members; afterwards nothing of them is left, unless they are to be found again."""
    controller = controller or f"c-{uuid.uuid4().hex[:6]}"

    async def tell() -> Any:
        async with opened(controller, leave) as world:
            return await asyncio.wait_for(story(world), 2 * WAIT_S)

    return asyncio.run(tell())


@contextlib.asynccontextmanager
async def opened(controller: str, leave: bool = False) -> AsyncIterator[World]:
    deaths: list[tuple[TaskWorker, str]] = []
    node = next(node["NodeID"] for node in ray.nodes() if node["Alive"])
    members = TaskWorkerManager(controller, None, lambda member, why: deaths.append((member, why)))
    world = World(members, controller, node, deaths)
    try:
        await members.node_joined(node)
        yield world
    finally:
        if not leave:
            pids = [int(path.stem) for path in run_dir(controller, node).glob("[0-9]*.json")]
            await members.close()
            assert not [pid for pid in pids if alive(pid)]
            nothing_left(controller, node)


def nothing_left(controller: str, node: str) -> None:
    assert not run_dir(controller, node).exists()
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    assert not [name for name in names if name.startswith(f"trimtab:{controller}:")]
    groups = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
    assert not [one for one in groups if one["name"].startswith(f"trimtab:{controller}:")]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Worker:
    """A well-behaved task."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.cancelled: list[Any] = []
        self.on_main = threading.current_thread() is threading.main_thread()

    def add(self, more: int = 1) -> int:
        self.count += more
        return self.count

    def facts(self) -> dict[str, Any]:
        here = threading.current_thread() is threading.main_thread()
        names = ("TASK", "POOL", "RANK", "WORLD_SIZE", "ATTEMPT")
        identity = {name: os.environ[f"TRIMTAB_{name}"] for name in names}
        return {"main": self.on_main and here, "seat": identity, "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def work(self, seconds: float = 3600.0) -> str:
        until_then = time.monotonic() + seconds
        while time.monotonic() < until_then and not self.cancelled:
            time.sleep(0.01)
        return "cancelled" if self.cancelled else "done"

    def fail(self) -> None:
        raise ValueError("no luck\nand more")

    def cancel(self, task: str) -> None:
        self.cancelled.append(task)

    def save(self) -> int:
        return self.count + 100 * len(self.cancelled)

    def load(self, state: int) -> None:
        self.count = state


class Bad:
    """A task whose hooks do what they are told to do."""

    def __init__(self, **does: str) -> None:
        self.does = does

    def _do(self, hook: str) -> None:
        what = self.does.get(hook)
        if what == "raise":
            raise RuntimeError(f"{hook} failed\nbadly")
        if what == "hang":
            time.sleep(3600)
        if what == "hold":
            ctypes.PyDLL(None).sleep(3600)  # never lets another thread of this process run

    def cancel(self) -> None:
        self._do("cancel")

    def save(self) -> str:
        self._do("save")
        return "saved"

    def park(self) -> None:
        self._do("park")


class At:
    """Unpickles as the value that an environment variable has at that moment."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return os.getenv, (self.name,)


class Keeps:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class Raises:
    def __init__(self) -> None:
        raise ValueError("no such model\nat all")


class Exits:
    def __init__(self) -> None:
        sys.exit("enough")


class Dies:
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs:
    def __init__(self) -> None:
        time.sleep(3600)


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


# ---- starting -----------------------------------------------------------------------------------------------------


def test_user_code_runs_on_the_main_thread_and_is_told_who_it_is() -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker, 5, task="mine", attempt=3)
        assert await world.call(member, "add", 2) == 7
        facts = await world.call(member, "facts")
        assert facts["main"]
        assert facts["seat"] == {"TASK": "mine", "POOL": "pool", "RANK": "0", "WORLD_SIZE": "1", "ATTEMPT": "3"}
        assert facts["devices"] == ""
        assert (member.task, member.attempt, member.rank, member.world, member.kind) == ("mine", 3, 0, 1, "host")

    world_of(story)


def test_a_host_has_the_devices_of_its_slot_before_anything_is_unpickled() -> None:
    async def story(world: World) -> None:
        gpus = Resources.of(cpu=1, gpu=2)
        places = await world.group(gpus, gpus)
        seen = [
            await world.call(member, "get")
            for member in await world.start_all(2, Keeps, At("CUDA_VISIBLE_DEVICES"), places=places, bundle=gpus)
        ]
        assert sorted(seen) == ["0,1", "2,3"]

    world_of(story)


def test_a_warm_host_is_used_where_there_is_one_and_replaced_behind() -> None:
    async def story(world: World) -> None:
        await world.start(Worker)
        assert world.how == "a host started for it: none was warm"
        await world.warm(1)
        await world.start(Worker, task="second")
        assert world.how == "a warm host"
        await until_async(lambda: world.members.warm_counts()[world.node] == {"ready": 1, "starting": 0})

    own_world_of(story)


def test_warm_hosts_import_ahead_and_a_module_that_is_missing_does_no_harm() -> None:
    async def story(world: World) -> None:
        wanted = ("colorsys", "no_such_module")
        await world.members.warm({world.node: {WarmWorkerKind(wanted): 1}})
        await until_async(lambda: world.members.warm_counts()[world.node]["ready"] == 1)
        started, _ = await world.members.start(
            "t", 1, "pool", [BundlePlacement("g", 0, world.node)], [CPU], made(Loaded), None, WAIT_S, preload=wanted
        )
        assert await world.call(started[0], "get")

    own_world_of(story)


class Loaded(Keeps):
    def __init__(self) -> None:
        super().__init__("colorsys" in sys.modules)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Raises, "its constructor raised: ValueError: no such model"),
        (Exits, "its constructor raised: SystemExit: enough"),
        (
            Unreadable(),
            "its class could not be unpickled: ValueError: invalid literal for int() with base 10: 'not a number'",
        ),
    ],
)
def test_user_code_that_fails_at_the_start_is_fatal_and_says_what_happened(kind: Any, why: str) -> None:
    async def story(world: World) -> None:
        with pytest.raises(TaskStartError) as caught:
            await world.start(kind)
        assert caught.value.fatal
        assert caught.value.why == why
        assert await world.members.existing() == []

    world_of(story)


def test_a_process_that_dies_while_it_is_constructed_may_be_tried_again() -> None:
    async def story(world: World) -> None:
        with pytest.raises(TaskStartError, match="its process died while it was constructed") as caught:
            await world.start(Dies)
        assert not caught.value.fatal
        assert world.deaths == []

    world_of(story)


def test_a_constructor_that_hangs_is_ended_at_the_deadline() -> None:
    async def story(world: World) -> None:
        await until_async(lambda: world.members.warm_counts()[world.node]["ready"] > 0)
        with pytest.raises(TaskStartError, match="not constructed within"):
            await world.start(Hangs, timeout_s=0.3)
        assert await world.members.existing() == []

    world_of(story)


def test_a_gang_starts_whole_or_not_at_all() -> None:
    async def story(world: World) -> None:
        gang = await world.start_all(3, Worker)
        identities = [(await world.call(member, "facts"))["seat"] for member in gang]
        assert [(identity["RANK"], identity["WORLD_SIZE"]) for identity in identities] == [
            ("0", "3"),
            ("1", "3"),
            ("2", "3"),
        ]
        with pytest.raises(TaskStartError, match="only two"):
            await world.start_all(3, OnlyTwo, task="broken")
        assert {member.task for member in await world.members.existing()} == {"task"}

    world_of(story)


class OnlyTwo:
    def __init__(self) -> None:
        if os.environ["TRIMTAB_RANK"] == "2":
            raise RuntimeError("only two")


@pytest.mark.long
def test_many_start_and_stop_at_once() -> None:
    async def story(world: World) -> None:
        await world.warm(4)

        async def one(number: int) -> int:
            member = await world.start(Worker, number, task=f"t{number}")
            count: int = await world.call(member, "add")
            await world.members.stop(member, 5.0, False, 0.0, None)
            assert not alive(member.pid)
            return count

        assert await asyncio.gather(*(one(number) for number in range(8))) == list(range(1, 9))
        assert world.deaths == []

    own_world_of(story)


# ---- the entry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [None, "the user wants one"])
def test_the_entry_runs_once_and_its_outcome_can_be_asked_again(plain: str | None) -> None:
    async def story(world: World) -> None:
        places = await world.group(CPU)
        args = cloudpickle.dumps(((5,), {}))
        member = await world.start(Worker, 1, entry="add", entry_args=args, plain=plain, places=places)
        for _ in range(2):
            outcome = await world.members.outcome(member)
            assert (pickle.loads(outcome.value or b""), outcome.error) == (6, None)

    world_of(story)


@pytest.mark.parametrize("plain", [None, "the user wants one"])
def test_an_entry_that_raises_gives_type_and_first_line(plain: str | None) -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker, entry="fail", plain=plain, places=await world.group(CPU))
        outcome = await world.members.outcome(member)
        assert (outcome.value, outcome.error) == (None, "ValueError: no luck")
        assert "in fail" in outcome.trace

    world_of(story)


@pytest.mark.parametrize("plain", [None, "the user wants one"])
def test_the_outcome_of_a_process_that_was_killed_is_that_it_died(plain: str | None) -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker, entry="work", plain=plain, places=await world.group(CPU))
        waiting = asyncio.create_task(world.members.outcome(member))
        await asyncio.sleep(0.1)
        os.kill(member.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await waiting

    world_of(story)


# ---- stopping -----------------------------------------------------------------------------------------------------


def test_a_stop_cancels_then_saves_while_the_main_thread_is_busy_and_the_state_comes_back() -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker, 7, entry="work")
        stopped = await world.members.stop(member, 5.0, False, 5.0, None)
        assert not alive(member.pid)
        assert (stopped.cancel, stopped.saved) == ("returned", True)
        again = await world.start(Worker, state={0: stopped.state})
        assert await world.call(again, "add", 0) == 107
        assert world.deaths == []

    world_of(story)


def test_a_host_writes_its_state_to_a_path_and_reads_it_there(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        path = str(tmp_path / "states" / "task.state")
        member = await world.start(Worker, 3)
        stopped = await world.members.stop(member, 0.0, False, 5.0, path)
        assert (stopped.cancel, stopped.saved, stopped.state) == ("not called", True, None)
        again = await world.start(Worker, state={0: path})
        assert await world.call(again, "add", 0) == 3
        with pytest.raises(TaskStartError, match="its state could not be restored: FileNotFoundError") as caught:
            await world.start(Worker, state={0: path + ".gone"})
        assert caught.value.fatal

    world_of(story)


def test_a_pool_s_handlers_save_and_restore_what_cannot_do_so_itself() -> None:
    async def story(world: World) -> None:
        handlers = cloudpickle.dumps(
            (lambda actor: actor.value * 2, lambda actor, state: setattr(actor, "value", state))
        )
        member = await world.start(Keeps, 21, handlers=handlers)
        stopped = await world.members.stop(member, 1.0, False, 5.0, None)
        assert (stopped.cancel, stopped.saved) == ("not called", True)
        again = await world.start(Keeps, 0, handlers=handlers, state={0: stopped.state})
        assert await world.call(again, "get") == 42

    world_of(story)


@pytest.mark.parametrize(
    ("does", "cancel", "saved", "note"),
    [
        ({"cancel": "hang"}, "timed out", False, ""),
        ({"cancel": "hold"}, "timed out", False, ""),
        ({"cancel": "raise"}, "raised", True, "RuntimeError: cancel failed"),
        ({"save": "hang"}, "returned", False, "save() timed out"),
        ({"save": "raise"}, "returned", False, "save() raised: RuntimeError: save failed"),
    ],
)
def test_whatever_a_task_does_its_process_does_not_exist_after_a_stop(
    does: dict[str, str], cancel: str, saved: bool, note: str
) -> None:
    async def story(world: World) -> None:
        started, _ = await world.members.start(
            "t",
            1,
            "pool",
            [BundlePlacement("g", 0, world.node)],
            [CPU],
            TaskPayload(cloudpickle.dumps((Bad, (), does))),
            None,
            WAIT_S,
        )
        cancel_s = 0.2 if does.get("cancel") in ("hang", "hold") else WAIT_S
        save_s = 0.2 if does.get("save") == "hang" else WAIT_S
        stopped = await world.members.stop(started[0], cancel_s, False, save_s, None)
        assert not alive(started[0].pid)
        assert (stopped.cancel, stopped.saved, stopped.note) == (cancel, saved, note)
        assert world.deaths == []

    world_of(story)


def test_a_frozen_process_is_ended_too() -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker)
        os.kill(member.pid, signal.SIGSTOP)
        assert (await world.members.stop(member, 0.2, False, 0.2, None)).cancel == "timed out"
        assert not alive(member.pid)

    world_of(story)


def test_what_a_task_started_is_ended_with_it_however_it_ends() -> None:
    async def story(world: World) -> None:
        stopped, killed = await world.start(Parent), await world.start(Parent, task="other")
        children = [await world.call(member, "children") for member in (stopped, killed)]
        await world.members.stop(stopped, 0.0, False, 0.0, None)
        assert not [pid for pid in children[0] if born(pid)]
        os.kill(killed.pid, signal.SIGKILL)
        await until_async(lambda: bool(world.deaths))
        assert not [pid for pid in children[1] if born(pid)]

    world_of(story)


class Parent:
    def __init__(self) -> None:
        child = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        self.pids = [child.pid, int(child.stdout.readline())]

    def children(self) -> list[int]:
        return self.pids


def test_with_notice_a_task_is_drained_instead_of_cancelled(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        member = await world.start(Drains, str(tmp_path / "told"))
        assert (await world.members.stop(member, 7.0, True, 0.0, None)).cancel == "returned"
        assert (tmp_path / "told").read_text() == "7.0"

    world_of(story)


class Drains:
    def __init__(self, path: str) -> None:
        self.path = path

    def drain(self, seconds: float) -> None:
        Path(self.path).write_text(str(seconds))


def test_stopping_what_is_gone_already_is_no_fault_and_a_reused_number_is_never_killed() -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker)
        innocent = await world.start(Worker, task="innocent")
        stopped = await world.members.stop(replace(innocent, born=innocent.born - 1), 1.0, False, 1.0, None)
        assert (stopped.cancel, stopped.note) == ("not called", "its process was gone already")
        assert alive(innocent.pid)
        await world.members.stop(member, 1.0, False, 0.0, None)
        assert (await world.members.stop(member, 1.0, False, 1.0, None)).cancel == "not called"

    world_of(story)


def test_a_task_takes_turns_where_it_can_and_says_so_where_not() -> None:
    async def story(world: World) -> None:
        member = await world.start(Bad, task="fine")
        await world.members.park(member, 5.0)
        with pytest.raises(ParkError, match="unpark\\(\\) not called"):
            await world.members.unpark(member, 5.0)
        started, _ = await world.members.start(
            "t",
            1,
            "p",
            [BundlePlacement("g", 0, world.node)],
            [CPU],
            TaskPayload(cloudpickle.dumps((Bad, (), {"park": "hang"}))),
            None,
            60,
        )
        with pytest.raises(ParkError, match="park\\(\\) timed out"):
            await world.members.park(started[0], 0.1)

    world_of(story)


# ---- deaths -------------------------------------------------------------------------------------------------------


def test_a_death_is_reported_once_and_a_warm_host_that_dies_is_replaced() -> None:
    async def story(world: World) -> None:
        await world.warm(1)
        member = await world.start(Worker)
        await until_async(lambda: world.members.warm_counts()[world.node]["ready"] == 1)
        warm = world.members._warm_pool._ready[world.node][0]
        os.kill(warm.pid, signal.SIGKILL)
        os.kill(member.pid, signal.SIGKILL)
        await until_async(lambda: bool(world.deaths))
        await until_async(
            lambda: [one.pid for one in world.members._warm_pool._ready[world.node]] not in ([], [warm.pid])
        )
        assert [(one.pid, why) for one, why in world.deaths] == [
            (member.pid, f"process {member.pid} on node {world.node[:12]} died")
        ]

    own_world_of(story)


@pytest.mark.long
def test_a_warden_that_is_killed_comes_back_and_loses_nothing() -> None:
    async def story(world: World) -> None:
        dies, stays = await world.start(Worker, task="dies"), await world.start(Worker, task="stays")
        agent = world.members.agents.facts[world.node]["pid"]
        os.kill(agent, signal.SIGKILL)
        os.kill(dies.pid, signal.SIGKILL)
        await until_async(lambda: [member for member, _ in world.deaths] == [dies])
        assert (await world.members.stop(stays, 1.0, False, 1.0, None)).saved
        assert not alive(stays.pid)

    own_world_of(story)


@pytest.mark.long
def test_a_warden_that_hangs_is_replaced_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker)
        hangs = world.members.agents.facts[world.node]["pid"]
        os.kill(hangs, signal.SIGSTOP)
        monkeypatch.setattr(door, "_END_S", 5.0)
        assert "did not answer" in (await world.members.stop(member, 0.0, False, 0.0, None)).note
        assert not alive(member.pid)
        assert not alive(hangs)

    own_world_of(story)


def test_who_waits_for_a_host_on_a_node_gets_one_after_a_start_that_took_too_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        world.members._warm_pool._start_s = 0.0
        taking = asyncio.ensure_future(world.members._warm_pool._take(world.node, WarmWorkerKind()))
        await until_async(lambda: "did not start: TimeoutError" in caplog.text)
        world.members._warm_pool._start_s = WAIT_S
        host, was_ready = await asyncio.wait_for(taking, WAIT_S)
        assert alive(host.pid)
        assert not was_ready
        await until_async(lambda: world.members.warm_counts()[world.node]["starting"] == 0)

    with caplog.at_level(logging.WARNING):
        own_world_of(story)


def test_deaths_are_heard_of_after_an_answer_of_the_node_s_agent_that_makes_no_sense() -> None:
    async def story(world: World) -> None:
        agents, asked = world.members.agents, []
        ask = agents.request

        async def odd(node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
            if method == "deaths" and not asked:
                asked.append(method)
                return None
            return await ask(node, method, *arguments, timeout_s=timeout_s)

        agents.request = odd  # type: ignore[method-assign]
        first, second = await world.start(Worker, task="first"), await world.start(Worker, task="second")
        os.kill(first.pid, signal.SIGKILL)  # ends the question that is under way, and the next gets that answer
        await until_async(lambda: [member for member, _ in world.deaths] == [first])
        os.kill(second.pid, signal.SIGKILL)
        await until_async(lambda: [member for member, _ in world.deaths] == [first, second])
        assert asked
        [row] = [row for row in world.members.background.status() if row["failures"]]
        assert (row["name"], row["state"]) == (f"deaths on node {world.node[:12]}", "running")

    own_world_of(story)


def test_a_node_s_agent_without_file_descriptors_calls_no_living_process_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.pidfd_open, []

    def full(pid: int, flags: int = 0) -> int:
        if len(refused) < 3:
            refused.append(pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid, flags)

    async def story() -> None:
        monkeypatch.setattr(os, "pidfd_open", full)
        agent = NodeAgent(f"c-{uuid.uuid4().hex[:6]}", "node")
        process = subprocess.Popen(["sleep", "600"])
        try:
            since = born(process.pid)
            assert since is not None
            await agent.watch([(process.pid, since)])
            await until_async(lambda: len(refused) == 3)
            epoch, deaths = await agent.deaths("", 0, 0.0)
            assert deaths == []
            process.kill()
            await asyncio.to_thread(process.wait)
            assert await asyncio.wait_for(agent.deaths(epoch, 0, WAIT_S), WAIT_S) == (epoch, [(process.pid, since)])
        finally:
            process.kill()
            process.wait()
            await agent.leave()

    asyncio.run(story())


def test_a_dead_raylet_takes_its_processes_along_also_where_descriptors_had_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, refused, left = os.pidfd_open, [], asyncio.Event()

    def full(pid: int, flags: int = 0) -> int:
        if len(refused) < 3:
            refused.append(pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid, flags)

    async def story() -> None:
        raylet = subprocess.Popen(["sleep", "600"])
        monkeypatch.setattr(os, "pidfd_open", full)
        monkeypatch.setattr(os, "getppid", lambda: raylet.pid)
        monkeypatch.setattr(os, "_exit", lambda status: left.set())
        agent = NodeAgent(f"c-{uuid.uuid4().hex[:6]}", "node")
        try:
            await agent.hello()
            await until_async(lambda: len(refused) == 3)
            raylet.kill()
            await asyncio.to_thread(raylet.wait)
            await asyncio.wait_for(left.wait(), WAIT_S)
        finally:
            raylet.kill()
            raylet.wait()
            assert agent._heartbeat is not None
            agent._heartbeat[0].close()
            await agent.leave()

    asyncio.run(story())


def test_what_lost_nodes_left_on_disk_is_removed_unless_something_there_is_alive() -> None:
    place = run_dir("some", "node").parent
    facts = {"dead": {"pid": os.getpid(), "born": 1.0}, "alive": {"pid": os.getpid(), "born": born(os.getpid())}}
    for name, record in facts.items():
        (place / name).mkdir(parents=True)
        (place / name / "1.json").write_text(json.dumps(record))
        os.utime(place / name, (0, 0))

    async def story(world: World) -> None:
        assert not (place / "dead").exists()
        assert (place / "alive").exists()

    own_world_of(story)
    shutil.rmtree(place / "alive")


# ---- slots --------------------------------------------------------------------------------------------------------


def test_a_group_is_made_on_its_node_seen_and_removed() -> None:
    async def story(world: World) -> None:
        await world.group(CPU, Resources.of(cpu=0.5, memory=2**20, gpu=1), name="g7")
        seen = (await world.members.groups())["g7"]
        assert (seen.group, seen.pool, seen.nodes, seen.intact) == ("g7", "pool", (world.node,) * 2, True)
        assert seen.bundles == (CPU, Resources.of(cpu=0.5, memory=2**20, gpu=1))
        await world.members.remove_group("g7", "pool")
        await world.members.remove_group("g7", "pool")
        assert await world.members.groups() == {}

    world_of(story)


def test_a_group_that_does_not_fit_is_said_at_the_deadline_and_leaves_nothing() -> None:
    async def story(world: World) -> None:
        with pytest.raises(PlacementGroupError, match="not free on its nodes"):
            await world.group(Resources.of(cpu=100), wait_s=0.3)
        assert await world.members.groups() == {}

    world_of(story)


# ---- plain actors -------------------------------------------------------------------------------------------------


def test_a_plain_actor_has_its_name_its_devices_and_its_place_and_can_be_stopped_while_busy() -> None:
    async def story(world: World) -> None:
        gpu = Resources.of(cpu=1, gpu=1)
        places = await world.group(gpu)
        member = await world.start(
            Worker, 4, entry="work", plain="it has a name", places=places, bundle=gpu,
            ray_options={"name": "my-worker", "num_cpus": 77}, namespace="somebody",
        )  # fmt: skip
        assert world.how == "a plain Ray actor: it has a name"
        assert (member.kind, member.actor, member.namespace) == ("actor", "my-worker", "somebody")
        assert ray.available_resources().get("GPU") == 3.0
        stopped = await world.members.stop(member, 5.0, False, 5.0, None)
        assert not alive(member.pid)
        assert (stopped.cancel, stopped.saved) == ("returned", True)
        again = await world.start(
            Worker, plain="it has a name", places=places, bundle=gpu,
            ray_options={"name": "my-worker"}, namespace="somebody", state={0: stopped.state},
        )  # fmt: skip
        handle = ray.get_actor("my-worker", "somebody")
        assert await handle.add.remote(0) == 104
        facts = await handle.facts.remote()
        assert facts["devices"] == "0"
        assert facts["seat"]["TASK"] == "task"
        os.kill(again.pid, signal.SIGKILL)
        await until_async(lambda: [member for member, _ in world.deaths] == [again])

    world_of(story)


@pytest.mark.long
def test_a_decorated_class_and_an_async_one_are_told_and_saved_too() -> None:
    async def story(world: World) -> None:
        places = await world.group(CPU, CPU)
        decorated = await world.start(ray.remote(Worker), 1, plain="decorated", places=places[:1])
        for attempt, state in ((1, None), (2, "last")):
            member = await world.start(
                Async, attempt=attempt, entry="work", plain="async", places=places[1:],
                state={0: saved} if state else None,  # noqa: F821
            )  # fmt: skip
            stopped = await world.members.stop(member, 5.0, False, 5.0, None)
            assert (stopped.cancel, stopped.saved) == ("returned", True)
            saved = stopped.state
        assert pickle.loads(saved or b"") == ("own", 2)
        assert (await world.members.stop(decorated, 5.0, False, 0.0, None)).cancel == "returned"

    world_of(story)


class Async:
    def __init__(self) -> None:
        self.count = 0

    async def work(self) -> None:
        await asyncio.sleep(3600)

    async def cancel(self) -> None:
        self.count += 1

    async def save(self) -> int:
        return self.count

    async def load(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize(
    ("kind", "why", "fatal"),
    [
        (Raises, "its constructor raised: ValueError: no such model", True),
        (Unreadable(), "its class could not be unpickled: ValueError: invalid literal", True),
        (Dies, "its process died while it was constructed", False),
    ],
)
def test_a_plain_actor_that_fails_at_the_start_says_why(kind: Any, why: str, fatal: bool) -> None:
    async def story(world: World) -> None:
        with pytest.raises(TaskStartError) as caught:
            await world.start(kind, plain="so", places=await world.group(CPU))
        assert caught.value.why.startswith(why)
        assert caught.value.fatal == fatal
        assert await world.members.existing() == []

    world_of(story)


def test_a_name_that_is_still_held_by_somebody_who_is_leaving_is_waited_for() -> None:
    async def story(world: World) -> None:
        leaving = ray.remote(Worker).options(name="held", namespace="somebody", num_cpus=0).remote()
        await leaving.add.remote()
        places = await world.group(CPU)
        options = {"plain": "named", "ray_options": {"name": "held"}, "namespace": "somebody"}
        starting = asyncio.create_task(world.start(Worker, 5, places=places, **options))
        await asyncio.sleep(1.0)
        ray.kill(leaving)
        await starting
        assert await ray.get_actor("held", "somebody").add.remote() == 6

    world_of(story)


@pytest.mark.parametrize("plain", [None, "the user wants one"])
def test_a_start_that_is_called_off_leaves_nothing(plain: str | None, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        places = await world.group(CPU)
        starting = asyncio.create_task(world.start(Announces, str(tmp_path / "pid"), plain=plain, places=places))
        await until_async(lambda: (tmp_path / "pid").exists())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until_async(lambda: not alive(int((tmp_path / "pid").read_text())))
        assert await world.members.existing() == []
        assert world.deaths == []
        again = await world.start(Worker, plain=plain, places=places)
        assert alive(again.pid)

    world_of(story)


class Announces:
    """Says who it is, then hangs in its constructor."""

    def __init__(self, path: str) -> None:
        Path(path + ".new").write_text(str(os.getpid()))
        Path(path + ".new").rename(path)
        time.sleep(3600)


# ---- recovery -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_new_controller_finds_what_is_alive_keeps_what_it_wants_and_ends_the_rest() -> None:
    async def before(world: World) -> tuple[str, TaskWorker, TaskWorker, int]:
        await world.warm(1)
        places = await world.group(CPU)
        kept = await world.start(Worker, 1, task="kept", entry="add")
        other = await world.start(Worker, task="other", plain="so", places=places)
        await until_async(lambda: world.members.warm_counts()[world.node]["ready"] == 1)
        return world.controller, kept, other, world.members._warm_pool._ready[world.node][0].pid

    controller, kept, other, warm = own_world_of(before, leave=True)

    async def after(world: World) -> None:
        assert sorted(await world.members.existing(), key=lambda member: member.task) == [kept, other]
        gone = replace(kept, task="gone", pid=other.pid, born=1.0)
        assert await world.members.sweep([kept, gone]) == 1
        assert not alive(other.pid)
        await until_async(lambda: [member for member, _ in world.deaths] == [gone])
        assert pickle.loads((await world.members.outcome(kept)).value or b"") == 2
        assert set(await world.members.groups()) == {"g"}
        await until_async(lambda: world.members.warm_counts()[world.node]["ready"] == 1)
        assert world.members._warm_pool._ready[world.node][0].pid == warm
        os.kill(kept.pid, signal.SIGKILL)
        await until_async(lambda: [member for member, _ in world.deaths] == [gone, kept])

    own_world_of(after, controller)


@pytest.mark.long
@pytest.mark.parametrize("plain", [None, "the user wants one"])
def test_a_new_controller_ends_or_awaits_what_was_half_started(plain: str | None, tmp_path: Path) -> None:
    controller = f"c-{uuid.uuid4().hex[:6]}"
    pilot = ray.remote(Pilot).options(num_cpus=0).remote(controller)
    starting = pilot.start.remote(made(Announces, str(tmp_path / "pid"), plain=plain))
    asyncio.run(until_async(lambda: (tmp_path / "pid").exists() or ray.wait([starting], timeout=0)[0]))
    if ray.wait([starting], timeout=0)[0]:
        ray.get(starting)
    os.kill(ray.get(pilot.pid.remote()), signal.SIGKILL)
    pid = int((tmp_path / "pid").read_text())

    async def after(world: World) -> None:
        for member in await world.members.existing():
            assert not await world.members.ready(member, 0.2)
        assert await world.members.sweep([]) == 1
        await until_async(lambda: not alive(pid))
        member = await world.start(Worker, plain=plain, places=[BundlePlacement("g", 0, world.node)])
        assert await world.members.ready(member, WAIT_S)

    own_world_of(after, controller)


class Pilot:
    """Members where they live in earnest: in an async actor."""

    def __init__(self, controller: str) -> None:
        self.controller = controller

    async def pid(self) -> int:
        return os.getpid()

    async def start(self, payload: TaskPayload) -> None:
        async with opened(self.controller, leave=True) as world:
            places = await world.group(CPU)
            await world.members.start("task", 1, "pool", places, [CPU], payload, None, WAIT_S)


def test_controllers_of_different_names_do_not_disturb_each_other() -> None:
    async def story(world: World) -> None:
        member = await world.start(Worker)
        await world.group(CPU)
        async with opened("another") as other:
            await other.start(Worker, task="theirs")
            assert [one.task for one in await world.members.existing()] == ["task"]
            assert await other.members.sweep([]) == 0
            assert await other.members.groups() == {}
        assert alive(member.pid)
        assert set(await world.members.groups()) == {"g"}

    world_of(story)


def test_a_controller_s_name_must_not_break_the_names_made_of_it() -> None:
    with pytest.raises(InputError, match="cannot be the name of a controller"):
        TaskWorkerManager("a:b", None, lambda member, why: None)
