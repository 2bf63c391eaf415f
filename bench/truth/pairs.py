"""Published steps of one run in two modes: given the synchronous one, is the better mode proposed, with what gain?

The other mode's split and parallelism are chosen as `trimtab plan` does; it is proposed where it gains more than the
noise of a run. What a row does not state is assumed as `trimtab estimate` does, the mean length from the published
update; such pairs are counted apart. Constants are fitted without the model.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.truth import choosing, rows
from trimtab.core.errors import InputError
from trimtab.formats import catalogue
from trimtab.formats.modes import NOISE
from trimtab.plan.estimate.answer import Interval, gain_interval
from trimtab.plan.estimate.choose import on
from trimtab.plan.estimate.constants import CONSTANTS, Constants
from trimtab.plan.estimate.step import RunInputs, step_time
from trimtab.plan.estimate.what_if import changed

SAMPLES = "1024"
"""Of a step that does not state them, as `trimtab estimate` assumes."""


@dataclass(frozen=True)
class Pair:
    """The gain of a mode over the synchronous run: published, and predicted from the latter; without it a `reason`."""

    label: str
    published: float
    predicted: float = 0.0
    assumed: tuple[str, ...] = ()
    same_gpus: bool = True
    reason: str = ""

    @property
    def judged(self) -> bool:
        """Rows that take about the same time say nothing of which mode is better."""
        return self.same_gpus and not self.reason and abs(math.log(self.published)) > NOISE

    @property
    def right(self) -> bool:
        return (self.predicted > 1 + NOISE) == (self.published > 1)

    @property
    def gain(self) -> Interval:
        return gain_interval(self.predicted, CONSTANTS)

    @property
    def error(self) -> float:
        return math.log(self.predicted / self.published)


def pairs(constants: Callable[[str], Constants]) -> list[Pair]:
    found = []
    table = [row for row in catalogue.table("rl_steps") if row["step_s"].strip()]
    for before in (row for row in table if row["mode"].startswith("sync")):
        same = ("framework", "model", "algorithm", "gpu", "max_len")
        # A source with several tables of one model has a synchronous row before each.
        after = itertools.takewhile(lambda row: not row["mode"].startswith("sync"), table[table.index(before) + 1 :])
        found += [_pair(before, row, constants) for row in after if all(row[key] == before[key] for key in same)]
    return found


def _pair(before: Mapping[str, str], after: Mapping[str, str], constants: Callable[[str], Constants]) -> Pair:
    count = before["gpus"] if before["gpus"] == after["gpus"] else f"{before['gpus']} -> {after['gpus']}"
    label = f"{before['framework']}, {before['model']}, {count} {before['gpu']}, {after['mode']}"
    published, same = float(before["step_s"]) / float(after["step_s"]), before["gpus"] == after["gpus"]
    family = rows.family(rows.bare(before["model"]))
    try:
        run = run_of(before)
        c = constants(family)
        wider = run if same else on(run, int(after["gpus"]))
        other = changed(wider, switch_of(after), c)[0]
        predicted = step_time(run, c).seconds / step_time(other, c).seconds
    except InputError as error:
        return Pair(label, published, assumed=tuple(rows.missing(before)), same_gpus=same, reason=error.what)
    return Pair(label, published, predicted, tuple(rows.missing(before)), same)


def switch_of(row: Mapping[str, str]) -> str:
    """A published mode as `--what-if` has it."""
    mode = row["mode"]
    if "colocate" in mode:
        return "colocate-async"
    stale = re.search(r"stale ([\d.]+)", mode)
    staleness = float(stale[1]) if stale else 1.0
    if "stream" in mode:  # mini-batches are trained on as they come: only the first of a weight sync is waited for
        staleness = max(staleness, 1 - float(row["train_batch"]) / float(row["samples_per_step"]))
    text = f"async:{staleness:g}"
    # Trainers that never wait for a batch's last answers.
    streams = "fully" in mode or "separate" in mode or mode == "async"
    text += "+partial" if streams or "partial" in mode else ""
    engines_own = row["update_s"] and not row["old_logprob_s"]  # its stages are published, and there is no such pass
    return text + ("+no-old-log-probs" if engines_own else "")


def run_of(row: Mapping[str, str]) -> RunInputs:
    """The synchronous run that a row describes."""
    if not rows.missing(row):
        return rows.run_of(row)
    mean = choosing.inferred_mean([{**row, "samples_per_step": row["samples_per_step"] or SAMPLES}])
    longest = float(row["max_len"]) if row["max_len"] else None
    given = {
        "model": rows.bare(row["model"]),
        "gpu": re.sub(r" \(.*\)|\?", "", row["gpu"]),
        "gpus": int(row["gpus"]),
        "rollout_gpus": int(row["gen_gpus_if_separate"] or 0) or None,
        "mode": "separate" if row["gen_gpus_if_separate"] else "sync",
        "algorithm": row["algorithm"].lower(),
        "oversample": 1.0,
        "samples": int(row["samples_per_step"]) if row["samples_per_step"] else None,
        "train_batch": int(row["train_batch"]) if row["train_batch"] else None,
        "mean_tokens": float(row["avg_len"]) if row["avg_len"] else mean,
        "max_tokens": longest or (4 * mean if mean else None),
    }
    run = choosing.build(given).run
    if row["update_s"] and not row["old_logprob_s"]:  # its stages are published, and there is no such pass
        run = replace(run, passes=tuple(name for name in run.passes if name != "old"))
    return run
