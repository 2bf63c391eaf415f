"""Writes a tiny random Llama as a GGUF file, so that tests can run real llama.cpp servers on it.

The same seed gives the same bytes. The vocabulary is byte-level: printable ASCII, some pairs of letters, and on demand
the 128 bytes beyond ASCII, with which a random model writes broken UTF-8 all the time. Two files made with the same
seed but another `shift` differ in their weights only: that is what a refit looks like in a test.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 4096
END = 0  # the id of the token that ends an answer
FIRST = 1  # the first id that is plain text


def vocabulary(*, beyond_ascii: bool = False) -> tuple[list[str], list[str]]:
    """Tokens in order of their ids, and the merges; every token is written as GPT-2's byte-level form has it."""
    letters = [chr(code) for code in range(33, 127)]
    letters += ["Ġ", "Ċ"]  # space and line feed
    if beyond_ascii:
        letters += [written(byte) for byte in range(128, 256)]
    pairs = [(one, two) for one in "bdfgklmnprst" for two in "aeiou"]
    return ["<|end|>", *letters, *(one + two for one, two in pairs)], [f"{one} {two}" for one, two in pairs]


def written(byte: int) -> str:
    """How the byte-level form writes one byte beyond ASCII: printable Latin-1 as itself, the others from 256 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))


def pieces(*, beyond_ascii: bool = False) -> list[bytes]:
    """What each id stands for, in bytes."""
    back = {written(byte): byte for byte in range(256)}
    back |= {"Ġ": 32, "Ċ": 10}
    tokens, _ = vocabulary(beyond_ascii=beyond_ascii)
    return [b"" if index == END else bytes(back[sign] for sign in token) for index, token in enumerate(tokens)]


def tiny_gguf(*, seed: int = 0, shift: float = 0.0, beyond_ascii: bool = False, folder: Path | None = None) -> Path:
    """The file, made once for each kind and kept in the temporary folder."""
    place = folder or Path(tempfile.gettempdir()) / f"trimtab-tiny-gguf-{os.getuid()}"
    place.mkdir(exist_ok=True, mode=0o700)
    path = place / f"llama-{seed}-{shift:g}-{'bytes' if beyond_ascii else 'ascii'}.gguf"
    if not path.exists():
        # Two test processes may make it at once: each writes its own and the last one named stays.
        half = path.with_suffix(f".{os.getpid()}")
        write(half, seed=seed, shift=shift, beyond_ascii=beyond_ascii)
        half.replace(path)
    return path


def write(path: Path, *, seed: int, shift: float, beyond_ascii: bool) -> None:
    """The file itself: a Llama of 32-bit floats with random weights."""
    tokens, merges = vocabulary(beyond_ascii=beyond_ascii)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_add_bos_token(False)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    writer.add_tensor("token_embd.weight", matrix(len(tokens), HIDDEN, 1.0))
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(block + name + ".weight", matrix(HIDDEN, HIDDEN, HIDDEN**-0.5))
        writer.add_tensor(block + "ffn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(block + "ffn_gate.weight", matrix(FEED_FORWARD, HIDDEN, HIDDEN**-0.5))
        writer.add_tensor(block + "ffn_up.weight", matrix(FEED_FORWARD, HIDDEN, HIDDEN**-0.5))
        writer.add_tensor(block + "ffn_down.weight", matrix(HIDDEN, FEED_FORWARD, FEED_FORWARD**-0.5))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    output = matrix(len(tokens), HIDDEN, 2 * HIDDEN**-0.5)
    output += np.float32(shift) * np.roll(output, 1, axis=0)
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
