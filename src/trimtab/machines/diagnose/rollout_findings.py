"""Types of rollout findings: issues, severities, and a reader for a pool's status.

`rollout.py` and `rollout_scaling.py` make findings, `render/text/rollout.py` renders them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import ReasonCode
from trimtab.model.rollout import Owner, RolloutRules

Data = Mapping[str, Any]


class Severity(str, enum.Enum):
    """Severity of a finding."""

    fault = "fault"  # an engine or a request failed
    stuck = "stuck"  # nothing changes without an action
    note = "note"  # temporary, or intended


class RolloutIssue(str, enum.Enum):
    """What was found: stable constants."""

    # engines
    none_serving = "NOBODY_SERVES"
    engine_awaited = "ENGINE_AWAITED"  # configured, but never reached
    engine_lost = "ENGINE_LOST"  # its process is gone, or it is unreachable
    engine_wedged = "ENGINE_WEDGED"  # healthy by its check, but does not answer
    engine_faulty = "ENGINE_FAULTY"  # requests or its health check fail
    given_up = "GIVEN_UP"  # its starts or refits failed too often
    weights_old = "WEIGHTS_OLD"  # up, and waits for a refit
    weights_gone = "WEIGHTS_GONE"  # up, and its weights were discarded
    refit_failed = "REFIT_FAILED"
    refit_open = "REFIT_OPEN"  # new weights are being loaded
    paused = "PAUSED_BY_OTHERS"
    asleep = "ASLEEP_BY_OTHERS"
    drained = "DRAINED_BY_HAND"  # until it is resumed by hand
    release_unknown = "RELEASE_UNKNOWN"  # an untested release
    exposed = "EXPOSED"  # reachable from other machines, without authentication
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
    weights_awaited = "WEIGHTS_AWAITED"  # requests wait for a version that is not published
    moved_often = "MOVED_OFTEN"
    retries_used = "RETRIES_USED"  # failed on one engine after another
    requests_failed = "REQUESTS_FAILED"
    # settings
    setting = "SETTING"


class RolloutFinding(Frozen):
    """A cause: the affected workers or classes, the observation, the fix."""

    issue: RolloutIssue
    severity: Severity
    sentence: str
    fix: str
    affected: tuple[str, ...] = ()  # workers or request classes


class StatusReader:
    """A status with defaults for missing fields: an older gateway reports less."""

    def __init__(self, status: Data, holders: Mapping[str, Sequence[int]]) -> None:
        self.status = status
        self.holders = holders
        self.workers: Sequence[Data] = status.get("workers") or ()
        self.metrics: Data = status.get("metrics") or {}
        self.elastic: Data = status.get("elastic") or {}
        self.rules = decode(RolloutRules, status.get("rules") or {})  # default values are omitted there
        self.steps: Sequence[Data] = status.get("steps") or ()
        self.range: Data = status.get("range") or {}
        scaling: Data = status.get("scaling") or {}
        self.decision: Data | None = scaling.get("decision")
        self.by_hand: Data | None = scaling.get("by_hand")
        self.holds: Mapping[str, int] = scaling.get("holds") or {}

    @property
    def refits(self) -> bool:
        """Whether a refit is open: membership is frozen."""
        return bool(self.status.get("refit") or (self.status.get("membership") or {}).get("frozen"))

    def of(self, *states: str) -> list[Data]:
        return [worker for worker in self.workers if worker["state"] in states]

    def owner(self, verb: str) -> str:
        owner: Owner = getattr(self.rules.ownership, verb)
        return owner.value

    @property
    def serving(self) -> int:
        """Workers that serve, or will without a further decision."""
        return len(self.of("active", "starting"))

    @property
    def low(self) -> bool:
        ratio, threshold = self.metrics.get("load_ratio"), self.elastic.get("scale_down_threshold")
        return ratio is not None and threshold is not None and ratio < threshold and self.serving > 1

    @property
    def high(self) -> bool:
        ratio, threshold = self.metrics.get("load_ratio"), self.elastic.get("scale_up_threshold")
        return ratio is not None and threshold is not None and ratio > threshold

    def memory_kept(self, worker: Data) -> str:
        """The warning where it slept and kept its memory; else empty."""
        kept = worker.get("memory") or {}
        if kept.get("code") == ReasonCode.memory_kept.value:
            return str(kept["sentence"])
        code, text = reason_of(worker)
        if code == ReasonCode.memory_kept.value:
            return text
        if not worker.get("asleep"):
            return ""
        warnings = self.status.get("warnings") or ()
        own = [warning["sentence"] for warning in warnings if warning.get("worker") == worker["name"]]
        return next((str(line).removeprefix("sleep: ") for line in reversed(own) if line.startswith("sleep: ")), "")


RolloutCheck = Callable[[StatusReader], Iterator[RolloutFinding]]
"""A check of a status for one kind of issue."""


def reason_of(worker: Data) -> tuple[str, str]:
    reason = worker.get("reason") or {}
    return str(reason.get("code", "")), str(reason.get("sentence", ""))
