"""Reads the `elastic_config:` block of a YAML file; every error names the file and the key.

The block may stand in any training config; only its own keys are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, nearest
from trimtab.formats import yaml_text
from trimtab.model.elastic_config import ElasticConfig

BLOCK = "elastic_config"

LONGEST_S = 1e7
RANGES: Mapping[str, tuple[float, float]] = {
    "monitoring_interval": (0.01, LONGEST_S),
    **dict.fromkeys(("drain_timeout", "scale_down_cooldown", "scale_up_cooldown", "min_stable_period"), (0, LONGEST_S)),
    **dict.fromkeys(("scale_down_threshold", "scale_up_threshold"), (0, 1e6)),
    **dict.fromkeys(("min_workers", "max_workers"), (1, 65_536)),
    "requests_per_worker_capacity": (1, 1_000_000),
}
"""Allowed values, in seconds, ratios, workers and requests."""


def read(path: Path) -> ElasticConfig:
    """The settings in a file. Raises InputError, also for a file without the block."""
    config = from_data(yaml_text.read_mapping(path), str(path))
    if config is None:
        raise InputError(f"this file has no {BLOCK} block", where=str(path), hint=f"{BLOCK}: {{max_workers: 8}}")
    return config


def from_text(text: str, name: str = "the text") -> ElasticConfig | None:
    """The settings in YAML text, or None without the block; `name` is used in errors."""
    data = yaml_text.parse(text, name)
    if not isinstance(data, Mapping):
        raise InputError("a mapping of keys is expected", where=name)
    return from_data(data, name)


def from_data(data: Mapping[Any, Any], name: str) -> ElasticConfig | None:
    """The settings in plain data, or None without the block (or if it is null)."""
    if BLOCK not in data:
        meant = nearest(BLOCK, [key for key in data if isinstance(key, str) and key.startswith("elastic")])
        if meant is not None:
            raise InputError(f"{meant} is not read", where=f"{name}: {meant}", hint=f"did you mean {BLOCK}?")
        return None
    block = data[BLOCK]
    if block is None:
        return None
    where = f"{name}: {BLOCK}"
    if not isinstance(block, Mapping):
        raise InputError(f"{BLOCK} is a mapping of settings, not {type(block).__name__}", where=where)
    check_ranges(block, where)
    return ElasticConfig.from_mapping(dict(block), where)


def check_ranges(block: Mapping[Any, Any], where: str) -> None:
    """Raise InputError for a number out of its range."""
    for key, (lowest, highest) in RANGES.items():
        value: Any = block.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not lowest <= value <= highest:
            raise InputError(f"{key} is {value:g}", where=f"{where}.{key}", hint=f"from {lowest:g} to {highest:g}")
