"""The dashboard's page and its static files.

The page is the same for every run: the server pushes its content (`source`). Timeline (`run_timeline.js`) and style are
the report's. Without scripts it says that it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from trimtab import __version__
from trimtab.render.html.kit.markup import asset, escape

STYLES = ("report.css", "timeline.css", "run_report.css", "dashboard.css")
SCRIPTS = ("run_timeline.js", "dashboard.js")
COLUMNS = (
    {
        "advice": "Advice",
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
        "around": "Engines and GPUs",
        "nodes": "Nodes",
        "pools": "Pools",
        "fleet": "Nodes of the cluster",
    },
)
"""Panels and their titles. Each stays in its column, so that none moves when another grows."""


@cache
def files() -> Mapping[str, tuple[str, bytes]]:
    """Static files by path."""
    found = {"/": ("text/html; charset=utf-8", _page().encode())}
    for name in (*STYLES, *SCRIPTS):
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        found[f"/{name}"] = (f"{kind}; charset=utf-8", asset(name).encode())
    return found


def _panel(name: str, title: str) -> str:
    return (
        f'<section class="panel card" id="p-{name}" aria-labelledby="h-{name}" hidden>'
        f'<h2 id="h-{name}">{title}</h2><div class="body" data-panel="{name}"></div></section>'
    )


def _page() -> str:
    styles = "".join(f'<link rel="stylesheet" href="/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script src="/{name}" defer></script>\n' for name in SCRIPTS)
    panels = "\n".join(
        f'<div class="column">{"".join(_panel(name, title) for name, title in column.items())}</div>'
        for column in COLUMNS
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
<a class="skip" href="#p-components">Skip to the figures</a>
<main>
<header>
<div class="top"><p class="eyebrow">trimtab dashboard</p>
<p class="link" id="link" role="status" data-state="connecting">connecting</p></div>
<h1 id="title">trimtab</h1>
<p class="lede" data-panel="standing"></p>
<ul class="plain warn" id="notes" hidden></ul>
<dl class="numbers" data-panel="tiles" aria-label="The run in figures"></dl>
<div class="ask" id="ask" role="toolbar" aria-label="Request a change" hidden></div>
<p class="unseen" id="said" role="status" aria-live="polite"></p>
</header>
<noscript><p class="card warn">This page is updated live and needs scripts.
<code>trimtab report</code> makes a page that does not.</p></noscript>
<section class="card" id="p-timeline" aria-labelledby="h-timeline" hidden>
<h2 id="h-timeline">Timeline</h2>
<p>A row for each GPU. Grey is idle; an empty row means that the node was absent. Click a mark,
or select it with N and P and press Enter, to read its story.</p>
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
<h2 id="token-title">A change</h2>
<p id="token-what"></p>
<div class="field" id="token-ask"><label for="token-text">Token</label>
<input id="token-text" type="password" autocomplete="off" spellcheck="false" aria-describedby="token-where">
<small id="token-where">A change needs it; the command that started the dashboard printed where it is.</small></div>
<div class="buttons"><button type="button" id="token-leave">Cancel</button><button value="ask">Apply</button></div>
</form></dialog>
</body>
</html>
"""
