"""Reads and writes YAML, and reads TOML; every error names the file, and the line where the parser knows it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from trimtab.core.frozen import Frozen

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.formats.files import unreadable

MAX_BYTES = 8 * 2**20


class Source(Frozen):
    """A file in errors: its name, and its text for line numbers (empty: none are given)."""

    name: str
    text: str = field(default="", repr=False)

    def place(self, *keys: str | int) -> str:
        """`file:line: a.b[0].c`; the line is that of the nearest key in the file."""
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
        line = self._line(keys)
        return f"{self.name}:{line}: {path}" if line else f"{self.name}: {path}" if path else self.name

    def error(self, what: str, *keys: str | int, hint: str | None = None) -> InputError:
        return InputError(what, where=self.place(*keys), hint=hint)

    @contextmanager
    def located(self, *keys: str | int) -> Iterator[None]:
        """Give errors of the block a place in the file: the dotted key that they name, or these keys."""
        try:
            yield
        except InputError as error:
            named = (error.where or "").removeprefix(f"{self.name}: ")
            if not named.startswith(f"{self.name}:"):
                found = re.findall(r"\[(\d+)\]|([^.\[\]]+)", named)
                words = [int(index) if index else word for index, word in found]
                error.where = self.place(*(words if words[:1] == list(keys[:1]) or not keys else keys))
            raise

    def _line(self, keys: tuple[str | int, ...]) -> int | None:
        node: Any = _marked(self.text)
        line = None
        with suppress(AttributeError, KeyError, IndexError, TypeError, ValueError):
            for key in keys:
                # An int is the index of a list; a number that is a key comes as text.
                key = key if isinstance(key, int) or key in node else int(key)
                marks = node.lc
                line = (marks.item(key) if isinstance(node, list) else marks.key(key))[0] + 1
                node = node[key]
        return line


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


def parse_config(text: str, name: str) -> Any:
    """Plain data of a config: TOML where the file's name says so, else YAML."""
    if not name.endswith(".toml"):
        return parse(text, name)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"this is not valid TOML: {_one_line(str(error))}", where=name) from None
    return plain.check(data, name)


def read_source(path: Path) -> tuple[Source, Any]:
    """A YAML file: for errors, and its data."""
    source = Source(str(path), read_text(path))
    return source, parse(source.text, source.name)


@lru_cache(maxsize=4)
def _marked(text: str) -> Any:
    """The data with positions; None where the text is not YAML."""
    try:
        return YAML(typ="rt", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return None


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
    return read_named(path)[1]


def read_named(path: Path) -> tuple[Source, dict[str, Any]]:
    """The same, and the file for errors."""
    source, data = read_source(path)
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InputError(f"a mapping of keys is expected, the file holds {found}", where=str(path))
    return source, dict(data)


def overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The data with `a.b=value` overrides applied; values are YAML."""
    result = dict(data)
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.strip().lstrip("+").split(".")
        if not equals or not all(parts):
            raise InputError(
                f"this override cannot be understood: {override}",
                where="command line",
                hint="write key=value, for example workflow.batches=256",
            )
        place = result
        for part in parts[:-1]:
            child = place.get(part, {})
            if not isinstance(child, Mapping):
                raise InputError(f"{key} cannot be set: {part} is no mapping", where="command line")
            # Only the path is copied: YAML aliases may make the whole data infinite.
            place[part] = place = dict(child)
        place[parts[-1]] = parse(value, f"command line: {override}")
    return result


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
