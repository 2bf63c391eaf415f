"""Runs that were never run: logs in each framework's own form, written from what every component takes in every step.

Times have the noise of real steps (spread and likeness of neighbours as in public training traces: 4 %, 0.7, a heavy
tail now and then), drawn from a fixed seed. What the log says is known here to the last figure, so that a test can say
when advice has to come and when it must not.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.formats import profile_file
from trimtab.model.workflow import ComponentProfile, Profile

DATA = Path(__file__).parents[1] / "data"

Drift = Callable[[int], Mapping[str, float]]


def steady(step: int) -> Mapping[str, float]:
    return {}


def grows(name: str, *, after: int, to: float, over: int = 12) -> Drift:
    """A component that takes so much longer, from a step on, a little more with each step."""

    def level(step: int) -> Mapping[str, float]:
        return {name: 1 + (to - 1) * min(1.0, max(0, step - after) / over)}

    return level


def noise(seed: int, count: int) -> list[float]:
    """Neighbours alike (0.7), spread 4 %, and one step in fifty that takes up to twice as long."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at = 0.7 * at + rng.gauss(0.0, 0.04 * (1 - 0.7**2) ** 0.5)
        found.append((1 + at) * (rng.uniform(1.3, 2.0) if rng.random() < 0.02 else 1.0))
    return found


@dataclass
class Told:
    """A run: what each component takes at the beginning, how that drifts, and which steps write a checkpoint."""

    seconds: Mapping[str, float]
    drift: Drift = steady
    steps: int = 60
    seed: int = 1
    noisy: bool = True
    saves: int = 0  # every so many steps
    length: float = 1500.0
    overlap: float = 0.0  # share of the components' times that falls together
    extra: Mapping[str, float] = field(default_factory=dict)  # further timers, as they are

    def each(self) -> list[tuple[int, dict[str, float], float]]:
        """(step, seconds of each component, mean answer length)."""
        factors = {name: noise(self.seed * 100 + at, self.steps) for at, name in enumerate(self.seconds)}
        found = []
        for step in range(1, self.steps + 1):
            level = self.drift(step)
            slow = 1.6 if step == 1 else 1.0
            times = {
                name: round(value * level.get(name, 1.0) * slow * (factors[name][step - 1] if self.noisy else 1.0), 3)
                for name, value in self.seconds.items()
            }
            found.append((step, times, self.length * level.get("rollout", level.get("generation", 1.0))))
        return found

    def saved(self, step: int) -> bool:
        return bool(self.saves) and step % self.saves == 0


VERL_TIMERS = {
    "rollout": "gen", "reward": "reward", "old_log_prob": "old_log_prob", "ref": "ref", "update_actor": "update_actor",
}  # fmt: skip


def verl_data(told: Told) -> list[tuple[int, dict[str, float]]]:
    """What verl logs for each step, under its own names."""
    found = []
    for step, times, length in told.each():
        data = {"actor/pg_loss": 0.01, "response_length/mean": length, "prompt_length/mean": 200.0}
        data |= {f"timing_s/{VERL_TIMERS[name]}": value for name, value in times.items()}
        data |= {f"timing_s/{name}": value for name, value in told.extra.items()}
        total = sum(times.values()) + 2.0
        if told.saved(step):
            data["timing_s/save_checkpoint"] = 40.0
            total += 40.0
        data["timing_s/step"] = total
        found.append((step, data))
    return found


def verl_jsonl(told: Told) -> str:
    return "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in verl_data(told))


def verl_console(told: Told, pid: int | None = 4242) -> str:
    mark = "" if pid is None else f"\x1b[36m(TaskRunner pid={pid})\x1b[0m "
    lines = []
    for step, data in verl_data(told):
        items = " - ".join(f"{name}:np.float64({value})" for name, value in data.items())
        lines.append(f"{mark}step:{step} - {items}\n")
    return "".join(lines)


RLINF_TIMERS = {"rollout": "rollout", "inference": "actor/inference", "actor": "actor/training"}


def rlinf_bar(told: Told) -> str:
    """The progress bar of the reasoning runner: every state ends in a carriage return."""
    text = "Start generation...\n"
    for step, times, length in told.each():
        post = {f"{RLINF_TIMERS[name]}_time": value for name, value in times.items()}
        post |= {"sync_weights_time": 1.2, "step_time": round(sum(times.values()) * (1 - told.overlap) + 1.5, 3)}
        if told.saved(step):
            post |= {"save_checkpoint_time": 30.0}
        items = ", ".join(f"{name}={value}" for name, value in {**post, "response_length": round(length, 1)}.items())
        text += f"\rGlobal Step:  10%|█   | {step}/900 [03:06<4:39:00, 186.10s/it, {items}]"
    return text + "\n"


NEMO_TIMERS = {
    "generation": "generation", "reward": "reward_calculation", "logprobs": "policy_and_reference_logprobs",
    "policy": "policy_training", "exposed": "exposed_generation",
}  # fmt: skip


def nemo_blocks(told: Told, mark: str = "") -> str:
    lines = []
    for step, times, length in told.each():
        bullets = {NEMO_TIMERS[name]: value for name, value in times.items()}
        if told.saved(step):
            bullets["checkpointing"] = 25.0
        total = sum(bullets.values()) + 1.0
        lines += [f"========================= Step {step}/900 =========================", "📊 Training Results:"]
        lines += [f"  • Mean Generation Length: {length:.4f}", "", "⏱️  Timing:", f"  • Total step time: {total:.2f}s"]
        lines += [f"  • {name}: {value:.2f}s ({100 * value / total:.1f}%)" for name, value in bullets.items()]
        lines += ["", "🔍 Performance Metrics:", "  • Mean Total Tokens per Sample: 1416.00", ""]
    return "".join(f"{mark}{line}\n" for line in lines)


OPENRLHF_TIMERS = {"rollout": "generation", "inference": "make_experience", "actor": "ppo_train"}


def openrlhf_lines(told: Told, mark: str = "\x1b[36m(PPOTrainer pid=77)\x1b[0m ") -> str:
    """A line for every step, as its logger prints a step's status."""
    text = ""
    for step, times, length in told.each():
        status: dict[str, float] = {"policy_loss": -0.01, "reward": 0.5, "response_length": length, "kl": 0.002}
        status |= {f"timing/{OPENRLHF_TIMERS[name]}": value for name, value in times.items()} | {
            "timing/broadcast": 1.5
        }
        whole = sum(value for name, value in status.items() if name.startswith("timing/"))
        status["timing/step_total"] = whole * (1 - told.overlap)
        text += f"{mark}INFO 09-14 01:51:48 ppo_trainer.py:551] \u2728 Global step {step}: {status}\n"
    return text


def openrlhf_beside(told: Told) -> str:
    """The same of an asynchronous run: a step lasts as long as whoever takes longer."""
    lines = []
    for line in openrlhf_lines(told).replace("\u2728 ", "").splitlines(keepends=True):
        times = {name: float(value) for name, value in re.findall(r"'timing/(\w+)': ([\d.]+)", line)}
        total = max(times["generation"], times["make_experience"] + times["ppo_train"] + times["broadcast"])
        lines.append(re.sub(r"('timing/step_total': )[\d.]+", rf"\g<1>{total}", line))
    return "".join(lines)


def profile(folder: Path, points: Mapping[str, Mapping[int, float]]) -> Path:
    """A profile file with these points."""
    path = folder / "profile.yaml"
    profile_file.write(measured(points), path)
    return path


def measured(points: Mapping[str, Mapping[int, float]]) -> Profile:
    return Profile("test", tuple(ComponentProfile(name, tuple(sorted(some.items()))) for name, some in points.items()))


def event_file(steps: list[tuple[int, dict[str, float]]]) -> bytes:
    """A TensorBoard event file with these scalars, as its writer lays it out (checksums left 0)."""

    def varint(number: int) -> bytes:
        found = b""
        while number > 0x7F:
            found += bytes([number & 0x7F | 0x80])
            number >>= 7
        return found + bytes([number])

    def field_of(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    def framed(event: bytes) -> bytes:
        return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)

    text = framed(b"\x09" + struct.pack("<d", 1.0) + field_of(3, b"brain.Event:2"))
    for step, data in steps:
        for tag, value in data.items():
            summary = field_of(1, field_of(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            text += framed(b"\x09" + struct.pack("<d", 1.0) + varint(2 << 3) + varint(step) + field_of(5, summary))
    return text


# ---- the runs whose advice has to change ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A framework's run: its configuration, what is known of its costs, and which component grows."""

    framework: str
    config: str  # YAML, or the name of a file in tests/data
    overrides: tuple[str, ...]
    seconds: Mapping[str, float]
    points: Mapping[str, Mapping[int, float]] | None
    drifts: str
    to: float
    write: Callable[[Told], str]
    after: int = 25
    over: int = 12

    def told(self, **changes: Any) -> Told:
        """The run with that drift."""
        return Told(self.seconds, grows(self.drifts, after=self.after, to=self.to, over=self.over), **changes)

    def steady(self, seed: int, **changes: Any) -> Told:
        """The same run with noise alone."""
        return Told(self.seconds, seed=seed, **changes)

    def path(self, folder: Path) -> Path:
        if self.config.endswith(".yaml"):
            return DATA / self.config
        path = folder / "config.yaml"
        path.write_text(self.config)
        return path


VERL_POINTS = {
    "rollout": {16: 42.0, 24: 30.0}, "reward": {8: 5.0, 16: 4.6, 24: 4.4}, "old_log_prob": {16: 36.0, 24: 30.0},
    "ref": {16: 30.0, 24: 25.0}, "update_actor": {16: 52.0, 24: 40.0},
}  # fmt: skip
RLINF_POINTS = {
    "rollout": {4: 44.0, 8: 36.0, 16: 32.0}, "inference": {2: 60.0, 8: 20.0, 16: 14.0},
    "actor": {4: 160.0, 8: 86.0, 16: 50.0},
}  # fmt: skip

VERL = Case(
    framework="verl",
    config="verl_sync.yaml",
    overrides=(
        "data.train_batch_size=1536",
        "reward.reward_model.enable=true",
        "trainer.nnodes=3",
        "++trimtab.nodes=3",
        "++trimtab.gpus_per_node=8",
    ),
    seconds={name: points[24] for name, points in VERL_POINTS.items()},
    points=VERL_POINTS,
    drifts="reward",
    to=13.0,
    write=verl_jsonl,
)
RLINF = Case(
    framework="rlinf",
    config="""\
cluster: {num_nodes: 2, num_gpus_per_node: 8, component_placement: {"actor,rollout,reward": all}}
runner: {task_type: reasoning}
algorithm: {group_size: 8, n_minibatches: 4, recompute_logprobs: true, normalize_advantages: false}
data: {rollout_batch_size: 512}
rollout: {tensor_parallel_size: 1, pipeline_parallel_size: 1}
actor: {model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}
""",
    overrides=(),
    seconds={name: points[16] for name, points in RLINF_POINTS.items()},
    points=RLINF_POINTS,
    drifts="rollout",
    to=3.0,
    write=rlinf_bar,
)
NEMO = Case(
    framework="nemo_rl",
    config="""\
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 8}
policy:
  dtensor_cfg: {tensor_parallel_size: 1}
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 1}, colocated: {enabled: true}}
env: {reward_model: {enabled: true, resources: {num_nodes: 1, gpus_per_node: 2}}}
cluster: {num_nodes: 1, gpus_per_node: 8}
""",
    overrides=(),
    seconds={"generation": 40.0, "reward": 18.0, "logprobs": 14.0, "policy": 50.0},
    points=None,
    drifts="reward",
    to=6.0,
    write=nemo_blocks,
)
OPENRLHF = Case(
    framework="openrlhf",
    config="""\
actor: {num_nodes: 1, num_gpus_per_node: 4}
vllm: {num_engines: 4, tensor_parallel_size: 1}
train: {async_enable: true, async_queue_size: 1, batch_size: 120}
rollout: {batch_size: 128}
algo: {advantage: {estimator: group_norm}, kl: {init_coef: 0}}
""",
    overrides=(),
    seconds={"rollout": 60.0, "inference": 12.0, "actor": 45.0},
    points=None,
    drifts="rollout",
    to=2.0,
    write=openrlhf_beside,
)
CASES = (VERL, RLINF, NEMO, OPENRLHF)
