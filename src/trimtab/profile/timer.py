"""Times the components of a training loop and produces the profile that the planner reads.

Blocks of a component within an iteration add up to one sample; without iterations every block is a sample. A component
that is open more than once at a time (threads, nested calls) counts once, from the first opening to the last closing.
Blocks of different components are independent: nested blocks count in both, with a note in the profile. A block left by
an exception makes its sample void. What must never happen: the timer raises into the loop that it measures (wrong
arguments apart) or waits for a device by itself (see `sync`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from trimtab.model.workflow import Profile

Function = TypeVar("Function", bound=Callable[..., Any])

PATH_VARIABLE = "TRIMTAB_PROFILE"
"""Environment variable with a file name: the profile is saved there at process exit. `{pid}` becomes the process id."""

_Key = tuple[str, int | None]


@dataclass
class _OpenBlock:
    """A running component: since when, how many of its blocks are open, whether one failed."""

    since: float
    blocks: int = 1
    failed: bool = False


@dataclass
class _Iteration:
    seconds: dict[_Key, float] = field(default_factory=dict)
    void: set[_Key] = field(default_factory=set)


class Recorder:
    """Collects the times of the components of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[_Key, _OpenBlock] = {}
        self._samples: dict[_Key, list[float]] = {}  # one per block, while no iteration has been marked
        self._iterations: list[_Iteration] = []  # ended
        self._current: _Iteration | None = None
        self._marked = False
        self._nested: set[tuple[str, str]] = set()  # (inner, outer) names open together in a thread
        self._stack = threading.local()

    def component(self, name: str, *, gpus: int | None = None, sync: Callable[[], object] | None = None) -> Block:
        """Mark a component's work: `with component("rollout", gpus=8):`, or as a decorator.

        `sync` is called before the clock is read, for asynchronous work, e.g. torch.cuda.synchronize.
        """
        if not isinstance(name, str) or not name:
            raise ValueError("a component needs a name")
        if gpus is not None and (not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1):
            raise ValueError(f"a component runs on 1 GPU or more, not {gpus!r}")
        return Block(self, (name, gpus), sync)

    def iteration(self) -> AbstractContextManager[object]:
        """Mark the start of an iteration and the end of the previous one; as a context manager, also its own end.

        Once iterations are marked, blocks outside them (validation, checkpoints) do not count.
        """
        with self._lock:
            self._marked = True
            self._end_iteration()
            started = self._current = _Iteration()
        mark = ExitStack()
        mark.push(lambda kind, error, trace: self._close(started, failed=kind is not None))
        return mark

    def profile(self, *, gpus: int | None = None, warmup: int = 2, kind: str = "") -> Profile:
        """The profile so far. `gpus` applies to components whose blocks state no count."""
        from trimtab.core.errors import InputError
        from trimtab.formats.logs.measured import CostSample, drift_note, summarise
        from trimtab.formats.profile_file import merge
        from trimtab.model.workflow import Profile

        with self._lock:
            samples, notes = self._counted(warmup)
            notes += [f"{inner} ran inside {outer}: its time is in both" for inner, outer in sorted(self._nested)]
        if not samples:
            raise InputError(
                "the timer has nothing to save: no component finished often enough",
                hint=f'mark work with `with trimtab.profile.component("rollout", gpus=8):`; warm-up is {warmup}',
            )
        unknown = sorted({name for name, stated in samples if stated is None}) if gpus is None else []
        if unknown:
            raise InputError(
                f"the number of GPUs is not known of: {', '.join(unknown)}",
                hint=f'component("{unknown[0]}", gpus=8), or save(path, gpus=8) for all',
            )
        runs = []
        for (name, stated), seconds in samples.items():
            taken = [CostSample(value) for value in seconds]
            measured = summarise(name, stated or gpus or 0, taken, kind)
            if measured.seconds[0][1] <= 0:
                notes.append(f"{name} took no time and is left out")
                continue
            drift = drift_note(measured, taken)
            runs.append(Profile("timer", (measured,), (drift,) if drift else ()))
        if not runs:
            raise InputError("every component's time is 0", hint="check the clock")
        merged = merge(runs)
        return Profile("timer", merged.components, (*notes, *merged.notes))

    def save(self, path: str | os.PathLike[str], *, gpus: int | None = None, warmup: int = 2, kind: str = "") -> None:
        from trimtab.formats.profile_file import write

        write(self.profile(gpus=gpus, warmup=warmup, kind=kind), Path(path))

    def _counted(self, warmup: int) -> tuple[dict[_Key, list[float]], list[str]]:
        if not self._marked:
            kept = {key: values[warmup:] for key, values in self._samples.items() if len(values) > warmup}
            note = f"no iterations were marked: every block is a sample, the first {warmup} of each are warm-up"
            return kept, [note]
        ended = [*self._iterations, *([self._current] if self._current is not None else [])]
        counted: dict[_Key, list[float]] = {}
        for iteration in ended[warmup:]:
            for key, seconds in iteration.seconds.items():
                if key not in iteration.void:
                    counted.setdefault(key, []).append(seconds)
        notes = [
            f"{max(0, len(ended) - warmup)} of {len(ended)} iterations count; {min(warmup, len(ended))} were warm-up"
        ]
        void = sum(len(iteration.void) for iteration in ended[warmup:])
        if void:
            notes.append(f"{void} samples were left by an exception and do not count")
        return counted, notes

    def _enter(self, key: _Key) -> None:
        outer: list[str] = self._stack.__dict__.setdefault("names", [])
        now = self._clock()
        with self._lock:
            if outer and outer[-1] != key[0]:
                self._nested.add((key[0], outer[-1]))
            running = self._open.get(key)
            if running is None:
                self._open[key] = _OpenBlock(now)
            else:
                running.blocks += 1
        outer.append(key[0])

    def _exit(self, key: _Key, failed: bool) -> None:
        now = self._clock()
        names: list[str] = self._stack.__dict__.get("names", [])
        if names and key[0] in names:
            # Coroutines of a thread may close in any order: remove the latest of this name.
            del names[len(names) - 1 - names[::-1].index(key[0])]
        with self._lock:
            running = self._open.get(key)
            if running is None:
                return
            running.blocks -= 1
            running.failed = running.failed or failed
            if running.blocks:
                return
            del self._open[key]
            self._count(key, now - running.since, running.failed)

    def _count(self, key: _Key, seconds: float, failed: bool) -> None:
        if self._current is not None:
            if failed:
                self._current.void.add(key)
            self._current.seconds[key] = self._current.seconds.get(key, 0.0) + seconds
        elif not self._marked and not failed:
            self._samples.setdefault(key, []).append(seconds)

    def _end_iteration(self) -> None:
        if self._current is not None:
            self._iterations.append(self._current)
        self._current = None

    def _close(self, iteration: _Iteration, failed: bool) -> None:
        with self._lock:
            if self._current is not iteration:
                return
            if failed:
                self._current = None  # an iteration left by an exception does not count
            else:
                self._end_iteration()


class Block:
    """A component's work, as a context manager or a decorator. Reusable, also concurrently."""

    __slots__ = ("_key", "_recorder", "_sync")

    def __init__(self, recorder: Recorder, key: _Key, sync: Callable[[], object] | None) -> None:
        self._recorder = recorder
        self._key = key
        self._sync = sync

    def __enter__(self) -> None:
        if self._sync is not None:
            self._sync()
        self._recorder._enter(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._sync is not None and kind is None:
                self._sync()
        except BaseException:
            self._recorder._exit(self._key, failed=True)
            raise
        self._recorder._exit(self._key, failed=kind is not None)

    def __call__(self, function: Function) -> Function:
        """Time every call of a function; a coroutine function until it ends."""
        import inspect

        wrapped: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return wrapped  # type: ignore[no-any-return]


_default: Recorder | None = None
_default_lock = threading.Lock()


def recorder() -> Recorder:
    """The process-wide recorder that the functions of this module use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Recorder()
                _save_at_exit(_default)
    return _default


def component(name: str, *, gpus: int | None = None, sync: Callable[[], object] | None = None) -> Block:
    """Mark a component's work: `with trimtab.profile.component("rollout", gpus=8):`, or as a decorator."""
    return recorder().component(name, gpus=gpus, sync=sync)


def iteration() -> AbstractContextManager[object]:
    """Mark the start of an iteration; as a context manager, also its end."""
    return recorder().iteration()


def save(path: str | os.PathLike[str], *, gpus: int | None = None, warmup: int = 2, kind: str = "") -> None:
    recorder().save(path, gpus=gpus, warmup=warmup, kind=kind)


def _save_at_exit(measured: Recorder) -> None:
    path = os.environ.get(PATH_VARIABLE)
    if not path:
        return
    import atexit

    def save_quietly() -> None:
        from trimtab.core.errors import TrimtabError

        try:
            measured.save(path.replace("{pid}", str(os.getpid())))
        except TrimtabError as error:
            # Must not fail the exit of a training run.
            print(f"trimtab: no profile written to {path}: {'; '.join(error.lines())}", file=sys.stderr)

    atexit.register(save_quietly)
