"""One start of a program as a script or a command line would do it, and where the program's config comes from.

Words are text in which a part that could not be found out without running something is a marker (`unknown`): it stays
in words that are built from it, and it is asked for when the key is read. A framework recognises its trainer by
`Launch.runs`, and answers with a `ConfigSource`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

OPEN, CLOSE = "\ue000", "\ue001"  # private use: in no real script
_MARKER = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


def unknown(why: str) -> str:
    """A word, or part of a word, that only running something could tell; `why` says what."""
    return f"{OPEN}{_MARKER.sub(lambda match: match[1], why)}{CLOSE}"


def is_unknown(text: str) -> bool:
    return OPEN in text


def why_unknown(text: str) -> str:
    """What made the first unknown part of a word unknown."""
    found = _MARKER.search(text)
    return found[1] if found else ""


def known_part(text: str) -> str:
    """A word without its unknown parts."""
    return _MARKER.sub("", text)


UNKNOWN = unknown("")
"""A value of which nothing is known."""


class Launch(Frozen):
    """A start of a program: what is started, with which arguments, environment and working folder.

    `program` is without wrappers (`ray job submit --`, `uv run`, `torchrun` and the like): `("python3", "-m",
    "verl.trainer.main_ppo")`, `("python3", "train.py")` or `("prime-rl",)`. `script` is the file that starts it.
    `wrapper` are the words before it (`accelerate launch --num_processes 7`); `beside` are the other programs that the
    same file starts, such as a server.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    script: Path = Path()
    line: int = 0
    wrapper: tuple[str, ...] = ()
    beside: tuple[Launch, ...] = ()

    @property
    def module(self) -> str:
        """The program as a dotted name: `verl.trainer.main_ppo` for `-m` and for `verl/trainer/main_ppo.py` alike."""
        name = self.program[-1] if self.program else ""
        if not name.endswith(".py"):
            return name
        return ".".join(part for part in Path(name).with_suffix("").parts if part not in ("/", ".", ".."))

    def runs(self, *names: str) -> bool:
        """Whether the program is one of these modules, console scripts or files, whatever folder they lie in."""
        module = f".{self.module}"
        return any(module.endswith(f".{name.removesuffix('.py').replace('/', '.')}") for name in names)

    @property
    def where(self) -> str:
        return f"{self.script}:{self.line}" if self.line else str(self.script)

    def error(self, what: str, hint: str | None = None) -> InputError:
        return InputError(what, where=self.where, hint=hint)

    def find(self, *names: str) -> Path | None:
        """The first of these files or folders that exists: `verl/trainer/config/ppo_trainer.yaml`.

        Looked for in the working folder, PYTHONPATH, the folders above the script and the working folder, and in
        installed packages.
        """
        folders = [self.folder]
        paths = self.environment.get("PYTHONPATH", "")
        folders += [self.folder / part for part in paths.split(":") if part and not is_unknown(part)]
        folders += [*self.script.resolve().parents, *self.folder.resolve().parents]
        for name in names:
            if is_unknown(name):
                continue
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(Path(name).parts[0])  # of the top-level package: imports nothing
                folders += [Path(at).parent for at in (spec and spec.submodule_search_locations) or ()]
            # A checkout is named like its package: it may be verl/verl.
            inner = Path(name).parts[0]
            for place in (folder / name if not at else folder / inner / name for at in (0, 1) for folder in folders):
                with suppress(OSError):
                    if place.exists():
                        return place
        return None


class ConfigSource(Frozen):
    """Where a launched trainer gets its config: a file or data, then overrides in the order in which they apply.

    `config` is a YAML file (with Hydra `defaults` or parents, composed by the caller) or the whole config as data: the
    framework's defaults that matter, below what flags or a TOML file say. `overrides` are Hydra's `key=value`,
    `+key=value`, `++key=value`, `~key`. An unknown value may stand in both; it is asked for when it is read.
    `assumptions` are shown with the answer: which defaults were taken, and of which version.
    """

    config: Path | Mapping[str, Any]
    overrides: Sequence[str] = ()
    assumptions: tuple[str, ...] = ()
