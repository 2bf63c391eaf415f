"""Reads and writes RLinf's `component_placement`.

The grammar is `part(,part)*` with `part = GPUs[:processes]`, GPUs being `all`, a rank or a range, ascending and without
overlap. What this module accepts RLinf accepts; refusals name the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.ranks import ranks_text
from trimtab.formats.frameworks.hydra_config import ConfigReader

KEY = "cluster.component_placement"

_RANGE = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?\Z")


def stated(reader: ConfigReader) -> dict[str, Any]:
    """Component name to its placement as written. Joint keys (`a,b`) are split."""
    placements: dict[str, Any] = {}
    for names, value in reader.mapping(KEY).items():
        for name in (part.strip() for part in str(names).split(",")):
            if name in placements:
                raise InputError(f"{name} is placed twice", where=reader.where(f"{KEY}.{names}"))
            if name:
                placements[name] = value
    return placements


def highest_rank(reader: ConfigReader) -> int | None:
    """The highest GPU rank in the placements; None if they name none (`all`)."""
    found = [
        max(ranks)
        for name, value in stated(reader).items()
        if (ranks := _ranks(_text(reader, name, value), None, reader.where(f"{KEY}.{name}")))
    ]
    return max(found, default=None)


def ranks(reader: ConfigReader, total: int) -> dict[str, tuple[int, ...]]:
    """The GPUs of every placed component on `total` GPUs. Raises InputError on an invalid placement."""
    result = {}
    for name, value in stated(reader).items():
        where = reader.where(f"{KEY}.{name}")
        found = _ranks(_text(reader, name, value), total, where)
        if not found:
            raise InputError(f"{name} is placed on no GPU", where=where, hint='name GPUs, for example "0-3", or all')
        result[name] = found
    return result


def refuse_partial_overlap(placed: Mapping[str, tuple[int, ...]], reader: ConfigReader) -> None:
    """Raise InputError if two components share some of their GPUs but not all: no mode of RLinf runs that."""
    names = list(placed)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            both = set(placed[name]) & set(placed[other])
            if both and set(placed[name]) != set(placed[other]):
                raise InputError(
                    f"{name} and {other} overlap on GPU {ranks_text(sorted(both))} without sharing all their GPUs",
                    where=reader.where(KEY),
                    hint="RLinf runs components either on the same GPUs or on GPUs of their own",
                )


def text(gpus: tuple[int, ...], total: int) -> str:
    """GPUs in RLinf's notation."""
    return "all" if len(gpus) == total else ranks_text(gpus)


def _text(reader: ConfigReader, name: str, value: Any) -> str:
    where = reader.where(f"{KEY}.{name}")
    if isinstance(value, Mapping):
        group = value.get("node_group", "cluster")
        if group != "cluster":
            raise InputError(
                f"{name} is placed in the node group {group}, and plans are made for one kind of node so far",
                where=where,
                hint="plan this workflow with a job file of trimtab's own form, which knows unlike nodes",
            )
        value = value.get("placement", "")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"a placement is a rank, a range or all, not {value!r}", where=where)
    return str(value)


def _ranks(placement: str, total: int | None, where: str) -> tuple[int, ...]:
    """The GPU ranks of a placement; without a total `all` is empty."""
    result: list[int] = []
    for part in (piece.strip() for piece in placement.split(",")):
        if not part:
            continue
        resources, _, processes = part.partition(":")
        gpus = _resources(resources.strip(), total, placement, where)
        if gpus and result and gpus[0] <= result[-1]:
            repeated = sorted(set(gpus) & set(result))
            what = f"names GPU {ranks_text(repeated)} twice" if repeated else f"goes down at GPU {gpus[0]}"
            raise InputError(
                f"the placement {placement!r} {what}", where=where, hint="write ranks once each, in ascending order"
            )
        if ":" in part and gpus:
            _check_processes(processes.strip(), len(gpus), placement, where)
        result.extend(gpus)
    return tuple(result)


def _resources(text: str, total: int | None, placement: str, where: str) -> list[int]:
    if text.lower() == "all":
        return list(range(total or 0))
    match = _RANGE.match(text)
    if match is None:
        raise InputError(
            f"the placement {placement!r} cannot be understood at {text!r}",
            where=where,
            hint='write all, a rank, a range such as "0-3", or several with commas; always in quotes',
        )
    first, last = int(match[1]), int(match[2] if match[2] is not None else match[1])
    if last < first:
        raise InputError(f"the placement {placement!r} runs down from GPU {first} to GPU {last}", where=where)
    if total is not None and last >= total:
        outside = ranks_text(range(max(first, total), last + 1))
        trap = "; an unquoted 4:0 is the number 240 in YAML, so put placements in quotes" if first >= 60 else ""
        raise InputError(
            f"the placement {placement!r} names GPU {outside}, and the cluster has GPUs 0-{total - 1}",
            where=where,
            hint=f"correct it, or state cluster.num_nodes and cluster.num_gpus_per_node{trap}",
        )
    return list(range(first, last + 1))


def _check_processes(text: str, gpus: int, placement: str, where: str) -> None:
    match = _RANGE.match(text)
    if match is None:
        raise InputError(f"the processes in {placement!r} are a rank or a range, not {text!r}", where=where)
    count = int(match[2] if match[2] is not None else match[1]) - int(match[1]) + 1
    if count < 1 or max(count, gpus) % min(count, gpus):
        raise InputError(
            f"{max(count, 0)} processes cannot be spread evenly over {gpus} GPUs in {placement!r}", where=where
        )
