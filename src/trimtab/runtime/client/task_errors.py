"""What can come of a task instead of its result, each with the controller's explanation."""

from __future__ import annotations

from trimtab.core.errors import TrimtabError
from trimtab.model.pool import TaskExplanation


class TaskError(TrimtabError):
    """A task did not do what was asked of it; `explanation` says why, as far as the controller could be asked."""

    exit_status = 4

    def __init__(self, what: str, explanation: TaskExplanation | None = None, *, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.explanation = explanation


class TaskTimeoutError(TaskError, TimeoutError):
    """The task is not so far yet; it goes on."""


class TaskInterruptedError(TaskError):
    """The process ended under a call. If the task was evicted or has restarts left, it runs again."""


class TaskFailedError(TaskError):
    """The task failed; `trace` is the traceback of its constructor or entry method, where that raised."""

    trace: str = ""

    def __str__(self) -> str:
        """What happened, and the traceback from the task's process."""
        return f"{super().__str__()}\n\n{self.trace}".rstrip()


class TaskCancelledError(TaskError):
    """Somebody ended the task."""
