"""Dashboard panels of an advised run: the advice, engines and GPUs.

Read from `summary.json` of the folder that `trimtab advise` keeps, which is replaced atomically at every update. The
folder of another kind of run, or an unreadable summary, gives no panels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.render.html.kit.labels import counted, duration, escape, escape_block, share
from trimtab.render.html.kit.page import heads, scroll
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
        "<p>Add to the run's command line:</p>"
        f'<div class="copy"><pre tabindex="0" aria-label="Overrides">{escape_block(overrides)}</pre></div>'
        + _notes(data)
    )


def _notes(data: Mapping[str, Any]) -> str:
    waits = [
        f"{name}: waiting, not a cost: {component['wait']}"
        for name, component in data["components"].items()
        if component.get("wait")
    ]
    items = "".join(f"<li>{escape(str(note))}</li>" for note in [*waits, *data["notes"]])
    return f'<ul class="plain">{items}</ul>' if items else ""


def _gain(advice: Mapping[str, Any]) -> str:
    low, high = max(float(advice["gain_low"]), 0.0), float(advice["gain_high"])
    now, then = duration(float(advice["iteration_seconds"])), duration(float(advice["new_iteration_seconds"]))
    gain = f"{share(float(advice['gain']))} of a step is gained ({share(low)} to {share(high)})"
    return f"{gain}: {then} instead of {now}."


def _around(data: Mapping[str, Any]) -> str:
    found = ""
    engines = data["engines"]
    if engines:
        rows = "".join(_engine(engine) for engine in engines[:ENGINES_SHOWN])
        left = f"<p>The first {ENGINES_SHOWN} of {len(engines)}.</p>" if len(engines) > ENGINES_SHOWN else ""
        columns = '<thead><tr><th scope="col">Engine</th>' + "".join(
            f'<th scope="col" class="number">{heading}</th>' for heading in ("Running", "Waiting", "Cache", "Tokens/s")
        )
        body = f'{columns}<th scope="col">State</th></tr></thead>\n<tbody>{rows}</tbody>'
        found += left + scroll("Engines", body, css="bare tall")
    cluster = data["cluster"]
    if cluster is not None and cluster.get("fault"):
        found += f'<p class="warn">Cluster: {escape(str(cluster["fault"]))}</p>'
    elif cluster is not None:
        rows = "".join(_node(node) for node in cluster["nodes"][:NODES_SHOWN])
        columns = heads("Node of the cluster", "GPUs", "Free", "GPU utilisation", words=1)
        found += scroll("Nodes of the cluster", f"{columns}\n<tbody>{rows}</tbody>", css="bare tall")
    if data["gpus_here"]:
        busy = ", ".join(share(float(busy_share)) for busy_share in data["gpus_here"])
        found += f"<p>GPUs of this machine compute {busy} of the time.</p>"
    return found


def _engine(engine: Mapping[str, Any]) -> str:
    fault = engine["fault"]
    silent = f"does not answer for {duration(float(engine['silent_seconds'] or 0))}"
    state = "answers" if fault is None else f'<span class="warn">{escape(silent)}</span>'
    numbers = (_number(engine["running"]), _number(engine["waiting"]), _share(engine["cache_share"]),
               _number(engine["tokens_per_second"]))  # fmt: skip
    cells = "".join(f'<td class="number">{cell}</td>' for cell in numbers)
    return f'<tr><th scope="row">{escape(str(engine["url"]))}</th>{cells}<td>{state}</td></tr>\n'


def _node(node: Mapping[str, Any]) -> str:
    busy = ", ".join(share(float(value)) for value in node["busy"].values()) or "–"
    name = f"{node['name']}, draining" if node["draining"] else str(node["name"])
    cells = "".join(f'<td class="number">{cell}</td>' for cell in (_number(node["gpus"]), _number(node["free"]), busy))
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'


def _number(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def _share(value: Any) -> str:
    return "–" if finite(value) is None else share(float(value))


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
        found.append(
            f"GPUs of this machine: {', '.join(share(float(busy_share)) for busy_share in data['gpus_here'])} busy"
        )
    return found
