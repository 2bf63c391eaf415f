"""`python -m bench.verl_gpu FOLDER`: a GRPO run of verl itself on one GPU, predicted before and advised on after.

Needs verl 0.9.1 with vLLM 0.24.0, torch 2.11.0, transformers 5.9.0 and tensordict 0.10.0 or older. The model is a
random Qwen2 of 0.5B weights, the reward counts a letter, 20 steps. FOLDER gets the model, the prompts, the script, what
`check` and `estimate` say beforehand, verl's log, and `advise` on it with its report. `--make` only makes the inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

STEPS, PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 20, 8, 4, 64, 256
VOCABULARY = 151_936
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("e") / max(1, len(solution_str))
"""


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from bench.rollout_gpu.models import tokenizer_of

    tokenizer = tokenizer_of(VOCABULARY)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def make_inputs(folder: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    make_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"Write about {at}."}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": at},
        }
        for at in range(STEPS * PROMPTS)
    ]
    for name, kept in (("train", rows), ("val", rows[:PROMPTS])):
        parquet.write_table(arrow.Table.from_pylist(kept), folder / f"{name}.parquet")
    (folder / "run.sh").write_text("python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(overrides(folder)) + "\n")


def overrides(folder: Path) -> list[str]:
    model, rollout, actor = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={ANSWER_TOKENS}",
        f"{model}.path={folder}/model",
        f"{model}.use_remove_padding=False",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.ppo_micro_batch_size_per_gpu=16",
        f"{actor}.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.name=vllm",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={STEPS}",
    ]


def kept(command: list[str], output: Path, **environment: str) -> int:
    """Run a command with its output in a file."""
    print(f"{output.name}: {' '.join(command[:6])} ...", flush=True)
    with output.open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False, env={**os.environ, **environment}
        )
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--make", action="store_true", help="only make the inputs")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_inputs(folder)
    if given.make:
        return
    trimtab = [sys.executable, "-m", "trimtab"]
    script, log = folder / "run.sh", folder / "verl.jsonl"
    status = {
        verb: kept([*trimtab, verb, str(script), "--gpu", given.gpu], folder / f"{verb}.txt")
        for verb in ("check", "estimate")
    }
    status["verl"] = kept(
        ["sh", str(script)],
        folder / "verl.log",
        VERL_FILE_LOGGER_PATH=str(log),
        VLLM_USE_FLASHINFER_SAMPLER="0",
        HF_HUB_OFFLINE="1",
    )
    report = ["--once", "--report", str(folder / "advice.html"), "--folder", str(folder / "advice")]
    status["advise"] = kept([*trimtab, "advise", str(script), "--follow", str(log), *report], folder / "advice.txt")
    print(json.dumps(status))
    sys.exit(1 if status["verl"] else 0)


if __name__ == "__main__":
    main()
