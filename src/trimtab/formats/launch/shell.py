"""Evaluates a launch script without running anything: which programs it would start, with which arguments.

Assignments, expansions, conditions, loops, functions and sourced files are evaluated; of commands only those of
`commands` are computed. Every other command is a start: it is noted with its arguments and environment, its output and
status are unknown, and never does it run. Steps, sizes and depth are bounded, so that every script ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.files import unreadable
from trimtab.formats.launch import arithmetic, conditions, expansion, syntax
from trimtab.formats.launch import syntax_tree as tree
from trimtab.formats.launch.commands import COMMANDS, Call
from trimtab.formats.launch.launch import is_unknown, unknown, why_unknown
from trimtab.formats.launch.scope import ShellScope
from trimtab.formats.launch.shell_builtins import BUILTINS, DECLARING, declare
from trimtab.formats.launch.state import Flow, Variable, joined
from trimtab.formats.launch.wrappers import slurm_variables, start

MAX_STEPS = 50_000
MAX_DEPTH = 40
MAX_ITERATIONS = 2_000
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
_WHOLE_VARIABLE = re.compile(r"""[^\s=]+=["']?\$\{?([A-Za-z_]\w*)\}?["']?\Z""")


class Shell(ShellScope):
    """A shell that evaluates a script; `starts` are the programs that it would have started."""

    def substitute(self, text: str) -> str:
        """The output of `$(...)`."""
        if content := re.fullmatch(r"\s*<\s*(\S+)\s*", text):
            name = expansion.text(content[1], self)
            return (self.read(name) or unknown(f"what {name} holds")).rstrip("\n")
        commands = syntax.parse(text, str(self.script))
        in_text, self.in_text = self.in_text, True
        with self.subshell():
            self.run(commands)
        self.in_text = in_text
        return self.captured.rstrip("\n")

    @contextmanager
    def subshell(self) -> Iterator[None]:
        """A copy of the state, dropped afterwards except its files; `captured` is what it printed; `exit` ends it."""
        outer = self.state
        self.state = outer.copy()
        self.state.output = []
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("the script calls itself too deeply")
        try:
            yield
        except Flow as flow:
            if flow.kind == "exit":
                self.state.status, self.failed = flow.number, bool(flow.number)
        finally:
            self.depth -= 1
            self.captured = "".join(self.state.output)
            outer.files, outer.status = self.state.files, self.state.status
            self.state = outer

    # -- running ------------------------------------------------------------------------------------------------------

    def at_line(self, line: int) -> None:
        if not self.in_text:
            self.line = line

    def assumed(self, what: str) -> None:
        if what not in self.assumptions:
            self.assumptions.append(what)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:  # what it started so far is known
            self.unfinished = True
            raise Flow("exit", None)

    def fork(self, why: str, *ways: Callable[[], None]) -> None:
        """Follow every way on a copy of the state; a way that leaves the block is dropped where another goes on."""
        base, left, flow = self.state, [], None
        for way in ways:
            self.state = base.copy()
            try:
                way()
            except Flow as error:
                flow = flow or (self.state, error)
                self.left_loop = self.left_loop or error.kind == "break"
                continue
            left.append(self.state)
        if not left:
            assert flow is not None
            self.state = flow[0]
            raise flow[1]
        self.state = joined(left, why, self.answers)

    def doubted(self) -> str:
        return self.doubt or f"a condition in line {self.line}"

    def run(self, command: tree.Command) -> None:
        self.step()
        _RUN[type(command)](self, command)

    def succeeded(self, command: tree.Command) -> bool | None:
        """Run a condition."""
        self.guarded += 1
        try:
            self.run(command)
        finally:
            self.guarded -= 1
        return None if self.state.status is None else self.state.status == 0

    def run_list(self, command: tree.CommandList) -> None:
        for item, background in command.items:
            if background:
                with self.subshell():
                    self.run(item)
                self.print(self.captured)
                self.state.status = 0
            else:
                self.run(item)

    def run_and_or(self, command: tree.AndOr) -> None:
        status = self.succeeded(command.first)
        for at, (operator, part) in enumerate(command.rest):
            is_last = at == len(command.rest) - 1
            if status is None:
                self.guarded += 1
                try:
                    self.fork(self.doubted(), lambda: None, lambda part=part: self.run(part))  # type: ignore[misc]
                finally:
                    self.guarded -= 1
                status = None if self.state.status is None else self.state.status == 0
            elif status == (operator == "&&"):
                if is_last:
                    self.run(part)
                else:
                    status = self.succeeded(part)

    def run_pipeline(self, command: tree.Pipeline) -> None:
        if len(command.commands) == 1:
            status = self.succeeded(command.commands[0])
            self.state.status = None if status is None else int(status)
            return
        text: str | None = None
        statuses: list[int | None] = []
        for at, part in enumerate(command.commands):
            with self.subshell():
                if at:
                    self.state.input = (text or "").splitlines(keepends=True)
                self.run(part)
            text = self.captured
            statuses.append(self.state.status)
        self.state.output.append(text or "")
        self.state.status = (
            next((s for s in statuses if s != 0), 0) if "pipefail" in self.state.options else statuses[-1]
        )
        if command.negated and self.state.status is not None:
            self.state.status = int(not self.state.status)
        else:
            self.check()

    def check(self) -> None:
        """`set -e`: a command that is known to fail ends the script."""
        if self.state.status and "errexit" in self.state.options and not self.guarded:
            raise Flow("exit", self.state.status)

    def run_if(self, command: tree.IfCommand, at: int = 0) -> None:
        if at == len(command.branches):
            self.state.status = 0
            if command.otherwise is not None:
                self.run(command.otherwise)
            return
        condition, body = command.branches[at]
        truth = self.succeeded(condition)
        if truth is None:
            self.fork(self.doubted(), lambda: self.run(body), lambda: self.run_if(command, at + 1))
        elif truth:
            self.run(body)
        else:
            self.run_if(command, at + 1)

    def iterate(self, body: tree.Command) -> bool:
        """Run a loop's body once; False if it ended the loop."""
        self.left_loop = False
        try:
            self.run(body)
        except Flow as flow:
            if flow.kind not in ("break", "continue"):
                raise
            if (flow.number or 1) > 1:
                raise Flow(flow.kind, (flow.number or 1) - 1) from None
            return flow.kind == "continue" and not self.left_loop
        return not self.left_loop

    def run_for(self, command: tree.ForCommand) -> None:
        values = self.positional()
        if command.words is not None:
            values = [field for word in command.words for field in expansion.fields(word.text, self)]
        for value in values[:MAX_ITERATIONS]:
            self.assign(command.name, value)
            if not self.iterate(command.body):
                break

    def run_arithmetic_for(self, command: tree.ArithmeticFor) -> None:
        start, condition, step = (expansion.text(part, self, quoted=True) for part in command.clauses)
        arithmetic.evaluate(start, self)
        for _ in range(MAX_ITERATIONS):
            value = arithmetic.evaluate(expansion.text(command.clauses[1], self, quoted=True), self)
            if is_unknown(value):
                self.fork(f"how often a loop runs: {why_unknown(value)}", lambda: None, lambda: self.once(command.body))
                return
            if (condition.strip() and value == "0") or not self.iterate(command.body):
                return
            arithmetic.evaluate(step, self)

    def once(self, body: tree.Command) -> None:
        self.iterate(body)

    def run_while(self, command: tree.WhileCommand) -> None:
        for _ in range(MAX_ITERATIONS):
            truth = self.succeeded(command.condition)
            if truth is None:
                self.fork(self.doubted(), lambda: None, lambda: self.once(command.body))
                return
            if truth == command.until or not self.iterate(command.body):
                break
        else:
            raise Flow("exit", 0)  # a loop for ever: nothing after it is reached
        self.left_loop = False
        self.state.status = 0

    def run_case(self, command: tree.CaseCommand) -> None:
        value = expansion.text(command.word.text, self)
        if is_unknown(value):
            ways = [lambda body=body: self.run(body) for _, body, _ in command.clauses]
            self.fork(why_unknown(value), *ways, *([] if self.has_any(command) else [lambda: None]))
            return
        falls = False
        for patterns, body, end in command.clauses:
            found = [expansion.pattern(pattern.text, self) for pattern in patterns]
            if falls or any(wanted is not None and re.fullmatch(wanted, value, re.DOTALL) for wanted in found):
                self.run(body)
                falls = end == ";&"
                if end == ";;":
                    return
        if not falls:
            self.state.status = 0

    def has_any(self, command: tree.CaseCommand) -> bool:
        return any(pattern.text == "*" for patterns, _, _ in command.clauses for pattern in patterns)

    def run_function_definition(self, command: tree.FunctionDefinition) -> None:
        self.state.functions[command.name] = command.body

    def run_group(self, command: tree.CommandGroup) -> None:
        if not command.subshell:
            self.run(command.body)
            return
        with self.subshell():
            self.run(command.body)
        self.print(self.captured)
        self.check()

    def run_test(self, command: tree.TestCommand) -> None:
        self.at_line(command.line)
        words: list[str] = []
        matchers: dict[int, conditions.Matcher] = {}
        for at, word in enumerate(command.words):
            operator = words[-1] if words else ""
            words.append(
                word.text if word.text in ("&&", "||", "(", ")", "<", ">", "!") else expansion.text(word.text, self)
            )
            if operator in ("=", "==", "!="):
                matchers[at] = self.glob_matcher(expansion.pattern(word.text, self))
            elif operator == "=~":
                matchers[at] = self.regex_matcher(expansion.regex(word.text, self))
        self.judge(words, matchers, joined=True)

    def glob_matcher(self, wanted: str | None) -> conditions.Matcher:
        return lambda value: None if wanted is None else re.fullmatch(wanted, value, re.DOTALL) is not None

    def regex_matcher(self, wanted: str | None) -> conditions.Matcher:
        def matches(value: str) -> bool | None:
            found = conditions.searched(wanted, value)
            if found is False:
                self.state.variables["BASH_REMATCH"] = Variable(unknown("a match"))
                return None
            groups = [] if not isinstance(found, re.Match) else [found[0], *(group or "" for group in found.groups())]
            self.state.variables["BASH_REMATCH"] = Variable(dict(enumerate(groups)))
            return found is not None

        return matches

    def judge(self, words: Sequence[str], matchers: dict[int, conditions.Matcher], *, joined: bool) -> None:
        truth: bool | None
        try:
            truth = conditions.holds(
                words,
                exists=self.exists,
                is_set=lambda name: name in self.state.variables,
                number=lambda text: arithmetic.evaluate(text, self),
                matchers=matchers,
                joined=joined,
            )
        except InputError:  # bash complains, and goes on: a test with an empty variable that is not quoted
            truth = False
        if truth is None:
            unsure = next((why_unknown(word) for word in words if is_unknown(word)), "")
            self.doubt = unsure or f"whether [ {' '.join(words)[:80]} ] (line {self.line})"
        self.state.status = None if truth is None else int(not truth)
        self.check()

    def run_arithmetic(self, command: tree.ArithmeticCommand) -> None:
        self.at_line(command.line)
        value = arithmetic.evaluate(expansion.text(command.text, self, quoted=True), self)
        self.state.status = None if is_unknown(value) else int(value == "0")
        self.check()

    def run_redirected(self, command: tree.Redirected) -> None:
        outer_input, outer_output = self.state.input, self.state.output
        sink: tuple[Path, bool] | None = None
        to_output = True
        for redirect in command.redirects:
            operator, target = redirect.operator, redirect.target.text
            if operator in ("<<", "<<-"):
                body = expansion.text(redirect.body, self, quoted=True) if redirect.expands else redirect.body
                self.state.input = body.splitlines(keepends=True)
            elif operator == "<<<":
                self.state.input = [f"{expansion.text(target, self)}\n"]
            elif operator == "<":
                name = expansion.text(target, self)
                content = None if is_unknown(name) else self.read(name)
                content = unknown(why_unknown(name) or f"what {name} holds") if content is None else content
                self.state.input = content.splitlines(keepends=True)
            elif redirect.descriptor == 1 or operator in ("&>", "&>>"):
                name = expansion.text(target, self)
                if operator == ">&" and name in ("1", "2"):
                    to_output = to_output and name == "1"
                    continue
                to_output = False
                if not is_unknown(name) and not name.startswith("/dev/"):
                    sink = (self.path(name), operator in (">>", "&>>"))
        self.state.output = []
        try:
            self.run(command.command)
        finally:
            text = "".join(self.state.output)
            self.state.input = outer_input
            self.state.output = outer_output + ([text] if to_output and text else [])
            if sink is not None:
                before = (self.read(str(sink[0])) or "") if sink[1] else ""
                self.state.files[sink[0]] = (before + text)[: syntax.MAX_CHARS]

    # -- simple commands ----------------------------------------------------------------------------------------------

    def run_simple(self, command: tree.SimpleCommand) -> None:
        self.at_line(command.line)
        try:
            self.simple(command)
        except InputError as error:
            error.where = error.where or self.where
            raise

    def simple(self, command: tree.SimpleCommand) -> None:
        words = list(command.words)
        assigned: list[tree.Word] = []
        while words and (_ASSIGNMENT.match(words[0].text)):
            assigned.append(words.pop(0))
        if not words:
            self.state.status = 0
            for word in assigned:
                self.assignment(word)
            self.check()
            return
        line = command.line
        name = words[0].text
        if name in DECLARING:
            declare(self, name, words[1:])
            return
        fields = [field for word in words for field in self.argument(word)]
        self.at_line(line)
        if not fields:
            return
        before = {}
        for word in assigned:
            match = _ASSIGNMENT.match(word.text)
            assert match is not None
            before[match[1]] = self.state.variables.get(match[1])
            self.assignment(word)
            self.state.variables[match[1]] = Variable(self.state.variables[match[1]].value, exported=True)
        try:
            self.call(fields)
        finally:
            for key, value in before.items():
                if value is None:
                    self.state.variables.pop(key, None)
                else:
                    self.state.variables[key] = value
        self.at_line(line)
        self.check()

    def argument(self, word: tree.Word) -> list[str]:
        """The fields of a word; `key=$NAME` of a variable that is not set is unknown, not empty."""
        found = expansion.fields(word.text, self)
        unset = _WHOLE_VARIABLE.match(word.text)
        if unset and len(found) == 1 and found[0].endswith("=") and unset[1] not in self.state.variables:
            return [found[0] + unknown(f"{unset[1]} is not set")]
        return found

    def call(self, fields: Sequence[str]) -> None:
        """Run a function, a builtin or a command of `COMMANDS`, or note the start of another program."""
        name, arguments = fields[0], tuple(fields[1:])
        if name in self.state.functions:
            self.function(name, arguments)
        elif name in BUILTINS:
            BUILTINS[name](self, arguments)
        elif (known := os.path.basename(name)) in COMMANDS and not is_unknown(name):
            self.computed(known, arguments)
        else:
            start(self, tuple(fields))

    def function(self, name: str, arguments: Sequence[str]) -> None:
        state = self.state
        outer, calls = state.arguments, state.calls
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("the script calls itself too deeply")
        state.arguments, state.calls = list(arguments), (name, *calls)
        state.frames.append({})
        try:
            self.run(state.functions[name])
        except Flow as flow:
            if flow.kind != "return":
                raise
            self.state.status = flow.number
        finally:
            self.depth -= 1
            self.state.arguments, self.state.calls = outer, calls
            for key, value in self.state.frames.pop().items():
                if value is None:
                    self.state.variables.pop(key, None)
                else:
                    self.state.variables[key] = value

    def input_text(self) -> str | None:
        return None if self.state.input is None else "".join(self.state.input)

    def computed(self, name: str, arguments: tuple[str, ...]) -> None:
        text = self.input_text()
        if any(is_unknown(word) for word in arguments) or (text is not None and is_unknown(text) and name != "cat"):
            found = None
        else:
            found = COMMANDS[name](Call(arguments, text, self.folder, self.read, self.now))
        if name == "mkdir":
            for word in arguments:
                if not word.startswith("-") and not is_unknown(word):
                    self.state.files.setdefault(self.path(word), None)
        if name == "cat" and not arguments and text is not None:
            found = (0, text)
        if found is None:
            why = next((why_unknown(part) for part in (*arguments, text or "") if is_unknown(part)), "")
            self.doubt = why or f"what `{' '.join((name, *arguments))[:60]}` gives (line {self.line})"
            self.print(unknown(self.doubt))
            self.state.status = None
            return
        self.state.status = found[0]
        self.print(found[1])

    def print(self, text: str) -> None:
        if text:
            self.state.output.append(text)
            if len(text) > syntax.MAX_CHARS:
                raise self.error("a command's output is too long")

    # -- scripts ------------------------------------------------------------------------------------------------------

    def run_text(
        self,
        text: str,
        script: Path | None,
        arguments: Sequence[str],
        *,
        name: str | None = None,
        sourced: bool = False,
    ) -> None:
        """Evaluate a script: in this shell (`source`), or in one of its own with the exported variables."""
        commands = syntax.parse(text, str(script or self.where))
        outer, line, in_text = self.script, self.line, self.in_text
        self.in_text = script is None
        script = script or outer
        self.script = script
        try:
            if sourced:
                self.sourced(commands, script, arguments)
                return
            with self.subshell():
                self.state.variables = {k: v for k, v in self.state.variables.items() if v.exported}
                self.state.functions, self.state.options, self.state.frames = {}, frozenset(), []
                self.state.name, self.state.arguments = name or str(script), list(arguments)
                self.state.sources, self.state.calls = (name or str(script),), ()
                guarded, self.guarded = self.guarded, 0
                in_slurm, lines = self.in_slurm, re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE)
                self.in_slurm = in_slurm or bool(lines)
                for key, value in slurm_variables([word for line in lines for word in line.split()]).items():
                    self.state.variables.setdefault(key, Variable(value, exported=True))
                try:
                    self.run(commands)
                finally:
                    self.guarded, self.in_slurm = guarded, in_slurm
            self.print(self.captured)
        finally:
            self.script, self.line, self.in_text = outer, line, in_text

    def sourced(self, commands: tree.CommandList, script: Path, arguments: Sequence[str]) -> None:
        state = self.state
        sources, outer = state.sources, state.arguments
        state.sources = (str(script), *sources)
        if arguments:
            state.arguments = list(arguments)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("the script sources itself")
        try:
            self.run(commands)
        except Flow as flow:
            if flow.kind != "return":
                raise
        finally:
            self.depth -= 1
            self.state.sources = sources
            if arguments:
                self.state.arguments = outer


_RUN: Mapping[type, Callable[[Shell, Any], None]] = {
    tree.SimpleCommand: Shell.run_simple,
    tree.Redirected: Shell.run_redirected,
    tree.Pipeline: Shell.run_pipeline,
    tree.AndOr: Shell.run_and_or,
    tree.CommandList: Shell.run_list,
    tree.IfCommand: Shell.run_if,
    tree.ForCommand: Shell.run_for,
    tree.ArithmeticFor: Shell.run_arithmetic_for,
    tree.WhileCommand: Shell.run_while,
    tree.CaseCommand: Shell.run_case,
    tree.FunctionDefinition: Shell.run_function_definition,
    tree.CommandGroup: Shell.run_group,
    tree.TestCommand: Shell.run_test,
    tree.ArithmeticCommand: Shell.run_arithmetic,
}


def read_script(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise unreadable(path, error) from None
