"""`trimtab demo`: the bundled job, planned; `trimtab demo rlhf`: pools at work on a real Ray."""

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


@app.callback()
def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--folder", help="Where the report goes.")] = Path("out"),
) -> None:
    """Plan the bundled example and write its report; `demo rlhf` shows pools on Ray."""
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
