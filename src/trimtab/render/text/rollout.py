"""The output of `trimtab engine`: a pool's status as data and as text.

`status_data` is the documented form (docs/guides/rollout-doctor.md); all text is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.machines.diagnose.rollout_findings import RolloutFinding, Severity
from trimtab.render.html.kit.labels import counted
from trimtab.render.output import clock, facts, facts_table, out, reason_text, show, span, text_table

Data = Mapping[str, Any]
COLOURS = {
    "active": "green", "starting": "cyan", "draining": "yellow", "inactive": "dim", "stale": "yellow",
    "empty": "yellow", "suspect": "red", "lost": "red",
}  # fmt: skip
WEIGHT_COLOURS = {Severity.fault: "red", Severity.stuck: "yellow", Severity.note: "cyan"}
WHY = Column("why", overflow="fold")
STEPS_SHOWN = 5
WARNINGS_SHOWN = 5
WARNED_S = 600.0  # older warnings are shown by --format json only
WORKERS_SHOWN = 64
ENDS = ("stop", "length", "abort", "cancelled", "failed")


# ---- data -----------------------------------------------------------------------------------------------------------


def status_data(status: Data, url: str, job: str) -> dict[str, Any]:
    """The data of `trimtab engine list`: the pool's status and its gateway."""
    return {**status, "gateway": {**status.get("gateway", {}), "url": url, "job": job or None}}


def story_data(name: str, answer: Data, status: Data) -> dict[str, Any]:
    """The data of `trimtab engine show NAME`. Times are seconds since 1970 on the gateway's clock."""
    story = [
        {
            "at": None if chapter.get("ago_s") is None else status["now"] - chapter["ago_s"],
            "state": chapter["state"],
            **chapter["reason"],
        }
        for chapter in answer["chapters"]
    ]
    worker = next((worker for worker in status["workers"] if worker["name"] == name), None)
    return {"name": name, "worker": worker, "story": story}


def finding_data(finding: RolloutFinding) -> dict[str, Any]:
    return {
        "cause": finding.issue.value,
        "weight": finding.severity.value,
        "who": list(finding.affected),
        "sentence": finding.sentence,
        "do": finding.fix,
    }


def doctor_data(found: Sequence[RolloutFinding], of_what: str) -> dict[str, Any]:
    weights = {weight.value: sum(finding.severity is weight for finding in found) for weight in Severity}
    worst = next((weight.value for weight in Severity if weights[weight.value]), "healthy")
    return {"of": of_what, "health": worst, "counts": weights, "findings": [finding_data(finding) for finding in found]}


# ---- the status ------------------------------------------------------------------------------------------------------


def print_status(data: Data) -> None:
    """Print the status; on a terminal folded, because reasons are long."""
    if out.is_terminal:
        Console(highlight=False).print(picture(data))
    else:
        show(picture(data))


def picture(data: Data, hints: Sequence[str] = ()) -> RenderableType:
    """Gateway, load, workers, queues, last scaling steps and recent warnings as a renderable."""
    parts: list[RenderableType] = [_facts(data), "", workers_table(data["workers"])]
    if len(data["workers"]) > WORKERS_SHOWN:
        parts.append(f"and {len(data['workers']) - WORKERS_SHOWN} more: --format json has all")
    waiting = [queue for queue in data["queue"] if queue["waiting"]]
    if waiting:
        parts += ["", _queue_table(waiting)]
    if data["steps"]:
        parts += ["", _steps_table(data["steps"][-STEPS_SHOWN:], data["now"])]
    warned = [warning for warning in data["warnings"] if warning["ago_s"] <= WARNED_S][-WARNINGS_SHOWN:]
    if warned:
        parts += ["", *(Text.from_markup(f"[yellow]warning:[/] {escape(_warning(warning))}") for warning in warned)]
    for remark in data.get("remarks", ()):
        sentence = f"{', '.join(remark['workers'])} {remark['sentence']}"
        parts += ["", Text.from_markup(f"[dim]weights:[/] {escape(sentence)}")]
    failed = [loop for loop in data.get("background", ()) if loop["failures"]]
    if failed:
        parts += ["", *(Text.from_markup(f"[red]background:[/] {escape(_failed_loop(loop))}") for loop in failed)]
    if hints:
        parts += ["", *(Text(line, style="dim") for line in hints)]
    return Group(*parts)


def _failed_loop(loop: Data) -> str:
    times = "once" if loop["failures"] == 1 else f"{loop['failures']} times"
    return f"{loop['name']} failed {times} and is {loop['state']}: {loop['last_error']}"


def _facts(data: Data) -> Table:
    gateway = data["gateway"]
    return facts_table(
        (
            ("gateway", gateway["url"] + (f" ({gateway['job']})" if gateway["job"] else "")),
            ("load", _load(data)),
            ("scaling", _scaling(data)),
            ("weights", _weights(data)),
            ("answers", _answers(data["counters"])),
        )
    )


def _load(data: Data) -> str:
    load, metrics = data["load"], data["metrics"]
    words = ", ".join(f"{load[word]} {word}" for word in ("queued", "running", "draining"))
    stale = "" if load["fresh"] else "; the metrics of some engines are stale"
    return f"{metrics['load_ratio']:.2f} of capacity {metrics['total_capacity']:g} ({words}){stale}"


def _scaling(data: Data) -> str:
    scaling, elastic = data["scaling"], data["elastic"]
    text = f"{elastic['policy']}, {data['range']['least']} to {counted(data['range']['most'], 'worker')}"
    if scaling["by_hand"] is not None:
        by_hand = scaling["by_hand"]
        left = f" for {span(by_hand['left_s'])} more" if by_hand.get("left_s") is not None else " until released"
        return f"{text}; set by hand to {by_hand['workers']}{left}: {by_hand['why']}"
    if scaling["holds"]:
        text += "; kept ready: " + ", ".join(f"{count} by {name}" for name, count in scaling["holds"].items())
    decision = scaling["decision"]
    return text if decision is None else f"{text}; {decision['reason']['code']}: {decision['reason']['sentence']}"


def _weights(data: Data) -> str:
    version, workers = data["version"], data["workers"]
    current = sum(worker["version"] == version for worker in workers)
    frozen = (data.get("membership") or {}).get("frozen")
    return f"version {version}, confirmed on {current} of {len(workers)}" + ("; a refit is under way" if frozen else "")


def _answers(counters: Data) -> str:
    ends = {end: counters.get(f"answered_{end}", 0) for end in ENDS}
    parts = [f"{count} {end}" for end, count in ends.items() if count]
    parts += [f"{counters[word]} {word}" for word in ("moved", "restarted", "refused") if counters.get(word)]
    return ", ".join(parts) or "none yet"


def workers_table(workers: Sequence[Data]) -> Table:
    heads = ("worker", "engine", "state", ">since", ">version", ">running", ">tokens", ">served", WHY)
    rows = (
        (
            worker["name"],
            worker["kind"] or "-",
            Text(state_words(worker), COLOURS.get(worker["state"], "default")),
            span(round(worker["since_s"], 1)),
            "-" if worker["version"] is None else worker["version"],
            f"{worker['running']}/{worker['limit']}",
            worker["outstanding_tokens"],
            worker["served"],
            _first_line(worker["reason"]),
        )
        for worker in workers[:WORKERS_SHOWN]
    )
    return text_table(heads, rows)


def state_words(worker: Data) -> str:
    """State of a worker, with the operation in progress."""
    more = [word for word in ("paused", "asleep") if worker.get(word)]
    if worker.get("doing"):
        more.append(str(worker["doing"]))
    return f"{worker['state']} ({', '.join(more)})" if more else str(worker["state"])


def _queue_table(waiting: Sequence[Data]) -> Table:
    rows = (
        (
            *(queue[key] for key in ("class", "priority", "waiting", "limit")),
            span(queue["oldest_s"]),
            _first_line(queue["reason"]) if queue["reason"] else "",
        )
        for queue in waiting
    )
    return text_table(("class", ">priority", ">waits", ">limit", ">longest", "why"), rows)


def _steps_table(steps: Sequence[Data], now: float) -> Table:
    verdicts = {None: "not known yet", True: "yes", False: Text("no", "red")}
    rows = (
        (
            clock(now - step["ago_s"]),
            f"{step['before']} to {step['workers']}",
            reason_text(step["reason"]),
            step.get("expects", ""),
            verdicts[step.get("came_true")],
        )
        for step in steps
    )
    return text_table(("when", "workers", WHY, Column("expected", overflow="fold"), "came true"), rows)


def _first_line(reason: Data) -> str:
    """The first line of a reason; the output of an engine that failed is in its story."""
    first, *more = reason_text(reason).splitlines() or [""]
    return first + (" ..." if more else "")


def _warning(warning: Data) -> str:
    who = f"{warning['worker']}: " if warning["worker"] else ""
    return f"{who}{warning['sentence'].splitlines()[0]} ({span(warning['ago_s'])} ago)"


# ---- changes -------------------------------------------------------------------------------------------------------


def change_lines(before: Data | None, now: Data) -> list[str]:
    """The changes, a line each, for output that is not a terminal."""
    at = clock(now["now"])
    old = {worker["name"]: worker["state"] for worker in before["workers"]} if before else {}
    lines = [
        f"{at} {worker['name']} {worker['state']}: {worker['reason']['sentence'].splitlines()[0]}"
        for worker in now["workers"]
        if old.get(worker["name"]) != worker["state"]
    ]
    lines += [f"{at} {name} is gone" for name in old if name not in {worker["name"] for worker in now["workers"]}]
    known = {(step["at"], step["workers"]) for step in before["steps"]} if before else set()
    lines += [f"{at} {_step(step)}" for step in now["steps"] if (step["at"], step["workers"]) not in known]
    if before is not None and before["version"] != now["version"]:
        lines.append(f"{at} weights are version {now['version']}")
    return lines


def _step(step: Data) -> str:
    text = f"{step['before']} to {counted(step['workers'], 'worker')}: {step['reason']['sentence']}"
    return text + (f"; expects {step['expects']}" if step.get("expects") else "")


def print_story(data: Data) -> None:
    """Print a worker or request and its story."""
    worker = data["worker"]
    if worker is not None:
        out.print(f"[bold]{escape(worker['name'])}[/] is {state_words(worker)} for {span(round(worker['since_s'], 1))}")
        rows = [("why", reason_text(worker["reason"]))]
        if worker["url"]:
            rows.append(("engine", f"{worker['dialect'] or worker['kind']} at {worker['url']}"))
        if worker["deadline_s"] is not None:
            rows.append(("deadline", f"in {span(worker['deadline_s'])}" if worker["deadline_s"] > 0 else "now"))
        rows.append(
            ("load", f"{worker['running']} of {counted(worker['limit'], 'request')}, {worker['served']} served")
        )
        rows.append(("weights", "unconfirmed" if worker["version"] is None else str(worker["version"])))
        rows += [(word, worker[word]) for word in ("note", "unwell", "node") if worker.get(word)]
        facts(*rows)
        out.print()
    entries = (
        ("" if entry["at"] is None else clock(entry["at"]), entry["state"], reason_text(entry))
        for entry in data["story"]
    )
    show(text_table(("when", "state", WHY), entries))


# ---- single results -------------------------------------------------------------------------------------------------


def print_scaled(data: Data) -> None:
    out.print(f"scaling: {_scaling(data)}", markup=False)


def print_worker(worker: Data, verb: str) -> None:
    late = worker.get("deadline_s")
    until = f", for at most {span(late)}" if verb == "drains" and late is not None and worker["running"] else ""
    runs = f"; {counted(worker['running'], 'request')} still running{until}" if worker["running"] else ""
    out.print(f"{worker['name']} {verb}: {state_words(worker)}{runs}", markup=False)
    out.print(f"  {worker['reason']['code']}: {worker['reason']['sentence']}", markup=False)


# ---- the doctor ------------------------------------------------------------------------------------------------------


def print_findings(found: Sequence[RolloutFinding], of_what: str) -> None:
    """Print the findings, worst first, each with what to do."""
    if not found:
        out.print(f"{of_what}: no problems found", markup=False)
        return
    counts = [f"{sum(finding.severity is weight for finding in found)} {weight.value}" for weight in Severity]
    out.print(f"{of_what}: {', '.join(words for words in counts if not words.startswith('0 '))}", markup=False)
    for finding in found:
        out.print()
        colour = WEIGHT_COLOURS[finding.severity]
        text = escape(finding.sentence).replace("\n", "\n  ")
        out.print(f"[{colour}]{finding.severity.value}[/] [bold]{finding.issue.value}[/]  {text}")
        out.print(f"  do: {finding.fix}", markup=False)
