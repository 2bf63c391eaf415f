"""What switches gave in public, beside what `--what-if` says of them with constants fitted without the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.truth import rows
from trimtab.formats import catalogue
from trimtab.formats.run_settings import ROLLOUT_WORDS, TRAIN_WORDS, build, parallel
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.what_if import what_if


@dataclass(frozen=True)
class SwitchGain:
    """The speed-up of a stage by a switch, measured and estimated."""

    label: str
    switch: str
    measured: float
    estimated: float

    @property
    def sign(self) -> bool:
        return (self.estimated > 1) == (self.measured > 1)

    @property
    def error(self) -> float:
        return abs(math.log(self.estimated / self.measured))


def gains(constants: Callable[[str], Constants]) -> list[SwitchGain]:
    found = []
    for row in catalogue.table("switches"):
        c = constants(rows.family(row["model"]))
        numbers = ("gpus", "rollout_gpus", "samples", "mean_tokens", "max_tokens")
        given = {key: catalogue.number_or_word(row[key]) for key in (*numbers, "model", "gpu", "mode") if row[key]}
        given |= {"rollout": parallel(row["rollout"], "rollout", ROLLOUT_WORDS), "oversample": 1.0}
        given |= {"train": parallel(row["train"], "train", TRAIN_WORDS), "algorithm": row["algorithm"]}
        run = build(given, c).run
        estimated = what_if(run, row["switch"], c).stage_speedup(row["stage"])
        label = f"{row['switch']}, {row['stage']}: {row['system']}, {row['model']}, {row['gpus']} {row['gpu']}"
        found.append(SwitchGain(label, row["switch"], float(row["before"]) / float(row["after"]), estimated))
    return found
