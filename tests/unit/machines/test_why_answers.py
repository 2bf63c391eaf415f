"""What `trimtab why` says to people and programs, and whether a job would fit: from made facts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.formats.load import load
from trimtab.machines.diagnose.snapshot import GcsSnapshot, NodeSnapshot, NonRayGpuUser, PendingWorkload, RayJob
from trimtab.machines.diagnose.why import diagnose
from trimtab.machines.diagnose.would_fit import KIND_LABEL, WouldFit, would_fit
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.render.text import why as why_text
from why_world import NOW, actor, group, holds, node, request, snapshot

JOB = """
cluster: {nodes: 2, gpus_per_node: 4KIND}
workflow:
  batches: 8
  components:
    rollout: {seconds: {4: 10}, gpus: [4]}
    reward: {after: [rollout], device: cpu, cpus: 6, seconds: 1}
    trainer: {after: [rollout], seconds: {4: 10}, gpus: [4], multiple_of: 4}
"""


def said(seen: GcsSnapshot, capsys: pytest.CaptureFixture[str]) -> str:
    why_text.print_why(seen, diagnose(seen))
    return capsys.readouterr().out


# ---- for people -----------------------------------------------------------------------------------------------------


def test_the_cause_comes_first_then_the_nodes_then_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    seen = snapshot(
        [node("n1", gpu=2), node("n2", gpu=2), node("head", cpu=1)],
        [actor("wide", gpu=2)],
        [holds("x", "n1", gpu=1), holds("y", "n2", gpu=1)],
        jobs=(RayJob("job", "python train.py", 77, "10.0.0.1"),),
    )
    assert said(seen, capsys).splitlines()[2:] == [
        "WAITS   actor wide, 2 gpu for 1 min",
        "        FRAGMENTED: 2 of 4 gpu are free on 2 nodes, but in pieces: no node has 2 gpu at once; "
        "n1 comes nearest and lacks 1 gpu",
        "        node  free        lacks now",
        "        n1    1 of 2 gpu  1 gpu",
        "        n2    1 of 2 gpu  1 gpu",
        "        1 other node has no gpu",
        "        helps  actor x, which holds 1 gpu, ends",
        "",
        "requested by python train.py (process 77 on 10.0.0.1)",
    ]


def test_long_lists_are_cut_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node(f"n{i:02}", gpu=1) for i in range(20)]
    text = said(snapshot(nodes, [actor(f"w{i}", class_name="W", gpu=2) for i in range(9)]), capsys)
    assert "9 actors w0, w1, w2, w3 and 5 more, 2 gpu each" in text
    assert "and 12 nodes more: --format json has all" in text


def test_whose_each_wait_is_stands_beside_it_where_there_are_several_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = (RayJob("a", "python a.py", 1, "h"), RayJob("b", "python b.py", 2, "h"))
    waiting = [actor("x", gpu=9, job="a"), actor("y", gpu=8, job="b")]
    text = said(snapshot([node("n1", gpu=1)], waiting, jobs=jobs), capsys)
    assert "        requested by python a.py" in text
    assert "        requested by python b.py" in text


def test_times_that_ray_does_not_tell_are_said_to_be_unknown_or_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = actor("x", gpu=9, since=None)
    assert "for an unknown time" in said(snapshot([node("n1", gpu=1)], [unknown]), capsys)
    watched = replace(unknown, since=NOW - 90, at_least=True)
    assert "for at least 1 min 30 s" in said(snapshot([node("n1", gpu=1)], [watched]), capsys)


def test_names_are_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [actor("[red]x[/red]", gpu=9)]
    seen = snapshot([node("[bold]n", gpu=1)], waiting, non_ray_gpu_users=(NonRayGpuUser("[bold]n", 0, 5, "sh [/x]"),))
    text = said(seen, capsys)
    for name in ("[red]x[/red]", "[bold]n", "sh [/x]"):
        assert name in text


def test_the_headline_counts_what_waits_what_never_can_and_what_is_under_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = [group("g", request(gpu=1), request(gpu=9)), actor("soon", gpu=1)]
    text = said(replace(snapshot([node("n1", gpu=1)], waiting), address="h:6379"), capsys)
    assert text.startswith("2 wait, 1 can never start on this cluster, 1 starting (h:6379, 1 node)\n")
    assert "placement group g (2 bundles, PACK)" in text


# ---- for programs ---------------------------------------------------------------------------------------------------


def test_data_is_plain_and_has_everything_that_text_has() -> None:
    seen = snapshot([node("n1", gpu=2, drain=30, labels={"zone": "a"})], [actor("w", gpu=4, zone="a")])
    data = json.loads(json.dumps(why_text.as_data(seen, diagnose(seen)), allow_nan=False))
    assert (data["status"], data["waits"], data["never"]) == ("never", 1, 1)
    (found,) = data["findings"]
    assert found["who"][0]["asks"] == [{"amounts": {"gpu": 4}, "labels": [["zone=a"]], "node": None}]
    assert found["nodes"][0]["lacks_when_empty"] == {"gpu": 2}
    assert data["nodes"][0]["draining"] == {"deadline": NOW + 30, "cause": ""}
    assert found["waits_s"] == 60


@pytest.mark.parametrize(("waiting", "status"), [([], "nothing waits"), ([actor("a", gpu=1)], "waits")])
def test_the_status_says_whether_anything_waits(waiting: list[PendingWorkload], status: str) -> None:
    seen = snapshot([node("n1", gpu=1)], waiting)
    assert why_text.as_data(seen, diagnose(seen))["status"] == status


# ---- would it fit ---------------------------------------------------------------------------------------------------


def checked(folder: Path, nodes: list[NodeSnapshot], kind: str = "") -> WouldFit:
    path = folder / "job.yaml"
    path.write_text(JOB.replace("KIND", f", gpu: {kind}" if kind else ""))
    loaded = load(path)
    space, outcome = best_plan(loaded.job, loaded.rules)
    assert outcome.best is not None
    return would_fit("job.yaml", loaded.job, to_plan(space, outcome.best), snapshot(nodes))


def test_a_plan_that_fits_is_told_where_each_group_would_be(tmp_path: Path) -> None:
    found = checked(tmp_path, [node("n1", gpu=4, cpu=8), node("n2", gpu=4, cpu=8)])
    assert (found.now, found.ever, found.finding) == (True, True, None)
    assert {one.group.name: len(one.nodes) for one in found.groups if one.group.gpus} == {"rollout": 1, "trainer": 1}


def test_gpus_of_one_model_copy_have_to_be_on_one_node(tmp_path: Path) -> None:
    found = checked(tmp_path, [node(f"n{i}", gpu=2, cpu=8) for i in range(4)])
    assert not found.ever
    assert [str(one.lacks_ever) for one in found.groups if not one.ever] == ["4 gpu"]


def test_a_plan_that_others_are_in_the_way_of_would_fit_later(tmp_path: Path) -> None:
    taken = [node("n1", {"gpu": 4}, gpu=4, cpu=8), node("n2", gpu=4, cpu=8)]
    found = checked(tmp_path, [*taken, node("going", gpu=8, drain=60)])
    assert (found.now, found.ever) == (False, True)
    assert found.finding is not None
    assert not found.finding.never


def test_cpu_components_ask_their_cpus(tmp_path: Path) -> None:
    found = checked(tmp_path, [node("n1", gpu=8, cpu=4)])
    lacking = [one for one in found.groups if not one.ever]
    assert [(one.group.name, str(one.lacks_ever)) for one in lacking] == [("reward", "2 cpu")]


def test_the_kind_of_gpu_counts_where_nodes_tell_it_and_is_noted_where_not(tmp_path: Path) -> None:
    kinds = {"labels": {KIND_LABEL: "H200"}}
    nodes = [node("n1", gpu=8, cpu=8, **kinds), node("n2", gpu=8, cpu=8, **kinds)]
    assert checked(tmp_path, nodes, "H200").now
    other = checked(tmp_path, nodes, "H100")
    assert not other.ever
    assert other.finding is not None
    assert other.finding.cause.value == "NO_LABEL"
    unsaid = checked(tmp_path, [node("n1", gpu=8, cpu=8)], "H100")
    assert unsaid.now
    assert "was not checked" in unsaid.notes[0]


def test_a_job_that_never_fits_says_which_group_and_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = snapshot([node("n1", gpu=3, cpu=8)])
    found = checked(tmp_path, list(seen.nodes))
    why_text.print_would_fit(seen, "job.yaml", "rollout 4 | trainer 4", found)
    text = capsys.readouterr().out
    assert text.startswith("job.yaml never fits")
    assert "lacks 1 gpu" in text
    data = why_text.would_fit_data(seen, "job.yaml", "plan", found)
    assert (data["fits_ever"], data["finding"]["never"]) == (False, True)
    json.dumps(data, allow_nan=False)
