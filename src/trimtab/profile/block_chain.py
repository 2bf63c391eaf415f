"""Loads a PyTorch model as a chain of blocks, makes its inputs, and runs it block by block.

Used to measure layers (`layers.py`) and to run pipeline stages. This module must never import anything but torch and
the standard library: together with `layers.py` it is copied to machines where nothing can be installed. It never
changes a model's weights, apart from their dtype and device.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

try:
    from trimtab.core.errors import InputError as InputError
except ImportError:  # copied without the package

    class InputError(Exception):  # type: ignore[no-redef]
        """The input or the call is wrong."""

        def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
            super().__init__("\n  ".join(part for part in (what, where and f"at {where}", hint) if part))


_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class BlockOutput:
    """Output of a block and input of the next: the value, and side arguments that every block takes."""

    value: Any
    rest: tuple[Any, ...] = ()
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hand_over: str = "whole"  # what the next block takes of an output: "whole", its "first" part, or all parts "spread"


@dataclass(frozen=True)
class BlockChain:
    """A model as a sequence of blocks on a device."""

    blocks: tuple[Any, ...]
    names: tuple[str, ...]
    begin: Callable[[Any], BlockOutput]  # model input -> input of the first block
    outside: int = 0  # parameters in no block
    imports: str = ""  # where the blocks' classes come from, for processes that unpickle them

    def run(self, model_input: Any) -> Any:
        """Run the whole chain in this process."""
        with import_torch().inference_mode():
            carried = self.begin(model_input)
            for block in self.blocks:
                carried = step(block, carried)
        return carried.value


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
    model = guarded(lambda: model.eval().requires_grad_(False).to(device=place, dtype=kind), "the model", device)
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
    if len(names) != len(parts):  # the same block object several times
        names = tuple(f"{prefix}{index}" for index in range(len(parts)))
    if not blocks:
        return BlockChain(parts, names, BlockOutput, imports=_absolute(factory))
    inside = {id(parameter) for block in parts for parameter in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return BlockChain(parts, names, lambda given: _first_call(model, parts, names, given), outside, _absolute(factory))


def input_maker(text: str, *, batch_size: int, dtype: str, device: str) -> Callable[[int], Any]:
    """A function from a number to a model input: of a shape without the batch dimension, or by
    `package.module:make_input`.

    The number seeds the input: inputs differ from each other and are reproducible.
    """
    torch = import_torch()
    kind, place = dtype_of(dtype), device_of(device)
    hint = "--input 128,2048 (a shape without the batch), or --input package.module:make_input (takes a batch size)"
    if not text:
        raise InputError("no model input is given", hint=hint)
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
    """Run a block on the output of the previous one."""
    if carried.hand_over == "spread":
        output = tuple(block(*carried.value, **carried.named))
    else:
        output = block(carried.value, *carried.rest, **carried.named)
        if carried.hand_over == "first":
            output = output[0]
    return dataclasses.replace(carried, value=output)


def load(spec: str) -> Any:
    """The object named by `package.module:name` or `path/file.py:name`."""
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{spec!r} names no object", hint="write it as package.module:factory or file.py:factory")
    try:
        if module_name.endswith(".py"):
            module = _file_module(module_name)
        else:
            if os.getcwd() not in sys.path and "" not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(module_name)
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


def _absolute(spec: str) -> str:
    """The spec with an absolute path, for processes in other folders."""
    module_name, _, name = spec.rpartition(":")
    return f"{os.path.realpath(module_name)}:{name}" if module_name.endswith(".py") else spec


def dtype_of(name: str) -> Any:
    """The torch dtype of a name such as torch.bfloat16, bfloat16 or bf16."""
    torch = import_torch()
    short = name.removeprefix("torch.")
    found = getattr(torch, _SHORT_DTYPES.get(short, short), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no dtype {name}", hint="for example torch.float32, torch.bfloat16, torch.float16")
    if not found.is_floating_point and not found.is_complex:
        raise InputError(f"a model cannot be run in {name}", hint="name a floating-point dtype")
    return found


def device_of(name: str) -> Any:
    """The torch device; raises InputError if this machine does not have it."""
    torch = import_torch()
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise InputError(f"{name} is no device", hint="cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"layers are measured on cpu or cuda, not on {name}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"there is no device {name} on this machine", hint="--device cpu measures here")
    return device


def on_device(value: Any, device: Any, dtype: Any = None) -> Any:
    """A copy of nested tuples, lists and mappings with its tensors on a device, floating ones in a dtype."""
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
    """All tensors in nested tuples, lists, mappings and dataclasses; names of other types go into `strange`."""
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
    """Run the model once; return the first block's arguments. Raises InputError if the blocks are no chain."""
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


def _same(left: Any, right: Any) -> bool:
    torch = import_torch()
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def guarded(action: Callable[[], Any], subject: str, device: str) -> Any:
    """Run user code; report its failures as failures of `subject`, or as out of memory."""
    try:
        return action()
    except InputError:
        raise
    except Exception as fault:
        first_line = str(fault).strip().split("\n")[0]
        if type(fault).__name__ == "OutOfMemoryError" or isinstance(fault, MemoryError):
            raise InputError(
                f"{subject} does not fit into the memory of {device}", hint="use a smaller batch"
            ) from None
        raise InputError(
            f"{subject} failed: {type(fault).__name__}: {first_line}", hint="check what --input makes against the model"
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
        child = getattr(found, part, None)
        if child is None:
            children = ", ".join(name for name, _ in found.named_children()) if hasattr(found, "named_children") else ""
            raise InputError(f"{factory} has no {path}: nothing is called {part}", hint=f"there are: {children}")
        found = child
    return found


def _file_module(path: str) -> Any:
    """A module from a file, under a name that other processes derive from the same path."""
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
        sys.path.append(folder)  # the file may import its neighbours
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_torch() -> Any:
    """The torch module, or an InputError that says how to install it."""
    try:
        import torch
    except ImportError:
        raise InputError(
            "measuring and running layers needs PyTorch, which is not installed here",
            hint="pip install 'trimtab[torch]', or pip install torch; or measure elsewhere and use --from-json",
        ) from None
    return torch
