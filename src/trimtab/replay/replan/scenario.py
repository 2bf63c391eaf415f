"""Reads a replan scenario file: an RL job, its cluster and node events, cost drift, migration times, policies.

    job: grpo.yaml            # a job file in any dialect, the same inline: {workflow: ...}, or the folder of a run
    cluster: {nodes: 8, gpus: 8, events: [{at_iteration: 20, node: 8, what: joined}], churn: {days_between: 20}}
    iterations: 80
    drift: {rollout: {to: 3.0, over: 60}}
    noise: {trace: minibatches.csv.gz}
    policies: [trimtab, kept, static, oracle]

The file is validated before anything runs. `iterations`, `save_every` and `loop` default to those of the job file's
`run` section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from trimtab.core.errors import InputError
from trimtab.formats import job as job_form
from trimtab.formats import yaml_text
from trimtab.formats.load import load
from trimtab.formats.run_section import LOOP_KEYS, RunSection, read_rules, read_section
from trimtab.model.plan import FrameworkRules
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Node, PlacementJob
from trimtab.replay.common.churn import Churn
from trimtab.replay.common.comparison import Comparison, PolicySummary, Spread, by_policy, spread, spreads
from trimtab.replay.common.keys import check_keys, check_name, check_unique
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.common.timing import Distribution
from trimtab.replay.pool.scenario import (
    SEEDS,
    Amount,
    ChurnSection,
    More,
    ScenarioSection,
    Sections,
    Whole,
    churn_of,
    explained,
)
from trimtab.replay.replan.noise import DrawnNoise, Noise, SyntheticNoise, TraceNoise, minibatches
from trimtab.replay.replan.past_run import JOB, PastRunReality, read_past_run
from trimtab.replay.replan.reality import (
    Drift,
    DriftShape,
    MigrationTimes,
    PeriodicWork,
    PlanCache,
    ReplanReality,
    ScheduledNodeEvent,
    TrueCosts,
)
from trimtab.replay.replan.runner import USES, ReplanFigures, figures, run_policy

POLICIES = ("trimtab", "kept", "static", "oracle")
# engines are not simulated
RULE_KEYS = tuple(key for key in LOOP_KEYS if key not in ("mode", "elastic", "range_slack"))
MOST_ITERATIONS = 100_000
NAMED = 8  # events listed in a report
WHEN = "one of at_s, at_iteration"
FIGURES = (
    *("total_s", "iteration_s", "moves", "rolled_back", "forced", "moving_s", "void_s", "waiting_s", "void"),
    "decisions",
)
FAR = 20.0  # churn is drawn for so many times the length of the run with its first plan


# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplanPolicy:
    """A policy of a scenario."""

    name: str
    use: str
    rules: ReplanRules = field(default_factory=lambda: ReplanRules(mode=ReplanMode.auto))
    changed: tuple[str, ...] = ()  # rules that are set

    def text(self) -> str:
        changes = ", ".join(f"{key} {getattr(self.rules, key):g}" for key in self.changed)
        return USES[self.use] + (f"; {changes}" if changes else "")


@dataclass(frozen=True)
class ReplanScenario:
    """A replan scenario."""

    name: str
    job: PlacementJob
    iterations: int
    policies: tuple[ReplanPolicy, ...]
    seeds: tuple[int, ...]
    allowed: FrameworkRules | None = None
    drift: Mapping[str, Drift] = field(default_factory=dict)
    noise: Noise = field(default_factory=SyntheticNoise)
    moves: MigrationTimes = field(default_factory=MigrationTimes)
    events: tuple[ScheduledNodeEvent, ...] = ()
    churn: Churn | None = None
    save_every: int = 10
    periodic: PeriodicWork | None = None

    @cached_property
    def plans(self) -> PlanCache:
        return PlanCache(self.job, self.allowed)

    def truth(self, seed: int) -> TrueCosts:
        """The job with everything that will happen to it under a seed."""
        reality = ReplanReality(
            self.job,
            self.iterations,
            self.drift,
            self.noise,
            self.moves,
            self.events,
            self.save_every,
            self.periodic,
            self.allowed,
            seed,
        )
        if self.churn is None:
            return TrueCosts(reality, self.plans)
        plan = self.plans.best(self.job.cluster, {}).plan
        numbers = range(1, self.iterations + 1)
        until_s = FAR * sum(self.plans.planner.seconds(plan, reality.levels(number)) for number in numbers)
        by_name = {node.name: node for node in self.job.cluster.nodes}
        by_chance = self.churn.events(list(by_name), until_s, seed)
        happens = [
            ScheduledNodeEvent(by_name[event.node], event.what, event.at_s, None, event.notice_s) for event in by_chance
        ]
        return TrueCosts(replace(reality, happens=(*self.events, *happens)), self.plans)

    def assumptions(self) -> list[str]:
        """The assumptions of a scenario, for a report."""
        nodes = self.job.cluster.nodes
        names = ", ".join(self.job.workflow.names)
        size = f"{len(nodes)} nodes, {self.job.cluster.gpus} GPUs"
        more = ["; ".join(event.text() for event in self.events[:NAMED])] if self.events else []
        more += [f"and {len(self.events) - NAMED} more events"] if len(self.events) > NAMED else []
        lines = [
            f"{self.iterations} iterations of {names} on {size}",
            *(f"{name} drifts {drift.text()}" for name, drift in self.drift.items() if len(drift.points) <= NAMED),
            self.noise.text(),
            *([self.periodic.text()] if self.periodic else []),
            *more,
            *([self.churn.text()] if self.churn else []),
            "an iteration takes what the planner's model predicts for the true costs under the current plan",
            *self.moves.text(),
        ]
        staleness = self.job.workflow.staleness
        if staleness:
            lines.append(
                f"iterations started ahead, up to {staleness}, end before a migration; the first after it is cold"
            )
        kept = f"every {self.save_every} iterations" if self.save_every else "after every iteration"
        lines.append(f"a loss voids the work since the last checkpoint; checkpoints are saved {kept}, at no cost")
        return lines


def run_replan(
    scenario: ReplanScenario, policy: ReplanPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> ReplanFigures:
    return figures(run_policy(policy.use, scenario.truth(seed), policy.rules, progress), policy.name, seed)


def compare_replans(
    scenario: ReplanScenario, runs: Sequence[ReplanFigures], advice: Recommendation | None = None
) -> Comparison[ReplanScenario, ReplanFigures]:
    """Facts of a policy: how many runs did all iterations; `regret` and `against_kept`, its total relative to that of
    the free oracle and of the kept plan under the same seed, minus 1 (None: it did not run).
    """
    oracle, kept = (_totals(scenario, runs, use) for use in ("oracle", "kept"))
    known = by_policy(runs)
    rows = [
        PolicySummary(
            policy.name,
            spreads(known[policy.name], FIGURES),
            {
                "finished": sum(run.finished for run in known[policy.name]),
                "regret": _beside(known[policy.name], oracle),
                "against_kept": _beside(known[policy.name], kept),
            },
        )
        for policy in scenario.policies
    ]
    return Comparison(scenario, runs, rows, advice=advice)


def _totals(scenario: ReplanScenario, runs: Sequence[ReplanFigures], use: str) -> dict[int, float]:
    name = next((policy.name for policy in scenario.policies if policy.use == use), None)
    return {run.seed: run.total_s for run in runs if run.policy == name and run.finished}


def _beside(known: Sequence[ReplanFigures], other: dict[int, float]) -> Spread | None:
    shares = [run.total_s / other[run.seed] - 1 for run in known if run.finished and other.get(run.seed)]
    return spread(shares) if shares else None


# ---- file ---------------------------------------------------------------------------------------------------------


Index = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]


class ReplanEventSection(ScenarioSection):
    """A change of a node's state."""

    at_s: Amount | None = None
    at_iteration: Whole | None = None
    node: Index
    what: Literal["lost", "joined", "draining"]
    notice_s: Amount = 120.0


class ReplanClusterSection(ScenarioSection):
    """The `cluster` section: missing keys are the job's."""

    nodes: Whole | None = None
    gpus: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = None
    events: list[ReplanEventSection] = Field(default_factory=list)
    churn: ChurnSection | None = None


class DriftSection(ScenarioSection):
    """Cost drift of a component."""

    to: More = 1.0
    over: Whole = 1
    after: Index = 0
    shape: DriftShape = "steady"
    points: dict[Whole, More] = Field(default_factory=dict)


class NoiseSection(ScenarioSection):
    """The `noise` section: a trace, a distribution, or synthetic."""

    trace: str | list[str] | None = None
    factor: Any = None
    spread: Annotated[float, Field(ge=0, le=1)] | None = None
    alike: Annotated[float, Field(ge=0, lt=1)] | None = None
    tail: Annotated[float, Field(ge=0, le=1)] | None = None


class PeriodicSection(ScenarioSection):
    """The `periodic` section."""

    every: Whole
    component: str
    adds: Amount
    announced: bool = False


class ReplanPolicySection(ScenarioSection):
    """An entry of `policies`."""

    use: str
    name: str | None = None
    loop: dict[str, Any] = Field(default_factory=dict)


def _all_policies() -> list[str | ReplanPolicySection]:
    return list(POLICIES)


class ReplanScenarioFile(ScenarioSection):
    """The scenario file."""

    name: str | None = None
    job: str | dict[str, Any]
    cluster: ReplanClusterSection = Field(default_factory=ReplanClusterSection)
    iterations: Annotated[Whole, Field(le=MOST_ITERATIONS)] | None = None
    save_every: Index | None = None
    drift: dict[str, DriftSection] = Field(default_factory=dict)
    noise: NoiseSection = Field(default_factory=NoiseSection)
    periodic: PeriodicSection | None = None
    moves: dict[str, Any] = Field(default_factory=dict)
    loop: dict[str, Any] = Field(default_factory=dict)
    policies: Annotated[list[str | ReplanPolicySection], Field(min_length=1)] = Field(default_factory=_all_policies)
    seeds: Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)] = Field(
        default_factory=lambda: list(SEEDS)
    )


SECTIONS: Sections = {
    "cluster": ReplanClusterSection,
    "events": ReplanEventSection,
    "churn": ChurnSection,
    "drift": DriftSection,
    "noise": NoiseSection,
    "periodic": PeriodicSection,
    "policies": ReplanPolicySection,
}


# ---- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> ReplanScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    try:
        spec = ReplanScenarioFile.model_validate(yaml_text.read_mapping(path))
    except ValidationError as error:
        raise explained(error, path, ReplanScenarioFile, SECTIONS) from None
    job, allowed, run, own_rules = _job(spec, path)
    past = _past(spec, job, path)
    if past is not None and past.cluster is not None and spec.cluster.nodes is None and spec.cluster.gpus is None:
        job = PlacementJob(Cluster(tuple(_like(job.cluster, node) for node in past.cluster.nodes)), job.workflow)
    names = job.workflow.names
    for key in spec.drift:
        check_name(key, names, f"{path}: drift.{key}", "unknown component {}")
    if spec.periodic is not None:
        check_name(spec.periodic.component, names, f"{path}: periodic.component", "unknown component {}")
    iterations = _iterations(spec, run, past, path)
    events = _events(spec.cluster.events, job.cluster, f"{path}: cluster.events")
    if past is not None and not spec.cluster.events:
        events = tuple(replace(event, node=_like(job.cluster, event.node)) for event in past.events)
    churn = spec.cluster.churn
    policies = tuple(_policy(entry, spec, own_rules, names, path) for entry in spec.policies)
    check_unique([policy.name for policy in policies], f"{path}: policies")
    return ReplanScenario(
        spec.name or path.stem,
        job,
        iterations,
        policies,
        tuple(dict.fromkeys(spec.seeds)),
        allowed,
        past.drift if past is not None else {n: _drift(drift, f"{path}: drift.{n}") for n, drift in spec.drift.items()},
        past.noise if past is not None else _noise(spec.noise, path),
        MigrationTimes.of(spec.moves, f"{path}: moves", past.moves if past is not None else None),
        events,
        None if churn is None else churn_of(churn, str(path)),
        spec.save_every if spec.save_every is not None else run.save_every,
        None if spec.periodic is None else PeriodicWork(**spec.periodic.model_dump()),
    )


def _job(
    spec: ReplanScenarioFile, path: Path
) -> tuple[PlacementJob, FrameworkRules | None, RunSection, dict[str, Any]]:
    """The job on the scenario's cluster, its framework's rules, its run section, and its replan rules."""
    here = spec.cluster
    if isinstance(spec.job, str):
        file = path.parent / spec.job
        file = file / JOB if file.is_dir() else file
        loaded = load(file)
        data: Mapping[str, Any] = yaml_text.read_mapping(file) if loaded.file_format == job_form.NAME else {}
    else:
        file = Path(f"{path}: job")
        inline = dict(spec.job)
        if "cluster" not in inline and here.nodes is not None:
            inline["cluster"] = {"nodes": here.nodes, "gpus_per_node": here.gpus or 8}
        loaded, data = job_form.read(inline, file), inline
    job = loaded.job
    section = data.get("run")
    run = read_section(section, file, job.workflow.names)
    rules = dict(section["loop"]) if isinstance(section, Mapping) and "loop" in section else {}
    if here.nodes is not None or here.gpus is not None:
        like = job.cluster.nodes[0] if job.cluster.nodes else Node("node0", here.gpus or 8)
        count = here.nodes if here.nodes is not None else len(job.cluster.nodes)
        gpus = here.gpus if here.gpus is not None else like.gpus
        nodes = tuple(replace(like, name=f"node{at}", gpus=gpus) for at in range(count))
        job = PlacementJob(Cluster(nodes), job.workflow)
    return job, loaded.rules, run, rules


def _past(spec: ReplanScenarioFile, job: PlacementJob, path: Path) -> PastRunReality | None:
    """The measurements of a run, if the job is the folder of a run."""
    if not isinstance(spec.job, str) or not (path.parent / spec.job).is_dir():
        return None
    for key in ("drift", "noise", "periodic"):
        if key in spec.model_fields_set:
            raise InputError(f"{key} comes from the measured run", where=f"{path}: {key}", hint=f"leave {key} out")
    return read_past_run(path.parent / spec.job, job.workflow)


def _iterations(spec: ReplanScenarioFile, run: RunSection, past: PastRunReality | None, path: Path) -> int:
    if past is not None:
        if spec.iterations is not None and spec.iterations > past.iterations:
            raise InputError(f"the run has {past.iterations} iterations", where=f"{path}: iterations")
        return spec.iterations or past.iterations
    if spec.iterations is None and run.iterations == RunSection().iterations:
        raise InputError("the number of iterations is missing", where=str(path), hint="iterations: 80")
    return spec.iterations or run.iterations


def _like(cluster: Cluster, node: Node) -> Node:
    """A node of a past run with the job's properties of its GPU kind."""
    known = [known for known in cluster.nodes if known.gpu == node.gpu]
    return replace(known[0], name=node.name, gpus=node.gpus) if known else node


def _events(sections: list[ReplanEventSection], cluster: Cluster, where: str) -> tuple[ScheduledNodeEvent, ...]:
    """Node events; nodes that join beyond the initial ones are like the first node."""
    nodes = dict(enumerate(cluster.nodes))
    for event in sections:
        if event.what == "joined" and event.node not in nodes and cluster.nodes:
            nodes[event.node] = replace(cluster.nodes[0], name=f"node{event.node}")
    found = []
    for event in sections:
        if (event.at_s is None) == (event.at_iteration is None):
            raise InputError("an event needs either a time or an iteration", where=where, hint=WHEN)
        if event.node not in nodes:
            known = f"nodes are counted from 0, and there are {len(cluster.nodes)}"
            raise InputError(f"there is no node {event.node}, and none joins", where=where, hint=known)
        found.append(ScheduledNodeEvent(nodes[event.node], event.what, event.at_s, event.at_iteration, event.notice_s))
    return tuple(found)


def _drift(section: DriftSection, where: str) -> Drift:
    if section.points and section.model_fields_set != {"points"}:
        raise InputError(
            "points cannot be combined with other keys of a drift", where=where, hint="points: {1: 1.0, 40: 2.5}"
        )
    return Drift(section.to, section.over, section.after, section.shape, tuple(sorted(section.points.items())))


def _noise(section: NoiseSection, path: Path) -> Noise:
    made_up = {key: value for key in ("spread", "alike", "tail") if (value := getattr(section, key)) is not None}
    kinds = [section.trace is not None, section.factor is not None, bool(made_up)]
    if sum(kinds) > 1:
        raise InputError(
            "noise is a trace, a distribution, or synthetic",
            where=f"{path}: noise",
            hint="one of: trace; factor; spread, alike and tail",
        )
    if section.factor is not None:
        return DrawnNoise(Distribution.of(section.factor, f"{path}: noise.factor"))
    if section.trace is None:
        return SyntheticNoise(**made_up)
    files = tuple(path.parent / name for name in ([section.trace] if isinstance(section.trace, str) else section.trace))
    if not files:
        raise InputError("the list of traces is empty", where=f"{path}: noise.trace")
    for file in files:
        minibatches(file)  # invalid traces are refused before anything runs
    return TraceNoise(files)


def _policy(
    entry: str | ReplanPolicySection,
    file: ReplanScenarioFile,
    own: Mapping[str, Any],
    names: tuple[str, ...],
    path: Path,
) -> ReplanPolicy:
    section = ReplanPolicySection(use=entry) if isinstance(entry, str) else entry
    where = f"{path}: policies.{section.name or section.use}"
    check_name(section.use, USES, where, "unknown policy {}")
    for stated, at in ((file.loop, f"{path}: loop"), (section.loop, f"{where}.loop")):
        check_keys(stated, RULE_KEYS, at)
        read_rules(stated, at, names)
    if section.loop and section.use != "trimtab":
        raise InputError(f"{section.use} has no loop", where=f"{where}.loop", hint="loop goes with use: trimtab")
    stated = {key: value for key, value in {**own, **file.loop, **section.loop}.items() if key in RULE_KEYS}
    rules = replace(read_rules(stated, f"{where}.loop", names), mode=ReplanMode.auto)
    changed = tuple(stated) if section.use == "trimtab" else ()
    return ReplanPolicy(section.name or section.use, section.use, rules, changed)


def with_rule(policy: ReplanPolicy, key: str, value: float, where: str) -> ReplanPolicy:
    """The policy with a rule set to a value, and a name that says so."""
    check_name(key, RULE_KEYS, where, "{} cannot be swept")
    whole = isinstance(getattr(policy.rules, key), int)
    if whole and value != int(value):
        raise InputError(f"{key} must be a whole number, not {value:g}", where=where)
    stated: dict[str, Any] = {key: int(value) if whole else value}
    try:
        rules = replace(policy.rules, **stated)
    except InputError as error:
        raise InputError(error.what, where=where) from None
    changed = tuple(dict.fromkeys((*policy.changed, key)))
    return ReplanPolicy(f"{policy.name}, {key} {value:g}", policy.use, rules, changed)
