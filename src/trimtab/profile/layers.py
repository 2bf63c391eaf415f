"""Measures a PyTorch model that is a chain of blocks: seconds, memory and what crosses each cut, block by block.

The blocks are timed as they run in a pipeline stage: one pass after another through the whole chain, so that no block
finds its own weights in a cache that a real pass would have emptied. The median of the passes counts. This module must
never import anything but torch and the standard library: the file alone measures on a machine where nothing can be
installed (`python layers.py FACTORY --input 128,2048 > profile.json`), and `trimtab profile layers --from-json` takes
the result home. It never writes a file and never changes a model's weights, apart from their dtype and device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

try:
    from trimtab.core.errors import InputError
except ImportError:  # the file stands alone

    class InputError(Exception):  # type: ignore[no-redef]
        """The input or the call is wrong."""

        def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
            super().__init__("\n  ".join(part for part in (what, where and f"at {where}", hint) if part))


KIND = "trimtab layer profile"
MB = 2**20
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class BlockOutput:
    """What one block hands to the next: the value itself, and arguments that every block takes besides."""

    value: Any
    rest: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hand_over: str = "whole"  # of an output the next block takes the "whole", its "first" part, or all parts "spread"


@dataclass(frozen=True)
class BlockChain:
    """A model as blocks in a row, ready to run on a device."""

    blocks: tuple[Any, ...]
    names: tuple[str, ...]
    begin: Callable[[Any], BlockOutput]  # from what the model takes to what the first block takes
    outside: int = 0  # parameters of the model that are in no block
    imports: str = ""  # where the blocks' classes come from, for a process that is to unpickle them

    def run(self, model_input: Any) -> Any:
        """The result of the whole chain in this process."""
        with import_torch().inference_mode():
            carried = self.begin(model_input)
            for block in self.blocks:
                carried = step(block, carried)
        return carried.value


@dataclass(frozen=True)
class LayerProfile:
    """What was measured; `as_data` is the form in which it travels between machines."""

    model: str
    factory: str
    device: str
    device_name: str
    device_mem_MB: int  # noqa: N815 - the file format's own word
    torch: str
    dtype: str
    batch_size: int
    warmup: int
    repeats: int
    names: tuple[str, ...]
    time_s: tuple[float, ...]
    slowest_s: tuple[float, ...]
    whole_s: float  # the median pass; next to the sum of the medians it shows what the cuts' clocks cost
    parameters: tuple[int, ...]
    weights_MB: tuple[float, ...]  # noqa: N815
    activations_MB: tuple[float, ...]  # noqa: N815
    parameters_in: int
    parameters_out: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Plain data: the file formats' own keys, and what else is worth knowing."""
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
    for what, value, least in (("batch size", batch_size, 1), ("repeats", repeats, 1), ("warm-up", warmup, 0)):
        if value < least:
            raise InputError(f"the {what} is {least} or more, not {value}")
    torch = import_torch()
    if threads is not None:
        if threads < 1:
            raise InputError(f"the number of threads is 1 or more, not {threads}")
        torch.set_num_threads(threads)
    kind = dtype_of(dtype)
    place = device_of(device)
    progress(f"building {factory}")
    chain = load_chain(factory, blocks=blocks, dtype=dtype, device=device)
    given = input_maker(model_input, batch_size=batch_size, dtype=dtype, device=device)(0)
    with torch.inference_mode():
        start = _guard(lambda: chain.begin(given), "the model", device)
        notes: dict[str, None] = {}
        if chain.outside:
            notes[f"{chain.outside:,} parameters stand outside the blocks and are not part of this profile"] = None
        crossing = [_crossing(start, batch_size, kind, notes)]
        activations: list[float] = []
        carried = start
        progress(f"{len(chain.blocks)} blocks; memory")
        for number, block in enumerate(chain.blocks, 1):
            who = f"block {number} ({chain.names[number - 1]})"
            # The first call of a block may build caches that stay; the second one shows what a pass needs.
            _guard(lambda block=block, carried=carried: step(block, carried), who, device)  # type: ignore[misc]
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


def load_chain(factory: str, *, blocks: str = "", dtype: str = "torch.float32", device: str = "cpu") -> BlockChain:
    """Build the model, in a dtype and on a device, and find its blocks."""
    torch = import_torch()
    made = load(factory)
    if callable(made) and not isinstance(made, torch.nn.Module):
        made = _call(made, factory)
    kind, place = dtype_of(dtype), device_of(device)
    if isinstance(made, torch.nn.Module):
        model, row = made, made
    elif isinstance(made, Sequence) and made and all(isinstance(part, torch.nn.Module) for part in made):
        model = row = torch.nn.ModuleList(made)
    else:
        raise InputError(
            f"{factory} gives {type(made).__name__}, not a PyTorch module or a list of them",
            hint="name a function without arguments that builds the model",
        )
    model = _guard(lambda: model.eval().requires_grad_(False).to(device=place, dtype=kind), "the model", device)
    if blocks:
        row = _inside(model, blocks, factory)
    if not isinstance(row, torch.nn.Sequential | torch.nn.ModuleList):
        lists = [
            f"{name} ({len(part)} blocks)"
            for name, part in model.named_modules()
            if name and isinstance(part, torch.nn.Sequential | torch.nn.ModuleList) and len(part) > 1
        ]
        raise InputError(
            f"{blocks or factory} is a {type(row).__name__}, not a row of blocks",
            hint=f"name the row with --blocks: {', '.join(lists[:6])}"
            if lists
            else "wrap its parts in an nn.Sequential",
        )
    parts = tuple(row)
    if not parts:
        raise InputError(f"{blocks or factory} holds no block")
    prefix = f"{blocks}." if blocks else ""
    names = tuple(f"{prefix}{name}" for name, _ in row.named_children())
    if len(names) != len(parts):  # one block object that stands in the row several times
        names = tuple(f"{prefix}{index}" for index in range(len(parts)))
    if not blocks:
        return BlockChain(parts, names, BlockOutput, imports=_anywhere(factory))
    inside = {id(parameter) for block in parts for parameter in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return BlockChain(parts, names, lambda given: _first_call(model, parts, names, given), outside, _anywhere(factory))


def input_maker(text: str, *, batch_size: int, dtype: str, device: str) -> Callable[[int], Any]:
    """What makes the model's inputs: a shape without the batch dimension, or `package.module:make_input`.

    The maker takes the number of the input, so that several inputs differ and yet come back the same.
    """
    torch = import_torch()
    kind, place = dtype_of(dtype), device_of(device)
    hint = "--input 128,2048 (a shape without the batch), or --input package.module:make_input (takes a batch size)"
    if not text:
        raise InputError("what does the model take?", hint=hint)
    if ":" in text:
        make = load(text)
        if not callable(make):
            raise InputError(f"{text} is no function", hint=hint)

        def made(number: int) -> Any:
            torch.manual_seed(number)
            return on_device(_call(make, text, batch_size), place, kind)

        return made
    try:
        shape = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        raise InputError(f"{text!r} is no shape", hint=hint) from None
    if any(size < 1 for size in shape):
        raise InputError(f"every size of a shape is 1 or more: {text}", hint=hint)

    def drawn(number: int) -> Any:
        source = torch.Generator().manual_seed(number)
        return on_device(torch.randn([batch_size, *shape], generator=source), place, kind)

    return drawn


def step(block: Any, carried: BlockOutput) -> BlockOutput:
    """Run one block on what the one before handed over."""
    if carried.hand_over == "spread":
        output = tuple(block(*carried.value, **carried.named))
    else:
        output = block(carried.value, *carried.rest, **carried.named)
        if carried.hand_over == "first":
            output = output[0]
    return dataclasses.replace(carried, value=output)


def load(spec: str) -> Any:
    """The object that `package.module:name` or `path/file.py:name` stands for."""
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{spec!r} names no object", hint="write it as package.module:factory or file.py:factory")
    try:
        module = _file_module(module_name) if module_name.endswith(".py") else _named_module(module_name)
    except InputError:
        raise
    except Exception as fault:
        raise InputError(
            f"{module_name} cannot be imported: {type(fault).__name__}: {fault}",
            where=spec,
            hint="modules are looked for in this folder, too; file.py:factory names a file",
        ) from None
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{module_name} has no {name}", where=spec)
        found = getattr(found, part)
    return found


def _anywhere(spec: str) -> str:
    """The same object, named so that a process in another folder finds it."""
    module_name, _, name = spec.rpartition(":")
    return f"{os.path.realpath(module_name)}:{name}" if module_name.endswith(".py") else spec


def dtype_of(name: str) -> Any:
    """The torch dtype that a name such as torch.bfloat16, bfloat16 or bf16 stands for."""
    torch = import_torch()
    short = name.removeprefix("torch.")
    found = getattr(torch, _SHORT_DTYPES.get(short, short), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no dtype {name}", hint="for example torch.float32, torch.bfloat16, torch.float16")
    if not found.is_floating_point and not found.is_complex:
        raise InputError(f"a model cannot be run in {name}", hint="name a floating-point dtype")
    return found


def device_of(name: str) -> Any:
    """The torch device, which must be there."""
    torch = import_torch()
    try:
        place = torch.device(name)
    except (RuntimeError, ValueError):
        raise InputError(f"{name} is no device", hint="cpu, cuda or cuda:1") from None
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"layers are measured on cpu or cuda, not on {name}")
    if place.type == "cuda" and (not torch.cuda.is_available() or (place.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"there is no device {name} on this machine", hint="--device cpu measures here")
    return place


def on_device(value: Any, device: Any, dtype: Any = None) -> Any:
    """The same nest of tuples, lists and mappings with its tensors on a device, floating ones in a dtype."""
    torch = import_torch()
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype if dtype is not None and value.is_floating_point() else None)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(part, device, dtype) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(on_device(part, device, dtype) for part in value)
    if type(value) is dict:
        return {key: on_device(part, device, dtype) for key, part in value.items()}
    if isinstance(value, BlockOutput):
        inner, rest, named = on_device((value.value, value.rest, dict(value.named)), device, dtype)
        return BlockOutput(inner, rest, named, value.hand_over)
    return value


def tensors_in(value: Any, strange: set[str] | None = None) -> Iterator[Any]:
    """Every tensor in a nest of tuples, lists, mappings and dataclasses; names of other types go into `strange`."""
    if isinstance(value, import_torch().Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part, strange)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, strange)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), strange)
    elif strange is not None and not isinstance(value, _PLAIN):
        strange.add(type(value).__name__)


def _first_call(model: Any, blocks: tuple[Any, ...], names: tuple[str, ...], model_input: Any) -> BlockOutput:
    """Run the model once and keep what its first block was called with; check that the blocks are a chain."""
    calls: list[tuple[Any, ...]] = []
    outputs: list[Any] = []
    hand_overs: list[str] = []

    def before(block: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        number = len(calls)
        if number >= len(blocks) or block is not blocks[number]:
            _no_chain(f"block {names[min(number, len(names) - 1)]} is not called once and in its turn")
        if number == 0:
            if not args:
                _no_chain(f"block {names[0]} takes its input by keyword")
            calls.append((args, named))
            return
        (first_args, first_named), output = calls[0], outputs[-1]
        if args and args[0] is output:
            found, rest = "whole", args[1:]
        elif isinstance(output, tuple | list) and output and args and args[0] is output[0]:
            spread = len(args) == len(output) > 1 and all(a is b for a, b in zip(args, output, strict=True))
            found, rest = ("spread", ()) if spread else ("first", args[1:])
        else:
            _no_chain(f"block {names[number]} does not take what block {names[number - 1]} gives")
        same_rest = found == "spread" or _same(rest, first_args[1:])
        if not same_rest or not _same(named, first_named):
            _no_chain(f"block {names[number]} takes other side arguments than block {names[0]}")
        hand_overs.append(found)
        calls.append((args, named))

    def after(block: Any, args: tuple[Any, ...], output: Any) -> None:
        outputs[:] = [output]

    hooks = []
    for block in dict.fromkeys(blocks):
        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.register_forward_hook(after))
    try:
        if isinstance(model_input, Mapping):
            model(**model_input)
        elif isinstance(model_input, tuple):
            model(*model_input)
        else:
            model(model_input)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != len(blocks):
        _no_chain(f"only {len(calls)} of {len(blocks)} blocks are called")
    if len(set(hand_overs)) > 1:
        _no_chain("its blocks hand over in different ways")
    hand_over = hand_overs[0] if hand_overs else "whole"
    args, named = calls[0]
    if hand_over == "spread":
        return BlockOutput(tuple(args), (), dict(named), hand_over)
    return BlockOutput(args[0], tuple(args[1:]), dict(named), hand_over)


def _no_chain(why: str) -> NoReturn:
    raise InputError(f"the blocks are no chain: {why}", hint="wrap the parts in an nn.Sequential of your own")


def _same(one: Any, other: Any) -> bool:
    torch = import_torch()
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _crossing(carried: BlockOutput, batch_size: int, dtype: Any, notes: dict[str, None], *, last: bool = False) -> int:
    """Elements per sample that cross a cut here: every tensor, once."""
    strange: set[str] = set()
    # After the last block only its result leaves.
    handed = carried.value if last else (carried.value, carried.rest, carried.named)
    count = 0
    for tensor in {id(tensor): tensor for tensor in tensors_in(handed, strange)}.values():
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
    """Parameters of a block, and the bytes of its parameters and buffers."""
    held = {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}
    return (
        sum(parameter.numel() for parameter in block.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in held.values()),
    )


def _measured_memory(block: Any, carried: BlockOutput, device: Any) -> tuple[BlockOutput, int]:
    """Run a block; give its output and the most bytes it held besides weights, input and output."""
    torch = import_torch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output = step(block, carried)
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device) - before
    else:
        live = _live_tensors()
        with live:
            output = step(block, carried)
        most = live.most
    kept = {id(t): t.numel() * t.element_size() for t in tensors_in(output.value)}
    return output, max(0, most - sum(kept.values()))


def _live_tensors() -> Any:
    """A mode under which torch tells every tensor it makes: the memory of a block on a CPU, kernels' scratch aside."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LiveTensors(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.most = 0
            self._now = 0
            self._holders: dict[int, int] = {}  # storage -> tensors on it that are alive and were made here

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
        ) -> Any:
            output = operation(*args, **(named or {}))
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, named or {}))}
            for tensor in tensors_in(output):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._holders:
                    if key in given:  # a view of a weight or of the block's input
                        continue
                    self._holders[key] = 0
                    self._now += size
                    self.most = max(self.most, self._now)
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
    chain: BlockChain, start: BlockOutput, device: Any, warmup: int, repeats: int, progress: Callable[[str], None]
) -> tuple[list[list[float]], list[float]]:
    """Seconds of every block in every counted pass, and of every pass."""
    torch = import_torch()
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
            carried = step(block, carried)
            marks.append(_mark(torch, on_gpu))
        if on_gpu:
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if number < warmup:
            continue
        whole.append(ended - begun)
        for index, (one, other) in enumerate(itertools.pairwise(marks)):
            samples[index].append(one.elapsed_time(other) / 1000 if on_gpu else other - one)
    return samples, whole


def _mark(torch: Any, on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _guard(action: Callable[[], Any], who: str, device: str) -> Any:
    """Run the user's code; its failures are told as failures of the block, or of the memory."""
    try:
        return action()
    except InputError:
        raise
    except Exception as fault:
        first_line = str(fault).strip().split("\n")[0]
        if type(fault).__name__ == "OutOfMemoryError" or isinstance(fault, MemoryError):
            raise InputError(f"{who} does not fit into the memory of {device}", hint="use a smaller batch") from None
        raise InputError(
            f"{who} failed: {type(fault).__name__}: {first_line}", hint="check what --input makes against the model"
        ) from None


def _call(function: Callable[..., Any], spec: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as fault:
        given = f" (called with {', '.join(map(str, arguments))})" if arguments else ""
        raise InputError(f"{spec} failed{given}: {type(fault).__name__}: {fault}") from None


def _inside(model: Any, path: str, factory: str) -> Any:
    found = model
    for part in path.split("."):
        following = getattr(found, part, None)
        if following is None:
            children = ", ".join(name for name, _ in found.named_children()) if hasattr(found, "named_children") else ""
            raise InputError(f"{factory} has no {path}: nothing is called {part}", hint=f"there are: {children}")
        found = following
    return found


def _named_module(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _file_module(path: str) -> Any:
    """A module from a file, under a name that another process makes of the same path."""
    full = os.path.realpath(path)
    if not os.path.isfile(full):
        raise InputError(f"there is no file {path}", hint="check the path; relative paths start here")
    name = "trimtab_model" + "".join(letter if letter.isalnum() else "_" for letter in full.removesuffix(".py"))
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, full)
    if found is None or found.loader is None:
        raise InputError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    folder = os.path.dirname(full)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import what stands beside it
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _device_name(device: Any) -> str:
    if device.type == "cuda":
        return str(import_torch().cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")
    except OSError:
        model = "CPU"
    return f"{model}, {import_torch().get_num_threads()} threads"


def _device_memory(device: Any) -> int:
    """Bytes of the whole device."""
    if device.type == "cuda":
        return int(import_torch().cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def import_torch() -> Any:
    """The torch module, or an error that says how to get it."""
    try:
        import torch
    except ImportError:
        raise InputError(
            "measuring and running layers needs PyTorch, which is not installed here",
            hint="pip install 'trimtab[torch]', or pip install torch; or measure elsewhere and use --from-json",
        ) from None
    return torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure from the command line of this file alone; JSON on standard output."""
    import argparse

    parser = argparse.ArgumentParser(prog="layers.py", description="Measure a PyTorch model block by block; JSON out.")
    parser.add_argument("factory", help="package.module:factory or file.py:factory")
    parser.add_argument("--model-name", default="", help="the model's name in models.yml")
    parser.add_argument("--blocks", default="", help="where the row of blocks stands in the model: model.layers")
    parser.add_argument("--input", default="", help="shape without the batch (128,2048), or module:make_input")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="torch.float32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--warmup", type=int, default=2, help="passes that do not count")
    parser.add_argument("--repeats", type=int, default=5, help="passes that count")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    given = parser.parse_args(arguments)
    try:
        measured = profile_layers(
            given.factory,
            model_name=given.model_name,
            blocks=given.blocks,
            model_input=given.input,
            batch_size=given.batch_size,
            dtype=given.dtype,
            device=given.device,
            warmup=given.warmup,
            repeats=given.repeats,
            threads=given.threads,
            progress=lambda sentence: print(sentence, file=sys.stderr),
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(measured.as_data(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
