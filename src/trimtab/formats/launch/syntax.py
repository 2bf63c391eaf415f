"""Parses shell scripts (the part of bash that launch scripts use) into commands whose words keep their source text.

Nothing is expanded here. A word is its text as it stands in the script, with its place; `expansion` reads it further.
A script that cannot be parsed is an InputError with the line, never a guess.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import CLOSE, OPEN
from trimtab.formats.launch.syntax_tree import (
    AndOr,
    ArithmeticCommand,
    ArithmeticFor,
    CaseCommand,
    Command,
    CommandGroup,
    CommandList,
    ForCommand,
    FunctionDefinition,
    IfCommand,
    Pipeline,
    Redirect,
    Redirected,
    SimpleCommand,
    TestCommand,
    WhileCommand,
    Word,
)

MAX_DEPTH = 60
MAX_CHARS = 2**20
_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "&", ";", "|", "(", ")", "\n")
_TEST_OPERATORS = ("&&", "||", "(", ")", "<", ">")
_REDIRECT = re.compile(r"(\d*)(&>>|&>|<<<|<<-|<<|<>|<&|>&|>>|>\||<|>)")
_ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^\]\s]*\])?\+?=\Z")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w ./-]*>")  # of a template: bash would not take it
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_END_WORD = set(" \t\n;&|<>()")
_RESERVED = {"then", "else", "elif", "fi", "do", "done", "esac", "}"}


@lru_cache(maxsize=256)
def parse(text: str, name: str = "the script") -> CommandList:
    """The commands of a script."""
    if len(text) > MAX_CHARS:
        raise InputError(f"the script is too long: at most {MAX_CHARS:,} characters are read", where=name)
    parser = _Parser(text.replace("\r\n", "\n"), name)
    try:
        found = parser.commands(())
    except RecursionError:
        raise InputError("the script is nested too deeply", where=name) from None
    if parser.at < len(parser.text):
        raise parser.error(f"unexpected {parser.text[parser.at]!r}")
    return found


def end_of_substitution(text: str, start: int, name: str = "the script") -> int:
    """The index of the `)` that closes `$(` whose commands start at `start`."""
    parser = _Parser(text, name)
    parser.at = start
    parser.commands((")",))
    parser.expect(")")
    return parser.at - 1


def end_of_braces(text: str, start: int) -> int:
    """The index of the `}` that closes `${` whose content starts at `start`; -1 if there is none."""
    at = start
    while at < len(text):
        char = text[at]
        if char == "}":
            return at
        at = after(text, at, in_braces=True)
    return -1


def end_of_arithmetic(text: str, start: int) -> int:
    """The index of the `))` that closes `$((` whose content starts at `start`; -1 if this is no arithmetic."""
    depth, at = 0, start
    while at < len(text):
        char = text[at]
        if char == "(":
            depth += 1
        elif char == ")":
            if depth == 0:
                return at if text.startswith("))", at) else -1
            depth -= 1
        elif char in f"$`'\"\\{OPEN}":
            at = after(text, at)
            continue
        at += 1
    return -1


def end_of_quotes(text: str, start: int) -> int:
    """The index of the `"` that ends the text starting at `start`; the length of the text if there is none."""
    at = start
    while at < len(text) and text[at] != '"':
        at = after(text, at, quoted=True)
    return at


def after(text: str, at: int, *, quoted: bool = False, in_braces: bool = False) -> int:
    """The index after the character, quoted text or expansion at `at`."""
    char = text[at]
    if char == OPEN:  # an unknown part, in a text that a command put together
        end = text.find(CLOSE, at)
        return len(text) if end < 0 else end + 1
    if char == "\\":
        return at + 2
    if char == "'" and not quoted:
        end = text.find("'", at + 1)
        if end < 0:
            raise InputError("a quote ' is not closed")
        return end + 1
    if char == '"' and (not quoted or in_braces):
        return end_of_quotes(text, at + 1) + 1
    if char == "`":
        at += 1
        while at < len(text) and text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return at + 1
    if char != "$" or at + 1 >= len(text):
        return at + 1
    if text.startswith("$((", at):
        end = end_of_arithmetic(text, at + 3)
        if end >= 0:
            return end + 2
    following = text[at + 1]
    if following == "(":
        return end_of_substitution(text, at + 2) + 1
    if following == "{":
        end = _end_of_quoted_braces(text, at + 2) if quoted else end_of_braces(text, at + 2)
        if end < 0:
            raise InputError("an expansion ${ is not closed")
        return end + 1
    if following == "'" and not quoted:
        at += 2
        while at < len(text) and text[at] != "'":
            at += 2 if text[at] == "\\" else 1
        return at + 1
    return at + 1


def _end_of_quoted_braces(text: str, start: int) -> int:
    """Inside double quotes, single quotes in `${...}` are plain characters."""
    at = start
    while at < len(text):
        if text[at] == "}":
            return at
        at = after(text, at, quoted=True, in_braces=True)
    return -1


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 0
        self.depth = 0
        self.here: list[Redirect] = []  # here-documents whose bodies follow the line
        self.lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, at: int | None = None) -> int:
        return bisect_right(self.lines, self.at if at is None else at)

    def error(self, what: str) -> InputError:
        return InputError(f"this script cannot be parsed: {what}", where=f"{self.name}:{self.line()}")

    # -- tokens ---------------------------------------------------------------------------------------------------

    def skip_blanks(self) -> None:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "\\" and self.at + 1 == len(text):
                self.at += 1
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def operator(self) -> str:
        """The operator here, not consumed; "" if there is none."""
        self.skip_blanks()
        if _REDIRECT.match(self.text, self.at) or self.text.startswith(("<(", ">("), self.at):
            return ""
        return next((op for op in _OPERATORS if self.text.startswith(op, self.at)), "")

    def take(self, operator: str) -> bool:
        if self.operator() != operator:
            return False
        self.at += len(operator)
        if operator == "\n":
            self.read_here_documents()
        return True

    def expect(self, operator: str) -> None:
        if not self.take(operator):
            raise self.error(f"{operator!r} is missing")

    def newlines(self) -> None:
        while self.take("\n"):
            pass

    def peek_word(self) -> str:
        """The plain word here (reserved words have no quotes), not consumed."""
        self.skip_blanks()
        found = re.compile(r"[^\s;&|<>()\"'$`\\#]*").match(self.text, self.at)
        return found[0] if found else ""

    def take_word(self, *words: str) -> str:
        """The reserved word here if it is one of these, consumed; else ""."""
        found = self.peek_word()
        after = self.at + len(found)
        if found in words and (after >= len(self.text) or self.text[after] in _END_WORD):
            self.at = after
            return found
        return ""

    def expect_word(self, word: str) -> None:
        if not self.take_word(word):
            raise self.error(f"{word!r} is missing")

    def read_here_documents(self) -> None:
        for redirect in self.here:
            end = re.sub(r"[\"'\\]", "", redirect.target.text)
            lines: list[str] = []
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if redirect.operator == "<<-":
                    line = line.lstrip("\t")
                if line == end:
                    break
                lines.append(line)
            redirect.body = "".join(f"{line}\n" for line in lines)
        self.here = []

    def word(self) -> Word | None:
        self.skip_blanks()
        text, start = self.text, self.at
        while self.at < len(text):
            char = text[self.at]
            if char == "<" and text[start : self.at].endswith("=") and (found := PLACEHOLDER.match(text, self.at)):
                self.at = found.end()
                continue
            if char in "<>" and text.startswith("(", self.at + 1):
                self.at = end_of_substitution(text, self.at + 2, self.name) + 1
                continue
            if char == "(":
                if self.at > start and _ARRAY.match(text[start : self.at]):
                    return self.array(start)
                if self.at > start and text[self.at - 1] in "?*+@!":
                    self.at = self.matching_paren()
                    continue
            if char in _END_WORD:
                break
            try:
                self.at = after(text, self.at)
            except InputError as error:
                if not error.where or error.where.startswith("the script"):
                    error.where = f"{self.name}:{self.line(start)}"
                raise
        if self.at > len(text):
            self.at = len(text)
        return Word(text[start : self.at], start, self.line(start)) if self.at > start else None

    def matching_paren(self) -> int:
        depth, at = 0, self.at
        while at < len(self.text):
            if self.text[at] == "(":
                depth += 1
            elif self.text[at] == ")":
                depth -= 1
                if depth == 0:
                    return at + 1
            at = after(self.text, at) if self.text[at] in "'\"\\$`" else at + 1
        raise self.error("'(' is not closed")

    def array(self, start: int) -> Word:
        self.at += 1
        words: list[Word] = []
        while True:
            self.newlines()
            if self.take(")"):
                return Word(self.text[start : self.at], start, self.line(start), tuple(words))
            found = self.word()
            if found is None:
                raise self.error("an array ( is not closed")
            words.append(found)

    def redirects(self) -> list[Redirect]:
        found: list[Redirect] = []
        while True:
            self.skip_blanks()
            match = _REDIRECT.match(self.text, self.at)
            if match is None or (match[2] in "<>" and self.text.startswith("(", match.end())):
                return found
            self.at = match.end()
            target = self.word()
            if target is None:
                raise self.error(f"nothing follows {match[2]}")
            descriptor = int(match[1][:4]) if match[1] else 0 if match[2].startswith("<") else 1
            found.append(Redirect(match[2], descriptor, target))
            if match[2] in ("<<", "<<-"):
                self.here.append(found[-1])

    # -- commands -------------------------------------------------------------------------------------------------

    def commands(self, ends: tuple[str, ...]) -> CommandList:
        """Commands until one of these operators or reserved words, which is not consumed."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("it is nested too deeply")
        items: list[tuple[Command, bool]] = []
        while True:
            self.newlines()
            if self.at >= len(self.text) or self.operator() in ends or self.peek_word() in ends:
                break
            command = self.and_or()
            background = False
            if self.take("&"):
                background = True
            elif not self.take(";") and self.operator() not in ("\n", *ends) and self.at < len(self.text):
                raise self.error(f"unexpected {self.text[self.at : self.at + 20].split(chr(10))[0]!r}")
            items.append((command, background))
        self.depth -= 1
        return CommandList(tuple(items))

    def and_or(self) -> Command:
        first = self.pipeline()
        rest: list[tuple[str, Command]] = []
        while (operator := self.operator()) in ("&&", "||"):
            self.take(operator)
            self.newlines()
            rest.append((operator, self.pipeline()))
        return AndOr(first, tuple(rest)) if rest else first

    def pipeline(self) -> Command:
        negated = False
        while self.take_word("!"):
            negated = not negated
        commands = [self.command()]
        while (operator := self.operator()) in ("|", "|&"):
            self.take(operator)
            self.newlines()
            commands.append(self.command())
        return Pipeline(tuple(commands), negated) if negated or len(commands) > 1 else commands[0]

    def command(self) -> Command:
        compound = self.compound()
        if compound is None:
            return self.simple()
        redirects = self.redirects()
        return Redirected(compound, tuple(redirects)) if redirects else compound

    def simple(self) -> Command:
        words: list[Word] = []
        redirects: list[Redirect] = []
        self.skip_blanks()
        line = self.line()
        while True:
            redirects += self.redirects()
            found = self.word()
            if found is None:
                break
            if not words and found.text in _RESERVED:
                self.at = found.start
                raise self.error(f"unexpected {found.text!r}")
            words.append(found)
            if len(words) == 1 and self.operator() == "(" and re.match(r"[\w.:-]+\Z", found.text):
                self.take("(")
                self.expect(")")
                self.newlines()
                return FunctionDefinition(found.text, self.command())
        if not words and not redirects:
            raise self.error(f"unexpected {self.text[self.at : self.at + 10]!r}" if self.at < len(self.text) else "end")
        command = SimpleCommand(tuple(words), line)
        return Redirected(command, tuple(redirects)) if redirects else command

    def compound(self) -> Command | None:
        self.skip_blanks()
        line = self.line()
        if self.text.startswith("((", self.at):
            end = end_of_arithmetic(self.text, self.at + 2)
            if end >= 0:
                text = self.text[self.at + 2 : end]
                self.at = end + 2
                return ArithmeticCommand(text, line)
        if self.take("("):
            body = self.commands((")",))
            self.expect(")")
            return CommandGroup(body, subshell=True)
        word = self.take_word("{", "if", "for", "select", "while", "until", "case", "function", "[[")
        forms: dict[str, Callable[[], Command]] = {
            "{": self.group,
            "if": self.if_command,
            "for": self.for_command,
            "select": self.for_command,
            "while": lambda: self.loop(until=False),
            "until": lambda: self.loop(until=True),
            "case": self.case_command,
            "function": self.function,
            "[[": self.test_command,
        }
        return forms[word]() if word else None

    def group(self) -> Command:
        body = self.commands(("}",))
        self.expect_word("}")
        return CommandGroup(body, subshell=False)

    def if_command(self) -> Command:
        branches = []
        otherwise = None
        while True:
            condition = self.commands(("then",))
            self.expect_word("then")
            branches.append((condition, self.commands(("elif", "else", "fi"))))
            found = self.take_word("elif", "else", "fi")
            if found == "elif":
                continue
            if found == "else":
                otherwise = self.commands(("fi",))
                self.expect_word("fi")
            elif found != "fi":
                raise self.error("'fi' is missing")
            return IfCommand(tuple(branches), otherwise)

    def do_body(self) -> CommandList:
        self.take(";")
        self.newlines()
        if self.take_word("{"):
            body = self.commands(("}",))
            self.expect_word("}")
            return body
        self.expect_word("do")
        body = self.commands(("done",))
        self.expect_word("done")
        return body

    def for_command(self) -> Command:
        self.skip_blanks()
        if self.text.startswith("((", self.at):
            end = end_of_arithmetic(self.text, self.at + 2)
            clauses = self.text[self.at + 2 : end].split(";") if end >= 0 else []
            if len(clauses) != 3:
                raise self.error("for (( needs three expressions")
            self.at = end + 2
            return ArithmeticFor((clauses[0], clauses[1], clauses[2]), self.do_body())
        name = self.word()
        if name is None or not _NAME.match(name.text):
            raise self.error("for needs a name")
        self.newlines()
        words: list[Word] | None = None
        if self.take_word("in"):
            words = []
            while (found := self.word()) is not None:
                words.append(found)
        return ForCommand(name.text, None if words is None else tuple(words), self.do_body())

    def loop(self, *, until: bool) -> Command:
        condition = self.commands(("do",))
        return WhileCommand(condition, self.do_body(), until)

    def case_command(self) -> Command:
        word = self.word()
        self.newlines()
        if word is None or not self.take_word("in"):
            raise self.error("case needs a word and 'in'")
        clauses: list[tuple[tuple[Word, ...], CommandList, str]] = []
        while True:
            self.newlines()
            if self.take_word("esac"):
                return CaseCommand(word, tuple(clauses))
            self.take("(")
            patterns: list[Word] = []
            while True:
                pattern = self.word()
                if pattern is None:
                    raise self.error("a pattern of case is missing")
                patterns.append(pattern)
                if not self.take("|"):
                    break
            self.expect(")")
            body = self.commands((";;", ";&", ";;&", "esac"))
            end = self.operator()
            if end in (";;", ";&", ";;&"):
                self.take(end)
            clauses.append((tuple(patterns), body, end or ";;"))

    def function(self) -> Command:
        name = self.word()
        if name is None:
            raise self.error("a function needs a name")
        if self.take("("):
            self.expect(")")
        self.newlines()
        return FunctionDefinition(name.text, self.command())

    def test_command(self) -> Command:
        line = self.line()
        words: list[Word] = []
        while True:
            self.skip_blanks()
            if self.text.startswith("\n", self.at):
                self.at += 1
            elif self.at >= len(self.text):
                raise self.error("[[ is not closed")
            elif self.take_word("]]"):
                return TestCommand(tuple(words), line)
            elif words and words[-1].text == "=~":
                words.append(self.regex())
            elif found := next(
                (op for op in ("&&", "||", "(", ")", "<", ">") if self.text.startswith(op, self.at)), ""
            ):
                words.append(Word(found, self.at, line))
                self.at += len(found)
            else:
                word = self.word()
                if word is None:
                    raise self.error(f"unexpected {self.text[self.at]!r}")
                words.append(word)

    def regex(self) -> Word:
        """A regular expression: parentheses and bars belong to it."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n" and depth == 0:
                break
            depth += (char == "(") - (char == ")")
            self.at = after(self.text, self.at) if char in "'\"\\$`" else self.at + 1
        return Word(self.text[start : self.at], start, self.line(start))
