from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import trimtab.profile
from trimtab.core.errors import InputError
from trimtab.formats import profile_file
from trimtab.profile import Recorder
from trimtab.profile.timer import recorder


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def seconds(measured: Recorder, name: str, warmup: int = 0) -> tuple[tuple[int, float], ...]:
    component = measured.profile(gpus=8, warmup=warmup).component(name)
    assert component is not None
    return component.seconds


def test_blocks_of_one_iteration_add_up_to_one_sample(clock: Clock) -> None:
    timer = Recorder(clock)
    for _ in range(3):
        with timer.iteration():
            for _ in range(4):
                with timer.component("rollout", gpus=8):
                    clock.wait(2.0)
            with timer.component("trainer", gpus=8):
                clock.wait(5.0)
    assert seconds(timer, "rollout") == ((8, 8.0),)
    assert seconds(timer, "trainer") == ((8, 5.0),)


def test_a_bare_call_marks_where_an_iteration_starts(clock: Clock) -> None:
    timer = Recorder(clock)
    for length in (9.0, 9.0, 3.0, 3.0):
        timer.iteration()
        with timer.component("rollout"):
            clock.wait(length)
    profile = timer.profile(gpus=4, warmup=2)
    assert profile.components[0].seconds == ((4, 3.0),)
    assert profile.components[0].steps == 2


def test_without_iterations_every_block_is_a_sample(clock: Clock) -> None:
    timer = Recorder(clock)
    for length in (100.0, 1.0, 2.0, 3.0):
        with timer.component("rollout", gpus=1):
            clock.wait(length)
    assert seconds(timer, "rollout", warmup=1) == ((1, 2.0),)


def test_work_outside_marked_iterations_is_not_counted(clock: Clock) -> None:
    timer = Recorder(clock)
    with timer.iteration(), timer.component("rollout"):
        clock.wait(1.0)
    with timer.component("rollout"):
        clock.wait(500.0)
    assert seconds(timer, "rollout") == ((8, 1.0),)


def test_a_block_left_by_an_exception_makes_its_sample_void(clock: Clock) -> None:
    timer = Recorder(clock)
    for failing in (False, True, False):
        with timer.iteration():
            with pytest.raises(ZeroDivisionError) if failing else timer.component("other"), timer.component("rollout"):
                clock.wait(7.0 if failing else 2.0)
                if failing:
                    raise ZeroDivisionError
            with timer.component("trainer"):
                clock.wait(1.0)
    rollout = timer.profile(gpus=8, warmup=0).component("rollout")
    trainer = timer.profile(gpus=8, warmup=0).component("trainer")
    assert rollout is not None
    assert trainer is not None
    assert (rollout.seconds, rollout.steps) == (((8, 2.0),), 2)
    assert trainer.steps == 3


def test_an_iteration_left_by_an_exception_is_none(clock: Clock) -> None:
    timer = Recorder(clock)

    def fails() -> None:
        with timer.iteration():
            with timer.component("rollout"):
                clock.wait(9.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with timer.iteration(), timer.component("rollout"):
        clock.wait(2.0)
    assert seconds(timer, "rollout") == ((8, 2.0),)


def test_one_component_in_many_threads_counts_from_first_to_last(clock: Clock) -> None:
    timer = Recorder(clock)
    opened, close = threading.Barrier(4), threading.Event()

    def work() -> None:
        with timer.component("rollout", gpus=8):
            opened.wait(10)
            close.wait(10)

    with timer.iteration():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        opened.wait(10)
        clock.wait(5.0)
        close.set()
        for thread in threads:
            thread.join(10)
    assert seconds(timer, "rollout") == ((8, 5.0),)


def test_a_component_nested_in_itself_counts_once_and_in_another_in_both(clock: Clock) -> None:
    timer = Recorder(clock)
    with timer.component("trainer"), timer.component("trainer"):
        clock.wait(1.0)
        with timer.component("ref"):
            clock.wait(2.0)
    assert seconds(timer, "trainer") == ((8, 3.0),)
    assert seconds(timer, "ref") == ((8, 2.0),)
    assert any("ref ran inside trainer" in note for note in timer.profile(gpus=8, warmup=0).notes)


def test_functions_and_coroutines_can_be_decorated(clock: Clock) -> None:
    timer = Recorder(clock)

    @timer.component("reward", gpus=1)
    def score(answer: int) -> int:
        clock.wait(1.0)
        return answer + 1

    @timer.component("rollout", gpus=2)
    async def generate() -> str:
        await asyncio.sleep(0)
        clock.wait(3.0)
        return "text"

    assert score(1) == 2
    assert asyncio.run(generate()) == "text"
    assert score.__name__ == "score"
    assert seconds(timer, "reward") == ((1, 1.0),)
    assert seconds(timer, "rollout") == ((2, 3.0),)


def test_the_device_is_waited_for_where_asked(clock: Clock) -> None:
    timer = Recorder(clock)
    with timer.component("trainer", sync=lambda: clock.wait(1.0)):
        clock.wait(2.0)
    assert seconds(timer, "trainer") == ((8, 3.0),)


def test_counts_measured_in_one_process_become_points(clock: Clock) -> None:
    timer = Recorder(clock)
    for gpus in (8, 16):
        with timer.component("rollout", gpus=gpus):
            clock.wait(160.0 / gpus)
    assert seconds(timer, "rollout") == ((8, 20.0), (16, 10.0))


def test_the_saved_file_is_a_profile(tmp_path: Path, clock: Clock) -> None:
    timer = Recorder(clock)
    for _ in range(4):
        with timer.component("rollout", gpus=8):
            clock.wait(1.5)
    timer.save(tmp_path / "profile.yaml", kind="H100")
    read = profile_file.read(tmp_path / "profile.yaml")
    assert read.source == "timer"
    assert read.components[0].seconds == ((8, 1.5),)
    assert read.components[0].kind == "H100"


def test_a_missing_count_or_an_empty_timer_is_told(tmp_path: Path, clock: Clock) -> None:
    timer = Recorder(clock)
    with pytest.raises(InputError, match="nothing to save"):
        timer.save(tmp_path / "profile.yaml")
    with timer.component("rollout"):
        clock.wait(1.0)
    with pytest.raises(InputError, match="number of GPUs is not known of: rollout"):
        timer.profile(warmup=0)
    with pytest.raises(ValueError, match="1 GPU or more"):
        timer.component("rollout", gpus=0)
    with pytest.raises(ValueError, match="name"):
        timer.component("")


def test_the_module_s_functions_share_one_recorder() -> None:
    with trimtab.profile.iteration(), trimtab.profile.component("a", gpus=1):
        pass
    assert recorder() is recorder()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


def test_a_profile_is_saved_at_exit_where_the_environment_asks(tmp_path: Path) -> None:
    code = "import trimtab.profile as p\nfor _ in range(4):\n    with p.component('rollout', gpus=2): sum(range(9999))"
    done = run(code, TRIMTAB_PROFILE=str(tmp_path / "p-{pid}.yaml"))
    assert done.returncode == 0
    (saved,) = tmp_path.iterdir()
    assert profile_file.read(saved).components[0].seconds[0][0] == 2


def test_a_profile_that_cannot_be_saved_at_exit_does_not_fail_the_run(tmp_path: Path) -> None:
    code = "import trimtab.profile as p\nwith p.component('rollout'): pass"
    done = run(code, TRIMTAB_PROFILE=str(tmp_path / "no" / "folder.yaml"))
    assert done.returncode == 0
    assert "no profile written" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_the_timer_is_light() -> None:
    heavy = "numpy", "pydantic", "ruamel", "rich", "typer", "asyncio", "inspect"
    done = run(f"import sys, trimtab.profile; print([m for m in {heavy!r} if m in sys.modules])")
    found = done.stdout.strip()
    assert "numpy" not in found
    assert "pydantic" not in found
    assert "ruamel" not in found
    assert "rich" not in found
