"""Reads a rollout scenario file: engines, a load, and the policies that set the number of engines.

In closed loop the load is a length profile and a number of steps; in open loop a request trace. Every policy runs on
the same load. `static` tries every number of engines, so that the best is known in hindsight.

Policies to compare with: `as_documented` is the common rule with thresholds, cooldowns and one worker per step,
`ray_serve` the rule of Ray Serve: ongoing requests over a target, averaged over a window, with delays up and down. Both
have the interface of `trimtab.machines.rollout.policies.policy`, and keep plain data as memory.

The clairvoyant bound: for steps, the engine-seconds in which a static fleet of the best pace had any work, which is
what a policy needs that knows the future and sleeps and wakes at no cost. For a trace, the fewest engines that serve
the load in every second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.formats import sections
from trimtab.formats.sections import Amount, Count, FieldsOf, OneOrMore, Positive, Section, Share, checked_by
from trimtab.formats.yaml_text import read_source
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState
from trimtab.machines.rollout.policies.stream import on
from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.comparison import (
    BY_USE,
    SEEDS,
    Comparison,
    PolicySummary,
    Recommendation,
    ScenarioKind,
    Seeds,
    Spread,
    SweepRules,
    by_policy,
    check_unique,
    percentile,
    spread,
    spreads,
)
from trimtab.replay.common.traces import RequestRow, requests
from trimtab.replay.rollout.driver import (
    EngineSpeed,
    Profile,
    RolloutOutcome,
    RolloutReplay,
    SimulatedFleet,
    least_engine_s,
)

SERVE_LOOK_BACK_S, SERVE_UP_S, SERVE_DOWN_S = 30.0, 30.0, 600.0  # Ray Serve's defaults


def as_documented(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """One worker more or less after the running requests were beyond a threshold for the stable period."""
    config, now = state.config, sample.now
    kept = _memory(state, up=None, down=None, high=None, low=None)
    ratio = sample.running / max(sample.active * sample.capacity, 1)
    for side, beyond in (("high", ratio > config.scale_up_threshold), ("low", ratio < config.scale_down_threshold)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    long = {side: kept[side] is not None and now - kept[side] >= config.min_stable_period for side in ("high", "low")}
    workers = sample.serving
    if long["high"] and workers < sample.max_workers and _cooled_down(kept["up"], config.scale_up_cooldown, now):
        workers, kept["up"] = workers + 1, now
    elif long["low"] and workers > sample.min_workers and _cooled_down(kept["down"], config.scale_down_cooldown, now):
        workers, kept["down"] = workers - 1, now
    return _decided(state, sample, kept, workers, f"running load {ratio:.2f}")


def ray_serve(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """Mean ongoing requests of 30 s over the target (fit_share of capacity), after 30 s up and 600 s down."""
    now = sample.now
    kept = _memory(state, seen=[], over=None, under=None)
    seen = [entry for entry in kept["seen"] if entry[0] > now - SERVE_LOOK_BACK_S]
    kept["seen"] = [*seen, [now, sample.load]]
    mean = sum(load for _, load in kept["seen"]) / len(kept["seen"])
    wanted = sample.within(math.ceil(mean / (sample.capacity * state.config.fit_share) - 1e-9))
    serving = sample.serving
    for side, beyond in (("over", wanted > serving), ("under", wanted < serving)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    workers = serving
    if (kept["over"] is not None and now - kept["over"] >= SERVE_UP_S) or (
        kept["under"] is not None and now - kept["under"] >= SERVE_DOWN_S
    ):
        workers, kept["over"], kept["under"] = wanted, None, None
    return _decided(state, sample, kept, workers, f"{mean:.0f} ongoing requests, {counted(wanted, 'worker')} wanted")


def _memory(state: PolicyState, **first: Any) -> dict[str, Any]:
    return {**first, **(state.memory.kept or {})}


def _cooled_down(last: float | None, cooldown_s: float, now: float) -> bool:
    return last is None or now - last >= cooldown_s


def _decided(
    state: PolicyState, sample: LoadSample, kept: dict[str, Any], workers: int, sentence: str
) -> tuple[PolicyState, Decision]:
    workers = sample.within(workers)
    code = (
        ReasonCode.load_fits
        if workers == sample.serving
        else ReasonCode.load_high
        if workers > sample.serving
        else ReasonCode.load_low
    )
    after = replace(state, memory=replace(state.memory, kept=kept))
    return after, Decision(workers, Reason(code, sentence), f"{counted(workers, 'worker')} serve")


KNOWN: dict[str, tuple[str | Callable[[PolicyState, LoadSample], tuple[PolicyState, Decision]], str]] = {
    "threshold": ("threshold", "between two shares of capacity, with as few changes as possible: the default"),
    "as_documented": (as_documented, "the common rule: thresholds, cooldowns, one worker per step"),
    "ray_serve": (ray_serve, "Ray Serve's rule: ongoing requests over a target, 30 s up, 600 s down"),
    "predictive": ("predictive", "learns the rhythm of steps; does not slow requests down"),
}
ELASTIC_KEYS = tuple(item.name for item in fields(ElasticConfig) if item.name not in ("policy", "max_workers"))
POLICIES = ("static", *KNOWN)
KINDS = {item.name: str(item.type) for item in fields(ElasticConfig) if item.type in ("int", "float", "bool")}
WINDOWS = 8  # of a trace: the first is warm-up, three choose, four evaluate
STATICS = 16  # at most so many static numbers of engines are tried; with as many engines or fewer, every number


class RolloutPolicy(Frozen):
    """A policy of a scenario, or a static number of engines."""

    name: str
    use: str
    elastic: ElasticConfig

    def text(self) -> str:
        return f"{self.elastic.max_workers} engines at all times" if self.use == "static" else KNOWN[self.use][1]


class RolloutScenario(Frozen):
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


class RolloutFigures(Frozen):
    """Figures of a run."""

    policy: str
    seed: int
    step_s: float  # mean, from the first prompt to the last answer; for a trace: its whole length
    worst_step_s: float
    engine_s: float  # awake engine-seconds; per step including training, or of the whole trace
    usable_s: float  # engine-seconds that other tasks could use
    wait_p99_s: float  # from arrival to the first engine
    busy_s: float  # of the engine-seconds: with at least one request
    least_engine_s: float  # lower bound for any policy
    moved: float
    scalings: int
    events: int
    checks: int
    answered: int
    loads: tuple[int, ...] = ()  # for a trace, by counted second: unanswered requests
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "loads"}


SAME_PACE = 1.02  # steps within this ratio count as equally fast
NO_WAIT_S = 1.0  # queue waits below this count as none
FIGURES = (
    *("step_s", "worst_step_s", "engine_s", "usable_s", "wait_p99_s", "busy_s", "least_engine_s", "moved", "scalings"),
)


def run_rollout(
    scenario: RolloutScenario, policy: RolloutPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> RolloutFigures:
    replay = RolloutReplay(policy.elastic, scenario.fleet)
    if scenario.profile is not None:
        profile = scenario.profile
        batches = profile.lengths(scenario.steps, scenario.prompts, scenario.samples, seed)
        outcome = replay.closed(profile, batches, seed)
        answers = [(profile.prompt_tokens, tokens) for batch in batches for tokens in batch.values()]
        prompts = scenario.steps * scenario.prompts * profile.prompt_tokens
        return _figures(scenario, policy, seed, outcome, answers, prompts)
    begin_s, end_s = scenario.counted_s
    rows = [row for row in scenario.rows if row.arrival_s / scenario.rate <= end_s]
    outcome = replay.open(rows, scenario.rate, begin_s)
    outcome.steps_s = [outcome.total_s]
    answers = [
        (row.input_tokens, max(row.output_tokens, 1)) for row in rows if row.arrival_s / scenario.rate >= begin_s
    ]
    found = _figures(scenario, policy, seed, outcome, answers, 0)
    return replace(found, loads=_by_second(outcome.loads, begin_s, begin_s + outcome.total_s))


def _by_second(loads: dict[int, int], begin_s: float, end_s: float) -> tuple[int, ...]:
    """Load by second; seconds without arrivals keep the last value."""
    last, found = 0, []
    for at in range(int(end_s)):
        last = loads.get(at, last)
        found.append(last)
    return tuple(found[int(begin_s) :])


def _figures(
    scenario: RolloutScenario,
    policy: RolloutPolicy,
    seed: int,
    outcome: RolloutOutcome,
    answers: list[tuple[int, int]],
    prompts: int,
) -> RolloutFigures:
    fleet, steps = scenario.fleet, len(outcome.steps_s)
    engines = min(policy.elastic.max_workers, fleet.engines)
    waits = sorted(outcome.waits_s)
    return RolloutFigures(
        policy.name,
        seed,
        fmean(outcome.steps_s),
        max(outcome.steps_s),
        (engines * outcome.total_s - outcome.asleep_s) / steps,
        # Engines that a smaller static fleet does not have are usable all the time.
        (outcome.usable_s + (fleet.engines - engines) * outcome.total_s) / steps,
        percentile(waits, 0.99) if waits else math.nan,
        outcome.busy_s / steps,
        least_engine_s(fleet.speed, fleet.limit, answers, prompts) / steps,
        outcome.moved / steps,
        outcome.scalings,
        outcome.events,
        outcome.checks,
        outcome.answered,
    )


def clairvoyant_engine_s(static: Sequence[tuple[int, RolloutFigures]], limit: int) -> float | None:
    """Engine-seconds of a policy that knows the trace and sleeps and wakes engines at no cost.

    In every second it has the fewest engines that hold the load, as full as possible. The load is that of the smallest
    static fleet without long waits; fewer engines are slower each, so the load grows. Never below the lower bound. A
    strong heuristic, not a proven optimum. None: requests wait with every static fleet.
    """
    known = [(engines, run) for engines, run in static if run.loads and run.wait_p99_s <= NO_WAIT_S]
    if not known:
        return None
    engines, run = min(known, key=lambda pair: pair[0])
    total, most = 0, max(number for number, _ in static)
    for load in run.loads:
        fewest = 1
        while fewest < most and on(limit, load, engines, fewest) > fewest * limit:
            fewest += 1
        total += fewest
    return max(float(total), run.least_engine_s)


# ---- comparison ---------------------------------------------------------------------------------------------------


def compare_rollouts(
    scenario: RolloutScenario, runs: Sequence[RolloutFigures], advice: Recommendation | None = None
) -> Comparison[RolloutScenario, RolloutFigures]:
    """Facts of a policy, in engine-seconds: `against_static`, relative to the cheapest static fleet as fast (None:
    none is); `regret`, relative to the clairvoyant bound, minus 1.
    """
    known = by_policy(runs)
    found = {policy.name: spreads(known[policy.name], FIGURES) for policy in scenario.policies}
    static = [found[policy.name] for policy in scenario.policies if policy.use == "static"]
    bound = clairvoyant_s(scenario, runs)
    rows = []
    for name, figures in found.items():
        rivals = [fleet["engine_s"][0] for fleet in static if _as_fast(scenario, fleet, figures)]
        engine_s = figures["engine_s"][0]
        facts = {
            "against_static": engine_s / min(rivals) if rivals else None,
            "regret": None if bound is None else engine_s / bound - 1,
        }
        rows.append(PolicySummary(name, figures, facts))
    return Comparison(scenario, runs, rows, {"clairvoyant_engine_s": bound}, advice)


def _as_fast(scenario: RolloutScenario, figures: Mapping[str, Spread], other: Mapping[str, Spread]) -> bool:
    """Whether steps, or waits for an engine, are no longer than those of `other`."""
    if scenario.trace is None:
        return figures["step_s"][0] <= SAME_PACE * other["step_s"][0]
    return figures["wait_p99_s"][0] <= max(other["wait_p99_s"][0], NO_WAIT_S)


def clairvoyant_s(scenario: RolloutScenario, runs: Sequence[RolloutFigures]) -> float | None:
    """The clairvoyant bound in engine-seconds; None without a static policy."""
    numbers = {policy.name: policy.elastic.max_workers for policy in scenario.policies if policy.use == "static"}
    if not numbers:
        return None
    if scenario.trace is not None:
        first = [(numbers[run.policy], run) for run in runs if run.policy in numbers and run.seed == scenario.seeds[0]]
        return clairvoyant_engine_s(first, scenario.fleet.limit)
    known = {name: [run for run in runs if run.policy == name] for name in numbers}
    pace_s = min(spread(run.step_s for run in fleet_runs)[0] for fleet_runs in known.values())
    return min(
        spread(run.busy_s for run in fleet_runs)[0]
        for fleet_runs in known.values()
        if spread(run.step_s for run in fleet_runs)[0] <= SAME_PACE * pace_s
    )


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def _base(scenario: RolloutScenario) -> RolloutPolicy:
    base = next((policy for policy in scenario.policies if policy.use != "static"), None)
    if base is None:
        raise InputError("only static policies are given", where="command line: --sweep", hint="another --policy")
    return base


def _with_setting(base: RolloutPolicy, key: str, value: float, where: str) -> RolloutPolicy | None:
    if key == "max_workers":
        raise InputError("max_workers cannot be swept", where=where, hint="known: " + ", ".join(KINDS))
    check_known([key], KINDS, where, "{} cannot be swept")
    if value == getattr(base.elastic, key):
        return None
    if KINDS[key] != "float" and value != int(value):
        raise InputError(f"{value:g} is not a whole number")
    changed: dict[str, Any] = {key: {"float": float, "int": int, "bool": bool}[KINDS[key]](value)}
    return replace(base, name=f"{base.name}, {key} {value:g}", elastic=replace(base.elastic, **changed))


def _windows(scenario: RolloutScenario) -> tuple[list[RolloutScenario], list[RolloutScenario]] | None:
    """Parts of a trace in the place of seeds."""
    if not scenario.trace:
        return None
    parts = [replace(scenario, seeds=(at,), part=(at / WINDOWS, (at + 1) / WINDOWS)) for at in range(WINDOWS)]
    return parts[1 : WINDOWS // 2], parts[WINDOWS // 2 :]


def _rejection(name: str, runs: Sequence[RolloutFigures], base: Sequence[RolloutFigures]) -> str:
    """Steps, within SAME_PACE, and waits must be as short."""
    step, base_step = (spread(run.step_s for run in side)[0] for side in (runs, base))
    wait, base_wait = (spread(run.wait_p99_s for run in side)[0] for side in (runs, base))
    is_as_fast = step <= SAME_PACE * base_step and wait <= max(base_wait, NO_WAIT_S)
    return "" if is_as_fast else f"{name} slows down"


SWEEP: SweepRules[RolloutFigures] = SweepRules(
    _base, _with_setting, lambda run: run.engine_s, "the number of engine-seconds", _rejection, True, _windows
)
ROLLOUTS = ScenarioKind(read, run_rollout, SWEEP, compare_rollouts)
