"""NeMo RL configs: generation shares the training GPUs or has GPUs of its own; training takes what is left.

On one node generation may take any number of its GPUs; on more it takes whole nodes, and so does a reward model.
Log-probs and policy training are one worker group and never part. NeMo RL has no key for the training GPUs: they are
the cluster less the others, so a plan that leaves GPUs idle is said by a smaller cluster. Costs come from a profile.
"""

from __future__ import annotations

from typing import Any

from trimtab.formats.dialect import Loaded, Settings
from trimtab.formats.framework import (
    Sizes,
    check_expressible,
    component,
    costs,
    divisors_of_batch,
    even_cluster,
    groupings,
    node_counts,
    not_placed,
    product,
    weight_sync,
)
from trimtab.formats.hydra_config import Composed, Reader
from trimtab.formats.write_back import block_text, nested
from trimtab.model.errors import InputError
from trimtab.model.plan import CurrentPlacement, Plan, Rules
from trimtab.model.profile import Profile
from trimtab.model.workflow import Component, Job, Workflow, check_workflow

NAME = "nemo_rl"

COMPONENTS = ("generation", "reward", "logprobs", "policy")

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"
_REWARD = "env.reward_model.resources"


def matches(reader: Reader) -> bool:
    """Whether this is a NeMo RL config."""
    return reader.has("policy.generation") or (reader.has("grpo") and reader.has("policy"))


def read(composed: Composed, profile: Profile | None) -> Loaded:
    """A NeMo RL config and a profile as a job."""
    return _Config(composed, profile).loaded()


class _Config:
    """One NeMo RL config, while it is being read."""

    def __init__(self, composed: Composed, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = composed.reader
        self.profile = profile
        self.nodes = int(self.reader.positive_int("cluster.num_nodes", 1))
        self.per_node = int(self.reader.positive_int("cluster.gpus_per_node"))
        self.total = self.nodes * self.per_node
        self.cluster = even_cluster(self.nodes, self.per_node)
        self.costs = costs(profile, COMPONENTS, ("generation", "policy"), NAME, str(composed.path))
        self.reward_on_gpu = "reward" in self.costs and self.reader.has(_REWARD)
        self.colocated = self.reader.boolean(f"{_COLOCATED}.enabled", True)
        self.is_async = self.reader.boolean("grpo.async_grpo.enabled", False)
        if self.is_async and self.colocated:
            raise InputError(
                "asynchronous training needs generation on GPUs of its own",
                where=self.reader.where(f"{_COLOCATED}.enabled"),
                hint=f"set {_COLOCATED}.enabled=false and say how many GPUs generation has now in {_RESOURCES}",
            )

    def loaded(self) -> Loaded:
        members = {name: self._component(name) for name in self.costs}
        staleness = int(self.reader.positive_int("grpo.async_grpo.max_trajectory_age_steps", 1)) if self.is_async else 0
        workflow = Workflow(
            components=tuple(members.values()),
            batches=int(self.reader.positive_int("grpo.num_prompts_per_step", 1)),
            staleness=staleness,
            weight_sync=weight_sync(self.profile, "policy", "generation"),
        )
        check_workflow(workflow)
        training: list[str] = [name for name in ("logprobs", "policy") if name in self.costs]
        reward: list[list[str]] = [["reward"]] if self.reward_on_gpu else []
        options: list[list[list[str]]] = [[["generation"], training, *reward]]
        if not self.is_async:
            options.insert(0, [["generation", *training], *reward])
        rules = Rules(
            framework="NeMo RL",
            groupings=groupings(options, members, self._pool_sizes(), str(self.composed.path)),
            even_nodes=True,
        )
        return Loaded(
            dialect=NAME,
            path=self.composed.path,
            job=Job(cluster=self.cluster, workflow=workflow),
            settings=lambda plan: self._settings(plan, rules),
            rules=rules,
            assumptions=(self._mode_text(staleness), *not_placed(self.profile, COMPONENTS)),
            current=self._current(),
            literal=self.composed.literal,
            states=self.composed.states,
        )

    def _mode_text(self, staleness: int) -> str:
        if self.is_async:
            steps = "1 step" if staleness == 1 else f"{staleness} steps"
            return f"asynchronous: generation beside training on weights up to {steps} old"
        return "no streaming: each component takes all its inputs at once (synchronous GRPO)"

    def _component(self, name: str) -> Component:
        after: list[str] = []
        if name in ("reward", "logprobs"):
            after = ["generation"]
        elif name == "policy":
            after = [n for n in ("reward", "logprobs") if n in self.costs] or ["generation"]
        on_cpu = name == "reward" and not self.reward_on_gpu
        return component(self.costs[name], after=after, sizes=self._sizes(name), on_cpu=on_cpu)

    def _sizes(self, component_name: str) -> Sizes:
        reader = self.reader
        if component_name == "generation":
            backend = reader.text("policy.generation.backend", "vllm")
            keys = ("tensor_parallel_size", "pipeline_parallel_size")
            return Sizes(product(reader, [f"policy.generation.{backend}_cfg.{key}" for key in keys]))
        if component_name == "reward":
            keys = ("tensor_parallel_size", "context_parallel_size")
            return Sizes(product(reader, [f"env.reward_model.dtensor_cfg.{key}" for key in keys]))
        if reader.boolean("policy.megatron_cfg.enabled", False):
            names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
            parallel = product(reader, [f"policy.megatron_cfg.{name}" for name in names])
        else:
            names = ["tensor_parallel_size", "context_parallel_size"]
            parallel = product(reader, [f"policy.dtensor_cfg.{name}" for name in names])
        batch: int | None = reader.positive_int("policy.train_global_batch_size", None)
        return Sizes(parallel, None if batch is None else divisors_of_batch(batch, parallel, self.total))

    def _pool_sizes(self) -> list[int]:
        """A part of the only node, or whole nodes; on several nodes no group has less than one."""
        if self.nodes == 1:
            return list(range(1, self.per_node + 1))
        return [self.per_node * count for count in range(1, self.nodes + 1)]

    def _current(self) -> CurrentPlacement:
        where = self.reader.where(_COLOCATED)
        reward = self._reward_now() if self.reward_on_gpu else 0
        rest = self.total - reward
        generation = rest if self.colocated else self._generation_now(rest)
        policy = rest if self.colocated else rest - generation
        if min(generation, policy) <= 0:
            raise InputError(
                f"generation takes {generation} and a reward model {reward} of {self.total} GPUs: none is left",
                where=where,
            )
        first_policy = 0 if self.colocated else generation
        spans = {
            "generation": (0, generation),
            "policy": (first_policy, first_policy + policy),
            "logprobs": (first_policy, first_policy + policy),
            "reward": (rest, self.total),
        }
        return CurrentPlacement(
            ranks={name: tuple(range(*spans[name])) for name in self.costs if name != "reward" or self.reward_on_gpu},
            where=where,
        )

    def _generation_now(self, rest: int) -> int:
        if rest <= self.per_node:
            return int(self.reader.positive_int(f"{_RESOURCES}.gpus_per_node"))
        return int(self.reader.positive_int(f"{_RESOURCES}.num_nodes")) * self.per_node

    def _reward_now(self) -> int:
        if self.nodes == 1:
            return int(self.reader.positive_int(f"{_REWARD}.gpus_per_node"))
        return int(self.reader.positive_int(f"{_REWARD}.num_nodes")) * self.per_node

    def _settings(self, plan: Plan, rules: Rules) -> Settings:
        check_expressible(plan, rules)
        gpus = {name: group.gpus for group in plan.groups for name in group.components}
        counts = {name: node_counts(ranks, self.cluster, name) for name, ranks in gpus.items()}
        shared = gpus["generation"] == gpus["policy"]
        groups = [counts["policy"], *([] if shared else [counts["generation"]])]
        if "reward" in counts:
            groups.append(counts["reward"])
        values: dict[str, Any] = {
            "cluster.num_nodes": self.nodes if self.nodes == 1 else sum(nodes for nodes, _ in groups),
            "cluster.gpus_per_node": sum(g for _, g in groups) if self.nodes == 1 else self.per_node,
            f"{_COLOCATED}.enabled": shared,
        }
        if not shared:
            one_node = self.nodes == 1 or counts["policy"][0] + counts["generation"][0] == 1
            values[f"{_RESOURCES}.gpus_per_node"] = counts["generation"][1]
            values[f"{_RESOURCES}.num_nodes"] = 1 if one_node else counts["generation"][0]
        if "reward" in counts:
            values[f"{_REWARD}.num_nodes"], values[f"{_REWARD}.gpus_per_node"] = counts["reward"]
        return Settings(values=values, block=block_text(nested(values)))
