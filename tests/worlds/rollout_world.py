"""A world in memory around the rollout machine: engines, clients and a trainer that carry things out and put faults in.

It keeps books of its own of what really is: engines that live, sleep, pause, hang and die, the weights that each really
has, every token with the version that made it, every client with the answers it got. News travels by mail, in order and
late. After every event it asserts what must be true of that. It believes nothing that the machine says of itself.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.attempts import ABORT_HOLD_S
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    End,
    InFlight,
    Membership,
    Owner,
    RefitWay,
    RequestSpec,
    RolloutRules,
    Span,
    WorkerSpec,
    WorkerState,
    WorkerVerb,
)

S = WorkerState
REFUSABLE = (
    e.RequestArrived,
    e.WorkerAdded,
    e.WorkerRemoved,
    e.WorkerReclaimed,
    e.WorkerReturned,
    e.ScaleRequested,
    e.RefitBegun,
)


@dataclass
class Running:
    """An attempt that an engine really works on."""

    request: str
    attempt: int
    most: int
    length: int  # of the answer, where nothing cuts it
    made: list[int] = field(default_factory=list)  # per token: the version that made it
    told: int = 0
    cut: bool = False  # an AbortAttempt reached it


@dataclass
class Engine:
    """An engine as it really is."""

    spec: WorkerSpec
    alive: bool = True
    asleep: bool = False
    paused: bool = False
    wedged: bool = False  # healthy, and answers nothing
    weights: int | None = 0  # that it really has
    told: bool = True  # what became of its process or weights behind trimtab's back has been said
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)  # what was done to it since it last served, in order


@dataclass
class Client:
    """Somebody who asked for one answer."""

    spec: RequestSpec
    tokens: list[int] = field(default_factory=list)  # received, per token the version that made it
    base: int = 0  # of those, the ones that the current attempt was given
    attempt: int = 0
    sends: int = 0
    workers: set[str] = field(default_factory=set)  # it was sent to
    answers: list[e.AnswerRequest | e.RefuseRequest] = field(default_factory=list)
    asked_at: float = 0.0
    passed_on: bool = False  # others aborted it
    murky: bool = False  # an engine whose weights changed unseen worked on it
    gap: int = 0  # the attempt of which the machine knows that some tokens cannot be named


class RolloutWorld:
    """The machine, and everything around it."""

    def __init__(self, rules: RolloutRules, elastic: ElasticConfig) -> None:
        self.rules, self.elastic = rules, elastic
        self.machine = RolloutMachine(rules, elastic)
        self.now = 0.0
        self.version = rules.version
        self.aborts_heard: dict[str, float] = {}  # by worker: the last one by others
        self.about = ""  # the request of the event that is told
        self.engines: dict[str, Engine] = {}
        self.clients: dict[str, Client] = {}
        self.mail: deque[tuple[Any, list[int] | None]] = deque()  # news, and the tokens that came with it
        self.served: set[str] = set()  # before the event
        self.acts: list[e.WorkerAction] = []  # to be carried out
        self.aborts: list[e.AbortAttempt] = []
        self.removed: set[str] = set()
        self.refit: Membership | None = None  # RefitReady was said
        self.begun: int | None = None
        self.journal: list[tuple[float, Any, list[Any]]] = []
        self.counted: Counter[str] = Counter()
        self.numbers = 0
        self.sessions: dict[str, str] = {}  # by session: the worker that served it last
        self.most = rules.max_workers
        self.broken = False

    # ---- events ----------------------------------------------------------------------------------------------------

    def tell(self, event: Any) -> list[Any]:
        """One event, and all that must be true after it."""
        self.now += 0.01
        self.broken = True  # until all of it has been looked at
        self.about = getattr(event, "request", "")
        self.served = {one.worker for one in self.machine.workers() if one.state is S.active}
        before = self.machine.dump() if isinstance(event, REFUSABLE) else None
        try:
            out = list(self.machine.handle(event, self.now))
        except (InputError, InfeasibleError):
            assert self.machine.dump() == before, f"{event} was refused, but something changed"
            self.counted["refused events"] += 1
            self.journal.append((self.now, event, []))
            self.machine.check()
            self.broken = False
            return []
        self.journal.append((self.now, event, out))
        self.machine.check()
        for one in out:
            self.counted[type(one).__name__] += 1
            getattr(self, f"_do_{type(one).__name__}")(one)
        if self.refit is not None:
            assert self.machine.membership() == self.refit, "membership changed while frozen"
        self.broken = False
        return out

    def deliver(self, count: int = 1_000_000) -> None:
        """Bring mail."""
        while self.mail and count:
            count -= 1
            self._bring(*self.mail.popleft())

    def _bring(self, event: Any, made: list[int] | None) -> None:
        if made is not None:
            client = self.clients[event.request]
            if client.attempt == event.attempt:
                client.tokens = [*client.tokens[: client.base], *made]
        if isinstance(event, e.TokensStreamed) and event.restart and self._is_current(event.request, event.attempt):
            self.clients[event.request].gap = event.attempt
            self.counted["gaps"] += 1
        on_purpose = isinstance(event, e.AbortedExternally) and self._is_current(event.request, event.attempt)
        if on_purpose:
            self.aborts_heard[self.machine.request(event.request).worker] = self.now + 0.01
        self.tell(event)
        if on_purpose:
            client = self.clients[event.request]
            client.passed_on = True
            assert client.answers or self._others_want(client), "others aborted it: that is its answer"

    def post(self, event: Any, running: Running | None = None) -> None:
        """Put news into the mail."""
        self.mail.append((event, None if running is None else list(running.made)))

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick whenever the machine wants one."""
        until = self.now + seconds
        ticks = 0
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.tell(e.RolloutTick())
            ticks += 1
            assert ticks < 5_000, f"the machine ticks for ever at {due}"
        self.now = max(self.now, until)

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _do_SendRequest(self, send: e.SendRequest) -> None:  # noqa: N802
        client, engine = self.clients[send.request], self.engines[send.worker]
        assert not client.answers or self._others_want(client), f"{send.request} was answered, and is sent"
        assert not client.passed_on, f"{send.request} was aborted by others, and is tried again"
        assert send.attempt > client.attempt
        assert send.resumed + send.max_tokens == client.spec.max_tokens
        assert send.max_tokens >= 1
        assert send.min_tokens == max(0, client.spec.min_tokens - send.resumed)
        assert send.resumed <= len(client.tokens), "resumed with tokens that nobody has"
        assert client.spec.resumable or send.resumed == 0 or client.attempt == 0
        assert send.resumed == 0 or not client.gap or client.gap < client.attempt, "carried on from a gap"
        assert send.version == self.version
        view = next(one for one in self.machine.workers() if one.worker == send.worker)
        assert (view.state, view.version) == (S.active, self.version), f"{send.worker} is {view.state}"
        heard = self._heard(engine)
        if engine.alive and heard:
            assert engine.weights == self.version, f"{send.worker} has {engine.weights}, not {self.version}"
            assert not engine.asleep, f"{send.worker} sleeps"
            assert not engine.paused, f"{send.worker} is paused: it would hang"
        if client.spec.version is not None:
            assert client.spec.version == self.version
        assert self.version >= (client.spec.at_least or self.version)
        if send.resumed and client.sends:
            self.counted["resumed"] += 1
        elif client.sends:
            self.counted["sent again from the prompt"] += 1
        if not client.spec.spans and send.resumed and not client.murky:
            assert set(client.tokens[: send.resumed]) == {self.version}, "would span versions"
        self._check_session(client, send.worker)
        client.attempt, client.sends = send.attempt, client.sends + 1
        client.workers.add(send.worker)
        client.tokens = client.tokens[: send.resumed]
        client.base = send.resumed
        running = Running(send.request, send.attempt, send.max_tokens, max(1, self._length(client.spec) - send.resumed))
        engine.steps.clear()
        if not engine.alive:
            self._end(engine, running, e.AttemptFailed, "nobody listens")
        else:
            engine.running[send.request, send.attempt] = running
            client.murky = client.murky or not heard

    def _check_session(self, client: Client, worker: str) -> None:
        session = client.spec.session
        home = next((one for one in self.machine.workers() if one.worker == self.sessions.get(session)), None)
        if session and home is not None and home.worker not in client.workers:  # it may have failed there
            takes = home.state is S.active and not home.paused and home.running + home.outside < home.spec.limit
            takes = takes and self.aborts_heard.get(home.worker, -ABORT_HOLD_S) + ABORT_HOLD_S < self.now
            assert worker == home.worker or not takes, f"session {session} is on {home.worker}, and goes to {worker}"
            self.counted["sessions kept"] += worker == home.worker
            self.counted["sessions moved"] += worker != home.worker
        if session:
            self.sessions[session] = worker

    def _others_want(self, client: Client) -> bool:
        """Whether somebody who came with the same key still waits for the answer."""
        key = client.spec.key
        return key != "" and any(one.spec.key == key and not one.answers for one in self.clients.values())

    def _length(self, spec: RequestSpec) -> int:
        return min(spec.max_tokens, 1 + sum(spec.id.encode()) * 7 % 40)

    def _do_AbortAttempt(self, abort: e.AbortAttempt) -> None:  # noqa: N802
        assert abort.deadline > self.now - 1
        running = self.engines[abort.worker].running.get((abort.request, abort.attempt))
        if running is not None:
            assert not running.cut or any(one.state == "lost" for one in self.machine.story(abort.worker)), "cut twice"
            running.cut = True
            self.aborts.append(abort)

    def _do_AnswerRequest(self, answer: e.AnswerRequest) -> None:  # noqa: N802
        client = self.clients[answer.request]
        assert not client.answers, f"{answer.request} is answered twice"
        assert answer.reason.sentence
        client.answers.append(answer)
        self.counted[answer.end.value] += 1
        source = self.clients[answer.of] if answer.of else client
        assert sum(one.tokens for one in answer.spans) == answer.tokens <= len(source.tokens)
        assert answer.tokens <= client.spec.max_tokens
        if not source.murky:
            assert answer.spans == spans_of(source.tokens[: answer.tokens]), "spans"
        if answer.end is End.abort and self.about not in (answer.request, answer.of):  # it was in the queue
            assert source.asked_at <= max(self.aborts_heard.values(), default=-1.0), "aborted, and by nobody"
            self.counted["aborted in the queue"] += 1
        if answer.end in (End.stop, End.length):
            assert answer.tokens == self._length(source.spec) or answer.tokens == source.spec.max_tokens, "cut short"
            assert source.spec.spans or source.murky or len(answer.spans) == 1, "spans versions, and may not"
            self.counted["spanning"] += len(answer.spans) > 1

    def _do_RefuseRequest(self, refuse: e.RefuseRequest) -> None:  # noqa: N802
        client = self.clients[refuse.request]
        assert not client.answers, f"{refuse.request} is answered twice"
        assert refuse.retry_after_s > 0
        client.answers.append(refuse)

    def _do_WorkerAction(self, act: e.WorkerAction) -> None:  # noqa: N802
        engine, own = self.engines[act.worker], self.rules.ownership
        state = next((one.state for one in self.machine.workers() if one.worker == act.worker), None)
        assert act.deadline > self.now - 1
        assert act.reason.sentence
        assert own.sleep is Owner.trimtab or act.verb not in (WorkerVerb.sleep, WorkerVerb.wake), (
            "sleep is the trainer's"
        )
        assert own.pause is Owner.trimtab or act.verb not in (WorkerVerb.pause, WorkerVerb.resume), (
            "pause is the trainer's"
        )
        assert own.refit is Owner.trimtab or act.verb is not WorkerVerb.refit, "refit is the trainer's"
        assert engine.spec.startable or act.verb not in (WorkerVerb.start, WorkerVerb.stop), (
            "it is somebody else's process"
        )
        if act.verb is WorkerVerb.sleep or (act.verb is WorkerVerb.stop and state is not S.lost):
            assert not engine.running or not engine.alive, f"{act.verb} under running requests"
        sleeps_first = engine.spec.can_sleep and own.sleep is Owner.trimtab and engine.alive
        if act.verb is WorkerVerb.stop and state is not S.lost and sleeps_first:
            assert engine.asleep or "sleep" in engine.steps, "stopped before it was put to sleep"
        engine.steps.append(act.verb.value)
        self.acts.append(act)

    def _do_RefitReady(self, ready: e.RefitReady) -> None:  # noqa: N802
        assert ready.version == self.version
        assert ready.membership.frozen
        offset = 0
        for member in ready.membership.members:
            assert member.offset == offset
            offset += member.size
        self.refit = ready.membership
        there = {one.worker for one in self.machine.workers() if one.state is not S.lost}
        for member in ready.membership.members:
            engine = self.engines[member.worker]
            if engine.alive and self._heard(engine) and member.worker in there:
                going = [one for one in engine.running.values() if not engine.paused and not one.cut]
                theirs = Owner.trainer in (self.rules.ownership.abort, self.rules.ownership.pause)
                assert theirs or not going, "weights would change under requests"
            if self.rules.ownership.pause is Owner.trainer:
                engine.paused = True

    def _do_RefitOver(self, over: e.RefitOver) -> None:  # noqa: N802
        self.refit = self.begun = None
        assert over.reason.sentence
        if self.rules.ownership.pause is Owner.trainer:
            for engine in self.engines.values():
                engine.paused = False

    def _do_AnnounceScaleStep(self, step: e.AnnounceScaleStep) -> None:  # noqa: N802
        one = step.step
        assert one.reason.sentence, "a step without a reason"
        assert one.expects, "a step that expects nothing"
        assert one.changed
        assert one.workers <= self.most
        if one.workers < one.before:
            self.counted["down"] += 1
            # The same tick may suspect a worker afterwards.
            active = sum(view.state in (S.active, S.suspect) for view in self.machine.workers()
                         if view.state is S.active or view.worker in self.served)  # fmt: skip
            least = self.machine.sample().min_workers
            assert active >= least or not self.served.intersection(one.changed), f"{active} serve, of {least}"
            assert self.begun is None, "somebody leaves during a refit"
        else:
            self.counted["up"] += 1

    def _do_Warn(self, warn: e.Warn) -> None:  # noqa: N802
        assert warn.reason.sentence

    # ---- clients ---------------------------------------------------------------------------------------------------

    def ask(self, **how: Any) -> str:
        self.numbers += 1
        name = f"r{self.numbers}"
        spec = RequestSpec(name, how.pop("prompt_tokens", 50), how.pop("max_tokens", 30), **how)
        self.clients[name] = Client(spec, asked_at=self.now)
        out = self.tell(e.RequestArrived(spec))
        if not out and self.machine.request(name) is None:
            del self.clients[name]  # a wrong ask
        return name

    def cancel(self, name: str) -> None:
        self.tell(e.RequestCancelled(name))
        assert len(self.clients[name].answers) == 1, "a cancelled request is answered at once"

    # ---- engines ---------------------------------------------------------------------------------------------------

    def add(self, up: bool = True, **how: Any) -> str:
        self.numbers += 1
        name = f"w{self.numbers}"
        spec = WorkerSpec(name, **how)
        self.engines[name] = Engine(spec, alive=up, weights=self.rules.version)
        self.tell(e.WorkerAdded(spec, up, self.rules.version if up else None))
        return name

    def generate(self, tokens: int) -> None:
        """All engines that can make tokens."""
        for engine in self.engines.values():
            if not engine.alive or engine.asleep or engine.paused or engine.wedged:
                continue
            for running in list(engine.running.values()):
                made_by = -1 if engine.weights is None else engine.weights
                count = min(tokens, running.length - len(running.made), running.most - len(running.made))
                running.made += [made_by] * max(0, count)
                whole = len(running.made) >= min(running.length, running.most)
                version = engine.weights if engine.told and len(running.made) % 2 else None
                if whole:
                    del engine.running[running.request, running.attempt]
                    end = End.length if len(running.made) >= running.most else End.stop
                    self.post(
                        e.AttemptFinished(running.request, running.attempt, len(running.made), end, version), running
                    )
                elif len(running.made) > running.told:
                    self.post(e.TokensStreamed(running.request, running.attempt, len(running.made), version), running)
                running.told = len(running.made)

    def _end(self, engine: Engine, running: Running, kind: type, *more: Any) -> None:
        engine.running.pop((running.request, running.attempt), None)
        self.post(kind(running.request, running.attempt, len(running.made), *more), running)

    def break_one(self, engine: Engine, why: str = "stream cut", fatal: bool = False) -> None:
        for running in list(engine.running.values())[:1]:
            self._end(engine, running, e.AttemptFailed, why, fatal and not running.cut)

    def lose_ids(self, engine: Engine) -> None:
        """Tokens come that nobody can name."""
        for running in list(engine.running.values()):
            if engine.alive and not engine.paused and len(running.made) < min(running.most, running.length) - 1:
                running.made.append(-1 if engine.weights is None else engine.weights)
                running.told = len(running.made)
                self.post(e.TokensStreamed(running.request, running.attempt, len(running.made), restart=True), running)

    def abort_elsewhere(self, engine: Engine) -> None:
        """Somebody else aborts, on purpose."""
        for running in list(engine.running.values()):
            self._end(engine, running, e.AbortedExternally)

    def _is_current(self, request: str, attempt: int) -> bool:
        """Whether nobody has given this attempt up."""
        view = self.machine.request(request)
        current = self.clients[request].attempt == attempt and not self.clients[request].answers
        return current and view is not None and view.state.value in ("sent", "streaming")

    def kill(self, engine: Engine, *, said: bool = True, streams_first: bool = False) -> None:
        if not engine.alive:
            return
        self._die(engine)
        if streams_first:
            self._streams_break(engine)
        if said:
            self.post(e.WorkerDied(engine.spec.id, "killed"))
        else:
            engine.told = False
        self._streams_break(engine)

    def _die(self, engine: Engine) -> None:
        engine.alive = engine.asleep = engine.paused = engine.wedged = False
        engine.weights = None
        self.acts = [
            act for act in self.acts if act.worker != engine.spec.id or act.verb in (WorkerVerb.start, WorkerVerb.stop)
        ]

    def _streams_break(self, engine: Engine) -> None:
        for running in list(engine.running.values()):
            self._end(engine, running, e.AttemptFailed, "connection reset")

    def restart_unseen(self, engine: Engine) -> None:
        """Killed and back with the weights it is started with, before anybody looked."""
        if not engine.alive or engine.spec.startable:
            return
        self._die(engine)
        self._streams_break(engine)
        engine.alive, engine.told, engine.weights = True, False, self.rules.version

    def look_at(self, engine: Engine) -> None:
        """A health check finds out what became of it."""
        name = engine.spec.id
        if not engine.alive and not engine.told:
            self.post(e.WorkerDied(name, "nobody listens"))
        elif engine.alive and not engine.told:
            self.post(e.WorkerUp(name, engine.weights))
        elif engine.alive and not engine.spec.startable and self._believed_lost(name):
            self.post(e.WorkerUp(name, engine.weights, restarted=False))
        engine.told = True

    def _heard(self, engine: Engine) -> bool:
        """Whether the machine knows of its process: what was said of it has also arrived."""
        ups = (event.worker for event, _ in self.mail if isinstance(event, e.WorkerUp))
        return engine.told and engine.spec.id not in ups

    def _believed_lost(self, name: str) -> bool:
        return any(one.worker == name and one.state is S.lost for one in self.machine.workers())

    def come_back(self, engine: Engine) -> None:
        """An attached engine that somebody starts again."""
        if engine.alive or engine.spec.startable or engine.spec.id in self.removed:
            return
        self.look_at(engine)
        engine.alive, engine.weights = True, self.rules.version
        self.post(e.WorkerUp(engine.spec.id, engine.weights))

    # ---- carrying out ----------------------------------------------------------------------------------------------

    def do_abort(self, at: int) -> None:
        if not self.aborts:
            return
        abort = self.aborts.pop(at % len(self.aborts))
        engine = self.engines[abort.worker]
        running = engine.running.get((abort.request, abort.attempt))
        if running is not None and engine.alive:
            self._end(engine, running, e.AbortDone)

    def do_act(self, at: int, how: str = "well") -> None:
        if not self.acts:
            return
        chosen = self.acts[at % len(self.acts)].worker
        act = next(one for one in self.acts if one.worker == chosen)  # on one worker, one after another
        self.acts.remove(act)
        engine, name = self.engines[act.worker], act.worker
        if how == "badly" or (how == "well" and not self._carry(engine, act)):
            self.post(e.ActionFailed(name, act.attempt, "it did not work"))
        elif how == "well":
            reported = engine.weights if act.verb in (WorkerVerb.start, WorkerVerb.wake) else None
            self.post(e.ActionDone(name, act.attempt, reported))

    def _carry(self, engine: Engine, act: e.WorkerAction) -> bool:
        if act.verb is WorkerVerb.start:
            if engine.alive:
                return False
            engine.alive, engine.weights, engine.told = True, self.rules.version, True
            engine.asleep = engine.paused = engine.wedged = False
            return True
        if act.verb is WorkerVerb.stop:
            self._die(engine)
            self._streams_break(engine)
            engine.told = True
            return True
        if not engine.alive or not engine.told:
            return False
        if act.verb is WorkerVerb.sleep:
            assert not engine.running, "memory released under running requests"
            engine.asleep = True
            engine.weights = engine.weights if act.keeps_weights else None
        elif act.verb is WorkerVerb.wake:
            engine.asleep = False
        elif act.verb is WorkerVerb.pause:
            engine.paused = True
        elif act.verb is WorkerVerb.resume:
            engine.paused = False
        elif act.verb is WorkerVerb.refit:
            engine.weights = act.version
        elif act.verb is WorkerVerb.probe:
            return not (engine.wedged or engine.asleep)
        return True

    # ---- the trainer -----------------------------------------------------------------------------------------------

    def begin_refit(self, way: RefitWay = RefitWay.disk, in_flight: InFlight = InFlight.keep) -> None:
        if self.begun is not None:
            return
        self.version += 1
        self.begun = self.version
        self.tell(e.RefitBegun(self.version, way, in_flight))
        if self.rules.ownership.abort is Owner.trainer:
            for member in self.machine.membership().members:
                self.abort_elsewhere(self.engines[member.worker])

    def confirm(self, at: int, well: bool = True) -> None:
        """The trainer's weights reach one member."""
        if self.refit is None or self.rules.ownership.refit is Owner.trimtab or not self.refit.members:
            return
        member = self.refit.members[at % len(self.refit.members)]
        engine = self.engines[member.worker]
        if well and engine.alive and engine.told:
            engine.weights = self.version
            self.post(e.RefitConfirmed(member.worker, self.version, self.refit.epoch))
        else:
            self.post(e.RefitFailed(member.worker, self.version, "it timed out"))

    def end_refit(self) -> None:
        if self.begun is not None and self.rules.ownership.refit is Owner.trainer:
            self.post(e.RefitEnded(self.begun))

    # ---- the end ---------------------------------------------------------------------------------------------------

    def all_well(self) -> None:
        """From now on everything works: whatever was accepted must be answered."""
        for turn in range(200):
            for engine in self.engines.values():
                engine.wedged = False
                self.look_at(engine)
            while self.acts or self.aborts or self.mail:
                while self.acts:
                    self.do_act(0)
                while self.aborts:
                    self.do_abort(0)
                self.deliver()
            self._trainer_well()
            self.generate(15)
            self.deliver()
            if not self.mail and not self.acts and not self.unanswered():
                return
            self.wait(1.0 if turn < 100 else 60.0)
        raise AssertionError(f"not answered: {[self.machine.request(name) for name in self.unanswered()]}")

    def _trainer_well(self) -> None:
        if self.begun is not None:
            for at in range(len(self.refit.members) if self.refit is not None else 0):
                self.confirm(at)
            self.end_refit()
            self.deliver()
        elif self.rules.ownership.refit is Owner.trainer and any(
            one.state in (S.stale, S.empty) for one in self.machine.workers()
        ):
            self.begin_refit()

    def unanswered(self) -> list[str]:
        return [name for name, one in self.clients.items() if not one.answers]

    def answers(self, machine: RolloutMachine) -> dict[str, Any]:
        """All that a machine can be asked."""
        names = [*self.engines, *self.clients, *(one.request for one in machine.requests())]
        return {
            "deadline": machine.next_deadline(),
            "version": machine.version,
            "workers": machine.workers(),
            "worker": [machine.worker(name) for name in self.engines],
            "requests": machine.requests(),
            "request": [machine.request(name) for name in self.clients],
            "membership": machine.membership(),
            "refit": machine.open_refit(),
            "sample": machine.sample(),
            "rules": machine.rules,
            "steps": machine.steps,
            "scaling": machine.scaling(),
            "metrics": machine.metrics(),
            "stories": [machine.story(name) for name in names if machine.worker(name) or machine.request(name)],
        }

    def reload(self) -> None:
        """The machine is read from its own snapshot, answers alike, and goes on."""
        data = json.loads(json.dumps(self.machine.dump()))
        again = RolloutMachine.load(data, self.elastic)
        again.check()
        assert again.dump() == data
        was, now = self.answers(self.machine), self.answers(again)
        assert {name: now[name] for name in now if now[name] != was[name]} == {}, "other answers after a snapshot"
        self.machine = again
        self.counted["reloads"] += 1

    def replay(self) -> None:
        """The journal, once more, from the beginning and from the middle: the same instructions, the same state."""
        again = RolloutMachine(self.rules, self.elastic)
        half = len(self.journal) // 2
        for at, (now, event, out) in enumerate(self.journal):
            if at == half:
                data = json.loads(json.dumps(again.dump()))
                again = RolloutMachine.load(data, self.elastic)
                assert again.dump() == data
                again.check()
            written = json.loads(json.dumps(encode(event)))
            try:
                said = list(again.handle(decode(type(event), written), now))
            except (InputError, InfeasibleError):
                said = []
            assert said == out, f"{event} at {now}"
        assert again.dump() == self.machine.dump()


def spans_of(tokens: list[int]) -> tuple[Span, ...]:
    """Runs of equal versions."""
    spans: list[Span] = []
    for version in tokens:
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].tokens + 1)
        else:
            spans.append(Span(version, 1))
    return tuple(spans)
