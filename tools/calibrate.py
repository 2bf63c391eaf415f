"""Fits the constants of `trimtab estimate` on the public rows of bench/truth and writes them into the package.

python tools/calibrate.py            # prints what it found, with the errors in sample
python tools/calibrate.py --write    # also writes src/trimtab/plan/estimate/constants.py
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.truth import Judge, fit, half_width, median_p90, one_measured, pairs, rows  # noqa: E402

from trimtab.plan.estimate.constants import Constants  # noqa: E402
from trimtab.plan.estimate.step import step_time  # noqa: E402

LEAST_SPREAD = 0.15
"""Of memory: twice the mean error of models that were left out."""
FILE = ROOT / "src/trimtab/plan/estimate/constants.py"


def intervals(found: Constants) -> Constants:
    """Half-widths that hold nine of ten rows of models that were left out."""
    left = [point.asleep_gb for point in rows.memory_points() if point.asleep_gb]
    found = replace(found, residue_gb=float(np.quantile(left, 0.99)))
    judge = Judge()
    steps = judge.step_errors(rows.step_rows()[0])
    points = rows.memory_points()
    families = {point.point.family for point in points}
    kept = {family: fit.fit_memory(family, fit.START) for family in families}

    def beyond(phase: str) -> float:
        own = [point for point in points if point.phase == phase]
        c = found
        under = [
            np.log(
                max(1e-3, point.point.value - fit.margin_gb(point, c)) / fit.memory_gb(point, kept[point.point.family])
            )
            for point in own
        ]
        return float(max(LEAST_SPREAD, np.quantile(under, 0.99)))

    gains = [pair.error for pair in pairs.pairs(judge.constants) if pair.judged]
    return replace(
        found,
        gain_over=max(0.0, float(np.quantile(gains, 0.95))),
        gain_under=max(0.0, -float(np.quantile(gains, 0.05))),
        step_error=half_width(steps),
        stage_error=half_width(steps) * 2**0.5,
        measured_error=half_width(one_measured(judge, same_gpu=True)),
        memory_error=beyond("training"),
        engine_memory_error=beyond("generation"),
    )


def written(found: Constants) -> str:
    """The module with the fitted numbers in place of those it has."""
    text = FILE.read_text(encoding="utf-8")
    for field in fields(Constants):
        value = getattr(found, field.name)
        if field.name == "releases":
            shown = ", ".join(f'("{name}", {factor:.3g})' for name, factor in value)
            text = re.sub(r"(    releases: .*?= ).*\n", rf"\g<1>({shown})\n", text)
        else:
            text = re.sub(rf"(    {field.name}: float = )\S+", rf"\g<1>{value:.4g}", text)
    return text


def main() -> None:
    found = intervals(fit.fit())
    for field in fields(Constants):
        value = getattr(found, field.name)
        print(f"{field.name:20} {value if field.name == 'releases' else f'{value:.4g}'}")
    judged = rows.step_rows()[0]
    errors = [np.log(step_time(row.run, found).seconds / row.seconds) for row in judged]
    print("steps in sample: median {:.1%}, p90 {:.1%}".format(*median_p90(errors)))
    points, work = rows.serving_points()
    measured = np.array([point.value for point in points])
    print("serving in sample: median {:.1%}, p90 {:.1%}".format(*median_p90(fit.serving_errors(found, work, measured))))
    if "--write" in sys.argv:
        FILE.write_text(written(found), encoding="utf-8")
        print(f"written to {FILE}")


if __name__ == "__main__":
    main()
