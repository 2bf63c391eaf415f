"""A component of a run: a class with `step`, named in the job file by `use: package.module:Class`.

Components are user code. A class is checked before it is instantiated (module, class, arguments, a `step` that takes a
batch) and its output before it is passed on; every violation becomes a `ComponentError` that names the component.
Nothing here depends on where a component runs: the same calls are made in this process and on a cluster.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.core.frozen import Frozen

MAX_PARENT_FOLDERS = 4  # searched above the job file for a module that Python does not find

FaultKind = Literal["raised", "hung", "wrong type", "unhealthy", "died"]


class Place(Frozen):
    """Where a component runs and with what. `devices` are GPU numbers of its node, `gpus` is their count.

    `iteration` is the first that it will run; `folder` is the run's, for its own files; `near` is the job file's
    folder. A component that brings its own workers gets the run's `pool` and controller (`session`) if the workers may
    have slots of their own (`on_slots`); otherwise they run in its own process or as its children.
    """

    component: str
    rank: int = 0
    world: int = 1
    devices: tuple[int, ...] = ()
    gpus: int = 0
    iteration: int = 1
    seed: int = 0
    folder: Path | None = None
    emulated: bool = False
    pool: str | None = None
    session: str | None = None
    on_slots: bool = False
    near: Path | None = None


class Batch(Frozen):
    """One unit of work. `data` is the output of the component before it, a dict by name if there are several, and the
    run's input (None without one) for a component without predecessors.
    """

    iteration: int
    index: int
    of: int
    data: Any = None


class Result(Frozen):
    """What a step may return instead of plain data to report metrics too."""

    data: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class RunComponent(Protocol):
    """The required interface. Any method of `OptionalMethods` may be present too."""

    def step(self, batch: Batch) -> Any:
        """Process a batch; returns plain data or a `Result`."""


class OptionalMethods(Protocol):
    """Optional methods; a run calls those that exist.

    `offload` releases the GPUs and `onload` takes them back; `sync` may be called while offloaded. `save` writes the
    full state into an empty folder, `load` restores it; both are called between two iterations of the component, while
    others go on. `snapshot` copies the full state in host memory and returns what writes the copy into a folder, beside
    the next steps; on a cluster it is used instead of `save` where the memory suffices.
    """

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def snapshot(self) -> Callable[[Path], None]: ...

    def weights(self) -> Any:
        """The current weights, in the form that `sync` of the target takes."""

    def sync(self, weights: Any, version: int) -> None:
        """Use these weights, of iteration `version`. Copy what is kept: they may be the memory of the source."""

    def health(self) -> bool | str:
        """True if healthy; otherwise what is wrong."""

    def close(self) -> None: ...

    def resize(self, gpus: int) -> None:
        """Go on with this many GPUs without losing work. Only for a component that brings its own workers."""

    def span(self, min_gpus: int, max_gpus: int) -> None:
        """The component may use this range of GPUs as its load requires."""


class ComponentError(UnreachableError):
    """A component violated its interface: the run ends, or goes on without it."""

    def __init__(
        self, component: str, fault_kind: FaultKind, what: str, where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.component = component
        self.fault_kind = fault_kind

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without its cause: an exception of user code may not survive that."""
        return ComponentError, (self.component, self.fault_kind, self.what, self.where, self.hint)


def make_component(use: str, settings: Mapping[str, Any], place: Place, near: Path | None = None) -> RunComponent:
    """Instantiate the class that `use` names with its settings and its place.

    InputError if module or class are missing, the arguments do not fit or there is no `step`; ComponentError if the
    constructor raises.
    """
    where = f"workflow.components.{place.component}.use"
    kind = find_class(use, near, where)
    check_class(kind, use, settings, where)
    try:
        made = kind(**settings, place=place)
    except Exception as error:
        raise ComponentError(
            place.component, "raised", f"{place.component} could not be made: {error_text(error)}", where=origin(error)
        ) from error
    return cast(RunComponent, made)


def find_class(use: str, near: Path | None = None, where: str = "use") -> Callable[..., Any]:
    """The class that `package.module:Class` names. `near` is a folder to search if Python does not find the module."""
    module_name, colon, name = use.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise InputError(f"{use!r} names no class", where=where, hint="write package.module:Class")
    found: Any = _module(module_name, near, where)
    for part in name.split("."):
        if not hasattr(found, part):
            hint = meant(part, [n for n in vars(found) if not n.startswith("_")])
            raise InputError(f"{module_name} has no {name}", where=where, hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{use} is a {type(found).__name__}, not a class", where=where)
    return cast(Callable[..., Any], found)


def _module(name: str, near: Path | None, where: str) -> types.ModuleType:
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            folder = (
                _folder_with(name.partition(".")[0], near) if near is not None and _is_the_module(error, name) else None
            )
            if folder is None or str(folder) in sys.path:
                raise
            sys.path.append(str(folder))
            importlib.invalidate_caches()
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _is_the_module(error, name):
            hint = f"pip install {error.name}"
            raise InputError(f"{name} needs {error.name}, which is not installed", where=where, hint=hint) from None
        searched = f" and above {near}" if near is not None else ""
        raise InputError(
            f"there is no module {error.name}",
            where=where,
            hint=f"looked where Python looks{searched}; start from the folder that holds it, or set PYTHONPATH",
        ) from None
    except Exception as error:
        raise InputError(f"{name} cannot be imported: {error_text(error)}", where=origin(error) or where) from error


def _is_the_module(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module itself or a parent package is missing, not something that it imports."""
    return error.name is not None and (name == error.name or name.startswith(f"{error.name}."))


def _folder_with(module: str, near: Path) -> Path | None:
    start = near.resolve()
    for folder in (start, *start.parents)[: MAX_PARENT_FOLDERS + 1]:
        if (folder / f"{module}.py").is_file() or (folder / module).is_dir():
            return folder
    return None


def check_class(kind: Callable[..., Any], use: str, settings: Mapping[str, Any], where: str) -> None:
    """Raise InputError if a class cannot be instantiated with these settings or lacks a usable `step`."""
    step = getattr(kind, "step", None)
    if inspect.isclass(kind):
        if step is None or not callable(step):
            raise InputError(f"{use} has no step", where=where, hint="a component has a method step(self, batch)")
        if not _takes(step, None, None):
            raise InputError(f"the step of {use} does not take one batch", where=where, hint="step(self, batch)")
        if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
            raise InputError(f"the step of {use} is asynchronous or a generator", where=where, hint="return the result")
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # some C classes have no signature
        return
    if "place" in settings:
        raise InputError(
            "a component gets its place from the run", where=where, hint="remove `place` from its settings"
        )
    try:
        signature.bind(**settings, place=None)
    except TypeError as error:
        takes = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if "place" not in takes and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            raise InputError(f"{use} takes no place", where=where, hint="def __init__(self, ..., place)") from None
        known = ", ".join(name for name in takes if name != "place") or "no settings"
        raise InputError(
            f"{use} cannot be made with these settings: {error}", where=where, hint=f"it takes {known}"
        ) from None


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


_REFUSED_TYPES: tuple[tuple[type, str], ...] = (
    (types.CoroutineType, "a coroutine that is never awaited"),
    (types.GeneratorType, "a generator: make a list of it"),
    (types.FunctionType, "a function"),
    (types.ModuleType, "a module"),
    (type, "a class"),
    (IO, "an open file"),
)


def checked(output: Any, component: str = "component", *, wanted_by: tuple[str, ...] = ()) -> Result:
    """The output of a step as a Result; ComponentError if it cannot be passed on.

    Any data may be passed: numbers, texts, arrays, containers of them, objects. Refused are objects bound to a process
    (generators, coroutines, functions, classes, open files), and None if another component needs the output.
    """
    result = output if isinstance(output, Result) else Result(output)
    if result.data is None and wanted_by:
        raise ComponentError(
            component,
            "wrong type",
            f"{component} returned nothing, and {' and '.join(wanted_by)} need{'s' * (len(wanted_by) == 1)} its output",
            hint="let its step return what it made",
        )
    for path, part in _parts(result.data):
        refused = _refused(part)
        if refused is not None:
            raise ComponentError(
                component,
                "wrong type",
                f"{component} returned {refused}{f' in {path}' if path else ''}",
                hint="a step returns data: numbers, arrays, texts, lists and dicts of them, or a Result",
            )
    if not isinstance(result.metrics, Mapping):
        raise ComponentError(component, "wrong type", f"the metrics of {component} are no mapping of names to numbers")
    return Result(result.data, {str(n): _metric_value(component, n, value) for n, value in result.metrics.items()})


def _parts(data: Any) -> Iterator[tuple[str, Any]]:
    """The data and its direct elements only: a list of ten thousand arrays is not walked."""
    yield "", data
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield f"[{key!r}]", value
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data[:100]):
            yield f"[{index}]", value


def _refused(part: Any) -> str | None:
    for kind, name in _REFUSED_TYPES:
        if isinstance(part, kind):
            return name
    if hasattr(part, "fileno") and hasattr(part, "close"):
        return "an open file"
    if isinstance(part, Iterator) and not hasattr(part, "__getitem__"):
        return "an iterator: make a list of it"
    return None


def _metric_value(component: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ComponentError(
            component, "wrong type", f"the metric {name} of {component} is a {type(value).__name__}, not a number"
        ) from None


def finite_or_none(value: float | None) -> float | None:
    """A number for JSON: null if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def error_text(error: BaseException) -> str:
    """An error of user code in one line."""
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def origin(error: BaseException) -> str | None:
    """File and line in user code that an error comes from: the innermost frame outside of libraries."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(".py") and "site-packages" not in file and Path(file).parent != Path(__file__).parent:
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def visible_devices() -> tuple[int, ...]:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(int(device) for device in shown.split(",") if device.strip().isdecimal())
