"""Which calls a server has, and which fields they take: asked of the server, not concluded from its release.

The OpenAPI page names all calls with their fields. A server that hides it is asked for each path with OPTIONS, which
changes nothing: 404 means that there is no such call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.runtime.engines.engine import EngineGoneError, EngineWedgedError
from trimtab.runtime.engines.wire import EngineHttpClient, NoSuchPathError


@dataclass(frozen=True)
class ServedCalls:
    """Calls of a server. `fields` has the query parameters and body fields of a call; None: not said."""

    paths: frozenset[str] = frozenset()
    fields: Mapping[str, frozenset[str]] | None = field(default=None)

    def has(self, path: str) -> bool:
        return path in self.paths

    def takes(self, path: str, name: str, otherwise: bool) -> bool:
        """Whether the call takes this field; `otherwise` where the server does not say."""
        known = None if self.fields is None else self.fields.get(path)
        return self.has(path) and (otherwise if not known else name in known)


async def served_calls(wire: EngineHttpClient, paths: Collection[str]) -> ServedCalls:
    """Asks the server which of these calls it has."""
    try:
        page = await wire.get("/openapi.json")
    except (EngineGoneError, EngineWedgedError):
        raise
    except TrimtabError:
        page = None
    if isinstance(page, dict) and isinstance(page.get("paths"), dict):
        found = {path: _fields(page, call) for path, call in page["paths"].items() if path in paths}
        if found:
            return ServedCalls(frozenset(found), found)
    return ServedCalls(frozenset([path for path in paths if await _exists(wire, path)]))


async def _exists(wire: EngineHttpClient, path: str) -> bool:
    try:
        await wire.options(path)
    except NoSuchPathError:
        return False
    except (EngineGoneError, EngineWedgedError):
        raise
    except TrimtabError:
        pass  # 405: the call exists, with another method
    return True


def _fields(page: dict[str, Any], call: Any) -> frozenset[str]:
    """Names of the query parameters and body fields of all methods of a call."""
    found: set[str] = set()
    for method in call.values() if isinstance(call, dict) else ():
        if not isinstance(method, dict):
            continue
        found |= {str(parameter.get("name")) for parameter in method.get("parameters") or ()}
        for content in ((method.get("requestBody") or {}).get("content") or {}).values():
            found |= _properties(page, content.get("schema") or {}, 0)
    return frozenset(found)


def _properties(page: dict[str, Any], schema: dict[str, Any], depth: int) -> set[str]:
    if depth > 4:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        schema = ((page.get("components") or {}).get("schemas") or {}).get(reference.rpartition("/")[2]) or {}
    found = set(schema.get("properties") or ())
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())):
        found |= _properties(page, part, depth + 1)
    return found
