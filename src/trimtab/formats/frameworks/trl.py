"""TRL's GRPO and RLOO flags, and its logs: vLLM within the training processes, or in a server beside them.

TRL takes flags, or a YAML file of the same names; the number of processes is accelerate's. With `vllm_mode: colocate`
every process holds an engine, or a part of one; with `server` the processes ask a `trl vllm-serve` on GPUs of its own
and wait for it, so both modes are synchronous. The server's sizes are flags of that command, here the section
`vllm_serve`. A plan keeps the samples of an optimizer step and of a generation: gradient accumulation changes with the
number of processes. Costs come from a profile.

The console has a dictionary with `step_time` for every logged step, and no time of a part. Those are in W&B (and
MLflow and Trackio) as `profiling/Time taken: GRPOTrainer.*`, one for each call, in rows without a step: they belong to
the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from trimtab.formats import yaml_text
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch import flags
from trimtab.formats.launch.launch import ConfigSource, Launch, is_unknown
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.workflow import Cluster, Node, Profile, Variant

_PER_NODE = 8
_SERVER = "vllm_serve"
_TENSOR_PARALLEL = (1, 2, 4, 8)  # of a server: attention heads are divided

_TRAINERS = ("grpo", "rloo", "online_dpo", "async_grpo")
_MARKS = frozenset(("use_vllm", "vllm_mode", "num_generations", "steps_per_generation", "max_staleness"))
_SERVER_FLAGS = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
_YAML = (".yaml", ".yml")

# ---- logs ------------------------------------------------------------------------------------------------------------

_DICT = re.compile(r"\{'(?:loss|grad_norm|learning_rate|num_tokens|reward|step_time|completion)")
_BAR = re.compile(r"\b(\d{1,12})/(\d{1,12}) \[")
_TIMERS = r"(?:train/)?profiling/Time taken: (?:[A-Za-z0-9]+Trainer)\."


def _record(line: LogLine) -> StepRecord | None:
    """A step's dictionary of metrics: numbers are bare, or strings with newer releases of transformers."""
    found = _DICT.search(line.text)
    if found is None or "'step_time'" not in line.text:
        return None
    items = line.text[found.start() + 1 :].rstrip()
    values = LOG.metrics(items.removesuffix("}").replace("'", ""), ", ", ": ", _named)
    return StepRecord(0, values, line.whole and "}" in items)


def _named(name: str) -> str:
    """`time/NAME` for a timer, whatever trainer logs it; other metrics as W&B has them, below `train/`."""
    name = re.sub(f"^{_TIMERS}", "time/", name)
    if name in ("step_time", "train/step_time"):
        return "time/step_time"
    return name if name.startswith(("time/", "train/")) else f"train/{name}"


def _complete(values: dict[str, float]) -> None:
    """The backward pass has no timer: training is what the others leave of a step."""
    total = values.get("time/step_time", 0.0)
    others = [
        seconds for name in ("rollout", "reward", "weight_sync") if (seconds := _logged(name, values)) is not None
    ]
    if others and total > sum(others):
        values["time/training"] = total - sum(others)


def _logged(component: str, values: Mapping[str, float]) -> float | None:
    timers = (f"time/{timer}" for (timer,) in LOG.parts[component])
    return next((values[timer] for timer in timers if timer in values), None)


class _Parser:
    """A dictionary of metrics for each step; its number is in the progress bar before it, or counted."""

    def __init__(self) -> None:
        self._step = self._bar = 0

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        if found := _BAR.search(line.text):
            self._bar = int(found[1])
        record = _record(line)
        if record is not None:
            self._step = record.step = max(self._step + 1, self._bar)
            yield record

    def end(self) -> Iterator[StepRecord]:
        yield from ()


LOG = LogFramework(
    name="trl",
    supported_logs="TRL: W&B (component times; the console has only `{'loss': ..., 'step_time': ...}`)",
    prefix="time/",
    marker=re.compile(r"\{'.*'step_time': "),
    parser=_Parser,
    needles=(b"'step_time'", b"it/s", b"s/it"),
    parts={
        "rollout": (("vLLM.generate",), ("transformers.generate",), ("transformers.generate_batch",)),
        "reward": (("_calculate_rewards",),),
        "update_actor": (("training",),),
        "weight_sync": (("sync_weights",), ("_move_model_to_vllm",)),
    },
    total="step_time",
    lengths=("train/completions/mean_length", "train/completion_length"),
    reward="train/reward",
    complete=_complete,
    named=_named,
    rows_add_up=True,
    line_start=_DICT,
)


# ---- configs ---------------------------------------------------------------------------------------------------------


class Trl(FrameworkConfig):
    """The flags of a run of TRL's online trainers."""

    NAME = "trl"
    TITLE = "TRL"
    LOG = LOG
    COMPONENTS = ("rollout", "reward", "old_log_prob", "update_actor")
    REQUIRED = ("rollout", "update_actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"update_actor": ("reward", "old_log_prob")}

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.server = uses_server(reader)
        self.processes = process_count(reader)
        self.machines = reader.count("num_machines", 1)
        self.server_gpus = server_gpus(reader) if self.server else 0
        if self.processes % self.machines:
            raise reader.error("num_processes", f"{self.processes} processes are not even on {self.machines} machines")
        self.cluster = self._cluster()
        self.per_device = reader.count("per_device_train_batch_size", 8)
        self.accumulation = reader.count("gradient_accumulation_steps", 1)
        samples = samples_per_generation(reader, self.processes)
        generations = reader.count("num_generations", 8)
        if samples % generations:
            raise reader.error(
                "num_generations", f"a generation of {samples} samples holds no whole groups of {generations}"
            )
        self.batches = samples // generations
        if is_async(reader):
            self.staleness = int(reader.number("max_staleness", 4))

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return any(reader.has(key) for key in ("use_vllm", "vllm_mode", "num_generations", "steps_per_generation"))

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """`accelerate launch ... script.py --flags`, `trl grpo --flags`: above a YAML file, if one is named."""
        words, own = launch.arguments, launch.program[-1:] == ("trl",)
        if own and (not words or words[0] not in _TRAINERS):
            return None
        given = _flags(words[1:] if own else words)
        config = given.pop("config", None)
        path = launch.find(config) if isinstance(config, str) else None
        if own and config is not None and path is None:
            raise launch.error(f"the config {config} is not there", "give the folder that it is started in")
        stated = yaml_text.parse(yaml_text.read_text(path), str(path)) if path and path.suffix in _YAML else {}
        merged = {**(stated if isinstance(stated, Mapping) else {}), **given}
        if not own and (_MARKS.isdisjoint(merged) or "experiment_name" in merged):
            return None
        merged = {"num_generations": 8, **_processes(launch, merged, own), **merged}
        server = next((beside for beside in launch.beside if _is_server(beside)), None)
        if server is not None:
            merged[_SERVER] = {name: value for name, value in _flags(server.arguments).items() if name in _SERVER_FLAGS}
            merged[_SERVER].setdefault("tensor_parallel_size", 1)
        return ConfigSource(merged)

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        processes = process_count(reader)
        by_name = {"trainer": processes, "rollout": server_gpus(reader) if uses_server(reader) else processes}
        mode = "asynchronous GRPO" if is_async(reader) else None
        return RunFacts(by_name=by_name | {"reward": processes}, asynchronous=mode)

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        processes = process_count(reader)
        server = server_gpus(reader) if uses_server(reader) else 0
        samples = samples_per_generation(reader, processes)
        batch = reader.counted("per_device_train_batch_size") or 8
        step = batch * processes * reader.count("gradient_accumulation_steps", 1)
        length = [reader.counted(key) for key in ("max_prompt_length", "max_completion_length")]
        tensor = f"{_SERVER}.tensor_parallel_size" if server else "vllm_tensor_parallel_size"
        share = f"{_SERVER}.gpu_memory_utilization" if server else "vllm_gpu_memory_utilization"
        return {
            "framework": "trl",
            "model": reader.get("model_name_or_path", reader.get("model")),
            "gpus": processes + server,
            "rollout_gpus": server or None,
            "mode": "async" if is_async(reader) else "separate" if server else "sync",
            "algorithm": "grpo",
            "samples": samples,
            "train_batch": min(step, samples),
            "max_tokens": sum(filter(None, length)) if length[1] else None,
            "rollout": {"tp": reader.counted(tensor), "memory": reader.get(share), "backend": "vllm"},
            "train": {
                "backend": "fsdp",
                "recompute": reader.get("gradient_checkpointing"),
                "lora": reader.counted("lora_r") if reader.has("use_peft") else None,
                "epochs": reader.counted("num_iterations"),
            },
        }

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        return "asynchronous GRPO" if is_async(reader) else None

    def _cluster(self) -> Cluster:
        """The machines: `trimtab.nodes`, or those of training with the server beside it or on a machine of its own."""
        reader, per_machine = self.reader, self.processes // self.machines
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            cluster = common.even_cluster(reader.count("trimtab.nodes", 1), reader.count("trimtab.gpus_per_node"))
        elif self.machines == 1 and self.processes + self.server_gpus <= _PER_NODE:
            cluster = common.even_cluster(1, self.processes + self.server_gpus)
        else:
            cluster = common.even_cluster(self.machines, per_machine)
            if self.server_gpus:
                own = Node(name=f"node{self.machines}", gpus=self.server_gpus)
                cluster = replace(cluster, nodes=(*cluster.nodes, own))
                self.assumptions.append(
                    "the server is taken to be on a machine of its own; if it is not, add ++trimtab.nodes=N "
                    "++trimtab.gpus_per_node=G"
                )
        if self.processes + self.server_gpus > cluster.gpus:
            raise reader.error(
                "num_processes",
                f"training and server have {self.processes + self.server_gpus} GPUs, and the cluster {cluster.gpus}",
            )
        return cluster

    def on_cpu(self, name: str) -> bool:
        return name == "reward"

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        if name == "rollout" and self.server:
            tensor, data = (reader.count(f"{_SERVER}.{key}_parallel_size", 1) for key in ("tensor", "data"))
            within = range(1, max(node.gpus for node in self.cluster.nodes) + 1)
            # One replica grows by tensor parallelism: vLLM takes several replicas only of mixtures of experts.
            sizes = [n for n in within if (n % tensor == 0 if data > 1 else n in _TENSOR_PARALLEL)]
            return Variant(gpus=tuple(sorted({*sizes, self.server_gpus})))
        shards = 1 if self.server or not uses_vllm(reader) else reader.count("vllm_tensor_parallel_size", 1)
        return Variant(multiple_of=shards, gpus=tuple(p for p in range(1, self.cluster.gpus + 1) if self._keeps(p)))

    def _keeps(self, processes: int) -> bool:
        """Whether that many processes can make the same optimizer steps and generations."""
        steps = self.reader.optional_count("steps_per_generation")
        stated = self.reader.optional_count("generation_batch_size")
        return (
            self.accumulation * self.processes % processes == 0
            and (steps is None or steps * self.processes % processes == 0)
            and (stated is None or stated % (self.per_device * processes) == 0)
        )

    def options(self) -> list[list[list[str]]]:
        training = self.measured("old_log_prob", "update_actor")
        apart, shared = [["rollout"], training], [["rollout", *training]]
        if is_async(self.reader):
            return [apart]
        return [apart if self.server else shared]

    def notes(self) -> list[str]:
        reader = self.reader
        if is_async(reader):
            return [f"asynchronous: rollout beside training on weights up to {self.staleness} steps old"]
        how = "the trainer waits for the server" if self.server else "engines share the training GPUs"
        notes = [f"no streaming: {how}"]
        if uses_vllm(reader) and not reader.has("vllm_mode"):
            notes.append(f"vllm_mode is not stated: {'server' if self.server else 'colocate, as TRL has it since 1.0'}")
        other = "colocate" if self.server else "server"
        if uses_vllm(reader):
            notes.append(f"to compare with vllm_mode={other}, measure it: an engine's speed there is another")
        return notes

    def current(self) -> CurrentPlacement:
        training = tuple(range(self.processes))
        ranks = {name: training for name in self.costs if not self.on_cpu(name)}
        if self.server:
            ranks["rollout"] = tuple(range(self.processes, self.processes + self.server_gpus))
        return CurrentPlacement(ranks, self.reader.where("num_processes"))

    def mode_facts(self) -> Mapping[str, Any]:
        total = self.cluster.gpus
        fitting = [n for n in range(1, total) if self._keeps(n) and total - n in _TENSOR_PARALLEL]
        if self.server or is_async(self.reader) or self.machines > 1 or not uses_vllm(self.reader) or not fitting:
            return {}
        half = min(fitting, key=lambda n: abs(2 * n - total))
        steps = self.reader.optional_count("steps_per_generation")
        sizes = {"num_processes": half, f"{_SERVER}.tensor_parallel_size": total - half, "trimtab.gpus_per_node": total}
        return {
            "apart": tuple(f"++{key}={size}" for key, size in sizes.items()),
            "accumulation": self.accumulation * self.processes // half,
            "steps": steps and steps * self.processes // half,
        }

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return (f"--{key}={common.value_text(value)}",)

    def settings(self, plan: Plan) -> PlanSettings:
        machines, each = self.node_counts(plan, "update_actor")
        processes = machines * each
        values: dict[str, Any] = {"num_processes": processes}
        if machines > 1 or self.reader.has("num_machines"):
            values["num_machines"] = machines
        for key in ("gradient_accumulation_steps", "steps_per_generation"):
            before = self.reader.optional_count(key) or (1 if key.startswith("grad") else None)
            if before is not None and processes != self.processes:
                values[key] = before * self.processes // processes
        advice: list[str] = []
        if self.server:
            gpus = len(common.gpus_by_component(plan)["rollout"])
            data = self.reader.count(f"{_SERVER}.data_parallel_size", 1)
            sizes = {"tensor": gpus, "data": 1}
            if data > 1:
                tensor = self.reader.count(f"{_SERVER}.tensor_parallel_size", 1)
                sizes = {"tensor": tensor, "data": gpus // tensor}
            values |= {f"{_SERVER}.{key}_parallel_size": size for key, size in sizes.items()}
            command = " ".join(f"--{key}_parallel_size {size}" for key, size in sizes.items())
            advice.append(f"the server: trl vllm-serve {command}, on {gpus} GPUs that training does not see")
        own = {key: value for key, value in values.items() if not key.startswith(_SERVER)}
        if not self.reader.has(_SERVER):
            values = own  # a section that TRL's own files do not have
        return PlanSettings(
            values, block_text(nested(values)), tuple(advice), tuple(f"--{k}={v}" for k, v in own.items())
        )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in flags.flags(words).items()}


def _is_server(launch: Launch) -> bool:
    return launch.runs("vllm_serve", "vllm-serve") or launch.arguments[:1] == ("vllm-serve",)


def _processes(launch: Launch, merged: Mapping[str, Any], own: bool) -> dict[str, Any]:
    """How many processes accelerate or torchrun starts, on how many machines; what it leaves open is left out."""
    wrapper = _flags(launch.wrapper)
    name = wrapper.get("config_file", merged.get("accelerate_config") if own else None)
    found: dict[str, Any] = {}
    if isinstance(name, str):
        path = launch.find(name, f"trl/accelerate_configs/{name}.yaml")
        data = yaml_text.parse(yaml_text.read_text(path), str(path)) if path and path.suffix in _YAML else {}
        stated = data if isinstance(data, Mapping) else {}
        found = {key: stated[key] for key in ("num_processes", "num_machines") if key in stated}
    each, nodes = wrapper.get("nproc_per_node"), wrapper.get("nnodes", 1)
    if each is not None:
        found["num_processes"] = each * nodes if isinstance(each, int) and isinstance(nodes, int) else each
        found["num_machines"] = nodes
    found |= {key: wrapper[key] for key in ("num_processes", "num_machines") if key in wrapper}
    visible = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    if "num_processes" not in found and not own and "accelerate" not in launch.wrapper:
        found["num_processes"] = 1
    elif "num_processes" not in found and visible and not is_unknown(visible):
        found["num_processes"] = len(visible.split(","))
    return found


def uses_vllm(reader: ConfigReader) -> bool:
    return reader.boolean("use_vllm", is_async(reader))


def is_async(reader: ConfigReader) -> bool:
    """Whether the flags are those of the asynchronous GRPO trainer."""
    return reader.has("max_staleness") or reader.has("weight_sync_steps")


def uses_server(reader: ConfigReader) -> bool:
    """Whether generation is by a `trl vllm-serve` on GPUs of its own."""
    if is_async(reader):
        return True
    mode = reader.text("vllm_mode", "server" if reader.has(_SERVER) else "colocate")
    if mode not in ("server", "colocate"):
        raise reader.error("vllm_mode", f"there is no mode {mode!r:.40}", "it is server or colocate")
    return uses_vllm(reader) and mode == "server"


def process_count(reader: ConfigReader) -> int:
    return reader.count("num_processes", None, "say how many accelerate starts: ++num_processes=N")


def server_gpus(reader: ConfigReader) -> int:
    if not reader.has(_SERVER):
        key = f"{_SERVER}.tensor_parallel_size"
        raise reader.missing(key, f"say what `trl vllm-serve` was given: ++{key}=N")
    return reader.product(_SERVER, "tensor_parallel_size", "data_parallel_size")


def samples_per_generation(reader: ConfigReader, processes: int) -> int:
    stated = reader.optional_count("generation_batch_size")
    if stated is not None:
        return stated
    steps = reader.optional_count("steps_per_generation") or reader.count("gradient_accumulation_steps", 1)
    return reader.count("per_device_train_batch_size", 8) * processes * steps
