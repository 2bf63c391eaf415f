"""Drives the rollout machine under a virtual clock, with modelled engines, a trainer, and clients.

Two kinds of load. Closed loop: all prompts of a step arrive at once; the next step begins after the last answer,
training and the weight update. Open loop: requests arrive as in a trace. Invariants are checked on every event: every
request is answered once, with exactly its number of tokens, by engines that are awake. The machine checks its own state
every CHECK_EVERY events and at the end.

Engines: every running request gets a token per decode step; a step takes a fixed time plus a share per request and per
cached token. Prefill comes first and blocks decoding; a prompt that is cached from the same group is not prefilled
again. Deterministic. Answer lengths are generated, as no public trace of them exists, and every parameter is stated:
lognormal, a part of the variance belongs to the prompt, so that samples of a prompt are similar, the rest to the
sample. The median drifts from step to step. Lengths are capped at `most` tokens.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.formats.sections import Count, FieldsOf, Made, Positive, Share, Within
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.load import Taker
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
from trimtab.replay.common.timing import P99, Agenda, Distribution
from trimtab.replay.common.traces import RequestRow
from trimtab.replay.pool.invariants import InvariantError

AttemptKey = tuple[str, int]  # request and attempt


class EngineSpeed(Frozen):
    """Speed of an engine. Defaults: an 8B model on one H200, fitted by hand to public measurements."""

    decode_s: float = 4.4e-3  # a decode step without requests
    request_s: float = 5e-5  # plus per request
    cached_s: float = 2.2e-8  # plus per token in the KV cache
    read_s: float = 1 / 50_000  # per prompt token

    def text(self) -> str:
        return (
            f"a decode step takes {self.decode_s * 1e3:g} ms, {self.request_s * 1e3:g} ms for each request and "
            f"{self.cached_s * 1e9:g} ns for each cached token; {1 / self.read_s:,.0f} prompt tokens are read a second"
        )


H200_8B = EngineSpeed()


@dataclass
class _RunningRequest:
    begun: float  # `made` of the engine when it began
    brought: int  # cached tokens when it began
    left: int  # tokens still to generate


@dataclass
class SimulatedEngine:
    """A simulated engine."""

    speed: EngineSpeed = H200_8B
    at: float = 0.0  # simulated up to here
    made: float = 0.0  # tokens of a request that has run since the start
    cached: float = 0.0
    reading_until: float = 0.0
    read: set[str] = field(default_factory=set)  # groups whose prompt is cached
    running: dict[AttemptKey, _RunningRequest] = field(default_factory=dict)
    # `made` at the end of a request; entries may be stale
    ends: list[tuple[float, AttemptKey]] = field(default_factory=list)
    revision: int = 0  # grows with every change: earlier predictions are void

    def advance(self, now: float) -> None:
        """Simulates up to `now`."""
        seconds = now - max(self.at, self.reading_until)
        self.at = max(self.at, now)
        if seconds <= 0 or not self.running:
            return
        step_s, growth = self._step_s(), self.speed.cached_s * len(self.running)
        tokens = (math.sqrt(step_s * step_s + 2 * growth * seconds) - step_s) / growth if growth else seconds / step_s
        self.made += tokens
        self.cached += tokens * len(self.running)

    def add(self, key: AttemptKey, group: str, prompt: int, resumed: int, left: int, now: float) -> None:
        """Adds a request; its prefill comes first."""
        self.advance(now)
        brings = resumed + (0 if group and group in self.read else prompt)
        if group:
            self.read.add(group)
        self.reading_until = max(self.reading_until, now) + brings * self.speed.read_s
        self.running[key] = _RunningRequest(self.made, prompt + resumed, left)
        heapq.heappush(self.ends, (self.made + left, key))
        self.cached += prompt + resumed
        self.revision += 1

    def drop(self, key: AttemptKey, now: float) -> int:
        """Removes a request; returns the tokens generated here."""
        self.advance(now)
        request = self.running.pop(key)
        tokens = min(int(self.made - request.begun + 1e-6), request.left)
        self.cached = self.cached - request.brought - (self.made - request.begun) if self.running else 0.0
        self.revision += 1
        return tokens

    def next_end(self) -> tuple[float, AttemptKey] | None:
        """Time and key of the next request to end."""
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        end, key = self.ends[0]
        tokens = max(end - self.made, 0.0)
        seconds = tokens * self._step_s() + self.speed.cached_s * len(self.running) * tokens * tokens / 2
        return max(self.at, self.reading_until) + seconds, key

    def flush_cache(self) -> None:
        self.read.clear()

    def _step_s(self) -> float:
        return self.speed.decode_s + self.speed.request_s * len(self.running) + self.speed.cached_s * self.cached


def least_engine_s(speed: EngineSpeed, limit: int, answers: list[tuple[int, int]], prompts: int) -> float:
    """Lower bound of engine-seconds for these answers (prompt tokens, answer tokens), for any policy.

    Every token takes its own share of a step, and the fixed part of a step is shared by at most `limit` requests.
    `prompts`: tokens that must be prefilled at least once.
    """
    fixed = speed.decode_s / limit + speed.request_s
    total = prompts * speed.read_s
    for prompt, tokens in answers:
        total += tokens * fixed + speed.cached_s * tokens * (prompt + tokens / 2)
    return total


class LengthProfile(Frozen):
    """A distribution of answer lengths."""

    name: str
    prompt_tokens: Count
    median: Positive
    p99: Positive
    most: Annotated[int, Within(1, 1_000_000_000)]
    alike: Share = 0.65  # share of the variance (of the logarithm) common to a prompt's samples
    drift: Annotated[float, Within(-0.999, 1e6)] = 0.0  # growth of the median per step

    def __post_init__(self) -> None:
        if self.p99 < self.median:
            raise InputError("p99 must not be below the median", where=f"profile {self.name}")

    def lengths(self, steps: int, prompts: int, samples: int, seed: int) -> list[dict[str, int]]:
        """Tokens by request, for each step. `s3p7.2` is sample 2 of prompt 7 in step 3."""
        sigma = math.log(self.p99 / self.median) / P99
        of_prompt, of_sample = sigma * math.sqrt(self.alike), sigma * math.sqrt(1 - self.alike)
        source = random.Random(f"lengths {self.name} {seed}")
        found = []
        for step in range(steps):
            middle = math.log(self.median * (1 + self.drift) ** step)
            batch = {}
            for prompt in range(prompts):
                of_this = middle + source.gauss(0, of_prompt)
                for sample in range(samples):
                    tokens = int(math.exp(of_this + source.gauss(0, of_sample)))
                    batch[f"s{step}p{prompt}.{sample}"] = min(max(tokens, 8), self.most)
            found.append(batch)
        return found

    def text(self) -> str:
        drift = f", {self.drift:+.1%} a step" if self.drift else ""
        return (
            f"{self.name}: {self.prompt_tokens} prompt tokens, answers of median {self.median:g} and p99 {self.p99:g}"
            f"{drift}, at most {self.most:,}; {self.alike:.0%} of the variance is the prompt's"
        )


PROFILES = {
    profile.name: profile
    for profile in (
        LengthProfile("reasoning", 512, 1_600, 16_000, 32_768),
        LengthProfile("growing", 512, 1_000, 8_000, 32_768, drift=0.04),
        LengthProfile("short", 256, 300, 1_200, 2_048, alike=0.4),
        LengthProfile("agents", 2_048, 4_000, 24_000, 32_768, alike=0.8),
    )
}


def _profile(stated: str | LengthProfile) -> LengthProfile:
    if isinstance(stated, str):
        check_known([stated], PROFILES, "", "unknown profile {}")
        return PROFILES[stated]
    return stated


Profile = Annotated[LengthProfile, Made(str | Annotated[LengthProfile, FieldsOf(LengthProfile)], _profile)]
"""A profile by name, or as described in a scenario."""


CHECK_EVERY = 20_000
USABLE_S = 20.0  # an engine that is free for less is not usable by other tasks
NEVER_S = 1e9


class SimulatedFleet(Frozen):
    """The simulated engines: the same for every policy."""

    engines: int = 8
    limit: int = 256  # concurrent requests per engine
    speed: EngineSpeed = H200_8B
    sleep_s: float = 2.0
    wake_s: float = 4.0
    refit_s: float = 2.0
    cut_s: float = 0.1  # until an engine has aborted a request
    training_s: float = 60.0  # median
    training_p99_s: float | None = None  # None: constant
    taker: Taker | None = None

    def training(self) -> Distribution:
        return Distribution.lognormal(self.training_s, self.training_p99_s or None)

    def text(self) -> str:
        return (
            f"{self.engines} engines of {self.limit} places; {self.speed.text()}; sleep {self.sleep_s:g} s, wake "
            f"{self.wake_s:g} s, weights {self.refit_s:g} s, training {self.training().text()}"
        )


@dataclass
class RolloutOutcome:
    """Results of a run."""

    steps_s: list[float] = field(default_factory=list)  # from the first prompt to the last answer
    total_s: float = 0.0
    asleep_s: float = 0.0  # engine-seconds asleep
    usable_s: float = 0.0  # of those, in stretches of USABLE_S or more
    busy_s: float = 0.0  # engine-seconds with at least one request
    waits_s: list[float] = field(default_factory=list)  # from arrival to the first engine
    loads: dict[int, int] = field(default_factory=dict)  # by second with an arrival: the maximum of unanswered requests
    answered: int = 0
    moved: int = 0
    read_again: int = 0
    scalings: int = 0
    events: int = 0
    checks: int = 0
    workers: list[tuple[float, int, int]] = field(default_factory=list)  # time, engines awake, unanswered requests


@dataclass
class _SimulatedRequest:
    tokens: int
    prompt: int
    group: str
    arrived_s: float
    sent: bool = False


class RolloutReplay:
    """A simulated run."""

    def __init__(
        self,
        elastic: ElasticConfig,
        fleet: SimulatedFleet,
        *,
        queue: int = 1_000_000,
        check_every: int = CHECK_EVERY,
        on_event: Callable[[float, e.RolloutEvent, list[e.RolloutInstruction]], None] | None = None,
    ) -> None:
        self.fleet = fleet
        rules = RolloutRules.of(
            elastic,
            max_workers=min(elastic.max_workers, fleet.engines),
            stall_s=NEVER_S,
            ownership=Ownership(refit=Owner.trimtab),
            classes=(RequestClass(queue_limit=queue, deadline_s=None),),
        )
        self.machine = RolloutMachine(rules, elastic)
        self.outcome = RolloutOutcome()
        self._on_event, self._check_every = on_event, check_every
        self._agenda: Agenda[tuple[str, int] | e.RolloutEvent] = Agenda()
        self._engines = {f"e{at}": SimulatedEngine(fleet.speed) for at in range(rules.max_workers)}
        self._pending: dict[str, _SimulatedRequest] = {}  # unanswered, by id
        self._answered: set[str] = set()
        self._attempts: dict[AttemptKey, tuple[str, int]] = {}  # engine, and tokens generated by earlier attempts
        self._asleep: dict[str, float] = {}  # since when
        self._busy: dict[str, float] = {}  # since when
        self._version = 0
        self._from = 0.0  # nothing before is counted
        for name in self._engines:
            self._send_event(e.WorkerAdded(WorkerSpec(name, limit=fleet.limit), up=True, version=0))
        if fleet.taker is not None:
            self._send_event(e.DemandSeen((fleet.taker,)))

    # ---- loads -----------------------------------------------------------------------------------------------------

    def closed(self, profile: LengthProfile, batches: Sequence[dict[str, int]], seed: int = 0) -> RolloutOutcome:
        """Runs steps: rollout, training, new weights."""
        training, source = self.fleet.training(), random.Random(f"training {seed}")
        for batch in batches:
            begin = self._agenda.now
            for name, tokens in batch.items():
                self._arrive(name, profile.prompt_tokens, tokens, profile.most, name.split(".")[0])
            self._run_until(lambda: not self._pending)
            self.outcome.steps_s.append(self._agenda.now - begin)
            self._run_to(self._agenda.now + training.draw(source))
            self._version += 1
            self._send_event(e.RefitBegun(self._version))
            self._run_to(self._agenda.now + self.fleet.refit_s + 0.1)
        return self._finish()

    def open(self, rows: Sequence[RequestRow], rate: float = 1.0, counted_from_s: float = 0.0) -> RolloutOutcome:
        """Runs the requests of a trace, `rate` times as fast. Time before `counted_from_s` is run but not counted."""
        for number, row in enumerate(rows):
            if self._agenda.now < counted_from_s <= row.arrival_s / rate:
                self._run_to(counted_from_s)
                self._count_from_now()
            self._run_to(row.arrival_s / rate)
            group = f"b{row.blocks[0]}" if row.blocks else ""
            self._arrive(f"r{number}", row.input_tokens, max(row.output_tokens, 1), max(row.output_tokens, 1), group)
        self._run_until(lambda: not self._pending)
        return self._finish()

    def _count_from_now(self) -> None:
        out, now = self.outcome, self._agenda.now
        self._from = now
        self._asleep = dict.fromkeys(self._asleep, now)
        self._busy = dict.fromkeys(self._busy, now)
        out.asleep_s = out.usable_s = out.busy_s = 0.0
        out.moved = out.scalings = out.read_again = 0
        out.waits_s.clear()

    def _arrive(self, name: str, prompt: int, tokens: int, max_tokens: int, group: str) -> None:
        if name in self._pending or name in self._answered:
            raise InvariantError(f"request {name} arrives twice")
        self._pending[name] = _SimulatedRequest(tokens, prompt, group, self._agenda.now)
        at, loads = int(self._agenda.now), self.outcome.loads
        loads[at] = max(loads.get(at, 0), len(self._pending))
        self._send_event(e.RequestArrived(RequestSpec(name, prompt, max_tokens, group=group)))

    def _finish(self) -> RolloutOutcome:
        self.machine.check()
        out = self.outcome
        out.checks += 1
        out.total_s = self._agenda.now - self._from
        for since in self._asleep.values():
            self._count_sleep(self._agenda.now - since)
        self._asleep.clear()
        if self._pending or self._attempts:
            raise InvariantError(
                f"{len(self._pending)} requests were not answered, {len(self._attempts)} attempts still run"
            )
        return out

    # ---- time ------------------------------------------------------------------------------------------------------

    def _run_to(self, moment: float) -> None:
        self._run_until(lambda: False, moment)
        self._agenda.advance_to(moment)

    def _run_until(self, done: Callable[[], bool], moment: float = float("inf")) -> None:
        agenda, machine = self._agenda, self.machine
        while not done():
            due, first = machine.next_deadline(), agenda.next_time()
            at = min(time for time in (due, first, moment) if time is not None)
            if at >= moment:
                return
            if at == float("inf"):
                raise InvariantError(f"no event is left, but {len(self._pending)} requests wait")
            if first is not None and first <= at:
                self._process(agenda.pop())
            else:
                agenda.advance_to(at)
                self._send_event(e.RolloutTick())

    def _count_busy(self, name: str) -> None:
        if self._engines[name].running:
            self._busy.setdefault(name, self._agenda.now)
        elif name in self._busy:
            self.outcome.busy_s += self._agenda.now - self._busy.pop(name)

    def _process(self, event: tuple[str, int] | e.RolloutEvent) -> None:
        if not isinstance(event, tuple):
            self._send_event(event)
            return
        name, news = event
        engine = self._engines[name]
        end = engine.next_end() if news == engine.revision else None
        if end is None:
            return
        key = end[1]
        engine.drop(key, self._agenda.now)
        _, before = self._attempts.pop(key)
        self._send_event(e.AttemptFinished(*key, self._pending[key[0]].tokens - before, End.stop))
        self._schedule_next_end(name)

    def _schedule_next_end(self, name: str) -> None:
        engine = self._engines[name]
        self._count_busy(name)
        end = engine.next_end()
        if end is not None:
            self._agenda.put(end[0], (name, engine.revision))

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _send_event(self, event: e.RolloutEvent) -> None:
        now, out = self._agenda.now, self.outcome
        wanted = self.machine.handle(event, now)
        out.events += 1
        if self._on_event is not None:
            self._on_event(now, event, wanted)
        for instruction in wanted:
            if isinstance(instruction, e.SendRequest):
                self._send(instruction)
            elif isinstance(instruction, e.AnswerRequest):
                self._answer(instruction)
            elif isinstance(instruction, e.AbortAttempt):
                self._abort(instruction)
            elif isinstance(instruction, e.WorkerAction):
                self._act(instruction)
            elif isinstance(instruction, e.RefuseRequest):
                raise InvariantError(f"{instruction.request} is refused: {instruction.reason.sentence}")
            elif isinstance(instruction, e.AnnounceScaleStep):
                out.scalings += 1
                out.workers.append((now, len(self._engines) - len(self._asleep), len(self._pending)))
        if isinstance(event, e.ActionDone):
            self._update_asleep()
        if out.events % self._check_every == 0:
            self.machine.check()
            out.checks += 1

    def _send(self, instruction: e.SendRequest) -> None:
        request, key = self._pending[instruction.request], (instruction.request, instruction.attempt)
        if instruction.worker in self._asleep:
            raise InvariantError(f"{instruction.request} is sent to {instruction.worker}, which sleeps")
        if not request.sent:
            request.sent = True
            self.outcome.waits_s.append(self._agenda.now - request.arrived_s)
        if instruction.attempt > 1:
            self.outcome.moved += 1
            self.outcome.read_again += instruction.resumed
        self._attempts[key] = (instruction.worker, instruction.resumed)
        engine = self._engines[instruction.worker]
        engine.add(
            key,
            request.group,
            request.prompt,
            instruction.resumed,
            request.tokens - instruction.resumed,
            self._agenda.now,
        )
        self._schedule_next_end(instruction.worker)

    def _answer(self, instruction: e.AnswerRequest) -> None:
        request = self._pending.pop(instruction.request, None)
        if request is None:
            raise InvariantError(f"{instruction.request} is answered, but was answered before or never sent")
        if instruction.end is not End.stop or instruction.tokens != request.tokens:
            raise InvariantError(
                f"{instruction.request} is answered with {instruction.tokens} of {request.tokens} tokens "
                f"({instruction.end.value})"
            )
        self._answered.add(instruction.request)
        self.outcome.answered += 1

    def _abort(self, instruction: e.AbortAttempt) -> None:
        key = (instruction.request, instruction.attempt)
        found = self._attempts.pop(key, None)
        if found is None:
            return  # it has ended in the meantime, and that was reported
        tokens = self._engines[found[0]].drop(key, self._agenda.now)
        self._agenda.put(
            self._agenda.now + self.fleet.cut_s, e.AbortDone(instruction.request, instruction.attempt, tokens)
        )
        self._schedule_next_end(found[0])

    def _act(self, action: e.WorkerAction) -> None:
        fleet, engine = self.fleet, self._engines[action.worker]
        took = {WorkerVerb.sleep: fleet.sleep_s, WorkerVerb.wake: fleet.wake_s, WorkerVerb.refit: fleet.refit_s}.get(
            action.verb, 0.1
        )
        if action.verb is WorkerVerb.sleep and engine.running:
            raise InvariantError(f"{action.worker} is put to sleep under {len(engine.running)} requests")
        if action.verb is WorkerVerb.wake and (since := self._asleep.pop(action.worker, None)) is not None:
            self._count_sleep(self._agenda.now - since)
            engine.flush_cache()
            self._send_demand()
        version = action.version if action.verb is WorkerVerb.refit else self.machine.version
        self._agenda.put(self._agenda.now + took, e.ActionDone(action.worker, action.attempt, version))

    def _count_sleep(self, seconds: float) -> None:
        self.outcome.asleep_s += seconds
        if seconds >= USABLE_S:
            self.outcome.usable_s += seconds

    def _update_asleep(self) -> None:
        for view in self.machine.workers():
            if view.state is WorkerState.inactive and view.asleep and view.worker not in self._asleep:
                self._asleep[view.worker] = self._agenda.now
                self._send_demand()

    def _send_demand(self) -> None:
        taker = self.fleet.taker
        if taker is not None:
            wants = max(taker.workers - len(self._asleep), 0)
            seen = (replace(taker, workers=wants),) if wants else ()
            self._agenda.put(self._agenda.now, e.DemandSeen(seen))
