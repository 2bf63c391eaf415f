"""The report of a run as the value of a notebook cell.

    trimtab.report("runs/grpo-1")

The page of `trimtab show --report` in a sandboxed iframe: its style and script stay apart from the notebook's, and it
loads nothing. Read when it is shown, so showing it again gives the current state of the run.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from trimtab.core.frozen import Frozen
from trimtab.render.html.run.story import RunStory, read_story

HEIGHT_PX = 900


class RunReport(Frozen):
    """The report of the run in a folder; `save` writes it as a file."""

    folder: Path
    metrics: tuple[str, ...] = ()
    height_px: int = HEIGHT_PX

    @property
    def story(self) -> RunStory:
        return read_story(self.folder)

    def html(self) -> str:
        from trimtab.render.html.run.report import run_report

        title = self.folder.resolve().name or "run"
        return run_report(self.story, title=title, command=None, metrics=self.metrics)

    def save(self, path: str | Path | None = None) -> Path:
        """Write the page, by default into the run's folder as report.html."""
        from trimtab.formats.files import write_text

        target = Path(path) if path is not None else self.folder / "report.html"
        write_text(target, self.html())
        return target

    def _repr_html_(self) -> str:
        page = html.escape(self.html(), quote=True)
        return (
            f'<iframe title="Report of the run {html.escape(str(self.folder), quote=True)}" sandbox="allow-scripts" '
            f'style="width:100%;height:{self.height_px}px;border:0" srcdoc="{page}"></iframe>'
        )

    def __repr__(self) -> str:
        from trimtab.render.html.run.figures import status_sentence, story_lines

        story = self.story
        return "\n".join([status_sentence(story), *story_lines(story, self.metrics)])


def report(folder: str | Path, *, metrics: Sequence[str] = (), height_px: int = HEIGHT_PX) -> RunReport:
    """The report of a run for a notebook. InputError where the folder holds no run."""
    made = RunReport(Path(folder), tuple(metrics), height_px)
    read_story(made.folder)
    return made
