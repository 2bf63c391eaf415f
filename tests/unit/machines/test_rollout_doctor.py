"""The rollout doctor: each ailment from the status that shows it, the cause by name, and what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trimtab.machines.diagnose.rollout import examine, examine_settings
from trimtab.machines.diagnose.rollout_findings import RolloutFinding, RolloutIssue, Severity
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import Owner, Ownership, RolloutRules, WorkerSpec
from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.rollout.status import status as status_of


def worker(name: str = "a", state: str = "active", code: str = "CURRENT", said: str = "as it is", **more: Any) -> dict:
    return {
        "name": name, "url": "http://127.0.0.1:1", "kind": "vllm", "state": state, "since_s": 5.0, "running": 0,
        "reason": {"code": code, "sentence": said}, "note": "", **more,
    }  # fmt: skip


def status(*workers: dict, load: float = 0.6, **more: Any) -> dict[str, Any]:
    return {
        "workers": list(workers) or [worker("a"), worker("b")],
        "metrics": {"load_ratio": load},
        "elastic": vars(ElasticConfig()),
        "rules": {},
        "range": {"least": 1, "most": 8},
        "queue": [],
        "steps": [],
        "scaling": {"by_hand": None, "holds": {}, "decision": None},
        "counters": {},
        "warnings": [],
        "advice": [],
        **more,
    }


def decided(code: str, said: str = "so it was decided") -> dict[str, Any]:
    decision = {"workers": 2, "reason": {"code": code, "sentence": said}, "expects": ""}
    return {"by_hand": None, "holds": {}, "decision": decision}


def only(found: tuple[RolloutFinding, ...]) -> RolloutFinding:
    assert len(found) == 1, found
    return found[0]


def test_a_healthy_pool_has_no_findings() -> None:
    assert examine(status()) == ()


# ---- not scaling down


@pytest.mark.parametrize(
    ("more", "ailment", "words"),
    [
        ({"scaling": decided("LOAD_FITS")}, RolloutIssue.load_does_not_fit, "requests_per_worker_capacity"),
        ({"scaling": decided("NOT_YET"), "steps": [{"ago_s": 20.0}]}, RolloutIssue.cooldown, "scale_down_cooldown"),
        ({"scaling": decided("NOT_YET"), "steps": [{"ago_s": 90.0}]}, RolloutIssue.not_stable, "min_stable_period"),
        ({"scaling": decided("NOT_YET")}, RolloutIssue.not_stable, "min_stable_period"),
        ({"rules": {"min_workers": 2}}, RolloutIssue.min_workers, "min_workers"),
        (
            {"scaling": {"by_hand": None, "holds": {"validation": 2}, "decision": None}},
            RolloutIssue.held,
            "release the hold",
        ),
        (
            {"scaling": {"by_hand": {"workers": 2, "why": "a look", "left_s": 30.0}, "holds": {}, "decision": None}},
            RolloutIssue.set_by_hand,
            "--auto",
        ),
        ({"scaling": decided("NO_TAKER")}, RolloutIssue.no_taker, "scale_down_requires_demand"),
        ({"scaling": decided("SWITCHED_OFF")}, RolloutIssue.switched_off, "enable_elastic"),
        ({"scaling": decided("LOAD_UNKNOWN")}, RolloutIssue.load_unknown, "metrics"),
        ({"scaling": decided("POLICY_FAULT")}, RolloutIssue.policy_fault, "fix the policy"),
        ({"elastic": vars(ElasticConfig(policy="static"))}, RolloutIssue.policy_fixed, "threshold"),
        ({"membership": {"epoch": 3, "frozen": True}}, RolloutIssue.refit_holds, "refit"),
    ],
)
def test_not_scaling_down_has_its_cause_by_name(more: dict[str, Any], ailment: RolloutIssue, words: str) -> None:
    found = only(examine(status(load=0.1, **more)))
    assert found.issue is ailment
    assert "load 0.10 is below 0.5, 2 serve" in found.sentence
    assert words in found.fix


def test_what_scales_down_by_itself_is_not_complained_of() -> None:
    assert examine(status(load=0.1, scaling=decided("LOAD_LOW"))) == ()
    assert examine(status(worker(), load=0.0)) == ()


@pytest.mark.parametrize(
    ("more", "rules", "words"),
    [
        (
            {"running": 3},
            {"ownership": {"abort": "trainer"}},
            "3 requests run there, and only the trainer may abort them",
        ),
        ({"outside": 2}, {}, "2 requests of other clients run there"),
        ({"running": 1}, {}, "1 request there do not end"),
        ({"doing": "sleep"}, {}, "its sleep is under way"),
        ({}, {}, "its own figures are stale"),
    ],
)
def test_a_drain_that_does_not_end_says_what_holds_it(more: dict[str, Any], rules: dict[str, Any], words: str) -> None:
    late = worker("b", "draining", "LOAD_LOW", since_s=95.0, deadline_s=-65.0, **more)
    found = only(examine(status(worker(), late, rules=rules)))
    assert (found.issue, found.severity, found.affected) == (RolloutIssue.drain_late, Severity.stuck, ("b",))
    assert "95 s, 30 s were allowed" in found.sentence
    assert words in found.sentence


def test_a_drain_within_its_time_is_nothing() -> None:
    assert examine(status(worker(), worker("b", "draining", since_s=95.0, deadline_s=5.0, running=1))) == ()


# ---- memory


def test_memory_that_was_kept_is_a_fault_with_who_computes_on_the_gpus() -> None:
    said = "a sleeps, but only 0.1 GiB of 60.0 GiB came free in 10 s; 6.0 GiB were expected"
    asleep = worker("a", "inactive", "ASLEEP", asleep=True)
    seen = status(worker("b"), asleep, warnings=[{"ago_s": 3.0, "worker": "a", "sentence": f"sleep: {said}"}])
    found = only(examine(seen, {"0": [4711]}))
    assert (found.issue, found.severity) == (RolloutIssue.memory_kept, Severity.fault)
    assert said in found.sentence
    assert "GPU 0: process 4711" in found.sentence
    assert "--enable-memory-saver" in found.fix
    asleep["asleep"] = False
    assert examine(seen) == ()
    asleep["memory"] = {"code": "MEMORY_KEPT", "sentence": said}
    assert only(examine(seen)).sentence == said


# ---- engines


@pytest.mark.parametrize(
    ("ill", "ailment", "words"),
    [
        (worker("b", "lost", "PROCESS_DIED", "killed"), RolloutIssue.engine_lost, "restart it at the same address"),
        (
            worker("b", "lost", "PROCESS_DIED", startable=True),
            RolloutIssue.engine_lost,
            "restarted when needed",
        ),
        (worker("b", "suspect", "HUNG", "no token for 120 s"), RolloutIssue.engine_wedged, "see its log"),
        (worker("b", "lost", "HUNG", "no answer"), RolloutIssue.engine_wedged, "see its log"),
        (worker("b", "suspect", "FAULTY", "3 broke"), RolloutIssue.engine_faulty, "until it answers a probe"),
        (worker("b", "inactive", "RESTARTS_USED", "3 times"), RolloutIssue.given_up, "trimtab engine undrain b"),
        (worker("b", "stale", "REFIT_FAILED", "no file"), RolloutIssue.refit_failed, "refit it again"),
    ],
)
def test_an_engine_that_failed_is_a_fault(ill: dict[str, Any], ailment: RolloutIssue, words: str) -> None:
    found = only(examine(status(worker(), ill)))
    assert (found.issue, found.severity, found.affected) == (ailment, Severity.fault, ("b",))
    assert words in found.fix


def test_an_engine_that_was_never_reached_is_a_fault_until_it_is_there() -> None:
    warned = [{"ago_s": 500.0, "worker": "b", "sentence": "connection refused", "code": "NOT_REACHED"}]
    found = only(examine(status(worker(), warnings=warned)))
    assert (found.issue, found.severity, found.affected) == (RolloutIssue.engine_awaited, Severity.fault, ("b",))
    assert examine(status(worker(), worker("b"), warnings=warned)) == ()


@pytest.mark.parametrize(
    ("state", "ailment"), [("stale", RolloutIssue.weights_old), ("empty", RolloutIssue.weights_gone)]
)
def test_an_engine_without_weights_says_whose_turn_it_is(state: str, ailment: RolloutIssue) -> None:
    waits = worker("b", state, "OUTDATED", "it reports no version")
    found = only(examine(status(worker(), waits)))
    assert (found.issue, found.severity) == (ailment, Severity.stuck)
    assert "refits are owned by the trainer" in found.sentence
    found = only(examine(status(worker(), waits, rules={"ownership": {"refit": "trimtab"}})))
    assert "refits are owned by trimtab" in found.sentence
    found = only(examine(status(worker(), waits, membership={"epoch": 1, "frozen": True})))
    assert found.severity is Severity.note


def test_what_others_do_to_engines_is_explained() -> None:
    paused = only(examine(status(worker(), worker("b", paused_elsewhere=True))))
    assert paused.issue is RolloutIssue.paused
    taken = only(examine(status(worker(), worker("b", "inactive", "TAKEN", taken=True))))
    assert "engine undrain b" in taken.fix
    asleep = worker("b", "inactive", "ASLEEP", asleep=True)
    found = only(examine(status(worker(), asleep, rules={"ownership": {"sleep": "trainer"}})))
    assert found.issue is RolloutIssue.asleep


def test_nobody_serving_is_said_first_among_its_equals() -> None:
    found = examine(status(worker("a", "stale", "OUTDATED"), worker("b", "inactive", "JOINED")))
    assert found[0].issue is RolloutIssue.none_serving
    assert "1 stale, 1 inactive" in found[0].sentence
    assert only(examine(status(worker("a", "starting")))).severity is Severity.note


def test_releases_that_were_never_tried_are_named_once() -> None:
    how = {"note": "vllm 0.99 is not among those that were looked at", "release": "untried"}
    found = only(examine(status(worker("a", **how), worker("b", **how))))
    assert (found.issue, found.affected) == (RolloutIssue.release_unknown, ("a", "b"))
    assert how["note"] in found.sentence
    silent = only(examine(status(worker("a", release="unsaid"))))
    assert silent.issue is RolloutIssue.release_unknown


def test_what_a_note_says_in_words_decides_nothing() -> None:
    note = "sleep was never tried; this engine does not say its release"
    assert examine(status(worker("a", note=note, release="tried"))) == ()


@pytest.mark.parametrize(
    ("url", "weight"),
    [
        ("http://8.8.8.8:80", Severity.stuck),
        ("http://[2606:4700::1]:80", Severity.stuck),
        ("http://0.0.0.0:80", Severity.stuck),
        ("http://10.0.0.7:80", Severity.note),
        ("http://[::1]:80", None),
        ("http://engine.local:80", None),
    ],
)
def test_engines_that_others_can_reach_are_named(url: str, weight: Severity | None) -> None:
    found = examine(status(worker("a", url=url)))
    assert [one.severity for one in found] == ([] if weight is None else [weight])
    assert all(one.issue is RolloutIssue.exposed for one in found)


# ---- scaling up, requests, settings


def test_load_that_nobody_can_take_is_stuck() -> None:
    full = only(examine(status(load=2.0, rules={"max_workers": 2})))
    assert "at most 2 may" in full.sentence
    none = only(examine(status(load=2.0, range={"least": 1, "most": 2})))
    assert "no other engine is available" in none.sentence
    assert examine(status(load=2.0)) == ()


def test_steps_that_do_not_come_true_again_and_again_are_told() -> None:
    step = {"ago_s": 500.0, "expects": "4 workers serve", "came_true": False, "changed": ["c"]}
    found = only(examine(status(steps=[step, step, {"ago_s": 1.0}])))
    assert (found.issue, found.affected) == (RolloutIssue.steps_untrue, ("c",))
    assert examine(status(steps=[step, {**step, "came_true": True}])) == ()
    assert examine(status(steps=[step])) == ()


def test_a_full_queue_is_stuck_and_one_that_was_full_a_note() -> None:
    line = {"class": "default", "limit": 4, "waiting": 4, "reason": {"code": "QUEUED", "sentence": "no room"}}
    found = only(examine(status(queue=[line], counters={"refused": 9})))
    assert (found.issue, found.severity, found.affected) == (RolloutIssue.queue_full, Severity.stuck, ("default",))
    assert "no room" in found.sentence
    assert "classes.default.queue_limit" in found.fix
    past = only(examine(status(queue=[{**line, "waiting": 1}], counters={"refused": 9})))
    assert past.severity is Severity.note


def test_requests_that_wait_for_weights_nobody_brings_are_stuck() -> None:
    reason = {"code": "VERSION_AWAITED", "sentence": "version 9 has not come"}
    line = {"class": "default", "limit": 99, "waiting": 4, "oldest_s": 90.0, "reason": reason}
    found = only(examine(status(queue=[line])))
    assert (found.issue, found.severity) == (RolloutIssue.weights_awaited, Severity.stuck)
    assert "version 9 has not come" in found.sentence
    assert examine(status(queue=[{**line, "oldest_s": 9.0}])) == ()


def test_many_moves_are_worth_a_word_and_few_are_not() -> None:
    found = only(examine(status(counters={"answered_stop": 100, "moved": 8, "restarted": 4})))
    assert (found.issue, found.severity) == (RolloutIssue.moved_often, Severity.note)
    assert "12 requests were aborted" in found.sentence
    assert "drain_timeout" in found.fix
    assert examine(status(counters={"answered_stop": 1000, "moved": 12})) == ()


def test_requests_that_were_given_up_name_the_worker_and_the_cause() -> None:
    failed = {"code": "RETRIES_USED", "worker": "b", "sentence": "6 tries: it cut the stream"}
    found = only(examine(status(failed=[failed, failed])))
    assert (found.issue, found.affected) == (RolloutIssue.retries_used, ("b",))
    assert "2 requests failed too often on b" in found.sentence
    assert "it cut the stream" in found.sentence
    late = only(examine(status(failed=[{"code": "TOO_LATE", "worker": "", "sentence": "an hour"}])))
    assert late.issue is RolloutIssue.requests_failed
    assert only(examine(status(counters={"answered_failed": 3}))).severity is Severity.fault


def test_settings_alone_can_be_examined() -> None:
    found = examine_settings(ElasticConfig(scale_down_threshold=0.75).warnings(), [("a", "8.8.8.8")])
    assert [(one.issue, one.severity) for one in found] == [
        (RolloutIssue.exposed, Severity.stuck),
        (RolloutIssue.setting, Severity.note),
    ]
    assert only(examine(status(advice=["the gap is narrow"]))).sentence == "the gap is narrow"


def test_faults_come_before_what_is_stuck_and_notes_last() -> None:
    found = examine(status(worker(release="unsaid"), worker("b", "stale", "OUTDATED"), worker("c", "lost")))
    assert [one.severity for one in found] == [Severity.fault, Severity.stuck, Severity.note]
    assert all(one.sentence and one.fix for one in found)


# ---- as a real pool says it


def test_the_status_of_a_real_machine_is_understood() -> None:
    rules = RolloutRules(min_workers=1, max_workers=4, ownership=Ownership(abort=Owner.trainer))
    machine = RolloutMachine(rules, ElasticConfig(min_workers=1, max_workers=4, monitoring_interval=1.0))
    now = 0.0
    for name in ("a", "b"):
        machine.handle(e.WorkerAdded(WorkerSpec(name, can_sleep=False), up=True, version=0), now)
    machine.handle(e.WorkerAdded(WorkerSpec("c", can_sleep=False), up=True, version=None), now)

    async def seen() -> dict[str, Any]:
        return status_of(RolloutCore(machine, clock=lambda: 5.0), ElasticConfig())

    machine.handle(e.RolloutTick(), 5.0)
    found = {one.issue for one in examine(asyncio.run(seen()))}
    assert found == {RolloutIssue.weights_old, RolloutIssue.not_stable}
