"""A rollout engine that runs anywhere: llama.cpp's server from the wheel `xllamacpp`, on a tiny random model.

    pip install xllamacpp gguf
    python examples/rollout/tiny_engine.py --port 8000 --model /tmp/tiny.gguf

The model is made where there is none yet: two layers, random weights, so it writes gibberish, but quickly and always
the same. A server of your own takes its place in a job file by its command line.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 4096


def make_model(path: Path) -> None:
    """A Llama with random weights and a vocabulary of single letters; written whole or not at all."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # the last two are space and line feed
    tokens = ["<|end|>", *letters]
    random = np.random.default_rng(0)
    half = path.with_name(f".{path.name}.{os.getpid()}")  # several engines may make it at once
    writer = gguf.GGUFWriter(str(half), "llama")
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
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)

    def tensor(name: str, rows: int, columns: int, scale: float) -> None:
        writer.add_tensor(name, (random.standard_normal((rows, columns)) * scale).astype(np.float32))

    tensor("token_embd.weight", len(tokens), HIDDEN, 1.0)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        writer.add_tensor(f"{block}attn_norm.weight", np.ones(HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"{block}{name}.weight", HIDDEN, HIDDEN, HIDDEN**-0.5)
        writer.add_tensor(f"{block}ffn_norm.weight", np.ones(HIDDEN, np.float32))
        tensor(f"{block}ffn_gate.weight", FEED_FORWARD, HIDDEN, HIDDEN**-0.5)
        tensor(f"{block}ffn_up.weight", FEED_FORWARD, HIDDEN, HIDDEN**-0.5)
        tensor(f"{block}ffn_down.weight", HIDDEN, FEED_FORWARD, FEED_FORWARD**-0.5)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    tensor("output.weight", len(tokens), HIDDEN, HIDDEN**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.replace(path)


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description="A llama.cpp server on a tiny random model.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", type=Path, required=True, help="A GGUF file; made where there is none.")
    parser.add_argument("--slots", type=int, default=4, help="Requests at once.")
    given = parser.parse_args()
    if not given.model.exists():
        given.model.parent.mkdir(parents=True, exist_ok=True)
        make_model(given.model)
    params = xllamacpp.CommonParams()
    params.model.path = str(given.model)
    params.hostnames, params.port = [given.host], given.port
    params.n_parallel, params.n_ctx = given.slots, given.slots * 1024
    params.n_threads_http = 2 * given.slots + 8
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = params.endpoint_slots = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)  # the server's threads have nothing to save, and would wait for each other


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
