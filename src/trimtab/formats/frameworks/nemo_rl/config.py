"""Reads NeMo RL configs: generation shares the training GPUs or has its own; training takes the rest.

On one node generation may take any number of its GPUs; on more it takes whole nodes, and so does a reward model.
Log-probs and policy training are one worker group and never separate. NeMo RL has no key for the training GPUs: they
are the cluster without the others, so a plan with idle GPUs is expressed by a smaller cluster. Teachers, and a reward
model without a cost, keep their GPUs, which are not part of the plan. Costs come from a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import AllowedGpuCounts
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.profile import Profile
from trimtab.model.workflow import Component, Workflow

NAME = "nemo_rl"

COMPONENTS = ("generation", "reward", "logprobs", "policy")

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"
_REWARD = "env.reward_model.resources"
_ALGORITHMS = ("grpo", "ppo", "distillation")
_TEACHERS = "on_policy_distillation"


def matches(reader: ConfigReader) -> bool:
    return reader.has("policy.generation") or (reader.has("grpo") and reader.has("policy"))


def read(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    return _Config(composed, profile).loaded()


@dataclass(frozen=True)
class NemoRlGpus:
    """How NeMo RL divides its cluster: `nodes` x `per_node` are without the teachers' nodes."""

    nodes: int
    per_node: int
    teacher_nodes: int
    reward: int
    generation: int
    policy: int
    colocated: bool


def gpus_of(reader: ConfigReader) -> NemoRlGpus:
    """The GPUs of each worker group; raises InputError if none is left for training."""
    nodes = int(reader.positive_int("cluster.num_nodes", 1))
    per_node = int(reader.positive_int("cluster.gpus_per_node"))
    teacher_nodes = _teacher_nodes(reader)
    nodes -= teacher_nodes
    if nodes < 1:
        raise InputError(
            f"teachers take {teacher_nodes} of {nodes + teacher_nodes} nodes: none is left",
            where=reader.where(f"{_TEACHERS}.non_colocated_teachers"),
        )
    reward = 0
    if reader.has(_REWARD):
        alone = nodes + teacher_nodes == 1
        reward = int(reader.positive_int(f"{_REWARD}.{'gpus_per_node' if alone else 'num_nodes'}"))
        reward *= 1 if alone else per_node
    rest = nodes * per_node - reward
    colocated = reader.boolean(f"{_COLOCATED}.enabled", True)
    generation = policy = rest
    if not colocated:
        if rest <= per_node:
            generation = int(reader.positive_int(f"{_RESOURCES}.gpus_per_node"))
        else:
            generation = int(reader.positive_int(f"{_RESOURCES}.num_nodes")) * per_node
        policy = rest - generation
    if policy < 1:
        raise InputError(
            f"generation takes {generation} and a reward model {reward} of {nodes * per_node} GPUs: none is left for "
            "training",
            where=reader.where(_RESOURCES),
        )
    return NemoRlGpus(nodes, per_node, teacher_nodes, reward, generation, policy, colocated)


def _teacher_nodes(reader: ConfigReader) -> int:
    """Nodes of teachers alone: a worker group for each model, or for each alias."""
    own = f"{_TEACHERS}.non_colocated_teachers"
    if not (reader.boolean(f"{_TEACHERS}.enabled", False) and reader.boolean(f"{own}.enabled", False)):
        return 0
    models = reader.mapping(f"{_TEACHERS}.teacher_model_by_agent_name")
    once = reader.boolean(f"{_TEACHERS}.deduplicate_shared_teacher_checkpoints", True)
    default = int(reader.positive_int(f"{own}.default_teacher_cfg.num_nodes", 1))
    seen: set[str] = set()
    nodes = 0
    for alias, model in models.items():
        if once and str(model) in seen:
            continue
        seen.add(str(model))
        nodes += int(reader.positive_int(f"{own}.teacher_overrides.{alias}.num_nodes", default))
    return nodes


class _Config:
    """State while a NeMo RL config is read."""

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = reader = composed.reader
        self.profile = profile
        self.gpus = gpus_of(reader)
        self.costs = common.costs(profile, COMPONENTS, ("generation", "policy"), NAME, str(composed.path))
        self.reward_on_gpu = "reward" in self.costs and self.gpus.reward > 0
        outside = 0 if self.reward_on_gpu else self.gpus.reward
        whole = outside // self.gpus.per_node if self.gpus.nodes > 1 else 0
        self.outside = (self.gpus.teacher_nodes + whole, 0 if whole else outside)  # (nodes, GPUs of the only node)
        self.nodes, self.per_node = self.gpus.nodes - whole, self.gpus.per_node - self.outside[1]
        self.total = self.nodes * self.per_node
        self.cluster = common.even_cluster(self.nodes, self.per_node)
        self.algorithm = next((name for name in _ALGORITHMS if reader.has(name)), "grpo")
        self.batches = int(reader.positive_int(f"{self.algorithm}.num_prompts_per_step", 1))
        self.backend = reader.text("policy.generation.backend", "vllm")
        self.staleness, self.chunk = self._mode()
        if self.staleness and self.gpus.colocated and self.backend != "megatron":
            raise InputError(
                "asynchronous training needs generation on GPUs of its own",
                where=reader.where(f"{_COLOCATED}.enabled"),
                hint=f"set {_COLOCATED}.enabled=false and say how many GPUs generation has now in {_RESOURCES}",
            )

    def _mode(self) -> tuple[int, int | None]:
        """(staleness, prompts that training takes at a time; `None`: all of a step)."""
        reader = self.reader
        if reader.has("async_rl"):  # the single controller
            sampler = reader.text("async_rl.sampler.name", "in_order")
            key = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
            chunk = int(reader.positive_int("async_rl.min_groups_for_streaming_train", 32))
            ahead = float(reader.number(f"async_rl.sampler.{key}", 1))
            return int(ahead), chunk if chunk < self.batches and self.batches % chunk == 0 else None
        section = f"{self.algorithm}.async_{'ppo' if self.algorithm == 'ppo' else 'grpo'}"
        if not reader.boolean(f"{section}.enabled", False):
            return 0, None
        return int(reader.positive_int(f"{section}.max_trajectory_age_steps", 1)), None

    def loaded(self) -> LoadedJob:
        members = {name: self._component(name) for name in self.costs}
        workflow = Workflow(
            components=tuple(members.values()),
            batches=self.batches,
            staleness=self.staleness,
            weight_sync=common.weight_sync(self.profile, "policy", "generation"),
        )
        training: list[str] = [name for name in ("logprobs", "policy") if name in self.costs]
        reward: list[list[str]] = [["reward"]] if self.reward_on_gpu else []
        options: list[list[list[str]]] = []
        if self._runs("shared"):
            options.append([["generation", *training], *reward])
        if self._runs("apart"):
            options.append([["generation"], training, *reward])
        rules = FrameworkRules(
            framework="NeMo RL",
            groupings=common.groupings(options, members, self._pool_sizes(), str(self.composed.path)),
            even_nodes=True,
        )
        assumptions = (self._mode_text(), *self._outside_text(), *common.not_placed(self.profile, COMPONENTS))
        return common.loaded_job(
            self.composed, NAME, self.cluster, workflow, rules, self._settings, assumptions, self._current()
        )

    def _runs(self, how: Literal["shared", "apart"]) -> bool:
        """Whether NeMo RL supports generation with training, or apart; the file's current way is supported."""
        if (how == "shared") == self.gpus.colocated:
            return True
        if how == "shared":
            return not self.staleness and self.backend != "dynamo"
        if self.backend == "megatron":
            return self.algorithm == "grpo" and not self.reader.has("async_rl")
        return self.backend == "vllm" or (self.backend == "trtllm" and self.algorithm != "ppo")

    def _mode_text(self) -> str:
        taken = f", training takes {self.chunk} prompts at a time" if self.chunk else ""
        if self.staleness:
            steps = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
            return f"asynchronous: generation beside training on weights up to {steps} old{taken}"
        if taken:
            return f"synchronous{taken}"
        return f"no streaming: each component takes all its inputs at once (synchronous {self.algorithm})"

    def _outside_text(self) -> tuple[str, ...]:
        notes = []
        if self.gpus.teacher_nodes:
            notes.append(f"teachers keep their {self.gpus.teacher_nodes} nodes")
        if self.gpus.reward and not self.reward_on_gpu:
            notes.append(f"the reward model, which has no cost here, keeps its {self.gpus.reward} GPUs")
        return tuple(f"{what}: not part of the plan" for what in notes)

    def _component(self, name: str) -> Component:
        after: list[str] = []
        if name in ("reward", "logprobs"):
            after = ["generation"]
        elif name == "policy":
            after = [n for n in ("reward", "logprobs") if n in self.costs] or ["generation"]
        on_cpu = name == "reward" and not self.reward_on_gpu
        chunk = self.chunk if after else None
        return common.component(
            self.costs[name], after=after, sizes=self._sizes(name), granularity=chunk, on_cpu=on_cpu
        )

    def _sizes(self, component_name: str) -> AllowedGpuCounts:
        reader = self.reader
        if component_name == "generation" and self.backend != "megatron":
            section = f"policy.generation.{'vllm' if self.backend == 'dynamo' else self.backend}_cfg"
            names = ["tensor_parallel_size", "pipeline_parallel_size", "tp_size", "pp_size"]
            return AllowedGpuCounts(common.product(reader, [f"{section}.{name}" for name in names]))
        if component_name == "reward":
            names = ["tensor_parallel_size", "context_parallel_size"]
            return AllowedGpuCounts(common.product(reader, [f"env.reward_model.dtensor_cfg.{name}" for name in names]))
        if reader.boolean("policy.megatron_cfg.enabled", False):
            names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
            parallel = common.product(reader, [f"policy.megatron_cfg.{name}" for name in names])
        else:
            names = ["tensor_parallel_size", "context_parallel_size"]
            parallel = common.product(reader, [f"policy.dtensor_cfg.{name}" for name in names])
        if component_name == "generation":
            return AllowedGpuCounts(parallel)
        batch: int | None = reader.positive_int("policy.train_global_batch_size", None)
        return AllowedGpuCounts(
            parallel, None if batch is None else common.divisors_of_batch(batch, parallel, self.total)
        )

    def _pool_sizes(self) -> list[int]:
        """A part of the only node, or whole nodes; on several nodes at least one."""
        if self.nodes == 1:
            return list(range(1, self.per_node + 1))
        return [self.per_node * count for count in range(1, self.nodes + 1)]

    def _current(self) -> CurrentPlacement:
        gpus = self.gpus
        first = 0 if gpus.colocated else gpus.generation
        training = tuple(range(first, first + gpus.policy))
        ranks = {"generation": tuple(range(gpus.generation)), "logprobs": training, "policy": training}
        if self.reward_on_gpu:
            ranks["reward"] = tuple(range(self.total - gpus.reward, self.total))
        return CurrentPlacement(
            ranks={name: ranks[name] for name in self.costs if name in ranks}, where=self.reader.where(_COLOCATED)
        )

    def _settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        counts = {name: common.node_counts(ranks, self.cluster, name) for name, ranks in gpus.items()}
        shared = gpus["generation"] == gpus["policy"]
        groups = [counts["policy"], *([] if shared else [counts["generation"]])]
        if "reward" in counts:
            groups.append(counts["reward"])
        values: dict[str, Any] = {
            "cluster.num_nodes": self.outside[0] + (1 if self.nodes == 1 else sum(nodes for nodes, _ in groups)),
            "cluster.gpus_per_node": self._per_node(sum(g for _, g in groups)),
            f"{_COLOCATED}.enabled": shared,
        }
        if not shared:
            one_node = self.nodes == 1 or counts["policy"][0] + counts["generation"][0] == 1
            values[f"{_RESOURCES}.gpus_per_node"] = counts["generation"][1]
            values[f"{_RESOURCES}.num_nodes"] = 1 if one_node else counts["generation"][0]
        if "reward" in counts:
            values[f"{_REWARD}.num_nodes"], values[f"{_REWARD}.gpus_per_node"] = counts["reward"]
        return PlanSettings(values=values, block=block_text(nested(values)))

    def _per_node(self, planned: int) -> int:
        """GPUs per node: on the only node the used ones; teachers' nodes keep their size."""
        return self.gpus.per_node if self.nodes > 1 or self.outside[0] else planned + self.outside[1]
