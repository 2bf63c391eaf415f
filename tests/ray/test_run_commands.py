"""`trimtab run`, `trimtab plan --from-run`, `trimtab.Job`: what they say, how they end, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import run_parts
import trimtab
from cluster_here import PATIENCE_S, TRIMTAB, Terminal
from trimtab.cli.app import run
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import ReasonCode
from trimtab.model.workflow import Cluster, Node
from trimtab.render.text.run import RunNarrator
from trimtab.runtime.procs.processes import MARK, family
from trimtab.runtime.run.emulated import VirtualClock
from trimtab.runtime.run.folder import RunFolder, new_folder, read_run
from trimtab.runtime.run.job_file import load_run
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.run import Run

HERE = Path(__file__).parents[1] / "helpers"

FILE = """\
cluster: {{nodes: 1, gpus_per_node: 2}}
workflow:
  batches: 2
  components:
    rollout: {{use: 'run_parts:Noting', settings: {{pause_s: {pause_s}}}, gpus: [1]{costs}}}
    trainer: {{use: 'run_parts:Noting', settings: {settings}, after: rollout, gpus: [1]{costs}}}
  weight_sync: {{from: trainer, to: rollout}}
run: {{iterations: {iterations}, save_every: 1, step_limit_s: {limit_s}, modules_from: '{here}'{more}}}
"""

EMULATED = """\
cluster: {nodes: 1, gpus_per_node: 4}
workflow:
  batches: 2
  components:
    rollout: {seconds: {4: 0.004}, emulate: {drift: {to: 3.0, over: 10}}}
    trainer: {seconds: {4: 0.002, 2: 0.004}, emulate: true, after: rollout}
  weight_sync: {from: trainer, to: rollout}
run: {iterations: 20}
"""


def job_file(folder: Path, **given: Any) -> Path:
    facts = {"pause_s": 0.0, "settings": {}, "iterations": 5, "limit_s": 20.0, "more": "", "costs": "", "here": HERE}
    facts.update(given)
    path = folder / "small.yaml"
    path.write_text(FILE.format(**{**facts, "settings": json.dumps(facts["settings"])}))
    return path


def emulated_file(folder: Path, text: str = EMULATED) -> Path:
    path = folder / "emulated.yaml"
    path.write_text(text)
    return path


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one for one in told if not kinds or one["event"] in kinds]


def numbers(folder: Path) -> list[int]:
    return [one.number for one in read_run(folder).iterations]


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run_parts.LOG.clear()


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_job_without_costs_is_measured_planned_and_run_and_the_end_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(job_file(tmp_path, iterations=6)), "--local"]) == 0
    told = capsys.readouterr()
    for words in ("6 iterations", "this process, without Ray", "no costs are given", "plan (measured; from iteration",
                  "iteration 1 of 6", "iteration 6 of 6", "total "):  # fmt: skip
        assert words in told.err
    for words in ("done: all 6 iterations are done", "folder: runs/small-1 (checkpoint after iteration 6)",
                  "resume: trimtab run --resume runs/small-1 --local --iterations 12",
                  "report: trimtab show runs/small-1 --report report.html",
                  "trimtab plan --from-run runs/small-1"):  # fmt: skip
        assert words in told.out
    assert numbers(tmp_path / "runs/small-1") == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "runs/small-1/job.yaml").read_text().startswith("# The job of this run")


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = job_file(tmp_path, iterations=1)
    assert [run(["run", str(path), "--local", "-q"]) for _ in range(2)] == [0, 0]
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == ["small-1", "small-2"]
    assert new_folder(tmp_path / "runs", "a job: of / mine").name == "a-job-of-mine-1"
    (tmp_path / "grpo").mkdir()
    named_job = job_file(tmp_path, iterations=1).rename(tmp_path / "grpo/job.yaml")
    assert run(["run", str(named_job), "--local", "-q"]) == 0
    assert (tmp_path / "runs/grpo-1").is_dir()


@pytest.mark.parametrize("form", [["-f", "json"], ["--format", "yaml"]])
def test_the_answer_for_programs_stands_alone_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    from trimtab.formats.yaml_text import parse

    (tmp_path / "talker.py").write_text(
        "class Talker:\n    def __init__(self, place): pass\n    def step(self, batch):\n        print('hello')\n"
        "        return 1\n"
    )
    path = emulated_file(tmp_path, EMULATED.replace("emulate: true", "use: 'talker:Talker'"))
    assert run(["run", str(path), "--local", "--iterations", "2", *form]) == 0
    told = capsys.readouterr()
    data = parse(told.out, "answer")
    assert (data["state"], data["iterations"], data["folder"]) == ("done", 2, "runs/emulated-1")
    assert data["measured_s"] > 0
    assert "hello" in told.err


def test_quiet_says_nothing_but_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(emulated_file(tmp_path)), "--local", "--iterations", "2", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_mode_and_rules_of_the_loop_come_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = job_file(tmp_path, more=", loop: {least_iterations: 2, elastic: [rollout]}")
    job = trimtab.Job.load(path, mode="auto", iterations=9, seed=4)
    rules = job.run_job.rules
    assert (rules.mode.value, rules.least_iterations, rules.elastic) == ("auto", 2, ("rollout",))
    assert (job.run_job.iterations, job.run_job.seed) == (9, 4)
    assert trimtab.Job.load(path).run_job.rules.mode.value == "advise"


def test_a_plan_of_ones_own_is_run_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = emulated_file(tmp_path)
    groups = [{"components": ["rollout"], "gpus": [0, 1, 2]}, {"components": ["trainer"], "gpus": [3]}]
    (tmp_path / "plan.json").write_text(json.dumps({"groups": groups}))
    assert run(["run", str(path), "--local", "--iterations", "2", "--plan", "plan.json"]) == 0
    assert "plan: rollout 3 | trainer 1 GPUs" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text(json.dumps({"groups": [{"components": ["rollout"], "gpus": [0, 9]}]}))
    assert run(["run", str(path), "--local", "--plan", "plan.json"]) == 2
    assert "GPUs that do not exist: 9" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert run(["run", str(path), "--local", "--plan", "plan.json"]) == 2
    assert "not a plan" in capsys.readouterr().err
    with pytest.raises(InfeasibleError, match="does not say where trainer goes"):
        trimtab.Job.load(path).plan({"rollout": [0]})
    with pytest.raises(InputError, match="no component named critic"):
        trimtab.Job.load(path).plan({"critic": [0]})


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_folder_without_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, iterations=3)
    assert run(["run", str(path), "--local", "-q"]) == 0
    path.unlink()
    capsys.readouterr()
    assert run(["run", "--resume", "runs/small-1", "--local"]) == 0
    assert "all 3 iterations are done already: --iterations N" in capsys.readouterr().out
    assert run(["run", "--resume", "runs/small-1", "--local", "--iterations", "7"]) == 0
    assert "continues after iteration 3" in capsys.readouterr().err
    assert numbers(tmp_path / "runs/small-1") == [1, 2, 3, 4, 5, 6, 7]
    assert ("load", "trainer", 6) in run_parts.LOG
    # The longer job is what the folder keeps from now on.
    assert trimtab.Job.of_run("runs/small-1").run_job.iterations == 7


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"settings": {"pause_s": 0.001}}, "trainer.settings was {}, and is {'pause_s': 0.001} now"),
        ({"more": ", seed: 3"}, "run.seed was 0, and is 3 now"),
    ],
)
def test_a_run_does_not_go_on_as_another_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], what: str
) -> None:
    assert run(["run", str(job_file(tmp_path, iterations=2)), "--local", "-q"]) == 0
    before = (tmp_path / "runs/small-1/events.jsonl").read_bytes()
    other = job_file(tmp_path, iterations=9, **change)
    assert run(["run", str(other), "--resume", "runs/small-1", "--local"]) == 2
    assert f"another job: {what}" in capsys.readouterr().err
    assert (tmp_path / "runs/small-1/events.jsonl").read_bytes() == before
    # Length, saving and the loop may be others: they do not change what is computed.
    same = job_file(tmp_path, iterations=4, more=", loop: {mode: auto}", limit_s=9)
    assert run(["run", str(same), "--resume", "runs/small-1", "--local", "-q"]) == 0
    assert numbers(tmp_path / "runs/small-1") == [1, 2, 3, 4]


def test_a_seed_given_on_the_command_line_is_part_of_the_job(tmp_path: Path) -> None:
    assert run(["run", str(job_file(tmp_path, iterations=2)), "--local", "-q", "--seed", "5"]) == 0
    assert run(["run", "--resume", "runs/small-1", "--local", "--iterations", "3", "--seed", "6"]) == 2
    assert run(["run", "--resume", "runs/small-1", "--local", "--iterations", "3", "-q"]) == 0
    assert trimtab.Job.of_run("runs/small-1").run_job.seed == 5


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "what", "hint"),
    [
        ("save_every", "save_evry", "unknown key save_evry", "did you mean save_every?"),
        ("modules_from", "modules", "unknown key modules", "did you mean modules_from?"),
        ("gpus: [1]", "gpu: [1]", "unknown key gpu", "did you mean gpus?"),
        ("'run_parts:Noting'", "'run_parts:Notin'", "run_parts has no Notin", "did you mean Noting?"),
        ("'run_parts:Noting'", "'no_such_module:A'", "there is no module no_such_module", "PYTHONPATH"),
        ("'run_parts:Noting'", "'run_parts:NoStep'", "has no step", "step(self, batch)"),
        ("pause_s: 0.0", "speed: 1", "cannot be made with these settings", "it takes fail, pause_s"),
        ("step_limit_s: 20.0", "step_limit_s: 0", "step_limit_s is not right: 0", "a number of 0.001 or more"),
        ("step_limit_s: 20.0", "priority: high", "priority is not right: 'high'", "expected: a number"),
        (
            "step_limit_s: 20.0",
            "loop: {dwell_iteration: 3}",
            "unknown key dwell_iteration",
            "did you mean dwell_iterations?",
        ),
        ("step_limit_s: 20.0", "loop: {mode: car}", "mode is not right: 'car'", "one of advise, auto"),
        ("step_limit_s: 20.0", "loop: {elastic: [rolout]}", "there is no component named rolout", "rollout"),
        ("step_limit_s: 20.0", "loop: {window: 1}", "window is not right: 1", "a whole number of 4 or more"),
        ("step_limit_s: 20.0", "loop: on", "loop is a section of keys", "keys: mode"),
        ("iterations: 5", "iterations: 0", "iterations is not right: 0", "a whole number of 1 or more"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_by_its_key_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, what: str, hint: str
) -> None:
    path = job_file(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert run(["run", str(path), "--local"]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert hint in told
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "FILE is missing"),
        (["there/is/none.yaml"], "there is no file there/is/none.yaml"),
        (["small.yaml", "--local", "--address", "1.2.3.4:5"], "--local and --address exclude each other"),
        (["small.yaml", "--local", "--iterations", "0"], "iterations is not right: 0"),
        (["--resume", "nowhere"], "there is no run in this folder"),
        (["--resume", "."], "there is no run in this folder"),
        (["--resume", "a", "--folder", "b"], "--resume names the folder already"),
        (["small.yaml", "--address", "nonsense"], "nonsense is no address of a Ray cluster"),
    ],
)
def test_a_call_that_is_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    job_file(tmp_path)
    assert run(["run", *arguments]) == 2
    assert what in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*"))


def test_a_folder_that_is_taken_or_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, iterations=1)
    assert run(["run", str(path), "--local", "-q", "--folder", "mine"]) == 0
    assert run(["run", str(path), "--local", "--folder", "mine"]) == 2
    assert "`trimtab run --resume mine` goes on with it" in capsys.readouterr().err
    held = RunFolder(Path("mine"), resume=True)
    assert run(["run", "--resume", "mine", "--iterations", "2"]) == 2  # without --local: no Ray is started for it
    assert "another run writes this folder" in capsys.readouterr().err
    held.close()
    (tmp_path / "file").write_text("")
    assert run(["run", str(path), "--local", "--folder", "file/run"]) == 2
    assert "cannot write here" in capsys.readouterr().err


def test_more_nodes_than_one_machine_carries_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = emulated_file(tmp_path, EMULATED.replace("nodes: 1", "nodes: 64"))
    assert run(["run", str(path)]) == 3
    assert "the job has 64 nodes, and a Ray on this machine has 8 at the most" in capsys.readouterr().err
    assert run(["run", str(path), "--local", "--iterations", "2", "-q"]) == 0


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "what"),
    [
        ("raise", "RAISED", "the step of trainer raised RuntimeError: out of memory"),
        ("exit", None, "the step of trainer tried to exit the process: SystemExit"),
        ("generator", None, "trainer returned a generator"),
        ("hang", "HUNG", "the step of trainer was not over after 2 s"),
    ],
)
def test_a_component_that_misbehaves_ends_the_run_with_status_4_and_the_folder_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, code: str | None, what: str
) -> None:
    fail = {"fail": {"how": how, "iteration": 3, "seconds": 4.0}}
    limit_s = 2.0 if how == "hang" else 20
    path = job_file(tmp_path, settings=fail, limit_s=limit_s, costs=", seconds: {1: 0.01}")
    assert run(["run", str(path), "--local"]) == 4
    told = capsys.readouterr()
    assert f"error: {what}" in told.err
    assert "failed: " in told.out
    assert "resume: trimtab run --resume runs/small-1 --local" in told.out
    folder = tmp_path / "runs/small-1"
    assert numbers(folder) == [1, 2]
    assert read_run(folder).saved == 2
    ended = events(folder, "ended")
    assert (len(ended), ended[0]["state"]) == (1, "failed")
    assert code is None or ended[0]["code"] == code


def test_a_disk_that_takes_no_more_events_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b'"number": 3' in data:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    path = job_file(tmp_path, costs=", seconds: {1: 0.01}")
    assert run(["run", str(path), "--local"]) == 0
    told = capsys.readouterr().out
    assert "the folder is incomplete: events cannot be written: No space left on device" in told
    assert "(checkpoint after iteration 2)" in told
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(["run", "--resume", "runs/small-1", "--local", "-q"]) == 0
    assert numbers(tmp_path / "runs/small-1") == [1, 2, 3, 4, 5]


@contextmanager
def begun(*arguments: str, **around: str) -> Iterator[subprocess.Popen[str]]:
    """`trimtab run` in a process of its own, which is gone at the end, and does not wait for ever."""
    process = subprocess.Popen(
        [TRIMTAB, "run", *arguments],
        env={**os.environ, "RAY_ADDRESS": "local", **around},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(PATIENCE_S, process.kill)
    guard.start()
    with process:
        try:
            yield process
        finally:
            guard.cancel()
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What it says on standard error, up to a line with these words."""
    told = ""
    while words not in told:
        line = process.stderr.readline()
        assert line, f"it ended without saying {words}:\n{told}"
        told += line
    return told


def test_ctrl_c_once_ends_the_run_after_its_iteration_and_says_how_to_go_on(tmp_path: Path) -> None:
    path = job_file(tmp_path, iterations=500, pause_s=0.02, costs=", seconds: {1: 0.01}")
    with begun(str(path), "--local") as process:
        read_until(process, "iteration 1 of 500")
        process.send_signal(signal.SIGINT)
        read_until(process, "the run stops after the current iteration")
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: Ctrl-C" in out
    assert "resume: trimtab run --resume runs/small-1 --local" in out
    folder = tmp_path / "runs/small-1"
    done = numbers(folder)
    assert done == list(range(1, done[-1] + 1))
    assert read_run(folder).saved == done[-1]
    assert run(["run", "--resume", str(folder), "--local", "-q", "--iterations", str(done[-1] + 2)]) == 0
    assert numbers(folder) == list(range(1, done[-1] + 3))


def test_a_signal_asks_whether_the_plan_is_still_right(tmp_path: Path) -> None:
    path = job_file(tmp_path, iterations=300, pause_s=0.02, costs=", seconds: {1: 0.01}")
    with begun(str(path), "--local") as process:
        read_until(process, "iteration 1 of 300")
        process.send_signal(signal.SIGUSR1)
        read_until(process, "re-planning requested")
        read_until(process, "stays: ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_on_a_terminal_the_run_is_a_picture_that_says_what_ctrl_c_does(tmp_path: Path) -> None:
    path = job_file(tmp_path, iterations=900, pause_s=0.02, costs=", seconds: {1: 0.01}")
    screen = Terminal(TRIMTAB, "run", str(path), "--local", cwd=tmp_path, around=dict(os.environ))
    try:
        screen.expect("Ctrl-C stops the run after this iteration, a second Ctrl-C at once")
        screen.expect(r"iteration \d+ of 900 [\s\S]*?plan: rollout 1 \| trainer 1 GPUs")
        screen.expect(r"trainer +1 +\d+ ms")
        screen.interrupt()
        screen.expect("the run stops after the current iteration")
        assert screen.ended() == 130
        assert "resume: trimtab run --resume runs/small-1 --local" in screen.text
    finally:
        screen.close()


def test_ctrl_c_twice_ends_the_run_at_once(tmp_path: Path) -> None:
    slow = {"fail": {"how": "hang", "iteration": 2, "seconds": 600}}
    path = job_file(tmp_path, settings=slow, limit_s=900, costs=", seconds: {1: 0.01}")
    with begun(str(path), "--local") as process:
        read_until(process, "iteration 1 of 5")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        read_until(process, "the run stops after the current iteration")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped at once: iteration 2 was not over, and does not count" in out
    assert numbers(tmp_path / "runs/small-1") == [1]
    assert events(tmp_path / "runs/small-1", "ended")[0]["code"] == ReasonCode.by_hand.value


# ---- on a real Ray ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray that this process is connected to, with two logical GPUs."""
    from trimtab.runtime.rayapi.embedded import EmbeddedRay

    with EmbeddedRay(Cluster((Node("one", 2),))):
        yield


@pytest.mark.usefixtures("ray_here")
def test_on_ray_a_job_is_run_and_one_that_asks_for_more_than_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(job_file(tmp_path, iterations=6))]) == 0
    told = capsys.readouterr()
    assert "on the Ray that this process was connected to already" in told.err
    assert "done: all 6 iterations are done" in told.out
    path = emulated_file(tmp_path)
    assert run(["run", str(path)]) == 3
    assert "the job asks for 4 GPUs, and Ray has 2 on 1 node" in capsys.readouterr().err
    path.write_text(EMULATED.replace("{nodes: 1, gpus_per_node: 4}", "{nodes: 2, gpus_per_node: 1}"))
    assert run(["run", str(path)]) == 3
    assert "the job asks for nodes of 1, 1 GPUs, and Ray has 2 on 1 node: nodes of 2" in capsys.readouterr().err
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == ["small-1"]


@pytest.mark.long
@pytest.mark.usefixtures("ray_here")
def test_on_ray_a_component_whose_process_dies_comes_back_and_nothing_counts_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mortal.py").write_text(
        "import os, signal, pathlib\nfrom run_parts import Noting\n\n"
        "class Mortal(Noting):\n    def step(self, batch):\n"
        "        mark = pathlib.Path(__file__).with_name('died')\n"
        "        if batch.iteration == 3 and not mark.exists():\n"
        "            mark.touch()\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().step(batch)\n"
    )
    path = job_file(tmp_path, costs=", seconds: {1: 0.01}")
    text = path.read_text().replace(f"'{HERE}'", f"'{tmp_path}'")
    path.write_text(text.replace("trainer: {use: 'run_parts:Noting'", "trainer: {use: 'mortal:Mortal'"))
    (tmp_path / "run_parts.py").write_text((HERE / "run_parts.py").read_text())
    assert run(["run", str(path)]) == 0
    told = capsys.readouterr()
    assert "trainer is lost: " in told.err
    assert "during the run, losses: 1" in told.out
    assert numbers(tmp_path / "runs/small-1") == [1, 2, 3, 4, 5]
    assert read_run(tmp_path / "runs/small-1").metrics[5]["trainer"]["total"] == 9.5  # batches 9 and 10 of the run


@pytest.mark.long
@pytest.mark.usefixtures("ray_here")
def test_on_ray_a_component_that_hangs_ends_the_run_and_leaves_no_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = {"fail": {"how": "hang", "iteration": 2, "seconds": 600}}
    path = job_file(tmp_path, settings=hangs, limit_s=6.0, costs=", seconds: {1: 0.01}")
    assert run(["run", str(path)]) == 4
    assert "error: the step of trainer was not over after 6 s" in capsys.readouterr().err
    assert numbers(tmp_path / "runs/small-1") == [1]
    with trimtab.connect() as session:
        assert {one.state.value for one in session.tasks()} <= {"done", "cancelled", "failed"}
        assert not session.status()["pools"]


def test_with_a_ray_of_its_own_nothing_is_left_behind_after_ctrl_c(tmp_path: Path) -> None:
    mark = f"run-{os.getpid()}-{time.time_ns()}"
    path = job_file(tmp_path, iterations=5000, pause_s=0.02, costs=", seconds: {1: 0.01}")
    with begun(str(path), **{MARK: mark}) as process:
        told = read_until(process, "iteration 1 of 5000")
        assert "on a Ray of its own here: 2 logical GPUs on 1 node" in told
        assert len(family(None, mark)) > 5  # Ray's processes and the components'
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "resume: trimtab run --resume runs/small-1\n" in out
    assert family(None, mark) == []
    folder = tmp_path / "runs/small-1"
    assert read_run(folder).saved == numbers(folder)[-1]
    # The same folder goes on without Ray as well.
    last = numbers(folder)[-1]
    assert run(["run", "--resume", str(folder), "--local", "-q", "--iterations", str(last + 1)]) == 0
    assert numbers(folder) == list(range(1, last + 2))


def two_ctrl_c_while_it_starts(tmp_path: Path, after_s: float, gap_s: float) -> None:
    mark = f"start-{os.getpid()}-{time.time_ns()}"
    path = job_file(tmp_path, iterations=5000, pause_s=0.02, costs=", seconds: {1: 0.01}")
    with begun(str(path), **{MARK: mark}) as process:
        read_until(process, "components on")
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        time.sleep(gap_s)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, (after_s, gap_s, rest)
    assert "Traceback" not in rest, (after_s, gap_s, rest)
    assert family(None, mark) == [], (after_s, gap_s)


@pytest.mark.long
def test_two_ctrl_c_while_ray_starts_end_it_and_leave_nothing(tmp_path: Path) -> None:
    for after_s, gap_s in ((0.3, 0.3), (2.5, 0.02)):
        two_ctrl_c_while_it_starts(tmp_path, after_s, gap_s)


@pytest.mark.long
def test_two_ctrl_c_at_any_moment_of_the_start_end_it_and_leave_nothing(tmp_path: Path) -> None:
    for at in range(24):
        two_ctrl_c_while_it_starts(tmp_path, 0.25 * at, (0.0, 0.1, 0.6)[at % 3])


# ---- planning from a run ---------------------------------------------------------------------------------------------


def test_a_job_without_costs_cannot_be_planned_and_the_error_says_who_measures_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path)
    assert run(["plan", str(path)]) == 2
    told = capsys.readouterr().err
    assert "what rollout costs is not stated: running the job measures it" in told
    assert "--from-run DIR" in told
    with pytest.raises(InputError, match="running the job measures it"):
        trimtab.Job.load(path).plan()
    assert run(["plan", str(emulated_file(tmp_path)), "--format", "json"]) == 0
    path.write_text(path.read_text().replace("save_every", "save_evry"))
    assert run(["plan", str(path)]) == 2  # also when it is only planned


def test_a_past_run_is_planned_with_what_it_measured_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_run(emulated_file(tmp_path))
    assert Run(job, tmp_path / "runs/emulated-1", executor=LocalExecutor(VirtualClock())).run().state == "done"
    assert run(["plan", "--from-run", "runs/emulated-1", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rested = " ".join(data["assumptions"])
    assert "costs are those of 20 iterations of the run in runs/emulated-1: rollout on" in rested
    assert "rollout drifted to" in rested
    assert "your placement" in [one["label"] for one in data["alternatives"]]
    predicted_s = data["components"]["rollout"]["seconds"] * len(data["components"]["rollout"]["gpus"]) / 4
    assert predicted_s == pytest.approx(3 * 0.004, rel=0.01)  # it has trebled
    # Another cluster, by an override alone or with the file named.
    assert run(["plan", "--from-run", "runs/emulated-1", "cluster.gpus_per_node=8", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] <= 8
    assert run(["plan", "emulated.yaml", "--from-run", "runs/emulated-1", "--format", "text"]) == 0
    assert "Best placement for this task is:" in capsys.readouterr().out
    assert run(["plan", "--from-run", "runs"]) == 2
    assert run(["plan"]) == 2
    assert run(["plan", "--from-run", "runs/emulated-1", "--profile", "x.yaml"]) == 2


# ---- from Python -----------------------------------------------------------------------------------------------------


def test_a_job_is_made_of_classes_and_run_from_python(tmp_path: Path) -> None:
    heard: list[str] = []
    job = trimtab.Job(
        {
            "rollout": {"use": run_parts.Noting, "seconds": {1: 0.01}},
            "trainer": {"use": run_parts.Noting, "after": "rollout", "seconds": {1: 0.01}, "settings": {"pause_s": 0}},
        },
        cluster=2,
        batches=2,
        weight_sync=("trainer", "rollout"),
        run={"iterations": 3, "save_every": 1},
        name="mine",
    )
    assert job.plan().iteration_seconds > 0
    end = job.run(local=True, on_event=lambda event, facts: heard.append(event))
    assert (end.state, len(end.iterations)) == ("done", 3)
    assert (heard[0], heard[1], heard[-1]) == ("starting", "began", "ended")
    longer = trimtab.Job.of_run("runs/mine-1", iterations=4)
    assert longer.run(local=True, folder="runs/mine-1", resume=True).iterations[-1].number == 4
    with pytest.raises(InputError, match="none is named"):
        longer.run(local=True, resume=True)
    with pytest.raises(InputError, match="does not run now"):
        longer.stop()


def test_a_job_that_runs_can_be_asked_and_stopped_from_anywhere(tmp_path: Path) -> None:
    job = trimtab.Job.load(job_file(tmp_path, iterations=50, costs=", seconds: {1: 0.01}"))
    decided = []

    def heard(event: str, facts: dict[str, Any]) -> None:
        decided.append(facts["code"]) if event == "decided" else None
        if event == "iteration" and facts["iteration"]["number"] == 4:
            job.ask("is it?")
            job.stop("enough")

    end = job.run(local=True, on_event=heard)
    assert (end.state, end.reason.sentence, len(end.iterations)) == ("stopped", "enough", 4)
    assert decided


def test_what_nobody_else_could_import_or_keep_is_refused(tmp_path: Path) -> None:
    class Inside(run_parts.Bare):
        pass

    both = {"rollout": run_parts.Bare, "trainer": {"use": run_parts.Bare, "after": "rollout"}}
    with pytest.raises(InputError, match="inside a function"):
        trimtab.Job({**both, "rollout": Inside})
    with pytest.raises(InputError, match="rollout is a Bare: a class is expected"):
        trimtab.Job({**both, "rollout": run_parts.Bare(None)})
    with pytest.raises(InputError, match="this is a object, which a job file cannot hold") as refused:
        trimtab.Job({**both, "rollout": {"use": run_parts.Bare, "settings": {"deep": [object()]}}})
    assert refused.value.where.endswith("components.rollout.settings.deep[0]")


def test_classes_of_a_script_are_found_by_the_run_s_other_processes_and_by_a_resume(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import trimtab\n\nclass One:\n    def __init__(self, place): pass\n    def step(self, batch): return 1\n\n"
        "if __name__ == '__main__':\n"
        "    job = trimtab.Job({'a': One, 'b': {'use': One, 'after': 'a'}}, run={'iterations': 5})\n"
        "    print(job.run(local=True).state)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "done", done.stderr
    assert run(["run", "--resume", "runs/job-1", "--local", "--iterations", "6", "-q"]) == 0


# ---- words -----------------------------------------------------------------------------------------------------------


def test_what_happens_to_a_run_is_said_in_words() -> None:
    story = RunNarrator(80)
    numbers = {"iteration_s": 20.0, "new_iteration_s": 15.0, "gain_s": 5.0, "cost_s": 60.0}
    advice = {"what": "advise", "code": "DRIFTED", "reason": "rollout grew", "numbers": numbers}
    plan = {"plan": "rollout 6 | trainer 2", "predicted_s": 15.0}
    said = [
        *story.on_event("resumed", {"after": 20, "void": 3}),
        *story.on_event("plan", {"why": "first", "iteration": 21, "plan": "rollout, trainer 8", "predicted_s": 20.0}),
        *story.on_event("decided", {"what": "stay", "code": "TOO_FEW", "reason": "1 of 8 iterations are measured"}),
        *story.on_event("decided", {**advice, "plan": plan}),
        *story.on_event("decided", {**advice, "plan": plan}),  # once is enough
        *story.on_event(
            "move", {"move": 1, "state": "begun", "reason": "rollout grew", "numbers": numbers, "plan": plan}
        ),
        *story.on_event("move", {"move": 1, "state": "stage", "stage": "save"}),
        *story.on_event("move", {"move": 1, "state": "rolling back", "stage": "load", "reason": "a disk is full"}),
        *story.on_event("move", {"move": 1, "state": "rolled back"}),
        *story.on_event("move", {"move": 2, "state": "arrived", "took_s": 2.0}),
        *story.on_event("move", {"move": 3, "state": "stuck", "reason": "there is no way back"}),
        *story.on_event("cluster", {"why": "joined", "nodes": [["a", 8, ""], ["b", 8, ""]], "leaving": ["a"]}),
        *story.on_event("range", {"component": "rollout", "least": 2, "most": 6}),
        *story.on_event("task", {"task": "eval", "what": "running", "reason": "room made by evicting others"}),
        *story.on_event("task", {"task": "eval", "what": "cancelling", "reason": "its work is done"}),
        *story.on_event("worker", {"component": "rollout", "worker": "w1", "state": "draining", "code": "TAKEN"}),
        *story.on_event("worker", {"component": "rollout", "worker": "w1", "state": "active", "code": "CURRENT"}),
        *story.on_event("lost", {"component": "trainer", "why": "its process is gone", "after": 20, "void": 0}),
        *story.on_event("told", {"code": "NO_PLAN", "reason": "nothing fits"}),
        *story.on_event("something new", {}),
    ]  # fmt: skip
    assert said == [
        "continues after iteration 20; 3 iterations after that had no checkpoint and will run again",
        "plan: rollout, trainer 8 GPUs, 20.0 s an iteration",
        "would move to rollout 6 | trainer 2: rollout grew (25% less an iteration; the move costs 60.0 s, assumed)",
        "move 1 to rollout 6 | trainer 2: rollout grew (25% less an iteration; the move costs 60.0 s, assumed)",
        "move 1 failed (load): a disk is full; back to the plan before",
        "move 1 is rolled back: the plan before runs again",
        "move 2 is done after 2.0 s",
        "move 3 is stuck: there is no way back",
        "nodes changed (joined): 2 nodes with 16 GPUs now; a draining",
        "rollout may use 2 to 6 GPUs",
        "task eval: running, room made by evicting others",
        "rollout: worker w1 is draining",
        "trainer is lost: its process is gone",
        "nothing fits",
    ]
    assert story.counts == {"moves": 1, "rolled back": 1, "lost": 1, "advice": 1}
