"""Reason texts of the replan machine. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.core.reasons import Reason, ReasonCode, some
from trimtab.machines.replan.state import RunState
from trimtab.model.run import CostEstimate

NAMED = 3
SMALL = 0.02  # a drift below this share of the longest component is not named


def drift_reason(
    drifted: Sequence[str], levels: Mapping[str, float], run: RunState, seconds: Mapping[str, float]
) -> Reason:
    """Why another plan may be better; `seconds` are the times of each component in an iteration.

    Names the drifted components with the largest effect, and none that are small in an iteration.
    """
    away = {name: abs(1 - run.reference[name] / levels[name]) * seconds.get(name, 0.0) for name in drifted}
    smallest = SMALL * max(seconds.values(), default=0.0)
    far = sorted((name for name in drifted if away[name] >= smallest), key=lambda name: -away[name])
    text = [run.cluster_change] if run.cluster_change else []
    if far:
        named = [f"{name} takes {levels[name] / run.reference[name]:.2f} times" for name in far]
        text.append(f"{some(named, NAMED)} what the plan was made for")
    if not text:
        return Reason(ReasonCode.better_plan, "costs and nodes are as they were")
    return Reason(ReasonCode.drifted if far else ReasonCode.room_changed, "; ".join(text))


def costs_text(estimates: Mapping[str, CostEstimate], reference: Mapping[str, float], drifted: Sequence[str]) -> str:
    """Distance of the costs from those the plan was made for; `drifted` is beyond noise, but too small to matter."""
    name = max(estimates, key=lambda each: abs(estimates[each].middle / reference[each] - 1))
    estimate = estimates[name]
    away, now = estimate.middle / reference[name] - 1, estimate.level / reference[name] - 1
    text = f"{name} is furthest from what the plan was made for: {away:+.1%}"
    if name in drifted:
        return (
            f"{text}, more than its noise of {estimate.width:.1%}, but it is too short a part of an iteration to matter"
        )
    if estimate.middle / (1 + estimate.width) <= reference[name] <= estimate.middle * (1 + estimate.width):
        return f"{text}, within its noise of {estimate.width:.1%}"
    return f"{text}, but {now:+.1%} by its trend: with a noise of {estimate.width:.1%} that is not told from no change"


def gone_reason(run: RunState) -> Reason:
    if run.lost:
        return Reason(ReasonCode.plan_gone, f"GPUs of the plan are gone with {some(run.lost, NAMED)}")
    return Reason(ReasonCode.plan_gone, f"GPUs of the plan will go with {some(run.leaving, NAMED)}")
