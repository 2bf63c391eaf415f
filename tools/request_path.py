"""Files of the package whose functions run for one request, once a pool is set up: how long its path is.

    python tools/request_path.py             # one prompt through `RolloutPool.generate`
    python tools/request_path.py --gateway   # one prompt through the gateway's /v1/completions

The engine is a stub in another process. Generated methods (of dataclasses) count for no file. Health checks are rare
here, so that they do not run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "src" / "trimtab"


class CallRecorder:
    """Functions of the package that run within the block, by file."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            self.files[str(Path(path).relative_to(PACKAGE))].add(frame.f_code.co_name)

    def __enter__(self) -> CallRecorder:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


async def record(gateway: bool) -> CallRecorder:
    """A second request is recorded: the first one sets up connections and caches."""
    from bench.rollout_pieces import instant_servers

    from trimtab.rollout import Gateway, GatewaySettings, RolloutPool, SamplingParams

    recorder = CallRecorder()
    with instant_servers(1) as (url,):
        async with RolloutPool(look_s=3600.0, reconcile_s=3600.0) as pool:
            await pool.attach(url)
            await asyncio.sleep(1.0)  # the first health check ends
            if not gateway:
                await pool.generate([[5, 6, 7]], SamplingParams(max_tokens=16))
                with recorder:
                    (answer,) = await pool.generate([[5, 6, 7]], SamplingParams(max_tokens=16))
                assert answer.ok
                return recorder
            async with Gateway(pool, GatewaySettings("a-token-of-the-tool")) as front, aiohttp.ClientSession() as http:
                body = {"prompt": [5, 6, 7], "max_tokens": 16, "model": "instant"}
                await (await http.post(f"{front.url}/v1/completions", json=body)).read()
                with recorder:
                    reply = await http.post(f"{front.url}/v1/completions", json=body)
                    await reply.read()
                assert reply.status == 200, await reply.text()
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", action="store_true", help="through the HTTP front")
    files = asyncio.run(record(parser.parse_args().gateway)).files
    for path, functions in sorted(files.items()):
        print(f"{path:44} {len(functions):3}  {', '.join(sorted(functions))}"[:200])
    print(f"{len(files)} files, {sum(map(len, files.values()))} functions")


if __name__ == "__main__":
    main()
