"""A slow, obvious partition planner to check the real one against: every split on every sequence of hosts.

It shares no code with `trimtab.plan`: costs, memory and the rule for ties are written a second time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trimtab.model.pipeline import DeviceType, Host, HostLink, ModelChain, PipelineJob

MIB = 2**20

Outcome = tuple[float, float, int]
"""Bottleneck, latency and number of devices of a schedule."""


def sent_bytes(job: PipelineJob, cut: int) -> int:
    elements = job.model.parameters_in if cut == 0 else job.model.parameters_out[cut - 1]
    return elements * job.batch_size * job.element_bytes


def memory(job: PipelineJob, first: int, last: int) -> float:
    """Bytes of layers first..last, counted from 1."""
    taken, given = sent_bytes(job, first - 1), sent_bytes(job, last)
    need = MIB * sum(job.model.mem_mb[first - 1 : last]) + taken + given + job.buffers_out * given
    return need + job.buffers_in * taken if first > 1 else need


def seconds_between(job: PipelineJob, a: str, b: str, count: int) -> float:
    if count == 0 or a == b:
        return 0.0
    speed, delay = min(job.type_of(a).bw_mbps, job.type_of(b).bw_mbps), 0.0
    for link in job.links:
        if set(link.hosts) == {a, b}:
            speed, delay = speed if link.bw_mbps is None else link.bw_mbps, link.latency_s
    return float("inf") if speed == 0 else delay + count / (speed * MIB / 8)


def alike(job: PipelineJob, a: Host, b: Host) -> bool:
    return a.type == b.type and not job.links and not {a.name, b.name} & {job.source, job.sink}


def schedules(job: PipelineJob) -> Iterator[Outcome]:
    """Every schedule; of hosts that no schedule can tell apart the first free one stands for all."""
    layers = job.model.layers
    most = job.max_devices or len(job.hosts)

    def go_on(done: int, hosts: list[str], bottleneck: float, latency: float) -> Iterator[Outcome]:
        if done == layers:
            out = seconds_between(job, hosts[-1], job.sink, sent_bytes(job, layers)) if job.sink else 0.0
            if out < float("inf"):
                yield max(bottleneck, out), latency + out, len(hosts)
            return
        if len(hosts) == most:
            return
        tried: list[Host] = []
        for host in job.hosts:
            kind = job.type_of(host.name)
            if host.name in hosts or not kind.time_s or any(alike(job, host, other) for other in tried):
                continue
            tried.append(host)
            before = hosts[-1] if hosts else job.source
            came = seconds_between(job, before, host.name, sent_bytes(job, done)) if before else 0.0
            if came == float("inf"):
                continue
            compute = 0.0
            for last in range(done + 1, layers + 1):
                compute += kind.time_s[last - 1]
                if last % job.cut_every == 0 and memory(job, done + 1, last) < kind.mem_mb * MIB * (1 - job.headroom):
                    yield from go_on(
                        last, [*hosts, host.name], max(bottleneck, came, compute), latency + came + compute
                    )

    yield from go_on(0, [], 0.0, 0.0)


def best(found: list[Outcome], objective: str) -> Outcome | None:
    """The best outcome by the rule for ties: within 1e-9 lower latency counts, then fewer devices."""
    if not found:
        return None
    if objective == "throughput":
        least = min(bottleneck for bottleneck, _, _ in found)
        found = [outcome for outcome in found if outcome[0] <= least * (1 + 1e-9)]
    least = min(latency for _, latency, _ in found)
    return min((outcome for outcome in found if outcome[1] <= least * (1 + 1e-9)), key=lambda o: o[2])


def random_pipeline(rng: random.Random, *, links: bool = False, ends: bool = False) -> PipelineJob:
    """A small random job: tight memory, zero bandwidths, layers that send nothing, equal times that make ties."""
    layers = rng.randint(1, 8)
    coarse = rng.random() < 0.4

    def seconds() -> float:
        return float(rng.randint(0 if rng.random() < 0.1 else 1, 4)) if coarse else rng.uniform(0.05, 2.0)

    sizes = [rng.choice([0, 100_000, 400_000]) if rng.random() < 0.7 else 250_000 for _ in range(layers + 1)]
    mem = [float(rng.randint(5, 40)) for _ in range(layers)]
    model = ModelChain("chain", tuple(mem), sizes[0], tuple(sizes[1:]))
    kinds, hosts = [], []
    left = rng.randint(1, 5)
    for number in range(rng.randint(1, 3)):
        speed = rng.choice([0.0, 50.0, 100.0, 100.0, 1000.0])
        room = rng.choice([sum(mem) * rng.uniform(0.2, 0.8) + 60, rng.uniform(20, 120), 1000.0])
        kinds.append(DeviceType(f"kind{number}", speed, room, tuple(seconds() for _ in range(layers))))
        count = rng.randint(1, left) if left else 0
        left -= count
        hosts += [Host(f"h{number}-{i}", f"kind{number}") for i in range(count)]
    rng.shuffle(hosts)
    names = [host.name for host in hosts]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    joined = tuple(
        HostLink(pair, rng.choice([None, 0.0, 20.0, 500.0]), rng.choice([0.0, 0.1]))
        for pair in pairs
        if links and rng.random() < 0.6
    )
    return PipelineJob(
        model,
        tuple(kinds),
        tuple(hosts),
        batch_size=rng.choice([1, 8]),
        element_bytes=rng.choice([1, 2, 4, 8]),
        buffers_in=rng.randint(0, 3),
        buffers_out=rng.randint(0, 3),
        headroom=rng.choice([0.0, 0.0, 0.1]),
        links=joined,
        source=rng.choice([None, *names]) if ends else None,
        sink=rng.choice([None, *names]) if ends else None,
        max_devices=rng.choice([None, None, 1, 2, 3]) if ends or links else None,
        cut_every=2 if ends and layers % 2 == 0 and rng.random() < 0.4 else 1,
    )
