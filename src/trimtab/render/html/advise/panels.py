"""What a dashboard shows of a run that is only advised, beside what it shows of any: the advice, and who was asked.

Read from `summary.json` of the folder that `trimtab advise` keeps, which is replaced whole at every look; the events of
the folder tell the rest. A folder of another kind of run, or a summary that nobody understands, gives nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.render.html.kit.labels import duration, escape, escape_block, share
from trimtab.render.html.kit.markup import heads, scroll
from trimtab.render.html.run.facts import counted, finite
from trimtab.runtime.run.folder import SUMMARY

ENGINES_SHOWN = 100
NODES_SHOWN = 100
_NOTHING = '<p class="none">'
_ODD = (ValueError, KeyError, TypeError, AttributeError)


class AdvisePanels:
    """The summary of one folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUMMARY
        self._seen: tuple[int, int] | None = None
        self.panels: dict[str, str] = {}
        self.lines: tuple[str, ...] = ()

    def among(self, panels: Mapping[str, str]) -> dict[str, str]:
        """The panels of a run with these, without those that a run which is only advised has nothing for."""
        kept = {name: html for name, html in panels.items() if name != "moves" and not html.startswith(_NOTHING)}
        return kept | self.panels

    def look(self) -> bool:
        """Read it if it is another than before; whether what is shown has changed."""
        try:
            status = os.stat(self._path)
            if self._seen == (status.st_ino, status.st_mtime_ns):
                return False
            self._seen = status.st_ino, status.st_mtime_ns
            data = json.loads(self._path.read_bytes())
            told = data if data.get("advised") is True else {}
            panels = {"advice": _advice(told), "around": _around(told)} if told else {}
            lines = tuple(_lines(told)) if told else ()
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
        said = f"<p>None. {escape(str(decision['reason']))} <code>{escape(str(decision['code']))}</code></p>"
        return said + _notes(data)
    overrides = "\n".join(map(str, advice["command_line"]))
    more = "".join(f"<p>{escape(str(one))}</p>" for one in advice["advice"])
    far = ", ".join(map(str, advice["extrapolated"]))
    more += f"<p>Nobody measured {escape(far)} on so many GPUs: it is extrapolated.</p>" if far else ""
    return (
        f"<p><strong>{escape(str(advice['placement']))}</strong>, since step {int(advice['since_step'])}. "
        f"{escape(_gain(advice))}</p>\n<p>{escape(str(advice['reason']))} "
        f"<code>{escape(str(advice['code']))}</code></p>\n{more}"
        "<p>Add to the run's command line:</p>"
        f'<div class="copy"><pre tabindex="0" aria-label="Overrides">{escape_block(overrides)}</pre></div>'
        + _notes(data)
    )


def _notes(data: Mapping[str, Any]) -> str:
    waits = [f"{name}: a wait, no cost: {one['wait']}" for name, one in data["components"].items() if one.get("wait")]
    items = "".join(f"<li>{escape(str(one))}</li>" for one in [*waits, *data["notes"]])
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
        rows = "".join(_engine(one) for one in engines[:ENGINES_SHOWN])
        left = f"<p>The first {ENGINES_SHOWN} of {len(engines)}.</p>" if len(engines) > ENGINES_SHOWN else ""
        columns = '<thead><tr><th scope="col">Engine</th>' + "".join(
            f'<th scope="col" class="number">{one}</th>' for one in ("Running", "Waiting", "Cache", "Tokens/s")
        )
        body = f'{columns}<th scope="col">State</th></tr></thead>\n<tbody>{rows}</tbody>'
        found += left + scroll("Engines", body, css="bare tall")
    cluster = data["cluster"]
    if cluster is not None and cluster.get("fault"):
        found += f'<p class="warn">Cluster: {escape(str(cluster["fault"]))}</p>'
    elif cluster is not None:
        rows = "".join(_node(one) for one in cluster["nodes"][:NODES_SHOWN])
        columns = heads("Node of the cluster", "GPUs", "Free", "How busy its GPUs are", words=1)
        found += scroll("Nodes of the cluster", f"{columns}\n<tbody>{rows}</tbody>", css="bare tall")
    if data["gpus_here"]:
        busy = ", ".join(share(float(one)) for one in data["gpus_here"])
        found += f"<p>GPUs of this machine compute {busy} of the time.</p>"
    return found


def _engine(one: Mapping[str, Any]) -> str:
    fault = one["fault"]
    silent = f"does not answer for {duration(float(one['silent_seconds'] or 0))}"
    state = "answers" if fault is None else f'<span class="warn">{escape(silent)}</span>'
    numbers = (_number(one["running"]), _number(one["waiting"]), _share(one["cache_share"]),
               _number(one["tokens_per_second"]))  # fmt: skip
    cells = "".join(f'<td class="number">{said}</td>' for said in numbers)
    return f'<tr><th scope="row">{escape(str(one["url"]))}</th>{cells}<td>{state}</td></tr>\n'


def _node(one: Mapping[str, Any]) -> str:
    busy = ", ".join(share(float(value)) for value in one["busy"].values()) or "–"
    name = f"{one['name']}, will go" if one["draining"] else str(one["name"])
    cells = "".join(f'<td class="number">{said}</td>' for said in (_number(one["gpus"]), _number(one["free"]), busy))
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'


def _number(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def _share(value: Any) -> str:
    return "–" if finite(value) is None else share(float(value))


def _lines(data: Mapping[str, Any]) -> list[str]:
    """The same for a terminal: the advice and its overrides, engines that do not answer, GPUs."""
    advice, decision = data["advice"], data["decision"]
    if advice is None:
        found = [f"no advice ({decision['code']}): {decision['reason']}"]
    else:
        found = [f"advice since step {advice['since_step']}: {advice['placement']}; {_gain(advice)}"]
        found += [f"  {one}" for one in advice["command_line"]]
    silent = [str(one["url"]) for one in data["engines"] if one["fault"] is not None]
    if data["engines"]:
        answers = counted(len(data["engines"]), "engine")
        found.append(answers + (f", of which do not answer: {', '.join(silent)}" if silent else ", all answer"))
    if data["gpus_here"]:
        found.append(
            f"GPUs of this machine: {', '.join(share(float(one)) for one in data['gpus_here'])} busy"
        )
    return found
