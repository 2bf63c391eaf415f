from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.formats import catalogue, check_settings
from trimtab.plan.check import cache_rules, gpu_memory, host_rules, sizes
from trimtab.plan.check.check import RULES, CheckAnswer, check
from trimtab.plan.check.cluster_rules import LiveNode
from trimtab.plan.check.findings import within
from trimtab.plan.check.options import Exclusion, found, matches
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.lengths import Lengths

QWEN = catalogue.model("qwen2.5-7b")[1]
BASE = RunSetup(
    framework="verl",
    model_name="qwen2.5-7b",
    model=QWEN,
    gpu=catalogue.gpu("h100"),
    gpus=8,
    host_memory=2048.0,
    prompts=128,
    group=8,
    mini_batch=256,
    micro_batch=2,
    prompt_tokens=1024,
    answer_tokens=3072,
    rollout_tp=2,
    rollout_memory=0.5,
    train_offload_weights=True,
    train_offload_optimizer=True,
)


def rules(answer: CheckAnswer) -> set[str]:
    return {finding.rule for finding in answer.findings}


def test_a_run_that_fits_has_no_finding() -> None:
    answer = check(BASE)
    assert not answer.findings
    assert not answer.unchecked
    assert {phase.name for phase in answer.phases} == {"generate", "wake with both weights", "log-probs", "update"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rollout_tp": 8}, "rollout-heads"),
        ({"rollout_tp": 3, "gpus": 6}, "rollout-heads"),
        ({"train_sp": 8}, "training-heads"),
        ({"train_tp": 8, "train_backend": "fsdp"}, "training-heads"),
        ({"train_backend": "megatron", "train_pp": 3, "gpus": 6}, "pipeline-layers"),
        ({"train_tp": 4, "train_pp": 4}, "training-gpus"),
        ({"rollout_tp": 4, "gpus": 6}, "rollout-gpus"),
        ({"prompts": 3, "group": 1}, "verl-samples"),
        ({"mini_batch": 8, "micro_batch": 2, "version": "0.5"}, "verl-mini-batch"),
        ({"mini_batch": 12}, "verl-mini-batch"),
        ({"mini_batch": 4096}, "verl-mini-batch"),
        ({"framework": "openrlhf", "mini_batch": 250}, "global-batch"),
        ({"framework": "trl", "samples_of_generation": 12}, "whole-groups"),
        ({"algorithm": "grpo", "group": 1}, "single-answers"),
        ({"framework": "openrlhf", "engines": 3}, "as-many-gpus"),
        ({"gpus": 12}, "whole-nodes"),
        ({"gpus": 16, "rollout_tp": 14, "gpus_per_node": 8}, "across-nodes"),
        ({"positions": 4000}, "positions"),
        ({"rollout_max_length": 2048}, "engine-context"),
        ({"rollout_chunked": False, "rollout_batched_tokens": 2048}, "batched-tokens"),
        ({"dynamic": True, "micro_tokens": 2048}, "micro-batch-tokens"),
        ({"rollout_memory": 0.1}, "no-cache"),
        ({"rollout_memory": 0.13, "rollout_max_length": 128_000}, "one-sequence"),
        ({"rollout_memory": 0.2, "prompts": 2048, "rollout_sequences": 1024}, "preempted"),
        ({"micro_batch": 64}, "gpu-update"),
        ({"logprob_batch": 512}, "gpu-logprobs"),
        ({"rollout_memory": 0.95}, "engine-beside-trainer"),
        ({"rollout_memory": 0.9, "rollout_wakes_whole": True, "rollout_full_copy": True}, "wake-up"),
        ({"rollout_memory": 0.9, "rollout_full_copy": True, "shared": False, "rollout_gpus": 4}, "weight-sync"),
        ({"host_memory": 100.0}, "host-memory"),
        ({"model": catalogue.model("qwen2.5-32b")[1], "rollout_backend": "hf"}, "trainer-generates"),
    ],
)
def test_every_rule_finds_its_fault(change: dict[str, object], rule: str) -> None:
    answer = check(replace(BASE, **change))  # type: ignore[arg-type]
    assert rule in rules(answer)
    finding = next(found for found in answer.findings if found.rule == rule)
    assert finding.what
    assert finding.why
    assert finding.names


def test_each_rule_has_a_source_and_a_date() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert "/" in rule.source
        assert rule.dated >= "2025"


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch": 64},
        {"logprob_batch": 512},
        {"rollout_memory": 0.95},
        {"rollout_memory": 0.1},
        {"rollout_tp": 8},
        {"train_sp": 8},
        {"positions": 4000},
        {"host_memory": 150.0},
        {"rollout_chunked": False, "rollout_batched_tokens": 2048},
        {"mini_batch": 4096},
        {"dynamic": True, "micro_tokens": 2048, "logprob_tokens": 8192},
    ],
)
def test_a_cure_takes_its_finding_away(change: dict[str, object]) -> None:
    run = replace(BASE, **change)  # type: ignore[arg-type]
    for finding in check(run).errors:
        assert finding.cures, finding.what
        for cure in finding.cures:
            assert cure.cost
            assert finding.rule not in {left.rule for left in check(replace(run, **cure.values)).errors}


def test_the_cheapest_cure_comes_first() -> None:
    finding = next(found for found in check(replace(BASE, micro_batch=64)).findings if found.rule == "gpu-update")
    assert finding.cures[0].values == {"micro_batch": 8}
    assert "nothing" in finding.cures[0].cost


def test_a_cure_says_what_it_costs_in_seconds_of_a_step() -> None:
    parked = replace(BASE, rollout_memory=0.8, train_offload_optimizer=False, train_offload_weights=False)
    cures = next(found for found in check(parked).findings if found.rule == "engine-beside-trainer").cures
    assert cures[0].values == {"rollout_memory": 0.7}
    moved = next(cure for cure in cures if "train_offload_optimizer" in cure.values)
    assert re.match(r"about \d+(\.\d+)? s a step to move \d+ GB there and back on each GPU", moved.cost)


def test_an_engine_without_a_stated_context_takes_the_models() -> None:
    llama = replace(
        BASE,
        model=catalogue.model("llama-3.1-8b")[1],
        positions=131072,
        rollout_tp=1,
        rollout_memory=0.4,
        micro_batch=1,
    )
    assert "one-sequence" not in rules(check(llama))
    assert "one-sequence" in rules(check(replace(llama, rollout_whole_context=True)))
    assert "one-sequence" not in rules(check(replace(llama, rollout_whole_context=True, rollout_backend="sglang")))
    assert "one-sequence" not in rules(check(replace(llama, rollout_whole_context=True, rollout_max_length=4096)))


def test_a_finding_names_the_releases_its_rule_holds_for() -> None:
    row = Exclusion("verl", {"a": True}, "they do", {"a": False}, "owner/repo#1", "2026-01", since="0.3", until="0.5")
    (finding,) = found(replace(BASE, version="0.4", options={"a": True}), (row,))
    assert (finding.releases, finding.dated, finding.source) == ("verl from 0.3 before 0.5", "2026-01", "owner/repo#1")
    assert {found.releases for found in check(replace(BASE, logprob_batch=512)).findings} == {"any framework"}


def test_memory_is_not_summed_up_for_a_layout_that_does_not_exist() -> None:
    answer = check(replace(BASE, rollout_tp=8, logprob_batch=512))
    assert rules(answer) == {"rollout-heads"}
    assert not answer.phases
    assert any("memory" in note for note in answer.unchecked)


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    answer = check(RunSetup(framework="verl", model_name="own-model"))
    assert not answer.findings
    notes = " ".join(answer.unchecked)
    for words in ("own-model", "--gpu", "--gpus"):
        assert words in notes


def test_configs_that_are_read_in_part_only_warn_of_memory() -> None:
    whole, part = check(replace(BASE, logprob_batch=512)), check(replace(BASE, logprob_batch=512, in_part=True))
    assert whole.errors
    assert not part.errors
    assert rules(whole) == rules(part)


def test_a_micro_batch_of_many_sequences_is_less_than_all_of_them_at_their_longest() -> None:
    one, many = BASE.together(1), BASE.together(64)
    assert one == BASE.reached
    assert many is not None
    assert 0.4 * 64 * 3584 < many < 0.6 * 64 * 3584
    assert replace(BASE, packed=False).together(64) == 64 * 3584


def test_experts_are_divided_by_their_own_parallel_sizes() -> None:
    model = catalogue.model("qwen3-30b-a3b")[1]
    run = replace(BASE, model=model, train_backend="megatron", train_tp=2, train_ep=8, train_etp=1)
    held = gpu_memory.stage_parameters(run, model)
    dense = (model.layer_parameters - model.expert_parameters + model.embedding + model.head) / 2
    assert held == pytest.approx(dense + model.expert_parameters / 8, rel=1e-3)


def test_offload_takes_states_from_the_gpu_and_puts_them_on_the_host() -> None:
    kept = replace(BASE, train_offload_optimizer=False)
    before = next(phase for phase in gpu_memory.phases(kept) if phase.name == "generate")
    after = next(phase for phase in gpu_memory.phases(BASE) if phase.name == "generate")
    optimizer = gpu_memory.states(BASE, QWEN).optimizer
    assert before.gb - after.gb == pytest.approx(optimizer)
    hosts = [next(phase for phase in host_rules.phases(run) if phase.name == "a step").gb for run in (BASE, kept)]
    assert hosts[0] - hosts[1] == pytest.approx(8 * optimizer)


def test_deepspeed_accumulates_gradients_beside_those_of_its_cpu_optimizer() -> None:
    run = replace(BASE, train_backend="deepspeed", train_cpu_optimizer=True, train_gradient_bytes=4.0)

    def on_host(each: RunSetup) -> float:
        return dict(next(phase for phase in host_rules.phases(each) if phase.name == "a step").terms)["CPU optimiser"]

    assert on_host(run) == pytest.approx(QWEN.parameters * 20 / 2**30)
    assert on_host(replace(run, train_gradient_bytes=2.0)) == pytest.approx(QWEN.parameters * 18 / 2**30)
    assert on_host(replace(run, train_backend="fsdp")) == pytest.approx(QWEN.parameters * 16 / 2**30)


def test_generation_by_the_trainer_gathers_all_weights_only_where_they_are_sharded() -> None:
    model = catalogue.model("qwen2.5-32b")[1]
    run = replace(BASE, model=model, rollout_backend="hf")
    assert "trainer-generates" in rules(check(run))
    assert "trainer-generates" not in rules(check(replace(run, train_zero=2)))
    assert "trainer-generates" not in rules(check(replace(BASE, model=model)))


@pytest.mark.parametrize(("more", "size"), [("", 10.0), ("tensor_parallel_size: 2", 14.0), ("chunk", 6.0)])
def test_log_probs_of_nemo_rl_hold_logits_in_fp32_unless_they_go_in_chunks(
    more: str, size: float, tmp_path: Path
) -> None:
    split = more if ":" in more else "tensor_parallel_size: 1"
    chunk = "logprob_chunk_size: 1024, " if more == "chunk" else ""
    config = tmp_path / "recipe.yaml"
    config.write_text(
        f"grpo: {{num_prompts_per_step: 64, num_generations_per_prompt: 8}}\n"
        f"policy: {{model_name: Qwen/Qwen2.5-7B, {chunk}logprob_batch_size: 1, max_total_sequence_length: 4096, "
        f"dtensor_cfg: {{enabled: true, {split}}}, generation: {{backend: vllm}}}}\n"
        "cluster: {num_nodes: 1, gpus_per_node: 8}\n"
    )
    setup = check_settings.read(config, [], {"gpu": "h100"})
    logits = dict(gpu_memory.working(setup, QWEN, 4096, training=False))["logits"]
    assert logits == pytest.approx(size * 4096 * QWEN.vocabulary / setup.train_tp / 2**30)


@pytest.mark.parametrize(("version", "words", "size"), [("0.5.3", [], 4.0), ("", [], 2.0), ("", ["fp32"], 4.0)])
def test_openrlhf_accumulates_gradients_as_its_release_and_config_say(
    version: str, words: list[str], size: float, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{actor: {model_name_or_path: Qwen/Qwen2.5-7B}, vllm: {num_engines: 1}, ds: {zero_stage: 3}}\n")
    overrides = [f"++ds.grad_accum_dtype={word}" for word in words]
    setup = check_settings.read(config, overrides, {"gpu": "h100", "version": version})
    assert setup.train_gradient_bytes == size


def test_of_verls_other_trainers_memory_only_warns() -> None:
    file = Path(__file__).parents[3] / "examples" / "check" / "grpo-dies.yaml"
    veomni = check_settings.read(file, ["++actor_rollout_ref.actor.strategy=veomni"], {"gpu": "a100-80"})
    assert veomni.in_part
    assert not check_settings.read(file, [], {"gpu": "a100-80"}).in_part
    assert {finding.rule for finding in check(veomni).errors} == {"rollout-heads"}


def test_megatrons_buffers_of_gradients_stay_beside_an_engine_where_its_weights_do() -> None:
    kept = replace(BASE, train_backend="megatron", train_tp=2, train_offload_weights=False)
    sizes = [
        {phase.name: dict(phase.terms).get("trainer's gradients", 0.0) for phase in gpu_memory.phases(run)}
        for run in (kept, replace(kept, train_offload_weights=True), replace(kept, train_backend="fsdp", train_tp=1))
    ]
    held = gpu_memory.states(kept, QWEN).gradients
    assert sizes[0] == {"generate": held, "wake with both weights": held, "log-probs": held, "update": 0.0}
    assert not any(sizes[1].values())
    assert not any(sizes[2].values())


def test_preemption_costs_time_and_less_with_more_room() -> None:
    tight = replace(BASE, rollout_memory=0.2, prompts=2048, rollout_sequences=1024)
    (finding,) = cache_rules.preempted(tight)
    assert finding.severity == "warning"
    assert "computed again" in finding.why
    assert not list(cache_rules.preempted(replace(tight, rollout_memory=0.8, rollout_sequences=64)))


def test_answers_that_end_make_room_for_those_that_grow() -> None:
    lengths = Lengths.capped(1000, 4000, 100)
    peak = cache_rules.peak_tokens(lengths, 64)
    assert 64 * 100 < peak < 64 * 1000


def test_near_sizes_come_first() -> None:
    assert sizes.near_divisors(28, 8)[:2] == [7, 4]
    assert sizes.near_multiples(250, 16) == [256, 240]


@pytest.mark.parametrize(
    ("version", "since", "until", "holds"),
    [
        ("", "0.7", "", True),
        ("", "", "0.5", False),
        ("0.4.1", "", "0.5", True),
        ("0.5", "", "0.5", False),
        ("v0.8.5.post1", "0.8.5", "", True),
        ("0.6", "0.7", "", False),
    ],
)
def test_rules_hold_for_their_versions_and_an_unknown_one_is_the_newest(
    version: str, since: str, until: str, holds: bool
) -> None:
    assert within(version, since, until) is holds


def test_exclusions_compare_values_lists_and_words() -> None:
    assert matches(None, "unset")
    assert not matches(None, "set")
    assert matches(2, "> 1")
    assert not matches(True, "> 0")
    assert not matches(1, True)
    assert matches(False, [False, "unset"])
    assert matches("b", "not a")
    row = Exclusion("verl", {"a": True, "b": "> 1"}, "they do", {"a": False}, "owner/repo#1", "2026-01", until="0.5")
    run = replace(BASE, version="0.4", options={"a": True, "b": 2})
    (finding,) = found(run, (row,))
    assert finding.cures[0].text(run) == "a=false"
    assert not list(found(replace(run, version="0.5"), (row,)))
    assert not list(found(replace(run, framework="trl"), (row,)))


def test_every_exclusion_of_the_table_can_hold() -> None:
    for row in check_settings.exclusions():
        assert row.source
        assert row.dated
        values = {key: _fitting(wanted) for key, wanted in row.when.items()}
        run = RunSetup(framework=row.framework, version=row.since, options=values)
        assert list(found(run, (row,))), row
        cured = {**values, **{key: value for key, value in row.cure.items() if key in values}}
        assert not list(found(replace(run, options=cured), (row,))), row


def _fitting(wanted: object) -> object:
    if isinstance(wanted, list):
        return _fitting(wanted[0])
    words = {"set": 1, "unset": None}
    if isinstance(wanted, str):
        return words.get(wanted, float(wanted[2:]) + 1 if wanted.startswith("> ") else wanted)
    return wanted


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((LiveNode("a", 4, 2000.0, 100.0),), "the cluster has 4 GPUs, the run asks for 8"),
        ((LiveNode("a", 4, 2000.0, 100.0), LiveNode("b", 4, 2000.0, 100.0)), "1 times 8 GPUs of one node"),
        ((LiveNode("a", 8, 200.0, 100.0),), "--host-memory-gb 200"),
        ((LiveNode("a", 8, 2000.0, 0.3),), "object stores"),
    ],
)
def test_a_cluster_that_cannot_hold_the_run_is_named(nodes: tuple[LiveNode, ...], words: str) -> None:
    (finding,) = (found for found in check(BASE, (), nodes).findings if found.cause == "ray")
    said = " ".join([finding.what, finding.why, *(cure.text(BASE) for cure in finding.cures)])
    assert words in said


def test_a_cluster_that_holds_the_run_is_not_named() -> None:
    assert not check(BASE, (), (LiveNode("a", 8, 2000.0, 200.0),)).findings
