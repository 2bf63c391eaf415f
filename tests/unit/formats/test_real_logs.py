"""Logs in the forms that ten frameworks write: every component's seconds and every step's total are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from advise_world import event_file
from dialect_plans import DATA
from trimtab.core.errors import InputError
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.logs import reader
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.ledger import ledger
from trimtab.formats.logs.reader import JoinedSteps
from trimtab.formats.logs.records import StepRecord
from wandb_files import history, wandb_file

ROOT = Path(__file__).parents[3]
LOGS = DATA / "real" / "logs"
CASES = {case["file"]: case for case in yaml.safe_load((LOGS / "index.yaml").read_text())}


def joined(path: Path) -> JoinedSteps:
    """The steps of a log whose framework is found out from it."""
    framework = reader.detect([path])
    return reader.join(framework, [path])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "components" in case])
def test_every_steps_components_and_totals_are_right(name: str) -> None:
    case = CASES[name]
    run = joined(LOGS / name)
    framework, steps = run.framework, run.steps(0)
    assert framework.name == case["framework"]
    samples = reader.samples_of(framework, steps, RunFacts())
    assert {name: [sample.seconds for sample in taken] for name, taken in samples.items()} == {
        name: pytest.approx(seconds, rel=1e-4) for name, seconds in case["components"].items()
    }
    totals = [record.values.get(framework.prefix + framework.total, 0.0) for record in steps]
    assert [total for total in totals if total > 0] == pytest.approx(case.get("totals") or [], rel=1e-4)


def wrapped(text: str) -> str:
    """As it is copied from a terminal of 118 columns."""
    return "\n".join(line[at : at + 118] for line in text.split("\n") for at in range(0, max(1, len(line)), 118))


FORMS = {
    "colours": lambda text: "".join(f"\x1b[36m{line}\x1b[0m\n" for line in text.splitlines()),
    "colours of a page": lambda text: "".join(f"[36m{line}[0m\n" for line in text.splitlines()),
    "ranks of srun": lambda text: "".join(f" 0: {line}\n" for line in text.splitlines()),
    "ranks of torchrun": lambda text: "".join(f"[rank0]: {line}\n" for line in text.splitlines()),
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "a narrow terminal": wrapped,
}
PLAIN = {  # one console log of each framework
    *("verl_ray.log", "rlinf_bar.log", "nemo_rl_console.log", "openrlhf_ray.log", "slime_ray.log", "skyrl_ray.log"),
    *("areal_console.log", "roll_rlvr.log"),
}


# A table is as wide as its window or unreadable, a bar redraws itself, and SkyRL's timers have no form to be joined by.
NOT_WRAPPED = ("areal_console.log", "rlinf_bar.log", "skyrl_ray.log")


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in sorted(PLAIN) for form in FORMS if name not in NOT_WRAPPED or FORMS[form] is not wrapped],
)
def test_a_log_that_was_copied_or_coloured_says_the_same(name: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with (LOGS / name).open(encoding="utf-8", newline="") as file:
        path.write_text(FORMS[form](file.read()), encoding="utf-8", newline="")
    found, told = joined(path), joined(LOGS / name)
    assert found.framework.name == told.framework.name
    mine, theirs = ([(record.step, record.values) for record in run.steps(0)] for run in (found, told))
    assert mine == theirs


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "components" in case])
def test_a_profile_marks_the_waits_and_books_the_steps_seconds(name: str) -> None:
    case = CASES[name]
    profile = reader.read([LOGS / name], facts=RunFacts(8), warmup=0)
    assert sorted(c.name for c in profile.components if c.waits) == sorted(case.get("waits", []))
    if case.get("totals"):
        assert any(note.startswith("of a step's ") and "no timer" in note for note in profile.notes)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "refused" in case])
def test_a_log_without_enough_says_what_is_missing(name: str) -> None:
    case = CASES[name]
    with pytest.raises(InputError, match=case["refused"]):
        reader.read([LOGS / name], facts=RunFacts(8), warmup=case.get("warmup", 0), framework=case.get("framework"))


def test_there_are_logs_of_all_frameworks() -> None:
    assert {case.get("framework") for case in CASES.values()} >= set(FRAMEWORKS)
    assert len(CASES) >= 30


TIMES = {"timing_s/gen": 61.0, "timing_s/update_actor": 40.0, "timing_s/step": 105.0, "response_length/mean": 800.0}
CALLS = ({"GRPOTrainer.vLLM.generate": 20.0}, {"GRPOTrainer.compute_loss": 3.0}, {"GRPOTrainer.sync_weights": 1.0})


def wandb_run(folder: Path, records: list[bytes]) -> Path:
    inside = folder / "wandb" / "offline-run-20260101_000000-abc"
    inside.mkdir(parents=True)
    (inside / "run-abc.wandb").write_bytes(wandb_file(records))
    return inside


def test_a_wandb_folder_is_read_without_its_package(tmp_path: Path) -> None:
    other = b"\x08\x01" + b"\x2a\x00"  # a config record
    large = history(0, {"text": "x" * 100_000})  # lies in several blocks
    inside = wandb_run(tmp_path, [other, large, *(history(step, TIMES) for step in range(1, 6))])
    for path in (inside, tmp_path, tmp_path / "wandb", inside / "run-abc.wandb"):
        profile = reader.read([path], facts=RunFacts(8), warmup=2)
        assert profile.source == "verl"
        assert {c.name: c.seconds for c in profile.components} == {
            "rollout": ((8, 61.0),),
            "update_actor": ((8, 40.0),),
        }


def test_a_wandb_file_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    whole = wandb_file([history(step, TIMES) for step in range(1, 6)])
    (tmp_path / "run.wandb").write_bytes(whole[:-20])
    run = reader.join(reader.framework_named("verl"), [tmp_path / "run.wandb"])
    assert [record.step for record in run.steps(0)] == [1, 2, 3, 4]
    assert run.cut_off == 1


def test_trls_calls_add_up_to_their_step(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in range(1, 4):
        calls = [{f"profiling/Time taken: {name}": s for name, s in call.items()} for call in CALLS]
        rows += [*calls, *calls, {"train/global_step": step, "train/step_time": 70.0}]
    (tmp_path / "run.wandb").write_bytes(wandb_file([history(at, row) for at, row in enumerate(rows)]))
    profile = reader.read([tmp_path], facts=RunFacts(8), warmup=0)
    assert {c.name: c.seconds[0][1] for c in profile.components} == {
        "rollout": 40.0,
        "weight_sync": 2.0,
        "update_actor": 28.0,
    }


@pytest.mark.parametrize(
    ("framework", "values"),
    [
        ("verl", TIMES),
        ("areal", {"timeperf/rollout": 5.0, "timeperf/train_step": 40.0}),
        ("roll", {"time/step_generate": 60.0, "time/step_train": 40.0, "time/step_total": 104.0}),
        ("slime", {"perf/rollout_time": 60.0, "perf/actor_train_time": 40.0}),
        ("skyrl", {"timing/generate": 60.0, "timing/policy_train": 40.0}),
        ("nemo_rl", {"timing/train/generation": 60.0, "timing/train/policy_training": 40.0}),
        ("openrlhf", {"train/timing/generation": 60.0, "train/timing/ppo_train": 40.0}),
        ("rlinf", {"time/rollout": 60.0, "time/actor/training": 40.0}),
        ("prime_rl", {"time/forward_backward": 40.0}),
    ],
)
def test_tensorboard_and_wandb_tell_whose_timers_they_hold(
    framework: str, values: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "events.out.tfevents.1.a").write_bytes(event_file([(n, values) for n in range(4)]))
    inside = wandb_run(tmp_path / "w", [history(step, values) for step in range(4)])
    for path in (tmp_path / "deep", inside):
        profile = reader.read([path], facts=RunFacts(8), warmup=1)
        assert profile.source == framework
        assert profile.components


def test_a_total_that_is_logged_with_the_next_step_is_given_back() -> None:
    run = JoinedSteps(reader.framework_named("roll"))
    for step in range(1, 4):
        run.take(StepRecord(step, {"time/step_generate": 60.0, "time/step_total": 100.0 * (step - 1)}))
    assert [record.values.get("time/step_total") for record in run.steps(0)] == [100.0, 200.0, None]


def test_a_ledger_adds_up_to_the_step() -> None:
    framework = reader.framework_named("verl")
    step = {"gen": 60.0, "update_actor": 30.0, "testing": 20.0, "step": 100.0}
    outside = StepRecord(1, {f"timing_s/{name}": seconds for name, seconds in step.items()})
    found = ledger(framework, [outside])
    assert found is not None
    # Validation lies outside of this total.
    assert (found.step_s, found.unbooked) == (120.0, pytest.approx(10 / 120))
    assert sum(found.shares().values()) + found.unbooked == pytest.approx(1.0)
    waiting = ledger(framework, [StepRecord(1, {"timing_s/gen": 90.0, "timing_s/update_actor": 60.0,
                                                "timing_s/step": 100.0})], waits=("rollout",))  # fmt: skip
    assert waiting is not None
    assert waiting.seconds == {"update_actor": 60.0, "rollout (waits)": 40.0}
    assert waiting.unbooked == 0
    assert ledger(framework, [StepRecord(1, {"timing_s/gen": 1.0})]) is None


def test_a_run_of_verl_on_a_gpu_reads_as_its_own_file_of_metrics_says() -> None:
    folder = ROOT / "docs" / "results" / "verl-gpu"
    rows = [json.loads(line)["data"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    run = joined(folder / "console.log")
    steps = run.steps(0)
    samples = reader.samples_of(run.framework, steps, RunFacts())
    timers = {
        "rollout": ["gen"],
        "old_log_prob": ["old_log_prob"],
        "ref": ["ref"],
        "update_actor": ["update_actor", "adv"],
    }
    assert len(rows) == len(steps) == 20
    for component, names in timers.items():
        own = [sum(row[f"timing_s/{name}"] for name in names) for row in rows]
        assert [sample.seconds for sample in samples[component]] == pytest.approx(own)
    assert [step.values["timing_s/step"] for step in steps] == [row["timing_s/step"] for row in rows]
