"""Runs inside .venv-verl: verl's own router factory makes the load balancer, and verl's own clients use it.

Argument: the file that `rollout.router_config_path` would name. Standard output: a line that begins with SEEN, then
JSON. Servers are actors that count and wait; neither an engine nor a GPU is needed.
"""

import asyncio
import inspect
import json
import sys
from collections import Counter
from uuid import uuid4

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import RequestLoadBalancer, get_router_handle

CONFIG = OmegaConf.create(
    {"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False, "response_length": 8}}}
)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Server:
    def __init__(self, name):
        self.name, self.now, self.most, self.aborts = name, 0, 0, 0

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        tokens, why = [len(prompt_ids)] * sampling_params.get("max_tokens", 8), "completed"
        if self.aborts:
            self.aborts -= 1
            tokens, why = tokens[:3], "aborted"
        return TokenOutput(token_ids=tokens, stop_reason=why, extra_fields={"server": self.name})

    async def abort_next(self):
        self.aborts += 1

    async def most_at_once(self):
        return self.most


async def turn(client, request, prompt):
    answer = await client.generate(request, prompt_ids=prompt, sampling_params={"max_tokens": 8})
    return answer.extra_fields.get("server"), answer.token_ids


async def look(path):
    servers = {f"10.0.0.{at}:8000": Server.remote(f"10.0.0.{at}:8000") for at in range(3)}
    balancer = get_router_handle(servers, router_config_path=path)
    asked = [
        name for name, _ in inspect.getmembers(RequestLoadBalancer, inspect.isfunction) if not name.startswith("_")
    ]
    seen = {"missing": [name for name in asked if not hasattr(balancer, name)]}

    client = LLMServerClient(CONFIG, balancer)
    turns = [turn(client, uuid4().hex, [at // 4 + 1] * 5) for at in range(64)]
    answers = await asyncio.gather(*turns)
    seen |= {"asked": 64, "answers": sum(len(tokens) == 8 for _, tokens in answers)}
    seen["served"] = Counter(name for name, _ in answers)
    seen["at_once"] = {name: await one.most_at_once.remote() for name, one in servers.items()}
    seen["homes"] = len({(await turn(client, "talk", [9] * (5 + at)))[0] for at in range(6)})

    removed = next(iter(servers))
    await balancer.remove_servers.remote(server_ids=[removed])
    answers = await asyncio.gather(*(turn(client, uuid4().hex, [at + 1] * 5) for at in range(24)))
    seen |= {"removed": removed, "after_removal": sorted({name for name, _ in answers})}
    await balancer.add_servers.remote(servers={removed: servers[removed]})
    await balancer.clear_sticky_cache.remote()
    answers = await asyncio.gather(*(turn(client, uuid4().hex, [at + 1] * 5) for at in range(24)))
    seen["after_return"] = len({name for name, _ in answers})

    patient = FullyAsyncLLMServerClient(CONFIG, balancer, only_hybrid=True)
    await balancer.remove_servers.remote(server_ids=list(servers))
    waiting = asyncio.ensure_future(turn(patient, uuid4().hex, [1] * 5))
    await asyncio.sleep(0.5)
    seen["empty"] = "waited" if not waiting.done() else "gave up"
    await balancer.add_servers.remote(servers=servers)
    await waiting
    await asyncio.gather(*(one.abort_next.remote() for one in servers.values()))
    _, tokens = await turn(patient, uuid4().hex, [1] * 5)
    seen |= {"resumed_asked": 8, "resumed": len(tokens)}
    for _ in range(100):
        seen["inflight"] = await balancer.get_total_inflight.remote()
        if not seen["inflight"]:
            break
        await asyncio.sleep(0.05)
    return seen


def main():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        print("SEEN" + json.dumps(asyncio.run(look(sys.argv[1]))))
    finally:
        ray.shutdown()


main()
