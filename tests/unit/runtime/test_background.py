"""Background loops are logged, counted, started again with a limit, and shown."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, RestartPolicy, describe

QUICK = RestartPolicy(max_failures=3, backoff_s=0.001, max_backoff_s=0.002)


async def test_a_loop_that_raises_is_logged_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    background, passes, done = Background(QUICK), [], asyncio.Event()

    async def loop() -> None:
        passes.append(1)
        if len(passes) < 3:
            raise ValueError("odd answer")
        done.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        background.start("watch", loop)
        await asyncio.wait_for(done.wait(), 60)
    assert background.status() == [
        {"name": "watch", "state": "running", "failures": 2, "last_error": "ValueError: odd answer"}
    ]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    await background.close()
    assert background.status() == []


async def test_a_loop_that_fails_too_often_is_given_up_and_its_owner_is_called() -> None:
    background, given_up = Background(QUICK), []

    async def loop() -> None:
        raise TimeoutError

    task = background.start("watch", loop, on_failed=lambda name, error: given_up.append((name, type(error))))
    await asyncio.wait_for(task, 60)
    assert given_up == [("watch", TimeoutError)]
    [row] = background.status()
    assert row == {"name": "watch", "state": "failed", "failures": 4, "last_error": "TimeoutError"}
    assert background.unhealthy() == ["watch failed 4 times and is not started again: TimeoutError"]


async def test_failures_further_apart_than_the_window_are_forgotten() -> None:
    now, passes, done = [0.0], [], asyncio.Event()
    background = Background(RestartPolicy(2, window_s=10.0, backoff_s=0.001, max_backoff_s=0.001), lambda: now[0])

    async def loop() -> None:
        passes.append(1)
        now[0] += 6.0
        if len(passes) == 20:
            done.set()
            return
        raise ValueError("again")

    await asyncio.wait_for(background.start("watch", loop), 60)
    assert done.is_set()


async def test_a_job_that_runs_once_is_not_repeated() -> None:
    background, runs = Background(QUICK), []

    async def job() -> None:
        runs.append(1)
        raise OSError("gone")

    await asyncio.wait_for(background.once("end host", job()), 60)
    assert runs == [1]
    assert [row["state"] for row in background.status()] == ["failed"]


async def test_jobs_of_one_name_that_failed_are_one_row_and_those_that_run_are_none() -> None:
    background = Background(QUICK)

    async def job() -> None:
        raise OSError("gone")

    for _ in range(3):
        await asyncio.wait_for(background.once("end host", job()), 60)
    waiting = background.once("start host", asyncio.sleep(600))
    await asyncio.sleep(0)
    assert background.status() == [
        {"name": "end host", "state": "failed", "failures": 3, "last_error": "OSError: gone"}
    ]
    waiting.cancel()
    await background.close()


async def test_a_job_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    background = Background(QUICK)
    background.once("end host", asyncio.sleep(600)).cancel()
    background.start("watch", asyncio.Event().wait).cancel()  # type: ignore[arg-type]
    await background.close()
    assert background.status() == []


async def test_what_nothing_can_do_without_is_never_given_up() -> None:
    background, passes = Background(), []

    async def loop() -> None:
        passes.append(1)
        if len(passes) < 50:
            raise ValueError("again")

    assert NEVER_GIVE_UP.max_failures is None
    policy = RestartPolicy(max_failures=None, backoff_s=0.0001, max_backoff_s=0.0002)
    await asyncio.wait_for(background.start("watch", loop, policy=policy), 60)
    assert len(passes) == 50


async def test_closing_cancels_what_runs_without_a_failure() -> None:
    background = Background(QUICK)
    task = background.start("watch", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await background.close()
    assert task.cancelled()
    assert background.status() == []


async def test_what_is_cancelled_before_its_first_step_leaves_no_row() -> None:
    background = Background(QUICK)

    async def job() -> None:
        raise AssertionError("it never runs")

    tasks = {background.start("watch", job), background.once("end host", job())}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert background.status() == []


def test_a_thread_that_raises_is_started_again_and_ends_when_told() -> None:
    background, passes, third = Background(QUICK), [], threading.Event()

    def loop() -> None:
        passes.append(1)
        if len(passes) < 3:
            raise ValueError("odd answer")
        third.set()
        background.stopping.wait()

    thread = background.start_thread("renew lease", loop)
    assert third.wait(60)
    assert [row["failures"] for row in background.status()] == [2]
    background.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(ValueError("a\nb")) == "ValueError: a"
