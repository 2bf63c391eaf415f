"""Reads a pipeline's files (`models.yml`, `device_types.yml`, `devices.yml`, `links.yml`); writes its schedule as YAML.

Reading gives a checked `PipelineJob` or an InputError that names file and key; input with a single possible meaning is
accepted with a warning, and nothing is guessed. Only what the job needs is checked, so that an unfinished profile of
another model does no harm.

A schedule is also written as an uneven split for serving engines and trainers. These count whole decoder blocks and
give stage n to pipeline rank n; they do not take hosts. So the schedule must be cut between blocks, and the hosts are
listed beside the split in rank order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trimtab.core.errors import InfeasibleError, InputError, meant, nearest
from trimtab.core.frozen import Frozen
from trimtab.formats import sections, yaml_text
from trimtab.formats.sections import Made, OpenSection, Section, Within, checked_by
from trimtab.formats.yaml_text import Source
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


Value = Annotated[float, Within(0.0, MAX_VALUE)]
Whole = Annotated[int, Within(0, MAX_VALUE)]


def _check_host(name: str) -> None:
    if not name.strip() or not name.isprintable():
        raise InputError(f"a host name is expected, not {name!r}")


class ModelEntry(OpenSection):
    """A model of `models.yml`."""

    layers: Whole
    mem_mb: list[Value] = Field(alias="mem_MB")
    parameters_in: Whole
    parameters_out: list[Whole]


class ProfileEntry(OpenSection):
    """A profile of a model on a device type."""

    batch_size: Whole
    dtype: Annotated[str, Made(str, lambda name: canonical_dtype(name))]
    time_s: list[Value]


class TypeEntry(OpenSection):
    """A device type of `device_types.yml`; profiles of other models than the job's are not read."""

    bw_mbps: Value = Field(alias="bw_Mbps")
    mem_mb: Value = Field(alias="mem_MB")
    model_profiles: dict[str, Any] | None = None


class LinkEntry(Section):
    """An entry of `links.yml`."""

    hosts: list[Annotated[str, checked_by(_check_host)]] = Field(default_factory=list)
    to: list[Annotated[str, checked_by(_check_host)]] | None = None
    bw_mbps: Value | None = Field(default=None, alias="bw_Mbps")
    latency_ms: Value = 0.0


class PartitionRequest(Frozen):
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


class LoadedPipeline(Frozen):
    """A job, and warnings from reading it."""

    job: PipelineJob
    warnings: tuple[str, ...]


def load(
    models: Path, types: Path, devices: Path, request: PartitionRequest, links: Path | None = None
) -> LoadedPipeline:
    """Read the job from three files, or four. Raises InputError."""
    warnings: list[str] = []
    request = replace(request, dtype=canonical_dtype(request.dtype))
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
    kinds = _types(types, devices, hosts, model, request, warnings)
    known = [host.name for host in hosts]
    for option, end in (("--source", request.source), ("--sink", request.sink)):
        if end is not None and end not in known:
            raise InputError(f"{option} {end}: there is no such host", where=str(devices), hint=_meant(end, known))
    job = PipelineJob(
        model,
        kinds,
        tuple(host for host in hosts if any(kind.name == host.type for kind in kinds)),
        element_bytes=ELEMENT_BYTES[request.dtype],
        links=_links(links, known) if links is not None else (),
        **{name: value for name, value in vars(request).items() if name not in ("model", "dtype")},
    )
    return LoadedPipeline(job, tuple(warnings))


def canonical_dtype(name: str) -> str:
    """The canonical name of a torch dtype, without prefix: `torch.half` is `float16`."""
    short = name.strip().removeprefix("torch.")
    short = _SAME.get(short, short)
    if short not in ELEMENT_BYTES:
        near = nearest(short, ELEMENT_BYTES)
        raise InputError(f"unknown dtype {name}", hint=f"did you mean torch.{near}?" if near else "torch.float32 ...")
    return short


def _model(path: Path, name: str, warnings: list[str]) -> ModelChain:
    source, data = yaml_text.read_named(path)
    if name not in data:
        raise InputError(f"there is no model {name}", where=str(path), hint=_meant(name, sorted(map(str, data))))
    entry = sections.read(ModelEntry, data[name], source, name)
    layers, out = entry.layers, entry.parameters_out
    _same_length(entry.mem_mb, layers, source, name, "mem_MB")
    if len(out) > layers or (layers and not out):
        _same_length(out, layers, source, name, "parameters_out")
    if len(out) < layers:
        rest = "" if layers % len(out) == 0 else ", the last time in part"
        warnings.append(
            f"{path}: {name}.parameters_out has {len(out)} entries for {layers} layers: repeated as a block{rest}"
        )
        out = [out[i % len(out)] for i in range(layers)]
    return ModelChain(name, tuple(entry.mem_mb), entry.parameters_in, tuple(out))


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
            if not isinstance(host, str):
                raise InputError(f"a host name is expected, not a {type(host).__name__}", where=where)
            with Source(str(path)).located(str(kind), at):
                _check_host(host)
            if host in types:
                also = "twice" if types[host] == kind else f"under {types[host]} and under {kind}"
                raise InputError(f"host {host} is listed {also}", where=where, hint="list every host once")
            types[host] = str(kind)
            out.append(Host(host, str(kind)))
    return tuple(out)


def _types(
    path: Path, devices: Path, hosts: Sequence[Host], model: ModelChain, request: PartitionRequest, warnings: list[str]
) -> tuple[DeviceType, ...]:
    source, data = yaml_text.read_named(path)
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
        entry = sections.read(TypeEntry, by_name[name], source, name)
        time_s: tuple[float, ...] = ()
        if model.layers:
            time_s, seen = _profile(entry, name, model, request, source, warnings)
            others |= seen
        out.append(DeviceType(name, entry.bw_mbps, entry.mem_mb, time_s))
    if model.layers and not any(kind.time_s for kind in out if any(host.type == kind.name for host in hosts)):
        if not hosts:
            raise InputError("no hosts are listed", where=str(devices), hint="list at least one under its device type")
        what, hint = f"no device has a profile of {model.name}", "profile its layers on at least one device"
        if others:
            what += f" for {_settings({(request.batch_size, request.dtype)})}"
            hint = f"there are profiles for {_settings(others)}"
        raise InputError(what, where=str(path), hint=hint)
    return tuple(out)


def _settings(profiled: set[tuple[int, str]]) -> str:
    return ", ".join(f"batch size {size} with torch.{kind}" for size, kind in sorted(profiled)) or "none"


def _profile(
    entry: TypeEntry, name: str, model: ModelChain, request: PartitionRequest, source: Source, warnings: list[str]
) -> tuple[tuple[float, ...], set[tuple[int, str]]]:
    """(times of a model on a device type, settings it was profiled with)."""
    where = f"{source.name}: {name}"
    rows = (entry.model_profiles or {}).get(model.name)
    if rows is None:
        warnings.append(f"{where} has no profile of {model.name}: its hosts hold no layers")
        return (), set()
    keys = (name, "model_profiles", model.name)
    if not isinstance(rows, list):
        raise source.error("a list of profiles is expected", *keys)
    found: tuple[float, ...] = ()
    seen = set()
    wanted = (request.batch_size, request.dtype)
    for at, row in enumerate(rows):
        profile = sections.read(ProfileEntry, row, source, *keys, at)
        if (profile.batch_size, profile.dtype) == wanted:
            if wanted in seen:
                place = source.place(*keys, at)
                warnings.append(f"{place} is a second profile of the same settings: the last one counts")
            _same_length(profile.time_s, model.layers, source, *keys, at, "time_s")
            found = tuple(profile.time_s)
        seen.add((profile.batch_size, profile.dtype))
    if not found:
        there = f"{_settings({wanted})} (there is: {_settings(seen)})"
        warnings.append(f"{where} has no profile of {model.name} for {there}: its hosts hold no layers")
    return found, seen


def _links(path: Path, known: list[str]) -> tuple[HostLink, ...]:
    """Links by pair of hosts; of several entries for a pair the last counts."""
    source = Source(str(path), yaml_text.read_text(path))
    found: dict[tuple[str, str], HostLink] = {}
    for at, stated in enumerate(_as_written(path, list)):
        entry = sections.read(LinkEntry, stated, source, at)
        hosts, to = entry.hosts, entry.to or []
        for key, names in (("hosts", hosts), ("to", to)):
            for index, name in enumerate(names):
                if name not in known:
                    raise source.error(f"there is no host {name}", at, key, index, hint=_meant(name, known))
        if len(hosts) + len(to) < 2 or not hosts:
            raise source.error("a link needs two hosts", at, hint="write `hosts: [a, b]`")
        for a, b in product(hosts, to) if entry.to is not None else combinations(hosts, 2):
            if a == b:
                raise source.error(f"host {a} is linked to itself", at)
            pair = (a, b) if a < b else (b, a)
            found[pair] = HostLink(pair, entry.bw_mbps, entry.latency_ms / 1000)
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


def _same_length(values: Sequence[Any], layers: int, source: Source, *keys: str | int) -> None:
    if len(values) != layers:
        what = f"{keys[-1]} has {len(values)} entries, it must have {layers} (one for each layer)"
        raise source.error(what, *keys)


def _meant(name: str, known: Iterable[str]) -> str:
    names = list(known)
    listed = ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
    return meant(name, names, f"there is: {listed}" if names else "there is none")


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


class SplitTarget(str, enum.Enum):
    """Software that runs the stages."""

    vllm = "vllm"
    sglang = "sglang"
    megatron = "megatron"


def split_lines(schedule: Schedule, engine: SplitTarget, layers_per_block: int = 1) -> str:
    """Shell text: the split as an environment variable or flags, and the hosts in rank order as a comment."""
    sizes = [(stage.last - stage.first + 1) // layers_per_block for stage in schedule.stages]
    if not sizes:
        raise InfeasibleError("there are no layers to split")
    listed = ",".join(map(str, sizes))
    hosts = " ".join(stage.host for stage in schedule.stages)
    count = len(sizes)
    if engine is SplitTarget.vllm:
        lines = [f'export VLLM_PP_LAYER_PARTITION="{listed}"', f"# vllm serve ... --pipeline-parallel-size {count}"]
    elif engine is SplitTarget.sglang:
        lines = [
            f'export SGLANG_PP_LAYER_PARTITION="{listed}"',
            f"# python -m sglang.launch_server ... --pp-size {count}",
        ]
    else:
        lines = [
            f"--num-layers {sum(sizes)} --pipeline-model-parallel-size {count} "
            f'--pipeline-model-parallel-layout "{layout(sizes)}"'
        ]
        inner = sizes[1:-1]
        if inner and len(set(inner)) == 1 and len(set(sizes)) > 1:
            lines.append(
                f"# the same without a layout: --decoder-first-pipeline-num-layers {sizes[0]} "
                f"--decoder-last-pipeline-num-layers {sizes[-1]}"
            )
    return "\n".join([*lines, f"# pipeline ranks 0 to {count - 1} on: {hosts}"]) + "\n"


def layout(sizes: list[int]) -> str:
    """Megatron's layout: embedding with the first stage, loss with the last, equal neighbours folded."""
    if len(sizes) == 1:
        return f"E{_layers(sizes[0])}L"
    parts = [f"E{_layers(sizes[0])}|"]
    for size, run in groupby(sizes[1:-1]):
        count = len(list(run))
        parts.append(f"{_layers(size)}|" if count == 1 else f"({_layers(size)}|)*{count}")
    return "".join(parts) + f"{_layers(sizes[-1])}L"


def _layers(count: int) -> str:
    return "t" * count if count <= 2 else f"t*{count}"
