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

from pydantic import Field

from trimtab.core.errors import InputError, check_known
from trimtab.formats import sections
from trimtab.formats.sections import (
    Amount,
    Count,
    FieldsOf,
    OneOrMore,
    Positive,
    Section,
    Share,
    checked_by,
)
from trimtab.formats.yaml_text import read_source
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState
from trimtab.machines.rollout.policies.predictive import cost_aware
from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.comparison import check_unique
from trimtab.replay.common.traces import RequestRow, requests
from trimtab.replay.pool.scenario import BY_USE, SEEDS, Seeds
from trimtab.replay.rollout.driver import SimulatedFleet
from trimtab.replay.rollout.engine_model import EngineSpeed
from trimtab.replay.rollout.policies import as_documented, ray_serve
from trimtab.replay.rollout.workload import Profile

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
    profile: Profile | None = None
    steps: Count = 8
    prompts: Count = 128
    samples: Count = 8
    trace: Path | None = None
    limit: Count | None = None
    rate: Positive = 1.0
    part: Part = (0.0, 1.0)  # share of the trace's time that counts

    def __post_init__(self) -> None:
        if (self.profile is None) == (self.trace is None):
            raise InputError("requests need exactly one source", hint="`profile` or `trace`")

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


def _part(shares: tuple[float, float]) -> None:
    if shares[0] >= shares[1]:
        raise InputError("two shares of the trace's time, the lower first")


class EnginesSection(Section):
    """The `engines` section."""

    count: Count = 8
    limit: Count = 256
    sleep_s: Amount = 2.0
    wake_s: Amount = 4.0
    refit_s: Amount = 2.0
    training_s: Amount = 60.0
    training_p99_s: Amount | None = None
    decode_s: Positive | None = None
    request_s: Amount | None = None
    cached_s: Amount | None = None
    read_s: Positive | None = None


Part = Annotated[tuple[Share, Share], checked_by(_part)]
Load = FieldsOf(RolloutScenario, only=("profile", "steps", "prompts", "samples", "trace", "limit", "rate", "part"))
Elastic = Annotated[dict[str, Any], FieldsOf(ElasticConfig, only=ELASTIC_KEYS)]


class RolloutPolicySection(Section):
    """An entry of `policies`."""

    use: Annotated[str, checked_by(lambda use: check_known([use], POLICIES, "", "unknown policy {}"))]
    name: str | None = None
    elastic: Elastic = Field(default_factory=dict)


class RolloutScenarioFile(Section):
    """The scenario file."""

    name: str | None = None
    engines: EnginesSection = Field(default_factory=EnginesSection)
    rollout: Annotated[dict[str, Any], Load]
    elastic: Elastic = Field(default_factory=dict)  # for every policy
    policies: Annotated[tuple[Annotated[RolloutPolicySection, BY_USE], ...], Field(min_length=1), OneOrMore] = tuple(
        RolloutPolicySection(use=use) for use in POLICIES
    )
    seeds: Seeds = SEEDS


def read(path: Path) -> RolloutScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    source, data = read_source(path)
    scenario = sections.read(RolloutScenarioFile, data, source)
    with source.located("policies"):
        policies = [policy for entry in scenario.policies for policy in _policies(entry, scenario)]
        check_unique(policies)
    with source.located("engines", "training_p99_s"):
        fleet = _fleet(scenario.engines)
    load, seeds = scenario.rollout, scenario.seeds
    if load.get("trace") is not None:
        load["trace"] = path.parent / load["trace"]
    with source.located("rollout"):
        return RolloutScenario(scenario.name or path.stem, fleet, tuple(policies), seeds, **load)


def _fleet(section: EnginesSection) -> SimulatedFleet:
    stated = section.model_dump(exclude_none=True)
    speed = EngineSpeed(**{key: stated.pop(key) for key in EngineSpeed.__dataclass_fields__ if key in stated})
    fleet = SimulatedFleet(stated.pop("count"), speed=speed, **stated)
    fleet.training()  # refuses a percentile below the median
    return fleet


def _policies(section: RolloutPolicySection, file: RolloutScenarioFile) -> list[RolloutPolicy]:
    settings, count = {**file.elastic, **section.elastic}, file.engines.count
    if section.use == "static":
        numbers = sorted({max(1, round(count * at / STATICS)) for at in range(1, STATICS + 1)})
        fixed = [ElasticConfig(policy=scaling.static, min_workers=each, max_workers=each) for each in numbers]
        return [RolloutPolicy(f"static {config.max_workers}", "static", config) for config in fixed]
    elastic = ElasticConfig(**{**settings, "policy": KNOWN[section.use][0], "max_workers": count})
    return [RolloutPolicy(section.name or section.use, section.use, elastic)]
