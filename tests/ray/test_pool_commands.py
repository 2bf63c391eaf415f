"""`trimtab pool`, `task` and `why` on a real Ray, and the page that documents them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.app import run
from trimtab.core.reasons import ReasonCode
from trimtab.formats import yaml_text
from trimtab.model.pool import Aggressiveness, TaskState
from trimtab.render.output import span
from trimtab.render.text import pool as pool_text
from trimtab.runtime.client.session import Pool, Session, connect
from trimtab.runtime.controller.metrics import METRICS
from trimtab.runtime.controller.metrics import NODE_METRICS as FLEET_METRICS
from trimtab.runtime.rayapi.connect import connected
from trimtab.runtime.rayapi.nodes import RayNode
from waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "pools.md").read_text(encoding="utf-8")
ROLLOUT_PAGE = (ROOT / "docs" / "guides" / "rollout.md").read_text(encoding="utf-8")
LOOP_PAGE = (ROOT / "docs" / "guides" / "replanning.md").read_text(encoding="utf-8")
NODES_PAGE = (ROOT / "docs" / "guides" / "nodes.md").read_text(encoding="utf-8")


class Actor:
    def save(self) -> int:
        return 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with connected(cpus=8) as ray:
        yield ray


@pytest.fixture(scope="module")
def session(cluster: Any) -> Iterator[Session]:
    session = connect(name="watched")
    yield session
    session.shutdown()


@pytest.fixture(scope="module")
def pool(session: Session) -> Pool:
    """A pool of three CPUs: two rollouts run, `train` took the place of a third, and `late` waits."""
    session.preemption(label_rules={"role": {"train": ["rollout"]}})
    pool = session.pool("rlhf", {"cpu": 3, "memory": 2**31}, reserved=[{"cpu": 1}], preload=["json"])
    for number in range(3):
        name, labels = f"rollout-{number}", {"role": "rollout"}
        pool.submit(Actor, resources={"cpu": 1}, id=name, labels=labels, priority=1.0).wait("running", timeout=60)
    pool.submit(Actor, resources={"cpu": 1}, id="train", labels={"role": "train"}, priority=7.0).wait(timeout=60)
    pool.submit(Actor, resources={"cpu": 1}, id="late", priority=0.5)
    return pool


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run([*arguments])  # without --name: the only controller there is
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, err = call(capsys, *arguments, "--format", "json")
    assert (status, err) == (0, "")
    return json.loads(out)


def evicted(pool: Pool) -> str:
    [task] = [one.id for one in pool.tasks() if one.state is TaskState.evicted]
    return task


# ---- status -------------------------------------------------------------------------------------------------------


def test_status_shows_pools_tasks_waits_nodes_and_why_metrics_are_missing(
    capsys: pytest.CaptureFixture[str], pool: Pool
) -> None:
    status, out, err = call(capsys, "pool", "show")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    for part in ("the Ray that this process was connected to", "watched, process", "rlhf", "3/3 cpu, 0/2 GiB memory"):
        assert part in words
    assert f"{evicted(pool)} (evicted) rlhf 1 1 QUOTA" in words
    assert "late rlhf 2 0.5 QUOTA" in words
    assert "warm hosts" in words
    assert re.search(r"metrics (none: Ray's exporter does not run|http://)", words)


def test_status_as_data_has_the_documented_keys(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    data = asked(capsys, "pool", "show")
    assert set(data) == keys_of("trimtab pool show")
    assert data["controller"]["name"] == "watched"
    assert data["tasks"]["running"] == 3
    assert [(one["id"], one["position"]) for one in data["waiting"]] == [(evicted(pool), 1), ("late", 2)]
    assert data["waiting"][0]["reason"]["code"] == "QUOTA"
    assert data["pools"]["rlhf"]["slots"]["taken"] == 3
    assert data["evictions"]["evictions"] == 1
    assert data["evictions"]["latest"][0]["victim"] == evicted(pool)
    [node] = data["nodes"]
    assert node["total"]["cpu"] == 8
    assert set(node["warm_hosts"]) == {"ready", "starting"}
    _, out, _ = call(capsys, "pool", "show", "--format", "yaml")
    assert yaml_text.parse(out, "yaml")["pools"] == data["pools"]


def test_a_missing_exporter_is_said_and_so_is_one_that_does_not_answer() -> None:
    node = {"Alive": True, "Resources": {"node:__internal_head__": 1}, "NodeManagerAddress": "127.0.0.1"}
    without, silent_one = (RayNode.of({**node, "MetricsExportPort": port}) for port in (-1, 1))
    none = pool_text.exporter([without], None)
    assert (none["url"], none["series"]) == (None, 0)
    assert "ray[default]" in none["why"]
    silent = pool_text.exporter([silent_one], None)
    assert silent["url"] == "http://127.0.0.1:1/metrics"
    assert "does not answer" in silent["why"]
    assert pool_text.exporter([silent_one], "metrics stopped: X")["why"] == "metrics stopped: X"
    assert pool_text.exporter([], None)["url"] is None


# ---- explain ------------------------------------------------------------------------------------------------------


def test_explain_says_why_a_task_waits_and_what_would_have_to_end(
    capsys: pytest.CaptureFixture[str], pool: Pool
) -> None:
    status, out, err = call(capsys, "why", "late")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert re.search(r"^late is waiting for \d+(\.\d+)? s; pool rlhf, priority 0.5", words)
    for part in ("QUOTA: the quota of pool rlhf is short", "2 of 2 in the queue", "would have to end", "deadline in"):
        assert part in words
    assert "QUEUED: just submitted" in words


def test_explain_as_data_has_the_documented_keys(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    data = asked(capsys, "why", evicted(pool))
    assert set(data) == keys_of("trimtab why TASK")
    assert (data["state"], data["evictions"], data["position"], data["queue_length"]) == ("evicted", 1, 1, 2)
    assert data["evicted_s"] > 0
    assert data["deadline"] > data["time"] >= data["since"]
    assert data["story"][0] == {**data["story"][0], "state": "waiting", "code": "QUEUED"}
    assert "LABEL_RULE" in [chapter["code"] for chapter in data["story"]]


def test_explain_says_in_what_a_task_runs_and_who_left_for_it(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    _, out, _ = call(capsys, "why", "train")
    words = " ".join(out.split())
    assert f"PREEMPTED: {evicted(pool)} left for it" in words
    assert "runs in a host" in words or "runs in a warm host" in words
    assert "1 slot on" in words


def test_explain_tells_the_story_of_a_node_by_the_beginning_of_its_id(
    capsys: pytest.CaptureFixture[str], pool: Pool, cluster: Any
) -> None:
    [node] = [one["NodeID"] for one in cluster.nodes()]
    data = asked(capsys, "why", node[:8])
    assert set(data) == keys_of("trimtab why NODE")
    assert (data["node"], data["there"]) == (node, True)
    assert "train" in data["tasks"]
    assert [(chapter["state"], chapter["code"]) for chapter in data["story"]] == [("ready", "JOINED")]
    _, out, _ = call(capsys, "why", node)
    assert "is ready" in out


def test_explain_says_why_a_group_is_not_larger(capsys: pytest.CaptureFixture[str], session: Session) -> None:
    waits = {"code": "NO_NODE", "sentence": "it asks 8 gpu, and no node is large enough"}
    members = [
        {"member": "t-0001", "task": "t-0001", "state": "working", "node": "ab" * 28, "rank": 0, "reason": waits},
        {"member": "t-0002", "task": "t-0002", "state": "pending", "node": None, "rank": None, "reason": waits},
    ]
    facts = {"state": "working", "reason": waits, "deadline": None, "pool": "rlhf", "unit": {"gpu": 8.0}, "size": 1}
    session.ask("publish", "group", "trainers", {**facts, "wanted": 2, "members": members}, session.client)
    try:
        status, out, _ = call(capsys, "why", "trainers")
        words = " ".join(out.split())
        assert status == 0
        for part in ("group trainers is working", "1 work, 2 wanted, limits 1 or more", "8 gpu", "t-0002 pending -"):
            assert part in words
        assert "NO_NODE: it asks 8 gpu, and no node is large enough" in words
        assert asked(capsys, "why", "trainers")["members"] == members
        _, out, _ = call(capsys, "pool", "show")
        assert "trainers rlhf 1 of 2 wanted" in " ".join(out.split())
    finally:
        session.ask("publish", "group", "trainers", None, session.client)


def test_an_unknown_task_is_refused_with_what_was_meant(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    status, out, err = call(capsys, "why", "trian")
    assert (status, out) == (2, "")
    assert "no task trian is known here" in err
    assert "did you mean train?" in err
    status, _, err = call(capsys, "why", "???")
    assert status == 2
    assert "`trimtab task list`" in err


# ---- pool ---------------------------------------------------------------------------------------------------------


def test_pool_list_shows_what_is_used(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    status, out, err = call(capsys, "pool", "list")
    assert (status, err) == (0, "")
    assert re.search(r"rlhf\s+3/3 cpu", out)
    data = asked(capsys, "pool", "list")
    assert set(data) == {"pools"}
    assert set(data["pools"]["rlhf"]) == keys_of("trimtab pool list")


def test_pool_show_has_settings_and_tasks(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    data = asked(capsys, "pool", "show", "rlhf")
    assert set(data) == keys_of("trimtab pool list") | keys_of("trimtab pool show POOL")
    assert data["reserved"] == [{"cpu": 1}]
    assert data["quota"] == {"cpu": 3, "memory": 2**31}
    states = {one["id"]: one["state"] for one in data["tasks"]}
    assert states["train"] == "running"
    assert states["late"] == "waiting"
    status, out, _ = call(capsys, "pool", "show", "rlhf")
    words = " ".join(out.split())
    assert status == 0
    assert "1 cpu (for priority 8 and above)" in words
    assert "1 LABEL_RULE" in words


def test_an_unknown_pool_is_refused_with_what_was_meant(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    for verb in ("show", "drain"):
        status, out, err = call(capsys, "pool", verb, "rlfh")
        assert (status, out) == (2, "")
        assert "there is no pool rlfh" in err
        assert "did you mean rlhf?" in err
    assert "pools: rlhf" in call(capsys, "pool", "show", "zzzzz")[2]


def test_a_drained_pool_starts_nothing_until_it_is_opened_again(
    capsys: pytest.CaptureFixture[str], session: Session
) -> None:
    pool = session.pool("closing", {"cpu": 1})
    status, out, _ = call(capsys, "pool", "drain", "closing")
    assert (status, out) == (0, "pool closing starts nothing new: 0 running, 0 waiting\n")
    task = pool.submit(Actor, resources={"cpu": 1}, id="newcomer")
    assert asked(capsys, "why", "newcomer")["reason"]["code"] == "DRAINED"
    assert "closing (drained)" in call(capsys, "pool", "list")[1]
    data = asked(capsys, "pool", "undrain", "closing")
    assert (data["pool"], data["drained"]) == ("closing", False)
    task.wait("running", timeout=60)
    pool.drop()


# ---- tasks --------------------------------------------------------------------------------------------------------


def test_tasks_are_listed_shown_evicted_and_cancelled(capsys: pytest.CaptureFixture[str], session: Session) -> None:
    pool = session.pool("errands", {"cpu": 1})
    task = pool.submit(Actor, resources={"cpu": 1}, id="errand", labels={"role": "lab"})
    task.wait("running", timeout=60)
    assert [one["id"] for one in asked(capsys, "task", "list", "--pool", "errands")["tasks"]] == ["errand"]
    data = asked(capsys, "task", "show", "errand")
    assert set(data) == keys_of("trimtab task show TASK")
    assert (data["state"], data["labels"]) == ("running", {"role": "lab"})
    [process] = data["processes"]
    os.kill(process["pid"], 0)
    status, out, _ = call(capsys, "task", "show", "errand")
    assert status == 0
    assert str(process["pid"]) in out
    assert call(capsys, "task", "evict", "errand")[0] == 0
    until(lambda: asked(capsys, "task", "show", "errand")["evictions"] == 1)
    assert call(capsys, "task", "cancel", "errand")[0] == 0
    assert task.wait("cancelled", timeout=60) is TaskState.cancelled
    status, _, err = call(capsys, "task", "logs", "errand")
    assert status == 2
    assert "it has no process 0 now" in err
    status, _, err = call(capsys, "task", "cancel", "errant")
    assert status == 2
    pool.drop()


# ---- nothing there ------------------------------------------------------------------------------------------------


def test_a_controller_that_is_not_there_is_not_made(
    capsys: pytest.CaptureFixture[str], cluster: Any, session: Session
) -> None:
    before = cluster.util.list_named_actors(all_namespaces=True)
    for arguments in (["pool", "show"], ["why", "x"], ["pool", "list"], ["pool", "drain", "x"]):
        status, out, err = call(capsys, *arguments, "--name", "nobody")
        assert (status, out) == (4, "")
        assert "no controller nobody" in err
        assert "watched" in err
    names = {one["name"] for one in cluster.util.list_named_actors(all_namespaces=True)}
    assert not [name for name in names if "nobody" in name]
    assert {one["name"] for one in before if one["name"].endswith("controller")} <= names


@pytest.mark.long
def test_among_several_controllers_one_is_named(capsys: pytest.CaptureFixture[str], session: Session) -> None:
    other = connect(name="another")
    try:
        status, _, err = call(capsys, "pool", "show")
        assert status == 4
        assert "--name is one of: another, watched" in err
        assert asked(capsys, "pool", "show", "--name", "another")["controller"]["name"] == "another"
    finally:
        other.shutdown()


def test_another_process_finds_the_cluster_by_its_address(cluster: Any, pool: Pool) -> None:
    address = cluster.get_runtime_context().gcs_address
    for arguments, named, why in (
        (["--address", address], {}, f"the Ray at {address}, as asked"),
        ([], {"RAY_ADDRESS": address}, f"the Ray at {address}, from RAY_ADDRESS"),
    ):
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", "pool", "show", "--format", "json", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**environment, **named},
        )
        assert (done.returncode, done.stderr) == (0, "")
        data = json.loads(done.stdout)
        assert data["ray"]["how"] == why
        assert "rlhf" in data["pools"]


def test_looking_starts_no_cluster() -> None:
    # In a process of its own, where no Ray is found: whatever else runs on this machine.
    code = """
import sys
from ray._private import services
services.find_gcs_addresses = set
from trimtab.cli.app import run
import ray
status = run(sys.argv[1:])
print(status, ray.is_initialized())
"""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    for arguments, why in (
        (["pool", "show"], "RAY_ADDRESS is not set; no Ray runs on this machine"),
        (["pool", "show", "--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.stdout == "4 False\n", done.stderr
        assert why in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, "pool", "show", "--address", "local"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "2 False\n", done.stderr


def test_times_are_said_as_people_say_them() -> None:
    said = [span(seconds) for seconds in (0.03, 9.94, 45.2, 61, 120, 3600, 4000, -5)]
    assert said == ["0.03 s", "9.9 s", "45 s", "1 min 1 s", "2 min", "1 h", "1 h 6 min", "0 s"]


# ---- the page -----------------------------------------------------------------------------------------------------


def table(heading: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the first table under a heading of a page, as lists of cells."""
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def keys_of(command: str) -> set[str]:
    """The keys that the page documents for a command."""
    [row] = [row for row in table("Looking from the command line") if row[0] == f"`{command}`"]
    return set(re.findall(r"`(\w+)`", row[1]))


@pytest.mark.long
def test_the_python_of_the_page_runs_as_it_stands(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for_all: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/guides/pools.md", "exec"), for_all)
    lines = [line for line in capsys.readouterr().out.splitlines() if "(raylet)" not in line]  # Ray's, about what ended
    assert lines[0].startswith("1 ")
    assert "evicted" in lines[1]
    assert lines[2:4] == ["6", "6"]
    assert lines[4].startswith("True ")
    assert lines[4].endswith(" 0")


def test_the_page_lists_exactly_the_states_of_tasks() -> None:
    assert [row[0] for row in table("States")] == [f"`{state.value}`" for state in TaskState]


def test_the_page_lists_exactly_the_codes_of_reasons() -> None:
    rows = [*table("Reasons"), *table("Reasons", NODES_PAGE), *table("Reasons", ROLLOUT_PAGE)]
    rows += table("Reasons", LOOP_PAGE)
    assert [row[0] for row in rows] == [f"`{code.value}`" for code in ReasonCode]


def test_the_page_has_the_gaps_of_every_aggressiveness() -> None:
    assert [row[:3] for row in table("Preemption")] == [
        [f"`{level.name.upper()}`", f"{level.label_gap:.1f}", f"{level.same_pool_gap:.1f}"] for level in Aggressiveness
    ]


def test_the_page_lists_every_metric_with_its_labels() -> None:
    rows = [*table("Metrics"), *table("Metrics", NODES_PAGE)]
    assert [row[:3] for row in rows] == [
        [f"`{metric.exported}`", metric.kind, ", ".join(metric.labels)] for metric in (*METRICS, *FLEET_METRICS)
    ]
