"""Models and GPU kinds by name, from the tables that ship with trimtab, or from a user's file.

A model is a name of `data/models.csv`, a `config.json`, or the folder that holds one; a GPU kind is a name of
`data/gpus.csv` or a YAML file with the same keys. An unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, unknown
from trimtab.formats import yaml_text
from trimtab.formats.files import is_folder
from trimtab.formats.logs.lengths import TOKEN_KEYS
from trimtab.model.architecture import Architecture, from_config
from trimtab.model.gpus import GpuKind

ORGANISATIONS = re.compile(r"^.*/(?=[^/])|/$")
SUFFIXES = re.compile(r"-(instruct|it|base|chat|hf|thinking|sft|bf16|fp8|nvfp4|\d{4}|v0\.\d|[a-z-]*rl-\w+|rl)$")


@cache
def table(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of a table that ships with trimtab."""
    text = (resources.files("trimtab.formats") / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def model_names() -> list[str]:
    return [row["name"] for row in table("models")]


def canonical(name: str) -> str | None:
    """The table's name of a model as people write it: `Qwen/Qwen2.5-7B-Instruct` is `qwen2.5-7b`."""
    known = set(model_names())
    word = ORGANISATIONS.sub("", name.strip()).lower().replace("_", "-").replace(" ", "-")
    word = re.sub(r"^(meta-llama|llama)-?(\d)", r"llama-\2", word).replace("deepseek-r1-distill", "r1-distill")
    while word not in known:
        shorter = SUFFIXES.sub("", word)
        if shorter == word:
            return None
        word = shorter
    return word


def model(name: str) -> tuple[str, Architecture]:
    """(name, architecture) of a table's name or of a path."""
    path = Path(name)
    if path.suffix == ".json" or is_folder(path):
        return path.parent.name if path.suffix == ".json" else path.name, read_config(path)
    known = canonical(name)
    if known is None:
        words = model_names()
        bare = ORGANISATIONS.sub("", name).lower()
        raise unknown(bare, words, what="unknown model {}: --model takes a name of the table or a folder")
    row = next(row for row in table("models") if row["name"] == known)
    return known, from_config(config_of(row), known)


def config_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The `config.json` keys of a row of the models' table."""
    apart = ("name", "parameters_b", "active_b", "other", "source")
    config: dict[str, Any] = {key: number_or_word(text) for key, text in row.items() if key not in apart and text}
    vision: dict[str, Any] = {}
    for word in row["other"].split():
        key, _, text = word.partition("=")
        if key == "vision_deepstack":
            vision["deepstack_visual_indexes"] = list(range(int(text)))
        elif key.startswith("vision_"):
            vision[key.removeprefix("vision_")] = number_or_word(text)
        else:
            config[key] = number_or_word(text)
    return {**config, "vision_config": vision} if vision else config


def read_config(path: Path) -> Architecture:
    """Read a `config.json`, or the folder that holds one."""
    file = path / "config.json" if is_folder(path) else path
    text = yaml_text.read_text(file)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"this is not valid JSON: {error.msg}", where=f"{file}, line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not valid JSON: {error!s:.200}", where=str(file)) from None
    if not isinstance(data, dict):
        raise InputError("a model's config.json holds a mapping of keys", where=str(file))
    return from_config(data, str(file))


def gpu_names() -> list[str]:
    return [row["name"] for row in table("gpus")]


def gpu(name: str) -> GpuKind:
    """A GPU kind by name (`H100`, `A100-80GB`, `NVIDIA L4`) or from a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return _gpu_of(yaml_text.read_mapping(Path(name)), name)
    word = name.strip().lower().removeprefix("nvidia").strip(" -").replace(" ", "-").replace("_", "-")
    word = re.sub(r"(-sxm\d?|-hbm3|-nvl)", "", word)
    word = re.sub(r"(\d)gb$", r"\1", word)
    if word.startswith(("rtx4090", "4090")):
        word = "rtx-4090"
    rows: dict[str, Mapping[str, str]] = {row["name"]: row for row in table("gpus")}
    base = re.sub(r"-\d+$", "", word)
    found = word if word in rows else {"a100": "a100-80"}.get(word, base if base in rows else None)
    if found is None:
        raise unknown(word, rows, what="unknown GPU kind {}: give a name of the table or a file.yaml")
    row = rows[found]
    return _gpu_of({key: number_or_word(text) for key, text in row.items()}, "gpus.csv")


def _gpu_of(data: Any, where: str) -> GpuKind:
    fields = GpuKind.__dataclass_fields__
    if not isinstance(data, Mapping):
        raise InputError("a GPU file holds a mapping of keys", where=where, hint=f"keys: {', '.join(fields)}")
    for key in data:
        if key not in fields:
            raise unknown(str(key), fields, where=where)
    numbers = [key for key in fields if key not in ("name", "source")]
    given = {key: data[key] for key in numbers if key in data}
    bf16 = given.get("bf16_tflops")
    given.setdefault("fp8_tflops", bf16)
    given.setdefault("fp4_tflops", given["fp8_tflops"])
    needed = ("bf16_tflops", "memory_gb", "bandwidth_gbs", "intra_node_gbs", "inter_node_gbs")
    missing = [key for key in needed if key not in given]
    if missing:
        raise InputError(f"the GPU file has no {', '.join(missing)}", where=where)
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise InputError(f"{key} is {value!r:.60}, not a number above 0", where=f"{where}: {key}")
    name = str(data.get("name", Path(where).stem))
    return GpuKind(**{**given, "name": name, "source": str(data.get("source", where))})


def lengths(path: Path, prompt: float = 0.0) -> tuple[tuple[float, float], ...]:
    """(tokens of prompt and answer, share) pairs of a file: a length a line, `tokens,count`, or JSON with `tokens`.

    A dump of answers has the lengths of these alone, to which the prompt is added.
    """
    pairs: dict[float, float] = {}
    for number, line in enumerate(yaml_text.read_text(path).splitlines(), start=1):
        if not line.strip() or (number == 1 and line[0].isalpha()):
            continue
        try:
            tokens, count = _length(line, prompt)
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"this line holds no length: {line:.60}",
                where=f"{path}, line {number}",
                hint="a line is a count of tokens, or tokens,count, or a JSON object with tokens or response_tokens",
            ) from None
        pairs[tokens] = pairs.get(tokens, 0.0) + count
    total = sum(pairs.values())
    if not total:
        raise InputError("the file holds no lengths", where=str(path))
    return tuple((tokens, count / total) for tokens, count in sorted(pairs.items()))


def _length(line: str, prompt: float) -> tuple[float, float]:
    if line.lstrip().startswith("{"):
        data = json.loads(line)
        whole = next((data[key] for key in ("tokens", "total_tokens", "length") if key in data), None)
        if whole is None:  # a log or dump of answers
            answer = next((data[key] for key in TOKEN_KEYS if key in data), None)
            whole = (len(answer) if isinstance(answer, list) else answer) + data.get("prompt_tokens", prompt)
        pair: Iterable[float] = (float(whole), 1.0)
    else:
        words = line.replace("\t", ",").split(",")
        pair = (float(words[0]), float(words[1]) if len(words) > 1 else 1.0)
    tokens, count = pair
    if not (0 < tokens < 1e8 and 0 <= count < 1e12):
        raise ValueError(line)
    return tokens, count


def number_or_word(text: str) -> Any:
    """A cell of a table, or the value of an option: true, false, a number, or a word."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
