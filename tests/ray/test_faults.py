"""Thousands of faults in live parts, by seeds: nothing is lost, nothing is doubled, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import journal_writer
from engine_answers import run
from engine_scenes import expected
from engine_stubs import SglangStub, Stub, VllmStub
from faults import Faults, Proxy
from gateway_scenes import front
from journal_writer import GONE, HAS, REFUSED, SAID, STARTED, last_of
from rollout_scenes import DEADLINES
from trimtab.machines.rollout import events as e
from trimtab.rollout import RolloutPool, RolloutRules, SamplingParams
from waiting import until_async

RULES = RolloutRules(
    min_workers=1, max_workers=8, drain_s=0.5, abort_s=2.0, stall_s=20.0, suspect_s=10.0, lost_s=60.0,
    back_off_s=0.01, probe_s=1.0,
    load_fresh_s=5.0, retries=1000, poison_count=1000, faults=1000,
)  # fmt: skip


class Ledger:
    """Counts what the machine of requests was told and said."""

    def __init__(self) -> None:
        self.arrived: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    def __call__(self, what: Any, now: float) -> None:
        if isinstance(what, e.RequestArrived):
            self.arrived[what.spec.id] += 1
        elif isinstance(what, e.AnswerRequest):
            self.answered[what.request] += 1

    def check(self) -> None:
        assert set(self.arrived) == set(self.answered)
        assert set(self.arrived.values()) == set(self.answered.values()) == {1}


# ---- a journal whose writer is killed, frozen and refused -------------------------------------------------------


class Writers:
    """Writers of one journal, one after the other, and what they said that it has."""

    def __init__(self, directory: Path, faults: Faults) -> None:
        self.has = 0
        self._faults = faults
        command = [sys.executable, journal_writer.__file__, str(directory)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def start(self, seed: int) -> int:
        """Another writer; its process."""
        assert self._server.stdin is not None
        self._server.stdin.write(f"{seed}\n".encode())
        return self.listen(STARTED)

    def listen(self, until: bytes, events: int = 0) -> int:
        """Until something is said, and so many events more are in the journal; the number of what was said last."""
        assert self._server.stdout is not None
        wanted = self.has + events
        while True:
            word, number = SAID.unpack(self._server.stdout.read(SAID.size))
            if word == REFUSED:
                self._faults.put("write refused")
            elif word == HAS:
                assert number > self.has
                self.has = number
            if word == until and self.has >= wanted:
                return int(number)

    def close(self) -> None:
        self._server.communicate(timeout=60)


def kill_writers(directory: Path, faults: Faults, wanted: int, seed: int) -> None:
    chance = random.Random(seed)
    with contextlib.closing(Writers(directory, faults)) as writers:
        while faults.total < wanted:
            writer = writers.start(chance.randrange(2**32))
            writers.listen(HAS, chance.randrange(1, 20))
            if chance.random() < 0.3:
                os.kill(writer, signal.SIGSTOP)
                faults.put("writer frozen")
                last_of(str(directory))  # can be read meanwhile, and is whole
                os.kill(writer, signal.SIGCONT)
                writers.listen(HAS, 3)
            os.kill(writer, signal.SIGKILL)
            faults.put("writer killed")
            writers.listen(GONE)
            last = last_of(str(directory))
            assert writers.has <= last <= writers.has + 2, "an event is lost, or there is one that was never written"
            writers.has = last
            if chance.random() < 0.3 and tear(directory, chance):
                faults.put("last line torn")
                assert last_of(str(directory)) == last


def tear(directory: Path, chance: random.Random) -> bool:
    """As a crash in the midst of a write leaves it: with the beginning of a line at its end."""
    segments = sorted(directory.glob("journal-*"))
    content = segments[-1].read_bytes() if segments else b""
    if not content.endswith(b"\n"):
        return False  # it is torn already, or has only a snapshot
    line = content.splitlines(keepends=True)[-1]
    with segments[-1].open("ab") as file:
        file.write(line[: chance.randrange(1, len(line))])
    return True


def test_a_journal_whose_writers_are_killed_frozen_and_refused_has_every_event_once(tmp_path: Path) -> None:
    faults = Faults("a journal")
    kill_writers(tmp_path, faults, 60, seed=1)


@pytest.mark.long
def test_a_journal_survives_thousands_of_faults_with_every_event_once(tmp_path: Path) -> None:
    faults = Faults("a journal, long")
    kill_writers(tmp_path, faults, 3_000, seed=2)


# ---- connections between a pool and its engines -----------------------------------------------------------------


async def through_bad_connections(faults: Faults, wanted: int, seed: int) -> None:
    chance = random.Random(seed)
    stubs: list[Stub] = [SglangStub(), VllmStub(), SglangStub(), VllmStub()]
    ledger = Ledger()
    async with contextlib.AsyncExitStack() as stack:
        pool = RolloutPool(RULES, look_s=0.5, deadlines=DEADLINES)
        await stack.enter_async_context(pool)
        pool.add_listener(ledger)
        proxies = []
        for stub in stubs:
            stub.step_s = 0.001
            await stack.enter_async_context(stub.up())
            request = b"POST /generate" if isinstance(stub, SglangStub) else b"POST /v1/completions"
            proxies.append(await stack.enter_async_context(Proxy(stub.url, faults, chance, request, 0.5).up()))
            await pool.attach(proxies[-1].url, limit=8)
        asked = 0
        while faults.total < wanted:
            prompts = [tuple(chance.choices(range(1, 99), k=chance.randrange(2, 6))) for _ in range(64)]
            params = SamplingParams(max_tokens=20, temperature=0.0)
            for prompt, got in zip(prompts, await pool.generate(prompts, params), strict=True):
                (sample,) = got.samples
                assert sample.ok, sample.reason
                assert sample.token_ids == expected(20, prompt=prompt)
            asked += len(prompts)
        assert len(ledger.answered) == asked
        ledger.check()
        for stub in stubs:
            await left_nothing(stub)


async def left_nothing(stub: Stub) -> None:
    """Until no request is running on the engine any more."""
    async with asyncio.timeout(60):
        while stub.running:
            await asyncio.sleep(0.01)


def test_requests_through_bad_connections_are_answered_once_and_rightly() -> None:
    faults = Faults("connections of a pool to its engines")
    run(through_bad_connections(faults, 60, seed=1), within_s=120)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_bad_connections_lose_and_double_no_request(seed: int) -> None:
    faults = Faults(f"connections of a pool to its engines, seed {seed}")
    run(through_bad_connections(faults, 1_700, seed=100 + seed), within_s=1_800)


# ---- connections between clients and a gateway ------------------------------------------------------------------


async def clients_with_bad_connections(faults: Faults, wanted: int, seed: int) -> None:
    chance = random.Random(seed)
    stubs = [SglangStub(), VllmStub()]
    ledger = Ledger()
    right = 0
    async with contextlib.AsyncExitStack() as stack:
        for stub in stubs:
            stub.step_s = 0.001
            await stack.enter_async_context(stub.up())
        scene = await stack.enter_async_context(front([stub.url for stub in stubs], rules=RULES, limit=16))
        scene.pool.add_listener(ledger)
        proxy = await stack.enter_async_context(
            Proxy(scene.gateway.url, faults, chance, b"POST /generate", 0.6, breaks_within=400).up()
        )

        async def client() -> int:
            """Asks again until it is answered; the answer that it reads whole is the right one."""
            prompt = tuple(chance.choices(range(1, 99), k=4))
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
            while True:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    timeout = aiohttp.ClientTimeout(total=None, sock_read=2.0)
                    async with scene.http.post(f"{proxy.url}/generate", json=body, timeout=timeout) as answer:
                        told = await answer.json()
                        assert answer.status == 200, told
                        assert tuple(told["output_ids"]) == expected(12, prompt=prompt)
                        return 1

        while faults.total < wanted:
            right += sum(await asyncio.gather(*(client() for _ in range(48))))
        await until_async(lambda: scene.running() == 0)
        for stub in stubs:
            await left_nothing(stub)
    assert len(ledger.arrived) >= right
    assert set(ledger.arrived.values()) == {1}
    assert max(ledger.answered.values()) == 1
    assert set(ledger.answered) <= set(ledger.arrived)
    assert len(ledger.answered) >= right


def test_clients_with_bad_connections_are_answered_rightly_and_leave_nothing_running() -> None:
    faults = Faults("connections of clients to a gateway")
    run(clients_with_bad_connections(faults, 60, seed=1), within_s=120)


@pytest.mark.long
def test_thousands_of_bad_connections_of_clients_leave_nothing_running() -> None:
    faults = Faults("connections of clients to a gateway, long")
    run(clients_with_bad_connections(faults, 1_500, seed=2), within_s=1_800)
