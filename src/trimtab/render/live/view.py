"""A live view: redrawn in place on a terminal, otherwise a line for each change. It only reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from trimtab.render.output import out

State = TypeVar("State")


class LiveView(Generic[State]):
    """Shows states while the `with` block is active; `stays` leaves the last picture on the terminal.

    `lines` are printed where there is no terminal: what changed since the state before, None at first.
    """

    def __init__(
        self,
        picture: Callable[[State], RenderableType],
        lines: Callable[[State | None, State], Iterable[str]],
        *,
        stays: bool = False,
    ) -> None:
        self._picture, self._lines = picture, lines
        self._before: State | None = None
        self._live: Live | None = None
        if out.is_terminal:
            screen = Console(highlight=False)  # folds long lines; `out` would crop them
            self._live = Live(console=screen, auto_refresh=False, transient=not stays, vertical_overflow="crop")

    @property
    def is_redrawn(self) -> bool:
        return self._live is not None

    def __enter__(self) -> LiveView[State]:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: State) -> None:
        if self._live is not None:
            self._live.update(self._picture(state), refresh=True)
            return
        for line in self._lines(self._before, state):
            print(line, flush=True)
        self._before = state
