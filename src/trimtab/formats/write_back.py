"""Writes a plan into the user's config file, or formats it as overrides.

Only the text of changed values is replaced: every other byte of the file stays, comments and quoting included. The new
text is parsed before it is written, and must equal the old data with the new values. A file is replaced atomically,
after a backup that never overwrites an older one. Values that come from elsewhere (a parent file, an interpolation, an
anchor, the command line) are never edited.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, ScalarNode

from trimtab.core.errors import InputError
from trimtab.formats import files, yaml_text
from trimtab.formats.loaded import LaunchedScript, PlanSettings

KeyStanding = Literal["literal", "absent", "indirect"]

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z_.\-]*\Z")
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.,\-]*\Z")


def scalar_text(value: Any) -> str:
    """A value as YAML: strings other than plain words are quoted, because unquoted `4:0` is 240."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if _PLAIN_WORD.match(text) and text.lower() not in _YAML_WORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def key_text(key: str, *, flow: bool = False) -> str:
    """A key as YAML; in flow style commas need quotes."""
    if _PLAIN_KEY.match(key) and key.lower() not in _YAML_WORDS and not (flow and "," in key):
        return key
    return scalar_text(key)


def block_text(values: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings as YAML text."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key_text(key)}:\n{block_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key_text(key)}: {scalar_text(value)}\n")
    return "".join(lines)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _put(tree, key.split("."), value)
    return tree


def overrides(settings: PlanSettings) -> list[str]:
    """The settings as Hydra overrides, one argument each, before shell quoting.

    A mapping is removed first: Hydra merges mappings, and old entries would stay. Commas in its keys are escaped,
    because Hydra's grammar has no quoted keys.
    """
    lines: list[str] = []
    for key, value in settings.values.items():
        if value is None:
            lines.append(f"~{key}")
        elif isinstance(value, Mapping):
            entries = ",".join(f"{_escaped(name)}:{_override_value(entry)}" for name, entry in value.items())
            lines.extend([f"~{key}", f"+{key}={{{entries}}}"])
        else:
            lines.append(f"++{key}={_override_value(value)}")
    return lines


def shell_words(settings: PlanSettings) -> list[str]:
    return [shlex.quote(line) for line in settings.words or overrides(settings)]


def uneditable_keys(
    settings: PlanSettings,
    literal: Callable[[str], bool],
    states: Callable[[str, Any], bool] = lambda key, value: False,
) -> tuple[str, ...]:
    """Keys that must change but cannot be edited in the file; empty where `apply` works."""
    return tuple(key for key, value in settings.values.items() if not _stated(states, key, value) and not literal(key))


def apply(
    path: Path,
    settings: PlanSettings,
    literal: Callable[[str], bool],
    states: Callable[[str, Any], bool] = lambda key, value: False,
) -> Path | None:
    """Write the settings into the file; return the backup's path, or None if nothing changed."""
    uneditable = uneditable_keys(settings, literal, states)
    if uneditable:
        raise InputError(
            f"not written: {', '.join(uneditable)} is not set in the file itself",
            where=str(path),
            hint="give the overrides on the command line of the run instead (--overrides)",
        )
    changes = {key: value for key, value in settings.values.items() if not _stated(states, key, value)}
    target = path.resolve()
    raw = yaml_text.read_text(target)
    mark = "\ufeff" if target.read_bytes().startswith(b"\xef\xbb\xbf") else ""
    text = edited(raw, changes, str(path))
    if text == raw:
        return None
    return _replace_file(target, path, mark + text)


def apply_to_script(script: LaunchedScript, settings: PlanSettings) -> Path | None:
    """Write the settings into a launch script; return the backup's path, or None if nothing changed."""
    text = script.rewritten(settings)
    target = script.path.resolve()
    return None if text == yaml_text.read_text(target) else _replace_file(target, script.path, text)


def edited(text: str, changes: Mapping[str, Any], name: str = "the file") -> str:
    """YAML text with some dotted keys changed and every other byte kept."""
    expected = _unshared(yaml_text.parse(text, name))
    result = text
    for key, value in changes.items():
        result = _edit_one(result, key, value, name)
        _put(expected, key.split("."), value)
    if yaml_text.parse(result, name) != expected:
        raise InputError(
            f"not written: the layout of this file does not let {', '.join(changes)} be edited safely",
            where=name,
            hint="give the overrides on the command line of the run instead (--overrides)",
        )
    return result


def key_standing(text: str, key: str) -> KeyStanding:
    """Whether YAML text has a literal value for a dotted key, lacks the key, or only refers to a value elsewhere."""
    try:
        root = _compose(text)
    except InputError:  # Hydra's parser is more lenient; what this one cannot parse must not be edited
        return "indirect"
    node = root
    for part in key.split("."):
        if not isinstance(node, MappingNode) or _anchored(node):
            return "indirect"
        found = _entry(node, part)
        if found is None:
            merged = any(key_node.value == "<<" for key_node, _ in node.value)
            return "indirect" if merged else "absent"
        node = found[1]
    return "literal" if _is_literal(node) else "indirect"


def _edit_one(text: str, key: str, value: Any, name: str) -> str:
    root = _compose(text)
    parts = key.split(".")
    node = root
    for depth, part in enumerate(parts):
        found = _entry(node, part) if isinstance(node, MappingNode) else None
        if found is None:
            if value is None:
                return text
            missing: Any = value
            for below in reversed(parts[depth + 1 :]):
                missing = {below: missing}
            return _insert(text, node, part, missing, name)
        if depth == len(parts) - 1:
            if value is None:
                return _remove(text, *found)
            return _replace(text, node, *found, value)
        node = found[1]
    return text


def _replace(text: str, parent: Any, key_node: Any, old: Any, value: Any) -> str:
    flow = bool(parent.flow_style)
    if isinstance(value, Mapping) and isinstance(old, MappingNode) and old.value and not old.flow_style:
        return _replace_block(text, old, value)
    if isinstance(value, Mapping) and not flow and not (isinstance(old, MappingNode) and old.flow_style):
        indent = " " * (key_node.start_mark.column + 2)
        new = "\n" + block_text(value, indent).rstrip("\n")
        return _splice(text, _after_colon(text, key_node), max(_after_colon(text, key_node), _end(old)), new)
    new = _flow_text(value)
    start, end = old.start_mark.index, _end(old)
    if start >= end:  # an empty value: `key:`
        return _splice(text, _after_colon(text, key_node), _after_colon(text, key_node), f" {new}")
    return _splice(text, start, end, new)


def _replace_block(text: str, old: Any, value: Mapping[str, Any]) -> str:
    """Replace the entries of a block mapping; comments stay beside their keys, or above the entries."""
    indent = " " * old.value[0][0].start_mark.column
    start, end = old.value[0][0].start_mark.index, _end(old)
    beside: dict[str, str] = {}
    above: list[str] = []
    for index, (key_node, node) in enumerate(old.value):
        next_start = old.value[index + 1][0].start_mark.index if index + 1 < len(old.value) else end
        between = text[_end(node) : next_start]
        first, *more = between.split("\n")
        if first.strip().startswith("#"):
            if str(key_node.value) in value:
                beside[str(key_node.value)] = first.rstrip()
            else:
                above.append(first.strip())
        above.extend(line.strip() for line in more if line.strip().startswith("#"))
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = list(above)
    for key, entry in value.items():
        lines.append(f"{key_text(key)}: {scalar_text(entry)}{beside.get(key, '')}")
    return _splice(text, start, end, f"{newline}{indent}".join(lines))


def _insert(text: str, parent: Any, key: str, value: Any, name: str) -> str:
    if not isinstance(parent, MappingNode) or not parent.value:
        raise InputError(f"not written: there is no place for {key}", where=name)
    last = _end(parent.value[-1][1]) if not parent.flow_style else parent.value[-1][1].end_mark.index
    if parent.flow_style:
        return _splice(text, last, last, f", {key_text(key, flow=True)}: {_flow_text(value)}")
    last = max(last, _after_colon(text, parent.value[-1][0]))
    line_end = text.find("\n", last)
    indent = " " * parent.value[0][0].start_mark.column
    entry = block_text({key: value}, indent)
    if line_end < 0:
        return text + "\n" + entry
    return _splice(text, line_end + 1, line_end + 1, entry)


def _remove(text: str, key_node: Any, node: Any) -> str:
    start = text.rfind("\n", 0, key_node.start_mark.index) + 1
    end = text.find("\n", max(_end(node), _after_colon(text, key_node)))
    return _splice(text, start, len(text) if end < 0 else end + 1, "")


def _end(node: Any) -> int:
    """End of a node's own text: a block's end mark lies past the comments and blank lines after it."""
    if isinstance(node, ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)


def _after_colon(text: str, key_node: Any) -> int:
    return text.index(":", key_node.end_mark.index) + 1


def _splice(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _compose(text: str) -> Any:
    try:
        return YAML(typ="rt", pure=True).compose(text)
    except Exception as error:  # Hydra read this text; if this parser cannot, nothing may be edited
        raise InputError(f"the file cannot be edited: {' '.join(str(error).split())[:200]}") from None


def _entry(node: Any, name: str) -> tuple[Any, Any] | None:
    for key_node, value_node in node.value:
        if isinstance(key_node, ScalarNode) and str(key_node.value) == name:
            return key_node, value_node
    return None


def _anchored(node: Any) -> bool:
    return getattr(node, "anchor", None) is not None


def _is_literal(node: Any) -> bool:
    if _anchored(node):
        return False
    if isinstance(node, ScalarNode):
        return "${" not in str(node.value) and str(node.value) != "???"
    if isinstance(node, MappingNode):
        return all(key.value != "<<" and _is_literal(value) for key, value in node.value)
    return False


def _put(data: Any, parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    if value is None:
        data.pop(parts[-1], None)
    else:
        data[parts[-1]] = dict(value) if isinstance(value, Mapping) else value


def _unshared(data: Any) -> Any:
    """A copy without shared objects (YAML aliases), so that a change shows in one place only."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data


def _stated(states: Callable[[str, Any], bool], key: str, value: Any) -> bool:
    return states(key, dict(value) if isinstance(value, Mapping) else value)


def _flow_text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return scalar_text(value)
    return "{" + ", ".join(f"{key_text(key, flow=True)}: {_flow_text(entry)}" for key, entry in value.items()) + "}"


def _escaped(name: str) -> str:
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)


def _override_value(value: Any) -> str:
    if isinstance(value, str):
        # In Hydra a backslash is literal, except before a quote.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"
    return scalar_text(value)


def _replace_file(target: Path, shown: Path, text: str) -> Path:
    """Back up, then replace the file atomically."""
    backup: Path | None = None
    try:
        if not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
        backup = _free_backup(shown)
        shutil.copy2(target, backup)
        files.replace(target, text)
    except OSError as error:
        if backup is not None:
            backup.unlink(missing_ok=True)
        raise InputError(
            f"{shown} cannot be written: {error.strerror or error}",
            where=str(shown),
            hint="the file is unchanged; use --output FILE, or give the overrides instead (--overrides)",
        ) from None
    return backup


def _free_backup(path: Path) -> Path:
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            os.close(os.open(backup, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            number += 1
            continue
        return backup
