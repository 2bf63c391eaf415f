"""States of a run: each component saved between two of its own iterations, and all of them together or not at all.

A state after iteration t holds every component as it was when it had ended t, whatever the others were doing then; so
nobody has to wait for a state, also where iterations overlap. It counts when the last one has saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trimtab.runtime.run.components import ComponentSet
from trimtab.runtime.run.folder import RunFolder


class Checkpointer:
    """When to save, and who has. Any thread may save a component, one at a time for each."""

    def __init__(
        self, folder: RunFolder | None, names: tuple[str, ...], every: int, last: int, tell: Callable[..., None]
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._names = names
        self._every = every
        self._last = last
        self._lock = threading.Lock()
        self._saved: set[tuple[int, str]] = set()  # of states that do not count yet
        self.whole = 0  # the last iteration of which there is a state that counts

    def is_due(self, iteration: int) -> bool:
        """Whether there is to be a state after an iteration."""
        return self._folder is not None and (iteration % self._every == 0 or iteration == self._last)

    def save(self, crew: ComponentSet, name: str, iteration: int) -> None:
        """Have a component save that has just ended an iteration. Raises OSError."""
        if self._folder is None:
            return
        if crew.has(name, "save"):
            crew.save(name, self._folder.new_state_folder(iteration, name))
        with self._lock:
            self._saved.add((iteration, name))

    def complete(self, crew: ComponentSet, iteration: int) -> None:
        """Everybody has ended the iteration: have those save that have not, and let the state count. Raises OSError.

        As long as events cannot be written no state counts: after a crash it would know of iterations that they do not.
        """
        if self._folder is None or self.whole >= iteration or not self._folder.all_written():
            return
        for name in self._names:
            if (iteration, name) not in self._saved:
                self.save(crew, name, iteration)
        self._folder.commit_state(iteration)
        self._tell("saved", iteration=iteration)
        with self._lock:
            self.whole = iteration
            self._saved = {one for one in self._saved if one[0] > iteration}
