"""Command-line flags as data: `--a.b=c`, `--a-b c`, `--switch`, `--list a b`, `-s`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

_FLAG = re.compile(r"--?[A-Za-z]")
_NUMBER = re.compile(r"[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?\Z")
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def flag_words(arguments: Sequence[str], switches: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Words after each flag, by its name without dashes, as argparse takes them: the last of a repeated flag wins.

    Words before the first flag are under "". `switches` are names that take no word: what follows one is positional.
    """
    found: dict[str, tuple[str, ...]] = {"": ()}
    name = ""
    for at, word in enumerate(arguments):
        if word == "--":
            found[""] += tuple(arguments[at + 1 :])
            break
        if not _FLAG.match(word):
            found[name] += (word,)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        found[name] = (value,) if equals else ()
        if equals or name in switches:
            name = ""
    return found


def flags(arguments: Sequence[str], switches: Collection[str] = ()) -> dict[str, Any]:
    """Flags as typed values: True for one without a word, a list for several words; positional words are left out.

    `write_back.nested` makes nested mappings of dotted names.
    """
    values: dict[str, Any] = {}
    for name, words in flag_words(arguments, switches).items():
        if name:
            typed = [typed_word(word) for word in words]
            values[name] = True if not typed else typed[0] if len(typed) == 1 else typed
    return values


def typed_word(word: str) -> Any:
    """A number, truth value or null where the word is one, else the word."""
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    if not _NUMBER.match(word):
        return word
    return float(word) if set(word) & set(".eE") else int(word)
