"""Waiting workloads and their causes, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.core.resources import amount_text, total
from trimtab.machines.diagnose.findings import UNDER_WAY, Diagnosis, Finding, NodeFit
from trimtab.machines.diagnose.snapshot import GcsSnapshot, NodeSnapshot, PendingWorkload, WorkloadKind
from trimtab.machines.diagnose.would_fit import WouldFit
from trimtab.render.output import clock, picked, show, span, text_lines, text_table

NODES_SHOWN = 8
NAMES_SHOWN = 4
_line = Text.from_markup
MARGIN = 6  # without the 2 characters between columns


# ---- data -----------------------------------------------------------------------------------------------------------


def as_data(snapshot: GcsSnapshot, found: Diagnosis) -> dict[str, Any]:
    """The data of `trimtab why`. Times are seconds since 1970; amounts are Ray's, memory in bytes."""
    return {
        "status": "never" if found.never else "waits" if found.waits else "nothing waits",
        "waits": found.waits,
        "never": found.never,
        "address": snapshot.address,
        "at": snapshot.at,
        "findings": [finding_data(snapshot, finding) for finding in found.findings],
        "notes": [{"code": note.kind.value, "sentence": note.sentence} for note in found.notes],
        "nodes": [_node_data(node) for node in snapshot.nodes],
    }


def finding_data(snapshot: GcsSnapshot, finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause.value,
        **picked(finding, "never", "sentence", "count", "since"),
        "waits_s": None if finding.since is None else max(0.0, snapshot.at - finding.since),
        "who": [_waiting_data(snapshot, workload) for workload in finding.workloads],
        "followers": [_waiting_data(snapshot, workload) for workload in finding.followers],
        "asked": finding.asked.floats(),
        "nodes": [_row_data(row) for row in finding.rows],
        "helps": list(finding.remedies),
        "blockers": list(finding.blockers),
    }


def would_fit_data(snapshot: GcsSnapshot, job: str, plan: str, found: WouldFit) -> dict[str, Any]:
    """What `trimtab why --would-fit` answers."""
    return {
        "job": job,
        "plan": plan,
        "fits_now": found.now,
        "fits_ever": found.ever,
        "address": snapshot.address,
        "at": snapshot.at,
        "groups": [
            {
                "components": group_fit.group.name,
                "gpus": group_fit.group.gpus,
                "gpus_on_one_node": group_fit.group.block,
                "fits_now": group_fit.now,
                "fits_ever": group_fit.ever,
                "nodes": list(group_fit.nodes),
                "lacks_now": group_fit.lacks_now.floats(),
                "lacks_ever": group_fit.lacks_ever.floats(),
            }
            for group_fit in found.groups
        ],
        "finding": None if found.finding is None else finding_data(snapshot, found.finding),
        "notes": list(found.notes),
    }


def _waiting_data(snapshot: GcsSnapshot, workload: PendingWorkload) -> dict[str, Any]:
    job = snapshot.job(workload.job)
    return {
        "id": workload.id,
        "kind": workload.kind.value,
        "name": workload.name,
        "class": workload.class_name if workload.kind is WorkloadKind.actor else None,
        "stage": workload.stage.value,
        "since": workload.since,
        "since_is": "unknown" if workload.since is None else "first seen" if workload.at_least else "told by Ray",
        "count": workload.count,
        "asks": [
            {
                "amounts": request.amounts.floats(),
                "labels": [[str(label) for label in selector] for selector in request.labels],
                "node": request.node,
            }
            for request in workload.requests
        ],
        "strategy": workload.strategy.value if workload.kind is WorkloadKind.group else None,
        **picked(workload, "group", "bundle", "pinned"),
        "job": {"id": workload.job, **picked(job, "command", "pid", "address")} if job else None,
    }


def _row_data(row: NodeFit) -> dict[str, Any]:
    return {
        "node": row.node,
        "free": row.free.floats(),
        "total": row.total.floats(),
        "lacks": row.lacks.floats(),
        "lacks_when_empty": row.lacks_empty.floats(),
        "note": row.note,
    }


def _node_data(node: NodeSnapshot) -> dict[str, Any]:
    return {
        **picked(node, "id", "name", "address", "head"),
        "total": node.total.floats(),
        "free": node.free.floats(),
        "labels": dict(node.labels),
        "draining": None if node.drain is None else picked(node.drain, "deadline", "cause"),
    }


# ---- text -----------------------------------------------------------------------------------------------------------


def print_why(snapshot: GcsSnapshot, found: Diagnosis) -> None:
    show(picture(snapshot, found))


def picture(snapshot: GcsSnapshot, found: Diagnosis) -> RenderableType:
    """The causes, worst first, as a renderable."""
    parts: list[RenderableType] = [_headline(snapshot, found)]
    jobs = {workload.job for finding in found.findings for workload in finding.workloads}
    for finding in found.findings:
        parts += [Text(), _finding(snapshot, finding)]
        if len(jobs) > 1:
            parts += _requested_by(snapshot, finding.workloads[0].job, MARGIN + 2)
    if found.notes:
        parts.append(Text())
        parts += [_line(f"[dim]note[/]    {escape(note.sentence)}") for note in found.notes]
    if len(jobs) == 1:
        parts += [Text(), *_requested_by(snapshot, jobs.pop())]
    return Group(*parts)


def live_picture(snapshot: GcsSnapshot, found: Diagnosis, every_s: float) -> RenderableType:
    line = Text(f"\n{clock(snapshot.at)}, every {every_s:g} s; Ctrl-C ends", style="dim")
    return Group(picture(snapshot, found), line)


def change_lines(before: tuple[GcsSnapshot, Diagnosis] | None, now: tuple[GcsSnapshot, Diagnosis]) -> list[str]:
    """The causes whenever they change, for output that is not a terminal."""
    if before is not None and _gist(before[1]) == _gist(now[1]):
        return []
    return [f"-- {clock(now[0].at)}", *text_lines(picture(*now))]


def _gist(found: Diagnosis) -> list[Any]:
    return [(f.cause, f.never, f.count, [each.id for each in f.workloads]) for f in found.findings]


def print_would_fit(snapshot: GcsSnapshot, job: str, plan: str, found: WouldFit) -> None:
    if found.now:
        verdict = "[bold green]fits now[/]"
    elif found.ever:
        verdict = "[bold yellow]would fit, but not now[/]"
    else:
        verdict = "[bold red]never fits[/] on the nodes that are not draining"
    parts: list[RenderableType] = [_line(f"[bold]{escape(job)}[/] {verdict}"), _line(f"[dim]plan: {escape(plan)}[/]")]
    rows = []
    for group_fit in found.groups:
        group = group_fit.group
        requests = f"{group.gpus} gpu" if group.gpus else str(total([request.amounts for request in group.requests]))
        if group.block > 1:
            requests += f", {group.block} of them on one node"
        now = f"fits on {_names(group_fit.nodes)}" if group_fit.now else f"lacks {group_fit.lacks_now}"
        rows.append((group.name, requests, now, "fits" if group_fit.ever else f"lacks {group_fit.lacks_ever}"))
    table = text_table(("group", "asks", "now", "nodes empty"), rows)
    parts += [Text(), table]
    if found.finding is not None:
        parts += [Text(), _finding(snapshot, found.finding, heading=False)]
    parts += [_line(f"[dim]note[/]    {escape(note)}") for note in found.notes]
    show(Group(*parts))


def _headline(snapshot: GcsSnapshot, found: Diagnosis) -> Text:
    nodes = f"{len(snapshot.nodes)} nodes" if len(snapshot.nodes) != 1 else "1 node"
    where = f"[dim]({escape(snapshot.address)}, {nodes})[/]"
    if not found.waits:
        return _line(f"[bold green]Nothing waits.[/] {where}")
    soon = sum(finding.count for finding in found.findings if finding.cause in UNDER_WAY)
    parts = [f"[bold]{found.waits} wait{'s' if found.waits == 1 else ''}[/]"]
    if found.never:
        parts.append(f"[bold red]{found.never} can never start on this cluster[/]")
    if soon:
        parts.append(f"{soon} starting")
    return _line(f"{', '.join(parts)} {where}")


def _finding(snapshot: GcsSnapshot, finding: Finding, *, heading: bool = True) -> RenderableType:
    """A word in the margin; beside it what waits, why, node by node, and what helps."""
    word, colour = ("WAITS", "yellow")
    if finding.never:
        word, colour = ("NEVER", "red")
    elif finding.cause in UNDER_WAY:
        word, colour = ("STARTS", "green")
    parts: list[RenderableType] = []
    if heading:
        parts.append(_line(f"[bold]{escape(_who(finding))}[/]{_since(snapshot, finding)}"))
    parts += [_line(f"[bold]{finding.cause.value}[/]: {escape(finding.sentence)}"), *_nodes(finding)]
    helps = Table.grid(padding=(0, 2, 0, 0))
    helps.add_column(style="dim", justify="right")
    for number, way in enumerate(finding.remedies):
        helps.add_row("or" if number else "helps", escape(way))
    if finding.followers:
        helps.add_row("behind it", escape(_names([workload.name for workload in finding.followers])))
    if helps.rows:
        parts.append(helps)
    margin = Table.grid(padding=(0, 2, 0, 0))
    margin.add_column(width=MARGIN)
    margin.add_row(f"[bold {colour}]{word}[/]" if heading else "", Group(*parts))
    return margin


def _requested_by(snapshot: GcsSnapshot, id: str, margin: int = 0) -> list[RenderableType]:
    job = snapshot.job(id)
    if job is None or not job.command:
        return []
    by = f"requested by {job.command} (process {job.pid} on {job.address})"
    return [_line(" " * margin + f"[dim]{escape(by)}[/]")]


def _who(finding: Finding) -> str:
    """The waiting workloads; two that block each other side by side."""
    sides: dict[tuple[WorkloadKind, str, str], list[PendingWorkload]] = {}
    for workload in finding.workloads:
        sides.setdefault((workload.kind, workload.job, workload.class_name), []).append(workload)
    return " and ".join(_alike(alike) for alike in sides.values())


def _alike(who: Sequence[PendingWorkload]) -> str:
    first = who[0]
    number = sum(workload.count for workload in who)
    sort = {
        WorkloadKind.group: "placement group",
        WorkloadKind.actor: "actor",
        WorkloadKind.task: "task",
        WorkloadKind.plan: "job",
    }[first.kind]
    names = list(dict.fromkeys(workload.name or workload.id[:12] for workload in who))
    if number == 1:
        text = f"{sort} {names[0]}"
        if first.kind is WorkloadKind.actor and first.class_name != first.name:
            text += f" ({first.class_name})"
    else:
        text = f"{number} {sort}s {_names(names)}"
    if first.kind is WorkloadKind.group:
        bundles = len(first.requests)
        text += f" ({'1 bundle' if bundles == 1 else f'{bundles} bundles, {first.strategy.value}'})"
    elif first.requests and first.requests[0].amounts:
        text += f", {first.requests[0].amounts}" + (" each" if number > 1 else "")
    return text


def _since(snapshot: GcsSnapshot, finding: Finding) -> str:
    if finding.since is None:
        return " [dim]for an unknown time[/]"
    at_least = "at least " if any(workload.at_least for workload in finding.workloads) else ""
    return f" [dim]for {at_least}{span(snapshot.at - finding.since)}[/]"


def _nodes(finding: Finding) -> list[RenderableType]:
    """A row per node that has some of what is requested; the others are counted."""
    if not finding.asked or not finding.rows:
        return []
    none = [row for row in finding.rows if any(not row.total.get(name) for name, _ in finding.asked)]
    shown = [row for row in finding.rows if row not in none]
    parts: list[RenderableType] = []
    if shown:
        heads = (Column("node", no_wrap=True), "free", "lacks now", "")
        rows = (_row(finding, row) for row in shown[:NODES_SHOWN])
        parts.append(text_table(heads, rows, header_style="dim"))
    if len(shown) > NODES_SHOWN:
        parts.append(_line(f"[dim]and {len(shown) - NODES_SHOWN} nodes more: --format json has all[/]"))
    if shown and none:
        missing = " or ".join(dict.fromkeys(n for row in none for n, _ in finding.asked if not row.total.get(n)))
        has = "node has" if len(none) == 1 else "nodes have"
        parts.append(_line(f"[dim]{len(none)} other {has} no {escape(missing)}[/]"))
    return parts


def _row(finding: Finding, row: NodeFit) -> tuple[str, str, str, str]:
    free = [
        f"{amount_text(name, row.free.get(name)).removesuffix(f' {name}')} of {amount_text(name, row.total.get(name))}"
        for name, _ in finding.asked
    ]
    notes = [row.note] if row.note else []
    if row.lacks_empty:
        notes.insert(0, f"{row.lacks_empty} even when empty" if row.lacks != row.lacks_empty else "even when empty")
    return row.node, ", ".join(free), str(row.lacks) if row.lacks else "-", "; ".join(notes)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else shown
