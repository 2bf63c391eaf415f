"""Scaling policies by name: plain functions of a state and a load sample that return a worker count.

`consult(state, sample)` is the entry point, called at every evaluation. No clock: the time is in the sample. What must
never happen: a count outside the sample's limits, an exception of a user's policy that gets out, or a worker that moves
because of an invalid decision.

Policies are registered in `policies` by `register`, or are given as a function in the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trimtab.core.errors import InputError, check_known
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout.policies.load import Decision as Decision
from trimtab.machines.rollout.policies.load import LoadSample, PolicyState, ScalingPolicy
from trimtab.machines.rollout.policies.predictive import predictive
from trimtab.machines.rollout.policies.threshold import threshold
from trimtab.model.elastic_config import ElasticConfig

policies: dict[str, ScalingPolicy] = {}  # by the name that `ElasticConfig.policy` gives


def register(name: str) -> Callable[[ScalingPolicy], ScalingPolicy]:
    """Register a policy: `@register("mine")` above the function."""

    def under(policy: ScalingPolicy) -> ScalingPolicy:
        if policies.setdefault(name, policy) is not policy:
            raise InputError(f"there is a policy {name} already", hint="choose another name")
        return policy

    return under


def policy_of(config: ElasticConfig) -> ScalingPolicy:
    if not isinstance(config.policy, str):
        return config.policy
    check_known([config.policy], policies, "elastic_config.policy", "there is no policy {}")
    return policies[config.policy]


def begin(config: ElasticConfig) -> PolicyState:
    """The initial state. Raises InputError for an unknown policy name."""
    policy_of(config)
    return PolicyState(config)


def consult(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """The decision of the configured policy, clamped to the limits.

    A policy that raises or returns an invalid decision changes nothing: the workers stay, and the reason says so.
    """
    try:
        after, decision = policy_of(state.config)(state, sample)
        fault = _fault(after, decision)
    except Exception as error:  # a user's function may raise anything
        fault = f"it raised {type(error).__name__}: {error}"
    if fault:
        reason = Reason(ReasonCode.policy_fault, f"{_name(state)}: {fault}; nothing is changed")
        return state, Decision(sample.inside, reason, f"{counted(sample.inside, 'worker')} serve")
    allowed = sample.within(decision.workers)
    if allowed != decision.workers:
        decision = replace(decision, workers=allowed, reason=_limited(decision.reason, decision.workers, sample))
    return after, decision


def _fault(after: object, decision: object) -> str:
    if not isinstance(after, PolicyState) or not isinstance(decision, Decision):
        return "it did not return a state and a decision"
    if isinstance(decision.workers, bool) or not isinstance(decision.workers, int) or decision.workers < 0:
        return f"{decision.workers!r} is no number of workers"
    if not isinstance(decision.reason, Reason) or not decision.reason.sentence:
        return "it gave no reason"
    return ""


def _name(state: PolicyState) -> str:
    policy = state.config.policy
    return f"policy {policy if isinstance(policy, str) else getattr(policy, '__name__', repr(policy))}"


def _limited(reason: Reason, wanted: int, sample: LoadSample) -> Reason:
    limit = f"at least {sample.min_workers}" if wanted < sample.min_workers else f"at most {sample.max_workers}"
    return Reason(ReasonCode.limits, f"{reason.sentence}; {counted(wanted, 'worker')} were wanted, {limit} are allowed")


@register("static")
def static(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """All available workers up to the maximum, whatever the load."""
    workers = sample.max_workers
    code = ReasonCode.load_fits if workers == sample.serving else ReasonCode.limits
    reason = Reason(code, f"the policy is static: all {counted(workers, 'worker')}, whatever the load")
    return state, Decision(workers, reason, f"{counted(workers, 'worker')} serve")


register("threshold")(threshold)
register("predictive")(predictive)
