"""The command line: commands, exit statuses, and error output.

Exit status: 0 success; 2 invalid input or call; 3 infeasible; 4 a cluster or engine failed.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Option
from typer.main import get_command

from trimtab import __version__
from trimtab.cli import advise as advise_commands
from trimtab.cli import cluster as cluster_commands
from trimtab.cli import cluster_export as outside_commands
from trimtab.cli import dashboard as dashboard_commands
from trimtab.cli import demo as demo_commands
from trimtab.cli import estimate as estimate_command
from trimtab.cli import partition as partition_commands
from trimtab.cli import plan as plan_commands
from trimtab.cli import pool as pool_commands
from trimtab.cli import profile as profile_commands
from trimtab.cli import replay as replay_commands
from trimtab.cli import report as run_report_command
from trimtab.cli import run as run_commands
from trimtab.cli import schema as schema_command
from trimtab.cli import simulate as simulate_commands
from trimtab.cli import why as why_commands
from trimtab.cli.rollout import commands as rollout_commands
from trimtab.core.errors import TrimtabError
from trimtab.render.output import err

INTERRUPTED = 130

app = typer.Typer(
    name="trimtab",
    help="Plans, schedules and runs RL post-training of large models on Ray.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan_commands.plan)
app.command("estimate")(estimate_command.estimate)
app.command("partition")(partition_commands.partition)
app.command("run")(run_commands.run)
app.command("simulate")(simulate_commands.simulate)
app.command("replay")(replay_commands.replay)
app.command("schema")(schema_command.schema)
app.command("report")(run_report_command.report)
app.command("dashboard")(dashboard_commands.dashboard)
app.command("top")(dashboard_commands.top)
app.add_typer(demo_commands.app, name="demo")
app.add_typer(profile_commands.app, name="profile")
app.command("status")(pool_commands.status)
app.command("explain")(pool_commands.explain)
app.add_typer(pool_commands.app, name="pool")
app.command("why")(why_commands.why)
app.command("advise")(advise_commands.advise)
cluster_commands.app.command("advise")(outside_commands.advise)
cluster_commands.app.command("hook")(outside_commands.hook)
cluster_commands.app.add_typer(outside_commands.export, name="export")
app.add_typer(cluster_commands.app, name="cluster")
app.add_typer(rollout_commands.app, name="rollout")

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


def command() -> Any:
    """All commands; in help texts brackets are no markup, and indented lines (examples) stay lines of their own."""
    root = get_command(app)
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        item.help = re.sub(r"(?<![\\\n])\n(?=    )", "\n\n", escape(item.help or ""))
        for parameter in item.params:
            if getattr(parameter, "help", None):
                parameter.help = escape(parameter.help)
        stack += getattr(item, "commands", {}).values()
    return root


def run(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status; errors are one to three lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an invalid character in a file name must not raise
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command()(args=arguments, prog_name="trimtab", standalone_mode=False)
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
            error.show()
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


def _show(error: TrimtabError) -> None:
    first, *rest = error.lines()
    err.print(f"[red]error:[/] {escape(first)}")
    for line in rest:
        err.print(f"  {escape(line)}")
