"""Faults of a pool's own parts, on a real Ray: controllers that die while a task saves, full disks, slow starts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disks import full, small_disk
from trimtab.core.errors import UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.model.pool import TaskState
from trimtab.runtime.client.session import Session, Task, connect
from trimtab.runtime.client.task import TaskFailedError, TaskTimeoutError
from trimtab.runtime.rayapi.connect import connected
from waiting import until

CPU = {"cpu": 1}
LONG_S = 120.0  # for what takes a moment on a calm machine


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with connected(cpus=4) as ray:
        yield ray


@contextlib.contextmanager
def own_session(**settings: Any) -> Iterator[Session]:
    """A session with a controller of its own, which ends with it."""
    session = connect(name=f"faults-{uuid.uuid4().hex[:6]}", **settings)
    try:
        yield session
    finally:
        session.shutdown()


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def told(session: Session, task: Task) -> str:
    """All that the story of a task says."""
    return "\n".join(str(chapter.reason) for chapter in session.explain(task.id).story)


class Saver:
    """Counts; its `save()` says that it began, and waits until it may end."""

    def __init__(self, folder: str) -> None:
        self.folder, self.value = Path(folder), 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def save(self) -> int:
        (self.folder / "saving").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return self.value

    def load(self, value: int) -> None:
        self.value = value


class Work:
    """Gives so much, when it may."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def give(self, amount: int) -> str:
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        return "x" * amount


class Stuck:
    """Never constructed."""

    def __init__(self) -> None:
        time.sleep(3600)


# ---- the controller dies while a task saves ---------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["while it is away", pytest.param("when it is back", marks=pytest.mark.long)])
def test_a_state_saved_for_a_controller_that_died_is_restored(tmp_path: Path, saved: str) -> None:
    with own_session() as session:
        session.preemption(cancel_timeout_s=60.0, save_timeout_s=60.0)
        pool = session.pool("p", {"cpu": 1})
        task = pool.submit(Saver, (str(tmp_path),), resources=CPU)
        assert task.call("add", 42, timeout=LONG_S) == 42
        pid, controller = task.call("pid"), session.status()["pid"]
        task.evict()
        until((tmp_path / "saving").exists)
        os.kill(controller, signal.SIGKILL)
        if saved == "when it is back":
            until(lambda: session.status()["pid"] != controller)
        (tmp_path / "go").touch()
        until(lambda: not exists(pid))
        assert task.call("add", 0, timeout=LONG_S) == 42
        assert task.seen.attempt == 2
        assert session.status()["faults"] == []


# ---- a full disk ------------------------------------------------------------------------------------------------


def test_a_result_that_cannot_be_stored_is_a_failure_with_its_cause(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk, own_session(journal_dir=str(disk / "journal")) as session:
        pool = session.pool("p", {"cpu": 2})
        tasks = [pool.submit(Work, (str(tmp_path),), resources=CPU, run="give", run_args=(99_999,)) for _ in range(2)]
        for task in tasks:
            task.wait("running", timeout=LONG_S)
        with full(disk):
            (tmp_path / "go").touch()
            for task in tasks:
                with pytest.raises(TaskFailedError, match=f"{disk}/journal/results cannot be written: No space left"):
                    task.result(timeout=LONG_S)
                assert task.state is TaskState.failed
        (tmp_path / "later").mkdir()
        late = pool.submit(Work, (str(tmp_path / "later"),), resources=CPU, run="give", run_args=(3,))
        late.wait("running", timeout=LONG_S)
        with full(disk):
            (tmp_path / "later/go").touch()
            with pytest.raises(TaskTimeoutError):
                late.result(timeout=1.0)  # it has returned, and waits for room
        assert late.result(timeout=LONG_S) == "xxx"


def test_a_submission_to_a_full_disk_says_what_is_full_and_what_to_do(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk, own_session(journal_dir=str(disk / "journal")) as session:
        pool = session.pool("p", {"cpu": 1})
        (tmp_path / "go").touch()
        with full(disk):
            with pytest.raises(UnreachableError) as raised:
                pool.submit(Work, (str(tmp_path),), resources=CPU, id="t", run="give", run_args=(3,))
            assert f"{disk}/journal" in raised.value.what
            assert "No space left on device" in raised.value.what
            assert "make room" in str(raised.value.hint)
        task = pool.submit(Work, (str(tmp_path),), resources=CPU, id="t", run="give", run_args=(3,))
        assert task.result(timeout=LONG_S) == "xxx"


@pytest.mark.parametrize("shared_dir", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_state_saved_to_a_full_disk_is_not_lost(tmp_path: Path, shared_dir: bool) -> None:
    with (
        small_disk(tmp_path / "disk", "3m") as disk,
        own_session(
            journal_dir=str(disk / "journal"), state_dir=str(disk / "states") if shared_dir else None
        ) as session,
    ):
        states = disk / ("states" if shared_dir else "journal/states")
        session.preemption(cancel_timeout_s=60.0, save_timeout_s=60.0)
        pool = session.pool("p", {"cpu": 1})
        task = pool.submit(Saver, (str(tmp_path),), resources=CPU)
        assert task.call("add", 42, timeout=LONG_S) == 42
        (tmp_path / "go").touch()
        with full(disk):
            task.evict()
            assert task.call("add", 0, timeout=LONG_S) == 42
            assert task.seen.attempt == 2
            assert f"not in {states} (No space left on device)" in told(session, task)
        until(lambda: list(states.glob("*.state")))
        until(lambda: session.status()["journal"]["fault"] is None)
        controller = session.status()["pid"]
        os.kill(controller, signal.SIGKILL)
        until(lambda: session.status()["pid"] != controller)
        assert task.call("add", 1, timeout=LONG_S) == 43
        assert task.seen.attempt == 2


@pytest.mark.long
def test_a_state_that_only_its_node_has_outlives_the_controller(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk, own_session(journal_dir=str(disk / "journal")) as session:
        session.preemption(cancel_timeout_s=60.0, save_timeout_s=60.0)
        pool = session.pool("p", {"cpu": 1})
        task = pool.submit(Saver, (str(tmp_path),), resources=CPU, priority=1.0)
        assert task.call("add", 42, timeout=LONG_S) == 42
        (tmp_path / "go").touch()
        pool.submit(Saver, (str(tmp_path),), resources=CPU, priority=0.0, id="next")
        with full(disk):
            task.evict()
            until(lambda: session.task("next").state is TaskState.running or task.seen.attempt == 2)
            controller = session.status()["pid"]
            os.kill(controller, signal.SIGKILL)
        until(lambda: session.status()["pid"] != controller)
        session.task("next").cancel()
        assert task.call("add", 0, timeout=LONG_S) == 42


# ---- a start that hangs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_start_that_takes_too_long_ends_with_its_own_reason(plain: bool) -> None:
    with own_session() as session:
        pool = session.pool("p", {"cpu": 1})
        for restarts, code in ((0, ReasonCode.start_timeout), (1, ReasonCode.restarts_used)):
            task = pool.submit(Stuck, resources=CPU, restarts=restarts, start_timeout_s=2.0, plain=plain)
            with pytest.raises(TaskFailedError, match="not constructed within 2 s"):
                task.wait("running", timeout=LONG_S)
            assert (task.seen.reason.code, task.seen.attempt) == (code, 1 + restarts)


# ---- damage -----------------------------------------------------------------------------------------------------


def test_a_damaged_journal_of_nodes_is_set_aside_and_tasks_go_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with own_session(journal_dir=str(journal)) as session:
        pool = session.pool("p", {"cpu": 1})
        task = pool.submit(Saver, (str(tmp_path),), resources=CPU)
        assert task.call("add", 42, timeout=LONG_S) == 42
        controller = session.status()["pid"]
        (damaged,) = (journal / "nodes").glob("journal-*")
        with damaged.open("r+b") as file:
            file.write(b"#")
        content = damaged.read_bytes()
        os.kill(controller, signal.SIGKILL)
        until(lambda: session.status()["pid"] != controller)
        assert task.call("add", 1, timeout=LONG_S) == 43
        (aside,) = journal.glob("nodes.damaged-*")
        assert (aside / damaged.name).read_bytes()[: len(content)] == content
        (said,) = session.status()["faults"]
        assert "the journal is damaged" in said
        assert str(aside) in said
        late = pool.submit(Saver, (str(tmp_path),), resources=CPU, id="late")
        task.complete()
        assert late.call("add", 1, timeout=LONG_S) == 1
