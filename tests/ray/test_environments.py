"""Clients with runtime environments of their own, on one real Ray: each task runs its own client's code."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.model.pool import TaskState
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.client.task import TaskFailedError
from trimtab.runtime.rayapi.connect import connected
from waiting import until

WAIT_S = 240.0

JOB_CODE = """
import os

WORD = {word!r}


class Job:
    def look(self):
        found = [name for name in ("FIRST_SECRET", "SECOND_SECRET") if name in os.environ]
        return [WORD, *(os.environ[name] for name in found)]

    def save(self):
        return None

    def load(self, state):
        pass


class Later:
    async def look(self):
        return Job().look()
"""

CLIENT = """
import json, logging, sys
import ray
ask = json.loads(sys.argv[1])
ray.init(address=ask["address"], runtime_env=ask["runtime_env"], log_to_driver=False, logging_level=logging.ERROR)
from trimtab.runtime.client.session import connect
session = connect(name=ask["controller"])
from job_code import Job, Later
pool = session.pool("shared", {"cpu": 6}, warm_hosts=2, preload=["job_code"])
for kind in (Job, Later) if ask["calls"] else ():
    task = pool.submit(kind, resources={"cpu": 1})
    print(json.dumps(task.call("look", timeout=120)), flush=True)
    task.cancel()
for id in ask["leave"]:
    pool.submit(Job, resources={"cpu": 1}, id=id, wait_s=600)
session.close()
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with connected(cpus=8) as ray:
        yield ray


def client(
    tmp_path: Path,
    cluster: Any,
    controller: str,
    word: str,
    *,
    brought: bool = True,
    calls: bool = True,
    leave: tuple[str, ...] = (),
    **variables: str,
) -> list[Any]:
    """A client process whose module `job_code` says a word, brought as working_dir or beside its script."""
    folder = tmp_path / word
    folder.mkdir()
    (folder / "job_code.py").write_text(JOB_CODE.format(word=word))
    (folder / "script.py").write_text(CLIENT)
    runtime_env = {"working_dir": str(folder), "env_vars": {f"{word.upper()}_SECRET": f"{word}-s3cret"}}
    ask = {
        "address": cluster.get_runtime_context().gcs_address,
        "runtime_env": runtime_env if brought else {},
        "controller": controller,
        "calls": calls,
        "leave": leave,
    }
    answer = subprocess.run(
        [sys.executable, "script.py", json.dumps(ask)],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert answer.returncode == 0
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.fixture
def controller(cluster: Any) -> Iterator[str]:
    name = f"own-{uuid.uuid4().hex[:6]}"
    yield name
    connect(name=name).shutdown()


@pytest.mark.parametrize(
    "brought",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["as working_dir", "beside its script"],
)
def test_each_client_s_tasks_run_its_own_code_with_its_own_variables(
    tmp_path: Path, cluster: Any, controller: str, brought: bool
) -> None:
    for word in ("first", "second"):  # the first makes the controller; each time a host, then a plain actor
        secrets = [f"{word}-s3cret"] if brought else []
        assert client(tmp_path, cluster, controller, word, brought=brought) == [[word, *secrets]] * 2


@pytest.mark.long
def test_a_task_that_waits_keeps_its_code_when_its_client_is_gone_and_the_controller_was_killed(
    tmp_path: Path, cluster: Any, controller: str
) -> None:
    with connect(name=controller) as session:
        pool = session.pool("other", {"cpu": 8})
        pool.submit(Sleeper, resources={"cpu": 8}, id="in the way").wait("running", WAIT_S)
        client(
            tmp_path, cluster, controller, "first", calls=False, leave=("left",),
            RAY_RUNTIME_ENV_TEMPORARY_REFERENCE_EXPIRATION_S="1",
        )  # fmt: skip
        journal = Path(session.status()["journal"]["dir"])
        kill_controller(session)
        assert session.task("left").state is TaskState.waiting
        until(lambda: only_pinned(cluster))
        session.task("in the way").cancel()
        assert session.task("left").call("look", timeout=WAIT_S) == ["first", "first-s3cret"]
        told = [path for path in journal.rglob("*") if path.is_file() and b"first-s3cret" in path.read_bytes()]
        assert {path.parent.name for path in told} == {"payloads", "environments"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in told} == {0o600}
        session.task("left").evict()  # and again, on a process that is started for it
        assert session.task("left").call("look", timeout=WAIT_S) == ["first", "first-s3cret"]


def test_an_environment_that_cannot_be_set_up_fails_its_task_and_no_other(
    tmp_path: Path, cluster: Any, controller: str
) -> None:
    with connect(name=controller) as session:
        pool = session.pool("p", {"cpu": 4}, warm_hosts=1)
        broken = {"working_dir": "file:///nowhere/at-all.zip"}
        task = pool.submit(Sleeper, resources={"cpu": 1}, ray_options={"runtime_env": broken})
        with pytest.raises(TaskFailedError, match="runtime environment"):
            task.wait("running", WAIT_S)
        assert pool.submit(Sleeper, resources={"cpu": 1}).wait("running", WAIT_S) is TaskState.running


class Sleeper:
    def cancel(self) -> None:
        pass


def only_pinned(cluster: Any) -> bool:
    """Whether no driver but this one is left, so that nothing of theirs is kept for them."""
    jobs = cluster._private.state.jobs()
    return sum(not job["IsDead"] for job in jobs) == 1


def kill_controller(session: Session) -> None:
    pid = session.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: session.status()["pid"] != pid)
