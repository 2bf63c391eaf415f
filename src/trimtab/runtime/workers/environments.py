"""Runtime environments: a task must only run with its own client's, never that of another client or the controller.

A client sends its job's environment as JSON with a submission, `working_dir` and `py_modules` already uploaded by Ray
and given by URI. It is stored beside the pickled class, in a file readable by its owner only, and never in the journal:
variables may be secrets. Ray deletes an uploaded package once the uploading job has ended and no process uses it; the
controller pins those that tasks and pools still need.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trimtab.model.pool import PoolSpec
from trimtab.runtime.store.blobs import BlobStore

MARK = "TRIMTAB_MEMBER"  # set in a worker process and all its children, started through Ray or not
_PIN_S = 600  # lifetime of a pin in Ray
_RENEW_S = 120.0
_UPLOADED = "gcs://"
_OWN_VARIABLES = "TRIMTAB_"  # of a worker process that submits tasks itself


class WarmWorkerKind(NamedTuple):
    """What a warm worker is prepared for; a task only gets one of its own runtime environment."""

    preload: tuple[str, ...] = ()  # imported modules
    runtime_env: str = ""  # JSON; empty: none
    paths: tuple[str, ...] = ()  # module search path of the client, for `preload`


def worker_kind(preload: Sequence[str], runtime_env: str, paths: Sequence[str]) -> WarmWorkerKind:
    """The warm worker kind; without `preload`, paths make no difference."""
    return WarmWorkerKind(tuple(preload), runtime_env, tuple(paths) if preload else ())


def of_this_process(ray: Any) -> str:
    return text_of(json.loads(ray.get_runtime_context().get_runtime_env_string() or "{}"))


def text_of(runtime_env: Mapping[str, Any]) -> str:
    """Canonical JSON of a runtime environment; empty if it sets nothing."""
    found = {name: value for name, value in runtime_env.items() if value not in (None, {}, [])}
    variables = found.pop("env_vars", {})
    variables = {name: value for name, value in variables.items() if not name.startswith(_OWN_VARIABLES)}
    if variables:
        found["env_vars"] = variables
    return json.dumps(found, sort_keys=True) if found else ""


def overridden(parent: str, child: Mapping[str, Any] | None) -> dict[str, Any]:
    """`child` on top of `parent`, by Ray's rule: variables are merged, the rest is replaced."""
    merged: dict[str, Any] = json.loads(parent) if parent else {}
    for name, value in (child or {}).items():
        merged[name] = {**merged.get(name, {}), **value} if name == "env_vars" and value else value
    return merged


def packages(runtime_env: str) -> set[str]:
    """URIs that Ray would delete."""
    found = json.loads(runtime_env) if runtime_env else {}
    named = [found.get("working_dir"), *(found.get("py_modules") or ())]
    return {uri for uri in named if isinstance(uri, str) and uri.startswith(_UPLOADED)}


class RuntimeEnvironments:
    """Warm worker kinds of pools, and packages that tasks and pools still need."""

    def __init__(self, ray: Any, blobs: BlobStore) -> None:
        self._ray = ray
        self._blobs = blobs
        self._pools: dict[str, WarmWorkerKind] = {}
        self._needed: dict[str, set[str]] = {}  # by task
        self._pinned: dict[str, float] = {}  # URI -> when

    async def set_pool(self, pool: str, runtime_env: str, paths: Sequence[str]) -> None:
        self._blobs.put("environments", pool, json.dumps({"runtime_env": runtime_env, "paths": list(paths)}).encode())
        self._pools[pool] = WarmWorkerKind((), runtime_env, tuple(paths))
        await self._pin(packages(runtime_env))

    async def submitted(self, task: str, runtime_env: str) -> None:
        """Pin the packages of a task until it has ended."""
        self._needed[task] = packages(runtime_env)
        await self._pin(self._needed[task])

    def recover(self, tasks: Iterable[str]) -> None:
        """Load the packages of unfinished tasks after a restart."""
        for task in tasks:
            header = self._blobs.header("payloads", task) or {}
            self._needed[task] = packages(header.get("runtime_env", ""))

    def kind(self, pool: PoolSpec) -> WarmWorkerKind:
        if pool.name not in self._pools:
            found = json.loads(self._blobs.get("environments", pool.name) or b"{}")
            self._pools[pool.name] = WarmWorkerKind((), found.get("runtime_env", ""), tuple(found.get("paths", ())))
        return worker_kind(pool.preload, *self._pools[pool.name][1:])

    def task_kind(self, task: str, pool: PoolSpec) -> WarmWorkerKind:
        header = self._blobs.header("payloads", task) or {}
        return worker_kind(pool.preload, header.get("runtime_env", ""), header.get("sys_path", ()))

    async def renew(self, tasks: Collection[str], pools: Iterable[PoolSpec]) -> None:
        """Renew the pins of these tasks and pools; drop all others."""
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
