"""Writes a tiny random Qwen2 with a tokenizer of its own into a folder, and the same with other weights beside it.

Run by the interpreter of an engine's environment, which has transformers: `tiny_model.py FOLDER`. What it makes is
FOLDER/v1 and FOLDER/v2; the same seeds give the same weights.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

folder = Path(sys.argv[1])
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {"<|end|>": 0} | {letter: index + 1 for index, letter in enumerate(letters)}
plain = Tokenizer(models.BPE(vocabulary, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
plain.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>", pad_token="<|end|>")
config = Qwen2Config(
    vocab_size=len(vocabulary),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=0,
    tie_word_embeddings=False,
    torch_dtype=torch.float32,
)
for seed, name in ((0, "v1"), (1, "v2")):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model.save_pretrained(folder / name, safe_serialization=True)
    tokenizer.save_pretrained(folder / name)
(folder / ".ready").touch()
