"""Train by GRPO in this process, by the plan that suits this machine.

python -m examples.grpo.train                                     # numpy alone
python -m examples.grpo.train --backend torch                     # a small transformer, on CUDA where there is one
python -m examples.grpo.train --folder out/grpo --iterations 200  # Ctrl-C, then the same again with --resume
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from examples.grpo.job import grpo

from trimtab import Iteration, Metrics, Run, RunEnd, RunJob, TrimtabError, summary_facts

COMPARED = 5
"""So many iterations after a plan was made show whether its prediction holds."""


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description="Trains a small policy by GRPO, in one process, without Ray.")
    parser.add_argument("--backend", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, help="GPUs to plan for: by default 2 for numpy, what there is for torch")
    parser.add_argument("--batches", type=int, default=4, help="batches of an iteration")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--digits", type=int, default=16, help="digits of the longest question")
    parser.add_argument("--questions", type=int, default=16, help="of a batch")
    parser.add_argument("--group", type=int, default=16, help="answers to each question")
    parser.add_argument("--size", type=json.loads, help='of the policy: {"hidden": 64}, or {"width": 64, "layers": 2}')
    parser.add_argument("--rate", type=float, help="of learning: by default 4e-3 for numpy, 1e-3 for torch")
    parser.add_argument("--folder", type=Path, help="where events, summary and states go")
    parser.add_argument("--resume", action="store_true", help="go on from the folder")
    parser.add_argument("--local", action="store_true", help="in this process (it always is)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON at the end")
    given = parser.parse_args()
    try:
        end = Run(_job(given), given.folder, resume=given.resume, on_iteration=_on_iteration).run()
    except TrimtabError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    _say(end, given.json)
    if end.error is not None:
        return end.error.exit_status
    return 0 if end.state == "done" else 130


def _job(given: argparse.Namespace) -> RunJob:
    torch_here = given.backend == "torch"
    gpus = given.gpus
    if gpus is None:
        gpus = 2
        if torch_here:
            import torch

            gpus = max(1, torch.cuda.device_count())
    return grpo(
        given.backend,
        iterations=given.iterations,
        seed=given.seed,
        gpus=gpus,
        batches=given.batches,
        staleness=given.staleness,
        digits=given.digits,
        questions=given.questions,
        group=given.group,
        size=given.size,
        rate=given.rate or (1e-3 if torch_here else 4e-3),
    )


def _on_iteration(iteration: Iteration, metrics: Metrics) -> None:
    reward, rollout = metrics["reward"], metrics["rollout"]
    times = ", ".join(f"{one.component} {1e3 * one.busy_s:.0f}" for one in iteration.components)
    bar = "#" * round(40 * max(0.0, reward["reward"] or 0.0))
    print(
        f"{iteration.number:>4}  reward {reward['reward']:6.3f}  length {rollout['length']:5.1f}"
        f"  {1e3 * iteration.wall_s:6.0f} ms ({times})  {bar}",
        flush=True,
    )


def _say(end: RunEnd, as_json: bool) -> None:
    facts = summary_facts(end.state, end.reason, end.plan, end.iterations, dict(end.metrics), end.since)
    # Costs drift as the policy learns, so a prediction is held against the iterations that follow it.
    after = [one for one in end.iterations if one.number >= end.since][:COMPARED]
    predicted_ms, measured_ms = 1e3 * end.plan.iteration_seconds, 1e3 * _median(one.wall_s for one in after)
    here_ms = 1e3 * _median(end.here_s[one.number] for one in after if one.number in end.here_s)
    if as_json:
        facts["just_after"] = {"predicted_ms": predicted_ms, "measured_ms": measured_ms, "here_ms": here_ms}
        print(json.dumps(facts, indent=1))
        return
    print(f"{end.state}: {end.reason.sentence}")
    if end.iterations:
        print(f"plan: {end.plan.describe()}")
        print(f"predicted {predicted_ms:.1f} ms; then measured {measured_ms:.1f} ms (in this process {here_ms:.1f} ms)")
        for name in ("reward.reward", "rollout.length"):
            course = facts["metrics"][name]
            print(f"{name.partition('.')[2]}: from {course['first']:.2f} to {course['last']:.2f}")


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values] or [0.0])


if __name__ == "__main__":
    sys.exit(main())
