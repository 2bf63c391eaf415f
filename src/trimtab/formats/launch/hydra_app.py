"""Arguments of a Hydra program, and the config that it starts from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from trimtab.core.frozen import Frozen
from trimtab.formats.launch.launch import CLOSE, Launch, is_unknown, why_unknown

_MAIN = re.compile(r"hydra\.main\(([^)]*)\)")
_OPTIONS = {
    "--config-path": "-cp",
    "-cp": "-cp",
    "--config-name": "-cn",
    "-cn": "-cn",
    "--config-dir": "-cd",
    "-cd": "-cd",
}
_OTHER_OPTIONS = {"--package", "-p", "--info", "-i", "--experimental-rerun"}


class HydraLaunch(Frozen):
    """The config file, if it was found; the name that was looked for; and the overrides."""

    config: Path | None
    wanted: str
    overrides: tuple[str, ...]


def hydra_launch(launch: Launch, folder: str = "", name: str = "") -> HydraLaunch:
    """Read the arguments as Hydra does; folder and name are the program's own where its file is not here.

    `folder` is relative to a checkout (`verl/trainer/config`). A program's own file says both: `@hydra.main(...)`.
    """
    options, overrides = _arguments(launch.arguments)
    if is_unknown(options.get("-cp", "")) and (end := options["-cp"].rpartition(CLOSE)[2].strip("/")):
        options["-cp"] = f"/{end}"  # of a checkout in a folder that is not known
    for option in ("-cp", "-cn", "-cd"):
        if is_unknown(options.get(option, "")):
            raise launch.error(
                f"the config depends on {why_unknown(options[option])}",
                "give the variable: NAME=VALUE, or plan the config",
            )
    if options.get("-cn") == "":
        hint = "it is an argument of the script: -- bash SCRIPT NAME, in place of the script"
        raise launch.error("--config-name has no value", hint)
    source = _program_file(launch)
    own_folder, own_name = _main(source) if source is not None else ("", "")
    wanted = f"{(options.get('-cn') or own_name or name).removesuffix('.yaml')}.yaml"
    folders: list[str] = []
    if source is not None and not options.get("-cp", "").startswith("/"):
        folders.append(str(source.parent / (options.get("-cp") or own_folder)))
    elif "-cp" in options:
        folders.append(options["-cp"])
    if folder and not ("-cp" in options and options["-cp"].startswith("/")):
        folders.append(folder)
    if "-cd" in options:
        folders.append(options["-cd"])
    config = launch.find(*(f"{place}/{wanted}" for place in folders)) if wanted != ".yaml" else None
    if config is None and "-cp" in options:
        config = _elsewhere(launch, options["-cp"], wanted)
    return HydraLaunch(config, wanted, overrides)


def _elsewhere(launch: Launch, folder: str, wanted: str) -> Path | None:
    """An absolute config path of another machine (`/workspace/verl/examples/config`): its end, in this checkout."""
    parts = [part for part in PurePosixPath(folder).parts if part not in ("/", ".", "..")]
    return launch.find(*("/".join((*parts[at:], wanted)) for at in range(len(parts))))


def _arguments(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    options: dict[str, str] = {}
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            options[_OPTIONS[name]] = value if equals else rest.pop(0) if rest else ""
        elif name in _OTHER_OPTIONS:
            if not equals and rest:
                rest.pop(0)
        elif word.strip() and not word.startswith("--"):
            overrides.append(word)
    return options, tuple(overrides)


def _program_file(launch: Launch) -> Path | None:
    """The Python file of the program: `-m recipe.dapo.main_dapo` may lie in a checkout named otherwise."""
    parts = launch.module.split(".")
    if launch.program[-1].endswith(".py"):
        return launch.find(launch.program[-1]) or launch.find(
            *("/".join(parts[at:]) + ".py" for at in range(len(parts) - 1))
        )
    return launch.find(*("/".join(parts[at:]) + ".py" for at in range(max(1, len(parts) - 1))))


def _main(source: Path) -> tuple[str, str]:
    """Config folder and name of a file's `@hydra.main(...)`."""
    try:
        found = _MAIN.search(source.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return "", ""
    inner = found[1] if found else ""
    path = re.search(r"config_path=[\"']([^\"']*)", inner)
    name = re.search(r"config_name=[\"']([^\"']*)", inner)
    return path[1] if path else "", name[1] if name else ""
