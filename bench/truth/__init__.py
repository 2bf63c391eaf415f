"""How far estimates are from public measurements, leaving out the model that is judged.

Each row is estimated with constants that were fitted without any row of its model. Beside it stands a plain guess: six
FLOPs per parameter and token at 40 % of the peak, weights and cache read once per token at the peak bandwidth. `main()`
prints the table; `scores()` gives it as data.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.estimate_gpu import PARTS
from bench.truth import aiconfigurator, choosing, fit, pairs, rows, switches
from bench.truth.fit import Errors
from bench.truth.rows import StepRow
from trimtab.plan.estimate.constants import CONSTANTS, Constants
from trimtab.plan.estimate.step import RunInputs, refit_seconds, step_time
from trimtab.plan.estimate.training import pass_time

KNOWN = 0.5
"""Share of a known row's error that is taken over, on the same kind of GPU."""
CLOSE = 0.05
"""Pairs that differ by less are no pairs."""
LEAST_POINTS = 10
"""Of an engine, model and GPU kind that are shown apart."""
PER_ENGINE: dict[str, tuple[int, float, float]] = {}


@dataclass(frozen=True)
class Score:
    """A line of the table: what is judged, on how many values, the estimate, the plain guess, and the goal."""

    what: str
    count: int
    value: str
    plain: str = ""
    goal: str = ""
    met: bool | None = None


def plain_seconds(run: RunInputs) -> float:
    """The plain guess of a step."""
    tokens = run.samples * run.lengths.mean
    train = 6 * run.model.active_parameters * tokens * (1 + len(run.passes) / 3)
    train /= run.trainer.gpus * run.gpu.flops(run.trainer.precision) * choosing.PLAIN_MFU
    engines = run.decode_gpus / run.engine.tp
    batch = run.samples / engines
    size = 2 if run.engine.precision == "bf16" else 1
    read = run.model.parameters * size / run.engine.tp
    read += batch * run.model.cached_values(run.lengths.mean) * 2 / run.engine.tp
    generate = run.lengths.longest * read / run.gpu.bandwidth
    return max(train, generate) if run.rollout_gpus and run.mode != "sync" else train + generate


def half_width(errors: Errors) -> float:
    """The half-width, as a logarithm, that holds nine of ten errors."""
    return float(np.quantile(np.abs(errors), 0.9, method="higher"))


def median_p90(errors: Errors | Sequence[float]) -> tuple[float, float]:
    sizes = np.abs(np.expm1(np.asarray(errors)))
    return float(np.median(sizes)), float(np.percentile(sizes, 90))


class Judge:
    """Fits once for each model that is left out, and keeps what came of it."""

    def __init__(self) -> None:
        self._fitted: dict[str, Constants] = {}

    def constants(self, family: str) -> Constants:
        if family not in self._fitted:
            self._fitted[family] = fit.fit(family)
        return self._fitted[family]

    def step_errors(self, judged: Iterable[StepRow]) -> Errors:
        return np.array([np.log(self.step(row) / row.seconds) for row in judged])

    def step(self, row: StepRow) -> float:
        return step_time(row.run, self.constants(row.family)).seconds


def errors_line(what: str, errors: Errors, plain: Errors | None, goal: tuple[float, float] | None) -> Score:
    middle, high = median_p90(errors)
    other = "" if plain is None else "{:.1%}, {:.1%}".format(*median_p90(plain))
    wanted = "" if goal is None else f"<= {goal[0]:.0%}, {goal[1]:.0%}"
    met = None if goal is None else middle <= goal[0] and high <= goal[1]
    return Score(f"{what}: median, p90 of the error", len(errors), f"{middle:.1%}, {high:.1%}", other, wanted, met)


def pairs_right(judged: Sequence[StepRow], estimate: Callable[[StepRow], float]) -> tuple[int, int]:
    """(pairs of a release on one GPU kind that are ranked as measured, pairs)."""
    right = total = 0
    for a, b in itertools.combinations(judged, 2):
        same = a.row["framework"] == b.row["framework"] and a.row["gpu"] == b.row["gpu"]
        if same and abs(np.log(a.seconds / b.seconds)) > CLOSE:
            total += 1
            right += (a.seconds < b.seconds) == (estimate(a) < estimate(b))
    return right, total


def regrets(judged: Sequence[StepRow], estimate: Callable[[StepRow], float]) -> list[float]:
    """GPU-seconds of the configuration chosen among those published for a model and GPU kind, over the best, less 1."""
    groups: dict[tuple[str, ...], list[StepRow]] = defaultdict(list)
    for row in judged:
        groups[row.row["framework"], row.row["model"], row.row["gpu"], row.row["algorithm"]].append(row)
    found = []
    for group in groups.values():
        if len(group) > 1:
            chosen = min(group, key=lambda row: estimate(row) * row.run.gpus)
            best = min(row.seconds * row.run.gpus for row in group)
            found.append(chosen.seconds * chosen.run.gpus / best - 1)
    return found


def step_scores(judge: Judge) -> list[Score]:
    judged = rows.step_rows()[0]
    errors = judge.step_errors(judged)
    plain = np.array([np.log(plain_seconds(row.run) / row.seconds) for row in judged])
    lines = [errors_line("step, model left out", errors, plain, (0.18, 0.40))]
    lines.append(errors_line("step, one row of its release and model known", one_measured(judge), None, (0.12, 0.25)))
    right, total = pairs_right(judged, judge.step)
    guessed, _ = pairs_right(judged, lambda row: plain_seconds(row.run))
    share = right / total
    lines.append(Score("pairs ranked right", total, f"{share:.1%}", f"{guessed / total:.1%}", ">= 88%", share >= 0.88))
    regret, other = regrets(judged, judge.step), regrets(judged, lambda row: plain_seconds(row.run))
    near, near_plain = (float(np.mean([value <= 0.10 for value in values])) for values in (regret, other))
    what = "chosen configuration within 10% of the best (GPU-seconds)"
    lines.append(Score(what, len(regret), f"{near:.0%}", f"{near_plain:.0%}", ">= 90%", near >= 0.9))
    halves = [half_width(errors[[other.family != row.family for other in judged]]) for row in judged]
    held = np.abs(errors) <= np.array(halves)
    width = float(np.exp(2 * np.median(halves)))
    inside = float(np.mean(held))
    lines.append(Score("within the stated interval", len(held), f"{inside:.0%}", "", ">= 85%", inside >= 0.85))
    lines.append(Score("interval, high over low", len(held), f"{width:.2f}x", "", "<= 2.5x", width <= 2.5))
    return lines


def one_measured(judge: Judge, *, same_gpu: bool = False) -> Errors:
    """Errors when one other row of the same release, model and algorithm is known, and a share of its error taken over.

    The share is smaller where that row was measured on another kind of GPU.
    """
    judged = rows.step_rows()[0]
    errors = judge.step_errors(judged)
    keys = ("framework", "model", "algorithm", *(("gpu",) if same_gpu else ()))
    found = [
        errors[i] - errors[j] * (KNOWN if judged[i].row["gpu"] == judged[j].row["gpu"] else KNOWN / 2)
        for i, j in itertools.permutations(range(len(judged)), 2)
        if all(judged[i].row[key] == judged[j].row[key] for key in keys)
    ]
    return np.array(found)


def choosing_scores(judge: Judge) -> list[Score]:
    found = choosing.alternatives(judge.constants)
    lines = []
    for complete, what in ((True, "complete rows"), (False, "rows with assumptions")):
        regret = [each.regret for each in found if each.complete is complete]
        share = float(np.mean([value <= choosing.NEAR for value in regret]))
        name = f"choice on the same GPUs within 10% of the best, {what}"
        lines.append(Score(name, len(regret), f"{share:.0%}", "", ">= 90%", share >= 0.9))
    counts = choosing.smallest_counts(_memory)
    dead = [each for each in counts if each.outcome != "runs" and each.cure != "settings"]
    wrong = sum(each.wrong for each in dead)
    lines.append(Score("smallest count that was reported to die", len(dead), f"{wrong}", "", "0", wrong == 0))
    ratios = [each.chosen / each.reported for each in counts if each.outcome == "runs"]
    text = f"{min(ratios):g}x to {max(ratios):g}x"
    lines.append(Score("smallest count over the least published one", len(ratios), text))
    return lines


def mode_scores(judge: Judge) -> list[Score]:
    found = [pair for pair in pairs.pairs(judge.constants) if pair.judged]
    lines = []
    for what, own in (("complete rows", [pair for pair in found if not pair.assumed]), ("all", found)):
        share = float(np.mean([pair.right for pair in own]))
        lines.append(
            Score(f"better of two modes proposed, {what}", len(own), f"{share:.0%}", "", ">= 80%", share >= 0.8)
        )
        middle, high = median_p90([pair.error for pair in own])
        lines.append(Score(f"  gain of that mode, {what}: median, p90", len(own), f"{middle:.1%}, {high:.1%}"))
    inside = float(np.mean([pair.gain.low <= pair.published <= pair.gain.high for pair in found]))
    lines.append(Score("  within the stated interval", len(found), f"{inside:.0%}"))
    return lines


def print_pairs(judge: Judge) -> None:
    print("\nGain of a mode over the synchronous run, predicted from the latter (low, likely, high) and published")
    for pair in pairs.pairs(judge.constants):
        gain = (
            f"{pair.gain.low:.2f} {pair.gain.likely:.2f} {pair.gain.high:.2f}" if not pair.reason else pair.reason[:15]
        )
        other = "" if pair.reason else "even" if pair.same_gpus else "more GPUs"
        verdict = ("right" if pair.right else "WRONG") if pair.judged else other
        lacking = f"assumed: {', '.join(pair.assumed)}" if pair.assumed else "complete"
        print(f"  {pair.label:76} {gain:15} {pair.published:5.2f}  {verdict:9} {lacking}")


def switch_scores(judge: Judge) -> list[Score]:
    found = switches.gains(judge.constants)
    right = sum(each.sign for each in found)
    errors = np.array([each.error for each in found])
    middle, high = median_p90(errors)
    return [
        Score("switches, faster or slower right", len(found), f"{right}", "", "all", right == len(found)),
        Score(
            "switches, speed-up: median, p90", len(found), f"{middle:.1%}, {high:.1%}", "", "<= 33%", middle <= 1 / 3
        ),
    ]


def serving_scores() -> list[Score]:
    points, work = rows.serving_points()
    measured = np.array([point.value for point in points])
    errors = np.zeros(len(points))
    for family in sorted({point.family for point in points}):
        own = np.array([point.family == family for point in points])
        errors[own] = fit.serving_errors(fit.fit_serving(family, fit.START), work, measured)[own]
    plain = np.log((work.weights + work.experts + work.cache) / measured)
    hopper = np.array([point.group in ("h100", "h200") for point in points])
    theirs = aiconfigurator_errors(points)
    known = ~np.isnan(theirs)
    lines = [
        errors_line("serving on H100 and H200, seconds per output token", errors[hopper], plain[hopper], (0.12, 0.40)),
        errors_line("serving on Blackwell, seconds per output token", errors[~hopper], plain[~hopper], None),
    ]
    for name, own in (("H100 and H200", hopper & known), ("Blackwell", ~hopper & known)):
        lines.append(errors_line(f"  points on {name} that AIConfigurator knows", errors[own], plain[own], None))
        lines.append(errors_line("    AIConfigurator itself", theirs[own], None, None))
    PER_ENGINE.update(per_engine(points, errors, theirs))
    return lines


def aiconfigurator_errors(points: Sequence[rows.Point]) -> Errors:
    """Logarithms of what AIConfigurator says over what was measured; NaN where it has no answer."""
    said = aiconfigurator.stored()
    return np.log(np.array([said.get(point.label) or np.nan for point in points]) / [point.value for point in points])


def per_engine(points: Sequence[rows.Point], errors: Errors, theirs: Errors) -> dict[str, tuple[int, float, float]]:
    """(points, our median error, AIConfigurator's) for each engine, model and GPU kind that it knows."""
    table = {row["id"]: row for row in rows.read("serving_points")}
    groups: dict[str, list[int]] = defaultdict(list)
    for i, point in enumerate(points):
        if not np.isnan(theirs[i]):
            row = table[point.label]
            groups[f"{row['backend']}, {row['model'].rpartition('/')[2]}, {row['precision']}, {point.group}"].append(i)
    return {
        name: (len(own), median_p90(errors[own])[0], median_p90(theirs[own])[0])
        for name, own in sorted(groups.items())
        if len(own) >= LEAST_POINTS
    }


def trainer_scores(judge: Judge) -> list[Score]:
    lines = []
    for name, blackwell in (("Hopper and Ampere", False), ("B200", True)):
        errors, plain = [], []
        for point, trainer, tokens, _ in rows.trainer_points():
            if ("B200" in point.label) is not blackwell:
                continue
            c = judge.constants(point.family)
            took = pass_time(trainer, tokens, trainer.micro_tokens, 1.0, c, backward=True).seconds
            errors.append(np.log(took / point.value))
            flops = 6 * trainer.model.active_parameters * tokens
            plain.append(np.log(flops / (trainer.gpus * trainer.gpu.flops("bf16") * choosing.PLAIN_MFU) / point.value))
        lines.append(errors_line(f"trainer's micro-batch on {name}", np.array(errors), np.array(plain), None))
    return lines


def gpu_scores(judge: Judge) -> list[Score]:
    """Points that were measured by `python -m bench.estimate_gpu`."""
    lines, families = [], sorted({entry[0].family for entry in rows.gpu_points()})
    for what, parts in (("all", PARTS), *((part, (part,)) for part in PARTS)):
        errors = [e for name in families for e in fit.gpu_errors(judge.constants(name), None, parts, only=name)]
        middle, high = median_p90(errors)
        name = f"random models on an H200, {what}: median, p90"
        lines.append(Score(name, len(errors), f"{middle:.1%}, {high:.1%}", "", "<= 15%", middle <= 0.15))
    return lines


def sync_scores() -> list[Score]:
    errors = []
    for point, how, run in rows.sync_points():
        c = fit.fit_syncs(point.family, fit.START)
        took = refit_seconds(run.model, run.engine, how, c, shared=False, trainers=run.trainer.gpus)
        errors.append(np.log(took / point.value))
    return [errors_line("weight sync", np.array(errors), None, None)]


def memory_scores() -> list[Score]:
    lines = []
    beyond: list[float] = []
    c = CONSTANTS
    highs = {"training": c.memory_error, "generation": c.engine_memory_error}
    for phase in ("training", "generation"):
        points = [point for point in rows.memory_points() if point.phase == phase]
        errors = [fit.memory_gb(point, _memory(point.point.family)) / point.point.value - 1 for point in points]
        beyond += [
            point.point.value / (point.point.value * (1 + error) * np.exp(highs[phase]) + fit.margin_gb(point, c)) - 1
            for error, point in zip(errors, points, strict=True)
        ]
        lines.append(_mean_line(f"memory of {phase} on one GPU", errors))
        plain = [error for error, point in zip(errors, points, strict=True) if _plain(point)]
        lines.append(_mean_line("  of which bf16 and not Gemma", plain))
    peaks = [fit.peak_gb(trainer, row, _memory(point.family)) / peak - 1 for point, trainer, row, peak in _peaks()]
    lines.append(_mean_line("memory, peaks of a sharded trainer", peaks))
    share, worst = float(np.mean([value > 0 for value in beyond])), max(beyond)
    met = share <= 0.01 and worst <= 0.05
    text = f"{share:.1%}, worst by {worst:.0%}"
    lines.append(Score("stated high of memory exceeded", len(beyond), text, "", "<= 1%, by <= 5%", met))
    return lines


def _plain(point: rows.MemoryPoint) -> bool:
    return point.precision == "bf16" and "gemma" not in point.point.family


def _mean_line(what: str, errors: Sequence[float]) -> Score:
    mean = float(np.mean(np.abs(errors)))
    return Score(f"{what}: mean error", len(errors), f"{mean:.1%}", "", "<= 5%", mean <= 0.05)


_MEMORY: dict[str, Constants] = {}


def _memory(family: str) -> Constants:
    if family not in _MEMORY:
        _MEMORY[family] = fit.fit_memory(family, fit.START)
    return _MEMORY[family]


def _peaks() -> list[tuple[rows.Point, rows.Trainer, Mapping[str, str], float]]:
    table = rows.read("prime_rl_trainer")
    return [
        (point, trainer, row, peak) for (point, trainer, _, peak), row in zip(rows.trainer_points(), table, strict=True)
    ]


def scores(judge: Judge) -> list[Score]:
    return [
        *step_scores(judge),
        *choosing_scores(judge),
        *switch_scores(judge),
        *mode_scores(judge),
        *serving_scores(),
        *trainer_scores(judge),
        *gpu_scores(judge),
        *sync_scores(),
        *memory_scores(),
    ]


def main() -> None:
    if "--aiconfigurator" in sys.argv:
        aiconfigurator.ask(sys.argv[sys.argv.index("--aiconfigurator") + 1], rows.read("serving_points"))
    judge = Judge()
    found = scores(judge)
    judged, others = rows.step_rows()
    if "--json" in sys.argv:
        print(json.dumps([vars(score) for score in found], indent=1))
        return
    print("Estimates beside public measurements; constants fitted without the model that is judged")
    print(f"{'':66} {'n':>5}  {'estimate':<18} {'plain guess':<18} {'goal':<17}")
    for score in found:
        mark = "" if score.met is None else "met" if score.met else "MISSED"
        print(f"{score.what:66} {score.count:>5}  {score.value:<18} {score.plain:<18} {score.goal:<17} {mark}")
    families = sorted({row.family for row in judged})
    frameworks = sorted({row.row["framework"].rsplit(" ", 1)[0] for row in judged})
    print(
        f"\n{len(judged)} complete steps of {', '.join(frameworks)}, of {len(families)} models: {', '.join(families)}"
    )
    for row in judged:
        took = judge.step(row)
        print(f"  {row.label:66} measured {row.seconds:7.1f}  estimated {took:7.1f}  {took / row.seconds - 1:+.0%}")
    print("\nPublished alternatives on the same GPUs, how much slower the chosen one is than the best")
    for each in choosing.alternatives(judge.constants):
        print(f"  {each.label:66} of {each.count} {'' if each.complete else '(assumed) '}{each.regret:+.0%}")
    print_pairs(judge)
    print("\nSeconds per output token: median error of the estimate and of AIConfigurator, on points that both know")
    for name, (count, ours, theirs) in PER_ENGINE.items():
        better = "AIConfigurator's is smaller" if theirs < ours else ""
        print(f"  {name:66} {count:>4}  {ours:6.1%} {theirs:6.1%}  {better}")
    print("\nSwitches, how much faster they made a stage")
    for gain in switches.gains(judge.constants):
        print(f"  {gain.label:86} measured {gain.measured:5.2f}x  estimated {gain.estimated:5.2f}x")
    print("\nSmallest number of GPUs")
    for count in choosing.smallest_counts(_memory):
        print(f"  {count.chosen:>4} chosen, {count.outcome} on {count.reported:<4} {count.cure:9} {count.label}")
    print(f"\n{len(others)} steps that are not scored, with what they do not state:")
    for label, lacking in others:
        print(f"  {label:66} {', '.join(lacking)}")
