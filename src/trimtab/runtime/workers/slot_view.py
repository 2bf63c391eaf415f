"""What user code in a warm host sees of its slot through Ray, and where the actors go that it makes.

A host has no resources of its own in Ray's books: the slot holds them. So Ray would tell the code in it that it has no
GPU and is in no placement group, and put the actors it makes anywhere, outside the task's quota. Here Ray's own object
for this process is given the answers of the slot, and what is made without a place of its own goes into the slot's
bundle, all of which is free, as the host takes nothing of it. Whatever is made carries the member's mark, by which the
warden finds and ends it. Only for a process that is bound to a task, before anything of the user is unpickled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from trimtab.runtime.workers.environments import MARK


@dataclass(frozen=True)
class BundleSlot:
    """A member's bundle, by Ray's names."""

    group: str  # Ray's id of the placement group, in hex
    bundle: int  # where nested actors go; -1: any bundle of the group
    amounts: dict[str, float]
    capture: bool  # nested actors without a place of their own go into it


def supported() -> bool:
    """Whether this version of Ray has what is replaced here."""
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
    """From now on Ray tells the code in this process of its slot."""
    from ray._private import worker
    from ray.runtime_context import RuntimeContext

    from ray import PlacementGroupID

    group = PlacementGroupID(bytes.fromhex(slot.group))

    class Worker(type(worker.global_worker)):  # type: ignore[misc]
        placement_group_id = property(lambda self: group)
        should_capture_child_tasks_in_placement_group = property(lambda self: slot.capture)

        def get_accelerator_ids_for_accelerator_resource(self, resource_name: str, resource_regex: str) -> list[Any]:
            if resource_name != "GPU":
                found: list[Any] = super().get_accelerator_ids_for_accelerator_resource(resource_name, resource_regex)
                return found
            named = self.original_visible_accelerator_ids.get("GPU") is not None  # then they are strings, as in Ray
            return list(devices) if named else [int(one) if one.isdecimal() else one for one in devices]

    worker.global_worker.__class__ = Worker
    RuntimeContext.get_assigned_resources = lambda self: dict(slot.amounts)


def mark_children(slot: BundleSlot | None, mark: str) -> None:
    """From now on what this process makes is marked, and goes into its slot unless a place is asked for.

    A detached actor is to outlive the task, so it is left alone.
    """
    from ray._private.utils import get_runtime_env_info
    from ray.actor import ActorClass
    from ray.remote_function import RemoteFunction
    from ray.runtime_env import RuntimeEnv

    def environment(options: dict[str, Any]) -> Any:
        asked = dict(options.get("runtime_env") or {})
        return RuntimeEnv(**{**asked, "env_vars": {**(asked.get("env_vars") or {}), MARK: mark}})

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
        elif placed(options) is not options:  # Ray would put it into the slot's group, and end it with that
            options = {**options, "scheduling_strategy": "DEFAULT"}
        return create_actor(self, args=args, kwargs=kwargs, **options)

    @functools.wraps(call)
    def call_marked(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        marked = get_runtime_env_info(environment(options), is_job_runtime_env=False, serialize=True)
        options = {**placed(options), "serialized_runtime_env_info": marked}
        return call(self, args=args, kwargs=kwargs, **options)

    ActorClass._remote, RemoteFunction._remote = create_marked, call_marked


def _in_bundle(slot: BundleSlot) -> Any:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from ray import PlacementGroupID

    return PlacementGroupSchedulingStrategy(
        placement_group=PlacementGroup(PlacementGroupID(bytes.fromhex(slot.group))),
        placement_group_bundle_index=slot.bundle,
        placement_group_capture_child_tasks=True,
    )
