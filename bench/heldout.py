"""Whether `predictive` slows a step on requests that had no part in making it: the second halves of two public traces.

Their answers' lengths, in order, are steps of 64 or 512 prompts on 8 simulated engines of 256 places, with 60 s of
training between them. The p95 of the step time and the engine-seconds are beside those of all engines at all times, and
of half of them. The machine and its policies are the real ones; nothing is drawn by chance. The traces are in the
folder TRIMTAB_TRACES, else ../shared/data.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.comparison import percentile
from trimtab.replay.common.traces import requests
from trimtab.replay.rollout.driver import PROFILES, RolloutReplay, SimulatedFleet

TRACES = Path(os.environ.get("TRIMTAB_TRACES") or Path(__file__).parents[2] / "shared" / "data")
NAMES = ("azure_llm_2023_conv", "mooncake_conversation")
ENGINES, STEPS = 8, 20
FLEET = SimulatedFleet(ENGINES, 256, training_s=60.0)
BASE = ElasticConfig(
    max_workers=ENGINES,
    requests_per_worker_capacity=8,
    monitoring_interval=1.0,
    min_stable_period=3.0,
    scale_up_cooldown=5.0,
    scale_down_cooldown=10.0,
    drain_timeout=5.0,
)
PROFILE = replace(PROFILES["reasoning"], prompt_tokens=1_000)


def static(count: int) -> ElasticConfig:
    return replace(BASE, policy="static", min_workers=count, max_workers=count)


def main() -> None:
    print(f"{'second half of':24} {'steps':>12} {'policy':>12} {'p95 step':>10} {'engine-s':>10}")
    for name in NAMES:
        path = TRACES / f"{name}.csv.gz"
        if not path.exists():
            print(f"{name:24} is not in {TRACES}")
            continue
        rows = requests(path)
        rows = rows[len(rows) // 2 :]
        for size in (64, 512):
            steps = [rows[at : at + size] for at in range(0, min(STEPS, len(rows) // size) * size, size)]
            batches = [
                {f"s{number}r{at}.0": max(1, row.output_tokens) for at, row in enumerate(step)}
                for number, step in enumerate(steps)
            ]
            policies = {f"static {count}": static(count) for count in (ENGINES, ENGINES // 2)}
            for policy, config in (policies | {"predictive": replace(BASE, policy="predictive")}).items():
                outcome = RolloutReplay(config, FLEET).closed(PROFILE, batches)
                awake = config.max_workers * outcome.total_s - outcome.asleep_s
                p95 = percentile(sorted(outcome.steps_s), 0.95)
                print(f"{name:24} {f'{len(steps)} of {size}':>12} {policy:>12} {p95:>8.2f} s {awake:>10,.0f}")


if __name__ == "__main__":
    main()
