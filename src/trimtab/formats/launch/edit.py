"""Writes a plan into a launch script: the words of the trainer's arguments, or the variables that they come from.

Every other byte stays. The edited text is evaluated before it is given back, and must start the same trainer with the
same arguments except those that the plan changes; where no edit does that, an InputError says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.launch.flags import flag_words
from trimtab.formats.launch.launch import Launch
from trimtab.formats.launch.shell import Shell
from trimtab.formats.loaded import PlanSettings

Arguments = dict[str, tuple[str, ...]]
_VARIABLE = re.compile(r"[\"']?\$\{?([A-Za-z_]\w*)(?::?-[^}]*)?\}?[\"']?\Z")
_LITERAL = re.compile(r"[\w.+-]*\Z")


def rewritten(
    text: str,
    launch: Launch,
    settings: PlanSettings,
    stated: Callable[[str, Any], bool],
    evaluate: Callable[[str], Shell],
) -> str:
    """The script's text with the settings; `evaluate` gives the shell of a changed text."""
    flags = bool(settings.words)
    expected = _arguments(launch, flags)
    changes = {key: value for key, value in settings.values.items() if not stated(key, value)}
    for key, value in changes.items():
        if value is None or isinstance(value, Mapping) or (flags and isinstance(value, bool)):
            raise _unsafe(launch, key)
        new = write_back.scalar_text(value)
        expected = {**expected, key: (new,)}
        candidates = _edits(text, key, new, flags, expected)
        found = next((edited for edited in candidates if _starts(evaluate(edited), launch, expected, flags)), None)
        if found is None:
            raise _unsafe(launch, key)
        text = found
    return text


def _unsafe(launch: Launch, key: str) -> InputError:
    return InputError(
        f"not written: {key} cannot be changed in this script without changing something else",
        where=launch.where,
        hint="pass the overrides to the run instead (--overrides)",
    )


def _arguments(launch: Launch, flags: bool) -> Arguments:
    if flags:
        return flag_words(launch.arguments)
    pairs = (word.lstrip("+").partition("=") for word in launch.arguments)
    return {key: (value,) if equals else () for key, equals, value in pairs}


def _starts(shell: Shell, launch: Launch, expected: Arguments, flags: bool) -> bool:
    """Whether the changed script starts the same programs, and the trainer with what is expected."""
    same = [start for start in shell.starts if start.program == launch.program]
    return any(_arguments(start, flags) == expected for start in same)


def _edits(text: str, key: str, new: str, flags: bool, expected: Arguments) -> Iterator[str]:
    places = list(_places(text, key, flags))
    for start, end in places:
        variable = _VARIABLE.match(text[start:end])
        if variable is not None:
            for first, last in _assignments(text, variable[1]):
                yield text[:first] + new + text[last:]
        yield text[:start] + new + text[end:]
    if not places:
        others = [place for name in expected if name for place in _places(text, name, flags)]
        if others:
            end = max(end for _, end in others)
            word = f"--{key} {new}" if flags else f"++{key}={new}"
            line = text[text.rfind("\n", 0, end) + 1 : end]
            indent = line[: len(line) - len(line.lstrip())]
            stop = text.find("\n", end)
            stop = len(text) if stop < 0 else stop
            if text[end:stop].strip() == "\\":
                yield f"{text[:stop]}\n{indent}{word} \\{text[stop:]}"
            elif not text[end:stop].strip():
                yield f"{text[:end]}\n{indent}{word}{text[end:]}"
            yield f"{text[:end]} {word}{text[end:]}"


def _places(text: str, key: str, flags: bool) -> Iterator[tuple[int, int]]:
    """Where the value of a key stands in the script."""
    mark = rf"--{re.escape(key)}(?:=|[ \t]+(?!--|\\))" if flags else rf"(?<![\w.]){re.escape(key)}="
    for match in re.finditer(mark, text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if line.lstrip().startswith("#"):
            continue
        yield match.end(), _end_of_value(text, match.end())


def _end_of_value(text: str, start: int) -> int:
    found = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|(?:\$\{[^}\n]*\}|[^\s\"'\\;&|)])*").match(text, start)
    return found.end() if found else start


def _assignments(text: str, name: str) -> list[tuple[int, int]]:
    """Where the literal value of a variable stands: `X=8`, `X="8"`, `X=${X:-8}`."""
    found = []
    for match in re.finditer(rf"^[ \t]*(?:export[ \t]+|local[ \t]+)?{name}=", text, re.MULTILINE):
        start, end = match.end(), _end_of_value(text, match.end())
        value = text[start:end]
        default = re.fullmatch(r"([\"']?\$\{[A-Za-z_]\w*:?[-=])([^}]*)(\}[\"']?)", value)
        quoted = re.fullmatch(r"([\"'])(.*)\1", value)
        if default:
            start, end = start + len(default[1]), end - len(default[3])
        elif quoted:
            start, end = start + 1, end - 1
        if _LITERAL.match(text[start:end]):
            found.append((start, end))
    return found
