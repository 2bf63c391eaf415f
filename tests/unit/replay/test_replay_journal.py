"""A controller's journal played again: the machine says the same, and other policies meet the same world."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pool_world import KINDS
from test_pool_invariants import Fate
from trimtab.cli.app import run
from trimtab.core.codec import decode
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool.explain import instruction_text
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.replay.common.timing import Churn, Distribution
from trimtab.replay.journal.record import JournalRecord, read_record
from trimtab.replay.journal.replay import (
    UNCHANGED,
    AlternativePolicy,
    agreement,
    fitted,
    read_alternatives,
    recorded,
    run_alternative,
)
from trimtab.replay.journal.world import length_s, world_of
from trimtab.replay.pool.driver import PoolOutcome, PoolReality, PoolReplay
from trimtab.replay.pool.policies import KNOWN, PoolPolicy, scheduler
from trimtab.replay.pool.scenario import TaskGenerator, figures, workload
from trimtab.runtime.store.journal import NODE_EVENTS, Journal, compact, read_journal

BUSY = TaskGenerator(50, 40.0, Distribution(1_500.0, 1.0), ((1, 0.7), (2, 0.2), (8, 0.08), (16, 0.02)))
NODES = ("n0", "n1", "n2")
Heard = list[tuple[float, e.PoolEvent, list[e.PoolInstruction]]]
EPOCH = 1.7e9  # a controller's clock


class Play:
    """A pool as a controller would drive it, by hand: what is told goes to the machine and is kept."""

    def __init__(self, *, gpus: int = 2, policy: PreemptionPolicy | None = None, **pool: object) -> None:
        self.machine, self.now, self.heard = PoolMachine(), EPOCH, Heard()
        self.tell(e.NodeJoined("n0", Resources.of(gpu=gpus)), after=0.0)
        self.tell(e.PoolEnsured(PoolSpec("p", Resources.of(gpu=gpus), **pool)))  # type: ignore[arg-type]
        if policy is not None:
            self.tell(e.PolicySet(policy))

    def tell(self, event: e.PoolEvent, *, after: float = 1.0) -> list[e.PoolInstruction]:
        self.now += after
        out = self.machine.handle(event, self.now)
        self.heard.append((self.now, event, out))
        return out

    def submit(self, name: str, gpus: float = 1, **more: object) -> list[e.PoolInstruction]:
        return self.tell(e.TaskSubmitted(TaskSpec(name, "p", (Resources.of(gpu=gpus),), **more)))  # type: ignore[arg-type]

    def answer(
        self, out: Sequence[e.PoolInstruction], *, saved: bool = True, after: float = 1.0
    ) -> list[e.PoolInstruction]:
        """Do what was said, each deed in a second, and whatever follows from it."""
        more: list[e.PoolInstruction] = []
        for one in out:
            if isinstance(one, e.CreatePlacementGroup):
                more += self.tell(e.PlacementGroupReady(one.group), after=after)
            elif isinstance(one, e.RemovePlacementGroup):
                more += self.tell(e.PlacementGroupRemoved(one.group), after=after)
            elif isinstance(one, e.StartTask):
                more += self.tell(e.TaskStarted(one.task, one.attempt), after=after)
            elif isinstance(one, e.StopTask):
                kept = saved and one.checkpoint_timeout_s > 0
                more += self.tell(e.TaskStopped(one.task, one.attempt, "returned", kept), after=after)
        return [*out, *self.answer(more, saved=saved, after=after)] if more else list(out)

    def ended(self, name: str, *, after: float) -> None:
        self.answer(self.tell(e.TaskEnded(name, self.machine.tasks[name].attempt), after=after))

    def record(self) -> JournalRecord:
        return record_of(self.heard)

    def story(self, name: str) -> tuple[float | None, str]:
        record = self.record()
        one = next(story for story in record.tasks if story.name == name)
        return length_s(one, record.end_s), one.end


def record_of(heard: Heard, *, marked: bool = True) -> JournalRecord:
    told = [tuple(map(instruction_text, out)) if marked else None for _, _, out in heard]
    return read_record(None, [(now, event) for now, event, _ in heard], told, 0.0)


def simulated(seed: int, *, saves: bool = True, clock: float = 0.0) -> tuple[Heard, PoolOutcome]:
    """A busy pool with failures and drains, as a journal would have it."""
    heard = Heard()
    churn = Churn(0.2, Distribution(600.0), drained=0.5).events(list(NODES), 30_000, seed)
    asked = workload(BUSY.rows(seed), seed=seed, node_gpus=8, saves=saves)
    machine, first = scheduler(PoolPolicy("trimtab", "trimtab"), 8, 24)
    reality = PoolReality(NODES, 8, churn=tuple(churn), checkpoint_s=0.0, seed=seed)
    replay = PoolReplay(
        machine, asked, reality, first=first, on_event=lambda now, event, out: heard.append((clock + now, event, out))
    )
    return heard, replay.run()


def write(directory: Path, heard: Heard, *, marked: bool = True) -> Path:
    journal = Journal(directory)
    for now, event, out in heard:
        journal.append(now, event, [*map(instruction_text, out)] if marked else None)
    journal.close()
    return directory


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal on disk."""
    return write(tmp_path_factory.mktemp("kept") / "journal", simulated(1, clock=EPOCH)[0])


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    """One of its own, to be spoilt."""
    return Path(shutil.copytree(kept, tmp_path / "journal"))


def segment(directory: Path) -> Path:
    return directory / "journal-00000000.jsonl"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


# ---- the same events ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "saves"), [(1, True), (2, False), (3, True)])
def test_a_journal_gives_the_same_instructions_and_the_figures_of_the_run_it_is_of(seed: int, saves: bool) -> None:
    heard, outcome = simulated(seed, saves=saves)
    record = record_of(heard)
    assert record.same
    assert record.marked == record.events == len(heard)
    was = recorded(world_of(record)).figures
    ran = figures(outcome, "ran", seed, ["high", "normal", "low"])
    assert was.evictions == ran.evictions > 0
    assert was.losses == ran.losses
    assert was.makespan_s == ran.makespan_s
    for there, here in (("high", "priority 8"), ("normal", "priority 5"), ("low", "priority 2"), ("all", "all")):
        for name in ("tasks", "wait_mean_s", "wait_p99_s", "completion_mean_s", "evictions"):
            assert getattr(was.classes[here], name) == pytest.approx(getattr(ran.classes[there], name))


@pytest.mark.parametrize(("seed", "saves"), [(1, True), (2, False), (3, True)])
def test_the_policy_that_ran_does_the_same_again_in_the_world_of_its_journal(seed: int, saves: bool) -> None:
    world = world_of(record_of(simulated(seed, saves=saves, clock=EPOCH)[0]))
    near = agreement(world, recorded(world), run_alternative(world, UNCHANGED))
    assert near.first == ""
    assert near.same == near.instructions > 100
    assert near.completion_worst < 1e-6
    assert near.makespan < 1e-6


def test_every_policy_finishes_the_tasks_of_a_journal_and_loses_none() -> None:
    world = world_of(record_of(simulated(2, saves=False)[0]))
    for name in KNOWN:
        run = run_alternative(world, AlternativePolicy(PoolPolicy(name, name)))
        assert [one.work.spec.id for one in run.outcome.tasks] == [one.spec.id for one in world.workload]
        assert all(one.done_s is not None for one in run.outcome.tasks)


def test_a_journal_that_does_not_say_what_was_instructed_is_held_to_its_answers() -> None:
    heard, _ = simulated(1)
    record = record_of(heard, marked=False)
    assert record.same
    assert record.marked == 0
    gone = [one for one in heard if not (isinstance(one[1], e.TaskSubmitted) and one[1].spec.id == "t5")]
    assert any("t5" in one for one in record_of(gone, marked=False).unrequested)


class Recalled(Fate):
    """Any fate of a pool, and then its journal: replayed by every policy, with nobody lost."""

    def teardown(self) -> None:
        world = self.world
        if not world.pools or world.broken:
            return
        heard = [(now, decode(KINDS[kind], json.loads(text)), out) for now, kind, text, out in world.journal]
        assert record_of(heard, marked=False).same
        record = record_of(heard)
        assert record.same
        with contextlib.suppress(InputError):  # nobody ran
            there = world_of(record)
            recorded(there)
            for name in KNOWN:
                with contextlib.suppress(InfeasibleError):  # what is not repeated had made the room
                    tasks = run_alternative(there, AlternativePolicy(PoolPolicy(name, name))).outcome.tasks
                    assert all(one.done_s is not None for one in tasks)


@pytest.mark.no_cover  # tracing doubles its time; the named rules cover the same lines
@pytest.mark.parametrize("runs", [8, pytest.param(400, marks=pytest.mark.long)])
def test_whatever_happened_its_journal_can_be_replayed_with_every_policy(runs: int) -> None:
    chosen = settings(
        max_examples=runs,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Recalled, settings=chosen)


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_the_work_of_an_evicted_task_is_what_it_saved_and_what_it_did_after() -> None:
    play = Play(gpus=1, policy=PreemptionPolicy())
    play.answer(play.submit("low", priority=2.0, saves=True))
    play.now += 99.0
    high = play.answer(play.submit("high", priority=8.0))  # 100 s after low began
    assert any(isinstance(one, e.StopTask) and one.task == "low" for one in high)
    play.ended("high", after=10.0)
    play.ended("low", after=50.0)
    assert play.story("low") == (150.0, "done")
    assert play.story("high") == (10.0, "done")
    story = next(one for one in play.record().tasks if one.name == "low")
    assert (story.evictions, story.losses, [one.saved for one in story.attempts]) == (1, 0, [True, False])


def test_work_that_was_not_saved_counts_for_nothing_in_the_length() -> None:
    play = Play(gpus=1, policy=PreemptionPolicy())
    play.answer(play.submit("low", priority=2.0))
    play.now += 99.0
    play.answer(play.submit("high", priority=8.0), saved=False)
    play.ended("high", after=10.0)
    play.ended("low", after=50.0)
    assert play.story("low") == (50.0, "done")
    assert recorded(world_of(play.record())).outcome.tasks[0].redone_s == 100.0


def test_a_task_whose_process_died_is_as_long_as_its_last_attempt() -> None:
    play = Play()
    play.answer(play.submit("a", restarts=1))
    play.answer(play.tell(e.TaskDied("a", 1, "killed"), after=30.0))
    play.answer(play.tell(e.PoolTick(), after=60.0))
    play.ended("a", after=20.0)
    assert play.story("a") == (20.0, "done")
    assert "processes that died (1)" in " ".join(world_of(play.record()).assumed)


def test_a_task_that_had_not_ended_has_done_its_work_or_says_how_long_it_takes() -> None:
    play = Play(gpus=3)
    for name, estimate_s in (("a", 0.0), ("b", 500.0)):
        play.answer(play.submit(name, estimate_s=estimate_s))
    play.submit("never", gpus=3)
    play.tell(e.PoolTick(), after=100.0)
    record = play.record()
    lengths = {one.name: length_s(one, record.end_s) for one in record.tasks}
    assert lengths == {"a": 104.0, "b": 500.0, "never": None}
    world = world_of(record)
    assert [one.spec.id for one in world.workload] == ["a", "b"]
    assert any("2 tasks had not ended" in one for one in world.facts)
    assert any("1 task that never started (waiting)" in one for one in world.facts)
    assert recorded(world).outcome.tasks[0].done_s == record.end_s


def test_a_task_that_was_cancelled_or_raised_is_as_long_as_it_ran() -> None:
    play = Play(gpus=3)
    for name in ("cancelled", "raised", "complete"):
        play.answer(play.submit(name), after=0.0)
    play.answer(play.tell(e.CancelRequested("cancelled"), after=10.0))
    play.answer(play.tell(e.TaskEnded("raised", 1, "ValueError"), after=10.0))
    play.answer(play.tell(e.CompleteRequested("complete"), after=10.0))
    assert play.story("cancelled") == (12.0, "cancelled")
    assert play.story("raised") == (22.0, "failed")
    assert play.story("complete") == (32.0, "done")


def test_an_id_that_is_used_again_is_another_task() -> None:
    play = Play()
    for seconds in (10.0, 20.0):
        play.answer(play.submit("a"))
        play.ended("a", after=seconds)
    record = play.record()
    assert [(one.name, length_s(one, record.end_s)) for one in record.tasks] == [("a", 10.0), ("a (2)", 20.0)]
    world = world_of(record)
    near = agreement(world, recorded(world), run_alternative(world, UNCHANGED))
    assert (near.first, near.same) == ("", near.instructions)


def test_who_takes_turns_in_the_slots_of_others_is_left_out() -> None:
    play = Play()
    play.answer(play.submit("owner", room=(Resources.of(gpu=1),)))
    play.answer(play.submit("guest", shares="owner"))
    play.ended("owner", after=10.0)
    world = world_of(play.record())
    assert [one.spec.id for one in world.workload] == ["owner"]
    assert any("shared the slots" in one for one in world.facts)
    run_alternative(world, UNCHANGED)


def test_a_journal_in_which_nobody_ran_has_nothing_to_try_policies_on() -> None:
    play = Play()
    play.submit("a", gpus=9)
    with pytest.raises(InputError, match=r"1 task that never started \(failed\)"):
        world_of(play.record())


# ---- amounts, nodes and pools ---------------------------------------------------------------------------------------


def test_shares_of_a_gpu_and_clusters_without_any_are_counted_in_units() -> None:
    play = Play(gpus=1)
    for name in ("a", "b", "c"):
        play.answer(play.submit(name, gpus=0.5))
    for name in ("a", "b"):
        play.ended(name, after=100.0)
    play.answer(play.tell(e.PoolTick()))
    play.ended("c", after=100.0)
    world = world_of(play.record())
    assert (world.units.resource, world.units.each) == ("gpu", 0.5)
    assert [one.gpus for one in world.workload] == [1, 1, 1]
    assert world.node_units == {"n0": 2}
    was, again = recorded(world), run_alternative(world, UNCHANGED)
    assert agreement(world, was, again).first == ""
    assert again.figures.utilisation == pytest.approx(was.figures.utilisation)
    assert 0.5 < was.figures.utilisation < 1.0
    assert max(was.figures.curves.used_gpus) == 1  # of one GPU
    fifo = run_alternative(world, AlternativePolicy(PoolPolicy("fifo", "fifo")))
    assert all(one.done_s is not None for one in fifo.outcome.tasks)


def test_where_nobody_asks_for_gpus_cpus_are_counted_and_that_is_said() -> None:
    heard = Heard()
    machine, now = PoolMachine(), EPOCH
    spec = TaskSpec("a", "p", (Resources.of(cpu=2),))
    for event in (
        e.NodeJoined("n0", Resources.of(cpu=4)),
        e.PoolEnsured(PoolSpec("p", Resources.of(cpu=4))),
        e.TaskSubmitted(spec),
        e.PlacementGroupReady("g2"),
        e.TaskStarted("a", 1),
        e.TaskEnded("a", 1),
        e.TaskStopped("a", 1),
    ):
        now += 1.0
        heard.append((now, event, machine.handle(event, now)))
    world = world_of(record_of(heard))
    assert any("counted GPU is 1 cpu" in one for one in world.facts)
    assert world.workload[0].gpus == 2
    assert run_alternative(world, UNCHANGED).figures.utilisation == recorded(world).figures.utilisation > 0


def test_nodes_of_different_sizes_that_drain_come_back_and_go_are_as_they_were_for_every_policy() -> None:
    play = Play(gpus=4)
    play.tell(e.NodeJoined("n1", Resources.of(gpu=1)))
    play.answer(play.submit("a", gpus=1))
    play.answer(play.tell(e.NodeDrained("n1")))
    play.answer(play.tell(e.NodeCordoned("n1", on=False)))
    play.answer(play.submit("b", gpus=2))
    play.tell(e.NodeLost("n1", "gone"))
    play.answer(play.tell(e.PoolTick()))
    for name in ("a", "b"):
        play.ended(name, after=30.0)
    play.tell(e.NodeLost("n0", "the cluster ends"))
    world = world_of(play.record())
    assert world.node_units == {"n0": 4, "n1": 1}
    for name in KNOWN:
        run = run_alternative(world, AlternativePolicy(PoolPolicy(name, name)))
        assert all(one.done_s is not None for one in run.outcome.tasks)


def test_a_pool_that_is_dropped_and_asked_for_again_is_another_once_its_tasks_have_ended() -> None:
    play = Play(gpus=2, reserved=(Resources.of(gpu=2),), reserved_priority=5.0)
    play.answer([one for _, _, out in play.heard for one in out])
    play.answer(play.submit("a"))
    play.tell(e.PoolDrained("p"))
    play.answer(play.tell(e.PoolDropped("p"), after=10.0))
    play.tell(e.PoolEnsured(PoolSpec("p", Resources.of(gpu=1), starvation_timeout_s=5.0)))
    play.answer(play.submit("b"))
    play.ended("b", after=10.0)
    world = world_of(play.record())
    assert [one.spec.pool for one in world.workload] == ["p", "p (2)"]
    was = recorded(world)
    assert agreement(world, was, run_alternative(world, UNCHANGED)).completion_worst < 0.1
    slow = replace(world, workload=(replace(world.workload[0], work_s=100.0), world.workload[1]))
    ends = [one.done_s or 0.0 for one in run_alternative(slow, UNCHANGED).outcome.tasks]
    assert ends[0] > 100.0  # it is not dropped under a task
    assert ends[1] > ends[0]  # and its reserved slot holds the room until then


def test_a_task_ends_in_a_replay_as_it_ended_then() -> None:
    play = Play(gpus=3)
    for name in ("cancelled", "raised", "complete"):
        play.answer(play.submit(name), after=0.0)
    play.answer(play.tell(e.CancelRequested("cancelled", keep_slot=False), after=10.0))
    play.answer(play.tell(e.TaskEnded("raised", 1, "ValueError"), after=10.0))
    play.answer(play.tell(e.CompleteRequested("complete", keep_slot=False), after=10.0))
    world = world_of(play.record())
    near = agreement(world, recorded(world), run_alternative(world, UNCHANGED))
    assert (near.first, near.same) == ("", near.instructions)


# ---- other policies -------------------------------------------------------------------------------------------------


def contended() -> JournalRecord:
    """A long task of low priority, then a short one of high priority, on one GPU; nobody may evict."""
    play = Play(gpus=1)
    play.answer(play.submit("low", priority=2.0, saves=True))
    out = play.submit("high", priority=8.0)
    play.answer(play.tell(e.TaskEnded("low", 1), after=100.0))
    play.answer(out)
    play.ended("high", after=10.0)
    return play.record()


def tried(record: JournalRecord, *said: str) -> dict[str, float]:
    """The mean wait of the class of high priority, by policy."""
    world = world_of(record)
    return {
        one.name: run_alternative(world, fitted(one, world)).figures.classes["priority 8"].wait_mean_s
        for one in read_alternatives(said)
    }


def policy_file(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_another_policy_would_have_let_the_important_task_go_first(tmp_path: Path) -> None:
    waits = tried(
        contended(),
        "trimtab",
        "fifo",
        policy_file(tmp_path, "preemption: {same_pool_gap: 7}"),
        policy_file(tmp_path, "{use: trimtab, name: none, preemption: {same_pool: false}}", "none.yaml"),
    )
    assert waits["trimtab"] < 30 < 90 < waits["fifo"]
    assert waits["mine"] == waits["none"] > 90


def test_a_file_holds_one_policy_a_list_or_the_policies_of_a_scenario(tmp_path: Path) -> None:
    names = [
        [one.name for one in read_alternatives([policy_file(tmp_path, text)])]
        for text in (
            "pool: {starvation_timeout_s: 5}",
            "[fifo, {use: las, threshold_gpu_s: 5}]",
            "{cluster: {nodes: 1}, policies: [fifo, {use: trimtab, name: eager}]}",
        )
    ]
    assert names == [["mine"], ["fifo", "las"], ["fifo", "eager"]]


def test_settings_of_one_pool_and_rules_by_label_change_what_the_journal_has(tmp_path: Path) -> None:
    text = """
    preemption: {cross_pool: true, label_rules: {role: {train: [rollout]}}, protected_pools: [q]}
    pools: {p: {quota: {gpu: 3}, borrow: true}}
    """
    (other,) = read_alternatives([policy_file(tmp_path, text)])
    world = world_of(contended())
    settings = [one for _, one in fitted(other, world).settings(world)]
    policy = next(one.policy for one in settings if isinstance(one, e.PolicySet))
    assert (policy.cross_pool, policy.protected_pools) == (True, ("q",))
    assert policy.label_rules == (("role", (("train", ("rollout",)),)),)
    pool = next(one.spec for one in settings if isinstance(one, e.PoolEnsured))
    assert (pool.borrow, pool.quota) == (True, Resources.of(gpu=3))
    assert "cross_pool True" in other.text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pool: {starvatoin_timeout_s: 5}", "did you mean starvation_timeout_s"),
        ("preemption: {same_pool_gab: 5}", "did you mean same_pool_gap"),
        ("preemption: {same_pool_gap: -1}", "a number of 0 or more"),
        ("preemption: {label_rules: [1]}", "label_rules"),
        ("pools: {p: {quoter: 5}}", "did you mean quota"),
        ("pools: {p: {quota: {gpu: -5}}}", "must not be negative"),
        ("pols: {}", "did you mean pools"),
        ("use: fifi", "did you mean fifo"),
        ("{use: fifo, pools: {p: {borrow: true}}}", "fifo takes no such settings"),
        ("{use: fifo, preemption: {cross_pool: true}}", "fifo takes no such settings"),
        ("name: recorded", "two policies are named recorded"),
        ("policies: []", "at least 1"),
        ("[", "not valid YAML"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_alternatives([policy_file(tmp_path, text)])
    assert words in " ".join(error.value.lines())


def test_a_policy_for_a_pool_that_is_not_there_and_a_name_that_is_none_are_refused(tmp_path: Path) -> None:
    world = world_of(contended())
    (other,) = read_alternatives([policy_file(tmp_path, "pools: {q: {borrow: true}}")])
    with pytest.raises(InputError, match="no pool q"):
        fitted(other, world)
    with pytest.raises(InputError, match="neither a policy nor a file"):
        read_alternatives(["fifa"])
    with pytest.raises(InputError, match="two policies are named fifo"):
        read_alternatives(["fifo", "fifo"])


# ---- the command ----------------------------------------------------------------------------------------------------


def test_replay_says_that_the_same_comes_out_and_how_tasks_fared(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(kept)]) == 0
    text = said(capsys)
    assert "the same events give the same instructions" in text
    assert "50 tasks in" in text
    assert "as it was" not in text
    assert run(["simulate", str(segment(kept)), "--policy", "fifo", "--policy", "clairvoyant"]) == 0
    text = said(capsys)
    assert "instructions are the same in the same order" in text
    for name in ("recorded", "as it was", "fifo", "clairvoyant"):
        assert name in text


def test_replay_answers_as_json_csv_and_a_page(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert run(["simulate", str(kept), "--policy", "las", "--format", "json", "--report", str(page)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["same"] is True
    assert answer["agreement"]["same"] == answer["agreement"]["instructions"]
    assert [one["policy"] for one in answer["summary"]] == ["recorded", "as it was", "las"]
    text = page.read_text()
    assert "trimtab simulate" in text
    assert "as recorded in the journal" in text
    assert run(["simulate", str(kept), "--csv", str(tmp_path / "runs.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [row["policy"] for row in rows] == ["recorded"]


def test_a_journal_that_was_changed_is_told_with_the_event(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment(copy)
    lines = path.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if '"TaskEnded"' in line)
    path.write_text("".join([*lines[:at], *lines[at + 1 :]]))
    assert run(["simulate", str(copy)]) == 2
    text = said(capsys)
    assert "the machine gives different instructions for" in text
    assert "the journal was changed" in text


def test_a_journal_cut_short_is_read_as_far_as_it_is_whole(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment(copy)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert run(["simulate", str(copy), "--policy", "fifo"]) == 0
    text = said(capsys)
    assert "half written and is left out" in text
    assert "had not ended" in text


def test_a_snapshot_in_the_middle_stands_for_what_was_before_it(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_journal(kept)
    half = len(found.events) // 2
    directory = tmp_path / "compacted"
    journal = Journal(directory)
    for at, ((now, event), told) in enumerate(zip(found.events, found.instructions, strict=True)):
        if at == half:
            compact(directory, journal.rotate())
        journal.append(now, event, list(told or ()))
    journal.close()
    assert run(["simulate", str(directory), "--policy", "fifo", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["same"] is True
    assert answer["from_snapshot"] is True
    assert answer["events"] == len(found.events) - half
    assert any("are submitted at its beginning" in one for one in answer["assumptions"])
    part = next(directory.glob("journal-*"))
    assert run(["simulate", str(part)]) == 2
    assert "begins in the middle" in said(capsys)


def test_what_is_no_journal_of_pools_is_refused_with_what_it_is(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, words: str) -> None:
        assert run(["simulate", str(path)]) == 2
        assert words in said(capsys)

    refused(tmp_path / "nowhere", "No such file")
    refused(tmp_path, "there is no journal here")
    (tmp_path / "events.jsonl").write_text("{}\n")
    refused(tmp_path, "this is the folder of a run")
    for text in ("hello\nworld\n", "", '{"format":"tri'):
        (tmp_path / "text").write_text(text)
        refused(tmp_path / "text", "not a journal")
    Journal(tmp_path / "nodes", kinds=NODE_EVENTS).close()
    with segment(tmp_path / "nodes").open("a") as file:
        file.write(json.dumps([1.0, next(name for name in NODE_EVENTS if name != "NodeTick"), {}]) + "\n")
    refused(tmp_path / "nodes", "a journal of nodes, not of pools")
    newer = Path(shutil.copytree(kept, tmp_path / "newer"))
    segment(newer).write_text(segment(kept).read_text().replace('"version":2', '"version":9', 1))
    refused(newer, "newer than 2")
    older = Path(shutil.copytree(kept, tmp_path / "older"))
    segment(older).write_text(segment(kept).read_text().replace('"version":2', '"version":1', 1))
    refused(older, "format 1, older than 2")
    damaged = Path(shutil.copytree(kept, tmp_path / "damaged"))
    lines = segment(kept).read_text().splitlines(keepends=True)
    segment(damaged).write_text("".join([*lines[:10], "{\n", *lines[10:]]))
    refused(damaged, "the journal is damaged")
    missing = Path(shutil.copytree(kept, tmp_path / "missing"))
    shutil.copy(segment(kept), missing / "journal-00000002.jsonl")
    refused(missing, "a part of the journal is missing")


def test_an_empty_journal_and_one_in_which_nobody_ran_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(tmp_path / "empty").close()
    for torn in (False, True):
        assert run(["simulate", str(tmp_path / "empty")]) == 0, torn
        assert "the journal is empty" in said(capsys)
        segment(tmp_path / "empty").write_text("")  # killed before its first line was there
    play = Play()
    play.submit("a", gpus=9)
    quiet = write(tmp_path / "quiet", play.heard)
    assert run(["simulate", str(quiet)]) == 0
    assert "never started" in said(capsys)
    assert run(["simulate", str(quiet), "--policy", "fifo"]) == 2
    assert run(["simulate", str(quiet), "--csv", str(quiet.with_suffix(".csv"))]) == 2


def test_settings_under_which_a_task_can_never_run_are_infeasible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(gpus=2)
    play.answer(play.submit("a", gpus=2))
    play.ended("a", after=10.0)
    journal = write(tmp_path / "journal", play.heard)
    path = policy_file(tmp_path, "pools: {p: {quota: {gpu: 1}}}")
    assert run(["simulate", str(journal), "--policy", path]) == 3
    assert "can never run" in said(capsys)


def test_work_that_waits_in_a_queue_is_in_the_curves_of_what_was() -> None:
    world = world_of(contended())
    curves = recorded(world).figures.curves
    assert max(curves.waiting) == 1
    assert curves.waiting[-1] == curves.used_gpus[-1] == 0
    assert replace(curves).at[-1] == world.until_s


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, float("nan")), (0, "x"), (1, ["x"]), (1, "Nothing"), (2, []), (2, {"node": 7}), (3, 5), (0, 10**400)],
    ids=lambda one: f"{one!r:.20}",
)
def test_an_odd_value_in_a_journal_is_one_clear_error_of_the_replay(
    copy: Path, capsys: pytest.CaptureFixture[str], column: int, value: object
) -> None:
    lines = [json.loads(line) for line in segment(copy).read_text().splitlines()]
    lines[3][column] = value
    segment(copy).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["simulate", str(copy)]) == 2
    text = said(capsys)
    assert "the journal is damaged" in text
    assert f"{segment(copy).name}, line 4" in text


def test_a_snapshot_that_contradicts_itself_is_one_clear_error_of_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = PoolMachine()
    for now, event, _ in simulated(1, clock=EPOCH)[0][:60]:
        machine.handle(event, now)
    state = json.loads(json.dumps(machine.dump()))
    state["groups"] = []  # while tasks run in them
    (tmp_path / "snapshot-00000001.json").write_text(
        json.dumps({"format": "trimtab-journal", "version": 2, "time": EPOCH, "machine": state})
    )
    assert run(["simulate", str(tmp_path)]) == 2
    assert "the snapshot cannot be read" in said(capsys)
