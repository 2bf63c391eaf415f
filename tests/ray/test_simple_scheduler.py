"""SimpleScheduler on a real Ray: the scenes it was made for, and what schedulers of its kind get wrong."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab import PreemptionAggressiveness, SimpleScheduler, SimpleTaskSpec
from trimtab.compat.schedulemesh.config.policy import PreemptionSettings
from trimtab.compat.schedulemesh.conversion import MB
from trimtab.core.errors import InputError
from trimtab.runtime.rayapi.connect import import_ray
from waiting import until

CPU = {"cpu": 1.0}


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = import_ray()
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="simple-tests",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def shared(ray: Any) -> Iterator[SimpleScheduler]:
    with SimpleScheduler("shared") as scheduler:
        # Warm processes for all tests, in a pool of which nobody asks anything.
        assert scheduler.ensure_pool("warmth", resources=CPU, target_agents=2)["success"]
        yield scheduler


@pytest.fixture
def scheduler(shared: SimpleScheduler) -> Iterator[SimpleScheduler]:
    """The scheduler with no preemption settings; pools that a test makes are removed after it."""
    shared.configure_preemption(**{**dataclasses.asdict(PreemptionSettings()), "cancel_timeout": 2.0})
    yield shared
    for pool in names(shared):
        if pool != "warmth":
            shared.session.pool(pool).drop()
    until(lambda: names(shared) == ["warmth"])


def names(scheduler: SimpleScheduler) -> list[str]:
    return [pool["name"] for pool in scheduler.list_pools()["pools"]]


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def state_of(scheduler: SimpleScheduler, task: str) -> str:
    return str(scheduler.session.task(task).state.value)


def groups_of(ray: Any, scheduler: str) -> list[dict[str, Any]]:
    table = ray.util.placement_group_table().values()
    return [one for one in table if one["name"].startswith(f"trimtab:{scheduler}:") and one["state"] != "REMOVED"]


def actors_of(ray: Any, scheduler: str) -> list[str]:
    found = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [one for one in found if one.startswith(f"trimtab:{scheduler}:")]


class RLHFWorker:
    """As in the guide: made with a name and labels, cancelled with the id of its task."""

    def __init__(self, name: str, labels: dict[str, str], diary: str | None = None) -> None:
        self.name = name
        self.labels = labels
        self.diary = diary
        self.steps = 0

    def run(self, steps: int = 1) -> int:
        self.steps += steps
        return self.steps

    def who(self) -> tuple[str, dict[str, str]]:
        return self.name, self.labels

    def cancel(self, task_id: str) -> None:
        if self.diary:
            Path(self.diary).write_text(f"cancelled {task_id}")

    def save(self) -> int:
        return self.steps

    def load(self, state: int) -> None:
        self.steps = state


class Plain:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def ray_devices(self) -> list[str]:
        import ray

        return [str(one) for one in ray.get_gpu_ids()]


class Stubborn(Plain):
    """Its `cancel()` does not return in the life of a test."""

    def cancel(self) -> None:
        threading.Event().wait(600)


class CannotBeMade:
    def __init__(self) -> None:
        raise RuntimeError("not today")


class NeedsMore:
    def __init__(self, path: str) -> None:
        self.path = path


# ---- the guide, as it stands ------------------------------------------------------------------------------------


def test_the_guides_scenes_run_as_they_stand(ray: Any) -> None:
    scheduler = SimpleScheduler(name="guide")
    scheduler.configure_preemption(
        enable_label_preemption=True,
        label_preemption_rules={
            "role": {
                "train": ["reward", "rollout"],
                "reward": ["rollout"],
            }
        },
        preemption_aggressiveness=PreemptionAggressiveness.MEDIUM,
        cancel_timeout=0.5,
        enable_cross_pool_preemption=False,
    )
    scheduler.ensure_pool(
        name="rlhf-pg-pool",
        resources={"cpu": 6.0, "memory": 8192.0},
        pg_pool_config={
            "enable": True,
            "high_priority_pg_specs": [
                {"cpu": 2.0, "memory": 2048.0},
                {"cpu": 2.0, "memory": 2048.0},
            ],
            "enable_dynamic_pgs": True,
            "max_dynamic_pgs": 2,
            "enable_pg_reuse": True,
        },
    )
    assert scheduler.pg_pool_stats("rlhf-pg-pool")["high_priority_pgs"] == 2

    rollouts = [
        scheduler.submit_with_pg_preemption(
            task_id=f"rollout-0{at}",
            pool="rlhf-pg-pool",
            actor_class=RLHFWorker,
            resources={"cpu": 1.5, "memory": 1024.0},
            priority=3.0,
            labels={"role": "rollout"},
        )
        for at in range(2)
    ]
    reward = scheduler.submit_with_pg_preemption(
        task_id="reward-00",
        pool="rlhf-pg-pool",
        actor_class=RLHFWorker,
        resources={"cpu": 2.0, "memory": 2048.0},
        priority=8.5,
        labels={"role": "reward"},
    )
    assert [one["success"] for one in (*rollouts, reward)] == [True, True, True]
    assert reward["code"] == "RESERVED"
    assert scheduler.stats()["total_preemptions"] == 0

    result = scheduler.submit_with_pg_preemption(
        task_id="train-00",
        pool="rlhf-pg-pool",
        actor_class=RLHFWorker,
        resources={"cpu": 2.0, "memory": 2048.0},
        priority=9.0,
        labels={"role": "train"},
        estimated_duration=25.0,
        ray_options={"name": "train-worker-00"},
    )
    assert not result["success"]
    assert "quota" in result["reason"]
    assert scheduler.stats()["total_preemptions"] == 0
    assert {one["state"] for one in scheduler.list_agents()["agents"]} == {"running"}

    result = scheduler.submit_spec(
        SimpleTaskSpec(
            task_id="train-00",
            pool="rlhf-pg-pool",
            actor_class=RLHFWorker,
            resources={"cpu": 2.0, "memory": 2048.0},
            priority=9.0,
            labels={"role": "train"},
            estimated_duration=25.0,
            ray_options={"name": "train-worker-00"},
        )
    )
    assert result["success"]
    assert ray.get(result["agent"]["handle"].run.remote(), timeout=60) == 1
    assert ray.get(ray.get_actor("train-worker-00").who.remote(), timeout=60) == ("train-00", {"role": "train"})
    assert "name" in result["agent"]["how"]
    stats = scheduler.stats()
    assert stats["total_preemptions"] == 1
    first = stats["recent_preemptions"][0]["task_id"]
    assert first.startswith("rollout-0")  # one of them is enough: reward stays

    result = scheduler.submit_spec(
        SimpleTaskSpec(
            task_id="rollout-extra-00",
            pool="rlhf-pg-pool",
            actor_class=RLHFWorker,
            resources={"cpu": 1.5, "memory": 1024.0},
            priority=4.5,
            labels={"role": "rollout"},
        )
    )
    assert result["success"]
    assert ray.get(result["agent"]["handle"].run.remote(), timeout=60) == 1
    assert scheduler.stats()["total_preemptions"] == scheduler.stats()["same_pool_preemptions"] == 2
    assert {one["task_id"] for one in scheduler.stats()["recent_preemptions"]} == {"rollout-00", "rollout-01"}
    pids = [one["pid"] for one in scheduler.list_agents()["agents"] if one["pid"]]

    for task in ("train-00", "reward-00", "rollout-extra-00"):
        assert scheduler.complete(task)["success"]
    scheduler.shutdown()
    assert groups_of(ray, "guide") == []
    assert actors_of(ray, "guide") == []
    assert not any(exists(pid) for pid in pids)
    assert not scheduler.ensure_pool(name="rlhf-pg-pool", resources=CPU)["success"]
    assert "shut down" in scheduler.complete("train-00")["reason"]
    scheduler.shutdown()


def test_a_script_for_the_public_scheduler_runs_to_its_end_with_only_its_imports_changed(ray: Any) -> None:
    from trimtab.compat.schedulemesh.config.policy import PreemptionAggressiveness as Level
    from trimtab.compat.schedulemesh.simple import SimpleScheduler as Public
    from trimtab.compat.schedulemesh.simple import SimpleTaskSpec as Spec

    worker = ray.remote(RLHFWorker)
    scheduler = Public("public-script", metric_aliases=True)
    rules = {"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}}
    scheduler.configure_preemption(
        enable_label_preemption=True, label_preemption_rules=rules, preemption_aggressiveness=Level.MEDIUM,
        enable_cross_pool_preemption=False,
    )  # fmt: skip
    slot = {"cpu": 2.0, "memory": 512.0}
    scheduler.ensure_pool(
        name="public", labels={"workload": "rlhf"}, resources={"cpu": 4.0, "memory": 2048.0},
        pg_pool_config={"enable": True, "high_priority_pg_specs": [slot], "enable_dynamic_pgs": True,
                        "max_dynamic_pgs": 2, "enable_pg_reuse": True},
    )  # fmt: skip
    small = {"cpu": 1.0, "memory": 256.0}
    tasks = []
    for task, role, priority, resources in (
        ("rollout-00", "rollout", 3.0, small), ("rollout-01", "rollout", 3.0, small), ("reward-00", "reward", 8.5, slot)
    ):  # fmt: skip
        answer = scheduler.submit_with_pg_preemption(
            task_id=task, pool="public", actor_class=worker, resources=resources, priority=priority,
            labels={"role": role, "tier": role}, estimated_duration=30.0, ray_options={"name": f"public-{task}"},
        )  # fmt: skip
        assert answer.get("success", False), answer
        tasks.append(task)
    train = Spec(
        task_id="train-00", pool="public", actor_class=worker, resources=slot, priority=9.0, labels={"role": "train"},
        estimated_duration=25.0, auto_register=True, ray_options={"name": "public-train"},
    )  # fmt: skip
    answer = scheduler.submit_spec(train)
    assert answer["success"]
    assert ray.get(answer["agent"]["handle"].run.remote(steps=3), timeout=60) == 3
    one = scheduler.pg_pool_stats(pool_name="public")
    every = scheduler.pg_pool_stats()
    assert one["total_pgs"] == every["pools"]["public"]["total_pgs"] == every["total_pgs"] > 0
    assert scheduler.stats().get("total_preemptions", 0) >= 1
    listed = scheduler.scheduler.list_agents(pool="public")
    assert {agent["status"] for agent in listed["agents"] if agent["name"] == "train-00"} == {"running"}
    for task in (*tasks, "train-00"):
        scheduler.complete(task)
        assert scheduler.scheduler.delete_agent(task, force=True, destroy_pg=True)["success"]
    scheduler.shutdown()
    assert groups_of(ray, "public-script") == actors_of(ray, "public-script") == []


# ---- submitting and calling -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_host_and_a_plain_actor_are_called_alike(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.ensure_pool("alike", resources={"cpu": 2})
    host = scheduler.submit(task_id="h", pool="alike", actor_class=Plain, resources=CPU)["agent"]
    plain = scheduler.submit(task_id="p", pool="alike", actor_class=ray.remote(Plain), resources=CPU)["agent"]
    assert (host["kind"], plain["kind"]) == ("host", "actor")
    assert "decorated" in plain["how"]
    for agent in (host, plain):
        assert ray.get([agent["handle"].add.remote(2), agent["handle"].add.options(name="x").remote(3)]) == [2, 5]
    elsewhere = pickle.loads(pickle.dumps(host["handle"]))
    assert ray.get(elsewhere.add.remote(1)) == 6


def test_a_named_task_starts_in_a_warm_process_where_names_are_the_schedulers_own(shared: Any, ray: Any) -> None:
    with SimpleScheduler("warm-names", warm_names=True) as scheduler:
        scheduler.ensure_pool("named", resources={"cpu": 2}, target_agents=1)
        options = {"name": "train-worker-00", "lifetime": "detached"}
        made = scheduler.submit(
            task_id="train-00", pool="named", actor_class=Plain, resources=CPU, ray_options=options
        )["agent"]
        assert (made["kind"], made["name"]) == ("host", "train-worker-00")
        assert ray.get(scheduler.get_actor("train-worker-00").add.remote(2), timeout=60) == 2
        assert options == {"name": "train-worker-00", "lifetime": "detached"}
        again = scheduler.submit(task_id="t", pool="named", actor_class=Plain, resources=CPU, ray_options=options)
        assert "the agent train-worker-00 exists" in again["reason"]
        more = scheduler.submit(
            task_id="o", pool="named", actor_class=Plain, resources=CPU, ray_options={"name": "o", "max_concurrency": 2}
        )["agent"]
        assert more["kind"] == "actor"
        scheduler.complete("train-00")
        with pytest.raises(InputError, match="train-worker-00"):
            scheduler.get_actor("train-worker-00")


def test_the_constructors_name_and_labels_are_filled_in(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.ensure_pool("named", resources={"cpu": 2})
    asked = {"pool": "named", "actor_class": RLHFWorker, "resources": CPU, "labels": {"role": "x"}}
    one = scheduler.submit(task_id="one", agent_name="the-one", **asked)
    two = scheduler.submit(task_id="two", actor_args=["given"], actor_kwargs={"labels": {"mine": "y"}}, **asked)
    assert ray.get(one["agent"]["handle"].who.remote()) == ("the-one", {"role": "x"})
    assert ray.get(two["agent"]["handle"].who.remote()) == ("given", {"mine": "y"})
    listed = {agent["name"]: agent for agent in scheduler.list_agents("named", include_handle=True)["agents"]}
    assert set(listed) == {"the-one", "two"}
    assert listed["the-one"]["labels"] == {"role": "x"}
    assert ray.get(listed["the-one"]["handle"].run.remote(4)) == 4
    assert not scheduler.submit(task_id="three", agent_name="the-one", **asked)["success"]
    assert scheduler.delete_agent("the-one")["task_id"] == "one"
    assert [agent["name"] for agent in scheduler.list_agents("named")["agents"]] == ["two"]


def test_memory_is_in_mb_and_ray_is_told_bytes(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.ensure_pool("memory", resources={"cpu": 2, "memory": 1024.0})
    asked = {"pool": "memory", "actor_class": Plain, "resources": {"cpu": 0.5, "memory": 600.0}}
    assert scheduler.submit(task_id="fits", **asked)["success"]
    beyond = scheduler.submit(task_id="beyond", **asked)
    assert not beyond["success"]
    assert "176 MiB memory" in beyond["reason"]
    bundles = [one["bundles"][0] for one in groups_of(ray, "shared") if ":memory:" in one["name"]]
    assert bundles == [{"CPU": 0.5, "memory": 600.0 * MB}]
    pool = next(one for one in scheduler.list_pools()["pools"] if one["name"] == "memory")
    assert (pool["resources"]["memory"], pool["used"]["memory"]) == (1024.0, 600.0)


@pytest.mark.long
def test_tasks_know_their_gpus_in_hosts_and_in_plain_actors(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.ensure_pool("gpus", resources={"cpu": 2, "gpu": 2})
    asked = {"pool": "gpus", "resources": {"cpu": 0.5, "gpu": 1}}
    host = scheduler.submit(task_id="h", actor_class=Plain, **asked)["agent"]
    plain = scheduler.submit(task_id="p", actor_class=ray.remote(Plain), **asked)["agent"]
    ids = [ray.get(agent["handle"].devices.remote()) for agent in (host, plain)]
    assert sorted(ids) == ["0", "1"]
    assert ray.get(plain["handle"].ray_devices.remote()) == [ids[1]]


def test_what_can_never_fit_is_refused_at_once_and_holds_up_nobody(scheduler: SimpleScheduler) -> None:
    scheduler.ensure_pool("large", resources={"cpu": 1000})
    asked = {"pool": "large", "actor_class": Plain}
    refused = scheduler.submit(task_id="giant", resources={"cpu": 900}, **asked)
    assert (refused["success"], refused["agent"], refused["code"]) == (False, None, "NEVER_FITS")
    assert refused["error"] == refused["reason"]
    assert "giant" not in [agent["name"] for agent in scheduler.list_agents()["agents"]]
    reserved = {"high_priority_pg_specs": [{"cpu": 500}]}
    made = scheduler.ensure_pool("unplaced", resources={"cpu": 1000}, pg_pool_config=reserved)
    assert made["success"]
    assert "1 of 1 reserved slots wait" in made["reason"]
    assert scheduler.pg_pool_stats("unplaced")["by_status"]["missing"] == 1
    assert scheduler.submit(task_id="small", resources=CPU, **asked)["success"]


def test_a_duplicate_id_is_refused_and_touches_nobody(scheduler: SimpleScheduler) -> None:
    scheduler.configure_preemption(preemption_aggressiveness="high")
    scheduler.ensure_pool("twice", resources={"cpu": 2})
    asked = {"pool": "twice", "actor_class": Plain, "resources": CPU}
    scheduler.submit(task_id="low", priority=1.0, **asked)
    scheduler.submit(task_id="same", priority=5.0, **asked)
    before = {one["name"]: one["pid"] for one in scheduler.list_agents()["agents"]}
    for submit in (scheduler.submit, scheduler.submit_with_pg_preemption):
        again = submit(task_id="same", priority=9.0, **asked)
        assert not again["success"]
        assert "exists" in again["reason"]
    assert {one["name"]: one["pid"] for one in scheduler.list_agents()["agents"]} == before
    assert {one["state"] for one in scheduler.list_agents()["agents"]} == {"running"}


# ---- evicting ---------------------------------------------------------------------------------------------------


def test_nobody_is_evicted_before_a_policy_is_set(ray: Any) -> None:
    with SimpleScheduler("silent") as scheduler:
        scheduler.ensure_pool("p", resources=CPU)
        asked = {"pool": "p", "actor_class": Plain, "resources": CPU}
        assert scheduler.submit(task_id="low", priority=1.0, **asked)["success"]
        assert not scheduler.submit(task_id="high", priority=9.0, **asked)["success"]
        assert state_of(scheduler, "low") == "running"


def test_a_cancel_that_hangs_holds_nobody_up(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.configure_preemption(cancel_timeout=0.3)
    scheduler.ensure_pool("hang", resources=CPU)
    asked = {"pool": "hang", "resources": CPU}
    old = scheduler.submit(task_id="stubborn", actor_class=Stubborn, priority=1.0, **asked)["agent"]
    new = scheduler.submit(task_id="next", actor_class=Plain, priority=9.0, **asked)
    assert new["success"]
    assert not exists(old["pid"])
    assert ray.get(new["agent"]["handle"].add.remote(1)) == 1
    story = [str(chapter.reason) for chapter in scheduler.session.explain("stubborn").story]
    assert any("cancel() timed out" in line for line in story)


def test_the_cheapest_sufficient_victim_goes_and_free_room_comes_first(scheduler: SimpleScheduler) -> None:
    scheduler.configure_preemption(preemption_aggressiveness="medium")
    scheduler.ensure_pool("cheap", resources={"cpu": 4})
    asked = {"pool": "cheap", "actor_class": Plain}
    scheduler.submit(task_id="seven", priority=7.0, resources={"cpu": 2}, **asked)
    scheduler.submit(task_id="one", priority=1.0, resources=CPU, **asked)
    # One CPU is free, and the least of the two gives the other.
    answer = scheduler.submit(task_id="nine", priority=9.0, resources={"cpu": 2}, **asked)
    assert [one["task_id"] for one in answer["preempted"]] == ["one"]
    assert state_of(scheduler, "seven") == "running"


@pytest.mark.parametrize("path", ["submit", "submit_with_pg_preemption"])
def test_evicted_work_comes_back_with_its_state(scheduler: SimpleScheduler, ray: Any, path: str) -> None:
    scheduler.ensure_pool("back", resources=CPU)
    asked = {"pool": "back", "actor_class": RLHFWorker, "resources": CPU}
    first = getattr(scheduler, path)(task_id="out", priority=1.0, **asked)["agent"]
    assert ray.get(first["handle"].run.remote(7)) == 7
    assert scheduler.submit(task_id="in", priority=9.0, **asked)["success"]
    assert state_of(scheduler, "out") == "evicted"
    assert not exists(first["pid"])
    scheduler.complete("in")
    assert scheduler.session.task("out").call("run", 1, timeout=60) == 8
    agent = scheduler.list_agents("back", include_handle=True)["agents"][0]
    assert (agent["state"], agent["evictions"]) == ("running", 1)
    assert ray.get(agent["handle"].run.remote(1)) == 9


def test_state_handlers_of_a_pool_save_what_cannot_save_itself(scheduler: SimpleScheduler, ray: Any) -> None:
    def restore(actor: Any, state: int) -> None:
        actor.value = state + 100

    scheduler.ensure_pool("handled", resources=CPU)
    assert scheduler.register_state_handlers("handled", lambda actor: actor.value, restore)["success"]
    assert not scheduler.register_state_handlers("nowhere", lambda actor: 0, restore)["success"]
    assert not scheduler.register_state_handlers("handled", "save", restore)["success"]  # type: ignore[arg-type]
    agent = scheduler.submit(task_id="t", pool="handled", actor_class=Plain, resources=CPU)["agent"]
    ray.get(agent["handle"].add.remote(5))
    scheduler.session.task("t").evict()
    until(lambda: state_of(scheduler, "t") == "running" and scheduler.list_agents("handled")["agents"][0]["evictions"])
    assert scheduler.session.task("t").call("add", 1, timeout=60) == 106


def test_cancel_is_called_when_somebody_evicts_or_deletes_by_hand(scheduler: SimpleScheduler, tmp_path: Path) -> None:
    scheduler.ensure_pool("hand", resources=CPU)
    diary = tmp_path / "diary"
    asked = {"pool": "hand", "actor_class": RLHFWorker, "resources": CPU, "actor_kwargs": {"diary": str(diary)}}
    scheduler.submit(task_id="evicted", **asked)
    scheduler.session.task("evicted").evict()
    until(
        lambda: scheduler.list_agents("hand")["agents"][0]["evictions"] and state_of(scheduler, "evicted") == "running"
    )
    assert diary.read_text() == "cancelled evicted"
    diary.unlink()
    assert scheduler.delete_agent("evicted")["state"] == "cancelled"
    assert diary.read_text() == "cancelled evicted"
    diary.unlink()
    scheduler.submit(task_id="forced", **asked)
    assert scheduler.delete_agent("forced", force=True)["success"]
    assert not diary.exists()


@pytest.mark.long
def test_other_pools_are_left_alone_unless_the_policy_says_so(scheduler: SimpleScheduler) -> None:
    rules = {"role": {"train": ["batch"]}}
    for pool in ("research", "production"):
        scheduler.ensure_pool(pool, resources={"cpu": 8})
    asked = {"actor_class": RLHFWorker, "resources": {"cpu": 5}}
    old = scheduler.submit(task_id="batch", pool="research", priority=1.0, labels={"role": "batch"}, **asked)["agent"]
    urgent = {"task_id": "urgent", "pool": "production", "priority": 9.0, "labels": {"role": "train"}, **asked}
    for settings in (
        {"enable_cross_pool_preemption": False, "label_preemption_rules": rules},  # a rule does not open other pools
        {"enable_cross_pool_preemption": True, "protected_pools": ["research"]},
        {"protected_pools": [], "cross_pool_priority_threshold": 8.5},
    ):
        scheduler.configure_preemption(**settings)
        for submit in (scheduler.submit, scheduler.submit_with_pg_preemption):
            refused = submit(**urgent)
            assert not refused["success"]
            assert "room" in refused["reason"]
            assert exists(old["pid"])
    scheduler.configure_preemption(cross_pool_priority_threshold=5.0)
    across = scheduler.stats()["cross_pool_preemptions"]
    answer = scheduler.submit(**urgent)
    assert answer["success"]
    assert [(one["task_id"], one["code"]) for one in answer["preempted"]] == [("batch", "CROSS_POOL")]
    assert scheduler.stats()["cross_pool_preemptions"] == across + 1
    assert not exists(old["pid"])
    scheduler.complete("urgent")
    until(lambda: state_of(scheduler, "batch") == "running")


def test_what_is_not_registered_is_never_evicted(scheduler: SimpleScheduler) -> None:
    scheduler.ensure_pool("kept", resources=CPU)
    asked = {"pool": "kept", "actor_class": Plain, "resources": CPU}
    assert scheduler.submit(task_id="kept", priority=1.0, auto_register=False, **asked)["success"]
    assert not scheduler.submit(task_id="urgent", priority=9.0, **asked)["success"]
    assert state_of(scheduler, "kept") == "running"


# ---- ends -------------------------------------------------------------------------------------------------------


def test_complete_frees_what_the_task_held(scheduler: SimpleScheduler) -> None:
    scheduler.ensure_pool("full", resources=CPU)
    asked = {"pool": "full", "actor_class": Plain, "resources": CPU}
    first = scheduler.submit(task_id="first", **asked)["agent"]
    assert not scheduler.submit(task_id="second", **asked)["success"]
    assert scheduler.complete("first")["state"] == "done"
    assert not exists(first["pid"])
    assert scheduler.submit(task_id="second", **asked)["success"]
    stats = scheduler.pg_pool_stats("full")
    assert (stats["total_pgs"], stats["total_reuse_count"], stats["total_destroyed_count"]) == (1, 1, 0)
    assert scheduler.complete("first")["success"]
    assert not scheduler.complete("never-seen")["success"]
    assert not scheduler.delete_agent("never-seen")["success"]


def test_deleting_an_agent_removes_its_slot_unless_it_is_to_be_kept(scheduler: SimpleScheduler, ray: Any) -> None:
    config = {"high_priority_pg_specs": [CPU], "max_dynamic_pgs": 1}
    scheduler.ensure_pool("slots", resources={"cpu": 2}, pg_pool_config=config)
    asked = {"pool": "slots", "actor_class": Plain, "resources": CPU}
    assert scheduler.submit(task_id="high", priority=9.0, **asked)["code"] == "RESERVED"
    assert scheduler.submit(task_id="low", priority=1.0, **asked)["code"] == "PLACED"
    over = scheduler.submit_with_pg_preemption(task_id="over", priority=1.0, **asked)
    assert not over["success"]
    scheduler.delete_agent("low", destroy_pg=False)
    assert scheduler.pg_pool_stats("slots")["available_pgs"] == 1
    scheduler.delete_agent("high")
    until(lambda: scheduler.pg_pool_stats("slots")["total_pgs"] == 1)
    stats = scheduler.pg_pool_stats("slots")
    assert (stats["high_priority_pgs"], stats["dynamic_pgs"], stats["total_destroyed_count"]) == (0, 1, 1)
    assert len([one for one in groups_of(ray, "shared") if ":slots:" in one["name"]]) == 1


def test_the_death_of_a_process_is_noticed(scheduler: SimpleScheduler) -> None:
    scheduler.ensure_pool("mortal", resources=CPU)
    asked = {"pool": "mortal", "actor_class": Plain, "resources": CPU}
    agent = scheduler.submit(task_id="mortal", **asked)["agent"]
    os.kill(agent["pid"], signal.SIGKILL)
    until(lambda: not scheduler.list_agents("mortal")["agents"])
    assert state_of(scheduler, "mortal") == "failed"
    assert scheduler.submit(task_id="heir", **asked)["success"]


def test_a_controller_that_was_killed_goes_on(scheduler: SimpleScheduler, ray: Any) -> None:
    scheduler.ensure_pool("durable", resources={"cpu": 2})
    asked = {"pool": "durable", "actor_class": Plain, "resources": CPU}
    agent = scheduler.submit(task_id="before", agent_name="b", **asked)["agent"]
    ray.get(agent["handle"].add.remote(3))
    pid = scheduler.session.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: scheduler.session.status()["pid"] != pid)
    assert [(one["name"], one["pid"]) for one in scheduler.list_agents("durable")["agents"]] == [("b", agent["pid"])]
    assert ray.get(agent["handle"].add.remote(1)) == 4
    assert scheduler.submit(task_id="after", **asked)["success"]
    assert not scheduler.submit(task_id="beyond", **asked)["success"]
    assert scheduler.complete("before")["success"]


def test_shutdown_leaves_nothing_behind(ray: Any) -> None:
    name = f"short-{uuid.uuid4().hex[:6]}"
    with SimpleScheduler(name) as scheduler:
        scheduler.ensure_pool("p", resources={"cpu": 3}, pg_pool_config={"high_priority_pg_specs": [CPU, CPU]})
        agent = scheduler.submit(task_id="t", pool="p", actor_class=Stubborn, resources=CPU)["agent"]
        assert len(groups_of(ray, name)) == 3
    assert groups_of(ray, name) == []
    assert actors_of(ray, name) == []
    assert not exists(agent["pid"])


# ---- bad input --------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"task_id": "bad", "pool": "strict", "actor_class": Plain, "resources": CPU}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pool": "stict"}, "no pool"),
        ({"pool": 5}, "word"),
        ({"task_id": ""}, "task_id"),
        ({"task_id": "a/b"}, "id of a task"),
        ({"resources": {"cpu": -1}}, "negative"),
        ({"resources": {"cpu": math.nan}}, "number"),
        ({"resources": {"cpu": 1, "memory": "2048"}}, "number"),
        ({"resources": {}}, "ask for something"),
        ({"resources": [1]}, "resources"),
        ({"priority": math.nan}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"estimated_duration": -1}, "estimated_duration"),
        ({"labels": ["role"]}, "labels"),
        ({"labels": {"role": 1}}, "labels"),
        ({"actor_class": "Plain"}, "class"),
        ({"actor_class": NeedsMore}, "path"),
        ({"actor_args": 5}, "actor_args"),
        ({"actor_args": (1, 2)}, "too many"),
        ({"actor_class": NeedsMore, "actor_args": [threading.Lock()]}, "pickled"),
        ({"actor_class": CannotBeMade}, "not today"),
        ({"ray_options": {"num_cpus": 4}}, "num_cpus"),
        ({"ray_options": "name"}, "ray_options"),
        ({"agent_name": ""}, "agent_name"),
    ],
)
def test_bad_tasks_are_refused_with_a_reason(scheduler: SimpleScheduler, wrong: dict[str, Any], said: str) -> None:
    scheduler.ensure_pool("strict", resources=CPU)
    answer = scheduler.submit(**{**GOOD, **wrong})
    assert answer["success"] is False
    assert said in answer["reason"]
    pool = next(one for one in scheduler.list_pools()["pools"] if one["name"] == "strict")
    assert (pool["used"], pool["queue"]) == ({}, [])
    assert scheduler.list_agents()["agents"] == []


def test_a_spec_must_be_one_and_unknown_arguments_are_errors(scheduler: SimpleScheduler) -> None:
    assert not scheduler.submit_spec({"task_id": "x"})["success"]  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        scheduler.submit(**GOOD, prioritty=3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pg_pool_config": {"max_dynamic_pg": 2}}, "did you mean max_dynamic_pgs"),
        ({"pg_pool_config": {"enable_dynamic_pgs": "yes"}}, "true or false"),
        ({"pg_pool_config": {"max_dynamic_pgs": -1}}, "0 or more"),
        ({"pg_pool_config": {"max_dynamic_pgs": 1.5}}, "whole number"),
        ({"pg_pool_config": {"high_priority_pg_specs": [{"cpu": 3}, {"cpu": 3}]}}, "more than its quota"),
        ({"pg_pool_config": {"high_priority_pg_specs": {"cpu": 3}}}, "list"),
        ({"pg_pool_config": [1]}, "section of keys"),
        ({"resources": {"cpu": math.inf}}, "number"),
        ({"target_agents": -1}, "0 or more"),
        ({"placement_strategy": "STRICT_PAKC"}, "did you mean STRICT_PACK"),
        ({"labels": {"a": 1}}, "labels"),
    ],
)
def test_bad_pools_are_refused_with_a_reason(scheduler: SimpleScheduler, wrong: dict[str, Any], said: str) -> None:
    answer = scheduler.ensure_pool(**{"name": "bad", "resources": {"cpu": 4}, **wrong})
    assert answer["success"] is False
    assert said in answer["reason"]
    assert names(scheduler) == ["warmth"]


def test_a_pool_is_asked_for_again_only_as_it_is(scheduler: SimpleScheduler) -> None:
    assert scheduler.ensure_pool("again", resources={"cpu": 4})["created"]
    assert scheduler.ensure_pool("again", resources={"cpu": 4}) == {
        "success": True,
        "pool": "again",
        "created": False,
        "reason": "it exists, with the same configuration",
        "error": None,
    }
    assert scheduler.ensure_pool("again")["success"]  # no quota said: as it is
    other = scheduler.ensure_pool("again", resources={"cpu": 5})
    assert not other["success"]
    assert "another configuration" in other["reason"]
    whole = scheduler.ensure_pool("whole")
    assert whole["success"]
    assert next(one for one in scheduler.list_pools()["pools"] if one["name"] == "whole")["resources"]["cpu"] == 8
    with pytest.raises(InputError, match="no pool nowhere"):
        scheduler.pg_pool_stats("nowhere")


def test_settings_that_do_not_exist_are_errors_with_a_suggestion(scheduler: SimpleScheduler) -> None:
    for settings, said in (
        ({"cancel_timout": 1}, "did you mean cancel_timeout"),
        ({"preemption_aggressiveness": "agressive"}, "did you mean aggressive"),
        ({"preemption_aggressiveness": 3}, "no aggressiveness"),
        ({"enable_label_preemption": "yes"}, "true or false"),
        ({"label_preemption_rules": {"role": ["train"]}}, "must map"),
        ({"protected_pools": "research"}, "list of names"),
        ({"cancel_timeout": math.nan}, "number"),
    ):
        with pytest.raises(InputError, match=said) as fault:
            scheduler.configure_preemption(**settings)
        assert said in str(fault.value)


def test_rules_for_labels_that_nobody_has_are_warned_of(
    scheduler: SimpleScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.ensure_pool("labelled", resources=CPU)
    scheduler.submit(task_id="t", pool="labelled", actor_class=Plain, resources=CPU, labels={"tier": "gold"})
    with caplog.at_level("WARNING", "trimtab"):
        answer = scheduler.configure_preemption(
            label_preemption_rules={"teir": {"gold": ["silver"]}}, protected_pools=["labeled"]
        )
    assert answer["success"]
    assert len(answer["warnings"]) == len(caplog.messages) == 2
    assert "teir" in caplog.text
    assert "labeled" in caplog.text


def test_settings_that_are_not_given_stay(scheduler: SimpleScheduler) -> None:
    scheduler.configure_preemption(cancel_timeout=1.5, preemption_aggressiveness="urgent")
    answer = scheduler.configure_preemption(min_runtime=2.0)
    assert (answer["policy"]["cancel_timeout"], answer["policy"]["min_runtime"]) == (1.5, 2.0)
    assert answer["policy"]["preemption_aggressiveness"] == "urgent"


def test_words_for_aggressiveness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW_EAGER", " Urgent ")
    monkeypatch.setenv("HOW_WRONG", "sometimes")
    level = PreemptionAggressiveness.of
    assert level(PreemptionAggressiveness.LOW) is PreemptionAggressiveness.LOW
    assert [level(word) for word in ("background", "conservative", "LOW")] == [PreemptionAggressiveness.LOW] * 3
    assert [level(word) for word in ("normal", "medium")] == [PreemptionAggressiveness.MEDIUM] * 2
    assert [level(word) for word in ("aggressive", "env:HOW_EAGER")] == [PreemptionAggressiveness.HIGH] * 2
    with pytest.raises(InputError, match="HOW_WHAT is not set"):
        level("env:HOW_WHAT")
    with pytest.raises(InputError, match="sometimes"):
        level("env:HOW_WRONG")
    gaps = [PreemptionSettings(preemption_aggressiveness=one).policy() for one in ("low", "medium", "high")]
    assert [(one.label_gap, one.same_pool_gap) for one in gaps] == [(1.0, 3.0), (0.5, 1.0), (0.1, 0.5)]
    own = PreemptionSettings(label_priority_threshold=0.2, enable_label_preemption=False).policy()
    assert (own.label_gap, own.label_rules) == (0.2, ())
