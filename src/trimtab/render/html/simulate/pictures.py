"""Pictures of a simulation: bars that compare policies, and curves over time.

Colour is never the only cue: every bar has its number, every curve its name, and all of it is in tables too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.render.html.kit.labels import escape, fit, text_width
from trimtab.render.html.kit.svg import px, rect, svg_document, text_at
from trimtab.render.html.kit.timeline import COLOURS

_BAR, _GAP = 22.0, 8.0
_CURVE_HEIGHT = 190.0


@dataclass(frozen=True)
class PolicyBar:
    """A policy: a value, its spread, and both as text."""

    name: str
    value: float
    spread: float
    words: str


@dataclass(frozen=True)
class PolicyCurve:
    """A policy over time."""

    name: str
    at: Sequence[float]
    values: Sequence[float]


def bars_svg(title: str, bars: Sequence[PolicyBar], width: int, prefix: str) -> str:
    """Horizontal bars, each with its number; the thin line at its end is the spread."""
    names_px = min(max(text_width(bar.name, 13) for bar in bars) + 14, width * 0.36)
    words_px = max(text_width(bar.words, 12) for bar in bars) + 12
    room = max(width - names_px - words_px, 40.0)
    max_value = max([bar.value + bar.spread for bar in bars] + [1e-12])
    out = []
    for number, bar in enumerate(bars):
        y = 4 + number * (_BAR + _GAP)
        wide = room * bar.value / max_value
        out.append(text_at(0, y + 15, fit(bar.name, names_px - 8, 13), "small", tip=bar.name))
        out.append(
            rect(names_px, y, max(wide, 1.0), _BAR, f"bar k{number % COLOURS}", f"{bar.name}: {bar.words}", rx=3)
        )
        if bar.spread > 0:
            begin, end = (names_px + room * (bar.value + sign * bar.spread) / max_value for sign in (-1, 1))
            middle = y + _BAR / 2
            out.append(f'<path class="end" fill="none" d="M{px(max(begin, names_px))} {px(middle)}H{px(end)}"/>')
        beyond = names_px + room * (bar.value + bar.spread) / max_value + 8
        out.append(text_at(beyond, y + 15, bar.words, "quiet"))
    height = 4 + len(bars) * (_BAR + _GAP)
    description = "; ".join(f"{bar.name} {bar.words}" for bar in bars)
    return svg_document("".join(out), width, height, prefix, title, description)


DAYS = (86_400.0, " d")


def curves_svg(
    title: str, curves: Sequence[PolicyCurve], width: int, prefix: str, unit: str, across: tuple[float, str] = DAYS
) -> str:
    """Lines over time, named in the legend. `across`: seconds per unit of the axis, and its label."""
    left, right, top = 56.0, width - 12.0, 12.0
    bottom = top + _CURVE_HEIGHT
    last = max([curve.at[-1] for curve in curves if curve.at] + [1.0])
    max_value = max([max(curve.values) for curve in curves if curve.values] + [1e-12])
    out = []
    for step in range(5):
        y = bottom - (bottom - top) * step / 4
        out.append(f'<path class="grid" d="M{px(left)} {px(y)}H{px(right)}"/>')
        out.append(text_at(left - 8, y + 4, f"{max_value * step / 4:,.3g}", "quiet", anchor="end"))
    for step in range(5):
        x = left + (right - left) * step / 4
        anchor = "start" if step == 0 else "end" if step == 4 else "middle"
        out.append(text_at(x, bottom + 18, f"{last * step / 4 / across[0]:.3g}{across[1]}", "quiet", anchor=anchor))
    x, y = 0.0, bottom + 40
    for number, curve in enumerate(curves):
        points = " ".join(
            f"{px(left + (right - left) * at / last)},{px(bottom - (bottom - top) * value / max_value)}"
            for at, value in zip(curve.at, curve.values, strict=True)
        )
        colour = f"var(--tt-{number % COLOURS})"
        out.append(
            f'<polyline points="{points}" style="fill:none;stroke:{colour};stroke-width:1.5" stroke-linejoin="round">'
            f"<title>{escape(curve.name)}</title></polyline>"
        )
        name = fit(curve.name, width - 18.0, 12)
        wide = text_width(name, 12) + 30
        if x + wide > width and x > 0:
            x, y = 0.0, y + 20
        out.append(rect(x, y - 10, 12, 12, f"k{number % COLOURS}", rx=2))
        out.append(text_at(x + 18, y, name, "small"))
        x += wide
    peaks = "; ".join(f"{curve.name}: at most {max(curve.values):,.0f} {unit}" for curve in curves if curve.values)
    return svg_document("".join(out), width, y + 10, prefix, title, peaks)
