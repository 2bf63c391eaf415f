"""The Python API of pools: connect, create a pool, submit, call, wait, inspect.

    with trimtab.connect() as session:
        pool = session.pool("train", quota={"cpu": 6, "gpu": 8})
        task = pool.submit(Trainer, resources={"cpu": 1, "gpu": 1}, priority=9.0)
        task.call("step", 3)

A session is a client of a controller, which keeps running in the cluster when the session closes. Every wait has a
deadline; a timeout error has the reason for the wait. Errors are those of `trimtab.core.errors` and `client.task`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError, check_known
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import PoolDrained, PoolDropped, QuotaSet
from trimtab.model.nodes import NodeView
from trimtab.model.pool import (
    Aggressiveness,
    PoolSpec,
    PreemptionPolicy,
    TaskExplanation,
    TaskSpec,
    labels_of,
    rules_of,
    strategy_of,
)
from trimtab.runtime.client.connection import ANSWER_S, ControllerConnection
from trimtab.runtime.client.task import Task, class_of, own_paths, packed, pickled_handlers
from trimtab.runtime.controller.clients import LEASE_S, this_process
from trimtab.runtime.controller.rpc import ControllerSettings, TaskSnapshot, write_payload
from trimtab.runtime.procs.background import Background, RestartPolicy
from trimtab.runtime.rayapi.connect import RayConnection
from trimtab.runtime.workers import environments

log = logging.getLogger("trimtab")

RENEW_EVERY_S = 2.0
SUBMIT_S = 300.0  # payloads may be large

Amounts = Mapping[str, float]


def connect(
    address: str | None = None,
    name: str = "trimtab",
    journal_dir: str | None = None,
    state_dir: str | None = None,
    *,
    cpus: int | None = None,
    metrics_port: int | None = None,
    dashboard: bool = False,
    timeout: float = 120.0,
    lease_s: float = LEASE_S,
    answer_s: float = ANSWER_S,
    **settings: Any,
) -> Session:
    """Connect to the controller `name` of a Ray cluster, and create it if there is none.

    The cluster is the one this process is connected to, else `address`, else RAY_ADDRESS, else one that runs on this
    machine, else a local Ray of `cpus` logical CPUs that ends with the session ("local" requests that one);
    `session.how` says which it is and why. `journal_dir` is the directory of the controller's journal on the head node
    (default: in Ray's session directory, for the lifetime of the cluster). With `state_dir`, a directory that every
    node mounts, tasks save their state there themselves. `metrics_port` is for the exporter of a local Ray, `dashboard`
    starts Ray's dashboard with it (`session.dashboard_url`). `lease_s`:
    what was submitted with `ends_with_me` ends after so long without a sign of this process, unless its node sees that
    it is alive; at once if its node sees that it is dead. `answer_s` is how long the controller may take to answer.
    Further settings, of a new controller, are fields of `ControllerSettings`: reconcile_s, poll_nodes_s,
    worker_start_s, metric_alias.
    """
    check_known(settings, ControllerSettings.__dataclass_fields__, what="{} is no setting of a controller")
    if not answer_s > 0:
        raise InputError(f"answer_s must be more than 0, not {answer_s:g}")
    controller_settings = ControllerSettings(**settings)
    if not lease_s > 0:
        raise InputError(f"lease_s must be more than 0, not {lease_s:g}", hint=f"the default is {LEASE_S:g} seconds")
    connection = RayConnection(address, cpus=cpus, metrics_port=metrics_port, dashboard=dashboard)
    try:
        controller = ControllerConnection(
            connection.ray, name, journal_dir, state_dir, timeout, settings=controller_settings, answer_s=answer_s
        )
        return Session(connection, controller, lease_s)
    except BaseException:
        connection.close()
        raise


class Session:
    """A client of a controller. `how` says which Ray it is on and why."""

    def __init__(self, connection: RayConnection, controller: ControllerConnection, lease_s: float = LEASE_S) -> None:
        self._connection = connection
        self._controller = controller
        self._ray = connection.ray
        self.how = connection.how
        self.name = controller.name
        self.client = f"{uuid.uuid4().hex[:12]}"
        self.ask = controller.ask
        self._closed = threading.Event()
        self._lease_s = lease_s
        self._renew_every_s = min(RENEW_EVERY_S, lease_s / 12)
        self._renewer: threading.Thread | None = None
        self._renewed = threading.Event()  # the first time
        self._lease_fault = ""  # why the last renewal failed
        self._background = Background()
        for note in controller.facts["notes"]:
            log.warning("%s", note)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def preemption(
        self,
        *,
        same_pool: bool = True,
        label_rules: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
        aggressiveness: str | Aggressiveness = Aggressiveness.medium,
        same_pool_gap: float | None = None,
        label_gap: float | None = None,
        cross_pool: bool = False,
        cross_pool_gap: float = 5.0,
        protected_pools: Sequence[str] = (),
        cancel_timeout_s: float = 5.0,
        save_timeout_s: float = 60.0,
        min_runtime_s: float = 0.0,
        budget: int | None = None,
        budget_window_s: float = 60.0,
    ) -> PreemptionPolicy:
        """Set the preemption policy. `aggressiveness` sets the gaps that are not given."""
        try:
            level = Aggressiveness(aggressiveness)
        except ValueError:
            words = ", ".join(level.value for level in Aggressiveness)
            raise InputError(f"{aggressiveness!r} is no aggressiveness", hint=f"one of {words}") from None
        policy = PreemptionPolicy(
            same_pool=same_pool,
            same_pool_gap=level.same_pool_gap if same_pool_gap is None else same_pool_gap,
            label_rules=rules_of(label_rules),
            label_gap=level.label_gap if label_gap is None else label_gap,
            cross_pool=cross_pool,
            cross_pool_gap=cross_pool_gap,
            protected_pools=tuple(protected_pools),
            cancel_timeout_s=cancel_timeout_s,
            save_timeout_s=save_timeout_s,
            min_runtime_s=min_runtime_s,
            budget=budget,
            budget_window_s=budget_window_s,
        )
        for warning in self.ask("set_policy", policy):
            log.warning("%s", warning)
        return policy

    def pool(
        self,
        name: str,
        quota: Amounts | None = None,
        *,
        reserved: Sequence[Amounts] = (),
        reserved_priority: float = 8.0,
        dynamic: bool = True,
        dynamic_limit: int | None = None,
        reuse: bool = True,
        borrow: bool = False,
        return_preempts: bool = False,
        warm_hosts: int = 0,
        warm_each: int = 0,
        preload: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        strategy: str = "STRICT_PACK",
        wait_s: float = 3600.0,
        starvation_timeout_s: float = 60.0,
        starvation_runs: float = 20.0,
        ends_with_me: bool = False,
    ) -> Pool:
        """The pool of this name; with a quota it is created, or must exist with the same settings.

        Memory is in bytes. `reserved` slots are for tasks of `reserved_priority` and above; `borrow` lets others use
        them while they are idle. `warm_hosts` idle processes are kept ready on all nodes together, and `warm_each` on
        every node; they have imported `preload` and have the runtime environment of the last client that called this.
        `ends_with_me` drops the pool and its tasks when this client ends.
        """
        if quota is None:
            return Pool(self, self.ask("pool", name))
        where = f"pool {name}"
        spec = PoolSpec(
            name=name,
            quota=Resources.of(quota, where=where),
            labels=labels_of(labels, where),
            strategy=strategy_of(strategy, where),
            reserved=tuple(Resources.of(bundle, where=where) for bundle in reserved),
            reserved_priority=reserved_priority,
            dynamic=dynamic,
            dynamic_limit=dynamic_limit,
            reuse=reuse,
            borrow=borrow,
            return_preempts=return_preempts,
            target_hosts=warm_hosts,
            hosts_each=warm_each,
            preload=tuple(preload),
            wait_s=wait_s,
            starvation_timeout_s=starvation_timeout_s,
            starvation_runs=starvation_runs,
            client=self.client if ends_with_me else None,
        )
        self.ask("ensure_pool", spec, environments.of_this_process(self._ray), own_paths())
        if ends_with_me:
            self._keep_lease()
        return Pool(self, spec)

    def task(self, id: str) -> Task:
        """The task of this id, of any client."""
        self.ask("see", id)
        return Task(self, id)

    def tasks(self, pool: str | None = None) -> list[TaskSnapshot]:
        """Snapshots of all known tasks, or of one pool."""
        seen: list[TaskSnapshot] = self.ask("tasks", pool)
        return seen

    def status(self) -> dict[str, Any]:
        """State of the controller as plain data: nodes, pools, tasks by state, warm hosts, the journal, faults."""
        status: dict[str, Any] = self.ask("status")
        return {**status, "how": self.how}

    def explain(self, id: str) -> TaskExplanation:
        """The state of a task, and the reason for it."""
        explanation: TaskExplanation = self.ask("explain", id)
        return explanation

    def would_evict(
        self, pool: str, resources: Amounts | Sequence[Amounts], *, priority: float = 5.0, **settings: Any
    ) -> Any:
        """Dry run: which tasks would be evicted if this were submitted now. Settings are those of `Pool.submit`."""
        return self.ask("would_evict", _task_spec(None, pool, resources, priority=priority, **settings))

    def drain_node(self, node: str, deadline_s: float | None = None, cause: str = "asked by hand") -> NodeView:
        """Drain a node by a deadline (None: none), given its id, an id prefix, its name or its address.

        Its tasks are cancelled, saved and started elsewhere in time. Ray drains it too; this cannot be undone.
        """
        view: NodeView = self.ask("drain_node", node, deadline_s, cause)
        return view

    def close(self) -> None:
        """Close the session. The controller and its tasks stay, except tasks that end with this client.

        A local Ray that was started for this session is shut down.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._background.stop()
        if self._renewer is not None:
            self._renewer.join(timeout=5)
            with contextlib.suppress(TrimtabError):
                self.ask("leave", self.client)
        if self._connection.embedded:
            self._end_controller()
        self._connection.close()

    def shutdown(self, timeout: float = 60.0) -> None:
        """End the controller with all its tasks, slots and processes."""
        if not self._closed.is_set():
            self._closed.set()
            self._background.stop()
            self._end_controller(timeout)
            self._connection.close()

    def _end_controller(self, timeout: float = 60.0) -> None:
        try:
            self.ask("shutdown", True, timeout / 2, timeout_s=timeout)
        except TrimtabError as fault:
            log.warning("the controller did not shut down cleanly: %s", fault.what)
        self._controller.end()

    def _keep_lease(self) -> None:
        """Renew the lease now, and periodically from a thread."""
        if self._renewer is None:
            self._process = this_process(self._ray)
            policy = RestartPolicy(None, backoff_s=self._renew_every_s, max_backoff_s=self._renew_every_s)
            self._renewer = self._background.start_thread("lease", self._renew_often, policy=policy)
            self._renewed.wait(RENEW_EVERY_S)  # so that the lease exists before the caller blocks

    def _renew_often(self) -> None:
        while True:
            self._renew()
            self._renewed.set()
            if self._closed.wait(self._renew_every_s):
                return

    def _renew(self) -> None:
        fault = ""
        try:
            timeout_s = max(2 * RENEW_EVERY_S, self._lease_s / 6)
            if not self.ask("renew", self.client, self._lease_s, self._process, timeout_s=timeout_s):
                fault = "the lease had ended, and with it what was to end with this client"
        except UnreachableError as error:
            fault = error.what
        if fault and fault != self._lease_fault:
            log.warning("the lease of this client was not renewed: %s", fault)
        self._lease_fault = fault


class Pool:
    """A pool, as seen by a client; `spec` is its specification."""

    def __init__(self, session: Session, spec: PoolSpec) -> None:
        self._session = session
        self.spec = spec
        self.name = spec.name

    def submit(
        self,
        kind: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        resources: Amounts | Sequence[Amounts],
        id: str | None = None,
        priority: float = 5.0,
        labels: Mapping[str, str] | None = None,
        run: str | None = None,
        run_args: Sequence[Any] = (),
        run_kwargs: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        plain: bool = False,
        ends_with_me: bool = False,
        **settings: Any,
    ) -> Task:
        """Create an object of class `kind` in this pool; a list of `resources` makes a gang, one object each.

        With `run`, that method is called after construction, and its return value is the task's result; without, the
        task serves calls until it is completed or cancelled. A warm host serves it unless the class is decorated by
        Ray, has async methods, has `ray_options` that only an actor can honour, or `plain` requests an actor. Actors
        that it creates without a placement are in its slot, and end with it. `ends_with_me` cancels it when this client
        ends. Further settings are fields of `TaskSpec`: estimate_s, preemptible, strategy, wait_s, restarts, saves,
        notice_s, label_selector (of nodes, as in Ray), awaits_node, may_evict, over_quota_waits, shares, residual,
        room, start_timeout_s, one_process (a list of resources is for one object and the actors that it creates).
        """
        session = self._session
        user_class = class_of(kind)
        id = id or f"{user_class.__name__.lower()}-{uuid.uuid4().hex[:8]}"
        options = dict(ray_options or {})
        settings.setdefault("restarts", int(options.get("max_restarts") or 0))
        settings.setdefault("saves", callable(getattr(user_class, "save", None)))
        if ends_with_me:
            settings["client"] = session.client
        spec = _task_spec(id, self.name, resources, priority=priority, labels=labels, **settings)
        for option, name in (("num_cpus", "cpu"), ("num_gpus", "gpu")):
            has = min(bundle.floats().get(name, 0.0) for bundle in spec.bundles[: spec.processes])
            if options.get(option, 0) > has:
                raise InputError(
                    f"ray_options: {option} is {options[option]}, but its resources have {has:g} {name}",
                    where=f"task {id}",
                    hint="it is what the actor itself uses of its slot; the rest is for actors that it creates",
                )
        payload = packed(
            kind,
            args,
            kwargs,
            run=run,
            run_args=run_args,
            run_kwargs=run_kwargs,
            ray_options=options,
            plain=plain,
            namespace=session._ray.get_runtime_context().namespace,
            runtime_env=environments.of_this_process(session._ray),
            where=f"task {id}",
        )
        session.ask(
            "submit",
            spec,
            write_payload(payload, uuid.uuid4().hex),
            timeout_s=max(SUBMIT_S, session._controller.answer_s),
        )
        if ends_with_me:
            session._keep_lease()
        return Task(session, id)

    def state_handlers(self, preserver: Callable[[Any], Any], restorer: Callable[[Any, Any], None]) -> None:
        """For tasks without `save()`: `preserver(actor)` returns the state, `restorer(actor, state)` restores it."""
        handlers = pickled_handlers(preserver, restorer, f"pool {self.name}")
        self._session.ask("set_state_handlers", self.name, handlers)

    def tasks(self) -> list[TaskSnapshot]:
        """Snapshots of its tasks."""
        return self._session.tasks(self.name)

    def set_quota(self, quota: Amounts) -> None:
        """Change the quota. Running tasks above a smaller quota continue; nothing new starts until it fits."""
        resources = Resources.of(quota, where=f"pool {self.name}")
        self._session.ask("ask", QuotaSet(self.name, resources))
        self.spec = replace(self.spec, quota=resources)

    def drain(self, on: bool = True) -> None:
        """Accept no new tasks; with `on` false, accept them again."""
        self._session.ask("ask", PoolDrained(self.name, on))

    def drop(self) -> None:
        """Drop the pool: its tasks are cancelled and its slots removed."""
        self._session.ask("ask", PoolDropped(self.name))

    def __repr__(self) -> str:
        return f"Pool({self.name!r}, quota={self.spec.quota})"


def _task_spec(
    id: str | None,
    pool: str,
    resources: Amounts | Sequence[Amounts],
    *,
    priority: float = 5.0,
    labels: Mapping[str, str] | None = None,
    **settings: Any,
) -> TaskSpec:
    where = f"task {id}"
    check_known(settings, TaskSpec.__dataclass_fields__, where, "{} is no setting of a task")
    for name in ("residual", "room"):
        if name in settings:
            settings[name] = _bundles(settings[name], where)
    if "label_selector" in settings:
        settings["label_selector"] = labels_of(settings["label_selector"], where)
    if isinstance(settings.get("strategy"), str):
        settings["strategy"] = strategy_of(settings["strategy"], where)
    return TaskSpec(
        id=id or f"asked-{uuid.uuid4().hex[:8]}",
        pool=pool,
        bundles=_bundles(resources, where),
        priority=priority,
        labels=labels_of(labels, where),
        **settings,
    )


def _bundles(resources: Any, where: str) -> tuple[Resources, ...]:
    several = [resources] if isinstance(resources, Mapping) else list(resources)
    if not all(isinstance(bundle, Mapping) for bundle in several):
        raise InputError("resources are {name: amount}, or a list of those for a gang", where=where)
    return tuple(Resources.of(bundle, where=where) for bundle in several)
