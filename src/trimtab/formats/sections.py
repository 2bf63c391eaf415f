"""Sections of users' files as pydantic models: the types of their values, and one wording for what is refused.

`read` validates data or raises an InputError: what is wrong, where (file, line, dotted key), and what is allowed there.
Settings that have a dataclass are read by `FieldsOf`: their keys, types and ranges are stated once, in the dataclass.
`file_schema` is the JSON Schema (draft 2020-12) of a file, whose descriptions are the fields' comments: an editor
checks and completes a file by it, if a comment in the file names it: `# yaml-language-server: $schema=job.schema.json`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from trimtab.core.errors import InputError, meant, nearest
from trimtab.core.numbers import LONGEST_S, MAX_COUNT, Range, ranges_of
from trimtab.formats.yaml_text import Source

SectionT = TypeVar("SectionT", bound="Section")
Elsewhere = Mapping[str, tuple[str, str]]  # keys that belong elsewhere: what is said after the key, and what to do
MAX_GPUS = 65_536
COMPLETION = "points are [share of batches done, share of time], from [0, 0] to [1.0, 1.0]"
MIN_S = 0.001  # of a limit in seconds
ANY = Range(-math.inf, math.inf)
_REFUSED, _UNKNOWN, _NO_SECTION = "refused", "unknown_key", "no_section"
_EXPECTED = {
    **dict.fromkeys(("list_type", "tuple_type"), "expected: a list"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected: true or false"),
    "string_type": "expected: text",
    "too_short": "expected: at least {min_length} item",
    "string_too_short": "expected: at least {min_length} character",
}


# ---- types -----------------------------------------------------------------------------------------------------------


class Within(Range):
    """Annotates an int or a float with its range; text that is a number is one, true and false are none."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        allowed = dataclasses.replace(self, whole=source is int)
        bounds: dict[str, Any] = {
            key: bound for key, bound in (("ge", self.minimum), ("le", self.maximum)) if math.isfinite(bound)
        }
        kind = core_schema.int_schema(**bounds) if allowed.whole else core_schema.float_schema(**bounds)
        return core_schema.no_info_before_validator_function(allowed.parsed, kind)

    def parsed(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) < 32:
            with suppress(ValueError):
                value = int(value) if self.whole else float(value)
        if not self.takes(value):
            raise ValueError(f"expected: {self}{', not true or false' if isinstance(value, bool) else ''}")
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Shorthand:
    """Annotates a value that may be written shorter: a list as its only item, text as a number, a section as text."""

    expand: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = handler(schema)
        short = {"array": whole.get("items"), "string": {"type": "number"}}.get(whole.get("type", ""))
        return {"anyOf": [short or {"type": "string"}, whole]}


def _measured(value: Any) -> Any:
    if not isinstance(value, Mapping) or not value:
        raise refused("measured points {gpus: seconds} are expected", "{8: 95.7}")
    if len({str(gpus) for gpus in value}) < len(value):
        raise refused("a number of GPUs is stated twice")
    return value


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    before = (0.0, 0.0)
    for point in [point for point in points if point != (0.0, 0.0)]:
        if point[0] <= before[0] or point[1] < before[1]:
            raise refused(f"completion must rise: {list(point)} comes after {list(before)}", COMPLETION)
        before = point
    if points and before != (1.0, 1.0):
        raise refused(f"completion must end at [1.0, 1.0], not at {list(before)}", COMPLETION)
    return points


Count = Annotated[int, Within(1, 1_000_000)]
Index = Annotated[int, Within(0, 1_000_000)]
Gpus = Annotated[int, Within(1, MAX_GPUS)]
Seed = Annotated[int, Within(-MAX_COUNT, MAX_COUNT)]
Seconds = Annotated[float, Within(0.0, LONGEST_S)]
Limit = Annotated[float, Within(MIN_S, LONGEST_S)]  # seconds
Gigabytes = Annotated[float, Within(0.0, 1e6)]
Share = Annotated[float, Within(0.0, 1.0)]
Amount = Annotated[float, Within(0.0, 1e12)]
Positive = Annotated[float, Within(1e-6, 1e12)]
Priority = Annotated[float, Within(-1e9, 1e9)]
Measured = BeforeValidator(_measured)
Points = Annotated[dict[Gpus, Seconds], Measured]
Completion = Annotated[list[tuple[Share, Share]], AfterValidator(_rising)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]
OneOrMore = Shorthand(lambda value: [value] if isinstance(value, str | Mapping) else value)
Names = Annotated[tuple[Name, ...], OneOrMore]


def refused(what: str, hint: str | None = None, *keys: str | int) -> PydanticCustomError:
    """An error for validators: `{key}` in the text is the key, `keys` lead to it from the validated value."""
    return PydanticCustomError(_REFUSED, "{what}", {"what": what, "hint": hint or "", "keys": list(keys)})


def _refusing(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, for validators: its InputErrors get the place of what is validated."""

    def made(value: Any) -> Any:
        try:
            return make(value)
        except InputError as error:
            raise refused(error.what, error.hint) from None

    return made


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """Validates with a function that raises InputError; the value stays as it is."""
    return AfterValidator(_refusing(lambda value: (check(value), value)[1]))


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """Annotates a type whose values are made of data in another form, by a function that may raise InputError."""

    form: Any
    make: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_refusing(self.make), handler.generate_schema(self.form))


class Section(BaseModel):
    """A mapping of keys; an unknown key is refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    ELSEWHERE: ClassVar[Elsewhere] = {}
    ORIGIN: ClassVar[Any] = None  # the dataclass whose fields these are

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if isinstance(data, BaseModel):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if not isinstance(data, Mapping):
            raise PydanticCustomError(_NO_SECTION, "{hint}", {"hint": f"keys: {', '.join(known)}"})
        for key in data:
            if key in cls.ELSEWHERE:
                what, hint = cls.ELSEWHERE[key]
                raise refused(f"{{key}} {what}", hint, key)
            if key not in known and key not in cls.model_fields and cls.model_config["extra"] == "forbid":
                hint = meant(key, [*known, *cls.ELSEWHERE], f"known keys here: {', '.join(known)}")
                raise PydanticCustomError(_UNKNOWN, "{hint}", {"hint": hint, "keys": [str(key)]})
        return data


class OpenSection(Section):
    """A mapping of which only some keys are read."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _find_missing(cls, data: Any) -> Any:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if isinstance(data, Mapping):
            others = [str(key) for key in data if key not in fields]
            for name, field in fields.items():
                if field.is_required() and name not in data and (near := nearest(name, others)):
                    raise refused(f"{name} is missing", f"there is {near}")
        return data


@dataclasses.dataclass(frozen=True, eq=False)
class FieldsOf:
    """Annotates a dataclass, or a dict of its stated fields: keys, types and ranges are those of the fields."""

    kind: Any
    elsewhere: Elsewhere = dataclasses.field(default_factory=dict)
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # instead of the fields' own
    only: tuple[str, ...] = ()  # empty: all
    optional: tuple[str, ...] = ()  # required by the dataclass, stated elsewhere if not here

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        make = (lambda section: self.kind(**_stated(section))) if source is self.kind else _stated
        return Made(self.section, make).__get_pydantic_core_schema__(source, handler)

    def read(self, data: Any, source: Source, *under: str | int) -> dict[str, Any]:
        return _stated(read(self.section, data, source, *under))

    @cached_property
    def section(self) -> type[Section]:
        hints, ranges = get_type_hints(self.kind, include_extras=True), ranges_of(self.kind)
        made: dict[str, Any] = {}
        for field in dataclasses.fields(self.kind):
            if field.name in self.elsewhere or (self.only and field.name not in self.only):
                continue
            annotation = self.types.get(field.name, hints[field.name])
            if annotation in (int, float, int | None, float | None):
                allowed, kind = ranges.get(field.name, ANY), int if "int" in str(annotation) else float
                number: Any = Annotated[kind, Within(allowed.minimum, allowed.maximum)]
                annotation = number if annotation is kind else number | None
            annotation = Switch if annotation is bool else annotation
            missing = None if field.name in self.optional else ...
            default: Any = missing if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = Field(default_factory=field.default_factory)
            made[field.name] = (annotation, default)
        section: Any = create_model(self.kind.__name__, __base__=Section, **made)
        section.ELSEWHERE, section.ORIGIN, section.__doc__ = self.elsewhere, self.kind, self.kind.__doc__
        return cast(type[Section], section)


def _stated(section: Section) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.model_fields_set}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(kind: type[SectionT], data: Any, source: Source, *under: str | int) -> SectionT:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explained(error, data, source, *under) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", where=source.name) from None


def explained(error: ValidationError, data: Any, source: Source, *under: str | int) -> InputError:
    """The first of pydantic's errors, unknown keys before others: what, where, and what is allowed."""
    found = [(fault, _keys(fault, data)) for fault in error.errors(include_url=False)]
    # An unknown key explains a missing one; of the forms that a value may have, the one that was read furthest counts.
    fault, keys = min(
        found, key=lambda entry: (entry[0]["type"] != _UNKNOWN, -len(entry[1]), entry[0]["type"] != _REFUSED)
    )
    kind, context, value = fault["type"], fault.get("ctx", {}), fault.get("input")
    where = (*under, *keys)
    last = max((at for at, word in enumerate(where) if isinstance(word, str)), default=0)
    key = Source("").place(*where[last:]).removeprefix(": ") or "the file"
    if kind == _UNKNOWN:
        return source.error(f"unknown key {key}", *where, hint=context["hint"])
    if kind == _REFUSED:
        return source.error(context["what"].replace("{key}", key), *where, hint=context["hint"] or None)
    if kind == "missing":
        return source.error(f"{key} is missing", *where)
    if kind in ("dict_type", _NO_SECTION):
        return source.error(f"{key} is a section of keys", *where, hint=context.get("hint"))
    hints = dict.fromkeys(_hint(other) for other, its_keys in found if its_keys == keys)
    shown = "" if isinstance(value, Mapping | list) else f": {value!r}"[:80]
    return source.error(f"{key} is not right{shown}", *where, hint="; or ".join(hints))


def _hint(fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    if fault["type"] in ("literal_error", "enum"):
        known = re.findall("'([^']*)'", context["expected"])
        return f"{meant(fault['input'], known, '')} one of {', '.join(known)}".strip()
    expected = _EXPECTED.get(fault["type"], "").format_map(context)
    hint = context.get("hint") or expected or fault["msg"].removeprefix("Value error, ")
    return str(hint[:1].lower() + hint[1:])


def _keys(fault: ErrorDetails, data: Any) -> list[str | int]:
    """The keys in the file of a fault. Parts of its location that name a branch of a union are not in the data."""
    keys: list[str | int] = []
    for part in (*fault["loc"], *fault.get("ctx", {}).get("keys", ())):
        if isinstance(data, Mapping):
            key = next((key for key in data if str(key) == str(part)), None)
            if key is not None:
                data = data[key]
                keys.append(str(part))
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
            keys.append(part)
    return [*keys, str(fault["loc"][-1])] if fault["type"] == "missing" else keys


_FIELD = re.compile(r"^    (\w+): [^#\n]*  # (?!type:|fmt:)(.+)$", re.MULTILINE)


class _WithComments(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Only defaults that a file could state as well."""
        default = schema.get("default")
        plain = default is not None and isinstance(default, str | int | float)
        return super().default_schema(schema) if plain else self.generate_inner(schema["schema"])

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made, kind = super().model_schema(schema), schema["cls"]
        comments = _comments(getattr(kind, "ORIGIN", None) or kind)
        for name, field in kind.model_fields.items():
            property_ = made.get("properties", {}).get(field.alias or name)
            if property_ is not None and name in comments:
                property_.setdefault("description", comments[name])
        made.pop("title", None)
        return made


@cache
def _comments(kind: Any) -> Mapping[str, str]:
    """The comments behind the fields of a class, by name."""
    try:
        own = dict(_FIELD.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        own = {}  # without its source, or a builtin
    return {name: text for base in kind.__bases__ for name, text in _comments(base).items()} | own


def file_schema(title: str, by_key: Mapping[str, type[Section]]) -> dict[str, Any]:
    """The schema of a file: that of the section of the first of these keys which the file has."""
    named, definitions = models_json_schema(
        [(kind, "validation") for kind in by_key.values()], schema_generator=_WithComments
    )
    found: Any = {"required": [next(iter(by_key))]}
    for key, kind in reversed([*by_key.items()]):
        found = {"if": {"required": [key]}, "then": named[kind, "validation"], "else": found}
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": title, **found, **definitions}
