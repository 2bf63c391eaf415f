"""How many workers a stream of requests needs: load that comes and goes, and is never over.

Called by policies for load that does not come in steps. It remembers the loads of the last minutes and asks: with how
many workers would they have fitted, all but a few? Fewer workers are slower workers, so that more requests are there at
a time. Up is judged by the last looks and by where the load is going until a worker could be awake; down by all that is
remembered.

What must never happen: a step down that the loads of the last minutes would have filled again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trimtab.machines.rollout.policies.load import LoadSample
from trimtab.model.elastic_config import ElasticConfig

REMEMBERED_S = 180.0  # loads of so long decide whether a worker is spare
BINS = 60  # of what is remembered; of each the greatest load
WAIT_S = 1.0  # in the queue, that nobody minds
MAX_WAITING_SHARE = 0.25  # and at most such a share of the load waits
FITTED = 0.9  # of those times it must have fitted
RISING_S = 60.0  # the load's way up is taken from so long
QUICK_LOOKS = 3  # looks whose mean decides on a step up


@dataclass(frozen=True)
class StreamMemory:
    """What is remembered of a stream. Plain numbers, so that it can be in a snapshot."""

    loads: tuple[tuple[float, int, int], ...] = ()  # time, requests that were not answered, workers that served
    since: float | None = None  # the first look of all
    up_at: float | None = None  # of the last step up
    down_at: float | None = None

    def look(self, sample: LoadSample) -> StreamMemory:
        """With this sample in it."""
        now, load, workers = sample.now, sample.load, max(sample.active, 1)
        loads = [entry for entry in self.loads if entry[0] > now - REMEMBERED_S]
        if loads and now - loads[-1][0] < REMEMBERED_S / BINS * 0.99 and loads[-1][2] == workers:
            loads[-1] = (loads[-1][0], max(loads[-1][1], load), workers)
        else:
            loads.append((now, load, workers))
        return replace(self, loads=tuple(loads), since=now if self.since is None else self.since)

    def stepped(self, sample: LoadSample, workers: int) -> StreamMemory:
        """So many are to serve from now on."""
        return replace(self, up_at=sample.now) if workers > sample.serving else replace(self, down_at=sample.now)

    def may_down(self, now: float, config: ElasticConfig) -> bool:
        """Whether the last steps, and the first look, were long enough ago."""
        waits = (
            (self.since, config.min_stable_period),
            (self.down_at, config.min_stable_period),
            (self.up_at, config.scale_down_cooldown),
        )
        return all(at is None or now - at >= wait_s for at, wait_s in waits)


def on(capacity: int, load: float, was: int, workers: int) -> float:
    """The load that `was` workers had, had there been so many workers."""
    if load <= 0 or was == workers:
        return load
    # A full worker is taken to be half as fast as an empty one; then 1/load is linear in 1/workers.
    inverse = 1 / load - (1 / workers - 1 / was) / capacity
    return 1 / inverse if inverse > 0 else math.inf


def room(sample: LoadSample, workers: int) -> float:
    """The load that so many workers take, with nobody waiting for longer than is tolerated."""
    each_s = sample.service_s
    return workers * sample.capacity * (1 + (min(WAIT_S / each_s, MAX_WAITING_SHARE) if each_s else 0.0))


def up(stream: StreamMemory, sample: LoadSample, ahead_s: float) -> int:
    """The workers that the load of now, and where it is going, asks for; never fewer than serve."""
    latest = stream.loads[-QUICK_LOOKS:]
    now = sample.now
    level = sum(load for _, load, _ in latest) / len(latest)
    earlier = next(entry for entry in stream.loads if entry[0] > now - RISING_S or entry is stream.loads[-1])
    rising = 0.0
    if earlier[0] < latest[0][0]:
        at, load, there = earlier
        rising = max(0.0, (level - on(sample.capacity, load, there, max(sample.active, 1))) / (now - at))
    expected = min(level, sample.load) + rising * ahead_s
    workers, active = max(sample.serving, 1), max(sample.active, 1)
    while workers < sample.max_workers and on(sample.capacity, expected, active, workers) > room(sample, workers):
        workers += 1
    return max(workers, sample.serving)


def down(stream: StreamMemory, sample: LoadSample) -> int:
    """The fewest workers on which the loads of the last minutes would have fitted, all but a few."""
    known_s = sample.now - (stream.since if stream.since is not None else sample.now)
    # What is known of less than that time may be the beginning of more: twice the load, at first.
    caution = 1 + max(0.0, 1 - known_s / REMEMBERED_S)
    workers = max(
        sample.min_workers, math.ceil(sample.serving / 2)
    )  # what is wrong about half of them can be made good
    while workers < sample.serving:
        max_load = room(sample, workers)
        over = sum(on(sample.capacity, caution * load, there, workers) > max_load for _, load, there in stream.loads)
        if over <= (1 - FITTED) * len(stream.loads):
            break
        workers += 1
    return workers
