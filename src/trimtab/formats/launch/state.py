"""What a script has set at one point, and how two ways through it are joined.

Where a condition cannot be known, both ways are followed on copies; what they leave differently is unknown afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.core.frozen import Frozen
from trimtab.formats.launch.launch import unknown
from trimtab.formats.launch.syntax_tree import Command


class Flow(Exception):  # noqa: N818 - no error: how control leaves a block
    """`exit`, `return`, `break` or `continue`, with its number."""

    def __init__(self, kind: str, number: int | None = 0) -> None:
        super().__init__(kind)
        self.kind = kind
        self.number = number


class Variable(Frozen):
    """A text, or the elements of an array by index or key."""

    value: str | Mapping[int | str, str]
    exported: bool = False
    keyed: bool = False  # an associative array

    @property
    def elements(self) -> Mapping[int | str, str]:
        return {0: self.value} if isinstance(self.value, str) else self.value

    @property
    def text(self) -> str | None:
        return self.value if isinstance(self.value, str) else self.value.get(0)


@dataclass
class ShellState:
    """Variables, functions, arguments, folder, options and output of a shell."""

    variables: dict[str, Variable]
    folder: Path
    name: str = "bash"
    arguments: list[str] = field(default_factory=list)
    functions: dict[str, Command] = field(default_factory=dict)
    options: frozenset[str] = frozenset()
    status: int | None = 0
    output: list[str] = field(default_factory=list)
    files: dict[Path, str | None] = field(default_factory=dict)  # written by the script; None: a folder
    frames: list[dict[str, Variable | None]] = field(default_factory=list)  # what `local` hides, by function call
    sources: tuple[str, ...] = ()  # BASH_SOURCE
    calls: tuple[str, ...] = ()  # FUNCNAME
    stack: list[Path] = field(default_factory=list)  # pushd
    input: list[str] | None = None  # lines still to be read; shared by the commands of a loop

    def copy(self) -> ShellState:
        return replace(
            self,
            variables=dict(self.variables),
            arguments=list(self.arguments),
            functions=dict(self.functions),
            output=list(self.output),
            files=dict(self.files),
            stack=list(self.stack),
            frames=[dict(frame) for frame in self.frames],
            input=None if self.input is None else list(self.input),
        )

    def environment(self) -> dict[str, str]:
        return {name: found.text or "" for name, found in self.variables.items() if found.exported}


def joined(states: Sequence[ShellState], why: str, answers: Mapping[str, str]) -> ShellState:
    """The state after one of several ways, `why` not known which; `answers` are variables that were given."""
    first, *others = states
    result = first.copy()
    if not others:
        return result
    names = {name for state in states for name in state.variables}
    for name in names:
        found = [state.variables.get(name) for state in states]
        if any(value != found[0] for value in found):
            exported = any(value is not None and value.exported for value in found)
            value = answers.get(name) or unknown(f"the variable {name}: {why}")
            result.variables[name] = Variable(value, exported)
    if any(state.folder != first.folder for state in others):
        result.folder = max((state.folder for state in states), key=lambda folder: len(folder.parts))
    if any(state.status != first.status for state in others):
        result.status = None
    texts = ["".join(state.output) for state in states]
    if any(text != texts[0] for text in texts):
        result.output = [unknown(why)]
    if any(state.arguments != first.arguments for state in others):
        result.arguments = [unknown(why)]
    for state in others:
        result.functions = {**state.functions, **result.functions}
        for path, content in state.files.items():
            if result.files.get(path, content) != content:
                result.files[path] = unknown(why)
            else:
                result.files[path] = content
    return result
