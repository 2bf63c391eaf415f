"""What is written for RLinf, verl and OpenRLHF is given to their own placement code, each in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_corpus import checkout

from dialect_plans import DATA, TRL, composed, plan_of, profile_of
from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.areal import Areal
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.openrlhf import OpenRlhf
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.frameworks.roll import Roll
from trimtab.formats.frameworks.trl import Trl
from trimtab.formats.frameworks.verl import Verl
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.modes import plan_modes
from trimtab.plan.placement.planner import plan_placement

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.frameworks

REASONING = """\
cluster: {{num_nodes: {nodes}, num_gpus_per_node: 8, component_placement: {{"actor,rollout,reward": all}}}}
algorithm: {{group_size: 8, n_minibatches: 4, recompute_logprobs: {recompute}, normalize_advantages: true}}
data: {{rollout_batch_size: 512}}
rollout: {{tensor_parallel_size: 2, pipeline_parallel_size: 1}}
actor: {{model: {{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}}}
profile_data: {{actor_cost: 95.7, inference_cost: 30.8, rollout_cost: 59.9}}
"""
VERL = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "data.train_batch_size=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]
TRAINING = "old_log_prob ref update_actor"
SECONDS = {"rollout": {16: 60.0}, "old_log_prob": {16: 10.0}, "ref": {16: 9.0}, "update_actor": {16: 40.0}}


def ask(environment: str, script: str, cases: list[Any], paths: str = "") -> list[dict[str, Any]]:
    python = (ROOT / environment).resolve() / "bin" / "python"
    assert python.exists(), f"there is no {environment}: run tools/make-framework-envs"
    done = subprocess.run(
        [python, Path(__file__).parent / script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": paths} if paths else None,
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("ANSWERS")), None)
    assert line is not None, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(line.removeprefix("ANSWERS"))
    return answers


def in_rlinf(folder: Path, text: str, groups: dict[str, range], nodes: int, embodied: bool = False) -> dict[str, Any]:
    """The case for RLinf of a plan written into the user's file and read back."""
    job = composed(folder, text)
    settings = Rlinf.read(job, None).settings(plan_of(groups, total=8 * nodes))
    write_back.apply(job.path, settings, job.literal, job.states)
    config = compose(job.path).config
    return {"config": config, "nodes": nodes, "gpus_per_node": 8, "embodied": embodied}


def test_rlinf_accepts_what_is_written_and_places_each_component_on_the_planned_gpus(tmp_path: Path) -> None:
    one, two = (REASONING.format(nodes=n, recompute="true") for n in (1, 2))
    plain = REASONING.format(nodes=1, recompute="false")
    plans: list[tuple[str, dict[str, range], int, str]] = [
        (one, {"rollout inference actor": range(8)}, 1, "COLLOCATED"),
        (one, {"rollout": range(4), "inference": range(4, 6), "actor": range(6, 8)}, 1, "DISAGGREGATED"),
        (two, {"rollout inference actor": range(16)}, 2, "COLLOCATED"),
        (two, {"rollout": range(6), "inference": range(6, 8), "actor": range(8, 16)}, 2, "DISAGGREGATED"),
        (plain, {"rollout actor": range(8)}, 1, "COLLOCATED"),
        (plain, {"rollout": range(4), "actor": range(4, 8)}, 1, "DISAGGREGATED"),
    ]
    cases = []
    for index, (text, groups, nodes, _) in enumerate(plans):
        folder = tmp_path / str(index)
        folder.mkdir()
        cases.append(in_rlinf(folder, text, groups, nodes))
    for (_, groups, _, mode), answer in zip(plans, ask(".venv-rlinf", "rlinf_places.py", cases), strict=True):
        assert "error" not in answer, answer
        assert answer["mode"] == mode
        separate = mode == "DISAGGREGATED" and any("inference" in names for names in groups)
        assert answer["inference_workers"] == ("InferenceGroup" if separate else None)
        expected = {name: list(gpus) for names, gpus in groups.items() for name in names.split()}
        if mode == "COLLOCATED":
            expected.pop("inference", None)  # the actor's own workers do it
        assert answer["ranks"] == {**expected, "reward": expected["rollout"]}


def test_rlinf_accepts_every_grouping_of_the_embodied_form(tmp_path: Path) -> None:
    text = (DATA / "rlinf_embodied.yaml").read_text()
    plans = [
        {"env rollout actor": range(8)},
        {"env rollout": range(4), "actor": range(4, 8)},
        {"env": range(4), "rollout actor": range(4, 8)},
        {"env": range(2), "rollout": range(2, 5), "actor": range(5, 8)},
        {"env": range(2), "rollout": range(2, 8), "actor": range(8)},
    ]
    cases = []
    for index, groups in enumerate(plans):
        folder = tmp_path / str(index)
        folder.mkdir()
        cases.append(in_rlinf(folder, text, groups, 1, embodied=True))
    for groups, answer in zip(plans, ask(".venv-rlinf", "rlinf_places.py", cases), strict=True):
        assert answer == {
            "inference_workers": None,
            "mode": "HYBRID",
            "ranks": {name: list(gpus) for names, gpus in groups.items() for name in names.split()},
        }


def test_rlinf_refuses_the_placements_that_trimtab_refuses_to_read() -> None:
    bad = [
        {"actor": "0-4", "rollout": "4-7", "reward": "0-3"},
        {"actor": "0-3", "rollout": "4-9", "reward": "0-3"},
        {"actor": "0-3", "rollout": "7-4", "reward": "0-3"},
        {"actor": "0-3", "rollout": "6,5", "reward": "0-3"},
        {"actor": "0-3", "rollout": "4-7:0-2", "reward": "0-3"},
        {"actor": "0,2", "rollout": "4-7", "reward": "0-3"},
    ]
    base = {"actor": {"model": {}}, "rollout": {}, "algorithm": {"recompute_logprobs": False}}
    cases = [
        {"config": {**base, "cluster": {"component_placement": p}}, "nodes": 1, "gpus_per_node": 8, "embodied": False}
        for p in bad
    ]
    assert all("error" in answer for answer in ask(".venv-rlinf", "rlinf_places.py", cases))


PPO = {
    "actor.model_name_or_path": "m",
    "data.prompt_dataset": "d",
    "reward.remote_url": "/r.py",
    "train.batch_size": 128,
    "actor.num_gpus_per_node": 4,
    "vllm.num_engines": 4,
    "ds.packing_samples": True,
}
ESTIMATES = {"algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 8}


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as the launcher takes them; what is off is left out."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items() if value is not False
    ]


@pytest.mark.parametrize(
    ("more", "groups", "models", "engines"),
    [
        (
            {**ESTIMATES, "train.colocate_all": True, "vllm.enable_sleep": True, "ref.num_gpus_per_node": 4},
            {"rollout inference actor": range(2)},
            {"actor": [2, True], "ref": [2, True]},
            [2, 1, True],
        ),
        (
            {**ESTIMATES, "train.colocate_all": True, "vllm.enable_sleep": True, "ref.num_gpus_per_node": 4},
            {"inference actor": range(2), "rollout": range(2, 4)},
            {"actor": [2, True], "ref": [2, True]},
            [2, 1, False],
        ),
        (
            {"train.colocate_all": True, "ref.num_gpus_per_node": 4, "critic.num_gpus_per_node": 4},
            {"rollout inference actor": range(2)},
            {"actor": [2, True], "ref": [2, True], "critic": [2, True]},
            [2, 1, True],
        ),
        (
            {"train.colocate_actor_ref": True, "ref.num_gpus_per_node": 4, "critic.num_gpus_per_node": 2,
             "trimtab.nodes": 2, "trimtab.gpus_per_node": 8},
            {"inference actor": range(8), "rollout": range(8, 14)},
            {"actor": [8, True], "ref": [8, True], "critic": [2, False]},
            [6, 1, False],
        ),
        (
            {**ESTIMATES, "train.async_enable": True, "algo.kl.init_coef": 0},
            {"inference actor": range(2), "rollout": range(2, 8)},
            {"actor": [2, False]},
            [6, 1, False],
        ),
    ],
)  # fmt: skip
def test_openrlhfs_launcher_takes_the_flags_and_places_its_models_as_planned(
    more: dict[str, Any], groups: dict[str, range], models: dict[str, Any], engines: list[Any], tmp_path: Path
) -> None:
    flags = {**PPO, **more}
    job = composed(tmp_path, json.dumps(write_back.nested(flags)))
    loaded = OpenRlhf.read(job, profile_of({"rollout": {4: 60.0}, "inference": {4: 10.0}, "actor": {4: 40.0}}))
    settings = loaded.settings(plan_of(groups, total=14))
    stated = {name: value for name, value in {**flags, **settings.values}.items() if not name.startswith("trimtab.")}
    (answer,) = ask(".venv-openrlhf", "openrlhf_models.py", [flags_of(stated)])
    assert answer == {"groups": models, "engines": engines}


def test_openrlhfs_launcher_refuses_what_is_not_planned() -> None:
    uneven = {**PPO, **ESTIMATES, "train.colocate_all": True, "ref.num_gpus_per_node": 4, "vllm.num_engines": 3}
    answers = ask(".venv-openrlhf", "openrlhf_models.py", [flags_of(uneven), ["--no.such.flag"]])
    assert "must be equal" in answers[0]["error"]
    assert "parser" in answers[1]["error"]


def test_verl_makes_the_planned_pools_from_the_overrides() -> None:
    separate = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1")
    reward = ("reward.reward_model.enable=true",)
    teacher = ("distillation.enabled=true", "distillation.nnodes=1")
    cases: list[tuple[tuple[str, ...], dict[str, float], dict[str, range], dict[str, list[int]], list[int]]] = [
        ((), {}, {f"rollout {TRAINING}": range(16)}, {"global_pool": [8, 8]}, []),
        ((), {}, {f"rollout {TRAINING}": range(4)}, {"global_pool": [4]}, []),
        (separate, {}, {TRAINING: range(8), "rollout": range(8, 24)}, {"global_pool": [8]}, [8, 8]),
        (
            reward,
            {"reward": 8.0},
            {f"rollout {TRAINING}": range(8), "reward": range(8, 12)},
            {"global_pool": [8], "reward_pool": [4]},
            [],
        ),
        (reward, {"reward": 8.0}, {f"rollout reward {TRAINING}": range(16)}, {"global_pool": [8, 8]}, []),
        (
            teacher,
            {"teacher": 8.0},
            {f"rollout {TRAINING}": range(16), "teacher": range(16, 24)},
            {"global_pool": [8, 8], "teacher_pool": [8]},
            [],
        ),
    ]
    lines = []
    for overrides, extra, groups, _, _ in cases:
        profile = profile_of({**SECONDS, **{name: {8: seconds} for name, seconds in extra.items()}})
        loaded = Verl.read(compose(DATA / "verl_sync.yaml", overrides), profile)
        lines.append([*VERL, *overrides, *write_back.overrides(loaded.settings(plan_of(groups, total=24)))])
    for case, answer in zip(cases, ask(".venv-verl", "verl_pools.py", lines), strict=True):
        assert "error" not in answer, answer
        assert answer["pools"] == case[3]
        assert answer["rollout"] == case[4]
    bad = [*VERL, "trainer.n_gpus_per_node=7"]
    assert "divisible" in ask(".venv-verl", "verl_pools.py", [bad])[0]["error"]


def mode_words(read: Callable[[Sequence[str]], LoadedJob]) -> dict[str, tuple[str, ...]]:
    """All words of each other mode."""
    present = read(())
    _, *found = plan_modes(
        (present, None), plan_placement(present.job, present.rules).best, lambda words: (read(words), None)
    )
    assert found
    assert all(not mode.reason for mode in found), found
    return {mode.mode: tuple(shlex.split(" ".join(mode.words))) for mode in found}


def test_verl_starts_in_its_other_modes() -> None:
    cases = []
    for nodes in (1, 2, 3):
        mini = ("data.train_batch_size=768", "actor_rollout_ref.actor.ppo_mini_batch_size=256")
        given = [f"trainer.nnodes={nodes}", *mini]

        def read(words: Sequence[str], given: Sequence[str] = given) -> LoadedJob:
            return Verl.read(compose(DATA / "verl_sync.yaml", [*given, *words]), profile_of(SECONDS))

        cases += [[*VERL[:2], *given, *words] for words in mode_words(read).values()]
    answers = ask(".venv-verl", "verl_pools.py", cases)
    assert len(answers) == 6
    for answer, words in zip(answers, cases, strict=True):
        assert "error" not in answer, answer["error"]
        assert bool(answer["rollout"]) == ("++trainer.v1.trainer_mode=separate_async" in words)


def test_openrlhfs_launcher_takes_its_other_modes(tmp_path: Path) -> None:
    flags = {**PPO, **ESTIMATES, "train.colocate_all": True, "vllm.enable_sleep": True, "ref.num_gpus_per_node": 4}
    path = composed(tmp_path, json.dumps(write_back.nested(flags))).path
    costs = profile_of({"rollout": {4: 60.0}, "inference": {4: 10.0}, "actor": {4: 40.0}})
    found = mode_words(lambda words: OpenRlhf.read(compose(path, words), costs))
    stated = {name: value for name, value in flags.items() if name != "vllm.enable_sleep"}
    for answer in ask(
        ".venv-openrlhf", "openrlhf_models.py", [[*flags_of(stated), *words] for words in found.values()]
    ):
        assert "error" not in answer, answer
        assert answer["engines"][2] is False  # GPUs of their own


def test_areal_roll_and_trl_take_their_other_modes(tmp_path: Path) -> None:
    areal = checkout("areal") / "examples/math/gsm8k_grpo.yaml"
    cases: list[dict[str, Any]] = []
    for name, kind, path, more in (
        ("areal", Areal, areal, ("++rollout.max_head_offpolicyness=0",)),
        *(("roll", Roll, path, ()) for path in sorted((checkout("roll") / "examples").rglob("rlvr_config*.yaml"))),
    ):
        costs = profile_of({"rollout": {8: 60.0}, "update_actor": {8: 40.0}})

        def read(words: Sequence[str], kind: Any = kind, path: Path = path, given: Any = (more, costs)) -> LoadedJob:
            return kind.read(compose(path, [*given[0], *words]), given[1])  # type: ignore[no-any-return]

        with contextlib.suppress(InputError):  # an example that has no such GPUs, or is no RL
            if read(()).modes:
                words = [[f"++{w.lstrip('+')}" for w in (*more, *found)] for found in mode_words(read).values()]
                cases += [{"framework": name, "file": str(path), "overrides": each} for each in words]
    path = composed(tmp_path, TRL).path
    costs = profile_of({"rollout": {8: 60.0}, "update_actor": {8: 40.0}})
    flags = mode_words(lambda words: Trl.read(compose(path, words), costs))["server"]
    given = dict(word.lstrip("-").split("=") for word in flags)
    stated = yaml.safe_load(TRL) | {key: yaml.safe_load(value) for key, value in given.items()}
    cases.append({
        "framework": "trl", "trainer": "grpo", "folder": str(tmp_path), "processes": stated["num_processes"],
        "words": [f"--{name}={value}" for name, value in stated.items() if name != "num_processes" and "." not in name],
        "server": [f"--{name.partition('.')[2]}={value}" for name, value in stated.items() if "." in name],
    })  # fmt: skip
    answers = ask(".venv-areal", "own_config_checks.py", cases, str(checkout("roll")))
    assert {case["framework"] for case in cases} == {"areal", "roll", "trl"}
    assert all("error" not in answer for answer in answers), answers
    assert answers[-1]["gpus"]["step"] == 128  # as many answers as before
