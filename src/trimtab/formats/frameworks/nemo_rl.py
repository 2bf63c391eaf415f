"""NeMo RL's configs and logs: generation shares the training GPUs or has its own; training takes the rest.

On one node generation may take any number of its GPUs; on more it takes whole nodes, and so does a reward model.
Log-probs and policy training are one worker group and never separate. NeMo RL has no key for the training GPUs: they
are the cluster without the others, so a plan with idle GPUs is expressed by a smaller cluster. Teachers, and a reward
model without a cost, keep their GPUs, which are not part of the plan. Costs come from a profile.

Logs are a block of bullets under `Timing:` for every step, and TensorBoard's `timing/train/*`. Asynchronous runs log
`exposed_generation`, the part of generation that the trainer waited for; it is a wait and must never count as the cost
of generation. The blocks of validation and of worker start-up look alike and are no steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from trimtab.core.frozen import Frozen
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.flags import flag_words
from trimtab.formats.launch.launch import ConfigSource, Launch, is_unknown
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, Wait, number
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.workflow import Profile, Variant

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"
_REWARD = "env.reward_model.resources"
_ALGORITHMS = ("grpo", "ppo", "distillation")
_TEACHERS = "on_policy_distillation"
_STREAMED = "async_rl.min_groups_for_streaming_train"


# ---- logs ------------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"=+ Step (\d{1,12})/\d+ =+")
_TIMING = re.compile(r"^\W*Timing:\s*$")
_BULLET = re.compile(r"^\s*• ([^:]{1,120}): ([0-9.eE+-]+)s(?: \(([0-9.]+)%\))?\s*$")
_RESULT = re.compile(r"^\s*• (Mean Generation Length|Avg Reward): ([0-9.eE+-]+)\s*$")
_RESULTS = {"Mean Generation Length": "train/mean_gen_tokens_per_sample", "Avg Reward": "train/reward"}
_TOTAL = "Total step time"


class _Parser:
    """Blocks of bullets, each under its step header."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen = 0
        self._results: dict[str, float] = {}
        self._block: StepRecord | None = None

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text
        if self._block is not None:
            if bullet := _BULLET.match(text) if "•" in text else None:
                name, seconds = bullet[1].strip(), number(bullet[2])
                if seconds is not None and line.whole:
                    self._block.values["timing/train/" + ("total_step_time" if name == _TOTAL else name)] = seconds
                self._block.whole = self._block.whole and line.whole
                return
            # Other lines between two bullets are another process's output.
            if _STEP.search(text) or any(word in text for word in ("Timing:", "Performance Metrics:", "Results:")):
                yield from self.end()
        if found := _STEP.search(text):
            self._step = int(found[1])
        elif found := _RESULT.match(text):
            if (value := number(found[2])) is not None:
                self._results[_RESULTS[found[1]]] = value
        elif _TIMING.match(text):
            # Runs with the single controller print no step header: blocks are counted instead.
            self._seen = self._seen + 1 if self._step is None else self._step
            self._step = None
            self._block = StepRecord(self._seen, self._results)
            self._results = {}

    def end(self) -> Iterator[StepRecord]:
        block, self._block = self._block, None
        if block is not None:
            yield block


LOG = LogFramework(
    name="nemo_rl",
    supported_logs="NeMo RL: console blocks `Timing:` / `• Total step time: ...s`, TensorBoard",
    prefix="timing/train/",
    marker=re.compile(r"^\s*• Total step time: [0-9.]+s"),
    parser=_Parser,
    needles=("•".encode(), b"Timing:", b" Step ", b"Performance Metrics:", b"Results:"),
    parts={
        "generation": (("generation",), ("exposed_generation",)),
        "reward": (("reward_calculation",),),
        "logprobs": (("policy_and_reference_logprobs", "logprob_inference_prep"),),
        "teacher_logprobs": (("teacher_logprob_inference", "teacher_logprob_inference_prep"),),
        "value_inference": (("value_inference",),),
        "value_training": (("value_training", "value_training_prep"),),
        "policy": (("policy_training", "training_prep"),),
        "weight_sync": (("weight_sync",), ("prepare_for_generation/transfer_and_update_weights",)),
    },
    total="total_step_time",
    periodic=("checkpointing", "validation", "total_validation_time", "idle/validation"),
    idle=("idle/",),
    waits=(
        Wait(
            "generation",
            ("timing/train/exposed_generation",),
            "in asynchronous runs exposed_generation is only what the trainer waited for",
        ),
    ),
    lengths=("train/mean_gen_tokens_per_sample",),
    answers="train/global_valid_seqs",
    reward="train/reward",
)


# ---- configs ---------------------------------------------------------------------------------------------------------


class NemoRlGpus(Frozen):
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
    nodes = reader.count("cluster.num_nodes", 1)
    per_node = reader.count("cluster.gpus_per_node")
    teacher_nodes = _teacher_nodes(reader)
    nodes -= teacher_nodes
    if nodes < 1:
        raise reader.error(
            f"{_TEACHERS}.non_colocated_teachers",
            f"teachers take {teacher_nodes} of {nodes + teacher_nodes} nodes: none is left",
        )
    reward = 0
    if reader.has(_REWARD):
        alone = nodes + teacher_nodes == 1
        reward = reader.count(f"{_REWARD}.gpus_per_node") if alone else reader.count(f"{_REWARD}.num_nodes") * per_node
    rest = nodes * per_node - reward
    colocated = reader.boolean(f"{_COLOCATED}.enabled", True)
    generation = policy = rest
    if not colocated:
        if rest <= per_node:
            generation = reader.count(f"{_RESOURCES}.gpus_per_node")
        else:
            generation = reader.count(f"{_RESOURCES}.num_nodes") * per_node
        policy = rest - generation
    if policy < 1:
        raise reader.error(
            _RESOURCES,
            f"generation takes {generation} and a reward model {reward} of {nodes * per_node} GPUs: none is left for "
            "training",
        )
    return NemoRlGpus(nodes, per_node, teacher_nodes, reward, generation, policy, colocated)


def _teacher_nodes(reader: ConfigReader) -> int:
    """Nodes of teachers alone: a worker group for each model, or for each alias."""
    own = f"{_TEACHERS}.non_colocated_teachers"
    if not (reader.boolean(f"{_TEACHERS}.enabled", False) and reader.boolean(f"{own}.enabled", False)):
        return 0
    models = reader.mapping(f"{_TEACHERS}.teacher_model_by_agent_name")
    once = reader.boolean(f"{_TEACHERS}.deduplicate_shared_teacher_checkpoints", True)
    default = reader.count(f"{own}.default_teacher_cfg.num_nodes", 1)
    seen: set[str] = set()
    nodes = 0
    for alias, model in models.items():
        if once and str(model) in seen:
            continue
        seen.add(str(model))
        nodes += reader.count(f"{own}.teacher_overrides.{alias}.num_nodes", default)
    return nodes


def _algorithm(reader: ConfigReader) -> str:
    return next((name for name in _ALGORITHMS if reader.has(name)), "grpo")


_TRAINER = re.compile(r"(^|\.)run_(\w*_)?(grpo|ppo|distillation)\w*$")


def _own_config(launch: Launch) -> str | None:
    """The config that a program takes if none is named: the last path of `configs` in its file."""
    source = launch.find(launch.program[-1], *_ends(launch.program[-1]))
    if source is None:
        return None
    with suppress(OSError, UnicodeDecodeError):
        text = source.read_text(encoding="utf-8")
        found = re.search(r"\.join\(([^()]*(?:\([^()]*\)[^()]*)*\.yaml\"[^()]*)\)", text)
        parts = re.findall(r"\"([^\"]+)\"", found[1]) if found else []
        return str(source.parent.joinpath(*parts)) if parts else None
    return None


def _ends(path: str) -> list[str]:
    """The ends of a path, longest first: where a container has its checkout is not where it is here."""
    parts = [part for part in Path(path).parts if part not in ("/", ".", "..")]
    return ["/".join(parts[at:]) for at in range(1, len(parts))] if Path(path).is_absolute() else []


class NemoRl(FrameworkConfig):
    """A NeMo RL config."""

    NAME = "nemo_rl"
    TITLE = "NeMo RL"
    LOG = LOG
    COMPONENTS = ("generation", "reward", "logprobs", "policy")
    REQUIRED = ("generation", "policy")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("reward", "logprobs")}
    GROUPS = False

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.gpus = gpus_of(composed.reader)
        super().__init__(composed, profile)
        reader = self.reader
        self.reward_on_gpu = "reward" in self.costs and self.gpus.reward > 0
        outside = 0 if self.reward_on_gpu else self.gpus.reward
        whole = outside // self.gpus.per_node if self.gpus.nodes > 1 else 0
        self.outside = (self.gpus.teacher_nodes + whole, 0 if whole else outside)  # (nodes, GPUs of the only node)
        self.nodes, self.per_node = self.gpus.nodes - whole, self.gpus.per_node - self.outside[1]
        self.cluster = common.even_cluster(self.nodes, self.per_node)
        self.algorithm = _algorithm(reader)
        self.batches = reader.count(f"{self.algorithm}.num_prompts_per_step", 1)
        self.backend = reader.text("policy.generation.backend", "vllm")
        self.staleness, self.chunk = self._mode()
        if self.staleness and self.gpus.colocated and self.backend != "megatron":
            raise reader.error(
                f"{_COLOCATED}.enabled",
                "asynchronous training needs generation on GPUs of its own",
                f"set {_COLOCATED}.enabled=false and say how many GPUs generation has now in {_RESOURCES}",
            )

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return reader.has("policy.generation") or (reader.has("grpo") and reader.has("policy"))

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """`run_grpo.py --config FILE key=value`: without a config, the program's own."""
        if not launch.program[-1].endswith(".py") or not _TRAINER.search(launch.module):
            return None
        words = flag_words(launch.arguments)
        named = words.get("config", ())[:1]
        overrides = [word for name, found in words.items() for word in found[name == "config" :]]
        wanted = named[0] if named else _own_config(launch)
        if wanted is None or is_unknown(wanted):
            raise launch.error("it is not known which config this starts with", "give the variable: NAME=VALUE")
        found = launch.find(wanted, *_ends(wanted))
        if found is None:
            raise launch.error(f"the config {wanted} is not here", "run this in a checkout that has it")
        # Its own parser sets keys that the file does not have.
        return ConfigSource(found, [w if w[:1] in "+~" else f"++{w}" for w in overrides if w.strip()])

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        gpus = gpus_of(reader)
        by_name = {} if gpus.colocated and not gpus.reward else {"generation": gpus.generation}
        if gpus.reward:
            by_name["reward"] = gpus.reward
        keys = ("num_prompts_per_step", "num_generations_per_prompt")
        return RunFacts(gpus.policy, by_name, reader.counted(*(f"{_algorithm(reader)}.{key}" for key in keys)))

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        return "asynchronous GRPO" if reader.get("grpo.async_grpo.enabled", False) is True else None

    def _mode(self) -> tuple[int, int | None]:
        """(staleness, prompts that training takes at a time; `None`: all of a step)."""
        reader = self.reader
        if reader.has("async_rl"):  # the single controller
            sampler = reader.text("async_rl.sampler.name", "in_order")
            key = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
            ahead, chunk = reader.number(f"async_rl.sampler.{key}", 1), reader.count(_STREAMED, 32)
            return int(ahead), chunk if chunk < self.batches and self.batches % chunk == 0 else None
        section = f"{self.algorithm}.async_{'ppo' if self.algorithm == 'ppo' else 'grpo'}"
        if not reader.boolean(f"{section}.enabled", False):
            return 0, None
        return reader.count(f"{section}.max_trajectory_age_steps", 1), None

    def options(self) -> list[list[list[str]]]:
        training = self.measured("logprobs", "policy")
        reward = [["reward"]] if self.reward_on_gpu else []
        shared, apart = [["generation", *training], *reward], [["generation"], training, *reward]
        return [*([shared] if self._runs("shared") else []), *([apart] if self._runs("apart") else [])]

    def _runs(self, how: Literal["shared", "apart"]) -> bool:
        """Whether NeMo RL supports generation with training, or apart; the file's current way is supported."""
        if (how == "shared") == self.gpus.colocated:
            return True
        if how == "shared":
            return not self.staleness and self.backend != "dynamo"
        if self.backend == "megatron":
            return self.algorithm == "grpo" and not self.reader.has("async_rl")
        return self.backend == "vllm" or (self.backend == "trtllm" and self.algorithm != "ppo")

    def notes(self) -> list[str]:
        taken = f", training takes {self.chunk} prompts at a time" if self.chunk else ""
        notes = [f"no streaming: each component takes all its inputs at once (synchronous {self.algorithm})"]
        if self.staleness:
            steps = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
            notes = [f"asynchronous: generation beside training on weights up to {steps} old{taken}"]
        elif taken:
            notes = [f"synchronous{taken}"]
        if self.gpus.teacher_nodes:
            notes.append(f"teachers keep their {self.gpus.teacher_nodes} nodes: not part of the plan")
        if self.gpus.reward and not self.reward_on_gpu:
            kept = f"keeps its {self.gpus.reward} GPUs: not part of the plan"
            notes.append(f"the reward model, which has no cost here, {kept}")
        return notes

    def granularity(self, name: str) -> int | None:
        return self.chunk if name != "generation" else None

    def on_cpu(self, name: str) -> bool:
        return name == "reward" and not self.reward_on_gpu

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        keys: tuple[str, ...]
        if name == "generation" and self.backend != "megatron":
            section = f"policy.generation.{'vllm' if self.backend == 'dynamo' else self.backend}_cfg"
            keys = ("tensor_parallel_size", "pipeline_parallel_size", "tp_size", "pp_size")
            return Variant(multiple_of=reader.product(section, *keys))
        dtensor = ("tensor_parallel_size", "context_parallel_size")
        if name == "reward":
            return Variant(multiple_of=reader.product("env.reward_model.dtensor_cfg", *dtensor))
        if reader.boolean("policy.megatron_cfg.enabled", False):
            keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            parallel = reader.product("policy.megatron_cfg", *keys)
        else:
            parallel = reader.product("policy.dtensor_cfg", *dtensor)
        batch = None if name == "generation" else reader.optional_count("policy.train_global_batch_size")
        counts = None if batch is None else common.divisors_of_batch(batch, parallel, self.cluster.gpus)
        return Variant(multiple_of=parallel, gpus=counts)

    def pool_sizes(self) -> list[int]:
        """A part of the only node, or whole nodes; on several nodes at least one."""
        if self.nodes == 1:
            return list(range(1, self.per_node + 1))
        return [self.per_node * count for count in range(1, self.nodes + 1)]

    def current(self) -> CurrentPlacement:
        gpus = self.gpus
        first = 0 if gpus.colocated else gpus.generation
        training = tuple(range(first, first + gpus.policy))
        ranks = {"generation": tuple(range(gpus.generation)), "logprobs": training, "policy": training}
        if self.reward_on_gpu:
            ranks["reward"] = tuple(range(self.cluster.gpus - gpus.reward, self.cluster.gpus))
        return CurrentPlacement(
            ranks={name: ranks[name] for name in self.costs if name in ranks}, where=self.reader.where(_COLOCATED)
        )

    def mode_facts(self) -> Mapping[str, Any]:
        if self.staleness or self.algorithm != "grpo" or self.backend != "vllm" or self.reader.has("async_rl"):
            return {}
        size = self.nodes // 2 if self.nodes > 1 else self.per_node // 2
        unit = "num_nodes" if self.nodes > 1 else "gpus_per_node"
        place = (f"++{_COLOCATED}.enabled=false", f"++{_RESOURCES}.{unit}={size}")
        return {"apart": (place if self.gpus.colocated else ()) if size else None}

    def settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        counts = {name: common.node_counts(ranks, self.cluster, name) for name, ranks in gpus.items()}
        shared = gpus["generation"] == gpus["policy"]
        groups = [counts["policy"], *([] if shared else [counts["generation"]])]
        if "reward" in counts:
            groups.append(counts["reward"])
        # On the only node the used GPUs; teachers' nodes keep their size.
        whole = self.nodes > 1 or self.outside[0]
        per_node = self.gpus.per_node if whole else self.outside[1] + sum(g for _, g in groups)
        values: dict[str, Any] = {
            "cluster.num_nodes": self.outside[0] + (1 if self.nodes == 1 else sum(nodes for nodes, _ in groups)),
            "cluster.gpus_per_node": per_node,
            f"{_COLOCATED}.enabled": shared,
        }
        if not shared:
            one_node = self.nodes == 1 or counts["policy"][0] + counts["generation"][0] == 1
            values[f"{_RESOURCES}.gpus_per_node"] = counts["generation"][1]
            values[f"{_RESOURCES}.num_nodes"] = 1 if one_node else counts["generation"][0]
        if "reward" in counts:
            values[f"{_REWARD}.num_nodes"], values[f"{_REWARD}.gpus_per_node"] = counts["reward"]
        return PlanSettings(values, block_text(nested(values)))
