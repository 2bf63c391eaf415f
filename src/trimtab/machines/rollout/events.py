"""Events about rollout workers and requests, and the instructions that answer them.

The controller loop turns observations into events and executes instructions. Every instruction that takes time has a
deadline and ends in one of the events named in its docstring, also when it fails. An `attempt` number marks each send
or action, so that late news of an earlier attempt changes nothing unless stated otherwise. Counts and ids only:
prompts, tokens and texts stay with the caller. Events are idempotent.
"""

from __future__ import annotations

from trimtab.core.frozen import Frozen, Message
from trimtab.core.reasons import Reason
from trimtab.machines.rollout.policies.load import Taker
from trimtab.model.rollout import (
    End,
    InFlight,
    Membership,
    RefitWay,
    RequestSpec,
    ScaleStep,
    Span,
    WorkerSpec,
    WorkerVerb,
)


class RolloutEvent(Message):
    """An event of the rollout machine."""


# ---- events: requests -------------------------------------------------------------------------------------------


class RequestArrived(RolloutEvent):
    """A generation request. A known id or an unknown class is refused before any state changes."""

    spec: RequestSpec


class TokensStreamed(RolloutEvent):
    """Total tokens of this attempt so far. `version`: weights version, if the engine reports it."""

    request: str
    attempt: int
    tokens: int
    version: int | None = None
    restart: bool = False  # token ids are incomplete: after an abort it restarts from the prompt


class AttemptFinished(RolloutEvent):
    """The engine ended the answer in order: the model stopped, or max_tokens is reached."""

    request: str
    attempt: int
    tokens: int  # in this attempt
    end: End = End.stop
    version: int | None = None


class AttemptFailed(RolloutEvent):
    """Broken stream, error, time-out or invalid response. `fatal`: the engine rejects the request itself."""

    request: str
    attempt: int
    tokens: int  # in this attempt, usable
    why: str
    fatal: bool = False
    engine_died: bool = False  # the engine may have died of this request
    outdated: bool = False  # no fault: the weights changed under it, and the engine does not say which made a token


class AbortedExternally(RolloutEvent):
    """Aborted on purpose by another client of the engine: partial output is returned, never retried."""

    request: str
    attempt: int
    tokens: int
    why: str = ""
    paused: bool = False  # by that client: what waits goes on after its resume


class AbortDone(RolloutEvent):
    """An AbortAttempt was executed: nothing of this attempt runs any more. Late ones still free the worker."""

    request: str
    attempt: int
    tokens: int  # in this attempt


class RequestCancelled(RolloutEvent):
    """The client cancelled the request."""

    request: str
    why: str = ""


# ---- events: workers --------------------------------------------------------------------------------------------


class WorkerAdded(RolloutEvent):
    """A worker may be used. `up`: its engine runs already; else it is started when needed."""

    spec: WorkerSpec
    up: bool = False
    version: int | None = None  # as the engine reports it


class WorkerRemoved(RolloutEvent):
    """Remove a worker: route off, drain or abort, sleep, stop. `deadline_s` None: as the rules say."""

    worker: str
    deadline_s: float | None = None
    why: str = ""


class WorkerReclaimed(RolloutEvent):
    """The worker is lent out until WorkerReturned. Refused where too few would be left, unless forced (node loss)."""

    worker: str
    deadline: float
    why: str
    forced: bool = False
    full_notice: bool = False  # requests may run until the deadline; else at most for rules.drain_s


class WorkerReturned(RolloutEvent):
    """The worker may be used again."""

    worker: str


class WorkerUp(RolloutEvent):
    """The engine came up without a trimtab action: restarted, reconnected, or woken by the trainer."""

    worker: str
    version: int | None = None
    restarted: bool = True  # a new process; False: the same one, woken by the trainer


class WorkerDied(RolloutEvent):
    """The engine process is gone, with everything on it."""

    worker: str
    why: str


class WorkerUnhealthy(RolloutEvent):
    """The engine has failed its health check for `for_s` seconds."""

    worker: str
    for_s: float
    why: str


class WorkerHealthy(RolloutEvent):
    """The health check passes (again). Does not prove that the engine answers requests."""

    worker: str


class WorkerSlept(RolloutEvent):
    """The trainer put the engine to sleep."""

    worker: str
    keeps_weights: bool = True


class WeightsDiscarded(RolloutEvent):
    """The engine's weights were discarded."""

    worker: str


class PausedExternally(RolloutEvent):
    """Another client paused the engine (`on` false: resumed it). Requests sent there would hang."""

    worker: str
    on: bool = True


class LoadReported(RolloutEvent):
    """The engine's own load figures, taken at `at`. Stale figures are ignored."""

    worker: str
    running: int
    waiting: int
    kv_used_share: float
    at: float
    generates: bool = False  # it has made tokens since the last report, though they may not have arrived yet


class ActionDone(RolloutEvent):
    """A WorkerAction succeeded. `version`: of a start or wake, as reported. `note`: an anomaly to warn about."""

    worker: str
    attempt: int
    version: int | None = None
    note: str = ""


class ActionFailed(RolloutEvent):
    """A WorkerAction failed or timed out."""

    worker: str
    attempt: int
    why: str


# ---- events: refit, driven by the trainer ----------------------------------------------------------------------


class RefitBegun(RolloutEvent):
    """The trainer has new weights. Membership is frozen; from now on only this version is current."""

    version: int
    way: RefitWay = RefitWay.disk
    in_flight: InFlight = InFlight.keep


class RefitConfirmed(RolloutEvent):
    """The trainer confirms that this worker has this version. With an epoch: as the process of that epoch."""

    worker: str
    version: int
    epoch: int | None = None


class RefitFailed(RolloutEvent):
    """The worker did not get the weights; its weights are unknown."""

    worker: str
    version: int
    why: str


class RefitEnded(RolloutEvent):
    """The refit is over: confirmed workers serve, the others are out of service."""

    version: int


# ---- events: scaling -------------------------------------------------------------------------------------------


class ScaleRequested(RolloutEvent):
    """Manual worker count, until released or until `until`. Overrides the policy."""

    workers: int
    until: float | None = None
    why: str = ""


class ScaleReleased(RolloutEvent):
    """The policy decides again."""


class HoldRequested(RolloutEvent):
    """A named floor of workers for a while (e.g. before a validation)."""

    name: str
    workers: int
    until: float | None = None


class HoldReleased(RolloutEvent):
    """Removes the floor."""

    name: str


class WorkerRangeSet(RolloutEvent):
    """Replaces the plan's worker range."""

    min_workers: int
    max_workers: int


class DemandSeen(RolloutEvent):
    """Consumers that could use a freed worker, and for how long."""

    takers: tuple[Taker, ...] = ()


class RolloutTick(RolloutEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


class SendRequest(Message):
    """Ask the worker for the rest: prompt plus `resumed` tokens in.

    Ends in AttemptFinished, AttemptFailed, AbortedExternally or, after an AbortAttempt, AbortDone. The machine itself
    detects stalls.
    """

    request: str
    attempt: int
    worker: str
    resumed: int  # tokens of the answer so far
    max_tokens: int  # remaining
    min_tokens: int
    version: int  # of the worker
    reason: Reason


class AbortAttempt(Message):
    """Abort this attempt and report its tokens. Ends in AbortDone, or in AttemptFinished where that came first."""

    request: str
    attempt: int
    worker: str
    deadline: float
    reason: Reason


class AnswerRequest(Message):
    """Answer the client, exactly once. `of`: the request whose answer it is, where an idempotency key said so."""

    request: str
    end: End
    tokens: int
    spans: tuple[Span, ...]
    reason: Reason
    of: str = ""


class RefuseRequest(Message):
    """Reject the request; this is its answer. It may be retried after `retry_after_s`."""

    request: str
    reason: Reason
    retry_after_s: float


class WorkerAction(Frozen):
    """Run an action on a worker. Ends in ActionDone or ActionFailed; the machine enforces the deadline, too."""

    worker: str
    attempt: int
    verb: WorkerVerb
    deadline: float
    reason: Reason
    version: int | None = None  # of a refit, or expected of a started engine
    keeps_weights: bool = True  # of a sleep


class RefitReady(Frozen):
    """All members are quiesced: the trainer may send weights. Membership is frozen until RefitOver."""

    version: int
    membership: Membership
    reason: Reason


class RefitOver(Frozen):
    """The refit has ended: workers with the new version, and workers without it."""

    version: int
    current: tuple[str, ...]
    failed: tuple[str, ...]
    reason: Reason


class AnnounceScaleStep(Frozen):
    """The number of workers changes."""

    step: ScaleStep


class Warn(Frozen):
    """A warning for the operator. `worker`: the worker concerned, if any."""

    reason: Reason
    worker: str = ""


RolloutInstruction = (
    SendRequest
    | AbortAttempt
    | AnswerRequest
    | RefuseRequest
    | WorkerAction
    | RefitReady
    | RefitOver
    | AnnounceScaleStep
    | Warn
)
