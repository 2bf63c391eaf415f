"""Worker count for a stream of requests: load that rises and falls, and never ends.

Used by policies for load that does not arrive in steps. It keeps the loads of the last minutes and computes with how
many workers nearly all of them would have fitted; fewer workers are slower workers, so more requests are in flight. Up
is judged by the last evaluations and the trend until a worker could be awake; down by all loads kept.

What must never happen: a step down that the loads of the last minutes would have filled again.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.machines.rollout.policies.load import LoadSample
from trimtab.model.elastic_config import ElasticConfig

REMEMBERED_S = 180.0  # history that decides whether a worker is spare
BINS = 60  # of the history; each keeps its peak
WAIT_S = 1.0  # tolerable queueing time
MAX_WAITING_SHARE = 0.25  # at most this share of the load waits
FITTED = 0.9  # share of the history that must have fitted
RISING_S = 60.0  # window of the upward trend
QUICK_EVALUATIONS = 3  # evaluations whose mean decides on a step up


class StreamMemory(Frozen):
    """Load history of a stream. Plain numbers: part of snapshots."""

    loads: tuple[tuple[float, int, int], ...] = ()  # time, unanswered requests, serving workers
    since: float | None = None  # the first evaluation
    up_at: float | None = None  # of the last step up
    down_at: float | None = None

    def look(self, sample: LoadSample) -> StreamMemory:
        now, load, workers = sample.now, sample.load, max(sample.active, 1)
        loads = [entry for entry in self.loads if entry[0] > now - REMEMBERED_S]
        if loads and now - loads[-1][0] < REMEMBERED_S / BINS * 0.99 and loads[-1][2] == workers:
            loads[-1] = (loads[-1][0], max(loads[-1][1], load), workers)
        else:
            loads.append((now, load, workers))
        return replace(self, loads=tuple(loads), since=now if self.since is None else self.since)

    def stepped(self, sample: LoadSample, workers: int) -> StreamMemory:
        return replace(self, up_at=sample.now) if workers > sample.serving else replace(self, down_at=sample.now)

    def may_down(self, now: float, config: ElasticConfig) -> bool:
        waits = (
            (self.since, config.min_stable_period),
            (self.down_at, config.min_stable_period),
            (self.up_at, config.scale_down_cooldown),
        )
        return all(at is None or now - at >= wait_s for at, wait_s in waits)


def on(capacity: int, load: float, was: int, workers: int) -> float:
    """The load that `was` workers had, converted to another number of workers."""
    if load <= 0 or was == workers:
        return load
    # Model: a full worker is half as fast as an empty one; then 1/load is linear in 1/workers.
    inverse = 1 / load - (1 / workers - 1 / was) / capacity
    return 1 / inverse if inverse > 0 else math.inf


def max_load_of(sample: LoadSample, workers: int) -> float:
    """The load that so many workers take with a tolerable queueing time."""
    each_s = sample.service_s
    return workers * sample.capacity * (1 + (min(WAIT_S / each_s, MAX_WAITING_SHARE) if each_s else 0.0))


def up(stream: StreamMemory, sample: LoadSample, ahead_s: float) -> int:
    """Workers needed for the current load and its trend; never fewer than serve."""
    latest = stream.loads[-QUICK_EVALUATIONS:]
    now = sample.now
    level = sum(load for _, load, _ in latest) / len(latest)
    earlier = next(entry for entry in stream.loads if entry[0] > now - RISING_S or entry is stream.loads[-1])
    rising = 0.0
    if earlier[0] < latest[0][0]:
        at, load, there = earlier
        rising = max(0.0, (level - on(sample.capacity, load, there, max(sample.active, 1))) / (now - at))
    expected = min(level, sample.load) + rising * ahead_s
    workers, active = max(sample.serving, 1), max(sample.active, 1)
    while workers < sample.max_workers and on(sample.capacity, expected, active, workers) > max_load_of(
        sample, workers
    ):
        workers += 1
    return max(workers, sample.serving)


def down(stream: StreamMemory, sample: LoadSample) -> int:
    """The fewest workers on which nearly all loads of the last minutes would have fitted."""
    known_s = sample.now - (stream.since if stream.since is not None else sample.now)
    # A short history may be the begin of a rise: up to twice the load counts at first.
    caution = 1 + max(0.0, 1 - known_s / REMEMBERED_S)
    workers = max(sample.min_workers, math.ceil(sample.serving / 2))  # at most half of them at once
    while workers < sample.serving:
        max_load = max_load_of(sample, workers)
        over = sum(on(sample.capacity, caution * load, there, workers) > max_load for _, load, there in stream.loads)
        if over <= (1 - FITTED) * len(stream.loads):
            break
        workers += 1
    return workers
