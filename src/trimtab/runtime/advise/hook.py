"""The user's command that restarts a run with advised settings: run once for each advice, with a deadline.

It gets the advice in its environment, and its output goes to standard error, so that standard output holds only the
answer. It is never run twice for the same overrides, whatever its result; and it survives an interrupt of trimtab,
because a restart that is cut in half is worse than either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trimtab.formats.write_back import shell_words
from trimtab.runtime.advise.replanner import Advice

STANDARD_ERROR = 2
END_S = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class HookResult:
    """Result of the command. `status` is None if it could not be started or timed out."""

    step: int
    sentence: str
    status: int | None

    @property
    def done(self) -> bool:
        return self.status == 0


class RestartHook:
    """Runs at most one such command at a time.

    `ran` are overrides that it was run for before; `starts` records, before it is run, what it is run for, and returns
    whether that was written: a command whose run could not be remembered is not run.
    """

    def __init__(
        self,
        command: str,
        config: str,
        at_most_s: float,
        ran: Iterable[tuple[str, ...]] = (),
        starts: Callable[[Advice, int], bool] = lambda advice, step: True,
    ) -> None:
        self._command = command
        self._config = config
        self._at_most_s = at_most_s
        self._ran = set(ran)
        self._starts = starts
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._step = 0

    @property
    def runs(self) -> bool:
        return self._process is not None

    def wanted(self, advice: Advice) -> bool:
        """Whether the command was not run for this advice yet."""
        return self._process is None and advice.overrides not in self._ran

    def start(self, advice: Advice, step: int) -> HookResult | None:
        """Run the command; returns a result only if it cannot be started."""
        self._ran.add(advice.overrides)
        self._step = step
        if not self._starts(advice, step):
            return HookResult(step, "the command was not run: its start cannot be recorded", None)
        environment = {
            **os.environ,
            "TRIMTAB_CONFIG": self._config,
            "TRIMTAB_OVERRIDES": " ".join(shell_words(advice.settings)),
            "TRIMTAB_PLAN": advice.plan.describe(),
            "TRIMTAB_GAIN": f"{advice.gain:.4f}",
            "TRIMTAB_STEP": str(step),
        }
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,
                start_new_session=True,  # Ctrl-C is for trimtab
            )
        except OSError as error:
            return HookResult(step, f"the command could not be started: {error.strerror}", None)
        self._deadline = time.monotonic() + self._at_most_s
        return None

    def ended(self) -> HookResult | None:
        """The result of the command, once it has ended or timed out."""
        process = self._process
        if process is None:
            return None
        status = process.poll()
        if status is not None:
            self._process = None
            how = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
            return HookResult(self._step, f"the command {how}", status)
        if time.monotonic() < self._deadline:
            return None
        self._process = None
        _kill(process)
        return HookResult(self._step, f"the command took longer than {self._at_most_s:g} s and was ended", None)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
