"""OpenRLHF's flags as YAML: engines share the training GPUs (`colocate_all`) or have GPUs of their own.

OpenRLHF takes flags such as `--actor.num_nodes`; the file has the same names as nested keys, or they are given as
overrides. Making experience and training are one set of GPUs, with the reference model beside the actor. A critic or
a reward model on GPUs of its own is refused: nothing tells how long it takes. Costs come from a profile. In
asynchronous runs generation runs beside the training and is always apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.formats.dialect import Loaded, Settings
from trimtab.formats.framework import (
    Sizes,
    check_expressible,
    component,
    costs,
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

NAME = "openrlhf"

COMPONENTS = ("rollout", "inference", "actor")

_PER_NODE = 8  # OpenRLHF's own number where flags do not say
_APART = "a plan for a critic or a reward model on GPUs of its own cannot be made: no timer tells what it takes"


def matches(reader: Reader) -> bool:
    """Whether these are OpenRLHF's flags."""
    return reader.has("vllm.num_engines")


def read(composed: Composed, profile: Profile | None) -> Loaded:
    """OpenRLHF's flags and a profile as a job."""
    return _Config(composed, profile).loaded()


class _Config:
    """One set of flags, while it is being read."""

    def __init__(self, composed: Composed, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = reader = composed.reader
        self.profile = profile
        self.costs = costs(profile, COMPONENTS, ("rollout", "actor"), "OpenRLHF", str(composed.path))
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
        self._refuse_others_apart()
        taken = self.actor_gpus if self.shares else self.actor_gpus + self.rollout_gpus
        nodes, per_node = (actor_nodes, actor_per_node) if self.shares else (1, taken)
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            nodes = int(reader.positive_int("trimtab.nodes", 1))
            per_node = int(reader.positive_int("trimtab.gpus_per_node"))
        elif not self.shares and taken > _PER_NODE:
            raise InputError(
                f"the run has {taken} GPUs, and its flags do not say on which nodes",
                where=str(composed.path),
                hint="add ++trimtab.nodes=N ++trimtab.gpus_per_node=G",
            )
        self.nodes, self.per_node = nodes, per_node
        self.cluster = even_cluster(nodes, per_node)
        if taken > self.cluster.gpus:
            raise InputError(f"the run has {taken} GPUs, the cluster {self.cluster.gpus}", where=str(composed.path))

    def _refuse_others_apart(self) -> None:
        reader = self.reader
        if self.shares or reader.boolean("train.colocate_all", False):
            return
        has_critic = bool(reader.get("critic.model_name_or_path", None))
        has_reward = bool(reader.get("reward.model_name_or_path", None)) and not reader.get("reward.remote_url", None)
        has_ref = float(reader.number("algo.kl.init_coef", 0.0)) > 0
        if has_critic or has_reward or (has_ref and not reader.boolean("train.colocate_actor_ref", False)):
            raise InputError(
                _APART if has_critic or has_reward else _APART.replace("critic or a reward", "reference"),
                where=str(self.composed.path),
                hint="share GPUs with train.colocate_all or train.colocate_actor_ref, or use a reward of remote_url",
            )

    def loaded(self) -> Loaded:
        members = {name: self._component(name) for name in self.costs}
        staleness = int(self.reader.positive_int("train.async_queue_size", 1)) if self.is_async else 0
        workflow = Workflow(
            components=tuple(members.values()),
            batches=int(self.reader.positive_int("rollout.batch_size", 1024)),
            staleness=staleness,
            weight_sync=weight_sync(self.profile, "actor", "rollout"),
        )
        check_workflow(workflow)
        training: list[str] = [name for name in ("inference", "actor") if name in self.costs]
        options: list[list[list[str]]] = [[["rollout"], training]]
        if not self.is_async:
            options.insert(0, [["rollout", *training]])
        sizes = [self.per_node * count for count in range(1, self.nodes + 1)]
        if self.nodes == 1:
            sizes = list(range(1, self.per_node + 1))
        rules = Rules(
            framework="OpenRLHF",
            groupings=groupings(options, members, sizes, str(self.composed.path)),
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
            ahead = "1 batch" if staleness == 1 else f"{staleness} batches"
            return f"asynchronous: generation beside training, {ahead} ahead at most"
        return "no streaming: each component takes all its inputs at once"

    def _component(self, name: str) -> Component:
        after = {"inference": ["rollout"], "actor": ["inference"] if "inference" in self.costs else ["rollout"]}
        if name == "rollout":
            return component(self.costs[name], sizes=Sizes(self.engine_gpus))
        parallel = product(self.reader, ("ds.tensor_parallel_size", "ds.ring_attn_size"))
        return component(self.costs[name], after=after[name], sizes=Sizes(parallel))

    def _current(self) -> CurrentPlacement:
        first = 0 if self.shares else self.actor_gpus
        training = tuple(range(self.actor_gpus))
        ranks = {name: training for name in self.costs if name != "rollout"}
        ranks["rollout"] = tuple(range(first, first + self.rollout_gpus))
        return CurrentPlacement({name: ranks[name] for name in self.costs}, self.reader.where("vllm.num_engines"))

    def _settings(self, plan: Plan, rules: Rules) -> Settings:
        check_expressible(plan, rules)
        gpus = {name: group.gpus for group in plan.groups for name in group.components}
        shared = gpus["rollout"] == gpus["actor"]
        nodes, per_node = node_counts(gpus["actor"], self.cluster, "actor")
        values: dict[str, Any] = {"actor.num_nodes": nodes, "actor.num_gpus_per_node": per_node}
        if float(self.reader.number("algo.kl.init_coef", 0.0)) > 0:
            values |= {"ref.num_nodes": nodes, "ref.num_gpus_per_node": per_node}
            values["train.colocate_actor_ref"] = True
        values["vllm.num_engines"] = len(gpus["rollout"]) // self.engine_gpus
        if not self.is_async:
            values |= {"train.colocate_all": shared, "vllm.enable_sleep": shared}
        off = [f"--{name}" for name, value in values.items() if value is False and self.reader.boolean(name, False)]
        said = (f"leave out {', '.join(off)}",) if off else ()
        return Settings(values, block_text(nested(values)), said, tuple(_flags(values)))


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Settings as OpenRLHF takes them; one that is off has to be left out."""
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            found += [f"--{name}"] if value else []
        else:
            found.append(f"--{name}={value}")
    return found
