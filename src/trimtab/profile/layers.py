"""Measures a PyTorch model that is a chain of blocks: seconds, memory and data that crosses each cut, per block.

Blocks are timed as they run in a pipeline stage: pass after pass through the whole chain, so that no block finds its
weights in a cache that a real pass would have emptied. The median of the passes counts. This module must never import
anything but torch, the standard library and `block_chain.py`: the two files alone measure on a machine where nothing
can be installed (`python layers.py FACTORY --input 128,2048 > profile.json`), and `trimtab profile layers --from-json`
imports the result. It never writes a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from trimtab.profile import block_chain
except ImportError:  # copied without the package
    import block_chain  # type: ignore[import-not-found, no-redef]

KIND = "trimtab layer profile"
MB = 2**20


@dataclass(frozen=True)
class LayerProfile:
    """A measurement; `as_data` is its exchange format."""

    model: str
    factory: str
    device: str
    device_name: str
    device_mem_MB: int  # noqa: N815 - the file format's key
    torch: str
    dtype: str
    batch_size: int
    warmup: int
    repeats: int
    names: tuple[str, ...]
    time_s: tuple[float, ...]
    slowest_s: tuple[float, ...]
    whole_s: float  # the median pass; the sum of the blocks' medians minus this is the cost of the clocks
    parameters: tuple[int, ...]
    weights_MB: tuple[float, ...]  # noqa: N815
    activations_MB: tuple[float, ...]  # noqa: N815
    parameters_in: int
    parameters_out: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain data with the keys of the file formats, and more."""
        data: dict[str, Any] = {"kind": KIND}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = list(value) if isinstance(value, tuple) else value
        data["layers"] = len(self.names)
        data["mem_MB"] = [
            round(weights + activations, 6)
            for weights, activations in zip(self.weights_MB, self.activations_MB, strict=True)
        ]
        return data


def profile_layers(
    factory: str,
    *,
    model_name: str = "",
    blocks: str = "",
    model_input: str = "",
    batch_size: int = 8,
    dtype: str = "torch.float32",
    device: str = "cpu",
    warmup: int = 2,
    repeats: int = 5,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda sentence: None,
) -> LayerProfile:
    """Load a model and measure its blocks. `factory` is `package.module:factory` or `file.py:factory`."""
    for what, value, minimum in (("batch size", batch_size, 1), ("repeats", repeats, 1), ("warm-up", warmup, 0)):
        if value < minimum:
            raise block_chain.InputError(f"the {what} is {minimum} or more, not {value}")
    torch = block_chain.import_torch()
    if threads is not None:
        if threads < 1:
            raise block_chain.InputError(f"the number of threads is 1 or more, not {threads}")
        torch.set_num_threads(threads)
    kind = block_chain.dtype_of(dtype)
    place = block_chain.device_of(device)
    progress(f"building {factory}")
    chain = block_chain.load_chain(factory, blocks=blocks, dtype=dtype, device=device)
    given = block_chain.input_maker(model_input, batch_size=batch_size, dtype=dtype, device=device)(0)
    with torch.inference_mode():
        start = block_chain.guarded(lambda: chain.begin(given), "the model", device)
        notes: dict[str, None] = {}
        if chain.outside:
            notes[f"{chain.outside:,} parameters are outside the blocks and not part of this profile"] = None
        crossing = [_crossing(start, batch_size, kind, notes)]
        activations: list[float] = []
        carried = start
        progress(f"{len(chain.blocks)} blocks; memory")
        for number, block in enumerate(chain.blocks, 1):
            subject = f"block {number} ({chain.names[number - 1]})"
            # The first call of a block may build permanent caches: the second one is measured.
            block_chain.guarded(lambda block=block, carried=carried: block_chain.step(block, carried), subject, device)  # type: ignore[misc]
            carried, used = _measured_memory(block, carried, place)
            activations.append(round(used / MB, 6))
            crossing.append(_crossing(carried, batch_size, kind, notes, last=number == len(chain.blocks)))
        with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
            samples, whole = _timed(chain, start, place, warmup, repeats, progress)
    if max(whole) > 1.5 * statistics.median(whole):
        notes[
            f"the slowest pass took {max(whole) / statistics.median(whole):.1f} times the median: a busy machine?"
        ] = None
    weights = [_weights(block) for block in chain.blocks]
    return LayerProfile(
        model=model_name or factory.rpartition(":")[2],
        factory=factory,
        device=device,
        device_name=_device_name(place),
        device_mem_MB=_device_memory(place) // MB,
        torch=str(torch.__version__),
        dtype=str(kind),
        batch_size=batch_size,
        warmup=warmup,
        repeats=repeats,
        names=chain.names,
        time_s=tuple(_short(statistics.median(times)) for times in samples),
        slowest_s=tuple(_short(max(times)) for times in samples),
        whole_s=_short(statistics.median(whole)),
        parameters=tuple(count for count, _ in weights),
        weights_MB=tuple(round(size / MB, 6) for _, size in weights),
        activations_MB=tuple(activations),
        parameters_in=crossing[0],
        parameters_out=tuple(crossing[1:]),
        notes=tuple(notes),
    )


def _crossing(
    carried: block_chain.BlockOutput, batch_size: int, dtype: Any, notes: dict[str, None], *, last: bool = False
) -> int:
    """Elements per sample that cross a cut here; each tensor counts once."""
    strange: set[str] = set()
    # After the last block only its result leaves.
    handed = carried.value if last else (carried.value, carried.rest, carried.named)
    count = 0
    for tensor in {id(tensor): tensor for tensor in block_chain.tensors_in(handed, strange)}.values():
        if tensor.dim() and tensor.shape[0] == batch_size:
            count += tensor.numel() // batch_size
        else:
            count += tensor.numel()
            notes["a tensor without the batch dimension crosses cuts and is counted for every sample"] = None
        if tensor.dtype.itemsize != dtype.itemsize:
            notes[f"{tensor.dtype} crosses cuts; a plan counts its elements with the size of {dtype}"] = None
    for name in sorted(strange):
        notes[f"an object of type {name} crosses cuts; tensors inside it are not counted"] = None
    return count


def _weights(block: Any) -> tuple[int, int]:
    """(parameters of a block, bytes of its parameters and buffers)."""
    held = {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}
    return (
        sum(parameter.numel() for parameter in block.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in held.values()),
    )


def _measured_memory(block: Any, carried: block_chain.BlockOutput, device: Any) -> tuple[block_chain.BlockOutput, int]:
    """Run a block; return its output and its peak bytes besides weights, input and output."""
    torch = block_chain.import_torch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output = block_chain.step(block, carried)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        live = _live_tensors()
        with live:
            output = block_chain.step(block, carried)
        peak = live.peak
    kept = {id(t): t.numel() * t.element_size() for t in block_chain.tensors_in(output.value)}
    return output, max(0, peak - sum(kept.values()))


def _live_tensors() -> Any:
    """A torch dispatch mode that tracks live tensors: a block's memory on a CPU, without kernels' scratch space."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LiveTensors(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.peak = 0
            self._now = 0
            self._holders: dict[int, int] = {}  # storage -> live tensors on it that were made here

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
        ) -> Any:
            output = operation(*args, **(named or {}))
            given = {tensor.untyped_storage()._cdata for tensor in block_chain.tensors_in((args, named or {}))}
            for tensor in block_chain.tensors_in(output):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._holders:
                    if key in given:  # a view of a weight or of the block's input
                        continue
                    self._holders[key] = 0
                    self._now += size
                    self.peak = max(self.peak, self._now)
                self._holders[key] += 1
                weakref.finalize(tensor, self._gone, key, size).atexit = False
            return output

        def _gone(self, key: int, size: int) -> None:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._now -= size

    return LiveTensors()


def _timed(
    chain: block_chain.BlockChain,
    start: block_chain.BlockOutput,
    device: Any,
    warmup: int,
    repeats: int,
    progress: Callable[[str], None],
) -> tuple[list[list[float]], list[float]]:
    """(seconds of each block in each counted pass, seconds of each counted pass)."""
    torch = block_chain.import_torch()
    samples: list[list[float]] = [[] for _ in chain.blocks]
    whole: list[float] = []
    on_gpu = device.type == "cuda"
    for number in range(warmup + repeats):
        progress(f"pass {number + 1} of {warmup + repeats}")
        marks: list[Any] = []
        if on_gpu:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        carried = start
        marks.append(_mark(torch, on_gpu))
        for block in chain.blocks:
            carried = block_chain.step(block, carried)
            marks.append(_mark(torch, on_gpu))
        if on_gpu:
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if number < warmup:
            continue
        whole.append(ended - begun)
        for index, (start_mark, end_mark) in enumerate(itertools.pairwise(marks)):
            samples[index].append(start_mark.elapsed_time(end_mark) / 1000 if on_gpu else end_mark - start_mark)
    return samples, whole


def _mark(torch: Any, on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _device_name(device: Any) -> str:
    if device.type == "cuda":
        return str(block_chain.import_torch().cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        model = "CPU"
    return f"{model}, {block_chain.import_torch().get_num_threads()} threads"


def _device_memory(device: Any) -> int:
    if device.type == "cuda":
        return int(block_chain.import_torch().cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this file alone; prints JSON."""
    import argparse

    parser = argparse.ArgumentParser(prog="layers.py", description="Measure a PyTorch model block by block; JSON out.")
    parser.add_argument("factory", help="package.module:factory or file.py:factory")
    parser.add_argument("--model-name", default="", help="the model's name in models.yml")
    parser.add_argument("--blocks", default="", help="path of the list of blocks in the model: model.layers")
    parser.add_argument(
        "--input",
        dest="model_input",
        metavar="INPUT",
        default="",
        help="shape without the batch (128,2048), or module:make_input",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="torch.float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--warmup", type=int, default=2, help="passes that do not count")
    parser.add_argument("--repeats", type=int, default=5, help="passes that count")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    given = vars(parser.parse_args(arguments))
    try:
        measured = profile_layers(**given, progress=lambda sentence: print(sentence, file=sys.stderr))
    except block_chain.InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(measured.as_data(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
