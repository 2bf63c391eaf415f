"""What NVIDIA's AIConfigurator says of the serving points: seconds per output token from tables of measured kernels.

It needs an environment of its own (`pip install aiconfigurator`, 850 MB), whose Python runs this file. The file
takes the points as JSON and writes a line for each once it is known; what was said is kept in `aiconfigurator.csv`.
Only models whose configs it has are asked for, so that it fetches nothing.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".csv")
NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
}
"""Its names of the same architectures."""
MATRICES = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}


def stored() -> dict[str, float | None]:
    """Its seconds per output token by the point's id; None where it has no answer."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["tpot_ms"]) / 1e3 if row["tpot_ms"] else None for row in csv.DictReader(file)}


def ask(python: str, points: Iterable[Mapping[str, str]]) -> None:
    """Have it answer all points, and keep the answers."""
    command = [python, "-I", __file__]
    found = subprocess.run(command, input=json.dumps(list(points)), text=True, stdout=subprocess.PIPE, check=True)
    FILE.write_text("id,version,tpot_ms,reason\n" + found.stdout, encoding="utf-8")


def settings(point: Mapping[str, str]) -> dict[str, object]:
    """A point as the arguments of its `cli_estimate`; its batch is that of one rank of attention."""
    ranks, experts = int(point["attention_dp"]), int(point["moe_ep"])
    dense = "Llama" in point["model"]
    precision = MATRICES.get(point["precision"]) if dense or point["precision"] == "nvfp4" else None
    return {
        "model_path": NAMES.get(point["model"], point["model"]),
        "system_name": point["gpu"],
        "backend_name": point["backend"],
        "isl": int(point["isl"]),
        "osl": int(point["osl"]),
        "batch_size": max(1, round(int(point["concurrency"]) / ranks)),
        "tp_size": int(point["tp"]),
        "attention_dp_size": ranks,
        "moe_tp_size": None if dense else int(point["tp"]) * ranks // experts,
        "moe_ep_size": None if dense else experts,
        "gemm_quant_mode": precision,
        "moe_quant_mode": None if dense else precision,
    }


def main() -> None:
    """In its environment: points on standard input, answers as lines of a table."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    with contextlib.redirect_stdout(sys.stderr):
        api = importlib.import_module("aiconfigurator.cli.api")
        version = importlib.import_module("importlib.metadata").version("aiconfigurator")
    database = importlib.import_module("aiconfigurator.sdk.perf_database")
    newest = cache(lambda gpu, backend: database.get_latest_database_version(system=gpu, backend=backend))
    for point in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                release = newest(point["gpu"], point["backend"])
                answer = api.cli_estimate(**settings(point), backend_version=release)
            out.writerow((point["id"], version, f"{answer.tpot:.4g}", ""))
        except Exception as error:  # whatever it raises where it does not know a pair
            out.writerow((point["id"], version, "", f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
