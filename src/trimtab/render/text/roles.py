"""Advice on roles, as text and as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from trimtab.render.output import out, text_table
from trimtab.render.text.plan import groups_data

if TYPE_CHECKING:
    from trimtab.formats.loaded import PlanSettings
    from trimtab.machines.nodes.roles import RoleAdvice
    from trimtab.model.plan import Plan
    from trimtab.model.workflow import Cluster


def advice_data(advice: RoleAdvice, before: Cluster, after: Cluster, settings: PlanSettings | None) -> dict[str, Any]:
    """The data of `--format json` and `yaml`."""
    return {
        "advice": advice.reason.code.value,
        "sentence": advice.reason.sentence,
        "stay": advice.stay,
        "can_stay": advice.can_stay,
        "cluster": {"before": _cluster(before), "after": _cluster(after)},
        "before": _plan(advice.before) if advice.before else None,
        "after": _plan(advice.after),
        "best": _plan(advice.best),
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
        out.print()
        out.print("Resulting placement:")
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


def _cluster(cluster: Cluster) -> dict[str, Any]:
    by_kind = {kind or "any": len(cluster.ranks(kind)) for kind in cluster.kinds}
    return {"nodes": len(cluster.nodes), "gpus": cluster.gpus, "gpus_by_kind": by_kind}


def _plan(plan: Plan) -> dict[str, Any]:
    return {"iteration_seconds": plan.iteration_seconds, "gpus": plan.gpus, "groups": groups_data(plan)}
