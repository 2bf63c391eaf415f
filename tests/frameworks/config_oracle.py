"""What configs of AReaL and ROLL say, found the slow and obvious way; shares no code with trimtab's readers."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from corpus_oracle import Answer, Case, NotPlanned, Says, at, span
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def _composed(path: Path) -> Any:
    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict):
        raise ValueError("no mapping")
    if "defaults" not in data:
        return OmegaConf.create(data)
    with warnings.catch_warnings(), initialize_config_dir(config_dir=str(path.parent.resolve()), version_base=None):
        warnings.simplefilter("ignore")
        return compose(config_name=path.name, overrides=[])


# ---- AReaL ---------------------------------------------------------------------------------------------------------


def areal_cases(root: Path) -> Iterator[Case]:
    for path in sorted(root.rglob("*.yaml")):
        text = path.read_text()
        if re.search(r"^(actor|rollout):", text, re.MULTILINE) and "experiment_name" in text:
            yield Case(path)


def areal_gpus(text: str) -> int:
    """GPUs of `sglang:d4t2` or `megatron:(attn:d1p12t4|ffn:d1p12e4)`: all sizes but those of experts, multiplied."""
    attention = text.split("|ffn")[0].rpartition(":")[2]
    return math.prod(int(size) for key, size in re.findall(r"([a-z])(\d+)", attention) if key in "dptc")


def areal_says(case: Case) -> Answer:
    config = _composed(case.path)
    if at(config, "rollout") is None or at(config, "actor") is None or at(config, "gconfig") is None:
        return NotPlanned("no rollout, or no training")
    per_node = at(config, "cluster.n_gpus_per_node", 8)
    if not per_node:
        return NotPlanned("a run without GPUs")
    mode = at(config, "allocation_mode")
    if mode:
        engine, trainer = mode.split("+")
        gpus = {"rollout": areal_gpus(engine), "update_actor": areal_gpus(trainer)}
    else:
        gpus = {"rollout": areal_gpus(config.rollout.backend), "update_actor": areal_gpus(config.actor.backend)}
    places = {"update_actor": span(0, gpus["update_actor"])}
    over = at(config, "rollout.scheduling_strategy.type") == "colocation"
    places["rollout"] = span(0 if over else gpus["update_actor"], gpus["rollout"])
    cluster = at(config, "cluster.n_nodes", 32) * per_node
    teacher = 0
    if at(config, "teacher") is not None and at(config, "teacher.scheduling_strategy.type") != "colocation":
        teacher = areal_gpus(config.teacher.backend)
    return Says(
        places,
        config.train_dataset.batch_size,
        at(config, "rollout.max_head_offpolicyness", 0),
        max(cluster, len(frozenset.union(*places.values())) + teacher) - teacher,
    )


# ---- ROLL ----------------------------------------------------------------------------------------------------------


def roll_cases(root: Path) -> Iterator[Case]:
    for path in sorted([*(root / "examples").rglob("*.yaml"), *(root / "tests" / "pipeline").rglob("*.yaml")]):
        if re.search(r"^(actor_infer|student_infer|actor_train|sft_train|student):", path.read_text(), re.MULTILINE):
            yield Case(path)


def roll_devices(config: Any, role: str) -> list[int]:
    mapping = at(config, f"{role}.device_mapping")
    return (
        sorted(eval(mapping, {"list": list, "range": range})) if isinstance(mapping, str) else list(mapping or ())
    )  # a file of a public checkout


def roll_says(case: Case) -> Answer:
    config = _composed(case.path)
    student = at(config, "student_train") is not None
    train, infer = ("student_train", "student_infer") if student else ("actor_train", "actor_infer")
    if at(config, f"{infer}.device_mapping") is None or at(config, f"{train}.device_mapping") is None:
        return NotPlanned("no rollout, or no training")
    if student and at(config, "teacher.device_mapping") is None:
        return NotPlanned("several teachers")
    places = {"update_actor": roll_devices(config, train), "rollout": roll_devices(config, infer)}
    rewards = at(config, "rewards", {})
    judges = [roll_devices(config, f"rewards.{name}") for name in rewards]
    judges += [roll_devices(config, name) for name in ("reward_model", "reward")]
    used = {gpu for gpus in places.values() for gpu in gpus}
    everywhere = used | {gpu for gpus in judges for gpu in gpus}
    reference = roll_devices(config, "teacher" if student else "reference")
    everywhere |= set(reference)
    judges.append(reference)
    last = max(everywhere)
    per_node = at(config, "num_gpus_per_node", 8 if last >= 8 else last + 1)
    kept = len({gpu for gpus in judges if used.isdisjoint(gpus) for gpu in gpus})
    return Says(
        {name: frozenset(gpus) for name, gpus in places.items()},
        at(config, "rollout_batch_size", 128),
        math.ceil(at(config, "async_generation_ratio", 0)),
        (last // per_node + 1) * per_node - kept,
    )
