"""How good the choice is of what was not given: among published alternatives, and of the smallest number of GPUs.

Alternatives are published steps of one model on the same GPUs with other parallelism, another mode or another split.
Where a row does not state its lengths, samples or parallelism they are assumed as `trimtab estimate` does, the mean
length from the published update; such groups are counted apart. Each choice is made with constants that were fitted
without the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.truth import rows
from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.formats.run_settings import build
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.step import step_time

NEAR = 0.10
PLAIN_MFU = 0.4


@dataclass(frozen=True)
class Alternatives:
    """Published steps of one model on the same GPUs: the chosen one's seconds over the best's, less 1."""

    label: str
    complete: bool
    count: int
    regret: float


def alternatives(constants: Callable[[str], Constants]) -> list[Alternatives]:
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    for row in catalogue.table("rl_steps"):
        if row["step_s"].strip():
            key = (row["framework"], row["model"], row["algorithm"], row["gpu"], row["gpus"], row["max_len"])
            groups[key].append(row)
    found = []
    for key, group in groups.items():
        try:
            mean = inferred_mean(group)
            estimates = [(_seconds(row, constants, mean), float(row["step_s"])) for row in group]
        except InputError:  # a model or GPU kind that no table has
            continue
        if len(group) > 1:
            taken = [took for guess, took in estimates if guess <= min(estimates)[0] * (1 + 1e-9)]
            best = min(took for _, took in estimates)
            # Rows that an estimate cannot tell apart are chosen from with equal chance.
            regret = sum(taken) / len(taken) / best - 1
            found.append(Alternatives(", ".join(key[:5]), not any(map(rows.missing, group)), len(group), regret))
    return found


def inferred_mean(group: Sequence[Mapping[str, str]]) -> float | None:
    """Mean length from the published update of a run with all GPUs: six FLOPs at 40 % of the peak."""
    for row in group:
        if row["update_s"] and row["samples_per_step"] and not row["gen_gpus_if_separate"]:
            gpu = catalogue.gpu(row["gpu"])
            model = catalogue.model(rows.bare(row["model"]))[1]
            flops = float(row["update_s"]) * int(row["gpus"]) * gpu.flops("bf16") * PLAIN_MFU
            return max(400.0, flops / (6 * model.active_parameters * int(row["samples_per_step"])))
    return None


def _seconds(row: Mapping[str, str], constants: Callable[[str], Constants], mean: float | None) -> float:
    family = rows.family(rows.bare(row["model"]))
    if not rows.missing(row):
        return step_time(rows.run_of(row), constants(family)).seconds
    apart = row["gen_gpus_if_separate"]
    asynchronous = "async" in row["mode"] or "off" in row["mode"]
    given = {
        "model": rows.bare(row["model"]),
        "gpu": re.sub(r" \(.*\)", "", row["gpu"]),
        "gpus": int(row["gpus"]),
        "rollout_gpus": int(apart) if apart else None,
        "mode": "async" if asynchronous else "sync",
        "partial": "partial" in row["mode"] or "separate" in row["mode"],  # verl: `separate_async` goes on
        "lend": "switch" in row["mode"],
        "sync_every": float(cadence[1]) if (cadence := re.search(r"\bC(\d+)/A", row["mode"])) else None,
        "staleness": float(stale[1]) if (stale := re.search(r"stale ([\d.]+)", row["mode"])) else None,
        "algorithm": row["algorithm"].lower(),
        "oversample": 1.0,
        "samples": int(row["samples_per_step"]) if row["samples_per_step"] else None,
        "mean_tokens": float(row["avg_len"]) if row["avg_len"] else mean,
        "max_tokens": float(row["max_len"]) if row["max_len"] else None,
    }
    if "colocate" in row["mode"]:
        given["mode"] = "sync"
    run = build(given, constants(family)).run
    if row["update_s"] and not row["old_logprob_s"]:  # its stages are published, and there is no such pass
        run = replace(run, passes=tuple(name for name in run.passes if name != "old"))
    return step_time(run, constants(family)).seconds


@dataclass(frozen=True)
class SmallestCount:
    """The smallest count that was chosen beside one that was reported; `wrong` where the report says it dies."""

    label: str
    chosen: int
    reported: int
    outcome: str
    cure: str

    @property
    def wrong(self) -> bool:
        """Settings as a cure show that the count does."""
        return self.outcome != "runs" and self.cure != "settings" and self.chosen <= self.reported


def smallest_counts(constants: Callable[[str], Constants]) -> list[SmallestCount]:
    found = []
    for row in rows.read("out_of_memory"):
        given = {"algorithm": row["algorithm"], "max_tokens": float(row["max_tokens"]), "prompt_tokens": 100.0}
        c = constants(rows.family(row["model"]))
        chosen = build({"model": row["model"], "gpu": row["gpu"], **given}, c).run.gpus
        label = f"{row['model']}, {row['gpus']} {row['gpu']}, {row['algorithm']}: {row['source']}"
        found.append(SmallestCount(label, chosen, int(row["gpus"]), row["outcome"], row["cure"]))
    return found
