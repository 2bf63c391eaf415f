"""Reasons and stories: why anything waits, starts, changes or ends.

A code for programs and a sentence for users, set where the decision is made and never changed afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence

from trimtab.core.frozen import Message


class ReasonCode(str, enum.Enum):
    """Why something waits, starts, is evicted or fails."""

    # waits
    queued = "QUEUED"  # submitted just now, or behind others in the queue
    quota = "QUOTA"  # the pool's quota is used up
    no_room = "NO_ROOM"  # no node has enough free capacity
    slot_limit = "SLOT_LIMIT"  # the pool has reached its limit of dynamic slots
    turn = "TURN"  # another tenant of the slot is active
    evicting = "EVICTING"  # capacity is being freed: other tasks are stopping
    behind = "BEHIND"  # capacity is free, but reserved for a task that has waited longer
    drained = "DRAINED"  # the pool accepts no new tasks
    no_node = "NO_NODE"  # the node it needs is gone; it may come back
    back_off = "BACK_OFF"  # failed recently; retried soon
    # starts
    placed = "PLACED"  # free capacity
    reserved = "RESERVED"  # a reserved slot
    borrowed = "BORROWED"  # an idle reserved slot of another owner
    reused = "REUSED"  # an idle dynamic slot
    preempted = "PREEMPTED"  # capacity freed by evicting others
    found = "FOUND"  # was running when the state was lost
    # evictions and stops
    priority = "PRIORITY"  # same pool, by priority gap
    label_rule = "LABEL_RULE"  # same pool, by a label rule
    cross_pool = "CROSS_POOL"  # from another pool
    owner_returned = "OWNER_RETURNED"  # a borrower leaves a reserved slot
    by_hand = "BY_HAND"  # requested by a user
    node_lost = "NODE_LOST"
    slot_lost = "SLOT_LOST"
    gang_broken = "GANG_BROKEN"  # a member is gone, so the whole gang stops
    process_died = "PROCESS_DIED"
    client_died = "CLIENT_DIED"  # its lifetime was bound to the client that submitted it
    # ends
    completed = "COMPLETED"
    never_fits = "NEVER_FITS"  # requests more than any node, or the quota, has
    too_late = "TOO_LATE"  # its wait deadline passed
    start_failed = "START_FAILED"  # the constructor raised, or the class could not be unpickled
    start_timeout = "START_TIMEOUT"
    raised = "RAISED"  # its entry method raised
    restarts_used = "RESTARTS_USED"
    refused = "REFUSED"  # submitted with "start at once or not at all"
    pool_dropped = "POOL_DROPPED"
    # nodes
    joined = "JOINED"  # Ray lists it for the first time
    returned = "RETURNED"  # was lost, and is back
    unlike = "UNLIKE"  # other GPUs than most nodes, or another number of them
    changed = "CHANGED"  # its resources changed
    link_silent = "LINK_SILENT"  # no heartbeat on its connection; it may be frozen
    link_broken = "LINK_BROKEN"  # its connection broke and nothing listens there any more
    ray_lost = "RAY_LOST"  # Ray lists it no longer
    drain_asked = "DRAIN_ASKED"  # a drain was requested
    drain_seen = "DRAIN_SEEN"  # Ray announced that it will go (spot termination, idle, autoscaler)
    drain_over = "DRAIN_OVER"  # the drain was cancelled
    left = "LEFT"  # went as announced
    flapping = "FLAPPING"  # joined and left too often; not used until it is steady
    steady = "STEADY"  # up long enough to be trusted again
    node_draining = "NODE_DRAINING"  # what runs on it must move before its deadline
    # roles
    stay = "STAY"  # the current placement is as good as any new one
    regroup = "REGROUP"  # shares its GPUs with other components than before
    # elastic groups
    grow = "GROW"  # there is capacity for more members
    shrink = "SHRINK"  # a member's node will go, or its capacity was taken
    replaced = "REPLACED"  # a member was lost
    unhealthy = "UNHEALTHY"  # a member's health check raised or timed out
    hung = "HUNG"  # a member did not end its step in time
    cap = "CAP"  # restart limit reached; no more are tried for now
    below_min = "BELOW_MIN"  # fewer members than the minimum; the group waits, with a deadline
    began = "BEGAN"  # the first world of the group
    redone = "REDONE"  # a step was interrupted and runs again from its start
    # rollout
    load_high = "LOAD_HIGH"  # load above the target: more workers
    load_low = "LOAD_LOW"  # the load fits fewer workers
    load_fits = "LOAD_FITS"  # the number of workers fits the load
    load_unknown = "LOAD_UNKNOWN"  # no load figures, so nothing is scaled
    not_yet = "NOT_YET"  # a step is due, but not for long enough, or too soon after the last one
    limits = "LIMITS"  # the minimum or maximum number of workers is reached
    no_taker = "NO_TAKER"  # no demand would use the worker for longer than releasing and regaining it takes
    switched_off = "SWITCHED_OFF"  # elastic scaling is off
    policy_fault = "POLICY_FAULT"  # the scaling policy raised, or returned an invalid decision
    sent = "SENT"  # dispatched to a worker
    moved = "MOVED"  # continues on another worker, with its tokens so far
    restarted = "RESTARTED"  # starts again on another worker, from the prompt
    retries_used = "RETRIES_USED"  # broke too often; not retried
    passed_on = "PASSED_ON"  # aborted or paused by another client than trimtab: the partial output is the answer
    cancelled = "CANCELLED"  # cancelled by the client
    queue_full = "QUEUE_FULL"  # the queue of its class is full
    version_gone = "VERSION_GONE"  # the requested weights are no longer served
    version_awaited = "VERSION_AWAITED"  # the requested weights have not arrived yet
    current = "CURRENT"  # a worker has the trainer's weights, confirmed
    outdated = "OUTDATED"  # a worker's weights are not the trainer's, or unconfirmed
    emptied = "EMPTIED"  # a worker's weights were discarded
    refitting = "REFITTING"  # new weights are being loaded
    refit_failed = "REFIT_FAILED"  # the weights did not arrive, or were not confirmed
    asleep = "ASLEEP"  # memory released, or taken out of routing
    memory_kept = "MEMORY_KEPT"  # an engine sleeps, but its GPU memory was not released
    taken = "TAKEN"  # a worker is lent to others, with notice
    held = "HELD"  # a number of workers is held ready
    not_reached = "NOT_REACHED"  # an engine to be attached has not answered yet
    faulty = "FAULTY"  # a worker breaks requests, or ignores commands
    # loop
    too_few = "TOO_FEW"  # too few iterations measured to tell drift from noise
    costs_steady = "COSTS_STEADY"  # no cost differs from the planned one beyond the noise
    no_gain = "NO_GAIN"  # no plan is faster by more than real runs can show
    within_noise = "WITHIN_NOISE"  # a plan looks faster, but not if the cost changes are noise
    not_worth = "NOT_WORTH"  # the move costs more than it gains within the horizon
    dwell = "DWELL"  # a move would pay, but the last one is too recent
    model_off = "MODEL_OFF"  # the model does not predict the measured times, so its gains are not trusted
    drifted = "DRIFTED"  # costs differ from the planned ones, and another plan pays
    room_changed = "ROOM_CHANGED"  # nodes or a quota changed, and another plan pays
    better_plan = "BETTER_PLAN"  # another plan pays, with unchanged costs and nodes
    plan_gone = "PLAN_GONE"  # GPUs of the plan are gone or will go: it has to move
    no_plan = "NO_PLAN"  # no plan fits the cluster: the run waits, with a deadline
    moving = "MOVING"  # a move is under way
    arrived = "ARRIVED"  # the move is complete and the new plan runs
    fell_short = "FELL_SHORT"  # the last move gained less than half of the predicted gain
    stage_failed = "STAGE_FAILED"  # a stage of a move failed or timed out: back to the old plan
    rolled_back = "ROLLED_BACK"  # the old plan runs again
    stuck = "STUCK"  # neither the old nor the new plan can run: the run stops


class Reason(Message):
    """The cause of a wait, start, eviction or end: a code for programs and a sentence for users."""

    code: ReasonCode
    sentence: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.sentence}"


class StoryEntry(Message):
    """One entry of a story: time, new state and reason."""

    at: float
    state: str
    reason: Reason


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(words: Sequence[str], most: int = 4) -> str:
    """The first words of a list, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


STORY_KEPT = 100  # entries of a story


def add_story_entry(story: list[StoryEntry], entry: StoryEntry) -> None:
    """Append an entry; beyond the limit the first entry stays and the oldest after it are dropped."""
    story.append(entry)
    if len(story) > STORY_KEPT:
        del story[1 : len(story) - STORY_KEPT + 1]


def record(
    stories: dict[str, list[StoryEntry]], subject: str, entry: StoryEntry, most: int, *keep: Container[str]
) -> None:
    """Append to the story of a subject; beyond `most` stories, the oldest that is in none of `keep` is dropped."""
    add_story_entry(stories.setdefault(subject, []), entry)
    if len(stories) > most:
        keep = (*keep, (subject,))
        del stories[next(known for known in stories if not any(known in kept for kept in keep))]
