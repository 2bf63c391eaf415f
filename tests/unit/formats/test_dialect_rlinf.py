"""RLinf configs become jobs, and plans become `component_placement` that RLinf accepts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dialect_plans import DATA, composed, plan_of, profile_of
from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.loaded import LoadedJob
from trimtab.plan.placement.planner import plan_placement

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "examples" / "math" / "config" / "qwen2.5-1.5b-grpo-megatron.yaml"

REASONING = """\
cluster:
  num_nodes: 1
  num_gpus_per_node: 8
  component_placement:
    {placement}
algorithm: {{group_size: 8, n_minibatches: 4, recompute_logprobs: true, normalize_advantages: {normalize}}}
data: {{rollout_batch_size: 512}}
rollout: {{tensor_parallel_size: 2, pipeline_parallel_size: 1}}
actor: {{model: {{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}}}
profile_data: {{actor_cost: 95.7, inference_cost: 30.8, rollout_cost: 59.9}}
"""


def reasoning(
    folder: Path, *overrides: str, placement: str = "actor,rollout,reward: all", normalize: str = "true"
) -> LoadedJob:
    return Rlinf.read(composed(folder, REASONING.format(placement=placement, normalize=normalize), *overrides), None)


def test_the_seeds_form_is_read_with_its_costs_at_all_gpus() -> None:
    loaded = Rlinf.read(compose(BUNDLED), None)
    workflow = loaded.job.workflow
    assert workflow.names == ("rollout", "inference", "trainer")
    assert [c.variants[0].seconds[""] for c in workflow.components] == [((8, 59.9),), ((8, 30.8),), ((8, 95.7),)]
    assert workflow.batches == 512
    assert loaded.job.cluster.gpus == 8
    assert all(c.granularity is None for c in workflow.components)


def test_a_shared_plan_of_the_seeds_form_prints_the_seeds_block() -> None:
    loaded = Rlinf.read(compose(BUNDLED), None)
    block = loaded.settings(plan_of({"rollout inference trainer": range(8)})).block
    assert block == (
        "cluster:\n  num_nodes: 1\n  num_gpus_per_node: 8\n  component_placement:\n    rollout,trainer: all\n"
    )


def test_a_minimal_file_with_only_the_cluster_and_the_costs_is_enough(tmp_path: Path) -> None:
    text = (
        "cluster: {num_nodes: 1, num_gpus_per_node: 8}\n"
        "profile_data: {trainer_cost: 95.7, inference_cost: 30.8, rollout_cost: 59.9}\n"
    )
    loaded = Rlinf.read(composed(tmp_path, text), None)
    assert loaded.job.workflow.names == ("rollout", "inference", "trainer")
    assert loaded.current is None
    assert "rollout,trainer: all" in loaded.settings(plan_of({"rollout inference trainer": range(8)})).block


def test_a_shared_plan_places_actor_rollout_and_reward_and_no_inference(tmp_path: Path) -> None:
    settings = reasoning(tmp_path).settings(plan_of({"rollout inference actor": range(8)}))
    assert settings.values == {"cluster.component_placement": {"actor,rollout,reward": "all"}}


def test_a_separate_plan_is_written_with_quoted_ranks_and_the_reward_beside_the_rollout(tmp_path: Path) -> None:
    settings = reasoning(tmp_path).settings(plan_of({"rollout": range(4), "inference": (4, 5), "actor": (6, 7)}))
    assert settings.values["cluster.component_placement"] == {
        "rollout": "0-3",
        "inference": "4-5",
        "actor": "6-7",
        "reward": "0-3",
    }
    assert '    rollout: "0-3"\n    inference: "4-5"\n    actor: "6-7"\n    reward: "0-3"\n' in settings.block


@pytest.mark.parametrize(
    "groups",
    [
        {"rollout": range(4), "inference actor": range(4, 8)},
        {"rollout inference": range(4), "actor": range(4, 8)},
        {"rollout inference actor": range(4)},
    ],
)
def test_mixed_plans_and_sharing_a_part_of_the_gpus_are_refused(tmp_path: Path, groups: dict[str, range]) -> None:
    with pytest.raises(InputError, match="RLinf cannot run this plan"):
        reasoning(tmp_path).settings(plan_of(groups))


def test_sizes_follow_the_parallel_sizes_and_the_mini_batch(tmp_path: Path) -> None:
    workflow = reasoning(tmp_path, "cluster.num_nodes=3").job.workflow
    assert workflow.component("rollout").variants[0].multiple_of == 2
    # 128 groups a mini-batch: data-parallel sizes 1, 2, 4, 8; and 24 GPUs, where the profile was taken.
    assert workflow.component("actor").variants[0].gpus == (2, 4, 8, 16, 24)


def test_without_recomputed_log_probs_there_is_no_inference(tmp_path: Path) -> None:
    loaded = reasoning(tmp_path, "algorithm.recompute_logprobs=false", "~profile_data.inference_cost")
    assert loaded.job.workflow.names == ("rollout", "actor")


def test_separate_plans_stream_by_mini_batches_where_advantages_are_not_normalised(tmp_path: Path) -> None:
    apart = 'rollout: "0-3"\n    inference: "4-5"\n    actor: "6-7"\n    reward: "0-3"'
    for loaded in (reasoning(tmp_path, placement=apart, normalize="false"), reasoning(tmp_path, normalize="false")):
        assert [c.granularity for c in loaded.job.workflow.components] == [1, 1, 128]
        assert any(a.startswith("streaming") for a in loaded.assumptions)
    other = reasoning(tmp_path, placement=apart)
    assert [c.granularity for c in other.job.workflow.components] == [None, None, None]
    assert any(a.startswith("no streaming") for a in other.assumptions)


def test_the_current_placement_is_read_and_the_actor_does_the_inference_when_shared(tmp_path: Path) -> None:
    current = reasoning(tmp_path).current
    assert current is not None
    assert dict(current.ranks) == {name: tuple(range(8)) for name in ("rollout", "actor", "inference")}


@pytest.mark.parametrize(
    ("placement", "what"),
    [
        ('actor: "0-4"\n    rollout: "4-7"\n    reward: "4-7"', "overlap on GPU 4"),
        ('actor: "0-3"\n    rollout: "4-9"\n    reward: all', "names GPU 8-9"),
        ('actor: "0-3"\n    rollout: "7-4"\n    reward: all', "runs down from GPU 7 to GPU 4"),
        ('actor: "0-3"\n    rollout: "6,5"\n    reward: all', "goes down at GPU 5"),
        ('actor: "0-3"\n    rollout: "4-6,6-7"\n    reward: all', "names GPU 6 twice"),
        ('actor: "0-3"\n    rollout: "4-7:all"\n    reward: all', "processes"),
        ('actor: "0-3"\n    rollout: "4-7:0-2"\n    reward: all', "evenly"),
        ('actor: "0-3"\n    rollout: four\n    reward: all', "cannot be understood"),
        ('actor: "0,2"\n    rollout: "4-7"\n    reward: all', "gaps"),
        ("actor: 4:0\n    rollout: 0-3\n    reward: all", "names GPU 240"),
        ('actor: "0-3"\n    actor,rollout: "4-7"', "placed twice"),
        ("actor: {node_group: a800, placement: 0-3}\n    rollout: 0-3", "node group"),
        ("actor: [1, 2]\n    rollout: 0-3", "a placement is"),
    ],
)
def test_an_invalid_placement_is_an_error_that_names_the_gpus(tmp_path: Path, placement: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        reasoning(tmp_path, placement=placement)
    assert "cluster.component_placement" in str(caught.value.where)
    if "4:0" in placement:
        assert "quotes" in str(caught.value.hint)


def test_costs_in_profile_data_may_be_points_of_gpus_and_seconds(tmp_path: Path) -> None:
    loaded = reasoning(tmp_path, "profile_data.rollout_cost={4: 100, 8: 59.9}")
    by_name = {c.name: c.variants[0].seconds[""] for c in loaded.job.workflow.components}
    assert by_name["rollout"] == ((4, 100.0), (8, 59.9))
    assert by_name["actor"] == ((8, 95.7),)
    answer = plan_placement(loaded.job, loaded.rules, current=loaded.current)
    assert answer.scaling is not None
    assert answer.scaling.components == ("inference", "actor")
    with pytest.raises(InputError, match="no pair of GPUs"):
        reasoning(tmp_path, "profile_data.rollout_cost={0: 100}")


def test_a_critic_and_a_reward_with_costs_are_part_of_the_plan(tmp_path: Path) -> None:
    costs = ("+profile_data.critic_cost=40", "+profile_data.reward_cost=6")
    loaded = reasoning(tmp_path, *costs, placement="actor,critic,rollout,reward: all")
    workflow = loaded.job.workflow
    assert workflow.component("reward").cpu_seconds == 6.0
    assert workflow.component("critic").variants[0].seconds[""] == ((8, 40.0),)
    assert workflow.component("actor").after == ("critic", "reward")
    plan = plan_placement(loaded.job, loaded.rules, current=loaded.current).best
    assert plan.iteration_seconds == pytest.approx(95.7 + 30.8 + 59.9 + 40)
    assert list(loaded.settings(plan).values["cluster.component_placement"]) == ["actor,critic,rollout,reward"]


def test_a_reward_model_with_a_cost_stays_with_the_rollout(tmp_path: Path) -> None:
    loaded = reasoning(
        tmp_path, "+profile_data.reward_cost=6", "+reward.use_reward_model=true", "profile_data.actor_cost={1: 9, 8: 8}"
    )
    assert loaded.rules is not None
    assert [group.components for group in loaded.rules.groupings[1]] == [
        frozenset({"rollout", "reward"}), frozenset({"inference"}), frozenset({"actor"}),
    ]  # fmt: skip
    plan = plan_of({"rollout reward": range(4), "inference": range(4, 6), "actor": range(6, 8)})
    placement = loaded.settings(plan).values["cluster.component_placement"]
    assert placement == {"rollout": "0-3", "inference": "4-5", "actor": "6-7", "reward": "0-3"}


@pytest.mark.parametrize(
    ("key", "near"), [("rolout_cost", "rollout_cost"), ("infer_cost", "inference_cost"), ("gpu", "gpus")]
)
def test_an_unknown_key_of_profile_data_is_refused_with_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    with pytest.raises(InputError, match=f"no key {key}") as caught:
        reasoning(tmp_path, f"+profile_data.{key}=3")
    assert near in str(caught.value.hint)


def test_missing_profile_data_says_how_to_add_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="profile_data is missing") as caught:
        reasoning(tmp_path, "~profile_data")
    assert "profile_data: {actor_cost" in str(caught.value.hint)
    assert str(caught.value.where).endswith("job.yaml: profile_data")


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("~profile_data.actor_cost", "actor_cost is missing"),
        ("~profile_data.inference_cost", "inference_cost is missing"),
        ("profile_data.rollout_cost=-1", "finite"),
        ("profile_data.rollout_cost=nan", "finite"),
        ("profile_data.rollout_cost=inf", "finite"),
        ("+profile_data.trainer_cost=3", "two names"),
        ("algorithm.n_minibatches=3", "mini-batches"),
        ("cluster.num_nodes=0", "above 0"),
    ],
)
def test_each_fault_in_the_costs_has_its_own_error(tmp_path: Path, override: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        reasoning(tmp_path, override)


def test_gpus_per_node_come_from_the_file_the_placement_or_the_command_line_and_are_never_guessed(
    tmp_path: Path,
) -> None:
    apart = 'rollout: "0-1"\n    inference: "2"\n    actor: "3"\n    reward: "0"'
    assert reasoning(tmp_path, "~cluster.num_gpus_per_node", placement=apart).job.cluster.gpus == 4
    shared = REASONING.format(placement="actor,rollout,reward: all", normalize="true").replace(
        "  num_gpus_per_node: 8\n", ""
    )
    with pytest.raises(InputError, match="not stated") as caught:
        Rlinf.read(composed(tmp_path, shared), None)
    assert "++cluster.num_gpus_per_node=8" in str(caught.value.hint)
    assert Rlinf.read(composed(tmp_path, shared, "+cluster.num_gpus_per_node=4"), None).job.cluster.gpus == 4


def test_a_critic_without_a_cost_keeps_everything_shared(tmp_path: Path) -> None:
    loaded = reasoning(tmp_path, placement="actor,critic,rollout,reward: all")
    settings = loaded.settings(plan_of({"rollout inference actor": range(8)}))
    assert settings.values["cluster.component_placement"] == {"actor,critic,rollout,reward": "all"}
    with pytest.raises(InputError, match="cannot run"):
        loaded.settings(plan_of({"rollout": range(4), "inference": (4, 5), "actor": (6, 7)}))


def test_the_dynamic_scheduler_is_turned_off_for_a_fixed_plan(tmp_path: Path) -> None:
    settings = reasoning(tmp_path, "+cluster.auto_scheduler=true").settings(
        plan_of({"rollout inference actor": range(8)})
    )
    assert settings.values["cluster.auto_scheduler"] is False
    assert settings.advice


def test_a_measured_profile_replaces_profile_data_and_waits_are_refused(tmp_path: Path) -> None:
    text = REASONING.format(placement="actor,rollout,reward: all", normalize="true")
    measured = {"rollout": {4: 100.0, 8: 60.0}, "inference": {8: 30.0}, "actor": {8: 90.0}, "weight_sync": {8: 2.5}}
    loaded = Rlinf.read(composed(tmp_path, text), profile_of(measured))
    assert loaded.job.workflow.component("rollout").variants[0].seconds[""] == ((4, 100.0), (8, 60.0))
    assert loaded.job.workflow.weight_sync is not None
    assert loaded.job.workflow.weight_sync.separate_seconds == 2.5
    with pytest.raises(InputError, match="a wait, not a cost"):
        Rlinf.read(composed(tmp_path, text), profile_of(measured, waits=["rollout"]))


def test_the_correction_of_importance_sampling_needs_inference_too(tmp_path: Path) -> None:
    plain = ("algorithm.recompute_logprobs=false",)
    assert reasoning(tmp_path, *plain).job.workflow.names == ("rollout", "actor")
    fixed = (*plain, "+algorithm.importance_sampling_fix=true")
    assert reasoning(tmp_path, *fixed).job.workflow.names == ("rollout", "inference", "actor")


COLLOCATED = """\
cluster:
  num_nodes: 1
  num_gpus_per_node: 8
  component_placement:
    actor,rollout,reward: all
runner:
  task_type: reasoning
algorithm: {{group_size: 8, n_minibatches: 4, recompute_logprobs: true, normalize_advantages: true}}
data: {{rollout_batch_size: 512}}
rollout:
  tensor_parallel_size: 2
  model: {{model_path: /models/qwen, model_type: qwen2.5}}
actor:
  training_backend: {backend}
  model: {{{model}}}
  tokenizer: {{tokenizer_model: /models/qwen}}
  {backend}_config: {{strategy: one}}
"""
MEASURED = {"rollout": {8: 60.0}, "inference": {8: 10.0}, "actor": {8: 40.0}}


@pytest.mark.parametrize(
    ("backend", "model", "has"),
    [
        (
            "megatron",
            "tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, sequence_parallel: true",
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "sequence_parallel": True},
        ),
        ("fsdp", "model_path: /models/qwen, precision: fp32", {"model_path": "/models/qwen", "precision": "fp32"}),
    ],
)
@pytest.mark.parametrize("written_as", ["file", "overrides"])
def test_inference_on_gpus_of_its_own_gets_the_section_that_its_workers_read(
    backend: str, model: str, has: dict[str, object], written_as: str, tmp_path: Path
) -> None:
    job = composed(tmp_path, COLLOCATED.format(backend=backend, model=model))
    loaded = Rlinf.read(job, profile_of(MEASURED))
    apart = plan_of({"rollout": range(4), "inference": range(4, 6), "actor": range(6, 8)})
    settings = loaded.settings(apart)
    overrides = write_back.overrides(settings) if written_as == "overrides" else []
    if written_as == "file":
        write_back.apply(job.path, settings, job.literal, job.states)
    config = compose(job.path, overrides).config
    assert config["cluster"]["component_placement"]["inference"] == "4-5"
    assert config["inference"]["group_name"] == "InferenceGroup"
    assert config["inference"]["load_from_actor"] is True
    assert {key: config["inference"]["model"][key] for key in has} == has
    assert config["inference"]["tokenizer"] == {"tokenizer_model": "/models/qwen"}
    assert ("fsdp_config" in config["inference"]) == (backend == "fsdp")
    again = Rlinf.read(compose(job.path, overrides), profile_of(MEASURED))
    assert again.current is not None
    assert again.current.ranks["inference"] == (4, 5)
    assert set(again.settings(apart).values) == {"cluster.component_placement"}  # nothing is missing any more


def test_the_embodied_form_turns_environments_per_instance_into_gpus() -> None:
    loaded = Rlinf.read(compose(DATA / "rlinf_embodied.yaml"), None)
    workflow = loaded.job.workflow
    assert workflow.names == ("env", "rollout", "actor")
    assert workflow.component("env").variants[0].seconds[""] == ((2, 70.0), (4, 36.0), (8, 20.0))
    assert workflow.component("env").variants[0].gpus == (2, 4, 8)  # 64 divides, and no more than 32 an instance
    assert workflow.component("rollout").variants[0].gpus == tuple(range(1, 9))
    assert workflow.component("actor").variants[0].seconds[""] == ((8, 30.0),)


def test_environments_that_belong_to_no_whole_gpu_are_interpolated() -> None:
    loaded = Rlinf.read(compose(DATA / "rlinf_embodied.yaml", ["data.env_num=40"]), None)
    points = dict(loaded.job.workflow.component("env").variants[0].seconds[""])
    assert points[5] == 20.0
    assert points[4] == pytest.approx(20 + 16 * 2 / 8)  # 10 environments an instance, between 8 and 16


def test_any_grouping_of_the_embodied_form_is_written() -> None:
    loaded = Rlinf.read(compose(DATA / "rlinf_embodied.yaml"), None)
    mixed = loaded.settings(plan_of({"env rollout": range(4), "actor": range(4, 8)}))
    assert mixed.values["cluster.component_placement"] == {"env,rollout": "0-3", "actor": "4-7"}
    shared = loaded.settings(plan_of({"env rollout actor": range(8)}))
    assert shared.values["cluster.component_placement"] == {"env,rollout,actor": "all"}
    with pytest.raises(InputError, match="cannot have 3 GPUs"):
        loaded.settings(plan_of({"env rollout": range(3), "actor": range(3, 8)}))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("~profile_data", "profile_data is missing"),
        ("~profile_data.env_profile_data", "env_profile_data is missing"),
        ("profile_data.env_profile_data={8: -1}", "no pair"),
        ("profile_data.actor_cost=nan", "finite"),
        ("~data.env_num", "env_num is missing"),
        ("data.env_num=60000", "more per instance"),
    ],
)
def test_faults_of_the_embodied_form_have_their_own_errors(override: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        Rlinf.read(compose(DATA / "rlinf_embodied.yaml", [override]), None)


def test_the_seeds_script_calls_the_planner_on_the_bundled_config_from_anywhere(tmp_path: Path) -> None:
    script = tmp_path / "examples" / "math" / "run_placement_autotune.sh"
    script.parent.mkdir(parents=True)
    script.write_bytes((ROOT / "examples" / "math" / "run_placement_autotune.sh").read_bytes())
    fake = tmp_path / "trimtab"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for file in (script, fake):
        file.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*args: str) -> list[str]:
        done = subprocess.run([script, *args], cwd="/", env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    default = str(script.parent / "config" / "qwen2.5-1.5b-grpo-megatron.yaml")
    assert run() == ["plan", default]
    assert run("mine", "--format", "json") == [
        "plan",
        default.replace("qwen2.5-1.5b-grpo-megatron", "mine"),
        "--format",
        "json",
    ]
