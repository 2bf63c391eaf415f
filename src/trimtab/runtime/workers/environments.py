"""Runtime environments: each task runs with its own client's, never with that of another client or the controller.

A client sends its job's environment with what it submits, as JSON, with `working_dir` and `py_modules` already
uploaded by Ray and named by URI. It is kept beside the pickled class, in a file that only its owner reads, and never in
the journal: variables may be secrets. Ray deletes an uploaded package when the job that uploaded it has ended and no
process uses it; the controller asks it to keep those that tasks and pools still need.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trimtab.model.pool import PoolSpec
from trimtab.runtime.store.blobs import BlobStore

MARK = "TRIMTAB_MEMBER"  # set in a member's process and in all that it starts, through Ray or not
_PIN_S = 600  # Ray keeps a package so long after it was asked to
_RENEW_S = 120.0
_UPLOADED = "gcs://"
_OWN_VARIABLES = "TRIMTAB_"  # of a process that is itself a member, and submits


class WarmWorkerKind(NamedTuple):
    """What a warm host is ready for: a task is only given one of its own runtime environment."""

    preload: tuple[str, ...] = ()  # modules imported ahead
    runtime_env: str = ""  # JSON; empty: none
    paths: tuple[str, ...] = ()  # where the client's own modules lie, for those that are imported ahead


def worker_kind(preload: Sequence[str], runtime_env: str, paths: Sequence[str]) -> WarmWorkerKind:
    """The kind of host; where nothing is imported ahead, paths make no difference yet."""
    return WarmWorkerKind(tuple(preload), runtime_env, tuple(paths) if preload else ())


def of_this_process(ray: Any) -> str:
    """The runtime environment of this driver, or of the worker that this code runs in, as JSON."""
    return text_of(json.loads(ray.get_runtime_context().get_runtime_env_string() or "{}"))


def text_of(runtime_env: Mapping[str, Any]) -> str:
    """A runtime environment as JSON, the same for the same environment; empty where it says nothing."""
    found = {name: value for name, value in runtime_env.items() if value not in (None, {}, [])}
    variables = found.pop("env_vars", {})
    variables = {name: value for name, value in variables.items() if not name.startswith(_OWN_VARIABLES)}
    if variables:
        found["env_vars"] = variables
    return json.dumps(found, sort_keys=True) if found else ""


def overridden(parent: str, child: Mapping[str, Any] | None) -> dict[str, Any]:
    """An environment with what is asked on top of it, by Ray's own rule: variables are merged, the rest replaced."""
    merged: dict[str, Any] = json.loads(parent) if parent else {}
    for name, value in (child or {}).items():
        merged[name] = {**merged.get(name, {}), **value} if name == "env_vars" and value else value
    return merged


def packages(runtime_env: str) -> set[str]:
    """The URIs in it that Ray would delete."""
    found = json.loads(runtime_env) if runtime_env else {}
    named = [found.get("working_dir"), *(found.get("py_modules") or ())]
    return {uri for uri in named if isinstance(uri, str) and uri.startswith(_UPLOADED)}


class RuntimeEnvironments:
    """The controller's side: what pools keep warm hosts for, and the packages that tasks and pools still need."""

    def __init__(self, ray: Any, shelf: BlobStore) -> None:
        self._ray = ray
        self._shelf = shelf
        self._pools: dict[str, WarmWorkerKind] = {}
        self._needed: dict[str, set[str]] = {}  # by task
        self._pinned: dict[str, float] = {}  # URI -> when

    async def set_pool(self, pool: str, runtime_env: str, paths: Sequence[str]) -> None:
        """A client asked for a pool: its warm hosts are for tasks of this environment from now on."""
        self._shelf.put("environments", pool, json.dumps({"runtime_env": runtime_env, "paths": list(paths)}).encode())
        self._pools[pool] = WarmWorkerKind((), runtime_env, tuple(paths))
        await self._pin(packages(runtime_env))

    async def submitted(self, task: str, runtime_env: str) -> None:
        """A task needs its packages until it has ended."""
        self._needed[task] = packages(runtime_env)
        await self._pin(self._needed[task])

    def recover(self, tasks: Iterable[str]) -> None:
        """These tasks were submitted to an earlier controller, and have not ended."""
        for task in tasks:
            header = self._shelf.header("payloads", task) or {}
            self._needed[task] = packages(header.get("runtime_env", ""))

    def kind(self, pool: PoolSpec) -> WarmWorkerKind:
        """The warm hosts of a pool."""
        if pool.name not in self._pools:
            found = json.loads(self._shelf.get("environments", pool.name) or b"{}")
            self._pools[pool.name] = WarmWorkerKind((), found.get("runtime_env", ""), tuple(found.get("paths", ())))
        return worker_kind(pool.preload, *self._pools[pool.name][1:])

    def task_kind(self, task: str, pool: PoolSpec) -> WarmWorkerKind:
        """The host that a task would be given."""
        header = self._shelf.header("payloads", task) or {}
        return worker_kind(pool.preload, header.get("runtime_env", ""), header.get("sys_path", ()))

    async def renew(self, tasks: Collection[str], pools: Iterable[PoolSpec]) -> None:
        """Have Ray keep what these tasks and pools need; others need nothing any more."""
        self._needed = {task: uris for task, uris in self._needed.items() if uris and task in tasks}
        needed = set().union(*self._needed.values(), *(packages(self.kind(pool).runtime_env) for pool in pools))
        self._pinned = {uri: at for uri, at in self._pinned.items() if uri in needed}
        await self._pin(needed)

    async def _pin(self, uris: Collection[str]) -> None:
        now = time.monotonic()
        for uri in uris:
            if now - self._pinned.get(uri, float("-inf")) >= _RENEW_S:
                pin = self._ray.experimental.internal_kv._pin_runtime_env_uri
                await asyncio.to_thread(pin, uri, expiration_s=_PIN_S)
                self._pinned[uri] = now
