import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bystanders import KILLS, bystanders
from trimtab.core.errors import InputError
from trimtab.formats.launch import sandbox
from trimtab.formats.launch.launch import is_unknown
from trimtab.formats.launch.read import evaluated, executed

HARM = f"""#!/bin/bash
{KILLS}\
kill -9 $PIDS; /usr/bin/pkill -9 -f sleeper; kill -9 -1
echo gone > victim.txt; rm -rf "$HOME" folder; : > "$VICTIM"
(while :; do :; done) &
exec 3<> /dev/tcp/127.0.0.1/1 || true
python3 -m verl.trainer.main_ppo trainer.nnodes=$(python3 -c 'print(4)') trainer.n_gpus_per_node=8
"""


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    with bystanders(tmp_path, "sglang", "raylet") as started:
        yield started


@pytest.fixture
def can_execute(tmp_path: Path) -> None:
    try:
        sandbox.run_recorded(["bash", "-c", "true"], tmp_path, {"PATH": "/usr/bin:/bin"})
    except InputError as error:
        pytest.skip(f"no namespaces here: {error.what}")


@pytest.mark.parametrize("way", ["read", "executed"])
def test_a_script_that_does_harm_changes_nothing(
    way: str, tmp_path: Path, alive: list[subprocess.Popen[bytes]], request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if way == "executed":
        request.getfixturevalue("can_execute")
    home = tmp_path / "home"
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    home.mkdir()
    (home / "kept").write_text("kept")
    (work / "victim.txt").write_text("kept")
    (work / "run.sh").write_text(HARM)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("VICTIM", str(home / "kept"))
    monkeypatch.setenv("PIDS", " ".join(str(process.pid) for process in alive))
    monkeypatch.setattr(sandbox.run_recorded, "__defaults__", (3.0,))
    shell, _ = (evaluated if way == "read" else executed)(Path("run.sh"), ())
    assert [process.poll() for process in alive] == [None, None, None]
    assert (home / "kept").read_text() == (work / "victim.txt").read_text() == "kept"
    assert sorted(path.name for path in work.iterdir()) == ["folder", "run.sh", "victim.txt"]
    if way == "read":  # the run ends itself with `kill -9 -1`
        (trainer,) = [start for start in shell.starts if start.module == "verl.trainer.main_ppo"]
        assert is_unknown(trainer.arguments[0])
        assert trainer.arguments[1] == "trainer.n_gpus_per_node=8"


def test_a_recorded_command_makes_a_value_unknown_never_empty(tmp_path: Path, can_execute: None) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "set -e\nN=$(nvidia-smi -L | wc -l)\nH=$(hostname -I | awk '{print $1}')\nmkdir -p logs\necho x > logs/x\n"
        "G=$(python -c 'print(1)')\nD=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n"
        'nohup uv run python3 -m verl.trainer.main_ppo n=$N g=$G h=$H d=$D "s=a b" l=$(cat logs/x) &\nwait\n'
    )
    records = sandbox.run_recorded(["bash", str(script)], tmp_path, {"PATH": "/usr/bin:/bin", "HOME": "/x"})
    (words,) = [record.words for record in records if "verl.trainer.main_ppo" in record.words]
    assert words[:6] == ("nohup", "uv", "run", "python3", "-m", "verl.trainer.main_ppo")
    assert [is_unknown(word) for word in words[6:9]] == [True, True, True]
    assert words[9:] == ("d=gpu", "s=a b", "l=x")
    assert not (tmp_path / "logs").exists()


def test_a_loop_and_a_question_end_with_the_time_limit(tmp_path: Path, can_execute: None) -> None:
    script = "ray start; read -p sure answer; while :; do :; done; ray stop"
    records = sandbox.run_recorded(["bash", "-c", script], tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s=1)
    assert [record.words for record in records] == [("ray", "start")]


def test_what_a_script_writes_is_there_for_the_script_only(tmp_path: Path, can_execute: None) -> None:
    """Its folder, its home and new folders of the root can be written; what is there is not changed."""
    (tmp_path / "home").mkdir()
    script = """set -euo pipefail
    ulimit -n 65536
    for folder in "$HOME/logs" /workspace-of-a-test/logs here; do
        mkdir -p "$folder" && echo "$folder" > "$folder/name" && ray status "$(cat "$folder/name")"
    done
    echo gone > /etc/hostname || ray stop
    """
    records = sandbox.run_recorded(["bash", "-c", script], tmp_path, {"PATH": "/usr/bin", "HOME": f"{tmp_path}/home"})
    written = [f"{tmp_path}/home/logs", "/workspace-of-a-test/logs", "here"]
    assert [record.words for record in records] == [*(("ray", "status", name) for name in written), ("ray", "stop")]
    assert not any(Path(tmp_path, name).exists() for name in written)


def test_a_script_reaches_no_network(tmp_path: Path, can_execute: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        script = f"exec 3<> /dev/tcp/127.0.0.1/{port} && ray start; ray stop"
        records = sandbox.run_recorded(["bash", "-c", script], tmp_path, {"PATH": "/usr/bin:/bin"})
        assert [record.words for record in records] == [("ray", "stop")]
        with pytest.raises(BlockingIOError):
            server.accept()


def test_without_namespaces_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something ran"))
    with pytest.raises(InputError, match="--execute needs"):
        sandbox.run_recorded(["bash", "-c", "true"], tmp_path, {})
