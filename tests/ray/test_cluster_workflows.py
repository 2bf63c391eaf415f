"""The three workflows of a cluster that grows under a training loop, typed into pseudo-terminals, and their ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_here import TRIMTAB, Place, Terminal
from trimtab.runtime.procs.processes import command, send, table
from waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "auto_scaling"
LOOP = "training_loop_with_autoscaling.py"
Open = Callable[..., Terminal]


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture
def terminal(place: Place) -> Iterator[Open]:
    """Opens terminals in the example's directory, where the commands are typed as documented."""
    opened: list[Terminal] = []
    path = f"{Path(TRIMTAB).parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def open_one(*words: str, **around: str) -> Terminal:
        settings = {**place.environment, "PATH": path, "TRIMTAB_FAKE_GPUS": "4", **around}
        opened.append(Terminal(*words, cwd=EXAMPLE, around=settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def start(terminal: Open, place: Place, workers: int, **around: str) -> Terminal:
    shown = terminal("./start_ray_cluster.sh", str(workers), "--dashboard-port=0", *place.ports, **around)
    shown.expect(rf"{workers + 1} nodes?\b")
    shown.expect("Ctrl-C ends the cluster")
    return shown


def train(terminal: Open, place: Place) -> Terminal:
    loop = terminal(sys.executable, LOOP, RAY_ADDRESS=place.cluster().address)
    loop.expect("TRAINING LOOP STARTED")
    return loop


def trained_by(loop: Terminal, members: int) -> None:
    """A step was completed by so many."""
    loop.expect(rf"\b{members} actors? trained")


@pytest.mark.long
def test_a_cluster_starts_small_and_its_training_grows_with_every_worker(place: Place, terminal: Open) -> None:
    before = set(table())
    first = start(terminal, place, 0)
    loop = train(terminal, place)
    trained_by(loop, 1)
    added = terminal("./add_ray_worker.sh")
    added.expect("runs on GPU 1")
    assert added.ended() == 0
    loop.expect("new worker")
    trained_by(loop, 2)
    first.expect(r"gpu-1 +1 +running")
    added = terminal("./add_ray_worker.sh")
    added.expect("runs on GPU 2")
    assert added.ended() == 0
    trained_by(loop, 3)
    loop.interrupt()
    loop.ended()
    first.interrupt()
    first.expect("no process is left")
    assert first.ended() == 0
    assert not place.processes()
    mine = [pid for pid in set(table()) - before if str(place.directory) in " ".join(command(pid))]
    assert not mine


@pytest.mark.long
def test_a_cluster_starts_with_workers_and_training_uses_all_of_them_and_one_more(place: Place, terminal: Open) -> None:
    first = start(terminal, place, 2)
    loop = train(terminal, place)
    trained_by(loop, 3)
    added = terminal("./add_ray_worker.sh")
    added.expect("runs on GPU 3")
    assert added.ended() == 0
    trained_by(loop, 4)
    loop.interrupt()
    loop.ended()
    first.process.send_signal(signal.SIGKILL)  # nobody is left to clean up: the nodes notice
    until(lambda: not place.processes(), "nodes outlive the command that they belong to")


@pytest.mark.long
def test_workers_are_added_until_no_gpu_is_left_and_a_ray_stop_is_noticed(place: Place, terminal: Open) -> None:
    first = start(terminal, place, 1)
    loop = train(terminal, place)
    for gpu in (2, 3):
        added = terminal("./add_ray_worker.sh")
        added.expect(f"runs on GPU {gpu}")
        assert added.ended() == 0
    refused = terminal("./add_ray_worker.sh")
    refused.expect("no GPU is left: this machine has 4 faked GPUs")
    assert refused.ended() == 3
    trained_by(loop, 4)
    loop.interrupt()
    loop.ended()
    stop_as_ray_does(place)
    first.expect("the cluster has ended: its Ray was stopped from outside, as `ray stop` does")
    assert first.ended() == 4
    assert not place.processes()


@pytest.mark.long
def test_ctrl_c_while_the_cluster_starts_leaves_nothing_behind(place: Place, terminal: Open) -> None:
    first = terminal("./start_ray_cluster.sh", "1", "--dashboard-port=0", *place.ports)
    first.expect("head runs on GPU 0")
    first.interrupt()
    assert first.ended() == 130
    assert not place.processes()
    assert not place.cluster().live_nodes


@pytest.mark.long
def test_a_terminal_that_is_closed_takes_its_cluster_along(place: Place, terminal: Open) -> None:
    first = start(terminal, place, 0)
    first.process.send_signal(signal.SIGHUP)
    first.ended()
    assert not place.processes()


def stop_as_ray_does(place: Place) -> None:
    """What `ray stop` does, to this cluster alone: SIGTERM to Ray's own processes."""
    for one in place.processes():
        words = command(one.pid)
        if words and Path(words[0]).name in ("raylet", "gcs_server"):
            send(one, signal.SIGTERM)
