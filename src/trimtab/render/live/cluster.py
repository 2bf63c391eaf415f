"""What `trimtab cluster start` shows until it is interrupted or the cluster ends, and how it hears of being ended.

On a terminal one picture that is redrawn; elsewhere a line per change. It looks and tells, and changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.live import Live

from trimtab.core.errors import UnreachableError
from trimtab.render.output import out
from trimtab.render.text import cluster as cluster_text
from trimtab.runtime.localcluster import gpus
from trimtab.runtime.localcluster import nodes as local
from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger
from trimtab.runtime.localcluster.ray_status import FIRST_ANSWER_S, RayViewProcess

LOOK_EVERY_S = 1.0
GPUS_EVERY_S = 10.0
LIVE_ANSWER_S = 3.0  # how long a picture waits for Ray; without it, what is known is shown


class ClusterStatusLoop:
    """Puts the status of a cluster together, again and again; a process of its own asks Ray."""

    def __init__(self, ledger: Ledger, cluster: ClusterRecord) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._watch: RayViewProcess | None = None
        self._gpus: Any = None
        self._gpus_at = -math.inf

    def __enter__(self) -> ClusterStatusLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def now(self, patience_s: float = FIRST_ANSWER_S) -> dict[str, Any]:
        """The status; where Ray does not answer in time, what is known without it."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        seen, notes = None, []
        try:
            if self._watch is None:
                local.auth_of(cluster)
                self._watch = RayViewProcess(cluster.address, LOOK_EVERY_S)
            seen = self._watch.nodes(patience_s)
        except UnreachableError as fault:
            if self._watch is not None and not self._watch.alive:
                self._stop()
            if not cluster.standing:
                raise
            notes.append(fault.what)
        there, users = self._gpus_now(cluster)
        return cluster_text.status_data(cluster, seen, there, users, notes)

    def while_it_lives(self) -> dict[str, Any] | None:
        """The status; None when the head has ended."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        if cluster.head is None or not cluster.head.stands:
            return None
        try:
            return self.now(patience_s=LIVE_ANSWER_S)
        except UnreachableError:  # it has ended in this moment
            return None

    def _gpus_now(self, cluster: ClusterRecord) -> Any:
        """GPUs and who computes on them; asking the driver is slow, so not every time."""
        if time.monotonic() - self._gpus_at > GPUS_EVERY_S:
            here = cluster.head_here or cluster.nodes
            there = gpus.of_this_machine(cluster.fake_gpus) if here else gpus.LocalGpus(())
            self._gpus = there, {} if there.fake else gpus.users()
            self._gpus_at = time.monotonic()
        return self._gpus

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def watch(look: Callable[[], dict[str, Any] | None], hints: Sequence[str]) -> None:
    """Show the cluster until `look` says None: it has ended."""
    if not out.is_terminal:
        _tell_changes(look)
        return
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while (data := look()) is not None:
            live.update(cluster_text.picture(data, [*hints, "", "Ctrl-C ends the cluster"]), refresh=True)
            time.sleep(LOOK_EVERY_S)


def _tell_changes(look: Callable[[], dict[str, Any] | None]) -> None:
    before: dict[str, Any] | None = None
    while (data := look()) is not None:
        for line in cluster_text.change_lines(before, data):
            print(line, flush=True)
        before = data
        time.sleep(LOOK_EVERY_S)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Being ended or hung up on is like Ctrl-C: what was started is ended in order."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A second Ctrl-C does not cut the cleaning up short; it has deadlines of its own."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
