"""A vLLM server that answers at once and costs next to nothing, for measuring what stands before it.

    python -m bench.instant_vllm        # says its port, and serves until it is ended

Bodies are made once for each number of tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time

from bench.instant_engine import STREAMS, Connection, answer, serve, streamed

TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
LOGPROBS = re.compile(rb'"logprobs": ?\d')
SCHEMA = {"openapi": "3.1.0", "paths": {path: {"post": {}} for path in ("/reset_prefix_cache", "/sleep", "/wake_up")}}
INFO = {
    "/version": {"version": "0.26.0"},
    "/openapi.json": SCHEMA,
    "/is_sleeping": {"is_sleeping": False},
    "/v1/models": {"object": "list", "data": [{"id": "instant", "root": "instant", "max_model_len": 32768}]},
}
made = 0
started = time.time()


def choice(count: int, logprobs: bool, last: bool) -> dict[str, object]:
    """Some tokens of an answer, as completions have them."""
    ids = [1000 + at * 37 % 150_000 for at in range(count)]
    values = {
        "text_offset": [0] * count,
        "token_logprobs": [-0.123456789 - at % 7 for at in range(count)],
        "tokens": [f"token_id:{token}" for token in ids],
        "top_logprobs": [{f"token_id:{token}": -0.12345} for token in ids],
    }
    return {
        "index": 0, "text": " word" * count, "logprobs": values if logprobs else None,
        "finish_reason": "length" if last else None, "stop_reason": None, "prompt_logprobs": None,
        "prompt_token_ids": list(range(1000, 1128)) if last else None, "token_ids": ids,
    }  # fmt: skip


def completion(count: int, so_far: int, logprobs: bool, last: bool) -> bytes:
    """A body or an event."""
    usage = {"prompt_tokens": 128, "completion_tokens": so_far, "total_tokens": 128 + so_far}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "instant"}
    return json.dumps({**head, "choices": [choice(count, logprobs, last)], "usage": usage}).encode()


@functools.cache
def completed(count: int, streams: bool, logprobs: bool) -> bytes:
    """The answer of /v1/completions: whole, or an event for each token."""
    if not streams:
        return answer(completion(count, count, logprobs, True))
    return streamed([completion(1, at, logprobs, at == count) for at in range(1, count + 1)])


class Server(Connection):
    """vLLM's calls."""

    def respond(self, path: str, body: bytes) -> bytes:
        if path != "/v1/completions":
            return other(path)
        found = TOKENS.search(body)
        count = int(found[1]) if found else 16
        global made
        made += count
        return completed(count, STREAMS.search(body) is not None, LOGPROBS.search(body) is not None)


def other(path: str) -> bytes:
    """Everything but generating."""
    if path in INFO:
        return answer(json.dumps(INFO[path]).encode())
    if path == "/metrics":
        lines = ("vllm:num_requests_running 1", "vllm:num_requests_waiting 0", f"vllm:generation_tokens_total {made}")
        return answer("\n".join((*lines, f"process_start_time_seconds {started}")).encode(), "text/plain")
    return answer(b"") if path == "/health" else answer(b"{}", status="404 Not Found")


if __name__ == "__main__":
    asyncio.run(serve(Server))
