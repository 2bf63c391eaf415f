"""Whether engines on the trainer's own GPUs are worth waking for a training cycle, and when the trainer takes them.

A cycle is what lies between two weight syncs: `collections` times, the trainer waits for `required` samples and trains
on them. Dedicated engines generate all the time; shared ones only before the training, and waking and releasing them
costs `switch_s`, in which the rebuilt sync group counts too.

With the shared engines awake until n samples are buffered, the k-th collection waits for k * required - n samples of
the dedicated ones. The trainer never waits once n is at least k * required - rate * (k - 1) * train_s for every k;
more would be generated slower than it is trained on anyway.
"""

from __future__ import annotations

import math

from trimtab.core.frozen import Frozen


class TrainingCycle(Frozen):
    """What is known at a weight sync about the cycle that begins."""

    required: int  # samples of one collection
    collections: int  # between two weight syncs
    buffered: int  # samples that wait already
    train_s: float  # of one collection
    dedicated_rate: float  # samples per second of the engines that never train
    shared_rate: float  # of the others, in addition
    switch_s: float  # waking with its weight sync, draining, and sleep


class Handover(Frozen):
    """The better of both ways through a cycle."""

    samples: int  # buffered when the trainer takes the shared engines' GPUs
    with_s: float  # duration of the cycle with the shared engines
    without_s: float


def plan_handover(cycle: TrainingCycle) -> Handover:
    """How many samples to wait for with the shared engines awake, and what the cycle takes with and without them."""
    rounds = range(1, cycle.collections + 1)
    never_waits = max(
        k * cycle.required - cycle.dedicated_rate * (k - 1) * cycle.train_s if cycle.dedicated_rate > 0 else math.inf
        for k in rounds
    )
    samples = math.ceil(min(never_waits, cycle.required * cycle.collections))
    missing = max(0, samples - cycle.buffered)
    rate = cycle.dedicated_rate + cycle.shared_rate
    gather_s = missing / rate if rate > 0 else math.inf if missing else 0.0
    with_s = cycle.switch_s + gather_s + _train_s(cycle, max(samples, cycle.buffered))
    return Handover(samples, with_s, _train_s(cycle, cycle.buffered))


def _train_s(cycle: TrainingCycle, buffered: int) -> float:
    """Until the end of the last collection, with the dedicated engines alone."""
    now = 0.0
    for k in range(1, cycle.collections + 1):
        missing = k * cycle.required - buffered
        if missing > 0:
            now = max(now, missing / cycle.dedicated_rate) if cycle.dedicated_rate > 0 else math.inf
        now += cycle.train_s
    return now
