"""What elastic rollout is worth in steps whose answers have a long tail: 512 prompts x 8 samples on 8 engines.

The machine and its policies are the real ones; engines, trainer and clock are simulated. An engine's decode step takes
4.4 ms, 0.05 ms for each request and 22 ns for each token in its cache, and it reads 50,000 prompt tokens a second
(fitted by hand to public measurements of an 8B model on one H200); samples of one prompt on one engine read it once.
Lengths are lognormal with the 99th percentile ten times the median, samples of one prompt being alike, at most 32,768;
nobody but the engine knows them. A step is a rollout, then a pause in which somebody trains, then new weights. Sleep
and wake take seconds, a woken engine needs the weights before it serves, a request that is moved is read again with
what it had.

`given` counts engine-seconds from asleep to wake, up to what the taker wants at a time; `stints` are the times that an
engine was lent for. `as documented` is the policy that is common elsewhere: one worker a step once the running requests
have been beyond a threshold for the stable period, cooldowns, nothing known of queued or draining ones.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState, Taker
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    End,
    Owner,
    Ownership,
    RequestClass,
    RequestSpec,
    RolloutRules,
    WorkerSpec,
    WorkerState,
    WorkerVerb,
)

SEED, STEPS = 20, 5
ENGINES, LIMIT, PROMPTS, SAMPLES = 8, 256, 512, 8
PROMPT_TOKENS, MEDIAN, MOST_TOKENS = 512, 1_600, 32_768
SPREAD_PROMPT, SPREAD_SAMPLE = 0.80, 0.58  # of the logarithm; together 0.99: the 99th percentile is ten medians
TRAINING_S, ACT_S = 60.0, {WorkerVerb.sleep: 2.0, WorkerVerb.wake: 4.0, WorkerVerb.refit: 2.0}
CUT_S = 0.1  # until an engine has let go of a request
DECODE_S, DECODE_REQUEST_S, DECODE_CACHED_S = 4.4e-3, 5e-5, 2.2e-8
READ_S = 1 / 50_000
TAKER = Taker("evaluation", 6, 90.0)
QUICK = {
    "monitoring_interval": 1.0,
    "min_stable_period": 3.0,
    "scale_up_cooldown": 5.0,
    "scale_down_cooldown": 10.0,
    "drain_timeout": 5.0,
}
SETTINGS: tuple[tuple[int, dict[str, float], str], ...] = (
    (8, {}, "all defaults"),
    (32, {}, "times as by default"),
    (8, QUICK, "quick"),
    (LIMIT, {}, "times as by default: as many as an engine has places"),
)


# ---- one engine ------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """Every running request gets a token in each decode step; a step takes longer the more there is to attend to."""

    at: float = 0.0  # up to here it is worked out
    made: float = 0.0  # tokens that a request would have that runs since the beginning
    cached: float = 0.0  # tokens in its cache
    reading_until: float = 0.0  # prompts are read first, and nothing is decoded meanwhile
    read: set[str] = field(default_factory=set)  # prompts that need not be read again
    running: dict[tuple[str, int], float] = field(default_factory=dict)  # `made` at its begin
    ends: list[tuple[float, tuple[str, int]]] = field(default_factory=list)  # `made` at its end; also of dropped ones
    news: int = 0  # grows with every change: what was foretold before does not count

    def advance(self, now: float) -> None:
        """Work out what has been made by now."""
        seconds = now - max(self.at, self.reading_until)
        self.at = max(self.at, now)
        if seconds <= 0 or not self.running:
            return
        one, growth = self._step_s(), DECODE_CACHED_S * len(self.running)
        tokens = (math.sqrt(one * one + 2 * growth * seconds) - one) / growth
        self.made += tokens
        self.cached += tokens * len(self.running)

    def add(self, key: tuple[str, int], group: str, resumed: int, left: int, now: float) -> None:
        """One request more: what it brings is read before anything else is made."""
        self.advance(now)
        brings = resumed + (0 if group in self.read else PROMPT_TOKENS)
        self.read.add(group)
        self.reading_until = max(self.reading_until, now) + brings * READ_S
        self.running[key] = self.made
        heapq.heappush(self.ends, (self.made + left, key))
        self.cached += PROMPT_TOKENS + resumed
        self.news += 1

    def drop(self, key: tuple[str, int], resumed: int, now: float) -> int:
        """One request less; the tokens that it got here."""
        self.advance(now)
        tokens = int(self.made - self.running.pop(key) + 1e-6)
        self.cached -= PROMPT_TOKENS + resumed + tokens
        self.news += 1
        return tokens

    def next_end(self) -> tuple[float, tuple[str, int]] | None:
        """When the first of its requests ends, and which."""
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        end, key = self.ends[0]
        tokens = max(end - self.made, 0.0)
        seconds = tokens * self._step_s() + DECODE_CACHED_S * len(self.running) * tokens * tokens / 2
        return max(self.at, self.reading_until) + seconds, key

    def _step_s(self) -> float:
        return DECODE_S + DECODE_REQUEST_S * len(self.running) + DECODE_CACHED_S * self.cached


# ---- policies --------------------------------------------------------------------------------------------------------


def as_documented(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """One worker more or fewer once the running requests have been beyond a threshold for the stable period."""
    config, now = state.config, sample.now
    kept = {"up": -math.inf, "down": -math.inf, "high": None, "low": None, **(state.memory.kept or {})}
    ratio = sample.running / max(sample.active * sample.capacity, 1)
    for side, beyond in (("high", ratio > config.scale_up_threshold), ("low", ratio < config.scale_down_threshold)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    long = {side: kept[side] is not None and now - kept[side] >= config.min_stable_period for side in ("high", "low")}
    workers = sample.serving
    if long["high"] and workers < sample.max_workers and now - kept["up"] >= config.scale_up_cooldown:
        workers, kept["up"] = workers + 1, now
    elif long["low"] and workers > sample.min_workers and now - kept["down"] >= config.scale_down_cooldown:
        workers, kept["down"] = workers - 1, now
    code = (
        ReasonCode.load_fits
        if workers == sample.serving
        else ReasonCode.load_high
        if long["high"]
        else ReasonCode.load_low
    )
    state = replace(state, memory=replace(state.memory, kept=kept))
    return state, Decision(workers, Reason(code, f"running load {ratio:.2f}"), f"{workers} workers serve")


# ---- the world -------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of some steps."""

    rollouts_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    given_s: float = 0.0
    stints_s: list[float] = field(default_factory=list)
    moved: int = 0
    read_again: int = 0
    scalings: int = 0


class World:
    """Engines, a trainer and a taker around one machine, under a clock that jumps."""

    def __init__(self, elastic: ElasticConfig, held: bool) -> None:
        self.held = held
        rules = RolloutRules(
            min_workers=elastic.min_workers,
            max_workers=ENGINES,
            capacity=elastic.requests_per_worker_capacity,
            monitor_s=elastic.monitoring_interval,
            drain_s=elastic.drain_timeout,
            stall_s=1e9,
            ownership=Ownership(refit=Owner.trimtab),
            classes=(RequestClass(queue_limit=PROMPTS * SAMPLES),),
        )
        self.machine = RolloutMachine(rules, elastic)
        self.engines = {f"e{number}": Engine() for number in range(ENGINES)}
        self.now = 0.0
        self.agenda: list[tuple[float, int, tuple[str, int] | e.RolloutEvent]] = []  # an engine's forecast, or an event
        self.order = itertools.count()
        self.left: dict[str, int] = {}  # tokens of the whole answer, by request that is not answered
        self.resumed: dict[tuple[str, int], int] = {}
        self.where: dict[tuple[str, int], str] = {}
        self.asleep: dict[str, float] = {}  # since when
        self.tally = Tally()
        for name in self.engines:
            self.tell(e.WorkerAdded(WorkerSpec(name, limit=LIMIT), up=True, version=0))
        self.tell(e.DemandSeen((TAKER,)))

    # ---- time ----

    def until(self, moment: float | None = None) -> None:
        """Let time pass: up to a moment, or until every request is answered and every engine has its weights."""
        while self.left if moment is None else self.now < moment:
            due = self.machine.next_deadline()
            first = self.agenda[0][0] if self.agenda else math.inf
            at = min(first, math.inf if due is None else due, math.inf if moment is None else moment)
            self.count_given(at)
            self.now = max(self.now, at)
            if first <= self.now:
                self._happens(heapq.heappop(self.agenda)[2])
            elif due is not None and due <= self.now:
                self.tell(e.RolloutTick())

    def count_given(self, at: float) -> None:
        """Engine-seconds that the taker had since the last time: no more engines than it wants."""
        self.tally.given_s += max(at - self.now, 0.0) * min(len(self.asleep), TAKER.workers)

    def _happens(self, what: tuple[str, int] | e.RolloutEvent) -> None:
        if not isinstance(what, tuple):
            self.tell(what)
            return
        name, news = what
        engine = self.engines[name]
        if news != engine.news or (end := engine.next_end()) is None:
            return
        request, attempt = key = end[1]
        tokens = self.left[request] - self.resumed[key]
        engine.drop(key, self.resumed[key], self.now)
        del self.where[key]
        self.tell(e.AttemptFinished(request, attempt, tokens, End.stop))
        self._foretell(name)

    def _foretell(self, name: str) -> None:
        engine = self.engines[name]
        if (end := engine.next_end()) is not None:
            heapq.heappush(self.agenda, (end[0], next(self.order), (name, engine.news)))

    def _later(self, seconds: float, event: e.RolloutEvent) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self.order), event))

    # ---- what the machine wants ----

    def tell(self, event: e.RolloutEvent) -> None:
        """An event, and whatever the machine wants done about it."""
        for one in self.machine.handle(event, self.now):
            if isinstance(one, e.SendRequest):
                self._send(one)
            elif isinstance(one, e.AbortAttempt):
                self._cut(one)
            elif isinstance(one, e.WorkerAction):
                self._act(one)
            elif isinstance(one, e.AnswerRequest):
                assert one.end is End.stop, one
                assert one.tokens == self.left.pop(one.request), one
            elif isinstance(one, e.AnnounceScaleStep):
                self.tally.scalings += 1
        if isinstance(event, e.ActionDone):
            self._see_who_sleeps()

    def _send(self, one: e.SendRequest) -> None:
        key, group = (one.request, one.attempt), one.request.split(".")[0]
        self.resumed[key], self.where[key] = one.resumed, one.worker
        if one.attempt > 1:
            self.tally.moved += 1
            self.tally.read_again += one.resumed
        self.engines[one.worker].add(key, group, one.resumed, self.left[one.request] - one.resumed, self.now)
        self._foretell(one.worker)

    def _cut(self, one: e.AbortAttempt) -> None:
        key = (one.request, one.attempt)
        if (name := self.where.pop(key, None)) is None:
            return  # it has ended meanwhile, and that was told
        tokens = self.engines[name].drop(key, self.resumed[key], self.now)
        self._later(CUT_S, e.AbortDone(one.request, one.attempt, tokens))
        self._foretell(name)

    def _act(self, one: e.WorkerAction) -> None:
        if one.verb is WorkerVerb.wake and (since := self.asleep.pop(one.worker, None)) is not None:
            self.tally.stints_s.append(self.now - since)
            self.engines[one.worker].read.clear()
            self._tell_takers()
        version = one.version if one.verb is WorkerVerb.refit else self.machine.version
        self._later(ACT_S.get(one.verb, 0.1), e.ActionDone(one.worker, one.attempt, version))

    def _see_who_sleeps(self) -> None:
        for view in self.machine.workers():
            if view.state is WorkerState.inactive and view.worker not in self.asleep:
                self.asleep[view.worker] = self.now
                self._tell_takers()

    def _tell_takers(self) -> None:
        """What is wanted now: whoever has got an engine does not want it any more."""
        wants = max(TAKER.workers - len(self.asleep), 0)
        self._later(0.0, e.DemandSeen((replace(TAKER, workers=wants),) if wants else ()))

    # ---- what the trainer does ----

    def step(self, number: int, lengths: dict[str, int]) -> None:
        """A rollout, a pause for training, new weights."""
        begin = self.now
        self.left = dict(lengths)
        for name in lengths:
            group = name.split(".")[0]
            self.tell(e.RequestArrived(RequestSpec(name, PROMPT_TOKENS, MOST_TOKENS, group=group)))
        if self.held:
            self.tell(e.HoldReleased("the step"))  # its requests speak for themselves now
        self.until()
        self.tally.rollouts_s.append(self.now - begin)
        if self.held:
            early_s = ACT_S[WorkerVerb.wake] + ACT_S[WorkerVerb.sleep]
            self.until(self.now + TRAINING_S - early_s)
            self.tell(e.HoldRequested("the step", ENGINES))
            self.until(self.now + early_s)
        else:
            self.until(self.now + TRAINING_S)
        self.tell(e.RefitBegun(number))
        self.until(self.now + ACT_S[WorkerVerb.refit] + 0.1)

    def over(self) -> Tally:
        """The tally, with engines that are still lent."""
        self.machine.check()
        self.tally.total_s = self.now
        self.tally.stints_s += [self.now - since for since in self.asleep.values()]
        return self.tally


def batches(seed: int) -> Iterator[dict[str, int]]:
    """Lengths of each step's answers, by request."""
    source = random.Random(seed)
    for step in range(STEPS):
        lengths = {}
        for prompt in range(PROMPTS):
            middle = math.log(MEDIAN) + source.gauss(0, SPREAD_PROMPT)
            for sample in range(SAMPLES):
                tokens = int(math.exp(middle + source.gauss(0, SPREAD_SAMPLE)))
                lengths[f"s{step}p{prompt}.{sample}"] = min(max(tokens, 8), MOST_TOKENS)
        yield lengths


def run(elastic: ElasticConfig, held: bool = False) -> Tally:
    """All steps under one policy."""
    world = World(elastic, held)
    for number, lengths in enumerate(batches(SEED), 1):
        world.step(number, lengths)
    return world.over()


def main() -> None:
    every = [length for lengths in batches(SEED) for length in lengths.values()]
    cuts = statistics.quantiles(every, n=100)
    print(
        f"{STEPS} steps of {PROMPTS} prompts x {SAMPLES} samples on {ENGINES} simulated engines of {LIMIT} places, "
        f"seed {SEED}; lengths p50 {cuts[49]:,.0f}, p99 {cuts[98]:,.0f}, longest {max(every):,}\n"
        f"training {TRAINING_S:g} s, sleep {ACT_S[WorkerVerb.sleep]:g} s, wake {ACT_S[WorkerVerb.wake]:g} s, "
        f"weights {ACT_S[WorkerVerb.refit]:g} s; {TAKER.name} can use {TAKER.workers} engines for {TAKER.use_s:g} s"
    )
    print(
        f"\n{'a step, mean of all':24}{'rollout s':>10}{'ratio':>7}{'worst s':>9}{'used':>9}{'given':>9}{'share':>7}"
        f"{'stints':>8}{'median s':>10}{'moved':>7}{'read again':>12}{'scalings':>10}"
    )
    static_s = row("static", run(ElasticConfig(policy="static", max_workers=ENGINES)), 0.0)
    for capacity, times, title in SETTINGS:
        elastic = ElasticConfig(
            requests_per_worker_capacity=capacity, max_workers=ENGINES, scale_down_requires_demand=True, **times
        )
        print(f"capacity {capacity}, {title}")
        row("  as documented", run(replace(elastic, policy=as_documented)), static_s)
        row("  as documented, held", run(replace(elastic, policy=as_documented), held=True), static_s)
        row("  threshold", run(elastic), static_s)
        row("  threshold, held", run(elastic, held=True), static_s)
    print(
        "\nused, given: engine-seconds of a whole step, training included; stints: times that an engine was lent, and "
        "for how long;\nread again: tokens of answers that moved. held: the trainer holds all engines from "
        f"{ACT_S[WorkerVerb.wake] + ACT_S[WorkerVerb.sleep]:g} s before the end of training until requests are in.\n"
        f"quick: {', '.join(f'{key} {value:g}' for key, value in QUICK.items())}.\n"
        "capacity is requests_per_worker_capacity: what is left of a step is put together on engines until they have "
        "two thirds of it,\nand the fuller an engine, the slower each of its answers."
    )


def row(name: str, tally: Tally, static_s: float) -> float:
    rollout = statistics.mean(tally.rollouts_s)
    static_s = static_s or rollout
    engine_s = ENGINES * tally.total_s
    stints = tally.stints_s
    print(
        f"{name:24}{rollout:>10.1f}{rollout / static_s:>7.3f}{max(tally.rollouts_s):>9.1f}"
        f"{(engine_s - tally.given_s) / STEPS:>9,.0f}{tally.given_s / STEPS:>9,.0f}{tally.given_s / engine_s:>7.1%}"
        f"{len(stints):>8}{statistics.median(stints) if stints else 0.0:>10.1f}{tally.moved / STEPS:>7.0f}"
        f"{tally.read_again / STEPS:>12,.0f}{tally.scalings:>10}"
    )
    return static_s


if __name__ == "__main__":
    main()
