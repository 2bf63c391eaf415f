"""`[ ... ]` and `[[ ... ]]`: true, false, or None where that cannot be known without running something."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import is_unknown, known_part

_FILE_TESTS = frozenset("abcdefghkprstuwxGLNOS")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_NESTED_REPEAT = re.compile(r"[*+}][^()]*\)[*+{]")

Truth = bool | None
Matcher = Callable[[str], Truth]


def holds(
    words: Sequence[str],
    *,
    exists: Callable[[str, str], Truth],
    is_set: Callable[[str], bool],
    number: Callable[[str], str],
    matchers: dict[int, Matcher] | None = None,
    joined: bool = False,
) -> Truth:
    """Whether a test holds.

    `exists(operator, path)` answers file tests, `number` is arithmetic. `joined`: `[[`, where `&&` and `||` join tests
    and `matchers` are the patterns at their positions.
    """
    test = _Test(list(words), exists, is_set, number, matchers or {}, joined)
    found = test.either()
    if test.at < len(test.words):
        raise InputError(f"this test cannot be read: {' '.join(words)[:80]}")
    return found


class _Test:
    def __init__(
        self,
        words: list[str],
        exists: Callable[[str, str], Truth],
        is_set: Callable[[str], bool],
        number: Callable[[str], str],
        matchers: dict[int, Matcher],
        joined: bool,
    ) -> None:
        self.words = words
        self.exists = exists
        self.is_set = is_set
        self.number = number
        self.matchers = matchers
        self.either_word, self.both_word = ("||", "&&") if joined else ("-o", "-a")
        self.joined = joined
        self.at = 0

    def peek(self, ahead: int = 0) -> str | None:
        at = self.at + ahead
        return self.words[at] if at < len(self.words) else None

    def either(self) -> Truth:
        found = self.both()
        while self.peek() == self.either_word:
            self.at += 1
            other = self.both()
            found = True if found or other else None if None in (found, other) else False
        return found

    def both(self) -> Truth:
        found = self.negated()
        while self.peek() == self.both_word:
            self.at += 1
            other = self.negated()
            found = False if False in (found, other) else None if None in (found, other) else True
        return found

    def negated(self) -> Truth:
        negated = False
        while self.peek() == "!" and len(self.words) - self.at > 1:
            negated = not negated
            self.at += 1
        found = self.primary()
        return found if found is None else found != negated

    def primary(self) -> Truth:
        first = self.peek()
        if first is None:
            return False
        operator = self.peek(1)
        if operator is not None and self.is_binary(operator) and self.peek(2) is not None:
            self.at += 3
            return self.binary(first, operator, self.words[self.at - 1], self.at - 1)
        if first == "(":
            self.at += 1
            found = self.either()
            if self.peek() != ")":
                raise InputError(f"this test cannot be read: {' '.join(self.words)[:80]}")
            self.at += 1
            return found
        if re.fullmatch(r"-[a-zA-Z]", first) and operator is not None and operator not in (")", "&&", "||"):
            self.at += 2
            return self.unary(first, operator)
        self.at += 1
        return None if is_unknown(first) and not known_part(first) else bool(first)

    def is_binary(self, operator: str) -> bool:
        return operator in _NUMBERS or operator in ("=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef")

    def unary(self, operator: str, value: str) -> Truth:
        if operator in ("-z", "-n"):
            if is_unknown(value) and not known_part(value):
                return None
            return bool(value) == (operator == "-n")
        if operator in ("-v", "-R"):
            return self.is_set(value)
        if operator in ("-t", "-o"):
            return False
        if operator[1] in _FILE_TESTS:
            return None if is_unknown(value) else self.exists(operator, value)
        raise InputError(f"this test cannot be read: {operator} {value[:60]}")

    def binary(self, left: str, operator: str, right: str, at: int) -> Truth:
        if operator in _NUMBERS:
            return self.compared(left, operator, right)
        if operator in ("-nt", "-ot", "-ef"):
            return None
        if is_unknown(left):
            return None
        if at in self.matchers and operator != "<" and operator != ">":
            found = self.matchers[at](left)
            return found if found is None else found == (operator != "!=")
        if is_unknown(right):
            return None
        if operator in ("<", ">"):
            return left < right if operator == "<" else left > right
        return (left == right) == (operator != "!=")

    def compared(self, left: str, operator: str, right: str) -> Truth:
        numbers = []
        for word in (left, right):
            if is_unknown(word):
                return None
            value = self.number(word) if self.joined else word.strip()
            if is_unknown(value):
                return None
            if not re.fullmatch(r"[+-]?\d{1,30}", value):
                return False  # bash complains, and the test fails
            numbers.append(int(value))
        return _NUMBERS[operator](numbers[0], numbers[1])


def searched(expression: str | None, value: str) -> re.Match[str] | bool | None:
    """`=~`: a match, None if there is none, False where the expression is unknown or could take for ever."""
    if expression is None or is_unknown(value) or _NESTED_REPEAT.search(expression) or len(value) > 2_000:
        return False
    for name, chars in (("digit", "0-9"), ("space", r"\s"), ("alpha", "a-zA-Z"), ("alnum", "a-zA-Z0-9")):
        expression = expression.replace(f"[:{name}:]", chars)
    try:
        return re.search(expression, value)
    except (re.error, RecursionError):
        return False


def file_holds(operator: str, path: Path) -> Truth:
    """A file test on the file system here: a file that is missing here may be there where the script runs."""
    try:
        if not path.exists():
            return False if operator in ("-L", "-h") and not path.is_symlink() else None
        kinds: dict[str, Callable[[], bool]] = {
            "-f": path.is_file,
            "-d": path.is_dir,
            "-L": path.is_symlink,
            "-h": path.is_symlink,
            "-s": lambda: path.stat().st_size > 0,
            "-r": lambda: os.access(path, os.R_OK),
            "-w": lambda: os.access(path, os.W_OK),
            "-x": lambda: os.access(path, os.X_OK),
        }
        return kinds.get(operator, lambda: True)()
    except (OSError, ValueError):
        return None
