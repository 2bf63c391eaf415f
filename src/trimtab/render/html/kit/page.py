"""The frame of every page and the pieces it is made of: head, foot, sections, tables.

A page is one file that loads and sends nothing; its content security policy forbids both. Callers escape text from
outside before they pass it as markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources

from trimtab import __version__
from trimtab.render.html.kit import timeline
from trimtab.render.html.kit.labels import escape

WIDE_PX, NARROW_PX = 960, 420
WIDTHS = (("wide", WIDE_PX), ("narrow", NARROW_PX))

# Without scripts the block can still be selected; the button appears only where the clipboard is available.
COPY_SCRIPT = """
for (const box of document.querySelectorAll(".copy")) {
  if (!navigator.clipboard) break;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", () => navigator.clipboard.writeText(box.querySelector("pre").textContent).then(
    () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); },
    () => { getSelection().selectAllChildren(box.querySelector("pre")); }));
  box.append(button);
}
"""


@cache
def _style() -> str:
    return (
        resources.files("trimtab.render.html").joinpath("assets/report.css").read_text(encoding="utf-8")
        + timeline.style()
    )


def page_head(title: str, *, scripts: Sequence[str] = (COPY_SCRIPT,), style: str = "") -> str:
    """The head of a page. Only these scripts may run in it."""
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {digests}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="trimtab {escape(__version__)}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}{style}</style>\n</head>\n<body>\n<main>"
    )


def page_header(
    eyebrow: str, title: str, lede: str, tiles: Iterable[tuple[str, str]] = (), *, notice: str = "", more: str = ""
) -> str:
    """The header of a page; `tiles` are names with their `<dd>` markup, `notice` and `more` are markup."""
    drawn = "".join(f"<div><dt>{name}</dt>{value}</div>" for name, value in tiles)
    numbers = f'<dl class="numbers">{drawn}</dl>\n' if drawn else ""
    return (
        f'<header>\n<p class="eyebrow">{escape(eyebrow)}</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lede">{escape(lede)}</p>\n{notice}{numbers}{more}</header>'
    )


def page_foot(command: str | None = None, *, more: str = "", script: str = COPY_SCRIPT) -> str:
    """The end of a page. `command` made it; `more` follows the version."""
    made = f" Made by <code>{escape(command)}</code>." if command else ""
    return (
        f"</main>\n<footer><p>trimtab {escape(__version__)}.{more}{made}</p></footer>\n"
        f"<script>{script}</script>\n</body>\n</html>"
    )


def both(draw: Callable[[int, str], str], prefix: str, widths: Sequence[tuple[str, int]] = WIDTHS) -> str:
    """The same picture for a wide and a narrow page; the style sheet shows one of them."""
    return "".join(
        draw(width, f"{prefix}-{name}").replace('class="tt"', f'class="tt {name}"', 1) for name, width in widths
    )


def section(name: str, title: str, lede: str, body: str) -> str:
    """A section with a heading; `title` and `lede` are markup already."""
    lede_html = f"<p>{lede}</p>\n" if lede else ""
    return f'<section aria-labelledby="h-{name}">\n<h2 id="h-{name}">{title}</h2>\n{lede_html}{body}\n</section>'


def card(body: str) -> str:
    return f'<div class="card">{body}</div>'


def scroll(label: str, table: str, *, css: str = "") -> str:
    """A table that scrolls in its own region."""
    return (
        f'<div class="scroll{f" {css}" if css else ""}" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table>\n{table}\n</table></div>"
    )


def heads(*names: str, words: int) -> str:
    """Column heads; those after the first `words` are numeric."""
    numeric = ' class="number"'
    cells = "".join(f'<th scope="col"{numeric if at >= words else ""}>{head}</th>' for at, head in enumerate(names))
    return f"<thead><tr>{cells}</tr></thead>"


def code_of(code: str) -> str:
    """A reason code, small beside its sentence."""
    return f' <small class="code">{escape(code)}</small>' if code else ""


def list_section(name: str, title: str, sentences: Iterable[str]) -> str:
    """A section with a list of sentences, escaped here; empty without any."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return section(name, title, "", f'<ul class="plain">{items}</ul>') if items else ""
