"""A run hears of its cluster whatever goes wrong on the way."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import pytest

from jobs import cluster
from trimtab.core.errors import UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.replan.events import ClusterChangeCause
from trimtab.model.nodes import NodeFacts, NodeState, NodeView
from trimtab.model.pool import PoolSpec, TaskState
from trimtab.runtime.client.session import Session
from trimtab.runtime.controller.rpc import ClientUpdate, TaskSnapshot
from trimtab.runtime.run import ray_executor as news
from trimtab.runtime.run.ray_executor import ClusterListener, NodeSelection, RunNodes


def view(node: str, gpus: int = 2) -> NodeView:
    facts = NodeFacts(Resources.of(gpu=gpus), (), "", "", node)
    return NodeView(node=node, state=NodeState.ready, facts=facts, since=0.0, reason=Reason(ReasonCode.began, ""))


class Asked:
    """A controller that answers with a node more than before, and one task."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)

    def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        if self.faults:
            raise self.faults.pop(0)
        if method == "pool":
            return PoolSpec("p", Resources.of(gpu=4))
        return ClientUpdate(1, (view("a"), view("b")), 0)

    def tasks(self, pool: str) -> list[TaskSnapshot]:
        return [TaskSnapshot("t", pool, TaskState.running, Reason(ReasonCode.began, ""), 5.0, (), 1, 0, "")]


def heard(asked: Asked, refuse: int = 0) -> list[Any]:
    """What a run hears, where its own ears fail so often."""
    nodes = NodeSelection(cluster(2))
    first = nodes.first([view("a")])
    told: list[Any] = []
    both = threading.Event()
    left = [refuse, refuse]

    def on_cluster(seen: RunNodes, why: ClusterChangeCause) -> None:
        if left[0]:
            left[0] -= 1
            raise ValueError("the run did not understand")
        told.append(why)

    def on_task(task: TaskSnapshot) -> None:
        if left[1]:
            left[1] -= 1
            raise ValueError("nor this")
        told.append(task.id)
        both.set()

    listening = ClusterListener(cast(Session, asked), "p", nodes, first, on_cluster, on_task)
    listening.start()
    assert both.wait(60)
    listening.close()
    return told


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "RETRY_S", 0.01)


def test_what_a_run_failed_to_take_in_is_told_again() -> None:
    assert heard(Asked(), refuse=1) == [ClusterChangeCause.joined, "t"]


def test_a_controller_that_is_away_is_said_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        told = heard(Asked(*[UnreachableError("the controller is gone")] * 5))
    assert told == [ClusterChangeCause.joined, "t"]
    assert caplog.text.count("the controller is gone") == 1


def test_an_error_that_nothing_was_known_of_is_logged_with_its_traceback_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        told = heard(Asked(KeyError("odd")))
    assert told == [ClusterChangeCause.joined, "t"]
    assert [record.exc_info is not None for record in caplog.records] == [True]
