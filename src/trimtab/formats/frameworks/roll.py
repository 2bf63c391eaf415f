"""ROLL's pipeline configs and logs: a list of GPUs for every role, which may share them in many ways.

Each role has a `device_mapping`, Python text such as `list(range(0, 8))`, which is read without running it. Pipelines
with rewards (`rlvr`) take turns on whatever GPUs two roles share, so training may lie over the rollout and a judge.
Agentic pipelines share all GPUs or none, with the reference where the actor trains. With `async_generation_ratio`
above 0 the rollout has GPUs of its own. A judge keeps its GPUs, as its time is inside the rollout's; it never shares
them with the rollout. A plan keeps the samples of an optimizer step: gradient accumulation changes with the
data-parallel size. Costs come from a profile.

Logs are JSON objects of `time/*`, one for each step, between `pipeline step N start...` lines; the same names are in
TensorBoard and W&B. Pipelines with rewards log with each step the total of the step before.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import MAX_COUNT, ComposedConfig, ConfigReader
from trimtab.formats.launch import flags
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, values_of
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import Component, Profile, Variant

_PER_NODE = 8  # ROLL's default
_ASYNC = "async_generation_ratio"
_ACCUMULATION = "gradient_accumulation_steps"
_START_FLAGS = (("config_path", "config"), ("config_name", "sppo_config"))


# ---- logs ------------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"\bpipeline (?:step|rollout step) (\d{1,12}) (?:start|finished)")
_OBJECT = re.compile(r"\{\"[^\n]*\"(?:time/|system/)")


class _Parser:
    """A JSON object of metrics for each step; its number is in the lines around it."""

    def __init__(self) -> None:
        self._step = -1

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text
        if found := _STEP.search(text):
            self._step = int(found[1])
        elif '"time/step_' in text and (begin := text.find("{")) >= 0:
            try:
                data = json.loads(text[begin:])
            except (ValueError, RecursionError):
                yield StepRecord(self._step, whole=False)
                return
            if not isinstance(data, dict):
                return
            step, values = values_of(LOG, data)
            yield StepRecord(self._step if step is None else step, values, line.whole)

    def end(self) -> Iterator[StepRecord]:
        yield from ()


LOG = LogFramework(
    name="roll",
    supported_logs="ROLL: console lines with JSON of `time/step_train`, TensorBoard, W&B",
    prefix="time/",
    marker=re.compile(r"\"time/step_(?:train|generate|rollout|model_update)\": |\bpipeline step \d{1,12} start\b"),
    parser=_Parser,
    line_start=re.compile(r"\[PID \d{1,12}\] \{\""),
    needles=(b'"time/step_', b"pipeline "),
    parts={
        "rollout": (("step_generate",), ("step_rollout",)),
        "ref": (("ref_log_probs_values",), ("step_ref_log_probs_values_reward",)),
        "old_log_prob": (("old_log_probs",), ("step_old_log_probs_values",)),
        "update_actor": (("step_train", "step_adv"),),
        "weight_sync": (("step_model_update",),),
    },
    total="step_total",
    periodic=("val_step", "step_val"),
    lengths=("token/response_length/mean", "tokens/response_length/mean", "token/all/response_length/mean"),
    reward="critic/score/mean",
    late_total="step_generate",
)


# ---- configs ---------------------------------------------------------------------------------------------------------


class Roll(FrameworkConfig):
    """A ROLL config of a pipeline with rewards, or of an agentic one."""

    NAME = "roll"
    TITLE = "ROLL"
    LOG = LOG
    COMPONENTS = ("rollout", "ref", "old_log_prob", "update_actor")
    REQUIRED = ("rollout", "update_actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {"update_actor": ("ref", "old_log_prob")}
    EVEN_NODES = False

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.keys = role_keys(reader)
        self.train = devices(reader, self.keys["update_actor"])
        self.rollout = devices(reader, self.keys["rollout"])
        self.ref = devices(reader, self.keys["ref"], required=False) or self.train
        self.agentic = is_agentic(reader)
        self.ratio = reader.number(_ASYNC, 0)
        self.judges = judges(reader)
        busy = {*self.train, *self.rollout, *(self.ref if "ref" in self.costs else ())}
        self.inside = tuple(key for key, gpus in self.judges.items() if busy & set(gpus))
        others = [gpus for key, gpus in self.judges.items() if key not in self.inside]
        if "ref" not in self.costs and busy.isdisjoint(self.ref):
            others.append(self.ref)
        self.kept = frozenset(itertools.chain(*others))  # GPUs of roles that are no part of the plan
        self.machines = self._machines(busy | self.kept | set(itertools.chain(*self.judges.values())))
        self.cluster = common.without(self.machines, len(self.kept))
        self.batches = reader.count("rollout_batch_size", 128)
        self.staleness = math.ceil(self.ratio)

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        roles = ("actor_train", "actor_infer", "student_train", "sft_train", "student")
        return any(reader.has(f"{role}.device_mapping") or reader.has(f"{role}.strategy_args") for role in roles)

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        if reader.has("sft_train"):
            return "supervised fine-tuning"
        if reader.has("student.strategy_args") or reader.has("student.device_mapping"):
            return "distillation without a rollout"
        trains, infers = (
            any(reader.has(f"{who}_{what}.device_mapping") for who in ("actor", "student"))
            for what in ("train", "infer")
        )
        if trains and not infers:
            return "training on preferences (DPO or a reward model)"
        return None if trains else "generation without training"

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """`python start_rlvr_pipeline.py --config_path DIR --config_name NAME`; the folder is beside the program."""
        if not re.search(r"(?:^|\.)start_(?!\w*rollout_pipeline)\w+_pipeline$", launch.module):
            return None
        given = flags.flag_words(launch.arguments)
        folder, name = ((given.get(key) or (default,))[0] for key, default in _START_FLAGS)
        name = name.removesuffix(".yaml")
        if name.startswith("${") or not name:
            raise launch.error("the name of the config is not known")
        beside = Path(launch.program[-1]).parent
        found = launch.find(str(beside / folder / f"{name}.yaml"), str(Path(folder) / f"{name}.yaml"))
        if found is None:
            raise launch.error(
                f"the config {beside / folder / name}.yaml is not there", "give the folder that it is started in"
            )
        return ConfigSource(found)

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        keys = role_keys(reader)
        gpus = {name: len(devices(reader, key)) for name, key in keys.items() if name != "ref" or reader.has(key)}
        by_name = {"rollout": gpus["rollout"], "trainer": gpus["update_actor"]}
        if "ref" in gpus:
            by_name["ref"] = gpus["ref"]
        group = "actor_infer.generating_args.num_return_sequences"
        answers = reader.counted("rollout_batch_size", "num_return_sequences_in_group") or reader.counted(
            "rollout_batch_size", group
        )
        if is_agentic(reader):
            answers = reader.counted("rollout_batch_size")
        return RunFacts(by_name=by_name, answers_per_step=answers, asynchronous=cls.asynchronous(reader))

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        keys = role_keys(reader)
        train, rollout = devices(reader, keys["update_actor"]), devices(reader, keys["rollout"])
        alone = set(train).isdisjoint(rollout)
        config = f"{keys['update_actor']}.strategy_args.strategy_config"
        engine = f"{keys['rollout']}.strategy_args.strategy_config"
        parallel = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
        samples = cls.facts(reader).answers_per_step
        own = [f"{keys['update_actor']}.training_args.{key}" for key in ("per_device_train_batch_size", _ACCUMULATION)]
        batch = reader.counted(*own)
        megatron = "megatron" in reader.text(f"{keys['update_actor']}.strategy_args.strategy_name", "")
        sizes = {size: reader.counted(f"{config}.{name}_parallel_size") for size, name in parallel.items()}
        split = math.prod(sizes[size] or 1 for size in ("tp", "pp", "cp"))
        most = [reader.counted(key) for key in ("prompt_length", "response_length")]
        adv = reader.text("adv_estimator", "gae")
        return {
            "framework": "roll",
            "model": reader.get("pretrain"),
            "gpus": len({*train, *rollout}),
            "rollout_gpus": len(rollout) if alone else None,
            "mode": "async" if reader.number(_ASYNC, 0) else None,
            "staleness": reader.number(_ASYNC, 0) or None,
            "algorithm": {"gae": "ppo", "grpo": "grpo"}.get(adv),
            "samples": samples,
            "train_batch": min(batch * len(train) // split, samples) if batch and samples else None,
            "max_tokens": reader.counted("sequence_length") or (sum(filter(None, most)) if all(most) else None),
            "rollout": {
                "tp": engine_gpus(reader, keys["rollout"]),
                "memory": reader.get(f"{engine}.gpu_memory_utilization", reader.get(f"{engine}.mem_fraction_static")),
            },
            "train": {**(sizes if megatron else {}), "backend": "megatron" if megatron else "fsdp"},
        }

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        ratio = reader.number(_ASYNC, 0)
        return f"asynchronous ({_ASYNC} {ratio:g})" if ratio > 0 else None

    def _machines(self, used: set[int]) -> Any:
        reader, last = self.reader, max(used)
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            nodes, per_node = reader.count("trimtab.nodes", 1), reader.count("trimtab.gpus_per_node")
        else:
            per_node = reader.count("num_gpus_per_node", _PER_NODE if last >= _PER_NODE else last + 1)
            nodes = last // per_node + 1
        if last >= nodes * per_node:
            raise reader.error(
                "num_gpus_per_node", f"a role has GPU {last}, and the cluster GPUs 0-{nodes * per_node - 1}"
            )
        return common.even_cluster(nodes, per_node)

    @property
    def judge_gpus(self) -> int:
        """GPUs of judges within the plan's cluster, which the rollout leaves free."""
        return len(set(itertools.chain(*(self.judges[key] for key in self.inside))))

    # -- sizes --------------------------------------------------------------------------------------------------------

    def sizes(self, name: str) -> Variant:
        if name == "rollout":
            multiple = engine_gpus(self.reader, self.keys["rollout"])
            most = self.cluster.gpus - self.judge_gpus
            return Variant(multiple_of=multiple, gpus=tuple(range(multiple, most + 1, multiple)))
        key = self.keys.get(name, self.keys["update_actor"])
        parallel = self._parallel(key)
        if name == "ref":
            return Variant(multiple_of=parallel)
        megatron = "megatron" in self._strategy(key)
        own = len(self.train)
        every = own // parallel * self._accumulation()  # micro-batches of an optimizer step
        counts = [
            dp * parallel
            for dp in range(1, self.cluster.gpus // parallel + 1)
            if every % dp == 0 and self._samples() >= dp and not (megatron and dp > 1 and self.batches % dp)
        ]
        return Variant(multiple_of=parallel, gpus=tuple(sorted({*counts, own})))

    def _samples(self) -> int:
        group = self.reader.count("num_return_sequences_in_group", 1)
        return self.batches * (1 if self.agentic else group)

    def _accumulation(self) -> int:
        return self.reader.count(f"{self.keys['update_actor']}.training_args.{_ACCUMULATION}", 1)

    def _strategy(self, key: str) -> str:
        return self.reader.text(f"{key}.strategy_args.strategy_name", "")

    def _parallel(self, key: str) -> int:
        reader, config = self.reader, f"{key}.strategy_args.strategy_config"
        if "megatron" in self._strategy(key):
            return reader.product(
                config, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
            )
        return reader.count(f"{key}.model_args.ulysses_size", 1) if "fsdp2" in self._strategy(key) else 1

    # -- plans --------------------------------------------------------------------------------------------------------

    def options(self) -> list[list[list[str]]]:
        with_train = [["rollout"], self.measured("ref", "old_log_prob", "update_actor")]
        options = [with_train]
        if "ref" in self.costs and not self.agentic and set(self.ref).isdisjoint(self.train):
            options.append([["rollout"], ["ref"], self.measured("old_log_prob", "update_actor")])
        if not self.ratio and not self.judge_gpus:
            options.append([list(itertools.chain(*with_train))])
        return options

    def rules(self, members: Mapping[str, Component]) -> FrameworkRules:
        rules = super().rules(members)
        sizes, gpus = self.pool_sizes(), self.cluster.gpus
        rollout, training = (
            AllowedGroup(frozenset(names), common.runnable(sizes, (members[name] for name in names)))
            for names in (["rollout"], self.measured("ref", "old_log_prob", "update_actor"))
        )
        below, above = rollout, training  # taking turns, training lies over the rollout and whatever judges hold
        if self.agentic and self.ratio:
            # Training takes GPUs of some engines, while at least one engine goes on.
            most = gpus - engine_gpus(self.reader, self.keys["rollout"])
            below, above = _only(training, range(1, most + 1)), _only(rollout, [gpus])
        elif self.agentic:
            below, above = _only(rollout, [gpus - self.judge_gpus]), _only(training, [gpus])
        wanted = self.judge_gpus if self.agentic and not self.ratio else self.agentic or not self.ratio
        over = ((below, above),) if wanted and below.sizes and above.sizes else ()
        return FrameworkRules(rules.framework, rules.groupings, spanning=over)

    def notes(self) -> list[str]:
        notes = ["no streaming: each component takes all its inputs at once"]
        if self.ratio:
            notes = [f"asynchronous: rollout beside training, {self.ratio:g} batches ahead at most"]
        if self.judges:
            gpus = sum(len(found) for found in self.judges.values())
            notes.append(f"a judge keeps {gpus} GPUs, apart from the rollout's: its time is part of the rollout's")
        return notes

    def current(self) -> CurrentPlacement:
        # Roles outside the plan may lie anywhere: the others close ranks.
        position = {gpu: rank for rank, gpu in enumerate(self._real())}
        ranks = {"rollout": self.rollout, "ref": self.ref}
        placed = {name: tuple(sorted(position[gpu] for gpu in ranks.get(name, self.train))) for name in self.costs}
        return CurrentPlacement(placed, self.reader.where(f"{self.keys['rollout']}.device_mapping"), overlap=True)

    def _real(self) -> list[int]:
        """ROLL's numbers of the GPUs that a plan is made for."""
        return [gpu for gpu in range(self.cluster.gpus + len(self.kept)) if gpu not in self.kept]

    def mode_facts(self) -> Mapping[str, Any]:
        half, real = self.cluster.gpus // 2, self._real()
        held = set(itertools.chain(*self.judges.values()))
        train, rollout = real[:half], [gpu for gpu in real[half:] if gpu not in held]
        parallel, engine = self._parallel(self.keys["update_actor"]), engine_gpus(self.reader, self.keys["rollout"])
        roles = [self.keys["update_actor"], *([self.keys["ref"]] if self.reader.has(self.keys["ref"]) else [])]
        busy = self.ratio or held & set(train) or self.reader.has("critic.device_mapping") or not train or not rollout
        if busy or half % parallel or len(rollout) % engine or len(self.train) % half:
            return {}
        pools = {**dict.fromkeys(roles, train), self.keys["rollout"]: rollout}
        place = [f"++{key}.device_mapping='{device_text(gpus)}'" for key, gpus in pools.items()]
        nodes = self.machines.nodes
        place += [f"++trimtab.nodes={len(nodes)}", f"++trimtab.gpus_per_node={nodes[0].gpus}"]
        return {"apart": tuple(place), "accumulation": self._accumulation() * len(self.train) // half}

    def settings(self, plan: Plan) -> PlanSettings:
        gpus = common.gpus_by_component(plan)
        real = self._real()
        values: dict[str, Any] = {}
        for name in ("update_actor", "rollout", "ref"):
            key, before = self.keys[name], {"rollout": self.rollout, "ref": self.ref}.get(name, self.train)
            after = tuple(real[rank] for rank in gpus.get(name, ()))
            if name in gpus and (name != "ref" or self.reader.has(f"{key}.device_mapping")):
                values[f"{key}.device_mapping"] = (
                    self.reader.get(f"{key}.device_mapping") if after == before else device_text(after)
                )
        if "ref" not in gpus and self.reader.has(f"{self.keys['ref']}.device_mapping") and self.agentic:
            values[f"{self.keys['ref']}.device_mapping"] = values[f"{self.keys['update_actor']}.device_mapping"]
        values |= self._judges_out_of_the_way({real[rank] for rank in gpus["rollout"]}, real)
        before_dp, after_dp = len(self.train), len(gpus["update_actor"])
        if before_dp != after_dp:
            key = f"{self.keys['update_actor']}.training_args.{_ACCUMULATION}"
            values[key] = self._accumulation() * before_dp // after_dp
        advice = "ROLL's start scripts take no overrides: the values go into the file (--apply)"
        return PlanSettings(values, block_text(nested(values)), (advice,))

    def _judges_out_of_the_way(self, rollout: set[int], real: Sequence[int]) -> dict[str, Any]:
        """New places of judges whose GPUs the rollout takes."""
        free = [gpu for gpu in reversed(real) if gpu not in rollout]
        values: dict[str, Any] = {}
        for key in self.inside:
            taken = set(self.judges[key])
            if taken & rollout:
                place = tuple(sorted(free[: len(taken)]))
                values[f"{key}.device_mapping"] = device_text(place)
                free = [gpu for gpu in free if gpu not in place]
        return values


def _only(group: AllowedGroup, sizes: Iterable[int]) -> AllowedGroup:
    return replace(group, sizes=tuple(size for size in sizes if size in (group.sizes or ())))


def role_keys(reader: ConfigReader) -> dict[str, str]:
    """The config sections of rollout, trainer and reference: distillation on policy has names of its own."""
    if reader.has("student_train.device_mapping"):
        teacher = "teacher"
        if not reader.has("teacher.device_mapping") and reader.mapping("teacher"):
            raise reader.error("teacher", "several teachers: no placement is planned for them")
        return {"rollout": "student_infer", "update_actor": "student_train", "ref": teacher}
    distilled = reader.boolean("use_opd", False)
    return {"rollout": "actor_infer", "update_actor": "actor_train", "ref": "teacher" if distilled else "reference"}


def is_agentic(reader: ConfigReader) -> bool:
    return reader.has("train_env_manager") or reader.has("custom_envs")


def judges(reader: ConfigReader) -> dict[str, tuple[int, ...]]:
    """The reward workers that have GPUs, by section."""
    sections = ["reward", "reward_model", *(f"rewards.{name}" for name in reader.mapping("rewards"))]
    found = {key: devices(reader, key, required=False) for key in sections if reader.has(f"{key}.device_mapping")}
    return {key: gpus for key, gpus in found.items() if gpus}


def engine_gpus(reader: ConfigReader, key: str) -> int:
    """GPUs of one engine: vLLM's parallel sizes, or for others the workers' GPUs."""
    config = f"{key}.strategy_args.strategy_config"
    if reader.text(f"{key}.strategy_args.strategy_name", "") == "vllm":
        return reader.product(config, "tensor_parallel_size", "pipeline_parallel_size")
    return reader.count(f"{key}.num_gpus_per_worker", 1)


def devices(reader: ConfigReader, key: str, *, required: bool = True) -> tuple[int, ...]:
    """The GPUs of a role, in its order. Raises InputError for what is no list of GPUs."""
    where = f"{key}.device_mapping"
    value = reader.get(where)
    if value is None:
        if required:
            raise reader.missing(where, f'say which GPUs it has: {where}="list(range(0,8))"')
        return ()
    try:
        gpus = _evaluated(ast.parse(value.strip(), mode="eval").body) if isinstance(value, str) else value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        gpus = None
    unread = reader.error(where, f"{value!r:.80} is no list of GPUs", "write for example list(range(0,8)) or [0, 1]")
    if not isinstance(gpus, list) or not all(_is_rank(gpu) for gpu in gpus) or (required and not gpus):
        raise unread
    if len(set(gpus)) < len(gpus):
        raise reader.error(where, f"{value!r:.80} names a GPU twice")
    each = engine_gpus(reader, key) if key.endswith("_infer") else 1
    if len(gpus) % each:
        raise reader.error(where, f"{len(gpus)} GPUs are no multiple of an engine's {each}")
    return tuple(gpus)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _evaluated(node: ast.expr) -> list[int]:
    """The list that an expression of lists, ranges and sums stands for; ValueError for any other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _evaluated(node.left) + _evaluated(node.right)
    elif isinstance(node, ast.List | ast.Tuple):
        found = [number for item in node.elts for number in _items(item)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name, given = node.func.id, node.args
        if name == "list" and len(given) == 1:
            found = _evaluated(given[0])
        elif name == "range" and 1 <= len(given) <= 3:
            numbers = range(*(_whole(argument) for argument in given))
            if len(numbers) > MAX_COUNT:
                raise ValueError("too many GPUs")
            found = list(numbers)
        else:
            raise ValueError(f"{name} is not read")
    else:
        raise ValueError("no list")
    if len(found) > MAX_COUNT:
        raise ValueError("too many GPUs")
    return found


def _items(node: ast.expr) -> list[int]:
    return _evaluated(node.value) if isinstance(node, ast.Starred) else [_whole(node)]


def _whole(node: ast.expr) -> int:
    """A whole number, also as a sum, difference, product or quotient of such."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= MAX_COUNT:
        return int(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _whole(node.left), _whole(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv) and right:
            return left // right
    raise ValueError("no whole number")


def device_text(gpus: Sequence[int]) -> str:
    """GPUs as ROLL's configs write them."""
    if list(gpus) == list(range(gpus[0], gpus[0] + len(gpus))):
        return f"list(range({gpus[0]},{gpus[-1] + 1}))"
    return f"[{', '.join(str(gpu) for gpu in gpus)}]"
