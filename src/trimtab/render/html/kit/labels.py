"""Text in pictures and pages: escaping, text width, durations, axis ticks.

Widths are estimates for an unknown system font and err on the wide side: a label that fits here fits in the browser.
Must never happen: text from outside reaches markup without `escape`.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Callable, Sequence

from trimtab.model.ledger import BUCKETS, LedgerSummary

# XML allows no control characters and no surrogates; direction marks would reorder adjacent text.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_UNPRINTABLE_IN_BLOCKS = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
_JOINERS = "\u200d\ufe0e\ufe0f"

_STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_LESS_THAN_A_TICK = 1e-9
_LEAST_SHARE = 0.005  # of an iteration, in words


def escape(text: str) -> str:
    """Escape text for one line of XML or HTML, inside an element or a quoted attribute."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text.replace("\n", " ").replace("\t", " ")))


def escape_block(text: str) -> str:
    """Escape text and keep its line breaks."""
    return html.escape(_UNPRINTABLE_IN_BLOCKS.sub("\ufffd", text.expandtabs(4).replace("\r\n", "\n")))


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Upper bound of a text's width in pixels at a font size."""
    return sum(map(_em, text)) * size * (1.12 if bold else 1.0)


def _em(character: str) -> float:
    if character.isascii():
        if character in "ijl.,:;'|! ":
            return 0.36
        if character in "ftr-()[]/":
            return 0.44
        return 1.0 if character in "mwMW@%" else 0.78 if character.isupper() else 0.65
    if unicodedata.combining(character) or character in _JOINERS:
        return 0.0
    if character in "·–×…":
        return 0.85 if character in "×…" else 0.55
    code = ord(character)
    return 0.8 if code < 0x590 else 1.4 if code >= 0x1F000 else 1.1


def fit(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """The text, cut with an ellipsis where it is too wide; empty where not even two letters would remain."""
    if text_width(text, size, bold=bold) <= width:
        return text
    room = width - text_width("…", size, bold=bold)
    kept = ""
    for character in text:
        room -= text_width(character, size, bold=bold)
        if room < 0:
            break
        kept += character
    # Do not cut inside a combining sequence or a joined emoji.
    kept = kept.rstrip(_JOINERS + " ,")
    return f"{kept}…" if len(kept) > 1 else ""


def duration(seconds: float) -> str:
    """A duration as `250 ms`, `59.9 s`, `12 min 05 s` or `2 h 05 min`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        factor, unit = (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "µs")
        return f"{seconds * factor:.3g} {unit}"
    if seconds < 599.95:
        return f"{seconds:.1f} s"
    if seconds < 7199.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds < 1e7:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours:,} h {rest:02d} min"
    return f"{seconds / 86400:.4g} days"


def share(part: float) -> str:
    """A share as a percentage without false precision."""
    percent = round(100 * part, 1)
    return f"{percent:.0f} %" if abs(percent) >= 10 or percent == round(percent) else f"{percent:.1f} %"


def ledger_text(ledger: LedgerSummary, limit: int = 5) -> str:
    """The largest shares of an iteration's wall time, and what is unbooked."""
    largest = sorted(ledger.shares.items(), key=lambda item: -item[1])[:limit]
    parts = [f"{BUCKETS[bucket]} {share(part)}" for bucket, part in largest if part >= _LEAST_SHARE]
    return ", ".join([*parts, f"unbooked {share(ledger.unbooked)}"])


def known(value: float | None, render: Callable[[float], str] = duration, otherwise: str = "–") -> str:
    """A figure, or a dash where it is not known."""
    return otherwise if value is None else render(value)


def counted(number: int, noun: str) -> str:
    """`1 move`, `2 moves`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def reason_text(code: str, reason: str) -> str:
    """`CODE: reason`, or what there is of it."""
    return ": ".join(part for part in (code, reason) if part)


def gpus_words(count: int, kind: str) -> str:
    """`8 × H100`, or `8 GPUs` where the kind is not known."""
    return f"{count} × {kind}" if kind else counted(count, "GPU")


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """The text on one line or, broken at a space, on two; what is still too wide is cut."""
    if text_width(text, size, bold=bold) <= width:
        return [text]
    at = max((i for i, c in enumerate(text) if c == " " and text_width(text[:i], size, bold=bold) <= width), default=0)
    lines = (text[:at], text[at + 1 :]) if at else (text,)
    return [fit(line, width, size, bold=bold) for line in lines]


def ticks(seconds: float, limit: int) -> list[tuple[float, str]]:
    """Round times from 0 to `seconds`, at most `limit` after 0, with labels in one unit."""
    if not (seconds > 0 and math.isfinite(seconds)):
        return [(0.0, "0")]
    at_least = seconds / max(1, limit)
    step = round_step(at_least, minutes=seconds > 240 or at_least > 50)
    size, unit = next((s, u) for s, u in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (0, "µs")) if step >= s)
    count = math.floor(seconds / step + _LESS_THAN_A_TICK)
    return [(0.0, "0")] + [(i * step, f"{i * step / (size or 1e-6):.6g} {unit}") for i in range(1, count + 1)]


def round_step(at_least: float, *, minutes: bool = False) -> float:
    """1, 2 or 5 times a power of ten; or a round number of minutes or hours."""
    if minutes and at_least <= _STEPS_S[-1]:
        return next(step for step in _STEPS_S if step >= at_least)
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= at_least * (1 - _LESS_THAN_A_TICK))
