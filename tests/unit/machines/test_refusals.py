"""What any machine refuses changes nothing of it: not even its clock, however late the ask comes."""

from __future__ import annotations

from typing import Any

import pytest

from loop_world import first_plan, nodes, workflow
from trimtab.core.errors import InputError
from trimtab.core.resources import Resources
from trimtab.machines.elastic import events as group_events
from trimtab.machines.elastic.machine import ElasticMachine
from trimtab.machines.nodes import events as node_events
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.machines.pool import events as pool_events
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.replan import events as loop_events
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.rollout import events as rollout_events
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.nodes import ElasticSpec
from trimtab.model.pool import PoolSpec, TaskSpec
from trimtab.model.workflow import PlacementJob

GPU = Resources.of(gpu=1)


def pool() -> PoolMachine:
    machine = PoolMachine()
    machine.handle(pool_events.PoolEnsured(PoolSpec("p", GPU)), 1.0)
    return machine


def loop() -> ReplanMachine:
    cluster = nodes(4, 4)
    machine = ReplanMachine(workflow(), cluster, first_plan(PlacementJob(cluster, workflow())))
    machine.handle(loop_events.ReplanTick(), 1.0)
    return machine


@pytest.mark.parametrize(
    ("machine", "wrong"),
    [
        (pool(), pool_events.TaskSubmitted(TaskSpec("t", "nowhere", (GPU,)))),
        (pool(), pool_events.PoolEnsured(PoolSpec("p", GPU.plus(GPU)))),
        (pool(), pool_events.CancelRequested("nothing")),
        (pool(), pool_events.NodeCordoned("nowhere")),
        (NodeMachine(), node_events.DrainRequested("nowhere", None, "by hand")),
        (ElasticMachine(ElasticSpec("g", GPU, min_members=2)), group_events.ResizeRequested(1)),
        (RolloutMachine(), rollout_events.ScaleRequested(99)),
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
