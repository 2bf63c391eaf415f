"""Packing what components pass on: buffers are not copied, tensors come back whole, and only readers get views."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from trimtab.runtime.run.transfer import Packed, Packer, unpack

torch = pytest.importorskip("torch")
pytest.importorskip("ray")


def through_a_store(packed: Packed) -> Packed:
    """As the object store does it: buffers apart, read-only on the other side."""
    buffers: list[Any] = []
    head = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[memoryview(bytes(buffer)) for buffer in buffers])


def test_tensors_of_all_kinds_come_back_as_they_were() -> None:
    strided = torch.arange(12.0).reshape(3, 4).t()
    given = {
        "bf16": torch.ones(5, dtype=torch.bfloat16), "bool": torch.tensor([True, False]), "one": torch.tensor(3.5),
        "strided": strided, "empty": torch.empty(0), "int": torch.arange(4), "text": "x",
        "parameter": torch.nn.Parameter(torch.ones(2)), "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    for only_reads in (True, False):
        got = unpack(through_a_store(Packer().pack(given)), only_reads=only_reads)
        assert list(got) == list(given)
        assert isinstance(got["parameter"], torch.nn.Parameter)
        for name in set(given) - {"text", "sparse"}:
            assert got[name].dtype == given[name].dtype
            assert torch.equal(got[name], given[name])
        assert torch.equal(got["sparse"].to_dense(), torch.eye(3))


def test_packing_copies_no_host_memory() -> None:
    array, tensor = np.zeros(1000), torch.zeros(1000)
    packed = Packer().pack([array, tensor])
    array[0], tensor[0] = 7, 8
    got_array, got_tensor = unpack(packed, only_reads=True)
    assert (got_array[0], got_tensor[0]) == (7, 8)


def test_a_tensor_may_be_written_to_and_other_readers_do_not_see_it() -> None:
    stored = through_a_store(Packer().pack(torch.zeros(10)))
    mine, other = unpack(stored, only_reads=False), unpack(stored, only_reads=True)
    mine += 1
    assert (float(mine[0]), float(other[0])) == (1.0, 0.0)


def test_classes_that_cannot_be_imported_travel_by_value() -> None:
    class Answer:
        def __init__(self) -> None:
            self.tokens = torch.arange(3)

    got = unpack(through_a_store(Packer().pack([Answer()])), only_reads=False)
    assert got[0].tokens.tolist() == [0, 1, 2]
