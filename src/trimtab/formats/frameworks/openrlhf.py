"""OpenRLHF's flags as YAML, and its logs: engines share the training GPUs (`colocate_all`) or have their own.

OpenRLHF takes flags such as `--actor.num_nodes`; the file has the same names as nested keys, or they are overrides;
defaults are its launcher's. Making experience and training share their GPUs. There is no timer for a critic, a reward
model or a reference on GPUs of its own: it keeps them, and they are not part of the plan. Costs come from a profile. In
asynchronous runs generation runs beside training, always on GPUs of its own.

Logs are a line `Global step N: {...}` for every step, and TensorBoard's `train/timing/*`. In a synchronous run the
total is the sum of the timers. Otherwise generation ran beside training; each timer is still the component's own work,
except the weight sync, which then waits for a generated batch: it is marked and must never count as a cost. Checkpoints
and evaluation are in no timer and no total.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.flags import flags
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LineParser, LogFramework, LogLine, StepRecord, Wait
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.workflow import Profile, Variant

_PER_NODE = 8  # OpenRLHF's default

_STEP = re.compile(r"\bGlobal step (\d{1,12}): \{")
_TIMING = "train/timing/"
_BESIDE = "train/generation_beside_training"
_QUOTE = "'"
_OFF = 0.01  # relative difference that is more than rounding


def _record(line: LogLine) -> StepRecord | None:
    found = _STEP.search(line.text)
    if found is None:
        return None
    items = line.text[found.end() :].rstrip()
    values = LOG.metrics(items.removesuffix("}"), ", '", "': ", lambda name: f"train/{name.lstrip(_QUOTE)}")
    total = values.get(_TIMING + LOG.total, 0.0)
    parts = sum(values.get(_TIMING + timer, 0.0) for ((timer,),) in LOG.parts.values())
    if total > 0 and abs(parts - total) > _OFF * total:
        values[_BESIDE] = 1.0
    return StepRecord(int(found[1]), values, line.whole and items.endswith("}"))


LOG = LogFramework(
    name="openrlhf",
    supported_logs="OpenRLHF: console lines `Global step 1: {'timing/generation': ...}`, TensorBoard",
    prefix=_TIMING,
    marker=re.compile(r"\bGlobal step \d{1,12}: \{.*'timing/step_total': "),
    parser=partial(LineParser, _record),
    needles=(b"Global step ",),
    parts={
        "rollout": (("generation",),),
        "inference": (("make_experience",),),
        "actor": (("ppo_train",),),
        "weight_sync": (("broadcast",),),
    },
    total="step_total",
    waits=(
        Wait(
            "weight_sync", (_BESIDE,), "in asynchronous runs it contains waiting for the batch that is being generated"
        ),
    ),
    lengths=("train/response_length",),
    reward="train/reward",
    timers_exclude_waits=True,
    line_start=_STEP,
)


class OpenRlhf(FrameworkConfig):
    """The flags of an OpenRLHF run."""

    NAME = "openrlhf"
    TITLE = "OpenRLHF"
    LOG = LOG
    COMPONENTS = ("rollout", "inference", "actor")
    REQUIRED = ("rollout", "actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor": ("inference",)}

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.is_async = reader.boolean("train.async_enable", False)
        self.shares = reader.boolean("train.colocate_all", False) and not self.is_async
        self.engine_gpus = reader.count("vllm.tensor_parallel_size", 1)
        actor_nodes = reader.count("actor.num_nodes", 1)
        actor_per_node = reader.count("actor.num_gpus_per_node", _PER_NODE)
        self.actor_gpus = actor_nodes * actor_per_node
        self.rollout_gpus = reader.count("vllm.num_engines") * self.engine_gpus
        if self.shares and self.rollout_gpus != self.actor_gpus:
            raise reader.error(
                "vllm.num_engines",
                f"engines have {self.rollout_gpus} GPUs and the actor {self.actor_gpus}: with train.colocate_all "
                "they are the same",
            )
        self.on_actor_gpus, self.separate = self._others()
        taken = self.actor_gpus if self.shares else self.actor_gpus + self.rollout_gpus
        outside = sum(self.separate.values())
        nodes, per_node = (actor_nodes, actor_per_node) if self.shares else (1, taken + outside)
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            nodes, per_node = reader.count("trimtab.nodes", 1), reader.count("trimtab.gpus_per_node")
        elif not self.shares and taken + outside > _PER_NODE:
            raise InputError(
                f"the run has {taken + outside} GPUs, and its flags do not say on which nodes",
                where=self.path,
                hint="add ++trimtab.nodes=N ++trimtab.gpus_per_node=G",
            )
        if taken + outside > nodes * per_node:
            raise InputError(f"the run has {taken + outside} GPUs, the cluster {nodes * per_node}", where=self.path)
        self.cluster = common.without(common.even_cluster(nodes, per_node), outside)
        self.batches = reader.count("rollout.batch_size", 1024)
        self.staleness = reader.count("train.async_queue_size", 1) if self.is_async else 0

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return reader.has("vllm.num_engines")

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        if not launch.runs("openrlhf.cli.train_ppo_ray"):
            return None
        old = next(
            (word for word in launch.arguments if re.match(r"--(actor_num_nodes|vllm_num_engines)\b", word)), None
        )
        if old is not None:
            raise launch.error(
                f"{old} is a flag of OpenRLHF before 0.10", "name it as today, for example --vllm.num_engines"
            )
        nodes = launch.environment.get("SLURM_NNODES", "")
        if not nodes.isdigit():
            return ConfigSource(nested(flags(launch.arguments)))
        cluster = (f"++trimtab.nodes={nodes}", f"++trimtab.gpus_per_node={_PER_NODE}")
        return ConfigSource(nested(flags(launch.arguments)), cluster, (f"{nodes} nodes of {_PER_NODE} GPUs",))

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        trainer = reader.count("actor.num_nodes") * reader.count("actor.num_gpus_per_node")
        rollout = reader.count("vllm.num_engines") * reader.count("vllm.tensor_parallel_size", 1)
        answers = reader.counted("rollout.batch_size", "rollout.n_samples_per_prompt")
        return RunFacts(by_name={"rollout": rollout, "trainer": trainer}, answers_per_step=answers)

    def _others(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """(models on the actor's GPUs, GPUs of models that have their own)."""
        reader = self.reader
        size = {
            role: reader.count(f"{role}.num_nodes", 1) * reader.count(f"{role}.num_gpus_per_node", _PER_NODE)
            for role in ("critic", "reward", "ref")
        }
        remote = reader.has("reward.remote_url") or reader.has("train.agent_func_path")
        has = {
            "critic": reader.text("algo.advantage.estimator", "gae") == "gae",
            "reward": reader.has("reward.model_name_or_path") and not remote,
            "ref": reader.number("algo.kl.init_coef", 0.01) > 0,
        }
        with_actor = reader.boolean("train.colocate_all", False)
        beside = [role for role in size if has[role] and with_actor]
        if has["ref"] and not with_actor and reader.boolean("train.colocate_actor_ref", False):
            beside.append("ref")
        apart = {role: size[role] for role in size if has[role] and role not in beside}
        if reader.boolean("train.colocate_critic_reward", False) and {"critic", "reward"} <= set(apart):
            apart["critic and reward"] = max(apart.pop("critic"), apart.pop("reward"))
        return tuple(beside), apart

    def options(self) -> list[list[list[str]]]:
        training = self.measured("inference", "actor")
        # If a model with its own GPUs would share them, or the reverse, its time would change.
        stays = bool(self.separate) or any(role in self.on_actor_gpus for role in ("critic", "reward"))
        options: list[list[list[str]]] = []
        if self.shares or not (self.is_async or stays):
            options.append([["rollout", *training]])
        if not self.shares or not stays:
            options.append([["rollout"], training])
        return options

    def notes(self) -> list[str]:
        mode = "no streaming: each component takes all its inputs at once"
        if self.is_async:
            ahead = "1 batch" if self.staleness == 1 else f"{self.staleness} batches"
            mode = f"asynchronous: generation beside training, {ahead} ahead at most"
        return [
            mode,
            *(
                f"{role} on {gpus} GPUs of its own: not part of the plan, as there is no timer for it"
                for role, gpus in self.separate.items()
            ),
        ]

    def sizes(self, name: str) -> Variant:
        """DeepSpeed splits a training batch evenly into micro-batches, and every process makes experience."""
        if name == "rollout":
            return Variant(multiple_of=self.engine_gpus)
        count = self.reader.count
        parallel = self.reader.product("ds", "tensor_parallel_size", "ring_attn_size")
        batch, micro = count("train.batch_size", 128), count("train.micro_batch_size", 1)
        samples = self.batches * count("rollout.n_samples_per_prompt", 1)
        highest = min(samples // count("rollout.micro_batch_size", 1), self.cluster.gpus // parallel)
        counts = tuple(dp * parallel for dp in range(1, highest + 1) if batch % (micro * dp) == 0)
        return Variant(multiple_of=parallel, gpus=counts)

    def current(self) -> CurrentPlacement:
        first = 0 if self.shares else self.actor_gpus
        training = tuple(range(self.actor_gpus))
        ranks = {name: training for name in self.costs if name != "rollout"}
        ranks["rollout"] = tuple(range(first, first + self.rollout_gpus))
        return CurrentPlacement({name: ranks[name] for name in self.costs}, self.reader.where("vllm.num_engines"))

    def mode_facts(self) -> Mapping[str, Any]:
        nodes = len(self.cluster.nodes)
        per_node = self.cluster.nodes[0].gpus
        half = (nodes // 2, per_node) if nodes > 1 else (1, per_node // 2)
        engines = (self.cluster.gpus - half[0] * half[1]) // self.engine_gpus
        if self.is_async or self.separate or not half[1] or not engines:
            return {}
        place = [f"++vllm.num_engines={engines}"]
        for role in ("actor", *self.on_actor_gpus):
            place += [f"++{role}.num_nodes={half[0]}", f"++{role}.num_gpus_per_node={half[1]}"]
        return {"apart": (*place, *self.cluster_overrides())}

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return (f"--{key}" if value is True else f"--{key}={value}",)

    def settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        shared = gpus["rollout"] == gpus["actor"]
        nodes, per_node = self.node_counts(plan, "actor")
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
        # A flag that is off is left out.
        on = {name: value for name, value in values.items() if value is not False}
        flags = (f"--{name}" if value is True else f"--{name}={value}" for name, value in on.items())
        return PlanSettings(values, block_text(nested(values)), advice, tuple(flags))
