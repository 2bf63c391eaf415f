"""Tokenizers of engines over HTTP.

Optional: `tokenizer_of` is None for an engine without one. The pool takes and gives token ids; no generation depends on
text. Answers are checked to be ids or text. Engines tokenize also while paused or asleep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trimtab.runtime.engines.engine import EngineMalformedError
from trimtab.runtime.engines.http_engine import HttpEngine


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer. Calls are bounded by the engine's `call_s` and raise the errors of `engine.py`."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, including BOS if the model needs it."""

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; `special` includes special tokens, if the engine can omit them at all."""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Ids of a conversation by the model's chat template; `options` are the template's."""

    async def model(self) -> str:
        """Model name at the engine."""

    async def vocabulary(self) -> int | None:
        """Vocabulary size; None: unknown, or the engine rejects unknown ids itself."""


RENDER_OPTIONS: dict[str, frozenset[str]] = {
    "llamacpp": frozenset({"add_generation_prompt", "chat_template_kwargs"}),
    "vllm": frozenset({"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}),
    "sglang": frozenset({"continue_final_message", "chat_template_kwargs"}),
}
"""Chat fields that concern the template, by kind of engine."""


class HttpTokenizer:
    """As vLLM has it. It always writes special tokens, and the server rejects unknown ids itself."""

    text_key = "prompt"  # of a detokenized text

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await self._ids({"prompt": text, "add_special_tokens": True})

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        body = {"tokens": list(ids), **self._detokenize_options(special)}
        return await self._text("/detokenize", body, self.text_key) if ids else ""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        return await self._ids({"messages": list(messages), **options})

    async def model(self) -> str:
        reply = await self._engine.wire.get("/v1/models")
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise self._nonsense("/v1/models names no model", reply) from None

    async def vocabulary(self) -> int | None:
        return None

    def _detokenize_options(self, special: bool) -> dict[str, Any]:
        return {}

    async def _ids(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        reply = await self._engine.wire.post("/tokenize", body)
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise self._nonsense("/tokenize gave no ids", reply)
        return tuple(ids)

    async def _text(self, path: str, body: Mapping[str, Any], key: str) -> str:
        reply = await self._engine.wire.post(path, body)
        text = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(text, str):
            raise self._nonsense(f"{path} gave no text", reply)
        return text

    def _nonsense(self, what: str, reply: Any) -> EngineMalformedError:
        return EngineMalformedError(f"{what}: {str(reply)[:80]!r}", engine=self._engine.name)


class LlamaCppTokenizer(HttpTokenizer):
    """Always writes special tokens."""

    text_key = "content"

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await self._ids({"content": text, "add_special": True, "parse_special": True})

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        body = {"messages": list(messages), **options}
        return await self.tokenize(await self._text("/apply-template", body, "prompt"))

    async def vocabulary(self) -> int | None:
        reply = await self._engine.wire.get("/v1/models")
        try:
            return int(reply["data"][0]["meta"]["n_vocab"])
        except (KeyError, IndexError, TypeError, ValueError):
            return None


class SglangTokenizer(HttpTokenizer):
    """Conversations need a release that takes messages at `/tokenize`; older ones reject them."""

    text_key = "text"

    def _detokenize_options(self, special: bool) -> dict[str, Any]:
        return {"skip_special_tokens": not special}

    async def vocabulary(self) -> int | None:
        """From the model's config file, if it is local: an unknown id kills this server."""
        reply = await self._engine.wire.get("/model_info")
        try:
            config = json.loads((Path(reply["model_path"]) / "config.json").read_text(encoding="utf-8"))
            return int(config.get("text_config", config)["vocab_size"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None


_KINDS = {"llamacpp": LlamaCppTokenizer, "vllm": HttpTokenizer, "sglang": SglangTokenizer}


def tokenizer_of(engine: object) -> Tokenizer | None:
    """Tokenizer of an engine, if it has one. Others than those over HTTP may offer one as an attribute `texts`."""
    own: Tokenizer | None = getattr(engine, "texts", None)
    if own is None and isinstance(engine, HttpEngine) and engine.kind in _KINDS:
        return _KINDS[engine.kind](engine)
    return own
