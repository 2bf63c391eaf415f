"""Nodes of a real Ray as the controller sees them: killed, frozen, drained, back again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

import storm
from storm import Work, below, is_process, kill, lives
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.pool import TaskState
from trimtab.runtime.client.session import Pool, Session, connect
from trimtab.runtime.client.task import TaskFailedError
from trimtab.runtime.controller.rpc import ClientUpdate
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.nodes import HEAD
from waiting import until

WAIT_S = 240.0
UNIT = {"cpu": 1, "seat": 1}


class Nodes:
    """A head without seats, and nodes with one seat each."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._made: dict[str, Any] = {}

    def add(self, **labels: str) -> str:
        node = self.cluster.add_node(num_cpus=1, resources={"seat": 1}, labels=labels)
        self._made[node.node_id] = node
        return str(node.node_id)

    def processes(self, node: str) -> list[int]:
        raylets = [info.process.pid for info in self._made[node].all_processes["raylet"]]
        return [one for raylet in raylets for one in (raylet, *below(raylet))]

    def kill(self, node: str) -> None:
        for pid in self.processes(node):
            kill(pid)

    def remove(self, node: str) -> None:
        made = self._made.pop(node, None)
        if made is not None:
            self.cluster.remove_node(made, allow_graceful=False)


class Seat:
    """Keeps a number, and says where it is."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> int:
        self.number += 1
        return self.number

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def save(self) -> int:
        return self.number

    def load(self, number: int) -> None:
        self.number = number


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cloudpickle.register_pickle_by_value(storm)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Nodes()
    ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    cloudpickle.unregister_pickle_by_value(storm)


@pytest.fixture(scope="module")
def session(nodes: Nodes) -> Iterator[Session]:
    session = connect(name="nodes")
    yield session
    session.shutdown()


@pytest.fixture(scope="module")
def pool(session: Session) -> Pool:
    return session.pool("p", {"cpu": 8, "seat": 8}, reuse=False)


def view(session: Session, node: str) -> NodeView | None:
    news: ClientUpdate = session.ask("news", {}, -1, 0.0)
    return next((one for one in news.nodes if one.node == node), None)


def joined(session: Session, node: str) -> None:
    until(lambda: node in [one["node"] for one in session.status()["nodes"]], f"{node} did not join")


def listed(node: str) -> bool:
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def fleet(session: Session) -> dict[str, dict[str, Any]]:
    return {one["node"]: one for one in session.status()["fleet"]}


@pytest.mark.long
def test_a_killed_node_is_known_to_be_lost_before_ray_knows_it(nodes: Nodes, session: Session, pool: Pool) -> None:
    first = nodes.add()
    task = pool.submit(Seat, awaits_node=True, resources=UNIT, restarts=-1)
    node, _ = task.call("where")
    assert node == first
    other = nodes.add()
    joined(session, other)
    version = session.ask("news", {}, -1, 0.0).version
    nodes.kill(first)
    news: ClientUpdate = session.ask("news", {}, version, WAIT_S)
    assert first not in [one.node for one in news.nodes]
    assert listed(first), "Ray noticed it first: this shows nothing"
    assert task.call("where", timeout=WAIT_S)[0] == other
    told = [chapter.reason for chapter in task.explain().story if chapter.reason.code is ReasonCode.node_lost]
    assert told
    assert "nothing listens" in told[0].sentence
    assert fleet(session)[first]["state"] == NodeState.lost.value
    id, story = session.ask("node_story", first[:10])
    assert id == first
    assert next(chapter.state for chapter in story if chapter.state in ("ready", "lost")) == "ready"
    task.cancel()
    task.wait("ended")
    nodes.remove(first)
    nodes.remove(other)
    until(lambda: view(session, other) is None, "a removed node is still there")


def test_a_task_goes_to_a_node_with_the_label_that_it_asks_for(nodes: Nodes, session: Session, pool: Pool) -> None:
    plain, labelled = nodes.add(), nodes.add(gpu="h200")
    for node in (plain, labelled):
        joined(session, node)
    task = pool.submit(Seat, resources=UNIT, label_selector={"gpu": "in(h200, b200)"})
    assert task.call("where")[0] == labelled
    other = pool.submit(Seat, resources=UNIT, label_selector={"gpu": "b200"})
    with pytest.raises(TaskFailedError, match="no node has label gpu=b200"):
        other.wait("running", WAIT_S)
    task.cancel()
    task.wait("ended", WAIT_S)
    for node in (plain, labelled):
        nodes.remove(node)
        until(lambda node=node: view(session, node) is None, "a removed node is still there")


@pytest.mark.long  # the storm kills nodes too, and looks for two processes of a task at once
def test_processes_of_a_dead_raylet_are_gone_before_their_task_starts_again(
    nodes: Nodes, session: Session, pool: Pool, tmp_path: Path
) -> None:
    first = nodes.add()
    joined(session, first)
    work = {"id": "alone", "run": "run", "restarts": -1, "resources": UNIT}
    task = pool.submit(Work, ("alone", str(tmp_path), 3600.0), awaits_node=True, **work)
    log = tmp_path / "alone.log"
    until(log.exists, "it did not begin")
    other = nodes.add()
    joined(session, other)
    kill(nodes.processes(first)[0])  # the raylet alone
    until(lambda: len(log.read_text().split()) > 1, "it did not begin again")
    began = log.read_text().split()
    (tmp_path / "calm").touch()
    assert task.result(timeout=WAIT_S) == "result of alone"
    assert all(map(is_process, began)), f"two processes at once: {began}"
    assert len(began) == task.seen.attempt == 2
    nodes.remove(first)
    nodes.remove(other)
    until(lambda: view(session, other) is None, "a removed node is still there")


def test_a_frozen_node_is_spared_and_used_again_when_it_speaks(nodes: Nodes, session: Session, pool: Pool) -> None:
    node = nodes.add()
    task = pool.submit(Seat, awaits_node=True, resources=UNIT)
    home, pid = task.call("where")
    assert home == node
    frozen = nodes.processes(node)
    for one in frozen:
        os.kill(one, signal.SIGSTOP)
    try:
        until(lambda: seen_as(session, node, NodeState.suspect), "nobody suspects a frozen node")
        assert fleet(session)[node]["reason"]["code"] == ReasonCode.link_silent.value
    finally:
        for one in frozen:
            os.kill(one, signal.SIGCONT)
    until(lambda: seen_as(session, node, NodeState.ready), "it speaks and is not used again")
    assert task.call("where") == (node, pid)  # what ran there went on
    task.cancel()
    task.wait("ended")
    nodes.remove(node)


def seen_as(session: Session, node: str, state: NodeState) -> bool:
    seen = view(session, node)
    return seen is not None and seen.state is state


@pytest.mark.long
def test_what_was_given_up_on_a_frozen_node_is_ended_when_it_comes_back(
    nodes: Nodes, session: Session, pool: Pool
) -> None:
    node, other = nodes.add(), None
    task = pool.submit(Seat, awaits_node=True, resources=UNIT, restarts=-1)
    home, pid = task.call("where")
    assert home == node
    frozen = nodes.processes(node)
    for one in frozen:
        os.kill(one, signal.SIGSTOP)
    try:
        until(lambda: view(session, node) is None, "a frozen node is never lost")
        assert listed(node)
        other = nodes.add()
        assert task.call("where", timeout=WAIT_S)[0] == other
    finally:
        for one in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
    until(lambda: seen_as(session, node, NodeState.ready), "it never returns")
    until(lambda: not lives(pid), "what was given up there still runs")
    assert fleet(session)[node]["reason"]["code"] == ReasonCode.returned.value
    task.cancel()
    task.wait("ended")
    nodes.remove(node)
    nodes.remove(other)


def test_what_is_on_a_draining_node_moves_with_its_state_and_the_node_goes(
    nodes: Nodes, session: Session, pool: Pool
) -> None:
    first = nodes.add()
    task = pool.submit(Seat, awaits_node=True, resources=UNIT)
    assert [task.call("count") for _ in range(3)] == [1, 2, 3]
    other = nodes.add()
    joined(session, other)
    seen = session.drain_node(first[:12], 4.0, "the spot market")
    assert (seen.state, seen.reason.code) == (NodeState.draining, ReasonCode.drain_asked)
    assert "the spot market" in seen.reason.sentence
    assert first in draining.draining(ray)
    until(lambda: not listed(first), "something holds the empty node up")
    assert task.call("where", timeout=WAIT_S)[0] == other
    assert task.call("count") == 4
    told = [chapter.reason for chapter in task.explain().story if chapter.reason.code is ReasonCode.node_draining]
    assert told
    assert "the spot market" in told[0].sentence
    until(lambda: fleet(session)[first]["state"] == NodeState.left.value, "it went, and nobody knows")
    task.cancel()
    task.wait("ended")
    nodes.remove(other)


@pytest.mark.long
def test_a_drain_by_others_is_seen_and_outlasts_the_controller(nodes: Nodes, session: Session, pool: Pool) -> None:
    first = nodes.add()
    task = pool.submit(Seat, awaits_node=True, resources=UNIT)
    assert task.call("where")[0] == first
    draining.drain(ray, first, 30.0, "an autoscaler")
    until(lambda: seen_as(session, first, NodeState.draining), "nobody sees that Ray drains the node")
    kill(session.status()["pid"])
    assert seen_as(session, first, NodeState.draining)
    assert fleet(session)[first]["reason"]["code"] == ReasonCode.drain_seen.value
    other = nodes.add()  # may take longer than the drain
    until(lambda: not listed(first), "something holds the empty node up")
    assert task.call("where", timeout=WAIT_S)[0] == other
    task.cancel()
    task.wait("ended")
    nodes.remove(other)


@pytest.mark.parametrize(
    ("node", "deadline_s", "said"),
    [("nowhere", 10.0, "there is no node nowhere"), ("head", 10.0, "head"), ("worker", -1.0, "has passed already")],
)
def test_a_wrong_drain_is_refused(nodes: Nodes, session: Session, node: str, deadline_s: float, said: str) -> None:
    head = next(one["NodeID"] for one in ray.nodes() if HEAD in one["Resources"])
    with pytest.raises(InputError, match=said):
        session.drain_node({"head": head, "worker": head}.get(node, node), deadline_s)
    assert draining.draining(ray) == {}


def test_what_a_client_says_of_its_group_is_shown_until_it_leaves(nodes: Nodes) -> None:
    facts = {"size": 1, "wanted": 4, "redone": 2, "restarts": 1, "join_to_step_s": [1.5], "drain_lead_s": []}
    with connect(name="nodes") as other:
        other.ask("publish", "group", "trainers", facts, other.client)
        other.ask("want", other.client, [UNIT] * 4)
        other._keep_lease()
        status = other.status()
        assert [(one["id"], one["size"]) for one in status["groups"]] == [("trainers", 1)]
        assert status["wanted"] == [UNIT] * 4
        until(lambda: len(asked_of_autoscaler()) == 4, "the autoscaler is not asked")
        assert asked_of_autoscaler()[0] == {"CPU": 1, "seat": 1}
    with connect(name="nodes") as later:
        until(lambda: later.status()["groups"] == [], "it stays though its client has left")
        until(lambda: asked_of_autoscaler() == [], "more is asked than anybody wants")


def asked_of_autoscaler() -> list[dict[str, float]]:
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get("autoscaler_resource_request")
    return list(json.loads(found)) if found else []


def test_news_come_when_a_task_changes_and_not_before(nodes: Nodes, session: Session, pool: Pool) -> None:
    task = pool.submit(Seat, resources={"cpu": 1, "seat": 2}, awaits_node=True, wait_s=2.0)
    news: ClientUpdate = session.ask("news", {task.id: (TaskState.waiting, 0)}, -1, 0.0)
    assert news.tasks == () or task.state() is TaskState.failed
    while not news.tasks:  # nodes of other tests may still be going
        news = session.ask("news", {task.id: (TaskState.waiting, 0)}, news.version, WAIT_S)
    assert [(one.id, one.state) for one in news.tasks] == [(task.id, TaskState.failed)]
    version = session.ask("news", {}, -1, 0.0).version
    quiet: ClientUpdate = session.ask("news", {task.id: (TaskState.failed, 0)}, version, 0.1)
    assert quiet.tasks == ()


def test_nothing_of_the_links_is_left_in_the_journal_but_what_happened(session: Session) -> None:
    directory = Path(session.status()["journal"]["dir"]) / "nodes"
    lines = [json.loads(line) for path in directory.glob("journal-*.jsonl") for line in path.read_text().splitlines()]
    kinds = {line[1] for line in lines if isinstance(line, list)}
    assert {"NodeSeen", "NodeGone", "ConnectionBroken", "DrainRequested"} <= kinds
