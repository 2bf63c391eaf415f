"""Rules of the rollout machine, one by one: workers, requests, refits, numbers and routing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout import routing
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.policy import Decision
from trimtab.machines.rollout.routing import LengthPredictor
from trimtab.machines.rollout.workers import EDGES
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    End,
    InFlight,
    Owner,
    Ownership,
    RefitWay,
    RequestClass,
    RequestSpec,
    RequestState,
    RolloutRules,
    Span,
    WorkerSpec,
    WorkerState,
    WorkerVerb,
)

S = WorkerState
WRONG = [
    e.RequestArrived(RequestSpec("new", 1, 1, class_="nonsense")),
    e.RequestArrived(RequestSpec("r", 1, 1)),
    e.WorkerAdded(WorkerSpec("w0", limit=99)),
    e.WorkerRemoved("nobody"),
    e.WorkerReclaimed("w0", 100.0, "the trainer needs it"),
    e.ScaleRequested(99),
    e.HoldRequested("name", -1),
    e.WorkerRangeSet(5, 2),
]
OURS = Ownership(refit=Owner.trimtab)


class Bench:
    """A machine with some engines, and a clock."""

    def __init__(
        self, engines: int = 2, *, elastic: ElasticConfig | None = None, spec: Any = None, **rules: Any
    ) -> None:
        self.machine = RolloutMachine(RolloutRules(**rules), *(() if elastic is None else (elastic,)))
        self.now = 0.0
        self.said: list[Any] = []
        for number in range(engines):
            self.add(f"w{number}", **(spec or {}))

    def add(self, name: str, *, up: bool = True, version: int | None = 0, **spec: Any) -> None:
        self.tell(e.WorkerAdded(WorkerSpec(name, **{"can_pause": True, **spec}), up, version if up else None))

    def tell(self, event: Any, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        out = list(self.machine.handle(event, self.now))
        self.machine.check()
        self.said += out
        return out

    def ask(self, name: str = "r", max_tokens: int = 100, **how: Any) -> list[Any]:
        return self.tell(e.RequestArrived(RequestSpec(name, how.pop("prompt_tokens", 10), max_tokens, **how)))

    def wait(self, seconds: float) -> list[Any]:
        until, out = self.now + seconds, []
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            out += self.tell(e.RolloutTick())
        self.now = until
        return out

    def state(self, name: str) -> WorkerState:
        return next(one.state for one in self.machine.workers() if one.worker == name)

    def act(self, name: str) -> e.WorkerAction:
        return [one for one in self.said if isinstance(one, e.WorkerAction) and one.worker == name][-1]

    def done(self, name: str, version: int | None = None) -> list[Any]:
        return self.tell(e.ActionDone(name, self.act(name).attempt, version))

    def failed(self, name: str, why: str = "no") -> list[Any]:
        return self.tell(e.ActionFailed(name, self.act(name).attempt, why))

    def send(self, name: str = "r") -> e.SendRequest:
        return [one for one in self.said if isinstance(one, e.SendRequest) and one.request == name][-1]

    def answers(self, name: str = "r") -> list[e.AnswerRequest]:
        return [one for one in self.said if isinstance(one, e.AnswerRequest) and one.request == name]


def kinds(out: list[Any]) -> list[str]:
    return [one.verb.value if isinstance(one, e.WorkerAction) else type(one).__name__ for one in out]


def sent(out: list[Any]) -> dict[str, str]:
    return {one.request: one.worker for one in out if isinstance(one, e.SendRequest)}


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_request_is_sent_streamed_and_answered_once() -> None:
    bench = Bench()
    assert kinds(bench.ask()) == ["SendRequest"]
    assert bench.tell(e.TokensStreamed("r", 1, 4)) == []
    assert bench.machine.request("r").state is RequestState.streaming
    (answer,) = bench.tell(e.AttemptFinished("r", 1, 9))
    assert (answer.end, answer.tokens, answer.spans) == (End.stop, 9, (Span(0, 9),))
    assert bench.tell(e.AttemptFinished("r", 1, 9)) == []
    assert [one.state for one in bench.machine.story("r")] == ["queued", "sent", "streaming", "done"]


def test_a_broken_stream_goes_on_elsewhere_with_the_tokens_it_has() -> None:
    bench = Bench()
    bench.ask(min_tokens=20)
    first = bench.send().worker
    bench.tell(e.TokensStreamed("r", 1, 15))
    (again,) = bench.tell(e.AttemptFailed("r", 1, 16, "stream cut"))
    assert (again.resumed, again.max_tokens, again.min_tokens, again.attempt) == (16, 84, 4, 2)
    assert again.worker != first
    (answer,) = bench.tell(e.AttemptFinished("r", 2, 10))
    assert answer.tokens == 26


def test_what_a_cut_would_change_restarts_from_the_prompt() -> None:
    bench = Bench()
    bench.ask(resumable=False)
    (again,) = bench.tell(e.AttemptFailed("r", 1, 16, "500"))
    assert (again.resumed, again.max_tokens) == (0, 100)
    assert bench.machine.story("r")[-2].reason.code is ReasonCode.restarted


def test_a_stream_cut_after_its_last_token_is_whole() -> None:
    bench = Bench()
    bench.ask(max_tokens=16)
    (answer,) = bench.tell(e.AttemptFailed("r", 1, 16, "stream cut"))
    assert (answer.end, answer.tokens) == (End.length, 16)


def test_retries_are_bounded_with_a_reason_at_the_end() -> None:
    bench = Bench(retries=2, faults=9)
    bench.ask()
    for attempt in (1, 2):
        assert kinds(bench.tell(e.AttemptFailed("r", attempt, 0, "500"))) == ["SendRequest"]
    (answer,) = bench.tell(e.AttemptFailed("r", 3, 0, "500"))
    assert (answer.end, answer.reason.code) == (End.failed, ReasonCode.retries_used)


def test_a_request_that_the_engine_calls_wrong_is_not_tried_again() -> None:
    bench = Bench()
    bench.ask()
    (answer,) = bench.tell(e.AttemptFailed("r", 1, 0, "400: too long", fatal=True))
    assert (answer.end, answer.reason.code) == (End.failed, ReasonCode.refused)


def test_an_abort_of_others_is_passed_on_with_its_tokens_and_never_tried_again() -> None:
    bench = Bench()
    bench.ask()
    (answer,) = bench.tell(e.AbortedExternally("r", 1, 7))
    assert (answer.end, answer.tokens, answer.reason.code) == (End.abort, 7, ReasonCode.passed_on)


def test_what_waits_is_answered_too_when_others_abort_all_that_their_engines_run() -> None:
    bench = Bench(2, spec={"limit": 2})
    for number in range(8):
        bench.ask(f"r{number}")
    on = {
        name: [one for one in (f"r{number}" for number in range(4)) if bench.send(one).worker == name]
        for name in ("w0", "w1")
    }
    assert [len(names) for names in on.values()] == [2, 2]
    for name in (*on["w0"], on["w1"][0]):
        assert sent(bench.tell(e.AbortedExternally(name, 1, 7), 0.1)) == {}, "it may be aborting all"
    assert not bench.answers("r4")
    bench.wait(0.1)
    bench.ask("later")
    out = bench.tell(e.AbortedExternally(on["w1"][1], 1, 7), 0.1)
    assert {one.request: (one.end, one.tokens) for one in out if isinstance(one, e.AnswerRequest)} == {
        on["w1"][1]: (End.abort, 7), **{f"r{number}": (End.abort, 0) for number in range(4, 8)}
    }  # fmt: skip
    assert set(sent(out)) == {"later"}


def test_what_waits_goes_on_where_others_abort_only_some_or_pause_the_engine() -> None:
    bench = Bench(1, spec={"limit": 2})
    for number in range(4):
        bench.ask(f"r{number}")
    assert sent(bench.tell(e.AbortedExternally("r0", 1, 7))) == {}
    assert sent(bench.wait(2.0)) == {"r2": "w0"}
    bench.ask("r4")
    assert sent(bench.tell(e.AttemptFinished("r1", 1, 9, End.stop, 0))) == {"r3": "w0"}
    assert sent(bench.tell(e.AbortedExternally("r2", 1, 7, paused=True))) == {"r4": "w0"}


def test_an_engine_that_was_aborted_takes_new_requests_while_another_goes_on() -> None:
    bench = Bench(2, spec={"limit": 1})
    for number in range(3):
        bench.ask(f"r{number}")
    worker = bench.send("r0").worker
    bench.tell(e.AbortedExternally("r0", 1, 0))
    assert not bench.answers("r2")
    assert sent(bench.wait(2.0)) == {"r2": worker}


def test_news_of_an_old_attempt_changes_nothing() -> None:
    bench = Bench()
    bench.ask()
    bench.tell(e.AttemptFailed("r", 1, 5, "500"))
    for late in (
        e.TokensStreamed("r", 1, 50),
        e.AttemptFinished("r", 1, 60),
        e.AbortedExternally("r", 1, 60),
        e.AttemptFailed("r", 1, 9, "?"),
    ):
        assert bench.tell(late) == []
    assert bench.machine.request("r").tokens == 5


def test_a_cancelled_request_is_answered_at_once_and_its_place_stays_taken_until_it_has_ended() -> None:
    bench = Bench(1, spec={"limit": 1})
    bench.ask()
    bench.ask("next")
    assert kinds(bench.tell(e.RequestCancelled("r"))) == ["AbortAttempt", "AnswerRequest"]
    assert kinds(bench.tell(e.AbortDone("r", 1, 3))) == ["SendRequest"]
    assert len(bench.answers()) == 1


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    bench = Bench(1, spec={"limit": 1})
    bench.ask(deadline=5.0)
    bench.ask("waits", deadline=6.0)
    out = bench.wait(7.0)
    assert {one.request: one.reason.code for one in out if isinstance(one, e.AnswerRequest)} == {
        "r": ReasonCode.too_late,
        "waits": ReasonCode.too_late,
    }


def test_a_full_queue_refuses_with_a_reason_and_a_time_to_come_back() -> None:
    bench = Bench(1, spec={"limit": 1}, classes=(RequestClass(queue_limit=1),))
    bench.ask("a")
    bench.ask("b")
    (refuse,) = bench.ask("c")
    assert isinstance(refuse, e.RefuseRequest)
    assert (refuse.reason.code, refuse.retry_after_s > 0) == (ReasonCode.queue_full, True)
    assert bench.machine.request("c") is None


def test_only_an_explicit_key_makes_two_requests_one() -> None:
    bench = Bench()
    bench.ask("a", key="k")
    assert bench.ask("b", key="k") == []
    assert kinds(bench.ask("c")) == ["SendRequest"]
    out = bench.tell(e.AttemptFinished("a", 1, 5))
    assert [(one.request, one.of, one.tokens) for one in out] == [("a", "", 5), ("b", "a", 5)]
    (late,) = bench.ask("d", key="k")
    assert (late.of, late.tokens) == ("a", 5)
    with pytest.raises(InputError, match="has another prompt or limit"):
        bench.ask("f", key="k", max_tokens=7)


def test_whoever_shares_a_key_gets_the_answer_though_the_first_client_left() -> None:
    bench = Bench()
    bench.ask("a", key="k")
    bench.ask("b", key="k")
    assert kinds(bench.tell(e.RequestCancelled("a"))) == ["AnswerRequest"]
    assert [one.request for one in bench.tell(e.AttemptFinished("a", 1, 5))] == ["b"]


def test_a_wrong_ask_changes_nothing() -> None:
    bench = Bench()
    before = bench.machine.dump()
    with pytest.raises(InputError, match="no class"):
        bench.ask(class_="defualt")
    with pytest.raises(InputError, match="no worker"):
        bench.tell(e.WorkerReclaimed("w9", 9.0, ""))
    assert bench.machine.dump() == before


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_there_is_no_edge_from_lost_to_anything_that_serves() -> None:
    assert set(EDGES[S.lost]) == {S.starting, S.stale, S.inactive}


def test_an_engine_that_slept_when_it_was_lost_is_woken_and_refitted_before_it_serves() -> None:
    bench = Bench(2, ownership=OURS)
    bench.tell(e.ScaleRequested(1))
    bench.done("w1")
    bench.tell(e.WorkerDied("w0", "killed"))
    bench.tell(e.WorkerDied("w1", "no answer"))
    bench.tell(e.WorkerUp("w1", 0, restarted=False))
    assert bench.state("w1") is S.inactive
    bench.wait(6.0)
    assert bench.act("w1").verb is WorkerVerb.wake
    assert kinds(bench.done("w1", 0)) == ["refit"]
    bench.done("w1")
    assert bench.state("w1") is S.active


@pytest.mark.parametrize("way_down", ["stale", "empty", "lost"])
def test_only_a_confirmed_refit_leads_back_to_active(way_down: str) -> None:
    bench = Bench(2)
    if way_down == "stale":
        bench.tell(e.RefitBegun(1))
        bench.tell(e.RefitEnded(1))
    elif way_down == "empty":
        bench.tell(e.WeightsDiscarded("w0"))
    else:
        bench.tell(e.WorkerDied("w0", "killed"))
        bench.tell(e.WorkerUp("w0", bench.machine.version))
    tries = [
        e.WorkerUp("w0", bench.machine.version, restarted=False),
        e.WorkerHealthy("w0"),
        e.WorkerReturned("w0"),
        e.PausedExternally("w0"),
        e.PausedExternally("w0", on=False),
        e.RefitConfirmed("w0", bench.machine.version + 1),
        e.RefitConfirmed("w0", bench.machine.version - 1),
        e.RefitFailed("w0", bench.machine.version, "no"),
        e.ScaleRequested(2),
        e.HoldRequested("all", 2),
    ]
    for event in tries:
        bench.tell(event)
        bench.wait(10.0)
        assert bench.state("w0") in (S.stale, S.empty)
    bench.tell(e.RefitConfirmed("w0", bench.machine.version))
    assert bench.state("w0") is S.active


def test_an_engine_restarted_with_old_weights_serves_nobody() -> None:
    bench = Bench(2)
    bench.ask()
    worker = bench.send().worker
    out = bench.tell(e.WorkerUp(worker, 0))
    assert sent(out) == {"r": "w1" if worker == "w0" else "w0"}
    assert bench.state(worker) is S.stale


def test_a_sleep_that_discards_weights_leaves_the_worker_empty_until_a_refit() -> None:
    bench = Bench(2, spec={"sleep_keeps_weights": False})
    bench.tell(e.ScaleRequested(1))
    assert bench.act("w1").keeps_weights is False
    bench.done("w1")
    assert bench.state("w1") is S.inactive
    bench.tell(e.ScaleRequested(2))
    bench.done("w1", version=0)  # whatever it reports
    assert bench.state("w1") is S.empty
    bench.tell(e.RefitConfirmed("w1", 0))
    assert bench.state("w1") is S.active


def test_where_refits_are_trimtabs_a_returning_worker_is_refitted_first() -> None:
    bench = Bench(1, ownership=OURS)
    bench.tell(e.WorkerDied("w0", "killed"))
    assert kinds(bench.tell(e.WorkerUp("w0", 0))) == ["refit"]
    assert bench.ask() == []
    assert kinds(bench.done("w0")) == ["SendRequest"]


def test_a_drain_past_its_deadline_moves_what_is_left_with_its_tokens_and_only_then_sleeps() -> None:
    bench = Bench(2, drain_s=10.0)
    bench.ask()
    worker = bench.send().worker
    bench.tell(e.TokensStreamed("r", 1, 5))
    assert bench.tell(e.WorkerReclaimed(worker, 100.0, "a trainer needs it")) == []
    assert bench.state(worker) is S.draining
    assert kinds(bench.wait(10.5)) == ["AbortAttempt"]
    out = bench.tell(e.AbortDone("r", 1, 8))
    assert kinds(out) == ["sleep", "SendRequest"]
    assert (bench.send().resumed, bench.send().worker != worker) == (8, True)
    assert bench.machine.request("r").breaks == 0  # moves are not held against it


def test_a_draining_worker_can_be_called_back() -> None:
    bench = Bench(2)
    for name in ("a", "b"):
        bench.ask(name)
    bench.tell(e.ScaleRequested(1))
    (drained,) = [one.worker for one in bench.machine.workers() if one.state is S.draining]
    (step,) = bench.tell(e.ScaleRequested(2))
    assert step.step.changed == (drained,)
    assert bench.state(drained) is S.active


def test_a_worker_called_back_after_a_refit_is_stale() -> None:
    bench = Bench(2)
    bench.ask("a")
    bench.ask("b")
    bench.tell(e.ScaleRequested(1))
    (drained,) = [one.worker for one in bench.machine.workers() if one.state is S.draining]
    bench.tell(e.RefitBegun(1))
    bench.tell(e.ScaleRequested(2))
    assert bench.state(drained) is S.stale


def test_a_worker_called_back_during_a_refit_waits_for_its_end() -> None:
    bench = Bench(2, ownership=Ownership(pause=Owner.trainer))
    bench.ask()
    worker = bench.send().worker
    begin(bench, way=RefitWay.collective)
    bench.tell(e.WorkerReclaimed(worker, 100.0, "needed", forced=True))
    bench.tell(e.RefitConfirmed(worker, 1))
    bench.tell(e.WorkerReturned(worker))
    bench.tell(e.ScaleRequested(2))
    assert bench.state(worker) is S.stale  # the trainer may still hold it paused
    bench.tell(e.RefitEnded(1))
    assert bench.state(worker) is S.active


def test_the_order_of_a_stop_is_route_off_drain_sleep_stop() -> None:
    bench = Bench(2, spec={"startable": True})
    bench.ask()
    worker = bench.send().worker
    assert bench.tell(e.WorkerRemoved(worker)) == []
    assert sent(bench.ask("other")) == {"other": "w1" if worker == "w0" else "w0"}
    assert kinds(bench.tell(e.AttemptFinished("r", 1, 5))) == ["AnswerRequest", "sleep"]
    assert kinds(bench.done(worker)) == ["stop"]
    bench.done(worker)
    assert worker not in [one.worker for one in bench.machine.workers()]


def test_a_wedged_worker_is_suspected_probed_and_lost_and_its_requests_go_elsewhere() -> None:
    bench = Bench(2, stall_s=20.0, probe_s=5.0, tries=2, back_off_s=1.0)
    bench.ask()
    worker = bench.send().worker
    out = bench.wait(20.5)
    assert kinds(out)[:2] == ["AbortAttempt", "probe"]
    assert sent(out)["r"] != worker
    assert bench.state(worker) is S.suspect
    bench.wait(20.0)
    assert bench.state(worker) is S.lost


def test_a_suspect_that_answers_its_probe_serves_again() -> None:
    bench = Bench(2)
    bench.tell(e.WorkerUnhealthy("w0", 3.0, "no answer"))
    assert bench.state("w0") is S.suspect
    bench.tell(e.WorkerHealthy("w0"))
    bench.done("w0")
    assert bench.state("w0") is S.active


def test_a_worker_that_breaks_requests_in_a_row_is_suspected() -> None:
    bench = Bench(1, faults=3)
    bench.ask()
    for attempt in (1, 2, 3):
        bench.tell(e.AttemptFailed("r", attempt, 0, "500"))
    assert bench.state("w0") is S.suspect
    assert bench.machine.request("r").state is RequestState.queued


def test_out_of_memory_on_wake_leaves_it_asleep_and_is_tried_again_later() -> None:
    bench = Bench(2, back_off_s=2.0, tries=3)
    bench.tell(e.ScaleRequested(1))
    bench.done("w1")
    bench.tell(e.ScaleRequested(2))
    bench.failed("w1", "out of memory")
    assert bench.state("w1") is S.inactive
    bench.wait(30.0)
    assert bench.state("w1") is S.starting
    for _ in range(2):
        bench.failed("w1", "out of memory")
        bench.wait(30.0)
    assert bench.state("w1") is S.lost


def test_starts_are_bounded_and_the_last_failure_is_said() -> None:
    bench = Bench(0, tries=2, back_off_s=1.0)
    bench.add("w0", up=False, startable=True)
    bench.wait(1.0)
    for _ in range(2):
        assert bench.act("w0").verb is WorkerVerb.start
        bench.failed("w0", "no such file")
        bench.done("w0")  # the stop of what may be left of it
        bench.wait(20.0)
    warnings = [one.reason.code for one in bench.said if isinstance(one, e.Warn)]
    assert warnings == [ReasonCode.restarts_used]
    assert bench.state("w0") is S.lost


def test_figures_that_are_old_are_not_believed() -> None:
    bench = Bench(2, spec={"limit": 4}, load_fresh_s=5.0)
    bench.now = 100.0
    bench.tell(e.LoadReported("w0", 4, 0, 0.2, at=90.0))
    assert sent(bench.ask("a")) == {"a": "w0"}
    bench.tell(e.LoadReported("w0", 5, 0, 0.2, at=100.0))
    assert [sent(bench.ask(name)) for name in "bc"] == [{"b": "w1"}, {"c": "w1"}]
    bench.tell(e.LoadReported("w1", 2, 0, 0.99, at=100.0))
    assert bench.ask("d") == []
    assert sent(bench.wait(6.0)) == {"d": "w0"}


def test_nothing_is_sent_to_an_engine_that_others_have_paused_and_nothing_there_is_given_up() -> None:
    bench = Bench(1, stall_s=10.0)
    bench.ask("a")
    bench.tell(e.PausedExternally("w0"))
    assert bench.ask("b") == []
    assert bench.wait(100.0) == []
    assert sent(bench.tell(e.PausedExternally("w0", on=False))) == {"b": "w0"}


def test_what_a_lost_engine_may_still_work_on_is_cut_before_it_can_sleep() -> None:
    bench = Bench(2, ownership=OURS)
    bench.ask()
    worker = bench.send().worker
    bench.tell(e.WorkerUnhealthy(worker, 60.0, "no answer"))
    assert kinds(bench.tell(e.WorkerUp(worker, 0, restarted=False))) == ["AbortAttempt", "refit"]
    bench.done(worker)
    bench.tell(e.WorkerReclaimed(worker, 100.0, "needed"))
    assert bench.state(worker) is S.draining
    assert kinds(bench.tell(e.AbortDone("r", 1, 50))) == ["sleep"]


def test_with_aborts_in_the_trainers_hands_a_drain_goes_on_past_its_deadline_and_says_so() -> None:
    bench = Bench(2, drain_s=5.0, ownership=Ownership(abort=Owner.trainer))
    bench.ask()
    worker = bench.send().worker
    bench.tell(e.WorkerReclaimed(worker, 100.0, "needed"))
    assert kinds(bench.wait(50.0)) == ["Warn"]
    assert kinds(bench.tell(e.AttemptFinished("r", 1, 9))) == ["AnswerRequest", "sleep"]


# ---- refit -----------------------------------------------------------------------------------------------------------


def begin(bench: Bench, version: int = 1, **how: Any) -> list[Any]:
    return bench.tell(e.RefitBegun(version, **how))


def test_membership_is_frozen_from_begin_to_end_with_ranks_in_order() -> None:
    bench = Bench(0)
    for name, size in (("a", 2), ("b", 4), ("c", 1)):
        bench.add(name, size=size)
    (ready,) = begin(bench, way=RefitWay.collective)
    membership = ready.membership
    assert [(one.worker, one.size, one.offset) for one in membership.members] == [("a", 2, 0), ("b", 4, 2), ("c", 1, 6)]
    assert (membership.ranks, membership.frozen, membership.epoch) == (7, True, 1)
    bench.add("d")
    bench.tell(e.WorkerDied("b", "killed"))
    bench.tell(e.WorkerReclaimed("c", 100.0, "needed", forced=True))
    assert bench.machine.membership() == membership
    assert (bench.state("d"), bench.state("c")) == (S.stale, S.draining)
    for name in ("a", "c"):
        bench.tell(e.RefitConfirmed(name, 1, epoch=1))
    over = bench.tell(e.RefitEnded(1))[0]
    assert (over.current, over.failed) == (("a", "c"), ("b",))
    after = bench.machine.membership()
    assert ([one.worker for one in after.members], after.epoch) == (["a", "d"], 2)
    assert (after.joined, set(after.left)) == (("d",), {"b", "c"})


def test_a_newcomer_is_stale_until_the_trainer_has_acknowledged_it() -> None:
    bench = Bench(1)
    begin(bench)
    bench.tell(e.RefitConfirmed("w0", 1))
    bench.tell(e.RefitEnded(1))
    bench.add("new", version=1)
    assert bench.state("new") is S.stale
    assert bench.machine.membership().joined == ("new",)
    bench.tell(e.RefitConfirmed("new", 1))
    assert bench.state("new") is S.active


def test_what_was_sent_to_an_attached_engine_before_its_death_was_heard_is_aborted_on_its_new_process() -> None:
    bench = Bench(1)
    bench.ask()  # by now the engine may have been killed and started again
    bench.tell(e.WorkerDied("w0", "killed"))
    assert kinds(bench.tell(e.WorkerUp("w0", 0))) == ["AbortAttempt"]
    assert kinds(begin(bench, in_flight=InFlight.move)) == []  # not ready: it may still run there
    assert kinds(bench.tell(e.AbortDone("r", 1, 0))) == ["RefitReady"]


def test_nothing_is_aborted_on_a_process_that_trimtab_started_after_the_old_one_died() -> None:
    bench = Bench(1, spec={"startable": True})
    bench.ask()
    bench.tell(e.WorkerDied("w0", "killed"))
    bench.wait(60.0)
    assert bench.act("w0").verb is WorkerVerb.start
    assert "AbortAttempt" not in kinds(bench.done("w0", 0))


def test_the_same_members_keep_their_epoch_and_a_restarted_one_begins_another() -> None:
    bench = Bench(2)
    for version in (1, 2):
        (ready,) = begin(bench, version)
        assert ready.membership.epoch == 1
        for name in ("w0", "w1"):
            bench.tell(e.RefitConfirmed(name, version))
        bench.tell(e.RefitEnded(version))
    bench.tell(e.WorkerUp("w1", 0))
    (ready,) = begin(bench, 3)
    assert ready.membership.epoch == 2


def test_a_confirmation_of_a_process_that_is_gone_is_not_believed() -> None:
    bench = Bench(2)
    begin(bench)
    bench.tell(e.WorkerUp("w0", 0))  # restarted meanwhile
    bench.tell(e.RefitConfirmed("w0", 1, epoch=1))
    bench.tell(e.RefitEnded(1))
    assert bench.state("w0") is S.stale


def test_a_late_confirmation_does_not_reach_the_process_that_came_after() -> None:
    bench = Bench(2)
    begin(bench)
    bench.tell(e.RefitEnded(1))
    bench.tell(e.RefitConfirmed("w1", 1, epoch=1))
    assert bench.state("w1") is S.active  # late, but of the process that is there
    bench.tell(e.WorkerUp("w0", 0))
    bench.tell(e.RefitConfirmed("w0", 1, epoch=1))
    assert bench.state("w0") is S.stale


def test_a_refit_that_fails_on_one_of_eight_leaves_that_one_out_and_seven_serve() -> None:
    bench = Bench(8)
    begin(bench)
    for number in range(8):
        ok = e.RefitConfirmed(f"w{number}", 1)
        bench.tell(ok if number != 3 else e.RefitFailed("w3", 1, "checksum differs"))
    (over,) = bench.tell(e.RefitEnded(1))
    assert over.failed == ("w3",)
    assert [bench.state(f"w{number}") for number in range(8)] == [S.active] * 3 + [S.stale] + [S.active] * 4
    assert bench.machine.workers()[3].version is None


def test_a_refit_that_reaches_nobody_is_said_and_can_be_begun_again() -> None:
    bench = Bench(2)
    begin(bench)
    out = bench.wait(700.0)
    assert [kind for kind in kinds(out) if kind != "AnnounceScaleStep"] == ["RefitOver", "Warn"]
    assert [one.reason.code for one in out if isinstance(one, e.Warn)] == [ReasonCode.below_min]
    assert bench.ask() == []
    begin(bench)
    assert sent(bench.tell(e.RefitConfirmed("w0", 1))) == {"r": "w0"}


def test_requests_kept_over_a_refit_pause_in_place_and_record_both_versions() -> None:
    bench = Bench(1)
    bench.ask()
    bench.tell(e.TokensStreamed("r", 1, 5))
    assert kinds(begin(bench)) == ["pause"]
    bench.tell(e.TokensStreamed("r", 1, 6))
    assert kinds(bench.done("w0")) == ["RefitReady"]
    assert kinds(bench.tell(e.RefitConfirmed("w0", 1))) == ["resume"]
    assert bench.state("w0") is S.stale
    bench.done("w0")
    bench.tell(e.RefitEnded(1))
    (answer,) = bench.tell(e.AttemptFinished("r", 1, 16))
    assert answer.spans == (Span(0, 6), Span(1, 10))


def test_requests_that_may_not_span_versions_restart_at_a_refit() -> None:
    bench = Bench(1)
    bench.ask(spans=False)
    bench.tell(e.TokensStreamed("r", 1, 5))
    assert kinds(begin(bench)) == ["AbortAttempt", "pause"]
    bench.tell(e.AbortDone("r", 1, 7))
    bench.done("w0")
    bench.tell(e.RefitConfirmed("w0", 1))
    bench.done("w0")
    assert (bench.send().resumed, bench.send().version) == (0, 1)


def test_what_waits_with_tokens_of_an_older_version_and_may_not_span_restarts() -> None:
    bench = Bench(1)
    bench.ask("one", spans=False)
    bench.ask("several")
    bench.tell(e.TokensStreamed("one", 1, 5))
    bench.tell(e.TokensStreamed("several", 1, 5))
    bench.tell(e.WorkerDied("w0", "killed"))
    for name in ("one", "several"):
        bench.tell(e.AttemptFailed(name, 1, 5, "connection reset"))
    bench.tell(e.WorkerUp("w0", 0))
    begin(bench)
    bench.tell(e.RefitConfirmed("w0", 1))
    assert (bench.send("one").resumed, bench.send("several").resumed) == (0, 5)


def test_an_answer_that_spans_versions_and_may_not_is_never_given() -> None:
    theirs = Ownership(abort=Owner.trainer, pause=Owner.trainer)
    bench = Bench(1, ownership=theirs)
    bench.ask(spans=False)
    bench.tell(e.TokensStreamed("r", 1, 5))
    begin(bench)
    bench.tell(e.RefitConfirmed("w0", 1))
    bench.tell(e.RefitEnded(1))
    (again,) = bench.tell(e.AttemptFinished("r", 1, 9))
    assert (again.resumed, again.attempt) == (0, 2)


def test_requests_moved_at_a_refit_go_on_with_what_they_have_on_whoever_is_first() -> None:
    bench = Bench(2)
    bench.ask()
    worker = bench.send().worker
    assert kinds(begin(bench, in_flight=InFlight.move)) == ["AbortAttempt"]
    assert kinds(bench.tell(e.AbortDone("r", 1, 7))) == ["RefitReady"]
    other = "w1" if worker == "w0" else "w0"
    assert sent(bench.tell(e.RefitConfirmed(other, 1))) == {"r": other}
    assert bench.send().resumed == 7


def test_with_a_collective_nobody_serves_before_the_end() -> None:
    bench = Bench(2)
    begin(bench, way=RefitWay.collective)
    bench.tell(e.RefitConfirmed("w0", 1))
    assert bench.state("w0") is S.stale
    bench.tell(e.RefitEnded(1))
    assert bench.state("w0") is S.active


def test_a_version_that_is_gone_fails_and_one_that_has_not_come_waits() -> None:
    bench = Bench(1)
    assert bench.ask("next", version=1) == []
    assert bench.ask("newer", at_least=1) == []
    assert bench.machine.request("next").reason.code is ReasonCode.version_awaited
    begin(bench)
    bench.tell(e.RefitConfirmed("w0", 1))
    assert sent(bench.said) == {"next": "w0", "newer": "w0"}
    (answer,) = bench.ask("old", version=0)
    assert answer.reason.code is ReasonCode.version_gone


def test_with_everything_in_the_trainers_hands_trimtab_only_watches() -> None:
    theirs = Ownership(Owner.trainer, Owner.trainer, Owner.trainer, Owner.trainer)
    bench = Bench(2, ownership=theirs, drain_s=5.0)
    bench.ask("a")
    bench.ask("b", spans=False)
    assert kinds(begin(bench)) == ["RefitReady"]
    bench.tell(e.RefitConfirmed("w0", 1))
    bench.tell(e.RefitConfirmed("w1", 1))
    bench.tell(e.RefitEnded(1))
    bench.tell(e.WorkerReclaimed("w0", 50.0, "needed"))
    bench.wait(60.0)
    assert not [one for one in bench.said if isinstance(one, (e.WorkerAction, e.AbortAttempt))]


def test_weights_that_nobody_vouches_for_make_nothing_that_counts() -> None:
    bench = Bench(2)
    bench.ask()
    worker = bench.send().worker
    bench.tell(e.TokensStreamed("r", 1, 5))
    assert kinds(bench.tell(e.WeightsDiscarded(worker))) == ["AbortAttempt"]
    assert bench.tell(e.TokensStreamed("r", 1, 40, version=0)) == []
    (again,) = bench.tell(e.AttemptFinished("r", 1, 60))
    assert again.resumed == 5


# ---- how many --------------------------------------------------------------------------------------------------------


def three(state: Any, sample: Any) -> Any:
    return state, Decision(3, Reason(ReasonCode.load_high, "three are nice"), "three serve")


def test_the_policy_is_asked_at_every_look_and_several_workers_move_in_one_step() -> None:
    bench = Bench(1, elastic=ElasticConfig(policy=three), monitor_s=5.0)
    for number in range(4):
        bench.add(f"s{number}", up=False, startable=True)
    out = bench.wait(5.0)
    assert kinds(out) == ["start", "start", "AnnounceScaleStep"]
    assert (out[-1].step.before, out[-1].step.workers, out[-1].step.reason.code) == (1, 3, ReasonCode.load_high)


def test_a_number_set_by_hand_wins_until_it_expires_or_is_released() -> None:
    bench = Bench(4, elastic=ElasticConfig(policy=three), monitor_s=5.0)
    bench.tell(e.ScaleRequested(1, until=60.0))
    assert bench.machine.metrics()["active_workers"] == 1
    bench.wait(50.0)
    assert bench.machine.metrics()["active_workers"] == 1
    for number in (1, 2, 3):
        if bench.state(f"w{number}") is S.draining:
            bench.done(f"w{number}")
    bench.wait(20.0)
    assert bench.machine.sample().serving == 3
    with pytest.raises(InputError, match="range"):
        bench.tell(e.ScaleRequested(99))


def one_worker() -> Decision:
    return Decision(1, Reason(ReasonCode.load_low, "one is enough"), "one serves")


def test_workers_are_held_ready_before_a_validation() -> None:
    bench = Bench(3, elastic=ElasticConfig(policy=lambda state, seen: (state, one_worker())))
    bench.wait(6.0)
    for number in (1, 2):
        bench.done(f"w{number}")
    out = bench.tell(e.HoldRequested("validation", 3))
    assert kinds(out) == ["wake", "wake", "AnnounceScaleStep"]
    assert (out[-1].step.reason.code, out[-1].step.before) == (ReasonCode.held, 1)


def test_a_pool_takes_nobody_below_the_least_unless_the_node_goes_anyway() -> None:
    bench = Bench(2, min_workers=2)
    with pytest.raises(InfeasibleError, match="at least 2 must"):
        bench.tell(e.WorkerReclaimed("w0", 100.0, "a trainer needs it"))
    bench.tell(e.WorkerReclaimed("w0", 100.0, "the node goes", forced=True))
    assert bench.state("w0") is S.draining


def test_a_taken_worker_is_not_woken_until_it_is_given_back() -> None:
    bench = Bench(2)
    bench.tell(e.WorkerReclaimed("w0", 100.0, "needed"))
    bench.done("w0")
    assert bench.tell(e.ScaleRequested(2)) == []
    bench.tell(e.WorkerReturned("w0"))
    assert "wake" in kinds(bench.wait(6.0))


def test_nobody_leaves_by_scaling_while_a_refit_is_open() -> None:
    bench = Bench(3)
    begin(bench)
    assert bench.tell(e.ScaleRequested(1)) == []
    for number in range(3):
        bench.tell(e.RefitConfirmed(f"w{number}", 1))
    bench.tell(e.RefitEnded(1))
    assert "AnnounceScaleStep" in kinds(bench.wait(6.0))


def test_metrics_have_the_seven_figures() -> None:
    bench = Bench(2, capacity=4, spec={"limit": 2})
    for number in range(6):
        bench.ask(f"r{number}")
    assert bench.machine.metrics() == {
        "active_workers": 2,
        "draining_workers": 0,
        "total_workers": 2,
        "active_requests": 4,
        "pending_requests": 2,
        "load_ratio": 0.75,
        "total_capacity": 8,
    }


# ---- routing ---------------------------------------------------------------------------------------------------------


def test_tokens_count_not_requests() -> None:
    bench = Bench(2)
    bench.ask("long", max_tokens=4_000)
    assert [sent(bench.ask(name, max_tokens=100))[name] for name in "abc"] == ["w1", "w1", "w1"]


def test_the_length_of_answers_is_learnt_by_class_and_prompt_length() -> None:
    predictor = LengthPredictor({})
    short, long = RequestSpec("a", 10, 1_000, class_="x"), RequestSpec("b", 900, 1_000, class_="x")
    assert predictor.remaining(short, 0) == 1_000
    for _ in range(5):
        predictor.learn(short, 20)
        predictor.learn(long, 500)
    assert predictor.remaining(short, 0) == 20
    assert predictor.remaining(long, 100) == 400
    assert predictor.remaining(short, 30) == 30  # longer than ever before: as long again
    assert 20 < predictor.remaining(RequestSpec("c", 100, 1_000, class_="x"), 0) < 500


def test_one_prompts_samples_go_to_one_worker_while_it_pays() -> None:
    bench = Bench(2, spec={"limit": 64}, affinity_requests=2.0)
    places = [sent(bench.ask(f"r{number}", group="g"))[f"r{number}"] for number in range(8)]
    assert places[:3] == ["w0"] * 3
    assert 3 <= places.count("w1") <= 5


def test_a_prefix_may_jump_the_queue_but_only_within_the_window() -> None:
    bench = Bench(2, spec={"limit": 1}, affinity_window=2)
    bench.ask("a0", group="a")
    bench.ask("b0", group="b")
    for name, group in (("x", "x"), ("b1", "b"), ("y", "y"), ("z", "z"), ("b2", "b")):
        bench.ask(name, group=group)
    assert sent(bench.tell(e.AttemptFinished("b0", 1, 5))) == {"b1": "w1"}
    assert sent(bench.tell(e.AttemptFinished("b1", 1, 5))) == {"x": "w1"}


def test_a_session_stays_on_its_worker_over_a_hundred_others_and_moves_when_that_is_lost() -> None:
    bench = Bench(4, spec={"limit": 500})
    names = [f"s{number}" for number in range(101)]

    def turn(number: int) -> dict[str, str]:
        found = {}
        for name in names:
            request = f"{name}.{number}"
            # Long answers stay where the first turns were least loaded: loads alone would spread the sessions anew.
            length = 5_000 if name.endswith("7") else 10
            found[name] = sent(bench.ask(request, length, group=request, session=name))[request]
            if length == 10:
                bench.tell(e.AttemptFinished(request, 1, 10))
        return found

    first = turn(1)
    assert set(first.values()) == {"w0", "w1", "w2", "w3"}
    assert turn(2) == turn(3) == first
    gone = first["s0"]
    bench.tell(e.WorkerDied(gone, "killed"))
    moved = turn(4)
    assert gone not in moved.values()
    assert {name: place for name, place in moved.items() if first[name] != gone} == {
        name: place for name, place in first.items() if place != gone
    }
    assert turn(5) == moved, "the worker that it moved to is its home"
    again = RolloutMachine.load(bench.machine.dump())
    assert again.dump() == bench.machine.dump()
    bench.machine = again
    assert turn(6) == moved


def test_a_session_leaves_a_full_worker_and_one_that_it_failed_on() -> None:
    bench = Bench(2, spec={"limit": 1})
    assert sent(bench.ask("a1", session="a")) == {"a1": "w0"}
    assert sent(bench.ask("a2", session="a")) == {"a2": "w1"}
    bench.tell(e.AttemptFinished("a1", 1, 5))
    bench.tell(e.AttemptFinished("a2", 1, 5))
    assert sent(bench.ask("a3", session="a")) == {"a3": "w1"}, "the last one is its home"
    assert sent(bench.tell(e.AttemptFailed("a3", 1, 0, "500"))) == {"a3": "w0"}
    bench.tell(e.AttemptFinished("a3", 2, 5))
    assert sent(bench.ask("a4", session="a")) == {"a4": "w0"}


def test_a_prefix_takes_no_request_of_a_session_away_from_its_worker() -> None:
    bench = Bench(2)
    bench.ask("z", 1_000)
    assert sent(bench.ask("a", session="s")) == {"a": "w1"}
    for name in "za":
        bench.tell(e.AttemptFinished(name, 1, 5))
    bench.tell(e.RefitBegun(1, RefitWay.collective))
    bench.ask("p", 1, group="g")
    bench.ask("y", 5_000)
    bench.ask("x")
    bench.ask("a2", group="g", session="s")
    for name in ("w0", "w1"):
        bench.tell(e.RefitConfirmed(name, 1))
    # When it is the turn of `x`, w0 has the fewest tokens, and the prefix of `a2`; but its session is on w1.
    assert sent(bench.tell(e.RefitEnded(1))) == {"p": "w0", "y": "w1", "x": "w0", "a2": "w1"}


def test_sessions_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "HOMES_KEPT", 2)
    bench = Bench(1)
    for session in "abac":
        bench.ask(f"r{bench.now}{session}{len(bench.said)}", session=session)
    assert list(bench.machine.dump()["sessions"]) == ["a", "c"]


def test_a_higher_class_goes_first_and_whoever_comes_back_keeps_its_place() -> None:
    classes = (RequestClass(), RequestClass("validation", priority=5))
    bench = Bench(1, spec={"limit": 1}, classes=classes)
    bench.ask("a")
    bench.ask("b")
    bench.ask("v", class_="validation")
    assert sent(bench.tell(e.AttemptFailed("a", 1, 3, "500"))) == {"v": "w0"}
    assert sent(bench.tell(e.AttemptFinished("v", 1, 5))) == {"a": "w0"}


def test_a_worker_takes_no_more_than_its_limits() -> None:
    bench = Bench(1, spec={"limit": 3, "token_limit": 150})
    assert [len(sent(bench.ask(name, max_tokens=100))) for name in "abc"] == [1, 1, 0]


# ---- nouns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RolloutRules(min_workers=3, max_workers=2),
        lambda: RolloutRules(capacity=0),
        lambda: RolloutRules(monitor_s=0.0),
        lambda: RolloutRules(drain_s=-1.0),
        lambda: RolloutRules(lost_s=1.0, suspect_s=2.0),
        lambda: RolloutRules(tries=0),
        lambda: RolloutRules(classes=()),
        lambda: RequestClass(queue_limit=0),
        lambda: RequestClass(""),
        lambda: RequestSpec("", 1, 1),
        lambda: RequestSpec("r", 1, 0),
        lambda: RequestSpec("r", 1, 5, min_tokens=6),
        lambda: WorkerSpec("w", limit=0),
        lambda: WorkerSpec(""),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_made(wrong: Any) -> None:
    with pytest.raises(InputError):
        wrong()


def test_a_step_by_hand_is_judged_by_its_own_number() -> None:
    bench = Bench(3, elastic=ElasticConfig(policy=three))
    bench.tell(e.ScaleRequested(2))
    assert bench.machine.steps[-1].came_true is None  # one still drains
    for number in range(3):
        if bench.state(f"w{number}") is S.draining:
            bench.done(f"w{number}")
    bench.wait(6.0)
    assert bench.machine.steps[-1].came_true is True


def test_a_request_of_which_engines_die_is_not_given_to_all_of_them() -> None:
    bench = Bench(5, retries=10, poison_count=3)
    bench.ask()
    for attempt in (1, 2):
        out = bench.tell(e.AttemptFailed("r", attempt, 0, "connection reset", engine_died=True))
        assert "SendRequest" in kinds(out)
    (answer,) = (
        one
        for one in bench.tell(e.AttemptFailed("r", 3, 0, "connection reset", engine_died=True))
        if kinds([one]) == ["AnswerRequest"]
    )
    assert (answer.end, answer.reason.code) == (End.failed, ReasonCode.retries_used)
    assert "3 engines in a row died before its first token" in answer.reason.sentence


def test_an_engine_that_dies_after_a_token_is_not_held_against_the_request() -> None:
    bench = Bench(5, retries=10, poison_count=3)
    bench.ask()
    for attempt in range(1, 8):
        bench.tell(e.TokensStreamed("r", attempt, 1))
        assert "SendRequest" in kinds(
            bench.tell(e.AttemptFailed("r", attempt, 1, "connection reset", engine_died=True))
        )


def test_a_drain_by_hand_has_all_the_time_it_was_given() -> None:
    bench = Bench(2, drain_s=10.0, abort_s=5.0)
    bench.ask()
    worker = bench.send().worker
    bench.tell(e.WorkerReclaimed(worker, 100.0, "by hand", full_notice=True))
    assert bench.wait(90.0) == []
    assert kinds(bench.wait(6.0)) == ["AbortAttempt"]


# ---- what is refused, and snapshots ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: type(one).__name__)
def test_what_is_refused_moves_not_even_the_clock(wrong: Any):
    bench = Bench(1, min_workers=1, max_workers=4)
    bench.ask()
    before = bench.machine.dump()
    with pytest.raises((InputError, InfeasibleError)):
        bench.tell(wrong, after_s=1_000.0)
    assert bench.machine.dump() == before


def test_what_the_policy_decided_last_is_in_a_snapshot():
    elastic = ElasticConfig(min_workers=1, max_workers=4)
    bench = Bench(2, elastic=elastic, min_workers=1, max_workers=4)
    bench.wait(60.0)
    assert bench.machine.scaling()["decision"] is not None
    data = json.loads(json.dumps(bench.machine.dump()))
    again = RolloutMachine.load(data, elastic)
    assert again.scaling() == bench.machine.scaling()
    assert again.dump() == data


def test_workers_whose_refits_failed_too_often_take_part_in_the_next_one_and_a_pool_may_go_back() -> None:
    bench = Bench(ownership=OURS, tries=2)
    bench.tell(e.RefitBegun(1, RefitWay.disk, InFlight.move))
    for _ in range(2):
        for name in ("w0", "w1"):
            bench.failed(name)
        bench.wait(600.0)
    assert {bench.state(name) for name in ("w0", "w1")} == {S.stale}
    assert (bench.machine.version, bench.machine.served_version) == (1, 0)
    bench.tell(e.RefitBegun(0, RefitWay.disk, InFlight.move))
    assert [member.worker for member in bench.machine.membership().members] == ["w0", "w1"]
    for name in ("w0", "w1"):
        bench.done(name)
    assert {bench.state(name) for name in ("w0", "w1")} == {S.active}
    assert RolloutMachine.load(json.loads(json.dumps(bench.machine.dump()))).served_version == 0
