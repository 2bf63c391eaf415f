"""The controller on a real Ray, with real processes, killed by hand."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.app import run
from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.pool.events import PoolTick
from trimtab.model.pool import TaskState
from trimtab.runtime.client.session import Pool, Session, Task, connect
from trimtab.runtime.client.task import TaskCancelledError, TaskFailedError, TaskInterruptedError, TaskTimeoutError
from trimtab.runtime.controller.controller_loop import COMPACT_EVERY
from trimtab.runtime.rayapi.connect import connected
from trimtab.runtime.store.journal import VERSION, Journal, read_journal
from trimtab.runtime.workers.node_agent import NodeAgent, node_agent_name
from waiting import until

CPU = {"cpu": 1}
WAIT_S = 300.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with connected(cpus=8) as ray:
        yield ray


@pytest.fixture(scope="module", autouse=True)
def nothing_waits_for_an_hour() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Task.call.__kwdefaults__, "timeout", 60.0)
        yield


@pytest.fixture(scope="module")
def session(cluster: Any) -> Iterator[Session]:
    session = connect(name="shared")
    yield session
    session.shutdown()


@pytest.fixture(scope="module")
def pool(session: Session) -> Pool:
    return session.pool("main", {"cpu": 4, "gpu": 1}, warm_hosts=2, reuse=False)


@contextlib.contextmanager
def own_session(**settings: Any) -> Iterator[Session]:
    """A session with a controller of its own, which ends with it."""
    session = connect(name=f"own-{uuid.uuid4().hex[:6]}", **settings)
    try:
        yield session
    finally:
        session.shutdown()


def kill_controller(session: Session) -> None:
    """Kill the controller's process, and wait until another one answers."""
    pid = session.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: session.status()["pid"] != pid)


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def attempt(self) -> str:
        return os.environ["TRIMTAB_ATTEMPT"]

    def fail(self) -> None:
        raise ValueError("as asked")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def double(self, number: int) -> int:
        return number * 2

    def rank(self) -> tuple[str, str]:
        return os.environ["TRIMTAB_RANK"], os.environ["TRIMTAB_WORLD_SIZE"]

    def save(self) -> int:
        return self.value

    def load(self, state: int) -> None:
        self.value = state


class Diary:
    """Writes down that it was made and that it ran, so that nothing happens twice unseen."""

    def __init__(self, path: str, slow_s: float = 0.0) -> None:
        self.path = path
        self.write("made")
        time.sleep(slow_s)

    def write(self, word: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{word}\n")

    def work(self, seconds: float) -> str:
        self.write("began")
        time.sleep(seconds)
        self.write("ended")
        return Path(self.path).name


class Cannot:
    def __init__(self) -> None:
        raise RuntimeError("not today")


class Deaf:
    """Holds the interpreter, so that no thread of its process can answer."""

    def hold(self) -> None:
        ctypes.PyDLL(None).sleep(3600)


class Asynchronous:
    async def answer(self) -> int:
        return 42


# ---- submit, call, result ---------------------------------------------------------------------------------------


def test_a_submitted_object_is_made_once_and_called_directly(pool: Pool) -> None:
    task = pool.submit(Counter, (5,), resources=CPU, priority=3.0, labels={"role": "count"})
    assert task.call("add", 3) == 8
    assert task.call("add", 3) == 11
    assert task.state is TaskState.running
    assert task.call("pid") == task.members[0].pid
    assert "host" in task.how
    task.complete()
    assert task.wait("ended", timeout=WAIT_S) is TaskState.done
    assert task.result(timeout=WAIT_S) is None


def test_the_entry_methods_value_is_the_result(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU, run="double", run_args=(21,))
    assert task.result(timeout=WAIT_S) == 42
    assert task.state is TaskState.done
    assert task.wait("running", timeout=1) is TaskState.done


def test_what_the_entry_method_raises_is_told_with_its_traceback(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU, run="fail")
    with pytest.raises(TaskFailedError, match="as asked") as failed:
        task.result(timeout=WAIT_S)
    assert "in fail" in failed.value.trace
    assert failed.value.explanation is not None
    assert failed.value.explanation.reason.code is ReasonCode.raised


def test_what_a_called_method_raises_is_raised_and_the_task_goes_on(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU)
    with pytest.raises(ValueError, match="as asked"):
        task.call("fail")
    with pytest.raises(AttributeError):
        task.call("no_such_method")
    assert task.call("add", 1) == 1
    task.cancel()
    assert task.wait("cancelled", timeout=WAIT_S) is TaskState.cancelled


def test_a_gang_starts_whole_and_answers_by_rank(pool: Pool) -> None:
    task = pool.submit(Counter, resources=[CPU, CPU])
    assert task.call("rank") == [("0", "2"), ("1", "2")]
    assert task.call("rank", rank=1) == ("1", "2")
    with pytest.raises(InputError, match="not 2"):
        task.call("rank", rank=2)
    task.complete()
    task.wait("done", timeout=WAIT_S)
    results = pool.submit(Counter, resources=[CPU, CPU], run="rank").result(timeout=WAIT_S)
    assert results == [("0", "2"), ("1", "2")]


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.long)], ids=["host", "plain actor"])
def test_a_constructor_that_raises_fails_the_task_with_its_words_and_its_traceback(pool: Pool, plain: bool) -> None:
    task = pool.submit(Cannot, resources=CPU, plain=plain)
    with pytest.raises(TaskFailedError, match="not today") as failed:
        task.wait("running", timeout=WAIT_S)
    for told in (failed.value.trace, str(failed.value)):
        assert "in __init__" in told
        assert "RuntimeError: not today" in told
    with pytest.raises(TaskFailedError):
        task.call("anything", timeout=WAIT_S)


@pytest.mark.long
def test_ray_knows_that_the_process_of_a_task_was_meant_to_end(session: Session, pool: Pool, cluster: Any) -> None:
    from ray.core.generated.common_pb2 import WorkerExitType
    from ray.core.generated.gcs_pb2 import WorkerTableData

    def how_ended(pids: Collection[int]) -> dict[int, str]:
        table = cluster._private.state.state._connect_and_get_accessor().get_worker_table()
        workers = [WorkerTableData.FromString(one) for one in table]
        ended = {one.pid: one.exit_type for one in workers if one.pid in pids and not one.is_alive}
        return {pid: WorkerExitType.Name(kind) for pid, kind in ended.items()}

    tasks = [pool.submit(Counter, resources=CPU) for _ in range(2)]
    tasks.append(pool.submit(Counter, resources=CPU, plain=True))
    pids = [task.call("pid") for task in tasks]
    for task in tasks:
        task.complete()
    deaf = pool.submit(Deaf, resources=CPU, run="hold")
    deaf.wait("running", timeout=WAIT_S)
    pids.append(deaf.members[0].pid)
    deaf.cancel()
    deaf.wait("ended", timeout=WAIT_S)
    until(lambda: len(how_ended(pids)) == len(pids))
    assert set(how_ended(pids).values()) <= {"INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT"}


def test_async_classes_become_plain_actors_and_say_why(pool: Pool) -> None:
    task = pool.submit(Asynchronous, resources=CPU)
    assert task.call("answer") == 42
    assert "async" in task.how
    task.cancel()
    task.wait("ended", timeout=WAIT_S)


def test_large_arguments_and_results_travel_through_files(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU, run="double", run_args=(b"x" * 3_000_000,))
    assert len(task.result(timeout=WAIT_S)) == 6_000_000


def test_other_clients_see_the_same_tasks(session: Session, pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU, id="seen-by-all")
    task.call("add", 2)
    again = connect(name="shared")
    assert again.task("seen-by-all").call("add", 2) == 4
    assert "seen-by-all" in [one.id for one in again.pool("main").tasks()]
    assert again.explain("seen-by-all").state is TaskState.running
    again.close()
    assert task.call("add", 1) == 5
    task.complete()
    task.wait("ended", timeout=WAIT_S)


# ---- what is refused --------------------------------------------------------------------------------------------


def test_a_duplicate_id_is_refused_before_anything_is_touched(session: Session, pool: Pool) -> None:
    task = pool.submit(Counter, (1,), resources=CPU, id="twin")
    assert task.call("add", 1) == 2
    with pytest.raises(InputError, match="twin exists and is running"):
        pool.submit(Counter, (100,), resources=CPU, id="twin")
    os.kill(task.members[0].pid, signal.SIGKILL)  # what runs after a loss is still the first one's class
    with pytest.raises(TaskFailedError, match="PROCESS_DIED"):
        task.wait("done", timeout=WAIT_S)


def test_the_id_of_an_ended_task_begins_a_new_life(pool: Pool) -> None:
    assert pool.submit(Counter, resources=CPU, id="phoenix", run="double", run_args=(1,)).result(timeout=WAIT_S) == 2
    second = pool.submit(Counter, (7,), resources=CPU, id="phoenix")
    assert second.call("add", 1) == 8
    second.complete()
    second.wait("done", timeout=WAIT_S)
    assert second.result(timeout=1) is None


def test_wrong_asks_come_back_as_input_errors(session: Session, pool: Pool) -> None:
    before = len(session.tasks())
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be pickled"):
        pool.submit(Counter, (lock,), resources=CPU)
    with pytest.raises(InputError, match="has no method ad"):
        pool.submit(Counter, resources=CPU, run="ad")
    with pytest.raises(InputError, match="runs a class"):
        pool.submit(lambda: 1, resources=CPU)
    with pytest.raises(InputError, match="must not be negative"):
        pool.submit(Counter, resources={"cpu": -1})
    with pytest.raises(InputError, match="priority must be a number"):
        pool.submit(Counter, resources=CPU, priority=float("nan"))
    with pytest.raises(InputError, match="prioritty is no setting"):
        pool.submit(Counter, resources=CPU, prioritty=1.0)
    with pytest.raises(InputError, match="memory cannot be set"):
        pool.submit(Counter, resources=CPU, ray_options={"memory": 2})
    with pytest.raises(InputError, match="plain data"):
        pool.submit(Counter, resources=CPU, ray_options={"runtime_env": {"x": lock}})
    with pytest.raises(InputError, match="no pool nowhere"):
        session.pool("nowhere")
    with pytest.raises(InputError, match="another configuration"):
        session.pool("main", {"cpu": 5})
    with pytest.raises(InputError, match="no task nobody"):
        session.task("nobody")
    with pytest.raises(InputError, match="no state of a task"):
        Task(session, "x").wait("runing")
    with pytest.raises(InputError, match="no aggressiveness"):
        session.preemption(aggressiveness="furious")
    with pytest.raises(InputError, match="cannot be the name"):
        connect(name="a:b")
    assert len(session.tasks()) == before


def test_what_can_never_run_fails_at_once_and_what_waits_says_why(session: Session, pool: Pool) -> None:
    never = pool.submit(Counter, resources={"cpu": 400})
    with pytest.raises(TaskFailedError, match="NEVER_FITS"):
        never.call("pid", timeout=WAIT_S)
    holders = [pool.submit(Counter, resources={"cpu": 2}) for _ in range(2)]
    for holder in holders:
        holder.wait("running", timeout=WAIT_S)
    waiter = pool.submit(Counter, resources=CPU)
    with pytest.raises(TaskTimeoutError, match="QUOTA") as late:
        waiter.wait("running", timeout=0.3)
    assert late.value.explanation is not None
    assert late.value.explanation.position == 1
    holders[0].complete()
    assert waiter.call("add", 1, timeout=WAIT_S) == 1
    for task in (waiter, holders[1]):
        task.cancel()
        task.wait("ended", timeout=WAIT_S)


# ---- losses -----------------------------------------------------------------------------------------------------


def test_a_killed_process_is_noticed_and_the_call_under_way_says_so(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU)
    pid = task.call("pid")
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(TaskInterruptedError, match="PROCESS_DIED") as interrupted:
        task.call("sleep", 60, timeout=WAIT_S)
    assert interrupted.value.explanation is not None
    assert interrupted.value.explanation.state in (TaskState.cancelling, TaskState.failed)
    with pytest.raises(TaskFailedError, match="died"):
        task.wait("done", timeout=WAIT_S)


def test_a_killed_process_is_started_again_as_often_as_it_may(pool: Pool) -> None:
    task = pool.submit(Counter, resources=CPU, restarts=1)
    os.kill(task.call("pid"), signal.SIGKILL)
    until(lambda: task.seen.attempt == 2)
    assert task.call("attempt", timeout=WAIT_S) == "2"
    os.kill(task.call("pid"), signal.SIGKILL)
    with pytest.raises(TaskFailedError, match="RESTARTS_USED"):
        task.wait("done", timeout=WAIT_S)


@pytest.mark.parametrize("shared_dir", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_evicted_task_returns_with_its_state(tmp_path: Path, shared_dir: bool) -> None:
    with own_session(state_dir=str(tmp_path / "states") if shared_dir else None) as session:
        session.preemption(cancel_timeout_s=2.0, save_timeout_s=10.0)
        pool = session.pool("p", {"cpu": 2})
        low = pool.submit(Counter, (1,), resources={"cpu": 2}, priority=1.0)
        assert low.call("add", 41) == 42
        first = low.members[0].pid
        dry = session.would_evict("p", {"cpu": 2}, priority=9.0)
        assert [victim for victim, _ in dry.victims] == [low.id]
        high = pool.submit(Counter, resources={"cpu": 2}, priority=9.0)
        assert high.call("add", 1, timeout=WAIT_S) == 1
        assert not exists(first)
        assert low.state is TaskState.evicted
        high.complete()
        assert low.call("add", 0, timeout=WAIT_S) == 42
        assert low.seen.evictions == 1
        assert (len(list((tmp_path / "states").iterdir())) == 1) if shared_dir else True


def test_state_handlers_of_a_pool_save_and_restore_what_cannot_itself(session: Session) -> None:
    pool = session.pool("handled", {"cpu": 1})
    pool.state_handlers(lambda actor: actor.path, lambda actor, state: setattr(actor, "path", state + "!"))
    session.preemption(cancel_timeout_s=2.0)
    task = pool.submit(Diary, (os.devnull,), resources=CPU)
    task.wait("running", timeout=WAIT_S)
    task.evict()
    until(lambda: task.seen.attempt == 2 and task.state is TaskState.running)
    assert task.seen.evictions == 1
    assert task.call("__getattribute__", "path") == os.devnull + "!"
    pool.drop()
    task.wait("ended", timeout=WAIT_S)


# ---- the controller is killed -----------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_in_the_middle_of_many_tasks_nothing_is_lost_and_nothing_is_doubled(tmp_path: Path) -> None:
    with own_session(journal_dir=str(tmp_path / "journal")) as session:
        pool = session.pool("p", {"cpu": 5}, warm_hosts=1)
        service = pool.submit(Counter, resources=CPU)
        assert service.call("add", 7) == 7
        works = [
            pool.submit(
                Diary, (str(tmp_path / f"{at}.txt"),), resources=CPU, id=f"work-{at}", run="work", run_args=(1.0,)
            )
            for at in range(6)  # four at a time
        ]
        works[0].wait("running", timeout=WAIT_S)
        kill_controller(session)
        time.sleep(1.0)
        kill_controller(session)
        assert [task.result(timeout=90) for task in works] == [f"{at}.txt" for at in range(6)]
        for at in range(6):
            assert (tmp_path / f"{at}.txt").read_text().count("began") == 1
        assert service.call("add", 1) == 8
        late = pool.submit(Counter, resources=CPU, run="double", run_args=(4,))
        assert late.result(timeout=WAIT_S) == 8
        assert session.status()["faults"] == []


@pytest.mark.long
def test_killed_while_a_task_starts_the_task_is_made_once(tmp_path: Path) -> None:
    diary = tmp_path / "diary.txt"
    with own_session() as session:
        pool = session.pool("p", {"cpu": 2})
        task = pool.submit(Diary, (str(diary), 4.0), resources=CPU)
        until(diary.exists)
        kill_controller(session)
        task.call("write", "called", timeout=WAIT_S)
        assert diary.read_text().split() == ["made", "called"]
        assert task.seen.attempt == 1


@pytest.mark.long
def test_what_died_while_the_controller_was_away_is_started_again(tmp_path: Path) -> None:
    with own_session() as session:
        pool = session.pool("p", {"cpu": 2})
        task = pool.submit(Counter, resources=CPU, restarts=3)
        member, controller = task.call("pid"), session.status()["pid"]
        os.kill(controller, signal.SIGKILL)
        os.kill(member, signal.SIGKILL)
        until(lambda: session.status()["pid"] != controller)
        assert task.call("attempt", timeout=WAIT_S) == "2"


@pytest.mark.long
def test_a_submission_under_way_when_the_controller_dies_is_taken_once() -> None:
    with own_session() as session:
        pool = session.pool("p", {"cpu": 4})
        pid = session.status()["pid"]
        os.kill(pid, signal.SIGSTOP)  # the call is sent and not answered
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        task = pool.submit(Counter, resources=CPU, id="once", run="double", run_args=(3,))
        assert task.result(timeout=WAIT_S) == 6
        assert [one.id for one in session.tasks()] == ["once"]


@pytest.mark.long
def test_a_new_controller_on_an_old_journal_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    name = f"again-{uuid.uuid4().hex[:6]}"
    first = connect(name=name, journal_dir=journal)
    pool = first.pool("p", {"cpu": 2})
    task = pool.submit(Counter, resources=CPU, id="kept")
    task.call("add", 5)
    first.ask("shutdown", False, 10.0)  # the controller alone
    first._controller.end()
    second = connect(name=name, journal_dir=journal)
    assert second.task("kept").call("add", 5) == 10
    with pytest.raises(InputError, match="runs with journal_dir"):
        connect(name=name, journal_dir=str(tmp_path / "other"))
    second.shutdown()


# ---- the journal ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_journal_that_is_gone_is_said_and_what_runs_is_taken_up_again(tmp_path: Path, cluster: Any) -> None:
    journal = tmp_path / "journal"
    with own_session(journal_dir=str(journal)) as session:
        pool = session.pool("p", {"cpu": 3}, reserved=[{"cpu": 1}])
        task = pool.submit(Counter, resources=CPU, id="orphan", priority=7.0, labels={"role": "rollout"})
        owner = pool.submit(Counter, resources=CPU, id="owner", priority=9.0)
        assert (task.call("add", 2), owner.call("add", 3)) == (2, 3)
        pids, controller = (task.call("pid"), owner.call("pid")), session.status()["pid"]
        os.kill(controller, signal.SIGSTOP)
        shutil.rmtree(journal)
        os.kill(controller, signal.SIGKILL)
        status = until(lambda: session.status())
        assert "history was lost" in status["journal"]["notes"][0]
        assert "orphan" in status["journal"]["notes"][0]
        assert (task.call("pid"), owner.call("pid")) == pids
        assert (task.call("add", 1), owner.call("add", 1)) == (3, 4)
        explanation = session.explain("orphan")
        assert (explanation.reason.code, explanation.priority) == (ReasonCode.found, 7.0)
        with pytest.raises(InputError, match="history was lost"):
            session.task("unheard-of")
        # The pool is as it was: its quota is used by what was taken up, its reserved slot is no second one.
        again = session.pool("p", {"cpu": 3}, reserved=[{"cpu": 1}])
        third = again.submit(Counter, resources=CPU, id="third")
        assert third.call("add", 1, timeout=WAIT_S) == 1
        assert session.status()["pools"]["p"]["slots"]["reserved"] == 1
        assert session.would_evict("p", CPU).found is False
        task.complete()
        task.wait("ended", timeout=WAIT_S)
        assert not exists(pids[0])


@pytest.mark.long
def test_a_journal_deleted_under_a_living_controller_is_written_anew(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with own_session(journal_dir=str(journal)) as session:
        pool = session.pool("p", {"cpu": 2})
        task = pool.submit(Counter, resources=CPU)
        task.call("add", 1)
        shutil.rmtree(journal)
        until(lambda: list(journal.glob("snapshot-*.json")) if journal.exists() else [])
        kill_controller(session)
        assert task.call("add", 1) == 2


@pytest.mark.long
def test_a_long_journal_is_compacted_behind_and_read_again(tmp_path: Path) -> None:
    filled = Journal(tmp_path)
    for number in range(COMPACT_EVERY):
        filled.append(float(number), PoolTick())
    filled.close()
    with own_session(journal_dir=str(tmp_path)) as session:
        until(lambda: not (tmp_path / "journal-00000000.jsonl").exists())
        task = session.pool("p", {"cpu": 1}).submit(Counter, resources=CPU)
        task.call("add", 1)
        assert session.status()["faults"] == []
        kill_controller(session)
        assert task.call("add", 1) == 2


def test_a_journal_of_a_newer_version_is_refused_at_connect(tmp_path: Path) -> None:
    (tmp_path / "journal-00000000.jsonl").write_text('{"format":"trimtab-journal","version":99}\n')
    name = f"newer-{uuid.uuid4().hex[:6]}"
    with pytest.raises(InputError, match="format 99"):
        connect(name=name, journal_dir=str(tmp_path))
    connect(name=name, journal_dir=str(tmp_path / "fresh")).shutdown()


def test_a_journal_of_an_older_version_is_refused_with_what_still_runs_and_how_to_free_it(
    tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.util import list_named_actors, placement_group_table

    def alive() -> list[str]:
        named = [one["name"] for one in list_named_actors(all_namespaces=True)]
        groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
        return sorted(one for one in (*named, *groups) if one.startswith(f"trimtab:{name}:"))

    name = f"older-{uuid.uuid4().hex[:6]}"
    first = connect(name=name, journal_dir=str(tmp_path))
    task = first.pool("p", {"cpu": 2}).submit(Counter, resources=CPU)
    pid = task.call("pid")
    assert run(["pool", "free", "--name", name]) == 2
    assert run(["pool", "free", "--name", "a:b"]) == 2
    assert f"the controller {name} is running" in capsys.readouterr().err
    first.ask("shutdown", False, 10.0)  # the controller alone
    first._controller.end()
    until(lambda: not any(one.endswith(":controller") for one in alive()))
    [segment] = tmp_path.glob("journal-*.jsonl")
    old = segment.read_text().replace(f'"version":{VERSION}', f'"version":{VERSION - 1}', 1)
    segment.write_text(old)
    left = alive()
    assert {one.split(":")[2] for one in left} >= {"node-agent", "host", "p"}
    with pytest.raises(InputError, match=f"format {VERSION - 1}, older than {VERSION}") as refused:
        connect(name=name, journal_dir=str(tmp_path))
    assert refused.value.where == str(segment)
    assert all(one in refused.value.what for one in left)
    assert f"`trimtab pool free --name {name}`" in str(refused.value.hint)
    assert segment.read_text() == old
    until(lambda: alive() == left)  # nothing was started, and the controller that was made is gone
    assert exists(pid)
    assert run(["pool", "free", "--name", name, "--format", "json"]) == 0
    ended = json.loads(capsys.readouterr().out)
    assert sorted((*ended["actors"], *ended["placement_groups"])) == left
    until(lambda: not alive())
    assert not exists(pid)
    with pytest.raises(InputError, match="older") as refused:
        connect(name=name, journal_dir=str(tmp_path))
    assert "alive" not in refused.value.what
    connect(name=name, journal_dir=str(tmp_path / "new")).shutdown()


@pytest.mark.long
def test_two_controllers_do_not_share_a_journal(tmp_path: Path) -> None:
    with own_session(journal_dir=str(tmp_path)) as session:
        session.pool("p", {"cpu": 1})
        name = f"second-{uuid.uuid4().hex[:6]}"
        with pytest.raises(InputError, match="another controller writes this journal"):
            connect(name=name, journal_dir=str(tmp_path))
        connect(name=name, journal_dir=str(tmp_path / "own")).shutdown()
    assert not read_journal(tmp_path).empty


# ---- clients ----------------------------------------------------------------------------------------------------

CLIENT = """
import sys, time
from trimtab.runtime.client.session import connect
class Own:  # known to this process alone
    def square(self, number):
        return number * number
session = connect(sys.argv[1], name=sys.argv[2])
pool = session.pool("p", {"cpu": 6})
{work}
"""


def client(session: Session, work: str, cluster: Any) -> subprocess.Popen[str]:
    address = cluster.get_runtime_context().gcs_address
    script = CLIENT.replace("{work}", work)
    return subprocess.Popen(
        [sys.executable, "-c", script, address, session.name], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.long
def test_two_client_processes_use_one_controller_at_once(cluster: Any) -> None:
    work = (
        "tasks = [pool.submit(Own, resources={'cpu': 1}, run='square', run_args=(n,)) for n in range(6)]\n"
        "print(sum(task.result(timeout=300) for task in tasks), flush=True)\n"
        "session.close()\n"
    )
    with own_session() as session:
        session.pool("p", {"cpu": 6})
        clients = [client(session, work, cluster) for _ in range(2)]
        answers = [one.communicate(timeout=WAIT_S)[0] for one in clients]
        assert answers == ["55\n", "55\n"]
        assert session.status()["tasks"] == {"done": 12}


@pytest.mark.long
def test_a_client_that_dies_takes_along_what_was_to_end_with_it_and_nothing_else(cluster: Any) -> None:
    work = (
        "mine = pool.submit(Own, resources={'cpu': 1}, id='mine', ends_with_me=True)\n"
        "pool.submit(Own, resources={'cpu': 1}, id='everybodys').wait('running', 60)\n"
        "print(mine.wait('running', 60), flush=True)\n"
        "time.sleep(600)\n"
    )
    with own_session() as session:
        session.pool("p", {"cpu": 6})
        other = client(session, work, cluster)
        assert other.stdout is not None
        assert "running" in other.stdout.readline()
        time.sleep(3)  # the lease is renewed meanwhile
        assert session.task("mine").state is TaskState.running
        other.kill()
        other.communicate(timeout=WAIT_S)
        with pytest.raises(TaskCancelledError, match="CLIENT_DIED"):
            session.task("mine").result(timeout=WAIT_S)
        assert session.task("everybodys").call("square", 3) == 9


def test_a_session_that_closes_ends_what_was_to_end_with_it(pool: Pool) -> None:
    leaving = connect(name="shared")
    leaving.pool("mine", CPU, ends_with_me=True)
    task = leaving.pool("main").submit(Counter, resources=CPU, ends_with_me=True)
    task.wait("running", timeout=WAIT_S)
    leaving.close()
    with pytest.raises(TaskCancelledError, match="CLIENT_DIED"):
        Task(pool._session, task.id).result(timeout=WAIT_S)
    assert until(lambda: "mine" not in pool._session.status()["pools"])


@pytest.mark.long
def test_without_any_ray_a_session_brings_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "from trimtab.runtime.client.session import connect\n"
        "class Own:\n"
        "    def pid(self): return os.getpid()\n"
        "with connect('local', cpus=2) as session:\n"
        "    pool = session.pool('p', {'cpu': 1})\n"
        "    print(session.how)\n"
        "    print(pool.submit(Own, resources={'cpu': 1}).call('pid', timeout=300))\n"
        "    print(session.status()['pid'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)
    how, member, controller = done.stdout.splitlines()
    assert how == "a local Ray of its own, as asked"
    assert not exists(int(member))
    assert not exists(int(controller))


def test_nothing_is_where_nothing_answers() -> None:
    script = "from trimtab.runtime.client.session import connect\nconnect('127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "UnreachableError: nothing answers at 127.0.0.1:1" in done.stderr


# ---- the cluster and the end ------------------------------------------------------------------------------------


def test_what_others_hold_of_a_node_is_seen_and_waited_for(session: Session, cluster: Any) -> None:
    @cluster.remote(num_cpus=6)
    class Holder:
        def here(self) -> None:
            pass

    holder = Holder.remote()
    cluster.get(holder.here.remote(), timeout=WAIT_S)
    until(lambda: session.status()["nodes"][0]["outside"].get("cpu") == 6)
    pool = session.pool("wide", {"cpu": 8})
    task = pool.submit(Counter, resources={"cpu": 5})
    with pytest.raises(TaskTimeoutError, match="NO_ROOM"):
        task.wait("running", timeout=1)
    cluster.kill(holder)
    assert task.call("add", 1, timeout=WAIT_S) == 1
    pool.drop()
    task.wait("ended", timeout=WAIT_S)


def test_a_placement_group_that_somebody_removes_is_noticed(session: Session, cluster: Any) -> None:
    from ray._raylet import PlacementGroupID
    from ray.util import placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    pool = session.pool("shaky", {"cpu": 1})
    task = pool.submit(Counter, resources=CPU, restarts=1)
    task.wait("running", timeout=WAIT_S)
    (ours,) = [key for key, one in placement_group_table().items() if ":shaky:" in one["name"]]
    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(ours))))
    until(lambda: task.seen.attempt == 2 and task.state is TaskState.running)
    pool.drop()
    task.wait("ended", timeout=WAIT_S)


def test_a_loop_of_the_controller_that_fails_is_started_again_and_shown_by_status(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Odd(NodeAgent):  # found by the controller under the name of its agent on the node
        asked = 0

        async def deaths(self, epoch: str, known: int, wait_s: float) -> Any:
            self.asked += 1
            return "nonsense" if self.asked <= 2 else await NodeAgent.deaths(self, epoch, known, wait_s)

    name, node = f"odd-{uuid.uuid4().hex[:6]}", cluster.nodes()[0]["NodeID"]
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    cluster.remote(Odd).options(
        name=node_agent_name(name, node), namespace="trimtab", lifetime="detached", num_cpus=0, max_concurrency=100,
        scheduling_strategy=place,
    ).remote(name, node)  # fmt: skip
    session = connect(name=name)
    try:
        task = session.pool("p", {"cpu": 1}).submit(Counter, resources=CPU, restarts=1)
        pid = task.call("pid")

        def failed() -> dict[str, Any] | None:
            rows = session.status()["background"]
            return next((one for one in rows if one["failures"] == 2 and one["state"] == "running"), None)

        row = until(failed)
        assert row["name"] == f"deaths on node {node[:12]}"
        assert row["last_error"].startswith("ValueError: too many values to unpack")
        os.kill(pid, signal.SIGKILL)  # and is heard of
        until(lambda: task.seen.attempt == 2 and task.state is TaskState.running)
        assert run(["pool", "show", "--name", name]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"deaths on node {node[:12]} failed 2 times and is running: ValueError" in said
        assert run(["pool", "show", "--name", name, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["background"] == [row]
    finally:
        session.shutdown()


def test_shutting_down_leaves_no_process_no_actor_and_no_placement_group(cluster: Any) -> None:
    from ray.util import list_named_actors, placement_group_table

    session = connect(name="passing")
    pool = session.pool("p", {"cpu": 3}, reserved=[CPU], warm_hosts=1)
    tasks = [pool.submit(Counter, resources=CPU) for _ in range(2)]
    pids = [task.call("pid") for task in tasks] + [session.status()["pid"]]
    session.shutdown()
    until(lambda: not any(exists(pid) for pid in pids))
    until(
        lambda: (
            not [one for one in list_named_actors(all_namespaces=True) if one["name"].startswith("trimtab:passing:")]
        )
    )
    groups = placement_group_table().values()
    assert not [one for one in groups if one["name"].startswith("trimtab:passing:") and one["state"] != "REMOVED"]
    with pytest.raises(UnreachableError):
        session.tasks()
