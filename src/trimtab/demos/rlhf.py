"""The RLHF demo: rollout, reward and train share one pool, then two pools meet. `trimtab demo rlhf` runs it.

Everything that it says happened is checked as it happens, and the exit status says whether all of it did. It runs on
whatever Ray is there, with sizes that fit; what it made is gone when it ends, also after Ctrl-C. Workers import this
module, so nothing heavy is imported before the demo runs.
"""

from __future__ import annotations

import argparse
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InfeasibleError, TrimtabError
from trimtab.demos.rlhf_texts import TEXTS

if TYPE_CHECKING:
    from trimtab.compat.simple_scheduler.scheduler import SimpleScheduler

MB = 2**20
POOL = "rlhf-pg-pool"
RESEARCH, PRODUCTION = "research", "production"
QUOTA = {"cpu": 6.0, "memory": 8192.0}
MOST_HOSTS = 8  # that are kept warm
MOST_NODES = 8  # that the second part fills, one task each
LEAST_SHARE = 0.02  # of the sizes below; smaller ones would be less than Ray counts
RETURN_S = 30.0  # for an evicted task to run again
NOT_DONE = 4  # exit status where something did not happen as it should


@dataclass(frozen=True)
class WorkerRole:
    """What one kind of worker asks."""

    name: str
    priority: float
    cpu: float
    memory: float  # MB
    seconds: float  # estimated


ROLLOUT = WorkerRole("rollout", 3.0, 1.5, 1024.0, 15.0)
REWARD = WorkerRole("reward", 8.5, 2.0, 2048.0, 20.0)
TRAIN = WorkerRole("train", 9.0, 2.0, 2048.0, 25.0)
EXTRA = WorkerRole("rollout", 4.5, 1.5, 1024.0, 10.0)
SLOTS = (TRAIN, REWARD, ROLLOUT, ROLLOUT)  # all at once: 7 CPU, 6 GiB


class RLHFWorker:
    """Pretends to work, and counts its steps, which it can save."""

    def __init__(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.role = (labels or {}).get("role", "?")
        self.steps = 0
        self.cancelled = False

    def run(self, steps: int = 1) -> dict[str, Any]:
        """Work for a moment."""
        for _ in range(steps):
            if not self.cancelled:
                time.sleep(0.02)
                self.steps += 1
        return {"name": self.name, "role": self.role, "steps": self.steps}

    def cancel(self, task_id: str) -> None:
        """Called before it is evicted: returns at once, and the loop above ends."""
        self.cancelled = True

    def save(self) -> int:
        """What is to be there again when it returns."""
        return self.steps

    def load(self, state: int) -> None:
        """It is back."""
        self.steps = state


def main(arguments: Sequence[str] | None = None) -> int:
    """The demo as a program of its own."""
    parser = argparse.ArgumentParser(description="Rollout, reward and train in one pool on Ray, with preemption.")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="the language of the output")
    parser.add_argument("--address", help="a Ray cluster; else RAY_ADDRESS, one that runs here, or a local Ray")
    asked = parser.parse_args(arguments)
    try:
        return run_demo(asked.lang, asked.address)
    except TrimtabError as fault:
        parser.exit(fault.exit_status, f"error: {fault}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")


def run_demo(lang: str = "en", address: str | None = None, say: Callable[[str], None] = print) -> int:
    """Run everything, clean up, and give the exit status: 0 if all that was said did happen."""
    from trimtab.compat.simple_scheduler.scheduler import SimpleScheduler
    from trimtab.runtime.client.connection import RayConnection

    name = f"rlhf-demo-{uuid.uuid4().hex[:6]}"
    voice = BilingualPrinter(lang, say)
    link = RayConnection(address)
    try:
        voice.line("connected", how=link.how)
        with SimpleScheduler(name) as scheduler:
            demo = _Demo(scheduler, link.ray, voice)
            demo.prepare()
            demo.one_pool()
            demo.two_pools()
        left = _left_behind(link.ray, name)
        voice.check(not left, "nothing_left", left=", ".join(left) or "-")
    finally:
        link.close()
    if voice.broken:
        voice.line("not_as_said", count=voice.broken)
        return NOT_DONE
    voice.line("all_as_said", count=voice.kept)
    return 0


class BilingualPrinter:
    """Speaks one of two languages, and counts what held of what it said."""

    def __init__(self, lang: str, say: Callable[[str], None]) -> None:
        self._at = ("en", "zh").index(lang)
        self._say = say
        self.kept = 0
        self.broken = 0

    def text(self, key: str, **values: Any) -> str:
        """A sentence."""
        return TEXTS[key][self._at].format(**values)

    def line(self, key: str, **values: Any) -> None:
        """Say a sentence."""
        self._say(self.text(key, **values))

    def check(self, holds: bool, key: str, **values: Any) -> bool:
        """Say a sentence that is to be true, and whether it is."""
        if holds:
            self.kept += 1
        else:
            self.broken += 1
        self._say(f"  {'✓' if holds else '✗'} {self.text(key, **values)}")
        return holds


class _Demo:
    """The scenes, one after another."""

    def __init__(self, scheduler: SimpleScheduler, ray: Any, voice: BilingualPrinter) -> None:
        self._scheduler = scheduler
        self._ray = ray
        self._voice = voice
        self._cpu_share = self._memory_share = 1.0
        self._steps: dict[str, int] = {}  # by task: what it has done, and must have done when it returns

    # ---- before

    def prepare(self) -> None:
        """Sizes, policy, pool, warm processes."""
        from trimtab.compat.simple_scheduler.scheduler import PreemptionAggressiveness

        free = _free(self._scheduler)
        self._cpu_share, self._memory_share = fitting_shares(free)
        cpu, memory = sum(one["cpu"] for one in free), sum(one["memory"] for one in free) / 1024
        small = min(self._cpu_share, self._memory_share) < 1
        self._voice.line("shrunk" if small else "fits", cpu=cpu, memory=memory, share=self._cpu_share)
        self._scheduler.configure_preemption(
            enable_label_preemption=True,
            label_preemption_rules={"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
            preemption_aggressiveness=PreemptionAggressiveness.MEDIUM,
            cancel_timeout=0.5,
            enable_cross_pool_preemption=False,
        )
        hosts = min(2 * len(free), MOST_HOSTS)  # two for each node, for nobody knows which one a task goes to
        made = self._scheduler.ensure_pool(
            name=POOL,
            resources=self._sized(QUOTA["cpu"], QUOTA["memory"]),
            target_agents=hosts,
            pg_pool_config={
                "enable": True,
                "high_priority_pg_specs": [self._size_of(TRAIN), self._size_of(REWARD)],
                "enable_dynamic_pgs": True,
                "max_dynamic_pgs": 2,
                "enable_pg_reuse": True,
            },
        )
        self._voice.check(made["success"], "pool_made", pool=POOL, reason=made["reason"])
        warm = _until(lambda: self._warm_hosts() >= hosts, 20.0)
        self._voice.line("warm" if warm else "not_warm", count=self._warm_hosts())

    # ---- part one

    def one_pool(self) -> None:
        """The scenes of one pool."""
        self._rollouts_start()
        self._reward_arrives()
        self._train_arrives()
        self._rollouts_grow()
        self._clean_up()

    def _rollouts_start(self) -> None:
        self._voice.line("scene_1")
        for task in ("rollout-00", "rollout-01"):
            answer = self._scheduler.submit_with_pg_preemption(**self._task(task, ROLLOUT))
            self._submitted(answer, "submitted", task)
            self._run(answer, 3)
        stats = self._statistics("after_rollouts", preemptions=0)
        idle = stats["dynamic_pgs"] == 2 and stats["high_priority_pgs"] == stats["available_pgs"] == 2
        self._voice.check(idle, "rollouts_dynamic")

    def _reward_arrives(self) -> None:
        self._voice.line("scene_2")
        answer = self._scheduler.submit_with_pg_preemption(**self._task("reward-00", REWARD, actor="reward-worker-00"))
        self._submitted(answer, "submitted", "reward-00")
        self._voice.check(answer.get("code") == "RESERVED", "reward_reserved", reason=answer["reason"])
        self._statistics("after_reward", preemptions=0)

    def _train_arrives(self) -> None:
        from trimtab.compat.simple_scheduler.scheduler import SimpleTaskSpec

        self._voice.line("scene_3")
        task = self._task("train-00", TRAIN, actor="train-worker-00")
        refused = self._scheduler.submit_with_pg_preemption(**task)
        self._voice.line("submitted_slot_path", task="train-00", success=refused["success"])
        self._voice.check(not refused["success"], "refused_for_quota", reason=refused["reason"])
        self._voice.line("falls_back")
        self._dry_run(TRAIN)
        answer = self._scheduler.submit_spec(SimpleTaskSpec(**task))
        self._submitted(answer, "submitted_preempting", "train-00")
        victims = [one["task_id"] for one in answer.get("preempted", ())]
        one_rollout = len(victims) == 1 and victims[0].startswith("rollout-0")
        self._voice.check(one_rollout, "victim_is_a_rollout", victims=", ".join(victims) or "-")
        self._voice.line("why_not_reward", rollout=self._cpu(ROLLOUT), lacks=self._lacking(), reward=self._cpu(REWARD))
        self._voice.line("which_rollout")
        self._run(answer, 2)
        self._statistics("after_train", preemptions=1)

    def _rollouts_grow(self) -> None:
        from trimtab.compat.simple_scheduler.scheduler import SimpleTaskSpec

        self._voice.line("scene_4")
        answer = self._scheduler.submit_spec(SimpleTaskSpec(**self._task("rollout-extra-00", EXTRA)))
        self._submitted(answer, "submitted_preempting", "rollout-extra-00")
        victims = ", ".join(f"{one['task_id']} ({one['reason']})" for one in answer.get("preempted", ()))
        self._voice.check(len(answer.get("preempted", ())) == 1, "victim", victims=victims or "-")
        self._run(answer, 1)
        self._statistics("after_growth", preemptions=2)

    def _clean_up(self) -> None:
        self._voice.line("scene_clean_up")
        for left in ("train-00", "rollout-extra-00"):
            out = [one["name"] for one in self._agents() if one["state"] == "evicted"]
            done = self._scheduler.complete(left)
            self._voice.check(done["success"], "completed", task=left)
            for one in self._one_returns(out):
                self._still_has_its_steps(one)
        for one in self._agents():
            gone = self._scheduler.delete_agent(one["name"], destroy_pg=True)
            self._voice.check(gone["success"], "deleted", task=one["name"])
        stats = self._statistics("after_clean_up", preemptions=2)
        self._voice.check(stats["total_reuse_count"] > 0 and stats["total_destroyed_count"] > 0, "reused_and_destroyed")
        self._scheduler.session.pool(POOL).drop()
        _until(lambda: not any(one["name"] == POOL for one in self._scheduler.list_pools()), RETURN_S)

    # ---- part two

    def two_pools(self) -> None:
        """Cross-pool preemption: off, against a protected pool, on."""
        self._voice.line("scene_two_pools")
        sizes = sorted((one["cpu"] for one in _free(self._scheduler)), reverse=True)
        if len(sizes) > MOST_NODES:
            self._voice.line("too_many_nodes", most=MOST_NODES)
            return
        cpu = _thousandths(sizes[0] * 0.6)  # more than half of the largest node: two never fit on one
        for pool in (RESEARCH, PRODUCTION):
            self._scheduler.ensure_pool(name=pool, resources={"cpu": sum(sizes)}, target_agents=1)
        filling = self._fill(cpu)
        self._voice.check(bool(filling), "filled", count=len(filling), cpu=cpu)
        self._refused_across("cross_off", cpu, enable_cross_pool_preemption=False)
        protected = {"enable_cross_pool_preemption": True, "protected_pools": [RESEARCH]}
        self._refused_across("cross_protected", cpu, **protected)
        self._scheduler.configure_preemption(enable_cross_pool_preemption=True, protected_pools=[])
        answer = self._scheduler.submit(**self._urgent(cpu))
        evicted = answer.get("preempted", ())
        said = ", ".join(f"{one['task_id']} ({one['reason']})" for one in evicted)
        self._voice.check(answer["success"] and len(evicted) == 1, "cross_on", victims=said or answer["reason"])
        stats = self._scheduler.stats()
        self._voice.check(
            stats["cross_pool_preemptions"] == 1 and stats["total_preemptions"] == 3,
            "cross_counted",
            total=stats["total_preemptions"],
            across=stats["cross_pool_preemptions"],
        )
        self._scheduler.complete("urgent-00")
        self._one_returns([one["task_id"] for one in evicted])
        self._voice.line("scene_end")

    def _fill(self, cpu: float) -> list[str]:
        filling: list[str] = []
        while len(filling) < MOST_NODES:
            task = f"batch-{len(filling):02d}"
            answer = self._scheduler.submit(
                task_id=task, pool=RESEARCH, actor_class=RLHFWorker, resources={"cpu": cpu}, priority=2.0
            )
            if not answer["success"]:
                break
            filling.append(task)
        return filling

    def _urgent(self, cpu: float) -> dict[str, Any]:
        return {
            "task_id": "urgent-00",
            "pool": PRODUCTION,
            "actor_class": RLHFWorker,
            "resources": {"cpu": cpu},
            "priority": 9.0,
            "labels": {"role": "train"},
        }

    def _refused_across(self, key: str, cpu: float, **settings: Any) -> None:
        before = {one["name"]: one["pid"] for one in self._agents()}
        self._scheduler.configure_preemption(**settings)
        answer = self._scheduler.submit(**self._urgent(cpu))
        untouched = {one["name"]: one["pid"] for one in self._agents()} == before
        self._voice.check(not answer["success"] and untouched, key, reason=answer["reason"])

    # ---- what the scenes share

    def _task(self, task: str, role: WorkerRole, actor: str | None = None) -> dict[str, Any]:
        return {
            "task_id": task,
            "pool": POOL,
            "actor_class": RLHFWorker,
            "resources": self._size_of(role),
            "priority": role.priority,
            "labels": {"role": role.name},
            "estimated_duration": role.seconds,
            "ray_options": {"name": actor, "namespace": self._scheduler.name} if actor else None,
        }

    def _size_of(self, role: WorkerRole) -> dict[str, float]:
        return self._sized(role.cpu, role.memory)

    def _sized(self, cpu: float, memory: float) -> dict[str, float]:
        return {"cpu": round(cpu * self._cpu_share, 4), "memory": float(math.floor(memory * self._memory_share))}

    def _cpu(self, role: WorkerRole) -> float:
        return self._size_of(role)["cpu"]

    def _lacking(self) -> float:
        used = 2 * self._cpu(ROLLOUT) + self._cpu(REWARD) + self._cpu(TRAIN)
        return round(used - self._sized(**QUOTA)["cpu"], 4)

    def _agents(self) -> list[dict[str, Any]]:
        return self._scheduler.list_agents()

    def _warm_hosts(self) -> int:
        return sum(counts.get("ready", 0) for counts in self._scheduler.session.status()["warm_hosts"].values())

    def _submitted(self, answer: Mapping[str, Any], key: str, task: str) -> None:
        self._voice.check(answer["success"], key, task=task, success=answer["success"])
        if answer["success"]:
            agent = answer["agent"]
            kind = self._voice.text(f"kind_{agent['kind']}")
            self._voice.line("runs_in", kind=kind, how=agent["how"], reason=answer["reason"])
        else:
            self._voice.line("because", reason=answer["reason"])

    def _run(self, answer: Mapping[str, Any], steps: int) -> None:
        """Call `worker.run()`, as one calls a Ray actor."""
        if not answer["success"]:
            return
        agent = answer["agent"]
        done = self._ray.get(agent["handle"].run.remote(steps), timeout=RETURN_S)
        self._steps[agent["task_id"]] = done["steps"]
        self._voice.check(done["steps"] == steps, "ran", task=agent["task_id"], steps=done["steps"])

    def _one_returns(self, out: Sequence[str]) -> list[dict[str, Any]]:
        """Wait until one of those that are out runs again."""

        def returned() -> list[dict[str, Any]]:
            return [one for one in self._agents() if one["task_id"] in out and one["state"] == "running"]

        back: list[dict[str, Any]] = _until(returned, RETURN_S)
        self._voice.check(bool(back), "came_back", task=", ".join(one["name"] for one in back) or ", ".join(out))
        return back

    def _still_has_its_steps(self, agent: Mapping[str, Any]) -> None:
        seen = self._scheduler.session.task(agent["task_id"]).call("run", 1, timeout=RETURN_S)
        before = self._steps[agent["task_id"]]
        self._voice.check(seen["steps"] == before + 1, "state_kept", task=agent["task_id"], before=before, **seen)

    def _dry_run(self, role: WorkerRole) -> None:
        asked = self._size_of(role)
        choice = self._scheduler.session.would_evict(
            POOL,
            {"cpu": asked["cpu"], "memory": asked["memory"] * MB},
            priority=role.priority,
            labels={"role": role.name},
            estimate_s=role.seconds,
        )
        self._voice.line("dry_run", victims=", ".join(f"{name} ({code.value})" for name, code in choice.victims) or "-")

    def _statistics(self, key: str, *, preemptions: int) -> dict[str, Any]:
        stats, slots = self._scheduler.stats(), self._scheduler.pg_pool_stats(POOL)
        self._voice.line("stats", when=self._voice.text(key), running=stats["running_tasks"], **slots)
        total = stats["total_preemptions"]
        self._voice.check(total == preemptions, "preemptions", total=total)
        return slots


def fitting_shares(free: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """How much of the demo's CPU and memory sizes the nodes can take; 1 and 1 where they take all of it.

    In proportion to what there is; less where nodes are too small for slots of that size.
    """
    cpu = min(1.0, sum(one["cpu"] for one in free) / sum(role.cpu for role in SLOTS))
    memory = min(1.0, sum(one["memory"] for one in free) / sum(role.memory for role in SLOTS))
    while min(cpu, memory) >= LEAST_SHARE:
        cpu, memory = (share if share == 1 else _thousandths(share) for share in (cpu, memory))
        if _packs(free, cpu, memory):
            return cpu, memory
        narrow_cpu, narrow_memory = not _packs(free, cpu, 0.0), not _packs(free, 0.0, memory)
        cpu *= 1.0 if narrow_memory and not narrow_cpu else 0.95
        memory *= 1.0 if narrow_cpu and not narrow_memory else 0.95
    has = ", ".join(f"{one['cpu']:g} CPU and {one['memory']:.0f} MB" for one in free) or "no node"
    raise InfeasibleError(
        f"the cluster has too little free for the demo: {has}", hint="free some of it, or run it alone"
    )


def _packs(free: Sequence[Mapping[str, float]], cpu: float, memory: float) -> bool:
    left = [[one["cpu"], one["memory"]] for one in free]
    for role in SLOTS:
        asks = role.cpu * cpu, role.memory * memory
        node = next((one for one in left if one[0] >= asks[0] and one[1] >= asks[1]), None)
        if node is None:
            return False
        node[0] -= asks[0]
        node[1] -= asks[1]
    return True


def _free(scheduler: SimpleScheduler) -> list[dict[str, float]]:
    """What each node has that nobody outside the pools holds; memory in MB."""
    nodes = scheduler.session.status()["nodes"]
    return [
        {
            "cpu": one["total"].get("cpu", 0.0) - one["outside"].get("cpu", 0.0),
            "memory": (one["total"].get("memory", 0.0) - one["outside"].get("memory", 0.0)) / MB,
        }
        for one in nodes
    ]


def _thousandths(amount: float) -> float:
    return math.floor(amount * 1000 + 1e-6) / 1000


def _until(found: Callable[[], Any], timeout_s: float) -> Any:
    """What is found as soon as there is something, or after so long whatever there is."""
    deadline = time.monotonic() + timeout_s
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def _left_behind(ray: Any, name: str) -> list[str]:
    """Placement groups and actors of the demo that still exist, after a moment for Ray to say so."""

    def left() -> list[str]:
        from ray.util import list_named_actors, placement_group_table

        groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
        actors = [one["name"] for one in list_named_actors(all_namespaces=True)]
        workers = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == name]
        return sorted({one for one in groups + actors if one.startswith(f"trimtab:{name}:")} | set(workers))

    _until(lambda: not left(), 10.0)
    return left()
