"""The training of the demo and the example: the same loss however the batch is shared, with numpy and with PyTorch."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.demos.elastic_training import TOLERANCE, ElasticTrainer, batch_of, fixed_run, model_of, share_of
from trimtab.model.nodes import World
from trimtab.runtime.elastic.member import MemberWorld
from trimtab.runtime.elastic.view import StepResult

ROWS = 30  # few, so that shares of seven members differ in size


def trained(backends: list[list[str]], rows: int = ROWS) -> list[float]:
    """The losses of a run whose members change after every third step, as groups have it: newcomers load."""
    members: list[ElasticTrainer] = []
    losses: list[float] = []
    for world in backends:
        kept = members[: len(world)]
        members = kept + [ElasticTrainer(backend, rows) for backend in world[len(kept) :]]
        for newcomer in members[len(kept) or 1 :]:
            newcomer.load(members[0].save())
        for rank, member in enumerate(members):
            member.enter(MemberWorld(rank, len(members), 1, len(losses)))
        for _ in range(3):
            step = len(losses) + 1
            parts = [member.compute(step) for member in members]
            said = [member.commit(step, parts) for member in members]
            assert len({one.loss for one in said}) == 1
            losses.append(said[0].loss)
    return losses


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_loss_does_not_depend_on_who_takes_part(backend: str) -> None:
    worlds = [[backend] * size for size in (1, 4, 3, 7, 2)]
    assert trained(worlds) == pytest.approx(fixed_run(15, rows=ROWS), rel=TOLERANCE)


def test_numpy_and_torch_go_on_from_each_others_state() -> None:
    worlds = [["numpy"], ["numpy", "torch"], ["numpy", "torch", "numpy"], ["numpy", "torch"]]
    assert trained(worlds) == pytest.approx(fixed_run(12, rows=ROWS), rel=TOLERANCE)


def test_the_loss_falls() -> None:
    losses = fixed_run(120)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_gradients_are_those_of_the_loss() -> None:
    model = model_of("numpy")
    inputs, targets = batch_of(1, 5)
    found = model.gradients(inputs, targets).gradients
    state = model.state()
    source = np.random.default_rng(0)
    for at, gradient in enumerate(found):
        where = tuple(int(source.integers(size)) for size in gradient.shape)
        sums = []
        for nudge in (1e-6, -1e-6):
            other = model.state()
            other["weights"][at][where] += nudge
            model.load(other)
            sums.append(model.gradients(inputs, targets).loss_sum)
            model.load(state)
        assert (sums[0] - sums[1]) / 2e-6 == pytest.approx(gradient[where], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("rows", "size"), [(10, 1), (10, 3), (3, 8), (384, 7)])
def test_shares_cover_the_batch_exactly_once(rows: int, size: int) -> None:
    taken = [row for rank in range(size) for row in range(rows)[share_of(rank, size, rows)]]
    assert taken == list(range(rows))
    assert all(share_of(rank, size, rows) == MemberWorld(rank, size, 1, 0).share(rows) for rank in range(size))


def test_a_backend_that_there_is_not_is_said() -> None:
    with pytest.raises(InputError, match="unknown backend"):
        model_of("jax")


@pytest.mark.parametrize(
    ("values", "combined"),
    [
        ((1.0, 3.0), 2.0),
        (({"loss": 1.0, "name": "a"}, {"loss": 2.0, "name": "b"}), {"loss": 1.5}),
        ((None, 4.0), 4.0),
        (("a", "b"), None),
        ((True, False), None),
        ((), None),
    ],
)
def test_what_members_say_is_combined_where_it_is_numbers(values: tuple[Any, ...], combined: Any) -> None:
    world = World(1, ("a", "b"), ("n", "n"), Reason(ReasonCode.began, "the first"))
    assert StepResult(1, world, values, (), (), 0.1).combined == combined


def test_with_rows_for_each_member_more_members_do_more_work_in_a_step_on_rows_of_their_own() -> None:
    members = [ElasticTrainer("numpy", rows_each=40, hidden=8) for _ in range(3)]
    for rank, member in enumerate(members):
        member.enter(MemberWorld(rank, len(members), 1, 0))
    parts = [member.compute(1) for member in members]
    assert sum(part.rows for part in parts) == 120
    assert len({part.loss_sum for part in parts}) == 3
    said = [member.commit(1, parts) for member in members]
    assert len({report.loss for report in said}) == 1
    assert all(np.array_equal(members[0].save()["weights"][0], member.save()["weights"][0]) for member in members)


def test_the_seconds_of_a_report_are_those_of_the_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    member = ElasticTrainer("numpy", rows=30, slow_s=5.0)
    report = member.commit(1, [member.compute(1)])
    assert (now[0], report.seconds) == (5.0, 0.0)


def test_a_newcomer_need_not_import_what_takes_longer_than_pytorch_itself() -> None:
    pytest.importorskip("torch")
    program = (
        "import sys; from trimtab.demos.elastic_training import ElasticTrainer; member = ElasticTrainer('torch');"
        "member.load(member.save()); member.commit(1, [member.compute(1)]); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
