"""Reads a pipeline's files (`models.yml`, `device_types.yml`, `devices.yml`, `links.yml`); writes its schedule as YAML.

Reading gives a checked `PipelineJob` or an InputError that names file and key; input with a single possible meaning is
accepted with a warning, and nothing is guessed. Only what the job needs is checked, so that an unfinished profile of
another model does no harm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trimtab.core.errors import InputError, nearest
from trimtab.formats import yaml_text
from trimtab.model.pipeline import DeviceType, Host, HostLink, ModelChain, PipelineJob, Schedule

MAX_VALUE = float(2**53)
"""Larger numbers are mistakes, and would not add up exactly."""

_SAME = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
_NARROW = (
    *("bool", "uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4", "bits8", "bits4x2", "bits2x4", "bits1x8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
ELEMENT_BYTES: dict[str, int] = {
    **dict.fromkeys(_NARROW, 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Stored bytes per element of each torch dtype."""


@dataclass(frozen=True)
class PartitionRequest:
    """Options of a partition: the model, how it was measured, and constraints on the schedule."""

    model: str
    dtype: str = "torch.float32"
    batch_size: int = 8
    buffers_in: int = 2
    buffers_out: int = 2
    headroom: float = 0.0
    source: str | None = None
    sink: str | None = None
    max_devices: int | None = None
    cut_every: int = 1


@dataclass(frozen=True)
class LoadedPipeline:
    """A job, and warnings from reading it."""

    job: PipelineJob
    warnings: tuple[str, ...]


def load(
    models: Path, types: Path, devices: Path, request: PartitionRequest, links: Path | None = None
) -> LoadedPipeline:
    """Read the job from three files, or four. Raises InputError."""
    warnings: list[str] = []
    dtype = canonical_dtype(request.dtype)
    for name, value, minimum in (
        ("--batch-size", request.batch_size, 1),
        ("--buffers-in", request.buffers_in, 0),
        ("--buffers-out", request.buffers_out, 0),
        ("--cut-every", request.cut_every, 1),
        ("--max-devices", 1 if request.max_devices is None else request.max_devices, 1),
    ):
        if not minimum <= value <= 2**31:
            raise InputError(f"{name} must be at least {minimum}, not {value}")
    if not 0 <= request.headroom < 1:
        raise InputError(f"--headroom must be a share from 0% to less than 100%, not {request.headroom:g}")
    model = _model(models, request.model, warnings)
    if model.layers % request.cut_every:
        raise InputError(
            f"--cut-every {request.cut_every} does not divide the {model.layers} layers of {model.name}",
            hint="give the number of profiled layers that make up one block",
        )
    hosts = _hosts(devices)
    kinds = _types(types, devices, hosts, model, request.batch_size, dtype, warnings)
    known = [host.name for host in hosts]
    for option, end in (("--source", request.source), ("--sink", request.sink)):
        if end is not None and end not in known:
            raise InputError(f"{option} {end}: there is no such host", where=str(devices), hint=_meant(end, known))
    job = PipelineJob(
        model,
        kinds,
        tuple(host for host in hosts if any(kind.name == host.type for kind in kinds)),
        request.batch_size,
        ELEMENT_BYTES[dtype],
        request.buffers_in,
        request.buffers_out,
        request.headroom,
        _links(links, known) if links is not None else (),
        request.source,
        request.sink,
        request.max_devices,
        request.cut_every,
    )
    return LoadedPipeline(job, tuple(warnings))


def canonical_dtype(name: str) -> str:
    """The canonical name of a torch dtype, without prefix: `torch.half` is `float16`."""
    short = name.strip().removeprefix("torch.")
    short = _SAME.get(short, short)
    if short not in ELEMENT_BYTES:
        raise InputError(f"unknown dtype {name}", hint=_meant(short, ELEMENT_BYTES, "torch."))
    return short


def _model(path: Path, name: str, warnings: list[str]) -> ModelChain:
    data = yaml_text.read_mapping(path)
    if name not in data:
        names = sorted(str(key) for key in data)
        raise InputError(f"there is no model {name}", where=str(path), hint=_meant(name, names))
    entry = _mapping(data[name], f"{path}: {name}")
    layers = _integer(_key(entry, "layers", f"{path}: {name}"), f"{path}: {name}.layers")
    mem = _numbers(_key(entry, "mem_MB", f"{path}: {name}"), f"{path}: {name}.mem_MB")
    _same_length(mem, "mem_MB", layers, f"{path}: {name}.mem_MB")
    taken = _integer(_key(entry, "parameters_in", f"{path}: {name}"), f"{path}: {name}.parameters_in")
    where = f"{path}: {name}.parameters_out"
    out = [_integer(v, f"{where}[{i}]") for i, v in enumerate(_list(_key(entry, "parameters_out", path), where))]
    if len(out) > layers or (layers and not out):
        _same_length(out, "parameters_out", layers, where)
    if len(out) < layers:
        rest = "" if layers % len(out) == 0 else ", the last time in part"
        warnings.append(
            f"{path}: {name}.parameters_out has {len(out)} entries for {layers} layers: repeated as a block{rest}"
        )
        out = [out[i % len(out)] for i in range(layers)]
    return ModelChain(name, tuple(mem), taken, tuple(out))


def _hosts(path: Path) -> tuple[Host, ...]:
    """Hosts in file order; names are taken literally, also where they look like numbers."""
    data = _as_written(path)
    out: list[Host] = []
    types: dict[str, str] = {}
    for kind, listed in data.items():
        if listed in ("", "~", "null"):
            listed = []
        if not isinstance(listed, list):
            raise InputError("a list of hosts is expected", where=f"{path}: {kind}", hint=f"write `{kind}: [host]`")
        for at, host in enumerate(listed):
            where = f"{path}: {kind}[{at}]"
            _host_name(host, where)
            if host in types:
                also = "twice" if types[host] == kind else f"under {types[host]} and under {kind}"
                raise InputError(f"host {host} is listed {also}", where=where, hint="list every host once")
            types[host] = str(kind)
            out.append(Host(host, str(kind)))
    return tuple(out)


def _host_name(host: Any, where: str) -> None:
    if not isinstance(host, str) or not host.strip():
        found = "nothing" if host in ("", None) else f"a {type(host).__name__}"
        raise InputError(f"a host name is expected, not {found}", where=where)
    if not host.isprintable():
        raise InputError("a host name has a character that cannot be printed", where=where)


def _types(
    path: Path,
    devices: Path,
    hosts: tuple[Host, ...],
    model: ModelChain,
    batch_size: int,
    dtype: str,
    warnings: list[str],
) -> tuple[DeviceType, ...]:
    data = yaml_text.read_mapping(path)
    by_name = {str(name): entry for name, entry in data.items()}
    named = list(dict.fromkeys([*(host.type for host in hosts), *(str(kind) for kind in _as_written(devices))]))
    out: list[DeviceType] = []
    others: set[tuple[int, str]] = set()
    for name in sorted(named):
        members = [host.name for host in hosts if host.type == name]
        if name not in by_name:
            if members:
                raise InputError(
                    f"host {members[0]} is of an unknown type {name}",
                    where=f"{devices}: {name}",
                    hint=f"{path} must describe it; {_meant(name, by_name)}",
                )
            warnings.append(f"{devices}: there is no device type {name} in {path}: skipped, it lists no hosts")
            continue
        entry = _mapping(by_name[name], f"{path}: {name}")
        speed = _number(_key(entry, "bw_Mbps", f"{path}: {name}"), f"{path}: {name}.bw_Mbps")
        memory = _number(_key(entry, "mem_MB", f"{path}: {name}"), f"{path}: {name}.mem_MB")
        time_s: tuple[float, ...] = ()
        if model.layers:
            time_s, seen = _profile(entry, model, batch_size, dtype, f"{path}: {name}", warnings)
            others |= seen
        out.append(DeviceType(name, speed, memory, time_s))
    if model.layers and not any(kind.time_s for kind in out if any(host.type == kind.name for host in hosts)):
        _no_profile(path, devices, hosts, model, batch_size, dtype, others)
    return tuple(out)


def _no_profile(
    path: Path,
    devices: Path,
    hosts: tuple[Host, ...],
    model: ModelChain,
    batch_size: int,
    dtype: str,
    others: set[tuple[int, str]],
) -> None:
    if not hosts:
        raise InputError("no hosts are listed", where=str(devices), hint="list at least one under its device type")
    if others:
        there = ", ".join(f"batch size {size} with torch.{kind}" for size, kind in sorted(others))
        raise InputError(
            f"no device has a profile of {model.name} for batch size {batch_size} with torch.{dtype}",
            where=str(path),
            hint=f"there are profiles for {there}",
        )
    raise InputError(
        f"no device has a profile of {model.name}", where=str(path), hint="profile its layers on at least one device"
    )


def _profile(
    entry: Mapping[str, Any], model: ModelChain, batch_size: int, dtype: str, where: str, warnings: list[str]
) -> tuple[tuple[float, ...], set[tuple[int, str]]]:
    """(times of a model on a device type, settings it was profiled with)."""
    profiles = entry.get("model_profiles")
    rows = _mapping(profiles, f"{where}.model_profiles").get(model.name) if profiles is not None else None
    if rows is None:
        warnings.append(f"{where} has no profile of {model.name}: its hosts hold no layers")
        return (), set()
    found: tuple[float, ...] = ()
    seen = set()
    for at, profile in enumerate(_list(rows, f"{where}.model_profiles.{model.name}")):
        place = f"{where}.model_profiles.{model.name}[{at}]"
        profile = _mapping(profile, place)
        size = _integer(_key(profile, "batch_size", place), f"{place}.batch_size")
        name = _key(profile, "dtype", place)
        if not isinstance(name, str):
            raise InputError("a dtype such as torch.float32 is expected", where=f"{place}.dtype")
        try:
            kind = canonical_dtype(name)
        except InputError as error:
            error.where = f"{place}.dtype"
            raise
        if (size, kind) == (batch_size, dtype):
            if (size, kind) in seen:
                warnings.append(f"{place} is a second profile of the same settings: the last one counts")
            times = _numbers(_key(profile, "time_s", place), f"{place}.time_s")
            _same_length(times, "time_s", model.layers, f"{place}.time_s")
            found = tuple(times)
        seen.add((size, kind))
    if not found:
        there = ", ".join(f"batch size {size} with torch.{kind}" for size, kind in sorted(seen)) or "none"
        warnings.append(
            f"{where} has no profile of {model.name} for batch size {batch_size} with torch.{dtype} "
            f"(there is: {there}): its hosts hold no layers"
        )
    return found, seen


def _links(path: Path, known: list[str]) -> tuple[HostLink, ...]:
    """Links by pair of hosts; of several entries for a pair the last counts."""
    entries = _as_written(path, list)
    found: dict[tuple[str, str], HostLink] = {}
    for at, entry in enumerate(entries):
        where = f"{path}: [{at}]"
        entry = _mapping(entry, where)
        strange = [key for key in entry if key not in ("hosts", "to", "bw_Mbps", "latency_ms")]
        if strange:
            raise InputError(
                f"unknown key {strange[0]}", where=where, hint="a link has hosts, to, bw_Mbps and latency_ms"
            )
        lists = []
        for key in ("hosts", "to"):
            names = _list(entry[key], f"{where}.{key}") if key in entry else []
            for index, name in enumerate(names):
                _host_name(name, f"{where}.{key}[{index}]")
                if name not in known:
                    raise InputError(
                        f"there is no host {name}", where=f"{where}.{key}[{index}]", hint=_meant(name, known)
                    )
            lists.append(names)
        hosts, to = lists
        if len(hosts) + len(to) < 2 or not hosts:
            raise InputError("a link needs two hosts", where=where, hint="write `hosts: [a, b]`")
        speed = _number(entry["bw_Mbps"], f"{where}.bw_Mbps") if "bw_Mbps" in entry else None
        delay = _number(entry["latency_ms"], f"{where}.latency_ms") / 1000 if "latency_ms" in entry else 0.0
        for a, b in product(hosts, to) if "to" in entry else combinations(hosts, 2):
            if a == b:
                raise InputError(f"host {a} is linked to itself", where=where)
            pair = (a, b) if a < b else (b, a)
            found[pair] = HostLink(pair, speed, delay)
    return tuple(found.values())


def _as_written(path: Path, expected: type = dict) -> Any:
    """A YAML file with every scalar as its text, so that the host 010 stays 010."""
    text = yaml_text.read_text(path)
    # Parsed twice: `yaml_text` gives the errors.
    plain = yaml_text.parse(text, str(path))
    if plain is None:
        return expected()
    if not isinstance(plain, expected):
        wanted = "a mapping of keys" if expected is dict else "a list"
        raise InputError(f"{wanted} is expected, the file holds {type(plain).__name__}", where=str(path))
    try:
        return YAML(typ="base", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"this is not valid YAML: {' '.join(str(error).split())[:300]}", where=str(path)) from None


def _key(entry: Mapping[str, Any], key: str, where: object) -> Any:
    if key not in entry:
        near = nearest(key, [str(k) for k in entry])
        raise InputError(f"`{key}` is missing", where=str(where), hint=f"there is `{near}`" if near else None)
    return entry[key]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"a mapping of keys is expected, not {_kind(value)}", where=where)
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"a list is expected, not {_kind(value)}", where=where)
    return value


def _numbers(value: Any, where: str) -> list[float]:
    return [_number(item, f"{where}[{at}]") for at, item in enumerate(_list(value, where))]


def _number(value: Any, where: str) -> float:
    """A finite number of 0 or more; text only occurs in files read by `_as_written`."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise InputError(f"a number is expected, not {value[:40]!r}", where=where) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"a number is expected, not {_kind(value)}", where=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"a finite number is expected, not {value}", where=where)
    if not 0 <= value <= MAX_VALUE:
        raise InputError(f"{_short(value)} is {'negative' if value < 0 else 'too large'}", where=where)
    return float(value)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"a whole number is expected, not {_kind(value)}", where=where)
    return int(_number(value, where))


def _short(value: float) -> str:
    return str(value) if abs(value) < 1e20 else "a number"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str | int | float):
        return repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]} ..."
    return {"list": "a list", "dict": "a mapping"}.get(type(value).__name__, f"a {type(value).__name__}")


def _same_length(values: list[Any], name: str, layers: int, where: str) -> None:
    if len(values) != layers:
        raise InputError(f"{name} has {len(values)} entries, it must have {layers} (one for each layer)", where=where)


def _meant(name: str, known: Any, prefix: str = "") -> str:
    names = [str(other) for other in known]
    if not names:
        return "there is none"
    near = nearest(name, names)
    listed = ", ".join(prefix + other for other in names[:12]) + (" ..." if len(names) > 12 else "")
    return f"did you mean {prefix}{near}?" if near else f"there is: {listed}"


_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*\Z")
# Numbers, dates and base-60 numbers of YAML 1.1 and 1.2, and some more: quotes do no harm.
_NUMBER_LIKE = re.compile(r"[0-9_][0-9a-fA-FxXoO_.:TtZz+-]*\Z")
_ADDRESS = re.compile(r"\d+(\.\d+){3}\Z")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"])


def schedule_yaml(schedule: Schedule) -> str:
    """A schedule in PipeEdge's format: a list of hosts with their first and last layer."""
    if not schedule.stages:
        return "[]\n"
    return "".join(f"- {scalar(s.host)}: [{s.first}, {s.last}]\n" for s in schedule.stages)


def scalar(text: str) -> str:
    """Text as a YAML scalar, quoted unless every YAML version reads it as text."""
    number = _NUMBER_LIKE.match(text) and not _ADDRESS.match(text)
    if _PLAIN.match(text) and not number and text.lower() not in _WORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def devices_yaml(hosts: Mapping[str, list[str]]) -> str:
    """`devices.yml`: hosts by type."""
    out = ""
    for kind, names in hosts.items():
        out += f"{scalar(kind)}:\n" + "".join(f"- {scalar(name)}\n" for name in names)
    return out or "{}\n"
