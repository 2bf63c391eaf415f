"""Packs what components pass to one another: one copy into shared memory, none out of it.

Arrays and CPU tensors are pickled out of band (protocol 5): `pack` copies nothing, the object store copies the buffers
once into shared memory, and a reader on the same node gets views of them. Tensors on a GPU are copied to pinned memory
that the next call uses again. Views are of memory that other readers have too: arrays are read-only, and tensors are
copied unless the reader says that it only reads.
"""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import Any

STORED_BYTES = 2**20  # from here on data is stored by its maker, with a timer; less travels with the call
_reading = threading.local()


@dataclass(frozen=True)
class Packed:
    """A pickled value, with its buffers out of band."""

    head: Any
    buffers: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in (self.head, *self.buffers))


@dataclass(frozen=True)
class Stored:
    """A packed value in the object store."""

    reference: Any


class Packer:
    """Packs the values of one process; a value's pinned buffers are used again by the next one."""

    def __init__(self) -> None:
        self._pinned: list[Any] = []

    def pack(self, value: Any) -> Packed:
        from io import BytesIO

        from ray import cloudpickle

        pinned, used = self._pinned, 0

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
                host = host_bytes(value.detach(), torch)
                kind = type(value) is torch.nn.Parameter
                facts = str(value.dtype).removeprefix("torch."), tuple(value.shape), value.requires_grad, kind
                return _tensor, (pickle.PickleBuffer(host.numpy()), *facts)

        head = BytesIO()
        buffers: list[Any] = []
        TensorPickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        if used:
            sys.modules["torch"].cuda.synchronize()
        return Packed(pickle.PickleBuffer(head.getbuffer()), buffers)


def unpack(packed: Packed, *, only_reads: bool) -> Any:
    """The value; with `only_reads` its tensors are views of shared memory."""
    _reading.only = only_reads
    return pickle.loads(packed.head, buffers=packed.buffers)


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
        flat = torch.frombuffer(data, dtype=getattr(torch, dtype))
    tensor = flat.reshape(shape) if _reading.only else flat.reshape(shape).clone()
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
