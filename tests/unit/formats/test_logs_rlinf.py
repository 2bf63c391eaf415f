from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.logs import gpus as logs_gpus
from trimtab.formats.logs import reader as logs
from trimtab.model.workflow import Profile

DATA = Path(__file__).parents[2] / "data" / "logs"
ROOT = Path(__file__).parents[3]
EIGHT = logs_gpus.from_options(["8"])


def bar(steps: int, **times: float) -> str:
    """What the reasoning runner's progress bar leaves in a log."""
    post = ", ".join(f"{name.replace('__', '/')}_time={value}" for name, value in times.items())
    return "".join(f"\rGlobal Step:  10%|█   | {n}/99 [03:06<4:39:00, 186.10s/it, {post}]" for n in range(1, steps + 1))


def notes(profile: Profile) -> str:
    return "\n".join(profile.notes)


def waits(profile: Profile) -> dict[str, bool]:
    return {component.name: component.waits for component in profile.components}


def test_the_progress_bar_of_the_reasoning_runner_is_read() -> None:
    profile = logs.read([ROOT / "examples/logs/rlinf.log"], facts=EIGHT)
    assert profile.source == "rlinf"
    found = {component.name: component.seconds[0][1] for component in profile.components}
    assert found["rollout"] == pytest.approx(60, rel=0.02)
    assert found["inference"] == pytest.approx(30.8, rel=0.02)
    assert found["actor"] == pytest.approx(95.7, rel=0.02)
    assert found["weight_sync"] == pytest.approx(1.3, rel=0.1)
    # The reward worker's timer covers the wait for answers, so it is never a cost.
    assert waits(profile) == {
        "rollout": False, "reward": True, "inference": False, "actor": False, "weight_sync": False,
    }  # fmt: skip
    rollout = profile.component("rollout")
    assert rollout is not None
    assert rollout.seconds_per_1k_tokens == pytest.approx(1000 * 60 / (8192 * 2210), rel=0.05)


def test_the_metric_table_of_the_embodied_runner_is_read() -> None:
    profile = logs.read([DATA / "rlinf_metrics.log"], facts=EIGHT)
    found = {component.name: component.seconds[0][1] for component in profile.components}
    assert found["env"] == pytest.approx(31.5, rel=0.03)
    assert found["rollout"] == pytest.approx(24.9, rel=0.03)
    assert found["actor"] == pytest.approx(28.1, rel=0.03)
    assert not any(waits(profile).values())
    assert "fell into 1 step" in notes(profile)


def test_timers_that_overlap_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(
        bar(8, step=100.0, rollout=90.0, actor__inference=85.0, actor__training=95.0, sync_weights=1.0) + "\n"
    )
    profile = logs.read([path], facts=EIGHT)
    assert waits(profile) == {"rollout": False, "inference": True, "actor": True, "weight_sync": False}
    assert "2.71 times their step" in notes(profile)


def test_in_shared_mode_the_actor_costs_what_the_others_leave(tmp_path: Path) -> None:
    path, config = tmp_path / "run.log", tmp_path / "config.yaml"
    path.write_text(
        bar(
            8,
            step=188.0,
            prepare_data=1.0,
            rollout=60.0,
            actor__inference=30.0,
            actor__training=186.0,
            sync_weights=1.0,
        )
        + "\n"
    )
    config.write_text(
        "cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {'actor,rollout,reward': all}}\n"
    )
    profile = logs.read([path], config=config)
    actor = profile.component("actor")
    assert actor is not None
    assert actor.seconds == ((8, 96.0),)
    assert not any(waits(profile).values())
    assert "the rest of the step" in notes(profile)


def test_placements_give_the_counts_of_separate_components(tmp_path: Path) -> None:
    path, config = tmp_path / "run.log", tmp_path / "config.yaml"
    path.write_text(bar(6, rollout=60.0, actor__training=95.0, actor__inference=30.0) + "\n")
    config.write_text("cluster: {num_nodes: 1, component_placement: {rollout: 0-3, actor: '4-5,7', inference: 6}}\n")
    profile = logs.read([path], config=config)
    assert {c.name: c.seconds[0][0] for c in profile.components} == {"rollout": 4, "inference": 1, "actor": 3}
    config.write_text("cluster: {component_placement: {rollout: '0-1:0-3, 2-3:4-5', 'actor,inference': 4-7}}\n")
    profile = logs.read([path], config=config)
    assert {c.name: c.seconds[0][0] for c in profile.components} == {"rollout": 4, "inference": 4, "actor": 4}
    config.write_text("cluster: {component_placement: {rollout: '4-', actor: 4-7}}\n")
    with pytest.raises(InputError, match="cannot be understood"):
        logs.read([path], config=config)


def test_a_table_cut_off_in_the_middle_is_left_out(tmp_path: Path) -> None:
    text = (DATA / "rlinf_metrics.log").read_text()
    path = tmp_path / "metrics.log"
    path.write_text(text[: text.rindex("Training/Actor")])
    profile = logs.read([path], facts=EIGHT)
    assert profile.components[0].steps == 5
    assert "cut off" in notes(profile)
