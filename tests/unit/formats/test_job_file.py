"""trimtab's own job file: what it says, and what is wrong with it."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats import yaml_text
from trimtab.formats.load import load
from trimtab.model.workflow import PlacementJob
from trimtab.plan.placement.planner import best_plan, plan_placement

WHOLE = """\
cluster:
  nodes: 2
  gpus_per_node: 8
  gpu: H100
  gpu_memory_gb: 80
workflow:
  batches: 512
  staleness: 0
  components:
    rollout:
      seconds: {16: 59.9}
      gpus: [1, 2, 4, 8, 16]
      completion: [[0.5, 0.3], [0.95, 0.6], [1.0, 1.0]]
      floor_seconds: 24
      memory_gb: {active: 60, resident: 4}
      host_memory_gb: 30
      switch_seconds: 2.0
      engine: vllm
    inference: {seconds: {"16": 30.8}, multiple_of: 2, after: [rollout], engine: megatron}
    trainer:
      after: [inference]
      granularity: 128
      engine: megatron
      variants:
        - {name: tp2, multiple_of: 2, seconds: {4: 300, 8: 160, 16: 95.7}, memory_gb: {active: 70, resident: 6}}
        - {name: tp4, multiple_of: 4, seconds: {4: 280, 8: 170, 16: 110}, memory_gb: {active: 45, resident: 4}}
    reward: {device: cpu, cpus: 32, seconds: 3.0, after: [rollout]}
  weight_sync: {from: trainer, to: rollout, shared_seconds: 1.0, separate_seconds: 4.0}
"""


def read(text: str, tmp_path: Path, *overrides: str) -> PlacementJob:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load(path, overrides).job


def test_the_documented_example_is_read_whole(tmp_path: Path) -> None:
    job = read(WHOLE, tmp_path)
    rollout, inference, trainer, reward = job.workflow.components
    assert job.cluster.gpus == 16
    assert job.cluster.kinds == ("H100",)
    assert rollout.variants[0].points("H100") == ((16, 59.9),)
    assert rollout.variants[0].gpus == (1, 2, 4, 8, 16)
    assert rollout.variants[0].floor_seconds == 24
    assert rollout.completion == ((0.5, 0.3), (0.95, 0.6), (1.0, 1.0))
    assert inference.variants[0].points("H100") == ((16, 30.8),)
    assert [v.name for v in trainer.variants] == ["tp2", "tp4"]
    assert trainer.granularity == 128
    assert reward.on_cpu
    assert reward.cpu_seconds == 3.0
    assert plan_placement(job).optimal


def test_nodes_may_be_listed_and_costs_stated_for_each_kind(tmp_path: Path) -> None:
    text = """\
cluster:
  nodes:
    - {name: big, gpus: 8, gpu: H100, gpu_memory_gb: 80, host_memory_gb: 1024, cpus: 96}
    - {gpus: 4, gpu: H20}
workflow:
  components:
    rollout: {seconds: {H100: {8: 60}, H20: {4: 90, 8: 50}}}
    trainer: {seconds: {8: 95}, after: rollout, granularity: all}
"""
    job = read(text, tmp_path)
    assert [node.name for node in job.cluster.nodes] == ["big", "node1"]
    assert job.workflow.components[0].variants[0].points("H20") == ((4, 90.0), (8, 50.0))
    assert job.workflow.components[1].granularity is None


@pytest.mark.parametrize(
    ("memory", "at_2", "at_4"),
    [
        ("60", 60, 60),
        ("{active: 60}", 60, 60),
        ("{active: {2: 60, 4: 30}}", 60, 30),
        ("{sharded: 100, per_gpu: 5, resident: 2}", 55, 30),
    ],
)
def test_memory_has_three_forms(memory: str, at_2: float, at_4: float, tmp_path: Path) -> None:
    job = read(
        f"""\
cluster: {{gpus_per_node: 4}}
workflow:
  components:
    a: {{seconds: {{4: 1}}, memory_gb: {memory}}}
    b: {{seconds: {{4: 1}}, after: [a]}}
""",
        tmp_path,
    )
    active = job.workflow.components[0].variants[0].memory.active
    assert (active.at(2), active.at(4)) == (at_2, at_4)


def test_overrides_change_keys_and_are_checked_like_the_file(tmp_path: Path) -> None:
    job = read(WHOLE, tmp_path, "cluster.nodes=4", "workflow.components.rollout.seconds={32: 40}")
    assert job.cluster.gpus == 32
    assert job.workflow.components[0].variants[0].points("H100") == ((32, 40.0),)
    for wrong in ("cluster.nodez=4", "nonsense", "=3", "cluster.nodes.x=3", "workflow.batches=[", "a..b=1"):
        with pytest.raises(InputError):
            read(WHOLE, tmp_path, wrong)


def broken(path: str, value: Any) -> str:
    data = yaml_text.parse(WHOLE, "whole")
    place = data
    *parents, last = path.split("/")
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return yaml_text.dump(data)


ROLLOUT = "workflow/components/rollout"

FAULTS = [
    (f"{ROLLOUT}/secondz", {16: 1}, "unknown key secondz", "did you mean seconds?"),
    ("workflow/weight_sync/separat_seconds", 1, "unknown key separat_seconds", "did you mean separate_seconds?"),
    ("cluster/gpus_pernode", 1, "unknown key gpus_pernode", "did you mean gpus_per_node?"),
    ("clutser", {}, "unknown key clutser", "did you mean cluster?"),
    ("workflow/components/trainer/variants/0/multiple_off", 2, "unknown key multiple_off", "multiple_of"),
    (f"{ROLLOUT}/memory_gb/actve", 2, "unknown key actve", "active"),
    (f"{ROLLOUT}/seconds", None, "no cost is stated", "workflow.components.rollout.seconds"),
    (f"{ROLLOUT}/seconds", {16: -1.0}, "is not right: -1.0", "rollout.seconds.16"),
    (f"{ROLLOUT}/seconds", {16: float("nan")}, "is not right", "a number of 0 or more"),
    (f"{ROLLOUT}/seconds", {16: float("inf")}, "is not right", "a number of 0 or more"),
    (f"{ROLLOUT}/seconds", {0: 3.0}, "is not right", "a whole number of 1 or more"),
    (f"{ROLLOUT}/seconds", 59.9, "on how many GPUs", "write seconds: {16: 59.9}"),
    (f"{ROLLOUT}/seconds", {}, "points", "rollout.seconds"),
    (f"{ROLLOUT}/seconds", {"H10": {16: 3.0}}, "the cluster has no H10", "H100"),
    (f"{ROLLOUT}/floor_seconds", 100, "the floor of 100 s is above a measured 59.9 s", "floor_seconds"),
    (f"{ROLLOUT}/completion", [[0.5, 0.6], [0.4, 0.7], [1.0, 1.0]], "completion must rise", "completion"),
    (f"{ROLLOUT}/completion", [[0.5, 0.6]], "completion must end at", "completion"),
    (f"{ROLLOUT}/gpus", [0], "is not right", "gpus"),
    (f"{ROLLOUT}/after", ["trainer"], "in a circle", "workflow.components"),
    (f"{ROLLOUT}/after", ["rollout"], "cannot come after itself", "after"),
    ("workflow/components/trainer/after", ["infrence"], "no component named infrence", "did you mean inference?"),
    ("workflow/components/reward/gpus", [4], "gpus is for GPU components", "reward.gpus"),
    ("workflow/components/reward/seconds", {4: 2.0}, "its `seconds` is one number", "reward.seconds"),
    ("workflow/components", {"only": {"seconds": {4: 1.0}}}, "2 to 8 components, this one has 1", "components"),
    ("workflow/weight_sync/from", "reward", "reward runs on CPUs", "weight_sync.from"),
    ("workflow/weight_sync/to", "trainer", "from one component to another", "weight_sync"),
    ("workflow/batches", 0, "is not right", "batches"),
    ("workflow/batches", True, "is not right", "not true or false"),
    ("workflow", None, "workflow is missing", "workflow"),
    ("cluster/gpus_per_node", None, "how many GPUs a node has is not stated", "gpus_per_node"),
    ("placement", {"rollout": "0-3", "roll": "4-7"}, "no component named roll", "did you mean rollout?"),
    ("placement", {"rollout": "7-3"}, "cannot be understood", "placement.rollout"),
    ("placement", {"rollout": "0-3,3"}, "names GPU 3 twice", "placement.rollout"),
    ("placement", {"rollout": "0", "rollout,trainer": "1"}, "placed twice", "placement"),
]


@pytest.mark.parametrize(("path", "value", "what", "also"), FAULTS, ids=[f[2] for f in FAULTS])
def test_each_fault_has_its_own_error(path: str, value: Any, what: str, also: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(broken(path, value), tmp_path)
    assert what in str(error.value)
    assert also in str(error.value)
    assert "job.yaml" in str(error.value)
    assert len(error.value.lines()) <= 3


def test_staleness_without_a_sync_is_refused(tmp_path: Path) -> None:
    data = yaml_text.parse(WHOLE, "whole")
    del data["workflow"]["weight_sync"]
    data["workflow"]["staleness"] = 1
    with pytest.raises(InputError, match="staleness is counted between"):
        read(yaml_text.dump(data), tmp_path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1, 2", "not valid YAML"),
        ("a: 1\na: 2", "not valid YAML"),
        ("- 1\n- 2", "holds list"),
        ("", "holds nothing"),
        ("just text", "holds str"),
        ("\tx: 1", "not valid YAML"),
    ],
)
def test_files_that_are_no_job_say_what_they_are(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=what):
        read(text, tmp_path)


def test_a_file_that_is_not_text_or_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    with pytest.raises(InputError, match="there is no file"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load(path)
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)
    path.write_bytes(b"#" * (yaml_text.MAX_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        load(path)


WORDS = (
    "cluster nodes gpus_per_node gpu workflow batches staleness components rollout trainer seconds gpus after "
    "granularity completion memory_gb active resident variants name device cpus weight_sync from to placement "
    "profile_data defaults policy actor_rollout_ref runner"
)


@pytest.mark.parametrize(
    "text",
    [
        "cluster: &a {nodes: *a}\nworkflow: {components: {}}",
        "workflow: &w {components: *w}\ncluster: {gpus_per_node: 8}",
        "workflow: {}\nx: &a [1, 1]\n"
        + "\n".join(f"x{i}: &a{i} [*a{i - 1 if i else ''}, *a{i - 1 if i else ''}]" for i in range(40)),
    ],
)
def test_aliases_without_end_are_only_an_error(text: str, tmp_path: Path) -> None:
    for overrides in ((), ("workflow.batches=3", "cluster.nodes=2")):
        with pytest.raises(InputError):
            read(text, tmp_path, *overrides)


KEYS = st.sampled_from(WORDS.split(" "))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 70_000),
        st.floats(),
        st.sampled_from(["all", "cpu", "0-3", "${oc.env:NOT_THERE}", "${a.b}", "rollout", "trainer", "4:0"]),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, st.integers(-2, 20)), inner, max_size=5)
    ),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.dictionaries(KEYS, VALUES, max_size=6), mutate=st.tuples(KEYS, VALUES), whole=st.booleans())
def test_no_file_makes_anything_but_a_clear_error(
    data: dict[str, Any], mutate: tuple[str, Any], whole: bool, tmp_path: Path
) -> None:
    if whole:
        data = copy.deepcopy(yaml_text.parse(WHOLE, "whole"))
        data["workflow"]["components"]["rollout"][mutate[0]] = mutate[1]
    path = tmp_path / "job.yaml"
    path.write_text(yaml_text.dump(data))
    with suppress(TrimtabError):
        best_plan(load(path).job)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=60), st.text("{}[]:,-&*!|>'\"%@` \n\tab01", max_size=40)))
def test_no_text_makes_anything_but_a_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(TrimtabError):
        load(path)
