"""Reads verl configs: pools of whole nodes, and which components each training mode separates.

In verl everything that trains (old log-probs, reference, values, critic, actor) shares one pool, `trainer.nnodes` x
`trainer.n_gpus_per_node`. The rollout shares it in the synchronous modes and has its own pool in the separate ones; the
mode decides whether training is on-policy, so a plan never changes it. A reward model may have its own pool, a teacher
always has one. Costs come from a profile.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import AllowedGpuCounts
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.profile import Profile
from trimtab.model.workflow import Cluster, Component, Node, Workflow
from trimtab.plan.placement.spread import positions_of, spread

NAME = "verl"

COMPONENTS = ("rollout", "reward", "old_log_prob", "ref", "values", "teacher", "update_critic", "update_actor")
TRAINING = ("old_log_prob", "ref", "values", "update_critic", "update_actor")

VerlMode = Literal["sync", "colocate_async", "separate_async", "one_step_off", "fully_async"]
SEPARATE: tuple[VerlMode, ...] = ("separate_async", "one_step_off", "fully_async")

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SYNC_STEP = "async_training.trigger_parameter_sync_step"
_PARAMETER_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
DEFAULT_MINI_BATCH = 256
"""Default of verl's base config."""


def matches(reader: ConfigReader) -> bool:
    return reader.has("actor_rollout_ref")


def read(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    return _Config(composed, profile).loaded()


class _Config:
    """State while a verl config is read."""

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = composed.reader
        self.profile = profile
        self.mode = _mode(self.reader)
        self.costs = common.costs(profile, COMPONENTS, ("rollout", "update_actor"), NAME, str(composed.path))
        self.reward_key = "reward.reward_model" if self.reader.has("reward.reward_model") else "reward_model"
        self.reward_model = self.reader.boolean(f"{self.reward_key}.enable", False)
        in_own = self.mode in ("one_step_off", "fully_async")
        self.rollout_pool = "rollout" if in_own else _ROLLOUT
        self.pools = self._pools()
        self.assumptions: list[str] = []
        self.cluster = self._cluster()

    def loaded(self) -> LoadedJob:
        members = {name: self._component(name) for name in self.costs}
        staleness = self._staleness()
        workflow = Workflow(
            components=tuple(members.values()),
            batches=self._batches(),
            staleness=staleness,
            weight_sync=common.weight_sync(self.profile, "update_actor", "rollout"),
        )
        self._note_mode(staleness)
        self.assumptions.extend(common.not_placed(self.profile, COMPONENTS))
        rules = FrameworkRules(
            framework=f"{NAME} in {self.mode} mode",
            groupings=common.groupings(
                self._options(), members, common.pool_sizes(self.cluster), str(self.composed.path)
            ),
            even_nodes=True,
        )
        return common.loaded_job(
            self.composed, NAME, self.cluster, workflow, rules, self._settings, self.assumptions, self._current()
        )

    # -- the cluster ------------------------------------------------------------------------------------------------

    def _pools(self) -> dict[str, tuple[int, int]]:
        """The pools in the file as (nodes, GPUs per node)."""
        pools = {"trainer": self._pool("trainer", 1, 8)}
        if self.mode in SEPARATE:
            hint = (
                f"in {self.mode} mode the rollout has GPUs of its own: add ++{self.rollout_pool}.nnodes=N "
                f"++{self.rollout_pool}.n_gpus_per_node=G, and make the trainer's pool smaller by as many"
            )
            pools["rollout"] = self._pool(self.rollout_pool, None, pools["trainer"][1], hint)
        # A pool of a component without a cost is unchanged, and its GPUs are not part of the plan.
        own_reward = self.reader.boolean(f"{self.reward_key}.enable_resource_pool", False)
        if self.reward_model and own_reward and "reward" in self.costs:
            pools["reward"] = self._pool(self.reward_key, None, None)
        if "teacher" in self.costs:
            pools["teacher"] = self._pool("distillation", None, None)
        return pools

    def _pool(self, key: str, nodes: int | None, gpus: int | None, hint: str | None = None) -> tuple[int, int]:
        def read(name: str, default: int | None) -> int:
            if default is None:
                return int(self.reader.positive_int(f"{key}.{name}", hint=hint))
            return int(self.reader.positive_int(f"{key}.{name}", default))

        pool = read("nnodes", nodes), read("n_gpus_per_node", gpus)
        common.check_gpus(pool[0] * pool[1], f"{pool[0]:,} nodes of {pool[1]:,} GPUs", self.reader.where(key))
        return pool

    def _cluster(self) -> Cluster:
        """The nodes: `trimtab.nodes`, or a node for every node of every pool, which any real cluster can provide."""
        reader = self.reader
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            shape = [int(reader.positive_int("trimtab.gpus_per_node"))] * int(reader.positive_int("trimtab.nodes", 1))
        else:
            shape = [gpus for nodes, gpus in self.pools.values() for _ in range(nodes)]
            if len(self.pools) > 1:
                stated = " + ".join(f"{name} {n} x {g}" for name, (n, g) in self.pools.items())
                self.assumptions.append(
                    f"the cluster is the pools of the file ({stated}), each on nodes of its own; if it is not, add "
                    "++trimtab.nodes=N ++trimtab.gpus_per_node=G"
                )
        common.check_gpus(sum(shape), f"{len(shape):,} nodes", reader.where("trainer"))
        return Cluster(tuple(Node(name=f"node{index}", gpus=gpus) for index, gpus in enumerate(shape)))

    # -- the workflow -----------------------------------------------------------------------------------------------

    def _component(self, name: str) -> Component:
        middle: list[str] = [n for n in ("reward", "old_log_prob", "ref", "values", "teacher") if n in self.costs]
        after: list[str] = []
        if name in middle:
            after = ["rollout"]
        elif name != "rollout":
            after = middle or ["rollout"]
        on_cpu = name == "reward" and not self.reward_model
        granularity = self._granularity() if after else None
        return common.component(
            self.costs[name], after=after, sizes=self._sizes(name), granularity=granularity, on_cpu=on_cpu
        )

    def _batches(self) -> int:
        """Prompts per iteration: a batch, or without one what the trainer takes between two weight syncs."""
        if self._without_batch():
            return self._taken_at_once() * int(self.reader.positive_int(_SYNC_STEP, 1))
        return int(self.reader.positive_int("data.train_batch_size", 1))

    def _without_batch(self) -> bool:
        """A fully asynchronous trainer has no batch: verl requires its size to be 0."""
        return self.mode == "fully_async" and self.reader.get("data.train_batch_size", 0) in (0, "0")

    def _taken_at_once(self) -> int:
        """Prompts that a fully asynchronous trainer waits for before each step."""
        mini_batch = int(self.reader.positive_int(f"{_ACTOR}.ppo_mini_batch_size", DEFAULT_MINI_BATCH))
        return mini_batch * int(self.reader.positive_int("async_training.require_batches", 1))

    def _granularity(self) -> int | None:
        """Prompts that the trainer takes at a time: None for all, or a mini-batch if samples stream."""
        if self.mode == "fully_async":
            taken = self._taken_at_once()
            return taken if taken < self._batches() else None
        mini_batch: int | None = self.reader.positive_int(f"{_ACTOR}.ppo_mini_batch_size", None)
        if mini_batch is None or self.mode != "separate_async":
            return None
        return mini_batch if mini_batch < self._batches() else None

    def _staleness(self) -> int:
        if self.mode == "separate_async":
            return max(1, math.ceil(float(self.reader.number("trainer.v1.separate_async.num_warmup_batches", 1))))
        if self.mode == "fully_async":
            return max(1, math.ceil(float(self.reader.number("async_training.staleness_threshold", 1))))
        return 1 if self.mode == "one_step_off" else 0

    def _note_mode(self, staleness: int) -> None:
        if self.mode in SEPARATE:
            what = "streaming by mini-batches, " if self._granularity() else ""
            self.assumptions.append(
                f"{self.mode}: {what}rollout beside training on weights up to {staleness} "
                f"iteration{'s' if staleness > 1 else ''} old"
            )
            if self._without_batch():
                self.assumptions.append(
                    f"an iteration is the {self._batches()} prompts trained on between two weight syncs "
                    "(ppo_mini_batch_size x require_batches x trigger_parameter_sync_step); the costs are of as many"
                )
            return
        self.assumptions.append(f"no streaming: each component takes all its inputs at once ({self.mode})")
        words = self._separation_overrides()
        if words:
            self.assumptions.append(
                f"rollout shares the training GPUs in this mode; to plan it apart: {' '.join(words)}"
            )

    def _separation_overrides(self) -> list[str]:
        """Overrides that give the rollout half of the GPUs, in this verl's mode for separate pools."""
        nodes, gpus = self.pools["trainer"]
        if nodes * gpus < 2:
            return []
        trainer, rollout = (
            ((nodes - nodes // 2, gpus), (nodes // 2, gpus)) if nodes > 1 else ((1, gpus - gpus // 2), (1, gpus // 2))
        )
        if self.reader.has("trainer.v1") and self.reader.get("trainer.use_v1", True) is True:
            key = _ROLLOUT
            words = ["++trainer.v1.trainer_mode=separate_async", f"++{_ROLLOUT}.checkpoint_engine.backend=nccl"]
            mini_batch = int(self.reader.positive_int(f"{_ACTOR}.ppo_mini_batch_size", DEFAULT_MINI_BATCH))
            if self._batches() % mini_batch == 0:
                words.append(f"++{_PARAMETER_SYNC_STEP}={self._batches() // mini_batch}")
        else:
            key = "rollout"  # an older verl, started with its one_step_off_policy.main_ppo
            words = ["++actor_rollout_ref.hybrid_engine=false"]
        if self.reward_model and "reward" in self.costs and "reward" not in self.pools:
            return []  # its pool would need some of these GPUs too
        for section, (count, each) in (("trainer", trainer), (key, rollout)):
            words += [f"++{section}.nnodes={count}", f"++{section}.n_gpus_per_node={each}"]
        return [*words, f"++trimtab.nodes={len(self.cluster.nodes)}", f"++trimtab.gpus_per_node={gpus}"]

    def _sizes(self, name: str) -> AllowedGpuCounts:
        reader = self.reader
        if name in ("rollout", "reward", "teacher"):
            section = {"rollout": _ROLLOUT, "reward": f"{self.reward_key}.rollout"}.get(name)
            if section is None:
                return AllowedGpuCounts()
            keys = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
            return AllowedGpuCounts(common.product(reader, [f"{section}.{key}" for key in keys]))
        if reader.text(f"{_ACTOR}.strategy", "fsdp") == "megatron":
            keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            parallel = common.product(reader, [f"{_ACTOR}.megatron.{key}" for key in keys])
            split = parallel
        else:
            parallel = int(reader.positive_int(f"{_ACTOR}.ulysses_sequence_parallel_size", 1))
            split = 1  # here verl requires the batch to divide by all GPUs, whatever the sequence parallelism
        if reader.get(f"{_ACTOR}.use_dynamic_bsz", False) is True or not reader.has("data.train_batch_size"):
            return AllowedGpuCounts(parallel)
        prompts = self._taken_at_once() if self._without_batch() else int(reader.positive_int("data.train_batch_size"))
        samples = prompts * int(reader.positive_int(f"{_ROLLOUT}.n", 1))
        if split > 1:
            samples //= int(reader.positive_int(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 1)) or 1
        return AllowedGpuCounts(parallel, common.divisors_of_batch(max(samples, 1), split, self.cluster.gpus))

    # -- plans ------------------------------------------------------------------------------------------------------

    def _options(self) -> list[list[list[str]]]:
        training = [name for name in TRAINING if name in self.costs]
        alone = [["teacher"]] if "teacher" in self.costs else []
        base = [training, ["rollout"], *alone] if self.mode in SEPARATE else [["rollout", *training], *alone]
        if "reward" not in self.costs or not self.reward_model:
            return [base]
        apart = [*base, ["reward"]]
        # A rollout that never pauses leaves no time for a reward model on the training GPUs.
        return [apart] if self.mode in SEPARATE else [[[*base[0], "reward"], *alone], apart]

    def _current(self) -> CurrentPlacement | None:
        nodes = [node.gpus for node in self.cluster.nodes]
        taken = sum(count * gpus for count, gpus in self.pools.values())
        if taken > self.cluster.gpus:
            raise InputError(
                f"the pools take GPUs 0-{taken - 1}, and the cluster has GPUs 0-{self.cluster.gpus - 1}",
                where=self.reader.where("trainer"),
            )
        layout = spread([[pool] for pool in self.pools.values()], nodes)
        # Pools may share a node: then only their sizes are known.
        sizes = [count * gpus for count, gpus in self.pools.values()]
        ends = itertools.accumulate(sizes)
        positions = (
            [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            if layout is None
            else positions_of(layout, nodes)
        )
        ranks: dict[str, tuple[int, ...]] = {}
        for pool, gpus in zip(self.pools, positions, strict=True):
            if pool == "trainer":
                ranks.update({name: tuple(gpus) for name in self.costs if not self._on_cpu(name)})
            elif pool in self.costs:
                ranks[pool] = tuple(gpus)
        return CurrentPlacement(ranks=ranks, where=self.reader.where("trainer"))

    def _on_cpu(self, name: str) -> bool:
        return name == "reward" and not self.reward_model

    def _settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        values: dict[str, Any] = {}

        def put(key: str, name: str) -> None:
            values[f"{key}.nnodes"], values[f"{key}.n_gpus_per_node"] = common.node_counts(
                gpus[name], self.cluster, name
            )

        put("trainer", "update_actor")
        if self.mode in SEPARATE:
            put(self.rollout_pool, "rollout")
        if "reward" in gpus:
            apart = gpus["reward"] != gpus["update_actor"]
            values[f"{self.reward_key}.enable_resource_pool"] = apart
            if apart:
                put(self.reward_key, "reward")
        if "teacher" in gpus:
            put("distillation", "teacher")
        return PlanSettings(values=values, block=block_text(nested(values)), advice=self._advice())

    def _advice(self) -> tuple[str, ...]:
        """Settings without which verl does not start with these pools."""
        advice = []
        backend = self.reader.get(
            f"{_ROLLOUT}.checkpoint_engine.backend", "naive" if self.mode == "separate_async" else None
        )
        if self.mode in SEPARATE and backend == "naive":
            advice.append(f"{_ROLLOUT}.checkpoint_engine.backend must be nccl or another that crosses pools, not naive")
        in_own = self.mode in ("one_step_off", "fully_async")
        if in_own and self.reader.get("actor_rollout_ref.hybrid_engine", True) is not False:
            advice.append(f"actor_rollout_ref.hybrid_engine must be false in {self.mode} mode")
        if self.mode != "separate_async":
            return tuple(advice)
        mini_batch = int(self.reader.positive_int(f"{_ACTOR}.ppo_mini_batch_size", DEFAULT_MINI_BATCH))
        steps = int(self.reader.positive_int(_PARAMETER_SYNC_STEP, 4))
        if self._batches() != steps * mini_batch:
            advice.append(
                f"data.train_batch_size ({self._batches()}) must be ppo_mini_batch_size ({mini_batch}) x "
                f"{_PARAMETER_SYNC_STEP} ({steps})"
            )
        return tuple(advice)


def _mode(reader: ConfigReader) -> VerlMode:
    if reader.has("async_training"):
        return "fully_async"
    if reader.has("rollout.nnodes"):
        return "one_step_off"
    mode = reader.text("trainer.v1.trainer_mode", "sync") if reader.get("trainer.use_v1", True) is True else "sync"
    known: tuple[VerlMode, ...] = ("sync", "colocate_async", "separate_async")
    for name in known:
        if mode == name:
            return name
    raise InputError(
        f"there is no trainer mode {mode!r}",
        where=reader.where("trainer.v1.trainer_mode"),
        hint="it is one of sync, colocate_async, separate_async",
    )
