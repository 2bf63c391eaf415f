"""Inputs that are a little wrong: real examples with values replaced by extreme ones, keys lost, and bytes flipped.

Deterministic by seed. A reader of files passes when every input ends in an answer or in a TrimtabError; anything else,
and any input that takes minutes, is a fault of the reader.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.core.errors import TrimtabError

LIMIT_S = 60  # of one input, and only so that a reader that never ends is found

EXTREMES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 10**6, 10**9, -(10**9), 999_999_999_999_999, 2**63, 10**20, -(10**20), 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1e-320, 1e-12, 1e18, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *(None, True, False, "", " ", "x", "x" * 3000, "0", "-1", "1e999", "nan", "9" * 400, "9" * 5000),
    *("\ud800", "a\udfffb", "\0", "\x1b[31m", "[red]x[/]", "all", "0-999999", "0-3,3", "${x}", "../..", "é" * 40),
    *([], {}, [[]], [None], {"": None}, {"x": {"x": {}}}, [1, "x", None], ["x", "x"], {"0": 1}, [10**400], [math.nan]),
)
NUMBERS = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NUMBER_TEXTS = (b"0", b"-1", b"1e999", b"nan", b"NaN", b"inf", b"1e-320", b"1e308", b"9" * 400, b"9" * 5000, b"", b"x")
BYTES = (b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"{", b"}", b"[", b"]", b'"', b"\n", b",", b":", b"&a *a", b"\t")


def deep(source: random.Random) -> Any:
    """A list in a list in a list."""
    found: Any = source.choice([1, "x", None])
    for _ in range(source.choice([3, 60, 300])):
        found = [found]
    return found


def extreme(source: random.Random) -> Any:
    """A value that nobody expects."""
    return deep(source) if source.random() < 0.03 else copy.deepcopy(source.choice(EXTREMES))


def mutated(tree: Any, source: random.Random) -> Any:
    """Plain data with one to three changes."""
    tree = copy.deepcopy(tree)
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        places = list(_places(tree))
        if not places:
            return extreme(source)
        holder, key = source.choice(places)
        _change(holder, key, source)
    return tree


def _change(holder: Any, key: Any, source: random.Random) -> None:
    what = source.random()
    if what < 0.65:
        holder[key] = extreme(source)
    elif what < 0.75:
        del holder[key]
    elif what < 0.85 and isinstance(holder, dict):
        name = extreme(source)
        holder[name if isinstance(name, str | int | float | None) else "x"] = holder.pop(key)
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(source.choice(holder)))
    else:
        holder[key] = copy.deepcopy(source.choice(list(holder.values())))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in it that can be changed: a mapping with a key, or a list with an index."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield node, key
            waiting.append(node[key])


def flipped(data: bytes, source: random.Random) -> bytes:
    """Bytes with one to four changes: cut short, a number replaced, bytes lost, doubled or put in."""
    for _ in range(source.choice([1, 1, 2, 4])):
        at = source.randrange(len(data) + 1)
        what = source.random()
        if what < 0.1:
            data = data[:at]
        elif what < 0.6:
            found = list(NUMBERS.finditer(data))
            if found:
                one = source.choice(found)
                data = data[: one.start()] + source.choice(NUMBER_TEXTS) + data[one.end() :]
        elif what < 0.75:
            data = data[:at] + source.choice(BYTES) + data[at:]
        elif what < 0.85:
            data = data[:at] + bytes([source.randrange(256)]) + data[at + 1 :]
        else:
            end = min(len(data), at + source.choice([1, 8, 200]))
            data = data[:at] + (data[at:end] * 2 if what < 0.92 else b"") + data[end:]
    return data


def as_json(tree: Any) -> str:
    """JSON, with NaN and lone surrogates where the data have them."""
    return json.dumps(_keyed(tree))


def as_yaml(tree: Any) -> str:
    """YAML in flow style, which is JSON but for numbers that are none."""
    return re.sub(
        r"(?<![\w\"\\])(-?)(NaN|Infinity)(?![\w\"])",
        lambda m: m[1] + (".nan" if m[2] == "NaN" else ".inf"),
        as_json(tree),
    )


def _keyed(tree: Any) -> Any:
    """With keys that JSON can hold."""
    if isinstance(tree, dict):
        return {
            key
            if isinstance(key, str)
            else str(key)[:50]
            if not isinstance(key, int) or abs(key) < 10**50
            else "n": _keyed(value)
            for key, value in tree.items()
        }
    return [_keyed(one) for one in tree] if isinstance(tree, list) else tree


class Stuck(BaseException):
    """An input took minutes."""


@contextlib.contextmanager
def in_time() -> Iterator[Callable[[], None]]:
    """Gives what has to be called before each input, so that one that never ends is an error."""

    def stuck(*_: Any) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, stuck)
    try:
        yield lambda: signal.alarm(LIMIT_S) and None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault_of(reader: Callable[[Any], Any], given: Any) -> str:
    """What is wrong with how a reader takes an input; empty where it answers or refuses as it should."""
    try:
        reader(given)
    except TrimtabError as error:
        return _fault_of_error(error)
    except RecursionError:
        return "RecursionError"
    except (Stuck, MemoryError) as error:
        return type(error).__name__
    except Exception as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        place = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
        return f"{type(error).__name__} at {place}: {str(error)[:200]}"
    return ""


def _fault_of_error(error: TrimtabError) -> str:
    """A refusal is one to three lines that can be printed."""
    text = str(error)
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"a message that cannot be printed: {text!r:.200}"
    if len(text) > 4_000 or len(error.lines()) > 3 or "\n" in error.what:
        return f"a message of {len(text)} characters and {text.count(chr(10)) + 1} lines: {text!r:.200}"
    return ""
