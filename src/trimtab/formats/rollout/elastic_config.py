"""Reads the `elastic_config:` block of a YAML file; every error names the file and the key.

The block may stand in any training config; only its own keys are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, nearest
from trimtab.formats import yaml_text
from trimtab.formats.sections import FieldsOf, Name
from trimtab.formats.yaml_text import Source
from trimtab.model.elastic_config import ElasticConfig

BLOCK = "elastic_config"
SETTINGS = FieldsOf(ElasticConfig, types={"policy": Name})


def read(path: Path) -> ElasticConfig:
    """The settings in a file. Raises InputError, also for a file without the block."""
    source, data = yaml_text.read_source(path)
    config = from_data(data, source)
    if config is None:
        raise InputError(f"this file has no {BLOCK} block", where=str(path), hint=f"{BLOCK}: {{max_workers: 8}}")
    return config


def from_text(text: str, name: str = "the text") -> ElasticConfig | None:
    """The settings in YAML text, or None without the block; `name` is used in errors."""
    return from_data(yaml_text.parse(text, name), Source(name, text))


def from_data(data: Any, source: Source) -> ElasticConfig | None:
    """The settings in plain data, or None without the block (or if it is null)."""
    if not isinstance(data, Mapping):
        raise InputError("a mapping of keys is expected", where=source.name)
    if BLOCK not in data:
        meant = nearest(BLOCK, [key for key in data if isinstance(key, str) and key.startswith("elastic")])
        if meant is not None:
            raise source.error(f"{meant} is not read", meant, hint=f"did you mean {BLOCK}?")
        return None
    if data[BLOCK] is None:
        return None
    with source.located(BLOCK):
        return ElasticConfig(**SETTINGS.read(data[BLOCK], source, BLOCK))
