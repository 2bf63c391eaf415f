"""What a parsed shell script is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
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


@dataclass(frozen=True)
class SimpleCommand:
    """Assignments and words, in the order of the source."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Redirected:
    """A command with redirections."""

    command: Command
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`; `negated` by `!`."""

    commands: tuple[Command, ...]
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """`a && b || c`: the first command, then operator and command."""

    first: Command
    rest: tuple[tuple[str, Command], ...]


@dataclass(frozen=True)
class CommandList:
    """Commands in sequence; True for one in the background."""

    items: tuple[tuple[Command, bool], ...]


@dataclass(frozen=True)
class IfCommand:
    """Conditions with their bodies, and the body of `else`."""

    branches: tuple[tuple[CommandList, CommandList], ...]
    otherwise: CommandList | None


@dataclass(frozen=True)
class ForCommand:
    """`for name in words`; without `in`, over the arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: CommandList


@dataclass(frozen=True)
class ArithmeticFor:
    """`for ((start; condition; step))`."""

    clauses: tuple[str, str, str]
    body: CommandList


@dataclass(frozen=True)
class WhileCommand:
    """`while`, or `until`."""

    condition: CommandList
    body: CommandList
    until: bool


@dataclass(frozen=True)
class CaseCommand:
    """A word, and for each clause its patterns, body, and terminator (`;;`, `;&`, `;;&`)."""

    word: Word
    clauses: tuple[tuple[tuple[Word, ...], CommandList, str], ...]


@dataclass(frozen=True)
class FunctionDefinition:
    """`name() { ... }`."""

    name: str
    body: Command


@dataclass(frozen=True)
class CommandGroup:
    """`{ ...; }`, or with `subshell` `( ... )`."""

    body: CommandList
    subshell: bool


@dataclass(frozen=True)
class TestCommand:
    """`[[ ... ]]`."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class ArithmeticCommand:
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
