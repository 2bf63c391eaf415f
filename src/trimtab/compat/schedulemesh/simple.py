"""`SimpleScheduler`: pools, priorities and preemption in one object, whose answers are dictionaries.

Everything goes through the native API (`trimtab.runtime.client.session`); nothing is decided here. A submission either
runs when it returns, after evicting others if the policy allows that, or it is refused with a reason and has evicted
nothing. Memory is in MB (2**20 bytes) in all input and output. An invalid pool or task gives an answer with `success:
False`; unknown settings raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.compat.schedulemesh import conversion
from trimtab.compat.schedulemesh.config.policy import PreemptionAggressiveness, PreemptionSettings
from trimtab.compat.schedulemesh.conversion import SimpleTaskSpec
from trimtab.core.errors import InputError, TrimtabError, check_known
from trimtab.core.reasons import ReasonCode
from trimtab.model.pool import ENDED, TaskState
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.client.task import Task, TaskError
from trimtab.runtime.controller.rpc import TaskSnapshot

__all__ = ["PreemptionAggressiveness", "PreemptionSettings", "SimpleScheduler", "SimpleTaskSpec"]

log = logging.getLogger("trimtab")

ROOM_S = 120.0  # beyond cancelling, saving and starting, until a submission is given up
SLOTS_S = 10.0  # for reserved slots to be ready before `ensure_pool` returns
SNAPSHOT_S = 5.0  # for the controller to report the process of a task
POLL_S = 0.01
METRIC_ALIAS = "schedulemesh"
_NAME_OPTIONS = {"name", "namespace", "lifetime"}


class SimpleScheduler:
    """One scheduler: a controller of this name, found or created on the Ray that `how` names.

    Nothing is evicted until `configure_preemption` is called. `session` is the native API beneath.
    """

    def __init__(
        self,
        name: str = "simple-scheduler",
        *,
        address: str | None = None,
        journal_dir: str | None = None,
        state_dir: str | None = None,
        cpus: int | None = None,
        metrics_port: int | None = None,
        dashboard: bool = False,
        start_timeout: float = 600.0,
        metric_aliases: bool = False,
        warm_names: bool = False,
    ) -> None:
        """`dashboard` starts Ray's dashboard with a Ray that is started here; `metric_aliases` exports the metrics that
        ScheduleMesh has under its names too (`ray_schedulemesh_...`). With `warm_names` a task whose Ray options are
        a name alone starts in a warm process, and `get_actor` finds it by that name instead of `ray.get_actor`."""
        alias: dict[str, Any] = {"metric_alias": METRIC_ALIAS} if metric_aliases else {}
        self.session = connect(
            address, name, journal_dir, state_dir, cpus=cpus, metrics_port=metrics_port, dashboard=dashboard, **alias
        )
        self.name = name
        self.how = self.session.how
        self._start_timeout_s = start_timeout
        self._warm_names = warm_names
        self._preemption = PreemptionSettings()
        self._closed = False

    def __enter__(self) -> SimpleScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def scheduler(self) -> SimpleScheduler:
        """The object itself: it has the calls of the scheduler beneath it too."""
        return self

    # ---- settings ------------------------------------------------------------------------------------------------

    def configure_preemption(self, **settings: Any) -> conversion.Answer:
        """Set the preemption policy; see `PreemptionSettings`. Settings that are not given stay as they are.

        Raises InputError for an unknown or wrong setting. Possible slips (a rule for a label that no task has, a
        protected pool that does not exist) are in the answer's `warnings`.
        """
        known = [field.name for field in dataclasses.fields(PreemptionSettings)]
        check_known(settings, known, what="configure_preemption has no setting {}")
        wanted = dataclasses.replace(self._preemption, **settings)
        policy = wanted.policy()
        session = self._open()
        status = session.status()
        warnings = list(session.ask("set_policy", policy))
        missing = [pool for pool in policy.protected_pools if pool not in status["pools"]]
        warnings += [f"there is no pool {pool} yet, which protected_pools names" for pool in missing]
        self._preemption = wanted
        # Rules are usually set before tasks exist: only with tasks is an unused label worth a warning.
        level = logging.WARNING if status["tasks"] else logging.INFO
        for warning in warnings:
            log.log(level, "%s", warning)
        return {"success": True, "policy": dataclasses.asdict(wanted), "warnings": warnings}

    def ensure_pool(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        resources: conversion.Amounts | None = None,
        target_agents: int = 0,
        placement_strategy: str = "STRICT_PACK",
        pg_pool_config: Mapping[str, Any] | None = None,
    ) -> conversion.Answer:
        """Create or find a pool with a quota of `resources` (default: all of the cluster).

        `target_agents` processes are kept warm. `pg_pool_config` may contain: enable, high_priority_pg_specs (slots
        reserved for priorities of 8 and above), enable_dynamic_pgs, max_dynamic_pgs, enable_pg_reuse; without it slots
        are created as tasks need them. For an existing pool the arguments must match, else `success` is False with the
        differences.
        """
        facts: conversion.Answer = {"pool": name}
        try:
            conversion.word_of("the name of a pool", name)
            conversion.mapping_of("labels", labels)
            session = self._open()
            known = session.status()["pools"].get(name)
            wanted = conversion.in_bytes(resources, f"pool {name}") if resources else self._default_quota(name)
            pool = session.pool(
                name,
                wanted,
                labels=labels,
                warm_hosts=conversion.whole_of("target_agents", target_agents),
                strategy=conversion.word_of("placement_strategy", placement_strategy),
                **conversion.slots_of(pg_pool_config or {}, f"pool {name}"),
            )
            slots = self._wait_slots(name)
        except TrimtabError as fault:
            return conversion.refused(fault, facts)
        reason = "it exists, with the same configuration" if known else "it was created"
        if slots["wanted"]:
            reason += f"; {slots['wanted']} of {len(pool.spec.reserved)} reserved slots wait for free resources"
        return {"success": True, **facts, "created": known is None, "reason": reason, "error": None}

    def register_state_handlers(
        self, pool_name: str, preserver: Callable[[Any], Any], restorer: Callable[[Any, Any], None]
    ) -> conversion.Answer:
        """Save and restore tasks of a pool without `save()`: preserver(actor) -> state, restorer(actor, state)."""
        try:
            self._open().pool(pool_name).state_handlers(preserver, restorer)
        except TrimtabError as fault:
            return conversion.refused(fault, {"pool": pool_name})
        return {"success": True, "pool": pool_name, "reason": "counts from the next start of a task", "error": None}

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        task_id: str,
        pool: str,
        actor_class: Any,
        resources: conversion.Amounts,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        actor_args: Sequence[Any] | None = None,
        actor_kwargs: Mapping[str, Any] | None = None,
        agent_name: str | None = None,
        estimated_duration: float = 0.0,
        auto_register: bool = True,
        ray_options: Mapping[str, Any] | None = None,
    ) -> conversion.Answer:
        """Run an actor now, evicting others if the policy allows it, or refuse it with a reason.

        The answer's `agent` has its `handle`: `handle.method.remote(...)`, as with a Ray actor. `name` and `labels` of
        the constructor are filled in if it has them and they are not given. A task that is not registered
        (`auto_register` false) is never evicted.
        """
        spec = SimpleTaskSpec(
            task_id, pool, actor_class, resources, priority, labels, actor_args, actor_kwargs, agent_name,
            estimated_duration, auto_register, ray_options,
        )  # fmt: skip
        return self._submit(spec, over_quota=True)

    def submit_with_pg_preemption(
        self,
        *,
        task_id: str,
        pool: str,
        actor_class: Any,
        resources: conversion.Amounts,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        actor_args: Sequence[Any] | None = None,
        actor_kwargs: Mapping[str, Any] | None = None,
        estimated_duration: float = 0.0,
        auto_register: bool = True,
        ray_options: Mapping[str, Any] | None = None,
    ) -> conversion.Answer:
        """As `submit`, but only within the pool's quota: if that is short it is refused, and nothing is evicted."""
        spec = SimpleTaskSpec(
            task_id, pool, actor_class, resources, priority, labels, actor_args, actor_kwargs, None,
            estimated_duration, auto_register, ray_options,
        )  # fmt: skip
        return self._submit(spec, over_quota=False)

    def submit_spec(self, spec: SimpleTaskSpec) -> conversion.Answer:
        """As `submit`, with everything in one object."""
        if not isinstance(spec, SimpleTaskSpec):
            return conversion.refused(InputError(f"submit_spec takes a SimpleTaskSpec, not {spec!r}"), {})
        return self._submit(spec, over_quota=True)

    def complete(self, task_id: str) -> conversion.Answer:
        """Mark a task as done: its process ends, and its resources are free when this returns."""
        return self._end(task_id, lambda task: task.complete(), to_complete=True)

    def delete_agent(self, name: str, *, force: bool = False, destroy_pg: bool = True) -> conversion.Answer:
        """End the task of this name (its agent's or its own), and with `destroy_pg` its slot, also a reserved one.

        Its `cancel()` is called first, unless `force`. Without `destroy_pg` the slot is kept for the next task.
        """
        return self._end(name, lambda task: (task.complete if force else task.cancel)(keep_slot=not destroy_pg))

    def get_actor(self, name: str) -> Any:
        """The handle of the running task of this name (its agent's or its own); InputError if there is none."""
        handle = conversion.handle_of(
            self.session._ray, self._find_task(conversion.word_of("a task", name), agents=True)
        )
        if handle is None:
            raise InputError(f"task {name} does not run", hint="`list_agents()` shows those that do")
        return handle

    # ---- listing -------------------------------------------------------------------------------------------------

    def list_agents(self, pool: str | None = None, *, include_handle: bool = False) -> conversion.Answer:
        """`agents`: the tasks that have not ended, of all pools or of one: where they run, and why."""
        seen = self._open().tasks(pool)
        agents = [self._agent(task, include_handle) for task in seen if task.state not in ENDED]
        return {"success": True, "agents": agents}

    def list_pools(self) -> conversion.Answer:
        """`pools`: all pools, with quota and usage."""
        session = self._open()
        pools = []
        for name, view in session.status()["pools"].items():
            try:
                spec = session.pool(name).spec
            except InputError:  # removed since
                continue
            pools.append(
                {
                    "name": name,
                    "labels": dict(spec.labels),
                    "resources": conversion.in_mb(view["quota"]),
                    "used": conversion.in_mb(view["used"]),
                    "target_agents": spec.target_hosts,
                    "placement_strategy": spec.strategy.value,
                    "tasks": view["tasks"],
                    "queue": list(view["queue"]),
                    "pg_pool": conversion.slot_stats(view),
                }
            )
        return {"success": True, "pools": pools}

    def stats(self) -> conversion.Answer:
        """Preemption counts, the last ten preemptions, and the number of running tasks."""
        totals = self._open().status()["totals"]
        by_state = dict(totals.get("by_state", {}))
        return {
            "total_preemptions": totals["evictions"],
            "same_pool_preemptions": totals["same_pool"],
            "cross_pool_preemptions": totals["cross_pool"],
            "running_tasks": by_state.get(TaskState.running.value, 0),
            "tasks": by_state,
            "recent_preemptions": [conversion.eviction_of(eviction) for eviction in totals.get("latest", ())],
        }

    def pg_pool_stats(self, pool_name: str | None = None) -> conversion.Answer:
        """The slots of a pool, which are placement groups: counts by kind and state, reused, destroyed.

        Without a pool: the sums over all, and each under `pools`.
        """
        session = self._open()
        if pool_name is not None:
            session.pool(pool_name)  # raises an error that names the existing pools
            return {"success": True, "pool": pool_name, **conversion.slot_stats(session.status()["pools"][pool_name])}
        pools = {name: conversion.slot_stats(view) for name, view in session.status()["pools"].items()}
        return {"success": True, **conversion.total_of(pools.values()), "pools": pools}

    def shutdown(self) -> None:
        """End everything of this scheduler: tasks, processes, placement groups, the controller. Idempotent."""
        if not self._closed:
            self._closed = True
            self.session.shutdown()

    def _open(self) -> Session:
        if self._closed:
            raise InputError(f"the scheduler {self.name} was shut down", hint="make a new SimpleScheduler")
        return self.session

    def _submit(self, spec: SimpleTaskSpec, *, over_quota: bool) -> conversion.Answer:
        facts: conversion.Answer = {"task_id": spec.task_id, "pool": spec.pool}
        try:
            session = self._open()
            options = dict(conversion.mapping_of("ray_options", spec.ray_options))
            if self._warm_names and spec.agent_name is None and {"name"} <= set(options) <= _NAME_OPTIONS:
                spec = dataclasses.replace(spec, agent_name=options.pop("name"))
            where = f"task {conversion.word_of('task_id', spec.task_id)}"
            pool = session.pool(conversion.word_of("the name of a pool", spec.pool))
            agent = self._agent_name(spec, session)
            labels = dict(conversion.mapping_of("labels", spec.labels))
            args, kwargs = conversion.arguments_of(spec, agent, labels)
            task = pool.submit(
                spec.actor_class,
                args,
                kwargs,
                id=spec.task_id,
                resources=conversion.in_bytes(spec.resources, where),
                priority=spec.priority,
                labels=labels if agent == spec.task_id else {**labels, conversion.AGENT_LABEL: agent},
                ray_options=options,
                estimate_s=spec.estimated_duration,
                preemptible=None if spec.auto_register else False,
                wait_s=0.0,
                over_quota_waits=over_quota,
                start_timeout_s=self._start_timeout_s,
            )
            seen = self._started(task)
        except TrimtabError as fault:
            return conversion.refused(fault, facts)
        preempted: list[conversion.Answer] = []
        if seen.reason.code is ReasonCode.preempted:
            with contextlib.suppress(TrimtabError):  # the task runs in any case
                preempted = [entry for entry in self.stats()["recent_preemptions"] if entry["by"] == spec.task_id]
        return {
            "success": True,
            **facts,
            "agent": {**self._agent(seen, True), "resources": dict(spec.resources)},
            "reason": seen.reason.sentence,
            "code": seen.reason.code.value,
            "error": None,
            "preempted": preempted,
        }

    def _started(self, task: Task) -> TaskSnapshot:
        """The task once it runs; TaskError if it cannot, with nothing of it left."""
        settings = self._preemption
        timeout_s = self._start_timeout_s + settings.cancel_timeout + settings.save_timeout + ROOM_S
        try:
            task.wait("running", timeout=timeout_s)
        except TaskError:
            with contextlib.suppress(TrimtabError):
                task.cancel()
            raise
        until = time.monotonic() + SNAPSHOT_S
        seen = task.seen
        while seen.state is TaskState.running and not seen.members and time.monotonic() < until:
            time.sleep(POLL_S)
            seen = task.seen
        return seen

    def _end(self, name: str, ask: Callable[[Task], None], *, to_complete: bool = False) -> conversion.Answer:
        facts: conversion.Answer = {"task_id": name}
        try:
            seen = self._find_task(conversion.word_of("a task", name), agents=not to_complete)
            facts["task_id"] = seen.id
            if seen.state in ENDED:
                if to_complete and seen.state is not TaskState.done:
                    raise InputError(f"task {seen.id} is {seen.state.value}: {seen.reason}")
                return {"success": True, **facts, "state": seen.state.value, "reason": str(seen.reason), "error": None}
            task = self._open().task(seen.id)
            ask(task)
            settings = self._preemption
            task.wait("ended", timeout=settings.cancel_timeout + settings.save_timeout + ROOM_S)
            seen = task.seen
        except TrimtabError as fault:
            return conversion.refused(fault, facts)
        return {"success": True, **facts, "state": seen.state.value, "reason": seen.reason.sentence, "error": None}

    def _find_task(self, name: str, agents: bool) -> TaskSnapshot:
        """The task of this id, or with `agents` the live one with this agent name."""
        session = self._open()
        if agents:
            for task in session.tasks():
                if task.state not in ENDED and conversion.name_of(task) == name:
                    return task
        return session.task(name).seen

    def _agent_name(self, spec: SimpleTaskSpec, session: Session) -> str:
        """The agent's name; unique among live ones."""
        if spec.agent_name is None:
            return spec.task_id
        name = conversion.word_of("agent_name", spec.agent_name)
        for task in session.tasks():
            if task.state not in ENDED and name in (task.id, conversion.name_of(task)) and task.id != spec.task_id:
                raise InputError(f"the agent {name} exists: it is that of task {task.id}", where=f"task {spec.task_id}")
        return name

    def _agent(self, seen: TaskSnapshot, with_handle: bool) -> conversion.Answer:
        member = seen.members[0] if seen.members else None
        agent: conversion.Answer = {
            "name": conversion.name_of(seen),
            "task_id": seen.id,
            "pool": seen.pool,
            "priority": seen.priority,
            "labels": {key: value for key, value in seen.labels if key != conversion.AGENT_LABEL},
            "state": seen.state.value,
            "status": seen.state.value,
            "reason": str(seen.reason),
            "how": seen.how,
            "kind": member.kind if member else None,
            "node": member.node if member else None,
            "pid": member.pid if member else None,
            "evictions": seen.evictions,
        }
        if with_handle:
            agent["handle"] = conversion.handle_of(self.session._ray, seen)
        return agent

    def _default_quota(self, name: str) -> dict[str, float]:
        """The pool's current quota, or else the resources of all nodes."""
        session = self._open()
        with contextlib.suppress(InputError):
            return dict(session.pool(name).spec.quota.floats())
        whole: dict[str, float] = {}
        for node in session.status()["nodes"]:
            for resource, amount in node["total"].items():
                whole[resource] = whole.get(resource, 0.0) + amount
        return whole

    def _wait_slots(self, pool: str) -> dict[str, int]:
        """The pool's slots, once none is being created any more, or after SLOTS_S."""
        until = time.monotonic() + SLOTS_S
        while True:
            slots: dict[str, int] = self._open().status()["pools"][pool]["slots"]
            if not slots["making"] or time.monotonic() > until:
                return slots
            time.sleep(POLL_S)
