"""Packing what components pass on: buffers are not copied, tensors come back whole, and only readers get views."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from trimtab.runtime.run import executor
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.executor import ComponentStartSpec, ComponentWorker
from trimtab.runtime.run.transfer import NotOpenedError, Packed, Packer, unpack

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


class Memory:
    """Stands for a GPU's memory that other processes can open by a number."""

    def __init__(self) -> None:
        self.lent: dict[int, Any] = {}
        self.released: list[int] = []
        self.unopened: set[int] = set()

    def handle(self, tensor: Any) -> LentTensor | None:
        if tensor.dtype is not torch.bfloat16:
            return None
        self.lent[len(self.lent)] = tensor
        return LentTensor(self, len(self.lent) - 1)


@dataclass(frozen=True)
class LentTensor:
    memory: Memory
    number: int

    def open(self) -> Any:
        if self.number in self.memory.unopened:
            raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronous")
        return self.memory.lent[self.number]

    def release(self) -> None:
        self.memory.released.append(self.number)


def test_tensors_with_a_handle_are_not_copied_and_the_others_travel() -> None:
    memory, there, here = Memory(), torch.ones(5, dtype=torch.bfloat16), torch.arange(3)
    packed = Packer().pack({"there": torch.nn.Parameter(there), "here": here}, memory.handle)
    got = unpack(packed, only_reads=True)
    assert isinstance(got["there"], torch.nn.Parameter)
    assert got["there"].data_ptr() == there.data_ptr()
    assert got["here"].tolist() == [0, 1, 2]
    mine = unpack(packed, only_reads=False)["there"]
    assert mine.data_ptr() != there.data_ptr()
    assert torch.equal(mine, there)


def test_a_handle_that_cannot_be_opened_says_why_and_frees_the_rest() -> None:
    memory = Memory()
    packed = Packer().pack([torch.ones(2, dtype=torch.bfloat16) for _ in range(3)], memory.handle)
    memory.unopened = {1}
    with pytest.raises(NotOpenedError, match="invalid argument"):
        unpack(packed, only_reads=True)
    assert memory.released == [1, 2]


def test_memory_that_cannot_be_shared_frees_what_was_lent_of_it() -> None:
    memory = Memory()

    def handle_of(tensor: Any) -> LentTensor | None:
        if len(memory.lent) == 2:
            raise RuntimeError("CUDA error: invalid argument")
        return memory.handle(tensor)

    with pytest.raises(RuntimeError, match="invalid argument"):
        Packer().pack([torch.ones(2, dtype=torch.bfloat16) for _ in range(3)], handle_of)
    assert memory.released == [0, 1]


def test_a_worker_lends_its_weights_until_its_next_step_or_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr(executor, "gpu_handle", memory.handle)
    trainer, rollout = worker("trainer", TorchTrainer), worker("rollout", TorchRollout)
    for ends in (lambda: trainer.step(2, 0, 1, None), trainer.park):
        result, given = trainer.weights(True)
        assert (result.note, len(given.handles), given.buffers) == ("", 1, [])
        assert rollout.sync(given, 1).fault is None
        assert trainer._lent is not None
        ends()
        assert trainer._lent is None
    assert trainer.weights(False)[1].handles == []  # for one that is elsewhere


def test_a_worker_whose_memory_cannot_be_shared_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def handle_of(tensor: Any) -> None:
        calls.append(tensor)
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(executor, "gpu_handle", handle_of)
    trainer = worker("trainer", TorchTrainer)
    result, given = trainer.weights(True)
    assert "invalid argument" in result.note
    assert (given.handles, len(given.buffers), trainer._lent) == ([], 1, None)
    assert len(calls) == 1


class TorchTrainer:
    def __init__(self, place: Place) -> None:
        self.weight = torch.ones(4, dtype=torch.bfloat16)

    def step(self, batch: Any) -> None:
        self.weight += 1

    def weights(self) -> dict[str, Any]:
        return {"weight": self.weight}


class TorchRollout(TorchTrainer):
    def sync(self, weights: dict[str, Any], version: int) -> None:
        self.weight.copy_(weights["weight"])


def worker(name: str, kind: type) -> ComponentWorker:
    return ComponentWorker(ComponentStartSpec(Place(component=name), f"{__name__}:{kind.__name__}", {}))
