"""Live against replayed: on a real Ray and with real servers, the machines say what they say again to the same events.

The same small scenario is played by real processes and in a replay: the same instructions, and times that agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import live_scene
import rollout_scenes
from live_scene import LONG, SHORT, Joining, Scene
from trimtab.cli.app import run
from trimtab.core.codec import decode, encode
from trimtab.machines.pool import events as e
from trimtab.machines.rollout import events as rollout_events
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.journal.replay import UNCHANGED, agreement, recorded, run_alternative
from trimtab.replay.journal.world import JournalWorld, world_of
from trimtab.runtime.store.journal import ROLLOUT_EVENTS

NEAR = 0.1  # that times may be off, relative


# ---- pools ----------------------------------------------------------------------------------------------------------


def test_what_happens_by_itself_in_the_scenarios_is_apart() -> None:
    for one in (SHORT, LONG):
        assert live_scene.apart_s(one) >= live_scene.APART_S


@pytest.fixture
def node() -> Iterator[Joining]:
    with live_scene.nodes_with_gpus() as node:
        yield node


def lived(one: Scene, node: Joining, journal: Path) -> JournalWorld:
    """Play it live; its replay must give the same instructions, at the same times."""
    record = live_scene.play(one, node, journal)
    # What the controller instructed is written beside every event: a fresh machine says the same.
    assert record.same
    assert record.marked == record.events
    world = world_of(record)
    assert [work.spec.id for work in world.workload] == [step.id for step in one.steps]
    near = agreement(world, recorded(world), run_alternative(world, UNCHANGED))
    assert near.first == ""
    assert near.same == near.instructions >= 2 * len(one.steps)
    assert max(near.completion_worst, near.makespan) < NEAR
    return world


@pytest.mark.long
def test_a_live_run_and_its_replay_give_the_same_instructions_at_the_same_times(
    node: Joining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lived(SHORT, node, tmp_path / "journal")
    assert run(["simulate", str(tmp_path / "journal"), "--policy", "fifo"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the same events give the same instructions" in said
    assert "instructions are the same in the same order" in said


@pytest.mark.long
def test_a_scenario_and_the_live_run_of_it_agree_with_the_lengths_that_were_asked_for(
    node: Joining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = lived(LONG, node, tmp_path / "journal")
    assert sum(isinstance(one, e.NodeJoined) for _, one in world.settings) > 3  # the third came
    was = recorded(world)
    assert was.figures.evictions > 0
    planned, near = live_scene.simulated(world, LONG)
    with capsys.disabled():
        print(f"\n{near}\n{live_scene.out_of_order(was, planned)}")
    assert max(near.completion_worst, near.makespan) < NEAR


# ---- rollouts -------------------------------------------------------------------------------------------------------


def test_the_rollout_machine_says_the_same_to_the_events_of_a_live_pool() -> None:
    heard: list[tuple[float, Any]] = []
    elastic = ElasticConfig(
        max_workers=3,
        requests_per_worker_capacity=2,
        monitoring_interval=0.1,
        min_stable_period=0.1,
        scale_up_cooldown=0.1,
        scale_down_cooldown=0.2,
        drain_timeout=0.5,
    )

    async def act(scene: rollout_scenes.Scene) -> None:
        params = rollout_scenes.SamplingParams(max_tokens=20, temperature=0.0)
        await scene.pool.generate([(one,) for one in range(1, 13)], params)
        async with scene.pool.refit(3) as refit:
            await refit.load("3")
        async with scene.running(100) as task:
            at = scene.busy()
            scene.stubs[at].die()
            sample = await task
        assert len(sample.token_ids) == 100
        await scene.pool.generate([(one,) for one in range(1, 5)], params)

    async def listening(scene: rollout_scenes.Scene) -> None:
        # Engines were attached by now: what was said before is not needed, the machine's state is.
        heard.append((0.0, scene.pool._core.machine.dump()))
        scene.pool.add_listener(lambda what, now: heard.append((now, what)))
        await act(scene)

    rollout_scenes.play(listening, kinds=("sglang", "sglang", "sglang"), elastic=elastic)
    (_, state), *rest = heard
    machine = RolloutMachine.load(json.loads(json.dumps(state)), elastic)
    said: list[Any] = []
    events, kinds = 0, set[str]()
    for now, what in rest:
        if type(what).__name__ not in ROLLOUT_EVENTS or isinstance(what, rollout_events.RolloutInstruction):
            assert said, f"{what} was said live, and is not now"
            assert said.pop(0) == what
            kinds.add(type(what).__name__)
            continue
        assert not said, f"{said[0]} is said now, and was not live"
        again = decode(type(what), json.loads(json.dumps(encode(what))))
        said = list(machine.handle(again, now))
        events += 1
    assert not said
    assert events > 50
    assert kinds >= {"SendRequest", "AnswerRequest", "WorkerAction", "RefitReady", "RefitOver"}
