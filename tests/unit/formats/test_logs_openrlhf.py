"""OpenRLHF's lines of a step become times; a run whose generation runs beside the training is told from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from advise_world import OPENRLHF, Told, event_file, openrlhf_beside, openrlhf_lines
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.gpus import RunFacts

TOLD = Told(OPENRLHF.seconds, noisy=False, steps=12)


def read(path: Path) -> dict[str, tuple[float, bool]]:
    profile = logs.read([path], facts=RunFacts(default_gpus=8))
    assert profile.source == "openrlhf"
    return {one.name: (one.seconds[0][1], one.waits) for one in profile.components}


def test_a_synchronous_run_tells_all_costs(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("loading\n" + openrlhf_lines(TOLD) + "Sample: ['Global step 3: {', 0.5]\n")
    assert read(log) == {
        "rollout": (60.0, False),
        "inference": (12.0, False),
        "actor": (45.0, False),
        "weight_sync": (1.5, False),
    }


def test_in_an_asynchronous_run_the_weight_sync_is_a_wait_and_the_rest_are_costs(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(openrlhf_beside(TOLD))
    found = read(log)
    assert found["rollout"] == (60.0, False)
    assert found["actor"] == (45.0, False)
    assert found["weight_sync"][1]


def test_gpus_are_read_from_the_flags(tmp_path: Path) -> None:
    log, flags = tmp_path / "run.log", tmp_path / "flags.yaml"
    log.write_text(openrlhf_beside(TOLD))
    flags.write_text(OPENRLHF.config.replace("num_engines: 4, tensor_parallel_size: 1", "num_engines: 3"))
    profile = logs.read([log], config=flags)
    gpus = {one.name: one.seconds[0][0] for one in profile.components}
    assert gpus == {"rollout": 3, "inference": 4, "actor": 4, "weight_sync": 4}


def test_its_event_files_are_read_too(tmp_path: Path) -> None:
    steps = [(step, {f"train/timing/{name}": 10.0 for name in ("generation", "make_experience", "ppo_train")}
              | {"train/timing/step_total": 30.0, "train/reward": 0.5}) for step in range(1, 13)]  # fmt: skip
    log = tmp_path / "events.out.tfevents.1"
    log.write_bytes(event_file(steps))
    assert read(log) == {name: (pytest.approx(10.0), False) for name in ("rollout", "inference", "actor")}


def test_a_line_that_was_cut_off_is_no_step_and_odd_values_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    text = openrlhf_lines(TOLD).replace("'kl': 0.002", "'kl': nan, 'text': \"it's {odd}\", 'n': np.float64(0.1)")
    log.write_text(text[:-40])
    profile = logs.read([log], facts=RunFacts(default_gpus=8))
    assert any("cut off" in note for note in profile.notes)
    assert profile.component("actor") is not None
