"""Reasons and stories: why anything waits, starts, changes or ends, in every room of the house.

A constant for programs and a sentence for people. Whoever decides says it; nobody changes it afterwards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReasonCode(str, enum.Enum):
    """Why something waits, starts, is evicted or fails: the constants of Reasons."""

    # waits
    queued = "QUEUED"  # submitted a moment ago, or behind others in the queue
    quota = "QUOTA"  # the pool's quota is used up
    no_room = "NO_ROOM"  # no node has enough free
    slot_limit = "SLOT_LIMIT"  # the pool has all the dynamic slots it may have
    turn = "TURN"  # another tenant of the slot is active
    evicting = "EVICTING"  # room is being made: others are stopping
    behind = "BEHIND"  # room exists, but is kept for somebody who has waited longer
    drained = "DRAINED"  # the pool takes nothing new
    no_node = "NO_NODE"  # the node it needs is gone; it may come back
    back_off = "BACK_OFF"  # it failed a moment ago and is tried again soon
    # starts
    placed = "PLACED"  # free capacity
    reserved = "RESERVED"  # a reserved slot
    borrowed = "BORROWED"  # an idle reserved slot of others
    reused = "REUSED"  # an idle dynamic slot
    preempted = "PREEMPTED"  # room made by evicting others
    found = "FOUND"  # it was running when nothing was remembered of it
    # evictions and stops
    priority = "PRIORITY"  # same pool, by priority gap
    label_rule = "LABEL_RULE"  # same pool, by a label rule
    cross_pool = "CROSS_POOL"  # from another pool
    owner_returned = "OWNER_RETURNED"  # a borrower leaves a reserved slot
    by_hand = "BY_HAND"  # somebody asked for it
    node_lost = "NODE_LOST"
    slot_lost = "SLOT_LOST"
    gang_broken = "GANG_BROKEN"  # a member is gone, so all of it stops
    process_died = "PROCESS_DIED"
    client_died = "CLIENT_DIED"  # it was to end with the client that submitted it
    # ends
    completed = "COMPLETED"
    never_fits = "NEVER_FITS"  # asks more than any node, or the quota, has
    too_late = "TOO_LATE"  # waited until its deadline
    start_failed = "START_FAILED"  # the constructor raised, or the class could not be unpacked
    start_timeout = "START_TIMEOUT"
    raised = "RAISED"  # its entry method raised
    restarts_used = "RESTARTS_USED"
    refused = "REFUSED"  # asked to start at once or not at all
    pool_dropped = "POOL_DROPPED"
    # nodes
    joined = "JOINED"  # Ray has it for the first time
    returned = "RETURNED"  # it was lost, and is back
    unlike = "UNLIKE"  # it has other GPUs than the rest, or another number of them
    changed = "CHANGED"  # its figures are others than before
    link_silent = "LINK_SILENT"  # its own link says nothing; it may be frozen
    link_broken = "LINK_BROKEN"  # its own link broke and nothing listens there any more
    ray_lost = "RAY_LOST"  # Ray does not have it any more
    drain_asked = "DRAIN_ASKED"  # somebody asked for it to be emptied
    drain_seen = "DRAIN_SEEN"  # Ray says that it will go (spot termination, idle, autoscaler)
    drain_over = "DRAIN_OVER"  # it stays after all
    left = "LEFT"  # it went as announced
    flapping = "FLAPPING"  # it came and went too often; not used until it has been steady
    steady = "STEADY"  # it has been there long enough to be trusted again
    node_draining = "NODE_DRAINING"  # what is on it has to move before its deadline
    # roles
    stay = "STAY"  # what is there is as good as anything new
    regroup = "REGROUP"  # shares its GPUs with others than before
    # elastic groups
    grow = "GROW"  # there is room for more members
    shrink = "SHRINK"  # a member's node will go, or its room was taken
    replaced = "REPLACED"  # a member was lost
    unhealthy = "UNHEALTHY"  # a member's health call raised or took too long
    hung = "HUNG"  # a member did not end its step in time
    cap = "CAP"  # members were started again so often that no more are tried
    below_min = "BELOW_MIN"  # fewer members than the least; the group waits, with a deadline
    began = "BEGAN"  # the first world of the group
    redone = "REDONE"  # a step was interrupted, so it is done again, whole
    # rollout
    load_high = "LOAD_HIGH"  # more load than the workers should have: more of them
    load_low = "LOAD_LOW"  # the load fits fewer workers
    load_fits = "LOAD_FITS"  # as many workers as the load asks for
    load_unknown = "LOAD_UNKNOWN"  # nobody could say what the load is, so nothing is done about it
    not_yet = "NOT_YET"  # the load asks for a step, but not for long enough, or too soon after the last one
    limits = "LIMITS"  # so many workers at least, or at most
    no_taker = "NO_TAKER"  # nobody could use the worker for longer than giving it up and having it back takes
    switched_off = "SWITCHED_OFF"  # elastic scaling is off
    policy_fault = "POLICY_FAULT"  # the scaling policy raised, or answered nonsense
    sent = "SENT"  # handed to a worker
    moved = "MOVED"  # goes to another worker, with the tokens it has
    restarted = "RESTARTED"  # goes to another worker, from the prompt
    retries_used = "RETRIES_USED"  # it broke so often that it is not tried again
    passed_on = "PASSED_ON"  # others than trimtab aborted or paused it: what there is of it is the answer
    cancelled = "CANCELLED"  # the client does not want it any more
    queue_full = "QUEUE_FULL"  # so many of its class wait already
    version_gone = "VERSION_GONE"  # the weights it asked for are not served any more
    version_awaited = "VERSION_AWAITED"  # the weights it asked for have not come yet
    current = "CURRENT"  # a worker has the trainer's weights, confirmed
    outdated = "OUTDATED"  # a worker's weights are not the trainer's, or nobody vouches for them
    emptied = "EMPTIED"  # a worker's weights were discarded
    refitting = "REFITTING"  # new weights are on their way
    refit_failed = "REFIT_FAILED"  # they did not arrive, or nobody confirmed that they did
    asleep = "ASLEEP"  # memory given back, or routed off
    memory_kept = "MEMORY_KEPT"  # an engine sleeps, and its GPU memory was not given back
    taken = "TAKEN"  # a worker is given to others, with notice
    held = "HELD"  # so many workers are held ready
    not_reached = "NOT_REACHED"  # an engine that is to be attached has not answered yet
    faulty = "FAULTY"  # a worker breaks requests, or does not do what it is told
    # loop
    too_few = "TOO_FEW"  # too few iterations were measured to tell drift from noise
    costs_steady = "COSTS_STEADY"  # nothing costs other than what the plan was made for, beyond the noise
    no_gain = "NO_GAIN"  # no plan is faster by more than real runs tell apart
    within_noise = "WITHIN_NOISE"  # a plan looks faster, but would not be if the costs were noise
    not_worth = "NOT_WORTH"  # the move costs more than it would gain in the iterations that count
    dwell = "DWELL"  # a move would pay, but the last one is too short a while ago
    model_off = "MODEL_OFF"  # the model does not predict what is measured, so nothing is moved for what it promises
    drifted = "DRIFTED"  # costs are others than the plan was made for, and another plan pays
    room_changed = "ROOM_CHANGED"  # nodes or a quota are others than before, and another plan pays
    better_plan = "BETTER_PLAN"  # another plan pays, with costs and nodes as they were
    plan_gone = "PLAN_GONE"  # GPUs of the plan are gone or will go: it has to move
    no_plan = "NO_PLAN"  # nothing fits what is there: the run waits, with a deadline
    moving = "MOVING"  # a move is under way
    arrived = "ARRIVED"  # the move is done and the new plan runs
    fell_short = "FELL_SHORT"  # the last move gained less than half of what was promised
    stage_failed = "STAGE_FAILED"  # a stage of a move failed or took too long: back to the old plan
    rolled_back = "ROLLED_BACK"  # the old plan runs again
    stuck = "STUCK"  # there is no way back and no way on: the run stops


@dataclass(frozen=True)
class Reason:
    """The stated cause of a wait, start, eviction or end: a constant for programs and a sentence for people."""

    code: ReasonCode
    sentence: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.sentence}"


@dataclass(frozen=True)
class StoryEntry:
    """One line of a story: when, what became of it, and why."""

    at: float
    state: str
    reason: Reason


STORY_KEPT = 100  # chapters of one story


def add_story_entry(story: list[StoryEntry], chapter: StoryEntry) -> None:
    """One more chapter of a story. Where there are too many, the first stays and the oldest behind it go."""
    story.append(chapter)
    del story[1 : max(1, len(story) - STORY_KEPT + 1)]
