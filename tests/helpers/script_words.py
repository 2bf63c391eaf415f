"""The words of the trainers that launch scripts start, found without a shell: variables, arrays, sourced files.

Shares no code with trimtab's reader of scripts. What a script takes from outside (its arguments, files that are not
there, what commands print) is empty, except for what `GIVEN` says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

GIVEN = {"HOME": "/home/user", "DETECTED_GPUS": "8"}

_ARRAY = re.compile(r"^[ \t]*(\w+)(\+?)=\(((?:[^()\"'#]|\"[^\"]*\"|'[^']*'|#[^\n]*|\$\([^()]*\))*)\)", re.MULTILINE)
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)="
    r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|\$\(\([^\n]*\)\)|\$\{[^\n]*\}[^\s;()]*|[^\s;()]*)"
)
_DEFAULT = re.compile(r"^[ \t]*: +\"?\$\{(\w+):?=(.*)\}\"?[ \t]*(?:#.*)?$")
_SOURCED = re.compile(r"^[ \t]*(?:source|\.) +(\S+)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


@dataclass(frozen=True)
class Started:
    """A program and its words, as they would be started from the script's folder or above."""

    script: Path
    program: tuple[str, ...]
    words: tuple[str, ...]


class _Script:
    """A script while it is read, line by line."""

    def __init__(self, path: Path, given: dict[str, str]) -> None:
        self.path = path
        self.values: dict[str, str] = {**GIVEN, **given}
        self.arrays: dict[str, list[str]] = {}

    def filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            found = self.values.get(name, "")
            return found or (self.filled(match[2]) if match[2] else "")

        for _ in range(8):
            new = _SUM.sub(lambda match: self.computed(match[1]), _VARIABLE.sub(value, text))
            if new == text:
                break
            text = new
        return text

    def computed(self, text: str) -> str:
        # `a * b` of shell variables, which need no dollar.
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self.values.get(match[0], "") or "0", self.filled(text))
        if not re.fullmatch(r"[\d\s+*/()-]+", text):
            return ""
        return str(eval(text.replace("/", "//"), {"__builtins__": {}}))

    def split(self, text: str) -> list[str]:
        """The words of a command or an array, with arrays in place."""
        text = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
        text = re.sub(r"(?<=\s)#[^\n]*", "", text)
        found: list[str] = []
        lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, ""
        for word in lexer:
            name = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{(\w+)\[[@*]\]\+.*", word)
            if name:
                found += self.arrays.get(name[1] or name[2], [])
            elif filled := self.filled(word):
                found += [filled] if "=" in word or "{" in filled else filled.split()
        return found

    def read(self, text: str) -> None:
        """Assignments in order, each seen once; blocks are gone through as if every condition held."""
        at = 0
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[at:end]
            if array := _ARRAY.match(text, at):
                words = self.split(array[3])
                self.arrays[array[1]] = [*self.arrays.get(array[1], []), *words] if array[2] else words
                end = array.end()
            elif default := _DEFAULT.match(line):
                self.values[default[1]] = self.values.get(default[1]) or self.filled(default[2].strip('"'))
            elif sourced := _SOURCED.match(line):
                name = Path(self.filled(sourced[1].strip('"'))).name
                root = next((folder for folder in self.path.parents if (folder / ".git").exists()), self.path.parent)
                file = next((f for f in root.rglob(name) if f.is_file()), None)
                if file is not None:
                    self.read(file.read_text(errors="replace"))
            elif (own := _ASSIGNED.match(line)) and not line[own.end() :].strip().startswith(("(", "python", "uv")):
                value = own[2]
                if "$(" not in value.replace("$((", ""):
                    self.values[own[1]] = value[1:-1] if value[:1] == "'" else self.filled(value.strip('"')).strip('"')
            at = end + 1


def started(path: Path, programs: Sequence[str], given: dict[str, str] | None = None) -> Iterator[Started]:
    """What a script starts whose program matches one of the patterns."""
    text = path.read_text(errors="replace").replace("\\\n", " ")
    script = _Script(path, given or {})
    script.read(text)
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    for line in lines:
        found = re.search(rf"(?:python3?|uv run|-m)\b.*?({'|'.join(programs)})(?=\s|$)", line)
        if found is None or "echo" in line[: found.start()]:
            continue
        words = _SUM.sub(lambda match: script.computed(match[1]), line[found.end() :])
        rest = re.split(r"\s(?:2>|\||&>|>|&$|;)", words + " ")[0]
        yield Started(path, (found[1],), tuple(script.split(rest)))
