"""`trimtab demo`: plans, trains and migrates a job; `plan`, `rlhf`, `elastic` show one aspect each."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from trimtab.cli import plan as plan_commands

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.command("plan")(plan_commands.demo)


class Language(str, enum.Enum):
    """Language of the pool demo."""

    en = "en"
    zh = "zh"


class Backend(str, enum.Enum):
    """Backend of the elastic demo."""

    auto = "auto"
    torch = "torch"
    numpy = "numpy"


@app.callback()
def demo(
    context: typer.Context, folder: Annotated[Path, Option(help="Folder for the run and its report.")] = Path("out")
) -> None:
    """Train a policy on a local Ray: plan, a joining node, a preempting evaluation, drift, migrations, a report.

    `demo plan` plans the bundled example, `demo rlhf` shows pools, `demo elastic` shows elastic groups.
    """
    if context.invoked_subcommand is None:
        from trimtab.demos.run import run_demo

        raise typer.Exit(run_demo(folder))


@app.command()
def rlhf(
    lang: Annotated[Language, Option(help="Language of the output.")] = Language.en,
    address: Annotated[
        str | None,
        Option("--address", "-a", help="Ray cluster.  [default: RAY_ADDRESS, a running local cluster, or a new one]"),
    ] = None,
    ray_dashboard: Annotated[bool, Option("--ray-dashboard", help="Start a new Ray with Ray's dashboard.")] = False,
) -> None:
    """Run rollout, reward and train in one pool on Ray, then two pools with preemption across them."""
    from trimtab.demos.rlhf import run_demo

    raise typer.Exit(run_demo(lang.value, address, dashboard=ray_dashboard))


@app.command()
def elastic(
    backend: Annotated[Backend, Option(help="Compute backend; auto: PyTorch if installed, else numpy.")] = Backend.auto,
) -> None:
    """Train while nodes join, are killed and drained, on a local Ray of several nodes; about a minute."""
    from trimtab.demos.elastic import run_demo

    raise typer.Exit(run_demo(backend.value))
