"""prime-rl's TOML configs and logs: a trainer, and engines on GPUs of their own that generate ahead of it.

On one node the `rl` launcher gives `deployment.num_infer_gpus` and `num_train_gpus`; on several, whole nodes. Nothing
ever shares GPUs. The orchestrator stops generating when it is a batch ahead of the trainer's weights; answers that are
older than `max_off_policy_steps` are dropped, so with 0 of these it waits. Configs of earlier releases list GPUs
(`trainer_gpu_ids`, `inference_gpu_ids`), and say with `max_async_level` how far ahead it may be. Costs come from a
profile.

Logs are the JSON lines of `metrics.jsonl`, of the trainer and of the orchestrator. The orchestrator's step contains its
wait for the trainer, which is taken off: what is left is generation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.formats.frameworks import trainer_and_engines as pools
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.flags import typed_word
from trimtab.formats.launch.launch import ConfigSource, Launch, is_unknown
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LineParser, LogFramework, LogLine, StepRecord, number, step_number
from trimtab.formats.write_back import nested
from trimtab.model.plan import Plan
from trimtab.model.workflow import Profile, Variant

_TIME = "time/"
_WAIT = "time/wait_for_policy"
_LEVELS = ("max_async_level", "orchestrator.max_async_level")
_OWN = ("deployment", "inference", "inference_gpu_ids", "trainer", "trainer_gpu_ids")


# ---- logs ------------------------------------------------------------------------------------------------------------


def _record(line: LogLine) -> StepRecord | None:
    text = line.text.strip()
    if not text.startswith('{"step"'):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return StepRecord(step=-1, whole=False)
    step = step_number(str(data.get("step"))) if isinstance(data, dict) else None
    if step is None:
        return None
    found = {name: number(repr(value)) for name, value in data.items() if LOG.keeps(name)}
    values = {name: value for name, value in found.items() if value is not None}
    if _WAIT in values:
        generated = values.pop("time/step", 0.0) - values[_WAIT] - values.get("time/pack", 0.0)
        values["time/rollout"] = max(0.0, generated)
    return StepRecord(step, values)


LOG = LogFramework(
    name="prime_rl",
    supported_logs="prime-rl: metrics.jsonl of the trainer and the orchestrator, TensorBoard",
    prefix=_TIME,
    marker=re.compile(r'^\s*\{"step": \d+, .*"time/(?:forward_backward|wait_for_policy)": '),
    parser=partial(LineParser, _record),
    needles=(b'{"step"',),
    parts={
        "rollout": (("rollout",),),
        "trainer": (("forward_backward", "load_data"),),
        "weight_sync": (("broadcast_weights",),),
    },
    total="step",
    periodic=("save_ckpt",),
    idle=("wait_for_batch", "wait_for_policy"),
    reward="reward/all/mean",
    timers_exclude_waits=True,
    other_timers=("pack",),
)


# ---- configs ---------------------------------------------------------------------------------------------------------


class PrimeRl(pools.TrainerAndEngines):
    """A config of prime-rl's `rl` launcher."""

    NAME = "prime_rl"
    TITLE = "prime-rl"
    LOG = LOG
    COMPONENTS = ("rollout", "trainer")
    REQUIRED = ("rollout", "trainer")
    shared = False

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.several = _several(reader)
        self.place = _place(reader)
        self.per_node = reader.count(f"{self.place}.gpus_per_node", pools.PER_NODE)
        self.trainer_gpus, self.rollout_gpus = _gpus(reader)
        self.outside = _listed(reader, "teacher_gpu_ids", [])
        if not self.several and self.trainer_gpus + self.rollout_gpus > self.per_node:
            raise reader.error(
                "deployment",
                f"{self.trainer_gpus} GPUs to train and {self.rollout_gpus} to generate are more than the node's "
                f"{self.per_node}",
                'set deployment.gpus_per_node, or deployment.type = "multi_node"',
            )
        self.cluster = self.nodes()
        self.batches = max(1, _answers(reader) // _group(reader))
        self.staleness = _ahead(reader)

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return reader.has("orchestrator") and any(reader.has(name) for name in _OWN)

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        own = launch.runs("prime_rl.entrypoints.rl", "prime_rl.rl") or launch.program[-1:] in (("rl",), ("prime-rl",))
        config: dict[str, Any] = {}
        notes: list[str] = []
        if not own or not _read_arguments(launch, config, notes):
            return None
        return ConfigSource(config, assumptions=tuple(notes))

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        fake = reader.has("trainer.data.fake") and reader.get("trainer.data.fake") is not False
        if fake:
            return "training on made-up data, without engines"
        outside = not reader.has("inference") and not reader.has("inference_gpu_ids")
        return "training beside engines that were started elsewhere" if outside else None

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        trainer, rollout = _gpus(reader)
        return RunFacts(None, {"rollout": rollout, "trainer": trainer}, _answers(reader))

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        trainer, rollout = _gpus(reader)
        counted, answers = reader.counted, _answers(reader)
        model = ("model.name", "trainer.model.name", "orchestrator.model.name", "inference.vllm.model")
        lengths = (counted("seq_len"), counted("orchestrator.seq_len"), counted("trainer.model.seq_len"))
        ahead = _ahead(reader)
        return {
            "framework": "prime-rl",
            "model": next((reader.get(key) for key in model if reader.has(key)), None),
            "gpus": trainer + rollout,
            "rollout_gpus": rollout,
            "mode": "async" if ahead else "separate",
            "staleness": _oldest(reader) if ahead else None,
            "partial": bool(ahead) or None,
            "algorithm": "direct",
            "samples": answers,
            "train_batch": answers,
            "max_tokens": next(filter(None, lengths), None),
            "rollout": {
                "tp": _engine(reader),
                "memory": reader.get("inference.vllm.gpu_memory_utilization"),
                "sequences": counted("inference.vllm.max_num_seqs"),
                "precision": "fp8" if reader.get("inference.vllm.quantization") == "fp8" else None,
                "backend": "vllm",
            },
            "train": {"cp": counted("trainer.model.cp"), "lora": counted("trainer.model.lora.rank"), "backend": "fsdp"},
        }

    def can_share(self) -> bool:
        return False

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        if name == "rollout":
            if not self.several:
                return Variant(multiple_of=_engine(reader))
            return Variant(multiple_of=self.per_node * (self.replica_nodes if self.by_replicas else 1))
        replicas = reader.count("trainer.model.dp_replicate", 1)
        context = reader.count("trainer.model.cp", 1)
        experts = reader.get("trainer.model.ep", "auto")
        island = experts if isinstance(experts, int) and not isinstance(experts, bool) and experts > 1 else 1
        parallel = replicas * math.lcm(context, island)
        if self.several:
            group = reader.count(f"{self.place}.nodes_per_fsdp_group", 1)
            parallel = math.lcm(context, island, group * self.per_node)
        return self.trainer_sizes(parallel, lambda ranks: True)

    @property
    def replica_nodes(self) -> int:
        return _infer_nodes(self.reader)

    @property
    def by_replicas(self) -> bool:
        """Whether engines can only be multiplied as a whole: several nodes of a kind, or experts over all of them."""
        reader = self.reader
        kind = reader.text("inference.deployment.type", "single_node")
        experts = reader.boolean("inference.vllm.enable_expert_parallel", False)
        many = reader.count(f"{self.place}.num_infer_replicas", 1) > 1
        return many or kind != "single_node" or (experts and self.replica_nodes > 1)

    def notes(self) -> list[str]:
        oldest = _oldest(self.reader)
        steps = "1 step" if oldest == 1 else f"{oldest} steps"
        notes = ["synchronous: generation waits for the weights of the last step"]
        if self.staleness:
            notes = [f"asynchronous: generation beside training, answers on weights up to {steps} old"]
        if self.reader.has("orchestrator.token_batch_size"):
            notes.append("a batch is counted in tokens: the number of its answers is not known, 128 are taken")
        return notes

    def mode_facts(self) -> Mapping[str, Any]:
        return {"waits": not self.staleness and not any(self.reader.has(name) for name in _LEVELS)}

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return pools.flag_settings({key: value}, equals=False).words

    def settings(self, plan: Plan) -> PlanSettings:
        trainer, rollout = len(plan.group_of("trainer").gpus), len(plan.group_of("rollout").gpus)
        values: dict[str, Any]
        if self.reader.has("trainer_gpu_ids") or self.reader.has("inference_gpu_ids"):
            first, last = list(range(rollout)), list(range(rollout, rollout + trainer))
            lists = {"inference_gpu_ids": first, "trainer_gpu_ids": last}
            values = {name: json.dumps(ids) for name, ids in lists.items()}
        elif self.several:
            values = {f"{self.place}.num_train_nodes": trainer // self.per_node}
            nodes = rollout // self.per_node
            if self.by_replicas:
                values[f"{self.place}.num_infer_replicas"] = nodes // self.replica_nodes
            else:
                values[f"{self.place}.num_infer_nodes"] = nodes
        else:
            values = {"deployment.num_train_gpus": trainer, "deployment.num_infer_gpus": rollout}
        for key in ("inference.vllm.data_parallel_size", "inference.parallel.dp"):
            if not self.several and self.reader.has(key):
                values[key] = rollout // _engine(self.reader)
        settings = pools.flag_settings(values, equals=False)  # prime-rl takes no `--flag=value`
        return replace(settings, block=_toml_text(values))


def _toml_text(values: Mapping[str, Any]) -> str:
    """Dotted keys as TOML; values are numbers or lists that are text already."""
    lines, section = [], ""
    for key, value in values.items():
        above, _, name = key.rpartition(".")
        if above != section:
            section = above
            lines.append(f"[{section}]\n")
        lines.append(f"{name} = {value}\n")
    return "".join(lines)


def _place(reader: ConfigReader) -> str:
    """The section that says how many nodes there are."""
    return "slurm" if reader.has("slurm.num_train_nodes") else "deployment"


def _several(reader: ConfigReader) -> bool:
    return _place(reader) == "slurm" or reader.text("deployment.type", "single_node") == "multi_node"


def _infer_nodes(reader: ConfigReader) -> int:
    """Nodes of a replica of the engines."""
    stated = reader.optional_count(f"{_place(reader)}.num_infer_nodes")
    if stated is not None:
        return stated
    section = "inference.deployment"
    kind = reader.text(f"{section}.type", "single_node")
    if kind == "disaggregated":
        parts = ("prefill", "decode")
        each = (
            reader.count(f"{section}.{part}_nodes_per_replica", 1) * reader.count(f"{section}.num_{part}_replicas", 1)
            for part in parts
        )
        return sum(each)
    return reader.count(f"{section}.num_nodes", 2) if kind == "multi_node" else 1


def _gpus(reader: ConfigReader) -> tuple[int, int]:
    """GPUs of the trainer and of the engines."""
    if _several(reader):
        place = _place(reader)
        per_node = reader.count(f"{place}.gpus_per_node", pools.PER_NODE)
        replicas = reader.count(f"{place}.num_infer_replicas", 1)
        return reader.count(f"{place}.num_train_nodes") * per_node, _infer_nodes(reader) * replicas * per_node
    if reader.has("trainer_gpu_ids") or reader.has("inference_gpu_ids"):
        return _listed(reader, "trainer_gpu_ids", [1]), _listed(reader, "inference_gpu_ids", [0])
    return reader.count("deployment.num_train_gpus", 1), reader.count("deployment.num_infer_gpus", 1)


def _listed(reader: ConfigReader, key: str, default: list[int]) -> int:
    found = reader.get(key, default)
    if isinstance(found, str):  # as it was written back
        found = yaml_text.parse(found, key)
    ids = found if isinstance(found, list) else [found]
    if any(isinstance(gpu, bool) or not isinstance(gpu, int) for gpu in ids):
        raise reader.error(key, f"a list of GPUs is expected, not {found!r:.60}")
    return len(set(ids))


def _engine(reader: ConfigReader) -> int:
    """GPUs of an engine."""
    return reader.count("inference.vllm.tensor_parallel_size", reader.count("inference.parallel.tp", 1))


def _answers(reader: ConfigReader) -> int:
    return reader.count("orchestrator.batch_size", 128)


def _group(reader: ConfigReader) -> int:
    return reader.count("orchestrator.group_size", reader.count("orchestrator.rollouts_per_example", 1))


def _ahead(reader: ConfigReader) -> int:
    """Batches that the orchestrator may be ahead of the trainer."""
    for key in _LEVELS:
        if reader.has(key):
            return int(reader.number(key))
    return min(1, _oldest(reader))


def _oldest(reader: ConfigReader) -> int:
    return int(reader.number("orchestrator.max_off_policy_steps", 8))


# ---- the command line ------------------------------------------------------------------------------------------------


def _read_arguments(launch: Launch, config: dict[str, Any], notes: list[str]) -> bool:
    """Merge TOML files (`@ rl.toml`, `--trainer @ train.toml`) and flags, left to right; False if there are none."""
    section, words = "", list(launch.arguments)
    read = False
    while words:
        word = words.pop(0)
        if word == "@" or (word.startswith("@") and len(word) > 1):
            name = word[1:] or (words.pop(0) if words else "")
            read = True
            _merge(config, _at(section, _file(launch, name, notes)))
            section = ""
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            section = key.replace("-", "_")
            values = [value] if equals else []
            while not equals and words and not words[0].startswith(("--", "@")):
                values.append(words.pop(0))
            if values or not (words and words[0].startswith("@")):
                _merge(config, _flag(section, values))
                section = ""
            read = True
    return read


def _flag(key: str, values: list[str]) -> dict[str, Any]:
    if not values and key.startswith("no_"):
        return nested({key.removeprefix("no_"): False})
    typed = [typed_word(value) for value in values]
    first = typed[0] if typed else True
    if isinstance(first, str) and first[:1] in "[{" and not is_unknown(first):
        first = yaml_text.parse(first, f"--{key}")
    return nested({key: first if len(typed) < 2 else typed})


def _at(section: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    return nested({section: dict(data)}) if section else data


def _file(launch: Launch, name: str, notes: list[str]) -> Mapping[str, Any]:
    path = launch.find(name)
    if path is None:
        raise launch.error(f"there is no config {name}", "give the folder in which the command is started")
    data = yaml_text.parse_config(yaml_text.read_text(path), str(path))
    if not isinstance(data, dict):
        raise InputError("a mapping of keys is expected at the top of the file", where=str(path))
    notes.append(f"read {Path(name)}")
    return data


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        name = str(key).replace("-", "_")
        inside = below.get(name)
        if isinstance(value, Mapping) and isinstance(inside, dict):
            _merge(inside, value)
        elif isinstance(value, Mapping):
            below[name] = {}
            _merge(below[name], value)
        else:
            below[name] = value
