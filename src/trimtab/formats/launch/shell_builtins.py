"""The builtins of the shell that `shell` evaluates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trimtab.formats.launch import expansion
from trimtab.formats.launch.commands import printf, unescaped
from trimtab.formats.launch.launch import is_unknown, unknown, why_unknown
from trimtab.formats.launch.state import Flow, Variable

if TYPE_CHECKING:
    from trimtab.formats.launch.shell import Shell
    from trimtab.formats.launch.syntax_tree import Word

Builtin = Callable[["Shell", Sequence[str]], None]
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_ASSIGNS = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
_OPTIONS = {"e": "errexit", "u": "nounset", "a": "allexport"}


def declare(shell: Shell, name: str, words: Sequence[Word]) -> None:
    """`export`, `declare`, `local`, `readonly` with their assignments, whose values are not split."""
    letters, unsets, local = "", False, name == "local"
    shell.state.status = 0
    for word in words:
        if re.match(r"[-+][A-Za-z]+\Z", word.text):
            letters += word.text[1:] if word.text[0] == "-" else ""
            unsets = unsets or word.text[0] == "+"
            continue
        target = re.match(r"[A-Za-z_]\w*", word.text)
        if target is None or not _ASSIGNS.match(word.text):
            for field in expansion.fields(word.text, shell):
                _declare_one(shell, name, field, letters, local)
            continue
        if (local or name in ("declare", "typeset")) and shell.state.frames and "g" not in letters:
            _hide(shell, target[0])
        shell.assignment(word, keyed="A" in letters)
        _mark(shell, target[0], name, letters)


def _declare_one(shell: Shell, name: str, field: str, letters: str, local: bool) -> None:
    key, equals, value = field.partition("=")
    if not _NAME.match(key):
        return
    if (local or name in ("declare", "typeset")) and shell.state.frames and "g" not in letters:
        _hide(shell, key)
    if equals:
        shell.assign(key, value)
    elif key not in shell.state.variables and ("A" in letters or "a" in letters):
        shell.state.variables[key] = Variable({}, keyed="A" in letters)
    _mark(shell, key, name, letters)


def _hide(shell: Shell, name: str) -> None:
    frame = shell.state.frames[-1]
    if name not in frame:
        frame[name] = shell.state.variables.pop(name, None)


def _mark(shell: Shell, name: str, command: str, letters: str) -> None:
    found = shell.state.variables.get(name)
    if found is not None and ((command == "export" and "n" not in letters) or "x" in letters):
        shell.state.variables[name] = Variable(found.value, True, found.keyed)


def _number(arguments: Sequence[str], default: int | None) -> int | None:
    if not arguments:
        return default
    return int(arguments[0]) % 256 if re.fullmatch(r"-?\d{1,9}", arguments[0]) else None


def _exit(shell: Shell, arguments: Sequence[str]) -> None:
    raise Flow("exit", _number(arguments, shell.state.status))


def _return(shell: Shell, arguments: Sequence[str]) -> None:
    raise Flow("return", _number(arguments, shell.state.status))


def _break(shell: Shell, arguments: Sequence[str]) -> None:
    raise Flow("break", _number(arguments, 1))


def _continue(shell: Shell, arguments: Sequence[str]) -> None:
    raise Flow("continue", _number(arguments, 1))


def _true(shell: Shell, arguments: Sequence[str]) -> None:
    shell.state.status = 0


def _false(shell: Shell, arguments: Sequence[str]) -> None:
    shell.state.status = 1


def _unknown_status(shell: Shell, arguments: Sequence[str]) -> None:
    shell.state.status = None


def _echo(shell: Shell, arguments: Sequence[str]) -> None:
    words, end, escapes = list(arguments), "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        option = words.pop(0)
        end = "" if "n" in option else end
        escapes = escapes or "e" in option
    text = " ".join(words)
    shell.print((unescaped(text) if escapes else text) + end)
    shell.state.status = 0


def _printf(shell: Shell, arguments: Sequence[str]) -> None:
    words = list(arguments)
    name = ""
    if words[:1] == ["-v"] and len(words) > 2:
        name, words = words[1], words[2:]
    if words[:1] == ["--"]:
        words = words[1:]
    text = printf(words)
    if text is None:
        why = next((why_unknown(word) for word in words if is_unknown(word)), f"printf in line {shell.line}")
        text = unknown(why)
    if name:
        shell.assign(name, text)
    else:
        shell.print(text)
    shell.state.status = 0


def _cd(shell: Shell, arguments: Sequence[str]) -> None:
    words = [word for word in arguments if word not in ("--", "-P", "-L")]
    target = words[0] if words else shell.lookup("HOME") or "/"
    if target == "-":
        target = shell.lookup("OLDPWD") or "."
    shell.state.status = 0
    if is_unknown(target):
        shell.state.status = None
        return
    path = shell.path(target)
    shell.assign("OLDPWD", str(shell.folder))
    if shell.exists("-d", target) is not True:
        # It may be there where the script runs: paths below it are taken to exist.
        shell.missing.append(str(path))
    shell.state.folder = path
    shell.assign("PWD", str(path))


def _pwd(shell: Shell, arguments: Sequence[str]) -> None:
    shell.print(f"{shell.folder}\n")
    shell.state.status = 0


def _set(shell: Shell, arguments: Sequence[str]) -> None:
    words = list(arguments)
    shell.state.status = 0
    while words:
        word = words.pop(0)
        if word == "--" or not re.match(r"[-+][A-Za-z]", word):
            shell.state.arguments = words if word == "--" else [word, *words]
            return
        on = word[0] == "-"
        for letter in word[1:]:
            name = words.pop(0) if letter == "o" and words else _OPTIONS.get(letter, "")
            if name:
                shell.state.options = shell.state.options | {name} if on else shell.state.options - {name}


def _unset(shell: Shell, arguments: Sequence[str]) -> None:
    for name in arguments:
        shell.state.variables.pop(name, None)
        if "-f" in arguments:
            shell.state.functions.pop(name, None)
    shell.state.status = 0


def _shift(shell: Shell, arguments: Sequence[str]) -> None:
    count = _number(arguments, 1) or 0
    shell.state.status = 0 if count <= len(shell.state.arguments) else 1
    if shell.state.status == 0:
        shell.state.arguments = shell.state.arguments[count:]


def _source(shell: Shell, arguments: Sequence[str]) -> None:
    name = arguments[0] if arguments else ""
    text = shell.read(name)
    shell.state.status = 0
    if is_unknown(name) or text is None:
        if not re.search(r"(activate|bashrc|profile|conda\.sh|set_env\.sh|setvars\.sh)\Z", name):
            shell.missing.append(str(shell.path(name)) if not is_unknown(name) else why_unknown(name))
        shell.state.status = None
        return
    shell.run_text(text, shell.path(name), arguments[1:], sourced=True)


def _eval(shell: Shell, arguments: Sequence[str]) -> None:
    from trimtab.formats.launch.syntax import parse

    text = " ".join(arguments)
    if is_unknown(text):
        shell.state.status = None
        return
    shell.run(parse(text, str(shell.script)))


def _exec(shell: Shell, arguments: Sequence[str]) -> None:
    if arguments:
        shell.call(arguments)
        raise Flow("exit", shell.state.status)
    shell.state.status = 0


def _command(shell: Shell, arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in ("-v", "-V"):
        _which(shell, arguments[1:])
    elif arguments:
        shell.call(arguments)


def _which(shell: Shell, arguments: Sequence[str]) -> None:
    """Whether a program is installed where the script runs is not known."""
    shell.doubt = f"whether {' '.join(arguments)} is installed"
    shell.print(unknown(shell.doubt))
    shell.state.status = None


def _test(shell: Shell, arguments: Sequence[str]) -> None:
    shell.judge(arguments, {}, joined=False)


def _bracket(shell: Shell, arguments: Sequence[str]) -> None:
    shell.judge(arguments[:-1] if arguments and arguments[-1] == "]" else arguments, {}, joined=False)


def _read(shell: Shell, arguments: Sequence[str]) -> None:
    words, array = list(arguments), ""
    delimiter = "\n"
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option[-1] in "pdtnNuia" and words:
            value = words.pop(0)
            array = value if option[-1] == "a" else array
            delimiter = value if option[-1] == "d" else delimiter
    lines = shell.state.input
    if not lines:
        shell.state.status = 1 if lines is not None else None
        for name in words:
            shell.assign(name, "" if lines is not None else unknown("what is typed"))
        return
    line = "".join(lines) if delimiter != "\n" else lines[0].rstrip("\n")
    del lines[: len(lines) if delimiter != "\n" else 1]
    shell.state.status = 0 if delimiter == "\n" else 1
    if is_unknown(line):
        shell.state.status = None if delimiter == "\n" else 1
    separators = shell.lookup("IFS")
    parts = expansion.at_separators(line, " \t\n" if separators is None else separators)
    if separators is None or not separators.strip():
        parts = [part for part in parts if part]
    if array:
        shell.state.variables[array] = Variable(dict(enumerate(parts)))
        return
    if delimiter != "\n" or (separators == "" and words):
        shell.assign(words[0] if words else "REPLY", line)
        return
    names = words or ["REPLY"]
    for at, name in enumerate(names):
        last = at == len(names) - 1
        shell.assign(name, " ".join(parts[at:]) if last else parts[at] if at < len(parts) else "")


def _mapfile(shell: Shell, arguments: Sequence[str]) -> None:
    names = [word for word in arguments if not word.startswith("-")]
    lines = list(shell.state.input or [unknown("input")])
    strip = any(word.startswith("-") and "t" in word for word in arguments)
    values: dict[int | str, str] = {at: line.rstrip("\n") if strip else line for at, line in enumerate(lines)}
    shell.state.variables[names[-1] if names else "MAPFILE"] = Variable(values)
    shell.state.status = 0


def _let(shell: Shell, arguments: Sequence[str]) -> None:
    from trimtab.formats.launch.arithmetic import evaluate

    for word in arguments:
        value = evaluate(word, shell)
        shell.state.status = None if is_unknown(value) else int(value == "0")


def _tee(shell: Shell, arguments: Sequence[str]) -> None:
    text = shell.input_text() or ""
    for word in arguments:
        if not word.startswith("-") and not is_unknown(word):
            shell.state.files[shell.path(word)] = text
    shell.print(text)
    shell.state.status = 0


def _pushd(shell: Shell, arguments: Sequence[str]) -> None:
    shell.state.stack.append(shell.folder)
    _cd(shell, [word for word in arguments if not word.startswith(("-", "+"))])


def _popd(shell: Shell, arguments: Sequence[str]) -> None:
    if shell.state.stack:
        _cd(shell, [str(shell.state.stack.pop())])


def _getopts(shell: Shell, arguments: Sequence[str]) -> None:
    """Short options of the script's arguments."""
    if len(arguments) < 2:
        shell.state.status = 1
        return
    letters, name = arguments[:2]
    at = int(shell.lookup("OPTIND") or 1)
    words = shell.state.arguments
    word = words[at - 1] if at <= len(words) else ""
    if not re.match(r"-[A-Za-z]", word):
        shell.state.status = 1
        return
    letter = word[1]
    takes = f"{letter}:" in letters
    value = (word[2:] or (words[at] if at < len(words) else "")) if takes else ""
    shell.assign(name, letter if letter in letters else "?")
    shell.state.variables.pop("OPTARG", None)
    if takes:
        shell.assign("OPTARG", value)
    shell.assign("OPTIND", str(at + (2 if takes and not word[2:] else 1)))
    shell.state.status = 0


BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys((".", "source"), _source),
    ":": _true,
    "[": _bracket,
    "break": _break,
    **dict.fromkeys(("builtin", "command"), _command),
    "cd": _cd,
    "continue": _continue,
    "echo": _echo,
    "eval": _eval,
    "exec": _exec,
    "exit": _exit,
    "false": _false,
    "getopts": _getopts,
    "hash": _unknown_status,
    "let": _let,
    **dict.fromkeys(("mapfile", "readarray"), _mapfile),
    "popd": _popd,
    "printf": _printf,
    "pushd": _pushd,
    "pwd": _pwd,
    "read": _read,
    "return": _return,
    "set": _set,
    "shift": _shift,
    "tee": _tee,
    "test": _test,
    **dict.fromkeys(("type", "which"), _which),
    "unset": _unset,
    **dict.fromkeys(("alias", "bg", "disown", "enable", "fg", "jobs", "kill", "shopt", "times", "trap"), _true),
    **dict.fromkeys(("true", "ulimit", "umask", "wait"), _true),
}
DECLARING = frozenset({"declare", "export", "local", "readonly", "typeset"})
