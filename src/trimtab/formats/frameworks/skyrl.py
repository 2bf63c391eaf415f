"""SkyRL's config and logs: engines share the training GPUs (`colocate_all`) or have their own, also ahead of training.

SkyRL takes `key=value` words; a file has them as nested keys. Its first package, `skyrl_train`, has other names for the
engines' keys, and 4 GPUs where the present one has 1. Policy and critic train one after the other; log-probs, values
and the reference come before. Apart from the engines, the critic has GPUs of its own, and the reference too without
`colocate_policy_ref`: both keep them. `trimtab.script` is `main_async` for the example that generates one step ahead;
with `trainer.fully_async` generation never pauses. Costs come from a profile.

Logs are lines `Finished: 'generate', time cost: 12.34s`, and TensorBoard's `timing/*`. A step ends with the timer of
that name. Fully asynchronous runs have no timer of generation, only one of the wait for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from trimtab.formats.frameworks import common
from trimtab.formats.frameworks import trainer_and_engines as pools
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.flags import typed_word
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, number
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import Plan
from trimtab.model.workflow import Profile, Variant

_PLACED = "trainer.placement"
_ENGINES = "generator.inference_engine"
_SCRIPT = "trimtab.script"
_KEYS = re.compile(r"(?:trainer\.(?:placement|policy|fully_async|algorithm)|generator\.\w+)\b.*=")
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


# ---- logs ------------------------------------------------------------------------------------------------------------

_FINISHED = re.compile(r"Finished: '(\w{1,80})', time cost: ([0-9.]+)s")


class _Parser:
    """Timers in the order in which they end; that of the step closes a record."""

    def __init__(self) -> None:
        self._step = 0
        self._values: dict[str, float] = {}

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        found = _FINISHED.search(line.text)
        seconds = number(found[2]) if found else None
        if found is None or seconds is None:
            return
        name = f"timing/{found[1]}"
        self._values[name] = self._values.get(name, 0.0) + seconds
        if found[1] == LOG.total:
            self._step += 1
            values, self._values = self._values, {}
            yield StepRecord(self._step, values, line.whole)

    def end(self) -> tuple[StepRecord, ...]:
        return ()


LOG = LogFramework(
    name="skyrl",
    supported_logs="SkyRL: console lines `Finished: 'generate', time cost: ...s`, TensorBoard",
    prefix="timing/",
    marker=re.compile(r"Finished: '(?:generate|sync_weights|fwd_logprobs_values_reward)', time cost: [0-9.]+s"),
    parser=_Parser,
    needles=(b"Finished: ",),
    parts={
        "rollout": (("generate",),),
        "inference": (("fwd_logprobs_values_reward",),),
        "policy": (
            ("train_critic_and_policy", "compute_advantages_and_returns", "convert_to_training_input"),
            ("policy_train",),
        ),
        "weight_sync": (("sync_weights",),),
    },
    total="step",
    periodic=("eval", "save_checkpoints", "save_hf_model", "cleanup_old_checkpoints", "update_ref_with_policy"),
    idle=("wait_for_generation_buffer",),
    lengths=("generate/avg_num_tokens",),
    reward="reward/avg_raw_reward",
    timers_exclude_waits=True,
    other_timers=("postprocess_generator_output", "apply_reward_kl_penalty"),
)


# ---- configs ---------------------------------------------------------------------------------------------------------


class SkyRl(pools.TrainerAndEngines):
    """A SkyRL config."""

    NAME = "skyrl"
    TITLE = "SkyRL"
    LOG = LOG
    COMPONENTS = ("rollout", "inference", "policy")
    REQUIRED = ("rollout", "policy")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"policy": ("inference",)}

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.fully_async = reader.boolean("trainer.fully_async.enabled", False)
        self.one_ahead = not self.fully_async and _script(reader) == "main_async"
        self.shared = reader.boolean(f"{_PLACED}.colocate_all", True)
        if self.shared and (self.fully_async or self.one_ahead):
            raise reader.error(
                f"{_PLACED}.colocate_all",
                "asynchronous training needs generation on GPUs of its own",
                f"set {_PLACED}.colocate_all=false",
            )
        nodes, own = _pool(reader, "policy")
        self.per_node = own if nodes > 1 or self.shared else pools.PER_NODE
        self.trainer_gpus, self.rollout_gpus = nodes * own, _engine_gpus(reader)
        self.engine = _product(reader, _SIZES)
        self.with_policy = self._beside_policy()
        if self.shared and self.trainer_gpus != self.rollout_gpus:
            raise reader.error(
                f"{_PLACED}.policy_num_gpus_per_node",
                f"the policy has {self.trainer_gpus} GPUs and the engines {self.rollout_gpus}: with colocate_all they "
                "are the same",
                f"set {_name(reader, 'num_engines')}={max(1, self.trainer_gpus // self.engine)}, or colocate_all=false",
            )
        self.cluster = self.nodes()
        batch = "policy_mini_batch_size" if self.fully_async else "train_batch_size"
        self.batches = reader.count(f"trainer.{batch}", 256 if self.fully_async else 1024)
        self.staleness = int(self.one_ahead)
        if self.fully_async:
            self.staleness = int(reader.number("trainer.fully_async.max_staleness_steps", 4))

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        engines = ("generator.inference_engine", "generator.num_inference_engines", "generator.n_samples_per_prompt")
        return reader.has(_PLACED) or (reader.has("trainer") and any(reader.has(key) for key in engines))

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        first = launch.module.split(".")[0]
        words = [word.lstrip("+") for word in launch.arguments if "=" in word]
        other = launch.runs("serve", "main_sft", "api")
        if other or not (first in ("skyrl", "skyrl_train") or any(_KEYS.match(word) for word in words)):
            return None
        config: dict[str, Any] = {}
        for word in words:
            key, _, value = word.partition("=")
            config[key] = typed_word(value)
        config[_SCRIPT] = launch.module.rpartition(".")[2]
        if first == "skyrl_train":
            config["trimtab.package"] = first
        return ConfigSource(nested({key: value for key, value in config.items() if _dotted(key)}))

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        outside = any(reader.has(f"{_ENGINES}.{key}") for key in ("external_proxy_url", "external_server_urls"))
        if outside or reader.get(_name(reader, "run_engines_locally")) is False:
            return "training beside engines that were started elsewhere"
        if reader.has("trainer.override_entrypoint"):
            return f"a run of {reader.get('trainer.override_entrypoint')}, which places its models itself"
        if reader.get("trainer.fully_async.simulate_training") is True:
            return "a simulation of training, which has no models"
        return "generation without training" if _script(reader).endswith("generate") else None

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        nodes, gpus = _pool(reader, "policy")
        answers = reader.counted("trainer.train_batch_size", "generator.n_samples_per_prompt")
        return RunFacts(None, {"rollout": _engine_gpus(reader), "trainer": nodes * gpus}, answers)

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        counted = reader.counted
        shared = reader.boolean(f"{_PLACED}.colocate_all", True)
        ahead = reader.get("trainer.fully_async.enabled") is True
        rollout, (nodes, own) = _engine_gpus(reader), _pool(reader, "policy")
        megatron = reader.get("trainer.strategy") == "megatron"
        prompt = counted("trainer.max_prompt_length") or 512
        answer = counted("generator.sampling_params.max_generate_length") or 1024
        section = "trainer.policy.megatron_config"
        sizes = dict(zip(("tp", "pp", "cp", "ep"), (*_MEGATRON, "expert_model_parallel_size"), strict=True))
        estimator = reader.get("trainer.algorithm.advantage_estimator", "grpo")
        kl = (
            reader.get("trainer.algorithm.use_kl_loss", True),
            reader.get("trainer.algorithm.use_kl_in_reward", False),
        )
        without_reference = estimator == "grpo" and True not in kl
        answers = counted("generator.n_samples_per_prompt") or 5
        mini = counted("trainer.policy_mini_batch_size") or 256
        return {
            "framework": "skyrl",
            "model": reader.get("trainer.policy.model.path"),
            "gpus": rollout if shared else rollout + nodes * own,
            "rollout_gpus": None if shared else rollout,
            "mode": "async" if ahead or _script(reader) == "main_async" else None if shared else "separate",
            "staleness": reader.get("trainer.fully_async.max_staleness_steps", 4) if ahead else None,
            "partial": ahead or None,
            "old_log_probs": False if ahead else None,
            "algorithm": "gspo" if without_reference else "ppo" if estimator == "gae" else estimator,  # the same passes
            "samples": (mini if ahead else counted("trainer.train_batch_size") or 1024) * answers,
            "train_batch": mini * answers,
            "max_tokens": max(prompt, counted("generator.max_input_length") or 0) + answer,
            "turns": counted("generator.max_turns"),
            "rollout": {
                "tp": counted(_name(reader, "tensor_parallel_size")) or _default(reader, "tensor_parallel_size"),
                "memory": reader.get(_name(reader, "gpu_memory_utilization")),
                "sequences": counted(_name(reader, "max_num_seqs")),
                "backend": reader.get(_name(reader, "backend")),
            },
            "train": {
                **(
                    {name: counted(f"{section}.{key}") for name, key in sizes.items()}
                    if megatron
                    else {"cp": counted("trainer.policy.sequence_parallel_size")}
                ),
                "lora": counted("trainer.policy.model.lora.rank"),
                "backend": "megatron" if megatron else "fsdp",
            },
        }

    def _beside_policy(self) -> tuple[str, ...]:
        """The models on the policy's GPUs; sets how many GPUs those have that are apart."""
        reader = self.reader
        algorithm = "trainer.algorithm"
        used = {
            "ref": reader.boolean(f"{algorithm}.use_kl_loss", True) or reader.get(f"{algorithm}.use_kl_in_reward"),
            "critic": reader.has("trainer.critic.model.path"),
        }
        joined = {"ref": reader.boolean(f"{_PLACED}.colocate_policy_ref", True), "critic": False}
        beside, self.separate = [], {}
        for name in (name for name, is_used in used.items() if is_used):
            nodes, gpus = _pool(reader, name)
            if not self.shared and not joined[name]:
                self.separate[name] = nodes * gpus
                continue
            beside.append(name)
            if nodes * gpus != self.trainer_gpus:
                raise reader.error(
                    f"{_PLACED}.{name}_num_gpus_per_node",
                    f"the {name} has {nodes * gpus} GPUs and the policy {self.trainer_gpus}: where they are together "
                    "they are the same",
                    f"set {_PLACED}.{name}_num_nodes and {name}_num_gpus_per_node like the policy's",
                )
        self.outside = sum(self.separate.values())
        return tuple(beside)

    def can_share(self) -> bool:
        # If a model with its own GPUs would share them, or the reverse, its time would change.
        stays = self.fully_async or self.one_ahead or self.separate
        return self.shared or not (stays or self.reader.get(f"{_ENGINES}.weight_sync_backend") == "delta")

    def can_separate(self) -> bool:
        return not self.shared or "critic" not in self.with_policy

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        if name == "rollout":
            return Variant(multiple_of=self.engine)
        if reader.text("trainer.strategy", "fsdp") == "megatron":
            section = "trainer.policy.megatron_config"
            tensor, pipeline, context = (reader.count(f"{section}.{key}", 1) for key in _MEGATRON)
            split = tensor * pipeline * context
            experts = reader.count(f"{section}.expert_model_parallel_size", 1)
            within = reader.count(f"{section}.expert_tensor_parallel_size", tensor) if experts > 1 else 1
            parallel = math.lcm(split, experts * within * pipeline)
        else:
            split = reader.count("trainer.policy.sequence_parallel_size", 1)
            whole = reader.get("trainer.policy.fsdp_config.fsdp_size", -1)
            parallel = math.lcm(split, whole) if isinstance(whole, int) and whole > 0 else split
        micro = reader.count("trainer.micro_train_batch_size_per_gpu", 1)
        answers = reader.count("generator.n_samples_per_prompt", 5)
        minis = [reader.count("trainer.policy_mini_batch_size", 256)]
        minis += [reader.count("trainer.critic_mini_batch_size", 256)] if "critic" in self.with_policy else []

        def runs(ranks: int) -> bool:
            data_parallel = ranks * parallel // split
            if data_parallel > self.batches * answers:
                return False
            own = ranks * parallel == self.trainer_gpus  # SkyRL rounds down: what does not divide is padded
            return all(
                (own or mini * answers % data_parallel == 0)
                and (each := mini * answers // data_parallel) > 0
                and each % micro == 0
                and self.batches * answers // data_parallel % each == 0
                for mini in minis
            )

        return self.trainer_sizes(parallel, runs)

    def notes(self) -> list[str]:
        notes = ["no streaming: each component takes all its inputs at once"]
        if self.one_ahead or self.fully_async:
            steps = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
            notes = [f"asynchronous: generation beside training on weights up to {steps} old"]
        return [
            *notes,
            *(
                f"{role} on {gpus} GPUs of its own: not part of the plan, as there is no timer for it"
                for role, gpus in self.separate.items()
            ),
        ]

    def mode_facts(self) -> Mapping[str, Any]:
        halves = None if self.one_ahead or self.fully_async or self.separate else self.halves(self.engine)
        if halves is None or not halves[1] or "critic" in self.with_policy or _is_first(self.reader):
            return {}
        nodes, per_node = self.shape(halves[0])
        apart = [f"{_PLACED}.colocate_all=false", f"{_name(self.reader, 'num_engines')}={halves[1] // self.engine}"]
        for role in ("policy", *self.with_policy):
            apart += [f"{_PLACED}.{role}_num_nodes={nodes}", f"{_PLACED}.{role}_num_gpus_per_node={per_node}"]
        return {
            "apart": (*(f"++{word}" for word in apart), *self.cluster_overrides()),
            "batches": self.batches,
            "workers": min(5 * self.batches, max(768, self.batches)),
        }

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return (f"{key}={common.value_text(value)}",)

    def settings(self, plan: Plan) -> PlanSettings:
        shared = plan.group_of("policy") is plan.group_of("rollout")
        nodes, per_node = self.shape(len(plan.group_of("policy").gpus))
        values: dict[str, Any] = {f"{_PLACED}.colocate_all": shared}
        for role in ("policy", *self.with_policy):
            values |= {f"{_PLACED}.{role}_num_nodes": nodes, f"{_PLACED}.{role}_num_gpus_per_node": per_node}
        values[_name(self.reader, "num_engines")] = len(plan.group_of("rollout").gpus) // self.engine
        # SkyRL refuses a plus before a key.
        words = tuple(f"{key}={str(value).lower()}" for key, value in values.items())
        return PlanSettings(values, block_text(nested(values)), (), words)


def _dotted(key: str) -> bool:
    return all(key.split("."))


def _script(reader: ConfigReader) -> str:
    return reader.text(_SCRIPT, "main_base").removesuffix(".py")


def _is_first(reader: ConfigReader) -> bool:
    """Whether the config is of SkyRL's first package, whose names and defaults were others."""
    keys = ("trimtab.package", "generator.num_inference_engines", "generator.inference_engine_tensor_parallel_size")
    return any(reader.has(key) for key in keys)


def _name(reader: ConfigReader, name: str) -> str:
    """The key of a setting of the engines."""
    if not _is_first(reader):
        return f"{_ENGINES}.{name}"
    own = {"num_engines": "num_inference_engines", **{size: f"inference_engine_{size}" for size in _SIZES}}
    return f"generator.{own.get(name, name)}"


def _default(reader: ConfigReader, name: str) -> int:
    return 4 if _is_first(reader) and name in ("tensor_parallel_size", "gpus_per_node") else 1


def _product(reader: ConfigReader, names: tuple[str, ...]) -> int:
    return math.prod(reader.count(_name(reader, name), _default(reader, name)) for name in names)


def _engine_gpus(reader: ConfigReader) -> int:
    return _product(reader, ("num_engines", *_SIZES))


def _pool(reader: ConfigReader, role: str) -> tuple[int, int]:
    per_node = reader.count(f"{_PLACED}.{role}_num_gpus_per_node", _default(reader, "gpus_per_node"))
    return reader.count(f"{_PLACED}.{role}_num_nodes", 1), per_node
