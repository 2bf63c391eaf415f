"""Framework configs are read as Hydra and OmegaConf mean them, and only what is read may fail."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dialect_plans import DATA, composed, profile_of
from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.nemo_rl import NemoRl
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.frameworks.verl import Verl
from trimtab.formats.load import load
from trimtab.model.workflow import ComponentProfile, Profile

TRAIN = DATA / "hydra" / "train.yaml"


def test_a_defaults_list_is_composed_from_the_files_own_folder() -> None:
    reader = compose(TRAIN).reader
    assert reader.get("model.layers") == 12
    assert reader.get("cluster.gpus") == 4


def test_a_config_group_can_be_chosen_on_the_command_line() -> None:
    assert compose(TRAIN, ["model=large", "cluster.num_nodes=3"]).reader.get("cluster.gpus") == 8


def test_an_unresolved_interpolation_matters_only_when_it_is_read() -> None:
    reader = compose(TRAIN).reader
    assert reader.count("cluster.num_nodes") == 2
    for key in ("paths.out", "paths.tuned"):
        assert reader.has(key)
        with pytest.raises(InputError, match="cannot be resolved") as caught:
            reader.get(key)
        assert caught.value.where == f"{TRAIN}: {key}"


def test_the_whole_config_as_data_keeps_what_cannot_be_resolved_as_text() -> None:
    config = compose(TRAIN).config
    assert config["cluster"] == {"num_nodes": 2, "gpus": 4}
    assert config["paths"]["tuned"] == "${custom_resolver:1,2}"


def test_a_missing_config_group_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be found") as caught:
        composed(tmp_path, "defaults:\n  - model: nowhere\n  - _self_\na: 1\n")
    assert "model" in str(caught.value)
    assert "job.yaml: defaults" in str(caught.value)


def test_a_search_path_of_a_package_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    text = (
        "hydra:\n  searchpath:\n    - pkg://verl_is_not_here.trainer.config\ndefaults:\n  - ppo_trainer\n  - _self_\n"
    )
    with pytest.raises(InputError, match="ppo_trainer"):
        composed(tmp_path, text)


def test_a_missing_variable_in_the_search_path_is_an_error(tmp_path: Path) -> None:
    text = "hydra:\n  searchpath:\n    - file://${oc.env:TRIMTAB_NOT_SET}/c\ndefaults:\n  - _self_\na: 1\n"
    with pytest.raises(InputError, match="TRIMTAB_NOT_SET"):
        composed(tmp_path, text)


@pytest.mark.parametrize("known", ["", "elsewhere", "checkout"])
def test_a_folder_behind_a_variable_in_the_search_path_is_found_above_the_file(
    tmp_path: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples" / "config").mkdir(parents=True)
    (tmp_path / "examples" / "config" / "base.yaml").write_text("a: 1\n")
    if known:
        other = tmp_path / "checkout" / "examples" / "config"
        other.mkdir(parents=True)
        (other / "base.yaml").write_text("a: 2\n")
        monkeypatch.setenv("TRIMTAB_CHECKOUT", str(tmp_path / known))
    (tmp_path / "tests").mkdir()
    search = "hydra: {searchpath: ['file://${oc.env:TRIMTAB_CHECKOUT}/examples/config']}\n"
    reader = composed(tmp_path / "tests", f"defaults: [base, _self_]\n{search}").reader
    assert reader.get("a") == (2 if known == "checkout" else 1)


def test_parents_named_by_path_are_merged_below_their_child() -> None:
    reader = compose(DATA / "nemo" / "child.yaml").reader
    assert reader.get("grpo.num_prompts_per_step") == 128
    assert reader.get("grpo.num_generations_per_prompt") == 8
    assert reader.get("defaults") is None


def test_a_section_marked_override_replaces_its_parents(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\n")
    reader = composed(tmp_path, "defaults: base.yaml\na: {_override_: true, y: 3}\n").reader
    assert reader.get("a") == {"y": 3}


@pytest.mark.parametrize("text", ["defaults: job.yaml\na: 1\n", "defaults: [job.yaml]\n", "defaults: no.yaml\n"])
def test_parents_in_a_circle_or_missing_are_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"circle|no parent file"):
        composed(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("a.b=2", "a.b", 2),
        ("+a.new=true", "a.new", True),
        ("++a.b=x", "a.b", "x"),
        ("++c.d={e: 1}", "c.d", {"e": 1}),
        ("~a.b", "a.b", None),
    ],
)
def test_overrides_do_what_hydras_do(tmp_path: Path, override: str, key: str, value: object) -> None:
    assert composed(tmp_path, "a: {b: 1}\nother: ${a.b}\n", override).reader.get(key) == value


def test_an_override_of_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not fit") as caught:
        composed(tmp_path, "cluster: {num_nodes: 1}\n", "cluster.num_node=2")
    assert caught.value.hint == "did you mean cluster.num_nodes?"


@pytest.mark.parametrize("override", ["a=1,2", "=3", "a.b=[1", "a=range(1,3)"])
def test_overrides_that_are_no_single_value_are_errors(tmp_path: Path, override: str) -> None:
    with pytest.raises(InputError):
        composed(tmp_path, "a: 1\n", override)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1\nb: 2\n", "not valid YAML"),
        ("a: 1\na: 2\n", "duplicate"),
        ("- 1\n- 2\n", "mapping of keys"),
        ("a: &x [*x]\n", "contains itself"),
        ("\ta: 1\n", "not valid YAML"),
        ("a: ${b\n", "cannot be"),
    ],
)
def test_broken_files_are_clear_errors(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        composed(tmp_path, text).reader.get("a")


def test_aliases_that_multiply_without_bound_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="without bound"):
        composed(tmp_path, "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("value", "ok"),
    [("8", True), ("'8'", True), ("8.0", True), ("0", False), ("-1", False), ("x", False), ("true", False)],
)
def test_a_whole_number_is_one_in_any_spelling_and_nothing_else(tmp_path: Path, value: str, ok: bool) -> None:
    reader = composed(tmp_path, f"n: {value}\n").reader
    if ok:
        assert reader.count("n") == 8
    else:
        with pytest.raises(InputError, match="above 0"):
            reader.count("n")


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "abc", "[1]", "1e999"])
def test_a_cost_is_finite_and_not_negative(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match="finite"):
        composed(tmp_path, f"n: {value}\n").reader.number("n")


def test_what_stands_in_the_file_is_told_from_what_comes_from_elsewhere() -> None:
    child = compose(DATA / "nemo" / "child.yaml", ["policy.train_global_batch_size=256"])
    assert child.literal("cluster.num_nodes")
    assert not child.literal("cluster.gpus_per_node")  # in the parent
    assert not child.literal("policy.train_global_batch_size")  # on the command line
    assert child.literal("cluster.brand_new")  # nowhere: it can be added here
    assert not compose(TRAIN).literal("cluster.gpus")  # an interpolation
    assert not compose(TRAIN, ["cluster.num_nodes=5"]).literal("cluster.num_nodes")


def test_a_file_that_its_defaults_overrule_is_not_edited(tmp_path: Path) -> None:
    (tmp_path / "late.yaml").write_text("a: 2\n")
    late = composed(tmp_path, "defaults:\n  - _self_\n  - late\na: 1\n")
    assert late.reader.get("a") == 2
    assert not late.literal("a")


def test_plain_job_files_never_import_hydra() -> None:
    code = (
        "import sys, trimtab.formats.frameworks.registry, trimtab.formats.write_back; "
        "sys.exit(any(name in sys.modules for name in ('hydra', 'omegaconf', 'yaml', 'torch', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEASURED = profile_of(
    {
        name: {8: 3.0}
        for name in ("rollout", "update_actor", "generation", "policy", "actor", "inference", "env", "reward")
    }
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 99),
    st.floats(),
    st.sampled_from(["all", "0-3", "4-1", "${x}", "???", "0-3:9"]),
)
KEYS = st.sampled_from(
    """
    cluster num_nodes num_gpus_per_node gpus_per_node component_placement actor rollout reward actor,rollout
    profile_data actor_cost rollout_cost inference_cost algorithm runner task_type data rollout_batch_size env_num
    env_profile_data policy generation colocated enabled resources grpo actor_rollout_ref trainer nnodes v1
    trainer_mode defaults
    """.split()  # noqa: SIM905
)
TREES = st.recursive(
    SCALARS, lambda inner: st.dictionaries(KEYS, inner, max_size=5) | st.lists(inner, max_size=2), max_leaves=20
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=st.dictionaries(KEYS, TREES, max_size=6), raw=st.text(max_size=60))
def test_no_file_makes_anything_but_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, tree: object, raw: str
) -> None:
    import yaml

    folder = tmp_path_factory.mktemp("fuzz")
    for text in (yaml.safe_dump(tree), raw):
        with contextlib.suppress(TrimtabError):
            read = composed(folder, text)
            for dialect in (Rlinf, Verl, NemoRl):
                dialect.matches(read.reader)
                with contextlib.suppress(TrimtabError):
                    dialect.read(read, None)
                with contextlib.suppress(TrimtabError):
                    dialect.read(read, MEASURED)


EXAMPLES = "../../examples"
CONFIGS = {
    "verl": ("verl_sync.yaml", ["trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size"]),
    "rlinf": ("rlinf_embodied.yaml", ["cluster.num_nodes", "++cluster.num_gpus_per_node", "data.env_num"]),
    "nemo_rl": ("nemo/base.yaml", ["cluster.num_nodes", "cluster.gpus_per_node", "grpo.num_prompts_per_step"]),
    "openrlhf": (
        f"{EXAMPLES}/logs/openrlhf.yaml",
        ["++actor.num_nodes", "++actor.num_gpus_per_node", "++vllm.num_engines", "++vllm.tensor_parallel_size"],
    ),
    "slime": (f"{EXAMPLES}/frameworks/slime.yaml", ["actor_num_nodes", "rollout_num_gpus_per_engine"]),
    "skyrl": (
        f"{EXAMPLES}/frameworks/skyrl.yaml",
        ["++trainer.placement.policy_num_nodes", "generator.inference_engine.num_engines"],
    ),
    "prime_rl": (f"{EXAMPLES}/frameworks/prime_rl.toml", ["deployment.num_infer_gpus", "orchestrator.batch_size"]),
    "areal": (f"{EXAMPLES}/logs/areal.yaml", ["cluster.n_nodes", "cluster.n_gpus_per_node"]),
    "roll": (f"{EXAMPLES}/logs/roll.yaml", ["num_gpus_per_node", "rollout_batch_size"]),
    "trl": (f"{EXAMPLES}/logs/trl.yaml", ["num_processes", "num_generations"]),
}
EVERYTHING = Profile(
    "x",
    tuple(
        ComponentProfile(name, ((8, 10.0),))
        for name in (
            "rollout",
            "generation",
            "policy",
            "logprobs",
            "actor",
            "env",
            "update_actor",
            "old_log_prob",
            "trainer",
        )
    ),
)


@pytest.mark.parametrize(("file", "key"), [(file, key) for file, keys in CONFIGS.values() for key in keys])
@pytest.mark.parametrize("value", [10**9, 10**400, 0, 1.5], ids=lambda value: f"{value!s:.8}")
def test_every_count_of_a_framework_config_has_a_range(file: str, key: str, value: object) -> None:
    path = Path(__file__).parents[2] / "data" / file
    with pytest.raises(InputError) as refused:
        load(path, [f"{key}={value}"], EVERYTHING)
    assert len(str(refused.value).splitlines()) <= 3
    assert str(path) in (refused.value.where or "")
    assert key.lstrip("+") in (refused.value.where or "")
    if value != 10**400:
        assert "1 to 65,536" in refused.value.what


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("verl_sync.yaml", ["trainer.nnodes=60000", "trainer.n_gpus_per_node=60000"]),
        ("verl_sync.yaml", ["++trimtab.nodes=60000", "++trimtab.gpus_per_node=60000"]),
        ("rlinf_embodied.yaml", ["cluster.num_nodes=60000", "++cluster.num_gpus_per_node=60000"]),
        ("nemo/base.yaml", ["cluster.num_nodes=60000", "cluster.gpus_per_node=60000"]),
    ],
)
def test_a_cluster_too_large_to_plan_for_is_refused_with_the_range(file: str, overrides: list[str]) -> None:
    path = Path(__file__).parents[2] / "data" / file
    with pytest.raises(InputError, match="plans are made for 1 to 65,536") as refused:
        load(path, overrides, EVERYTHING)
    assert str(path) in (refused.value.where or "")


OTHER_JOBS = {
    "nemo_sft": (
        "sft: {max_num_epochs: 1}\npolicy: {train_global_batch_size: 128}\ncluster: {num_nodes: 1}\n",
        "fine-tun",
    ),
    "nemo_dpo": ("dpo: {max_num_epochs: 1}\npolicy: {train_global_batch_size: 128}\ncluster: {num_nodes: 1}\n", "DPO"),
    "nemo_rm": (
        "rm: {max_num_epochs: 1}\npolicy: {train_global_batch_size: 128}\ncluster: {num_nodes: 1}\n",
        "reward model",
    ),
    "nemo_eval": ("eval: {metric: pass@k}\ngeneration: {backend: vllm}\ncluster: {num_nodes: 1}\n", "evaluation"),
    "verl_sft": (
        "data: {train_batch_size: 256, train_files: a.parquet}\nmodel: {partial_pretrain: x}\noptim: {lr: 1e-5}\n"
        "trainer: {default_local_dir: y}\n",
        "fine-tun",
    ),
    "verl_eval": (
        "data: {path: a.parquet, response_key: responses}\ncustom_reward_function: {path: null}\n",
        "evaluation",
    ),
    "verl_generation": ("trainer: {nnodes: 1}\ndata: {path: a, output_path: b}\nrollout: {n: 1}\n", "without training"),
    "rlinf_sft": ("cluster: {num_nodes: 1, component_placement: {actor: all}}\nrunner: {task_type: sft}\n", "fine-tun"),
    "rlinf_eval": (
        "cluster: {num_nodes: 1, component_placement: {'env,rollout': all}}\nrunner: {task_type: embodied_eval}\n",
        "evaluation",
    ),
    "rlinf_sft_unset": (
        "defaults: [env/nowhere, _self_]\nhydra: {searchpath: ['file://${oc.env:TRIMTAB_NOT_SET}/config']}\n"
        "runner: {task_type: sft}\n",
        "fine-tun",
    ),
    "openrlhf_sft": (
        "data: {dataset: x, output_key: y}\nmodel: {model_name_or_path: z}\ntrain: {batch_size: 8}\n",
        "fine-tun",
    ),
    "openrlhf_dpo": ("data: {dataset: x, chosen_key: y}\nmodel: {model_name_or_path: z}\n", "DPO"),
}


@pytest.mark.parametrize("name", OTHER_JOBS)
def test_a_job_that_is_no_reinforcement_learning_is_told_what_it_is(tmp_path: Path, name: str) -> None:
    text, what = OTHER_JOBS[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"not an RL job: .*{what}"):
        load(path, (), profile_of({"rollout": {8: 1.0}, "actor": {8: 1.0}, "update_actor": {8: 1.0}}))


def test_a_child_of_a_config_for_something_else_is_told_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("dpo: {max_num_epochs: 1}\npolicy: {}\ncluster: {num_nodes: 1}\n")
    child = tmp_path / "child.yaml"
    child.write_text("defaults: dpo.yaml\ncluster: {num_nodes: 4}\n")
    with pytest.raises(InputError, match="not an RL job"):
        load(child)
