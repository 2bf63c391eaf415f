"""Pools under a virtual clock: the machine that runs live, baselines beside it, and what must be true throughout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from trimtab.core.codec import decode, encode
from trimtab.core.reasons import Reason
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool import feasibility as room
from trimtab.machines.pool.capacity import ClusterCapacity
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.queue import HintLog
from trimtab.machines.pool.records import PoolRecord, PoolTask
from trimtab.machines.pool.state import PoolState
from trimtab.model.pool import BundlePlacement, PlacementStrategy, PoolSpec
from trimtab.replay.common.comparison import percentile
from trimtab.replay.common.timing import Churn, ChurnEvent, Distribution, PoolTimes
from trimtab.replay.common.traces import JobRow
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.driver import PoolOutcome, PoolReality, PoolReplay, WorkloadTask
from trimtab.replay.pool.invariants import InvariantError, PoolInvariants
from trimtab.replay.pool.policies import KNOWN, LeastAttained, OrderedScheduler, PoolPolicy, scheduler
from trimtab.replay.pool.scenario import CLASSES, TaskGenerator, figures, workload

AT_ONCE = PoolTimes(*[Distribution()] * 5)
CLOCKWORK = PoolTimes(Distribution(1.0), Distribution(2.0), Distribution(1.0), Distribution(4.0), Distribution(3.0))
BUSY = TaskGenerator(60, 30.0, Distribution(2_000.0, 1.0), ((1, 0.7), (2, 0.2), (8, 0.08), (16, 0.02)))
SCHEDULED = [name for name in KNOWN if name != "clairvoyant"]


def nodes(count: int) -> tuple[str, ...]:
    return tuple(f"n{at}" for at in range(count))


def rows(*jobs: tuple[float, float, int]) -> list[JobRow]:
    return [JobRow(*job) for job in jobs]


def tasks(*jobs: tuple[float, float, int, float], saves: bool = True) -> list[WorkloadTask]:
    """Tasks as (submitted, lasts, GPUs, priority)."""
    made = workload(rows(*(job[:3] for job in jobs)), seed=1, node_gpus=8, saves=saves)
    return [
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, priority=job[3]))
        for one, job in zip(made, jobs, strict=True)
    ]


def run(policy: str, asked: list[WorkloadTask], reality: PoolReality, **more: object) -> PoolOutcome:
    if policy == "clairvoyant":
        return Clairvoyant(asked, reality).run()
    gpus = len(reality.nodes) * reality.node_gpus
    machine, first = scheduler(PoolPolicy(policy, policy), reality.node_gpus, gpus)
    return PoolReplay(machine, asked, reality, first=first, **more).run()  # type: ignore[arg-type]


# ---- the machine itself ---------------------------------------------------------------------------------------------


def test_the_machine_in_replay_is_the_one_that_runs_live_and_says_the_same_to_the_same_events() -> None:
    heard: list[tuple[float, e.PoolEvent, list[e.PoolInstruction]]] = []
    churn = Churn(0.2, Distribution(600.0), drained=0.5).events(list(nodes(3)), 40_000, 1)
    reality = PoolReality(nodes(3), 8, churn=tuple(churn), seed=1)
    run("trimtab", workload(BUSY.rows(1), seed=1, node_gpus=8), reality, on_event=lambda *one: heard.append(one))
    live = PoolMachine()
    for now, event, instructions in heard:
        # As a journal has it: plain data, read again.
        again = decode(type(event), json.loads(json.dumps(encode(event))))
        assert live.handle(again, now) == instructions
    live.check()
    assert any(isinstance(one, e.StopTask) for _, _, out in heard for one in out)


@pytest.mark.parametrize("policy", KNOWN)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy: str) -> None:
    def ends(seed: int) -> list[float | None]:
        reality = PoolReality(nodes(2), 8, seed=seed)
        return [one.done_s for one in run(policy, workload(BUSY.rows(1)[:30], seed=seed, node_gpus=8), reality).tasks]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


@pytest.mark.parametrize("policy", KNOWN)
def test_every_task_ends_once_through_failures_drains_and_returns(policy: str) -> None:
    churn = Churn(0.15, Distribution(900.0, 0.5), drained=0.4, notice_s=60.0)
    for seed in (1, 2):
        asked = workload(BUSY.rows(seed), seed=seed, node_gpus=8, saves=seed != 2)
        happens = tuple(churn.events(list(nodes(3)), 60_000, seed))
        outcome = run(policy, asked, PoolReality(nodes(3), 8, churn=happens, seed=seed), **_often(policy))
        assert all(one.done_s is not None for one in outcome.tasks)
        assert all(one.done_s >= one.work.submit_s + one.work.work_s - 1e-6 for one in outcome.tasks if one.done_s)
        assert outcome.work_gpu_s <= outcome.held_gpu_s + 1e-6 <= outcome.capacity_gpu_s + 2e-6


def _often(policy: str) -> dict[str, object]:
    return {} if policy == "clairvoyant" else {"check_every": 100}


# ---- what policies do -----------------------------------------------------------------------------------------------


def test_a_wait_is_the_time_in_the_queue_and_deeds_take_their_time() -> None:
    asked = tasks((0, 100, 8, 5), (10, 50, 8, 5))
    outcome = run("trimtab_no_preemption", asked, PoolReality(nodes(1), 8, CLOCKWORK))
    first, second = outcome.tasks
    # bound in 1 s, started in 2 s, stopped in 1 s; the second has the slot of the first.
    assert (first.first_start_s, first.done_s) == (1.0, 103.0)
    assert (second.first_start_s, second.done_s) == (104.0, 156.0)
    assert (first.waited_s, second.waited_s) == (1.0, 94.0)


def test_an_important_task_evicts_and_what_was_saved_is_not_done_again() -> None:
    outcome = run("trimtab", tasks((0, 100, 8, 2), (50, 10, 8, 8)), PoolReality(nodes(1), 8, CLOCKWORK))
    low, high = outcome.tasks
    # Told at 50, gone after 1 + 4 s of stopping and saving; 47 s of its work are kept.
    assert (high.first_start_s, high.done_s) == (55.0, 67.0)
    assert low.evictions == outcome.evictions == 1
    assert low.redone_s == 0.0
    # The slot is free at 68: started in 2 s, its state loaded in 3 s, and the 53 s that were left.
    assert low.done_s == 68.0 + 5.0 + 53.0


def test_what_is_not_saved_is_done_again_from_its_last_checkpoint() -> None:
    reality = PoolReality(nodes(1), 8, CLOCKWORK, checkpoint_s=20.0)
    low = run("trimtab", tasks((0, 100, 8, 2), (50, 10, 8, 8), saves=False), reality).tasks[0]
    assert low.redone_s == 7.0  # of 47
    lost = PoolReality(nodes(2), 8, CLOCKWORK, churn=(ChurnEvent(50, "n0", "lost"),), checkpoint_s=0.0)
    one = run("trimtab", tasks((0, 100, 8, 5)), lost).tasks[0]
    assert (one.losses, one.redone_s) == (1, 47.0)


def test_first_come_first_served_holds_everybody_up_unless_they_may_pass() -> None:
    asked = tasks((0, 100, 4, 5), (1, 10, 8, 5), (2, 10, 1, 5))
    reality = PoolReality(nodes(1), 8, AT_ONCE)
    assert run("fifo", asked, reality).tasks[2].first_start_s == 110.0
    assert run("fifo_fill", asked, reality).tasks[2].first_start_s == 2.0


def test_priority_decides_who_is_next_and_evicts_nobody() -> None:
    asked = tasks((0, 100, 8, 2), (1, 10, 8, 2), (2, 10, 8, 8))
    outcome = run("priority", asked, PoolReality(nodes(1), 8, AT_ONCE))
    assert [one.first_start_s for one in outcome.tasks] == [0.0, 110.0, 100.0]
    assert outcome.evictions == 0


def test_least_attained_service_lets_newcomers_pass_those_who_have_had_their_hour() -> None:
    asked = tasks((0, 10_000, 8, 8), (2_000, 10, 8, 2))
    machine = LeastAttained(8, threshold_gpu_s=8_000.0)
    outcome = PoolReplay(machine, asked, PoolReality(nodes(1), 8, AT_ONCE)).run()
    assert [one.evictions for one in outcome.tasks] == [1, 0]
    assert outcome.tasks[1].first_start_s == 2_000.0
    assert outcome.tasks[0].done_s == 10_010.0


def test_the_clairvoyant_is_ahead_of_everybody_on_the_class_that_counts_most() -> None:
    for seed in (1, 2):
        asked = workload(BUSY.rows(seed), seed=seed, node_gpus=8)
        reality = PoolReality(nodes(2), 8, seed=seed)
        names = [one.name for one in CLASSES]
        high = {name: figures(run(name, asked, reality), name, seed, names).classes["high"] for name in KNOWN}
        assert min(high, key=lambda name: high[name].completion_mean_s) == "clairvoyant"


def test_a_job_larger_than_a_node_is_a_gang_that_starts_whole() -> None:
    asked = tasks((0, 100, 20, 5))
    assert [one.get("gpu") // 10_000 for one in asked[0].spec.bundles] == [8, 8, 4]
    for policy in SCHEDULED:
        assert run(policy, asked, PoolReality(nodes(3), 8, AT_ONCE)).tasks[0].first_start_s == 0.0


# ---- what must be true ----------------------------------------------------------------------------------------------


class Liar(OrderedScheduler):
    """A scheduler that does what must never be done."""

    def __init__(self, lie: str) -> None:
        super().__init__(8)
        self.lie = lie

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        out = super().handle(event, now)
        if isinstance(event, e.TaskStarted) and self.lie == "starts twice":
            return [*out, e.StartTask(event.task, event.attempt + 1, (BundlePlacement("g2", 0, "n0"),), False, 1e9)]
        if isinstance(event, e.PlacementGroupRemoved) and self.lie == "starts after its end":
            return [e.CreatePlacementGroup("g9", "pool", (Resources.of(gpu=1),), ("n0",), PlacementStrategy.pack, 1e9)]
        if isinstance(event, e.PlacementGroupReady) and event.group == "g9":
            return [e.StartTask("t0", 9, (BundlePlacement("g9", 0, "n0"),), False, 1e9)]
        if isinstance(event, e.TaskSubmitted) and self.lie == "takes too much":
            return [
                e.CreatePlacementGroup(
                    f"x{event.spec.id}", "pool", (Resources.of(gpu=8),), ("n0",), PlacementStrategy.pack, 1e9
                )
            ]
        if isinstance(event, e.TaskStarted) and self.lie == "removes under it":
            return [*out, e.RemovePlacementGroup("g2")]
        return [] if self.lie == "forgets" else out

    def _group_ready(self, group: str) -> None:
        if group in self.by_group:
            super()._group_ready(group)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("starts twice", "already runs"),
        ("starts after its end", "has ended"),
        ("takes too much", "groups hold 16 of 8 GPUs"),
        ("removes under it", "removed under a process"),
        ("forgets", "no event is left"),
    ],
)
def test_a_scheduler_that_does_what_must_never_be_done_is_found_out(lie: str, said: str) -> None:
    asked = tasks((0, 10, 1, 5), (1, 10, 1, 5))
    if lie == "starts after its end":
        asked = tasks((0, 10, 1, 5), (100, 10, 1, 5))
    with pytest.raises(InvariantError, match=said):
        PoolReplay(Liar(lie), asked, PoolReality(nodes(1), 8, AT_ONCE)).run()


def _gives_back_twice(patch: pytest.MonkeyPatch) -> None:
    release = ClusterCapacity.release

    def twice(self: ClusterCapacity, on: object, bundles: object) -> None:
        release(self, on, bundles)  # type: ignore[arg-type]
        release(self, on, bundles)  # type: ignore[arg-type]

    patch.setattr(ClusterCapacity, "release", twice)


def _hears_of_nothing_that_falls_free(patch: pytest.MonkeyPatch) -> None:
    for what in ("row", "evictable", "pool"):
        patch.setattr(HintLog, what, lambda self, where: None)


def _thinks_that_gains_help_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(room, "could_help", lambda *asked: False)


def _says_starts_twice(patch: pytest.MonkeyPatch) -> None:
    handle = PoolMachine.handle

    def again(self: PoolMachine, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        out = handle(self, event, now)
        return [
            *out,
            *(dataclasses.replace(one, attempt=one.attempt + 1) for one in out if isinstance(one, e.StartTask)),
        ]

    patch.setattr(PoolMachine, "handle", again)


def _miscounts_a_quota(patch: pytest.MonkeyPatch) -> None:
    use = ClusterCapacity.use

    def less(self: ClusterCapacity, pool: str, bundles: tuple[Resources, ...], sign: int) -> None:
        use(self, pool, bundles[: 1 if sign > 0 else None], sign)  # of a gang, only its first member

    patch.setattr(ClusterCapacity, "use", less)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_gives_back_twice, "groups hold|what groups hold is not"),
        (_hears_of_nothing_that_falls_free, "no event is left|waits, and there is room for it"),
        (_thinks_that_gains_help_nobody, "no event is left|waits, and there is room for it"),
        (_says_starts_twice, "already runs"),
        (_miscounts_a_quota, "is not what the accounting says"),
    ],
)
@pytest.mark.parametrize("check_every", [7, 10**9])
def test_a_pool_machine_that_is_broken_on_purpose_is_caught_on_the_way_or_at_the_end(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], said: str, check_every: int
) -> None:
    asked = workload(BUSY.rows(3), seed=3, node_gpus=8)
    reality = PoolReality(nodes(3), 8, CLOCKWORK, seed=3)
    run("trimtab", asked, reality, check_every=check_every)  # as it is, nothing is found
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        run("trimtab", asked, reality, check_every=check_every)


# ---- who is looked at, and who is patient ---------------------------------------------------------------------------


def test_an_end_looks_only_at_those_whom_it_could_help(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [(float(at), 500.0 + at, 1, 5.0) for at in range(8)]
    large = [(20.0 + at, 50.0, 8, 1.0 + at / 100) for at in range(30)]  # each a kind of its own, and none may evict
    looked: list[str] = []
    spot = room.find_assignment

    def counted(books: PoolState, task: PoolTask) -> Assignment | Reason:
        looked.append(task.id)
        return spot(books, task)

    monkeypatch.setattr(room, "find_assignment", counted)
    asked = tasks(*small, *large)
    outcome = run("trimtab", asked, PoolReality(nodes(1), 8, AT_ONCE), check_every=10**9)
    assert all(life.done_s is not None for life in outcome.tasks)
    # One look when it comes and one when it starts; a few more beside, where 30 kinds wait through 38 ends.
    assert len(looked) <= 6 * len(asked)


def test_room_is_kept_for_one_who_waits_only_after_many_times_as_long_as_tasks_run() -> None:
    pool = PoolRecord(PoolSpec("p", Resources.of(gpu=8), starvation_timeout_s=60.0, starvation_runs=10.0))
    assert pool.starvation_timeout_s == 60.0
    pool.ran(2.0)
    assert pool.starvation_timeout_s == 60.0
    for _ in range(500):
        pool.ran(100.0)
    assert pool.starvation_timeout_s == pytest.approx(1_000.0, rel=0.01)
    assert (
        PoolRecord(
            dataclasses.replace(pool.spec, starvation_runs=0.0), run_count=9, run_mean_s=100.0
        ).starvation_timeout_s
        == 60.0
    )


def test_with_patience_a_gang_starts_sooner_and_others_wait_for_it() -> None:
    asked = tasks(
        *((60.0 * at, 400.0, 1, 5.0) for at in range(60)),  # always some that would fit
        (500.0, 100.0, 8, 5.0),
    )
    started = {}
    for runs in (0.0, 1_000.0):
        machine, first = scheduler(PoolPolicy("t", "trimtab", pool={"starvation_runs": runs}), 8, 8)
        outcome = PoolReplay(machine, asked, PoolReality(nodes(1), 8, AT_ONCE), first=first).run()
        (gang,) = [life for life in outcome.tasks if life.work.gpus == 8]
        started[runs] = gang.first_start_s
    assert started[0.0] is not None
    assert started[1_000.0] is not None
    assert started[0.0] < started[1_000.0]


def test_books_that_do_not_add_up_are_found() -> None:
    truths = PoolInvariants()
    truths.node_joined("n0", 8)
    truths.task_submitted("t0")
    truths.submitted += 1
    with pytest.raises(InvariantError, match="2 tasks were submitted, 0 ended, 1 are known"):
        truths.check_totals()


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
