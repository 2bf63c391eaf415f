"""`trimtab simulate SCENARIO.yaml`: what would happen, before a cluster is touched."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trimtab.model.errors import InputError, nearest

if TYPE_CHECKING:
    from trimtab.replay.rollout_scenario import RolloutScenario
    from trimtab.replay.scenario import Scenario

Asked = TypeVar("Asked", "Scenario", "RolloutScenario")
POINTS = 5  # of a range that is swept


class Form(str, enum.Enum):
    """How the answer is written."""

    text = "text"
    json = "json"
    csv = "csv"


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario file: a cluster with tasks, or engines with rollouts.")],
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Only this seed (may be given again).")] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Only this policy (may be given again).")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Runs at the same time.")] = 1,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="Try a setting of trimtab: patience_s=60,600,3600 or same_pool_gap=1..5."),
    ] = None,
    form: Annotated[Form, typer.Option("--format", "-f", help="text, json or csv.")] = Form.text,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None,
) -> None:
    """Run policies on simulated clusters under a virtual clock: the same machines that run live, and baselines."""
    from trimtab.formats.yaml_text import read_mapping

    command = f"trimtab simulate {scenario}"
    if "rollout" in read_mapping(scenario):
        if sweep is not None:
            raise InputError("only settings of pools can be swept", where="command line: --sweep")
        _rollouts(scenario, policy or [], seed or [], jobs, form, html, command)
    else:
        _pools(scenario, policy or [], seed or [], jobs, sweep, form, html, command)


def _pools(
    path: Path,
    policies: list[str],
    seeds: list[int],
    jobs: int,
    sweep: str | None,
    form: Form,
    html: Path | None,
    command: str,
) -> None:
    from trimtab.replay.scenario import read
    from trimtab.ui import simulate_report, simulate_text
    from trimtab.ui.simulate_runs import pool_runs

    asked = _narrowed(read(path), policies, seeds)
    if sweep is not None:
        asked = swept(asked, sweep)
    runs = pool_runs(asked, jobs)
    _write(html, lambda: simulate_report.report(asked, runs, command=command))
    if form is Form.json:
        sys.stdout.write(simulate_text.as_json(asked, runs))
    elif form is Form.csv:
        sys.stdout.write(simulate_text.as_csv(runs))
    else:
        simulate_text.print_answer(asked, runs)


def _rollouts(
    path: Path, policies: list[str], seeds: list[int], jobs: int, form: Form, html: Path | None, command: str
) -> None:
    from trimtab.replay.rollout_scenario import read
    from trimtab.ui import simulate_rollout
    from trimtab.ui.simulate_runs import rollout_runs

    asked = _narrowed(read(path), policies, seeds)
    runs = rollout_runs(asked, jobs)
    _write(html, lambda: simulate_rollout.report(asked, runs, command=command))
    if form is Form.json:
        sys.stdout.write(simulate_rollout.as_json(asked, runs))
    elif form is Form.csv:
        sys.stdout.write(simulate_rollout.as_csv(runs))
    else:
        simulate_rollout.print_answer(asked, runs)


def _write(path: Path | None, page: Callable[[], str]) -> None:
    from trimtab.formats.files import write_text
    from trimtab.ui.output import err

    if path is not None:
        write_text(path, page())
        err.print(f"report: {path}", markup=False)


def _narrowed(scenario: Asked, policies: list[str], seeds: list[int]) -> Asked:
    known = {one.name: one for one in scenario.policies}
    for name in policies:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "it has " + ", ".join(known)
            raise InputError(f"the scenario has no policy {name}", where="command line: --policy", hint=hint)
    kept = tuple(known[name] for name in dict.fromkeys(policies)) or scenario.policies
    return replace(scenario, policies=kept, seeds=tuple(dict.fromkeys(seeds)) or scenario.seeds)


def swept(scenario: Scenario, said: str) -> Scenario:
    """The scenario with the pool machine once for every value of a setting, instead of once."""
    from trimtab.replay.pool_policies import POOL_KEYS, PREEMPTION_KEYS, SWITCHES, PoolPolicy

    known, where = (*PREEMPTION_KEYS, *POOL_KEYS), "command line: --sweep"
    key, equals, values = said.partition("=")
    if key not in known:
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
        raise InputError(f"{key} cannot be swept", where=where, hint=hint)
    if not equals:
        raise InputError("no values", where=where, hint=f"{key}=1,2,3 or {key}=1..3")
    base = next((one for one in scenario.policies if one.use == "trimtab"), PoolPolicy("trimtab", "trimtab"))
    tried = []
    for value in _values(values, where):
        said_of = {key: bool(value) if key in SWITCHES else value}
        one = replace(base, name=f"{base.name}, {key} {value:g}")
        if key in PREEMPTION_KEYS:
            tried.append(replace(one, preemption={**base.preemption, **said_of}))
        else:
            tried.append(replace(one, pool={**base.pool, **said_of}))
    others = [one for one in scenario.policies if one is not base]
    return replace(scenario, policies=(*tried, *others))


def _values(said: str, where: str) -> list[float]:
    try:
        if ".." in said:
            low, high = (float(one) for one in said.split(".."))
            found = [low + (high - low) * at / (POINTS - 1) for at in range(POINTS)]
        else:
            found = [float(one) for one in said.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(one) for one in found) or len(found) > 100:
        raise InputError(f"{said!r} are no values", where=where, hint="numbers with commas, or a range: 0.5..0.95")
    return found
