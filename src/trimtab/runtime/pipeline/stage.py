"""One stage of a pipeline, as a Ray actor: takes a microbatch, runs its blocks, hands the result on.

Receiving, computing and sending run concurrently, each in its own thread, as the planner assumes. Slots bound them:
`buffers_in` received microbatches wait beside the one being computed, `buffers_out` results wait to be sent; without a
free slot a thread waits, which is the backpressure of a slow stage. Every wait has a deadline. Under emulation a stage
takes the planned times, and its real computation happens within them; a step is due its planned time after the previous
one was due, so that calls between processes, which the plan ignores, do not add up. Measured times are always real.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from trimtab.core.frozen import Frozen

# Of an emulated transfer, this much may have passed in the call that announced it.
CALL_GRACE_S = 0.02
CALL_GRACE_SHARE = 0.2


class StageSettings(Frozen):
    """Settings of a stage. Seconds are None if time is real, and the planned ones under emulation."""

    name: str
    buffers_in: int
    buffers_out: int
    timeout_s: float
    device: str = "cpu"
    threads: int = 1
    receive_s: float | None = None
    compute_s: float | None = None
    send_s: float | None = None  # of the last stage, to a sink; elsewhere the receiver's `receive_s` counts
    imports: str = ""
    python_path: tuple[str, ...] = ()


class StageTimes(Frozen):
    """Where a stage's time went."""

    compute_s: tuple[float, ...]  # of every microbatch, what the blocks really took
    starved_s: float  # waiting for input, after the first
    blocked_s: float  # waiting for the next stage


class StageError(Exception):
    """A stage cannot go on. `passed_on`: because of the next stage."""

    def __init__(self, what: str, passed_on: bool = False) -> None:
        super().__init__(what, passed_on)
        self.what = what
        self.passed_on = passed_on

    def __str__(self) -> str:
        return self.what


class StageActor:
    """The actor: `load`, then `run`, concurrently with `take` by the previous stage and `give` by the reader."""

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings
        self._blocks: tuple[Any, ...] = ()
        self._inbox: queue.Queue[tuple[int, Any, float]] = queue.Queue()
        self._outbox: queue.Queue[tuple[int, Any, float]] = queue.Queue()
        # Acquired before data is received, released when computing starts; and by a result, until it is received.
        self._in_slots = threading.Semaphore(settings.buffers_in)
        self._out_slots = threading.Semaphore(settings.buffers_out)
        self._link_free_at = 0.0
        self._exit_free_at = 0.0
        self._sent = threading.Event()
        self._send_fault: Exception | None = None

    def load(self, blocks: bytes | None) -> str:
        """Unpack the blocks onto the device; without blocks a stage passes on its input."""
        if blocks is None:
            return self._settings.name
        import pickle
        import sys

        sys.path.extend(entry for entry in self._settings.python_path if entry not in sys.path)
        from trimtab.profile import block_chain

        torch = block_chain.import_torch()
        torch.set_num_threads(self._settings.threads)
        if self._settings.imports:
            block_chain.load(self._settings.imports)  # so that classes of a file that is no package are found
        place = block_chain.device_of(self._settings.device)
        self._blocks = tuple(block.to(place) for block in pickle.loads(blocks))
        return self._settings.name

    def take(self, number: int, box: list[Any]) -> int:
        """Receive a microbatch; returns once it is here, which waits for a free slot."""
        import ray

        if not self._in_slots.acquire(timeout=self._settings.timeout_s):
            raise StageError(f"{self._settings.name} had no room for microbatch {number + 1} in time")
        free_at = time.monotonic()
        value = ray.get(box[0], timeout=self._settings.timeout_s)
        arrived = time.monotonic()
        if self._settings.receive_s:
            arrived = self._link_free_at = _pass_time(self._settings.receive_s, free_at, self._link_free_at)
        self._inbox.put((number, value, arrived))
        return number

    def run(self, count: int, following: Any) -> StageTimes:
        """Compute `count` microbatches and send them to the next stage, or keep them for `give`."""
        if following is not None:
            threading.Thread(target=self._send_all, args=(count, following), daemon=True).start()
        settings = self._settings
        computed: list[float] = []
        starved = blocked = 0.0
        free_at = 0.0
        for done in range(count):
            waited_from = time.monotonic()
            number, carried, arrived = self._next_input(done)
            self._in_slots.release()
            begun = time.monotonic()
            if done:
                starved += begun - waited_from
            carried = self._compute(carried)
            ended = time.monotonic()
            computed.append(ended - begun)
            if settings.compute_s is not None:
                free_at = max(ended, max(arrived, free_at) + settings.compute_s)
                _sleep_until(free_at)
            full_from = time.monotonic()
            if not self._out_slots.acquire(blocking=False):
                self._wait_for_room(number)
                free_at = time.monotonic()
                blocked += free_at - full_from
            self._outbox.put((number, carried, time.monotonic()))
        if following is not None and not self._sent.wait(settings.timeout_s):
            raise StageError(f"{settings.name} could not hand on its last microbatch in time")
        self._raise_send_fault()
        return StageTimes(tuple(computed), starved, blocked)

    def give(self) -> tuple[int, Any, float]:
        """The next result of the last stage: number, result, and completion time by this stage's clock."""
        try:
            number, carried, done_at = self._outbox.get(timeout=self._settings.timeout_s)
        except queue.Empty:
            raise StageError(f"{self._settings.name} had no result in time") from None
        if self._settings.send_s:
            self._exit_free_at = _pass_time(self._settings.send_s, done_at, self._exit_free_at)
            done_at = time.monotonic()
        self._out_slots.release()
        return number, carried, done_at

    def _compute(self, carried: Any) -> Any:
        if not self._blocks:
            return carried
        from trimtab.profile import block_chain

        torch = block_chain.import_torch()
        place = block_chain.device_of(self._settings.device)
        with torch.inference_mode():
            carried = block_chain.on_device(carried, place)
            for block in self._blocks:
                carried = block_chain.step(block, carried)
            # Onto the host also from a GPU: the object store is host memory.
            return block_chain.on_device(carried, torch.device("cpu"))

    def _next_input(self, done: int) -> tuple[int, Any, float]:
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            self._raise_send_fault()
            try:
                return self._inbox.get(timeout=min(0.5, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise StageError(f"{self._settings.name} got no input after {done} microbatches") from None

    def _wait_for_room(self, number: int) -> None:
        deadline = time.monotonic() + self._settings.timeout_s
        while not self._out_slots.acquire(timeout=0.5):
            self._raise_send_fault()
            if time.monotonic() >= deadline:
                raise StageError(f"{self._settings.name} could not hand on microbatch {number + 1} in time")

    def _send_all(self, count: int, following: Any) -> None:
        import ray

        try:
            for _ in range(count):
                number, carried, _done_at = self._outbox.get(timeout=2 * self._settings.timeout_s)
                box = [ray.put(carried)]
                ray.get(following.take.remote(number, box), timeout=2 * self._settings.timeout_s)
                self._out_slots.release()
        except queue.Empty:
            pass  # the computing thread reports why nothing came
        except Exception as fault:
            self._send_fault = fault
        finally:
            self._sent.set()

    def _raise_send_fault(self) -> None:
        if self._send_fault is not None:
            raise StageError(f"{self._settings.name} could not hand on: {self._send_fault}", passed_on=True)


def _pass_time(seconds: float, ready_at: float, free_at: float) -> float:
    """Let an emulated transfer take its time; returns its end."""
    grace = min(CALL_GRACE_S, CALL_GRACE_SHARE * seconds)
    # It never starts before the previous one has ended, so a link never exceeds its bandwidth.
    end = max(free_at, ready_at - grace) + seconds
    _sleep_until(end)
    return end


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
