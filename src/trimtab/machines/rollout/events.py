"""What happens to rollout workers and requests (events), and what is to be done about it (instructions).

Whoever drives the machine turns the world into events and instructions into deeds. Every instruction that takes time
has a deadline and ends in one of the events named beside it, also when it fails. An `attempt` numbers what was sent or
done, so that late news of an earlier one changes nothing, but for what is said beside it. Counts and ids only: prompts,
tokens and texts stay with the driver. Being told the same twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.machines.rollout.policies.policy import Taker
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

# ---- events: requests -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestArrived:
    """A generation is asked. An id that is known, or a class that is not, is refused before anything is touched."""

    spec: RequestSpec


@dataclass(frozen=True)
class TokensStreamed:
    """So many tokens came in this attempt so far (not since the last news). `version`: where the engine says it."""

    request: str
    attempt: int
    tokens: int
    version: int | None = None
    restart: bool = False  # some of them cannot be named, so that after a cut it starts from the prompt


@dataclass(frozen=True)
class AttemptFinished:
    """The engine ended the answer in order: the model stopped, or all tokens that were asked are there."""

    request: str
    attempt: int
    tokens: int  # in this attempt
    end: End = End.stop
    version: int | None = None


@dataclass(frozen=True)
class AttemptFailed:
    """Stream cut, error, time-out, nonsense. `fatal`: the engine says that the request itself is wrong."""

    request: str
    attempt: int
    tokens: int  # in this attempt, that are good
    why: str
    fatal: bool = False
    engine_died: bool = False  # the engine went away under it: it may have died of this request


@dataclass(frozen=True)
class AbortedExternally:
    """Somebody else than trimtab aborted it, on purpose: what there is of it is passed on, never tried again."""

    request: str
    attempt: int
    tokens: int
    why: str = ""


@dataclass(frozen=True)
class AbortDone:
    """An AbortAttempt was carried out: nothing of this attempt runs any more. Late ones free the worker all the
    same.
    """

    request: str
    attempt: int
    tokens: int  # in this attempt


@dataclass(frozen=True)
class RequestCancelled:
    """The client does not want it any more."""

    request: str
    why: str = ""


# ---- events: workers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerAdded:
    """A worker may be used. `up`: its engine runs already; else it is to be started when it is needed."""

    spec: WorkerSpec
    up: bool = False
    version: int | None = None  # as the engine reports it


@dataclass(frozen=True)
class WorkerRemoved:
    """A worker is to go for good: route off, drain or abort, sleep, stop. `deadline_s` None: as the rules say."""

    worker: str
    deadline_s: float | None = None
    why: str = ""


@dataclass(frozen=True)
class WorkerReclaimed:
    """The worker is given to others until WorkerReturned, with notice. Refused where too few would be left, unless
    forced (its node goes, whatever anybody says)."""

    worker: str
    deadline: float
    why: str
    forced: bool = False
    full_notice: bool = False  # what runs there has all of that time; else as long as a drain takes, for somebody waits


@dataclass(frozen=True)
class WorkerReturned:
    """The worker may be used again."""

    worker: str


@dataclass(frozen=True)
class WorkerUp:
    """The engine is up (again) without trimtab having asked: it was restarted, came back, or the trainer woke it."""

    worker: str
    version: int | None = None
    restarted: bool = True  # another process than before; False: the same, woken by the trainer


@dataclass(frozen=True)
class WorkerDied:
    """The engine is gone, and everything on it."""

    worker: str
    why: str


@dataclass(frozen=True)
class WorkerUnhealthy:
    """The engine has not passed a health check for so long."""

    worker: str
    for_s: float
    why: str


@dataclass(frozen=True)
class WorkerHealthy:
    """The engine passes its health check (again). Says nothing about whether it answers requests."""

    worker: str


@dataclass(frozen=True)
class WorkerSlept:
    """The trainer put it to sleep."""

    worker: str
    keeps_weights: bool = True


@dataclass(frozen=True)
class WeightsDiscarded:
    """Its weights were discarded by somebody."""

    worker: str


@dataclass(frozen=True)
class PausedExternally:
    """Somebody else than trimtab paused the engine (`on` false: resumed it). Requests sent there would hang."""

    worker: str
    on: bool = True


@dataclass(frozen=True)
class LoadReported:
    """The engine's own figures, taken at `at`. Old ones are not believed."""

    worker: str
    running: int
    waiting: int
    kv_used_share: float
    at: float


@dataclass(frozen=True)
class ActionDone:
    """An Act ended well. `version`: of a start or wake, as reported. `note`: what is odd about it all the same."""

    worker: str
    attempt: int
    version: int | None = None
    note: str = ""


@dataclass(frozen=True)
class ActionFailed:
    """An Act failed or took too long."""

    worker: str
    attempt: int
    why: str


# ---- events: refit, which is the trainer's ----------------------------------------------------------------------


@dataclass(frozen=True)
class RefitBegun:
    """The trainer has new weights. Membership is frozen; from now on only these weights are current."""

    version: int
    way: RefitWay = RefitWay.disk
    in_flight: InFlight = InFlight.keep


@dataclass(frozen=True)
class RefitConfirmed:
    """The trainer says that this worker has this version. With an epoch: as the process it was in that epoch."""

    worker: str
    version: int
    epoch: int | None = None


@dataclass(frozen=True)
class RefitFailed:
    """The worker has not got the weights; what it has now, nobody knows."""

    worker: str
    version: int
    why: str


@dataclass(frozen=True)
class RefitEnded:
    """The refit is over: whoever is confirmed serves, whoever is not is out of service."""

    version: int


# ---- events: how many -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleRequested:
    """A person wants so many workers, until released, or until then. Wins over the policy."""

    workers: int
    until: float | None = None
    why: str = ""


@dataclass(frozen=True)
class ScaleReleased:
    """The policy decides again."""


@dataclass(frozen=True)
class HoldRequested:
    """At least so many workers are wanted for a while (before a validation), under a name."""

    name: str
    workers: int
    until: float | None = None


@dataclass(frozen=True)
class HoldReleased:
    """They are not wanted any more."""

    name: str


@dataclass(frozen=True)
class WorkerRangeSet:
    """The plan's range is another."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class DemandSeen:
    """Who could use a freed worker, and for how long."""

    takers: tuple[Taker, ...] = ()


@dataclass(frozen=True)
class RolloutTick:
    """Time has passed."""


RolloutEvent = (
    RequestArrived
    | TokensStreamed
    | AttemptFinished
    | AttemptFailed
    | AbortedExternally
    | AbortDone
    | RequestCancelled
    | WorkerAdded
    | WorkerRemoved
    | WorkerReclaimed
    | WorkerReturned
    | WorkerUp
    | WorkerDied
    | WorkerUnhealthy
    | WorkerHealthy
    | WorkerSlept
    | WeightsDiscarded
    | PausedExternally
    | LoadReported
    | ActionDone
    | ActionFailed
    | RefitBegun
    | RefitConfirmed
    | RefitFailed
    | RefitEnded
    | ScaleRequested
    | ScaleReleased
    | HoldRequested
    | HoldReleased
    | WorkerRangeSet
    | DemandSeen
    | RolloutTick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SendRequest:
    """Ask the worker for the rest: prompt plus `resumed` tokens in. Ends in Finished, Broke, AbortedExternally or,
    after an AbortAttempt, AbortDone. The machine itself watches that tokens come."""

    request: str
    attempt: int
    worker: str
    resumed: int  # tokens of the answer that exist already
    max_tokens: int  # that are left
    min_tokens: int
    version: int  # that the worker has
    reason: Reason


@dataclass(frozen=True)
class AbortAttempt:
    """Cut this attempt and say what it had made. Ends in AbortDone, or in Finished where that came first."""

    request: str
    attempt: int
    worker: str
    deadline: float
    reason: Reason


@dataclass(frozen=True)
class AnswerRequest:
    """Tell the client, exactly once. `of`: the request whose answer it is, where a key said so."""

    request: str
    end: End
    tokens: int
    spans: tuple[Span, ...]
    reason: Reason
    of: str = ""


@dataclass(frozen=True)
class RefuseRequest:
    """Tell the client that it was not accepted. This is its answer; it may come again after `retry_after_s`."""

    request: str
    reason: Reason
    retry_after_s: float


@dataclass(frozen=True)
class WorkerAction:
    """Do something to a worker. Ends in ActionDone or ActionFailed; the deadline is the machine's, too."""

    worker: str
    attempt: int
    verb: WorkerVerb
    deadline: float
    reason: Reason
    version: int | None = None  # of a refit, or the one a started engine should have
    keeps_weights: bool = True  # of a sleep


@dataclass(frozen=True)
class RefitReady:
    """All members are quiet: the trainer may send weights. Membership is frozen until RefitOver."""

    version: int
    membership: Membership
    reason: Reason


@dataclass(frozen=True)
class RefitOver:
    """The refit has ended, with this outcome: who serves the new version, and who does not."""

    version: int
    current: tuple[str, ...]
    failed: tuple[str, ...]
    reason: Reason


@dataclass(frozen=True)
class AnnounceScaleStep:
    """The number of workers changes."""

    step: ScaleStep


@dataclass(frozen=True)
class Warn:
    """Somebody should know. `worker`: whom it is about, if anybody."""

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
