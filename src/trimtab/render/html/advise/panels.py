"""Dashboard panels of an advised run: the advice, engines and GPUs.

Read from `summary.json` of the folder that `trimtab advise` keeps, which is replaced atomically at every update. The
folder of another kind of run, or an unreadable summary, gives no panels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import counted, duration, escape, share
from trimtab.render.html.run.facts import finite
from trimtab.runtime.run.folder import SUMMARY

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
            panels = {"advice": _advice(summary), "around": _around(summary)} if summary else {}
            lines = tuple(_lines(summary)) if summary else ()
        except OSError:
            return False
        except _ODD:
            panels, lines = {}, ()
        panels = {name: html for name, html in panels.items() if html}
        before, self.panels, self.lines = (self.panels, self.lines), panels, lines
        return before != (panels, lines)


def _advice(data: Mapping[str, Any]) -> str:
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
        _share(engine["cache_share"]),
        _number(engine["tokens_per_second"]),
        "answers" if engine["fault"] is None else f'<span class="warn">{escape(silent)}</span>',
    ]


def _node(node: Mapping[str, Any]) -> list[str]:
    name = f"{node['name']}, draining" if node["draining"] else str(node["name"])
    return [escape(name), _number(node["gpus"]), _number(node["free"]), _shares(node["busy"].values()) or "–"]


def _number(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def _share(value: Any) -> str:
    return "–" if finite(value) is None else share(float(value))


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
