"""`SimpleScheduler`: pools, priorities and preemption in one object, whose answers are dictionaries.

Everything is asked of the native API (`trimtab.runtime.ray.client`); nothing is decided here. A submission either runs
when it returns, by evicting others where the policy allows that, or it is refused with a reason and has touched nobody.
Memory is in MB (2**20 bytes) in everything that goes in or comes out. What is wrong with a pool or a task is an answer
with `success: False`; settings that do not exist are errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.model.errors import InputError, TrimtabError, nearest
from trimtab.model.pool import ENDED, Aggressiveness, Code, Policy, State, rules_of
from trimtab.model.resources import Resources
from trimtab.runtime.ray.client import Session, connect
from trimtab.runtime.ray.doors import TaskSeen
from trimtab.runtime.ray.packing import class_of
from trimtab.runtime.ray.task import Task
from trimtab.runtime.ray.task_errors import TaskError

log = logging.getLogger("trimtab")

MB = 2**20
ROOM_S = 120.0  # beyond what telling, saving and starting may take, until a submission is given up
SLOTS_S = 10.0  # for reserved slots to stand before `ensure_pool` returns
NEWS_S = 5.0  # for the controller to say which process a task runs in
POLL_S = 0.01

# The name of an agent that is not called like its task travels with the task, so that every client sees it.
_AGENT_LABEL = "trimtab/agent"

Amounts = Mapping[str, float]
Answer = dict[str, Any]


class PreemptionAggressiveness(str, enum.Enum):
    """How large a gap in priority an eviction needs: by label rule, and in the same pool without one."""

    LOW = "low"  # 1.0 and 3.0
    MEDIUM = "medium"  # 0.5 and 1.0
    HIGH = "high"  # 0.1 and 0.5

    @classmethod
    def of(cls, word: str) -> PreemptionAggressiveness:
        """The level of this name or of a word for it; `env:VAR` reads it from the environment."""
        said = word.value if isinstance(word, cls) else word
        where = "preemption_aggressiveness"
        if isinstance(said, str) and said.startswith("env:"):
            variable = said.removeprefix("env:")
            where = f"{where}, from the environment variable {variable}"
            if variable not in os.environ:
                raise InputError(f"the environment variable {variable} is not set", where="preemption_aggressiveness")
            said = os.environ[variable]
        level = _LEVELS.get(said.strip().lower()) if isinstance(said, str) else None
        if level is None:
            near = nearest(str(said).lower(), _LEVELS)
            hint = f"did you mean {near}?" if near else "low, medium, high, or env:VARIABLE"
            raise InputError(f"{said!r} is no aggressiveness", where=where, hint=hint)
        return cls(level)


_LEVELS = {
    word: level
    for level, words in {
        "low": ("low", "background", "conservative", "gentle", "relaxed", "lazy"),
        "medium": ("medium", "normal", "default", "balanced", "standard", "moderate"),
        "high": ("high", "urgent", "aggressive", "critical", "realtime", "immediate"),
    }.items()
    for word in words
}


@dataclass(frozen=True)
class PreemptionSettings:
    """What `configure_preemption` takes. A threshold that is None follows the aggressiveness."""

    enable_same_pool_preemption: bool = True
    enable_label_preemption: bool = True
    label_preemption_rules: Mapping[str, Mapping[str, Sequence[str]]] = dataclasses.field(default_factory=dict)
    preemption_aggressiveness: str = PreemptionAggressiveness.MEDIUM
    same_pool_priority_threshold: float | None = None
    label_priority_threshold: float | None = None
    enable_cross_pool_preemption: bool = False
    cross_pool_priority_threshold: float = 5.0
    protected_pools: Collection[str] = ()
    cancel_timeout: float = 5.0  # seconds for `cancel()`; then the process is ended
    save_timeout: float = 60.0  # seconds for saving the state, apart from cancelling
    min_runtime: float = 0.0  # seconds that a task runs at least before it is evicted
    eviction_budget: int | None = None  # evictions within the window; None: as many as needed
    eviction_window: float = 60.0

    def policy(self) -> Policy:
        """The policy for the controller; InputError where a setting is wrong."""
        where = "configure_preemption"
        for field in dataclasses.fields(self):
            if field.name.startswith("enable_") and not isinstance(getattr(self, field.name), bool):
                raise InputError(f"{field.name} is true or false, not {getattr(self, field.name)!r}", where=where)
        protected = self.protected_pools
        if isinstance(protected, str) or not all(isinstance(one, str) for one in protected):
            raise InputError(f"protected_pools is a list of names, not {protected!r}", where=where)
        if not isinstance(self.label_preemption_rules or {}, Mapping):
            raise InputError("label_preemption_rules is {label: {value: [values it may evict]}}", where=where)
        level = Aggressiveness(PreemptionAggressiveness.of(self.preemption_aggressiveness).value)
        same, label = self.same_pool_priority_threshold, self.label_priority_threshold
        return Policy(
            same_pool=self.enable_same_pool_preemption,
            same_pool_gap=level.same_pool_gap if same is None else same,
            label_rules=rules_of(self.label_preemption_rules) if self.enable_label_preemption else (),
            label_gap=level.label_gap if label is None else label,
            cross_pool=self.enable_cross_pool_preemption,
            cross_pool_gap=self.cross_pool_priority_threshold,
            protected_pools=tuple(protected),
            cancel_timeout_s=self.cancel_timeout,
            save_timeout_s=self.save_timeout,
            min_runtime_s=self.min_runtime,
            budget=self.eviction_budget,
            budget_window_s=self.eviction_window,
        )


@dataclass(frozen=True)
class SimpleTaskSpec:
    """A task for `submit_spec`: what `submit` takes, as one object."""

    task_id: str
    pool: str
    actor_class: Any
    resources: Amounts
    priority: float = 5.0
    labels: Mapping[str, str] | None = None
    actor_args: Sequence[Any] | None = None
    actor_kwargs: Mapping[str, Any] | None = None
    agent_name: str | None = None
    estimated_duration: float = 0.0
    auto_register: bool = True
    ray_options: Mapping[str, Any] | None = None


class SimpleScheduler:
    """One scheduler: a controller of this name, found or made on the Ray that `how` names.

    Until `configure_preemption` is called nobody is evicted. `session` is the native API beneath.
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
        start_timeout: float = 600.0,
    ) -> None:
        self.session = connect(address, name, journal_dir, state_dir, cpus=cpus, metrics_port=metrics_port)
        self.name = name
        self.how = self.session.how
        self._start_timeout_s = start_timeout
        self._preemption = PreemptionSettings()
        self._is_shut = False

    def __enter__(self) -> SimpleScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- settings ------------------------------------------------------------------------------------------------

    def configure_preemption(self, **settings: Any) -> Answer:
        """Say who may evict whom; the settings are those of `PreemptionSettings`, and those not given stay as they are.

        Raises InputError for a setting that does not exist or is wrong. What may be a slip (a rule for a label that
        nobody has, a protected pool that does not exist) is among the answer's `warnings`.
        """
        known = [field.name for field in dataclasses.fields(PreemptionSettings)]
        for word in settings:
            if word not in known:
                near = nearest(word, known)
                raise InputError(
                    f"configure_preemption has no setting {word}",
                    hint=f"did you mean {near}?" if near else f"settings: {', '.join(known)}",
                )
        wanted = dataclasses.replace(self._preemption, **settings)
        policy = wanted.policy()
        session = self._open()
        status = session.status()
        warnings = list(session.ask("set_policy", policy))
        strangers = [pool for pool in policy.protected_pools if pool not in status["pools"]]
        warnings += [f"there is no pool {pool} yet, which protected_pools names" for pool in strangers]
        self._preemption = wanted
        # Rules come before tasks in most programs: only among tasks is a label that nobody has a surprise.
        level = logging.WARNING if status["tasks"] else logging.INFO
        for warning in warnings:
            log.log(level, "%s", warning)
        return {"success": True, "policy": dataclasses.asdict(wanted), "warnings": warnings}

    def ensure_pool(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        resources: Amounts | None = None,
        target_agents: int = 0,
        placement_strategy: str = "STRICT_PACK",
        pg_pool_config: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Have a pool with a quota of `resources` (without: all that the cluster has).

        `target_agents` processes are kept warm. `pg_pool_config` may say: enable, high_priority_pg_specs (slots kept
        for priorities of 8 and above), enable_dynamic_pgs, max_dynamic_pgs, enable_pg_reuse; without it slots are made
        as tasks need them. A pool that exists must be asked for as it is, else `success` is False with what differs.
        """
        facts: Answer = {"pool": name}
        try:
            _word("the name of a pool", name)
            _mapping("labels", labels)
            session = self._open()
            known = session.status()["pools"].get(name)
            wanted = _in_bytes(resources, f"pool {name}") if resources else self._all_of_it(name)
            pool = session.pool(
                name,
                wanted,
                labels=labels,
                warm_hosts=_whole("target_agents", target_agents),
                strategy=_word("placement_strategy", placement_strategy),
                **_slots(pg_pool_config or {}, f"pool {name}: pg_pool_config"),
            )
            slots = self._slots_that_stand(name)
        except TrimtabError as fault:
            return _refused(fault, facts)
        reason = "it was there, with the same configuration" if known else "it was made"
        if slots["wanted"]:
            reason += f"; {slots['wanted']} of {len(pool.spec.reserved)} reserved slots wait for room in the cluster"
        return {"success": True, **facts, "created": known is None, "reason": reason, "error": None}

    def register_state_handlers(
        self, pool_name: str, preserver: Callable[[Any], Any], restorer: Callable[[Any, Any], None]
    ) -> Answer:
        """Save and restore tasks of a pool that have no `save()`: preserver(actor) -> state, restorer(actor, state)."""
        try:
            self._open().pool(pool_name).state_handlers(preserver, restorer)
        except TrimtabError as fault:
            return _refused(fault, {"pool": pool_name})
        return {"success": True, "pool": pool_name, "reason": "counts from the next start of a task", "error": None}

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        task_id: str,
        pool: str,
        actor_class: Any,
        resources: Amounts,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        actor_args: Sequence[Any] | None = None,
        actor_kwargs: Mapping[str, Any] | None = None,
        agent_name: str | None = None,
        estimated_duration: float = 0.0,
        auto_register: bool = True,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Have an actor run now, evicting others where the policy allows it, or be told why not.

        The answer's `agent` has its `handle`: `handle.method.remote(...)`, as with a Ray actor. `name` and `labels` of
        the constructor are filled in where it has them and they are not given. A task that is not registered
        (`auto_register` false) is never evicted.
        """
        spec = SimpleTaskSpec(
            task_id=task_id,
            pool=pool,
            actor_class=actor_class,
            resources=resources,
            priority=priority,
            labels=labels,
            actor_args=actor_args,
            actor_kwargs=actor_kwargs,
            agent_name=agent_name,
            estimated_duration=estimated_duration,
            auto_register=auto_register,
            ray_options=ray_options,
        )
        return self._submit(spec, over_quota=True)

    def submit_with_pg_preemption(
        self,
        *,
        task_id: str,
        pool: str,
        actor_class: Any,
        resources: Amounts,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        actor_args: Sequence[Any] | None = None,
        actor_kwargs: Mapping[str, Any] | None = None,
        estimated_duration: float = 0.0,
        auto_register: bool = True,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Answer:
        """As `submit`, but only within the pool's quota: where that is short it is refused, and nobody is evicted."""
        spec = SimpleTaskSpec(
            task_id=task_id,
            pool=pool,
            actor_class=actor_class,
            resources=resources,
            priority=priority,
            labels=labels,
            actor_args=actor_args,
            actor_kwargs=actor_kwargs,
            estimated_duration=estimated_duration,
            auto_register=auto_register,
            ray_options=ray_options,
        )
        return self._submit(spec, over_quota=False)

    def submit_spec(self, spec: SimpleTaskSpec) -> Answer:
        """As `submit`, with everything in one object."""
        if not isinstance(spec, SimpleTaskSpec):
            return _refused(InputError(f"submit_spec takes a SimpleTaskSpec, not {spec!r}"), {})
        return self._submit(spec, over_quota=True)

    def complete(self, task_id: str) -> Answer:
        """Say that a task's work is done: its process ends, and what it held is free when this returns."""
        return self._end(task_id, lambda task: task.complete(), to_complete=True)

    def delete_agent(self, name: str, *, force: bool = False, destroy_pg: bool = True) -> Answer:
        """End the task of this name (its agent's or its own), and with `destroy_pg` its slot, also a reserved one.

        Its `cancel()` is called first, unless `force`. Without `destroy_pg` the slot is kept for the next.
        """
        return self._end(name, lambda task: (task.complete if force else task.cancel)(keep_slot=not destroy_pg))

    # ---- looking -------------------------------------------------------------------------------------------------

    def list_agents(self, pool: str | None = None, *, include_handle: bool = False) -> list[Answer]:
        """Tasks that have not ended, of all pools or of one: where they are, and why."""
        seen = self._open().tasks(pool)
        return [self._agent(one, include_handle) for one in seen if one.state not in ENDED]

    def list_pools(self) -> list[Answer]:
        """All pools, with what they may use and what they use."""
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
                    "resources": _in_mb(view["quota"]),
                    "used": _in_mb(view["used"]),
                    "target_agents": spec.target_hosts,
                    "placement_strategy": spec.strategy.value,
                    "tasks": view["tasks"],
                    "queue": list(view["queue"]),
                    "pg_pool": _pg_stats(view),
                }
            )
        return pools

    def stats(self) -> Answer:
        """Preemptions so far, the last ten of them, and how many tasks run."""
        totals = self._open().status()["totals"]
        by_state = dict(totals.get("by_state", {}))
        return {
            "total_preemptions": totals["evictions"],
            "same_pool_preemptions": totals["same_pool"],
            "cross_pool_preemptions": totals["cross_pool"],
            "running_tasks": by_state.get(State.running.value, 0),
            "tasks": by_state,
            "recent_preemptions": [_eviction(one) for one in totals.get("latest", ())],
        }

    def pg_pool_stats(self, pool: str) -> Answer:
        """The slots of a pool, which are placement groups: how many of which kind, taken, free, reused, destroyed."""
        session = self._open()
        session.pool(pool)  # an error that names those that exist
        return {"pool": pool, **_pg_stats(session.status()["pools"][pool])}

    def shutdown(self) -> None:
        """End everything of this scheduler: tasks, processes, placement groups, the controller. Twice is once."""
        if not self._is_shut:
            self._is_shut = True
            self.session.shutdown()

    # ---- how it is done ------------------------------------------------------------------------------------------

    def _open(self) -> Session:
        if self._is_shut:
            raise InputError(f"the scheduler {self.name} was shut down", hint="make a new SimpleScheduler")
        return self.session

    def _submit(self, spec: SimpleTaskSpec, *, over_quota: bool) -> Answer:
        facts: Answer = {"task_id": spec.task_id, "pool": spec.pool}
        try:
            session = self._open()
            where = f"task {_word('task_id', spec.task_id)}"
            pool = session.pool(_word("the name of a pool", spec.pool))
            agent = self._agent_name(spec, session)
            labels = dict(_mapping("labels", spec.labels))
            args, kwargs = _arguments(spec, agent, labels)
            task = pool.submit(
                spec.actor_class,
                args,
                kwargs,
                id=spec.task_id,
                resources=_in_bytes(spec.resources, where),
                priority=spec.priority,
                labels=labels if agent == spec.task_id else {**labels, _AGENT_LABEL: agent},
                ray_options=_mapping("ray_options", spec.ray_options),
                estimate_s=spec.estimated_duration,
                preemptible=None if spec.auto_register else False,
                wait_s=0.0,
                over_quota_waits=over_quota,
                start_timeout_s=self._start_timeout_s,
            )
            seen = self._started(task)
        except TrimtabError as fault:
            return _refused(fault, facts)
        preempted = []
        if seen.reason.code is Code.preempted:
            preempted = [one for one in self.stats()["recent_preemptions"] if one["by"] == spec.task_id]
        return {
            "success": True,
            **facts,
            "agent": {**self._agent(seen, True), "resources": dict(spec.resources)},
            "reason": seen.reason.sentence,
            "code": seen.reason.code.value,
            "error": None,
            "preempted": preempted,
        }

    def _started(self, task: Task) -> TaskSeen:
        """The task, as it runs; TaskError where it cannot, and then nothing of it is left."""
        settings = self._preemption
        patience_s = self._start_timeout_s + settings.cancel_timeout + settings.save_timeout + ROOM_S
        try:
            task.wait("running", timeout=patience_s)
        except TaskError:
            with contextlib.suppress(TrimtabError):
                task.cancel()
            raise
        until = time.monotonic() + NEWS_S
        seen = task.seen
        while seen.state is State.running and not seen.members and time.monotonic() < until:
            time.sleep(POLL_S)
            seen = task.seen
        return seen

    def _end(self, name: str, ask: Callable[[Task], None], *, to_complete: bool = False) -> Answer:
        facts: Answer = {"task_id": name}
        try:
            seen = self._named(_word("a task", name), agents=not to_complete)
            facts["task_id"] = seen.id
            if seen.state in ENDED:
                if to_complete and seen.state is not State.done:
                    raise InputError(f"task {seen.id} is {seen.state.value}: {seen.reason}")
                return {"success": True, **facts, "state": seen.state.value, "reason": str(seen.reason), "error": None}
            task = self._open().task(seen.id)
            ask(task)
            settings = self._preemption
            task.wait("ended", timeout=settings.cancel_timeout + settings.save_timeout + ROOM_S)
            seen = task.seen
        except TrimtabError as fault:
            return _refused(fault, facts)
        return {"success": True, **facts, "state": seen.state.value, "reason": seen.reason.sentence, "error": None}

    def _named(self, name: str, agents: bool) -> TaskSeen:
        """The task of this id, or with `agents` the living one whose agent is called so."""
        session = self._open()
        if agents:
            for one in session.tasks():
                if one.state not in ENDED and _name_of(one) == name:
                    return one
        return session.task(name).seen

    def _agent_name(self, spec: SimpleTaskSpec, session: Session) -> str:
        """What the agent is called; no two that live are called alike."""
        if spec.agent_name is None:
            return spec.task_id
        name = _word("agent_name", spec.agent_name)
        for one in session.tasks():
            if one.state not in ENDED and name in (one.id, _name_of(one)) and one.id != spec.task_id:
                raise InputError(f"the agent {name} exists: it is that of task {one.id}", where=f"task {spec.task_id}")
        return name

    def _agent(self, seen: TaskSeen, with_handle: bool) -> Answer:
        member = seen.members[0] if seen.members else None
        agent: Answer = {
            "name": _name_of(seen),
            "task_id": seen.id,
            "pool": seen.pool,
            "priority": seen.priority,
            "labels": {key: value for key, value in seen.labels if key != _AGENT_LABEL},
            "state": seen.state.value,
            "reason": str(seen.reason),
            "how": seen.how,
            "kind": member.kind if member else None,
            "node": member.node if member else None,
            "pid": member.pid if member else None,
            "evictions": seen.evictions,
        }
        if with_handle:
            agent["handle"] = _handle(self.session._ray, seen)
        return agent

    def _all_of_it(self, name: str) -> dict[str, float]:
        """The quota that a pool has, or else what all nodes together have."""
        session = self._open()
        with contextlib.suppress(InputError):
            return dict(session.pool(name).spec.quota.floats())
        whole: dict[str, float] = {}
        for node in session.status()["nodes"]:
            for resource, amount in node["total"].items():
                whole[resource] = whole.get(resource, 0.0) + amount
        return whole

    def _slots_that_stand(self, pool: str) -> dict[str, int]:
        """The pool's slots, once none is being made any more, or as they are after a while."""
        until = time.monotonic() + SLOTS_S
        while True:
            slots: dict[str, int] = self._open().status()["pools"][pool]["slots"]
            if not slots["making"] or time.monotonic() > until:
                return slots
            time.sleep(POLL_S)


class HostHandle:
    """Calls the methods of an object in a warm host as one calls those of a Ray actor: `handle.run.remote(...)`.

    It is of one run of the task: once the task was evicted or has ended, calls end in Ray's error for a dead actor.
    """

    def __init__(self, host: Any, task: str) -> None:
        self._host = host
        self._task = task

    def __getattr__(self, method: str) -> HostMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostMethod(self._host, self._task, method)

    def __repr__(self) -> str:
        return f"HostHandle({self._task!r})"


class HostMethod:
    """One method of an object in a warm host."""

    def __init__(self, host: Any, task: str, method: str, options: Mapping[str, Any] | None = None) -> None:
        self._host = host
        self._task = task
        self._method = method
        self._options = {"name": f"{task}.{method}", **(options or {})}  # the name is for Ray's dashboard

    def options(self, **options: Any) -> HostMethod:
        """The same method, called with these options of Ray."""
        return HostMethod(self._host, self._task, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; what comes back is for `ray.get`."""
        return self._host.call.options(**self._options).remote(self._method, *args, **kwargs)


def _handle(ray: Any, seen: TaskSeen) -> Any:
    """What calls the task's object; None where it does not run."""
    if not seen.members:
        return None
    member = seen.members[0]
    try:
        actor = ray.get_actor(member.actor, namespace=member.namespace)
    except ValueError:  # gone since
        return None
    return HostHandle(actor, seen.id) if member.kind == "host" else actor


def _name_of(seen: TaskSeen) -> str:
    return dict(seen.labels).get(_AGENT_LABEL, seen.id)


def _refused(fault: TrimtabError, facts: Answer) -> Answer:
    """An answer that says no, and why."""
    explanation = fault.explanation if isinstance(fault, TaskError) else None
    if explanation is not None:
        reason, code = explanation.reason.sentence, explanation.reason.code.value
    else:
        reason, code = "; ".join(fault.lines()), None
    return {"success": False, **facts, "agent": None, "reason": reason, "code": code, "error": reason}


def _eviction(one: Mapping[str, Any]) -> Answer:
    return {
        "task_id": one["victim"],
        "pool": one["victim_pool"],
        "by": one["by"],
        "reason": one["reason"]["sentence"],
        "code": one["reason"]["code"],
        "time": one["at"],
    }


def _pg_stats(view: Mapping[str, Any]) -> Answer:
    slots = view["slots"]
    return {
        "total_pgs": slots["reserved"] + slots["dynamic"],
        "high_priority_pgs": slots["reserved"],
        "dynamic_pgs": slots["dynamic"],
        "allocated_pgs": slots["taken"],
        "available_pgs": slots["idle"],
        "total_reuse_count": view["reuse_count"],
        "total_created_count": view["made_count"],
        "total_destroyed_count": view["destroyed_count"],
        "by_status": {
            "allocated": slots["taken"],
            "available": slots["idle"],
            "creating": slots["making"],
            "removing": slots["removing"],
            "missing": slots["wanted"],
        },
    }


# ---- what comes in ----------------------------------------------------------------------------------------------

_PG_KEYS = ("enable", "high_priority_pg_specs", "enable_dynamic_pgs", "max_dynamic_pgs", "enable_pg_reuse")


def _slots(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a `pg_pool_config` says, in the words of `Session.pool`."""
    config = _mapping("pg_pool_config", config)
    for key in config:
        if key not in _PG_KEYS:
            near = nearest(str(key), _PG_KEYS)
            hint = f"did you mean {near}?" if near else f"keys: {', '.join(_PG_KEYS)}"
            raise InputError(f"{key} is no key of it", where=where, hint=hint)
    flags = {key: config.get(key, True) for key in ("enable", "enable_dynamic_pgs", "enable_pg_reuse")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{key} is true or false, not {value!r}", where=where)
    if not flags["enable"]:
        return {}
    specs = config.get("high_priority_pg_specs") or ()
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence):
        raise InputError("high_priority_pg_specs is a list of {resource: amount}", where=where)
    most = config.get("max_dynamic_pgs")
    return {
        "reserved": [_in_bytes(one, f"{where}: high_priority_pg_specs") for one in specs],
        "dynamic": flags["enable_dynamic_pgs"],
        "dynamic_limit": None if most is None else _whole("max_dynamic_pgs", most),
        "reuse": flags["enable_pg_reuse"],
    }


def _in_bytes(resources: Any, where: str) -> dict[str, float]:
    """Amounts as pools count them: memory, given in MB, in bytes."""
    if not isinstance(resources, Mapping):
        raise InputError(f"resources are {{name: amount}}, not {resources!r}", where=where)
    Resources.of(resources, where=where)  # refuses what is no amount before anything is multiplied
    return {name: amount * MB if name == "memory" else amount for name, amount in resources.items()}


def _in_mb(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount / MB if name == "memory" else amount for name, amount in resources.items()}


def _arguments(spec: SimpleTaskSpec, agent: str, labels: dict[str, str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's arguments, with the agent's name and labels where it takes them and they are not given."""
    where = f"task {spec.task_id}"
    if isinstance(spec.actor_args, str) or not isinstance(spec.actor_args or (), Sequence):
        raise InputError(f"actor_args is a list, not {spec.actor_args!r}", where=where)
    args, kwargs = tuple(spec.actor_args or ()), dict(_mapping("actor_kwargs", spec.actor_kwargs))
    user_class = class_of(spec.actor_class, where)
    try:
        signature = inspect.signature(user_class)
    except (TypeError, ValueError):  # written in C, and silent about it
        return args, kwargs
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, value in (("name", agent), ("labels", labels)):
            parameter = signature.parameters.get(name)
            by_word = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            if parameter is not None and parameter.kind in by_word and name not in given:
                kwargs[name] = value
        signature.bind(*args, **kwargs)
    except TypeError as fault:
        raise InputError(f"{user_class.__name__} cannot be made: {fault}", where=where) from None
    return args, kwargs


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise InputError(f"{what} must be a dictionary, not {value!r}")
    return value or {}


def _word(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} must be a word, not {value!r}")
    return value


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{what} must be a whole number, not {value!r}")
    return value
