"""`trimtab simulate SCENARIO.yaml`: runs policies on simulated clusters."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.cli.options import save_report
from trimtab.core.errors import InputError, check_known

if TYPE_CHECKING:
    pass

POINTS = 5  # of a swept range
SWEEP = "command line: --sweep"


class SimulateFormat(str, enum.Enum):
    """Output formats."""

    text = "text"
    json = "json"
    csv = "csv"


def simulate(
    scenario: Annotated[Path, Argument(help="Scenario file: a cluster with tasks, engines with rollouts, or a job.")],
    seed: Annotated[list[int] | None, Option(help="Only this seed (repeatable).")] = None,
    policy: Annotated[list[str] | None, Option(help="Only this policy (repeatable).")] = None,
    jobs: Annotated[int, Option("--jobs", "-j", min=1, max=256, help="Parallel runs.")] = 1,
    sweep: Annotated[
        str | None, Option(help="Sweep a setting: starvation_timeout_s=60,600,3600 or same_pool_gap=1..5.")
    ] = None,
    form: Annotated[SimulateFormat, Option("--format", "-f", help="text, json or csv.")] = SimulateFormat.text,
    html: Annotated[Path | None, Option(help="Write an HTML report with plots.")] = None,
) -> None:
    """Run policies on simulated clusters under a virtual clock: the machines that run live, and baselines."""
    from trimtab.formats.yaml_text import read_mapping
    from trimtab.render.html.simulation import KINDS
    from trimtab.render.live import run_all
    from trimtab.render.output import err

    content = read_mapping(scenario)
    kind, print_text, page = KINDS[next((section for section in KINDS if section in content), "tasks")]
    selected = _narrowed(kind.read(scenario), policy or [], seed or [])
    if sweep is not None:
        selected, left_out = kind.sweep.sweep(selected, *_sweep(sweep), SWEEP)
        for sentence in left_out:
            err.print(sentence, markup=False)
    runs = run_all(selected, kind.run, jobs)
    advice = None
    if sweep is not None:
        advice = kind.sweep.recommend(selected, runs, lambda other: run_all(other, kind.run, jobs))
    compared = kind.compare(selected, runs, advice)
    if html is not None:
        save_report(html, page(compared, f"trimtab simulate {scenario}"))
    if form is SimulateFormat.text:
        print_text(compared)
    else:
        write_comparison(compared.data(), compared.csv, form)


def write_comparison(data: dict[str, Any], as_csv: Callable[[], str], form: SimulateFormat) -> None:
    if form is SimulateFormat.json:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        sys.stdout.write(as_csv())


def _sweep(text: str) -> tuple[str, list[float]]:
    key, equals, stated = text.partition("=")
    if not equals:
        raise InputError(f"{key} has no values", where=SWEEP, hint=f"{key}=1,2,3 or {key}=1..3")
    try:
        if ".." in stated:
            low, high = (float(word) for word in stated.split(".."))
            found = [low + (high - low) * at / (POINTS - 1) for at in range(POINTS)]
        else:
            found = [float(word) for word in stated.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) for value in found) or len(found) > 100:
        hint = "numbers with commas, or a range: 0.5..0.95"
        raise InputError(f"{stated!r} is not a list of values", where=SWEEP, hint=hint)
    return key, found


def _narrowed(scenario: Any, policies: list[str], seeds: list[int]) -> Any:
    known = {item.name: item for item in scenario.policies}
    check_known(policies, known, "command line: --policy", "the scenario has no policy {}")
    kept = tuple(known[name] for name in dict.fromkeys(policies)) or scenario.policies
    return replace(scenario, policies=kept, seeds=tuple(dict.fromkeys(seeds)) or scenario.seeds)
