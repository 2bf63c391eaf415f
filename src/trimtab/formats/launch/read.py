"""Reads a launch script or a command line as the config of the trainer that it starts; nothing is run.

A script is a file; a command line are the words `bash run.sh ARGS` in place of a file and overrides. Of several starts
the only trainer is taken; where there are more, `launch` chooses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats import yaml_text
from trimtab.formats.launch.launch import ConfigSource, Launch, is_unknown, known_part, unknown, why_unknown
from trimtab.formats.launch.shell import Shell, read_script
from trimtab.formats.launch.state import Flow, Variable
from trimtab.formats.launch.syntax import PLACEHOLDER
from trimtab.formats.launch.wrappers import PROGRAM, SCRIPT_SUFFIXES, start
from trimtab.formats.loaded import LaunchedScript, PlanSettings

if TYPE_CHECKING:
    from trimtab.formats.frameworks.common import FrameworkConfig
    from trimtab.formats.frameworks.hydra_config import ComposedConfig

_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_SHEBANG = re.compile(r"#!.*\b(ba|z|da|k)?sh\b")


class TrainerLaunch(Frozen):
    """A launch of a trainer, the framework that recognised it, and where its config comes from."""

    launch: Launch
    framework: type[FrameworkConfig]
    source: ConfigSource
    fault: InputError | None = None  # why the config of this launch cannot be found

    def shown(self) -> str:
        words = " ".join((*self.launch.program, *self.launch.arguments))
        return f"line {self.launch.line}: {known_part(words)[:90]} ({self.framework.TITLE})"


def is_launch(path: Path, words: Sequence[str] = ()) -> bool:
    """Whether this is a launch script, a file with an entry point of a Ray job, or a command line."""
    try:
        if path.is_file():
            if path.suffix in SCRIPT_SUFFIXES:
                return True
            with path.open("rb") as file:
                start = file.read(4096).decode("utf-8", "replace")
            return bool(_SHEBANG.match(start)) or (path.suffix in (".yaml", ".yml") and "kind: RayJob" in start)
    except OSError:
        return False
    return bool(words) and not path.exists() and PROGRAM.match(str(path)) is not None


class LaunchChoice(Frozen):
    """Which of several trainers of a script is read, and whether the script runs in a sandbox to find them."""

    number: int | None = None
    execute: bool = False


CHOICE: ContextVar[LaunchChoice | None] = ContextVar("how a launch script is read", default=None)
"""Set by the command line: every reader of the same script takes the same trainer."""


def composed_config(path: Path, words: Sequence[str] = ()) -> ComposedConfig:
    """The config of a file, launch script or command line."""
    from trimtab.formats.frameworks.hydra_config import compose

    return composed_launch(path, words) if is_launch(path, words) else compose(path, words)


def composed_launch(path: Path, words: Sequence[str] = ()) -> ComposedConfig:
    """The config of the trainer that a script or command line starts, with its overrides and the user's."""
    choice = CHOICE.get() or LaunchChoice()
    shell, overrides = executed(path, words) if choice.execute else evaluated(path, words)
    number = choice.number
    chosen = choose(shell, trainers(shell), path, number)
    config = composed(chosen, overrides, shell.assumptions)
    if chosen.launch.script == path and path.suffix not in (".yaml", ".yml"):
        script = LaunchedScript(path, lambda settings: _rewritten(config, chosen.launch, path, words, settings))
        return replace(config, script=script)
    return config


def _rewritten(config: ComposedConfig, launch: Launch, path: Path, words: Sequence[str], settings: PlanSettings) -> str:
    from trimtab.formats.launch.edit import rewritten

    given = {word.lstrip("+").partition("=")[0] for word in words}  # what the script itself does not say
    return rewritten(
        read_script(path),
        launch,
        settings,
        lambda key, value: key not in given and config.states(key, value),
        lambda text: evaluated(path, words, text)[0],
    )


def composed(chosen: TrainerLaunch, overrides: Sequence[str], assumptions: Sequence[str] = ()) -> ComposedConfig:
    """The config of a launch, with the user's overrides after its own."""
    from trimtab.formats.frameworks.hydra_config import OverrideError, compose, compose_data, environment_of

    source, launch = chosen.source, chosen.launch
    own = [override for word in source.overrides if (override := _override(word, launch))]
    notes = (*assumptions, *source.assumptions)
    try:
        with environment_of(chosen):
            if not isinstance(source.config, Path):
                config = compose_data(_marked(source.config), launch.script, [*own, *overrides])
            else:
                try:
                    config = compose(source.config, [*own, *overrides])
                except OverrideError as error:
                    # Written for another version of the framework: what its config lacks, or has already.
                    config = compose(source.config, [*map(_forced, own), *overrides])
                    notes = (*notes, f"the script is of another version than {source.config.name} here: {error.what}")
    except InputError as error:
        if error.where is None or not error.where.startswith(str(launch.script)):
            error.where = f"{launch.where}: {error.where}" if error.where else launch.where
        raise
    config.reader.launch = chosen
    return replace(config, launch=chosen, assumptions=notes)


def _forced(override: str) -> str:
    """An override of a key that is set whether the config has it or not; groups stay as they are."""
    key = override.partition("=")[0].lstrip("+")
    return f"++{override.lstrip('+')}" if "." in key and not set("~/@") & set(key) else override


def evaluated(path: Path, words: Sequence[str], text: str | None = None) -> tuple[Shell, list[str]]:
    """The evaluated script, and the overrides among the words; `text` stands for what is in the file."""
    folder = Path.cwd()
    if not path.is_file():
        shell = Shell(Path("the command line"), folder, os.environ)
        _run(shell, lambda: shell.call([str(path), *words]))
        return shell, []
    variables = [word for word in words if _VARIABLE.match(word)]
    overrides = [word for word in words if word not in variables]
    answers = {name: value for name, _, value in (word.partition("=") for word in variables)}
    shell = Shell(path, folder, os.environ, answers)
    if path.suffix in (".yaml", ".yml"):
        entry = _entry_point(path)
        _run(shell, lambda: shell.run_text(entry, path, []))
    else:
        content = read_script(path) if text is None else text
        _run(shell, lambda: shell.run_text(content, path, [], name=str(path)))
        for name in answers:
            if not re.search(rf"\b{name}\b", content):
                raise InputError(
                    f"{name} is no variable of this script",
                    where=str(path),
                    hint=f"for a top key of the config: ++{name}=VALUE",
                )
    return shell, overrides


def executed(path: Path, words: Sequence[str]) -> tuple[Shell, list[str]]:
    """As `evaluated`, with the commands that a run in a sandbox records."""
    from trimtab.formats.launch.sandbox import run_recorded

    variables = [word for word in words if _VARIABLE.match(word)] if path.is_file() else []
    answers = {name: value for name, _, value in (word.partition("=") for word in variables)}
    command = ["bash", str(path)] if path.is_file() else [str(path), *words]
    script = path if path.is_file() else Path("the command line")
    shell = Shell(script, Path.cwd(), os.environ, answers)
    shell.in_text = True
    for record in run_recorded(command, Path.cwd(), {**os.environ, **answers}):
        shell.state.folder = record.folder
        for name, value in record.environment.items():
            shell.state.variables[name] = Variable(value, exported=True)
        _run(shell, lambda words=record.words: start(shell, words))
    return shell, [word for word in words if word not in variables] if path.is_file() else []


def _run(shell: Shell, what: Any) -> None:
    try:
        what()
    except Flow:
        pass
    except RecursionError:
        raise shell.error("the script is nested too deeply") from None


def _entry_point(path: Path) -> str:
    """The entry point of a RayJob of KubeRay."""
    for document in re.split(r"^---.*$", yaml_text.read_text(path), flags=re.MULTILINE):
        if re.search(r"^kind:\s*[\"']?RayJob", document, re.MULTILINE):
            data = yaml_text.parse(document, str(path))
            entry = data.get("spec", {}).get("entrypoint") if isinstance(data, Mapping) else None
            if isinstance(entry, str):
                return entry
    raise InputError("this RayJob has no spec.entrypoint", where=str(path))


def trainers(shell: Shell) -> list[TrainerLaunch]:
    """The trainers among the programs that a script starts, each once."""
    from trimtab.formats.frameworks.registry import FRAMEWORKS

    found: list[TrainerLaunch] = []
    for at, launch in enumerate(shell.starts):
        beside = tuple(other for n, other in enumerate(shell.starts) if n != at)
        with_others = replace(launch, beside=beside)
        for kind in FRAMEWORKS.values():
            fault, source = None, None
            try:
                source = kind.launched(with_others)
            except InputError as error:
                fault = error
            if source is not None or fault is not None:
                made = TrainerLaunch(with_others, kind, source or ConfigSource({}), fault)
                same = (launch.program, launch.arguments, made.source.config)
                if all((o.launch.program, o.launch.arguments, o.source.config) != same for o in found):
                    found.append(made)
                break
    return found


def choose(shell: Shell, found: Sequence[TrainerLaunch], path: Path, number: int | None) -> TrainerLaunch:
    """The trainer to read. Raises InputError where there is none, or several and no number."""
    if not found:
        raise _nothing_found(shell, path)
    if number is not None and not 1 <= number <= len(found):
        raise InputError(f"there is no launch {number}: the script has {len(found)}", where=str(path))
    if number is None and len(found) > 1:
        listed = "; ".join(f"{at}: {launch.shown()}" for at, launch in enumerate(found, 1))
        raise InputError(
            f"the script starts {len(found)} trainers: {listed}", where=str(path), hint="choose one: --launch NUMBER"
        )
    chosen = found[(number or 1) - 1]
    if chosen.fault is not None:
        raise chosen.fault
    return chosen


def _nothing_found(shell: Shell, path: Path) -> InputError:
    from trimtab.formats.frameworks.registry import titles

    programs = [s for s in shell.starts if re.search(r"python|\.py$|torchrun|/", s.program[0]) or len(s.program) > 1]
    shown = ", ".join(f"{' '.join(start.program)[:60]} (line {start.line})" for start in (programs or shell.starts)[:4])
    what = f"no training with RL was found; it starts {shown}" if shown else "it starts no program"
    hint = f"known are the trainers of {titles()}; plan the config itself, with the script's overrides"
    if shell.missing:
        hint = f"it needs what is not here: {', '.join(dict.fromkeys(shell.missing))}"
    elif shell.unfinished:
        hint = "the script was not evaluated to its end: it takes too many steps"
    elif shell.failed:  # most likely for want of a variable
        said = next((line for line in reversed(shell.captured.splitlines()) if line.strip()), "")
        what = f"the script ends with status {shell.state.status}{f': {known_part(said)[:120]}' if said else ''}"
        if name := next((name for name in reversed(shell.not_set) if name.isidentifier()), ""):
            hint = f"{name} is not set: give it as {name}=VALUE"
    return InputError(what, where=str(path), hint=hint)


# ---- unknown values --------------------------------------------------------------------------------------------------


def _override(word: str, launch: Launch) -> str:
    """An override whose unknown value is asked for when it is read; "" for one that is empty."""
    key, equals, value = word.partition("=")
    if is_unknown(key) or (is_unknown(word) and not equals):
        raise launch.error(
            f"the trainer's arguments depend on {why_unknown(word)}", "give the variable that holds it: NAME=VALUE"
        )
    if place := PLACEHOLDER.search(value):
        value = unknown(f"the placeholder {place[0]}")
    return f"{key}={_placeholder(value)}" if is_unknown(value) else word


def _placeholder(value: str) -> str:
    return f"${{unknown:{why_unknown(value).encode().hex() or '00'}}}"


def _marked(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _marked(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_marked(value) for value in data]
    return _placeholder(data) if isinstance(data, str) and is_unknown(data) else data
