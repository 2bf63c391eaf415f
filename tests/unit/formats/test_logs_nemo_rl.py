from __future__ import annotations

import struct
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.logs import gpus as logs_gpus
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs import tensorboard as tensorboard_events
from trimtab.model.workflow import Profile

DATA = Path(__file__).parents[2] / "data" / "logs"
ROOT = Path(__file__).parents[3]
EVENTS = DATA / "nemo_tensorboard"
EIGHT = logs_gpus.from_options(["8"])


def notes(profile: Profile) -> str:
    return "\n".join(profile.notes)


def test_the_timing_blocks_of_the_console_are_read() -> None:
    profile = logs.read([ROOT / "examples/logs/nemo_rl.log"], facts=EIGHT)
    assert profile.source == "nemo_rl"
    found = {component.name: component.seconds[0][1] for component in profile.components}
    assert list(found) == ["generation", "reward", "logprobs", "policy", "weight_sync"]
    assert found["generation"] == pytest.approx(61.3, rel=0.03)
    assert found["policy"] == pytest.approx(83.6, rel=0.03)
    assert found["logprobs"] == pytest.approx(24.4, rel=0.03)
    assert "fell into 2 steps" in notes(profile)


def test_answers_per_step_come_from_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "cluster: {num_nodes: 2, gpus_per_node: 8}\n"
        "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\n"
        "policy: {generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}}\n"
    )
    profile = logs.read([ROOT / "examples/logs/nemo_rl.log"], config=config)
    generation, policy = profile.component("generation"), profile.component("policy")
    assert generation is not None
    assert policy is not None
    assert (generation.seconds[0][0], policy.seconds[0][0]) == (8, 8)
    assert generation.seconds_per_1k_tokens == pytest.approx(1000 * 61 / (512 * 1211), rel=0.05)


def test_generation_that_takes_every_gpu_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "cluster: {num_nodes: 1, gpus_per_node: 8}\n"
        "policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 8}}}}\n"
    )
    with pytest.raises(InputError, match="none is left for training"):
        logs.read([ROOT / "examples/logs/nemo_rl.log"], config=config)


PARENT = """\
cluster: {num_nodes: 1, gpus_per_node: 8}
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, async_grpo: {enabled: false}}
policy:
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}
  generation: {colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}}
"""
APART = """\
defaults: grpo_math.yaml
policy: {generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}}
cluster: {num_nodes: 4}
"""


@pytest.mark.parametrize(
    ("child", "generation", "policy"),
    [
        ("defaults: grpo_math.yaml\ncluster: {num_nodes: 2}\n", 16, 16),  # no gpus_per_node here
        (APART, 8, 24),
        ("defaults: apart.yaml\ngrpo: {num_prompts_per_step: 64}\n", 8, 24),  # no cluster here
        ("defaults: apart.yaml\ncluster: {num_nodes: 2, gpus_per_node: 8}\n", 8, 8),  # not 16: its parent is apart
    ],
)
def test_the_gpus_of_a_run_are_counted_with_the_parents_of_its_config(
    tmp_path: Path, child: str, generation: int, policy: int
) -> None:
    (tmp_path / "grpo_math.yaml").write_text(PARENT)
    (tmp_path / "apart.yaml").write_text(APART)
    config = tmp_path / "recipe.yaml"
    config.write_text(child)
    profile = logs.read([ROOT / "examples/logs/nemo_rl.log"], config=config)
    assert {c.name: c.seconds[0][0] for c in profile.components if c.name in ("generation", "policy")} == {
        "generation": generation,
        "policy": policy,
    }


def test_exposed_generation_is_a_wait_and_idle_time_no_cost() -> None:
    profile = logs.read([DATA / "nemo_async.log"], facts=EIGHT)
    generation, policy = profile.component("generation"), profile.component("policy")
    assert generation is not None
    assert policy is not None
    assert generation.waits
    assert not policy.waits
    assert "idle/buffer_starvation" in notes(profile)


def test_other_output_between_the_bullets_does_not_end_a_block(tmp_path: Path) -> None:
    text = (ROOT / "examples/logs/nemo_rl.log").read_text()
    path = tmp_path / "run.log"
    path.write_text(text.replace("  • reward_calculation", "(Worker pid=9) some warning\n  • reward_calculation"))
    profile = logs.read([path], facts=EIGHT)
    assert [c.name for c in profile.components] == ["generation", "reward", "logprobs", "policy", "weight_sync"]


def test_event_files_are_read_without_tensorboard() -> None:
    profile = logs.read([EVENTS], facts=EIGHT)
    generation = profile.component("generation")
    assert generation is not None
    assert generation.steps == 6
    assert generation.seconds_per_1k_tokens == pytest.approx(1000 * generation.seconds[0][1] / (512 * 1205), rel=0.02)


def test_an_event_file_cut_anywhere_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (whole,) = EVENTS.iterdir()
    data = whole.read_bytes()
    path = tmp_path / "events.out.tfevents.1"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        told: list[int] = []
        read = list(tensorboard_events.read_scalars(path, lambda _: True, lambda told=told: told.append(1)))
        assert all(scalar.tag for scalar in read)
        assert len(told) <= 1
    path.write_bytes(data[:-5])
    assert "cut off" in notes(logs.read([path], facts=EIGHT))


def test_scalars_stored_as_tensors_are_read_too(tmp_path: Path) -> None:
    def field(number: int, kind: int, body: bytes) -> bytes:
        return bytes([number << 3 | kind]) + (bytes([len(body)]) if kind == 2 else b"") + body

    def record(body: bytes) -> bytes:
        return struct.pack("<Q", len(body)) + b"\0" * 4 + body + b"\0" * 4

    tensor = field(1, 0, b"\x02") + field(4, 2, struct.pack("<d", 6.5))
    value = field(1, 2, b"timing/train/generation") + field(8, 2, tensor)
    path = tmp_path / "events"
    path.write_bytes(
        record(field(3, 2, b"brain.Event:2")) + record(field(2, 0, b"\x07") + field(5, 2, field(1, 2, value)))
    )
    assert tensorboard_events.is_event_file(path)
    found = list(tensorboard_events.read_scalars(path, lambda _: True, lambda: None))
    assert found == [tensorboard_events.Scalar(7, "timing/train/generation", 6.5)]
