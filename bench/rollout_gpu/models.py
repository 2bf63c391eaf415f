"""Writes random Qwen2 checkpoints with a tokenizer of their own: `models.py FOLDER --size 1.4b --count 2`.

Run by the interpreter of the engine, which has torch and transformers; imports nothing of trimtab. Makes FOLDER/v1,
FOLDER/v2 ... of other weights each; the same seeds give the same weights on the same kind of device.

Random weights with independent logits would be no use for comparing greedy answers: the best two of 16,384 logits are
so near that bf16 rounding chooses every twentieth token. So the output layer also knows, for each token, one that
likes to follow it, by 3 to 9 standard deviations of the other logits: most greedy tokens win clearly, some are left to
the context, and at temperature 1 an answer still is mostly noise.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "1.4b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 16_384,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 16_384,
    },
}  # fmt: skip
LIKED = (3.0, 9.0)  # standard deviations of the other logits
LONGEST = 32_768


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """One token for each byte, and words of three letters up to `size`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [letter for letter in letters if letter.isascii()]
    words = ("".join(word) for word in product(plain, repeat=3))
    names = ["<|end|>", *letters, *islice(words, size - 1 - len(letters))]
    whole = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|end|>", pad_token="<|end|>")


@torch.no_grad()
def fill(model: Qwen2ForCausalLM, config: Qwen2Config) -> None:
    """Random weights; see the opening of this module."""
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            continue
        small = name.endswith(("o_proj.weight", "down_proj.weight"))
        torch.nn.init.normal_(
            parameter, std=parameter.shape[1] ** -0.5 * (config.num_hidden_layers**-0.5 if small else 1)
        )
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    torch.nn.init.normal_(embedding)
    follows = torch.randperm(len(head), device=head.device)
    least, most = LIKED
    liked = torch.empty(len(head), 1, device=head.device).uniform_(least, most) / config.hidden_size**0.5
    torch.nn.init.normal_(head, std=config.hidden_size**-0.5)
    head[follows] += (embedding * liked / config.hidden_size**0.5).to(head.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1.4b")
    parser.add_argument("--count", type=int, default=2, help="checkpoints of other weights each (default: 2)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    sizes = SIZES[given.size]
    config = Qwen2Config(
        **sizes, max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
        torch_dtype=given.dtype,
    )  # fmt: skip
    tokenizer = tokenizer_of(sizes["vocab_size"])
    torch.set_default_dtype(getattr(torch, given.dtype))
    model = None
    for number in range(1, given.count + 1):
        folder, begun = given.folder / f"v{number}", time.monotonic()
        if (folder / ".ready").exists():
            continue
        model = Qwen2ForCausalLM(config) if model is None else model
        torch.manual_seed(number)
        fill(model, config)
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)
        (folder / ".ready").touch()
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(f"{folder}: {weights / 1e9:.2f} B weights in {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
