"""`trimtab estimate` beside a GPU: decode, prefill and a training step of random models, predicted, then measured.

    python -m bench.estimate_gpu                              # on an H200: 0.5B, 1.5B and 7B, three batch sizes each
    python -m bench.estimate_gpu --parts train --batches 1,4  # some parts
    python -m bench.estimate_gpu --device cpu --sizes tiny --length 32 --gpu l4   # a dry run of the script itself

Needs torch and transformers in the interpreter that runs it, and vLLM for `decode` and `prefill`; nothing is
downloaded: weights are random, vLLM makes its own. All predictions are written to OUT/estimate_gpu.json before anything
is measured. Engines start together and are measured one after another. A part that fails or takes longer than --part-s
is reported, and the next begins. Not part of `make bench`.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.formats import catalogue
from trimtab.model.architecture import Architecture, from_config
from trimtab.model.gpus import GpuKind
from trimtab.plan.estimate.constants import CONSTANTS, Constants
from trimtab.plan.estimate.serving import EngineReplica, decode_work, prefill_seconds
from trimtab.plan.estimate.training import Trainer, pass_time

MODELS = Path(__file__).parent / "truth" / "gpu_models.csv"
PARTS = ("decode", "prefill", "train")
REPEATS = 3
GOAL = 0.15


@cache
def models() -> dict[str, dict[str, Any]]:
    """A `config.json` of each random model, in the sizes of a public one."""
    with MODELS.open(newline="", encoding="utf-8") as file:
        rows = {row.pop("name"): row for row in csv.DictReader(file)}
    return {
        name: {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "max_position_embeddings": 32_768,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": row.pop("tied") == "yes",
            **{key: int(value) for key, value in row.items()},
        }
        for name, row in rows.items()
    }


def architecture(name: str) -> Architecture:
    return from_config(models()[name], name)


def predicted(part: str, model: Architecture, gpu: GpuKind, batch: int, length: int, c: Constants = CONSTANTS) -> float:
    """Seconds of an output token for each sequence, of a prefill of the batch, or of a forward and backward pass."""
    engine = EngineReplica(model, gpu)
    if part == "decode":
        # Half as many tokens as a prompt has are decoded after it.
        return float(decode_work(engine, float(batch), length * 1.25).seconds(c))
    if part == "prefill":
        return prefill_seconds(engine, c, float(batch), float(length))
    trainer = Trainer(model, gpu, 1, fsdp=True, micro_tokens=float(batch * length))
    return pass_time(trainer, float(batch * length), float(length), 1.0, c, backward=True).seconds


def timed(action: Any, wait: Any) -> float:
    """Median seconds of some runs, after one that does not count."""
    action()
    took = []
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        action()
        wait()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure_train(size: str, batches: list[int], length: int, device: str) -> dict[str, float]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**models()[size]))
    model.gradient_checkpointing_enable()
    model.train()
    found = {}
    for batch in batches:
        tokens = torch.randint(0, models()[size]["vocab_size"], (batch, length), device=device)

        def step(tokens: Any = tokens) -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=tokens, labels=tokens).loss.backward()

        found[f"train {batch}"] = timed(step, torch.cuda.synchronize if device == "cuda" else lambda: None)
    return found


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """No other engine starts or is measured meanwhile."""
    (folder / "ready").touch()
    engines = [other for other in folder.parent.iterdir() if (other / "engine.log").exists()]
    while not all((other / "ready").exists() for other in engines):
        time.sleep(0.2)
    with (folder.parent / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure_engine(size: str, batches: list[int], length: int, folder: Path, device: str) -> dict[str, float]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    model = architecture(size)
    # Stated, not profiled: other engines start on the same GPU.
    kept = round(2 * model.layers * model.kv_per_token_and_layer * max(batches) * 2 * length)
    more: dict[str, Any] = {"gpu_memory_utilization": 0.3} if device == "cuda" else {"enforce_eager": True}
    try:
        llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
                  max_model_len=4 * length, kv_cache_memory_bytes=kept, **more)  # fmt: skip
    except BaseException:
        (folder / "ready").touch()  # the others do not wait for it
        raise
    found = {}
    with turn(folder):
        for batch in batches:
            prompts = [{"prompt_token_ids": [(7 * i + j) % 199 + 1 for j in range(length)]} for i in range(batch)]

            def ask(tokens: int, prompts: Any = prompts) -> None:
                sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
                llm.generate(prompts, sampling, use_tqdm=False)

            first = timed(lambda ask=ask: ask(1), lambda: None)
            many = timed(lambda ask=ask: ask(1 + length // 2), lambda: None)
            found[f"prefill {batch}"], found[f"decode {batch}"] = first, (many - first) / (length // 2)
    return found


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.estimate_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", help="kind of the GPU, as in `trimtab estimate --gpu`")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--sizes", default="qwen2.5-0.5b,qwen2.5-1.5b,qwen2.5-7b", help="rows of bench/truth/gpu_models.csv"
    )
    parser.add_argument("--batches", default="1,4,8", help="of a training step")
    parser.add_argument("--sequences", default="1,32,128", help="that an engine decodes at once")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part-s", type=float, default=240.0, help="limit of a model's measurement")
    parser.add_argument("--engine-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def started(options: argparse.Namespace, size: str, kind: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own measures, so that its memory is free afterwards; its messages go to a log."""
    command = [options.engine_python if kind == "engine" else sys.executable, "-m", "bench.estimate_gpu"]
    command += ["--measure", f"{kind},{size},{folder}", "--device", options.device, "--length", str(options.length)]
    command += ["--batches", options.batches, "--sequences", options.sequences]
    with (folder / f"{kind}.log").open("w") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)


def outcome(process: subprocess.Popen[str], deadline: float, log: Path) -> dict[str, Any]:
    try:
        lines = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].strip().splitlines()
    except subprocess.TimeoutExpired:
        return {"error": f"took too long (--part-s); {log}"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    if process.returncode or not lines:
        return {"error": f"{(log.read_text().strip().splitlines() or ['nothing was printed'])[-1][:300]}; {log}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.measure:
        kind, size, folder = options.measure.split(",", 2)
        if kind == "train":
            found = measure_train(size, counts(options.batches), options.length, options.device)
        else:
            found = measure_engine(size, counts(options.sequences), options.length, Path(folder), options.device)
        print(json.dumps(found))
        return 0
    gpu, parts, sizes = catalogue.gpu(options.gpu), options.parts.split(","), options.sizes.split(",")
    rows: dict[str, dict[str, Any]] = {}
    for size in sizes:
        model = architecture(size)
        for part in parts:
            for batch in counts(options.batches if part == "train" else options.sequences):
                guess = predicted(part, model, gpu, batch, options.length)
                rows[f"{size} {part} {batch}"] = {"predicted_s": guess}
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "estimate_gpu.json"
    file.write_text(json.dumps({"gpu": gpu.name, "rows": rows}, indent=1))
    print(f"{len(rows)} predictions for {gpu.name} written to {file}; measuring", flush=True)
    for old in (*options.out.glob("model-*/engine.log"), *options.out.glob("model-*/ready")):
        old.unlink()
    folders = {size: options.out / f"model-{size}" for size in sizes}
    for size, folder in folders.items():
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(models()[size]))

    def ended(size: str, kind: str, process: subprocess.Popen[str], deadline: float) -> None:
        found = outcome(process, deadline, folders[size] / f"{kind}.log")
        if "error" in found:
            print(f"{size} {kind}: {found['error']}", flush=True)
        for key, seconds in found.items():
            if f"{size} {key}" in rows:
                rows[f"{size} {key}"]["measured_s"] = seconds
        file.write_text(json.dumps({"gpu": gpu.name, "rows": rows}, indent=1))

    if "train" in parts:
        for size in sizes:
            ended(size, "train", started(options, size, "train", folders[size]), time.monotonic() + options.part_s)
    if {"decode", "prefill"} & set(parts):
        engines = {size: started(options, size, "engine", folders[size]) for size in sizes}
        deadline = time.monotonic() + options.part_s * len(sizes)
        for size, process in engines.items():
            ended(size, "engine", process, deadline)
    return report(rows)


def report(rows: dict[str, dict[str, Any]]) -> int:
    """The table, and the median error of each part."""
    errors: dict[str, list[float]] = {}
    for name, row in rows.items():
        if "measured_s" not in row:
            print(f"{name:20} predicted {1e3 * row['predicted_s']:9.2f} ms, not measured")
            continue
        error = row["predicted_s"] / row["measured_s"] - 1
        errors.setdefault(name.split()[1], []).append(abs(error))
        print(f"{name:20} predicted {1e3 * row['predicted_s']:9.2f} ms, measured {1e3 * row['measured_s']:9.2f} ms, "
              f"{error:+.0%}")  # fmt: skip
    for part, values in errors.items():
        print(f"{part:8} median error {statistics.median(values):.1%} of {len(values)} (goal {GOAL:.0%})")
    if errors:
        middle = statistics.median(value for values in errors.values() for value in values)
        print(f"all      median error {middle:.1%}: {'within' if middle <= GOAL else 'beyond'} {GOAL:.0%}")
    return 0 if errors else 1


if __name__ == "__main__":
    sys.exit(main())
