"""The frame of every page and the pieces it is made of: head, foot, sections, tables.

A page is one file that loads and sends nothing; its content security policy forbids both. Callers escape text from
outside before they pass it as markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Container, Iterable, Sequence

from trimtab import __version__
from trimtab.core.frozen import Frozen
from trimtab.render.html.kit.assets import asset
from trimtab.render.html.kit.assets import script as script_of
from trimtab.render.html.kit.labels import escape, escape_block
from trimtab.render.html.kit.timeline import COLOURS, Chart, svg

WIDE_PX, NARROW_PX = 960, 420
WIDTHS = (("wide", WIDE_PX), ("narrow", NARROW_PX))

COPY_SCRIPT = "copy"


def document(
    title: str,
    parts: Iterable[str],
    *,
    command: str | None = None,
    more: str = "",
    script: str = COPY_SCRIPT,
    style: str = "",
) -> str:
    """A whole page of these parts. `command` made it; `more` follows the version in the foot."""
    made = f" Made by <code>{escape(command)}</code>." if command else ""
    foot = (
        f"</main>\n<footer><p>trimtab {escape(__version__)}.{more}{made}</p></footer>\n"
        f"<script>{script_of(script)}</script>\n</body>\n</html>\n"
    )
    return "\n".join([page_head(title, script, style), *(part for part in parts if part), foot])


def page_head(title: str, script: str = COPY_SCRIPT, style: str = "") -> str:
    """The head of a page. Only this script may run in it."""
    digest = base64.b64encode(hashlib.sha256(script_of(script).encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="trimtab {escape(__version__)}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('report.css')}{asset('timeline.css')}{style}</style>\n"
        "</head>\n<body>\n<main>"
    )


class Tile(Frozen):
    """A number in the header of a page, with a note below it. Escaped here."""

    name: str
    value: str
    note: str
    css: str = ""

    def markup(self) -> str:
        css = f' class="{self.css}"' if self.css else ""
        return (
            f"<div><dt>{escape(self.name)}</dt>"
            f"<dd{css}>{escape(self.value)}<small>{escape(self.note)}</small></dd></div>"
        )


def header(eyebrow: str, title: str, lede: str, tiles: Iterable[Tile] = (), *, notice: str = "", more: str = "") -> str:
    """The header of a page; `notice` and `more` are markup."""
    drawn = "".join(tile.markup() for tile in tiles)
    numbers = f'<dl class="numbers">{drawn}</dl>\n' if drawn else ""
    return (
        f'<header>\n<p class="eyebrow">{escape(eyebrow)}</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lede">{escape(lede)}</p>\n{notice}{numbers}{more}</header>'
    )


def section(name: str, title: str, lede: str, body: str) -> str:
    """A section with a heading; `title`, `lede` and `body` are markup."""
    lede_html = f"<p>{lede}</p>\n" if lede else ""
    body_html = f"{body}\n" if body else ""
    return f'<section aria-labelledby="h-{name}">\n<h2 id="h-{name}">{title}</h2>\n{lede_html}{body_html}</section>'


def list_section(name: str, title: str, sentences: Iterable[str]) -> str:
    """A section with a list of sentences, escaped here; empty without any."""
    items = plain_list(map(escape, sentences))
    return section(name, title, "", items) if items else ""


def plain_list(items: Iterable[str], css: str = "") -> str:
    """A list of markup; empty without any."""
    joined = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="plain{f" {css}" if css else ""}">{joined}</ul>' if joined else ""


def card(body: str) -> str:
    return f'<div class="card">{body}</div>'


def folded(summary: str, body: str) -> str:
    return f'<details class="card"><summary>{summary}</summary>{body}</details>'


def cards(items: Iterable[str], *, ordered: bool = True) -> str:
    tag = "ol" if ordered else "ul"
    return f'<{tag} class="plans">\n' + "\n".join(items) + f"\n</{tag}>"


def cards_section(name: str, title: str, lede: str, items: Sequence[str]) -> str:
    """A section with a list of `card_item`; empty without any."""
    return section(name, title, lede, cards(items)) if items else ""


def card_item(title: str, time: str, body: str, *, attributes: str = ' class="card"', css: str = "") -> str:
    """An entry of `cards`: a heading with a time at its right. All is markup."""
    at_right = f'<span class="time{f" {css}" if css else ""}">{time}</span>'
    return f"<li{attributes}><h3>{title}{at_right}</h3>{body}</li>"


def copy_section(name: str, title: str, lede: str, label: str, text: str) -> str:
    """A section with text to copy, escaped here."""
    return section(name, title, lede, copy_block(label, text))


def copy_block(label: str, text: str) -> str:
    return f'<div class="copy"><pre tabindex="0" aria-label="{label}">{escape_block(text)}</pre></div>'


def picture(
    draw: Callable[[int, str], str], prefix: str, widths: Sequence[tuple[str, int]] = WIDTHS, css: str = ""
) -> str:
    """The same picture for a wide and a narrow page; the style sheet shows one of them."""
    drawn = "".join(
        draw(width, f"{prefix}-{name}").replace('class="tt"', f'class="tt {name}"', 1) for name, width in widths
    )
    return f'<figure class="{css}">{drawn}</figure>' if css else f"<figure>{drawn}</figure>"


def chart_picture(chart: Chart, prefix: str, *, compact: bool = False) -> str:
    return picture(lambda width, name: svg(chart, width, standalone=False, compact=compact, prefix=name), prefix)


Row = str | Sequence[str]
"""Cells as markup, the first one the head of the row; or the markup of a whole row."""


def table(
    label: str, heads: Sequence[str], rows: Iterable[Row], *, numeric: Container[int] = range(0), css: str = ""
) -> str:
    """A table that scrolls in its own region; columns in `numeric` are aligned to the right."""
    number = ' class="number"'
    columns = "".join(f'<th scope="col"{number if at in numeric else ""}>{head}</th>' for at, head in enumerate(heads))
    body = "".join(row if isinstance(row, str) else table_row(row, numeric) for row in rows)
    return (
        f'<div class="scroll{f" {css}" if css else ""}" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table>\n<thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>"
    )


def table_row(cells: Sequence[str], numeric: Container[int] = range(0), attributes: str = "") -> str:
    first, *others = cells
    number = ' class="number"'
    drawn = "".join(f"<td{number if at in numeric else ''}>{cell}</td>" for at, cell in enumerate(others, 1))
    return f'<tr{attributes}><th scope="row">{first}</th>{drawn}</tr>\n'


def key_of(colour: int) -> str:
    return f'<span class="tt-key key{colour % COLOURS}"></span>'


def keyed(colour: int, name: str, *, wrapped: bool = True) -> str:
    """A name beside its colour; `name` is markup."""
    return f'<span class="named">{key_of(colour)}{f"<span>{name}</span>" if wrapped else name}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Keys (markup) with their words, which are escaped here."""
    return f'<ul class="legend">{"".join(f"<li>{key}{escape(words)}</li>" for key, words in entries)}</ul>'


def facts_list(facts: Iterable[tuple[str, str]], attributes: str = 'class="figures"') -> str:
    """Names with values, as markup; empty without any."""
    drawn = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f"<dl {attributes}>{drawn}</dl>" if drawn else ""


def code_of(code: str) -> str:
    return f' <small class="code">{escape(code)}</small>' if code else ""


def why_of(code: str, reason: str) -> str:
    return f"{escape(reason) or '–'}{code_of(code)}"
