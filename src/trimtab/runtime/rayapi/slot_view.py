"""Shows user code in a warm worker its slot through Ray's API, and places the actors it creates into the slot.

A warm worker holds no resources in Ray: the slot's placement group does. Ray would therefore report no GPU and no
placement group to the user's code, and schedule its actors anywhere, outside the task's quota. Here Ray's worker object
of this process is patched to report the slot, and children without an explicit placement go into the slot's bundle, all
of which is free. All children carry the worker's mark, by which the node agent finds and ends them. Only for a process
that is bound to a task, before any user object is unpickled.
"""

from __future__ import annotations

import functools
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.runtime.workers.environments import MARK


class BundleSlot(Frozen):
    """A worker's bundle, by Ray's names."""

    group: str  # Ray placement group id, in hex
    bundle: int  # where nested actors go; -1: any bundle of the group
    amounts: dict[str, float]
    capture: bool  # children without explicit placement go into it


def supported() -> bool:
    """Whether this Ray version has what is patched here. Seen with Ray 2.60."""
    from ray._private.worker import Worker
    from ray.actor import ActorClass
    from ray.remote_function import RemoteFunction
    from ray.runtime_context import RuntimeContext

    wanted = {
        Worker: (
            "placement_group_id",
            "should_capture_child_tasks_in_placement_group",
            "get_accelerator_ids_for_accelerator_resource",
        ),
        RuntimeContext: ("get_assigned_resources",),
        ActorClass: ("_remote",),
        RemoteFunction: ("_remote",),
    }
    return all(hasattr(kind, name) for kind, names in wanted.items() for name in names)


def show(slot: BundleSlot, devices: tuple[str, ...]) -> None:
    """Patch Ray's API in this process to report the slot. Seen with Ray 2.60."""
    from ray import PlacementGroupID
    from ray._private import worker
    from ray.runtime_context import RuntimeContext

    group = PlacementGroupID(bytes.fromhex(slot.group))

    class Worker(type(worker.global_worker)):  # type: ignore[misc]
        placement_group_id = property(lambda self: group)
        should_capture_child_tasks_in_placement_group = property(lambda self: slot.capture)

        def get_accelerator_ids_for_accelerator_resource(self, resource_name: str, resource_regex: str) -> list[Any]:
            if resource_name != "GPU":
                found: list[Any] = super().get_accelerator_ids_for_accelerator_resource(resource_name, resource_regex)
                return found
            named = self.original_visible_accelerator_ids.get("GPU") is not None  # then ids are strings, as in Ray
            return list(devices) if named else [int(id) if id.isdecimal() else id for id in devices]

    worker.global_worker.__class__ = Worker
    RuntimeContext.get_assigned_resources = lambda self: dict(slot.amounts)


def mark_children(slot: BundleSlot | None, mark: str) -> None:
    """Mark all children of this process, and place them into its slot unless they have an explicit placement.

    Detached actors outlive the task, so they are left alone. Seen with Ray 2.60.
    """
    from ray._private.utils import get_runtime_env_info
    from ray.actor import ActorClass
    from ray.remote_function import RemoteFunction
    from ray.runtime_env import RuntimeEnv

    def environment(options: dict[str, Any]) -> Any:
        env = dict(options.get("runtime_env") or {})
        return RuntimeEnv(**{**env, "env_vars": {**(env.get("env_vars") or {}), MARK: mark}})

    def placed(options: dict[str, Any]) -> dict[str, Any]:
        named = options.get("scheduling_strategy"), options.get("placement_group", "default")
        if slot is None or not slot.capture or named != (None, "default"):
            return options
        return {**options, "scheduling_strategy": _in_bundle(slot)}

    create_actor, call = ActorClass._remote, RemoteFunction._remote

    @functools.wraps(create_actor)
    def create_marked(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if options.get("lifetime") != "detached":
            options = {**placed(options), "runtime_env": environment(options)}
        elif placed(options) is not options:  # Ray would put it into the slot's group and end it with the group
            options = {**options, "scheduling_strategy": "DEFAULT"}
        return create_actor(self, args=args, kwargs=kwargs, **options)

    @functools.wraps(call)
    def call_marked(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        marked = get_runtime_env_info(environment(options), is_job_runtime_env=False, serialize=True)
        options = {**placed(options), "serialized_runtime_env_info": marked}
        return call(self, args=args, kwargs=kwargs, **options)

    ActorClass._remote, RemoteFunction._remote = create_marked, call_marked


def _in_bundle(slot: BundleSlot) -> Any:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(
        placement_group=PlacementGroup(PlacementGroupID(bytes.fromhex(slot.group))),
        placement_group_bundle_index=slot.bundle,
        placement_group_capture_child_tasks=True,
    )
