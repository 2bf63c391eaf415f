"""Rollouts through `RolloutPool` beside direct calls to the same vLLM servers, on a GPU.

    python -m bench.rollout_gpu                       # random 1.4 B weights, two servers on GPU 0, all parts
    python -m bench.rollout_gpu --only speed,kill     # some parts
    python -m bench.rollout_gpu --start-only          # makes the weights, starts the servers and leaves them
    python -m bench.rollout_gpu --stop                # ends them

Needs torch, transformers and vLLM in the interpreter that runs it, or in --engine-python. Servers are started with
sleep mode and development mode, in sessions of their own; a later command with the same --folder finds them. Not part
of `make bench`, which needs no GPU.

    speed     tokens per second and CPU of this process, directly and through the pool in turns, two engines and one:
              answers of one length; and n samples with log-probs and long-tail lengths
    curve     the rate for each `resume_every`, and what a lost engine costs then
    sleep     GPU memory before, asleep and awake, levels 1 and 2
    refit     other weights and back, at rest and with answers under way
    segments  whole answers beside answers in segments: tokens, log-probs, lengths
    kill      one of two engines is killed -9 in the middle (last, as one engine is gone afterwards)

Parts run in that order. One that fails or takes longer than --part-s is reported and the next one begins. Figures are
printed and, after every part, written to OUT/rollout_gpu.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.rollout_gpu.asking import Bench, Direct, session
from bench.rollout_gpu.kill import kill
from bench.rollout_gpu.segments import segments
from bench.rollout_gpu.servers import Fleet, serve_command
from bench.rollout_gpu.speed import curve, speed
from bench.rollout_gpu.weights import refit, sleep

PARTS: dict[str, Callable[[Bench], Awaitable[dict[str, Any]]]] = {
    "speed": speed,
    "curve": curve,
    "sleep": sleep,
    "refit": refit,
    "segments": segments,
    "kill": kill,
}
MODELS = Path(__file__).with_name("models.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rollout_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default=",".join(PARTS), help="parts, by commas (default: all)")
    add("--folder", type=Path, default=Path("out/rollout_gpu"), help="checkpoints, logs and servers.json (%(default)s)")
    add("--out", type=Path, help="where rollout_gpu.json goes (default: --folder)")
    servers = parser.add_argument_group("servers")
    add = servers.add_argument
    add("--size", default="1.4b", choices=("tiny", "1.4b", "7b"), help="random weights (default: %(default)s)")
    add("--models", help="checkpoints to use instead, by commas: what is served, and other weights for refits")
    add("--one-model", action="store_true", help="makes no second checkpoint: no refits")
    add("--engines", type=int, default=2)
    add("--urls", help="servers that run already, by commas; they are not killed")
    add("--start-only", action="store_true", help="starts the servers and leaves them running")
    add("--no-wait", action="store_true", help="with --start-only: does not wait until they are up")
    add("--stop", action="store_true", help="ends servers of an earlier command")
    add("--keep", action="store_true", help="leaves the servers running at the end")
    add("--engine-python", default=sys.executable, help="interpreter that has vLLM (default: this one)")
    add("--gpu", type=int, default=0, help="GPU whose memory is read, by the driver's number (default: 0)")
    add("--gpu-memory-utilization", type=float, default=0.25, help="of each server (default: %(default)s)")
    add("--max-num-seqs", type=int, default=256, help="default: %(default)s")
    add("--max-model-len", type=int, default=9_000, help="default: %(default)s")
    add("--serve-arguments", default="", help="more arguments of `vllm serve`, in one string")
    add("--cpu", action="store_true", help="vLLM for CPU, float32: to try this bench out")
    add("--up-s", type=float, default=600.0, help="seconds for the servers to come up (default: %(default)g)")
    loads = parser.add_argument_group("loads")
    add = loads.add_argument
    add("--answers", type=int, default=512, help="of one length; 0: without (default: %(default)s)")
    add("--ask", default="2,1", help="engines of the part speed (default: %(default)s)")
    add("--affinity", type=float, help="affinity_requests: what a prefix hit is worth (default: the pool's)")
    add("--tokens", type=int, default=1_024, help="of each answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of direct and pool in turns (default: %(default)s)")
    add("--tail", default="64,8,1000,8000", help="prompts, samples, mean length, longest; 0: without (%(default)s)")
    add("--sampled", type=int, default=2_000, help="answers whose lengths are compared (default: %(default)s)")
    add("--segment", type=int, default=64, help="resume_every of the part segments, in tokens (default: %(default)s)")
    add("--resume-every", help="of speed, refit and kill: tokens, inf, or seconds as '2 s' (default: the pool's)")
    add("--curve", default="32,64,128,256,512,inf", help="settings of the part curve (default: %(default)s)")
    add("--limit", type=int, help="requests that the pool gives to one engine (default: twice --max-num-seqs)")
    add("--part-s", type=float, default=300.0, help="seconds for one part (default: %(default)g)")
    given = parser.parse_args()
    given.parts = [name for name in given.only.split(",") if name]
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return given


def start(given: argparse.Namespace, fleet: Fleet) -> list[str]:
    """Checkpoints and servers, as far as they are missing; paths of the checkpoints."""
    count = 1 if given.one_model else 2
    paths = given.models.split(",") if given.models else [str(given.folder / f"v{at + 1}") for at in range(count)]
    paths = [str(Path(path).resolve()) for path in paths]
    if given.urls:
        return paths
    if not all((Path(path) / "config.json").exists() for path in paths):
        command = [given.engine_python, str(MODELS), str(given.folder), "--size", given.size, "--count", str(count)]
        subprocess.run([*command, "--dtype", "float32" if given.cpu else "bfloat16"], check=True)
    command, environment = serve_command(
        given.engine_python, Path(paths[0]), cpu=given.cpu, gpu_share=given.gpu_memory_utilization,
        max_num_seqs=given.max_num_seqs, max_model_len=given.max_model_len, more=given.serve_arguments,
    )  # fmt: skip
    fleet.start(given.engines, command, environment)
    return paths


async def measure(given: argparse.Namespace, fleet: Fleet, models: list[str], out: Path) -> int:
    """All parts; how many of them failed."""
    up_s = await fleet.come_up(given.up_s)
    print(f"{len(fleet.urls)} servers are up after {up_s:.0f} s: {', '.join(fleet.urls)}", flush=True)
    failed = 0
    async with session() as opened:
        direct = Direct(opened, "")
        async with opened.get(f"{fleet.urls[0]}/v1/models") as reply:
            direct.model = (await reply.json())["data"][0]["id"]
        async with opened.get(f"{fleet.urls[0]}/version") as reply:
            version = (await reply.json())["version"]
        prompts, samples, mean, longest = map(int, [*given.tail.split(","), "0", "0", "0"][:4])
        bench = Bench(
            fleet,
            direct,
            tuple(models),
            limit=given.limit or 2 * given.max_num_seqs,
            answers=given.answers,
            tokens=given.tokens,
            rounds=given.rounds,
            tail=(prompts, samples, mean, longest),
            sampled=given.sampled,
            segment=given.segment,
            resume_every=given.resume_every,
            curve=tuple(given.curve.split(",")),
            asked=tuple(count for count in map(int, given.ask.split(",")) if count <= len(fleet.urls)),
            affinity=given.affinity,
            gpu=given.gpu,
        )
        machine = {
            "vllm": version, "model": direct.model, "python": platform.python_version(), "gpu": gpu_name(given.gpu),
            "engines": len(fleet.urls), "limit": bench.limit, "command": sys.argv[1:], "up_s": round(up_s, 1),
        }  # fmt: skip
        print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
        for name in (name for name in PARTS if name in given.parts):
            begun = time.monotonic()
            try:
                bench.results[name] = await asyncio.wait_for(PARTS[name](bench), given.part_s)
            except Exception:
                failed += 1
                bench.results.setdefault(name, {})["failed"] = traceback.format_exc()
                print(f"\nthe part {name} failed:\n{traceback.format_exc()}", flush=True)
            print(f"[{name}: {time.monotonic() - begun:.0f} s]", flush=True)
            save(out, name, machine, bench.results[name])
    return failed


def save(out: Path, part: str, machine: dict[str, Any], result: dict[str, Any]) -> None:
    """Adds one part to the file; those of earlier commands stay."""
    path = out / "rollout_gpu.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[part] = {"machine": machine, "result": result}
    path.write_text(json.dumps(known, indent=1, default=str) + "\n")


def gpu_name(index: int) -> str:
    asked = ["nvidia-smi", f"--id={index}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def main() -> int:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    out = given.out or given.folder
    out.mkdir(parents=True, exist_ok=True)
    fleet = Fleet.of(given.folder, given.urls.split(",") if given.urls else ())
    if given.stop:
        fleet.stop()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended below
    keep = given.keep
    try:
        models = start(given, fleet)
        if given.start_only:
            keep = True
            if not given.no_wait:
                print(f"up after {asyncio.run(fleet.come_up(given.up_s)):.0f} s: {', '.join(fleet.urls)}")
            return 0
        return min(asyncio.run(measure(given, fleet, models, out)), 1)
    finally:
        if not keep:
            fleet.stop()


if __name__ == "__main__":
    sys.exit(main())
