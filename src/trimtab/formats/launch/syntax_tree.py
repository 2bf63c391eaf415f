"""What a parsed shell script is made of."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.frozen import Frozen


class Word(Frozen):
    """A word's source text and place; `array` are the words of `name=(...)`."""

    text: str
    start: int
    line: int
    array: tuple[Word, ...] | None = None


@dataclass
class Redirect:
    """`2>&1`, `<file`, `<<EOF`. A here-document's body follows its line; with a quoted end it is not expanded."""

    operator: str
    descriptor: int
    target: Word
    body: str = ""

    @property
    def expands(self) -> bool:
        return not set("'\"\\") & set(self.target.text)


class SimpleCommand(Frozen):
    """Assignments and words, in the order of the source."""

    words: tuple[Word, ...]
    line: int


class Redirected(Frozen):
    """A command with redirections."""

    command: Command
    redirects: tuple[Redirect, ...]


class Pipeline(Frozen):
    """Commands joined by `|`; `negated` by `!`."""

    commands: tuple[Command, ...]
    negated: bool


class AndOr(Frozen):
    """`a && b || c`: the first command, then operator and command."""

    first: Command
    rest: tuple[tuple[str, Command], ...]


class CommandList(Frozen):
    """Commands in sequence; True for one in the background."""

    items: tuple[tuple[Command, bool], ...]


class IfCommand(Frozen):
    """Conditions with their bodies, and the body of `else`."""

    branches: tuple[tuple[CommandList, CommandList], ...]
    otherwise: CommandList | None


class ForCommand(Frozen):
    """`for name in words`; without `in`, over the arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: CommandList


class ArithmeticFor(Frozen):
    """`for ((start; condition; step))`."""

    clauses: tuple[str, str, str]
    body: CommandList


class WhileCommand(Frozen):
    """`while`, or `until`."""

    condition: CommandList
    body: CommandList
    until: bool


class CaseCommand(Frozen):
    """A word, and for each clause its patterns, body, and terminator (`;;`, `;&`, `;;&`)."""

    word: Word
    clauses: tuple[tuple[tuple[Word, ...], CommandList, str], ...]


class FunctionDefinition(Frozen):
    """`name() { ... }`."""

    name: str
    body: Command


class CommandGroup(Frozen):
    """`{ ...; }`, or with `subshell` `( ... )`."""

    body: CommandList
    subshell: bool


class TestCommand(Frozen):
    """`[[ ... ]]`."""

    words: tuple[Word, ...]
    line: int


class ArithmeticCommand(Frozen):
    """`(( ... ))`."""

    text: str
    line: int


Command = (
    SimpleCommand
    | Redirected
    | Pipeline
    | AndOr
    | CommandList
    | IfCommand
    | ForCommand
    | ArithmeticFor
    | WhileCommand
    | CaseCommand
    | FunctionDefinition
    | CommandGroup
    | TestCommand
    | ArithmeticCommand
)
