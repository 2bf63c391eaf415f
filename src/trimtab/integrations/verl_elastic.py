"""Elastic rollout inside verl's fully-async trainer: its dynamic schedule policy `trimtab`.

verl asks the policy when replicas on the trainer's GPUs (shared ones) serve, and wakes, adds, removes, aborts and syncs
them itself. Here every replica is a worker of the rollout machine, which decides; between two weight syncs a thread
also takes single shared replicas out of service as the load falls. Replicas on GPUs of their own (dedicated ones) are
drained only by hand. A drained replica's requests are aborted by verl and go on elsewhere with their tokens.

What must never happen: a replica that was not part of verl's last weight sync is routed to; the replicas of a sync
change while it runs (drains wait for its end); the death of a dedicated replica ends the training.

No file of verl's is changed; `trimtab.integrations.verl_replicas` says which of its objects are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

from trimtab.core.errors import unknown
from trimtab.core.numbers import Range
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.integrations.verl_replicas import CALL_S, TrackedReplica, VerlRollouter, dead_servers, read_settings
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.cycles import Handover, TrainingCycle, plan_handover
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState
from trimtab.machines.rollout.policies.policy import policy_of
from trimtab.machines.rollout.records import FadingMean
from trimtab.model.rollout import Owner, Ownership, RolloutRules, WorkerSpec, WorkerState, WorkerVerb
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe

log = logging.getLogger("trimtab.integrations.verl")

DAY_S = 86_400.0  # verl wakes and syncs when it does; nothing here times out before it
FADE = 0.9  # weight of earlier production, per look
KEPT = 200  # decisions

S = WorkerState


def _adopt(trainer: Any) -> None:
    """In the trainer's process, once its event loop is free."""
    trainer.dynamic_resource_controller.policy.adopt(trainer)


class ElasticPolicy:
    """verl's `DynamicSchedulePolicyBase`, decided by the rollout machine."""

    def __init__(
        self, deactivate_ratio: float = 0.3, only_hybrid: bool = False, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        Range(0.0, 1.0).check("dynamic_schedule_deactivate_ratio", deactivate_ratio, "async_training")
        self.lock = threading.RLock()
        self.machine: RolloutMachine
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.background = Background(prefix="verl-elastic")
        self._ratio = 1.0 if only_hybrid else deactivate_ratio
        self._only_hybrid = only_hybrid
        self._clock = clock
        self._replicas: dict[str, TrackedReplica] = {}
        self._shared: list[str] = []
        self._dedicated: list[str] = []
        self._routed: set[str] = set()  # verl's load balancer has them
        self._by_hand: set[str] = set()
        self._wakes: dict[str, e.WorkerAction] = {}  # until verl's next weight sync
        self._plan: Handover | None = None  # while a weight sync is being decided
        self._deciding = False  # at a weight sync: the only time at which verl can wake a replica
        self._may_wake = True
        self._syncing = False
        self._given_back: list[str] = []  # while a weight sync runs
        self._woken: list[str] = []  # by the sync that runs
        self._waiting_for = 0  # samples
        self._manager: Any = None  # the trainer's checkpoint manager, of the dedicated replicas
        # Measured.
        self._seen: tuple[float, int, float] | None = None  # time, samples made, replicas that were busy
        self._made = self._busy_s = 0.0
        self._train_s, self._switch_s = FadingMean(), FadingMean()
        self._off = {True: FadingMean(), False: FadingMean()}  # cycles with and without: how much longer than planned
        self._planned: tuple[float, bool, float] | None = None  # when the cycle began, with shared replicas, seconds
        self._synced_at: float | None = None
        self._wait_began: float | None = None
        self._waited_s = 0.0

    # ---- joining verl ----------------------------------------------------------------------------------------------

    @property
    def _rollouter(self) -> Any:
        return self._verl

    @_rollouter.setter
    def _rollouter(self, actor: Any) -> None:
        """verl sets it, once its replicas exist."""
        self.attach(VerlRollouter(actor))
        ray.get_runtime_context().current_actor.__ray_call__.remote(_adopt)

    def attach(self, verl: VerlRollouter) -> None:
        """Read the settings, and make a worker of every replica."""
        self._verl = verl
        setup = verl.attach()
        self.config = read_settings(setup)
        policy_of(self.config)  # InputError for an unknown one
        for warning in self.config.warnings():
            if "drain_timeout" in warning:  # verl aborts what runs on a drained replica at once
                continue
            log.warning("elastic_config: %s", warning)
        self._total = setup.total
        self._address = dict(setup.shared)
        self._shared = list(setup.shared)
        for at, address in enumerate(setup.dedicated):
            self._dedicated.append(f"standalone_{at}")
            self._address[self._dedicated[-1]] = address
        self._routed = set(self._dedicated)
        call_s = CALL_S + 1.0
        rules = RolloutRules.of(
            self.config,
            ownership=Ownership(pause=Owner.trainer, refit=Owner.trainer, abort=Owner.trainer),
            drain_s=0.0,  # verl aborts what runs there, and goes on elsewhere
            wake_s=DAY_S,
            refit_s=DAY_S,
            sleep_s=call_s,
            load_fresh_s=2.5 * self.config.monitoring_interval,
        )
        self.machine = RolloutMachine(rules, replace(self.config, policy=self._decide))
        limit = self.config.requests_per_worker_capacity
        with self.lock:
            for name in self._dedicated:
                self._handle(e.WorkerAdded(WorkerSpec(name, limit=limit, can_sleep=False), up=True, version=0))
            for name in self._shared:
                spec = WorkerSpec(name, limit=limit, sleep_keeps_weights=False)
                self._handle(e.WorkerAdded(spec, up=True))
                self._handle(e.WorkerSlept(name, keeps_weights=False))
                self._reclaim(name, "the trainer has its GPUs")

    def adopt(self, trainer: Any) -> None:
        """Wrap the replicas of the trainer's checkpoint managers, and begin to look at the load."""
        names = {address: name for name, address in self._address.items()}
        for manager in (trainer.checkpoint_manager, trainer.hybrid_checkpoint_manager):
            tracked = [
                TrackedReplica(replica, names[replica._server_address], self)
                for replica in (manager.replicas if manager is not None else ())
            ]
            if tracked:
                manager.replicas = tracked
                self._replicas |= {replica.name: replica for replica in tracked}
        for name in self._shared:
            self._replicas[name].asleep = True  # verl has put them to sleep at its start
        self._manager = trainer.checkpoint_manager
        self.background.start_thread("load", self._look_on, policy=NEVER_GIVE_UP)

    def _look_on(self) -> None:
        while not self.background.stopping.wait(self.config.monitoring_interval):
            self.look()

    # ---- what verl asks ---------------------------------------------------------------------------------------------

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool:
        """The training that follows needs the GPUs of shared replicas."""
        return is_hybrid_active

    def deactivate_wait_samples(self, ctx: Any) -> int:
        """Samples that are buffered before the trainer takes the GPUs: with fewer it would wait later."""
        with self.lock:
            found = self._verl.statistics()
            plan = self._handover(ctx, found)
            wanted = int(self._ratio * ctx.step_required_samples) if plan is None else plan.samples
            done = found["count/total_generated_samples"] + found["count/dropped_stale_samples"]
            ever = found["monitor/queue/mq_queue_size"] + self._total - done
            self._waiting_for = max(0, min(wanted, ever))
            self._wait_began = self._clock()
            return self._waiting_for

    def should_activate_after_step(self, global_steps: int, is_hybrid_active: bool, ctx: Any) -> bool:
        """Before each weight sync: whether shared replicas take part in it, and serve afterwards."""
        with self.lock:
            self._observe()
            found, now = self._verl.statistics(), self._clock()
            if self._planned is not None and self._planned[2] < math.inf:
                began, chosen, planned_s = self._planned
                self._off[chosen].add(now - began - planned_s)
                self._off[not chosen].value = FADE * (self._off[not chosen].value or 0.0)
            self._plan = plan = self._handover(ctx, found)
            lost = [name for name in self._shared if self._replica_lost(name)]
            for name in self._shared:
                if not is_hybrid_active and name not in (*lost, *self._by_hand):
                    self._handle(e.WorkerReturned(name))
            self._deciding, self._may_wake = True, not lost
            self._set_range()
            self._deciding = False
            self._plan = None
            for action in self._wakes.values():  # verl wakes them with the sync that begins now
                self._handle(e.ActionDone(action.worker, action.attempt))
            self._woken, self._wakes = list(self._wakes), {}
            woke = bool(self._woken)
            self._planned = None if plan is None else (now, woke, plan.with_s if woke else plan.without_s)
            decided = self.machine.scaling()["decision"]
            self.decisions.append(
                {
                    "step": global_steps,
                    "activate": woke,
                    "reason": "" if decided is None else decided["reason"]["sentence"],
                    "wait_for": None if plan is None else plan.samples,
                    "with_s": None if plan is None else plan.with_s,
                    "without_s": None if plan is None else plan.without_s,
                }
            )
            log.info("step %s: %s", global_steps, self.decisions[-1])
            self._handle(e.RefitBegun(global_steps))
            self._syncing = True
            return woke

    def request_rebalance(self, global_steps: int, ctx: Any) -> None:
        """Spread running requests over the replicas that were added."""
        try:
            self._verl.rebalance()
        except Exception as error:  # a server may be gone; its requests go on elsewhere
            log.warning("rebalance: %s", describe(error))

    def update_after_step(self, global_steps: int, ctx: Any) -> None:
        """After the sync: those that took part serve; drains that were asked for meanwhile begin."""
        with self.lock:
            if self._woken:  # verl syncs and adds all shared replicas, or none
                there = [name for name in self._shared if not self._replica_lost(name)]
                self._routed |= set(there)
                for name in there:
                    self._replicas[name].asleep = False
                    if name not in self._woken:
                        self._unwanted(name)
            membership = self.machine.membership()
            for member in membership.members:
                if not self._replica_lost(member.worker):
                    self._handle(e.RefitConfirmed(member.worker, global_steps, membership.epoch))
            self._syncing, self._woken = False, []
            self._handle(e.RefitEnded(global_steps))
            self._measure_cycle(ctx)
            self._seen = None
            self._waiting_for = ctx.step_required_samples
            returning, self._given_back = self._given_back, []
            for name in returning:
                self.give_back(name)

    # ---- by hand ---------------------------------------------------------------------------------------------------

    def drain(self, replica: str, why: str) -> None:
        """Take a replica out of service until `give_back`. During a weight sync: as soon as that ends."""
        with self.lock:
            self._known(replica)
            self._by_hand.add(replica)
            self._reclaim(replica, why)

    def give_back(self, replica: str) -> None:
        """It may serve again: at once with the current weights, otherwise after a sync that includes it."""
        with self.lock:
            self._known(replica)
            self._by_hand.discard(replica)
            if replica in self._shared:  # with the next sync that wakes them
                return
            if self._syncing:
                self._given_back.append(replica)
                return
            if self._replicas[replica] not in self._manager.replicas:
                self._manager.add_replicas([self._replicas[replica]])
            self._handle(e.WorkerReturned(replica))
            self._set_range()

    def status(self) -> dict[str, Any]:
        """Workers with their states, and the last decisions."""
        with self.lock:
            return {
                "workers": {view.worker: (view.state.value, view.reason.sentence) for view in self.machine.workers()},
                "routed": sorted(self._routed),
                "decisions": list(self.decisions),
                "scale_steps": [(step.before, step.workers, step.reason.sentence) for step in self.machine.steps],
                "samples_per_replica_s": self._rate(),
                "train_s": self._train_s.value,
                "switch_s": self._switch_s.value,
            }

    # ---- what happens ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """One look: which servers are dead, the load, and what follows from both."""
        for name, why in dead_servers(self._replicas).items():
            self.lost(name, why)
        self._observe()

    def _observe(self) -> None:
        with self.lock:
            found = self._verl.statistics()
            now = self._clock()
            serving = [view.worker for view in self.machine.workers() if view.state is S.active]
            self._measure_rate(found, now, len(serving))
            running = found["monitor/active_tasks_size"]
            lacking = self._waiting_for - found["monitor/queue/mq_queue_size"] - running
            may_begin = found["static/max_required_samples"] - found["count/staleness_samples"]
            load = running + max(0, min(lacking, may_begin))
            for at, name in enumerate(serving):
                share = load // len(serving) + (at < load % len(serving))
                self._handle(e.LoadReported(name, share, 0, 0.0, now))
            self._handle(e.RolloutTick())

    def taken(self, name: str) -> None:
        """verl put a replica to sleep: the trainer has its GPUs."""
        with self.lock:
            if self._wait_began is not None:
                self._waited_s += self._clock() - self._wait_began
                self._wait_began = None
            self._routed.discard(name)
            self._handle(e.WorkerSlept(name, keeps_weights=False))
            self._reclaim(name, "the trainer has its GPUs")

    def lost(self, name: str, why: str) -> None:
        """A server's actor died. verl goes on without it."""
        with self.lock:
            if self._replica_lost(name):
                return
            log.warning("replica %s is lost: %s", name, why)
            self._replicas[name].lost = True
            self._wakes.pop(name, None)
            self._handle(e.WorkerDied(name, why))
            self._unroute(name)
            if not self._syncing:
                self._set_range()

    def _handle(self, event: e.RolloutEvent) -> None:
        for instruction in self.machine.handle(event, self._clock()):
            if isinstance(instruction, e.WorkerAction):
                self._act(instruction)
            elif isinstance(instruction, e.AnnounceScaleStep):
                log.info("replicas: %s", instruction.step.reason.sentence)
            elif isinstance(instruction, e.Warn):
                log.warning("replica %s: %s", instruction.worker, instruction.reason.sentence)
        if not self._syncing:
            self._reconcile()

    def _act(self, action: e.WorkerAction) -> None:
        name = action.worker
        if action.verb is WorkerVerb.wake:
            self._wakes[name] = action
        elif action.verb is WorkerVerb.sleep:
            if name in self._routed:
                self._leave(name)
            self._call(name, "sleep")
            self._handle(e.ActionDone(name, action.attempt))

    def _reconcile(self) -> None:
        """verl routes to a replica exactly where the machine has it in service."""
        for view in self.machine.workers():
            if view.state in (S.draining, S.inactive) and view.worker in self._routed:
                self._leave(view.worker)
            elif view.state is S.active and view.worker not in self._routed:
                self._join(view.worker)

    def _leave(self, name: str) -> None:
        """verl's order: routing, requests, memory. Its requests go on elsewhere with their tokens."""
        self._unroute(name)
        if name in self._dedicated:
            self._manager.remove_replicas([self._replicas[name]])
        self._call(name, "abort_all_requests", reject_request=True)
        self._handle(e.LoadReported(name, 0, 0, 0.0, self._clock()))

    def _unwanted(self, name: str) -> None:
        """verl woke it with the others."""
        self._unroute(name)
        self._call(name, "abort_all_requests", reject_request=True)
        self._call(name, "sleep")

    def _unroute(self, name: str) -> None:
        self._routed.discard(name)
        if name in self._shared:
            self._verl.remove([name])
        else:
            self._verl.route(self._address[name], False)

    def _join(self, name: str) -> None:
        self._routed.add(name)
        self._call(name, "resume_generation")
        if name in self._shared:
            self._verl.add([name])
        else:
            self._verl.route(self._address[name], True)

    def _call(self, name: str, verb: str, **settings: Any) -> None:
        """A verb of a replica, from a thread that may run an event loop of its own."""
        with ThreadPoolExecutor(1) as other:
            why = other.submit(asyncio.run, self._replicas[name].attempt(verb, **settings)).result(CALL_S)
        if why:
            self.lost(name, why)

    def _reclaim(self, name: str, why: str) -> None:
        self._handle(e.WorkerReclaimed(name, self._clock(), why, forced=True))

    def _known(self, name: str) -> None:
        if name not in self._address:
            raise unknown(name, self._address, what="there is no replica {}")

    def _replica_lost(self, name: str) -> bool:
        return name in self._replicas and self._replicas[name].lost

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _set_range(self) -> None:
        """Dedicated replicas always serve; this evaluates the policy too."""
        alive = sum(not self._replica_lost(name) for name in self._dedicated)
        fewest = max(self.config.min_workers, alive)
        self._handle(e.WorkerRangeSet(fewest, max(self.config.max_workers, fewest)))

    def _decide(self, state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
        """At a sync by what the cycle would take, otherwise by the configured policy, which may only release."""
        if not self._deciding:
            back = [
                view.worker
                for view in self.machine.workers()
                if view.state is S.inactive and view.worker in self._dedicated and view.worker not in self._by_hand
            ]
            if back:
                reason = Reason(ReasonCode.returned, f"{', '.join(back)}: given back")
                workers = sample.within(sample.serving + len(back))
                return state, Decision(workers, reason, f"{counted(workers, 'worker')} serve")
            after, decision = policy_of(self.config)(state, sample)
            most = max(sample.serving, sample.min_workers)
            return after, replace(decision, workers=min(decision.workers, most))
        plan, most = self._plan, sample.max_workers
        if not self._may_wake:
            wakes, why = False, "a replica on the trainer's GPUs is lost, and verl syncs all of them or none"
        elif self._only_hybrid:
            wakes, why = True, "there are no other replicas"
        elif not self.config.enable_elastic:
            wakes, why = False, "enable_elastic is off"
        elif plan is None:
            wakes, why = True, "not measured yet"
        else:
            with_s, without_s = (
                plan.with_s + (self._off[True].value or 0),
                plan.without_s + (self._off[False].value or 0),
            )
            wakes = with_s < without_s
            why = f"the cycle takes {with_s:.3g} s with the trainer's GPUs, {without_s:.3g} s without"
        workers = most if wakes else min(sample.serving, most)
        reason = Reason(ReasonCode.load_high if wakes else ReasonCode.load_fits, why)
        return state, Decision(sample.within(workers), reason, f"{counted(workers, 'worker')} serve")

    def _handover(self, ctx: Any, found: Mapping[str, Any]) -> Handover | None:
        """None until rates and times are measured."""
        rate, train_s, switch_s = self._rate(), self._train_s.value, self._switch_s.value
        if rate is None or train_s is None or switch_s is None:
            return None
        dedicated = sum(not self._replica_lost(name) for name in self._dedicated)
        return plan_handover(
            TrainingCycle(
                required=ctx.required_samples,
                collections=ctx.trigger_parameter_sync_step,
                buffered=found["monitor/queue/mq_queue_size"],
                train_s=train_s,
                dedicated_rate=rate * dedicated,
                shared_rate=rate * len(self._shared),
                switch_s=switch_s,
            )
        )

    # ---- measured --------------------------------------------------------------------------------------------------

    def _rate(self) -> float | None:
        """Samples per second of one busy replica."""
        return self._made / self._busy_s if self._made > 0 and self._busy_s > 0 else None

    def _measure_rate(self, found: Mapping[str, Any], now: float, serving: int) -> None:
        made = found["count/total_generated_samples"]
        busy = min(serving, found["monitor/active_tasks_size"] / self.config.requests_per_worker_capacity)
        if self._seen is not None and not self._syncing:
            at, before, was_busy = self._seen
            self._made = FADE * self._made + made - before
            self._busy_s = FADE * self._busy_s + (now - at) * was_busy
        self._seen = None if self._syncing else (now, made, busy)

    def _measure_cycle(self, ctx: Any) -> None:
        """Time of a training step, and of a switch, as of the cycle that ended."""
        now = self._clock()
        switch_s = ctx.last_activate_duration_s + ctx.last_deactivate_duration_s
        if ctx.last_activate_duration_s > 0:
            self._switch_s.add(switch_s)
        if self._synced_at is not None:
            idle_s = sum(ctx.step_wait_times) + self._waited_s + switch_s
            self._train_s.add(max(0.0, now - self._synced_at - idle_s) / ctx.trigger_parameter_sync_step)
        self._synced_at, self._waited_s, self._wait_began = now, 0.0, None
