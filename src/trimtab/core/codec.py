"""Dataclasses, enums and containers to JSON data and back, driven by their type annotations.

Fields that have their default value are left out, so data of an older version decode as long as new fields have
defaults. Types come from the declarations, never from the data: decoding runs no foreign code.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from trimtab.core.resources import Resources

Fact = TypeVar("Fact")

_FIELDS: dict[Any, tuple[tuple[str, Any, bool], ...]] = {}


def encode(fact: Any) -> Any:
    """JSON data of a value."""
    if fact is None or type(fact) in (str, int, float, bool):
        return fact
    if isinstance(fact, enum.Enum):
        return fact.value
    if isinstance(fact, Resources):
        return dict(fact.units)
    if isinstance(fact, (tuple, list)):
        return [encode(item) for item in fact]
    if isinstance(fact, dict):
        return {str(key): encode(value) for key, value in fact.items()}
    return {
        name: float(value) if is_float and value is not None else encode(value)
        for name, default, is_float in _fields(fact.__class__)
        if (value := getattr(fact, name)) != default
    }


def decode(kind: type[Fact], data: Any) -> Fact:
    """The value of a type from JSON data. Raises ValueError, TypeError, KeyError or AttributeError."""
    key: Any = kind
    return typing.cast(Fact, _reader(key)(data))


def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Name, default, and whether it is a float: an int given for a float field is encoded as a float."""
    known = _FIELDS.get(kind)
    if known is None:
        known = _FIELDS[kind] = tuple(
            (field.name, field.default, field.type in ("float", "float | None")) for field in dataclasses.fields(kind)
        )
    return known


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    if kind is Resources:
        return _resources
    if kind is Any:
        return lambda data: data
    if kind is float:
        return _float
    if kind in (str, int, bool, None, type(None)):
        return _exactly(kind or type(None))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return _one_of(arguments)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"{kind} cannot be read")
        read = _reader(inner[0])
        return lambda data: None if data is None else read(data)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        each = _reader(arguments[0])
        return lambda data: tuple([each(item) for item in _listed(data)])
    if origin is tuple:
        readers = [_reader(argument) for argument in arguments]
        return lambda data: tuple([read(item) for read, item in zip(readers, _listed(data), strict=True)])
    if origin is dict:
        value_of = _reader(arguments[1])
        return lambda data: {key: value_of(value) for key, value in _mapped(data).items()}
    if origin is list:
        each = _reader(arguments[0])
        return lambda data: [each(item) for item in _listed(data)]
    raise TypeError(f"{kind} cannot be read")


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is kind:
            return data
        # Python callers may have passed 2.0 for 2, or 1 for true: what was journalled must decode again.
        if kind in (int, bool) and type(data) in (int, float, bool) and math.isfinite(data) and data == kind(data):
            return kind(data)
        raise TypeError(f"{kind.__name__} is expected, not {data!r:.40}")

    return read


def _one_of(values: tuple[Any, ...]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if data not in values:
            raise ValueError(f"{' or '.join(map(repr, values))} is expected, not {data!r:.40}")
        return data

    return read


def _float(data: Any) -> float:
    if type(data) not in (float, int) or not math.isfinite(data):
        raise TypeError(f"a finite number is expected, not {data!r:.40}")
    return float(data)


def _listed(data: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise TypeError(f"a list is expected, not {data!r:.40}")
    return data


def _mapped(data: Any) -> dict[Any, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"keys with values are expected, not {data!r:.40}")
    return data


def _resources(data: Any) -> Resources:
    for name, units in _mapped(data).items():
        if type(name) is not str or type(units) is not int or units <= 0:
            raise TypeError(f"amounts of resources are whole numbers by name, not {name!r:.40}: {units!r:.40}")
    return Resources(tuple(sorted(data.items())))


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers: dict[str, Callable[[Any], Any]] = {}

    def read(data: Any) -> Any:
        if not readers:
            readers.update({field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)})
        return kind(**{name: readers[name](value) for name, value in _mapped(data).items()})

    return read
