"""Variables, arrays and files of a shell, as expansion and builtins see them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.launch import arithmetic, conditions, expansion, syntax
from trimtab.formats.launch import syntax_tree as tree
from trimtab.formats.launch.launch import Launch, is_unknown, known_part, unknown, why_unknown
from trimtab.formats.launch.state import ShellState, Variable

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
_NAMED = "the variable "
_SLURM = re.compile(r"SLURM_\w+\Z")


class ShellScope:
    """The state of a shell, and access to it by name."""

    def __init__(
        self,
        script: Path,
        folder: Path,
        environment: Mapping[str, str],
        answers: Mapping[str, str] | None = None,
        now: datetime | None = None,
    ) -> None:
        self.script = script
        self.answers = dict(answers or {})
        self.now = now or datetime.now()
        self.assumptions: list[str] = []
        self.missing: list[str] = []
        self.not_set: list[str] = []  # variables that were read without a value
        self.starts: list[Launch] = []
        self.steps = 0
        self.unfinished = False
        self.failed = False  # by `exit` or, with errexit, a command
        self.captured = ""
        self.depth = 0
        self.guarded = 0  # conditions, in which a failing command does not end the script
        self.line = 0
        self.in_text = False  # a command's text, whose lines are none of the script's
        self.in_slurm = False
        self.left_loop = False  # where it is unknown whether a loop ends, it does
        self.doubt = ""  # what made the last status unknown
        own = {**environment, **self.answers, "PWD": str(folder)}
        self.state = ShellState({name: Variable(value, exported=True) for name, value in own.items()}, folder)

    # -- what expansion needs ---------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.state.folder

    @property
    def where(self) -> str:
        return f"{self.script}:{self.line}" if self.line else str(self.script)

    def error(self, what: str, hint: str | None = None) -> InputError:
        return InputError(what, where=self.where, hint=hint)

    def lookup(self, name: str, subscript: str | None = None) -> str | None:
        state = self.state
        if name.isdigit():
            number = int(name[:6])
            if number == 0:
                return state.name
            return state.arguments[number - 1] if number <= len(state.arguments) else None
        special: dict[str, Callable[[], str]] = {
            "#": lambda: str(len(state.arguments)),
            "?": lambda: unknown("the status of a command") if state.status is None else str(state.status),
            "$": lambda: "4242",
            "!": lambda: "4243",
            "-": lambda: "",
            "RANDOM": lambda: unknown("RANDOM"),
            "SECONDS": lambda: "0",
            "LINENO": lambda: str(self.line),
            "EPOCHSECONDS": lambda: str(int(self.now.timestamp())),
            "BASH_VERSION": lambda: "5.2.15(1)-release",
            "HOSTNAME": lambda: unknown("HOSTNAME"),
        }
        if name in special:
            return special[name]()
        if name in ("BASH_SOURCE", "FUNCNAME"):
            values = state.sources if name == "BASH_SOURCE" else state.calls
            number = int(subscript) if subscript and subscript.isdigit() else 0
            return values[number] if number < len(values) else None
        found = state.variables.get(name)
        if found is None:
            if self.in_slurm and _SLURM.match(name):
                return unknown(f"{name}, which Slurm sets")
            return None
        if subscript is None:
            return found.text
        if isinstance(found.value, str) and is_unknown(found.value):
            return found.value
        return found.elements.get(self.key(subscript, found))

    def key(self, subscript: str, variable: Variable | None) -> int | str:
        text = expansion.text(subscript, self)
        if variable is not None and variable.keyed:
            return text
        number = arithmetic.evaluate(text, self)
        if is_unknown(number):
            return text
        found = int(number)
        if found < 0 and variable is not None:
            keys = [key for key in variable.elements if isinstance(key, int)]
            found += max(keys, default=-1) + 1
        return found

    def elements(self, name: str) -> Mapping[int | str, str]:
        if name == "BASH_SOURCE":
            return dict(enumerate(self.state.sources))
        found = self.state.variables.get(name)
        return {} if found is None else found.elements

    def positional(self) -> list[str]:
        return list(self.state.arguments)

    def names(self) -> list[str]:
        return sorted(self.state.variables)

    def unset(self, name: str) -> str:
        self.not_set.append(name)
        if "nounset" in self.state.options and name not in ("@", "*"):
            return unknown(f"{name}, which is not set")
        return ""

    def assign(self, name: str, value: str, subscript: str | None = None, *, append: bool = False) -> None:
        if name in self.answers and is_unknown(value):
            value = self.answers[name]
        if is_unknown(value) and not known_part(value) and not value[1:].startswith(_NAMED):
            value = unknown(f"{_NAMED}{name}: {why_unknown(value)}")
        old = self.state.variables.get(name)
        exported = old.exported if old else "allexport" in self.state.options
        if subscript is None and (old is None or isinstance(old.value, str)):
            before = (old.text or "") if old and append else ""
            self.state.variables[name] = Variable(before + value, exported)
            return
        key = self.key(subscript, old) if subscript is not None else 0
        elements = dict(old.elements) if old else {}
        elements[key] = (elements.get(key, "") if append else "") + value
        self.state.variables[name] = Variable(elements, exported, old.keyed if old else False)

    def assign_array(self, name: str, words: Sequence[tree.Word], *, append: bool, keyed: bool = False) -> None:
        old = self.state.variables.get(name)
        keyed = keyed or (old.keyed if old else False)
        elements: dict[int | str, str] = dict(old.elements) if old and append and old.value != "" else {}
        at = max((key for key in elements if isinstance(key, int)), default=-1) + 1
        for word in words:
            found = re.match(r"\[([^\]]*)\]=", word.text)
            if found:
                key = expansion.text(found[1], self) if keyed else self.key(found[1], None)
                elements[key] = expansion.text(word.text[found.end() :], self)
                at = key + 1 if isinstance(key, int) else at
                continue
            for field in expansion.fields(word.text, self):
                elements[at] = field
                at += 1
        if len(elements) > expansion.MAX_FIELDS:
            raise self.error(f"the array {name} is too long")
        self.state.variables[name] = Variable(elements, old.exported if old else False, keyed)

    def assignment(self, word: tree.Word, *, keyed: bool = False) -> str:
        """Carry out `name=value`; returns the name."""
        match = _ASSIGNMENT.match(word.text)
        assert match is not None
        if word.array is not None:
            self.assign_array(match[1], word.array, append=bool(match[3]), keyed=keyed)
        else:
            value = expansion.text(word.text[match.end() :], self)
            self.assign(match[1], value, match[2], append=bool(match[3]))
        return match[1]

    def substitute(self, text: str) -> str:
        raise NotImplementedError

    # -- files --------------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return Path(os.path.normpath(self.folder / name))

    def read(self, name: str) -> str | None:
        """A file's text: what the script wrote, or what is on the disk; None if it cannot be read."""
        if is_unknown(name):
            return None
        if name == "/dev/null":
            return ""
        path = self.path(name)
        if path in self.state.files:
            return self.state.files[path]
        try:
            if not path.is_file() or path.stat().st_size > syntax.MAX_CHARS:
                return None
            return path.read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def exists(self, operator: str, name: str) -> bool | None:
        path = self.path(name)
        if path in self.state.files:
            is_file = self.state.files[path] is not None
            return {"-d": not is_file, "-f": is_file}.get(operator, True)
        return conditions.file_holds(operator, path)
