"""`trimtab simulate SCENARIO.yaml`: runs policies on simulated clusters."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import InputError, nearest

if TYPE_CHECKING:
    from trimtab.replay.common.recommend import Recommendation

POINTS = 5  # of a swept range
SWEEP = "command line: --sweep"


class SimulateFormat(str, enum.Enum):
    """Output formats."""

    text = "text"
    json = "json"
    csv = "csv"


def simulate(
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file: a cluster with tasks, engines with rollouts, or a job.")
    ],
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Only this seed (repeatable).")] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Only this policy (repeatable).")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Parallel runs.")] = 1,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="Sweep a setting: starvation_timeout_s=60,600,3600 or same_pool_gap=1..5."),
    ] = None,
    form: Annotated[SimulateFormat, typer.Option("--format", "-f", help="text, json or csv.")] = SimulateFormat.text,
    html: Annotated[Path | None, typer.Option("--html", help="Write an HTML report with plots.")] = None,
) -> None:
    """Run policies on simulated clusters under a virtual clock: the machines that run live, and baselines."""
    from trimtab.formats.yaml_text import read_mapping
    from trimtab.render.output import err

    content = read_mapping(scenario)
    kind = next((made() for section, made in KINDS.items() if section in content), None) or _pools()
    selected = _narrowed(kind.read(scenario), policy or [], seed or [])
    if sweep is not None:
        selected, left_out = kind.swept(selected, *_sweep(sweep), SWEEP)
        for sentence in left_out:
            err.print(sentence, markup=False)
    runs = kind.runs(selected, jobs)
    advice = None if sweep is None else kind.recommendation(selected, runs, jobs)
    if html is not None:
        _write(html, kind.report(selected, runs, command=f"trimtab simulate {scenario}", advice=advice))
    if form is SimulateFormat.json:
        sys.stdout.write(kind.as_json(selected, runs, advice))
    elif form is SimulateFormat.csv:
        sys.stdout.write(kind.as_csv(runs))
    else:
        kind.print_answer(selected, runs, advice)


@dataclass(frozen=True)
class ScenarioKind:
    """A kind of scenario: how it is read, run, swept and shown. The results differ by kind."""

    read: Callable[[Path], Any]
    runs: Callable[[Any, int], Any]
    swept: Callable[[Any, str, list[float], str], tuple[Any, list[str]]]  # also what was skipped, and why
    recommendation: Callable[[Any, Any, int], Recommendation]
    report: Callable[..., str]
    as_json: Callable[[Any, Any, Recommendation | None], str]
    as_csv: Callable[[Any], str]
    print_answer: Callable[[Any, Any, Recommendation | None], None]


def _pools() -> ScenarioKind:
    from trimtab.render.html.simulate import report as simulate_report
    from trimtab.render.html.simulate.sweeps import pool_recommendation, pool_sweep
    from trimtab.render.live.simulate import pool_runs
    from trimtab.render.text import simulate as simulate_text
    from trimtab.replay.pool.scenario import read

    return ScenarioKind(
        read,
        pool_runs,
        lambda *args: (pool_sweep(*args), []),
        pool_recommendation,
        simulate_report.report,
        simulate_text.as_json,
        simulate_text.as_csv,
        simulate_text.print_answer,
    )


def _rollouts() -> ScenarioKind:
    from trimtab.render.html.simulate import rollout as simulate_rollout
    from trimtab.render.html.simulate.sweeps import rollout_recommendation, rollout_sweep
    from trimtab.render.live.simulate import rollout_runs
    from trimtab.replay.rollout.scenario import read

    return ScenarioKind(
        read,
        rollout_runs,
        rollout_sweep,
        rollout_recommendation,
        simulate_rollout.report,
        simulate_rollout.as_json,
        simulate_rollout.as_csv,
        simulate_rollout.print_answer,
    )


def _loops() -> ScenarioKind:
    from trimtab.render.html.simulate import replan as simulate_loop
    from trimtab.render.html.simulate.sweeps import replan_recommendation, replan_sweep
    from trimtab.render.live.simulate import loop_runs
    from trimtab.replay.replan.scenario import read

    return ScenarioKind(
        read,
        loop_runs,
        lambda *args: (replan_sweep(*args), []),
        replan_recommendation,
        simulate_loop.report,
        simulate_loop.as_json,
        simulate_loop.as_csv,
        simulate_loop.print_answer,
    )


KINDS = {"job": _loops, "rollout": _rollouts, "tasks": _pools}  # by the section that identifies them


def _sweep(text: str) -> tuple[str, list[float]]:
    """Parses the setting and its values."""
    key, equals, values = text.partition("=")
    if not equals:
        raise InputError(f"{key} has no values", where=SWEEP, hint=f"{key}=1,2,3 or {key}=1..3")
    return key, _values(values, SWEEP)


def _write(path: Path, page: str) -> None:
    from trimtab.formats.files import write_text
    from trimtab.render.output import err

    write_text(path, page)
    err.print(f"report: {path}", markup=False)


def _narrowed(scenario: Any, policies: list[str], seeds: list[int]) -> Any:
    known = {item.name: item for item in scenario.policies}
    for name in policies:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "it has " + ", ".join(known)
            raise InputError(f"the scenario has no policy {name}", where="command line: --policy", hint=hint)
    kept = tuple(known[name] for name in dict.fromkeys(policies)) or scenario.policies
    return replace(scenario, policies=kept, seeds=tuple(dict.fromkeys(seeds)) or scenario.seeds)


def _values(text: str, where: str) -> list[float]:
    try:
        if ".." in text:
            low, high = (float(word) for word in text.split(".."))
            found = [low + (high - low) * at / (POINTS - 1) for at in range(POINTS)]
        else:
            found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) for value in found) or len(found) > 100:
        raise InputError(
            f"{text!r} is not a list of values", where=where, hint="numbers with commas, or a range: 0.5..0.95"
        )
    return found
