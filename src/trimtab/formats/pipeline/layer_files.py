"""Merges a layer profile into `models.yml` and `device_types.yml`.

Decides whether a measurement agrees with the files, and what is added or replaced. It must never change another entry,
write one of the two files without the other, or replace a contradicting figure without `force`. Both new texts are made
and parsed before either file is written. Only memory may differ without `force`, because a model has one list for all
dtypes and batch sizes: the larger number of each layer is kept.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import is_number
from trimtab.formats import files, sections, yaml_text
from trimtab.formats.pipeline.pipeedge import MAX_VALUE, Value, Whole
from trimtab.formats.sections import OpenSection, Text, Within
from trimtab.formats.yaml_text import Source

KIND = "trimtab layer profile"
# The rest of a device's memory is for the runtime, the allocator's slack and the operating system.
USABLE_SHARE = 0.9
_OVER = "use --force to replace it"
_BOOLEAN_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~"}  # in YAML 1.1, too


class MeasuredLayers(OpenSection):
    """The part of a layer profile that goes into the files."""

    model: Text
    dtype: Text
    batch_size: Annotated[int, Within(1, MAX_VALUE)]
    time_s: Annotated[tuple[Value, ...], Field(min_length=1)]
    mem_mb: tuple[Value, ...] = Field(alias="mem_MB")
    parameters_in: Whole
    parameters_out: tuple[Whole, ...]
    device_mem_mb: Whole = Field(default=0, alias="device_mem_MB")


class MergedFiles(Frozen):
    """The result of a merge, with notes for the user."""

    model: str
    device_type: str
    models_file: Path
    types_file: Path
    changed: bool
    notes: tuple[str, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Read a layer profile that was measured elsewhere."""
    try:
        data = plain.loads(yaml_text.read_text(path))
    except ValueError as fault:
        raise InputError(f"this is not valid JSON: {fault}", where=str(path)) from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(
            "this file holds no layer profile", where=str(path), hint="`trimtab profile layers --format json` makes one"
        )
    measured(data, str(path))
    return data


def measured(data: Mapping[str, Any], name: str = "the profile") -> MeasuredLayers:
    """The checked figures of a layer profile."""
    profile = sections.read(MeasuredLayers, data, Source(name))
    for key, values in (("mem_MB", profile.mem_mb), ("parameters_out", profile.parameters_out)):
        if len(values) != len(profile.time_s):
            raise InputError(f"{key} has {len(values)} numbers, time_s has {len(profile.time_s)}", where=name)
    return profile


def merge(
    data: Mapping[str, Any],
    *,
    device_type: str,
    model_name: str | None = None,
    models_file: Path,
    types_file: Path,
    bw_mbps: float | None = None,
    mem_mb: float | None = None,
    force: bool = False,
) -> MergedFiles:
    """Add a layer profile to both files, or to neither. Raises InputError on a contradiction."""
    profile = measured(data)
    model = model_name or profile.model
    if not device_type.strip():
        raise InputError("a device type needs a name", hint="--type NAME")
    for what, value in (("bandwidth", bw_mbps), ("memory", mem_mb)):
        if value is not None and not is_number(value, 0):
            raise InputError(f"the {what} of a device type is 0 or more, not {value}")
    notes: dict[str, None] = {}
    models = _Document(models_file)
    types = _Document(types_file)
    _merge_model(models, model, profile, force, notes)
    _merge_type(types, device_type, model, profile, bw_mbps, mem_mb, force, notes)
    if force:
        _warn_of_lengths(types, model, len(profile.time_s), notes)
    texts = [(document, document.text()) for document in (models, types)]
    changed = any(text != document.old for document, text in texts)
    _write_both(texts)
    return MergedFiles(model, device_type, models_file, types_file, changed, tuple(notes))


class _Document:
    """A YAML file of named entries, old and new; other entries stay, byte for byte if possible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.old: str | None = yaml_text.read_text(path) if path.exists() else None
        plain = yaml_text.parse(self.old or "", str(path))
        if plain is not None and not isinstance(plain, Mapping):
            raise InputError(f"a mapping of names is expected, the file holds {type(plain).__name__}", where=str(path))
        self.expected: dict[Any, Any] = copy.deepcopy(dict(plain)) if plain else {}
        self._tree: Any = _yaml().load(self.old) if plain else CommentedMap()
        self._touched: dict[str, None] = {}  # names of changed or added entries

    def put(self, keys: tuple[Any, ...], value: Any) -> None:
        """Set a value; missing mappings above it are created."""
        for root, made in ((self.expected, value), (self._tree, _styled(value))):
            place, last = _below(root, keys[:-1]), keys[-1]
            place[last if last in place else _key(last)] = made
        self._touched[keys[0]] = None

    def append(self, keys: tuple[Any, ...], value: Any) -> None:
        for root, made in ((self.expected, value), (self._tree, _styled(value))):
            _below(root, keys).append(made)
        self._touched[keys[0]] = None

    def text(self) -> str:
        """The new text, which must parse to the old data with the new values."""
        if not self._touched:
            return self.old or ""
        for text in (self._spliced(), _dumped(self._tree)):
            with suppress(InputError):
                if yaml_text.parse(text, str(self.path)) == self.expected:
                    return text
        raise InputError(
            "not written: the layout of this file does not let it be added to safely",
            where=str(self.path),
            hint="name new files with -M and -T, and join them by hand",
        )

    def _spliced(self) -> str:
        """The old text with only the touched entries rewritten, or appended."""
        text = self.old or ""
        newline = "\r\n" if "\r\n" in text else "\n"
        for name in self._touched:
            alone = CommentedMap({_key(name): self._tree[name]})
            if name in self._tree.ca.items:
                alone.ca.items[name] = self._tree.ca.items[name]
            entry = _dumped(alone).replace("\n", newline)
            root = _yaml().compose(text)
            keys = [key for key, _ in root.value] if root is not None else []
            starts = [key.start_mark.index for key in keys] + [len(text)]
            index = next((index for index, key in enumerate(keys) if key.value == name), None)
            if index is None:
                text += (newline if text and not text.endswith("\n") else "") + entry
            else:
                text = text[: starts[index]] + entry + text[starts[index + 1] :]
        return text


def _merge_model(document: _Document, model: str, profile: MeasuredLayers, force: bool, notes: dict[str, None]) -> None:
    where = f"{document.path}: {model}"
    layers = len(profile.time_s)
    entry = document.expected.get(model)
    fresh = {
        "layers": layers,
        "mem_MB": list(profile.mem_mb),
        "parameters_in": profile.parameters_in,
        "parameters_out": list(profile.parameters_out),
    }
    if model not in document.expected:
        document.put((model,), fresh)
        return
    if not isinstance(entry, Mapping):
        entry = {}
    if force:
        for key, value in fresh.items():
            if entry.get(key) != value:
                document.put((model, key), value)
        return
    existing = {
        "layers": entry.get("layers"),
        "parameters_in": entry.get("parameters_in"),
        "parameters_out": _repeated(entry.get("parameters_out"), layers),
    }
    for key, old in existing.items():
        if old != fresh[key]:
            raise InputError(
                f"{model} is already there with another {key}: {_brief(old, fresh[key])}",
                where=f"{where}.{key}",
                hint="give this measurement another --model-name, or use --force to replace the model's entry",
            )
    memory = entry.get("mem_MB")
    if (
        not isinstance(memory, list)
        or len(memory) != layers
        or any(not is_number(value, 0, MAX_VALUE) for value in memory)
    ):
        raise InputError(f"mem_MB of {model} is no list of {layers} numbers", where=f"{where}.mem_MB", hint=_OVER)
    larger = [max(old, new) for old, new in zip(memory, profile.mem_mb, strict=True)]
    if larger != memory:
        document.put((model, "mem_MB"), larger)
        raised = sum(1 for old, new in zip(memory, larger, strict=True) if new != old)
        notes[f"mem_MB of {model}: raised for {raised} of {layers} layers to what was measured now"] = None
    if any(new < 0.9 * old for old, new in zip(memory, profile.mem_mb, strict=True)):
        notes[
            f"mem_MB of {model} stays larger than what was measured now: a model has one list for all dtypes and batch "
            "sizes; give this dtype or batch its own --model-name to plan with its own memory"
        ] = None


def _merge_type(
    document: _Document,
    name: str,
    model: str,
    profile: MeasuredLayers,
    bw_mbps: float | None,
    mem_mb: float | None,
    force: bool,
    notes: dict[str, None],
) -> None:
    where = f"{document.path}: {name}"
    entry = document.expected.get(name)
    if entry is not None and not isinstance(entry, Mapping):
        raise InputError(f"keys with values are expected here, not {type(entry).__name__}", where=where)
    entry = entry or {}
    if entry.get("bw_Mbps") is None and bw_mbps is None:
        raise InputError(f"the bandwidth of {name} is not known", where=where, hint="give it: --bw-mbps 10000")
    if entry.get("mem_MB") is None and mem_mb is None:
        mem_mb = int(profile.device_mem_mb * USABLE_SHARE)
        if not mem_mb:
            raise InputError(f"the memory of {name} is not known", where=where, hint="give it: --mem-mb 8192")
        notes[f"{name} gets mem_MB {mem_mb}: {USABLE_SHARE:.0%} of what the device has; --mem-mb sets it"] = None
    for key, given in (("bw_Mbps", bw_mbps), ("mem_MB", mem_mb)):
        if given is None or entry.get(key) == given:
            continue
        if entry.get(key) is not None and not force:
            raise InputError(
                f"{name} is already there with another {key}: {entry[key]}, not {given:g}",
                where=f"{where}.{key}",
                hint=f"leave the option out to keep it, or {_OVER}",
            )
        document.put((name, key), int(given) if float(given).is_integer() else given)
    profiles = entry.get("model_profiles")
    if profiles is not None and not isinstance(profiles, Mapping):
        raise InputError("models with their profiles are expected here", where=f"{where}.model_profiles")
    rows = (profiles or {}).get(model)
    place = f"{where}.model_profiles.{model}"
    if rows is not None and (not isinstance(rows, list) or any(not isinstance(row, Mapping) for row in rows)):
        raise InputError("a list of profiles is expected here", where=place)
    fresh = {"batch_size": profile.batch_size, "dtype": profile.dtype, "time_s": list(profile.time_s)}
    keys = (name, "model_profiles", model)
    if not rows:
        document.put(keys, [fresh])
        return
    for index, row in enumerate(rows):
        if (row.get("batch_size"), row.get("dtype")) != (profile.batch_size, profile.dtype):
            continue
        if row.get("time_s") == fresh["time_s"]:
            return
        if not force:
            raise InputError(
                f"{name} already has a profile of {model} with {profile.dtype} and batch size {profile.batch_size}",
                where=place,
                hint=_OVER,
            )
        document.put((*keys, index, "time_s"), fresh["time_s"])
        notes[f"the profile of {model} on {name} ({profile.dtype}, batch {profile.batch_size}) was replaced"] = None
        return
    document.append(keys, fresh)


def _warn_of_lengths(document: _Document, model: str, layers: int, notes: dict[str, None]) -> None:
    """Warn of profiles whose length no longer fits a model replaced by force."""
    for name, entry in document.expected.items():
        profiles = entry.get("model_profiles") if isinstance(entry, Mapping) else None
        for row in (profiles.get(model) if isinstance(profiles, Mapping) else None) or []:
            times = row.get("time_s") if isinstance(row, Mapping) else None
            if isinstance(times, list) and len(times) != layers:
                notes[
                    f"{name} has a profile of {model} with {len(times)} layers, which no longer fits: measure it again"
                ] = None


def _write_both(texts: list[tuple[_Document, str]]) -> None:
    """Write the changed files; if the second fails, the first is restored."""
    (first, first_text), (second, second_text) = texts
    if first_text != first.old:
        files.write_text(first.path, first_text)
    if second_text != second.old:
        try:
            files.write_text(second.path, second_text)
        except InputError:
            if first_text != first.old:
                with suppress(InputError, OSError):
                    if first.old is None:
                        first.path.unlink()
                    else:
                        files.write_text(first.path, first.old)
            raise


def _below(root: Any, keys: tuple[Any, ...]) -> Any:
    place = root
    for key in keys:
        if isinstance(place, Mapping) and place.get(key) is None:
            place[_key(key)] = type(root)()  # type: ignore[index]
        place = place[key]
    return place


def _dumped(tree: Any) -> str:
    stream = io.StringIO()
    _yaml().dump(tree, stream)
    return re.sub(r", +$", ",", stream.getvalue(), flags=re.MULTILINE)  # where long lists wrap


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.allow_duplicate_keys = False
    yaml.width = 100
    return yaml


def _styled(value: Any) -> Any:
    """Plain data in the files' style: block mappings, flow lists of numbers."""
    if isinstance(value, Mapping):
        return CommentedMap((_key(key), _styled(part)) for key, part in value.items())
    if isinstance(value, list):
        styled = CommentedSeq(_styled(part) for part in value)
        if not any(isinstance(part, Mapping) for part in value):
            styled.fa.set_flow_style()
        return styled
    return value


def _key(key: Any) -> Any:
    return DoubleQuotedScalarString(key) if isinstance(key, str) and key.lower() in _BOOLEAN_WORDS else key


def _repeated(values: Any, length: int) -> Any:
    """The counts after every layer; a shorter list is a block that repeats."""
    if isinstance(values, list) and values and len(values) < length:
        return (values * -(-length // len(values)))[:length]
    return values


def _brief(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"a list of {len(old)}, not of {len(new)}"
        place = next(index for index, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        return f"{old[place]!r:.40}, not {new[place]}, after layer {place + 1}"
    return f"{old!r:.40}, not {new!r:.40}"
