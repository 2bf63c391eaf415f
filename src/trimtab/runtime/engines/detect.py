"""Detects which engine software answers at an address, and its release.

The adapter depends on the software only; what its release can do, the adapter asks. An untested release is a remark of
`trimtab engine doctor`; anything that answers like none of the known servers is an error.
"""

from __future__ import annotations

import re
from contextlib import suppress

import aiohttp

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.model.rollout import ReleaseSupport
from trimtab.runtime.engines.engine import EngineDeadlines, EngineGoneError, EngineWedgedError
from trimtab.runtime.engines.http_engine import EngineHttpClient, HttpEngine, require_private
from trimtab.runtime.engines.llamacpp import LlamaCppEngine
from trimtab.runtime.engines.sglang import SglangEngine
from trimtab.runtime.engines.vllm import VllmEngine

KINDS: dict[str, type[HttpEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine, "llamacpp": LlamaCppEngine}
TESTED_RELEASES: dict[str, tuple[str, ...]] = {"vllm": ("0.32", "0.26", "0.11"), "sglang": ("0.5",), "llamacpp": ()}
"""Releases that the adapters ran against; llama.cpp has builds, not releases."""


class EngineDialect(Frozen):
    """Software and release that answer at an address."""

    kind: str
    release: str  # empty: not reported
    note: str = ""  # remark about the release
    known: ReleaseSupport = ReleaseSupport.tried


async def detect(url: str, session: aiohttp.ClientSession, deadlines: EngineDeadlines | None = None) -> EngineDialect:
    """Probes paths that only one kind of server answers."""
    await require_private(url)
    wire = EngineHttpClient(url, url, session, deadlines or EngineDeadlines())
    for path, kind in (
        ("/props", "llamacpp"),
        ("/server_info", "sglang"),
        ("/get_server_info", "sglang"),
        ("/version", "vllm"),
    ):
        try:
            info = await wire.get(path)
        except (EngineGoneError, EngineWedgedError):
            raise
        except TrimtabError:
            continue
        if isinstance(info, dict) and _matches(kind, info):
            return _dialect(kind, info)
    raise UnreachableError(
        "what answers there is neither vLLM nor SGLang nor llama.cpp", where=url, hint="give the engine's own address"
    )


def _matches(kind: str, info: dict[str, object]) -> bool:
    if kind == "llamacpp":
        return "default_generation_settings" in info or "build_info" in info
    if kind == "sglang":  # vLLM has a /server_info of its own, with its configuration in it
        return "version" in info and "vllm_config" not in info
    return "version" in info


def _dialect(kind: str, info: dict[str, object]) -> EngineDialect:
    release = str(info.get("build_info" if kind == "llamacpp" else "version") or "")
    tried = TESTED_RELEASES[kind]
    if not release or release == "b0-unknown":
        return EngineDialect(kind, release, f"this {kind} does not say its release", ReleaseSupport.unsaid)
    if tried and not any(re.match(rf"v?{re.escape(each)}(\.|$|\D)", release) for each in tried):
        were = "was" if len(tried) == 1 else "were"
        note = f"{kind} {release} was never tried; {', '.join(tried)} {were}"
        return EngineDialect(kind, release, note, ReleaseSupport.untried)
    return EngineDialect(kind, release)


async def attach(
    name: str, url: str, session: aiohttp.ClientSession, deadlines: EngineDeadlines | None = None
) -> tuple[HttpEngine, EngineDialect]:
    """The adapter for what answers there."""
    dialect = await detect(url, session, deadlines)
    engine = KINDS[dialect.kind](name, url, session, deadlines)
    engine.dialect, engine.release = f"{dialect.kind} {dialect.release}".strip(), dialect.known
    engine.release_note = dialect.note
    with suppress(TrimtabError):  # it is asked again at the first call
        await engine.discover()
    return engine, dialect
