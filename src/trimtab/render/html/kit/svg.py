"""The few SVG elements that pictures are made of. Whatever text comes in is escaped here."""

from __future__ import annotations

from trimtab.render.html.kit.labels import escape


def px(number: float) -> str:
    """A number as short as it can be said in hundredths of a pixel."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rect(
    x: float, y: float, width: float, height: float, css: str, tip: str = "", *, rx: float = 0, more: str = ""
) -> str:
    """A rectangle, with a tooltip where there is one."""
    # Both edges are rounded, not the width: neighbours then meet exactly.
    wide = round(x + width, 2) - round(x, 2)
    rounded = f' rx="{px(rx)}"' if rx else ""
    start = f'<rect class="{css}" x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="{px(height)}"{rounded}{more}'
    # A tooltip keeps its line breaks as references: as plain characters an XML reader may fold them.
    return f"{start}><title>{'&#10;'.join(map(escape, tip.splitlines()))}</title></rect>" if tip else f"{start}/>"


def text_at(x: float, y: float, words: str, css: str, *, anchor: str = "", tip: str = "", more: str = "") -> str:
    """A line of text, escaped."""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    title = f"<title>{escape(tip)}</title>" if tip and tip != words else ""
    return f'<text class="{css}" x="{px(x)}" y="{px(y)}"{anchored}>{escape(words)}{more}{title}</text>'
