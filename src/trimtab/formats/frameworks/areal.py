"""AReaL's configs and logs: an engine string for every role, and roles that share another's GPUs.

A role's `backend` is a string such as `sglang:d4t2` or `fsdp:d8`; its sizes multiply to the role's GPUs, and a plan
changes the data-parallel size. Older configs state all roles in `allocation_mode`. Reference, critic and teacher have
GPUs of their own or those of the actor (`scheduling_strategy`). The rollout has its own, or takes turns with the actor
on the same GPUs: then AReaL wants as many engines as actor processes, `enable_offload` and weights that are updated by
disk. Costs come from a profile.

Logs are tables of `timeperf/*` after `Train step N/M done.`, and the same names in TensorBoard and W&B. With
`max_head_offpolicyness` above 0 the rollout runs beside the training, and `timeperf/rollout` is the trainer's wait for
it. No timer holds a whole step: the total is the sum of the timers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats import yaml_text
from trimtab.formats.frameworks import common
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import MAX_COUNT, ComposedConfig, ConfigReader
from trimtab.formats.launch import flags
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, Wait, number
from trimtab.formats.write_back import block_text, nested
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.workflow import Profile, Variant

ENGINES = ("sglang", "vllm")
HELPERS: Mapping[str, tuple[str, ...]] = {
    "ref": ("ref",),
    "critic": ("values", "update_critic"),
    "teacher": ("teacher",),
}
"""Roles beside actor and rollout, with their components."""

_OLD = "allocation_mode"
_STALENESS = "rollout.max_head_offpolicyness"
_LAUNCHERS = ("areal.infra.launcher", "areal.launcher")
_OVERRIDE = re.compile(r"[~+]{0,2}[A-Za-z_][\w.@/]*=|~[A-Za-z_]")


# ---- logs ------------------------------------------------------------------------------------------------------------

_DONE = re.compile(r"\bTrain step (\d{1,12})/\d+ done\b")
_CELL = re.compile(r"([A-Za-z_][\w/.\-]*)\s*│\s*([-+0-9.eE]+)\s*(?=│)")


class _Parser:
    """The tables that follow a finished step, several metrics in a row."""

    def __init__(self) -> None:
        self._step: StepRecord | None = None

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        if found := _DONE.search(line.text):
            yield from self.end()
            self._step = StepRecord(int(found[1]))
        elif self._step is not None and "│" in line.text:
            for name, value in _CELL.findall(line.text):
                if LOG.keeps(name) and (read := number(value)) is not None:
                    self._step.values[name] = read
            self._step.whole = self._step.whole and line.whole

    def end(self) -> Iterator[StepRecord]:
        step, self._step = self._step, None
        if step is not None:
            yield step


LOG = LogFramework(
    name="areal",
    supported_logs="AReaL: console tables with `timeperf/rollout` after `Train step N/M done.`, TensorBoard, W&B",
    prefix="timeperf/",
    marker=re.compile(r"│ timeperf/[a-z_]+\s+│|\bTrain step \d{1,12}/\d+ done\b"),
    parser=_Parser,
    needles=("│".encode(), b"Train step "),
    parts={
        "rollout": (("rollout",),),
        "values": (("critic_values",),),
        "ref": (("ref_logp",),),
        "teacher": (("teacher_logp",),),
        "old_log_prob": (("recompute_logp",),),
        "update_actor": (("train_step", "compute_advantage"),),
        "update_critic": (("critic_train_step",),),
        "weight_sync": (("update_weights",),),
    },
    total="",
    periodic=("save", "checkpoint_for_recover", "eval"),
    waits=(
        Wait(
            "rollout",
            ("timeperf/rollout",),
            "unless max_head_offpolicyness is 0 (say so with --config), AReaL's rollout timer is the trainer's wait",
            ("timeperf/rollout_offload",),
        ),
    ),
    lengths=("ppo_actor/seq_len/avg", "grpo_actor/seq_len/avg"),
    reward="ppo_actor/task_reward/avg",
)


# ---- configs ---------------------------------------------------------------------------------------------------------

_SPEC = re.compile(r"(?:(?P<backend>[a-z]+)(?:\[(?P<name>\w+)\])?[:.])?(?P<sizes>.+)", re.DOTALL)
_SIZES = re.compile(r"(?:[dptcem][1-9][0-9]{0,5})+")
_HYBRID = re.compile(r"\(?attn:((?:[dptc][1-9][0-9]{0,5})+)\|ffn:((?:[dpte][1-9][0-9]{0,5})+)\)?")
_SIZE = re.compile(r"([a-z])(\d+)")


class Allocation(Frozen):
    """A role's backend string, read: `text` is the string, `attn` the sizes that multiply to its GPUs."""

    text: str
    backend: str
    name: str
    attn: Mapping[str, int]
    ffn: Mapping[str, int]

    @classmethod
    def of(cls, text: str, error: InputError) -> Allocation:
        """The allocation of a string; `error` is raised for one that is not AReaL's."""
        found = _SPEC.fullmatch(text.strip())
        if found is None:
            raise error
        hybrid = _HYBRID.fullmatch(found["sizes"])
        if hybrid is None and not _SIZES.fullmatch(found["sizes"]):
            raise error
        attn, ffn = hybrid.groups() if hybrid else (found["sizes"], "")
        allocation = cls(text.strip(), found["backend"] or "", found["name"] or "", _sizes(attn), _sizes(ffn))
        if not 1 <= allocation.gpus <= MAX_COUNT or allocation.gpus % allocation.multiple:
            raise error
        return allocation

    @property
    def parallel(self) -> int:
        """GPUs of one data-parallel replica."""
        return math.prod(size for key, size in self.attn.items() if key in "tpcm")

    @property
    def gpus(self) -> int:
        return self.attn.get("d", 1) * self.parallel

    @property
    def multiple(self) -> int:
        """What the GPU count has to be a multiple of: a replica, and a replica of the experts."""
        experts = self.ffn or self.attn
        pipeline = self.attn.get("p", 1)
        inner = experts.get("e", 1) * (self.ffn.get("t", 1) if self.ffn else 1) * pipeline
        return math.lcm(self.parallel, inner if experts.get("e", 1) > 1 else 1)

    @property
    def is_engine(self) -> bool:
        return self.backend in ENGINES

    def on(self, gpus: int) -> str:
        """The string for another number of GPUs: only data-parallel sizes change."""
        head, attention, rest = self.text.partition("attn:")
        if not attention:
            backend, colon, sizes = self.text.rpartition(":")
            return backend + colon + _with_d(sizes, gpus // self.parallel)
        sizes, bar, ffn = rest.partition("|")
        experts = math.prod(size for key, size in self.ffn.items() if key in "te") * self.attn.get("p", 1)
        ffn = _with_d(ffn, gpus // experts) if "d" in self.ffn else ffn
        return head + attention + _with_d(sizes, gpus // self.parallel) + bar + ffn


def _sizes(text: str) -> dict[str, int]:
    return {key: int(size) for key, size in _SIZE.findall(text)}


def _with_d(sizes: str, replicas: int) -> str:
    changed, count = re.subn(r"(?<![a-z])d\d+", f"d{replicas}", re.sub(r"(?<=\d)(?=[a-z])", "\0", sizes))
    return changed.replace("\0", "") if count else f"d{replicas}{sizes}"


class Areal(FrameworkConfig):
    """An AReaL config."""

    NAME = "areal"
    TITLE = "AReaL"
    LOG = LOG
    COMPONENTS = ("rollout", "old_log_prob", "ref", "values", "teacher", "update_critic", "update_actor")
    REQUIRED = ("rollout", "update_actor")
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("update_critic", "update_actor"), ("old_log_prob", "ref", "values", "teacher")
    )
    EVEN_NODES = False

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        super().__init__(composed, profile)
        reader = self.reader
        self.allocations = allocations(reader)
        self.shared = "rollout" in shares_with_actor(reader)
        self.apart = apart(reader, self.allocations)
        nodes, per_node = reader.count("cluster.n_nodes", 32), reader.count("cluster.n_gpus_per_node", 8)
        taken = sum(self.allocations[role].gpus for role in self._own_gpus())
        if taken > nodes * per_node and (nodes == 1 or not self.old):
            # AReaL's schedulers take the GPUs that are there, whatever the file says.
            self.assumptions.append(f"the roles have {taken} GPUs, the file's cluster {nodes * per_node}: {taken}")
            nodes, per_node = (1, taken) if nodes == 1 else (-(-taken // per_node), per_node)
        cluster = common.even_cluster(nodes, per_node)
        if taken > cluster.gpus:
            raise reader.error(
                "cluster",
                f"the roles have {taken} GPUs, and the cluster {cluster.gpus}",
                "set cluster.n_nodes and cluster.n_gpus_per_node, or smaller backends",
            )
        kept = sum(self.allocations[role].gpus for role in self.apart if not self.measured(*HELPERS[role]))
        self.cluster = common.without(cluster, kept)
        self.batches = reader.count("train_dataset.batch_size")
        self.staleness = int(reader.number(_STALENESS, 0))

    @classmethod
    def matches(cls, reader: ConfigReader) -> bool:
        named = reader.has("experiment_name") and reader.has("trial_name")
        return named and any(reader.has(key) for key in ("actor.backend", "rollout.backend", _OLD, "gconfig"))

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        if reader.has("actor") and reader.has("rollout"):
            return None
        return (
            "generation without training" if reader.has("rollout") else "training without a rollout (SFT or the like)"
        )

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """`python train.py --config FILE key=value ...`, also behind AReaL's launchers: the file tells whose it is."""
        (config,) = flags.flag_words(launch.arguments).get("config", ())[:1] or ("",)
        own = launch.runs(*(f"{name}.{how}" for name in _LAUNCHERS for how in ("local", "ray", "slurm")))
        if not config or not (own or (launch.program[-1:] and launch.program[-1].endswith(".py"))):
            return None
        path = launch.find(config)
        if path is None:
            if own or "areal" in launch.module:
                raise launch.error(f"the config {config} is not there", "give the folder that it is started in")
            return None
        data = yaml_text.parse(yaml_text.read_text(path), str(path)) if path.suffix in (".yaml", ".yml") else None
        if not isinstance(data, Mapping) or not {"experiment_name", "trial_name"} <= set(data):
            return None
        return ConfigSource(path, tuple(word for word in launch.arguments if _OVERRIDE.match(word)))

    @classmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        found = allocations(reader)
        by_name = {"rollout": found["rollout"].gpus, "trainer": found["actor"].gpus}
        for role in apart(reader, found):
            by_name |= dict.fromkeys(HELPERS[role], found[role].gpus)
        mode = cls.asynchronous(reader)
        answers = reader.counted("train_dataset.batch_size", "gconfig.n_samples")
        return RunFacts(by_name=by_name, answers_per_step=answers, asynchronous=mode, synchronous=mode is None)

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        found = allocations(reader)
        actor, engine = found["actor"], found["rollout"]
        rollout = 0 if "rollout" in shares_with_actor(reader) else engine.gpus
        samples = reader.counted("train_dataset.batch_size", "gconfig.n_samples")
        most = [reader.counted(key) for key in ("train_dataset.max_length", "gconfig.max_new_tokens")]
        share = {"sglang": "sglang.mem_fraction_static", "vllm": "vllm.gpu_memory_utilization"}[engine.backend]
        return {
            "framework": "areal",
            "model": reader.get("actor.path"),
            "gpus": actor.gpus + rollout + sum(found[role].gpus for role in apart(reader, found)),
            "rollout_gpus": rollout or None,
            "mode": "async" if cls.asynchronous(reader) else None,
            "staleness": reader.number(_STALENESS, 0) or None,
            "algorithm": "ppo" if "critic" in found else "grpo",
            "samples": samples,
            "train_batch": samples and samples // reader.count("actor.ppo_n_minibatches", 4),
            "max_tokens": sum(filter(None, most)) if all(most) else None,
            "rollout": {"tp": engine.attn.get("t", 1), "memory": reader.get(share), "backend": engine.backend},
            "train": {
                **{f"{size}p": actor.attn.get(size) for size in "tpc"},
                "ep": (actor.ffn or actor.attn).get("e"),
                "backend": "megatron" if actor.backend == "megatron" else "fsdp",
            },
        }

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        ahead = reader.number(_STALENESS, 0)
        return f"asynchronous (max_head_offpolicyness {ahead:g})" if ahead > 0 else None

    def _own_gpus(self) -> list[str]:
        """The roles that have GPUs of their own, in the order in which AReaL's scheduler gives them."""
        return ["actor", *self.apart, *([] if self.shared else ["rollout"])]

    def sizes(self, name: str) -> Variant:
        if name == "rollout":
            return Variant(multiple_of=self.allocations["rollout"].multiple)
        role = next((role for role, names in HELPERS.items() if name in names), "actor")
        allocation = self.allocations.get(role, self.allocations["actor"])
        samples = self.batches * self.reader.count("gconfig.n_samples", 1)
        multiple = allocation.multiple
        counts = (multiple * n for n in range(1, self.cluster.gpus // multiple + 1))
        even = tuple(g for g in counts if samples % (g // allocation.parallel) == 0 or g == allocation.gpus)
        return Variant(multiple_of=multiple, gpus=even)

    def options(self) -> list[list[list[str]]]:
        """The rollout apart, or with the actor (engines of one GPU, or awex); helper roles apart, or with the actor."""
        helpers = [role for role in HELPERS if self.measured(*HELPERS[role])]
        found: list[list[list[str]]] = []
        for mask in range(2 ** len(helpers)):
            alone = [role for bit, role in enumerate(helpers) if mask >> bit & 1]
            own = [self.measured(*HELPERS[role]) for role in alone]
            others = [name for role in helpers if role not in alone for name in self.measured(*HELPERS[role])]
            training = [*self.measured("old_log_prob", "update_actor"), *others]
            if not self.awex:
                found.append([["rollout"], training, *own])
            if self.awex or (self.allocations["rollout"].parallel == 1 and not self.old):
                found.append([["rollout", *training], *own])
        return found

    @property
    def old(self) -> bool:
        """Whether the config is one of the releases before engine strings."""
        return self.reader.has(_OLD) and not self.reader.has("actor.backend")

    @property
    def awex(self) -> bool:
        """Whether weights go to engines on the actor's own GPUs, of whatever size: the only way of this mode."""
        own = self.reader.text("actor._version", "v1")
        return self.shared and own == "v1" and self.reader.get("actor.weight_update_mode") == "awex"

    def notes(self) -> list[str]:
        notes = [f"on-policy: each step waits for its own samples ({_STALENESS} is 0)"]
        if self.staleness:
            ahead = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
            notes = [f"asynchronous: rollout beside training on weights up to {ahead} old"]
        kept = [role for role in self.apart if not self.measured(*HELPERS[role])]
        return [*notes, *(f"the {role} keeps its GPUs: not part of the plan, as it has no cost here" for role in kept)]

    def current(self) -> CurrentPlacement:
        ranks: dict[str, tuple[int, ...]] = {}
        first = 0
        for role in self._own_gpus():
            if role in self.apart and not self.measured(*HELPERS[role]):
                continue
            gpus = self.allocations[role].gpus
            ranks[role] = tuple(range(first, first + gpus))
            first += gpus
        ranks.setdefault("rollout", ranks["actor"])
        placed = dict.fromkeys(self.costs, ranks["actor"])
        placed["rollout"] = ranks["rollout"]
        for role in self.apart:
            placed |= dict.fromkeys(self.measured(*HELPERS[role]), ranks.get(role, ()))
        key = _OLD if self.old else "rollout.backend"
        return CurrentPlacement({name: placed[name] for name in self.costs}, self.reader.where(key))

    def mode_facts(self) -> Mapping[str, Any]:
        return {} if self.staleness else {"separate": not self.shared}

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        return (f"{key}={common.value_text(value)}",)

    def settings(self, plan: Plan) -> PlanSettings:
        gpus = {name: len(found) for name, found in common.gpus_by_component(plan).items()}
        roles = {"rollout": gpus["rollout"], "actor": gpus["update_actor"]}
        roles |= {role: gpus[found[0]] for role in HELPERS if (found := self.measured(*HELPERS[role]))}
        texts = {role: self.allocations[role].on(count) for role, count in roles.items() if role in self.allocations}
        if self.old:
            values: dict[str, Any] = {_OLD: _in_old_mode(self.reader, self.allocations, texts)}
            return PlanSettings(values, block_text(nested(values)))
        values = {f"{role}.backend": text for role, text in texts.items() if not self._follows_actor(role, text, texts)}
        for role in HELPERS:
            if role in roles:
                alone = plan.group_of(HELPERS[role][-1]) != plan.group_of("update_actor")
                if alone != (role in self.apart):
                    values |= _strategy(role, None if alone else "actor")
        shared = plan.group_of("rollout") == plan.group_of("update_actor")
        if shared != self.shared:
            values |= _strategy("rollout", "actor" if shared else None)
        if shared and not self.awex:
            values |= {"enable_offload": True, "actor.weight_update_mode": "disk"}
        return PlanSettings(values, block_text(nested(values)))

    def _follows_actor(self, role: str, text: str, texts: Mapping[str, str]) -> bool:
        """Whether a role's backend is the actor's by interpolation, and stays it."""
        return (
            role in HELPERS
            and text == texts["actor"]
            and self.allocations[role].text == self.allocations["actor"].text
            and not self.composed.literal(f"{role}.backend")
        )


def allocations(reader: ConfigReader) -> dict[str, Allocation]:
    """The allocation of each role that a run has. Raises InputError for one that cannot be read, or is missing."""
    found: dict[str, Allocation] = {}
    if reader.has("actor.backend") or not reader.has(_OLD):
        for role in ("actor", "rollout", *HELPERS):
            if role in ("actor", "rollout") or _has(reader, role):
                key = f"{role}.backend"
                if not reader.has(key):
                    raise reader.missing(key, f"say which engine it has, for example {key}=fsdp:d4")
                found[role] = Allocation.of(reader.text(key, ""), _unread(reader, key))
    else:
        unread = _unread(reader, _OLD)
        parts = [Allocation.of(text, unread) for text in _parts(reader.text(_OLD, ""), unread)]
        trainers = [part for part in parts if not part.is_engine]
        for role, part in (("rollout", next((p for p in parts if p.is_engine), None)), ("actor", _named(trainers))):
            if part is None:
                raise reader.error(_OLD, f"there is no {role} in {reader.text(_OLD, '')!r:.80}")
            found[role] = part
        for role in HELPERS:
            if _has(reader, role):
                found[role] = next((part for part in trainers if part.name == role), found["actor"])
    for role, allocation in found.items():
        if allocation.is_engine != (role == "rollout"):
            raise reader.error(f"{role}.backend", f"{allocation.text!r:.60} is no backend of the {role}")
    return found


def _named(trainers: list[Allocation]) -> Allocation | None:
    return next((part for part in trainers if part.name == "actor"), trainers[0] if trainers else None)


def _parts(mode: str, unread: InputError) -> list[str]:
    """The roles' strings in an old `allocation_mode`: joined by `+`, or by `|` where they share GPUs."""
    parts = re.split(r"\+|\|(?!ffn:)", mode.strip())
    if any(part in ("eval", "cpu") for part in parts):
        unread.what = f"{mode!r:.60} is an allocation for evaluation, not for training"
        raise unread
    return parts


def _in_old_mode(reader: ConfigReader, before: Mapping[str, Allocation], after: Mapping[str, str]) -> str:
    """The old `allocation_mode` with the parts of changed roles replaced."""
    changed = {before[role].text: text for role, text in after.items()}
    pieces = re.split(r"(\+|\|(?!ffn:))", reader.text(_OLD, ""))
    return "".join(changed.get(piece.strip(), piece) for piece in pieces)


def _unread(reader: ConfigReader, key: str) -> InputError:
    return reader.error(
        key,
        f"{reader.text(key, '')!r:.80} is no backend that AReaL takes",
        "write for example sglang:d4t2, fsdp:d8, megatron:d2p2t2 or megatron:(attn:d1p4t2|ffn:d1p4e2)",
    )


def _has(reader: ConfigReader, role: str) -> bool:
    """Whether a run makes workers of a helper role."""
    return reader.has(role) and (role != "ref" or reader.number("actor.kl_ctl", 0.1) > 0)


def _target(reader: ConfigReader, role: str) -> str | None:
    strategy = f"{role}.scheduling_strategy"
    colocated = reader.text(f"{strategy}.type", "separation") == "colocation"
    return reader.text(f"{strategy}.target", "") if colocated else None


def shares_with_actor(reader: ConfigReader) -> set[str]:
    """The roles whose workers are on the actor's GPUs."""
    targets = {role: _target(reader, role) for role in ("actor", "rollout", *HELPERS)}
    found = {"actor"}
    for _ in targets:
        found |= {role for role, target in targets.items() if target in found}
        found |= {target for role, target in targets.items() if role in found and target}
    return found - {"actor"}


def apart(reader: ConfigReader, found: Mapping[str, Allocation]) -> tuple[str, ...]:
    """The helper roles with GPUs of their own."""
    old = reader.has(_OLD) and not reader.has("actor.backend")
    shares = shares_with_actor(reader)
    return tuple(
        role for role in HELPERS if role in found and role not in shares and not (old and found[role] is found["actor"])
    )


def _strategy(role: str, target: str | None) -> dict[str, Any]:
    key = f"{role}.scheduling_strategy"
    return {f"{key}.type": "colocation" if target else "separation", f"{key}.target": target}
