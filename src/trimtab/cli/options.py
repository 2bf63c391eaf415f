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

ModelOption = Annotated[str | None, Option("--model", help="A model's name, or the folder of its config.json.")]
GpuOption = Annotated[str | None, Option("--gpu", help="GPU kind (h100, a100-80, ...), or a YAML file.")]
SamplesOption = Annotated[int | None, Option("--samples", help="Answers of a step.")]
MeanTokensOption = Annotated[float | None, Option("--mean-tokens", help="Mean of prompt and answer.")]
MaxTokensOption = Annotated[float | None, Option("--max-tokens", help="Limit of prompt and answer.")]
EngineOption = Annotated[
    str, Option("--rollout", help="Engines: tp=4,dp=1,precision=fp8,kv=fp8,memory=0.8,sequences=256.")
]
TrainOption = Annotated[
    str,
    Option("--train", help="Training: tp=4,pp=4,cp=1,ep=8,lora=16,backend=fsdp,recompute=no,offload=all."),
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
