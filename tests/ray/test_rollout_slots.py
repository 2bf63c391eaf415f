"""Rollout engines on slots of a pool, on a real Ray of several nodes: lent, evicted, drained, lost, and followed.

The engines are real llama.cpp servers; GPUs are Ray's numbers only. Requests run while all of it happens: each is
answered once, with the tokens that an undisturbed engine gives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_answers import prompts, run
from rollout_commands import llama, llama_over_nodes
from storm import below, kill
from tiny_gguf import tiny_gguf
from trimtab import rollout
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import Resources
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import TaskState
from trimtab.rollout import RolloutPool, RolloutRules, SamplingParams, WorkerSpec, WorkerState
from trimtab.runtime.client.session import Pool, Session, connect
from trimtab.runtime.procs.background import Background
from trimtab.runtime.procs.processes import table
from trimtab.runtime.rollout.launch.launcher import EngineCommand
from trimtab.runtime.rollout.launch.slots import SlotLauncher
from trimtab.runtime.rollout.launch.start import (
    DemandWatch,
    EnginesPerNode,
    engines_as_processes,
    engines_on_slots,
    engines_over,
    engines_that_fit,
)
from waiting import until_async

WAIT_S = 240.0
MARK = f"slots-{uuid.uuid4().hex[:8]}"
GPU = {"gpu": 1}
GREEDY = SamplingParams(max_tokens=200, temperature=0.0)
RULES = RolloutRules(
    min_workers=1, max_workers=4, capacity=4, monitor_s=0.2, drain_s=3.0, abort_s=1.0, stall_s=60.0, suspect_s=0.5,
    lost_s=5.0,
    back_off_s=0.2, probe_s=2.0, stop_s=30.0, retries=20,
)  # fmt: skip


class Nodes:
    """A cluster of a head and further nodes, of one GPU each, added as tests need them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
        )
        self.there: list[Any] = []

    def add(self, count: int = 1) -> None:
        self.there += [self.cluster.add_node(num_cpus=1, num_gpus=1, wait=False) for _ in range(count)]
        deadline = time.monotonic() + WAIT_S
        while not {one.node_id for one in self.there} <= alive():
            assert time.monotonic() < deadline, "nodes did not join in time"
            time.sleep(0.05)

    def kill(self, node: Any) -> None:
        """As a machine is lost: every process of it at once."""
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        for pid in [one for raylet in raylets for one in (raylet, *below(raylet))]:
            kill(pid)
        self.there.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def alive() -> set[str]:
    import ray

    return {one["NodeID"] for one in ray.nodes() if one["Alive"]}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    nodes = Nodes()
    ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
    nodes.add()
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def session(nodes: Nodes) -> Iterator[Session]:
    session = connect(name=f"slots-{uuid.uuid4().hex[:6]}")
    session.preemption(cancel_timeout_s=2.0, save_timeout_s=1.0)
    session.pool("gpus", {"gpu": 64}, reuse=False, warm_each=2)
    yield session
    session.shutdown()
    assert not servers(), "engines went with the cluster"


@pytest.fixture
def slots(session: Session) -> Pool:
    return session.pool("gpus")


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], tuple[int, ...]]:
    return {}


def servers() -> list[int]:
    """Engines of these tests that live."""
    return [pid for pid in table() if MARK in _line(pid) and "guard" not in _line(pid)]


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


class Taker:
    """Somebody else who wants a GPU."""


@asynccontextmanager
async def engines(
    session: Session,
    slots: Pool,
    elastic: ElasticConfig | None = None,
    command: EngineCommand | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[RolloutPool, SlotLauncher]]:
    settings = {"resources": GPU, "limit": 4, "notice_s": 8.0, "room_s": 1.0, "idle_s": 3.0, **settings}
    more = () if elastic is None else (elastic,)
    async with RolloutPool(RULES, *more, look_s=0.3) as pool:
        command = command or llama(mark=MARK, stop_s=2.0)
        launcher = engines_on_slots(pool, session, slots, command, **settings)
        yield pool, launcher


def active(pool: RolloutPool) -> list[str]:
    return [one.worker for one in pool.workers() if one.state is WorkerState.active]


async def said(task: Any) -> TaskState:
    state: TaskState = await asyncio.to_thread(lambda: task.state)
    return state


class Traffic:
    """Requests all the time, each compared with what an undisturbed engine says."""

    def __init__(self, pool: RolloutPool, right: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.pool, self.right = pool, right
        self.answered = 0
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(list(right)[at::6])) for at in range(6)]

    async def _ask(self, mine: list[tuple[int, ...]]) -> None:
        while not self._over.is_set():
            for prompt in mine:
                [answer] = await self.pool.generate([prompt], GREEDY)
                [sample] = answer.samples
                assert sample.ok, sample.reason
                assert sample.token_ids == self.right[prompt]
                self.answered += 1

    async def flows(self, more: int = 12) -> None:
        """So many answers from now on."""
        enough = self.answered + more
        await until_async(lambda: self.answered >= enough or any(one.done() for one in self._tasks), "answers")

    async def end(self) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def traffic(pool: RolloutPool) -> AsyncIterator[Traffic]:
    asked = prompts(12, longest=20)
    answers = await pool.generate(asked, GREEDY)
    one = Traffic(pool, {prompt: answer.samples[0].token_ids for prompt, answer in zip(asked, answers, strict=True)})
    try:
        yield one
    finally:
        await one.end()


@pytest.mark.long
def test_an_engine_ends_with_the_process_that_holds_its_slot_and_comes_back_in_another(
    session: Session, slots: Pool
) -> None:
    async def play() -> None:
        async with engines(session, slots, workers=1) as (pool, launcher):
            await until_async(lambda: active(pool), "an engine")
            [place] = launcher.worker_slots.values()
            async with traffic(pool) as flow:
                await flow.flows()
                [engine], [host] = servers(), await asyncio.to_thread(lambda: place.member.task.members)
                kill(host.pid)
                await until_async(lambda: engine not in servers(), "its end")
                await until_async(lambda: servers() and active(pool), "another engine, on a slot of its own")
                assert list(launcher.worker_slots.values()) != [place]
                await flow.flows()
        assert not servers()
        assert not [one for one in await asyncio.to_thread(slots.tasks) if one.state is TaskState.running]

    run(play(), within_s=300)


@pytest.mark.long
def test_a_slot_that_is_not_needed_goes_to_whoever_waits_and_comes_back_by_priority(
    session: Session, slots: Pool
) -> None:
    lends = ElasticConfig(
        min_workers=1, max_workers=2, monitoring_interval=0.2, scale_up_cooldown=0.1, scale_down_cooldown=0.2,
        min_stable_period=0.2, drain_timeout=0.2, requests_per_worker_capacity=4, scale_down_requires_demand=True,
    )  # fmt: skip

    async def play() -> None:
        async with engines(session, slots, lends, workers=2, lends=True) as (pool, _):
            pool.scale(2, why="the test")
            await until_async(lambda: len(active(pool)) == 2, "two engines")
            pool.release_scale()
            await asyncio.sleep(1.0)
            assert len(active(pool)) == 2, "idle, but nobody wants their room"
            taker = await asyncio.to_thread(
                lambda: slots.submit(Taker, resources=GPU, id=f"taker-{uuid.uuid4().hex[:4]}", priority=1.0)
            )
            await asyncio.to_thread(taker.wait, "running", WAIT_S)
            assert len(servers()) == 1, "the engine is gone when its slot is somebody else's"
            assert taker.id in pool.steps[-1].reason.sentence
            assert len(active(pool)) == 1
            pool.scale(2, why="the next step begins")
            await until_async(lambda: len(active(pool)) == 2, "its return")
            assert await said(taker) in (TaskState.evicted, TaskState.waiting), "the engine's priority is higher"
            await asyncio.to_thread(taker.cancel)

    run(play(), within_s=300)


def test_no_request_is_lost_when_an_engine_dies_waits_for_room_or_is_evicted(session: Session, slots: Pool) -> None:
    def vip() -> Any:
        return slots.submit(Taker, resources=GPU, id=f"vip-{uuid.uuid4().hex[:4]}", priority=9.0, preemptible=False)

    async def play() -> None:
        first = await asyncio.to_thread(vip)
        await asyncio.to_thread(first.wait, "running", WAIT_S)
        async with engines(session, slots, workers=2) as (pool, launcher):
            await until_async(lambda: len(active(pool)) == 1 and any(p.taken for p in launcher.worker_slots.values()))
            [waits] = [place.worker for place in launcher.worker_slots.values() if place.taken]
            view = next(one for one in pool.workers() if one.worker == waits)
            assert view.state is not WorkerState.active
            assert any("no room in pool gpus" in chapter.reason.sentence for chapter in pool.story(waits))
            [place] = [one for one in launcher.worker_slots.values() if not one.taken]
            async with traffic(pool) as flow:
                [engine] = servers()
                kill(engine)
                await until_async(lambda: servers() not in ([], [engine]) and active(pool), "another engine")
                assert launcher.worker_slots[place.worker] is place, "in the same slot"
                await asyncio.to_thread(first.complete)
                await until_async(lambda: len(active(pool)) == 2, "the second engine")
                await flow.flows()
                second = await asyncio.to_thread(vip)
                await asyncio.to_thread(second.wait, "running", WAIT_S)
                assert len(servers()) == 1
                assert len(active(pool)) == 1
                await flow.flows()
            async with pool.refit(1) as refit:
                await refit.load(str(tiny_gguf(shift=0.5)))
            assert len(launcher.worker_slots) == 2, "the refit kept the slot"
            await asyncio.to_thread(second.complete)
            await until_async(lambda: len(active(pool)) == 2, "its return")
            answers = await pool.generate([(5, 6, 7)] * 6, GREEDY)
            assert {worker for answer in answers for worker in answer.samples[0].workers} == set(active(pool))
            assert len({answer.samples[0].token_ids for answer in answers}) == 1, "it came back with the new weights"
            assert {span.version for answer in answers for span in answer.samples[0].spans} == {1}

    run(play(), within_s=300)


@pytest.mark.long
def test_engines_follow_nodes_that_drain_and_join_and_are_lost(nodes: Nodes, session: Session, slots: Pool) -> None:
    async def play() -> None:
        async with engines(session, slots, min_workers=1, max_workers=8) as (pool, launcher):
            await until_async(lambda: len(active(pool)) == 2, "an engine on every node")
            where = {place.member.node: place.worker for place in launcher.worker_slots.values()}
            [going] = nodes.there
            leaver = where.pop(going.node_id)
            [stayer] = where.values()
            async with traffic(pool) as flow:
                await flow.flows()
                await asyncio.to_thread(session.drain_node, going.node_id, 9.0)
                await until_async(lambda: [one.worker for one in pool.workers()] == [stayer], "the leaver's end")
                await until_async(lambda: going.node_id not in alive(), "the node's end")
                nodes.there.remove(going)
                nodes.cluster.remove_node(going, allow_graceful=False)
                await flow.flows()
                nodes.add()  # Ray wants the main thread for it
                await until_async(lambda: len(active(pool)) == 2, "an engine on the new node")
                assert leaver not in active(pool)
                await flow.flows()
                nodes.kill(nodes.there[0])
                await until_async(lambda: [one.worker for one in pool.workers()] == [stayer], "the loss")
                await flow.flows()
                assert len(servers()) == 1

    run(play(), within_s=400)


@pytest.mark.long
def test_an_engine_over_two_nodes_is_lost_with_a_process_a_member_or_a_node_and_no_request_is(
    nodes: Nodes, session: Session, slots: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add(2 - len(nodes.there))  # three with the head, so that it has somewhere to go
    deaths: list[str] = []

    def rank(pid: int) -> int:
        return int(_line(pid).split("\0")[6])

    async def play() -> None:
        command = llama_over_nodes(MARK, stop_s=2.0)
        async with engines(session, slots, command=command, workers=1, nodes=2, notice_s=20.0) as (pool, launcher):
            died = pool.died
            monkeypatch.setattr(pool, "died", lambda worker, why: (deaths.append(why), died(worker, why)))

            async def again(before: list[int]) -> list[int]:
                """Its processes, when none of before is left and it serves."""
                await until_async(
                    lambda: len(servers()) == 2 and not set(before) & set(servers()) and active(pool), "it serves"
                )
                await flow.flows()
                [view] = pool.status()["workers"]
                on = view["node"].split(", ")
                assert len(set(on)) == 2, "its nodes"
                return sorted(servers(), key=rank)

            await until_async(lambda: active(pool), "an engine")
            async with traffic(pool) as flow:
                first = await again([])
                assert [rank(pid) for pid in first] == [0, 1]
                [place] = launcher.worker_slots.values()
                kill(first[1])
                second = await again(first)
                assert list(launcher.worker_slots.values()) == [place], "the gang was kept"
                assert len(deaths) == 1
                assert "rank 1: it was ended by SIGKILL" in deaths[0]
                members = await asyncio.to_thread(lambda: place.member.task.members)
                kill(members[1].pid)
                third = await again(second)
                assert list(launcher.worker_slots.values()) != [place], "the gang was lost as a whole"
                assert len(deaths) == 2
                [place] = launcher.worker_slots.values()
                nodes.kill(next(node for node in nodes.there if node.node_id in place.nodes))
                await again(third)
                assert len(deaths) == 3
        assert not servers()
        assert not [one for one in await asyncio.to_thread(slots.tasks) if one.state is TaskState.running]

    run(play(), within_s=400)


@pytest.mark.long
def test_an_engine_over_two_nodes_leaves_both_with_notice_and_returns(
    nodes: Nodes, session: Session, slots: Pool
) -> None:
    nodes.add(1 - len(nodes.there))

    async def play() -> None:
        command = llama_over_nodes(MARK, stop_s=2.0)
        async with engines(session, slots, command=command, workers=1, nodes=2) as (pool, launcher):
            await until_async(lambda: active(pool), "an engine")
            [place] = launcher.worker_slots.values()
            names = [f"vip-{uuid.uuid4().hex[:4]}" for _ in range(len(nodes.there) + 1)]
            vips = await asyncio.to_thread(
                lambda: [slots.submit(Taker, resources=GPU, id=name, priority=9.0) for name in names]
            )
            await asyncio.to_thread(vips[-1].wait, "running", WAIT_S)
            assert not servers(), "it leaves as a whole"
            for vip in vips:
                await asyncio.to_thread(vip.complete)
            await until_async(lambda: active(pool), "its return")
            assert launcher.worker_slots[place.worker] is place, "its task had waited in the queue"
            assert len(servers()) == 2

    run(play(), within_s=300)


# Without a cluster.


TWO_GPUS = Resources.of(gpu=2)


@dataclass
class Ledger:
    """A rollout pool and a launcher that only take note."""

    unit: Resources = TWO_GPUS
    nodes: int = 1
    worker_slots: dict[str, Any] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    background: Background = field(default_factory=Background)

    @property
    def pool(self) -> Ledger:
        return self

    def add_startable(self, spec: WorkerSpec, launcher: Any) -> str:
        assert spec.startable
        assert not spec.can_sleep, "asleep it would keep its slot"
        self.added.append(spec.id)
        return spec.id

    async def remove(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        self.removed.append(worker)


def node(name: str, gpus: float, state: NodeState = NodeState.ready, **more: Any) -> NodeView:
    return NodeView(
        name, state, NodeFacts(Resources.of(gpu=gpus, cpu=8)), Reason(ReasonCode.joined, "test"), 0.0, **more
    )


def test_a_node_has_places_for_what_is_left_of_it_and_none_before_it_may_be_used() -> None:
    unit = TWO_GPUS
    assert engines_that_fit(node("a", 8), unit) == 4
    assert engines_that_fit(node("a", 8), unit, per_node=1) == 1
    assert engines_that_fit(node("a", 8, outside=Resources.of(gpu=3)), unit) == 2
    assert engines_that_fit(node("a", 1), unit) == 0
    assert engines_that_fit(node("a", 8, NodeState.suspect), unit) == 4, "silent for a moment"
    for state in (NodeState.held, NodeState.draining, NodeState.lost):
        assert engines_that_fit(node("a", 8, state), unit) == 0
    assert engines_that_fit(node("a", 8, announced=False), unit) == 0


def test_an_engine_over_several_nodes_needs_a_node_for_each_of_its_parts() -> None:
    for parts, nodes, fit in (
        ([4, 4], 1, 8),
        ([4, 4], 2, 4),
        ([4, 0], 2, 0),
        ([9, 1, 1], 2, 2),
        ([2, 2, 2], 2, 3),
        ([1, 1], 3, 0),
        ([], 2, 0),
    ):
        assert engines_over(parts, nodes) == fit, (parts, nodes)


def test_workers_follow_nodes_within_limits_and_those_whose_node_goes_go_first() -> None:
    async def play() -> None:
        ledger = Ledger()
        follower = EnginesPerNode(ledger, min_workers=1, max_workers=5)  # type: ignore[arg-type]
        follower.update([])
        assert ledger.added == ["engine-1"], "the least, wherever they will be"
        follower.update([node("a", 4), node("b", 4)])
        assert len(follower.workers) == 4
        for worker, where in zip(follower.workers, "aabb", strict=True):
            ledger.worker_slots[worker] = SimpleNamespace(nodes=(where,), node_leaving=False)
        follower.update([node("a", 4, NodeState.draining), node("b", 4)])
        await asyncio.sleep(0)
        assert ledger.removed == ["engine-1", "engine-2"]
        follower.update([node("b", 4), node("c", 16)])
        assert len(follower.workers) == 5
        assert ledger.added[-1] == "engine-7", "a name is not given twice"

    run(play())


def test_a_taker_is_who_waits_for_engines_alone_and_less_what_is_being_given_up_already() -> None:
    def waits(code: ReasonCode, *needs: str) -> SimpleNamespace:
        return SimpleNamespace(reason=Reason(code, "test"), needs=needs)

    explained = {
        "one": waits(ReasonCode.no_room, "t1"),
        "two": waits(ReasonCode.quota, "t1", "t2"),
        "mixed": waits(ReasonCode.no_room, "t1", "somebody"),
        "evicts": waits(ReasonCode.evicting, "t2"),
        "soon": waits(ReasonCode.behind),
    }

    async def ask(door: str, *args: str) -> Any:
        return explained[args[0]] if door == "explain" else {"pools": {"gpus": {"queue": ("t3", *explained)}}}

    def place(task: str, up: bool = True) -> SimpleNamespace:
        return SimpleNamespace(member=SimpleNamespace(task=SimpleNamespace(id=task)), up=up, taken=False)

    async def play() -> None:
        states = {"w1": WorkerState.active, "w2": WorkerState.active, "w3": WorkerState.inactive}
        launcher = SimpleNamespace(
            ask=ask,
            worker_slots={"w1": place("t1"), "w2": place("t2"), "w3": place("t3", up=False)},
            pool=SimpleNamespace(workers=lambda: [SimpleNamespace(worker=w, state=s) for w, s in states.items()]),
        )
        takers = DemandWatch(launcher, use_s=60.0)  # type: ignore[arg-type]
        assert await takers.find() == (rollout.Taker("one", 1, 60.0), rollout.Taker("two", 2, 60.0))
        states["w2"] = WorkerState.draining
        assert await takers.find() == (rollout.Taker("two", 2, 60.0),)
        launcher.worker_slots["w2"].taken = True
        assert len(await takers.find()) == 2, "what the slots' pool takes is for somebody else"

    run(play())


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"min_workers": 3, "max_workers": 2}, {"per_node": 0}):
        with pytest.raises(InputError):
            EnginesPerNode(Ledger(), **wrong)  # type: ignore[arg-type]
    for resources, said in (({"GPU": 1}, "did you mean gpu"), ({}, "needs resources"), ({"gpu": -1}, "negative")):
        with pytest.raises(InputError, match=said):
            SlotLauncher(None, None, "gpus", llama(), resources=resources)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="above 0 seconds"):
        DemandWatch(None, use_s=0.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="0 workers"):
        engines_as_processes(None, llama(), 0)  # type: ignore[arg-type]
