"""Composes framework configs as Hydra and OmegaConf do: defaults, interpolations, overrides, resolved files.

`compose` returns a `ComposedConfig`, whose `reader` resolves a key only when it is read: framework configs are full of
resolvers and environment variables that planning does not need, and those must never fail it. A key that is read and
cannot be resolved is an InputError that names the file and the key. Hydra is imported only here and only when a
framework config is read, because its import is slow.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError, nearest
from trimtab.core.frozen import Frozen
from trimtab.formats import yaml_text

if TYPE_CHECKING:
    from trimtab.formats.launch.read import TrainerLaunch
    from trimtab.formats.loaded import LaunchedScript

MAX_EXPANDED_NODES = 500_000
"""Limit for expanded aliases, which may multiply a small file without bound."""
MAX_PARENTS = 32
MAX_COUNT = 65_536
"""GPUs, nodes, batches, parallel sizes: the same limit as in trimtab's job file."""
MAX_NUMBER = 1e9

_RESOLVERS: Mapping[str, Callable[..., Any]] = {
    # NeMo RL
    "mul": operator.mul,
    "add": operator.add,
    "div": operator.truediv,
    "max": max,
    # RLinf
    "multiply": operator.mul,
    "subtract": operator.sub,
    "int_div": operator.floordiv,
    "not": operator.not_,
    # launch scripts
    "unknown": lambda why: _raise_unknown(str(why)),
}
"""Resolvers that frameworks register with OmegaConf at start."""


def _raise_unknown(why: str) -> Any:
    text = bytes.fromhex(why).decode("utf-8", "replace").strip("\0")
    raise InputError(f"it depends on {text}" if text else "it is not known")


@contextmanager
def environment_of(launch: TrainerLaunch | None) -> Iterator[None]:
    """The variables of a launch in the environment, where they are not set: `${oc.env:...}` reads them there."""
    own = {} if launch is None else launch.launch.environment
    added = {name: value for name, value in own.items() if name not in os.environ and "\0" not in value}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _resolvers() -> Iterator[None]:
    """Register the frameworks' resolvers while a value is read: OmegaConf's are process-wide."""
    from omegaconf import OmegaConf

    added = [name for name in _RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, _RESOLVERS[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


class ConfigReader:
    """Typed access to a composed config by dotted keys; resolves only the keys that are read."""

    def __init__(self, config: Any, path: Path, launch: TrainerLaunch | None = None) -> None:
        self._config = config
        self.path = path
        self.launch = launch

    def where(self, key: str) -> str:
        return f"{self.path}: {key}"

    def error(self, key: str, what: str, hint: str | None = None) -> InputError:
        return InputError(what, where=self.where(key), hint=hint)

    def has(self, key: str) -> bool:
        """Whether the key is set and not null; an interpolation counts as set, resolvable or not."""
        from omegaconf.errors import OmegaConfBaseException

        try:
            return self._select(key) is not None
        except OmegaConfBaseException as error:
            return "nterpolation" in type(error).__name__
        except (RecursionError, ValueError, TypeError, AttributeError):
            return False

    def get(self, key: str, default: Any = None) -> Any:
        """The plain value of a key, or the default if it is absent, null or `???`."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            with _resolvers(), environment_of(self.launch):
                value = self._select(key)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            full_key = str(getattr(error, "full_key", None) or key)
            unknown = _first_line(error)
            if "nterpolation" in type(error).__name__ and "InputError" in unknown:
                what = unknown.partition("interpolation: ")[2] or unknown
                name = re.search(r"the variable (\w+)|(\w+), which is not set", what)
                given = f"{name[1] or name[2]}=VALUE" if name else "the variable: NAME=VALUE"
                hint = f"give {given}, or the key: {'' if '.' in full_key else '++'}{full_key}=VALUE"
                raise self.error(full_key, f"this value is not known: {what}", hint) from None
            if "nterpolation" in type(error).__name__:
                raise self.error(
                    full_key,
                    f"this value cannot be resolved: {_first_line(error)}",
                    f"give it on the command line: {full_key}=VALUE",
                ) from None
            raise self.error(full_key, f"this cannot be read: {_first_line(error)}") from None
        except (RecursionError, ValueError, TypeError, AttributeError) as error:
            raise self.error(key, f"this cannot be read: {_first_line(error)}") from None
        fault = plain.fault_of(value)
        if fault is not None:
            raise self.error(f"{key}.{fault[1]}" if fault[1] else key, fault[0])
        return default if value is None else value

    def missing(self, key: str, hint: str | None = None) -> InputError:
        return InputError(
            f"{key} is missing", where=self.where(key), hint=hint or f"add it to the file, or: {key}=VALUE"
        )

    def count(self, key: str, default: int | None = None, hint: str | None = None) -> int:
        """A whole number from 1 to `MAX_COUNT`; required without a default."""
        wanted = f"a whole number above 0, from 1 to {MAX_COUNT:,}, is expected"
        return int(self._number(key, default, hint, wanted, lambda n: n == int(n) and 1 <= n <= MAX_COUNT))

    def optional_count(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def product(self, section: str, *names: str) -> int:
        """The product of parallel sizes; unset ones count 1."""
        return math.prod(self.count(f"{section}.{name}", 1) for name in names)

    def counted(self, *keys: str) -> int | None:
        """The product of counts; None where one is not stated, or no count."""
        try:
            return math.prod(self.count(key) for key in keys)
        except InputError:
            return None

    def number(self, key: str, default: float | None = None, hint: str | None = None) -> float:
        """A finite number from 0 to `MAX_NUMBER`; required without a default."""
        wanted = f"a finite number of at least 0, at most {MAX_NUMBER:g}, is expected"
        return self._number(key, default, hint, wanted, lambda found: 0 <= found <= MAX_NUMBER)

    def _number(
        self, key: str, default: float | None, hint: str | None, wanted: str, is_valid: Callable[[float], bool]
    ) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.missing(key, hint)
        number = as_number(value)
        if number is None or not is_valid(number):
            raise self.error(key, f"{wanted}, not {value!r:.60}", hint)
        return number

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, f"true or false is expected, not {value!r:.60}")

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if isinstance(value, str):
            return value
        raise self.error(key, f"a word is expected, not {value!r:.60}")

    def mapping(self, key: str) -> dict[Any, Any]:
        """A mapping; empty if the key is absent."""
        value = self.get(key, {})
        if isinstance(value, dict):
            return value
        raise self.error(key, f"a mapping of keys is expected, not {value!r:.60}")

    def plain(self, sections: Sequence[str] | None = None) -> dict[str, Any]:
        """Everything as plain data, or only these sections resolved; unresolvable interpolations stay as text."""
        from omegaconf import OmegaConf

        def convert(node: Any) -> Any:
            if OmegaConf.is_dict(node):
                return {key: convert_item(node, key) for key in node}
            if OmegaConf.is_list(node):
                return [convert_item(node, index) for index in range(len(node))]
            return node

        def convert_item(node: Any, key: Any) -> Any:
            try:
                return convert(None if OmegaConf.is_missing(node, key) else node[key])
            except Exception:  # resolvers may raise anything; unread keys must not matter
                return str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]

        with _resolvers(), environment_of(self.launch):
            own = {key: convert_item(self._config, key) for key in sections or () if key in self._config}
            return dict(convert(self._config)) if sections is None else {**_raw(self._config), **own}

    def _select(self, key: str) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.select(self._config, key, throw_on_missing=False)


class OverrideError(InputError):
    """An override does not fit: its key is not in the config, or one to be added is."""


class ComposedConfig(Frozen):
    """A merged framework config, which also knows which keys can be edited in the file itself."""

    path: Path
    reader: ConfigReader
    overridden: frozenset[str] = field(default_factory=frozenset)
    launch: TrainerLaunch | None = None
    assumptions: tuple[str, ...] = ()
    script: LaunchedScript | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.reader.plain()

    def literal(self, key: str) -> bool:
        """Whether the key can be edited in the file: it is set there literally, or nowhere at all."""
        from trimtab.formats import write_back

        if self.launch is not None or self.on_command_line(key) or self.path.suffix == ".toml":
            return False
        key_standing = write_back.key_standing(yaml_text.read_text(self.path), key)
        if key_standing == "absent":
            return not self.reader.has(key)
        # A defaults file may add to a mapping, or be merged after this file: then an edit here has no effect.
        return key_standing == "literal" and self._own.get(key) == self.reader.get(key)

    def states(self, key: str, value: Any) -> bool:
        """Whether the file, without the command line, has this value already."""
        if self.on_command_line(key) and self.launch is None:
            return False
        found = self.reader.get(key)
        return found == value and isinstance(found, bool) == isinstance(value, bool)

    def on_command_line(self, key: str) -> bool:
        """Whether an override sets the key, its parent or its child."""
        return any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in self.overridden)

    @cached_property
    def _own(self) -> ConfigReader:
        return ConfigReader(read_alone(self.path), self.path)


def compose(path: Path, overrides: Sequence[str] = ()) -> ComposedConfig:
    """Read a framework config with its parents and `key=value` overrides."""
    own = read_alone(path)
    defaults = _raw(own).get("defaults")
    parsed = _parse_overrides(overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing search paths show up as missing configs
        if defaults is None or _names_files(defaults):
            config = _with_parents(path, own, ())
            _apply_overrides(config, parsed, path)
        else:
            config = _compose_with_hydra(path, _with_search_path(path, own, overrides))
    keys = frozenset(str(override.key_or_group) for override in parsed)
    return ComposedConfig(path=path, reader=ConfigReader(config, path), overridden=keys)


def compose_data(data: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> ComposedConfig:
    """A config that is no file, with overrides that may set any key; `path` names it in errors."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.create(dict(data))
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"this cannot be read as a config: {_first_line(error)}", where=str(path)) from None
    forced = [text if text.startswith("~") else f"++{text.lstrip('+')}" for text in overrides]
    parsed = _parse_overrides(forced)
    present = [o for o in parsed if not o.is_delete() or OmegaConf.select(config, str(o.key_or_group)) is not None]
    _apply_overrides(config, present, path)
    keys = frozenset(str(override.key_or_group) for override in parsed)
    return ComposedConfig(path=path, reader=ConfigReader(config, path), overridden=keys)


def read_alone(path: Path) -> Any:
    """A YAML or TOML file as OmegaConf reads it, without its parents."""
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = yaml_text.read_text(path)
    try:
        if path.suffix == ".toml":
            return OmegaConf.create(yaml_text.parse_config(text, str(path)))
        _check_aliases(text, path)
        config = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise InputError(
            f"this is not valid YAML: {error.problem or error.context or 'syntax error'}", where=place
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise InputError(f"this cannot be read as a config: {_first_line(error)}", where=str(path)) from None
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, AssertionError) as error:
        raise InputError(f"this is not valid YAML: {_first_line(error)}", where=str(path)) from None
    if not OmegaConf.is_dict(config):
        raise InputError("a mapping of keys is expected at the top of the file", where=str(path))
    return config


def _check_aliases(text: str, path: Path) -> None:
    """Refuse recursive and excessive aliases before anything expands them."""
    if "*" not in text or "&" not in text:
        return
    import yaml

    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any) -> int:
        if isinstance(node, yaml.ScalarNode) or node is None:
            return 1
        key = id(node)
        if key in open_nodes:
            raise InputError("a YAML alias contains itself", where=str(path))
        if key not in sizes:
            open_nodes.add(key)
            mapping = isinstance(node, yaml.MappingNode)
            children = [child for pair in node.value for child in pair] if mapping else node.value
            sizes[key] = 1 + sum(size(child) for child in children)
            open_nodes.discard(key)
        return sizes[key]

    if size(yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))) > MAX_EXPANDED_NODES:
        raise InputError("the YAML aliases of this file expand without bound", where=str(path))


def _raw(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(config, resolve=False)
    return {str(key): value for key, value in data.items()}


def _names_files(defaults: Any) -> bool:
    """Whether `defaults` names parent files by path (NeMo RL) rather than Hydra config groups."""
    entries = [defaults] if isinstance(defaults, str) else list(defaults) if hasattr(defaults, "__iter__") else []
    return bool(entries) and all(isinstance(e, str) and e.endswith((".yaml", ".yml")) for e in entries)


def _with_parents(path: Path, config: Any, children: tuple[Path, ...]) -> Any:
    """Merge parent files below their child, depth first; later parents win."""
    from omegaconf import OmegaConf

    defaults = _raw(config).get("defaults")
    if "defaults" in config:
        del config["defaults"]
    if defaults is None:
        return config
    if not _names_files(defaults):
        raise InputError("a parent file cannot have a Hydra defaults list of its own", where=f"{path}: defaults")
    here = path.resolve()
    if here in children or len(children) >= MAX_PARENTS:
        raise InputError("the parents named in `defaults` form a cycle", where=f"{path}: defaults")
    merged: Any = OmegaConf.create({})
    for name in [defaults] if isinstance(defaults, str) else list(defaults):
        parent = path.parent / str(name)
        if not parent.is_file():
            raise InputError(f"there is no parent file {parent}", where=f"{path}: defaults")
        merged = _merge(merged, _with_parents(parent, read_alone(parent), (*children, here)), path)
    return _merge(merged, config, path)


def _merge(base: Any, child: Any, path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for key, raw in _raw(child).items():
            if isinstance(raw, dict) and raw.get("_override_") is True:  # NeMo RL: replaces the parent's section
                child[key].pop("_override_")
                base.pop(key, None)
        return OmegaConf.merge(base, child)
    except (OmegaConfBaseException, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a parent in `defaults` does not fit: {_first_line(error)}", where=str(path)) from None


def _parse_overrides(overrides: Sequence[str]) -> list[Any]:
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError, ValueError) as error:
            raise InputError(
                f"this override cannot be understood: {text}", where="command line", hint=_first_line(error)
            ) from None
        if override.is_sweep_override():
            raise InputError(
                f"a plan is made for one value at a time, not for a sweep: {text}",
                where="command line",
                hint="quote a value that contains commas: key='a,b'",
            )
        parsed.append(override)
    return parsed


def _apply_overrides(config: Any, parsed: list[Any], path: Path) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import OmegaConf

    OmegaConf.set_struct(config, True)
    for override in parsed:
        try:
            ConfigLoaderImpl._apply_overrides_to_config(overrides=[override], cfg=config)
        except Exception as error:  # noqa: PERF203 - no common base class, and resolvers may raise anything
            key = str(override.key_or_group)
            near = nearest(key, _dotted_keys(config))
            raise OverrideError(
                f"this override does not fit the file: {override.input_line}",
                where=f"{path}: {key}",
                hint=f"did you mean {near}?" if near and near != key else _first_line(error),
            ) from None
    OmegaConf.set_struct(config, False)


def _with_search_path(path: Path, own: Any, overrides: Sequence[str]) -> list[str]:
    """The overrides, plus the file's `hydra.searchpath` with existing folders.

    Hydra looks for `pkg://verl.trainer.config` in installed packages and for `file://verl/trainer/config` in the
    working folder. Configs are also planned elsewhere, so a folder of that name is looked for above the file; and so is
    `a/b` of `${oc.env:NAME}/a/b` where the variable names no folder with it.
    """
    entries = (_raw(own).get("hydra") or {}).get("searchpath")
    given = any(override.lstrip("+~").startswith("hydra.searchpath=") for override in overrides)
    if not isinstance(entries, list) or given:
        return list(overrides)
    found = [_found_folder(str(entry), path) for entry in entries]
    if found == entries:
        return list(overrides)
    return [*overrides, f"hydra.searchpath=[{','.join(_quoted(entry) for entry in found)}]"]


def _found_folder(entry: str, path: Path) -> str:
    """A search path entry as an existing folder, or unchanged if there is none."""
    scheme, _, place = entry.rpartition("://")
    variable, _, rest = place.partition("}/")
    if variable.startswith("${oc.env:") and len(Path(rest).parts) > 1:
        place = place if Path(os.environ.get(variable[9:]) or "/", rest).is_dir() else rest
    if scheme not in ("pkg", "file", "") or "${" in place:
        return entry
    wanted = Path(*place.split(".")) if scheme == "pkg" else Path(place)
    if wanted.is_absolute() or not wanted.parts:
        return entry
    above = [Path.cwd(), *path.resolve().parents]
    if scheme == "pkg":
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(wanted.parts[0])  # of the top-level package: imports nothing
            above = [*(Path(at).parent for at in (spec and spec.submodule_search_locations) or ()), *above]
    # A checkout is named like its package: it may be verl/verl.
    for folder in (base / inner / wanted for inner in ("", wanted.parts[0]) for base in above):
        if folder.is_dir():
            return f"file://{folder}"
    return entry


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _compose_with_hydra(path: Path, overrides: Sequence[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import MissingConfigException
    from omegaconf import OmegaConf

    if path.suffix != ".yaml":
        raise InputError("Hydra reads defaults only in files that end in .yaml", where=f"{path}: defaults")
    full = path.resolve()
    try:
        with initialize_config_dir(config_dir=str(full.parent), version_base=None):
            config = hydra_compose(config_name=full.name, overrides=list(overrides))
    except MissingConfigException as error:
        missing = getattr(error, "missing_cfg_file", None)
        what = f"the config {missing} is not there" if missing else _first_line(error)
        raise InputError(
            f"a config that `defaults` names cannot be found: {what}",
            where=f"{path}: defaults",
            hint="say where it is: hydra.searchpath=[file:///FOLDER], or give the resolved .hydra/config.yaml of a run",
        ) from None
    except Exception as error:  # errors of Hydra, OmegaConf, YAML or Python
        kind = OverrideError if re.match(r"Could not (override|append)", _first_line(error)) else InputError
        raise kind(
            f"Hydra cannot compose this config: {_first_line(error)}",
            where=str(path),
            hint="set what it asks for, or give the resolved .hydra/config.yaml of a run",
        ) from None
    OmegaConf.set_struct(config, False)
    return config


def _dotted_keys(config: Any, prefix: str = "", depth: int = 0) -> list[str]:
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(config, resolve=False) if depth == 0 else config
    keys: list[str] = []
    for key, value in data.items() if isinstance(data, dict) else ():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict) and depth < 8:
            keys.extend(_dotted_keys(value, f"{prefix}{key}.", depth + 1))
    return keys


def as_number(value: Any) -> float | None:
    """A finite number, also as a string of YAML or a shell (`1e3`, `'8'`); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _first_line(error: BaseException) -> str:
    while not str(error).strip() and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
