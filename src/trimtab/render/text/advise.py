"""The output of `trimtab advise`: a live display, lines, text at the end, and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.core.ranks import ranks_text
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.ledger import UNBOOKED, WAITS
from trimtab.formats.write_back import shell_words
from trimtab.model.ledger import UNBOOKED_WARNING
from trimtab.plan.placement.compare import DOUBLING
from trimtab.render.html.kit.labels import known
from trimtab.render.output import out, picked, print_list, text_table
from trimtab.runtime.advise.analysis import ComponentSummary, FollowEvent, RunPicture
from trimtab.runtime.advise.follower import ClusterSample, FollowFrame
from trimtab.runtime.advise.replanner import Advice
from trimtab.runtime.advise.samples import EngineSample

PART_KEYS = ("gpus", "seconds", "share", "spread", "drift", "drifted", "wait")
ENGINES_SHOWN = 12
EVENTS_SHOWN = 8


# ---- text ------------------------------------------------------------------------------------------------------------


def picture(frame: FollowFrame) -> RenderableType:
    parts: list[RenderableType] = [*_status(frame), *_advised(frame.picture)]
    parts.append(Text("\nCtrl-C ends", style="dim"))
    return Group(*parts)


def print_text(frame: FollowFrame, history: Sequence[FollowEvent]) -> None:
    """Print everything; the overrides come last, ready to copy."""
    for part in _status(frame):
        out.print(part)
    if history:
        out.print("\n[bold]What happened[/]")
        if len(history) > EVENTS_SHOWN:
            out.print(f"  ({len(history) - EVENTS_SHOWN} earlier events left out)", style="dim")
        for event in history[-EVENTS_SHOWN:]:
            out.print(f"  {_event_text(event)}", markup=False)
    print_list("Assumed, and left out", frame.picture.notes)
    for part in _advised(frame.picture):
        out.print(part)


def lines(frame: FollowFrame) -> Iterator[str]:
    """A line per event, and one for the newest step."""
    for event in frame.news:
        yield from _event_lines(event)
    if frame.steps:
        yield _step_line(frame.steps[-1], frame.picture)


def _step_line(step: LoggedStep, seen: RunPicture) -> str:
    total = f"{seen.step_s:.1f} s a step" if seen.step_s is not None else "no total yet"
    extra = f", with {', '.join(step.extra)}" if step.extra else ""
    advice = f"no advice ({seen.reason.code.value})"
    if seen.advice is not None:
        advice = f"{seen.advice.gain:.0%} gain with the advice of step {seen.advice.since}"
    return f"step {step.number}{extra}: {total} lately; {advice}"


def _event_lines(event: FollowEvent) -> Iterator[str]:
    yield _event_text(event)
    if event.advice is not None and event.what in ("advised", "changed"):
        yield f"  {_gain(event.advice)}"
        for word in shell_words(event.advice.settings):
            yield f"  {word}"


def _event_text(event: FollowEvent) -> str:
    words = {"advised": "advice", "changed": "other advice", "withdrawn": "advice withdrawn",
             "stands again": "earlier advice holds again"}  # fmt: skip
    return f"step {event.step}: {words.get(event.what, event.what)}: {event.sentence}"


def _status(frame: FollowFrame) -> list[RenderableType]:
    seen = frame.picture
    total = f"; a step takes [bold]{seen.step_s:.1f} s[/]" if seen.step_s is not None else ""
    at = f", the last is {seen.newest}" if seen.newest is not None else ""
    parts: list[RenderableType] = [
        Text.from_markup(f"{escape(seen.framework)} run: {seen.steps} steps, {seen.counted} count{at}{total}")
    ]
    if seen.parts:
        parts += [Text(), _table(seen)]
    parts += [Text(line) for line in _sentences(seen)]
    parts += _around(frame.around)
    return parts


def _table(seen: RunPicture) -> Table:
    rows = [
        (
            part.name,
            gpus_text(part),
            f"{part.seconds:.1f}",
            known(part.share, "{:.0%}".format, ""),
            spread_text(part),
            drift_text(part),
            mark_text(part),
        )
        for part in seen.parts
    ]
    if (where := seen.ledger) is not None:
        names = {part.name for part in seen.parts}
        for name, share in {**where.shares(), UNBOOKED: where.unbooked}.items():
            if name == UNBOOKED or not names & {name, name.removesuffix(WAITS)}:
                warning = "no timer has it" if name == UNBOOKED and share > UNBOOKED_WARNING else ""
                rows.append((name, "", f"{share * where.step_s:.1f}", f"{share:.0%}", "", "", warning))
    heads = ("component", ">GPUs", ">seconds", ">of the step", ">spread", ">drift", Column(""))
    return text_table(heads, rows, no_wrap=True)


def gpus_text(part: ComponentSummary) -> str:
    return "" if part.gpus is None else str(part.gpus or "CPU")


def spread_text(part: ComponentSummary) -> str:
    return known(part.spread, "±{:.0%}".format, "")


def drift_text(part: ComponentSummary) -> str:
    return known(part.drift, "{:+.0%}".format, "")


def mark_text(part: ComponentSummary) -> str:
    if part.wait is not None:
        return f"waiting, not a cost: {part.wait}"
    return "has drifted" if part.drifted else ""


def _sentences(seen: RunPicture) -> Iterator[str]:
    if seen.length is not None:
        drift = "" if seen.length_drift is None else f", {seen.length_drift:+.0%} since the beginning"
        yield f"answers: {seen.length:,.0f} tokens on average{drift}"
    if seen.sharing:
        groups = (f"{', '.join(group.components)} on {group.gpus} GPUs" for group in seen.sharing)
        yield f"now: {' | '.join(groups)}"
        for group in seen.sharing:
            if len(seen.sharing) > 1 or group.busy is None:
                busy = (
                    "the log does not show how long they compute"
                    if group.busy is None
                    else f"{group.busy:.0%} of a step"
                )
                yield f"  {', '.join(group.components)}: {busy}"
    if seen.idle is not None:
        yield f"GPUs are idle for {seen.idle:.0%} of their time"


def _around(around: ClusterSample) -> list[RenderableType]:
    found: list[RenderableType] = []
    if around.engines:
        found += [Text(), _engines(around.engines)]
    if isinstance(around.nodes, str):
        found.append(Text(f"cluster: {around.nodes}"))
    elif around.nodes is not None:
        gpus, free = sum(node.gpus for node in around.nodes), sum(node.free for node in around.nodes)
        draining = sum(node.draining for node in around.nodes)
        busy = [share for node in around.nodes for _, share in node.busy]
        text = f"cluster: {len(around.nodes)} nodes, {gpus:g} GPUs, {free:g} free"
        text += f", {draining} draining" if draining else ""
        text += f"; GPUs compute {sum(busy) / len(busy):.0%} of the time" if busy else ""
        found.append(Text(text))
    if around.gpus:
        found.append(Text(f"GPUs of this machine: {', '.join(f'{busy_share:.0%}' for busy_share in around.gpus)} busy"))
    return found


def _engines(engines: Sequence[EngineSample]) -> Table:
    rows = []
    for engine in engines[:ENGINES_SHOWN]:
        silent = "" if engine.fault is None else f"does not answer ({engine.silent_s or 0:.0f} s): {engine.fault}"
        looks = ("{:,.0f}", "{:,.0f}", "{:.0%}", "{:,.0f}")
        values = (engine.running, engine.waiting, engine.cache, engine.tokens_per_s)
        numbers = (known(value, look.format, "") for value, look in zip(values, looks, strict=True))
        rows.append((engine.url, *numbers, silent))
    table = text_table(("engine", ">running", ">waiting", ">cache", ">tokens/s", Column("")), rows, no_wrap=True)
    if len(engines) > ENGINES_SHOWN:
        table.caption = f"and {len(engines) - ENGINES_SHOWN} more"
    return table


def _advised(seen: RunPicture) -> list[RenderableType]:
    advice = seen.advice
    if advice is None:
        return [
            Text(),
            Text.from_markup(f"[bold]No advice[/] ({seen.reason.code.value}): {escape(seen.reason.sentence)}"),
        ]
    found: list[RenderableType] = [
        Text(),
        Text.from_markup(f"[bold]Advice[/] since step {advice.since}: {escape(advice.plan.describe())} GPUs"),
        Text(f"  {_gain(advice)}"),
        Text(f"  {advice.reason.sentence}"),
    ]
    if advice.extrapolated:
        found.append(Text(f"  not measured on that many GPUs, extrapolated: {', '.join(advice.extrapolated)}"))
    if advice.gain_if_less is not None:
        less = f"if each doubling of GPUs gives {DOUBLING:.0%} of a perfect speed-up it gains {advice.gain_if_less:.0%}"
        found.append(Text(f"  {less}: measure there, or give --profile with costs on several numbers of GPUs"))
    found += [Text(f"  {sentence}") for sentence in advice.settings.advice]
    found.append(Text("Add to the run's command line:"))
    found += [Text(f"  {word}") for word in shell_words(advice.settings)]
    return found


def _gain(advice: Advice) -> str:
    band = f"{max(advice.low, 0.0):.0%} to {advice.high:.0%}"
    return (
        f"{advice.gain:.0%} of a step is gained ({band}): "
        f"{advice.new_iteration_s:.1f} s instead of {advice.iteration_s:.1f} s, as predicted"
    )


# ---- data ------------------------------------------------------------------------------------------------------------


def as_data(frame: FollowFrame, history: Sequence[FollowEvent]) -> dict[str, Any]:
    """The data of `--format json` and `yaml`."""
    seen = frame.picture
    return {
        "framework": seen.framework,
        "steps": seen.steps,
        "counted_steps": seen.counted,
        "newest_step": seen.newest,
        "step_seconds": seen.step_s,
        "components": {part.name: picked(part, *PART_KEYS) for part in seen.parts},
        "other_seconds": seen.other_s,
        "ledger": None if seen.ledger is None else {**seen.ledger.shares(), UNBOOKED: seen.ledger.unbooked},
        "answers": {"mean_tokens": seen.length, "drift": seen.length_drift},
        "placement": [
            {"components": list(group.components), "gpus": group.gpus, "busy_share": group.busy}
            for group in seen.sharing
        ],
        "idle_share": seen.idle,
        "decision": {"code": seen.reason.code.value, "reason": seen.reason.sentence},
        "advice": None if seen.advice is None else _advice_data(seen.advice),
        "history": [_event_data(event) for event in history],
        **_around_data(frame.around),
        "notes": list(seen.notes),
    }


def events(frame: FollowFrame) -> Iterator[dict[str, Any]]:
    """The new events of a frame, an object each."""
    for step in frame.steps:
        yield {
            "event": "step",
            "step": step.number,
            "extra": list(step.extra),
            "restart": step.restart,
            "values": dict(step.values),
        }
    for event in frame.news:
        yield {"event": event.what.replace(" ", "_"), **_event_data(event)}


def _advice_data(advice: Advice) -> dict[str, Any]:
    return {
        "since_step": advice.since,
        "placement": advice.plan.describe(),
        "groups": [
            {"components": list(group.components), "ranks": ranks_text(group.gpus)} for group in advice.plan.groups
        ],
        "iteration_seconds": advice.iteration_s,
        "new_iteration_seconds": advice.new_iteration_s,
        "gain": advice.gain,
        "gain_low": advice.low,
        "gain_high": advice.high,
        "gain_if_scaling_is_less": advice.gain_if_less,
        "code": advice.reason.code.value,
        "reason": advice.reason.sentence,
        "extrapolated": list(advice.extrapolated),
        "settings": dict(advice.settings.values),
        "overrides": list(advice.overrides),
        "command_line": shell_words(advice.settings),
        "advice": list(advice.settings.advice),
    }


def _event_data(event: FollowEvent) -> dict[str, Any]:
    return {
        "what": event.what,
        "step": event.step,
        "reason": event.sentence,
        "overrides": None if event.advice is None else list(event.advice.overrides),
        "gain": None if event.advice is None else event.advice.gain,
    }


def _around_data(around: ClusterSample) -> dict[str, Any]:
    nodes = around.nodes
    return {
        "engines": [
            {
                "url": engine.url,
                "running": engine.running,
                "waiting": engine.waiting,
                "cache_share": engine.cache,
                "tokens_per_second": engine.tokens_per_s,
                "fault": engine.fault,
                "silent_seconds": engine.silent_s,
            }
            for engine in around.engines
        ],
        "cluster": None
        if nodes is None
        else {"fault": nodes}
        if isinstance(nodes, str)
        else {
            "nodes": [{**picked(node, "name", "gpus", "free", "draining"), "busy": dict(node.busy)} for node in nodes]
        },
        "gpus_here": list(around.gpus),
    }
