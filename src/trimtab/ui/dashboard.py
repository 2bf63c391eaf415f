"""The dashboard's page, its files, and what a page that is open has to be told when something changed.

Pure: the same state always gives the same page. The timeline is the report's (`run_pictures`, `run_timeline.js`), and
so is the look. The page is whole without a run and without scripts says so; everything in it comes from this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from trimtab import __version__
from trimtab.ui.dashboard_board import Board
from trimtab.ui.dashboard_panels import Panels, run_panels
from trimtab.ui.lettering import escape
from trimtab.ui.run_pictures import chart_data, run_chart

State = Mapping[str, Any]

STYLES = ("report.css", "timeline.css", "run_report.css", "dashboard.css")
SCRIPTS = ("run_timeline.js", "dashboard.js")
COLUMNS = (
    {
        "components": "Components",
        "moves": "Moves",
        "events": "What happened",
        "tasks": "Tasks in the run's slots",
        "queue": "Queue",
        "evictions": "Evictions",
    },
    {
        "predicted": "Predicted against measured",
        "reward": "Reward",
        "workers": "Rollout workers",
        "nodes": "Nodes",
        "pools": "Pools",
        "fleet": "Nodes of the cluster",
    },
)
"""Panels and their titles. Each stays in its column, so that none jumps when another grows."""


def state(
    board: Board | None, panels: Panels, *, title: str, changes: Sequence[str] = (), notes: Sequence[str] = ()
) -> State:
    """Everything that a page shows. `panels` are those beside the run's own; `changes` are what may be asked."""
    timeline: dict[str, Any] | None = None
    note = ""
    if board is not None:
        chart = run_chart(board.story)
        timeline = chart_data(chart)
        # Numbers that stay, whatever is told late: they are names of marks.
        order = sorted(range(len(board.story.happenings)), key=lambda at: board.story.happenings[at].t_s)
        for mark in timeline["marks"]:
            mark[6] = order[mark[6]]
        panels = {**run_panels(board, chart, board.costs), **panels}
        strong = [one for one in board.story.happenings if one.strong or one.kind in ("arrived", "ended")]
        note = f"{strong[-1].title}. {strong[-1].reason}".strip() if strong else ""
    return {
        "title": title,
        "timeline": timeline,
        "panels": panels,
        "note": note,
        "notes": list(notes),
        "changes": list(changes),
    }


def difference(before: State, after: State) -> dict[str, Any]:
    """What a page that shows `before` has to be told to show `after`."""
    if not before or before["title"] != after["title"] or not _goes_on(before["timeline"], after["timeline"]):
        return {"whole": after}
    told: dict[str, Any] = {name: after[name] for name in ("note", "notes", "changes") if after[name] != before[name]}
    panels = {name: html for name, html in after["panels"].items() if before["panels"].get(name) != html}
    if panels:
        told["panels"] = panels
    if after["timeline"] is not None:
        added = _added(before["timeline"], after["timeline"])
        if added:
            told["timeline"] = added
    return told


def _goes_on(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> bool:
    """Whether one timeline continues the other: not another run, or one that has become shorter."""
    if before is None or after is None:
        return before is after
    return bool(after["end"] >= before["end"] and len(after["marks"]) >= len(before["marks"]))


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What the timeline's script has to add. `fresh` are rows whose bars replace those that are there."""
    told: dict[str, Any] = {
        name: after[name]
        for name in ("keys", "nodes", "cpu", "lanes", "moves", "open", "end")
        if after[name] != before[name]
    }
    old = {_rows(track): track["bars"] for track in before["tracks"]}
    tracks, fresh = [], []
    for track in after["tracks"]:
        had = old.pop(_rows(track), [])
        bars = track["bars"]
        if bars[: len(had)] == had:
            if len(bars) > len(had):
                tracks.append({"rows": track["rows"], "bars": bars[len(had) :]})
        else:
            fresh.append(track["rows"])
            tracks.append(track)
    fresh += [[list(part) for part in rows] for rows in old]
    known = {mark[6] for mark in before["marks"]}
    marks = [mark for mark in after["marks"] if mark[6] not in known]
    lists: dict[str, list[Any]] = {"tracks": tracks, "fresh": fresh, "marks": marks}
    return told | {name: some for name, some in lists.items() if some}


def _rows(track: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, track["rows"]))


# ---- the page --------------------------------------------------------------------------------------------------------


@cache
def files() -> Mapping[str, tuple[str, bytes]]:
    """What the server serves as it is, by path."""
    found = {"/": ("text/html; charset=utf-8", _page().encode())}
    for name in (*STYLES, *SCRIPTS):
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        found[f"/{name}"] = (f"{kind}; charset=utf-8", _asset(name))
    return found


def _asset(name: str) -> bytes:
    return resources.files("trimtab.ui").joinpath(f"assets/{name}").read_bytes()


def _panel(name: str, title: str) -> str:
    return (
        f'<section class="panel card" id="p-{name}" aria-labelledby="h-{name}" hidden>'
        f'<h2 id="h-{name}">{title}</h2><div class="body" data-panel="{name}"></div></section>'
    )


def _page() -> str:
    styles = "".join(f'<link rel="stylesheet" href="/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/{name}" defer></script>\n' for name in SCRIPTS)
    panels = "\n".join(
        f'<div class="column">{"".join(_panel(name, title) for name, title in some.items())}</div>' for some in COLUMNS
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="trimtab {escape(__version__)}">
<title>trimtab dashboard</title>
<link rel="icon" href="data:,">
{styles}{scripts}</head>
<body class="board">
<a class="skip" href="#p-components">To the figures</a>
<main>
<header>
<div class="top"><p class="eyebrow">trimtab dashboard</p>
<p class="link" id="link" role="status" data-state="connecting">connecting</p></div>
<h1 id="title">trimtab</h1>
<p class="lede" data-panel="standing"></p>
<ul class="plain warn" id="notes" hidden></ul>
<dl class="numbers" data-panel="tiles" aria-label="The run in figures"></dl>
<div class="ask" id="ask" role="toolbar" aria-label="Ask for a change" hidden></div>
<p class="unseen" id="said" role="status" aria-live="polite"></p>
</header>
<noscript><p class="card warn">This page shows what happens as it happens, and needs scripts for that.
<code>trimtab report</code> makes one that does not.</p></noscript>
<section class="card" id="p-timeline" aria-labelledby="h-timeline" hidden>
<h2 id="h-timeline">Timeline</h2>
<p>A row for each GPU. Grey is idle; where a row is empty, the node was not there. Click a mark to read its story.</p>
<div data-panel="legend"></div>
<div class="run-timeline" id="timeline"></div>
</section>
<div class="panels">
{panels}
</div>
</main>
<footer><p>trimtab {escape(__version__)}. Read-only unless a token is given.</p></footer>
<dialog id="story" aria-labelledby="story-title"><form method="dialog">
<h2 id="story-title"></h2><button class="close" aria-label="Close">Close</button></form>
<dl class="facts" id="story-facts"></dl>
<h3 id="story-what">What happened</h3>
<div class="scroll bare" role="region" aria-labelledby="story-what" tabindex="0"><table><thead><tr>
<th scope="col">At</th><th scope="col">What</th><th scope="col">Why</th></tr></thead>
<tbody id="story-chapters"></tbody></table></div></dialog>
<dialog id="token" aria-labelledby="token-title"><form method="dialog">
<h2 id="token-title">A change needs the token</h2>
<p>It was told where the dashboard was started.</p>
<label for="token-text">Token</label>
<input id="token-text" type="password" autocomplete="off" spellcheck="false">
<div class="buttons"><button value="">Leave it</button><button value="ask">Ask</button></div></form></dialog>
</body>
</html>
"""
