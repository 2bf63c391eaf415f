"""What a dashboard shows, as its server sees it: whoever has something to show implements this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class PageSource(Protocol):
    """Called from one thread at a time, but not always the same. May take its time."""

    def look(self) -> Mapping[str, Any] | None:
        """What has changed since the last look, as plain data that can be written as JSON; None where nothing did."""

    def whole(self) -> Mapping[str, Any]:
        """All that the looks until now have told, for somebody who knows nothing yet."""

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """The story of a task, worker, node, component, move or mark; None where there is no such one."""

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """Everything that is served as it is: path, kind and content. The page itself is at `/`."""

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Change something and say what came of it. Raises a TrimtabError; InputError for what it does not know."""
