"""Advice on what the loggers of verl, RLinf and OpenRLHF write, accepted by their own code, each in its environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_own_placement_code import VERL as VERL_FLAGS
from test_own_placement_code import ask

from advise_world import OPENRLHF, RLINF, VERL, Told, grows, measured, openrlhf_beside, verl_data
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep, RunLog
from trimtab.formats.logs.follow_costs import RunConfig
from trimtab.formats.write_back import shell_words
from trimtab.model.run import ReplanRules
from trimtab.runtime.advise.analysis import AdviceTracker

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.frameworks


def ran(environment: str, script: str, told: list[Any], folder: Path, *words: Path) -> bytes:
    """What a framework's own code prints when it is told this."""
    python = ROOT / environment / "bin" / "python"
    assert python.exists(), f"there is no {environment}: run tools/make-framework-envs"
    done = subprocess.run(
        [python, Path(__file__).parent / script, *words],
        input=json.dumps(told).encode(),
        capture_output=True,
        timeout=300,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def logged(folder: Path, told: Told) -> dict[str, bytes]:
    """What verl's console and file loggers make of a run."""
    timings = [
        {name.removeprefix("timing_s/"): value for name, value in data.items() if name.startswith("timing_s/")}
        for _, data in verl_data(told)
    ]
    file = folder / "verl.jsonl"
    console = ran(".venv-verl", "verl_logs.py", timings, folder, file)
    return {"console": console, "file": file.read_bytes()}


def steps_of(data: bytes, framework: str = "verl") -> list[LoggedStep]:
    log = RunLog(logs.FRAMEWORKS[framework])
    found = []
    for at in range(0, len(data), 777):
        found += log.take("run.log", data[at : at + 777])
    return found + log.end()


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return logged(tmp_path_factory.mktemp("verl"), VERL.told(saves=20))


@pytest.mark.parametrize("logger", ["console", "file"])
def test_what_verls_own_logger_writes_is_advised_upon(logger: str, drifting: dict[str, bytes], tmp_path: Path) -> None:
    steps = steps_of(drifting[logger])
    assert [step.number for step in steps] == list(range(1, VERL.told().steps + 1))
    assert [step.number for step in steps if step.saved] == [20, 40, 60]
    assert VERL.points is not None
    config = RunConfig(VERL.path(tmp_path), VERL.overrides)
    rules = ReplanRules(assumed_move_s=120.0)
    advising = AdviceTracker(logs.FRAMEWORKS["verl"], config, measured(VERL.points), rules, 2)
    news = [one for step in steps for one in advising.take(step)]
    assert news[0].what == "advised"
    assert VERL.after < news[0].step <= VERL.after + VERL.over + rules.window
    assert news[0].sentence.startswith("reward takes ")
    assert advising.adviser is not None
    assert advising.adviser.advice is not None
    again, _ = RunConfig(config.path, (*config.overrides, *advising.adviser.advice.overrides)).placement(VERL.seconds)
    assert {name: len(ranks) for name, ranks in again.ranks.items()}["reward"] == 8
    # The run started anew with the advice gets the pools that were planned, by verl's own code.
    line = [*VERL_FLAGS, *config.overrides[1:3], *advising.adviser.advice.overrides]
    (answer,) = ask(".venv-verl", "verl_pools.py", [line])
    assert answer.get("pools") == {"global_pool": [8, 8], "reward_pool": [8]}, answer


def test_noise_alone_in_verls_own_log_is_no_reason_for_advice(tmp_path: Path) -> None:
    assert VERL.points is not None
    config = RunConfig(VERL.path(tmp_path), VERL.overrides)
    advising = AdviceTracker(
        logs.FRAMEWORKS["verl"], config, measured(VERL.points), ReplanRules(assumed_move_s=120.0), 2
    )
    news = [one for step in steps_of(logged(tmp_path, VERL.steady(4))["file"]) for one in advising.take(step)]
    assert news == []


EMBODIED = """\
cluster: {num_nodes: 1, num_gpus_per_node: 8, component_placement: {env: 0-3, "rollout,actor": 4-7}}
runner: {task_type: embodied}
data: {env_num: 64}
"""
EMBODIED_POINTS = {"env": {4: 30.0, 8: 29.8}, "rollout": {4: 2.0, 8: 1.1}, "actor": {4: 30.0, 8: 29.9}}


@pytest.mark.parametrize("drifts", [True, False])
def test_what_rlinfs_own_table_shows_is_advised_upon(drifts: bool, tmp_path: Path) -> None:
    seconds = {name: points[4] for name, points in EMBODIED_POINTS.items()}
    told = Told(seconds, grows("rollout", after=25, to=10.0)) if drifts else Told(seconds)
    timers = {"env": "time/env/env_interact_step", "rollout": "time/rollout/predict", "actor": "time/actor_training"}
    metrics = [
        {timers[name]: value for name, value in times.items()}
        | {"time/sync_weights": 1.0, "time/step": sum(times.values()) + 1.5, "env/success_once": 0.4}
        for _, times, _ in told.each()
    ]
    steps = steps_of(ran(".venv-rlinf", "rlinf_logs.py", metrics, tmp_path), "rlinf")
    assert [step.number for step in steps] == list(range(1, told.steps + 1))
    path = tmp_path / "config.yaml"
    path.write_text(EMBODIED)
    rules = ReplanRules(assumed_move_s=120.0)
    advising = AdviceTracker(logs.FRAMEWORKS["rlinf"], RunConfig(path), measured(EMBODIED_POINTS), rules, 2)
    news = [one for step in steps for one in advising.take(step)]
    if not drifts:
        assert news == []
        return
    assert news[0].what == "advised"
    assert 25 < news[0].step <= 25 + 12 + rules.window
    assert news[0].sentence.startswith("rollout takes ")
    assert news[0].advice is not None
    again, _ = RunConfig(path, news[0].advice.overrides).placement(seconds)
    assert {name: len(ranks) for name, ranks in again.ranks.items()} == dict.fromkeys(seconds, 8)
    config = compose(path, news[0].advice.overrides).config
    case = {"config": config, "nodes": 1, "gpus_per_node": 8, "embodied": True}
    (answer,) = ask(".venv-rlinf", "rlinf_places.py", [case])
    assert answer.get("ranks") == {name: list(range(8)) for name in seconds}, answer


def test_what_rlinfs_own_code_makes_of_advice_for_a_reasoning_run(tmp_path: Path) -> None:
    assert RLINF.points is not None
    config = RunConfig(RLINF.path(tmp_path), RLINF.overrides)
    rules = ReplanRules(assumed_move_s=120.0)
    advising = AdviceTracker(logs.FRAMEWORKS["rlinf"], config, measured(RLINF.points), rules, 2)
    for step in steps_of(RLINF.write(RLINF.told()).encode(), "rlinf"):
        advising.take(step)
    assert advising.adviser is not None
    advice = advising.adviser.advice
    assert advice is not None
    made = {**compose(config.path, advice.overrides).config, "profile_data": {}}
    (answer,) = ask(
        ".venv-rlinf", "rlinf_places.py", [{"config": made, "nodes": 2, "gpus_per_node": 8, "embodied": False}]
    )
    planned = {name: list(group.gpus) for group in advice.plan.groups for name in group.components}
    assert answer.get("ranks") == {**planned, "reward": planned["rollout"]}, answer


def test_what_openrlhfs_own_logger_prints_is_advised_upon_in_flags_that_it_takes(tmp_path: Path) -> None:
    told = openrlhf_beside(OPENRLHF.told())
    statuses = [json.loads(line.partition(": ")[2].replace("'", '"')) for line in told.splitlines()]
    printed = ran(".venv-openrlhf", "openrlhf_logs.py", statuses, tmp_path).decode()
    known, _, text = printed.partition("\n")
    steps = steps_of(text.encode(), "openrlhf")
    assert [step.number for step in steps] == list(range(1, 61))
    config = RunConfig(OPENRLHF.path(tmp_path))
    rules = ReplanRules(assumed_move_s=120.0)
    advising = AdviceTracker(logs.FRAMEWORKS["openrlhf"], config, None, rules, 2)
    news = [one for step in steps for one in advising.take(step)]
    assert news[0].what == "advised"
    assert OPENRLHF.after < news[0].step <= OPENRLHF.after + OPENRLHF.over + rules.window
    assert news[0].sentence.startswith("rollout takes ")
    assert news[0].advice is not None
    flags = {word.partition("=")[0] for word in shell_words(news[0].advice.settings)}
    assert flags <= set(json.loads(known))
