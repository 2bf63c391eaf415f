"""verl's own fully-async training with the policy `trimtab`, on CPUs; `verl_elastic.py` says what is verl's in it."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import engine_servers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
STEPS, CYCLE = 50, 32
SLOTS, CONTEXT = 8, 512
TIE = 1e-3  # nat between the two likeliest tokens, where what runs beside a request may decide
pytestmark = pytest.mark.frameworks


def in_verl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert PYTHON.exists(), "there is no .venv-verl: run tools/make-framework-envs"
    paths = (ROOT / "src", Path(__file__).parent)
    return subprocess.run(
        [PYTHON, *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "VERL_USE_EXTERNAL_MODULES": "trimtab.integrations.verl_plugin",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )


def trained(policy: str, steps: int, faults: str, folder: Path) -> dict[str, Any]:
    """A run in verl's environment: what its trainer, its controller and the engines have seen."""
    done = in_verl(folder, str(Path(__file__).parent / "verl_elastic.py"), policy, str(steps), faults)
    line = next((text for text in done.stdout.splitlines() if text.startswith("SEEN")), None)
    assert line is not None, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(line.removeprefix("SEEN"))
    return seen


def outdated(seen: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Requests that an engine began with weights older than those of the last sync that had ended."""
    found = []
    for name, engine in seen["engines"].items():
        for began, version in (engine or {"starts": []})["starts"]:
            synced = [step for ended, step in seen["syncs"] if ended < began]
            if synced and version < synced[-1]:
                found.append((name, version, synced[-1]))
    return found


def asked(url: str, ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True, **more}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def goes_wrong(url: str, prompt: int, given: list[int]) -> bool:
    """Whether a server asked for all tokens at once answers otherwise, and not only where two tokens are as likely."""
    ids, at = [1 + prompt // 90, 1 + prompt % 90], 0
    while at < len(given):
        alone = asked(url, [*ids, *given[:at]], len(given) - at)["tokens"]
        same = next((n for n, pair in enumerate(zip(alone, given[at:], strict=True)) if pair[0] != pair[1]), len(alone))
        at += same
        if at == len(given):
            return False
        likely = asked(url, [*ids, *given[:at]], 1, n_probs=2)["completion_probabilities"][0]["top_logprobs"]
        if given[at] not in [one["id"] for one in likely] or likely[0]["logprob"] - likely[1]["logprob"] > TIE:
            return True
        at += 1
    return False


def wrong_answers(seen: dict[str, Any], folder: Path) -> list[int]:
    answers = {int(prompt): tokens for prompt, tokens in seen["answers"].items()}
    with (
        engine_servers.servers(1, folder, slots=SLOTS, context=CONTEXT) as [server],
        ThreadPoolExecutor(SLOTS) as threads,
    ):
        wrong = threads.map(lambda one: goes_wrong(server.url, *one), answers.items())
        return [prompt for prompt, found in zip(answers, wrong, strict=True) if found]


def test_fifty_steps_with_drains_a_kill_and_a_drain_during_a_weight_sync_train_on_every_sample_once(
    tmp_path: Path,
) -> None:
    seen = trained("trimtab", STEPS, "faults", tmp_path)
    assert Counter(seen["got"]) == Counter(range(STEPS * CYCLE))
    assert seen["short"] == []
    assert wrong_answers(seen, tmp_path) == []  # also those at which several replicas took turns
    assert [step for _, step in seen["syncs"]] == list(range(STEPS + 1))
    assert seen["activated"] >= 10
    assert seen["deactivated"] >= 10
    assert seen["dead"] == ["engine_3"]
    assert not seen["killed_server_lives"]
    assert seen["status"]["workers"]["standalone_1"][0] == "lost"
    assert seen["drained_while_syncing"] is True
    groups = [group for group, _ in Counter(seen["groups"]).most_common()]
    assert sorted(groups) == [3, 4]  # ranks of the sync: without the drained one, and later without the lost one
    assert seen["groups"][-1] == 3
    assert outdated(seen) == []
    assert [fault for engine in seen["engines"].values() if engine for fault in engine["faults"]] == []
    assert sum(engine["aborted"] for engine in seen["engines"].values() if engine) > 0


def test_verls_default_policy_goes_through_the_same_trace_on_the_same_stand(tmp_path: Path) -> None:
    seen = trained("default", 6, "none", tmp_path)
    assert Counter(seen["got"]) == Counter(range(6 * CYCLE))
    assert seen["short"] == []
    assert wrong_answers(seen, tmp_path) == []
    assert seen["activated"] >= seen["deactivated"] > 0


IMPORTS = """
from verl.trainer.ppo import ray_trainer
from trimtab.compat.verl.trainer.ppo.ray_trainer import RayPPOTrainer
from trimtab.compat.verl.workers.rollout.elastic_scheduler import ElasticConfig, ElasticScheduler
print(issubclass(RayPPOTrainer, ray_trainer.RayPPOTrainer), ElasticConfig().max_workers, ElasticScheduler.__name__)
"""


def test_the_import_lines_of_the_elastic_schedulers_document_work_beside_verl_itself(tmp_path: Path) -> None:
    done = in_verl(tmp_path, "-c", IMPORTS)
    assert done.stdout.splitlines()[-1:] == ["True 8 ElasticScheduler"], done.stderr[-3000:]
