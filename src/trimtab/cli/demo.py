"""`trimtab demo`: a job planned, trained and moved; `plan`, `rlhf`, `elastic` show one side of it each."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli import plan as plan_commands

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
    folder: Annotated[Path, typer.Option("--folder", help="Where run and report go.")] = Path("out"),
) -> None:
    """Train a policy on a Ray of its own: plan, a node that joins, an evaluation that preempts, drift, moves, a report.

    `demo plan` plans the bundled example, `demo rlhf` shows pools on Ray, `demo elastic` elastic groups.
    """
    if context.invoked_subcommand is None:
        from trimtab.demos.run import run_demo

        raise typer.Exit(run_demo(folder))


@app.command()
def plan(
    folder: Annotated[Path, typer.Option("--folder", help="Where the report goes.")] = Path("out"),
) -> None:
    """Plan the bundled example and write its report."""
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
    from trimtab.demos.rlhf import run_demo

    raise typer.Exit(run_demo(lang.value, address))


@app.command()
def elastic(
    backend: Annotated[
        Backend, typer.Option("--backend", help="What computes: PyTorch where it is installed, else numpy.")
    ] = Backend.auto,
) -> None:
    """Train while nodes join, are killed and drained: on a Ray of several nodes of its own, about a minute."""
    from trimtab.demos.elastic import run_demo

    raise typer.Exit(run_demo(backend.value))
