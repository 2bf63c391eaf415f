"""Engines and ends of weight syncs for verl_elastic.py, as actors that need no verl: tokens follow from the prompt."""

import asyncio
import os
import random
import time
from types import SimpleNamespace

import ray

CYCLE = 32  # samples between two weight syncs
LONG = 15  # steps with long answers; shorter ones follow
SYNC_S, WAKE_S, SLEEP_S = 0.1, 0.3, 0.1
TOKEN_S = float(os.environ.get("TOKEN_S", "0.03"))


def answer(prompt, at):
    return (prompt * 7919 + at * 104729) % 31991 + 1


def length(prompt):
    """Tokens of an answer: long tails in the first steps, short answers afterwards."""
    tokens = int(min(400.0, 25.0 * random.Random(prompt).paretovariate(1.1)))
    return max(40, tokens) if prompt // CYCLE < LONG else min(20, tokens)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Engine:
    def __init__(self, name):
        self.name, self.version, self.asleep = name, 0, False
        self.open, self.aborting, self.rejecting = asyncio.Event(), asyncio.Event(), False
        self.open.set()
        self.running, self.starts, self.faults, self.aborted = 0, [], [], 0

    def pid(self):
        return os.getpid()

    async def generate(self, request_id, prompt_ids, sampling_params, **others):
        if not self.open.is_set():
            if self.rejecting:
                return self._output([], "aborted")
            await self.open.wait()
        if self.asleep:
            self.faults.append(f"{self.name} was asked for tokens while asleep")
        self.starts.append((time.time(), self.version))
        prompt, had = prompt_ids[0], len(prompt_ids) - 1
        left = min(length(prompt) - had, sampling_params["max_tokens"])
        self.running += 1
        began = time.monotonic()
        try:
            await asyncio.wait_for(self.aborting.wait(), left * TOKEN_S)
            made, why = min(left, int((time.monotonic() - began) / TOKEN_S)), "aborted"
            self.aborted += 1
        except asyncio.TimeoutError:
            made, why = left, "completed"
        finally:
            self.running -= 1
        return self._output([answer(prompt, at) for at in range(had, had + made)], why)

    def _output(self, tokens, why):
        fields = {"global_steps": self.version, "server": self.name}
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            stop_reason=why,
            extra_fields=fields,
            routed_experts=None,
            num_preempted=None,
        )

    async def abort_all_requests(self, reset_prefix_cache=True, reject_request=False):
        self.rejecting = reject_request
        self.open.clear()
        self.aborting.set()
        while self.running:
            await asyncio.sleep(0.005)
        self.aborting.clear()

    async def resume_generation(self):
        self.rejecting = False
        self.open.set()

    async def sleep(self):
        if self.running:
            self.faults.append(f"{self.name} was put to sleep with {self.running} requests")
        await asyncio.sleep(SLEEP_S)
        self.asleep = True

    async def wake_up(self):
        self.asleep = False

    async def load(self, version, wake):
        """New weights, as a checkpoint engine or the colocated trainer sends them."""
        await asyncio.sleep(WAKE_S if wake else SYNC_S)
        self.version = version
        self.asleep = self.asleep and not wake

    async def clear_kv_cache(self): ...

    async def release_kv_cache(self): ...

    async def resume_kv_cache(self): ...

    async def seen(self):
        return {"starts": self.starts, "faults": self.faults, "aborted": self.aborted}


@ray.remote(num_cpus=0)
class SyncWorker:
    """A dedicated replica's end of the weight sync."""

    def __init__(self, engine):
        self.engine, self.group = engine, None

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        if method == "init_process_group":
            self.group = kwargs
        return {"rank": None}

    async def update_weights(self, global_steps=None):
        await self.engine.load.remote(global_steps, False)


@ray.remote(num_cpus=0)
class TrainWorker:
    """One GPU of the trainer; its shared replica's engine is found by name, as verl does."""

    def __init__(self, rank):
        self.rank, self.groups = rank, []

    def execute_checkpoint_engine(self, method, *args, **kwargs):
        if method == "init_process_group":
            self.groups.append(kwargs["of"])
        return {"rank": self.rank}

    async def update_weights(self, global_steps=None, mode=None):
        if mode == "naive":
            await ray.get_actor(f"engine_{self.rank}").load.remote(global_steps, True)
        else:
            await asyncio.sleep(SYNC_S)

    def seen(self):
        return self.groups
