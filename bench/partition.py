"""How long the exact partition search takes, how much memory, and what a plain dynamic program takes for the same.

Seeded pipelines of three kinds, each row in a fresh process on one core; the worst counts, for both objectives and with
their tie-breaks. The plain program keeps the best value of every vector of used devices at every cut, vectorised over
the vectors: once for the bottleneck, then for the latency under it. Where it would take over twenty seconds it is
timed on its first cuts, scaled by the stages it looks at, and marked with ~. Times are CPU seconds.

Where the public `sched-pipeline` has been built, PUBLIC_SCHED_PIPELINE=/path/to/it measures it in the same run, on the
same pipeline, as whole programs from start to end: files in, schedule out.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trimtab.model.pipeline import DeviceType, Host, ModelChain, PipelineJob
from trimtab.plan.partition.planner import plan_partition
from trimtab.plan.partition.space import TIE, PartitionSpace, host_classes, space_of

ROWS = (
    *((48, 8, 2), (48, 16, 4), (96, 16, 4), (96, 32, 1), (96, 32, 4), (192, 32, 4), (192, 64, 2), (192, 64, 4)),
    *((96, 128, 4), (384, 64, 4), (384, 128, 2), (384, 128, 3), (1000, 64, 2), (1000, 128, 1), (1000, 32, 4)),
)
GOALS = {(96, 32, 4): 0.3, (192, 64, 4): 3.0, (96, 128, 4): 3.0, (1000, 64, 2): 5.0}
SEEDS = 12
KINDS = ("blocks", "random", "tight")
PLAIN_SECONDS = 20.0
MOST_BYTES = 2e9
PUBLIC_SECONDS = 120


def pipeline_job(seed: int, layers: int, devices: int, types: int) -> PipelineJob:
    """A random pipeline: blocks of four layers as in a transformer, unrelated layers, or memory that hardly holds."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind == "blocks":
        time_s = [0.3 * rng.uniform(0.9, 1.1) * part for _ in range(layers) for part in (1.1, 0.25, 1.15, 1.0)][:layers]
        sizes = [(302_592, 302_592, 756_480, 151_296)[i % 4] for i in range(layers)]
    else:
        time_s = [rng.uniform(0.05, 1.0) for _ in range(layers)]
        sizes = [rng.choice([150_000, 300_000, 300_000, 750_000]) for _ in range(layers)]
    mem = [rng.uniform(18, 35) for _ in range(layers)]
    kinds, hosts = [], []
    for number in range(types):
        slower = rng.uniform(0.5, 2.5)
        share = rng.uniform(1.0, 1.6) if kind == "tight" else rng.uniform(1.5, 8.0)
        room = sum(mem) / devices * share + 4 * 8 * 8 * max(sizes) / 2**20
        own = tuple(seconds * slower * rng.uniform(0.95, 1.05) for seconds in time_s)
        kinds.append(DeviceType(f"type{number}", rng.choice([100, 1000, 1000, 10_000]), room, own))
        hosts += [Host(f"type{number}-{i}", f"type{number}") for i in range(devices // types)]
    model = ModelChain("chain", tuple(mem), 150_528, tuple(sizes))
    return PipelineJob(model, tuple(kinds), tuple(hosts))


def plain_pass(space: PartitionSpace, bottleneck: float | None, deadline: float) -> tuple[float, float, int]:
    """One dense pass, for the bottleneck or for the latency under one: seconds, the best value, cuts done."""
    shape = tuple(count + 1 for count in space.counts)
    began = time.process_time()
    add = bottleneck is not None
    most = np.inf if bottleneck is None else bottleneck
    ready = [[np.full(shape, np.inf) for _ in space.counts] for _ in range(space.layers)]
    for t in range(space.classes):
        ready[0][t][(0,) * len(shape)] = space.enter[t]
    last: list[np.ndarray] = []
    for b in range(1, space.layers + 1):
        last = []
        for t in range(space.classes):
            now = np.full(shape, np.inf)
            into = (slice(None),) * t + (slice(1, None),)
            before = (slice(None),) * t + (slice(None, -1),)
            for a in range(b):
                cost = space.seconds[t, a, b]
                if space.fits[t, a, b] and cost <= most:
                    came = ready[a][t][before]
                    np.minimum(now[into], came + cost if add else np.maximum(came, cost), out=now[into])
            last.append(now)
        if b < space.layers:
            for v in range(space.classes):
                for u in range(space.classes):
                    over = space.cut[b, u, v]
                    if over <= most:
                        sent = last[u] + over if add else np.maximum(last[u], over)
                        np.minimum(ready[b][v], sent, out=ready[b][v])
        if time.process_time() > deadline:
            return time.process_time() - began, np.inf, b
    return time.process_time() - began, min(float(now.min()) for now in last), space.layers


def plain_seconds(job: PipelineJob) -> tuple[float, bool, float, float]:
    """Seconds of the plain program, whether that is an estimate, and the bottleneck and latency it found."""
    space = space_of(job, host_classes(job))
    size = float(np.prod([count + 1 for count in space.counts]))
    if size * 8 * space.layers * space.classes > MOST_BYTES:
        return np.nan, True, np.inf, np.inf
    spent, bottleneck, done = plain_pass(space, None, time.process_time() + PLAIN_SECONDS / 2)
    if done < space.layers:
        looked_at = space.fits[:, :, : done + 1].sum()
        return 2 * spent * float(space.fits.sum() / looked_at), True, np.inf, np.inf
    more, latency, done = plain_pass(space, bottleneck * (1 + TIE), time.process_time() + PLAIN_SECONDS)
    return spent + more, done < space.layers, bottleneck, latency


def write_files(job: PipelineJob, folder: Path) -> None:
    """A pipeline as the three files that both programs read."""
    model = job.model
    chain = {"layers": model.layers, "mem_MB": list(model.mem_mb), "parameters_in": model.parameters_in}
    chain["parameters_out"] = list(model.parameters_out)
    types = {
        kind.name: {
            "bw_Mbps": int(kind.bw_mbps),
            "mem_MB": int(kind.mem_mb),
            "model_profiles": {
                model.name: [{"batch_size": job.batch_size, "dtype": "torch.float32", "time_s": list(kind.time_s)}]
            },
        }
        for kind in job.types
    }
    devices = {kind.name: [host.name for host in job.hosts if host.type == kind.name] for kind in job.types}
    for name, data in (("models", {model.name: chain}), ("device_types", types), ("devices", devices)):
        (folder / f"{name}.yml").write_text(json.dumps(data))


def public_ratio(job: PipelineJob) -> str:
    """How long the public program takes, as a multiple of ours; both started as commands on the same files."""
    public = os.environ.get("PUBLIC_SCHED_PIPELINE")
    if not public:
        return ""
    ours = [sys.executable, "-c", "import sys; from trimtab.cli.pipeline import sched_pipeline as s; s()"]
    with tempfile.TemporaryDirectory() as folder:
        write_files(job, Path(folder))
        seconds = []
        for command in (ours, [public]):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                subprocess.run(
                    [*command, "-m", job.model.name],
                    cwd=folder,
                    capture_output=True,
                    check=True,
                    timeout=PUBLIC_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"over {PUBLIC_SECONDS / seconds[0]:,.0f}x as long (stopped)"
            except subprocess.CalledProcessError:
                return "failed"
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"{seconds[1] / seconds[0]:,.1f}x as long ({seconds[1]:.2f} s)"


def measure(layers: int, devices: int, types: int) -> None:
    """One row, in a process of its own: what it finds goes to standard output as JSON."""
    os.sched_setaffinity(0, {0})
    # One warm-up: numpy's first calls are not the search's.
    plan_partition(pipeline_job(0, 12, 4, 2))
    times: dict[str, list[float]] = {"throughput": [], "latency": []}
    proven = True
    for seed in range(SEEDS):
        job = pipeline_job(seed, layers, devices, types)
        for objective in ("throughput", "latency"):
            began = time.process_time()
            answer = plan_partition(job, objective)
            times[objective].append(time.process_time() - began)
            proven &= answer.optimal and answer.ties_proven
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    job = pipeline_job(0, layers, devices, types)
    plain, estimated, bottleneck, latency = plain_seconds(job)
    began = time.process_time()
    found = plan_partition(job).schedule
    mine = time.process_time() - began
    if not estimated:
        assert abs(found.bottleneck_seconds - bottleneck) <= 1e-8 * bottleneck
        assert abs(found.latency_seconds - latency) <= 1e-8 * latency
    print(
        json.dumps(
            {
                "median": sorted(times["throughput"])[SEEDS // 2],
                "worst": max(times["throughput"]),
                "latency": max(times["latency"]),
                "proven": proven,
                "mb": peak_mb,
                "ratio": None if np.isnan(plain) else plain / mine,
                "estimated": estimated,
                "public": public_ratio(job),
            }
        )
    )


def main() -> None:
    print(f"Partition search: {SEEDS} pipelines a row, one core, ties broken (goal in brackets, for both objectives)")
    head = ("layers", "devices", "types", "median s", "worst s", "latency s", "goal s", "proven", "MB", "plain program")
    public = "public program" if os.environ.get("PUBLIC_SCHED_PIPELINE") else ""
    print("{:>6} {:>7} {:>5} {:>9} {:>8} {:>9} {:>7} {:>6} {:>5}  {:<22}  {}".format(*head, public).rstrip())
    for layers, devices, types in ROWS:
        run = subprocess.run(
            [sys.executable, "-c", f"from bench.partition import measure; measure({layers}, {devices}, {types})"],
            capture_output=True,
            text=True,
            check=True,
        )
        row = json.loads(run.stdout)
        goal = GOALS.get((layers, devices, types))
        plain = "does not fit in memory"
        if row["ratio"] is not None:
            plain = f"{'~' if row['estimated'] else ''}{row['ratio']:,.1f}x as long"
        print(
            f"{layers:>6} {devices:>7} {types:>5} {row['median']:>9.3f} {row['worst']:>8.3f} {row['latency']:>9.3f} "
            f"{f'[{goal}]' if goal else '':>7} {'all' if row['proven'] else 'no':>6} {row['mb']:>5.0f}  "
            f"{plain:<22}  {row['public']}".rstrip(),
            flush=True,
        )


if __name__ == "__main__":
    main()
