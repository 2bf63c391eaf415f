"""Writes the defaults of verl's trainers that planning reads, from published wheels, to formats/data/verl_defaults.csv.

    pip download verl==0.9.1 --no-deps -d wheels    # and the other versions
    python tools/defaults.py wheels/verl-*.whl

A row is a trainer config and a key, a column a version; an empty cell: the config of that version has no such key.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

TABLE = Path(__file__).parents[1] / "src" / "trimtab" / "formats" / "data" / "verl_defaults.csv"
CONFIGS = {
    "ppo_trainer": ("verl/trainer/config",),
    "ppo_megatron_trainer": ("verl/trainer/config",),
    "one_step_off_ppo_trainer": ("verl/experimental/one_step_off_policy/config",),
    "one_step_off_ppo_megatron_trainer": ("verl/experimental/one_step_off_policy/config",),
    "fully_async_ppo_trainer": ("verl/experimental/fully_async_policy/config",),
    "fully_async_ppo_megatron_trainer": ("verl/experimental/fully_async_policy/config",),
}
PARALLEL = r"(tensor|pipeline|context|expert)_model_parallel_size|context_parallel_size|data_parallel_size"
POOL = r"nnodes|n_gpus_per_node|enable|enable_resource_pool"
KEYS = re.compile(
    rf"""data\.(train_batch_size|gen_batch_size|max_prompt_length|max_response_length)
    | algorithm\.adv_estimator
    | actor_rollout_ref\.(hybrid_engine|model\.(path|lora_rank))
    | actor_rollout_ref\.actor\.(strategy|ppo_mini_batch_size|ppo_micro_batch_size_per_gpu|use_dynamic_bsz
        |ulysses_sequence_parallel_size|megatron\.({PARALLEL}))
    | actor_rollout_ref\.rollout\.(name|n|mode|{PARALLEL}|{POOL}|gpu_memory_utilization|max_num_seqs
        |free_cache_engine|checkpoint_engine\.backend)
    | (reward\.)?reward_model\.({POOL}|rollout\.({PARALLEL})) | distillation\.({POOL}) | critic\.enable
    | trainer\.({POOL}|use_v1|v1\.trainer_mode|v1\.separate_async\.num_warmup_batches|v1\.[\w.]*parameter_sync_step)
    | rollout\.(nnodes|n_gpus_per_node) | async_training\.(staleness_threshold|require_batches|partial_rollout
        |trigger_parameter_sync_step)""",
    re.VERBOSE,
)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in config:
        raw = OmegaConf.to_container(config, resolve=False)[key]
        name = f"{prefix}{key}"
        if isinstance(raw, dict):
            found |= flat(config[key], f"{name}.")
        elif KEYS.fullmatch(name):
            found[name] = raw
    return found


def composed(root: Path, folder: str, name: str) -> dict[str, Any] | None:
    place = root / folder
    if not (place / f"{name}.yaml").is_file():
        return None
    search = f"hydra.searchpath=[file://{root}/verl/trainer/config]"
    with warnings.catch_warnings(), initialize_config_dir(str(place), version_base=None):
        warnings.simplefilter("ignore")
        config = compose(f"{name}.yaml", overrides=[search])
    values = flat(config)
    for key, raw in values.items():
        targets = re.findall(r"[\w.]+\.\w+", str(raw)) if "${" in str(raw) else []
        if any(target not in values and not target.startswith("oc.") for target in targets):
            values[key] = OmegaConf.select(config, key)
    return values


def main() -> None:
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for wheel in sys.argv[1:]:
        version = Path(wheel).name.split("-")[1]
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".yaml")])
            for name, (place,) in CONFIGS.items():
                values = composed(Path(folder), place, name)
                if values is not None:
                    tables.setdefault(name, {})[version] = values
    versions = sorted({v for found in tables.values() for v in found}, key=lambda v: [int(n) for n in v.split(".")])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["config", "key", *versions])
        for name, found in tables.items():
            for key in sorted({key for values in found.values() for key in values}):
                cells = [found.get(version, {}).get(key, "") for version in versions]
                writer.writerow([name, key, *("null" if cell is None else cell for cell in cells)])
    print(f"{TABLE}: {', '.join(versions)}")


if __name__ == "__main__":
    main()
