"""`trimtab demo rlhf`: rollout, reward and train share one pool, then preemption between two pools.

Every statement is checked, and the exit status tells whether all checks passed. It runs on any Ray with sizes that fit;
all it created is removed when it ends, also after Ctrl-C. Workers import this module, so heavy imports wait until the
demo runs.
"""

from __future__ import annotations

import argparse
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InfeasibleError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.formats import yaml_text

if TYPE_CHECKING:
    from trimtab.compat.schedulemesh.simple import SimpleScheduler

MB = 2**20
POOL = "rlhf-pg-pool"
RESEARCH, PRODUCTION = "research", "production"
QUOTA = {"cpu": 6.0, "memory": 8192.0}
MAX_HOSTS = 8  # maximum of warm hosts
MAX_NODES = 8  # maximum of nodes that the second part fills, a task each
MIN_SHARE = 0.02  # of the sizes below; smaller amounts are below Ray's resolution
RETURN_S = 30.0  # timeout for an evicted task to run again
NOT_DONE = 4  # exit status if a check failed


class WorkerRole(Frozen):
    """Resources and priority of a kind of worker."""

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
    """Simulates work and counts its steps, which it can save."""

    def __init__(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.role = (labels or {}).get("role", "?")
        self.steps = 0
        self.cancelled = False

    def run(self, steps: int = 1) -> dict[str, Any]:
        for _ in range(steps):
            if not self.cancelled:
                time.sleep(0.02)
                self.steps += 1
        return {"name": self.name, "role": self.role, "steps": self.steps}

    def cancel(self, task_id: str) -> None:
        """Called before an eviction: returns at once and ends `run`."""
        self.cancelled = True

    def save(self) -> int:
        return self.steps

    def load(self, state: int) -> None:
        self.steps = state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rollout, reward and train in one pool on Ray, with preemption.")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="the language of the output")
    parser.add_argument("--address", help="a Ray cluster (default: RAY_ADDRESS, a running local cluster, or a new one)")
    parser.add_argument("--ray-dashboard", action="store_true", help="start a new Ray with Ray's dashboard")
    options = parser.parse_args(arguments)
    try:
        return run_demo(options.lang, options.address, dashboard=options.ray_dashboard)
    except TrimtabError as fault:
        parser.exit(fault.exit_status, f"error: {fault}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")


def run_demo(
    lang: str = "en", address: str | None = None, say: Callable[[str], None] = print, *, dashboard: bool = False
) -> int:
    """Runs the demo, cleans up, and returns the exit status: 0 if all checks passed."""
    from trimtab.compat.schedulemesh.simple import SimpleScheduler
    from trimtab.runtime.rayapi.connect import RayConnection

    name = f"rlhf-demo-{uuid.uuid4().hex[:6]}"
    printer = BilingualPrinter(lang, say)
    link = RayConnection(address, dashboard=dashboard)
    try:
        printer.line("connected", how=link.how, address=link.ray.get_runtime_context().gcs_address)
        if link.dashboard_url:
            printer.line("ray_dashboard", url=link.dashboard_url)
        with SimpleScheduler(name) as scheduler:
            demo = _Demo(scheduler, link.ray, printer)
            demo.prepare()
            demo.one_pool()
            demo.two_pools()
        left = _left_behind(link.ray, name)
        printer.check(not left, "nothing_left", left=", ".join(left) or "-")
    finally:
        link.close()
    if printer.failed:
        printer.line("not_as_said", count=printer.failed)
        return NOT_DONE
    printer.line("all_as_said", count=printer.passed)
    return 0


def texts() -> dict[str, dict[str, Any]]:
    file = resources.files("trimtab.demos") / "rlhf_texts.yaml"
    found: dict[str, dict[str, Any]] = yaml_text.parse(file.read_text(encoding="utf-8"), file.name)
    return found


class BilingualPrinter:
    """Prints in one of two languages and counts passed and failed checks."""

    def __init__(self, lang: str, say: Callable[[str], None]) -> None:
        self._texts = {key: by_language.get(lang, {}) for key, by_language in texts().items()}
        self._say = say
        self.passed = 0
        self.failed = 0

    def text(self, key: str, **values: Any) -> str:
        return str(self._texts[key].format(**values))

    def reason(self, answer: Mapping[str, Any]) -> str:
        """The reason in an answer, in this language."""
        return str(self._texts["reasons"].get(answer.get("code"), answer["reason"]))

    def line(self, key: str, **values: Any) -> None:
        self._say(self.text(key, **values))

    def check(self, holds: bool, key: str, **values: Any) -> bool:
        self.passed, self.failed = self.passed + holds, self.failed + (not holds)
        self._say(f"  {'✓' if holds else '✗'} {self.text(key, **values)}")
        return holds


class _Demo:
    """The scenes in order."""

    def __init__(self, scheduler: SimpleScheduler, ray: Any, printer: BilingualPrinter) -> None:
        self._scheduler = scheduler
        self._ray = ray
        self._printer = printer
        self._cpu_share = self._memory_share = 1.0
        self._steps: dict[str, int] = {}  # by task: its steps, which it must have when it returns

    # ---- preparation

    def prepare(self) -> None:
        from trimtab.compat.schedulemesh.simple import PreemptionAggressiveness

        free = _free(self._scheduler)
        self._cpu_share, self._memory_share = fitting_shares(free)
        cpu, memory = sum(node["cpu"] for node in free), sum(node["memory"] for node in free) / 1024
        small = min(self._cpu_share, self._memory_share) < 1
        self._printer.line("shrunk" if small else "fits", cpu=cpu, memory=memory, share=self._cpu_share)
        self._scheduler.configure_preemption(
            enable_label_preemption=True,
            label_preemption_rules={"role": {"train": ["reward", "rollout"], "reward": ["rollout"]}},
            preemption_aggressiveness=PreemptionAggressiveness.MEDIUM,
            cancel_timeout=0.5,
            enable_cross_pool_preemption=False,
        )
        hosts = min(2 * len(free), MAX_HOSTS)  # two per node, because the node of a task is not known in advance
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
        self._printer.check(made["success"], "pool_made", pool=POOL, reason=made["reason"])
        warm = _until(lambda: self._warm_hosts() >= hosts, 20.0)
        self._printer.line("warm" if warm else "not_warm", count=self._warm_hosts())

    # ---- one pool

    def one_pool(self) -> None:
        self._rollouts_start()
        self._reward_arrives()
        self._train_arrives()
        self._rollouts_grow()
        self._clean_up()

    def _rollouts_start(self) -> None:
        self._printer.line("scene_1")
        for task in ("rollout-00", "rollout-01"):
            answer = self._scheduler.submit_with_pg_preemption(**self._task(task, ROLLOUT))
            self._submitted(answer, "submitted", task)
            self._run(answer, 3)
        stats = self._statistics("after_rollouts", preemptions=0)
        idle = stats["dynamic_pgs"] == 2 and stats["high_priority_pgs"] == stats["available_pgs"] == 2
        self._printer.check(idle, "rollouts_dynamic")

    def _reward_arrives(self) -> None:
        self._printer.line("scene_2")
        answer = self._scheduler.submit_with_pg_preemption(**self._task("reward-00", REWARD, actor="reward-worker-00"))
        self._submitted(answer, "submitted", "reward-00")
        self._printer.check(answer.get("code") == "RESERVED", "reward_reserved", reason=self._printer.reason(answer))
        self._statistics("after_reward", preemptions=0)

    def _train_arrives(self) -> None:
        from trimtab.compat.schedulemesh.simple import SimpleTaskSpec

        self._printer.line("scene_3")
        task = self._task("train-00", TRAIN, actor="train-worker-00")
        refused = self._scheduler.submit_with_pg_preemption(**task)
        self._printer.line("submitted_slot_path", task="train-00", success=refused["success"])
        self._printer.check(not refused["success"], "refused_for_quota", reason=self._printer.reason(refused))
        self._printer.line("falls_back")
        self._dry_run(TRAIN)
        answer = self._scheduler.submit_spec(SimpleTaskSpec(**task))
        self._submitted(answer, "submitted_preempting", "train-00")
        victims = [task["task_id"] for task in answer.get("preempted", ())]
        one_rollout = len(victims) == 1 and victims[0].startswith("rollout-0")
        self._printer.check(one_rollout, "victim_is_a_rollout", victims=", ".join(victims) or "-")
        self._printer.line(
            "why_not_reward", rollout=self._cpu(ROLLOUT), lacks=self._lacking(), reward=self._cpu(REWARD)
        )
        self._printer.line("which_rollout")
        self._run(answer, 2)
        self._statistics("after_train", preemptions=1)

    def _rollouts_grow(self) -> None:
        from trimtab.compat.schedulemesh.simple import SimpleTaskSpec

        self._printer.line("scene_4")
        answer = self._scheduler.submit_spec(SimpleTaskSpec(**self._task("rollout-extra-00", EXTRA)))
        self._submitted(answer, "submitted_preempting", "rollout-extra-00")
        victims = self._named(answer.get("preempted", ()))
        self._printer.check(len(answer.get("preempted", ())) == 1, "victim", victims=victims or "-")
        self._run(answer, 1)
        self._statistics("after_growth", preemptions=2)

    def _clean_up(self) -> None:
        self._printer.line("scene_clean_up")
        for left in ("train-00", "rollout-extra-00"):
            out = [agent["name"] for agent in self._agents() if agent["state"] == "evicted"]
            done = self._scheduler.complete(left)
            self._printer.check(done["success"], "completed", task=left)
            for agent in self._one_returns(out):
                self._still_has_its_steps(agent)
        for agent in self._agents():
            gone = self._scheduler.delete_agent(agent["name"], destroy_pg=True)
            self._printer.check(gone["success"], "deleted", task=agent["name"])
        stats = self._statistics("after_clean_up", preemptions=2)
        self._printer.check(
            stats["total_reuse_count"] > 0 and stats["total_destroyed_count"] > 0, "reused_and_destroyed"
        )
        self._scheduler.session.pool(POOL).drop()
        _until(lambda: not any(pool["name"] == POOL for pool in self._scheduler.list_pools()["pools"]), RETURN_S)

    # ---- two pools

    def two_pools(self) -> None:
        """Cross-pool preemption: off, against a protected pool, on."""
        self._printer.line("scene_two_pools")
        sizes = sorted((node["cpu"] for node in _free(self._scheduler)), reverse=True)
        if len(sizes) > MAX_NODES:
            self._printer.line("too_many_nodes", most=MAX_NODES)
            return
        cpu = _thousandths(sizes[0] * 0.6)  # more than half of the largest node: two never fit on a node
        for pool in (RESEARCH, PRODUCTION):
            self._scheduler.ensure_pool(name=pool, resources={"cpu": sum(sizes)}, target_agents=1)
        filling = self._fill(cpu)
        self._printer.check(bool(filling), "filled", count=len(filling), cpu=cpu)
        self._refused_across("cross_off", cpu, enable_cross_pool_preemption=False)
        protected = {"enable_cross_pool_preemption": True, "protected_pools": [RESEARCH]}
        self._refused_across("cross_protected", cpu, **protected)
        self._scheduler.configure_preemption(enable_cross_pool_preemption=True, protected_pools=[])
        answer = self._scheduler.submit(**self._urgent(cpu))
        evicted = answer.get("preempted", ())
        victims = self._named(evicted) or self._printer.reason(answer)
        self._printer.check(
            answer["success"] and len(evicted) == 1, "cross_on", victims=victims or self._printer.reason(answer)
        )
        stats = self._scheduler.stats()
        self._printer.check(
            stats["cross_pool_preemptions"] == 1 and stats["total_preemptions"] == 3,
            "cross_counted",
            total=stats["total_preemptions"],
            across=stats["cross_pool_preemptions"],
        )
        self._scheduler.complete("urgent-00")
        self._one_returns([task["task_id"] for task in evicted])
        self._printer.line("scene_end")

    def _fill(self, cpu: float) -> list[str]:
        filling: list[str] = []
        while len(filling) < MAX_NODES:
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
        before = {agent["name"]: agent["pid"] for agent in self._agents()}
        self._scheduler.configure_preemption(**settings)
        answer = self._scheduler.submit(**self._urgent(cpu))
        untouched = {agent["name"]: agent["pid"] for agent in self._agents()} == before
        self._printer.check(not answer["success"] and untouched, key, reason=self._printer.reason(answer))

    # ---- shared by the scenes

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
        agents: list[dict[str, Any]] = self._scheduler.list_agents()["agents"]
        return agents

    def _warm_hosts(self) -> int:
        return sum(counts.get("ready", 0) for counts in self._scheduler.session.status()["warm_hosts"].values())

    def _submitted(self, answer: Mapping[str, Any], key: str, task: str) -> None:
        self._printer.check(answer["success"], key, task=task, success=answer["success"])
        if answer["success"]:
            agent = answer["agent"]
            kind = self._printer.text(f"kind_{agent['kind']}")
            self._printer.line("runs_in", kind=kind, how=agent["how"], reason=self._printer.reason(answer))
        else:
            self._printer.line("because", reason=self._printer.reason(answer))

    def _named(self, evicted: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{task['task_id']} ({self._printer.reason(task)})" for task in evicted)

    def _run(self, answer: Mapping[str, Any], steps: int) -> None:
        """Calls `worker.run()` like a Ray actor's method."""
        if not answer["success"]:
            return
        agent = answer["agent"]
        done = self._ray.get(agent["handle"].run.remote(steps), timeout=RETURN_S)
        self._steps[agent["task_id"]] = done["steps"]
        self._printer.check(done["steps"] == steps, "ran", task=agent["task_id"], steps=done["steps"])

    def _one_returns(self, out: Sequence[str]) -> list[dict[str, Any]]:
        """Waits until one of the evicted tasks runs again."""

        def returned() -> list[dict[str, Any]]:
            return [agent for agent in self._agents() if agent["task_id"] in out and agent["state"] == "running"]

        back: list[dict[str, Any]] = _until(returned, RETURN_S)
        self._printer.check(bool(back), "came_back", task=", ".join(agent["name"] for agent in back) or ", ".join(out))
        return back

    def _still_has_its_steps(self, agent: Mapping[str, Any]) -> None:
        seen = self._scheduler.session.task(agent["task_id"]).call("run", 1, timeout=RETURN_S)
        before = self._steps[agent["task_id"]]
        self._printer.check(seen["steps"] == before + 1, "state_kept", task=agent["task_id"], before=before, **seen)

    def _dry_run(self, role: WorkerRole) -> None:
        size = self._size_of(role)
        choice = self._scheduler.session.would_evict(
            POOL,
            {"cpu": size["cpu"], "memory": size["memory"] * MB},
            priority=role.priority,
            labels={"role": role.name},
            estimate_s=role.seconds,
        )
        self._printer.line(
            "dry_run", victims=", ".join(f"{name} ({code.value})" for name, code in choice.victims) or "-"
        )

    def _statistics(self, key: str, *, preemptions: int) -> dict[str, Any]:
        stats, slots = self._scheduler.stats(), self._scheduler.pg_pool_stats(POOL)
        self._printer.line("stats", when=self._printer.text(key), running=stats["running_tasks"], **slots)
        total = stats["total_preemptions"]
        self._printer.check(total == preemptions, "preemptions", total=total)
        return slots


def fitting_shares(free: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Shares of the demo's CPU and memory sizes that fit on the nodes; 1 and 1 if all fits.

    In proportion to the free resources; less if nodes are too small for the slots.
    """
    cpu = min(1.0, sum(node["cpu"] for node in free) / sum(role.cpu for role in SLOTS))
    memory = min(1.0, sum(node["memory"] for node in free) / sum(role.memory for role in SLOTS))
    while min(cpu, memory) >= MIN_SHARE:
        cpu, memory = (share if share == 1 else _thousandths(share) for share in (cpu, memory))
        if _packs(free, cpu, memory):
            return cpu, memory
        narrow_cpu, narrow_memory = not _packs(free, cpu, 0.0), not _packs(free, 0.0, memory)
        cpu *= 1.0 if narrow_memory and not narrow_cpu else 0.95
        memory *= 1.0 if narrow_cpu and not narrow_memory else 0.95
    has = ", ".join(f"{node['cpu']:g} CPU and {node['memory']:.0f} MB" for node in free) or "no node"
    raise InfeasibleError(
        f"the cluster has too little free for the demo: {has}", hint="free some of it, or run it alone"
    )


def _packs(free: Sequence[Mapping[str, float]], cpu: float, memory: float) -> bool:
    left = [[node["cpu"], node["memory"]] for node in free]
    for role in SLOTS:
        asks = role.cpu * cpu, role.memory * memory
        node = next((pair for pair in left if pair[0] >= asks[0] and pair[1] >= asks[1]), None)
        if node is None:
            return False
        node[0] -= asks[0]
        node[1] -= asks[1]
    return True


def _free(scheduler: SimpleScheduler) -> list[dict[str, float]]:
    """Resources of each node that are not used outside the pools; memory in MB."""
    nodes = scheduler.session.status()["nodes"]
    return [
        {
            "cpu": node["total"].get("cpu", 0.0) - node["outside"].get("cpu", 0.0),
            "memory": (node["total"].get("memory", 0.0) - node["outside"].get("memory", 0.0)) / MB,
        }
        for node in nodes
    ]


def _thousandths(amount: float) -> float:
    return math.floor(amount * 1000 + 1e-6) / 1000


def _until(found: Callable[[], Any], timeout_s: float) -> Any:
    """Polls until the result is truthy or the timeout is over; returns the last result."""
    deadline = time.monotonic() + timeout_s
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def _left_behind(ray: Any, name: str) -> list[str]:
    """Placement groups and actors of the demo that still exist after 10 s."""

    def left() -> list[str]:
        from ray.util import list_named_actors, placement_group_table

        groups = [item["name"] for item in placement_group_table().values() if item["state"] != "REMOVED"]
        actors = [item["name"] for item in list_named_actors(all_namespaces=True)]
        workers = [item["name"] for item in list_named_actors(all_namespaces=True) if item["namespace"] == name]
        return sorted({item for item in groups + actors if item.startswith(f"trimtab:{name}:")} | set(workers))

    _until(lambda: not left(), 10.0)
    return left()
