"""Interface between the dashboard's server and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class PageSource(Protocol):
    """Called from one thread at a time, but not always the same. May block."""

    def look(self) -> Mapping[str, Any] | None:
        """Changes since the last call, as data for JSON; None without any."""

    def whole(self) -> Mapping[str, Any]:
        """The full state after all calls of `look`, for a new client."""

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """The story of a task, worker, node, component, move or mark; None if it does not exist."""

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """Static files: path, media type and content. The page itself is at `/`."""

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Change something; returns a sentence. Raises a TrimtabError; InputError if `what` is unknown."""
