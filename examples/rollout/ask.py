"""Asks a rollout gateway many things at once, as a trainer would, and says what came of it.

python examples/rollout/ask.py            # the only gateway of yours that runs here
python examples/rollout/ask.py http://127.0.0.1:8268 --requests 200
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def gateway() -> str:
    """The address of the gateway that runs here."""
    told = subprocess.run(["trimtab", "engine", "list", "--format", "json"], check=True, capture_output=True, text=True)
    return str(json.loads(told.stdout)["gateway"]["url"])


def ask(url: str, number: int, tokens: int) -> Counter[str]:
    """One prompt to OpenAI's door: how it ended, and how many tokens came."""
    body = {"prompt": f"What is {number} times {number}?", "max_tokens": tokens, "temperature": 0.7}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with DIRECT.open(request, timeout=120) as answer:
        told = json.load(answer)
    return Counter({told["choices"][0]["finish_reason"]: 1, "tokens": told["usage"]["completion_tokens"]})


def main() -> None:
    """All at once, as many times as there are requests."""
    parser = argparse.ArgumentParser(description="Many requests at once.")
    parser.add_argument("url", nargs="?")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    url = given.url or gateway()
    began = time.monotonic()
    with ThreadPoolExecutor(given.requests) as threads:
        ends = sum(threads.map(lambda one: ask(url, one, given.tokens), range(given.requests)), Counter())
    tokens = ends.pop("tokens", 0)
    said = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{given.requests} requests answered ({said}), {tokens} tokens in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
