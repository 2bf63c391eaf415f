"""Options that several commands share: a flag has one meaning, whatever command takes it."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import Format, err

if TYPE_CHECKING:
    from trimtab.model.workflow import Profile
    from trimtab.runtime.client.session import Session

JobArgument = Annotated[
    Path, Argument(metavar="FILE", help="Job file, or a config of RLinf, verl, NeMo RL, OpenRLHF, ...")
]
OverridesArgument = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="Keys of the file to override, or variables of a launch script."),
]
FormatOption = Annotated[Format, Option("--format", "-f", help="Output format.")]
OutputOption = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write the result to this file.")]
ReportOption = Annotated[Path | None, Option("--report", metavar="FILE", help="Write an HTML report.")]
TraceOption = Annotated[
    Path | None, Option("--trace", metavar="FILE", help="Write a Chrome trace (opens in Perfetto).")
]
ForceOption = Annotated[bool, Option("--force", help="Overwrite what is there.")]
ProfileOption = Annotated[Path | None, Option("--profile", "-p", help="Measured costs, from `trimtab profile logs`.")]
NoiseOption = Annotated[str, Option("--noise", help="Differences below this count as noise.")]
AddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster.  [default: RAY_ADDRESS, or the cluster on this machine]")
]
RunAddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster.  [default: RAY_ADDRESS, or a new local Ray]")
]
WatchAddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster to show, too: host:6379, or auto.")
]
PlanAddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster whose nodes count, not the file's: host:6379, or auto.")
]
NameOption = Annotated[str | None, Option("--name", "-n", help="Name of the controller, if the cluster has several.")]
PortOption = Annotated[int | None, Option("--port", help="Port to listen on.  [default: 8270, or the next free port]")]
DashboardOption = Annotated[bool, Option("--dashboard", help="Serve a local dashboard.")]
TokenFileOption = Annotated[Path | None, Option("--token-file", help="File of the token that changes require.")]
UrlOption = Annotated[
    str | None, Option("--url", help="Gateway.  [default: TRIMTAB_ROLLOUT_URL, or your only local gateway]")
]
EveryOption = Annotated[float, Option("--every", metavar="S", help="Seconds between two looks.")]
AtMostOption = Annotated[float | None, Option("--at-most", metavar="S", help="Stop after this time.")]
DeadlineOption = Annotated[str | None, Option("--deadline", metavar="TIME", help="When it must be over: 30, 90s, 5m.")]
FrameworkOption = Annotated[
    str | None, Option("--framework", help="Framework that wrote the log, e.g. verl.  [default: detected]")
]
WarmupOption = Annotated[int, Option("--warmup", help="Steps to skip after every start of a run.")]
ReasonOption = Annotated[str, Option("--reason", help="Reason, shown in stories.")]
TailOption = Annotated[int, Option("--tail", min=-1, max=10_000_000, help="Last lines only; -1: all.")]
FollowOption = Annotated[bool, Option("--follow", help="Print new lines until Ctrl-C.")]

CONTROLLER = "trimtab"  # default name of a controller
ANSWER_S = 30.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

ModelOption = Annotated[str | None, Option("--model", help="A model's name, or the folder of its config.json.")]
GpuOption = Annotated[str | None, Option("--gpu", help="GPU kind (h100, a100-80, ...), or a YAML file.")]
SamplesOption = Annotated[int | None, Option("--samples", help="Answers of a step.")]
MeanTokensOption = Annotated[float | None, Option("--mean-tokens", help="Mean of prompt and answer.")]
MaxTokensOption = Annotated[float | None, Option("--max-tokens", help="Limit of prompt and answer.")]
EngineOption = Annotated[
    str, Option("--rollout", help="Engines: tp=4,dp=1,precision=fp8,kv=fp8,memory=0.8,sequences=256.")
]
TrainOption = Annotated[
    str, Option("--train", help="Training: tp=4,pp=4,cp=1,ep=8,lora=16,backend=fsdp,recompute=no,offload=all.")
]


LaunchOption = Annotated[
    int | None, Option("--launch", metavar="N", help="Which trainer of a launch script that starts several.")
]
ExecuteOption = Annotated[
    bool, Option("--execute", help="Run the launch script in a sandbox that records commands, instead of reading it.")
]


def choose_launch(number: int | None, execute: bool) -> None:
    """How launch scripts are read in this process."""
    from trimtab.formats.launch.read import CHOICE, LaunchChoice

    CHOICE.set(LaunchChoice(number, execute))


def read_profile(path: Path | None) -> Profile | None:
    if path is None:
        return None
    from trimtab.formats import profile_file

    return profile_file.read(path)


def called() -> str:
    return shlex.join(["trimtab", *sys.argv[1:]])


def save(path: Path, text: str, what: str = "report") -> None:
    from trimtab.formats.files import write_text

    write_text(path, text)
    err.print(f"{what} written to {path}", markup=False)


def seconds_of(text: str, option: str) -> float:
    """Parses a duration: 90, 90s, 10m, 1.5h."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise InputError(f"a time such as 90s, 10m or 2h is expected, not {text}", where=f"command line: {option}")
    return float(match[1]) * _UNITS[match[2]]


def check_seconds(seconds: float, option: str, min_s: float) -> None:
    if not min_s <= seconds < float("inf"):
        raise InputError(f"{option} must be at least {min_s:g} s, not {seconds:g}", where=f"command line: {option}")


def at_most_of(seconds: float | None) -> float:
    if seconds is None:
        return math.inf
    check_seconds(seconds, "--at-most", 0.0)
    return seconds


def not_installed(what: str, fault: ImportError) -> InputError:
    """The error for a dependency of `trimtab[serve]` that is missing."""
    return InputError(f"{what} needs {fault.name}, which is not installed", hint="pip install 'trimtab[serve]'")


@contextmanager
def controller_session(address: str | None, name: str | None) -> Iterator[Session]:
    """A session with the running controller. Raises UnreachableError if there is none."""
    from trimtab.runtime.client.connection import ControllerConnection
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.rayapi.connect import RayConnection

    link = RayConnection(None if address == "auto" else address, start=False)
    try:
        session = Session(
            link, ControllerConnection(link.ray, _controller_name(link.ray, name), None, None, ANSWER_S, make=False)
        )
    except BaseException:
        link.close()
        raise
    with session:
        yield session


def _controller_name(ray: Any, name: str | None) -> str:
    """The name of the controller: as given, the only one, or the default."""
    from trimtab.runtime.controller.rpc import controllers

    there = controllers(ray)
    wanted = name or (there[0] if len(there) == 1 else CONTROLLER)
    if there and wanted not in there:
        raise UnreachableError(f"the cluster has no controller {wanted}", hint=f"--name is one of: {', '.join(there)}")
    return wanted
