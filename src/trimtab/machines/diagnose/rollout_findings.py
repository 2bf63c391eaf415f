"""The nouns of the rollout doctor: what can ail a pool, how much that stops, and a status as the checks read it.

`rollout_doctor` makes findings of them, `ui/rollout_text` shows them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.reasons import ReasonCode
from trimtab.model.rollout import Owner, RolloutRules

Data = Mapping[str, Any]

NAMED = 4  # workers in one sentence


class Severity(str, enum.Enum):
    """How much a finding stops."""

    fault = "fault"  # an engine or a request failed
    stuck = "stuck"  # nothing changes until somebody does something
    note = "note"  # explains; passes by itself, or was asked for


class RolloutIssue(str, enum.Enum):
    """What was found: stable constants."""

    # engines
    none_serving = "NOBODY_SERVES"
    engine_awaited = "ENGINE_AWAITED"  # the job file names it, and it was never reached
    engine_lost = "ENGINE_LOST"  # its process is gone, or it cannot be reached
    engine_wedged = "ENGINE_WEDGED"  # healthy by its own word, and does not answer
    engine_faulty = "ENGINE_FAULTY"  # it breaks requests, or its health check fails
    given_up = "GIVEN_UP"  # its starts or refits failed so often that it is not tried again
    weights_old = "WEIGHTS_OLD"  # up, and waits for a refit
    weights_gone = "WEIGHTS_GONE"  # up, and its weights were discarded
    refit_failed = "REFIT_FAILED"
    refit_open = "REFIT_OPEN"  # new weights are on their way
    paused = "PAUSED_BY_OTHERS"
    asleep = "ASLEEP_BY_OTHERS"
    drained = "DRAINED_BY_HAND"  # taken until somebody resumes it
    release_unknown = "RELEASE_UNKNOWN"  # a release that was never tried
    exposed = "EXPOSED"  # an engine that more than this machine can reach, and that obeys whoever does
    # memory
    memory_kept = "MEMORY_KEPT"
    # not scaling down
    load_does_not_fit = "LOAD_DOES_NOT_FIT"
    cooldown = "COOLDOWN"
    not_stable = "NOT_STABLE"
    min_workers = "MIN_WORKERS"
    held = "HELD"
    set_by_hand = "SET_BY_HAND"
    no_taker = "NO_TAKER"
    switched_off = "SWITCHED_OFF"
    load_unknown = "LOAD_UNKNOWN"
    policy_fault = "POLICY_FAULT"
    policy_fixed = "POLICY_FIXED"
    refit_holds = "REFIT_HOLDS"
    drain_late = "DRAIN_LATE"
    # not scaling up
    all_in_use = "ALL_IN_USE"
    steps_untrue = "STEPS_UNTRUE"
    # requests
    queue_full = "QUEUE_FULL"
    weights_awaited = "WEIGHTS_AWAITED"  # requests wait for a version that the trainer has not brought yet
    moved_often = "MOVED_OFTEN"
    retries_used = "RETRIES_USED"  # they were sent to one engine after another, and broke each time
    requests_failed = "REQUESTS_FAILED"
    # settings
    setting = "SETTING"


@dataclass(frozen=True)
class RolloutFinding:
    """One cause: whom it concerns, what was seen, what to do."""

    issue: RolloutIssue
    severity: Severity
    sentence: str
    fix: str
    affected: tuple[str, ...] = ()  # workers or request classes


class StatusReader:
    """A status, read with defaults where something is missing: an older gateway says less."""

    def __init__(self, status: Data, holders: Mapping[str, Sequence[int]]) -> None:
        self.status = status
        self.holders = holders
        self.workers: Sequence[Data] = status.get("workers") or ()
        self.metrics: Data = status.get("metrics") or {}
        self.elastic: Data = status.get("elastic") or {}
        self.rules = decode(RolloutRules, status.get("rules") or {})  # what has its default value is left out there
        self.steps: Sequence[Data] = status.get("steps") or ()
        self.range: Data = status.get("range") or {}
        scaling: Data = status.get("scaling") or {}
        self.decision: Data | None = scaling.get("decision")
        self.by_hand: Data | None = scaling.get("by_hand")
        self.holds: Mapping[str, int] = scaling.get("holds") or {}

    @property
    def refits(self) -> bool:
        """Whether a refit is open: then nobody joins or leaves."""
        return bool(self.status.get("refit") or (self.status.get("membership") or {}).get("frozen"))

    def of(self, *states: str) -> list[Data]:
        """The workers in these states."""
        return [worker for worker in self.workers if worker["state"] in states]

    def owner(self, verb: str) -> str:
        """Who carries a verb out."""
        owner: Owner = getattr(self.rules.ownership, verb)
        return owner.value

    @property
    def serving(self) -> int:
        """Workers that serve or will do so by themselves."""
        return len(self.of("active", "starting"))

    @property
    def low(self) -> bool:
        """Whether the load is below what the workers that serve are for."""
        ratio, threshold = self.metrics.get("load_ratio"), self.elastic.get("scale_down_threshold")
        return ratio is not None and threshold is not None and ratio < threshold and self.serving > 1

    @property
    def high(self) -> bool:
        """Whether the load is above it."""
        ratio, threshold = self.metrics.get("load_ratio"), self.elastic.get("scale_up_threshold")
        return ratio is not None and threshold is not None and ratio > threshold

    def memory_kept(self, worker: Data) -> str:
        """What was seen when it slept and kept its memory; empty: nothing of the kind."""
        kept = worker.get("memory") or {}
        if kept.get("code") == ReasonCode.memory_kept.value:
            return str(kept["sentence"])
        code, said = reason_of(worker)
        if code == ReasonCode.memory_kept.value:
            return said
        if not worker.get("asleep"):
            return ""
        warnings = self.status.get("warnings") or ()
        own = [warning["sentence"] for warning in warnings if warning.get("worker") == worker["name"]]
        return next((str(text).removeprefix("sleep: ") for text in reversed(own) if text.startswith("sleep: ")), "")


RolloutCheck = Callable[[StatusReader], Iterator[RolloutFinding]]
"""One look at a status for one kind of ailment."""


def reason_of(worker: Data) -> tuple[str, str]:
    """The code and the sentence of its reason."""
    reason = worker.get("reason") or {}
    return str(reason.get("code", "")), str(reason.get("sentence", ""))


def some(names: Sequence[str]) -> str:
    """The first few names."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def requests_text(count: int) -> str:
    """So many requests, in words."""
    return f"{count} request{'' if count == 1 else 's'}"
