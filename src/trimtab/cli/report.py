"""`trimtab report`: writes an HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trimtab.cli.options import FormatOption, called
from trimtab.formats.files import write_text
from trimtab.render.output import Format, answer, err, print_lines, warn


def report(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of a run.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Output file.  [default: DIR/report.html]")] = None,
    metric: Annotated[
        list[str] | None,
        Option(help="Metric to plot, as component.name or name (repeatable).  [default: those named reward]"),
    ] = None,
    form: FormatOption = Format.text,
) -> None:
    """Write an HTML report of a run: timeline per GPU, plans, moves, decisions, costs, predictions and reward.

    The run may have ended, been killed, or be running. The file is self-contained.

    Examples:

        trimtab report out/grpo
        trimtab report out/grpo -o grpo.html --metric trainer.loss --metric reward
    """
    from trimtab.render.html.run.figures import all_metrics, metric_names, status_sentence, story_lines
    from trimtab.render.html.run.report import run_report
    from trimtab.render.html.run.story import read_story

    story = read_story(folder)
    target = output if output is not None else folder / "report.html"
    wanted = metric or []
    missing = [name for name in wanted if not metric_names(story, [name])]
    if missing:
        there = ", ".join(all_metrics(story)) or "none"
        warn(f"no metric {', '.join(missing)} in this run; available: {there}".replace("[", "\\["))
    title = folder.resolve().name or story.job or "run"
    write_text(target, run_report(story, title=title, command=called(), metrics=wanted))
    lines = story_lines(story, wanted)
    data = {
        "report": str(target),
        "state": story.state or "running",
        "standing": status_sentence(story),
        "iterations": len(story.iterations),
        "seconds": story.end_s,
        "moves": sum(move.state == "arrived" for move in story.moves),
        "lines_left_out": story.unparsed_lines,
        "words": lines,
    }

    answer(data, form, lambda: print_lines(lines))
    err.print(f"report written to {target}", markup=False)
