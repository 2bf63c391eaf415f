"""The load balancer for verl: on real llama.cpp servers, as an actor on a real Ray, and in verl's own hands.

The last needs verl in an environment of its own (`make test-frameworks`); what verl does with its servers there is what
it does with a GPU, but for the servers, which only count and wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from ray import cloudpickle

from engine_answers import run
from engine_servers import LlamaServer, servers
from trimtab.core.errors import InputError, UnreachableError
from trimtab.integrations.verl import NO_SERVER, Balancer, BalancerSettings, LoadBalancer

ROOT = Path(__file__).parents[2]
PROMPT = [40, 41, 42, 43, 44]
QUICK = {"look_s": 0.05}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LlamaServer]]:
    """Servers that no test hurts."""
    with servers(2, tmp_path_factory.mktemp("engines")) as started:
        yield started


def addresses(started: list[LlamaServer]) -> dict[str, str]:
    """As verl has them: the address, and a handle, which here is the URL."""
    return {one.url.removeprefix("http://"): one.url for one in started}


@asynccontextmanager
async def balancing(handles: dict[str, Any], **settings: Any) -> AsyncIterator[Balancer]:
    balancer = Balancer(handles, {"router_class": "ours", **QUICK, **settings})
    try:
        yield balancer
    finally:
        await balancer.close()


async def turn(balancer: Balancer, session: aiohttp.ClientSession, request: str, prompt: list[int]) -> str:
    """What verl's client does: a server, a generation there, and the server back."""
    server, url = await balancer.acquire_server(request, prompt_ids=prompt)
    try:
        order = {"prompt": prompt, "n_predict": 8, "temperature": 0.0}
        async with session.post(f"{url}/completion", json=order) as answer:
            assert answer.status == 200
            assert (await answer.json())["tokens_predicted"] == 8
    finally:
        await balancer.release_server(server, request_id=request)
    return server


def test_turns_are_spread_over_real_servers_and_each_place_comes_back(two: list[LlamaServer]) -> None:
    async def story() -> None:
        async with balancing(addresses(two), watch="http") as balancer, aiohttp.ClientSession() as session:
            turns = [turn(balancer, session, f"r{at}", [*PROMPT, 50 + at]) for at in range(40)]
            served = Counter(await asyncio.gather(*turns))
            assert set(served) == set(addresses(two))
            assert min(served.values()) >= 10
            assert await balancer.get_total_inflight() == 0
            status = await balancer.get_status()
            assert status["active_servers"] == 2
            assert sum(one["served"] for one in status["pool"]["workers"]) == 40

    run(story())


def test_turns_of_one_trajectory_and_samples_of_one_prompt_stay_together(two: list[LlamaServer]) -> None:
    async def story() -> None:
        async with balancing(addresses(two)) as balancer:
            for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
                homes = set()
                for sample in range(4):
                    for length in (0, 40):  # the second turn has a longer prompt
                        request = f"{prompt}/{sample}"
                        server, _ = await balancer.acquire_server(request, prompt_ids=prompt + [7] * length)
                        await balancer.release_server(server, request_id=request)
                        homes.add(server)
                assert len(homes) == 1
            assert (await balancer.clear_sticky_cache())["cleared_entries"] == 12

    run(story())


def test_whoever_comes_while_all_servers_are_full_waits_for_a_place(two: list[LlamaServer]) -> None:
    async def story() -> None:
        async with balancing(addresses(two), limit=1) as balancer:
            first, second = [await balancer.acquire_server(name) for name in "ab"]
            assert first[0] != second[0]
            third = asyncio.create_task(balancer.acquire_server("c"))
            await asyncio.wait({third}, timeout=0.2)
            assert not third.done()
            assert await balancer.get_total_inflight() == 2
            await balancer.release_server(first[0], request_id="a")
            assert (await third)[0] == first[0]

    run(story())


def test_a_wait_that_is_too_long_ends_with_the_words_that_verl_looks_for(two: list[LlamaServer]) -> None:
    async def story() -> None:
        async with balancing(addresses(two[:1]), limit=1, wait_s=0.1) as balancer:
            await balancer.acquire_server("a")
            with pytest.raises(RuntimeError, match=f"{NO_SERVER}: no worker in 0.1 s"):
                await balancer.acquire_server("b")
            await balancer.remove_servers(list(addresses(two[:1])))
            with pytest.raises(RuntimeError, match=f"^{NO_SERVER}$"):
                await balancer.acquire_server("c")

    run(story())


def test_a_server_that_verl_takes_out_gets_nothing_more_and_its_turns_end_by_themselves(
    two: list[LlamaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        async def remove(*_: Any, **__: Any) -> None:
            monkeypatch.undo()
            raise ValueError("a surprise")

        monkeypatch.setattr(pool, "remove", remove)

    async def story() -> None:
        handles = addresses(two)
        gone, stays = handles
        async with balancing(handles) as balancer:
            held = {}
            for name in "abcd":
                held[name], _ = await balancer.acquire_server(name)
            fails_once(balancer._pool, monkeypatch)
            await balancer.remove_servers([gone])
            assert await balancer.get_all_servers() == [stays]
            after = {(await balancer.acquire_server(f"later{at}"))[0] for at in range(6)}
            assert after == {stays}
            on_stays = sum(server == stays for server in held.values()) + 6
            assert await balancer.get_total_inflight() == on_stays  # as verl counts: registered servers only
            await balancer.add_servers({gone: "another handle"})  # while turns of its former life still run
            assert await balancer.get_inflight_count(gone) == 0
            server, handle = await balancer.acquire_server("new")
            assert (server, handle) == (gone, "another handle")
            for name, server in held.items():
                await balancer.release_server(server, request_id=name)
            assert await balancer.get_inflight_count(gone) == 1
            workers = (await balancer.get_status())["pool"]["workers"]
            assert await _until(lambda: len(balancer._by_worker) == 2), workers

    run(story())


def test_a_killed_server_gets_nothing_more_and_releases_of_what_it_had_are_harmless(tmp_path: Path) -> None:
    async def story(started: list[LlamaServer]) -> None:
        handles = addresses(started)
        async with balancing(handles, watch="http") as balancer:
            held = [await balancer.acquire_server(f"r{at}") for at in range(4)]
            started[0].kill()
            lost, stays = handles
            status: dict[str, Any] = {}

            async def one_serves() -> bool:
                status.update(await balancer.get_status())
                return bool(status["active_servers"] == 1)

            assert await _until(one_serves), status
            assert {(await balancer.acquire_server(f"later{at}"))[0] for at in range(6)} == {stays}
            for at, (server, _) in enumerate(held):
                await balancer.release_server(server, request_id=f"r{at}")
                await balancer.release_server(server, request_id=f"r{at}")  # twice
            assert await balancer.get_inflight_count(lost) == 0
            assert await balancer.get_total_inflight() == 6

    with servers(2, tmp_path) as started:
        run(story(started))


def test_where_one_server_cannot_be_reached_none_is_added(two: list[LlamaServer]) -> None:
    async def story() -> None:
        async with balancing({}, watch="http") as balancer:
            with pytest.raises(UnreachableError):
                await balancer.add_servers({**addresses(two), "127.0.0.1:9": "nobody"})
            assert await balancer.get_all_servers() == []
            with pytest.raises(RuntimeError, match=NO_SERVER):
                await balancer.acquire_server("a")

    run(story())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limt": 4}, "did you mean limit"),
        ({"limit": 0}, "limit must be a whole number"),
        ({"wait_s": -1}, "wait_s must be a number"),
        ({"watch": "eyes"}, "known: actor, http, none"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        BalancerSettings.read(given)


# ---- on Ray --------------------------------------------------------------------------------------------------------


class Server:
    """Something that lives."""

    async def generate(self, prompt: list[int]) -> int:
        return len(prompt)


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


@pytest.mark.long
def test_as_an_actor_it_lets_places_come_back_however_many_wait_and_sees_a_server_die(cluster: None) -> None:
    async def story() -> None:
        handles = {name: ray.remote(Server).options(num_cpus=0).remote() for name in ("one", "two")}
        balancer = LoadBalancer.remote(handles, {"limit": 1, **QUICK})
        fields = ray.get([balancer.require_acquire_fields.remote(), balancer.require_release_fields.remote()])
        assert fields == [["prompt_ids"], ["request_id"]]

        async def serve(name: str) -> str:
            server, handle = await balancer.acquire_server.remote(request_id=name, prompt_ids=[1, 2, 3])
            if name.startswith("later"):
                assert await handle.generate.remote([1, 2, 3]) == 3
            balancer.release_server.remote(server_id=server, request_id=name)
            return str(server)

        # More than an actor takes calls by default: whoever gives a place back must get through all the same.
        served = Counter(await asyncio.gather(*(serve(f"r{at}") for at in range(1_050))))
        assert set(served) == {"one", "two"}
        ray.kill(handles["one"])

        async def one_serves() -> bool:
            return bool((await balancer.get_status.remote())["active_servers"] == 1)

        assert await _until(one_serves)
        assert {await serve(f"later{at}") for at in range(4)} == {"two"}
        await balancer.close.remote()

    run(story())


# ---- in verl's own hands -------------------------------------------------------------------------------------------


@pytest.mark.frameworks
def test_verls_own_client_generates_through_it_as_its_own_factory_made_it(tmp_path: Path) -> None:
    python = ROOT / ".venv-verl" / "bin" / "python"
    assert python.exists(), "there is no .venv-verl: run tools/make-framework-envs"
    config = tmp_path / "router.yaml"
    config.write_text("router_class: trimtab.integrations.verl.LoadBalancer\nlimit: 4\nlook_s: 0.2\n")
    done = subprocess.run(
        [python, Path(__file__).parents[1] / "frameworks" / "verl_balancer.py", str(config)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0"},
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("SEEN")), None)
    assert line is not None, done.stderr[-3000:]
    seen = json.loads(line.removeprefix("SEEN"))
    assert seen["missing"] == []  # of what verl's protocol asks for
    assert seen["answers"] == seen["asked"] == 64
    assert len(seen["served"]) == 3
    assert max(seen["at_once"].values()) <= 4
    assert seen["homes"] == 1  # turns of one trajectory
    assert seen["after_removal"] == sorted(set(seen["served"]) - {seen["removed"]})
    assert seen["after_return"] == 3
    assert seen["empty"] == "waited"  # a client that may find nobody comes again, as verl's does
    assert seen["resumed"] == seen["resumed_asked"]  # of a turn that was aborted half-way
    assert seen["inflight"] == 0


async def _until(true: Any, within_s: float = 240.0) -> bool:
    """Looks until it is so."""
    for _ in range(int(within_s / 0.02)):
        found = true()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        await asyncio.sleep(0.02)
    return False
