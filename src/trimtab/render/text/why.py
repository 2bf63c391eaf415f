"""Waits and their causes for people, as text, and for programs, as data. Asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trimtab.core.resources import amount_text, total
from trimtab.machines.diagnose.findings import UNDER_WAY, Diagnosis, Finding, NodeFit
from trimtab.machines.diagnose.snapshot import GcsSnapshot, NodeSnapshot, PendingWorkload, ResourceRequest, WorkloadKind
from trimtab.machines.diagnose.would_fit import WouldFit
from trimtab.render.output import plain_table
from trimtab.render.text.formatting import show, span

NODES_SHOWN = 8
NAMES_SHOWN = 4
MARGIN = 6  # two more are between columns


# ---- for programs ---------------------------------------------------------------------------------------------------


def as_data(snapshot: GcsSnapshot, found: Diagnosis) -> dict[str, Any]:
    """What `trimtab why` answers. Times are seconds since 1970; amounts are as Ray counts them, memory in bytes."""
    return {
        "status": "never" if found.never else "waits" if found.waits else "nothing waits",
        "waits": found.waits,
        "never": found.never,
        "address": snapshot.address,
        "at": snapshot.at,
        "findings": [finding_data(snapshot, one) for one in found.findings],
        "notes": [{"code": one.kind.value, "sentence": one.sentence} for one in found.notes],
        "nodes": [_node_data(one) for one in snapshot.nodes],
    }


def finding_data(snapshot: GcsSnapshot, one: Finding) -> dict[str, Any]:
    """One cause with all that belongs to it."""
    return {
        "cause": one.cause.value,
        "never": one.never,
        "sentence": one.sentence,
        "count": one.count,
        "since": one.since,
        "waits_s": None if one.since is None else max(0.0, snapshot.at - one.since),
        "who": [_waiting_data(snapshot, each) for each in one.workloads],
        "followers": [_waiting_data(snapshot, each) for each in one.followers],
        "asked": one.asked.floats(),
        "nodes": [_row_data(row) for row in one.rows],
        "helps": list(one.remedies),
        "blockers": list(one.blockers),
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
                "components": one.group.name,
                "gpus": one.group.gpus,
                "gpus_on_one_node": one.group.block,
                "fits_now": one.now,
                "fits_ever": one.ever,
                "nodes": list(one.nodes),
                "lacks_now": one.lacks_now.floats(),
                "lacks_ever": one.lacks_ever.floats(),
            }
            for one in found.groups
        ],
        "finding": None if found.finding is None else finding_data(snapshot, found.finding),
        "notes": list(found.notes),
    }


def _waiting_data(snapshot: GcsSnapshot, one: PendingWorkload) -> dict[str, Any]:
    job = snapshot.job(one.job)
    return {
        "id": one.id,
        "kind": one.kind.value,
        "name": one.name,
        "class": one.class_name if one.kind is WorkloadKind.actor else None,
        "stage": one.stage.value,
        "since": one.since,
        "since_is": "unknown" if one.since is None else "first seen" if one.at_least else "told by Ray",
        "count": one.count,
        "asks": [_ask_data(request) for request in one.requests],
        "strategy": one.strategy.value if one.kind is WorkloadKind.group else None,
        "group": one.group,
        "bundle": one.bundle,
        "pinned": one.pinned,
        "job": {"id": one.job, "command": job.command, "pid": job.pid, "address": job.address} if job else None,
    }


def _ask_data(request: ResourceRequest) -> dict[str, Any]:
    labels = [[str(one) for one in each] for each in request.labels]
    return {"amounts": request.amounts.floats(), "labels": labels, "node": request.node}


def _row_data(row: NodeFit) -> dict[str, Any]:
    return {
        "node": row.node,
        "free": row.free.floats(),
        "total": row.total.floats(),
        "lacks": row.lacks.floats(),
        "lacks_when_empty": row.lacks_empty.floats(),
        "note": row.note,
    }


def _node_data(one: NodeSnapshot) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "address": one.address,
        "head": one.head,
        "total": one.total.floats(),
        "free": one.free.floats(),
        "labels": dict(one.labels),
        "draining": None if one.drain is None else {"deadline": one.drain.deadline, "cause": one.drain.cause},
    }


# ---- for people -----------------------------------------------------------------------------------------------------


def print_why(snapshot: GcsSnapshot, found: Diagnosis) -> None:
    """The causes, worst first."""
    show(picture(snapshot, found))


def picture(snapshot: GcsSnapshot, found: Diagnosis) -> RenderableType:
    """The same, to be shown once or again and again."""
    parts: list[RenderableType] = [_headline(snapshot, found)]
    jobs = {each.job for one in found.findings for each in one.workloads}
    for one in found.findings:
        parts += [Text(), _finding(snapshot, one)]
        if len(jobs) > 1:
            parts += _asked_by(snapshot, one.workloads[0].job, MARGIN + 2)
    if found.notes:
        parts.append(Text())
        parts += [_line(f"[dim]note[/]    {escape(one.sentence)}") for one in found.notes]
    if len(jobs) == 1:
        parts += [Text(), *_asked_by(snapshot, jobs.pop())]
    return Group(*parts)


def print_would_fit(snapshot: GcsSnapshot, job: str, plan: str, found: WouldFit) -> None:
    """Whether a plan would find its room."""
    if found.now:
        verdict = "[bold green]fits now[/]"
    elif found.ever:
        verdict = "[bold yellow]would fit, but not now[/]"
    else:
        verdict = "[bold red]never fits[/] on the nodes that are here and stay"
    parts: list[RenderableType] = [_line(f"[bold]{escape(job)}[/] {verdict}"), _line(f"[dim]plan: {escape(plan)}[/]")]
    table = plain_table()
    for heading in ("group", "asks", "now", "nodes empty"):
        table.add_column(heading)
    for one in found.groups:
        requests = (
            f"{one.group.gpus} gpu"
            if one.group.gpus
            else str(total([request.amounts for request in one.group.requests]))
        )
        if one.group.block > 1:
            requests += f", {one.group.block} of them on one node"
        now = f"fits on {_names(one.nodes)}" if one.now else f"lacks {one.lacks_now}"
        table.add_row(escape(one.group.name), requests, escape(now), "fits" if one.ever else f"lacks {one.lacks_ever}")
    parts += [Text(), table]
    if found.finding is not None:
        parts += [Text(), _finding(snapshot, found.finding, heading=False)]
    parts += [_line(f"[dim]note[/]    {escape(one)}") for one in found.notes]
    show(Group(*parts))


def _headline(snapshot: GcsSnapshot, found: Diagnosis) -> Text:
    nodes = f"{len(snapshot.nodes)} nodes" if len(snapshot.nodes) != 1 else "1 node"
    where = f"[dim]({escape(snapshot.address)}, {nodes})[/]"
    if not found.waits:
        return _line(f"[bold green]Nothing waits.[/] {where}")
    soon = sum(one.count for one in found.findings if one.cause in UNDER_WAY)
    said = [f"[bold]{found.waits} wait{'s' if found.waits == 1 else ''}[/]"]
    if found.never:
        said.append(f"[bold red]{found.never} can never start as things are[/]")
    if soon:
        said.append(f"{soon} under way")
    return _line(f"{', '.join(said)} {where}")


def _finding(snapshot: GcsSnapshot, one: Finding, *, heading: bool = True) -> RenderableType:
    """A word in the margin, and beside it who waits, why, node by node, and what helps."""
    word, colour = ("WAITS", "yellow")
    if one.never:
        word, colour = ("NEVER", "red")
    elif one.cause in UNDER_WAY:
        word, colour = ("STARTS", "green")
    parts: list[RenderableType] = []
    if heading:
        parts.append(_line(f"[bold]{escape(_who(one))}[/]{_since(snapshot, one)}"))
    parts += [_line(f"[bold]{one.cause.value}[/]: {escape(one.sentence)}"), *_nodes(one)]
    helps = Table.grid(padding=(0, 2, 0, 0))
    helps.add_column(style="dim", justify="right")
    for number, way in enumerate(one.remedies):
        helps.add_row("or" if number else "helps", escape(way))
    if one.followers:
        helps.add_row("behind it", escape(_names([each.name for each in one.followers])))
    if helps.rows:
        parts.append(helps)
    margin = Table.grid(padding=(0, 2, 0, 0))
    margin.add_column(width=MARGIN)
    margin.add_row(f"[bold {colour}]{word}[/]" if heading else "", Group(*parts))
    return margin


def _asked_by(snapshot: GcsSnapshot, id: str, margin: int = 0) -> list[RenderableType]:
    job = snapshot.job(id)
    if job is None or not job.command:
        return []
    by = f"asked by {job.command} (process {job.pid} on {job.address})"
    return [_line(" " * margin + f"[dim]{escape(by)}[/]")]


def _who(one: Finding) -> str:
    """All of them; two that block each other side by side."""
    sides: dict[tuple[WorkloadKind, str, str], list[PendingWorkload]] = {}
    for each in one.workloads:
        sides.setdefault((each.kind, each.job, each.class_name), []).append(each)
    return " and ".join(_alike(each) for each in sides.values())


def _alike(who: Sequence[PendingWorkload]) -> str:
    first = who[0]
    number = sum(each.count for each in who)
    sort = {
        WorkloadKind.group: "placement group",
        WorkloadKind.actor: "actor",
        WorkloadKind.task: "task",
        WorkloadKind.plan: "job",
    }[first.kind]
    names = list(dict.fromkeys(each.name or each.id[:12] for each in who))
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


def _since(snapshot: GcsSnapshot, one: Finding) -> str:
    if one.since is None:
        return " [dim]since an unknown time[/]"
    at_least = "at least " if any(each.at_least for each in one.workloads) else ""
    return f" [dim]for {at_least}{span(snapshot.at - one.since)}[/]"


def _nodes(one: Finding) -> list[RenderableType]:
    """A line for each node that has something of what is asked; the others are counted."""
    if not one.asked or not one.rows:
        return []
    none = [row for row in one.rows if any(not row.total.get(name) for name, _ in one.asked)]
    some = [row for row in one.rows if row not in none]
    parts: list[RenderableType] = []
    if some:
        table = plain_table(header_style="dim")
        for heading in ("node", "free", "lacks now", ""):
            table.add_column(heading, no_wrap=heading == "node")
        for row in some[:NODES_SHOWN]:
            table.add_row(*(escape(word) for word in _row(one, row)))
        parts.append(table)
    if len(some) > NODES_SHOWN:
        parts.append(_line(f"[dim]and {len(some) - NODES_SHOWN} nodes more: --format json has all[/]"))
    if some and none:
        missing = " or ".join(dict.fromkeys(n for row in none for n, _ in one.asked if not row.total.get(n)))
        has = "node has" if len(none) == 1 else "nodes have"
        parts.append(_line(f"[dim]{len(none)} other {has} no {escape(missing)}[/]"))
    return parts


def _row(one: Finding, row: NodeFit) -> tuple[str, str, str, str]:
    free = [f"{_number(name, row.free.get(name))} of {amount_text(name, row.total.get(name))}" for name, _ in one.asked]
    notes = [row.note] if row.note else []
    if row.lacks_empty:
        notes.insert(0, f"{row.lacks_empty} even when empty" if row.lacks != row.lacks_empty else "even when empty")
    return row.node, ", ".join(free), str(row.lacks) if row.lacks else "-", "; ".join(notes)


def _number(name: str, units: int) -> str:
    return amount_text(name, units).removesuffix(f" {name}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else shown


def _line(markup: str) -> Text:
    return Text.from_markup(markup)
