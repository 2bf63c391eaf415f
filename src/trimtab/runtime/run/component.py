"""What a component is to a run: a class with `step`, made from the job file's `use: package.module:Class`.

A component is anybody's code. It is checked before it is made (module, class, arguments, a `step` that takes a batch),
and what it gives is checked before it is passed on; whatever it does wrong becomes one `ComponentError` that names it.
Nothing here knows where a component runs: the same calls are made in this process and on a cluster.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

from trimtab.core.errors import InputError, UnreachableError, nearest

FOLDERS_ABOVE = 4
"""A module that Python does not find is looked for beside the job file, and in so many folders above it."""

FaultKind = Literal["raised", "hung", "wrong type", "unhealthy", "died"]


@dataclass(frozen=True)
class Place:
    """Where a component is and what it was given. `devices` are GPU numbers of its machine, `gpus` how many it has.

    `iteration` is the first one that it will see; `folder` is the run's, for files of its own. A component that brings
    its own workers finds the names of the run's `pool` and of its controller (`session`) where they may have slots of
    their own (`on_slots`); otherwise they live where it lives. `near` is the folder of the job file.
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


@dataclass(frozen=True)
class Batch:
    """One unit of work. `data` is what the one component before it gave, a dict by name where there are several, and
    the run's input (None where it has none) for a component that comes after nobody.
    """

    iteration: int
    index: int
    of: int
    data: Any = None


@dataclass(frozen=True)
class Result:
    """What a step may return instead of plain data, where it has figures to show as well."""

    data: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class RunComponent(Protocol):
    """What has to be there. Anything of `OptionalMethods` may be there too."""

    def step(self, batch: Batch) -> Any:
        """One batch in, what becomes of it out: plain data, or a `Result`."""


class OptionalMethods(Protocol):
    """What a component may have besides; a run calls what it finds.

    `offload` and `onload` leave GPUs to others and come back to them; `sync` may come while it is off them. `save`
    writes all it needs into an empty folder, `load` takes it back; they are called between two of its iterations.
    """

    def offload(self) -> None:
        """Leave the GPUs to others."""

    def onload(self) -> None:
        """Come back to the GPUs."""

    def save(self, path: Path) -> None:
        """Write all that is needed to go on from here."""

    def load(self, path: Path) -> None:
        """Go on from what was saved."""

    def weights(self) -> Any:
        """What others need to work with the weights it has now."""

    def sync(self, weights: Any, version: int) -> None:
        """Work with these weights from now on: those after iteration `version`."""

    def health(self) -> bool | str:
        """True where all is well; otherwise what is wrong."""

    def close(self) -> None:
        """The run is over."""

    def resize(self, gpus: int) -> None:
        """Go on with so many GPUs, with nothing lost. Only for one that brings its own workers."""

    def span(self, least: int, most: int) -> None:
        """Between so many GPUs and so many are its own to use as its load has it."""


class ComponentError(UnreachableError):
    """A component did what it may not: the run ends, or goes on without it."""

    def __init__(
        self, component: str, fault_kind: FaultKind, what: str, *, where: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(what, where=where, hint=hint or None)
        self.component = component
        self.fault_kind = fault_kind


def make_component(use: str, settings: Mapping[str, Any], place: Place, near: Path | None = None) -> RunComponent:
    """The component of a `use`, made with its settings and its place.

    InputError where module or class are not there, the arguments do not fit, or it has no `step`; ComponentError where
    its constructor raises.
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
    """What a `package.module:Class` names. `near` is a folder to look in when Python does not find the module."""
    module_name, colon, name = use.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise InputError(f"{use!r} names no class", where=where, hint="write package.module:Class")
    found: Any = _module(module_name, near, where)
    for part in name.split("."):
        if not hasattr(found, part):
            near_word = nearest(part, [n for n in vars(found) if not n.startswith("_")])
            raise InputError(
                f"{module_name} has no {name}", where=where, hint=f"did you mean {near_word}?" if near_word else None
            )
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{use} is a {type(found).__name__}, not a class", where=where)
    return cast(Callable[..., Any], found)


def _module(name: str, near: Path | None, where: str) -> types.ModuleType:
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            folder = _folder_with(name.partition(".")[0], near) if near is not None and _is_of(error, name) else None
            if folder is None or str(folder) in sys.path:
                raise
            sys.path.append(str(folder))
            importlib.invalidate_caches()
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _is_of(error, name):
            hint = f"pip install {error.name}"
            raise InputError(f"{name} needs {error.name}, which is not installed", where=where, hint=hint) from None
        looked = f" and above {near}" if near is not None else ""
        raise InputError(
            f"there is no module {error.name}",
            where=where,
            hint=f"looked where Python looks{looked}; start from the folder that holds it, or set PYTHONPATH",
        ) from None
    except Exception as error:
        raise InputError(f"{name} cannot be imported: {error_text(error)}", where=origin(error) or where) from error


def _is_of(error: ModuleNotFoundError, name: str) -> bool:
    """Whether it is the module itself that was not found, or a package it is in, and not something that it imports."""
    return error.name is not None and (name == error.name or name.startswith(f"{error.name}."))


def _folder_with(module: str, near: Path) -> Path | None:
    start = near.resolve()
    for folder in (start, *start.parents)[: FOLDERS_ABOVE + 1]:
        if (folder / f"{module}.py").is_file() or (folder / module).is_dir():
            return folder
    return None


def check_class(kind: Callable[..., Any], use: str, settings: Mapping[str, Any], where: str) -> None:
    """Raise InputError where a class cannot be made with these settings, or could not work if it were."""
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
    except (TypeError, ValueError):  # some classes of C say nothing of themselves
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


_CANNOT_PASS: tuple[tuple[type, str], ...] = (
    (types.CoroutineType, "a coroutine that nobody awaits"),
    (types.GeneratorType, "a generator: make a list of it"),
    (types.FunctionType, "a function"),
    (types.ModuleType, "a module"),
    (type, "a class"),
    (IO, "an open file"),
)


def checked(output: Any, component: str = "component", *, wanted_by: tuple[str, ...] = ()) -> Result:
    """What a step returned, as a Result; ComponentError where it may not be passed on.

    Anything that is data may: numbers, texts, arrays, containers of them, objects. What lives in one process only may
    not (generators, coroutines, functions, classes, open files), nor nothing at all where somebody waits for it.
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
    return Result(result.data, {str(n): _figure(component, n, value) for n, value in result.metrics.items()})


def _parts(data: Any) -> Iterator[tuple[str, Any]]:
    """The data, and what stands directly in it: a list of ten thousand arrays is not walked through."""
    yield "", data
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield f"[{key!r}]", value
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data[:100]):
            yield f"[{index}]", value


def _refused(part: Any) -> str | None:
    for kind, name in _CANNOT_PASS:
        if isinstance(part, kind):
            return name
    if hasattr(part, "fileno") and hasattr(part, "close"):
        return "an open file"
    if isinstance(part, Iterator) and not hasattr(part, "__getitem__"):
        return "an iterator: make a list of it"
    return None


def _figure(component: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ComponentError(
            component, "wrong type", f"the metric {name} of {component} is a {type(value).__name__}, not a number"
        ) from None


def finite_or_none(value: float) -> float | None:
    """A number as JSON can hold it: what is not finite becomes null."""
    return value if math.isfinite(value) else None


def error_text(error: BaseException) -> str:
    """An error of somebody's code in one line."""
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def origin(error: BaseException) -> str | None:
    """The file and line of somebody's code that an error comes from: the innermost one that is not a library's."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(".py") and "site-packages" not in file and Path(file).parent != Path(__file__).parent:
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
