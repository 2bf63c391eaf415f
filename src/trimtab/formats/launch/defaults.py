"""Defaults of verl's trainers where verl is not installed: tables made by `tools/defaults.py` from published wheels."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from trimtab.formats import write_back, yaml_text
from trimtab.formats.catalogue import table


def verl_defaults(config: str) -> tuple[dict[str, Any], str]:
    """The defaults that matter of a trainer's config, and the newest version that has it; empty for another config."""
    values, newest = _values(config)
    return write_back.nested(deepcopy(values)), newest


@cache
def _values(config: str) -> tuple[dict[str, Any], str]:
    rows = [row for row in table("verl_defaults") if row["config"] == config]
    versions = [name for name in rows[0] if name not in ("config", "key")] if rows else []
    newest = next((version for version in reversed(versions) if any(row[version] for row in rows)), "")
    values = {row["key"]: yaml_text.parse(row[newest], "defaults") for row in rows if row[newest] != ""}
    return values, newest


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data over other nested data."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
