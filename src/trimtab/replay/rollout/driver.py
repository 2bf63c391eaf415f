"""Drives the rollout machine under a virtual clock: engines that are arithmetic, a trainer, and clients.

Two kinds of load. Closed loop: the prompts of a step all arrive at once, the next step begins when the last answer is
there, the trainer has trained and the weights are new. Open loop: requests arrive as a trace says. What must be true is
looked at with every event: every request is answered once, with exactly the tokens it was to have, by engines that are
awake; the machine checks its books on a sample of events and at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from trimtab.replay.common.agenda import Agenda
from trimtab.replay.common.timing import Distribution
from trimtab.replay.common.traces import RequestRow
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.rollout.engine_model import H200_8B, AttemptKey, EngineSpeed, SimulatedEngine
from trimtab.replay.rollout.workload import LengthProfile

CHECK_EVERY = 20_000
USABLE_S = 20.0  # an engine that is free for less is of no use to anybody else
NEVER_S = 1e9


@dataclass(frozen=True)
class SimulatedFleet:
    """Engines and what is done to them, whoever decides."""

    engines: int = 8
    limit: int = 256  # requests at once on one engine
    speed: EngineSpeed = H200_8B
    sleep_s: float = 2.0
    wake_s: float = 4.0
    refit_s: float = 2.0
    cut_s: float = 0.1  # until an engine has let go of a request
    training_s: float = 60.0  # median
    training_p99_s: float | None = None  # None: it always takes as long
    taker: Taker | None = None

    def training(self) -> Distribution:
        """How long training takes."""
        return Distribution.of({"median": self.training_s, "p99": self.training_p99_s or self.training_s}, "engines")

    def text(self) -> str:
        """As a report states it."""
        return (
            f"{self.engines} engines of {self.limit} places; {self.speed.text()}; sleep {self.sleep_s:g} s, wake "
            f"{self.wake_s:g} s, weights {self.refit_s:g} s, training {self.training().text()}"
        )


@dataclass
class RolloutOutcome:
    """What came of a run."""

    steps_s: list[float] = field(default_factory=list)  # from the first prompt to the last answer
    total_s: float = 0.0
    asleep_s: float = 0.0  # engine-seconds in all
    usable_s: float = 0.0  # of those, in stretches long enough for somebody else
    busy_s: float = 0.0  # engine-seconds in which at least one request was there
    waits_s: list[float] = field(default_factory=list)  # from arrival to the first engine
    loads: dict[int, int] = field(default_factory=dict)  # by second in which one came: the most that were not answered
    answered: int = 0
    moved: int = 0
    read_again: int = 0
    scalings: int = 0
    events: int = 0
    checks: int = 0
    workers: list[tuple[float, int, int]] = field(default_factory=list)  # time, engines awake, requests not answered


@dataclass
class _SimulatedRequest:
    tokens: int
    prompt: int
    group: str
    arrived_s: float
    sent: bool = False


class RolloutReplay:
    """One run."""

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
        rules = RolloutRules(
            least=elastic.min_workers,
            most=min(elastic.max_workers, fleet.engines),
            capacity=elastic.requests_per_worker_capacity,
            monitor_s=elastic.monitoring_interval,
            drain_s=elastic.drain_timeout,
            stall_s=NEVER_S,
            ownership=Ownership(refit=Owner.trimtab),
            classes=(RequestClass(queue_limit=queue, deadline_s=None),),
        )
        self.machine = RolloutMachine(rules, elastic)
        self.outcome = RolloutOutcome()
        self._on_event, self._check_every = on_event, check_every
        self._agenda: Agenda[tuple[str, int] | e.RolloutEvent] = Agenda()
        self._engines = {f"e{at}": SimulatedEngine(fleet.speed) for at in range(rules.most)}
        self._asked: dict[str, _SimulatedRequest] = {}  # not answered
        self._answered: set[str] = set()
        self._where: dict[AttemptKey, tuple[str, int]] = {}  # engine, and tokens that were there before
        self._asleep: dict[str, float] = {}  # since when
        self._busy: dict[str, float] = {}  # since when
        self._version = 0
        self._from = 0.0  # what was before is not counted
        for name in self._engines:
            self._send_event(e.WorkerAdded(WorkerSpec(name, limit=fleet.limit), up=True, version=0))
        if fleet.taker is not None:
            self._send_event(e.DemandSeen((fleet.taker,)))

    # ---- loads -----------------------------------------------------------------------------------------------------

    def closed(self, profile: LengthProfile, batches: Sequence[dict[str, int]], seed: int = 0) -> RolloutOutcome:
        """Step by step: a rollout, training, new weights."""
        training, source = self.fleet.training(), random.Random(f"training {seed}")
        for batch in batches:
            begin = self._agenda.now
            for name, tokens in batch.items():
                self._arrive(name, profile.prompt_tokens, tokens, profile.most, name.split(".")[0])
            self._pass(lambda: not self._asked)
            self.outcome.steps_s.append(self._agenda.now - begin)
            self._until(self._agenda.now + training.draw(source))
            self._version += 1
            self._send_event(e.RefitBegun(self._version))
            self._until(self._agenda.now + self.fleet.refit_s + 0.1)
        return self._over()

    def open(self, rows: Sequence[RequestRow], rate: float = 1.0, counted_from_s: float = 0.0) -> RolloutOutcome:
        """Requests as a trace says, `rate` times as fast. What is before `counted_from_s` is run and not counted."""
        for number, row in enumerate(rows):
            if self._agenda.now < counted_from_s <= row.arrival_s / rate:
                self._until(counted_from_s)
                self._count_from_now()
            self._until(row.arrival_s / rate)
            group = f"b{row.blocks[0]}" if row.blocks else ""
            self._arrive(f"r{number}", row.input_tokens, max(row.output_tokens, 1), max(row.output_tokens, 1), group)
        self._pass(lambda: not self._asked)
        return self._over()

    def _count_from_now(self) -> None:
        out, now = self.outcome, self._agenda.now
        self._from = now
        self._asleep = dict.fromkeys(self._asleep, now)
        self._busy = dict.fromkeys(self._busy, now)
        out.asleep_s = out.usable_s = out.busy_s = 0.0
        out.moved = out.scalings = out.read_again = 0
        out.waits_s.clear()

    def _arrive(self, name: str, prompt: int, tokens: int, most: int, group: str) -> None:
        if name in self._asked or name in self._answered:
            raise InvariantError(f"request {name} comes twice")
        self._asked[name] = _SimulatedRequest(tokens, prompt, group, self._agenda.now)
        at, loads = int(self._agenda.now), self.outcome.loads
        loads[at] = max(loads.get(at, 0), len(self._asked))
        self._send_event(e.RequestArrived(RequestSpec(name, prompt, most, group=group)))

    def _over(self) -> RolloutOutcome:
        self.machine.check()
        out = self.outcome
        out.checks += 1
        out.total_s = self._agenda.now - self._from
        for since in self._asleep.values():
            self._stint(self._agenda.now - since)
        self._asleep.clear()
        if self._asked or self._where:
            raise InvariantError(f"{len(self._asked)} requests were not answered, {len(self._where)} still run")
        return out

    # ---- time ------------------------------------------------------------------------------------------------------

    def _until(self, moment: float) -> None:
        self._pass(lambda: False, moment)
        self._agenda.leap(moment)

    def _pass(self, done: Callable[[], bool], moment: float = float("inf")) -> None:
        agenda, machine = self._agenda, self.machine
        while not done():
            due, first = machine.next_deadline(), agenda.first()
            at = min(one for one in (due, first, moment) if one is not None)
            if at >= moment:
                return
            if at == float("inf"):
                raise InvariantError(f"nothing happens any more, and {len(self._asked)} requests wait")
            if first is not None and first <= at:
                self._occur(agenda.pop())
            else:
                agenda.leap(at)
                self._send_event(e.RolloutTick())

    def _count(self, name: str) -> None:
        """An engine has its first request, or none any more."""
        if self._engines[name].running:
            self._busy.setdefault(name, self._agenda.now)
        elif name in self._busy:
            self.outcome.busy_s += self._agenda.now - self._busy.pop(name)

    def _occur(self, what: tuple[str, int] | e.RolloutEvent) -> None:
        if not isinstance(what, tuple):
            self._send_event(what)
            return
        name, news = what
        engine = self._engines[name]
        end = engine.next_end() if news == engine.news else None
        if end is None:
            return
        key = end[1]
        engine.drop(key, self._agenda.now)
        _, before = self._where.pop(key)
        self._send_event(e.AttemptFinished(*key, self._asked[key[0]].tokens - before, End.stop))
        self._foretell(name)

    def _foretell(self, name: str) -> None:
        engine = self._engines[name]
        self._count(name)
        end = engine.next_end()
        if end is not None:
            self._agenda.put(end[0], (name, engine.news))

    # ---- what the machine wants ------------------------------------------------------------------------------------

    def _send_event(self, event: e.RolloutEvent) -> None:
        now, out = self._agenda.now, self.outcome
        wanted = self.machine.handle(event, now)
        out.events += 1
        if self._on_event is not None:
            self._on_event(now, event, wanted)
        for one in wanted:
            if isinstance(one, e.SendRequest):
                self._send(one)
            elif isinstance(one, e.AnswerRequest):
                self._answer(one)
            elif isinstance(one, e.AbortAttempt):
                self._cut(one)
            elif isinstance(one, e.WorkerAction):
                self._act(one)
            elif isinstance(one, e.RefuseRequest):
                raise InvariantError(f"{one.request} is refused: {one.reason.sentence}")
            elif isinstance(one, e.AnnounceScaleStep):
                out.scalings += 1
                out.workers.append((now, len(self._engines) - len(self._asleep), len(self._asked)))
        if isinstance(event, e.ActionDone):
            self._see_who_sleeps()
        if out.events % self._check_every == 0:
            self.machine.check()
            out.checks += 1

    def _send(self, one: e.SendRequest) -> None:
        asked, key = self._asked[one.request], (one.request, one.attempt)
        if one.worker in self._asleep:
            raise InvariantError(f"{one.request} is sent to {one.worker}, which sleeps")
        if not asked.sent:
            asked.sent = True
            self.outcome.waits_s.append(self._agenda.now - asked.arrived_s)
        if one.attempt > 1:
            self.outcome.moved += 1
            self.outcome.read_again += one.resumed
        self._where[key] = (one.worker, one.resumed)
        engine = self._engines[one.worker]
        engine.add(key, asked.group, asked.prompt, one.resumed, asked.tokens - one.resumed, self._agenda.now)
        self._foretell(one.worker)

    def _answer(self, one: e.AnswerRequest) -> None:
        asked = self._asked.pop(one.request, None)
        if asked is None:
            raise InvariantError(f"{one.request} is answered, and was answered before or never asked")
        if one.end is not End.stop or one.tokens != asked.tokens:
            raise InvariantError(
                f"{one.request} is answered with {one.tokens} of {asked.tokens} tokens ({one.end.value})"
            )
        self._answered.add(one.request)
        self.outcome.answered += 1

    def _cut(self, one: e.AbortAttempt) -> None:
        key = (one.request, one.attempt)
        found = self._where.pop(key, None)
        if found is None:
            return  # it has ended meanwhile, and that was told
        tokens = self._engines[found[0]].drop(key, self._agenda.now)
        self._agenda.put(self._agenda.now + self.fleet.cut_s, e.AbortDone(one.request, one.attempt, tokens))
        self._foretell(found[0])

    def _act(self, one: e.WorkerAction) -> None:
        fleet, engine = self.fleet, self._engines[one.worker]
        took = {WorkerVerb.sleep: fleet.sleep_s, WorkerVerb.wake: fleet.wake_s, WorkerVerb.refit: fleet.refit_s}.get(
            one.verb, 0.1
        )
        if one.verb is WorkerVerb.sleep and engine.running:
            raise InvariantError(f"{one.worker} is put to sleep under {len(engine.running)} requests")
        if one.verb is WorkerVerb.wake and (since := self._asleep.pop(one.worker, None)) is not None:
            self._stint(self._agenda.now - since)
            engine.forget()
            self._tell_takers()
        version = one.version if one.verb is WorkerVerb.refit else self.machine.version
        self._agenda.put(self._agenda.now + took, e.ActionDone(one.worker, one.attempt, version))

    def _stint(self, seconds: float) -> None:
        self.outcome.asleep_s += seconds
        if seconds >= USABLE_S:
            self.outcome.usable_s += seconds

    def _see_who_sleeps(self) -> None:
        for view in self.machine.workers():
            if view.state is WorkerState.inactive and view.asleep and view.worker not in self._asleep:
                self._asleep[view.worker] = self._agenda.now
                self._tell_takers()

    def _tell_takers(self) -> None:
        taker = self.fleet.taker
        if taker is not None:
            wants = max(taker.workers - len(self._asleep), 0)
            seen = (replace(taker, workers=wants),) if wants else ()
            self._agenda.put(self._agenda.now, e.DemandSeen(seen))
