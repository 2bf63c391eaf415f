"""What any machine refuses changes nothing of it: not even its clock, however late the ask comes."""

from __future__ import annotations

from typing import Any

import pytest

from loop_world import first_plan, nodes, workflow
from trimtab.fleet import group_events, node_events, rollout_events
from trimtab.fleet.group import GroupMachine
from trimtab.fleet.nodes import NodeMachine
from trimtab.fleet.rollout import RolloutMachine
from trimtab.loop import events as loop_events
from trimtab.loop.machine import LoopMachine
from trimtab.model.errors import InputError
from trimtab.model.fleet import GroupSpec
from trimtab.model.pool import PoolSpec, TaskSpec
from trimtab.model.resources import Resources
from trimtab.model.workflow import Job
from trimtab.pool import events as pool_events
from trimtab.pool.machine import PoolMachine

GPU = Resources.of(gpu=1)


def pool() -> PoolMachine:
    machine = PoolMachine()
    machine.handle(pool_events.PoolEnsured(PoolSpec("p", GPU)), 1.0)
    return machine


def loop() -> LoopMachine:
    cluster = nodes(4, 4)
    machine = LoopMachine(workflow(), cluster, first_plan(Job(cluster, workflow())))
    machine.handle(loop_events.Tick(), 1.0)
    return machine


@pytest.mark.parametrize(
    ("machine", "wrong"),
    [
        (pool(), pool_events.Submitted(TaskSpec("t", "nowhere", (GPU,)))),
        (pool(), pool_events.PoolEnsured(PoolSpec("p", GPU.plus(GPU)))),
        (pool(), pool_events.CancelAsked("nothing")),
        (pool(), pool_events.NodeCordoned("nowhere")),
        (NodeMachine(), node_events.DrainAsked("nowhere", None, "by hand")),
        (GroupMachine(GroupSpec("g", GPU, least=2)), group_events.Asked(1)),
        (RolloutMachine(), rollout_events.Scaled(99)),
        (loop(), loop_events.AdviceTaken()),
        (loop(), loop_events.RunResumed(-1)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_refused_leaves_a_machine_as_it_was(machine: Any, wrong: Any) -> None:
    before = machine.dump()
    with pytest.raises(InputError):
        machine.handle(wrong, 1_000_000.0)
    assert machine.dump() == before
