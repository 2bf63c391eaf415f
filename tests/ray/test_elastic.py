"""Elastic groups on a real Ray of several nodes: joins, losses, drains, hangs, evictions, with training that counts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm import below, kill
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.demos.elastic_training import TOLERANCE, ElasticTrainer, fixed_run
from trimtab.runtime.client.session import Pool, Session, connect
from trimtab.runtime.elastic.group import ElasticGroup, GroupGaveUpError, GroupLogEntry, StepFailedError, StepResult
from trimtab.runtime.elastic.member import MemberWorld, MemberWrapper, PartLostError, WorldMismatchError
from waiting import until

WAIT_S = 240.0
GPU = {"gpu": 1}


class Nodes:
    """A cluster of a head without GPUs and nodes of one GPU each, added as tests need them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.there: list[Any] = []
        self.session: Session | None = None

    def add(self, count: int = 1) -> None:
        self.there += [self.cluster.add_node(num_cpus=1, num_gpus=1, wait=False) for _ in range(count)]
        until(lambda: {one.node_id for one in self.there} <= alive())

    def have(self, count: int) -> None:
        """At least so many nodes that are there to stay, and are known to the controller, which hears of them later."""
        self.add(max(0, count - len(self.there)))
        until(lambda: {one.node_id for one in self.there} <= self.ready())

    def ready(self) -> set[str]:
        if self.session is None:
            return alive()
        return {one["node"] for one in self.session.status()["fleet"] if one["state"] == "ready"}

    def kill(self, node: Any) -> None:
        """As a machine is lost: every process of it at once."""
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        for pid in [one for raylet in raylets for one in (raylet, *below(raylet))]:
            kill(pid)
        self.there.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    nodes = Nodes()
    ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def session(nodes: Nodes) -> Iterator[Session]:
    session = nodes.session = connect(name=f"elastic-{uuid.uuid4().hex[:6]}")
    yield session
    session.shutdown()


@pytest.fixture
def happened() -> list[GroupLogEntry]:
    return []


def alive() -> set[str]:
    import ray

    return {one["NodeID"] for one in ray.nodes() if one["Alive"]}


def kinds(happened: list[GroupLogEntry]) -> list[str]:
    return [one.kind for one in happened]


def ledgers(session: Session) -> Pool:
    """One pool for most groups, so that its warm hosts serve them one after another."""
    return session.pool("ledgers", {"gpu": 64}, reuse=False, warm_each=1)


class Ledger:
    """A member that adds up what all computed, and gets into trouble as files in a directory say."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.total, self.steps = 0, []
        self.world = MemberWorld(0, 1, 0, 0)

    def enter(self, world: MemberWorld) -> None:
        self.world = world

    def compute(self, step: int, batch: int) -> int:
        self.trouble(f"compute-{self.world.rank}")
        return sum(range(100)[self.world.share(100)]) * batch

    def commit(self, step: int, parts: list[int]) -> dict[str, Any]:
        self.trouble(f"commit-{self.world.rank}")
        self.total += sum(parts)
        self.trouble(f"half-{self.world.rank}")
        self.steps.append(step)
        return {"total": self.total, "steps": list(self.steps), "pid": os.getpid(), "epoch": self.world.epoch}

    def health(self) -> bool:
        return not self.taken(f"health-{self.world.rank}")

    def save(self) -> tuple[int, list[int]]:
        return self.total, self.steps

    def load(self, state: tuple[int, list[int]]) -> None:
        self.total, self.steps = state[0], list(state[1])

    def trouble(self, name: str) -> None:
        word = self.taken(name)
        if word == "hang":
            time.sleep(600)
        elif word == "die":
            os._exit(1)
        elif word == "die late":
            time.sleep(0.5)
            os._exit(1)
        elif word == "raise":
            raise ValueError("as asked")

    def taken(self, name: str) -> str | None:
        """What is to happen, once."""
        try:
            word = (self.directory / name).read_text()
            (self.directory / name).unlink()
        except OSError:
            return None
        return word


class Counted:
    """A group of ledgers whose every step is checked: each member has applied every step exactly once."""

    def __init__(self, session: Session, directory: Path, happened: list[GroupLogEntry], **settings: Any) -> None:
        self.directory = directory
        settings.setdefault("pool", ledgers(session))
        settings = {"min": 1, "step_timeout_s": 30.0, "health_every_s": 0.0, "back_off_s": 0.1, **settings}
        self.group = ElasticGroup(
            Ledger, (str(directory),), session=session, per_node=GPU, tell=happened.append, **settings
        )
        self.total = 0

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()

    def trouble(self, where: str, rank: int, word: str) -> None:
        (self.directory / f"{where}-{rank}").write_text(word)

    def step(self) -> StepResult:
        result = self.group.step(result_number := self.group.steps + 1, timeout=WAIT_S)
        self.total += result_number * sum(range(100))
        assert result.number == result_number
        for value in result.values:
            if value is not None:
                assert value["steps"] == list(range(1, result.number + 1)), "a step was counted twice, or not at all"
                assert value["total"] == self.total, "a step was counted half"
                assert value["epoch"] == result.world.epoch, "a member is in another world"
        return result

    def until(self, size: int) -> StepResult:
        """Step until the world has so many members."""
        deadline = time.monotonic() + WAIT_S
        while True:
            result = self.step()
            if result.size == size:
                return result
            assert time.monotonic() < deadline, f"there are {result.size} members, not {size}: {self.group.view()}"
            time.sleep(0.05)


def test_training_goes_on_through_joins_a_loss_and_a_drain_as_if_membership_were_fixed(
    nodes: Nodes, session: Session, happened: list[GroupLogEntry]
) -> None:
    nodes.have(1)
    losses: list[float] = []
    sizes: list[int] = []

    with ElasticGroup(
        ElasticTrainer, ("numpy",), session=session, per_node=GPU, step_timeout_s=60.0, tell=happened.append
    ) as group:

        def train(size: int) -> StepResult:
            deadline = time.monotonic() + WAIT_S
            while True:
                result = group.step(timeout=WAIT_S)
                losses.append(next(one.loss for one in result.values if one is not None))
                sizes.append(result.size)
                assert sum(one.rows for one in result.values if one is not None) <= 384
                if result.size == size:
                    return result
                assert time.monotonic() < deadline
                time.sleep(0.2)

        start = len(nodes.there)
        first = train(start)
        assert "joined" not in kinds(happened), "nodes that were there at the start are not new"
        nodes.add(2)
        grown = train(start + 2)
        assert grown.world.nodes[:start] == first.world.nodes, "who was there keeps its rank"
        assert kinds(happened).count("joined") == 2

        lost = nodes.there[1]
        nodes.kill(lost)
        after = train(start + 1)
        assert lost.node_id not in after.world.nodes
        assert "node lost" in kinds(happened)

        leaver = nodes.there[0]
        session.drain_node(leaver.node_id, 8.0, "a test")
        drained = train(start)
        assert leaver.node_id not in drained.world.nodes
        assert drained.redone == 0, "who leaves in time interrupts nothing"
        nodes.there.remove(leaver)

        nodes.add(1)
        train(start + 1)
        for _ in range(5):
            train(start + 1)
        assert group.steps == len(losses)
    expected = fixed_run(len(losses), members=2)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert set(sizes) >= {start, start + 2, start + 1}
    until(lambda: leaver.node_id not in alive())


def test_a_group_that_starts_with_workers_takes_each_once_and_leaves_no_placement_group(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(3)
    with Counted(session, tmp_path, happened) as counted:
        world = counted.until(len(nodes.there)).world
        order = [one["node"] for one in session.status()["fleet"]]
        assert list(world.nodes) == sorted(world.nodes, key=order.index), "ranks follow the order of nodes"
        assert len(set(world.members)) == world.size
        assert world.reason.sentence
        for _ in range(3):
            assert counted.step().size == len(nodes.there)
        assert kinds(happened).count("started") == len(nodes.there)
        assert "joined" not in kinds(happened)
        states = group_states()
        assert states == ["CREATED"] * len(nodes.there), "no group waits, and nobody has two"
    until(lambda: not group_states())


def group_states() -> list[str]:
    from ray.util import placement_group_table

    states = [str(one["state"]) for one in placement_group_table().values()]
    return [one for one in states if one != "REMOVED"]


@pytest.mark.long
def test_a_member_that_hangs_is_ended_and_its_step_is_done_again(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, step_timeout_s=1.5, max=2) as counted:
        before = counted.until(2)
        counted.trouble("compute", 1, "hang")
        result = counted.step()
        assert result.redone == 1
        assert "redone" in kinds(list(result.changes))
        after = counted.until(2)
        assert len({value["pid"] for value in (*before.values, *after.values)}) == 3
        story = [one for one in happened if one.reason is not None and one.reason.code is ReasonCode.hung]
        assert story, "the reason says that it hung"


def test_an_unhealthy_member_is_replaced_and_gets_the_state_of_the_others(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, health_every_s=0.2, max=2) as counted:
        before = counted.until(2)
        counted.trouble("health", 0, "unwell")
        until(lambda: any(one.reason is not None and one.reason.code is ReasonCode.unhealthy for one in happened))
        after = counted.until(2)
        assert before.values[0]["pid"] not in {value["pid"] for value in after.values}
        assert counted.group.view()["restarts"] == 1


@pytest.mark.long
def test_two_losses_at_once_are_made_good(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(3)
    with Counted(session, tmp_path, happened, max=3) as counted:
        counted.until(3)
        counted.trouble("compute", 0, "die")
        counted.trouble("compute", 2, "die")
        result = counted.step()
        assert result.redone >= 1
        counted.until(3)
        assert kinds(happened).count("lost") == 2


@pytest.mark.long
def test_a_member_lost_while_others_commit_does_not_have_the_step_counted_twice(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(3)
    with Counted(session, tmp_path, happened, max=3) as counted:
        counted.until(3)
        counted.trouble("commit", 1, "die late")
        result = counted.step()
        assert result.redone == 0, "the others had committed: it counts"
        assert result.values[1] is None
        counted.until(3)


@pytest.mark.long
def test_a_member_whose_commit_raises_is_replaced_by_one_that_has_the_step(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, max=2) as counted:
        counted.until(2)
        counted.trouble("commit", 0, "raise")
        assert counted.step().values[0] is None
        counted.until(2)


def test_what_a_member_raises_is_raised_and_the_step_does_not_count(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, max=2) as counted:
        counted.until(2)
        steps = counted.group.steps
        counted.trouble("compute", 1, "raise")
        with pytest.raises(StepFailedError, match=r"compute of .* raised ValueError: as asked") as caught:
            counted.group.step(1, timeout=WAIT_S)
        assert isinstance(caught.value.__cause__, ValueError)
        assert counted.group.steps == steps
        counted.step()
        assert "lost" not in kinds(happened)


@pytest.mark.long
def test_a_commit_that_raises_half_way_leaves_no_half_of_a_step_in_any_member(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, max=2, keep_state=True) as counted:
        counted.until(2)
        counted.trouble("half", 1, "raise")
        assert counted.step().values[1] is None, "the other had committed: the step counts"
        counted.until(2)
        steps = counted.group.steps
        for rank in (0, 1):
            counted.trouble("half", rank, "raise")
        with pytest.raises(StepFailedError, match=r"commit of .* raised ValueError: as asked") as caught:
            counted.group.step(steps + 1, timeout=WAIT_S)
        assert isinstance(caught.value.__cause__, ValueError)
        assert counted.group.steps == steps
        counted.step()  # every member has applied every step once, and nothing else
        assert "replaced" in str(caught.value.hint)
        counted.until(2)


def test_too_few_members_are_said_and_given_up_after_the_deadline_with_no_step_counted(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(1)
    with Counted(session, tmp_path, happened, min=40, wait_s=1.5) as counted:
        with pytest.raises(GroupGaveUpError, match="of at least 40 members") as caught:
            counted.group.step(1, timeout=WAIT_S)
        assert counted.group.steps == 0
        assert "trimtab why" in str(caught.value.hint)
        assert "waits" in kinds(happened)
        with pytest.raises(GroupGaveUpError):
            counted.group.step(1, timeout=WAIT_S)


def test_without_any_node_for_members_no_step_completes(nodes: Nodes, session: Session, tmp_path: Path) -> None:
    with ElasticGroup(Ledger, (str(tmp_path),), session=session, per_node={"worker_unit": 1}, wait_s=0.5) as group:
        with pytest.raises(GroupGaveUpError, match="0 of at least 1"):
            group.step(1, timeout=WAIT_S)
        assert group.steps == 0


def test_a_constructor_that_raises_is_said_at_once(nodes: Nodes, session: Session) -> None:
    nodes.have(1)
    with (
        ElasticGroup(Ledger, (), session=session, pool=ledgers(session), per_node=GPU, wait_s=60.0) as group,
        pytest.raises(GroupGaveUpError, match="missing 1 required positional argument"),
    ):
        group.step(1, timeout=WAIT_S)


@pytest.mark.long
def test_a_member_leaves_for_a_task_of_higher_priority_and_the_group_grows_again(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    count = len(nodes.there)
    session.preemption(same_pool_gap=1.0, cancel_timeout_s=2.0)
    pool = session.pool(f"shared-{uuid.uuid4().hex[:6]}", {"gpu": 64}, reuse=False)
    with Counted(session, tmp_path, happened, pool=pool, priority=2.0, notice_s=10.0, handover_s=2.0) as counted:
        counted.until(count)
        urgent = pool.submit(Ledger, (str(tmp_path),), resources=GPU, priority=9.0)
        result = counted.until(count - 1)
        assert result.redone == 0, "notice was given, so nothing was interrupted"
        urgent.wait("running", timeout=WAIT_S)
        counted.step()
        urgent.complete(keep_slot=False)
        counted.until(count)
    pool.drop()


@pytest.mark.long
def test_the_only_member_keeps_its_state_when_its_room_is_taken_and_given_back(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(1)
    session.preemption(same_pool_gap=1.0, cancel_timeout_s=2.0)
    pool = session.pool(f"single-{uuid.uuid4().hex[:6]}", {"gpu": 1}, reuse=False)
    settings = {"pool": pool, "priority": 2.0, "max": 1, "notice_s": 2.0, "handover_s": 1.0}
    with Counted(session, tmp_path, happened, **settings) as counted:
        counted.until(1)
        counted.step()
        urgent = pool.submit(Ledger, (str(tmp_path),), resources=GPU, priority=9.0)
        urgent.wait("running", timeout=WAIT_S)
        urgent.complete(keep_slot=False)
        counted.step()
        counted.step()
    pool.drop()


@pytest.mark.long
def test_all_state_is_lost_with_the_only_member_unless_a_copy_is_kept(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(1)
    with Counted(session, tmp_path, happened, max=1, keep_state=True) as counted:
        counted.step()
        counted.trouble("compute", 0, "die")
        assert counted.step().redone == 1
    with Counted(session, tmp_path, happened, max=1) as counted:
        counted.step()
        counted.trouble("compute", 0, "die")
        with pytest.raises(GroupGaveUpError, match="every member that had the state of step 1 is lost"):
            counted.group.step(1, timeout=WAIT_S)


class Engine:
    """No second half, no state: a generation engine, or an environment."""

    def step(self, number: int, batch: list[int]) -> list[int]:
        return [number * one for one in batch]


def test_a_class_with_only_a_step_gives_its_values_by_rank(nodes: Nodes, session: Session) -> None:
    nodes.have(2)
    with ElasticGroup(Engine, session=session, pool=ledgers(session), per_node=GPU, min=2, max=2) as group:
        result = group.step([1, 2], timeout=WAIT_S)
        assert result.values == ([1, 2], [1, 2])
        assert group.step([1, 2], timeout=WAIT_S).values == ([2, 4], [2, 4])


def test_training_goes_on_while_the_controller_is_killed_and_comes_back(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, max=2) as counted:
        counted.until(2)
        pid = session.status()["pid"]
        assert kill(pid)
        for _ in range(5):
            assert counted.step().redone == 0
        until(lambda: session.status()["pid"] != pid)
        counted.trouble("compute", 1, "die")
        assert counted.step().redone == 1
        counted.until(2)


def test_a_part_that_does_not_come_is_not_waited_for_once_its_maker_is_gone(nodes: Nodes, tmp_path: Path) -> None:
    import ray

    shell = MemberWrapper(Ledger, (str(tmp_path),), {})
    shell.enter(MemberWorld(0, 2, 1, 0))
    _, part = shell.compute(1, 1, 1)
    never = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
    threading.Timer(0.3, shell.beside_let_go).start()
    with pytest.raises(PartLostError, match="1 of 2 parts did not come"):
        shell.commit(1, 1, [ray.put(part), never])
    ray.cancel(never, force=True)
    assert shell.facts().committed == 0
    done = shell.commit(1, 1, [ray.put(part), ray.put(0)])
    assert shell.commit(1, 1, []) is done, "asked again, it says what it said"
    with pytest.raises(WorldMismatchError, match="for world 2, this member is in 1"):
        shell.compute(2, 2, 1)
    with pytest.raises(WorldMismatchError, match="step 7"):
        shell.commit(7, 1, [])


@pytest.mark.long
def test_a_frozen_process_is_noticed_by_its_health_call(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(2)
    with Counted(session, tmp_path, happened, health_every_s=0.5, health_timeout_s=3.0, max=2) as counted:
        frozen = counted.until(2).values[1]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        result = counted.until(2)
        assert frozen not in {value["pid"] for value in result.values}
        assert any(one.reason is not None and one.reason.code is ReasonCode.unhealthy for one in happened)


@pytest.mark.long
def test_training_goes_on_when_two_nodes_are_killed_at_once(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(4)
    count = len(nodes.there)
    with Counted(session, tmp_path, happened) as counted:
        counted.until(count)
        for node in nodes.there[:2]:
            nodes.kill(node)
        counted.until(count - 2)
        for _ in range(5):
            assert counted.step().size == count - 2


class Episodes:
    """Every member has something of its own."""

    def __init__(self) -> None:
        self.mine: list[str] = []

    def enter(self, world: MemberWorld) -> None:
        if not self.mine and not world.step:
            self.mine = [f"episode-{world.rank}"]

    def compute(self, step: int, batch: Any) -> int:
        return 1

    def commit(self, step: int, parts: list[int]) -> list[str]:
        return self.mine

    def save(self) -> list[str]:
        return self.mine

    def load(self, state: list[str]) -> None:
        self.mine = state

    def merge(self, states: list[list[str]]) -> None:
        self.mine = self.mine + [one for state in states for one in state]


def test_what_a_leaver_has_of_its_own_is_merged_and_a_newcomer_begins_with_nothing_of_others(
    nodes: Nodes, session: Session
) -> None:
    nodes.have(2)
    pool = ledgers(session)
    with ElasticGroup(Episodes, session=session, pool=pool, per_node=GPU, min=1, max=2) as group:
        group.resize(2)
        until(lambda: len([one for one in group.view()["members"] if one["state"] == "ready"]) == 2)
        assert group.step(timeout=WAIT_S).values == (["episode-0"], ["episode-1"])
        group.resize(1)
        until(lambda: group.step(timeout=WAIT_S).values == (["episode-0", "episode-1"],))
        group.resize(2)
        until(lambda: sorted(group.step(timeout=WAIT_S).values) == [[], ["episode-0", "episode-1"]])
        with pytest.raises(InputError, match="cannot have 3 members"):
            group.resize(3)
        group.step(timeout=WAIT_S)


def test_what_cannot_be_a_member_or_a_group_is_said_before_anything_starts() -> None:
    class Wrong:
        def comptue(self) -> None: ...

    class Forgetful:
        def compute(self, step: int, batch: Any) -> None: ...
        def save(self) -> None: ...

    for kind, settings, words in (
        (Wrong, {}, "did you mean comptue"),
        (Forgetful, {}, "no load"),
        (Engine, {"min": 3, "max": 2}, "max 2 is less than min 3"),
        (Engine, {"per_node": {}}, "must ask for something"),
        (Engine, {"notice_s": 1.0, "handover_s": 5.0}, "leaves no time"),
    ):
        with pytest.raises(InputError, match=words):
            ElasticGroup(kind, **settings)


def test_a_group_is_shown_by_the_controller_and_goes_with_its_driver(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(1)

    def shown() -> list[dict[str, Any]]:
        return [one for one in session.status()["groups"] if one["id"] == "seen"]

    with Counted(session, tmp_path, happened, name="seen") as counted:
        counted.step()
        counted.step()
        group = until(lambda: [one for one in shown() if one["step"] == 2])[0]
        assert group["size"] >= 1
        assert group["wanted"] == len(nodes.there)
        assert group["story"]
        with pytest.raises(InputError, match="a group of this name"):
            ElasticGroup(Engine, session=session, per_node=GPU, name="seen")
    until(lambda: not shown())
    tasks = [task for task in session.tasks() if task.id.startswith("seen-")]
    assert {task.state.value for task in tasks} == {"done"}


@pytest.mark.long
def test_two_drains_two_seconds_apart_cause_one_change_of_the_world(
    nodes: Nodes, session: Session, tmp_path: Path, happened: list[GroupLogEntry]
) -> None:
    nodes.have(3)
    count = len(nodes.there)
    with Counted(session, tmp_path, happened) as counted:
        epoch = counted.until(count).world.epoch
        leavers = nodes.there[:2]
        session.drain_node(leavers[0].node_id, 30.0, "first")
        apart = time.monotonic() + 2.0
        while time.monotonic() < apart:
            counted.step()
            time.sleep(0.05)
        session.drain_node(leavers[1].node_id, 30.0, "second")
        result = counted.until(count - 2)
        assert result.world.epoch == epoch + 1
        for leaver in leavers:
            nodes.there.remove(leaver)
        until(lambda: not {one.node_id for one in leavers} & alive())


LOOP = Path(__file__).parents[2] / "examples" / "auto_scaling" / "training_loop_with_autoscaling.py"


def started_loop(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(LOOP), "--backend", "numpy", "--rows", "100", "--pace", "0.1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of_its_controller() -> list[str]:
    """What the controller that the loop makes for itself has in the cluster."""
    from ray.util import list_named_actors, placement_group_table

    groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    names = [one["name"] for one in list_named_actors(all_namespaces=True)]
    return [one for one in names + groups if one.startswith("trimtab:trimtab:")]


@pytest.mark.long
def test_the_example_loop_shows_its_steps_and_leaves_nothing_behind_after_ctrl_c(nodes: Nodes) -> None:
    nodes.have(1)
    loop = started_loop("--address", nodes.cluster.address, "--max", "1")
    try:
        assert loop.stdout is not None
        said: list[str] = []
        deadline = time.monotonic() + WAIT_S
        while not any("Step 3 completed" in line for line in said):
            assert time.monotonic() < deadline, said
            said.append(loop.stdout.readline())
        loop.send_signal(signal.SIGINT)
        rest, _ = loop.communicate(timeout=WAIT_S)
    finally:
        loop.kill()
    assert loop.returncode == 130, rest
    text = "".join(said)
    for words in (
        "🎯 DYNAMIC TRAINING LOOP STARTED",
        "✅ Created placement group g",
        "🎭 Spawned training actor 0 on node",
        "🚀 Running training step 1 on 1 actors...",
        "📊 Step 1 completed:\n   - 1 actors trained\n   - Average duration: ",
        "   - Throughput: ",
        "   - Actor 0: CPU training: loss=",
    ):
        assert words in text, text
    assert "the cluster is unchanged" in rest
    until(lambda: not of_its_controller())


@pytest.mark.long
def test_members_and_pool_of_a_driver_that_is_killed_end_by_themselves(nodes: Nodes) -> None:
    nodes.have(1)
    loop = started_loop("--address", nodes.cluster.address, "--max", "1")
    assert loop.stdout is not None
    while "Step 1 completed" not in loop.stdout.readline():
        assert loop.poll() is None
    loop.kill()
    loop.communicate(timeout=WAIT_S)
    session = connect()  # to the controller that it made, and could not end
    try:
        assert session.status()["pools"]
        until(lambda: not session.status()["pools"])
        until(lambda: not sum(one["ready"] for one in session.status()["warm_hosts"].values()))
        assert not session.status()["groups"]
    finally:
        session.shutdown()


def test_the_example_loop_says_how_to_start_a_cluster_where_there_is_none() -> None:
    loop = started_loop("--address", "127.0.0.1:1")
    said, _ = loop.communicate(timeout=WAIT_S)
    assert loop.returncode == 4
    assert "No Ray cluster found" in said
    assert "./start_ray_cluster.sh" in said
    assert "Traceback" not in said
