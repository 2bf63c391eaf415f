"""RLinf's configs and logs: what its reasoning and its embodied configs share.

The grammar of `component_placement` is `part(,part)*` with `part = GPUs[:processes]`, GPUs being `all`, a rank or a
range, ascending and without overlap. What is accepted here RLinf accepts; refusals name the GPUs.

Logs are the metric table of `metrics.log`, the progress bar's `<name>_time=`, and TensorBoard's `time/*`. The embodied
runner prints the table; the reasoning runner shows its times behind the progress bar. Timers of workers that exchange
data while they run (environment and rollout; every pipeline stage; rewards, computed as responses come; FSDP training,
whose timer starts with the step) contain waiting. Where a timer of the computation alone exists it is used; otherwise
the time is marked as a wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError, meant
from trimtab.core.ranks import rank_range, ranks_text
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader, as_number
from trimtab.formats.launch.hydra_app import hydra_launch
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, Wait
from trimtab.formats.write_back import block_text, nested
from trimtab.model.workflow import Profile

KEY = "cluster.component_placement"
TRAINS = ("embodied", "reasoning", "coding_online_rl")
"""Task types that train with RL."""

_RANGE = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?\Z")


# ---- logs ------------------------------------------------------------------------------------------------------------

_TABLE_STEP = re.compile(r"│\s*Global Step:\s*(\d{1,12})/\d+")
_SECTION = re.compile(r"^\s*├─+ ([^─]+?) ─+┤\s*$")
_PROGRESS = re.compile(r"(\d{1,12})/\d+ \[[^\[\]]*?[,<][^\[\]]*?, (?=\S+=)")
_BAR_OR_TABLE = re.compile(r"├─+ Metric Table ─+┤|\d/\d+ \[.*\b(?:step|rollout|actor/training)_time=")
_SECTIONS = {"Time": "time/", "Rollout": "rollout/"}
_BOTH = "environment and rollout answer each other inside this timer, so it contains waiting"


class _Parser:
    """A table over several lines, or a progress bar's state in one."""

    def __init__(self) -> None:
        self._table: StepRecord | None = None
        self._prefix: str | None = None  # of the table's section

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text
        if "│" in text or "├" in text or "╰" in text:
            if found := _TABLE_STEP.search(text):
                yield from self.end()
                self._table = StepRecord(int(found[1]), whole=False)
            elif section := _SECTION.match(text):
                self._prefix = _SECTIONS.get(section[1].strip())
            elif self._table is not None and "╰" in text:
                self._table.whole = line.whole
                yield from self.end()
            elif self._table is not None and self._prefix is not None:
                self._table.values |= LOG.metrics(text, "│", "=", self._prefix.__add__)
        elif "_time=" in text and (progress := _PROGRESS.search(text)):
            yield _progress_record(int(progress[1]), text[progress.end() :])

    def end(self) -> Iterator[StepRecord]:
        table, self._table, self._prefix = self._table, None, None
        if table is not None:
            yield table


def _progress_record(step: int, text: str) -> StepRecord:
    def named(name: str) -> str:
        return f"time/{name.removesuffix('_time')}" if name.endswith("_time") else f"rollout/{name}"

    inside, bracket, _ = text.partition("]")
    return StepRecord(step, LOG.metrics(inside, ", ", "=", named), whole=bool(bracket))


LOG = LogFramework(
    name="rlinf",
    supported_logs="RLinf: the metric table (metrics.log), the progress bar with `rollout_time=...`, TensorBoard",
    prefix="time/",
    marker=_BAR_OR_TABLE,
    parser=_Parser,
    needles=("│".encode(), "├".encode(), "╰".encode(), b"_time="),
    parts={
        "rollout": (
            *(("rollout",), ("rollout/predict",), ("rollout/predict_rtc",)),
            *(("generate_rollouts",), ("rollout/rollout/generate",)),
        ),
        "env": (("env/env_interact_step",), ("env/interact",)),
        "reward": (("reward",), ("reward/compute_reward",), ("reward/compute_rewards",)),
        "inference": (("actor/inference",), ("inference",)),
        "critic_inference": (("critic/inference",),),
        "actor": (("actor/training",), ("actor_training", "cal_adv_and_returns"), ("actor/run_training",)),
        "critic": (("critic/training",),),
        "weight_sync": (("sync_weights",),),
    },
    total="step",
    periodic=("eval", "save_checkpoint", "evaluate"),
    idle=("actor/wait_for_rollout_store_ready", "actor/recv_traj"),
    waits=(
        Wait(
            "rollout",
            ("time/actor/wait_for_rollout_store_ready",),
            "in RLinf's asynchronous runners the rollout runs beside the training",
        ),
        Wait("rollout", ("time/generate_rollouts",), _BOTH, ("time/rollout/predict", "time/rollout/predict_rtc")),
        Wait("env", ("time/env/interact",), _BOTH, ("time/env/env_interact_step",)),
        Wait(
            "reward",
            ("time/reward",),
            "the reward worker's timer runs from the step's start and contains waiting for answers",
        ),
        Wait(
            "reward",
            ("time/reward/compute_rewards",),
            "the reward worker's timer contains waiting for the environment",
            ("time/reward/compute_reward",),
        ),
    ),
    lengths=("rollout/response_length", "rollout/average_response_length"),
    answers="rollout/total_num_sequence",
    reward="rollout/rewards",
    last="actor",
    other_timers=("prepare_data",),
)


# ---- configs ---------------------------------------------------------------------------------------------------------


_PROGRAMS = (
    *("train_embodied_agent", "train_async", "train_offline_rl", "main_grpo", "main_coding_online_rl"),
    *("main_coding_rl_llm_judge", "main_rstar2", "searchr1.train", "wideseek_r1.train"),
)


class Rlinf(FrameworkConfig):
    """An RLinf config; `read` chooses the subclass."""

    NAME = "rlinf"
    TITLE = "RLinf"
    LOG = LOG
    REQUIRED = ("rollout", "actor")

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.nodes, self.gpus_per_node = cluster_size(composed.reader)
        self.total = self.nodes * self.gpus_per_node
        self.cluster = common.even_cluster(self.nodes, self.gpus_per_node)
        self.placed = ranks(composed.reader, self.total)
        super().__init__(composed, profile)

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        runs = reader.has("runner.task_type") and reader.has("cluster.num_nodes")
        return runs or reader.has(KEY) or reader.has("profile_data")

    @classmethod
    def read(cls, composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
        from trimtab.formats.frameworks.rlinf_embodied import Embodied
        from trimtab.formats.frameworks.rlinf_reasoning import Reasoning

        reader = composed.reader
        kind = reader.text("runner.task_type", "")
        if (kind and kind not in TRAINS) or reader.boolean("runner.only_eval", False):
            raise reader.error(
                "runner",
                f"this is no RL training: runner.task_type is {kind}" if kind not in TRAINS else "this only evaluates",
                f"plans are made for runner.task_type {', '.join(TRAINS)}",
            )
        embodied = kind == "embodied" or reader.has("profile_data.env_profile_data")
        return (Embodied if embodied else Reasoning)(composed, profile).loaded()

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """Hydra programs of RLinf's examples, which take `--config-path` and `--config-name`."""
        named = any(word.partition("=")[0] in ("--config-name", "-cn") for word in launch.arguments)
        if not named or not launch.runs(*_PROGRAMS):
            return None
        app = hydra_launch(launch)
        if app.config is None:
            raise launch.error(f"the config {app.wanted} is not here", "run this in a checkout that has it")
        return ConfigSource(app.config, app.overrides)

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        total = reader.counted("cluster.num_nodes", "cluster.num_gpus_per_node")
        gpus = {name: len(found) for name, found in ranks(reader, total).items()}
        if "actor" in gpus:
            # Components without a placement (inference in shared mode) run on the actor's GPUs.
            gpus.setdefault("trainer", gpus["actor"])
        if total is None and not gpus:
            reader.count("cluster.num_gpus_per_node")
        answers = reader.counted("data.rollout_batch_size", "algorithm.group_size")
        places = {str(value).strip().lower() for value in reader.mapping(KEY).values()}
        return RunFacts(total, gpus, answers, shared=len(places) == 1)

    def placement_text(self, gpus: Sequence[int]) -> str:
        """Ranks, and `all` only where the file says how many that are: a cluster may have more."""
        every = len(gpus) == self.total and self.reader.has("cluster.num_gpus_per_node")
        return "all" if every else ranks_text(gpus)

    def block(self, values: dict[str, Any]) -> str:
        size = {"cluster.num_nodes": self.nodes, "cluster.num_gpus_per_node": self.gpus_per_node}
        return block_text(nested({**size, **values}))

    def check_profile_data(self, known: Sequence[str], hint: str) -> None:
        """Refuse a config without `profile_data`, or with unknown keys in it."""
        if not self.reader.has("profile_data"):
            raise self.reader.error("profile_data", "profile_data is missing: component costs are unknown", hint)
        for key in self.reader.mapping("profile_data"):
            if key not in known:
                raise self.reader.error(
                    f"profile_data.{key}",
                    f"profile_data has no key {key}",
                    meant(key, known, f"it has: {', '.join(known)}"),
                )

    def stated_cost(self, name: str, measured_on: int, hint: str | None = None) -> tuple[tuple[int, float], ...]:
        """A cost in `profile_data` as points: seconds on `measured_on` GPUs, or `{GPUs: seconds}`."""
        reader, key = self.reader, f"profile_data.{name}_cost"
        stated = reader.get(key)
        if not isinstance(stated, dict):
            return ((measured_on, reader.number(key, hint=hint if stated is None else None)),)
        points: dict[int, float] = {}
        for gpus, seconds in stated.items():
            count, cost = as_number(gpus), as_number(seconds)
            if count is None or count < 1 or count != int(count) or cost is None or cost < 0:
                what = f"{gpus!r}: {seconds!r} is no pair of GPUs and finite seconds"
                raise reader.error(key, what)
            points[int(count)] = cost
        if not points:
            raise reader.error(key, "no time is given", f"write {name}_cost: {{GPUS: SECONDS}}")
        return tuple(sorted(points.items()))


def cluster_size(reader: ConfigReader) -> tuple[int, int]:
    """(nodes, GPUs per node). RLinf counts GPUs in the live cluster, so a config may not state them.

    Then they are those that the placements name; `all` names none, so with one `all` they have to be stated.
    """
    nodes = reader.count("cluster.num_nodes", 1)
    per_node = reader.optional_count("cluster.num_gpus_per_node")
    if per_node is not None:
        common.check_gpus(nodes * per_node, f"{nodes:,} nodes of {per_node:,} GPUs", reader.where("cluster"))
        return nodes, per_node
    placed = _all_ranks(reader, None).values()
    highest = max((gpus[-1] for gpus in placed if gpus), default=None)
    if highest is None or (highest + 1) % nodes or not all(placed):
        raise reader.error(
            "cluster.num_gpus_per_node",
            "how many GPUs a node has is not stated",
            "add it to the file, or to the command: ++cluster.num_gpus_per_node=8",
        )
    common.check_gpus(highest + 1, f"GPUs 0 to {highest:,}", reader.where(KEY))
    return nodes, (highest + 1) // nodes


def stated_placement(reader: ConfigReader) -> dict[str, Any]:
    """Component name to its placement as written. Joint keys (`a,b`) are split."""
    placements: dict[str, Any] = {}
    for names, value in reader.mapping(KEY).items():
        for name in (part.strip() for part in str(names).split(",")):
            if name in placements:
                raise reader.error(f"{KEY}.{names}", f"{name} is placed twice")
            if name:
                placements[name] = value
    return placements


def ranks(reader: ConfigReader, total: int | None) -> dict[str, tuple[int, ...]]:
    """The GPUs of every placed component on `total` GPUs, if known. Raises InputError on an invalid placement."""
    found = _all_ranks(reader, total)
    for name, gpus in found.items():
        if not gpus:
            what = "on no GPU" if total is not None else "on GPUs that cannot be counted"
            hint = 'name GPUs, for example "0-3", or all'
            raise reader.error(f"{KEY}.{name}", f"{name} is placed {what}", hint)
    return found


def _all_ranks(reader: ConfigReader, total: int | None) -> dict[str, tuple[int, ...]]:
    return {
        name: _ranks(_text(reader, name, value), total, reader.where(f"{KEY}.{name}"))
        for name, value in stated_placement(reader).items()
    }


def _text(reader: ConfigReader, name: str, value: Any) -> str:
    where = reader.where(f"{KEY}.{name}")
    if isinstance(value, Mapping):
        group = value.get("node_group", "cluster")
        if group != "cluster":
            raise InputError(
                f"{name} is placed in the node group {group}, and plans are made for one kind of node so far",
                where=where,
                hint="plan this workflow with a job file of trimtab's own form, which knows unlike nodes",
            )
        value = value.get("placement", "")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"a placement is a rank, a range or all, not {value!r}", where=where)
    return str(value)


def _ranks(placement: str, total: int | None, where: str) -> tuple[int, ...]:
    """The GPU ranks of a placement; without a total `all` is empty."""
    result: list[int] = []
    for part in (piece.strip() for piece in placement.split(",")):
        if not part:
            continue
        resources, _, processes = part.partition(":")
        gpus = _resources(resources.strip(), total, placement, where)
        if gpus and result and gpus[0] <= result[-1]:
            repeated = sorted(set(gpus) & set(result))
            what = f"names GPU {ranks_text(repeated)} twice" if repeated else f"goes down at GPU {gpus[0]}"
            raise InputError(
                f"the placement {placement!r} {what}", where=where, hint="write ranks once each, in ascending order"
            )
        if ":" in part and gpus:
            _check_processes(processes.strip(), len(gpus), placement, where)
        result.extend(gpus)
    return tuple(result)


def _resources(text: str, total: int | None, placement: str, where: str) -> list[int]:
    if text.lower() == "all":
        return list(range(total or 0))
    match = _RANGE.match(text)
    if match is None:
        raise InputError(
            f"the placement {placement!r} cannot be understood at {text!r}",
            where=where,
            hint='write all, a rank, a range such as "0-3", or several with commas; always in quotes',
        )
    first, last = int(match[1]), int(match[2] if match[2] is not None else match[1])
    if last < first:
        raise InputError(f"the placement {placement!r} runs down from GPU {first} to GPU {last}", where=where)
    if total is not None and last >= total:
        outside = ranks_text(range(max(first, total), last + 1))
        trap = "; an unquoted 4:0 is the number 240 in YAML, so put placements in quotes" if first >= 60 else ""
        raise InputError(
            f"the placement {placement!r} names GPU {outside}, and the cluster has GPUs 0-{total - 1}",
            where=where,
            hint=f"correct it, or state cluster.num_nodes and cluster.num_gpus_per_node{trap}",
        )
    return list(range(first, last + 1))


def _check_processes(text: str, gpus: int, placement: str, where: str) -> None:
    ranks = rank_range(text)
    if ranks is None:
        raise InputError(f"the processes in {placement!r} are a rank or a range, not {text!r}", where=where)
    if max(len(ranks), gpus) % min(len(ranks), gpus):
        raise InputError(
            f"{len(ranks)} processes cannot be spread evenly over {gpus} GPUs in {placement!r}", where=where
        )
