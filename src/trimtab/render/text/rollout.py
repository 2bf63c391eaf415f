"""What `trimtab rollout` shows: a pool's status as data for programs, and as text for people. Asks nobody.

`status_data` is the documented form (docs/rollout-doctor.md); everything printed is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trimtab.machines.diagnose.rollout_findings import RolloutFinding, Severity
from trimtab.render.output import out, plain_table
from trimtab.render.text.formatting import clock, facts, of, show, span, why

Data = Mapping[str, Any]
COLOURS = {
    "active": "green", "starting": "cyan", "draining": "yellow", "inactive": "dim", "stale": "yellow",
    "empty": "yellow", "suspect": "red", "lost": "red",
}  # fmt: skip
WEIGHT_COLOURS = {Severity.fault: "red", Severity.stuck: "yellow", Severity.note: "cyan"}
STEPS_SHOWN = 5
WARNINGS_SHOWN = 5
WARNED_S = 600.0  # older warnings are for --format json
WORKERS_SHOWN = 64
ENDS = ("stop", "length", "abort", "cancelled", "failed")


# ---- for programs ---------------------------------------------------------------------------------------------------


def status_data(status: Data, url: str, job: str) -> dict[str, Any]:
    """What `trimtab rollout status` answers: the pool's own words, and whom they are from."""
    return {**status, "gateway": {**status.get("gateway", {}), "url": url, "job": job or None}}


def story_data(name: str, told: Data, status: Data) -> dict[str, Any]:
    """What `trimtab rollout status NAME` answers. Times are seconds since 1970, by the gateway's clock."""
    story = [
        {
            "at": None if one.get("ago_s") is None else status["now"] - one["ago_s"],
            "state": one["state"],
            **one["reason"],
        }
        for one in told["chapters"]
    ]
    worker = next((one for one in status["workers"] if one["name"] == name), None)
    return {"name": name, "worker": worker, "story": story}


def finding_data(one: RolloutFinding) -> dict[str, Any]:
    """One finding of the doctor."""
    return {
        "cause": one.issue.value,
        "weight": one.severity.value,
        "who": list(one.affected),
        "sentence": one.sentence,
        "do": one.fix,
    }


def doctor_data(found: Sequence[RolloutFinding], of_what: str) -> dict[str, Any]:
    """What `trimtab rollout doctor` answers."""
    weights = {weight.value: sum(one.severity is weight for one in found) for weight in Severity}
    worst = next((weight.value for weight in Severity if weights[weight.value]), "healthy")
    return {"of": of_what, "health": worst, "counts": weights, "findings": [finding_data(one) for one in found]}


# ---- the status ------------------------------------------------------------------------------------------------------


def print_status(data: Data) -> None:
    """The whole picture; on a terminal folded, because reasons are long."""
    if out.is_terminal:
        Console(highlight=False).print(picture(data))
    else:
        show(picture(data))


def picture(data: Data, hints: Sequence[str] = ()) -> RenderableType:
    """Where it is, its load, workers, queues, the last steps, what was warned of."""
    parts: list[RenderableType] = [_facts(data), "", workers_table(data["workers"])]
    if len(data["workers"]) > WORKERS_SHOWN:
        parts.append(f"and {len(data['workers']) - WORKERS_SHOWN} more: --format json has all")
    waiting = [one for one in data["queue"] if one["waiting"]]
    if waiting:
        parts += ["", _queue_table(waiting)]
    if data["steps"]:
        parts += ["", _steps_table(data["steps"][-STEPS_SHOWN:], data["now"])]
    warned = [one for one in data["warnings"] if one["ago_s"] <= WARNED_S][-WARNINGS_SHOWN:]
    if warned:
        parts += ["", *(Text.from_markup(f"[yellow]warning:[/] {escape(_warning(one))}") for one in warned)]
    failed = [one for one in data.get("background", ()) if one["failures"]]
    if failed:
        parts += ["", *(Text.from_markup(f"[red]background:[/] {escape(_failed_loop(one))}") for one in failed)]
    if hints:
        parts += ["", *(Text(line, style="dim") for line in hints)]
    return Group(*parts)


def _failed_loop(one: Data) -> str:
    times = "once" if one["failures"] == 1 else f"{one['failures']} times"
    return f"{one['name']} failed {times} and is {one['state']}: {one['last_error']}"


def _facts(data: Data) -> Table:
    table = plain_table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    gateway = data["gateway"]
    rows = [
        ("gateway", gateway["url"] + (f" ({gateway['job']})" if gateway["job"] else "")),
        ("load", _load(data)),
        ("scaling", _scaling(data)),
        ("weights", _weights(data)),
        ("answers", _answers(data["counters"])),
    ]
    for word, sentence in rows:
        table.add_row(word, escape(sentence))
    return table


def _load(data: Data) -> str:
    load, metrics = data["load"], data["metrics"]
    words = ", ".join(f"{load[word]} {word}" for word in ("queued", "running", "draining"))
    stale = "" if load["fresh"] else "; some engine's own figures are old"
    return f"{metrics['load_ratio']:.2f} of capacity {metrics['total_capacity']:g} ({words}){stale}"


def _scaling(data: Data) -> str:
    scaling, elastic = data["scaling"], data["elastic"]
    said = f"{elastic['policy']}, {data['range']['least']} to {of(data['range']['most'], 'worker')}"
    if scaling["by_hand"] is not None:
        by_hand = scaling["by_hand"]
        left = f" for {span(by_hand['left_s'])} more" if by_hand.get("left_s") is not None else " until released"
        return f"{said}; set by hand to {by_hand['workers']}{left}: {by_hand['why']}"
    if scaling["holds"]:
        said += "; held ready: " + ", ".join(f"{count} by {name}" for name, count in scaling["holds"].items())
    decision = scaling["decision"]
    return said if decision is None else f"{said}; {decision['reason']['code']}: {decision['reason']['sentence']}"


def _weights(data: Data) -> str:
    version, workers = data["version"], data["workers"]
    current = sum(one["version"] == version for one in workers)
    frozen = (data.get("membership") or {}).get("frozen")
    return f"version {version}, confirmed on {current} of {len(workers)}" + ("; a refit is under way" if frozen else "")


def _answers(counters: Data) -> str:
    ends = {end: counters.get(f"answered_{end}", 0) for end in ENDS}
    parts = [f"{count} {end}" for end, count in ends.items() if count]
    parts += [f"{counters[word]} {word}" for word in ("moved", "restarted", "refused") if counters.get(word)]
    return ", ".join(parts) or "none yet"


def workers_table(workers: Sequence[Data]) -> Table:
    """A row for each worker."""
    table = plain_table()
    for heading in ("worker", "engine", "state", "since", "version", "running", "tokens", "served", "why"):
        right = heading in ("since", "version", "running", "tokens", "served")
        table.add_column(
            heading, justify="right" if right else "left", overflow="fold" if heading == "why" else "ellipsis"
        )
    for one in workers[:WORKERS_SHOWN]:
        table.add_row(
            escape(one["name"]),
            escape(one["kind"] or "-"),
            f"[{COLOURS.get(one['state'], 'default')}]{state_words(one)}[/]",
            span(round(one["since_s"], 1)),
            "-" if one["version"] is None else str(one["version"]),
            f"{one['running']}/{one['limit']}",
            str(one["outstanding_tokens"]),
            str(one["served"]),
            _first_line(one["reason"]),
        )
    return table


def state_words(worker: Data) -> str:
    """Its state, and what is being done to it."""
    more = [word for word in ("paused", "asleep") if worker.get(word)]
    if worker.get("doing"):
        more.append(str(worker["doing"]))
    return f"{worker['state']} ({', '.join(more)})" if more else str(worker["state"])


def _queue_table(waiting: Sequence[Data]) -> Table:
    table = plain_table()
    for heading in ("class", "priority", "waits", "limit", "longest", "why"):
        table.add_column(heading, justify="left" if heading in ("class", "why") else "right")
    for one in waiting:
        reason = _first_line(one["reason"]) if one["reason"] else ""
        table.add_row(
            escape(one["class"]), str(one["priority"]), str(one["waiting"]), str(one["limit"]),
            span(one["oldest_s"]), reason,
        )  # fmt: skip
    return table


def _steps_table(steps: Sequence[Data], now: float) -> Table:
    table = plain_table()
    for heading in ("when", "workers", "why", "expected", "came true"):
        table.add_column(heading, overflow="fold" if heading in ("why", "expected") else "ellipsis")
    verdicts = {None: "not known yet", True: "yes", False: "[red]no[/]"}
    for one in steps:
        table.add_row(
            clock(now - one["ago_s"]),
            f"{one['before']} to {one['workers']}",
            why(one["reason"]),
            escape(one.get("expects", "")),
            verdicts[one.get("came_true")],
        )
    return table


def _first_line(reason: Data) -> str:
    """A reason in one line; what an engine said at its end is in its story."""
    first, *more = why(reason).splitlines() or [""]
    return first + (" ..." if more else "")


def _warning(one: Data) -> str:
    who = f"{one['worker']}: " if one["worker"] else ""
    return f"{who}{one['sentence'].splitlines()[0]} ({span(one['ago_s'])} ago)"


# ---- what changed ----------------------------------------------------------------------------------------------------


def change_lines(before: Data | None, now: Data) -> list[str]:
    """What became different, a line each: for where there is no screen to redraw."""
    at = clock(now["now"])
    old = {one["name"]: one["state"] for one in before["workers"]} if before else {}
    lines = [
        f"{at} {one['name']} {one['state']}: {one['reason']['sentence'].splitlines()[0]}"
        for one in now["workers"]
        if old.get(one["name"]) != one["state"]
    ]
    lines += [f"{at} {name} is gone" for name in old if name not in {one["name"] for one in now["workers"]}]
    told = {(one["at"], one["workers"]) for one in before["steps"]} if before else set()
    lines += [f"{at} {_step(one)}" for one in now["steps"] if (one["at"], one["workers"]) not in told]
    if before is not None and before["version"] != now["version"]:
        lines.append(f"{at} weights are version {now['version']}")
    return lines


def _step(one: Data) -> str:
    said = f"{one['before']} to {of(one['workers'], 'worker')}: {one['reason']['sentence']}"
    return said + (f"; expects {one['expects']}" if one.get("expects") else "")


def print_story(data: Data) -> None:
    """One worker or request: how it is, and its story."""
    worker = data["worker"]
    if worker is not None:
        out.print(f"[bold]{escape(worker['name'])}[/] is {state_words(worker)} for {span(round(worker['since_s'], 1))}")
        rows = [("why", f"{worker['reason']['code']}: {worker['reason']['sentence']}")]
        if worker["url"]:
            rows.append(("engine", f"{worker['dialect'] or worker['kind']} at {worker['url']}"))
        if worker["deadline_s"] is not None:
            rows.append(("deadline", f"in {span(worker['deadline_s'])}" if worker["deadline_s"] > 0 else "now"))
        rows.append(("load", f"{worker['running']} of {of(worker['limit'], 'request')}, {worker['served']} served"))
        rows.append(("weights", "nobody vouches for them" if worker["version"] is None else str(worker["version"])))
        rows += [(word, worker[word]) for word in ("note", "unwell", "node") if worker.get(word)]
        facts(*rows)
        out.print()
    table = plain_table()
    for heading in ("when", "state", "why"):
        table.add_column(heading, overflow="fold" if heading == "why" else "ellipsis")
    for one in data["story"]:
        table.add_row("" if one["at"] is None else clock(one["at"]), one["state"], why(one))
    show(table)


# ---- single answers --------------------------------------------------------------------------------------------------


def print_scaled(data: Data) -> None:
    """What a number set by hand did."""
    out.print(f"scaling: {_scaling(data)}", markup=False)


def print_worker(worker: Data, verb: str) -> None:
    """A worker after it was drained or resumed."""
    late = worker.get("deadline_s")
    until = f", for at most {span(late)}" if verb == "drains" and late is not None and worker["running"] else ""
    runs = f"; {of(worker['running'], 'request')} of its own go on{until}" if worker["running"] else ""
    out.print(f"{worker['name']} {verb}: {state_words(worker)}{runs}", markup=False)
    out.print(f"  {worker['reason']['code']}: {worker['reason']['sentence']}", markup=False)


# ---- the doctor ------------------------------------------------------------------------------------------------------


def print_findings(found: Sequence[RolloutFinding], of_what: str) -> None:
    """What was found, the worst first, each with what to do."""
    if not found:
        out.print(f"{of_what}: nothing to find fault with", markup=False)
        return
    counts = [f"{sum(one.severity is weight for one in found)} {weight.value}" for weight in Severity]
    out.print(f"{of_what}: {', '.join(words for words in counts if not words.startswith('0 '))}", markup=False)
    for one in found:
        out.print()
        colour = WEIGHT_COLOURS[one.severity]
        said = escape(one.sentence).replace("\n", "\n  ")
        out.print(f"[{colour}]{one.severity.value}[/] [bold]{one.issue.value}[/]  {said}")
        out.print(f"  do: {one.fix}", markup=False)
