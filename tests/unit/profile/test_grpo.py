"""The GRPO example: its arithmetic, that it learns, and that stopping and going on changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # `examples` is no package that is installed

from examples.grpo.job import grpo  # noqa: E402
from examples.grpo.loss import Rules, advantages, token_slopes  # noqa: E402
from examples.grpo.numpy_policy import NumpyPolicy  # noqa: E402
from examples.grpo.task import BLANK, END, lengths, questions, rewards, right_answers  # noqa: E402

from trimtab.runtime.run.job_file import load_run  # noqa: E402
from trimtab.runtime.run.run import Run, RunEnd  # noqa: E402

SMALL = {"questions": 4, "group": 4, "digits": 5, "size": {"hidden": 16}, "batches": 2}
RISE = 0.25
"""By so much at least the mean reward (from 0 for nothing to 1 for all right) rises in 40 iterations."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices on crowded cores: threads would wait for each other."""
    try:
        import torch
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(*arguments: str) -> dict:
    """What `python -m examples.grpo.train` says at its end."""
    command = [sys.executable, "-m", "examples.grpo.train", "--json", *arguments]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    return json.loads(out[out.index("{\n") :])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_and_the_answers_grow(seed: int) -> None:
    summary = trained("--iterations", "40", "--seed", str(seed))
    reward, length = summary["metrics"]["reward.reward"], summary["metrics"]["rollout.length"]
    assert summary["state"] == "done"
    assert reward["last"] - reward["first"] > RISE
    assert length["last"] > length["first"] + 1.5


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def run(seed: int) -> list[float]:
        end = Run(grpo(iterations=4, seed=seed, **SMALL)).run()
        return [end.metrics[n]["trainer"]["loss"] for n in (1, 2, 3, 4)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def weights_of(end: RunEnd, folder: Path) -> dict[str, np.ndarray]:
    assert end.state in ("done", "stopped")
    with np.load(folder / "state" / f"{end.iterations[-1].number:08d}" / "trainer" / "policy.npz") as state:
        return dict(state)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(tmp_path: Path, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    small = {**SMALL, "size": {"hidden": 16} if backend == "numpy" else {"width": 16, "layers": 1, "heads": 2}}
    job = grpo(backend, iterations=6, seed=5, **small)
    whole = weights_of(Run(job, tmp_path / "whole").run(), tmp_path / "whole")
    stopped = Run(job, tmp_path / "parts", on_iteration=lambda one, _: one.number == 4 and stopped.stop())
    assert len(stopped.run().iterations) == 4
    resumed = weights_of(Run(job, tmp_path / "parts", resume=True).run(), tmp_path / "parts")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert np.array_equal(value, resumed[name]), name


def test_with_stale_weights_it_trains_all_the_same() -> None:
    end = Run(grpo(iterations=5, staleness=1, **SMALL)).run()
    assert [one.number for one in end.iterations] == [1, 2, 3, 4, 5]


def test_the_job_file_and_the_job_in_python_are_the_same() -> None:
    read = load_run(ROOT / "examples" / "grpo" / "job.yaml")
    assert replace(read, name="grpo", text=None) == grpo()


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_answers_are_checked_up_to_the_first_mistake() -> None:
    asked = np.array([[3, 9, 4, END, END]] * 5)
    assert right_answers(asked)[0].tolist() == [6, 0, 5, END, BLANK]
    answered = np.array(
        [
            [6, 0, 5, END, BLANK],  # all of it
            [6, 0, END, BLANK, BLANK],  # stopped early
            [6, 1, 5, END, BLANK],  # a mistake, and one more token
            [END, BLANK, BLANK, BLANK, BLANK],
            [6, 0, 5, 1, END],  # did not stop
        ]
    )
    assert rewards(asked, answered) == pytest.approx([1.0, 0.5, (1 - 0.06) / 4, 0.0, (3 - 0.03) / 4])
    assert lengths(answered).tolist() == [4, 3, 4, 1, 5]


def test_questions_are_the_same_for_the_same_numbers() -> None:
    one = questions(1, 2, 3, 8, 6)
    assert np.array_equal(one, questions(1, 2, 3, 8, 6))
    assert not np.array_equal(one, questions(1, 2, 4, 8, 6))
    assert (one[:, -1] == END).all()


def test_advantages_compare_within_a_group_only() -> None:
    found = advantages(np.array([0.0, 1.0, 5.0, 5.0]), 2)
    assert found == pytest.approx([-1.0, 1.0, 0.0, 0.0], abs=1e-3)


def batch_of_answers() -> tuple:
    policy = NumpyPolicy(1, hidden=8)
    asked = np.repeat(questions(1, 1, 0, 3, 4), 4, axis=0)
    answered, logs = policy.sample(asked, [1])
    reference = NumpyPolicy(2, hidden=8).log_probabilities(asked, answered)
    return policy, asked, answered, logs, reference, advantages(rewards(asked, answered), 4)


def test_what_is_sampled_has_the_probability_that_it_is_said_to_have() -> None:
    policy, asked, answered, logs, *_ = batch_of_answers()
    assert policy.log_probabilities(asked, answered) == pytest.approx(logs)
    assert (logs[answered == BLANK] == 0).all()


def test_the_gradient_is_that_of_the_loss() -> None:
    policy, asked, answered, logs, reference, advantage = batch_of_answers()
    old = logs + np.random.default_rng(0).normal(0, 0.3, logs.shape)  # some ratios are clipped
    rules, counts = Rules(kl=0.1, rate=1.0), answered != BLANK

    def loss() -> float:
        new = policy.log_probabilities(asked, answered)
        return token_slopes(new, old, reference, advantage, counts, rules)[1]["loss"]

    found: dict[str, np.ndarray] = {}
    policy._adam = lambda gradient, rate: found.update(gradient)
    facts = policy.update(asked, answered, old, reference, advantage, rules)
    assert facts["loss"] == pytest.approx(loss())
    assert 0 < facts["clipped"] < 1
    assert facts["kl"] > 0
    for name, slopes in found.items():
        weight = policy.weights[name]
        for at in [tuple(i) for i in np.argwhere(np.abs(slopes) > 1e-4)[:6]]:
            before = weight[at]
            weight[at] = before + 1e-6
            up = loss()
            weight[at] = before - 1e-6
            down = loss()
            weight[at] = before
            assert slopes[at] == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-6)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def test_the_transformer_says_the_same_place_by_place_as_all_at_once() -> None:
    pytest.importorskip("torch")
    from examples.grpo.torch_policy import TorchPolicy

    policy = TorchPolicy(1, places=7, width=16, layers=2, heads=2, device="cpu")
    asked = np.repeat(questions(1, 1, 0, 4, 6), 4, axis=0)
    answered, logs = policy.sample(asked, [1])
    assert policy.log_probabilities(asked, answered) == pytest.approx(logs, abs=1e-5)
    assert np.array_equal(policy.sample(asked, [1])[0], answered)


def test_the_transformer_learns_too_and_gives_its_weights_away() -> None:
    pytest.importorskip("torch")
    from examples.grpo.torch_policy import TorchPolicy

    size = {"places": 5, "width": 32, "layers": 1, "heads": 2, "device": "cpu"}
    policy, other = TorchPolicy(1, trains=True, **size), TorchPolicy(7, **size)
    asked = np.repeat(questions(1, 1, 0, 8, 4), 8, axis=0)
    answered, logs = policy.sample(asked, [1])
    advantage = advantages(rewards(asked, answered), 8)
    facts = [policy.update(asked, answered, logs, logs, advantage, Rules(rate=1e-3)) for _ in range(4)]
    assert facts[-1]["loss"] < facts[0]["loss"]
    other.take(policy.copied())
    other.offload()  # on a host there is nothing to leave
    other.onload()
    assert np.array_equal(other.log_probabilities(asked, answered), policy.log_probabilities(asked, answered))


def test_without_a_known_backend_nothing_is_made() -> None:
    end = Run(grpo("jax", iterations=1, **SMALL)).run()
    assert end.state == "failed"
    assert "no backend jax" in end.reason.sentence


def test_the_example_needs_no_ray_and_nothing_to_read_yaml_with() -> None:
    code = (
        "import sys\n"
        "for name in ('ray', 'pydantic', 'ruamel', 'typer', 'rich', 'hydra', 'torch'): sys.modules[name] = None\n"
        "sys.argv = ['train', '--iterations', '4', '--questions', '2', '--group', '2']\n"
        "from examples.grpo.train import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "done: all 4 iterations are done" in done.stdout
