"""verl's configs and logs: pools of whole nodes, and which components each training mode separates.

In verl everything that trains (old log-probs, reference, values, critic, actor) shares one pool, `trainer.nnodes` x
`trainer.n_gpus_per_node`. The rollout shares it in the synchronous modes and has its own pool in the separate ones; the
mode decides whether training is on-policy, so a plan never changes it. A reward model may have its own pool, a teacher
always has one. Costs come from a profile.

Logs are console lines `step:3 - timing_s/gen:12.3 - ...`, the file logger's JSON lines, and TensorBoard; early releases
wrote `timing/gen`, and no total of a step. In the synchronous trainers `timing_s/gen` is the cost of generation. In the
asynchronous ones (one_step_off, fully_async, separate_async) the same timer is the trainer's wait for samples and must
never count as a cost.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, cached_property, partial
from typing import Any, Literal

from trimtab.formats import yaml_text
from trimtab.formats.catalogue import table
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.launch.hydra_app import hydra_launch
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LineParser, LogFramework, LogLine, StepRecord, Wait, number, step_number
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.workflow import Cluster, Node, Profile, Variant
from trimtab.plan.placement.spread import positions_of, spread

TRAINING = ("old_log_prob", "ref", "values", "update_critic", "update_actor")
_BEFORE_UPDATES = ("reward", "old_log_prob", "ref", "values", "teacher")

VerlMode = Literal["sync", "colocate_async", "separate_async", "one_step_off", "fully_async"]
SEPARATE: tuple[VerlMode, ...] = ("separate_async", "one_step_off", "fully_async")

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_POOL = ("nnodes", "n_gpus_per_node")
_SYNC_STEP = "async_training.trigger_parameter_sync_step"
_PARAMETER_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
DEFAULT_MINI_BATCH = 256
"""Default of verl's base config."""


# ---- logs ------------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"(?:^|[^\w:])step:(\d{1,12}) - ")
_CONSOLE_OR_JSON = re.compile(r"step:\d{1,12} - .*\btiming(?:_s)?/|^\s*\{\s*\"step\":\s*\d+,\s*\"data\":\s*\{")
_OLD_TIMERS = "timing/"
_MODE_TIMERS = {
    "fully_async": ("timing_s/wait_for_enough_samples", "timing_s/param_sync", "timing_s/timing_s/param_sync"),
    "one_step_off": ("timing_s/generate_async", "timing_s/sync_rollout_weights"),
    "separate_async": ("timing_s/switch_wait", "timing_s/switch_to_trainer", "timing_s/switch_to_rollout"),
}


def _record(line: LogLine) -> StepRecord | None:
    text = line.text.strip()
    if text.startswith("{"):
        return _json_record(text)
    found = _STEP.search(text)
    return found and StepRecord(int(found[1]), LOG.metrics(text[found.end() :], " - ", ":", _named), line.whole)


def _json_record(text: str) -> StepRecord | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        # A cut-off last line is no JSON: marked, not guessed.
        return StepRecord(step=-1, whole=False) if text.startswith('{"step"') else None
    if not isinstance(data, dict) or not isinstance(data.get("data"), dict):
        return None
    step = step_number(str(data.get("step")))
    if step is None:
        return None
    values = {}
    for name, value in data["data"].items():
        key = _named(name)
        if LOG.keeps(key) and isinstance(value, int | float) and not isinstance(value, bool):
            read = number(repr(value))
            if read is not None:
                values[key] = read
    return StepRecord(step, values)


def _named(name: str) -> str:
    """A metric's current name: timers were `timing/gen` once."""
    return f"timing_s/{name.removeprefix(_OLD_TIMERS)}" if name.startswith(_OLD_TIMERS) else name


def _wait(mode: str, *timers: str) -> Wait:
    return Wait("rollout", timers, f"in verl's {mode} mode timing_s/gen is the trainer's wait for samples")


def _tokens(values: Mapping[str, float]) -> float | None:
    length = values.get("response_length/mean")
    prompt = values.get("prompt_length/mean")
    total = values.get("perf/total_num_tokens")
    if length and total and prompt is not None and length + prompt > 0:
        return total * length / (length + prompt)
    generation, per_token_ms = values.get("timing_s/gen"), values.get("timing_per_token_ms/gen")
    return 1000 * generation / per_token_ms if generation and per_token_ms and per_token_ms > 0 else None


LOG = LogFramework(
    name="verl",
    supported_logs="verl: console lines `step:1 - timing_s/gen:...`, the file logger's JSON lines, TensorBoard",
    prefix="timing_s/",
    marker=_CONSOLE_OR_JSON,
    parser=partial(LineParser, _record),
    needles=(b"step",),
    parts={
        "rollout": (("gen", "gen_max"),),
        **{name: ((name,),) for name in ("reward", "old_log_prob", "ref", "values", "update_critic")},
        "update_actor": (("update_actor", "adv"),),
        "weight_sync": (("update_weights",), ("sync_rollout_weights",), ("param_sync",), ("timing_s/param_sync",)),
    },
    total="step",
    periodic=("save_checkpoint", "testing", "start_profile", "stop_profile"),
    idle=("generate_async", "wait_for_enough_samples", "switch_wait"),
    waits=(*(_wait(mode, *timers) for mode, timers in _MODE_TIMERS.items()), _wait("fully_async", "fully_async/")),
    lengths=("response_length/mean",),
    tokens=_tokens,
    reward="critic/rewards/mean",
    kept=("timing_per_token_ms/gen", "perf/total_num_tokens", "prompt_length/mean", "fully_async/"),
    other_timers=("dump_rollout_generations",),
    line_start=_STEP,
    named=_named,
)


_TRAINERS = {
    "verl.trainer.main_ppo": ("verl/trainer/config", "ppo_trainer"),
    "verl.trainer.main_ppo_sync": ("verl/trainer/config", "ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "verl/experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "verl/experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
}
_SEARCHES = re.compile(r"^\s*searchpath\s*:", re.MULTILINE)
_NO_TRAINER = re.compile(r"generation|eval|sft|merge|diagnos|print_cfg|preprocess")

# ---- configs ---------------------------------------------------------------------------------------------------------


class Verl(FrameworkConfig):
    """A verl config."""

    NAME = TITLE = "verl"
    LOG = LOG
    COMPONENTS = ("rollout", "reward", "old_log_prob", "ref", "values", "teacher", "update_critic", "update_actor")
    REQUIRED = ("rollout", "update_actor")
    AFTER = dict.fromkeys(("update_critic", "update_actor"), _BEFORE_UPDATES)

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.mode = mode_of(composed.reader)
        super().__init__(composed, profile)
        self.reward_key = "reward.reward_model" if self.reader.has("reward.reward_model") else "reward_model"
        self.reward_model = self.reader.boolean(f"{self.reward_key}.enable", False)
        self.rollout_pool = "rollout" if self.mode in ("one_step_off", "fully_async") else _ROLLOUT
        self.pools = self._pools()
        self.cluster = self._cluster()
        # A fully asynchronous trainer has no batch: verl requires its size to be 0.
        self.without_batch = self.mode == "fully_async" and self.reader.get("data.train_batch_size", 0) in (0, "0")
        # Prompts per iteration: a batch, or without one what the trainer takes between two weight syncs.
        if self.without_batch:
            self.batches = self.taken_at_once * self.reader.count(_SYNC_STEP, 1)
        else:
            self.batches = self.reader.count("data.train_batch_size", 1)
        self.staleness = self._staleness()
        self.chunk = self._chunk()

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        return reader.has("actor_rollout_ref")

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """verl's trainers, and recipes: Hydra programs that are given keys of `actor_rollout_ref`."""
        known = next((config for name, config in _TRAINERS.items() if launch.runs(name)), None)
        keys = (word.lstrip("+~") for word in launch.arguments)
        if not launch.program[0].rpartition("/")[2].startswith("python") or _NO_TRAINER.search(launch.module):
            return None
        if known is None and not any(key.startswith("actor_rollout_ref.") for key in keys):
            return None
        folder, name = known or ("", "")
        app = hydra_launch(launch, folder, name)
        text = yaml_text.read_text(app.config) if app.config is not None else "{}"
        if app.config is not None and (not _SEARCHES.search(text) or launch.find("verl/trainer/config")):
            return ConfigSource(app.config, app.overrides)
        own = yaml_text.parse(text, app.wanted)
        # verl is not here: its defaults from the table, below the recipe's own keys.
        above = own.pop("defaults", ()) if isinstance(own, dict) else ()
        names = [app.wanted.removesuffix(".yaml"), *(name for name in above if isinstance(name, str))]
        defaults, version = next((found for name in names if (found := verl_defaults(name))[0]), ({}, ""))
        if not defaults:
            what = f"the config {app.wanted} of {launch.program[-1]} is not here"
            raise launch.error(what, "run this in a checkout that has it")
        note = f"defaults are those of verl {version}, which is not installed here"
        return ConfigSource(merged(defaults, own), app.overrides, (note,))

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        pools = {"trainer": "trainer"}
        if reader.get(f"{_ROLLOUT}.nnodes", 0):
            pools["rollout"] = _ROLLOUT
        if reader.get("reward.reward_model.enable_resource_pool") is True:
            pools["reward"] = "reward.reward_model"
        gpus = {
            name: reader.count(f"{key}.nnodes") * reader.count(f"{key}.n_gpus_per_node") for name, key in pools.items()
        }
        return RunFacts(gpus.pop("trainer"), gpus, asynchronous=cls.asynchronous(reader))

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        mode = mode_of(reader)
        return None if mode == "sync" else mode

    @property
    def title(self) -> str:
        return f"verl in {self.mode} mode"

    # -- the cluster ------------------------------------------------------------------------------------------------

    def _pools(self) -> dict[str, tuple[int, int]]:
        pools = {"trainer": self._pool("trainer", 1, 8)}
        if self.mode in SEPARATE:
            hint = (
                f"in {self.mode} mode the rollout has GPUs of its own: add ++{self.rollout_pool}.nnodes=N "
                f"++{self.rollout_pool}.n_gpus_per_node=G, and make the trainer's pool smaller by as many"
            )
            pools["rollout"] = self._pool(self.rollout_pool, None, pools["trainer"][1], hint)
        # A pool of a component without a cost is unchanged, and its GPUs are not part of the plan.
        own_reward = self.reader.boolean(f"{self.reward_key}.enable_resource_pool", False)
        if self.reward_model and own_reward and "reward" in self.costs:
            pools["reward"] = self._pool(self.reward_key, None, None)
        if "teacher" in self.costs:
            pools["teacher"] = self._pool("distillation", None, None)
        return pools

    def _pool(self, key: str, nodes: int | None, gpus: int | None, hint: str | None = None) -> tuple[int, int]:
        count = self.reader.count
        pool = count(f"{key}.nnodes", nodes, hint), count(f"{key}.n_gpus_per_node", gpus, hint)
        common.check_gpus(pool[0] * pool[1], f"{pool[0]:,} nodes of {pool[1]:,} GPUs", self.reader.where(key))
        return pool

    def _cluster(self) -> Cluster:
        """The nodes: `trimtab.nodes`, or a node for every node of every pool, which any real cluster can provide."""
        reader = self.reader
        if reader.has("trimtab.nodes") or reader.has("trimtab.gpus_per_node"):
            shape = [reader.count("trimtab.gpus_per_node")] * reader.count("trimtab.nodes", 1)
        else:
            shape = [gpus for nodes, gpus in self.pools.values() for _ in range(nodes)]
            if len(self.pools) > 1:
                stated = " + ".join(f"{name} {n} x {g}" for name, (n, g) in self.pools.items())
                self.assumptions.append(
                    f"the cluster is the pools of the file ({stated}), each on nodes of its own; if it is not, add "
                    "++trimtab.nodes=N ++trimtab.gpus_per_node=G"
                )
        common.check_gpus(sum(shape), f"{len(shape):,} nodes", reader.where("trainer"))
        return Cluster(tuple(Node(name=f"node{index}", gpus=gpus) for index, gpus in enumerate(shape)))

    # -- the workflow -----------------------------------------------------------------------------------------------

    @cached_property
    def mini_batch(self) -> int:
        return self.reader.count(f"{_ACTOR}.ppo_mini_batch_size", DEFAULT_MINI_BATCH)

    @cached_property
    def taken_at_once(self) -> int:
        """Prompts that a fully asynchronous trainer waits for before each step."""
        return self.mini_batch * self.reader.count("async_training.require_batches", 1)

    def granularity(self, name: str) -> int | None:
        return self.chunk if name != "rollout" else None

    def _chunk(self) -> int | None:
        """Prompts that the trainer takes at a time: None for all, or a mini-batch if samples stream."""
        taken: int | None = None
        if self.mode == "fully_async":
            taken = self.taken_at_once
        elif self.mode == "separate_async":
            taken = self.reader.optional_count(f"{_ACTOR}.ppo_mini_batch_size")
        return taken if taken is not None and taken < self.batches else None

    def _staleness(self) -> int:
        if self.mode == "one_step_off":
            return 1
        keys = {
            "separate_async": "trainer.v1.separate_async.num_warmup_batches",
            "fully_async": "async_training.staleness_threshold",
        }
        return max(1, math.ceil(self.reader.number(keys[self.mode], 1))) if self.mode in keys else 0

    def notes(self) -> list[str]:
        if self.mode not in SEPARATE:
            return [f"no streaming: each component takes all its inputs at once ({self.mode})"]
        what = "streaming by mini-batches, " if self.chunk else ""
        iterations = f"{self.staleness} iteration{'s' if self.staleness > 1 else ''}"
        notes = [f"{self.mode}: {what}rollout beside training on weights up to {iterations} old"]
        if self.without_batch:
            notes.append(
                f"an iteration is the {self.batches} prompts trained on between two weight syncs "
                "(ppo_mini_batch_size x require_batches x trigger_parameter_sync_step); the costs are of as many"
            )
        return notes

    def mode_facts(self) -> Mapping[str, Any]:
        if self.mode != "sync":
            return {}
        is_v1 = self.reader.has("trainer.v1") and self.reader.get("trainer.use_v1", True) is True
        even = self.batches % self.mini_batch == 0
        updates = self.batches // self.mini_batch if even else None
        apart = self._halves(_ROLLOUT if is_v1 else "rollout")
        return {"v1": is_v1, "v0": not is_v1, "apart": apart, "updates": updates}

    def _halves(self, key: str) -> tuple[str, ...] | None:
        """Overrides that give the rollout half of the GPUs, in a section of its own."""
        nodes, gpus = self.pools["trainer"]
        if nodes * gpus < 2 or (self.reward_model and "reward" in self.costs and "reward" not in self.pools):
            return None  # a shared reward model's pool would need some of these GPUs too
        trainer, rollout = (
            ((nodes - nodes // 2, gpus), (nodes // 2, gpus)) if nodes > 1 else ((1, gpus - gpus // 2), (1, gpus // 2))
        )
        pools = (("trainer", trainer), (key, rollout))
        words = [f"++{section}.{name}={n}" for section, pool in pools for name, n in zip(_POOL, pool, strict=True)]
        return (*words, f"++trimtab.nodes={len(self.cluster.nodes)}", f"++trimtab.gpus_per_node={gpus}")

    def sizes(self, name: str) -> Variant:
        reader = self.reader
        if name == "teacher":
            return Variant()
        if name in ("rollout", "reward"):
            section = _ROLLOUT if name == "rollout" else f"{self.reward_key}.rollout"
            keys = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
            return Variant(multiple_of=reader.product(section, *keys))
        if reader.text(f"{_ACTOR}.strategy", "fsdp") == "megatron":
            keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            parallel = split = reader.product(f"{_ACTOR}.megatron", *keys)
        else:
            parallel = reader.count(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
            split = 1  # here verl requires the batch to divide by all GPUs, whatever the sequence parallelism
        if reader.get(f"{_ACTOR}.use_dynamic_bsz", False) is True or not reader.has("data.train_batch_size"):
            return Variant(multiple_of=parallel)
        samples = (self.taken_at_once if self.without_batch else self.batches) * reader.count(f"{_ROLLOUT}.n", 1)
        if split > 1:
            samples //= reader.count(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", 1)
        return Variant(multiple_of=parallel, gpus=common.divisors_of_batch(max(samples, 1), split, self.cluster.gpus))

    # -- plans ------------------------------------------------------------------------------------------------------

    def options(self) -> list[list[list[str]]]:
        training = self.measured(*TRAINING)
        alone = [[name] for name in self.measured("teacher")]
        base = [training, ["rollout"], *alone] if self.mode in SEPARATE else [["rollout", *training], *alone]
        if "reward" not in self.costs or not self.reward_model:
            return [base]
        apart = [*base, ["reward"]]
        # A rollout that never pauses leaves no time for a reward model on the training GPUs.
        return [apart] if self.mode in SEPARATE else [[[*base[0], "reward"], *alone], apart]

    def current(self) -> CurrentPlacement:
        nodes = [node.gpus for node in self.cluster.nodes]
        taken = sum(count * gpus for count, gpus in self.pools.values())
        if taken > self.cluster.gpus:
            raise self.reader.error(
                "trainer", f"the pools take GPUs 0-{taken - 1}, and the cluster has GPUs 0-{self.cluster.gpus - 1}"
            )
        layout = spread([[pool] for pool in self.pools.values()], nodes)
        # Pools may share a node: then only their sizes are known.
        sizes = [count * gpus for count, gpus in self.pools.values()]
        ends = itertools.accumulate(sizes)
        positions = (
            [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            if layout is None
            else positions_of(layout, nodes)
        )
        ranks: dict[str, tuple[int, ...]] = {}
        for pool, gpus in zip(self.pools, positions, strict=True):
            if pool == "trainer":
                ranks.update({name: tuple(gpus) for name in self.costs if not self.on_cpu(name)})
            elif pool in self.costs:
                ranks[pool] = tuple(gpus)
        return CurrentPlacement(ranks=ranks, where=self.reader.where("trainer"))

    def on_cpu(self, name: str) -> bool:
        return name == "reward" and not self.reward_model

    def settings(self, plan: Plan) -> PlanSettings:
        placed = common.gpus_by_component(plan)
        values = self._pool_keys(plan, "trainer", "update_actor")
        if self.mode in SEPARATE:
            values |= self._pool_keys(plan, self.rollout_pool, "rollout")
        if "reward" in placed:
            apart = values[f"{self.reward_key}.enable_resource_pool"] = placed["reward"] != placed["update_actor"]
            values |= self._pool_keys(plan, self.reward_key, "reward") if apart else {}
        if "teacher" in placed:
            values |= self._pool_keys(plan, "distillation", "teacher")
        return PlanSettings(values, block_text(nested(values)), self._advice())

    def _pool_keys(self, plan: Plan, key: str, name: str) -> dict[str, Any]:
        nodes, gpus = self.node_counts(plan, name)
        return {f"{key}.nnodes": nodes, f"{key}.n_gpus_per_node": gpus}

    def _advice(self) -> tuple[str, ...]:
        """Settings without which verl does not start with these pools."""
        advice = []
        backend = self.reader.get(
            f"{_ROLLOUT}.checkpoint_engine.backend", "naive" if self.mode == "separate_async" else None
        )
        if self.mode in SEPARATE and backend == "naive":
            advice.append(f"{_ROLLOUT}.checkpoint_engine.backend must be nccl or another that crosses pools, not naive")
        in_own = self.mode in ("one_step_off", "fully_async")
        if in_own and self.reader.get("actor_rollout_ref.hybrid_engine", True) is not False:
            advice.append(f"actor_rollout_ref.hybrid_engine must be false in {self.mode} mode")
        if self.mode == "separate_async":
            steps = self.reader.count(_PARAMETER_SYNC_STEP, 4)
            if self.batches != steps * self.mini_batch:
                advice.append(
                    f"data.train_batch_size ({self.batches}) must be ppo_mini_batch_size ({self.mini_batch}) x "
                    f"{_PARAMETER_SYNC_STEP} ({steps})"
                )
        return tuple(advice)


def mode_of(reader: ConfigReader) -> VerlMode:
    if set(reader.mapping("async_training")) - {"partial_rollout"}:  # which a recipe adds to synchronous training
        return "fully_async"
    if reader.has("rollout.nnodes"):
        return "one_step_off"
    mode = reader.text("trainer.v1.trainer_mode", "sync") if reader.get("trainer.use_v1", True) is True else "sync"
    known: tuple[VerlMode, ...] = ("sync", "colocate_async", "separate_async")
    for name in known:
        if mode == name:
            return name
    raise reader.error(
        "trainer.v1.trainer_mode",
        f"there is no trainer mode {mode!r}",
        "it is one of sync, colocate_async, separate_async",
    )


def verl_defaults(config: str) -> tuple[dict[str, Any], str]:
    """For where verl is not installed: a trainer's defaults that matter, and the newest version that has it."""
    values, newest = _values(config)
    return nested(deepcopy(values)), newest


@cache
def _values(config: str) -> tuple[dict[str, Any], str]:
    rows = [row for row in table("verl_defaults") if row["config"] == config]
    versions = [name for name in rows[0] if name not in ("config", "key")] if rows else []
    newest = next((version for version in reversed(versions) if any(row[version] for row in rows)), "")
    values = {row["key"]: yaml_text.parse(row[newest], "defaults") for row in rows if row[newest] != ""}
    return values, newest


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data over other nested data."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
