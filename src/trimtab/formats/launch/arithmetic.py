"""Shell arithmetic: 64-bit integers, C's operators and precedence, variables by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import is_unknown, unknown, why_unknown

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]{1,16}|\d{1,2}#\w{1,40}|\d{1,30})|([A-Za-z_]\w*)(\[[^\]]*\])?"
    r"|(\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>!~&|^?:=(),])|(\S))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_ASSIGN = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}
_MAX_DEPTH = 40


class UnknownNumberError(Exception):
    """A value in the expression is not known; the text says why."""


class Variables(Protocol):
    """What arithmetic needs of a shell."""

    def lookup(self, name: str, subscript: str | None = None) -> str | None: ...

    def assign(self, name: str, value: str, subscript: str | None = None) -> None: ...


def evaluate(text: str, variables: Variables) -> str:
    """The value of an expression as text; unknown if a value in it is."""
    if is_unknown(text):
        return unknown(why_unknown(text))
    try:
        return str(_Evaluator(text, variables, 0).whole())
    except UnknownNumberError as error:
        return unknown(str(error))


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


class _Evaluator:
    def __init__(self, text: str, variables: Variables, depth: int) -> None:
        if depth > _MAX_DEPTH or len(text) > 10_000:
            raise InputError(f"this arithmetic is too deep or too long: {text[:60]}")
        self.text = text
        self.variables = variables
        self.depth = depth
        self.tokens = [match.groups() for match in _TOKEN.finditer(text)]
        self.at = 0

    def error(self) -> InputError:
        return InputError(f"this arithmetic cannot be read: {self.text.strip()[:80]}")

    def whole(self) -> int:
        if not self.text.strip():
            return 0
        value = self.comma()
        if self.at < len(self.tokens):
            raise self.error()
        return value

    def peek(self) -> str:
        return self.tokens[self.at][3] or "" if self.at < len(self.tokens) else ""

    def take(self, *operators: str) -> str:
        found = self.peek()
        if found and found in operators:
            self.at += 1
            return found
        return ""

    def comma(self) -> int:
        value = self.assignment()
        while self.take(","):
            value = self.assignment()
        return value

    def assignment(self) -> int:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error()
        try:
            if self.at + 1 < len(self.tokens) and self.tokens[self.at][1] and self.tokens[self.at + 1][3] in _ASSIGN:
                _, name, subscript, _, _ = self.tokens[self.at]
                operator = self.tokens[self.at + 1][3]
                start = self.at
                self.at += 2
                value = self.assignment()
                if operator != "=":
                    value = self.binary(operator[:-1], self.named(start), lambda: value)
                return self.store(name, subscript, value)
            return self.ternary()
        finally:
            self.depth -= 1

    def ternary(self) -> int:
        condition = self.level(0)
        if not self.take("?"):
            return condition
        first = self.assignment()
        if not self.take(":"):
            raise self.error()
        second = self.assignment()
        return first if condition else second

    def level(self, at: int) -> int:
        if at == len(_LEVELS):
            return self.power()
        value = self.level(at + 1)
        while operator := self.take(*_LEVELS[at]):
            value = self.binary(operator, value, lambda: self.level(at + 1))
        return value

    def power(self) -> int:
        base = self.unary()
        if not self.take("**"):
            return base
        exponent = self.power()
        if not 0 <= exponent <= 1_000:
            raise self.error()
        return _wrapped(base**exponent)

    def unary(self) -> int:
        operator = self.take("-", "+", "!", "~", "++", "--")
        if operator in ("++", "--"):
            start = self.at
            self.at += 1
            return self.store(*self.name_at(start), self.named(start) + (1 if operator == "++" else -1))
        if operator:
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise self.error()
            value = self.unary()
            self.depth -= 1
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[operator]
        return self.primary()

    def primary(self) -> int:
        if self.take("("):
            value = self.comma()
            if not self.take(")"):
                raise self.error()
            return value
        if self.at >= len(self.tokens):
            raise self.error()
        number, name, _, _, _ = self.tokens[self.at]
        start = self.at
        self.at += 1
        if number:
            return self.literal(number)
        if not name:
            raise self.error()
        value = self.named(start)
        if operator := self.take("++", "--"):
            self.store(*self.name_at(start), value + (1 if operator == "++" else -1))
        return value

    def literal(self, number: str) -> int:
        try:
            if "#" in number:
                base, _, digits = number.partition("#")
                return _wrapped(int(digits, int(base)))
            if number[:2].lower() == "0x":
                return _wrapped(int(number, 16))
            return _wrapped(int(number, 8 if number.startswith("0") and len(number) > 1 else 10))
        except ValueError:
            raise self.error() from None

    def name_at(self, at: int) -> tuple[str, str | None]:
        if at >= len(self.tokens) or not self.tokens[at][1]:
            raise self.error()
        return self.tokens[at][1], self.tokens[at][2]

    def named(self, at: int) -> int:
        name, subscript = self.name_at(at)
        value = self.variables.lookup(name, subscript[1:-1] if subscript else None)
        if value is None or not value.strip():
            return 0
        if is_unknown(value):
            raise UnknownNumberError(why_unknown(value))
        return _Evaluator(value, self.variables, self.depth + 1).whole()

    def store(self, name: str, subscript: str | None, value: int) -> int:
        value = _wrapped(value)
        self.variables.assign(name, str(value), subscript[1:-1] if subscript else None)
        return value

    def binary(self, operator: str, left: int, right_of: Callable[[], int]) -> int:
        right = right_of()
        if operator in ("/", "%"):
            if right == 0:
                raise InputError(f"division by zero: {self.text.strip()[:80]}")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if operator == "/" else left - quotient * right
        found = {
            "||": lambda: int(bool(left or right)),
            "&&": lambda: int(bool(left and right)),
            "|": lambda: left | right,
            "^": lambda: left ^ right,
            "&": lambda: left & right,
            "==": lambda: int(left == right),
            "!=": lambda: int(left != right),
            "<": lambda: int(left < right),
            "<=": lambda: int(left <= right),
            ">": lambda: int(left > right),
            ">=": lambda: int(left >= right),
            "<<": lambda: left << (right % 64),
            ">>": lambda: left >> (right % 64),
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
        }[operator]()
        return _wrapped(found)
