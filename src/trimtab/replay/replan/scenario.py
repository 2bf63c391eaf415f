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
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.formats import job as job_form
from trimtab.formats import sections, yaml_text
from trimtab.formats.files import is_folder
from trimtab.formats.job import LOOP_KEYS, RunSection
from trimtab.formats.load import load
from trimtab.formats.sections import (
    Amount,
    Count,
    FieldsOf,
    Index,
    Made,
    OneOrMore,
    Section,
    Share,
    Within,
    checked_by,
    refused,
)
from trimtab.formats.yaml_text import Source
from trimtab.model.plan import FrameworkRules
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Node, PlacementJob
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
    spread,
    spreads,
)
from trimtab.replay.common.timing import Churn, Durations, NodeEventKind
from trimtab.replay.replan.baselines import USES, ReplanFigures, figures, run_policy
from trimtab.replay.replan.past_run import JOB, PastRunReality, read_past_run
from trimtab.replay.replan.reality import (
    DrawnNoise,
    Drift,
    MigrationTimes,
    Noise,
    PeriodicWork,
    PlanCache,
    ReplanReality,
    ScheduledNodeEvent,
    SyntheticNoise,
    TraceNoise,
    TrueCosts,
    minibatches,
)

POLICIES = ("trimtab", "kept", "static", "oracle")
# engines are not simulated
RULE_KEYS = tuple(key for key in LOOP_KEYS if key not in ("mode", "elastic", "range_slack"))
MOST_ITERATIONS = 100_000
NAMED = 8  # events listed in a report
FIGURES = (
    *("total_s", "iteration_s", "moves", "rolled_back", "forced", "moving_s", "void_s", "waiting_s", "void"),
    "decisions",
)
FAR = 20.0  # churn is drawn for so many times the length of the run with its first plan


# ---- settings -----------------------------------------------------------------------------------------------------


class ReplanPolicy(Frozen):
    """A policy of a scenario."""

    name: str
    use: str
    rules: ReplanRules = field(default_factory=lambda: ReplanRules(mode=ReplanMode.auto))
    changed: tuple[str, ...] = ()  # rules that are set

    def text(self) -> str:
        changes = ", ".join(f"{key} {getattr(self.rules, key):g}" for key in self.changed)
        return USES[self.use] + (f"; {changes}" if changes else "")


class ReplanScenario(Frozen):
    """A replan scenario."""

    name: str
    reality: ReplanReality  # without a seed, and without random failures
    policies: tuple[ReplanPolicy, ...]
    seeds: tuple[int, ...]
    churn: Churn | None = None

    @cached_property
    def plans(self) -> PlanCache:
        return PlanCache(self.reality.job, self.reality.allowed)

    def truth(self, seed: int) -> TrueCosts:
        """The job with everything that will happen to it under a seed."""
        reality = replace(self.reality, seed=seed)
        if self.churn is None:
            return TrueCosts(reality, self.plans)
        cluster, numbers = reality.job.cluster, range(1, reality.iterations + 1)
        plan = self.plans.best(cluster, {}).plan
        until_s = FAR * sum(self.plans.planner.seconds(plan, reality.levels(number)) for number in numbers)
        by_name = {node.name: node for node in cluster.nodes}
        happens = (
            ScheduledNodeEvent(by_name[event.node], event.what, event.at_s, None, event.notice_s)
            for event in self.churn.events(list(by_name), until_s, seed)
        )
        return TrueCosts(replace(reality, happens=(*reality.happens, *happens)), self.plans)

    def assumptions(self) -> list[str]:
        """The assumptions of a scenario, for a report."""
        reality = self.reality
        nodes = reality.job.cluster.nodes
        names = ", ".join(reality.job.workflow.names)
        size = f"{len(nodes)} nodes, {reality.job.cluster.gpus} GPUs"
        more = ["; ".join(event.text() for event in reality.happens[:NAMED])] if reality.happens else []
        more += [f"and {len(reality.happens) - NAMED} more events"] if len(reality.happens) > NAMED else []
        lines = [
            f"{reality.iterations} iterations of {names} on {size}",
            *(f"{name} drifts {drift.text()}" for name, drift in reality.drift.items() if len(drift.points) <= NAMED),
            reality.noise.text(),
            *([reality.periodic.text()] if reality.periodic else []),
            *more,
            *([self.churn.text()] if self.churn else []),
            "an iteration takes what the planner's model predicts for the true costs under the current plan",
            *reality.moves.text(),
        ]
        staleness = reality.job.workflow.staleness
        if staleness:
            lines.append(
                f"iterations started ahead, up to {staleness}, end before a migration; the first after it is cold"
            )
        kept = f"every {reality.save_every} iterations" if reality.save_every else "after every iteration"
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


class ReplanEventSection(Section):
    """A change of a node's state."""

    at_s: Amount | None = None
    at_iteration: Count | None = None
    node: Index
    what: NodeEventKind
    notice_s: Amount = 120.0

    @model_validator(mode="after")
    def _one_time(self) -> ReplanEventSection:
        if (self.at_s is None) == (self.at_iteration is None):
            raise refused("an event needs either a time or an iteration", "one of at_s, at_iteration")
        return self


class ReplanClusterSection(Section):
    """The `cluster` section: missing keys are the job's."""

    nodes: Count | None = None
    gpus: Annotated[int, Within(1, 1024)] | None = None
    events: list[ReplanEventSection] = Field(default_factory=list)
    churn: Annotated[Churn, FieldsOf(Churn)] | None = None


def _drift(stated: dict[str, Any]) -> Drift:
    if stated.get("points") and len(stated) > 1:
        raise InputError("points cannot be combined with other keys of a drift", hint="points: {1: 1.0, 40: 2.5}")
    return Drift(**stated)


class NoiseSection(Section):
    """The `noise` section: a trace, a distribution, or synthetic."""

    trace: Annotated[tuple[Path, ...], Field(min_length=1), OneOrMore] | None = None
    factor: Durations | None = None
    spread: Share | None = None
    alike: Annotated[float, Within(0.0, 0.999_999)] | None = None
    tail: Share | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> NoiseSection:
        if sum((self.trace is not None, self.factor is not None, bool(self.synthetic))) > 1:
            raise refused("noise is a trace, a distribution, or synthetic", "trace; factor; or spread, alike and tail")
        return self

    @property
    def synthetic(self) -> dict[str, float]:
        return self.model_dump(include={"spread", "alike", "tail"}, exclude_none=True)


Rules = Annotated[dict[str, Any], FieldsOf(ReplanRules, only=RULE_KEYS)]


class ReplanPolicySection(Section):
    """An entry of `policies`."""

    use: Annotated[str, checked_by(lambda use: check_known([use], USES, "", "unknown policy {}"))]
    name: str | None = None
    loop: Rules = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_loop(self) -> ReplanPolicySection:
        if self.loop and self.use != "trimtab":
            raise refused(f"{self.use} has no loop", "loop goes with use: trimtab", "loop")
        return self


class ReplanScenarioFile(Section):
    """The scenario file."""

    name: str | None = None
    job: str | dict[str, Any]
    cluster: ReplanClusterSection = Field(default_factory=ReplanClusterSection)
    iterations: Annotated[int, Within(1, MOST_ITERATIONS)] | None = None
    save_every: Index | None = None
    drift: dict[str, Annotated[Drift, Made(Annotated[dict[str, Any], FieldsOf(Drift)], _drift)]] = Field(
        default_factory=dict
    )
    noise: NoiseSection = Field(default_factory=NoiseSection)
    periodic: Annotated[PeriodicWork, FieldsOf(PeriodicWork)] | None = None
    moves: Annotated[dict[str, Any], FieldsOf(MigrationTimes)] = Field(default_factory=dict)
    loop: Rules = Field(default_factory=dict)
    policies: Annotated[tuple[Annotated[ReplanPolicySection, BY_USE], ...], Field(min_length=1)] = tuple(
        ReplanPolicySection(use=use) for use in POLICIES
    )
    seeds: Seeds = SEEDS


# ---- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> ReplanScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    source, data = yaml_text.read_source(path)
    spec = sections.read(ReplanScenarioFile, data, source)
    job, allowed, run = _job(spec, path)
    past = _past(spec, job, path)
    if past is not None and past.cluster is not None and spec.cluster.nodes is None and spec.cluster.gpus is None:
        job = PlacementJob(Cluster(tuple(_like(job.cluster, node) for node in past.cluster.nodes)), job.workflow)
    names = job.workflow.names
    check_known(spec.drift, names, f"{path}: drift", "unknown component {}")
    if spec.periodic is not None:
        check_known([spec.periodic.component], names, f"{path}: periodic.component", "unknown component {}")
    iterations = _iterations(spec, run, past, path)
    events = _events(spec.cluster.events, job.cluster, f"{path}: cluster.events")
    if past is not None and not spec.cluster.events:
        events = tuple(replace(event, node=_like(job.cluster, event.node)) for event in past.events)
    policies = tuple(_policy(section, {**run.loop, **spec.loop, **section.loop}) for section in spec.policies)
    with source.located("policies"):
        check_unique(policies)
    reality = ReplanReality(
        job,
        iterations,
        past.drift if past is not None else spec.drift,
        past.noise if past is not None else _noise(spec.noise, path),
        replace(past.moves if past is not None else MigrationTimes(), **spec.moves),
        events,
        spec.save_every if spec.save_every is not None else run.save_every,
        spec.periodic,
        allowed,
    )
    return ReplanScenario(spec.name or path.stem, reality, policies, spec.seeds, spec.cluster.churn)


def _job(spec: ReplanScenarioFile, path: Path) -> tuple[PlacementJob, FrameworkRules | None, RunSection]:
    """The job on the scenario's cluster, its framework's rules, and its run section."""
    here = spec.cluster
    run = RunSection()
    if isinstance(spec.job, str):
        file = path.parent / spec.job
        file = file / JOB if is_folder(file) else file
        loaded = load(file)
        if loaded.file_format == job_form.NAME:
            source, data = yaml_text.read_source(file)
            run = job_form.parsed(data, source).run
    else:
        file = Path(f"{path}: job")
        inline = dict(spec.job)
        if "cluster" not in inline and here.nodes is not None:
            inline["cluster"] = {"nodes": here.nodes, "gpus_per_node": here.gpus or 8}
        loaded, run = job_form.read(inline, file), job_form.parsed(inline, Source(str(file))).run
    job = loaded.job
    if here.nodes is not None or here.gpus is not None:
        like = job.cluster.nodes[0] if job.cluster.nodes else Node("node0", here.gpus or 8)
        count = here.nodes if here.nodes is not None else len(job.cluster.nodes)
        gpus = here.gpus if here.gpus is not None else like.gpus
        nodes = tuple(replace(like, name=f"node{at}", gpus=gpus) for at in range(count))
        job = PlacementJob(Cluster(nodes), job.workflow)
    return job, loaded.rules, run


def _past(spec: ReplanScenarioFile, job: PlacementJob, path: Path) -> PastRunReality | None:
    """The measurements of a run, if the job is the folder of a run."""
    if not isinstance(spec.job, str) or not is_folder(path.parent / spec.job):
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
        if event.node not in nodes:
            known = f"nodes are counted from 0, and there are {len(cluster.nodes)}"
            raise InputError(f"there is no node {event.node}, and none joins", where=where, hint=known)
        found.append(ScheduledNodeEvent(nodes[event.node], event.what, event.at_s, event.at_iteration, event.notice_s))
    return tuple(found)


def _noise(section: NoiseSection, path: Path) -> Noise:
    if section.factor is not None:
        return DrawnNoise(section.factor)
    if section.trace is None:
        return SyntheticNoise(**section.synthetic)
    files = tuple(path.parent / name for name in section.trace)
    for file in files:
        minibatches(file)  # invalid traces are refused before anything runs
    return TraceNoise(files)


def _policy(section: ReplanPolicySection, loop: Mapping[str, Any]) -> ReplanPolicy:
    stated = {key: value for key, value in loop.items() if key in RULE_KEYS}
    changed = tuple(stated) if section.use == "trimtab" else ()
    return ReplanPolicy(section.name or section.use, section.use, ReplanRules(**stated, mode=ReplanMode.auto), changed)


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def _base(scenario: ReplanScenario) -> ReplanPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), ReplanPolicy("trimtab", "trimtab"))


def _with_rule(policy: ReplanPolicy, key: str, value: float, where: str) -> ReplanPolicy | None:
    check_known([key], RULE_KEYS, where, "{} cannot be swept")
    whole = isinstance(getattr(policy.rules, key), int)
    if whole and value != int(value):
        raise InputError(f"{key} must be a whole number, not {value:g}", where=where)
    stated: dict[str, Any] = {key: int(value) if whole else value}
    try:
        rules = replace(policy.rules, **stated)
    except InputError as error:
        raise InputError(error.what, where=where) from None
    changed = tuple(dict.fromkeys((*policy.changed, key)))
    found = ReplanPolicy(f"{policy.name}, {key} {value:g}", policy.use, rules, changed)
    return found if rules != policy.rules else None


def _rejection(name: str, runs: Sequence[ReplanFigures], base: Sequence[ReplanFigures]) -> str:
    return "" if all(run.finished for run in runs) else f"with {name} the run does not finish"


SWEEP: SweepRules[ReplanFigures] = SweepRules(
    _base, _with_rule, lambda run: run.total_s, "the time of the run", _rejection
)
REPLANS = ScenarioKind(read, run_replan, SWEEP, compare_replans)
