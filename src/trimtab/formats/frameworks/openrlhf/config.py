"""Reads OpenRLHF's flags as YAML: engines share the training GPUs (`colocate_all`) or have their own.

OpenRLHF takes flags such as `--actor.num_nodes`; the file has the same names as nested keys, or they are overrides;
defaults are its launcher's. Making experience and training share their GPUs. There is no timer for a critic, a reward
model or a reference on GPUs of its own: it keeps them, and they are not part of the plan. Costs come from a profile. In
asynchronous runs generation runs beside training, always on GPUs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import AllowedGpuCounts
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.profile import Profile
from trimtab.model.workflow import Cluster, Component, Workflow

NAME = "openrlhf"

COMPONENTS = ("rollout", "inference", "actor")

_PER_NODE = 8  # OpenRLHF's default


def matches(reader: ConfigReader) -> bool:
    return reader.has("vllm.num_engines")


def read(composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
    return _Config(composed, profile).loaded()


class _Config:
    """State while the flags are read."""

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = reader = composed.reader
        self.profile = profile
        self.costs = common.costs(profile, COMPONENTS, ("rollout", "actor"), "OpenRLHF", str(composed.path))
        self.is_async = reader.boolean("train.async_enable", False)
        self.shares = reader.boolean("train.colocate_all", False) and not self.is_async
        self.engine_gpus = int(reader.positive_int("vllm.tensor_parallel_size", 1))
        actor_nodes = int(reader.positive_int("actor.num_nodes", 1))
        actor_per_node = int(reader.positive_int("actor.num_gpus_per_node", _PER_NODE))
        self.actor_gpus = actor_nodes * actor_per_node
        self.rollout_gpus = int(reader.positive_int("vllm.num_engines")) * self.engine_gpus
        if self.shares and self.rollout_gpus != self.actor_gpus:
            raise InputError(
                f"engines have {self.rollout_gpus} GPUs and the actor {self.actor_gpus}: with train.colocate_all "
                "they are the same",
                where=reader.where("vllm.num_engines"),
            )
        self.on_actor_gpus, self.separate = self._others()
        taken = self.actor_gpus if self.shares else self.actor_gpus + self.rollout_gpus
        outside = sum(self.separate.values())
        nodes, per_node = (actor_nodes, actor_per_node) if self.shares else (1, taken + outside)
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            nodes = int(reader.positive_int("trimtab.nodes", 1))
            per_node = int(reader.positive_int("trimtab.gpus_per_node"))
        elif not self.shares and taken + outside > _PER_NODE:
            raise InputError(
                f"the run has {taken + outside} GPUs, and its flags do not say on which nodes",
                where=str(composed.path),
                hint="add ++trimtab.nodes=N ++trimtab.gpus_per_node=G",
            )
        if taken + outside > nodes * per_node:
            raise InputError(
                f"the run has {taken + outside} GPUs, the cluster {nodes * per_node}", where=str(composed.path)
            )
        self.cluster = _without(common.even_cluster(nodes, per_node), outside)

    def _others(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """(models on the actor's GPUs, GPUs of models that have their own)."""
        reader = self.reader
        size = {
            role: int(reader.positive_int(f"{role}.num_nodes", 1))
            * int(reader.positive_int(f"{role}.num_gpus_per_node", _PER_NODE))
            for role in ("critic", "reward", "ref")
        }
        remote = reader.has("reward.remote_url") or reader.has("train.agent_func_path")
        has = {
            "critic": reader.text("algo.advantage.estimator", "gae") == "gae",
            "reward": reader.has("reward.model_name_or_path") and not remote,
            "ref": float(reader.number("algo.kl.init_coef", 0.01)) > 0,
        }
        with_actor = reader.boolean("train.colocate_all", False)
        beside = [role for role in size if has[role] and with_actor]
        if has["ref"] and not with_actor and reader.boolean("train.colocate_actor_ref", False):
            beside.append("ref")
        apart = {role: size[role] for role in size if has[role] and role not in beside}
        if reader.boolean("train.colocate_critic_reward", False) and {"critic", "reward"} <= set(apart):
            apart["critic and reward"] = max(apart.pop("critic"), apart.pop("reward"))
        return tuple(beside), apart

    def loaded(self) -> LoadedJob:
        members = {name: self._component(name) for name in self.costs}
        staleness = int(self.reader.positive_int("train.async_queue_size", 1)) if self.is_async else 0
        workflow = Workflow(
            components=tuple(members.values()),
            batches=int(self.reader.positive_int("rollout.batch_size", 1024)),
            staleness=staleness,
            weight_sync=common.weight_sync(self.profile, "actor", "rollout"),
        )
        training: list[str] = [name for name in ("inference", "actor") if name in self.costs]
        # If a model with its own GPUs would share them, or the reverse, its time would change.
        stays = bool(self.separate) or any(role in self.on_actor_gpus for role in ("critic", "reward"))
        options: list[list[list[str]]] = []
        if self.shares or not (self.is_async or stays):
            options.append([["rollout", *training]])
        if not self.shares or not stays:
            options.append([["rollout"], training])
        rules = FrameworkRules(
            framework="OpenRLHF",
            groupings=common.groupings(options, members, common.pool_sizes(self.cluster), str(self.composed.path)),
            even_nodes=True,
        )
        assumptions = (self._mode_text(staleness), *self._apart_text(), *common.not_placed(self.profile, COMPONENTS))
        return common.loaded_job(
            self.composed, NAME, self.cluster, workflow, rules, self._settings, assumptions, self._current()
        )

    def _mode_text(self, staleness: int) -> str:
        if self.is_async:
            ahead = "1 batch" if staleness == 1 else f"{staleness} batches"
            return f"asynchronous: generation beside training, {ahead} ahead at most"
        return "no streaming: each component takes all its inputs at once"

    def _apart_text(self) -> tuple[str, ...]:
        return tuple(
            f"{role} on {gpus} GPUs of its own: not part of the plan, as there is no timer for it"
            for role, gpus in self.separate.items()
        )

    def _component(self, name: str) -> Component:
        after = {"inference": ["rollout"], "actor": ["inference"] if "inference" in self.costs else ["rollout"]}
        if name == "rollout":
            return common.component(self.costs[name], sizes=AllowedGpuCounts(self.engine_gpus))
        return common.component(self.costs[name], after=after[name], sizes=self._training_sizes())

    def _training_sizes(self) -> AllowedGpuCounts:
        """DeepSpeed splits a training batch evenly into micro-batches, and every process makes experience."""
        read = self.reader.positive_int
        parallel = common.product(self.reader, ("ds.tensor_parallel_size", "ds.ring_attn_size"))
        batch, micro = int(read("train.batch_size", 128)), int(read("train.micro_batch_size", 1))
        samples = int(read("rollout.batch_size", 1024)) * int(read("rollout.n_samples_per_prompt", 1))
        highest = min(samples // int(read("rollout.micro_batch_size", 1)), self.cluster.gpus // parallel)
        return AllowedGpuCounts(
            parallel, tuple(dp * parallel for dp in range(1, highest + 1) if batch % (micro * dp) == 0)
        )

    def _current(self) -> CurrentPlacement:
        first = 0 if self.shares else self.actor_gpus
        training = tuple(range(self.actor_gpus))
        ranks = {name: training for name in self.costs if name != "rollout"}
        ranks["rollout"] = tuple(range(first, first + self.rollout_gpus))
        return CurrentPlacement({name: ranks[name] for name in self.costs}, self.reader.where("vllm.num_engines"))

    def _settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        shared = gpus["rollout"] == gpus["actor"]
        nodes, per_node = common.node_counts(gpus["actor"], self.cluster, "actor")
        values: dict[str, Any] = {"actor.num_nodes": nodes, "actor.num_gpus_per_node": per_node}
        for role in self.on_actor_gpus:
            values |= {f"{role}.num_nodes": nodes, f"{role}.num_gpus_per_node": per_node}
        if "ref" in self.on_actor_gpus:
            values["train.colocate_actor_ref"] = True
        values["vllm.num_engines"] = len(gpus["rollout"]) // self.engine_gpus
        if not self.is_async:
            values |= {"train.colocate_all": shared, "vllm.enable_sleep": shared}
        off = [f"--{name}" for name, value in values.items() if value is False and self.reader.boolean(name, False)]
        advice = (f"leave out {', '.join(off)}",) if off else ()
        return PlanSettings(values, block_text(nested(values)), advice, tuple(_flags(values)))


def _without(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster without `gpus` GPUs, taken from its last nodes."""
    left = []
    for node in reversed(cluster.nodes):
        taken = min(gpus, node.gpus)
        gpus -= taken
        left.append(replace(node, gpus=node.gpus - taken))
    return Cluster(tuple(node for node in reversed(left) if node.gpus))


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Settings as OpenRLHF's flags; a flag that is off is left out."""
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            found += [f"--{name}"] if value else []
        else:
            found.append(f"--{name}={value}")
    return found
