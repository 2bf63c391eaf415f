"""Checkpoints of a run: each component saves between two of its own iterations; a checkpoint is complete or void.

The checkpoint after iteration t holds every component as it was at the end of its own iteration t, whatever the others
were doing then, so no component waits for a checkpoint, even where iterations overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trimtab.runtime.run.components import Components
from trimtab.runtime.run.folder import RunFolder


class Checkpointer:
    """Decides when to save and tracks which components have. Components may be saved from any thread."""

    def __init__(
        self, folder: RunFolder | None, names: tuple[str, ...], every: int, last: int, emit: Callable[..., None]
    ) -> None:
        self._folder = folder
        self._emit = emit
        self._names = names
        self._every = every
        self._last = last
        self._lock = threading.Lock()
        self._saved: set[tuple[int, str]] = set()  # of checkpoints that are not complete yet
        self.last_complete = 0  # iteration of the last complete checkpoint

    def is_due(self, iteration: int) -> bool:
        return self._folder is not None and (iteration % self._every == 0 or iteration == self._last)

    def save(self, components: Components, name: str, iteration: int) -> None:
        """Save a component that has just ended an iteration. Raises OSError."""
        if self._folder is None:
            return
        if components.has(name, "save"):
            components.call(name, "save", str(self._folder.new_state_folder(iteration, name)))
        with self._lock:
            self._saved.add((iteration, name))

    def complete(self, components: Components, iteration: int) -> None:
        """Save the components that have not saved yet and commit the checkpoint. Raises OSError.

        No checkpoint is committed while events cannot be written: after a crash it would be ahead of the event log.
        """
        if self._folder is None or self.last_complete >= iteration or not self._folder.all_written():
            return
        for name in self._names:
            if (iteration, name) not in self._saved:
                self.save(components, name, iteration)
        self._folder.commit_state(iteration)
        self._emit("saved", iteration=iteration)
        with self._lock:
            self.last_complete = iteration
            self._saved = {saved for saved in self._saved if saved[0] > iteration}
