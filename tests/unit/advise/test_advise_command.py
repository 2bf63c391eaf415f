"""`trimtab advise` as people and programs call it: on finished logs, on logs that grow, and with bad input."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from advise_world import CASES, NEMO, RLINF, VERL, Case, Told, profile, verl_data, verl_jsonl
from cluster_here import Terminal
from engine_servers import again as start_again
from engine_servers import servers, wait_up
from trimtab.cli.app import run
from waiting import until

PATIENCE_S = 240.0
ROOT = Path(__file__).parents[3]
ids = [case.framework for case in CASES]


def words(case: Case, folder: Path, log: Path, *more: str) -> list[str]:
    known = ["--profile", str(profile(folder, case.points))] if case.points else []
    config = str(case.path(folder))
    return ["advise", config, *case.overrides, "--follow", str(log), "--restart-s", "120", *known, *more]


def written(case: Case, folder: Path, told: Told | None = None) -> Path:
    path = folder / "run.log"
    path.write_text(case.write(told or case.told()), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(VERL, tmp_path, VERL.steady(1, steps=14))


# ---- finished logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_finished_log_is_answered_as_data_and_as_a_page(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, page = written(case, tmp_path), tmp_path / "report.html"
    assert run(words(case, tmp_path, log, "--once", "--format", "json", "--report", str(page))) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["framework"] == case.framework
    assert data["components"][case.drifts]["drifted"]
    assert data["advice"]["gain_low"] < data["advice"]["gain"] < data["advice"]["gain_high"]
    assert data["history"][0]["what"] == "advised"
    html = page.read_text(encoding="utf-8")
    for word in data["advice"]["command_line"]:
        assert word.strip("'").split("=")[0] in html
    assert "Where each step goes" in html
    assert "Advised plan" in html
    assert not re.findall(r"(?:src|href)=", html)


def test_a_finished_log_is_answered_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(VERL, tmp_path, written(VERL, tmp_path), "--once")) == 0
    text = capsys.readouterr().out
    assert "Advice since step" in text
    assert "reward takes" in text
    assert "++reward.reward_model.enable_resource_pool=true" in text


def test_the_logs_of_the_examples_need_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "examples/math/config"
    file = next(config.glob("*.yaml"))
    assert run(["advise", str(file), "--follow", str(ROOT / "examples/logs/rlinf.log"), "--once", "-f", "yaml"]) == 0
    assert "COSTS_STEADY" in capsys.readouterr().out


def test_a_log_in_a_mode_whose_timings_are_waits_is_shown_and_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ROOT / "tests/data/logs/nemo_async.log"
    config = tmp_path / "config.yaml"
    apart = "colocated: {enabled: false, resources: {gpus_per_node: 4}}"
    text = NEMO.config.replace("colocated: {enabled: true}", apart).replace("env: ", "unused: ")
    config.write_text(text.replace("prompt: 8}", "prompt: 8, async_grpo: {enabled: true}}"))
    assert run(["advise", str(config), "--follow", str(log), "--once", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["advice"] is None
    assert data["components"]["generation"]["wait"]
    assert "--profile" in data["decision"]["reason"]
    assert data["idle_share"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--once", "--restart-hook", "true"], "--restart-hook and --once exclude each other"),
        (["--once", "--dashboard"], "then `trimtab show DIR --dashboard`"),
        (["--engine", "engine:8000"], "no address of an engine"),
        (["--every", "0"], "--every must be at least"),
        (["--least-gain", "lots"], "share such as 5%"),
        (["--warmup", "-1", "--once"], "negative"),
        (["--framework", "rlinf", "--once"], "the log is from verl"),
        (["--framework", "verll", "--once"], "did you mean verl"),
        (["--once", "--report", "/nowhere/at/all.html"], "/nowhere/at/all.html"),
        (["--once", "--warmup", "40"], "are warm-up"),
        (["--at-most", "nan"], "--at-most"),
    ],
)
def test_a_wrong_call_is_refused(
    more: list[str], said: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(VERL, tmp_path, small, *more)) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_log_of_no_known_framework_lists_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "poem.log"
    log.write_text("two roads diverged in a yellow wood\n")
    assert run(words(VERL, tmp_path, log, "--once")) == 2
    error = capsys.readouterr().err
    assert "no step with timings of verl" in error
    assert "timing_s/gen" in error
    job = tmp_path / "job.yaml"
    job.write_text("cluster: {nodes: 1, gpus_per_node: 8}\nworkflow: {components: {rollout: {seconds: {8: 1}}}}\n")
    assert run(["advise", str(job), "--follow", str(log), "--once"]) == 2
    error = capsys.readouterr().err
    for name in ("verl", "RLinf", "NeMo RL"):
        assert name in error
    assert run(["advise", str(job), "--once"]) == 2
    assert run(["advise", str(job), "--follow", str(tmp_path / "none.log"), "--once"]) == 2


def test_a_log_and_a_configuration_of_two_frameworks_do_not_go_together(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(RLINF, tmp_path, small, "--once")) == 2
    assert "the log is from verl, the configuration from rlinf" in capsys.readouterr().err.replace("\n", " ")


# ---- logs that grow ------------------------------------------------------------------------------------------------


class Live:
    """The command on a log that grows."""

    def __init__(self, folder: Path, *more: str, case: Case = VERL, log: Path | None = None) -> None:
        self.log = log or folder / "run.log"
        self.log.touch()
        command = [sys.executable, "-m", "trimtab", *words(case, folder, self.log, "--every", "0.1", *more)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def expect(self, said: str, times: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while sum(said in line for line in list(self.lines)) < times:
            assert self.process.poll() is None or said in "".join(self.lines), "".join(self.lines)[-3000:]
            assert time.monotonic() < deadline, f"{said} was not said:\n{''.join(self.lines)[-3000:]}"
            time.sleep(0.05)

    def end(self, number: int | None = signal.SIGINT) -> str:
        """Interrupt it, or wait for its own end; all that it said. It has to end well."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.wait(PATIENCE_S) == 0, "".join(self.lines)[-3000:]
        self.close()
        return "".join(self.lines)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def lives() -> Iterator[list[Live]]:
    """What a test started and did not end."""
    kept: list[Live] = []
    yield kept
    for one in kept:
        one.close()


def rows(told: Told) -> list[str]:
    return verl_jsonl(told).splitlines(keepends=True)


def test_the_users_command_runs_once_at_the_next_checkpoint(tmp_path: Path, lives: list[Live]) -> None:
    told = rows(VERL.told(saves=10))
    (tmp_path / "run.log").write_text("".join(told[:50]))  # the advice stands already, with checkpoints behind it
    hook = 'eval "set -- $TRIMTAB_OVERRIDES"; echo "$TRIMTAB_STEP $#$*" >> ran; echo "plan: $TRIMTAB_PLAN"; exit 7'
    live = Live(tmp_path, "--restart-hook", hook, "--least-gain", "5%")
    lives.append(live)
    live.expect("advice: reward takes")
    live.expect("step 50")
    assert not (tmp_path / "ran").exists()  # what was written before is never acted upon
    live.write("".join(told[50:59]))
    live.expect("step 59")
    assert not (tmp_path / "ran").exists()
    live.write(told[59] + rows(VERL.told(saves=1, steps=66))[60][:30])
    live.expect("the command ended with status 7")
    live.write(rows(VERL.told(saves=1, steps=66))[60][30:] + "".join(rows(VERL.told(saves=1, steps=66))[61:]))
    live.expect("step 66")
    said = live.end()
    ran = (tmp_path / "ran").read_text().splitlines()
    assert len(ran) == 1
    assert ran[0].startswith("60 5++trainer.nnodes=2 ++trainer.n_gpus_per_node=8 ")
    assert "plan: rollout, old_log_prob, ref, update_actor 16 | reward 8" in said
    assert "Advice since step" in said


def test_a_restart_after_the_users_command_runs_the_advised_plan(tmp_path: Path, lives: list[Live]) -> None:
    live = Live(tmp_path, "--restart-hook", "true", "--least-gain", "5%", "--format", "json")
    lives.append(live)
    told = rows(VERL.told(saves=50))
    live.write("".join(told[:49]))
    live.expect('"event": "advised"')
    live.write("".join(told[49:]))
    live.expect('"event": "hook_ended"')
    live.log.write_text("".join(rows(Told(VERL.seconds, lambda step: {"reward": VERL.to}, steps=4, seed=7))))
    live.expect('"event": "restarted"')
    end = json.loads(live.end(signal.SIGTERM).splitlines()[-1])
    assert end["event"] == "end"
    assert [one["what"] for one in end["history"]] == ["advised", "hook started", "hook ended", "restarted"]
    assert [one["gpus"] for one in end["placement"]] == [16, 8]


def test_a_command_that_takes_too_long_is_ended_and_told(tmp_path: Path, lives: list[Live]) -> None:
    live = Live(tmp_path, "--restart-hook", "echo $$ > pid; sleep 600", "--least-gain", "5%", "--hook-s", "4")
    lives.append(live)
    told = rows(VERL.told(saves=50))
    live.write("".join(told[:49]))
    live.expect("advice: reward takes")
    live.write(told[49])
    live.expect("took longer than 4 s and was ended")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    live.end()


def test_a_log_that_never_tells_a_step_ends_with_what_is_read(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("loading ...\n" * 20)
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *words(VERL, tmp_path, log, "--every", "0.1", "--silent", "1")],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "no step with timings of verl is in the log (20 lines were read)" in done.stderr.replace("\n", " ")


def test_it_ends_by_itself_when_its_time_is_over_and_the_page_is_there(tmp_path: Path, lives: list[Live]) -> None:
    written(VERL, tmp_path, VERL.steady(1, steps=14))
    live = Live(tmp_path, "--at-most", "1", "--report", str(tmp_path / "page.html"))
    lives.append(live)
    said = live.end(None)
    assert "1 s are over" in said
    (kept,) = (tmp_path / "runs").iterdir()
    assert f"observations are kept in runs/{kept.name}" in said
    assert "No advice (COSTS_STEADY)" in said
    assert "No advice" in (tmp_path / "page.html").read_text()


def test_a_second_command_on_the_same_log_looks_and_remembers_nothing(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.runtime.advise.record import FollowRecord, default_folder

    monkeypatch.chdir(tmp_path)
    first = FollowRecord(default_folder([small]), [small], VERL.path(tmp_path), VERL.overrides)
    briefly = words(VERL, tmp_path, small, "--at-most", "0")
    assert run(briefly) == 0
    told = capsys.readouterr()
    assert "observations are not kept: another run writes this folder" in told.err.replace("\n", " ")
    assert "No advice (COSTS_STEADY)" in told.out
    assert run([*briefly, "--restart-hook", "true"]) == 2  # it might be run twice
    first.close()
    assert run(briefly) == 0
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / default_folder([small])]


def test_on_a_terminal_one_picture_is_redrawn(tmp_path: Path) -> None:
    log = written(VERL, tmp_path, VERL.steady(1, steps=14))
    program = str(Path(sys.executable).with_name("trimtab"))
    terminal = Terminal(program, *words(VERL, tmp_path, log, "--every", "0.2"), cwd=tmp_path, around=dict(os.environ))
    terminal.expect("Ctrl-C ends")
    terminal.expect(r"the last is 14")
    data = json.dumps({"step": 15, "data": verl_data(VERL.steady(1, steps=15))[-1][1]})
    with log.open("a") as file:
        file.write(data + "\n")
    terminal.expect(r"the last is 15")
    terminal.interrupt()
    assert terminal.ended() == 0
    assert "Traceback" not in terminal.text


# ---- engines -------------------------------------------------------------------------------------------------------


class _Engine(http.server.BaseHTTPRequestHandler):
    tokens = 0

    def do_GET(self) -> None:
        type(self).tokens += 500
        page = (
            '# TYPE x gauge\nvllm:num_requests_running{engine="0"} 12.0\nvllm:num_requests_waiting{engine="0"} 3.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} 0.5\nvllm:generation_tokens_total{{engine="0"}} {self.tokens}\n'
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_an_engine_that_stops_answering_is_told_and_asked_again(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trimtab.runtime.advise.samples import EngineMetricsReader

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    engines = EngineMetricsReader([url, f"{url}/metrics", "http://127.0.0.1:9"])
    first, second = engines.sample(0.0)[0], engines.sample(10.0)[0]
    assert (first.running, first.waiting, first.cache, first.tokens_per_s) == (12.0, 3.0, 0.5, None)
    assert second.tokens_per_s == 50.0
    assert run(words(VERL, tmp_path, small, "--once", "--engine", url, "--engine", "http://127.0.0.1:9")) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{url} +12 +3 +50%", shown)
    assert "does not answer" in shown
    server.shutdown()
    server.server_close()
    thread.join(5)
    gone, never = engines.sample(30.0)
    assert gone.fault is not None
    assert gone.silent_s == 20.0
    assert never.fault is not None
    again = http.server.ThreadingHTTPServer(("127.0.0.1", server.server_port), _Engine)
    thread = threading.Thread(target=again.serve_forever, daemon=True)
    thread.start()
    assert engines.sample(40.0)[0].fault is None
    again.shutdown()
    again.server_close()
    thread.join(5)


def test_a_real_engine_is_read_frozen_killed_and_back(tmp_path: Path) -> None:
    from trimtab.runtime.advise.samples import EngineMetricsReader

    with servers(1, tmp_path) as [server]:
        engines = EngineMetricsReader([server.url])
        until(lambda: engines.sample(0.0)[0].fault is None)
        (seen,) = engines.sample(0.0)
        assert (seen.running, seen.waiting) == (0.0, 0.0)
        server.freeze()
        (frozen,) = engines.sample(5.0)
        assert frozen.fault is not None
        assert frozen.silent_s == 5.0
        server.thaw()
        until(lambda: engines.sample(6.0)[0].fault is None)
        server.kill()
        (gone,) = engines.sample(16.0)
        assert gone.fault is not None
        assert gone.silent_s == 10.0
        again = wait_up(start_again(server))
        until(lambda: engines.sample(20.0)[0].fault is None)
        again.stop()


def test_what_answers_and_is_no_engine_is_said_to_be_none(tmp_path: Path) -> None:
    from trimtab.runtime.advise.samples import EngineMetricsReader

    class Other(_Engine):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"up 1\n")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (seen,) = EngineMetricsReader([f"http://127.0.0.1:{server.server_port}"]).sample(0.0)
    assert seen.fault == "its /metrics are not those of a known engine"
    server.shutdown()
    server.server_close()
    thread.join(5)
