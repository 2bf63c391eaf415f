"""Reads and writes YAML; every error names the file, and the line where the parser knows it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.formats.files import unreadable

MAX_BYTES = 8 * 2**20


def read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB: that is no job file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})", where=str(path)) from None


def parse(text: str, name: str) -> Any:
    """Plain Python data from YAML text; `name` is used in errors."""
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        data = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise InputError(
            f"this is not valid YAML: {_one_line(error.problem or error.context or 'syntax error')}", where=place
        ) from None
    except (YAMLError, ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"this is not valid YAML: {_one_line(str(error))}", where=name) from None
    return plain.check(data, name)


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping."""
    data = parse(read_text(path), str(path))
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InputError(f"a mapping of keys is expected, the file holds {found}", where=str(path))
    return dict(data)


def dump(data: Any) -> str:
    """YAML text of plain data: block style, keys in order."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    stream = io.StringIO()
    yaml.dump(_plain(data), stream)
    return stream.getvalue()


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
