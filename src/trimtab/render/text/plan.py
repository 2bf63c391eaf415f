"""A plan, and advice on roles, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Column, Table

from trimtab.core.ranks import ranks_text
from trimtab.formats.loaded import PlanSettings
from trimtab.model.plan import Alternative, IntervalCheck, PlacementAnswer, Plan, ScalingCaveat, Sensitivity
from trimtab.plan.placement.compare import time_text
from trimtab.render.output import out, picked, print_list, text_table

if TYPE_CHECKING:
    from trimtab.formats.modes import ModePlan
    from trimtab.machines.nodes.roles import RoleAdvice
    from trimtab.model.plan import Plan
    from trimtab.model.workflow import Cluster


HEADING = "Best placement for this task is:"


def as_data(
    answer: PlacementAnswer,
    settings: PlanSettings,
    dialect: str,
    searched: float,
    other: PlanSettings | None = None,
    modes: Sequence[ModePlan] = (),
) -> dict[str, Any]:
    """The data of `--format json` and `yaml`.

    `other` is the plan for less than perfect scaling in the file's own keys, where there is one.
    """
    best = answer.best
    return {
        "iteration_seconds": best.iteration_seconds,
        "iterations_per_hour": 3600 / best.iteration_seconds if best.iteration_seconds else None,
        "lower_bound_seconds": answer.lower_bound_seconds,
        "optimal": answer.optimal,
        **picked(best, "mode", "gpus", "idle_share"),
        "groups": groups_data(best),
        "components": {
            c.name: {
                "gpus": list(c.gpus),
                "variant": c.variant or None,
                **picked(c, "seconds", "start", "end", "idle_share", "extrapolated", "switch_seconds"),
            }
            for c in best.components
        },
        "sync_seconds": best.sync_seconds,
        "alternatives": [
            {
                "label": other.label,
                "iteration_seconds": other.plan.iteration_seconds if other.plan else None,
                "groups": groups_data(other.plan) if other.plan else None,
                "reason": other.reason,
            }
            for other in answer.alternatives
        ],
        "near_ties": [{"iteration_seconds": p.iteration_seconds, "groups": groups_data(p)} for p in answer.near_ties],
        "unrestricted": (
            {"iteration_seconds": answer.unrestricted.iteration_seconds, "groups": groups_data(answer.unrestricted)}
            if answer.unrestricted
            else None
        ),
        "sensitivity": {
            s.component: picked(s, "lower_factor", "upper_factor", "lower_becomes", "upper_becomes")
            for s in answer.sensitivity
        },
        "scaling": _scaling(answer.scaling, other),
        "kept": answer.kept,
        "modes": [
            {
                **picked(mode, "mode", "staleness", "age", "placement", "words", "needs", "reason", "proposed"),
                **{
                    name: found and picked(found, "low", "likely", "high")
                    for name in ("seconds", "memory_gb", "gain")
                    for found in [getattr(mode, name)]
                },
            }
            for mode in modes
        ],
        "interval": answer.interval and picked(answer.interval, "holds", "loss", "factors", "becomes"),
        "assumptions": list(answer.assumptions),
        "dialect": dialect,
        "settings": dict(settings.values),
        "advice": list(settings.advice),
        "search": {"seconds": round(searched, 6), "plans_considered": answer.plans_considered},
    }


def _scaling(scaling: ScalingCaveat | None, other: PlanSettings | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    plan = scaling.plan
    return {
        "measured_once": list(scaling.components),
        "per_doubling": scaling.doubling,
        "iteration_seconds": scaling.chosen_seconds,
        "plan": plan
        and {
            "iteration_seconds": plan.iteration_seconds,
            "groups": groups_data(plan),
            "settings": dict(other.values) if other else None,
        },
        "measure": dict(zip(("component", "gpus"), scaling.measure, strict=True)) if scaling.measure else None,
    }


def groups_data(plan: Plan) -> list[dict[str, Any]]:
    return [
        {"components": list(g.components), "gpus": list(g.gpus), **({"kind": g.kind} if g.kind else {})}
        for g in plan.groups
    ]


def print_text(
    answer: PlacementAnswer,
    settings: PlanSettings,
    searched: float,
    noise: float,
    other: PlanSettings | None = None,
    modes: Sequence[ModePlan] = (),
) -> None:
    """Print the answer; the placement block comes last, ready to copy."""
    best = answer.best
    out.print(f"[bold]{time_text(best.iteration_seconds)}[/] per iteration, {_rate(best)}, {_proof(answer)}")
    out.print(
        f"{best.mode}: {escape(best.describe())} GPUs; {best.gpus} of {best.total_gpus} GPUs used, "
        f"{best.idle_share:.0%} of the GPU time idle"
    )
    out.print(f"[dim]{answer.plans_considered} plans simulated in {searched:.3f} s[/]")
    if answer.scaling is not None:
        low, high = sorted((best.iteration_seconds, answer.scaling.chosen_seconds))
        if high > low * 1.01:
            out.print(f"Its scaling is assumed, not measured: {time_text(low)} to {time_text(high)} per iteration")
    if answer.scaling is not None and answer.scaling.plan is not None:
        _print_scaling(answer.scaling)
    out.print()
    out.print(_components(best))
    if answer.alternatives:
        out.print()
        out.print(_alternatives(answer.alternatives, best))
    if modes:
        out.print()
        out.print(_modes(modes, best))
        out.print(_proposal(modes))
        print_list("What the other modes need", _mode_needs(modes))
    if answer.near_ties:
        out.print(f"\n[bold]Near ties[/] (within {noise:.0%}, the noise of a measurement; prefer the simpler plan)")
        for tie in answer.near_ties:
            out.print(f"  {time_text(tie.iteration_seconds)}  {escape(tie.describe())}")
    if answer.unrestricted is not None:
        saved = best.iteration_seconds - answer.unrestricted.iteration_seconds
        out.print()
        framework = escape(answer.framework or "Your framework")
        out.print(
            f"[bold]{framework} cannot run this; it would save {time_text(saved)}[/] "
            f"({saved / best.iteration_seconds:.0%}): {escape(answer.unrestricted.describe())}"
        )
    if answer.sensitivity:
        out.print()
        unsure = ", if scaling is perfect" if answer.scaling is not None and answer.scaling.plan is not None else ""
        out.print(f"[bold]How far a cost may be off[/] before another plan is more than {noise:.0%} faster{unsure}")
        width = max(len(row.component) for row in answer.sensitivity)
        for row in answer.sensitivity:
            out.print(f"  {escape(row.component.ljust(width))}  {escape(_range(row))}")
    if answer.interval is not None:
        out.print(f"\n{_interval(answer.interval)}", markup=False)
    print_list("Assumed", (*answer.assumptions, *settings.advice))
    if other is not None and answer.scaling is not None:
        out.print(f"\nIf each doubling of GPUs gives {answer.scaling.doubling:.0%} of a perfect speed-up it is:")
        out.print()
        out.print(other.block.rstrip("\n"), markup=False, highlight=False)
    out.print()
    out.print(HEADING)
    out.print()
    out.print(settings.block.rstrip("\n"), markup=False, highlight=False)


def _interval(check: IntervalCheck) -> str:
    if check.becomes is None:
        return "Over the interval of the estimated costs the choice holds: no other plan is faster"
    where = ", ".join(f"{name} {factor:.2g}x" for name, factor in check.factors.items())
    if check.holds:
        return f"Over the interval of the estimated costs the choice holds: at most {check.loss:.1%} above the best"
    return (
        f"The choice does not hold over the interval of the estimated costs: with {where} of the estimate "
        f"{check.becomes} is {check.loss:.0%} faster. Measure a step: `trimtab profile logs`"
    )


def _proof(answer: PlacementAnswer) -> str:
    if answer.kept:
        return "the placement in the file: keep it"
    if answer.scaling is not None and answer.scaling.plan is not None:
        return "best if scaling is perfect, which was not measured"
    gap = answer.best.iteration_seconds / max(answer.lower_bound_seconds, 1e-12) - 1
    return "proven optimal" if answer.optimal else f"at most {gap:.1%} above the optimum"


def _print_scaling(scaling: ScalingCaveat) -> None:
    assert scaling.plan is not None
    out.print()
    out.print(
        f"[bold]If each doubling of GPUs gives {scaling.doubling:.0%} of a perfect speed-up[/]: "
        f"{time_text(scaling.plan.iteration_seconds)} with {escape(scaling.plan.describe())}; "
        f"the plan above takes {time_text(scaling.chosen_seconds)} then"
    )
    if scaling.measure is not None:
        name, gpus = scaling.measure
        out.print(f"Measure {escape(name)} on {gpus} GPUs: that decides between the two.")


def _rate(plan: Plan) -> str:
    if not plan.iteration_seconds:
        return "no time at all"
    per_hour = 3600 / plan.iteration_seconds
    return f"{per_hour:.1f} iterations an hour" if per_hour < 1000 else f"{per_hour:.0f} iterations an hour"


def _unit(plan: Plan) -> tuple[str, float]:
    """Unit of the times in a table: milliseconds for iterations under a second."""
    return ("ms", 1e3) if 0 < plan.iteration_seconds < 0.9995 else ("seconds", 1.0)


def _components(plan: Plan) -> Table:
    word, unit = _unit(plan)
    variants = any(c.variant for c in plan.components)
    rows = []
    for c in plan.components:
        seconds, *times = (f"{unit * value:.1f}" for value in (c.seconds, c.start, c.end))
        mark = "*" if c.extrapolated else ""
        rows.append(
            (
                *(c.name, len(c.gpus) or "CPU", ranks_text(c.gpus) or "-"),
                *([c.variant or "-"] if variants else []),
                *(f"{seconds}{mark}", *times, f"{c.idle_share:.0%}"),
            )
        )
    heads = ("component", ">GPUs", "ranks", *(["variant"] if variants else []), f">{word}", ">start", ">end", ">idle")
    table = text_table(heads, rows)
    if any(c.extrapolated for c in plan.components):
        table.caption = "* extrapolated beyond what was measured"
        table.caption_justify = "left"
    return table


def _alternatives(alternatives: tuple[Alternative, ...], best: Plan) -> Table:
    word, unit = _unit(best)
    rows = []
    for other in alternatives:
        if other.plan is None:
            rows.append((other.label, "-", "-", other.reason))
            continue
        ratio = other.plan.iteration_seconds / best.iteration_seconds if best.iteration_seconds else 1.0
        seconds = f"{unit * other.plan.iteration_seconds:.1f}"
        rows.append((other.label, seconds, f"{ratio:.2f}x", f"{other.plan.describe()}: {other.reason}"))
    return text_table(("compared with", f">{word}", ">slower", "placement, and why it loses"), rows)


def _modes(modes: Sequence[ModePlan], best: Plan) -> Table:
    """Seconds of a step with what no component books, peak GB of a GPU, steps that weights are old (mean, most)."""
    word, unit = _unit(best)
    rows = []
    for mode in modes:
        seconds = ["-"] * 3
        if mode.seconds is not None:
            seconds = [f"{unit * value:.1f}" for value in (mode.seconds.low, mode.seconds.likely, mode.seconds.high)]
        gain = "" if mode.gain is None else f"{mode.gain.likely:.2f}x"
        gb = "" if mode.memory_gb is None else f"{mode.memory_gb.likely:.0f}"
        age = f"{mode.staleness:g}" if mode.age is None else f"{mode.age:.1f}, {mode.staleness:g}"
        # The last component of a group is the one that trains.
        groups = [group.rpartition(", ")[2] for group in mode.placement.split(" | ")]
        where = " | ".join(groups) if len(groups) > 1 else f"all on {groups[0].rpartition(' ')[2]}"
        rows.append((mode.mode, *seconds, gain, gb, "" if mode.reason else age, "-" if mode.reason else where))
    heads = (Column(head, justify="right", no_wrap=True) for head in ("low", word, "high", "faster", "peak GB", "age"))
    return text_table(("mode", *heads, "GPUs"), rows)


def _proposal(modes: Sequence[ModePlan]) -> str:
    found = next((mode for mode in modes if mode.proposed), None)
    more = "; with --gpu KIND what a mode changes in decoding, and its memory, are estimated too"
    if any(mode.memory_gb for mode in modes):
        more = " (seconds of whole steps, with what no component books)"
    if found is None or found.gain is None:
        return f"No other mode is proposed: none is faster by more than the noise of a run{more}"
    low, likely, high = (f"{value:.2f}x" for value in (found.gain.low, found.gain.likely, found.gain.high))
    return f"Proposed: {found.mode}, {likely} as fast ({low} to {high}), if training bears weights of that age{more}"


def _mode_needs(modes: Sequence[ModePlan]) -> list[str]:
    """For each mode all that has to be set, or why it is not planned."""
    planned = [f"{mode.mode}: {'; '.join((*mode.needs, ' '.join(mode.words)))}" for mode in modes if mode.words]
    return [*planned, *(f"{mode.mode}: not planned: {mode.reason}" for mode in modes if mode.reason)]


def _range(row: Sensitivity) -> str:
    if row.lower_factor is None and row.upper_factor is None:
        return "holds from half to double"
    parts = []
    if row.lower_factor is not None:
        parts.append(f"{row.lower_factor - 1:+.0%} (then {row.lower_becomes})")
    else:
        parts.append("holds down to half")
    if row.upper_factor is not None:
        parts.append(f"{row.upper_factor - 1:+.0%} (then {row.upper_becomes})")
    else:
        parts.append("holds up to double")
    return "; ".join(parts)


def advice_data(advice: RoleAdvice, before: Cluster, after: Cluster, settings: PlanSettings | None) -> dict[str, Any]:
    """The data of `--format json` and `yaml`."""
    return {
        "advice": advice.reason.code.value,
        "sentence": advice.reason.sentence,
        "stay": advice.stay,
        "can_stay": advice.can_stay,
        "cluster": {"before": _cluster_data(before), "after": _cluster_data(after)},
        "before": _plan_data(advice.before) if advice.before else None,
        "after": _plan_data(advice.after),
        "best": _plan_data(advice.best),
        "components": {
            change.component: {
                "code": change.reason.code.value,
                "sentence": change.reason.sentence,
                "gpus": {"before": change.gpus_before, "after": change.gpus_after},
                "kind": {"before": change.kind_before or None, "after": change.kind_after or None},
                "group": {"before": list(change.group_before), "after": list(change.group_after)},
                "seconds": {"before": change.seconds_before, "after": change.seconds_after},
            }
            for change in advice.changes
        },
        "notes": list(advice.notes),
        "settings": dict(settings.values) if settings else None,
    }


def print_advice(advice: RoleAdvice, before: Cluster, after: Cluster, settings: PlanSettings | None) -> None:
    """Print the advice, its effect on each component, and the resulting placement."""
    out.print(f"[bold]{advice.reason.code.value}[/] {escape(advice.reason.sentence)}")
    out.print(f"{_nodes(before)} before, {_nodes(after)} after")
    out.print()
    rows = []
    for change in advice.changes:
        seconds = "-" if change.seconds_before is None else f"{change.seconds_before:.1f}"
        gpus = _from_to(str(change.gpus_before or "-"), str(change.gpus_after or "CPU"))
        rows.append((change.component, gpus, _from_to(seconds, f"{change.seconds_after:.1f}"), change.reason))
    out.print(text_table(("component", ">GPUs", ">seconds", "what, and why"), rows))
    out.print()
    if advice.before is not None:
        out.print(f"before  {_described(advice.before)}")
    out.print(f"after   {_described(advice.after)}")
    if advice.best.iteration_seconds < advice.after.iteration_seconds * (1 - 1e-9):
        out.print(f"best    {_described(advice.best)}, a larger move for a gain below measurement noise")
    for note in advice.notes:
        out.print(f"  - {escape(note)}")
    if settings is not None:
        out.print("\nResulting placement:")
        out.print()
        out.print(settings.block.rstrip("\n"), markup=False, highlight=False)


def _from_to(before: str, after: str) -> str:
    if before == "-" and after == "CPU":
        return after
    return after if before == after else f"{before} -> {after}"


def _described(plan: Plan) -> str:
    return f"{plan.iteration_seconds:.1f} s  {escape(plan.describe())} of {plan.total_gpus} GPUs"


def _nodes(cluster: Cluster) -> str:
    count = len(cluster.nodes)
    kinds = [f"{len(cluster.ranks(kind))} {kind or 'GPUs'}" for kind in cluster.kinds]
    return f"{count} node{'' if count == 1 else 's'} with {' and '.join(kinds) or 'no GPUs'}"


def _cluster_data(cluster: Cluster) -> dict[str, Any]:
    by_kind = {kind or "any": len(cluster.ranks(kind)) for kind in cluster.kinds}
    return {"nodes": len(cluster.nodes), "gpus": cluster.gpus, "gpus_by_kind": by_kind}


def _plan_data(plan: Plan) -> dict[str, Any]:
    return {"iteration_seconds": plan.iteration_seconds, "gpus": plan.gpus, "groups": groups_data(plan)}
