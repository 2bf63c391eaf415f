"""The policy for verl's fully-async trainer, against stand-ins with verl's signatures: no Ray, no verl, no threads."""

from __future__ import annotations

import asyncio
import math
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from trimtab.core.errors import InputError
from trimtab.integrations import verl_replicas
from trimtab.integrations.verl_elastic import ElasticPolicy
from trimtab.integrations.verl_replicas import GuardedServer, VerlRollouter, check_verl
from trimtab.machines.rollout.policies.cycles import TrainingCycle, plan_handover

BLOCK = {"monitoring_interval": 1.0, "min_stable_period": 2.0, "scale_down_cooldown": 2.0, "scale_up_cooldown": 2.0}
REQUIRED, COLLECTIONS = 16, 2


class Call:
    """A method of a Ray actor: `.remote` answers at once."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class Replica:
    """verl's `RolloutReplica`, as the trainer has it."""

    def __init__(self, address: str, log: list[tuple[str, str]]) -> None:
        self._server_address, self.log = address, log
        self._server_handle = f"handle of {address}"
        self.servers: list[Any] = []
        self.workers = [f"worker of {address}"]
        self.dead = False

    async def _did(self, verb: str) -> None:
        if self.dead:
            raise RayActorError
        self.log.append((verb, self._server_address))

    async def sleep(self) -> None:
        await self._did("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._did("abort")

    async def resume_generation(self) -> None:
        await self._did("resume")


class Manager:
    """verl's `CheckpointEngineManager`."""

    def __init__(self, replicas: list[Any]) -> None:
        self.replicas = replicas

    def add_replicas(self, replicas: list[Any]) -> None:
        self.replicas.extend(replicas)

    def remove_replicas(self, replicas: list[Any]) -> None:
        self.replicas = [replica for replica in self.replicas if replica not in set(replicas)]


class Servers:
    """verl's server manager and load balancer, in one."""

    def __init__(self, shared: list[Replica], dedicated: list[Replica]) -> None:
        self.hybrid_replicas = {f"hybrid_{at}": replica for at, replica in enumerate(shared)}
        self.rollout_replicas = list(dedicated)
        self.server_addresses = [replica._server_address for replica in dedicated]
        self.server_handles: list[Any] = [replica._server_handle for replica in dedicated]
        self.routed: dict[str, Any] = dict(zip(self.server_addresses, self.server_handles, strict=True))
        self.global_load_balancer = SimpleNamespace(add_servers=Call(self.add), remove_servers=Call(self.remove))

    def get_standalone_replicas(self) -> list[Replica]:
        return self.rollout_replicas

    def add(self, servers: dict[str, Any]) -> None:
        self.routed |= servers

    def remove(self, server_ids: list[str]) -> None:
        for server in server_ids:
            self.routed.pop(server, None)


class Rollouter:
    """verl's `FullyAsyncRollouter` actor."""

    def __init__(self, shared: list[Replica], dedicated: list[Replica], block: dict[str, Any], partial: bool) -> None:
        asynchronous = {"partial_rollout": partial, "concurrent_samples_per_replica": 4}
        self.config = {"elastic_config": block}
        self.config = type("Config", (dict,), {"async_training": asynchronous})(self.config)
        self.llm_server_manager = Servers(shared, dedicated)
        self.total_rollout_steps = 10_000
        self.made = self.active = self.buffered = self.dropped = 0
        self.__ray_call__ = Call(lambda function, *given: function(self, *given))
        self.get_statistics = Call(self._statistics)
        self.add_replicas = Call(lambda names: self._add(names))
        self.remove_replicas = Call(lambda names: self._remove(names))
        self.rebalance_requests = Call(dict)

    def _update_max_concurrent_samples(self) -> None: ...

    def _statistics(self) -> dict[str, int]:
        return {
            "monitor/active_tasks_size": self.active,
            "monitor/queue/mq_queue_size": self.buffered,
            "count/total_generated_samples": self.made,
            "count/dropped_stale_samples": self.dropped,
            "count/staleness_samples": self.active + self.buffered,
            "static/max_required_samples": 48,
        }

    def _add(self, names: list[str]) -> None:
        servers = self.llm_server_manager
        for name in names:
            servers.routed[servers.hybrid_replicas[name]._server_address] = name

    def _remove(self, names: list[str]) -> None:
        servers = self.llm_server_manager
        servers.remove([servers.hybrid_replicas[name]._server_address for name in names])


@dataclass
class Verl:
    """verl's trainer loop, as far as the policy is asked; `sync` and `hand_over` are in verl's order."""

    shared: int = 2
    dedicated: int = 2
    block: dict[str, Any] = field(default_factory=lambda: dict(BLOCK))
    partial: bool = True
    now: float = 100.0
    active: bool = False
    step: int = -1
    activate_s: float = 0.5

    def __post_init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        shared = [Replica(f"s{at}", self.log) for at in range(self.shared)]
        dedicated = [Replica(f"d{at}", self.log) for at in range(self.dedicated)]
        self.replicas = {replica._server_address: replica for replica in (*shared, *dedicated)}
        self.rollouter = Rollouter(shared, dedicated, self.block, self.partial)
        self.policy = ElasticPolicy(0.5, self.dedicated == 0, clock=lambda: self.now)
        self.policy.attach(VerlRollouter(self.rollouter, get=lambda value: value))
        self.checkpoint_manager, self.hybrid_checkpoint_manager = Manager(dedicated), Manager(shared)
        self.policy._look_on = lambda: None  # type: ignore[method-assign]  # looks are this test's
        self.policy.adopt(self)
        self.ctx = SimpleNamespace(
            required_samples=REQUIRED,
            trigger_parameter_sync_step=COLLECTIONS,
            step_required_samples=REQUIRED * COLLECTIONS,
            step_wait_times=[],
            last_activate_duration_s=0.0,
            last_deactivate_duration_s=0.0,
        )

    @property
    def routed(self) -> set[str]:
        return set(self.rollouter.llm_server_manager.routed)

    def begin_sync(self) -> bool:
        self.step += 1
        return self.policy.should_activate_after_step(self.step, self.active, self.ctx)

    def end_sync(self, activate: bool) -> None:
        if activate:
            self.ctx.last_activate_duration_s = self.activate_s
            for replica in self.hybrid_checkpoint_manager.replicas:
                asyncio.run(replica.resume_generation())
            self.rollouter._add(list(self.rollouter.llm_server_manager.hybrid_replicas))
            self.active = True
        self.policy.update_after_step(self.step, self.ctx)
        self.ctx.last_activate_duration_s = self.ctx.last_deactivate_duration_s = 0.0

    def sync(self) -> bool:
        activate = self.begin_sync()
        self.end_sync(activate)
        return activate

    def hand_over(self) -> int:
        """The beginning of a training step. Answers how many samples verl waits for."""
        if not self.policy.should_deactivate(self.step, self.active, self.ctx):
            return 0
        samples = self.policy.deactivate_wait_samples(self.ctx)
        self.rollouter._remove(list(self.rollouter.llm_server_manager.hybrid_replicas))
        for replica in self.hybrid_checkpoint_manager.replicas:
            asyncio.run(replica.abort_all_requests())
            asyncio.run(replica.sleep())
        self.ctx.last_deactivate_duration_s = 0.2
        self.active = False
        return samples

    def generate(self, seconds: float, per_replica_s: float, active: int) -> None:
        """Time passes: every replica in service makes samples, and the policy looks each second."""
        for _ in range(round(seconds)):
            self.active_samples(active)
            self.now += 1.0
            self.rollouter.made += round(per_replica_s * len(self.routed))
            self.policy.look()

    def active_samples(self, count: int) -> None:
        self.rollouter.active = count

    def states(self) -> dict[str, str]:
        return {name: state for name, (state, _) in self.policy.status()["workers"].items()}


def cycle(verl: Verl, per_replica_s: float, train_s: float) -> bool:
    """One training cycle; answers whether shared replicas are woken for the next one."""
    verl.generate(4, per_replica_s, 16)
    verl.hand_over()
    verl.now += train_s * COLLECTIONS
    return verl.sync()


def test_before_anything_is_measured_all_replicas_serve() -> None:
    verl = Verl()
    assert verl.sync()
    assert verl.routed == {"s0", "s1", "d0", "d1"}
    assert set(verl.states().values()) == {"active"}


def test_the_trainer_gets_its_gpus_for_every_step_and_a_replica_sleeps_once() -> None:
    verl = Verl()
    verl.sync()
    assert verl.hand_over() == 16  # half of a cycle's samples, as configured
    assert verl.routed == {"d0", "d1"}
    assert verl.log.count(("sleep", "s0")) == 1
    assert verl.states()["hybrid_0"] == "inactive"


def test_replicas_that_were_away_are_not_routed_to_before_a_sync_has_included_them() -> None:
    verl = Verl()
    verl.sync()
    verl.hand_over()
    verl.generate(5, 1.0, 16)
    assert verl.routed == {"d0", "d1"}
    assert verl.begin_sync()
    assert verl.states()["hybrid_0"] != "active"
    verl.end_sync(True)
    assert verl.states()["hybrid_0"] == "active"


def test_shared_replicas_stay_with_the_trainer_where_a_switch_costs_more_than_it_gains() -> None:
    verl = Verl(activate_s=30.0)
    verl.sync()
    woken = [cycle(verl, 4.0, 8.0) for _ in range(4)]
    assert woken[-1] is False
    assert "the cycle takes" in verl.policy.status()["decisions"][-1]["reason"]
    assert verl.routed == {"d0", "d1"}


def test_shared_replicas_come_back_for_each_cycle_that_is_shorter_with_them() -> None:
    verl = Verl(activate_s=0.5)
    verl.sync()
    woken = [cycle(verl, 1.0, 0.5) for _ in range(4)]
    assert all(woken)
    found = verl.policy.status()["decisions"][-1]
    assert found["with_s"] < found["without_s"]


def test_cycles_that_take_longer_than_planned_weigh_in_the_next_decision() -> None:
    verl = Verl(activate_s=0.5)
    verl.sync()
    for _ in range(2):
        cycle(verl, 1.0, 0.5)
    verl.now += 60.0  # lost with the shared replicas awake, and in no figure
    cycle(verl, 1.0, 0.5)
    assert cycle(verl, 1.0, 0.5) is False


def test_a_falling_load_releases_shared_replicas_one_by_one_before_the_handover() -> None:
    verl = Verl()
    verl.sync()
    verl.generate(4, 1.0, 16)
    verl.rollouter.buffered = 28
    verl.generate(8, 0.0, 3)
    assert {"d0", "d1"} <= verl.routed < {"s0", "s1", "d0", "d1"}
    verbs = [verb for verb, address in verl.log if address == "s1"]
    assert verbs[-2:] == ["abort", "sleep"]
    verl.hand_over()
    assert verl.log.count(("sleep", "s1")) == 1


def test_a_drain_during_a_weight_sync_waits_for_its_end() -> None:
    verl = Verl()
    verl.sync()
    activate = verl.begin_sync()
    members = list(verl.checkpoint_manager.replicas)
    verl.policy.drain("standalone_0", "its node goes")
    verl.policy.look()
    assert "d0" in verl.routed
    assert verl.checkpoint_manager.replicas == members
    verl.end_sync(activate)
    assert "d0" not in verl.routed
    assert [replica.name for replica in verl.checkpoint_manager.replicas] == ["standalone_1"]
    assert ("abort", "d0") in verl.log


def test_a_dedicated_replica_given_back_serves_after_the_next_sync_if_it_missed_one() -> None:
    verl = Verl()
    verl.sync()
    verl.policy.drain("standalone_0", "its node goes")
    assert "d0" not in verl.routed
    verl.hand_over()
    verl.sync()
    verl.policy.give_back("standalone_0")
    verl.policy.look()
    assert "d0" not in verl.routed
    verl.hand_over()
    verl.sync()
    assert "d0" in verl.routed
    assert len(verl.checkpoint_manager.replicas) == 2


def test_one_given_back_during_a_weight_sync_is_not_added_to_it() -> None:
    verl = Verl()
    verl.sync()
    verl.policy.drain("standalone_0", "its node goes")
    verl.hand_over()
    activate = verl.begin_sync()
    verl.policy.give_back("standalone_0")
    assert len(verl.checkpoint_manager.replicas) == 1
    verl.end_sync(activate)
    assert len(verl.checkpoint_manager.replicas) == 2
    assert "d0" not in verl.routed
    verl.hand_over()
    verl.sync()
    assert "d0" in verl.routed


def test_one_given_back_with_the_current_weights_serves_at_once() -> None:
    verl = Verl()
    verl.sync()
    verl.policy.drain("standalone_0", "by hand")
    verl.policy.give_back("standalone_0")
    assert "d0" in verl.routed


def test_a_shared_replica_drained_by_hand_is_put_back_to_sleep_when_verl_wakes_all() -> None:
    verl = Verl()
    verl.sync()
    verl.policy.drain("hybrid_1", "its node goes")
    verl.hand_over()
    assert verl.sync()
    assert verl.routed == {"s0", "d0", "d1"}
    assert verl.log[-1] == ("sleep", "s1")
    verl.policy.give_back("hybrid_1")
    verl.hand_over()
    verl.sync()
    assert "s1" in verl.routed


def test_a_lost_dedicated_replica_is_left_out_of_the_next_sync_group() -> None:
    verl = Verl()
    verl.sync()
    verl.replicas["d1"].dead = True
    verl.begin_sync()
    for replica in verl.checkpoint_manager.replicas:
        asyncio.run(replica.abort_all_requests())
    assert [replica.workers for replica in verl.checkpoint_manager.replicas] == [["worker of d0"], []]
    verl.end_sync(False)
    assert "d1" not in verl.routed
    assert verl.states()["standalone_1"] == "lost"
    verl.hand_over()
    verl.sync()  # goes on


def test_with_a_lost_shared_replica_the_others_stay_with_the_trainer() -> None:
    verl = Verl()
    verl.sync()
    verl.replicas["s0"].dead = True
    verl.hand_over()
    assert verl.sync() is False
    assert verl.routed == {"d0", "d1"}


def test_the_trainer_does_not_wait_for_more_samples_than_the_run_still_makes() -> None:
    verl = Verl()
    verl.sync()
    verl.rollouter.total_rollout_steps = verl.policy._total = 100
    verl.rollouter.made, verl.rollouter.dropped, verl.rollouter.buffered = 99, 1, 5
    assert verl.hand_over() == 5


def test_without_dedicated_replicas_all_come_back_every_time() -> None:
    verl = Verl(dedicated=0, activate_s=60.0)
    verl.sync()
    assert all(cycle(verl, 1.0, 1.0) for _ in range(3))


def test_switched_off_nothing_is_woken() -> None:
    assert Verl(block={"enable_elastic": False}).sync() is False


@pytest.mark.parametrize(
    ("block", "partial", "text"),
    [
        ({"min_workerz": 2}, True, "min_workerz"),
        ({"min_workers": 9, "max_workers": 3}, True, "above max_workers"),
        ({"policy": "nope"}, True, "nope"),
        ({}, False, "drops the requests"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(block: dict[str, Any], partial: bool, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Verl(block=block, partial=partial)


def test_other_releases_of_verl_are_refused_with_what_to_do() -> None:
    check_verl("0.9.1")
    with pytest.raises(InputError, match=r"0\.10\.0") as caught:
        check_verl("0.10.0.dev")
    assert "default" in (caught.value.hint or "")


def test_an_unknown_replica_is_named() -> None:
    with pytest.raises(InputError, match="hybrid_7"):
        Verl().policy.drain("hybrid_7", "")


def test_a_request_to_a_dead_server_comes_back_as_aborted_and_the_server_leaves(monkeypatch: Any) -> None:
    async def dies(**given: Any) -> Any:
        raise RayActorError

    removed: list[str] = []

    async def remove(server_ids: list[str]) -> None:
        removed.extend(server_ids)

    monkeypatch.setattr(verl_replicas, "_aborted", lambda: SimpleNamespace(token_ids=[], stop_reason="aborted"))
    handle = SimpleNamespace(generate=Call(dies), other=1)
    guarded = GuardedServer("d0", handle, SimpleNamespace(remove_servers=Call(remove)))
    answer = asyncio.run(guarded.generate.remote(request_id="r", prompt_ids=[1]))
    assert (answer.token_ids, answer.stop_reason, removed, guarded.other) == ([], "aborted", ["d0"], 1)
    assert pickle.loads(pickle.dumps(GuardedServer("d0", "handle", "balancer"))).server == "d0"


# ---- the plan of a cycle --------------------------------------------------------------------------------------------


def slow_plan(cycle: TrainingCycle, samples: int) -> float:
    """What a cycle takes when the trainer takes over at so many samples, in small steps of time."""
    made, now, step = float(cycle.buffered), cycle.switch_s, 0.001
    while made < samples:
        made, now = made + (cycle.dedicated_rate + cycle.shared_rate) * step, now + step
    for k in range(1, cycle.collections + 1):
        while made < k * cycle.required - 1e-6:
            made, now = made + cycle.dedicated_rate * step, now + step
        made, now = made + cycle.dedicated_rate * cycle.train_s, now + cycle.train_s
    return now


@pytest.mark.parametrize(
    "cycle",
    [
        TrainingCycle(16, 2, 0, 0.5, 4.0, 4.0, 0.6),
        TrainingCycle(16, 3, 10, 2.0, 5.0, 9.0, 1.0),
        TrainingCycle(8, 4, 0, 0.1, 2.0, 1.0, 3.0),
    ],
)
def test_the_handover_is_the_best_of_all(cycle: TrainingCycle) -> None:
    plan = plan_handover(cycle)
    every = {samples: slow_plan(cycle, samples) for samples in range(cycle.buffered, cycle.required * 4 + 1)}
    assert plan.with_s == pytest.approx(min(every.values()), abs=0.3)
    assert every[plan.samples] == pytest.approx(min(every.values()), abs=0.3)
    alone = TrainingCycle(**{**vars(cycle), "switch_s": 0.0, "shared_rate": 0.0})
    assert plan.without_s == pytest.approx(slow_plan(alone, 0), abs=0.3)


def test_without_dedicated_engines_a_cycle_waits_for_all_its_samples() -> None:
    plan = plan_handover(TrainingCycle(16, 2, 0, 0.5, 0.0, 4.0, 100.0))
    assert plan.samples == 32
    assert plan.with_s == pytest.approx(100 + 32 / 4 + 2 * 0.5)
    assert plan.without_s == math.inf
