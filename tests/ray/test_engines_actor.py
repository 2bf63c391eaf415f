"""Any Ray actor with the few methods is an engine: on a real Ray, with actors that stream, hang, raise and die."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from bystanders import KILLS, bystanders
from engine_answers import answer, greedy, run
from trimtab.core.errors import InputError
from trimtab.runtime.engines.actor import ActorEngine
from trimtab.runtime.engines.engine import (
    Engine,
    EngineCapability,
    EngineDeadlines,
    EngineFailedError,
    EngineGoneError,
    EngineMalformedError,
    EnginePausedError,
    EngineWedgedError,
    FinishReason,
    NotSupportedError,
    PauseMode,
    WeightUpdate,
)

PROMPT = (4, 5, 6)
LONG = 5000


class Plain:
    """The least that an actor needs."""

    def __init__(self) -> None:
        self.streams = 0

    async def ready(self) -> bool:
        return True

    async def generate(self, order: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        last, fault = order["token_ids"][-1], order["extra"].get("fault")
        self.streams += 1
        try:
            for place in range(order["max_tokens"]):
                await asyncio.sleep(0.005)
                if place == 3 and fault == "die":
                    await asyncio.sleep(0.5)  # what it said before has left the process
                    os._exit(1)
                if place == 3 and fault == "raise":
                    raise RuntimeError("no memory left")
                if place == 3 and fault == "hang":
                    await asyncio.sleep(600)
                if place == 3 and fault == "nonsense":
                    yield {"tokens": "many"}
                last = self.follows(last)
                ended = "length" if place + 1 == order["max_tokens"] else self.ended(order["id"])
                yield {"token_ids": [last], "logprobs": [-0.5], "finish": ended}
                if ended:
                    return
        finally:
            self.streams -= 1

    def follows(self, last: int) -> int:
        return (last * 7 + 3) % 100

    def ended(self, key: str) -> str | None:
        return None

    async def open(self) -> int:
        return self.streams


class Full(Plain):
    """All that an actor may have."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.stopped, self.paused, self.calls = "v1", False, False, list[str]()

    async def ready(self) -> dict[str, Any]:  # type: ignore[override]
        return {"up": not self.paused, "paused": self.paused, "version": self.weights, "why": "it says so"}

    async def load(self) -> dict[str, Any]:
        return {"running": self.streams, "waiting": 0, "kv_used_share": 0.5}

    def follows(self, last: int) -> int:
        return (last * 7 + 3 + len(self.weights)) % 100

    def ended(self, key: str) -> str | None:
        return "aborted" if self.stopped else None

    async def abort(self, keys: list[str] | None) -> None:
        self.stopped = True

    async def pause(self, mode: str) -> None:
        self.stopped, self.paused = mode == "abort", True
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.stopped = self.paused = False
        self.calls.append("resume")

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake(self, parts: list[str]) -> None:
        self.calls.append(f"wake {'+'.join(parts)}")

    async def flush(self) -> dict[str, bool]:
        return {"success": False}

    async def version(self) -> str:
        return self.weights

    async def refit(self, refit: dict[str, str]) -> None:
        self.weights = refit["version"]

    async def told(self) -> list[str]:
        return self.calls


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        namespace="trimtab",
    )  # fmt: skip
    yield
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def actor(kind: type[Any]) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote()


def expected(tokens: int, more: int = 0) -> tuple[int, ...]:
    ids = [PROMPT[-1]]
    for _ in range(tokens):
        ids.append((ids[-1] * 7 + 3 + more) % 100)
    return tuple(ids[1:])


async def nothing_open(handle: Any) -> None:
    while await handle.open.remote():
        await asyncio.sleep(0.02)


def test_an_actor_with_two_methods_is_an_engine(cluster: None) -> None:
    async def scene() -> None:
        handle = actor(Plain)
        engine = ActorEngine("one", handle)
        assert isinstance(engine, Engine)
        assert engine.capabilities == frozenset()
        assert (await engine.ready()).up
        got = await answer(engine, greedy("a", PROMPT, 5))
        assert (got.ids, got.finish) == (expected(5), FinishReason.length)
        assert got.so_far.logprobs == (-0.5,) * 5
        load = await engine.load()
        assert (load.running, load.fresh) == (0, True), "what was sent from here is all it has"
        with pytest.raises(NotSupportedError, match="no way to sleep"):
            await engine.sleep()
        # A client that goes away.
        async with aclosing(engine.generate(greedy("b", PROMPT, LONG))) as stream:
            async for _ in stream:
                break
        await nothing_open(handle)
        # An abort, and a pause that only means that nothing is sent.
        begun = asyncio.Event()
        task = asyncio.create_task(answer(engine, greedy("c", PROMPT, LONG), lambda _: begun.set()))
        await begun.wait()
        await engine.pause(PauseMode.abort)
        assert (await task).finish is FinishReason.aborted
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("d", PROMPT, 2))
        await engine.resume()
        assert (await answer(engine, greedy("d", PROMPT, 2))).ids == expected(2)

    run(scene())


def test_an_actor_with_all_methods_has_all_verbs(cluster: None) -> None:
    async def scene() -> None:
        handle = actor(Full)
        engine = ActorEngine("one", handle)
        assert engine.capabilities == frozenset(EngineCapability)
        begun = asyncio.Event()
        task = asyncio.create_task(answer(engine, greedy("a", PROMPT, LONG), lambda _: begun.set()))
        await begun.wait()
        assert (await engine.load()).running == 1
        await engine.pause(PauseMode.abort)
        ended = await task
        assert (ended.finish, ended.ids) == (FinishReason.aborted, expected(len(ended.ids), 2))
        await engine.sleep(2)
        assert await engine.version() is None
        await engine.wake()
        await engine.refit(WeightUpdate("", "three"))
        await engine.resume()
        assert await engine.version() == "three"
        assert (await answer(engine, greedy("b", PROMPT, 4))).ids == expected(4, 5)
        assert await handle.told.remote() == ["pause abort", "sleep 2", "wake kv_cache+weights", "resume"]
        with pytest.raises(EngineFailedError, match="success: false"):
            await engine.flush()
        await handle.pause.remote("keep")
        state = await engine.ready()
        assert (state.up, state.paused) == (False, True), "somebody else paused it"

    run(scene())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("die", EngineGoneError),
        ("raise", EngineFailedError),
        ("hang", EngineWedgedError),
        ("nonsense", EngineMalformedError),
    ],
)
def test_an_actor_that_fails_leaves_what_it_had_said(cluster: None, fault: str, error: type[EngineGoneError]) -> None:
    async def scene() -> None:
        engine = ActorEngine(
            "one", actor(Plain), EngineDeadlines(silence_s=1.0 if fault == "hang" else 30.0, first_bytes_s=60)
        )
        with pytest.raises(error) as caught:
            await answer(engine, greedy("a", PROMPT, 9, extra={"fault": fault}))
        assert caught.value.so_far.token_ids == expected(3)
        assert (await engine.ready()).up == (fault != "die")

    run(scene())


def test_an_actor_that_cannot_generate_is_refused(cluster: None) -> None:
    class Other:
        async def ready(self) -> bool:
            return True

    with pytest.raises(InputError, match="no method 'generate'"):
        ActorEngine("one", actor(Other))


@pytest.mark.parametrize("way", [(), ("--execute",)], ids=["read", "executed"])
def test_a_launch_script_that_kills_ray_engines_and_python_ends_none_of_them(
    cluster: None, way: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    launch = "python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8\n"
    script.write_text(f"{KILLS}sleep 3\nread -p sure\n{launch}")
    handle = actor(Full)
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    with bystanders(tmp_path, "sglang") as alive:
        call = [sys.executable, "-m", "trimtab", "plan", str(script), *way, "--gpu", "h100", "--model", "qwen2.5-7b"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False)
        refused = "namespaces, which cannot be had here" in done.stderr
        assert done.returncode == (2 if refused else 0), done.stderr
        assert refused or "rollout" in done.stdout
        assert [process.poll() for process in alive] == [None, None]
    assert ray.get(handle.version.remote(), timeout=60) == "v1"
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} == nodes
    ray.kill(handle)
