"""A call of all workers of a component on Ray, beside others if need be; Ray's errors become the component's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.runtime.client.task import Task, TaskError
from trimtab.runtime.run.component import ComponentError, error_text
from trimtab.runtime.run.executor import (
    WITH_DATA,
    BegunCall,
    CallResult,
    ComponentLostError,
    hung_error,
    spans_since_sent,
)

CALL_POLL_S = 0.5  # calls are awaited in intervals, between which lost processes are checked


class CallLimits(Frozen):
    """Seconds for a component to be there, and for it to return."""

    place_s: float
    call_s: float


class RayCall(BegunCall):
    """A call of all workers of a component."""

    def __init__(
        self,
        ray: Any,
        task: Task,
        name: str,
        method: str,
        arguments: tuple[Any, ...],
        limits: CallLimits,
        lost: Mapping[str, str],
    ) -> None:
        """`lost`: tasks that were reported as lost, and why."""
        self._ray, self._task, self._name, self._method, self._lost = ray, task, name, method, lost
        self._data: Any = None
        self._limit_s = limits.call_s
        self._result: CallResult | None = None
        self._fault: BaseException | None = None
        self._sent_s, self._end = time.perf_counter(), time.monotonic() + self._limit_s
        with self._errors():
            returns = 2 if method in WITH_DATA else 1
            references = task.begin(method, *arguments, timeout=limits.place_s, returns=returns)
            if method in WITH_DATA:
                self._data = references[0][1]
                references = [done for done, _ in references]
            self._references: list[Any] = references

    @property
    def is_over(self) -> bool:
        return self._result is not None or self._fault is not None

    def poll(self) -> CallResult | None:
        if not self.is_over:
            self._fetch(0.0)
        if self._fault is not None:
            raise self._fault
        return self._result

    def wait(self) -> None:
        """Ray needs up to 15 s to notice a lost node; reported losses are seen sooner."""
        while not self.is_over:
            self._fetch(CALL_POLL_S)

    def _fetch(self, within_s: float) -> None:
        """Fetch the results if they are there in time."""
        from ray.exceptions import GetTimeoutError

        left_s = self._end - time.monotonic()
        try:
            with self._errors():
                try:
                    within_s = max(0.0, min(within_s, left_s))
                    results = self._ray.get(self._references, timeout=within_s)
                except GetTimeoutError:
                    lost = self._lost.get(self._task.id)
                    if lost is not None:
                        raise ComponentLostError(self._name, f"{self._name} was lost: {lost}") from None
                    if left_s <= 0:
                        raise hung_error(self._name, self._method, self._limit_s) from None
                    return
                self._result = self._merged(results)
        except (TrimtabError, KeyboardInterrupt) as fault:
            self._fault = fault

    def _merged(self, results: Sequence[CallResult]) -> CallResult:
        for result in results:
            if result.fault is not None:
                raise result.fault
        received_s = time.perf_counter()
        spans = tuple(span for result in results for span in spans_since_sent(result.spans, self._sent_s, received_s))
        value = results[0].value if self._data is None else self._data
        took_s, note = max(result.took_s for result in results), max(result.note for result in results)
        return replace(results[0], took_s=took_s, value=value, spans=spans, workers=len(results), note=note)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of Ray as those of the component."""
        from ray import exceptions

        name, method = self._name, self._method
        try:
            yield
        except TaskError as error:
            raise ComponentLostError(name, f"{name} was lost: {error.what}") from error
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ComponentLostError(name, f"{name} was lost: {self._task.interrupted(method).what}") from error
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.ObjectLostError | exceptions.RayActorError):
                raise ComponentLostError(name, f"the input of {name} was lost with the process that made it") from error
            raise ComponentError(name, "raised", f"the {method} of {name} raised {error_text(error.cause)}") from error
        except exceptions.RayError as error:
            raise ComponentLostError(name, f"{name} cannot be reached: {error_text(error)}") from error
