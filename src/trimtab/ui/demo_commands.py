"""`trimtab demo`: the bundled job, planned; `demo rlhf`: pools on a real Ray; `demo elastic`: nodes come and go."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from trimtab.ui import plan_commands

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


class Language(str, enum.Enum):
    """What the demo of pools speaks."""

    en = "en"
    zh = "zh"


class Backend(str, enum.Enum):
    """What the demo of elastic groups computes with."""

    auto = "auto"
    torch = "torch"
    numpy = "numpy"


@app.callback()
def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--folder", help="Where the report goes.")] = Path("out"),
) -> None:
    """Plan the bundled example and write its report; `demo rlhf` shows pools on Ray, `demo elastic` elastic groups."""
    if context.invoked_subcommand is None:
        plan_commands.demo(folder)


@app.command()
def rlhf(
    lang: Annotated[Language, typer.Option("--lang", help="Language of the output.")] = Language.en,
    address: Annotated[
        str | None,
        typer.Option("--address", "-a", help="A Ray cluster; else RAY_ADDRESS, one that runs here, or a local Ray."),
    ] = None,
) -> None:
    """Rollout, reward and train in one pool on Ray, then two pools with preemption across them."""
    from trimtab.ui.rlhf_demo import run_demo

    raise typer.Exit(run_demo(lang.value, address))


@app.command()
def elastic(
    backend: Annotated[
        Backend, typer.Option("--backend", help="What computes: PyTorch where it is installed, else numpy.")
    ] = Backend.auto,
) -> None:
    """Train while nodes join, are killed and drained: on a Ray of several nodes of its own, about a minute."""
    from trimtab.ui.elastic_demo import run_demo

    raise typer.Exit(run_demo(backend.value))
