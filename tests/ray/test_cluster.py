"""`trimtab cluster` with real Ray nodes: GPUs never given twice, faults said, nobody else's processes touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster_here import Place, worker_ports
from trimtab.runtime.localcluster import allocation as books
from trimtab.runtime.localcluster.ledger import ClusterRecord, NodePhase, NodeSizes
from trimtab.runtime.localcluster.node_supervisor import ended_by_logs
from trimtab.runtime.procs import gpus, ports
from trimtab.runtime.procs.processes import ProcessIdentity, send
from trimtab.runtime.rayapi import auth
from waiting import until

TOKEN = "a-token-that-only-the-first-terminal-has-0123456789"

DRIVER = """
import json, os, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
@ray.remote(num_gpus=1, num_cpus=0)
class Trainer:
    def where(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id()
actors = [Trainer.options(name=f"trainer-{i}").remote() for i in range(int(sys.argv[2]))]
print(json.dumps(ray.get([one.where.remote() for one in actors])), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


@pytest.fixture(scope="module")
def here() -> Iterator[Place]:
    """A cluster of a head with four faked GPUs, started in a terminal that has a token which no other terminal has."""
    place = Place()
    place.done(
        "start", "--detach", "--fake-gpus=4", "--dashboard-port=0", "--quick-loss", "--timeout", "600", *place.ports,
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN,
    )  # fmt: skip
    yield place
    place.close()


@pytest.fixture
def workers(here: Place) -> Place:
    """That cluster with workers on GPUs 1, 2 and 3."""
    missing = {"1", "2", "3"} - {gpu for node in here.cluster().live_nodes for gpu in node.gpus}
    adding = [here.begin("add", "--gpu-index", gpu, "--timeout", "600") for gpu in sorted(missing)]
    for one in adding:
        out, err = one.communicate(timeout=600)
        assert one.returncode == 0, out + err
    return here


@contextmanager
def trainers(place: Place, count: int) -> Iterator[dict[str, str]]:
    """Actors that hold a GPU each, for as long as this lasts: by what they see of GPUs, the nodes that they are on."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, place.cluster().address, str(count)],
        env={**place.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            yield dict(json.loads(driver.stdout.readline()))
        finally:
            driver.stdin.close()
            driver.wait(60)


def gpus_of(place: Place) -> list[str]:
    return sorted(gpu for node in place.cluster().live_nodes for gpu in node.gpus)


def dead() -> ProcessIdentity:
    """A process that was there and is not any more."""
    child = subprocess.Popen(["true"])
    child.wait()
    return ProcessIdentity(child.pid, 1.0)


# ---- before anything is started ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("add",), ("show",), ("env",), ("stop",), ("drain", "gpu-1"), ("remove", "gpu-1")])
def test_without_a_cluster_every_command_says_how_to_start_one(place: Place, command: tuple[str, ...]) -> None:
    done = place.run(*command)
    assert done.returncode == 4
    assert "no Ray cluster found" in done.stderr
    assert "trimtab cluster start" in done.stderr


def test_an_address_where_nothing_answers_is_said_at_once(place: Place) -> None:
    done = place.run("add", "--fake-gpus=1", "--address", f"127.0.0.1:{place.port}")
    assert done.returncode == 4
    assert f"no Ray cluster answers at 127.0.0.1:{place.port}" in done.stderr
    assert place.run("add", "--address", "nonsense").returncode == 2


def test_more_workers_than_gpus_are_refused_before_anything_starts(place: Place) -> None:
    done = place.run("start", "4", "--fake-gpus=4", *place.ports)
    assert done.returncode == 3
    assert "GPU 4 is not available" in done.stderr
    assert "4 faked GPUs (0-3)" in done.stderr
    assert "`trimtab cluster start 3`" in done.stderr
    assert not place.ledger.read()


def test_a_machine_without_gpus_is_told_how_to_do_without(place: Place) -> None:
    done = place.run("start", *place.ports, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert "this machine has no GPU" in done.stderr
    assert "--fake-gpus" in done.stderr


def test_a_port_that_is_taken_is_named_with_its_process_before_ray_starts(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.port)):
        done = place.run("start", "--fake-gpus=1", *place.ports)
    assert done.returncode == 2
    assert f"port {place.port}, for the head, is taken by process {os.getpid()}" in done.stderr
    assert "--port" in done.stderr
    with socket.create_server(("0.0.0.0", place.port + 50)):
        done = place.run("start", "--fake-gpus=1", *place.ports, f"--dashboard-port={place.port + 50}")
    assert done.returncode == 2
    assert f"port {place.port + 50}, for the dashboard, is taken by process {os.getpid()}" in done.stderr
    assert not place.ledger.read()


def test_a_block_of_ports_of_which_one_is_taken_is_passed_over(place: Place) -> None:
    first = place.port + 1
    assert ports.free_block(first, 10_002, (), ())[1].node_manager == first
    with socket.create_server(("127.0.0.1", first + 1)):
        assert ports.free_block(first, 10_002, (), ())[1].node_manager == first + ports.PORTS_PER_NODE


def test_ports_of_nodes_never_overlap() -> None:
    blocks = [ports.block(slot, 6380, 10_002) for slot in range(ports.MAX_NODES)]
    assert (blocks[0].node_manager, blocks[0].object_manager) == (6380, 6381)
    fixed = [port for one in blocks for port in one.fixed]
    workers = [port for one in blocks for port in range(one.first_worker, one.last_worker + 1)]
    assert len(set(fixed)) == len(fixed)
    assert len(set(workers)) == len(workers)
    assert not set(fixed) & set(workers)


def test_a_session_of_an_earlier_run_is_noticed_said_and_cleaned(place: Place) -> None:
    cluster = ClusterRecord(f"10.0.0.1:{place.port}", True, str(place.directory / "t"), NodeSizes(), 2, place.port + 1)
    books.open_cluster(place.ledger, cluster, gpus.local_gpus(2), 1)
    for node in place.cluster().nodes:
        place.ledger.update(node.mark, adder=dead(), supervisor=dead(), phase=NodePhase.running)
    done = place.run("show")
    assert "is left over from an earlier run" in done.stderr
    assert "no Ray cluster found" in done.stderr
    assert done.returncode == 4
    assert not place.cluster().live_nodes
    assert "earlier run" not in place.run("show").stderr


def test_a_gpu_is_given_once_however_many_clusters_ask(place: Place) -> None:
    real = gpus.LocalGpus(("0", "1", "2"))
    first = ClusterRecord(f"10.0.0.1:{place.port}", True, "t", NodeSizes(), None, place.port + 1)
    second = ClusterRecord("10.0.0.2:6379", False, "t", NodeSizes(), None, place.port + 1)
    books.open_cluster(place.ledger, first, real, 1)
    _, node = books.allocate_node(place.ledger, second, real)
    assert node.gpus == ("2",)
    held = [port for one in place.ledger.read().values() for each in one.nodes for port in each.ports.fixed]
    assert len(set(held)) == len(held)
    with pytest.raises(books.InfeasibleError, match="no GPU is left"):
        books.allocate_node(place.ledger, second, real)
    for cluster in place.ledger.read().values():
        for each in cluster.nodes:  # nobody started anything
            place.ledger.update(each.mark, adder=dead())


def test_the_gpus_that_the_caller_may_see_are_the_ones_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpu_names", lambda: ["NVIDIA H200"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpus.local_gpus(None).ids == ("3", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert gpus.local_gpus(None).ids == ()


def test_a_new_cluster_wants_a_token_exactly_where_ray_would(place: Place) -> None:
    outside = {"HOME": str(place.home)}
    assert auth.new_cluster_auth(outside) == {"RAY_AUTH_MODE": "disabled"}
    (place.home / ".ray").mkdir()
    (place.home / ".ray" / "auth_token").write_text("secret")
    assert auth.new_cluster_auth(outside) == {"RAY_AUTH_MODE": "token"}
    assert auth.new_cluster_auth({**outside, "RAY_AUTH_MODE": "disabled"}) == {"RAY_AUTH_MODE": "disabled"}
    with pytest.raises(auth.InputError, match="there is no token"):
        auth.new_cluster_auth({"HOME": "/nowhere", "RAY_AUTH_MODE": "token"})


# ---- a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_six_adds_at_once_for_three_free_gpus_give_each_gpu_once(here: Place) -> None:
    adding = [here.begin("add", "--timeout", "600") for _ in range(6)]
    ended = [(one, *one.communicate(timeout=600)) for one in adding]
    told = [err for one, _, err in ended if one.returncode == 3]
    said = [out for one, out, _ in ended if one.returncode == 0]
    assert len(said) == 3, [err for _, _, err in ended]
    assert sorted(line.split("GPU ")[1][0] for line in said) == ["1", "2", "3"]
    assert len(told) == 3
    for why in told:
        assert "no GPU is left: this machine has 4 faked GPUs (0-3)" in why
        assert "GPU 1 is gpu-1's" in why
        assert "`trimtab node remove NODE`" in why
    assert gpus_of(here) == ["0", "1", "2", "3"]
    alive = [node["node_id"] for node in here.asked("show")["nodes"] if node["state"] == "running"]
    assert len(set(alive)) == 4


def test_a_node_has_one_gpu_one_cpu_and_one_worker_unit_and_status_says_who_holds_it(workers: Place) -> None:
    assert TOKEN not in (workers.directory / "ledger.json").read_text()
    with trainers(workers, 4) as seen:
        data = workers.asked("show")
        text = workers.done("show")
    for node in data["nodes"]:
        assert (node["total"]["gpu"], node["total"]["cpu"], node["total"]["worker_unit"]) == (1, 1, 1)
        assert [seen[gpu] for gpu in node["gpus"]] == [node["node_id"]]  # CUDA_VISIBLE_DEVICES is the node's own
        assert node["free"].get("gpu", 0) == 0
        [holder] = [one for one in node["holders"] if one["holds"].get("gpu")]
        assert holder["name"].startswith("trainer-")
    assert {one["gpu"]: one["node"] for one in data["gpus"]} == {"0": "head", "1": "gpu-1", "2": "gpu-2", "3": "gpu-3"}
    assert "trainer-0" in text
    assert "free: none" in text
    assert TOKEN not in text + json.dumps(data)


def test_ray_status_works_in_the_shell_that_the_printed_line_leaves(here: Place) -> None:
    line = here.done("env").strip()
    assert line == f"export RAY_ADDRESS={here.cluster().address} RAY_AUTH_MODE=token"
    shell = f'{line}; "{sys.executable}" -m ray.scripts.scripts status'
    around = {**here.environment, "RAY_AUTH_TOKEN": TOKEN}
    done = subprocess.run(["bash", "-c", shell], env=around, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPU" in done.stdout


def test_the_gpu_of_a_killed_node_returns_and_the_next_node_takes_it_and_no_other(workers: Place) -> None:
    before = {node.name: node.supervisor for node in workers.cluster().live_nodes}
    for one in workers.family("gpu-2"):
        send(one, signal.SIGKILL)  # as when a machine is lost: its supervisor too
    done = workers.run("add", "--timeout", "600")
    assert done.returncode == 0, done.stderr
    assert "node gpu-2 of" in done.stderr  # had no supervisor any more
    assert "runs on GPU 2" in done.stdout
    after = {node.name: node.supervisor for node in workers.cluster().live_nodes}
    assert after["gpu-2"] != before["gpu-2"]
    assert {name: after[name] for name in ("head", "gpu-1", "gpu-3")} == {
        name: before[name] for name in ("head", "gpu-1", "gpu-3")
    }


@pytest.mark.long
def test_a_node_whose_ray_is_stopped_by_others_ends_whole_and_says_so(workers: Place) -> None:
    """As `ray stop` does it; that itself would end other clusters on this machine, which is why we never call it."""
    family = workers.family("gpu-1")
    raylet = workers.node("gpu-1").raylet
    assert raylet is not None
    send(raylet, signal.SIGTERM)
    until(lambda: not any(one.alive for one in family), "some process of the node is still there")
    assert "stopped from outside, as `ray stop` does" in workers.cause("gpu-1")
    assert "as `ray stop` does" in workers.done("show")
    assert gpus_of(workers) == ["0", "2", "3"]


def test_a_raylet_that_is_killed_takes_its_node_with_it_and_its_gpu_is_free(workers: Place) -> None:
    family = workers.family("gpu-3")
    raylet = workers.node("gpu-3").raylet
    assert raylet is not None
    send(raylet, signal.SIGKILL)
    until(lambda: not any(one.alive for one in family), "some process of the node is still there")
    assert "its Ray died" in workers.cause("gpu-3")
    assert "3" not in gpus_of(workers)


@pytest.mark.parametrize(
    ("raylet", "gcs_server", "cause"),
    [
        ("main.cc:1174: received SIGTERM.", "", "its Ray was stopped from outside, as `ray stop` does"),
        ("", "main.cc:266: GCS server received SIGTERM", "its Ray was stopped from outside, as `ray stop` does"),
        ("death info: reason: AUTOSCALER_DRAIN\nmain.cc:1174: received SIGTERM.", "", "drained"),
        ("", "node_manager.cc:734: another node: death message = received SIGTERM", ""),
    ],
)  # fmt: skip
def test_the_logs_of_a_node_tell_a_stop_from_a_crash(tmp_path: Path, raylet: str, gcs_server: str, cause: str) -> None:
    assert ended_by_logs(str(tmp_path)) == ""
    logs = tmp_path / "session_2026" / "logs"
    logs.mkdir(parents=True)
    for name, text in (("raylet", raylet), ("gcs_server", gcs_server), ("raylet.1", "main.cc:9: received SIGTERM")):
        (logs / f"{name}.out").write_text(text)
    os.utime(logs / "raylet.1.out", (0, 0))  # of an earlier attempt to start
    assert ended_by_logs(str(tmp_path)) == cause


def test_drains_of_unknown_nodes_of_the_head_and_into_the_past_are_errors(here: Place) -> None:
    done = here.run("drain", "gpu-9")
    assert done.returncode == 2
    assert "there is no node gpu-9" in done.stderr
    for word in ("head", here.node("head").node_id[:12]):
        done = here.run("drain", word)
        assert done.returncode == 2
        assert "the head cannot be removed" in done.stderr
    for deadline, said in (("0", "has passed already"), ("-5", "a time such as 90s")):
        done = here.run("drain", "head", "--deadline", deadline)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_drained_node_that_is_busy_is_seen_by_all_and_goes_at_its_deadline(workers: Place) -> None:
    with trainers(workers, 4):
        family = workers.family("gpu-2")
        data = workers.asked("drain", "gpu-2", "--deadline", "600")
        [node] = [one for one in workers.asked("show")["nodes"] if one["name"] == "gpu-2"]
        assert node["state"] == "draining"  # Ray says so, to whoever asks
        assert node["deadline"] == data["deadline"]
        data = workers.asked("drain", "gpu-2", "--deadline", "2")  # a second one replaces the deadline
        until(lambda: not any(one.alive for one in family), "the drained node is still there")
        assert time.time() >= data["deadline"]
    assert "its deadline has passed" in workers.cause("gpu-2")


@pytest.mark.long
def test_a_removed_node_is_gone_with_all_its_processes(workers: Place) -> None:
    family = workers.family("gpu-1")
    done = workers.done("remove", "gpu-1")
    assert "node gpu-1 has ended" in done
    assert "GPU 1 is free" in done
    assert not any(one.alive for one in family)
    assert workers.run("remove", "gpu-1").returncode == 2


def test_a_gpu_that_is_not_there_or_taken_cannot_be_asked_for(here: Place) -> None:
    done = here.run("add", "--gpu-index", "7")
    assert (done.returncode, "GPU 7 is not there: this machine has 4 faked GPUs (0-3)" in done.stderr) == (2, True)
    done = here.run("add", "--gpu-index", "0")
    assert (done.returncode, "GPU 0 is taken: GPU 0 is head's" in done.stderr) == (3, True)


def test_a_second_start_on_the_same_port_is_refused_with_what_to_do(here: Place) -> None:
    done = here.run("start", "--fake-gpus=1", *here.ports)
    assert done.returncode == 2
    assert "a cluster of trimtab runs at" in done.stderr
    assert "`trimtab cluster stop`" in done.stderr


@pytest.mark.long
def test_a_node_joins_by_address_from_where_nothing_is_known_of_the_cluster(here: Place) -> None:
    """As from another machine: another ledger, and a token that has to be brought along."""
    there = Place()
    try:
        address = here.cluster().address
        own = [f"--ports-from={there.port + 1}", f"--worker-ports-from={worker_ports(there.port)}", "--fake-gpus=2"]
        done = there.run("add", "--address", address, *own)
        assert done.returncode == 4
        assert "requires a token, and there is none here" in done.stderr
        done = there.run("add", "--address", address, *own, RAY_AUTH_TOKEN="wrong")
        assert done.returncode == 4
        assert "does not accept the token" in done.stderr
        (there.home / ".ray").mkdir()
        (there.home / ".ray" / "auth_token").write_text(TOKEN)
        assert "runs on GPU 0" in there.done("add", "--address", address, *own)
        [theirs] = [one for one in here.asked("show")["nodes"] if not one["ours"]]
        assert theirs["state"] == "running"
        refused = here.run("remove", theirs["node_id"][:12])
        assert refused.returncode == 2
        assert "was not started by trimtab on this machine" in refused.stderr
        here.done("drain", theirs["node_id"][:12], "--deadline", "30")
        until(lambda: not there.processes(), "a drained node without work ends by itself")
    finally:
        there.close()


def test_stopping_ends_all_that_trimtab_started_and_nothing_else(here: Place) -> None:
    """The last of this module: `here` is gone afterwards."""
    stranger = here.directory / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", stranger)
    bystander = subprocess.Popen([str(stranger), "600"])
    try:
        assert here.processes()
        done = here.done("stop")
        assert "node head has ended: stopped by `trimtab cluster stop`" in done
        assert not here.processes()
        assert bystander.poll() is None
        again = here.run("stop")
        assert again.returncode == 4
        assert "stopped by `trimtab cluster stop`" in again.stderr
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.long
def test_workers_join_a_cluster_without_authentication_although_a_token_lies_about(place: Place) -> None:
    (place.home / ".ray").mkdir()
    (place.home / ".ray" / "auth_token").write_text("not-for-this-cluster")
    options = ["--fake-gpus=2", "--dashboard-port=0", "--detach", *place.ports]
    place.done("start", *options, RAY_AUTH_MODE="disabled")
    assert "runs on GPU 1" in place.done("add")
    data = place.asked("show")
    assert [node["state"] for node in data["nodes"]] == ["running", "running"]
    place.done("stop")
