"""Reads the `rollout:` section of a job file and the `elastic_config:` block beside it: engines, rules, scaling.

Both are checked before anything is started: an unknown key is refused with the nearest known one, a contradiction with
its line. Everything but the engines has a default. Other sections of a job file are ignored here. Without
`elastic_config` all engines serve at any load.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trimtab.core.errors import InputError, nearest
from trimtab.core.frozen import Frozen
from trimtab.formats import sections, yaml_text
from trimtab.formats.rollout import elastic_config as elastic_config_file
from trimtab.formats.rollout.schema import (
    MAX_ENGINES,
    AttachedEngine,
    GatewaySection,
    RolloutSection,
    ServedFile,
    StartedEngines,
)
from trimtab.formats.yaml_text import Source
from trimtab.machines.rollout.machine import STATIC
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import DEFAULT_CLASS, Ownership, RequestClass, RolloutRules

SECTION = "rollout"
ACTION_MARGIN_S = 30.0
DEFAULT_LIMIT = 64
MINIMAL = f"{SECTION}: {{engines: ['http://127.0.0.1:8000']}}"

# Steps of a training are no longer with it than with all engines, which `threshold` cannot say.
OWNED_POLICY = "predictive"
_BACK = "`policy: threshold` in elastic_config goes back to thresholds, `policy: static` keeps all engines"


class RolloutSettings(Frozen):
    """Everything that `trimtab engine serve` needs. `source` names file and line in later errors."""

    source: Source
    section: RolloutSection
    rules: RolloutRules
    elastic: ElasticConfig
    has_elastic_config: bool  # the file has an elastic_config block
    policy_by_default: bool = False  # it names no policy, and has engines that trimtab starts

    @property
    def path(self) -> Path:
        return Path(self.source.name)

    @property
    def engines(self) -> Sequence[AttachedEngine | StartedEngines]:
        return self.section.engines

    @property
    def gateway(self) -> GatewaySection:
        return self.section.gateway

    def beside(self, name: str | None) -> Path | None:
        """A path that the file names, relative to it."""
        return None if name is None else self.path.parent / name

    @property
    def count(self) -> int | None:
        """All engines; None: as many as fit on the nodes."""
        counts = [engine.workers for engine in self.engines]
        return None if None in counts else sum(count or 0 for count in counts)

    def remarks(self) -> list[str]:
        """Sentences on what was chosen for the user."""
        if not (self.has_elastic_config and self.policy_by_default):
            return []
        return [f"engines are scaled by the policy {self.elastic.policy}, the default for those started here; {_BACK}"]

    def warnings(self) -> list[str]:
        """Sentences on settings that are valid but probably not intended."""
        warnings = self.elastic.warnings() if self.has_elastic_config else []
        highest, lowest = self.rules.max_workers, self.rules.min_workers
        count = self.count
        if count is not None and count > highest:
            warnings.append(f"{count} engines, but max_workers is {highest}: {count - highest} of them never serve")
        if count == 0:
            warnings.append("no engine is named: nothing is served until one is added (POST /workers)")
        elif count is not None and count < lowest:
            warnings.append(f"{count} engines, but min_workers is {lowest}: it is never reached")
        for engine in self.engines:
            if self.has_elastic_config and engine.limit < self.rules.capacity:
                warnings.append(
                    f"{engine.label}: limit {engine.limit} is below requests_per_worker_capacity "
                    f"{self.rules.capacity}: scaling never sees it fully loaded"
                )
        return warnings

    def public_addresses(self) -> list[tuple[str, str]]:
        """(worker, host) of engines with a global or unspecified numeric IP address."""
        found = []
        for engine in self.engines:
            host = (urlsplit(engine.url).hostname or "") if isinstance(engine, AttachedEngine) else engine.host
            try:
                numeric = ipaddress.ip_address(host)
            except ValueError:
                continue  # a host name: not resolved here
            if numeric.is_global or numeric.is_unspecified:
                found.append((engine.label, host))
        return found


def read(path: Path, overrides: Sequence[str] = ()) -> RolloutSettings:
    """The settings in a job file, with `key=value` overrides. InputError names file, line and key."""
    text = yaml_text.read_text(path)
    data = yaml_text.parse(text, str(path))
    if overrides and isinstance(data, Mapping):
        text, data = "", yaml_text.overridden(data, overrides)
    return from_data(data, Source(str(path), text))


def from_text(text: str, path: Path) -> RolloutSettings:
    return from_data(yaml_text.parse(text, str(path)), Source(str(path), text))


def from_data(data: Any, source: Source) -> RolloutSettings:
    """The settings in the data of a job file."""
    if not isinstance(data, Mapping) or data.get(SECTION) is None:
        raise _no_section(data, source.name)
    section = sections.read(ServedFile, data, source).rollout
    elastic = elastic_config_file.from_data(data, source)
    chosen = isinstance(block := data.get(elastic_config_file.BLOCK), Mapping) and "policy" in block
    owned = any(isinstance(engine, StartedEngines) for engine in section.engines)
    if elastic is not None and owned and not chosen:
        elastic = replace(elastic, policy=OWNED_POLICY)
    if elastic is not None:
        with source.located(elastic_config_file.BLOCK):
            scaling.policy_of(elastic)
    with source.located(SECTION, "rules"):
        rules = _rules(section, elastic)
    return RolloutSettings(source, section, rules, elastic or STATIC, elastic is not None, owned and not chosen)


def _no_section(data: Any, name: str) -> InputError:
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        return InputError(f"a job file is a mapping of keys, this one holds {found}", where=name, hint=MINIMAL)
    near = nearest(SECTION, [str(key) for key in data if key != SECTION])
    meant = f"did you mean {SECTION} instead of {near}?" if near and SECTION not in data else f"add {MINIMAL}"
    return InputError(f"this file has no {SECTION} section", where=name, hint=meant)


def _rules(section: RolloutSection, elastic: ElasticConfig | None) -> RolloutRules:
    classes = {name: RequestClass(name, **stated) for name, stated in section.classes.items()}
    values: dict[str, Any] = {
        **section.rules,
        "version": section.version,
        "classes": tuple({DEFAULT_CLASS: RequestClass(), **classes}.values()),
        "ownership": Ownership(**section.ownership),
    }
    if elastic is None:
        values |= {
            "min_workers": 1,
            "max_workers": MAX_ENGINES,
            "capacity": min((engine.limit for engine in section.engines), default=DEFAULT_LIMIT),
        }
    # The machine's timeouts are longer than those of the launcher that starts and stops engines.
    for key in ("start_s", "stop_s"):
        if key not in section.rules:
            own = [getattr(item, key) + ACTION_MARGIN_S for item in section.engines if isinstance(item, StartedEngines)]
            values[key] = max([getattr(RolloutRules, key), *own])
    return RolloutRules(**values) if elastic is None else RolloutRules.of(elastic, **values)
