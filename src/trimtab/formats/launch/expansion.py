"""Expands words as bash does: braces, parameters, commands, arithmetic, field splitting, file names, quotes.

What only running something could tell is a marker in the text (`launch.unknown`): it spreads through whatever is built
from it, and an operation that needs the value gives an unknown result.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trimtab.core.errors import InputError
from trimtab.formats.launch import arithmetic, syntax
from trimtab.formats.launch.launch import CLOSE, OPEN, is_unknown, known_part, unknown, why_unknown

MAX_TEXT = 2**18
MAX_FIELDS = 10_000
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[((?:[^\[\]]|\[[^\]]*\])*)\])?")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v", "0": "\0"}


class Scope(arithmetic.Variables, Protocol):
    """What expansion needs of a shell."""

    @property
    def folder(self) -> Path: ...

    def elements(self, name: str) -> Mapping[int | str, str]: ...

    def positional(self) -> list[str]: ...

    def substitute(self, text: str) -> str: ...

    def unset(self, name: str) -> str: ...

    def names(self) -> list[str]: ...


Piece = tuple[str, bool | None]
"""Text and whether it is quoted: None for text of the script itself, which is not split; `_BREAK` ends a field."""
_BREAK: Piece = ("\ue002", True)
_VANISHES: Piece = ("\ue003", True)  # "$@" without arguments: no field at all


def fields(word: str, scope: Scope, *, assignment: bool = False) -> list[str]:
    """The fields of a word, in a command or a `for`; an assignment among arguments is one field."""
    if assignment:
        return [text(word, scope)]
    found: list[str] = []
    for braced in _braces(word):
        found += _split(_pieces(braced, scope, quoted=False, tilde=True), scope)
        if len(found) > MAX_FIELDS:
            raise InputError(f"a word expands to more than {MAX_FIELDS:,} fields: {word[:60]}")
    return found


def text(word: str, scope: Scope, *, quoted: bool = False) -> str:
    """A word as one text: in assignments, `case`, redirections and here-documents (`quoted`)."""
    parts = (
        " " if piece is _BREAK else "" if piece is _VANISHES else piece[0]
        for piece in _pieces(word, scope, quoted=quoted, tilde=not quoted)
    )
    return _bounded("".join(parts))


def pattern(word: str, scope: Scope) -> str | None:
    """A word as a regular expression for a glob pattern; None if it is unknown."""
    pieces = [p for p in _pieces(word, scope, quoted=False, tilde=True) if p is not _VANISHES and p is not _BREAK]
    return None if any(is_unknown(piece[0]) for piece in pieces) else glob_regex(pieces)


def regex(word: str, scope: Scope) -> str | None:
    """The right side of `=~`: quoted parts are literal."""
    pieces = _pieces(word, scope, quoted=False, tilde=False)
    if any(is_unknown(piece[0]) for piece in pieces):
        return None
    return "".join(re.escape(part) if is_quoted else part for part, is_quoted in pieces)


def _bounded(value: str) -> str:
    if len(value) > MAX_TEXT:
        raise InputError(f"a value grows beyond {MAX_TEXT:,} characters: {value[:40]!r}")
    return value


# ---- braces ---------------------------------------------------------------------------------------------------------


def _braces(word: str) -> list[str]:
    """Brace expansion, on the source text: `{a,b}` and `{1..3}` outside quotes."""
    if "{" not in word:
        return [word]
    at = 0
    while at < len(word):
        if word[at] == "{":
            parts, end = _brace_parts(word, at)
            if parts:
                after = _braces(word[end:])
                if len(parts) * len(after) > MAX_FIELDS:
                    raise InputError(f"a word expands to more than {MAX_FIELDS:,} fields: {word[:60]}")
                return [word[:at] + part + rest for part in parts for rest in after]
            at += 1
        else:
            at = syntax.after(word, at)
    return [word]


def _brace_parts(word: str, start: int) -> tuple[list[str], int]:
    """The alternatives of a brace expression and where it ends; none if it is plain text."""
    depth, at, last, parts = 0, start, start + 1, []
    while at < len(word):
        char = word[at]
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                break
        elif char == "," and depth == 1:
            parts.append(word[last:at])
            last = at + 1
        elif char in f"$'\"`\\{OPEN}":
            at = syntax.after(word, at)
            continue
        at += 1
    else:
        return [], start
    inner = word[start + 1 : at]
    if parts:
        return [found for part in [*parts, word[last:at]] for found in _braces(part)], at + 1
    found = re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?", inner)
    if found:
        first, stop, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
        if abs(stop - first) // step > MAX_FIELDS:
            raise InputError(f"a word expands to more than {MAX_FIELDS:,} fields: {word[:60]}")
        width = max(map(len, found.group(1, 2))) if re.match(r"-?0\d", found[1]) or re.match(r"-?0\d", found[2]) else 0
        numbers = range(first, stop + 1, step) if first <= stop else range(first, stop - 1, -step)
        return [f"{number:0{width}d}" for number in numbers], at + 1
    if letters := re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", inner):
        first, stop = ord(letters[1]), ord(letters[2])
        return [chr(code) for code in (range(first, stop + 1) if first <= stop else range(first, stop - 1, -1))], at + 1
    return [], start


# ---- pieces ---------------------------------------------------------------------------------------------------------


def _pieces(word: str, scope: Scope, *, quoted: bool, tilde: bool = False, in_braces: bool = False) -> list[Piece]:
    found: list[Piece] = []
    at = 0
    if tilde and word.startswith("~") and (len(word) == 1 or word[1] == "/"):
        found.append((scope.lookup("HOME") or "~", True))
        at = 1
    while at < len(word):
        char = word[at]
        if char == OPEN:
            end = syntax.after(word, at)
            found.append((word[at:end], True))
            at = end
        elif char == "\\":
            following = word[at + 1 : at + 2]
            at += 2
            if following == "\n":
                continue
            if quoted and following not in set('$`"\\'):
                found.append((f"\\{following}", True))
            else:
                found.append((following, True))
        elif char == '"' and in_braces and quoted:  # "${x:-"y"}"
            at += 1
        elif char == "'" and not quoted:
            end = word.find("'", at + 1)
            end = len(word) if end < 0 else end
            found.append((word[at + 1 : end], True))
            at = end + 1
        elif char == '"' and not quoted:
            end = syntax.end_of_quotes(word, at + 1)
            inner = _pieces(word[at + 1 : end], scope, quoted=True)
            found += inner or [("", True)]
            at = end + 1
        elif char == "$":
            pieces, at = _dollar(word, at, scope, quoted)
            found += pieces
        elif char == "`":
            end = syntax.after(word, at)
            inner_text = re.sub(r"\\([$`\\])", r"\1", word[at + 1 : end - 1])
            found.append((scope.substitute(inner_text), quoted))
            at = end
        elif char in "<>" and not quoted and word.startswith("(", at + 1):
            end = syntax.end_of_substitution(word, at + 2)
            found.append((unknown(f"what {' '.join(word[at : end + 1].split())[:60]} gives"), True))
            at = end + 1
        elif char == "<" and not quoted and (place := syntax.PLACEHOLDER.match(word, at)):
            found.append((unknown(f"the placeholder {place[0]}"), True))
            at = place.end()
        else:
            end = at + 1
            while end < len(word) and word[end] not in f"\\'\"$`<>{OPEN}":
                end += 1
            found.append((word[at:end], quoted or None))
            at = end
    return found


def _dollar(word: str, at: int, scope: Scope, quoted: bool) -> tuple[list[Piece], int]:
    """The pieces of an expansion that starts with the `$` at `at`, and where it ends."""
    if word.startswith("$((", at):
        end = syntax.end_of_arithmetic(word, at + 3)
        if end >= 0:
            inner = text(word[at + 3 : end], scope, quoted=True)
            return [(arithmetic.evaluate(inner, scope), quoted)], end + 2
    if word.startswith("$(", at):
        end = syntax.end_of_substitution(word, at + 2)
        return [(scope.substitute(word[at + 2 : end]), quoted)], end + 1
    if word.startswith("${", at):
        after = syntax.after(word, at, quoted=quoted)
        return _parameter(word[at + 2 : after - 1], scope, quoted), after
    if word.startswith("$'", at) and not quoted:
        after = syntax.after(word, at)
        return [(_ansi(word[at + 2 : after - 1]), True)], after
    if word.startswith('$"', at) and not quoted:
        return [], at + 1
    found = _NAME.match(word, at + 1)
    if found is None:
        return [("$", quoted)], at + 1
    return _parameter(found[0], scope, quoted), found.end()


def _ansi(value: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:x([0-9a-fA-F]{1,2})|(.))", one, value, flags=re.DOTALL)


def _parameter(content: str, scope: Scope, quoted: bool) -> list[Piece]:
    if content.startswith("#") and len(content) > 1 and (found := _PARAMETER.fullmatch(content, 1)):
        return [(_length(found[1], found[2], scope), quoted)]
    if content.startswith("!") and len(content) > 1 and (found := _PARAMETER.match(content, 1)):
        if found[2] in ("@", "*"):
            return _listed([str(key) for key in scope.elements(found[1])], quoted, joined=found[2] == "*")
        if content[found.end() :] in ("*", "@"):
            return _listed([n for n in scope.names() if n.startswith(found[1])], quoted, joined=True)
        target = scope.lookup(found[1], found[2]) or ""
        if is_unknown(target):
            return [(unknown(why_unknown(target)), quoted)]
        return _parameter(target + content[found.end() :], scope, quoted) if target else []
    found = _PARAMETER.match(content)
    if found is None:
        raise InputError(f"this expansion cannot be read: ${{{content[:60]}}}")
    name, subscript, rest = found[1], found[2], content[found.end() :]
    many = name in ("@", "*") or subscript in ("@", "*")
    values: list[str] | None = None
    if name in ("@", "*"):
        values = scope.positional()
    elif many:
        values = list(scope.elements(name).values())
    else:
        value = scope.lookup(name, subscript)
        values = None if value is None else [value]
    default = re.match(r":?[-=?+]", rest)
    if default is not None:
        return _with_default(name, subscript, values, default[0], rest[default.end() :], scope, quoted, many)
    if values is None:
        value = scope.unset(name)
        return [(value, quoted)] if value or quoted else []
    if rest:
        values = _operated(values, rest, scope, many and name in ("@", "*"))
    if many:
        return _listed(values, quoted, joined=(name == "*" or subscript == "*"), separator=scope)
    return [(values[0], quoted)] if values else []


def _listed(values: list[str], quoted: bool, *, joined: bool, separator: Scope | None = None) -> list[Piece]:
    if joined and quoted:
        between = separator.lookup("IFS") if separator is not None else None
        return [((" " if between is None else between[:1]).join(values), True)]
    if not values:
        return [_VANISHES] if quoted else []
    pieces: list[Piece] = []
    for value in values:
        pieces += [(value, quoted), _BREAK]
    return pieces[:-1]


def _length(name: str, subscript: str | None, scope: Scope) -> str:
    if name in ("@", "*"):
        return str(len(scope.positional()))
    if subscript in ("@", "*"):
        values = scope.elements(name)
        return (
            str(len(values))
            if not any(is_unknown(value) for value in values.values())
            else unknown(next(why_unknown(value) for value in values.values() if is_unknown(value)))
        )
    value = scope.lookup(name, subscript) or ""
    return unknown(why_unknown(value)) if is_unknown(value) else str(len(value))


def _with_default(
    name: str,
    subscript: str | None,
    values: list[str] | None,
    operator: str,
    word: str,
    scope: Scope,
    quoted: bool,
    many: bool,
) -> list[Piece]:
    joined = " ".join(values or ())
    is_set = values is not None and (not many or bool(values)) and (":" not in operator or bool(joined))
    kind = operator[-1]
    if kind == "+":
        if is_set and is_unknown(joined) and ":" in operator and not known_part(joined):
            return [(unknown(why_unknown(joined)), quoted)]
        return _expanded(word, scope, quoted) if is_set else []
    if is_set and values is not None:
        return _listed(values, quoted, joined=False) if many else [(values[0], quoted)]
    if kind == "?":
        what = text(word, scope, quoted=True)
        return [(unknown(f"{name}, which is not set{f': {what}' if what else ''}"), quoted)]
    pieces = _expanded(word, scope, quoted)
    if kind == "=":
        value = "".join(piece[0] for piece in pieces if piece not in (_BREAK, _VANISHES))
        scope.assign(name, value, subscript)
        return [(value, quoted)]
    return pieces or ([("", True)] if quoted else [])


def _expanded(word: str, scope: Scope, quoted: bool) -> list[Piece]:
    """The word after `:-`: its own text is split like an expansion."""
    pieces = _pieces(word, scope, quoted=quoted, tilde=True, in_braces=True)
    return [piece if piece[1] is not None else (piece[0], False) for piece in pieces]


def _operated(values: list[str], rest: str, scope: Scope, positional: bool) -> list[str]:
    """`#`, `%`, `/`, `^`, `,`, `:offset:length` and `@Q` on every value."""
    if rest.startswith(":"):
        return _sliced(values, rest[1:], scope, positional)
    if rest.startswith("@"):
        return [f"'{value}'" if rest[1:] == "Q" else value for value in values]
    return [unknown(why_unknown(v)) if is_unknown(v) else _bounded(_changed(v, rest, scope)) for v in values]


def _changed(value: str, rest: str, scope: Scope) -> str:
    if match := re.match(r"(\^\^?|,,?)", rest):
        change = str.upper if rest[0] == "^" else str.lower
        return change(value) if len(match[1]) == 2 else change(value[:1]) + value[1:]
    if match := re.match(r"(##?|%%?)", rest):
        found = pattern(rest[match.end() :], scope)
        if found is None:
            return unknown(f"a pattern in ${{...{rest}}}")
        cuts = range(len(value) + 1)
        if rest[0] == "#":
            order = reversed(cuts) if len(match[1]) == 2 else iter(cuts)
            return next((value[cut:] for cut in order if _matches(found, value[:cut])), value)
        order = iter(cuts) if len(match[1]) == 2 else reversed(cuts)
        return next((value[:cut] for cut in order if _matches(found, value[cut:])), value)
    if match := re.match(r"/([/#%]?)", rest):
        return _replaced(value, match[1], rest[match.end() :], scope)
    raise InputError(f"this expansion cannot be read: ${{...{rest[:40]}}}")


def _replaced(value: str, where: str, rest: str, scope: Scope) -> str:
    at = 0
    while at < len(rest) and rest[at] != "/":
        at = syntax.after(rest, at)
    found = pattern(rest[:at], scope)
    new = text(rest[at + 1 :], scope)
    if found is None or is_unknown(new):
        return unknown(why_unknown(new) or "a pattern")
    if not found and where in ("#", "%"):
        return new + value if where == "#" else value + new
    if not found or _costly(found, value):
        return value if not found else unknown("a pattern that takes too long")
    wanted = {"#": rf"\A(?:{found})", "%": rf"(?:{found})\Z"}.get(where, found)
    return re.sub(wanted, lambda _: new, value, count=0 if where == "/" else 1, flags=re.DOTALL)


def _sliced(values: list[str], rest: str, scope: Scope, positional: bool) -> list[str]:
    first, colon, second = rest.partition(":")
    numbers = []
    for part in (first, second) if colon else (first,):
        number = arithmetic.evaluate(text(part, scope, quoted=True), scope)
        if is_unknown(number):
            return [unknown(why_unknown(number))]
        numbers.append(int(number))
    whole: list[str] | str = values if positional or len(values) != 1 else values[0]
    if isinstance(whole, str) and is_unknown(whole):
        return [unknown(why_unknown(whole))]
    start = numbers[0] - 1 if positional and numbers[0] > 0 else numbers[0]
    start = max(0, len(whole) + start) if start < 0 else start
    end = len(whole) if len(numbers) == 1 else start + numbers[1] if numbers[1] >= 0 else len(whole) + numbers[1]
    cut = whole[start:end]
    return [cut] if isinstance(cut, str) else list(cut)


# ---- patterns and fields --------------------------------------------------------------------------------------------


def glob_regex(pieces: list[Piece]) -> str:
    """A regular expression for a glob pattern whose quoted parts are literal."""
    found = ""
    plain = [(char, quoted) for part, quoted in pieces for char in part]
    at = 0
    while at < len(plain):
        char, quoted = plain[at]
        at += 1
        if quoted:
            found += re.escape(char)
        elif char in "?*+@!" and at < len(plain) and plain[at] == ("(", False):
            end = next((i for i in range(at, len(plain)) if plain[i] == (")", False)), None)
            if end is None or char == "!":
                found += re.escape(char)
                continue
            options = "".join(c if c == "|" else re.escape(c) for c, _ in plain[at + 1 : end])
            found += f"(?:{options}){'' if char == '@' else char}"
            at = end + 1
        elif char == "*":
            found += "" if found.endswith(".*") else ".*"
        elif char == "?":
            found += "."
        elif char == "[":
            end = next((i for i in range(at + 1, len(plain)) if plain[i][0] == "]"), None)
            inner = "".join(c for c, _ in plain[at:end]) if end is not None else ""
            if end is None or not re.fullmatch(r"[!^]?(\[:\w+:\]?|[\w\s.,:/@%+=~-])+", inner):
                found += re.escape(char)
                continue
            named = {"[:digit:": "0-9", "[:space:": r"\s", "[:alpha:": "A-Za-z", "[:alnum:": "A-Za-z0-9"}
            for name, chars in named.items():
                if inner.lstrip("!^").startswith(name) and plain[end + 1 : end + 2] == [("]", False)]:
                    inner, end = inner.replace(name, chars), end + 1
            found += f"[{'^' if inner[0] in '!^' else ''}{inner.lstrip('!^')}]"
            at = end + 1
        else:
            found += re.escape(char)
    return found


def _costly(found: str, value: str) -> bool:
    """Whether matching could take more than a moment: many stars on a long text."""
    return found.count("*") + found.count("+") > 3 and len(value) > 500


def _matches(found: str, value: str) -> bool:
    return not _costly(found, value) and re.fullmatch(found, value, re.DOTALL) is not None


def _split(pieces: list[Piece], scope: Scope) -> list[str]:
    """Pieces as fields: unquoted expansions were marked by the caller as unquoted text, and split at IFS."""
    separators = scope.lookup("IFS")
    separators = " \t\n" if separators is None else separators
    found: list[list[Piece]] = []
    current: list[Piece] | None = None
    for piece in pieces:
        if piece is _BREAK:
            found.append(current if current is not None else [])
            current = []
            continue
        if piece is _VANISHES:
            continue
        value, quoted = piece
        if quoted or quoted is None or not separators:
            current = [*(current or ()), piece]
            continue
        parts = at_separators(value, separators)
        for index, part in enumerate(parts):
            if index:
                if current is not None:
                    found.append(current)
                current = None
            if part:
                current = [*(current or ()), (part, False)]
    if current is not None and (current or not found):
        found.append(current)
    return list(itertools.chain.from_iterable(_file_names(field, scope) for field in found if field))


def at_separators(value: str, separators: str) -> list[str]:
    parts, depth = [""], 0
    for char in value:
        depth += (char == OPEN) - (char == CLOSE)
        if char in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _file_names(field: list[Piece], scope: Scope) -> Iterator[str]:
    value = _bounded("".join(part for part, _ in field))
    if not any(not quoted and set("*?[") & set(part) for part, quoted in field) or is_unknown(value):
        yield value
        return
    escaped = "".join(glob.escape(part) if quoted else part for part, quoted in field)
    # What no file is named like stays as it is; `**` and folders above the root would be walked for long.
    try:
        names = sorted(itertools.islice(glob.iglob(escaped, root_dir=scope.folder), MAX_FIELDS))
    except (OSError, ValueError, re.error):
        names = []
    yield from names if names and "**" not in escaped and os.sep * 2 not in escaped else [value]
