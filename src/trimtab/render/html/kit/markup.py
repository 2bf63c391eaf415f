"""The pieces that the pages of a run are put together from. Texts from outside are escaped by whoever passes them."""

from __future__ import annotations

from trimtab.render.html.kit.labels import escape


def section(name: str, title: str, lede: str, body: str) -> str:
    """A part of the page under its own heading; `title` and `lede` are markup already."""
    lede_html = f"<p>{lede}</p>\n" if lede else ""
    return f'<section aria-labelledby="h-{name}">\n<h2 id="h-{name}">{title}</h2>\n{lede_html}{body}\n</section>'


def card(body: str) -> str:
    """A sheet with something on it."""
    return f'<div class="card">{body}</div>'


def scroll(label: str, table: str, *, css: str = "") -> str:
    """A table that scrolls by itself where it is too wide or too long."""
    return (
        f'<div class="scroll{f" {css}" if css else ""}" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table>\n{table}\n</table></div>"
    )


def heads(*names: str, words: int) -> str:
    """Column heads; those after the first so many are of numbers."""
    numeric = ' class="number"'
    cells = "".join(f'<th scope="col"{numeric if at >= words else ""}>{head}</th>' for at, head in enumerate(names))
    return f"<thead><tr>{cells}</tr></thead>"


def code_of(code: str) -> str:
    """The constant of a reason, small beside its sentence."""
    return f' <small class="code">{escape(code)}</small>' if code else ""
