"""What `trimtab run` shows while a job runs: on a terminal a picture that is redrawn, elsewhere lines.

All of it goes to standard error. It hears events and says them; a display that cannot be written to any more is left
alone, and never ends a run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from trimtab.render.output import err, plain_table
from trimtab.render.text.run import RunNarrator, seconds

LINES_EVERY_S = 0.5  # lines of iterations, where they are shorter than that
REFRESH_PER_S = 4
AGAIN_S = 1.0  # after a second Ctrl-C, for the run to have ended
HINT = "Ctrl-C ends it after this iteration, a second one at once"
ENDING = "it ends after the iteration under way; Ctrl-C once more ends it at once"


class RunDisplay:
    """Shows a run from `with` to its end; `on_event` is its ear."""

    def __init__(self, title: str, story: RunNarrator, *, quiet: bool = False) -> None:
        self._title = title
        self.story = story
        self._quiet = quiet
        self._live: Live | None = None
        self._said_at = 0.0
        self._broken = False
        self._hint = HINT
        self._has_begun = False

    def __enter__(self) -> RunDisplay:
        if not self._quiet and err.is_terminal:
            screen = Console(stderr=True, highlight=False)  # `err` would have long lines cut off in the picture
            self._live = Live(
                console=screen,
                get_renderable=self._picture,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
        """Take an event, in whatever thread it comes."""
        self._has_begun = self._has_begun or event == "plan"
        lines = self.story.on_event(event, facts)
        if self._quiet:
            return
        if event == "iteration":
            if self._live is not None or not self._is_due():
                return
            self._said_at = time.monotonic()
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        """A line of its own."""
        if self._quiet or self._broken:
            return
        try:
            if self._live is not None:
                self._live.console.print(escape(line))
            else:
                err.print(escape(line))
        except (OSError, ValueError):  # whoever read it is gone
            self._broken = True

    def interrupted(self, times: int) -> None:
        """Ctrl-C was pressed: what comes of it stays in sight."""
        self._hint = "it ends"
        if self._has_begun:
            self._hint = ENDING if times == 1 else "it ends at once"
        if times <= 2:
            self.say(self._hint)

    def _is_due(self) -> bool:
        """Whether an iteration gets a line: the first and the last do, and one now and then."""
        ends = self.story.done in (1, self.story.iterations)
        return ends or time.monotonic() - self._said_at >= LINES_EVERY_S

    def _picture(self) -> RenderableType:
        story = self.story
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_row(
            f"[bold]{escape(self._title)}[/]",
            ProgressBar(total=max(1, story.iterations), completed=story.done, width=30),
            escape(story.line()),
        )
        rows: list[RenderableType] = [head]
        if story.plan:
            rows.append(escape(f"plan: {story.plan} GPUs" + (f"   {story.move}" if story.move else "")))
        if story.components:
            rows.append(self._components())
        rows.append(f"[dim]{escape(self._hint)}[/]")
        return Group(*rows)

    def _components(self) -> Table:
        table = plain_table()
        table.add_column("component")
        for heading in ("GPUs", "computes", "planned", "waits"):
            table.add_column(heading, justify="right")
        for component in self.story.components:
            planned = self.story.costs_s.get(component["component"])
            table.add_row(
                escape(str(component["component"])),
                str(component.get("gpus") or "CPU"),
                seconds(float(component["busy_s"])),
                "-" if planned is None or self.story.measuring else seconds(planned),
                seconds(float(component.get("wait_s", 0.0))),
            )
        return table


@contextlib.contextmanager
def signal_callbacks(interrupted: Callable[[int], None], asked: Callable[[], None]) -> Iterator[None]:
    """Within, `interrupted` hears of Ctrl-C as soon as it is pressed, and how often; `asked` of SIGUSR1.

    What Ctrl-C does is the run's business. A signal handler of Python's may come in the midst of anything; a byte in a
    pipe that another thread reads is safe.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    asking_before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    listener = threading.Thread(
        target=_tell_signals, args=(reading, interrupted, asked), name="trimtab-signals", daemon=True
    )
    listener.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, asking_before)
        signal.set_wakeup_fd(fd_before)
        os.close(writing)
        listener.join(5)
        os.close(reading)


def _tell_signals(reading: int, interrupted: Callable[[int], None], asked: Callable[[], None]) -> None:
    came = 0
    is_sure = False
    while True:
        if came == 2 and not is_sure:
            is_sure = True
            if not select.select([reading], [], [], AGAIN_S)[0]:
                # Two that come at the same time are one to Python, and the run would hear of one alone.
                os.kill(os.getpid(), signal.SIGINT)
        data = os.read(reading, 64)
        if not data:
            return
        for number in data:
            if number in (signal.SIGINT, signal.SIGTERM):
                came += 1
                interrupted(came)
            elif number == signal.SIGUSR1:
                asked()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within, whatever components print goes to standard error: on standard output stands the answer alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
