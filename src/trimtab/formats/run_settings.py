"""From options to the inputs of an estimate: what was given, what a config gave, and what had to be chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, unknown
from trimtab.core.frozen import Frozen
from trimtab.formats import catalogue
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import BITS, GpuKind
from trimtab.plan.estimate import choose
from trimtab.plan.estimate.choose import Freedom
from trimtab.plan.estimate.constants import CONSTANTS, Constants
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.serving import EngineReplica, weight_bytes
from trimtab.plan.estimate.step import DYNAMIC_SAMPLING, PASSES, SEPARATE_FRACTION, SHARED_FRACTION, RunInputs
from trimtab.plan.estimate.training import Trainer

MODES = ("sync", "async", "colocate", "separate", "colocate-async")
FRAMEWORKS = ("verl", "nemo-rl", "openrlhf", "slime", "areal", "skyrl", "prime-rl", "rlinf", "trl", "roll")
BACKENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("openrlhf", "trl", "prime-rl"), ("fsdp",)),
    "slime": ("megatron",),
}
"""Of frameworks that have only one kind of training; others have both."""
TRANSPORTS = {"nemo-rl": "packed", "slime": "packed", "areal": "packed", "prime-rl": "packed"}
ROLLOUT_WORDS = ("tp", "dp", "precision", "kv", "memory", "sequences", "backend")
TRAIN_WORDS = ("tp", "pp", "cp", "ep", "dp", "lora", "backend", "recompute", "precision", "tokens", "epochs", "offload")
SYNCS = ("broadcast", "packed", "delta")
MOST = 10**9
MOST_OVERSAMPLED = 100


class Settings(Frozen):
    """A run to estimate, under the names that a user gave, with what was assumed."""

    run: RunInputs
    model: str
    framework: str
    algorithm: str
    offload: str
    assumed: tuple[str, ...]
    larger: tuple[RunInputs, ...] = ()
    """Twice and four times the GPUs, where their number was chosen."""


def parallel(text: str, option: str, words: tuple[str, ...]) -> dict[str, Any]:
    """`tp=4,pp=2` as a mapping; a flag without a value is true."""
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if key not in words:
            raise unknown(key, words, where=f"command line: {option}")
        found[key] = catalogue.number_or_word(value) if equals else True
    return found


def merged(inputs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a file with those of the command line over them; `rollout` and `train` word by word.

    An algorithm of the file's own, which no table has, is left to the default.
    """
    inputs = {key: value for key, value in inputs.items() if key != "algorithm" or str(value).lower() in PASSES}
    words = {
        key: {**inputs.get(key, {}), **parallel(given.get(key, ""), f"--{key}", known)}
        for key, known in (("rollout", ROLLOUT_WORDS), ("train", TRAIN_WORDS))
    }
    return {**inputs, **given, **words, "config": "framework" in inputs}


def build(given: Mapping[str, Any], c: Constants = CONSTANTS) -> Settings:
    """The run that the inputs describe; what is missing is chosen, and listed."""
    return _Builder(dict(given), c).settings()


def _fitting(model: Architecture, precision: str, gpu: GpuKind, gpus: int, fraction: float) -> int:
    """The least tensor-parallel size with which an engine's weights leave room for a cache."""
    needed = weight_bytes(model, precision) / (gpu.memory_gb * fraction * 0.6 * 2**30)
    return next((size for size in range(1, gpus + 1) if gpus % size == 0 and size >= needed), gpus)


class _Builder:
    """State while the inputs are completed."""

    def __init__(self, given: dict[str, Any], c: Constants) -> None:
        self.given, self.c = given, c
        self.assumed: list[str] = []
        self.free: Freedom | None = None
        self.rollout: dict[str, Any] = dict(given.get("rollout") or {})
        self.train: dict[str, Any] = dict(given.get("train") or {})

    def settings(self) -> Settings:
        if not self.given.get("model"):
            raise InputError("no model is given", hint="give --model NAME, or a folder with a config.json")
        if not self.given.get("gpu"):
            raise InputError("no GPU kind is given", hint=f"give --gpu, one of {', '.join(catalogue.gpu_names())}")
        name, model = catalogue.model(str(self.given["model"]))
        gpu = catalogue.gpu(str(self.given["gpu"]))
        rollout_gpu = catalogue.gpu(str(self.given["rollout_gpu"])) if self.given.get("rollout_gpu") else gpu
        framework = self._one_of("framework", FRAMEWORKS, "verl", alias={"nemo_rl": "nemo-rl", "nemo": "nemo-rl"})
        algorithm = self._one_of("algorithm", tuple(PASSES), "grpo")
        mode = self._one_of("mode", MODES, "sync")
        gpus = self._count("gpus", None)
        free = self.free = self._freedom(framework, mode)
        counted = gpus is not None or free is None
        if gpus is None:
            gpus = self._compatible(gpu, said=counted)
        apart = self._apart(mode, gpus)
        samples = self._count("samples", 1024) or 0
        batch = self._count("train_batch", samples) or 0
        lengths = self._lengths()
        engine = self._engine(model, rollout_gpu, apart or gpus, shared=not apart)
        trainer = self._trainer(model, gpu, gpus - apart, lengths, framework)
        transport = str(self.given.get("transport") or TRANSPORTS.get(framework, "broadcast"))
        if transport not in SYNCS:
            raise unknown(transport, SYNCS, where="command line: --transport")
        asynchronous = mode in ("async", "colocate-async")
        staleness = self._number("staleness", float(asynchronous))
        fraction = self.rollout.get("memory") or self._fraction(shared=not apart)
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise InputError(
                f"the engine's share of memory is {fraction}, not above 0 and at most 1", where="--rollout"
            )
        run = RunInputs(
            model=model,
            gpu=gpu,
            gpus=gpus,
            samples=samples,
            train_batch=min(batch, samples),
            lengths=lengths,
            engine=engine,
            trainer=trainer,
            rollout_gpus=apart,
            mode="async" if asynchronous else "sync",
            staleness=staleness,
            partial=bool(self.given.get("partial")) or mode == "colocate-async",
            lend=bool(self.given.get("lend")) and asynchronous,
            sync_every=max(1.0, self._number("sync_every", 1.0)),
            passes=tuple(name for name in PASSES[algorithm] if name != "old" or self.given.get("old_log_probs", True)),
            epochs=self._whole(self.train, "epochs", 1),
            memory_fraction=float(fraction),
            max_sequences=self._whole(self.rollout, "sequences", 1024),
            transport=transport,
            release=str(self.given.get("release") or ""),
            turns=int(self._number("turns", 1)),
            tool_seconds=self._number("tool_seconds", 0.0),
            image_tokens=self._number("image_tokens", 0.0),
            judge_seconds=self._number("judge_seconds", 0.0),
            **self._judge(rollout_gpu),
            oversample=self._oversample(algorithm),
        )
        offload = str(self.train.get("offload", "all"))
        if offload not in ("none", "optimizer", "all"):
            raise unknown(offload, ("none", "optimizer", "all"), where="command line: --train")
        larger: tuple[RunInputs, ...] = ()
        if free is not None:
            run = self._chosen(run, free, offload, counted=counted)
            if not counted:
                sizes = (choose.choose(choose.on(run, size * run.gpus), free, offload, self.c) for size in (2, 4))
                larger = tuple(size for size in sizes if size is not None)
        return Settings(run, name, framework, algorithm, offload, tuple(self.assumed), larger)

    def _compatible(self, gpu: GpuKind, *, said: bool) -> int:
        """GPUs of a run whose number is not given: a node, or what the given parallelism needs."""
        split = math.prod(self._whole(self.train, name, 1) for name in ("tp", "pp", "cp"))
        engine = self._whole(self.rollout, "tp", 1) * self._whole(self.rollout, "dp", 1)
        most = max(gpu.gpus_per_node, math.lcm(min(split, MOST), min(engine, MOST)))
        apart = self.given.get("rollout_gpus")
        if apart is not None:
            most = math.lcm(most, 2 * self._whole({"rollout GPUs": apart}, "rollout GPUs", 1))
        if said:
            self.assumed.append(f"GPUs: {most}")
        return most

    def _freedom(self, framework: str, mode: str) -> Freedom | None:
        """What may be chosen; a framework's config has values for everything, so that nothing is free."""
        if self.given.get("config"):
            return None
        own = BACKENDS.get(framework, ("fsdp", "megatron"))
        backend = self.train.get("backend")
        return Freedom(
            engine=not {"tp", "dp"} & set(self.rollout),
            fraction="memory" not in self.rollout,
            trainer=not {"tp", "pp", "cp", "ep", "dp"} & set(self.train),
            micro_batch="tokens" not in self.train,
            split=mode in ("async", "separate") and self.given.get("rollout_gpus") is None,
            backends=(str(backend),) if backend else own,
        )

    def _chosen(self, run: RunInputs, free: Freedom, offload: str, *, counted: bool) -> RunInputs:
        """The run with what was free chosen; as it is where nothing fits, so that the answer shows what is lacking."""
        found = (choose.choose if counted else choose.smallest)(run, free, offload, self.c)
        why = "the fastest that fits" if found else "nothing fits"
        run = found or run
        trainer, engine = run.trainer, run.engine
        if not counted:
            self.assumed.append(f"GPUs: {run.gpus}, " + ("the smallest number on which a run fits" if found else why))
        if free.split:
            self.assumed.append(f"GPUs of rollout alone: {run.rollout_gpus}, {why}")
        words = [f"tp={engine.tp}"] * free.engine + [f"memory={run.memory_fraction:g}"] * free.fraction
        if words:
            self.assumed.append(f"rollout: {','.join(words)}, {why}")
        words = ["backend=fsdp" if trainer.fsdp else "backend=megatron"] if free.trainer else []
        sizes = {name: getattr(trainer, name) for name in ("tp", "pp", "cp", "ep")}
        words += [f"{name}={size}" for name, size in sizes.items() if free.trainer and size > 1]
        words += [f"tokens={trainer.micro_tokens:.0f}"] * free.micro_batch
        if words:
            self.assumed.append(f"training: {','.join(words)}, {why}")
        return run

    def _one_of(self, key: str, words: tuple[str, ...], default: str, alias: Mapping[str, str] | None = None) -> str:
        value = self.given.get(key)
        if not value:
            self.assumed.append(f"{key}: {default}")
            return default
        word = str(value).lower()
        word = (alias or {}).get(word, word)
        if word not in words:
            raise unknown(word, words, where=f"--{key}", what=f"unknown {key} {{}}")
        return word

    def _number(self, key: str, default: float) -> float:
        value = self.given.get(key)
        if value is None:
            return default
        if not 0 <= float(value) < MOST:
            raise InputError(f"--{key.replace('_', '-')} is {value}, not a number from 0 to {MOST:,}")
        return float(value)

    def _oversample(self, algorithm: str) -> float:
        if algorithm == "dapo" and self.given.get("oversample") is None:
            self.assumed.append(f"dynamic sampling: {DYNAMIC_SAMPLING:g} answers decoded for each that is trained on")
            return DYNAMIC_SAMPLING
        times = self._number("oversample", 1.0)
        if not 1 <= times <= MOST_OVERSAMPLED:
            raise InputError(f"--oversample is {times:g}, not a factor from 1 to {MOST_OVERSAMPLED}")
        return times

    def _count(self, key: str, default: int | None) -> int | None:
        value = self.given.get(key)
        if value is None:
            if default is not None:
                self.assumed.append(f"{key.replace('_', ' ')}: {default:,}")
            return default
        if not 1 <= int(value) < MOST:
            raise InputError(f"--{key.replace('_', '-')} is {value}, not a count from 1 to {MOST:,}")
        return int(value)

    def _apart(self, mode: str, gpus: int) -> int:
        value = self.given.get("rollout_gpus")
        if mode in ("sync", "colocate", "colocate-async") and value is None:
            return 0
        value = max(1, gpus // 2) if value is None else value
        if not 1 <= int(value) < gpus:
            raise InputError(f"--rollout-gpus {value} leaves no GPU for one side of {gpus}", hint="give more --gpus")
        return int(value)

    def _lengths(self) -> Lengths:
        prompt = self.given.get("prompt_tokens")
        if prompt is None:
            prompt = min(200.0, self.given.get("max_prompt_tokens") or 200.0)
            self.assumed.append(f"prompt: {prompt:g} tokens")
        file = self.given.get("lengths")
        if file:
            pairs = catalogue.lengths(Path(str(file)), float(prompt))
            return Lengths.of(pairs, min(float(prompt), pairs[0][0] - 1 if pairs[0][0] > 1 else 0.0))
        most = self.given.get("max_tokens")
        if most is None:
            most = 4096
            self.assumed.append("longest sequence: 4,096 tokens of prompt and answer")
        mean = self.given.get("mean_tokens")
        if mean is None:
            mean = float(prompt) + (float(most) - float(prompt)) / 2
            self.assumed.append(f"mean sequence: {mean:,.0f} tokens, half of the longest answer")
        return Lengths.capped(float(mean), float(most), float(prompt))

    def _engine(self, model: Architecture, gpu: GpuKind, gpus: int, *, shared: bool) -> EngineReplica:
        precision = self._precision(self.rollout, "precision", "bf16")
        tp = self._whole(self.rollout, "tp", 0)
        if not tp:
            tp = _fitting(model, precision, gpu, gpus, SHARED_FRACTION if shared else SEPARATE_FRACTION)
            if self.free is None or not self.free.engine:
                self.assumed.append(f"rollout: tensor-parallel size {tp}")
        # With dp, attention is divided by requests and experts are over all tp x dp GPUs; a dense engine is a replica.
        wide = self._whole(self.rollout, "dp", 1) if model.experts else 1
        if gpus % (tp * wide):
            raise InputError(f"{gpus} GPUs of rollout are no multiple of an engine's {tp * wide}", where="--rollout")
        kv = self._precision(self.rollout, "kv", "bf16")
        backend = str(self.rollout.get("backend", "vllm"))
        return EngineReplica(model, gpu, tp * wide, wide, precision, kv, backend)

    def _judge(self, gpu: GpuKind) -> dict[str, Any]:
        """A judge or reward model that is a server: `MODEL:GPUS:TOKENS`, its verdict of so many tokens."""
        if not self.given.get("judge"):
            return {}
        name, gpus, tokens = (*str(self.given["judge"]).split(":"), "", "")[:3]
        model = catalogue.model(name)[1]
        sizes = {"GPUs of --judge": catalogue.number_or_word(gpus or "1")}
        sizes["tokens of --judge"] = catalogue.number_or_word(tokens or "1")
        own, verdict = (self._whole(sizes, what, 1) for what in sizes)
        if not gpus or not tokens:
            self.assumed.append(f"judge: {own} GPUs, verdicts of {verdict} tokens")
        engine = EngineReplica(model, gpu, _fitting(model, "bf16", gpu, own, SEPARATE_FRACTION))
        return {"judge": engine, "judge_gpus": own, "judge_tokens": float(verdict)}

    def _trainer(self, model: Architecture, gpu: GpuKind, gpus: int, lengths: Lengths, framework: str) -> Trainer:
        sizes = {name: self._whole(self.train, name, 1) for name in ("tp", "pp", "cp", "ep")}
        backend = str(self.train.get("backend") or ("megatron" if max(sizes.values()) > 1 else "fsdp"))
        if backend not in ("fsdp", "megatron"):
            raise unknown(backend, ("fsdp", "megatron"), where="--train")
        if "backend" not in self.train and (self.free is None or not self.free.trainer):
            self.assumed.append(f"training: {backend}")
        split = sizes["tp"] * sizes["pp"] * sizes["cp"]
        if gpus % split or gpus != split * self._whole(self.train, "dp", gpus // split):
            raise InputError(
                f"{gpus} GPUs of training do not make dp x tp x pp x cp, {split} without dp", where="--train"
            )
        if gpus // sizes["pp"] % sizes["ep"]:
            raise InputError(f"ep {sizes['ep']} does not divide {gpus // sizes['pp']} GPUs of a stage", where="--train")
        recompute = self.train.get("recompute")
        stated = recompute is not None
        if not stated:
            recompute = True
            self.assumed.append("training: activations are computed again")
        return Trainer(
            model,
            gpu,
            gpus,
            tp=sizes["tp"],
            pp=sizes["pp"],
            cp=sizes["cp"],
            ep=sizes["ep"],
            fsdp=backend == "fsdp",
            recompute=str(recompute).lower() not in ("false", "0", "no", "none"),
            recompute_timed=stated or backend == "fsdp",
            lora_rank=self._whole(self.train, "lora", 0),
            precision=self._precision(self.train, "precision", "bf16"),
            micro_tokens=float(self._whole(self.train, "tokens", round(lengths.longest))),
        )

    def _whole(self, section: Mapping[str, Any], key: str, default: int) -> int:
        value = section.get(key, default)
        if value == default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < MOST:
            raise InputError(f"{key} is {value!r:.40}, not a count from 1", hint="write for example --train tp=4,pp=2")
        return value

    def _precision(self, section: Mapping[str, Any], key: str, default: str) -> str:
        word = str(section.get(key, default)).lower()
        if word not in BITS:
            raise unknown(word, BITS, what="unknown precision {}")
        return word

    def _fraction(self, *, shared: bool) -> float:
        share = SHARED_FRACTION if shared else SEPARATE_FRACTION
        if self.free is None:
            self.assumed.append(f"engine's share of a GPU's memory: {share:g}")
        return share
