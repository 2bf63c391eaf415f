"""Reads a rollout scenario file: engines, a load, and the policies that set the number of engines.

In closed loop the load is a length profile and a number of steps; in open loop a request trace. Every policy runs on
the same load. `static` tries every number of engines, so that the best is known in hindsight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.formats.rollout.elastic_config import check_ranges
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState
from trimtab.machines.rollout.policies.predictive import cost_aware
from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.keys import check_keys, check_name, check_unique
from trimtab.replay.common.traces import RequestRow, requests
from trimtab.replay.pool.scenario import SEEDS, Amount, More, ScenarioSection, Sections, Whole, explained
from trimtab.replay.rollout.driver import SimulatedFleet
from trimtab.replay.rollout.engine_model import EngineSpeed
from trimtab.replay.rollout.policies import as_documented, ray_serve
from trimtab.replay.rollout.workload import LengthProfile, profile_of

KNOWN: dict[str, tuple[str | Callable[[PolicyState, LoadSample], tuple[PolicyState, Decision]], str]] = {
    "threshold": ("threshold", "between two shares of capacity, with as few changes as possible: the default"),
    "as_documented": (as_documented, "the common rule: thresholds, cooldowns, one worker per step"),
    "ray_serve": (ray_serve, "Ray Serve's rule: ongoing requests over a target, 30 s up, 600 s down"),
    "predictive": ("predictive", "learns the rhythm of steps; does not slow requests down"),
    "cost_aware": (cost_aware, "releases engines only if they are free for longer than the release takes"),
}
ELASTIC_KEYS = tuple(item.name for item in fields(ElasticConfig) if item.name not in ("policy", "max_workers"))
POLICIES = ("static", *KNOWN)
STATICS = 16  # at most so many static numbers of engines are tried; with as many engines or fewer, every number


@dataclass(frozen=True)
class RolloutPolicy:
    """A policy of a scenario, or a static number of engines."""

    name: str
    use: str
    elastic: ElasticConfig

    def text(self) -> str:
        return f"{self.elastic.max_workers} engines at all times" if self.use == "static" else KNOWN[self.use][1]


@dataclass(frozen=True)
class RolloutScenario:
    """A rollout scenario."""

    name: str
    fleet: SimulatedFleet
    policies: tuple[RolloutPolicy, ...]
    seeds: tuple[int, ...]
    profile: LengthProfile | None = None
    steps: int = 0
    prompts: int = 0
    samples: int = 0
    trace: Path | None = None
    limit: int | None = None
    rate: float = 1.0
    part: tuple[float, float] = (0.0, 1.0)  # share of the trace's time that counts

    @property
    def counted_s(self) -> tuple[float, float]:
        """Start and end of the counted time of a trace. The time before is run as well."""
        whole_s = self.rows[-1].arrival_s / self.rate
        return self.part[0] * whole_s, self.part[1] * whole_s

    @cached_property
    def rows(self) -> list[RequestRow]:
        return [] if self.trace is None else requests(self.trace, self.limit)

    def assumptions(self) -> list[str]:
        """The assumptions of a scenario, for a report."""
        if self.profile is not None:
            load = f"{self.steps} steps of {self.prompts} prompts x {self.samples} samples; {self.profile.text()}"
        else:
            load = (
                f"{len(self.rows):,} requests of {self.trace.name if self.trace else ''}, {self.rate:g} times as fast"
            )
            if self.part != (0.0, 1.0):
                load += f"; only {self.part[0]:.0%} to {self.part[1]:.0%} of its time is counted"
        return [self.fleet.text(), load, "a woken engine has an empty cache and needs the weights first"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2 or not value[0] < value[1]:
        raise ValueError("two shares of the trace's time, the lower first")
    return tuple(value)


Share = Annotated[float, Field(ge=0, le=1)]


class EnginesSection(ScenarioSection):
    """The `engines` section."""

    count: Whole = 8
    limit: Whole = 256
    sleep_s: Amount = 2.0
    wake_s: Amount = 4.0
    refit_s: Amount = 2.0
    training_s: Amount = 60.0
    training_p99_s: Amount | None = None
    decode_s: More | None = None
    request_s: Amount | None = None
    cached_s: Amount | None = None
    read_s: More | None = None


class RolloutLoadSection(ScenarioSection):
    """The `rollout` section."""

    profile: str | dict[str, Any] | None = None
    steps: Whole = 8
    prompts: Whole = 128
    samples: Whole = 8
    trace: str | None = None
    limit: Whole | None = None
    rate: More = 1.0
    part: Annotated[tuple[Share, Share], BeforeValidator(_pair)] = (0.0, 1.0)


class RolloutPolicySection(ScenarioSection):
    """An entry of `policies`."""

    use: str
    name: str | None = None
    elastic: dict[str, Any] = Field(default_factory=dict)


def _all_policies() -> list[str | RolloutPolicySection]:
    return list(POLICIES)


class RolloutScenarioFile(ScenarioSection):
    """The scenario file."""

    name: str | None = None
    engines: EnginesSection = Field(default_factory=EnginesSection)
    rollout: RolloutLoadSection
    elastic: dict[str, Any] = Field(default_factory=dict)  # for every policy
    policies: Annotated[list[str | RolloutPolicySection], BeforeValidator(_as_list), Field(min_length=1)] = Field(
        default_factory=_all_policies
    )
    seeds: Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)] = Field(
        default_factory=lambda: list(SEEDS)
    )


SECTIONS: Sections = {"engines": EnginesSection, "rollout": RolloutLoadSection, "policies": RolloutPolicySection}


def read(path: Path) -> RolloutScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    try:
        scenario = RolloutScenarioFile.model_validate(yaml_text.read_mapping(path))
    except ValidationError as error:
        raise explained(error, path, RolloutScenarioFile, SECTIONS) from None
    load = scenario.rollout
    where = f"{path}: rollout"
    if (load.profile is None) == (load.trace is None):
        raise InputError("requests need exactly one source", where=where, hint="`profile` or `trace`")
    policies = [policy for entry in scenario.policies for policy in _policies(entry, scenario, path)]
    check_unique([policy.name for policy in policies], f"{path}: policies")
    return RolloutScenario(
        scenario.name or path.stem,
        _fleet(scenario.engines, f"{path}: engines"),
        tuple(policies),
        tuple(dict.fromkeys(scenario.seeds)),
        None if load.profile is None else profile_of(load.profile, f"{where}.profile"),
        load.steps,
        load.prompts,
        load.samples,
        None if load.trace is None else path.parent / load.trace,
        load.limit,
        load.rate,
        load.part,
    )


def _fleet(section: EnginesSection, where: str) -> SimulatedFleet:
    given = {name: getattr(section, name) for name in ("decode_s", "request_s", "cached_s", "read_s")}
    speed = EngineSpeed(**{name: value for name, value in given.items() if value is not None})
    times = {name: getattr(section, name) for name in ("sleep_s", "wake_s", "refit_s", "training_s", "training_p99_s")}
    fleet = SimulatedFleet(section.count, section.limit, speed, **times)
    try:
        fleet.training()
    except InputError as error:
        error.where = f"{where}.training_p99_s"
        raise
    return fleet


def _policies(entry: str | RolloutPolicySection, file: RolloutScenarioFile, path: Path) -> list[RolloutPolicy]:
    section = RolloutPolicySection(use=entry) if isinstance(entry, str) else entry
    where = f"{path}: policies.{section.name or section.use}"
    check_name(section.use, POLICIES, where, "unknown policy {}")
    settings = {**file.elastic, **section.elastic}
    check_keys(settings, ELASTIC_KEYS, where)
    check_ranges(settings, where)
    count = file.engines.count
    if section.use == "static":
        numbers = sorted({max(1, round(count * at / STATICS)) for at in range(1, STATICS + 1)})
        fixed = [ElasticConfig(policy=scaling.static, min_workers=each, max_workers=each) for each in numbers]
        return [RolloutPolicy(f"static {config.max_workers}", "static", config) for config in fixed]
    elastic = ElasticConfig(**{**settings, "policy": KNOWN[section.use][0], "max_workers": count})
    return [RolloutPolicy(section.name or section.use, section.use, elastic)]
