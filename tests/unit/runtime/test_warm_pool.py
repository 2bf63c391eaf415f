"""How many warm workers a node starts at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.runtime.procs.background import Background
from trimtab.runtime.workers import warm_pool
from trimtab.runtime.workers.environments import WarmWorkerKind
from trimtab.runtime.workers.warm_pool import WarmPool, WarmWorker


class Started(WarmPool):
    """Starts are counted, and end when a test says so."""

    def __init__(self, cores: int) -> None:
        agents: Any = SimpleNamespace(nodes={"n"}, facts={"n": {"cores": cores}})
        super().__init__("c", agents, Background(), 10.0)
        self.names: list[str] = []

    def _launch(self, node: str, kind: WarmWorkerKind) -> None:
        self.names.append(f"w{len(self.names)}")
        self._starting[node][self.names[-1]] = kind

    def ready(self, name: str) -> None:
        self._start_done(WarmWorker("n", name, None, 1, 0.0, self._starting["n"][name]))


@pytest.mark.parametrize(("cores", "spares"), [(2, 0), (8, 1)])
def test_a_task_on_a_node_that_has_just_joined_is_constructed_before_spare_workers_take_its_cores(
    cores: int, spares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pool, "_REFILL_AFTER_S", 0.0)

    async def story() -> None:
        pool, kind = Started(cores), WarmWorkerKind()
        pool.expect("n", {kind: 1})
        assert pool.names == ["w0"]
        bound = asyncio.create_task(_bind(pool, kind))
        await asyncio.sleep(0)
        assert len(pool.names) == 1 + spares
        pool.ready("w0")
        while not bound.done():
            assert len(pool.names) == 1 + spares
            await asyncio.sleep(0)
        while len(pool.names) < 2:
            await asyncio.sleep(0)

    asyncio.run(story())


def test_a_construction_that_lasts_holds_spare_workers_up_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_pool, "_TASK_FIRST_S", 0.0)

    async def story() -> None:
        pool, kind = Started(2), WarmWorkerKind()
        pool.expect("n", {kind: 1})
        pool.ready("w0")
        async with pool.take("n", kind) as (host, was_ready):
            assert (host.actor, was_ready) == ("w0", True)
            assert pool.names == ["w0"]
            while len(pool.names) < 2:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pool._binding["n"] == 0

    asyncio.run(story())


async def _bind(pool: WarmPool, kind: WarmWorkerKind) -> None:
    async with pool.take("n", kind):
        for _ in range(3):
            await asyncio.sleep(0)
