"""Options that several commands share, and what they do with them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trimtab.core.errors import InputError
from trimtab.formats.files import write_text
from trimtab.render.output import Format, err

if TYPE_CHECKING:
    from trimtab.model.workflow import Profile

FormatOption = Annotated[Format, Option("--format", "-f", help="Output format.")]
JsonOption = Annotated[bool, Option("--json", help="Same as --format json.")]
ProfileOption = Annotated[Path | None, Option("--profile", "-p", help="Measured costs, from `trimtab profile logs`.")]
NameOption = Annotated[str | None, Option("--name", "-n", help="Name of the controller, if the cluster has several.")]
DashboardPortOption = Annotated[
    int | None, Option("--port", help="Port of the dashboard.  [default: 8270, or the next free port]")
]


def read_profile(path: Path | None) -> Profile | None:
    if path is None:
        return None
    from trimtab.formats import profile_file

    return profile_file.read(path)


def called() -> str:
    return shlex.join(["trimtab", *sys.argv[1:]])


def save_report(path: Path, page: str) -> None:
    write_text(path, page)
    err.print(f"report written to {path}", markup=False)


def not_installed(what: str, fault: ImportError) -> InputError:
    """The error for a dependency of `trimtab[serve]` that is missing."""
    return InputError(f"{what} needs {fault.name}, which is not installed", hint="pip install 'trimtab[serve]'")
