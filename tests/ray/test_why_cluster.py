"""`trimtab why` on a real Ray of several nodes: made situations, each of which it has to name."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import typer
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from trimtab.cli.why import why
from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import Format
from trimtab.runtime.procs.gpus import FILE_VARIABLE
from trimtab.runtime.rayapi.gcs_snapshot import GcsReader, find
from waiting import until

WAIT_S = 240.0
JOB = """
cluster: {nodes: NODES, gpus_per_node: GPUS}
workflow:
  batches: 4
  components:
    rollout: {seconds: {1: 10, 2: 6}}
    trainer: {after: [rollout], seconds: {1: 10, 2: 6}, multiple_of: 2}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    head = {"num_cpus": 4, "num_gpus": 2, "resources": {"seat": 2}, "node_name": "right", "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=4, num_gpus=2, labels={"zone": "a"}, node_name="left", wait=False)
    made.add_node(
        num_cpus=1,
        num_gpus=1,
        resources={"lab": 1, "spot": 2},
        node_name="lab",
        env_vars={"CUDA_VISIBLE_DEVICES": "5"},
        wait=False,
    )
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
    yield made
    ray.shutdown()
    made.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def owned(cluster: Cluster) -> Iterator[list[Any]]:
    """Actors and groups of one test, gone after it."""
    kept: list[Any] = []
    yield kept
    for one in kept:
        if isinstance(one, PlacementGroup):
            remove_placement_group(one)
        elif isinstance(one, ray.ObjectRef):
            ray.cancel(one, force=True)
        else:
            ray.kill(one)
    until(lambda: not GcsReader(cluster.address).look().waiting)


class Plain:
    def here(self) -> bool:
        return True


def made(options: dict[str, Any], name: str = "Plain") -> Any:
    """An actor of a class of that name; asks no CPU unless told."""
    kind = type(name, (Plain,), {})
    return ray.remote(kind).options(**{"num_cpus": 0, **options}).remote()


def running(options: dict[str, Any], name: str = "Plain") -> Any:
    actor = made(options, name)
    assert ray.get(actor.here.remote(), timeout=WAIT_S)
    return actor


class Asked:
    """`trimtab why` as a program sees it, and as people do."""

    def __init__(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.address = str(cluster.address)
        self._capsys = capsys

    def why(self, **options: Any) -> tuple[int, str]:
        self._capsys.readouterr()
        try:
            why(**{"address": self.address, **options})
            status = 0
        except typer.Exit as end:
            status = end.exit_code
        return status, self._capsys.readouterr().out

    def data(self, **options: Any) -> tuple[int, dict[str, Any]]:
        status, text = self.why(form=Format.json, **options)
        return status, json.loads(text)

    def finding(self, cause: str) -> tuple[int, dict[str, Any]]:
        """The only finding, once it is of that cause: Ray's own lists take a moment to agree."""
        deadline = time.monotonic() + WAIT_S
        while True:
            status, data = self.data()
            causes = [one["cause"] for one in data["findings"]]
            if causes == [cause]:
                return status, data["findings"][0]
            assert time.monotonic() < deadline, f"not {cause} but {data['findings']}"
            time.sleep(0.2)


@pytest.fixture
def asked(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(cluster, capsys)


# ---- nothing wrong --------------------------------------------------------------------------------------------------


def test_nothing_waits_on_a_quiet_cluster_and_looking_changes_nothing(asked: Asked, owned: list[Any]) -> None:
    owned.append(running({"num_gpus": 1}))
    jobs = [one["JobID"] for one in ray._private.state.jobs()]
    status, data = asked.data()
    assert (status, data["status"], data["findings"]) == (0, "nothing waits", [])
    assert {one["name"] for one in data["nodes"]} >= {"left", "right", "lab"}
    assert asked.why()[1].startswith("Nothing waits.")
    assert [one["JobID"] for one in ray._private.state.jobs()] == jobs


# ---- never ----------------------------------------------------------------------------------------------------------


def test_a_group_too_big_for_any_node_is_named_with_what_each_node_lacks(asked: Asked, owned: list[Any]) -> None:
    owned.append(placement_group([{"GPU": 1}, {"GPU": 4}], name="huge"))
    inside = PlacementGroupSchedulingStrategy(owned[0], 1)
    owned.insert(0, made({"num_gpus": 1, "scheduling_strategy": inside}, "Follower"))
    until(lambda: len(GcsReader(asked.address).look().waiting) == 2)
    status, found = asked.finding("TOO_BIG")
    assert (status, found["never"], found["count"]) == (3, True, 2)
    assert "bundle 1 asks 4 gpu" in found["sentence"]
    assert {one["node"]: one["lacks_when_empty"] for one in found["nodes"]}["left"] == {"gpu": 2}
    assert [one["name"] for one in found["followers"]] == ["Follower"]
    assert 0 <= found["waits_s"] < WAIT_S
    text = asked.why()[1]
    for word in ("NEVER", "placement group huge", "TOO_BIG", "helps", "Follower"):
        assert word in text


def test_a_label_that_no_node_has_is_named(asked: Asked, owned: list[Any]) -> None:
    owned.append(made({"num_cpus": 1, "label_selector": {"zone": "mars"}}))
    status, found = asked.finding("NO_LABEL")
    assert (status, found["never"]) == (3, True)
    assert "zone=mars" in found["sentence"]
    assert "zone is a" in found["sentence"]


def test_a_custom_resource_that_no_node_has_is_named(asked: Asked, owned: list[Any]) -> None:
    owned.append(made({"resources": {"seats": 1}}))
    until(lambda: any(one.since for one in GcsReader(asked.address).look().waiting))  # Ray tells it after a second
    status, found = asked.finding("NO_RESOURCE")
    assert (status, found["never"]) == (3, True)
    assert "seats" in found["sentence"]
    assert found["helps"][0] == "did you mean seat?"
    assert found["since"] is not None


def test_strict_spread_over_too_many_nodes_is_named(asked: Asked, owned: list[Any]) -> None:
    owned.append(placement_group([{"GPU": 1}] * 5, strategy="STRICT_SPREAD"))
    status, found = asked.finding("TOO_FEW_NODES")
    assert (status, found["never"]) == (3, True)


# ---- not now --------------------------------------------------------------------------------------------------------


def test_free_gpus_in_pieces_are_called_fragmented(asked: Asked, owned: list[Any]) -> None:
    nodes = {one["NodeName"]: one["NodeID"] for one in ray.nodes()}
    for name in ("left", "right"):
        there = NodeAffinitySchedulingStrategy(nodes[name], soft=False)
        owned.append(running({"num_gpus": 1, "scheduling_strategy": there}, f"On{name}"))
    owned.append(made({"num_gpus": 2}, "Wide"))
    status, found = asked.finding("FRAGMENTED")
    assert (status, found["never"], found["who"][0]["class"]) == (0, False, "Wide")
    assert [one["lacks"] for one in found["nodes"][:2]] == [{"gpu": 1}] * 2
    assert "On" in found["helps"][0]


def test_two_gangs_that_hold_half_each_are_both_named(asked: Asked, owned: list[Any]) -> None:
    seat = {"resources": {"seat": 1}}
    owned += [running(seat, "Trainer"), running(seat, "Critic"), made(seat, "Trainer"), made(seat, "Critic")]
    status, found = asked.finding("HALF_HELD")
    assert (status, found["never"], found["count"]) == (0, False, 2)
    assert "Trainer" in found["sentence"]
    assert "Critic" in found["sentence"]
    assert len(found["blockers"]) == 2


def test_who_holds_what_a_task_waits_for_is_named(asked: Asked, owned: list[Any]) -> None:
    owned.append(placement_group([{"seat": 2}], name="keeper"))
    assert owned[0].wait(WAIT_S)

    @ray.remote(num_cpus=0, resources={"seat": 1})
    def sit() -> None: ...

    owned.insert(0, sit.remote())
    status, found = asked.finding("BUSY")
    assert (status, found["who"][0]["kind"]) == (0, "task")
    assert "placement group keeper" in found["helps"][0]
    assert "nothing runs in it" in found["helps"][0]


def test_a_full_bundle_and_an_actor_bound_to_one_node_are_told_apart(asked: Asked, owned: list[Any]) -> None:
    owned.append(placement_group([{"GPU": 1}], name="single"))
    inside = {"num_gpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(owned[0], 0)}
    owned[:0] = [running(inside, "First"), made(inside, "Second")]
    _, found = asked.finding("GROUP_FULL")
    assert "First" in found["sentence"]
    ray.kill(owned.pop(1))
    left = next(one["NodeID"] for one in ray.nodes() if one["NodeName"] == "left")
    there = NodeAffinitySchedulingStrategy(left, soft=False)
    owned.insert(0, running({"num_gpus": 1, "scheduling_strategy": there}))
    owned.insert(0, made({"num_gpus": 2, "scheduling_strategy": there}, "Bound"))
    until(lambda: any(one.pinned == left for one in GcsReader(asked.address).look().waiting))
    status, found = asked.finding("BUSY")
    assert (status, found["who"][0]["pinned"]) == (0, left)
    assert "left, the only node it may use" in found["sentence"]


def test_an_actor_whose_process_takes_long_to_start_is_not_said_to_wait_for_room(
    asked: Asked, owned: list[Any], tmp_path: Path
) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {tmp_path}/gate ]; do sleep 0.1; done\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    seats = {"resources": {"seat": 2}}
    owned.append(made({**seats, "runtime_env": {"py_executable": str(slow)}}, "Slow"))
    status, found = asked.finding("STARTING")
    assert (status, found["never"]) == (0, False)
    assert "right" in found["sentence"]
    owned.append(made(seats, "Next"))
    until(lambda: [one["cause"] for one in asked.data()[1]["findings"]] == ["BUSY", "STARTING"])
    (tmp_path / "gate").touch()
    assert ray.get(owned[0].here.remote(), timeout=WAIT_S)


def test_a_gpu_that_a_process_outside_ray_holds_is_the_cause(
    cluster: Cluster, asked: Asked, owned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine(Plain):
        def __init__(self, gate: str) -> None:
            while not os.path.exists(gate):  # as an engine waits for memory of its GPU
                time.sleep(0.05)

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        listed = [{"gpu": 5, "pid": other.pid, "used_bytes": 60 * 2**30, "of_bytes": 80 * 2**30}]
        (tmp_path / "gpus.json").write_text(json.dumps(listed))
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "gpus.json"))
        engine = ray.remote(Engine).options(num_cpus=0, num_gpus=1, resources={"lab": 1})
        owned.append(engine.remote(str(tmp_path / "gate")))
        status, found = asked.finding("GPU_OUTSIDE")
        assert (status, found["who"][0]["stage"]) == (0, "starting")
        for word in ("GPU 5 on lab", f"process {other.pid}", "60 of 80 GiB"):
            assert word in found["sentence"]
        nodes = (cluster.head_node, *cluster.worker_nodes)
        raylets = [one.process.pid for node in nodes for one in node.all_processes["raylet"]]
        listed = [{"gpu": 5, "pid": pid} for pid in raylets]  # Ray's own are never accused
        (tmp_path / "gpus.json").write_text(json.dumps(listed))
        assert asked.finding("STARTING")[1]["never"] is False
        (tmp_path / "gate").touch()
    finally:
        other.kill()
        other.wait()


def test_what_only_a_new_node_can_take_waits_for_the_autoscaler(asked: Asked, owned: list[Any]) -> None:
    from ray.core.generated import autoscaler_pb2

    gcs = ray._private.worker.global_worker.gcs_client
    config = autoscaler_pb2.ClusterConfig()
    config.node_group_configs.add(name="large", max_count=2, resources={"GPU": 8, "CPU": 8})
    owned.append(made({"num_gpus": 8}))
    assert asked.finding("TOO_BIG")[0] == 3
    try:
        gcs.report_cluster_config(config.SerializeToString())
        state = autoscaler_pb2.AutoscalingState(autoscaler_state_version=1)
        state.pending_instances.add(ray_node_type_name="large")
        gcs.report_autoscaling_state(state.SerializeToString())
        status, found = asked.finding("NODES_COMING")
        assert (status, found["never"]) == (0, False)
        assert "is starting 1 (large)" in found["sentence"]
    finally:
        gcs.report_cluster_config(autoscaler_pb2.ClusterConfig().SerializeToString())


# ---- before anything is started -------------------------------------------------------------------------------------


def job_file(folder: Path, nodes: int, gpus: int) -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("NODES", str(nodes)).replace("GPUS", str(gpus)))
    return path


def test_a_job_that_fits_is_told_where_and_one_that_never_does_by_how_much(
    asked: Asked, owned: list[Any], tmp_path: Path
) -> None:
    status, data = asked.data(would_fit=job_file(tmp_path, 2, 2))
    assert (status, data["fits_now"], data["fits_ever"]) == (0, True, True)
    assert {node for one in data["groups"] for node in one["nodes"]} <= {"left", "right", "lab"}
    owned += [running({"num_gpus": 2}), running({"num_gpus": 2})]
    until(lambda: not asked.data(would_fit=job_file(tmp_path, 2, 2))[1]["fits_now"])
    status, data = asked.data(would_fit=job_file(tmp_path, 2, 2))
    assert (status, data["fits_now"], data["fits_ever"]) == (0, False, True)
    assert data["finding"]["cause"] == "BUSY"
    status, data = asked.data(would_fit=job_file(tmp_path, 8, 2))
    assert (status, data["fits_ever"]) == (3, False)
    assert sum(one["lacks_ever"].get("gpu", 0) for one in data["groups"]) > 0
    assert "never fits" in asked.why(would_fit=job_file(tmp_path, 8, 2))[1]


# ---- watching -------------------------------------------------------------------------------------------------------


def test_watching_ends_when_nothing_waits_any_more(asked: Asked, owned: list[Any]) -> None:
    seat = {"resources": {"seat": 2}}
    first = running(seat, "First")
    owned.append(made(seat, "Second"))
    asked.finding("BUSY")
    threading.Timer(1.0, lambda: ray.kill(first)).start()
    status, text = asked.why(live=True, every=0.2, at_most=WAIT_S)
    assert status == 0
    assert text.index("BUSY") < text.index("Nothing waits.")
    assert asked.data(live=True, every=0.2, at_most=WAIT_S)[1]["status"] == "nothing waits"


def test_watching_something_that_never_starts_ends_with_its_time(asked: Asked, owned: list[Any]) -> None:
    owned.append(made({"resources": {"nowhere": 1}}))
    asked.finding("NO_RESOURCE")
    assert asked.why(live=True, every=0.2, at_most=0.5)[0] == 3


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_where_nothing_listens_it_says_how_to_start_a_cluster() -> None:
    with pytest.raises(UnreachableError, match="nothing answers") as caught:
        why(address="127.0.0.1:1")
    assert "trimtab cluster start" in (caught.value.hint or "")


def test_something_else_that_listens_is_not_taken_for_a_cluster() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(UnreachableError, match="is no Ray cluster"):
            why(address=f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": "ray://head:10001"}, "Ray's client"),
        ({"address": "local"}, "a new, empty one"),
        ({"address": "nonsense"}, "no address"),
        ({"overrides": ["a=1"]}, "need --would-fit"),
        ({"live": True, "every": 0.0}, "--every"),
        ({"live": True, "every": float("nan")}, "--every"),
        ({"live": True, "would_fit": Path("job.yaml")}, "without NAME and --would-fit"),
    ],
)
def test_wrong_calls_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        why(**options)


def test_a_list_of_gpu_processes_that_is_none_is_refused(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus.json").write_text('{"gpu": 1}')
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "gpus.json"))
    with pytest.raises(InputError, match=FILE_VARIABLE):
        asked.why()


def test_the_cluster_of_this_process_is_found(cluster: Cluster) -> None:
    assert find(None) == cluster.address


def test_the_cluster_of_the_environment_is_found_and_one_that_is_gone_is_said(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "trimtab", "why"]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": str(cluster.address)}, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Nothing waits. ({cluster.address}, 3 nodes)")
    done = subprocess.run(
        [*command, "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 4
    assert "trimtab cluster start" in done.stderr


def test_a_view_on_a_terminal_ends_with_ctrl_c_and_its_status(cluster: Cluster, owned: list[Any]) -> None:
    owned.append(made({"resources": {"nowhere": 1}}))
    until(lambda: bool(GcsReader(str(cluster.address)).look().waiting))
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "trimtab", "why", "-a", str(cluster.address), "--live", "--every", "0.5"]
    view = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    try:
        deadline = time.monotonic() + WAIT_S
        while b"Ctrl-C ends" not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
        view.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal is gone with its last process
            while more := os.read(terminal, 65536):
                shown += more
        status = view.wait(WAIT_S)
    finally:
        view.kill()
        view.wait()
        os.close(terminal)
    assert status == 3
    assert b"NO_RESOURCE" in shown
    assert b"Traceback" not in shown


# ---- a node that goes: last, for Ray knows no way back --------------------------------------------------------------


def test_a_node_that_drains_is_named_and_what_is_left_of_a_group_once_it_went(
    cluster: Cluster, asked: Asked, owned: list[Any]
) -> None:
    owned.append(placement_group([{"spot": 1}, {"seat": 1}], strategy="SPREAD", name="pair"))
    assert owned[0].wait(WAIT_S)  # an empty node would go at once
    lab = next(one for one in cluster.worker_nodes if one.node_id in _ids("lab"))
    gcs = ray._private.worker.global_worker.gcs_client
    assert gcs.drain_node(lab.node_id, 2, "reclaimed", int((time.time() + 300) * 1000), timeout=5)[0]
    owned.insert(0, made({"resources": {"spot": 1}}, "Late"))
    status, found = asked.finding("DRAINING")
    assert (status, found["never"], found["who"][0]["class"]) == (3, True, "Late")
    assert "lab, which drains, deadline in" in found["sentence"]
    assert [one["code"] for one in asked.data()[1]["notes"]] == ["NODE_DRAINING"]
    ray.kill(owned.pop(0))

    cluster.remove_node(lab)
    status, found = asked.finding("NO_RESOURCE")
    assert (status, found["who"][0]["name"]) == (3, "pair")
    assert "it still holds 1 of its 2 bundles" in found["sentence"]
    owned.insert(0, made({"resources": {"seat": 2}}, "Blocked"))
    until(lambda: [one["cause"] for one in asked.data()[1]["findings"]] == ["NO_RESOURCE", "HALF_HELD"])
    blocked = asked.data()[1]["findings"][1]
    assert not blocked["never"]
    assert "placement group pair" in blocked["sentence"]


def _ids(name: str) -> list[str]:
    return [one["NodeID"] for one in ray.nodes() if one["NodeName"] == name]
