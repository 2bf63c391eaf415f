"""Text to token ids and back, by the tokenizer that an engine has, over HTTP.

Optional: `tokenizer_of` is None for an engine that has none to offer. Ids go in and out of the pool; text is for whoever
wants it, and nothing about a generation depends on it. What comes back is checked to be ids or text before anybody uses
it. An engine reads text also while it is paused or asleep.
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
    """A tokenizer. Every call is bounded by the engine's deadline for calls and raises the errors of `engine.py`."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, with what the model wants at its beginning."""

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """What they write; with `special`, also tokens that are no text, where the engine can leave them out at all."""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a conversation by the model's own template; `options` are the template's."""

    async def model(self) -> str:
        """What the engine calls its model."""

    async def vocabulary(self) -> int | None:
        """How many ids the model knows; None where nobody says, or where the engine refuses others by itself."""


RENDER_OPTIONS: dict[str, frozenset[str]] = {
    "llamacpp": frozenset({"add_generation_prompt", "chat_template_kwargs"}),
    "vllm": frozenset({"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"}),
    "sglang": frozenset({"continue_final_message", "chat_template_kwargs"}),
}
"""What of a chat concerns its template, by kind of engine."""


class _HttpTokenizer:
    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    async def model(self) -> str:
        reply = await self._engine.wire.get("/v1/models")
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise self._nonsense("/v1/models names no model", reply) from None

    async def vocabulary(self) -> int | None:
        """See `Tokenizer`."""
        return None

    async def _ids(self, path: str, body: Mapping[str, Any]) -> tuple[int, ...]:
        reply = await self._engine.wire.post(path, body)
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise self._nonsense(f"{path} gave no ids", reply)
        return tuple(ids)

    async def _text(self, path: str, body: Mapping[str, Any], key: str) -> str:
        reply = await self._engine.wire.post(path, body)
        text = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(text, str):
            raise self._nonsense(f"{path} gave no text", reply)
        return text

    def _nonsense(self, what: str, reply: Any) -> EngineMalformedError:
        return EngineMalformedError(f"{what}: {str(reply)[:80]!r}", engine=self._engine.name)


class LlamaCppTokenizer(_HttpTokenizer):
    """Writes special tokens out always."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """As its `/completion` reads a prompt."""
        return await self._ids("/tokenize", {"content": text, "add_special": True, "parse_special": True})

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See `Tokenizer`."""
        return await self._text("/detokenize", {"tokens": list(ids)}, "content") if ids else ""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """See `Tokenizer`."""
        body = {"messages": list(messages), **options}
        return await self.tokenize(await self._text("/apply-template", body, "prompt"))

    async def vocabulary(self) -> int | None:
        """It tells, with its model."""
        reply = await self._engine.wire.get("/v1/models")
        try:
            return int(reply["data"][0]["meta"]["n_vocab"])
        except (KeyError, IndexError, TypeError, ValueError):
            return None


class VllmTokenizer(_HttpTokenizer):
    """Writes special tokens out always. Ids that the model does not know it refuses by itself."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return await self._ids("/tokenize", {"prompt": text, "add_special_tokens": True})

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See `Tokenizer`."""
        return await self._text("/detokenize", {"tokens": list(ids)}, "prompt") if ids else ""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return await self._ids("/tokenize", {"messages": list(messages), **options})


class SglangTokenizer(_HttpTokenizer):
    """Conversations need a release that takes messages at `/tokenize`; an older one refuses them."""

    async def vocabulary(self) -> int | None:
        """From the model's own file, where it lies here too: an id that the model does not know ends this server."""
        reply = await self._engine.wire.get("/model_info")
        try:
            config = json.loads((Path(reply["model_path"]) / "config.json").read_text(encoding="utf-8"))
            return int(config.get("text_config", config)["vocab_size"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return await self._ids("/tokenize", {"prompt": text, "add_special_tokens": True})

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """See `Tokenizer`."""
        body = {"tokens": list(ids), "skip_special_tokens": not special}
        return await self._text("/detokenize", body, "text") if ids else ""

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return await self._ids("/tokenize", {"messages": list(messages), **options})


_KINDS: dict[str, type[LlamaCppTokenizer | VllmTokenizer | SglangTokenizer]] = {
    "llamacpp": LlamaCppTokenizer,
    "vllm": VllmTokenizer,
    "sglang": SglangTokenizer,
}


def tokenizer_of(engine: object) -> Tokenizer | None:
    """The tokenizer of an engine, where it has one that can be asked.

    An adapter that is not over HTTP (a Ray actor) may offer one itself, as an attribute `texts`.
    """
    own: Tokenizer | None = getattr(engine, "texts", None)
    if own is not None:
        return own
    if isinstance(engine, HttpEngine) and engine.kind in _KINDS:
        return _KINDS[engine.kind](engine)
    return None
