"""slime's flags and logs: `train.py` shares GPUs (`--colocate`) or not, `train_async.py` generates one step ahead.

slime takes Megatron's flags and its own; a file has them under argparse's names (`actor_num_nodes`), and
`trimtab.script` says which of the two scripts is started. Actor, reference, critic and log-probs are one group of
processes and never separate. Its launcher takes GPUs in a row: the actor's first, then the engines'. Costs come from a
profile.

Logs are lines `perf 3: {'perf/rollout_time': ...}`, one of the rollout and one of the trainer for each step, and
TensorBoard. `train_wait` is what the trainer waited for, never a cost. A fully asynchronous rollout function generates
on while the trainer works: its `rollout_time` is a wait.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from trimtab.formats import yaml_text
from trimtab.formats.frameworks import trainer_and_engines as pools
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.flags import flags
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LineParser, LogFramework, LogLine, StepRecord, Wait
from trimtab.model.plan import Plan
from trimtab.model.workflow import Profile, Variant

_STEP = re.compile(r"\b(?:perf|rollout) (\d{1,12}): \{")
_FULLY_ASYNC = re.compile(r"\bfully-async rollout (\d{1,12}): done in ")
_AHEAD = "rollout/fully_async"
_QUOTE = "'"
_OWN = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine", "colocate")
_OWN_FLAGS = (*_OWN, "rollout_batch_size", "hf_checkpoint", "rollout_function_path")
_SCRIPT = "trimtab.script"
_ASYNC = "train_async.py"
_GROUPS = "trimtab.engine_groups"


def _record(line: LogLine) -> StepRecord | None:
    if found := _FULLY_ASYNC.search(line.text):
        return StepRecord(int(found[1]), {_AHEAD: 1.0})
    found = _STEP.search(line.text)
    if found is None:
        return None
    items = line.text[found.end() :].rstrip()
    values = LOG.metrics(items.removesuffix("}"), ", '", "': ", lambda name: name.lstrip(_QUOTE))
    return StepRecord(int(found[1]), values, line.whole and items.endswith("}"))


LOG = LogFramework(
    name="slime",
    supported_logs="slime: console lines `perf 1: {'perf/rollout_time': ...}`, TensorBoard",
    prefix="perf/",
    marker=re.compile(r"\bperf \d{1,12}: \{.*'perf/(?:rollout|train|train_wait|actor_train)_time': "),
    parser=partial(LineParser, _record),
    needles=(b"perf ", b"rollout "),
    parts={
        "rollout": (("rollout_time",),),
        "inference": (("log_probs_time", "ref_log_probs_time", "teacher_log_probs_time"),),
        "actor": (("actor_train_time", "data_preprocess_time"),),
        "weight_sync": (("update_weights_time",),),
    },
    total="step_time",
    periodic=("save_model_time",),
    idle=("train_wait_time",),
    waits=(Wait("rollout", (_AHEAD,), "a fully asynchronous rollout generates ahead: its time is what it waited for"),),
    lengths=("rollout/response_len/mean",),
    reward="rollout/raw_reward",
    kept=(_AHEAD,),
    timers_exclude_waits=True,
    line_start=_STEP,
)


class Slime(pools.TrainerAndEngines):
    """The flags of a slime run."""

    NAME = TITLE = "slime"
    LOG = LOG
    COMPONENTS = ("rollout", "inference", "critic", "actor")
    REQUIRED = ("rollout", "actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"critic": ("inference",), "actor": ("critic", "inference")}

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.ahead = _starts_async(reader)
        self.shared = reader.boolean("colocate", False)
        if self.ahead and self.shared:
            raise reader.error("colocate", f"{_ASYNC} does not share GPUs", "leave it out, or start train.py")
        self.trainer_gpus, self.rollout_gpus = _gpus(reader)
        self.engine = reader.count("rollout_num_gpus_per_engine", 1)
        alone = reader.count("actor_num_nodes", 1) == 1
        own = pools.PER_NODE if alone else reader.count("actor_num_gpus_per_node", pools.PER_NODE)
        self.per_node = own if self.shared and not alone else reader.count("num_gpus_per_node", pools.PER_NODE)
        self.cluster = self.nodes()
        self.batches = reader.count("rollout_batch_size")
        self.samples = self.batches * reader.count("n_samples_per_prompt", 1)
        self.staleness = reader.count("update_weights_interval", 1) if self.ahead else 0
        self.parallel = _parallel(reader)
        if self.trainer_gpus % self.parallel:
            raise reader.error(
                "actor_num_gpus_per_node",
                f"{self.trainer_gpus} GPUs of the actor are no multiple of its parallel sizes, {self.parallel}",
                "slime would not start: give more nodes, or smaller parallel sizes",
            )

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return any(reader.has(name) for name in _OWN)

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        if not launch.runs("train", "train_async"):
            return None
        values = {name.replace("-", "_"): value for name, value in flags(launch.arguments).items()}
        if not any(name in values for name in _OWN_FLAGS):
            return None
        notes: list[str] = []
        for key in ("custom_config_path", "sglang_config"):
            path = values.get(key)
            found = launch.find(path) if isinstance(path, str) else None
            if found is None:
                notes += [f"{path}, which is not here, may say more"] if path else []
            elif isinstance(data := yaml_text.parse(yaml_text.read_text(found), str(found)), dict):
                values |= data if key == "custom_config_path" else {"trimtab": {"engine_groups": _groups(data)}}
        own: dict[str, Any] = values.setdefault("trimtab", {})
        own["script"] = _ASYNC if launch.runs("train_async") else "train.py"
        return ConfigSource(values, assumptions=tuple(notes))

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        if reader.get("loss_type") == "sft_loss":
            return "supervised fine-tuning"
        if reader.has("rollout_external_engine_addrs"):
            return "training beside engines that were started elsewhere"
        if reader.get("debug_train_only") is True or reader.has("load_debug_rollout_data"):
            return "training on saved rollouts, without engines"
        return "generation without training" if reader.get("debug_rollout_only") is True else None

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        trainer, rollout = _gpus(reader)
        answers = reader.counted("rollout_batch_size", "n_samples_per_prompt")
        return RunFacts(None, {"rollout": rollout, "trainer": trainer}, answers, cls.asynchronous(reader))

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        return "fully asynchronous" if _generates_on(reader) else None

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        trainer, rollout = _gpus(reader)
        shared = reader.boolean("colocate", False)
        counted, steps = reader.counted, reader.counted("num_steps_per_rollout")
        samples = counted("rollout_batch_size", "n_samples_per_prompt")
        folder = str(reader.get("hf_checkpoint", ""))
        estimator = reader.get("advantage_estimator", "grpo")
        without_reference = estimator == "grpo" and reader.get("use_kl_loss") is not True and not reader.has("kl_coef")
        longest = counted("rollout_max_response_len")
        prompt = counted("rollout_max_prompt_len") or 0
        recycled = "colocate-async" if reader.get("partial_rollout") is True else None
        return {
            "framework": "slime",
            "model": folder if not folder or Path(folder).is_dir() else Path(folder).name,
            "gpus": max(trainer, rollout) if shared else trainer + rollout,
            "rollout_gpus": None if shared else rollout,
            "mode": "async" if _starts_async(reader) else recycled if shared else "separate",
            "staleness": (every := counted("update_weights_interval") if _starts_async(reader) else None),
            "sync_every": every,
            "partial": reader.get("partial_rollout") or _generates_on(reader) or None,
            "algorithm": "gspo" if without_reference else estimator,  # the same passes
            "samples": samples,
            "train_batch": counted("global_batch_size") or (samples and steps and samples // steps),
            "max_tokens": counted("rollout_max_context_len") or (longest and longest + prompt),
            "rollout": {
                "tp": counted("rollout_num_gpus_per_engine"),
                "memory": reader.get("sglang_mem_fraction_static"),
                "backend": "sglang",
            },
            "train": {
                "tp": counted("tensor_model_parallel_size"),
                "pp": counted("pipeline_model_parallel_size"),
                "cp": counted("context_parallel_size"),
                "ep": counted("expert_model_parallel_size"),
                "backend": "megatron",
                "tokens": counted("max_tokens_per_gpu"),
            },
        }

    def can_share(self) -> bool:
        # Weights as deltas go through files, which shared GPUs do not need: slime refuses both together.
        return not self.ahead and self.reader.get("update_weight_mode") != "delta" and not self.reader.has(_GROUPS)

    def can_separate(self) -> bool:
        return not self.shared or not self.reader.has(_GROUPS)

    def sizes(self, name: str) -> Variant:
        reader, engine = self.reader, self.engine
        if name == "rollout":
            fixed = (self.rollout_gpus,) if reader.has(_GROUPS) else None
            return Variant(multiple_of=1 if fixed else engine, gpus=fixed)
        batch = reader.optional_count("global_batch_size")
        if steps := reader.optional_count("num_steps_per_rollout"):
            batch = max(1, self.samples // steps)
        micro = reader.count("micro_batch_size", 1)
        dense = math.prod(reader.count(key, 1) for key in _DENSE)
        # An engine behind the actor's GPUs must not reach over the end of its node.
        whole = math.gcd(engine, self.per_node) if len(self.cluster.nodes) > 1 and not self.shared else 1

        def runs(ranks: int) -> bool:
            gpus = ranks * self.parallel
            data_parallel = gpus // dense
            divides = batch is None or batch % (micro * data_parallel) == 0
            return divides and data_parallel <= (batch or self.samples) and gpus % whole == 0

        return self.trainer_sizes(self.parallel, runs)

    def notes(self) -> list[str]:
        notes = ["no streaming: each component takes all its inputs at once"]
        if self.ahead:
            steps = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
            notes = [f"{_ASYNC}: generation beside training on weights up to {steps} old"]
        if _generates_on(self.reader):
            notes.append("the rollout function generates on while weights change: some answers are older")
        if self.reader.has(_GROUPS):
            notes.append("engines are as the sglang_config says: their GPUs stay")
        return notes

    def mode_facts(self) -> Mapping[str, Any]:
        if self.ahead or self.reader.has(_GROUPS):
            return {}
        halves = self.halves(self.engine)
        apart: tuple[str, ...] | None = None
        if halves is not None and halves[1]:
            nodes, per_node = self.shape(halves[0])
            place = {"actor_num_nodes": nodes, "actor_num_gpus_per_node": per_node, "rollout_num_gpus": halves[1]}
            apart = (*(f"++{key}={count}" for key, count in place.items()), *self.cluster_overrides())
        recycles = not self.reader.has("rollout_function_path") and not self.reader.has("partial_rollout")
        return {"apart": apart, "recycles": recycles, "more": math.ceil(1.5 * self.batches)}

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return pools.flag_settings({key: value}).words

    def settings(self, plan: Plan) -> PlanSettings:
        trainer, rollout = len(plan.group_of("actor").gpus), len(plan.group_of("rollout").gpus)
        shared = plan.group_of("actor") is plan.group_of("rollout")
        nodes, per_node = self.shape(trainer)
        values: dict[str, Any] = {"actor_num_nodes": nodes, "actor_num_gpus_per_node": per_node}
        values["rollout_num_gpus"] = rollout
        if shared:
            values["colocate"] = True
        elif self.shared:
            values["colocate"] = None
        if shared and per_node < pools.PER_NODE:
            values["num_gpus_per_node"] = per_node
        return pools.flag_settings(values)


_DENSE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _parallel(reader: ConfigReader) -> int:
    """GPUs that the actor's have to be a multiple of: dense layers and experts are divided in ways of their own."""
    tensor, pipeline, context = (reader.count(key, 1) for key in _DENSE)
    experts = reader.count("expert_model_parallel_size", 1)
    within = reader.count("expert_tensor_parallel_size", tensor) if experts > 1 else 1
    return math.lcm(tensor * pipeline * context, experts * within * pipeline)


def _gpus(reader: ConfigReader) -> tuple[int, int]:
    """GPUs of the actor and of the engines."""
    actor = reader.count("actor_num_nodes", 1) * reader.count("actor_num_gpus_per_node", pools.PER_NODE)
    shared = reader.boolean("colocate", False)
    hint = "slime needs --rollout-num-gpus without --colocate, and at least one GPU to generate on"
    return actor, reader.count("rollout_num_gpus", actor if shared else None, hint)


def _starts_async(reader: ConfigReader) -> bool:
    return reader.text(_SCRIPT, "train.py").endswith(_ASYNC)


def _generates_on(reader: ConfigReader) -> bool:
    return "fully_async" in str(reader.get("rollout_function_path", ""))


def _groups(data: Mapping[str, Any]) -> int:
    """The groups of engines of an sglang_config."""
    models = data.get("sglang")
    listed = [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return sum(len(model.get("server_groups") or model.get("engine_groups") or ()) for model in listed) or 1
