"""All rules over one run: findings, the errors first, each with its rule and cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.plan.check import cache_rules, cluster_rules, gpu_memory, gpu_rules, host_rules, options, sizes
from trimtab.plan.check.cluster_rules import LiveNode
from trimtab.plan.check.findings import CheckFinding, CheckRule, releases
from trimtab.plan.check.options import Exclusion
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.phases import Phase

RULES: tuple[CheckRule, ...] = (*sizes.RULES, *cache_rules.RULES, *gpu_rules.RULES, *host_rules.RULES)


class CheckAnswer(Frozen):
    """Findings of a run, the memory they rest on, and what could not be checked."""

    findings: tuple[CheckFinding, ...]
    phases: tuple[Phase, ...]
    host: tuple[Phase, ...]
    unchecked: tuple[str, ...]

    @property
    def errors(self) -> tuple[CheckFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


def check(run: RunSetup, exclusions: tuple[Exclusion, ...] = (), nodes: tuple[LiveNode, ...] = ()) -> CheckAnswer:
    """Findings of all rules that hold for the run; `nodes` are those of a Ray cluster that is to run it."""
    sized = [*_found(run, sizes.RULES), *options.found(run, exclusions), *cluster_rules.found(run, nodes)]
    # Where sizes do not divide there is no layout whose memory could be summed up.
    broken = any(finding.severity == "error" and finding.rule in LAYOUT for finding in sized)
    rest = [] if broken else [*_found(run, (*cache_rules.RULES, *gpu_rules.RULES, *host_rules.RULES))]
    if run.in_part:
        rest = [replace(finding, severity="warning") for finding in rest]
    findings = sorted([*sized, *rest], key=lambda finding: finding.severity)
    return CheckAnswer(
        tuple(findings),
        () if broken else tuple(gpu_memory.phases(run)),
        () if broken else tuple(host_rules.phases(run)),
        tuple(_unchecked(run, broken=broken)),
    )


LAYOUT = ("training-gpus", "rollout-gpus", "training-heads", "rollout-heads", "pipeline-layers", "experts")


def _found(run: RunSetup, rules: tuple[CheckRule, ...]) -> Iterator[CheckFinding]:
    for rule in rules:
        if rule.holds(run):
            for finding in rule.find(run):
                yield replace(
                    finding,
                    rule=rule.name,
                    cause=rule.cause,
                    source=rule.source,
                    dated=rule.dated,
                    releases=releases(rule.frameworks, rule.since, rule.until),
                )


def _unchecked(run: RunSetup, *, broken: bool) -> Iterator[str]:
    if broken:
        yield "memory: the parallel sizes make no layout"
        return
    if run.in_part:
        yield f"memory, in full: of such configs of {run.framework} the sizes are read: findings of memory only warn"
    if run.model is None:
        yield f"heads, layers and memory: the model {run.model_name or 'is not stated'} is not known; give --model"
    if run.gpu is None:
        yield "GPU and host memory: give --gpu"
    if not run.gpus:
        yield "GPUs: the config does not say how many; give --gpus"
    if run.model and run.gpu and run.gpus and not run.in_part and not (run.update_tokens and run.rollout_memory):
        missing = [
            words
            for words, value in (
                ("micro-batches or lengths", run.update_tokens),
                ("the engine's share of memory", run.rollout_memory),
            )
            if not value
        ]
        yield f"part of GPU memory: the config does not state {' or '.join(missing)}"
