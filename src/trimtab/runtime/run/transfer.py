"""Packs what components pass to one another: one copy into shared memory, none out of it.

Arrays and CPU tensors are pickled out of band (protocol 5): `pack` copies nothing, the object store copies the buffers
once into shared memory, and a reader on the same node gets views of them. Tensors on a GPU are copied to pinned memory
that the next call uses again. Views are of memory that other readers have too: arrays are read-only, and tensors are
copied unless the reader says that it only reads. Weights for a component on the same GPU stay there: the reader opens
handles of the sender's memory (CUDA IPC), and the sender holds its tensors until the reader is done.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.runtime.run.component import error_text

STORED_BYTES = 2**20  # from here on data is stored by its maker, with a timer; less travels with the call
_reading = threading.local()


class NotOpenedError(Exception):
    """Memory of another process cannot be opened here."""


class GpuHandle(Frozen):
    """A tensor on a GPU, by CUDA IPC; `arguments` are those of torch's `rebuild_cuda_tensor`."""

    gpu: str
    rebuild: Callable[..., Any]
    arguments: tuple[Any, ...]

    def open(self) -> Any:
        torch = sys.modules["torch"]
        index = [gpu_id(torch, index) for index in range(torch.cuda.device_count())].index(self.gpu)
        return self.rebuild(*self.arguments[:6], index, *self.arguments[7:])

    def release(self) -> None:  # it will not be opened: its memory can be freed
        self.arguments[4]._release_ipc_counter(*self.arguments[11:13], device=self.arguments[6])


def gpu_id(torch: Any, index: int) -> str:  # the same in all processes
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_handle(tensor: Any) -> GpuHandle | None:
    """A handle of a tensor on a GPU; None for another. Raises RuntimeError for memory that cannot be shared."""
    if tensor.device.type != "cuda":
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    return GpuHandle(gpu_id(sys.modules["torch"], tensor.device.index), *reduce_tensor(tensor))


class Packed(Frozen):
    """A pickled value, with its buffers out of band, and handles of what stays where it is."""

    head: Any
    buffers: list[Any]
    handles: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in (self.head, *self.buffers))


class Stored(Frozen):
    """A packed value in the object store."""

    reference: Any


class Packer:
    """Packs the values of one process; a value's pinned buffers are used again by the next one."""

    def __init__(self) -> None:
        self._pinned: list[Any] = []

    def pack(self, value: Any, handle_of: Callable[[Any], Any] | None = None) -> Packed:
        """`handle_of`: for tensors that need not be copied."""
        from io import BytesIO

        from ray import cloudpickle

        pinned, used = self._pinned, 0
        handles: list[Any] = []

        def host_bytes(tensor: Any, torch: Any) -> Any:
            """The tensor's bytes on the host, flat."""
            nonlocal used
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            if flat.device.type == "cpu":
                return flat
            if used == len(pinned) or pinned[used].numel() < flat.numel():
                pinned[used : used + 1] = [torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)]
            host = pinned[used][: flat.numel()]
            used += 1
            host.copy_(flat, non_blocking=True)
            return host

        class TensorPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
            def reducer_override(self, value: Any) -> Any:
                torch = sys.modules.get("torch")
                if torch is None or not _is_plain_tensor(value, torch):
                    return super().reducer_override(value)
                kind = type(value) is torch.nn.Parameter
                facts = str(value.dtype).removeprefix("torch."), tuple(value.shape), value.requires_grad, kind
                handle = handle_of(value.detach()) if handle_of is not None else None
                if handle is not None:
                    handles.append(handle)
                    return _tensor, (len(handles) - 1, *facts)
                return _tensor, (pickle.PickleBuffer(host_bytes(value.detach(), torch).numpy()), *facts)

        head = BytesIO()
        buffers: list[Any] = []
        try:
            TensorPickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        except Exception:
            _release(handles)
            raise
        if used:
            sys.modules["torch"].cuda.synchronize()
        return Packed(pickle.PickleBuffer(head.getbuffer()), buffers, list(handles))


def unpack(packed: Packed, *, only_reads: bool) -> Any:
    """The value; with `only_reads` its tensors are views of shared memory. Raises NotOpenedError."""
    opened: list[Any] = []
    try:
        for handle in packed.handles:
            opened.append(handle.open())  # noqa: PERF401 -- some are open when one fails
    except Exception as error:
        _release(packed.handles[len(opened) :])
        raise NotOpenedError(error_text(error)) from None
    _reading.only, _reading.opened = only_reads, opened
    value = pickle.loads(packed.head, buffers=packed.buffers)
    _reading.opened = []
    return value


def _release(handles: list[Any]) -> None:
    for handle in handles:
        with contextlib.suppress(Exception):
            handle.release()


def _is_plain_tensor(value: Any, torch: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type in ("cpu", "cuda")
        and value.numel() > 0
        and not value.is_conj()
        and not value.is_neg()
    )


def _tensor(data: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is not writable
        opened = isinstance(data, int)
        found = _reading.opened[data] if opened else torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)
    tensor = found if _reading.only else found.clone()
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
