"""The command line: commands, exit statuses, and error output.

Exit status: 0 success; 2 invalid input or call; 3 infeasible; 4 a cluster or engine failed. A command's module is
imported when the command is called.
"""

from __future__ import annotations

import csv
import importlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import MutableMapping
from importlib import resources
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from trimtab import __version__
from trimtab.core.errors import TrimtabError
from trimtab.render.output import err

INTERRUPTED = 130

RUNS, THINGS, COSTS, MORE = "Runs", "Pools and clusters", "Costs and layers", "More"
COMMANDS = {  # name: module and function or group, panel of the help, its line there
    "plan": ("plan:plan", RUNS, "Find the best placement of every component under measured costs."),
    "estimate": ("estimate:estimate", RUNS, "Estimate seconds, memory and cost of a run before anything is measured."),
    "check": ("check:check", RUNS, "Say what would kill a run after minutes of loading, before it starts."),
    "run": ("run:run", RUNS, "Run a job, and re-plan when the plan is no longer the best."),
    "advise": ("advise:advise", RUNS, "Show where the step time of a run goes, and which placement is faster."),
    "simulate": ("simulate:simulate", RUNS, "Run policies on simulated clusters, or on the tasks of a journal."),
    "show": ("show:show", RUNS, "Open a run: in the terminal, as an HTML report, or as a dashboard."),
    "why": ("why:why", RUNS, "Say why a task, node, engine or anything of a Ray cluster waits."),
    "pool": ("pool:pools", THINGS, "Pools of a Ray cluster: quota, slots, queues."),
    "task": ("pool:tasks", THINGS, "Tasks of pools: state, processes, logs; cancel and evict."),
    "node": ("cluster.nodes:app", THINGS, "Nodes: list, add, drain and remove."),
    "engine": ("engine.commands:app", THINGS, "Rollout engines behind one gateway: serve, drain, scale, diagnose."),
    "cluster": ("cluster.commands:app", THINGS, "Ray clusters on this machine; exports for KubeRay and Slurm."),
    "profile": ("profile:app", COSTS, "Costs from logs, memory from a model's configuration, layers of a model."),
    "pipeline": ("pipeline:pipeline", COSTS, "Assign the layers of a model to unlike devices."),
    "demo": ("demo:app", MORE, "Train a small policy on a local Ray while nodes join and leave."),
    "schema": ("schema:schema", MORE, "Print the JSON Schema of a file, for editors."),
}


class Commands(TyperGroup):
    """The top-level commands; each is imported when it is called."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        """All commands, imported."""
        return {name: load(name) for name in COMMANDS}

    @commands.setter
    def commands(self, _: Any) -> None:
        """They are those of the table."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        _, panel, line = COMMANDS[cmd_name]
        return TyperCommand(name=cmd_name, help=line, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and printable(load(name or "")), rest


def load(name: str) -> Any:
    """Imports a command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(importlib.import_module(f"trimtab.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name)(function)
    found.rich_markup_mode, found._add_completion = "rich", False
    root: Any = get_command(found)
    root.name = name
    return root


def printable(root: Any) -> Any:
    """In help texts brackets are no markup, and indented lines (examples) stay lines of their own."""
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        item.help = re.sub(r"(?<![\\\n])\n(?=    )", "\n\n", escape(item.help or ""))
        for parameter in item.params:
            if getattr(parameter, "help", None):
                parameter.help = escape(parameter.help)
        stack += getattr(item, "commands", {}).values()
    return root


app = typer.Typer(
    name="trimtab",
    cls=Commands,
    help="Plans, schedules and runs RL post-training of large models on Ray.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_debug = False

# typer bundles click or uses the installed one: the base class of its exceptions is found through one of them.
_WrongCall: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


@app.callback()
def _common(
    debug: Annotated[bool, Option("--debug", help="Show tracebacks and detailed logs.")] = False,
    version: Annotated[bool, Option("--version", "-V", help="Show the version and exit.")] = False,
) -> None:
    global _debug
    _debug = debug
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if version:
        print(f"trimtab {__version__}")
        raise typer.Exit


def run(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status; errors are one to three lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an invalid character in a file name must not raise
            stream.reconfigure(errors="backslashreplace")
    try:
        status = get_command(app)(args=arguments, prog_name="trimtab", standalone_mode=False)
    except TrimtabError as error:
        if _debug:
            traceback.print_exc()
        _show(error)
        return error.exit_status
    except KeyboardInterrupt:
        err.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`trimtab plan ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, _WrongCall):
            moved = new_form(sys.argv[1:] if arguments is None else arguments)
            if moved is None:
                error.show()
            else:
                err.print("[red]error:[/] `trimtab {}` is now `trimtab {}`".format(*map(escape, moved)))
            return int(error.exit_code)
        if isinstance(error, typer.Abort):
            err.print("interrupted")
            return INTERRUPTED
        if _debug:
            traceback.print_exc()
        err.print(f"[red]error:[/] internal error in trimtab: {escape(type(error).__name__)}: {escape(str(error))}")
        err.print("run it again with `trimtab --debug ...` and report the output")
        return 1
    return status if isinstance(status, int) else 0


def new_form(arguments: list[str]) -> tuple[str, str] | None:
    """The longest old form in a call, of the table of what has moved, and its new form."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    words = words[1:] if words[:1] == ["--debug"] else words
    best: tuple[str, str] | None = None
    with (resources.files("trimtab") / "formats" / "data" / "moved_commands.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            verbs, flags, old = row["command"].split(), row["flag"].split(), f"{row['command']} {row['flag']}".strip()
            if words[: len(verbs)] == verbs and set(flags) <= set(words) and len(old) > len(best[0] if best else ""):
                best = old, row["new"]
    return best


def _show(error: TrimtabError) -> None:
    first, *rest = error.lines()
    err.print(f"[red]error:[/] {escape(first)}")
    for line in rest:
        err.print(f"  {escape(line)}")
