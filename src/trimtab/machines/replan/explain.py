"""Stories and sentences of the loop: why a plan is kept, left or gone. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_chapter
from trimtab.machines.replan.state import ReplanState
from trimtab.model.run import CostEstimate
from trimtab.model.workflow import Cluster

NAMED = 3
SMALL = 0.02  # a drift that makes less than this share of the longest component is not named
RUN = "run"
MOVES_KEPT = 20


class ReplanStories:
    """What became of the run and of its newest moves."""

    def __init__(self) -> None:
        self.entries: dict[str, list[StoryEntry]] = {RUN: []}

    def write(self, subject: str, entry: StoryEntry) -> None:
        """Add a chapter, unless it says of the run what its last one said, only with other figures."""
        story = self.entries.setdefault(subject, [])
        last = story[-1] if story and subject == RUN else None
        if last is not None and (last.state, last.reason.code) == (entry.state, entry.reason.code):
            return
        add_chapter(story, entry)
        for old in [name for name in self.entries if name != RUN][:-MOVES_KEPT]:
            del self.entries[old]

    def of(self, subject: str) -> tuple[StoryEntry, ...]:
        """One story, as long as it is remembered."""
        return tuple(self.entries.get(subject, ()))


def drift_reason(
    drifted: Sequence[str], levels: Mapping[str, float], run: ReplanState, seconds: Mapping[str, float]
) -> Reason:
    """Why another plan may be better than the one in place; `seconds` are those of each component in an iteration.

    Of what has drifted, that is named which makes seconds, and nothing that is small beside an iteration.
    """
    away = {name: abs(1 - run.reference[name] / levels[name]) * seconds.get(name, 0.0) for name in drifted}
    smallest = SMALL * max(seconds.values(), default=0.0)
    far = sorted((name for name in drifted if away[name] >= smallest), key=lambda name: -away[name])
    said = [run.cluster_change] if run.cluster_change else []
    if far:
        named = ", ".join(f"{name} takes {levels[name] / run.reference[name]:.2f} times" for name in far[:NAMED])
        more = f" and {len(far) - NAMED} more" if len(far) > NAMED else ""
        said.append(f"{named}{more} what the plan was made for")
    if not said:
        return Reason(ReasonCode.better_plan, "costs and nodes are as they were")
    return Reason(ReasonCode.drifted if far else ReasonCode.room_changed, "; ".join(said))


def costs_text(estimates: Mapping[str, CostEstimate], reference: Mapping[str, float], drifted: Sequence[str]) -> str:
    """How near everything is to what the plan was made for; `drifted` is told from noise, and too small to matter."""
    name = max(estimates, key=lambda each: abs(estimates[each].middle / reference[each] - 1))
    estimate = estimates[name]
    away, now = estimate.middle / reference[name] - 1, estimate.level / reference[name] - 1
    said = f"{name} is furthest from what the plan was made for: {away:+.1%}"
    if name in drifted:
        return (
            f"{said}, more than its noise of {estimate.width:.1%}, but it is too short a part of an iteration to matter"
        )
    if estimate.middle / (1 + estimate.width) <= reference[name] <= estimate.middle * (1 + estimate.width):
        return f"{said}, within its noise of {estimate.width:.1%}"
    return f"{said}, but {now:+.1%} by its trend: with a noise of {estimate.width:.1%} that is not told from no change"


def gone_reason(run: ReplanState) -> Reason:
    """Why the plan in place cannot go on."""
    if run.lost:
        return Reason(ReasonCode.plan_gone, f"GPUs of the plan are gone with {_names(run.lost)}")
    return Reason(ReasonCode.plan_gone, f"GPUs of the plan will go with {_names(run.leaving)}")


def cluster_change_text(before: Cluster, after: Cluster, why: str) -> str:
    """How a cluster has changed."""
    return f"{why}: {after.gpus} GPUs, there were {before.gpus}"


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return ", ".join(nodes[:NAMED]) + more
