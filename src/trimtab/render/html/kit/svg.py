"""SVG elements. Text is escaped here."""

from __future__ import annotations

from trimtab.render.html.kit.labels import escape


def px(number: float) -> str:
    """A number in at most two decimals, without trailing zeros."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rect(
    x: float, y: float, width: float, height: float, css: str, tip: str = "", *, rx: float = 0, more: str = ""
) -> str:
    # Round both edges, not the width: adjacent rectangles then meet exactly.
    wide = round(x + width, 2) - round(x, 2)
    rounded = f' rx="{px(rx)}"' if rx else ""
    start = f'<rect class="{css}" x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="{px(height)}"{rounded}{more}'
    return f"{start}>{tooltip(tip)}</rect>" if tip else f"{start}/>"


def tooltip(text: str) -> str:
    """Line breaks are kept as references: as plain characters an XML reader may fold them."""
    return f"<title>{'&#10;'.join(map(escape, text.splitlines()))}</title>"


def text_at(x: float, y: float, words: str, css: str, *, anchor: str = "", tip: str = "", more: str = "") -> str:
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    title = f"<title>{escape(tip)}</title>" if tip and tip != words else ""
    return f'<text class="{css}" x="{px(x)}" y="{px(y)}"{anchored}>{escape(words)}{more}{title}</text>'


def svg_document(body: str, width: int, height: float, prefix: str, title: str, description: str) -> str:
    """An SVG element with its title and description; `prefix` keeps ids apart on a page with several."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tt" viewBox="0 0 {width} {px(height)}" width="{width}" '
        f'height="{px(height)}" role="img" aria-labelledby="{prefix}-title {prefix}-desc">'
        f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(description)}</desc>'
        f"{body}</svg>\n"
    )


def hatch_pattern(prefix: str) -> str:
    """The pattern that `fill="url(#{prefix}-hatch)"` refers to."""
    return (
        f'<defs><pattern id="{prefix}-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>'
    )
