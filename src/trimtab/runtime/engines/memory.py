"""Checks that an engine that went to sleep has released its GPU memory.

Engines confirm a sleep that freed nothing: a flag was missing at start, or another process holds the rest. The next
user of the memory must not find out by an out-of-memory error, so the driver is read before and after, and a Reason
reports the result. If no driver can be read, the result is unknown, not success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.runtime.engines.engine import Engine
from trimtab.runtime.procs.gpus import used_bytes

_MIN_FREED_SHARE = 0.1
"""Of the memory in use before: freeing less counts as nothing freed, if `min_bytes` is not given."""
_GIB = 2**30

MemoryProbe = Callable[[Sequence[int]], "int | None"]
"""Bytes in use on these GPUs of this node; None: unknown."""


@dataclass(frozen=True)
class SleepResult:
    """Effect of a sleep on GPU memory."""

    before: int | None
    after: int | None
    reason: Reason

    @property
    def released(self) -> bool | None:
        """None: unknown."""
        return None if self.after is None else self.reason.code is ReasonCode.asleep


async def sleep_and_verify(
    engine: Engine,
    gpus: Sequence[int],
    *,
    level: int = 1,
    min_bytes: int | None = None,
    within_s: float = 10.0,
    used: MemoryProbe | None = None,
) -> SleepResult:
    """Puts an engine to sleep and waits for its GPU memory to be freed."""
    read = used or used_bytes
    before = read(gpus)
    await engine.sleep(level)
    if before is None:
        return SleepResult(
            None, None, Reason(ReasonCode.asleep, f"{engine.name} sleeps; its GPU memory cannot be read here")
        )
    wanted = min_bytes if min_bytes is not None else int(before * _MIN_FREED_SHARE)
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        after = read(gpus)
        if after is None:
            return SleepResult(
                before, None, Reason(ReasonCode.asleep, f"{engine.name} sleeps; its GPU memory cannot be read any more")
            )
        freed = before - after
        if freed >= wanted:
            sentence = f"{engine.name} sleeps and gave {_gib(freed)} back; {_gib(after)} are still in use"
            return SleepResult(before, after, Reason(ReasonCode.asleep, sentence))
        if asyncio.get_running_loop().time() >= deadline:
            sentence = (
                f"{engine.name} sleeps, but only {_gib(max(freed, 0))} of {_gib(before)} came free in {within_s:g} s; "
                f"{_gib(wanted)} were expected"
            )
            return SleepResult(before, after, Reason(ReasonCode.memory_kept, sentence))
        await asyncio.sleep(min(0.1, within_s))


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
