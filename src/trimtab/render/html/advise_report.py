"""A followed run as an HTML page, and as panels of the dashboard: steps, current and advised plan, engines, GPUs.

The panels are read from `summary.json` of the folder that `trimtab advise` keeps, which is replaced atomically at every
update. The folder of another kind of run, or an unreadable summary, gives no panels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.formats.write_back import shell_words
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import counted, duration, escape, known, share
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.kit.timeline import Chart, ChartBar, ChartRow, plan_chart
from trimtab.render.html.run.story import finite
from trimtab.render.text.advise import drift_text, gpus_text, mark_text, spread_text
from trimtab.runtime.advise.analysis import ComponentSummary, RunPicture
from trimtab.runtime.advise.follower import Follower, FollowFrame
from trimtab.runtime.run.folder import SUMMARY

STEPS_DRAWN = 14


def advise_report(follower: Follower, frame: FollowFrame) -> str:
    seen = frame.picture
    title = ", ".join(Path(path).name for path in follower.tail.paths)
    names = tuple(part.name for part in seen.parts)
    history = [f"step {event.step}: {event.what}: {event.sentence}" for event in follower.history]
    parts = [
        _headline(seen, title),
        _advice(follower, seen, names),
        _steps(follower, seen),
        page.list_section("history", "What happened", history),
        page.list_section("notes", "What was assumed and left out", seen.notes),
    ]
    return page.document(title, parts)


def _headline(seen: RunPicture, title: str) -> str:
    advice = seen.advice
    drift = "" if seen.length_drift is None else f"{seen.length_drift:+.0%} since the beginning"
    tiles = [
        Tile("A step takes", known(seen.step_s), f"{seen.counted} of {seen.steps} steps count"),
        Tile("GPUs idle", known(seen.idle, share), "of their time"),
        Tile("Answers", known(seen.length, "{:,.0f}".format), f"tokens {drift}"),
    ]
    if advice is None:
        tiles.append(Tile("Advice", "None", seen.reason.code.value))
    else:
        band = f"{share(max(advice.low, 0.0))} to {share(advice.high)} of a step"
        tiles.append(Tile("To be gained", share(advice.gain), band, "good"))
    now = " | ".join(f"{', '.join(group.components)} on {group.gpus} GPUs" for group in seen.sharing)
    return page.header(f"trimtab advise · {seen.framework}", title, now, tiles)


def _advice(follower: Follower, seen: RunPicture, names: tuple[str, ...]) -> str:
    advice, adviser = seen.advice, follower.advising.adviser
    if advice is None or adviser is None:
        return page.section("advice", "No advice", escape(seen.reason.sentence), "")
    now, then = adviser.at_current_costs(adviser.plan), adviser.at_current_costs(advice.plan)
    axis = max(now.timeline_seconds, then.timeline_seconds)
    plans = (("Current plan", now, advice.iteration_s), ("Advised plan", then, advice.new_iteration_s))
    items = []
    for at, (title, plan, seconds) in enumerate(plans):
        chart = plan_chart(plan, title, keys=names, axis_seconds=axis)
        body = f"<p>{escape(plan.describe())} GPUs</p>{page.chart_picture(chart, f'plan{at}', compact=True)}"
        items.append(page.card_item(title, duration(seconds), body))
    overrides = "\n".join(shell_words(advice.settings))
    extrapolated = f" Not measured on that many GPUs: {', '.join(advice.extrapolated)}." if advice.extrapolated else ""
    more = "".join(f" {sentence}." for sentence in advice.settings.advice)
    lede = f"Since step {advice.since}: {advice.reason.sentence}.{extrapolated}{more}"
    return (
        page.section("advice", "Advice", escape(lede), page.cards(items, ordered=False))
        + "\n"
        + page.copy_section("apply", "What to apply", "Add to the run's command line.", "Overrides", overrides)
    )


def _steps(follower: Follower, seen: RunPicture) -> str:
    if not seen.parts:
        return ""
    title = "Where each step goes"
    drawn = page.chart_picture(_step_chart(follower, seen.parts), "steps")
    heads = ("Component", "GPUs", "Seconds", "Of the step", "Spread", "Drift", "")
    rows = [
        [
            page.keyed(at, escape(part.name)),
            gpus_text(part),
            f"{part.seconds:,.1f}",
            known(part.share, share, ""),
            spread_text(part),
            drift_text(part),
            escape(mark_text(part)),
        ]
        for at, part in enumerate(seen.parts)
    ]
    body = page.card(f"{drawn}\n{page.table(title, heads, rows, numeric=range(1, 6))}")
    return page.section("steps", title, "", body)


def _step_chart(follower: Follower, parts: Sequence[ComponentSummary]) -> Chart:
    """A sample of steps from the first to the last, each as its components in sequence."""
    notes = {part.name: ", a wait" if part.wait else "" for part in parts}
    steps = follower.advising.counted
    if len(steps) > STEPS_DRAWN:
        steps = [steps[round(at * (len(steps) - 1) / (STEPS_DRAWN - 1))] for at in range(STEPS_DRAWN)]
    rows, longest = [], 0.0
    for step in steps:
        at, bars = 0.0, []
        for name, seconds in follower.advising.seconds(step).items():
            if name in notes and seconds > 0:
                bars.append(ChartBar(at, at + seconds, name, note=f"{seconds:.1f} s{notes[name]}"))
                at += seconds
        longest = max(longest, at)
        rows.append(ChartRow(f"step {step.number}", tuple(bars), shaded=False))
    return Chart("Steps of the run", tuple(rows), tuple(notes), max(longest, 1e-9))


ENGINES_SHOWN = 100
NODES_SHOWN = 100
_NOTHING = '<p class="none">'
_ODD = (ValueError, KeyError, TypeError, AttributeError)


class AdvisePanels:
    """The panels of one folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUMMARY
        self._seen: tuple[int, int] | None = None
        self.panels: dict[str, str] = {}
        self.lines: tuple[str, ...] = ()

    def merge(self, panels: Mapping[str, str]) -> dict[str, str]:
        """These panels of a run and the advice, without panels that an advised run cannot fill."""
        kept = {name: html for name, html in panels.items() if name != "moves" and not html.startswith(_NOTHING)}
        return kept | self.panels

    def refresh(self) -> bool:
        """Read the summary if it was replaced; whether what is shown has changed."""
        try:
            status = os.stat(self._path)
            if self._seen == (status.st_ino, status.st_mtime_ns):
                return False
            self._seen = status.st_ino, status.st_mtime_ns
            data = json.loads(self._path.read_bytes())
            summary = data if data.get("advised") is True else {}
            panels = {"advice": _advice_panel(summary), "around": _around(summary)} if summary else {}
            lines = tuple(_lines(summary)) if summary else ()
        except OSError:
            return False
        except _ODD:
            panels, lines = {}, ()
        panels = {name: html for name, html in panels.items() if html}
        before, self.panels, self.lines = (self.panels, self.lines), panels, lines
        return before != (panels, lines)


def _advice_panel(data: Mapping[str, Any]) -> str:
    advice, decision = data["advice"], data["decision"]
    if advice is None:
        text = f"<p>None. {escape(str(decision['reason']))} <code>{escape(str(decision['code']))}</code></p>"
        return text + _notes(data)
    overrides = "\n".join(map(str, advice["command_line"]))
    more = "".join(f"<p>{escape(str(sentence))}</p>" for sentence in advice["advice"])
    extrapolated = ", ".join(map(str, advice["extrapolated"]))
    more += f"<p>Not measured on that many GPUs, extrapolated: {escape(extrapolated)}.</p>" if extrapolated else ""
    return (
        f"<p><strong>{escape(str(advice['placement']))}</strong>, since step {int(advice['since_step'])}. "
        f"{escape(_gain(advice))}</p>\n<p>{escape(str(advice['reason']))} "
        f"<code>{escape(str(advice['code']))}</code></p>\n{more}"
        "<p>Add to the run's command line:</p>" + page.copy_block("Overrides", overrides) + _notes(data)
    )


def _notes(data: Mapping[str, Any]) -> str:
    waits = [
        f"{name}: waiting, not a cost: {component['wait']}"
        for name, component in data["components"].items()
        if component.get("wait")
    ]
    return page.plain_list(escape(str(note)) for note in [*waits, *data["notes"]])


def _gain(advice: Mapping[str, Any]) -> str:
    low, high = max(float(advice["gain_low"]), 0.0), float(advice["gain_high"])
    now, then = duration(float(advice["iteration_seconds"])), duration(float(advice["new_iteration_seconds"]))
    gain = f"{share(float(advice['gain']))} of a step is gained ({share(low)} to {share(high)})"
    return f"{gain}: {then} instead of {now}."


def _around(data: Mapping[str, Any]) -> str:
    found = ""
    engines = data["engines"]
    if engines:
        left = f"<p>The first {ENGINES_SHOWN} of {len(engines)}.</p>" if len(engines) > ENGINES_SHOWN else ""
        heads = ("Engine", "Running", "Waiting", "Cache", "Tokens/s", "State")
        rows = map(_engine, engines[:ENGINES_SHOWN])
        found += left + page.table("Engines", heads, rows, numeric=range(1, 5), css="bare tall")
    cluster = data["cluster"]
    if cluster is not None and cluster.get("fault"):
        found += f'<p class="warn">Cluster: {escape(str(cluster["fault"]))}</p>'
    elif cluster is not None:
        rows = map(_node, cluster["nodes"][:NODES_SHOWN])
        columns = ("Node of the cluster", "GPUs", "Free", "GPU utilisation")
        found += page.table("Nodes of the cluster", columns, rows, numeric=range(1, 4), css="bare tall")
    if data["gpus_here"]:
        found += f"<p>GPUs of this machine compute {_shares(data['gpus_here'])} of the time.</p>"
    return found


def _engine(engine: Mapping[str, Any]) -> list[str]:
    silent = f"does not answer for {duration(float(engine['silent_seconds'] or 0))}"
    return [
        escape(str(engine["url"])),
        _number(engine["running"]),
        _number(engine["waiting"]),
        known(finite(engine["cache_share"]), share),
        _number(engine["tokens_per_second"]),
        "answers" if engine["fault"] is None else f'<span class="warn">{escape(silent)}</span>',
    ]


def _node(node: Mapping[str, Any]) -> list[str]:
    name = f"{node['name']}, draining" if node["draining"] else str(node["name"])
    return [escape(name), _number(node["gpus"]), _number(node["free"]), _shares(node["busy"].values()) or "–"]


def _number(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def _shares(values: Iterable[Any]) -> str:
    return ", ".join(share(float(value)) for value in values)


def _lines(data: Mapping[str, Any]) -> list[str]:
    """The same for a terminal: the advice with its overrides, unresponsive engines, GPUs."""
    advice, decision = data["advice"], data["decision"]
    if advice is None:
        found = [f"no advice ({decision['code']}): {decision['reason']}"]
    else:
        found = [f"advice since step {advice['since_step']}: {advice['placement']}; {_gain(advice)}"]
        found += [f"  {word}" for word in advice["command_line"]]
    silent = [str(engine["url"]) for engine in data["engines"] if engine["fault"] is not None]
    if data["engines"]:
        answers = counted(len(data["engines"]), "engine")
        found.append(answers + (f", of which do not answer: {', '.join(silent)}" if silent else ", all answer"))
    if data["gpus_here"]:
        found.append(f"GPUs of this machine: {_shares(data['gpus_here'])} busy")
    return found
