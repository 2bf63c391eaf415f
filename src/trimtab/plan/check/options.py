"""Options that exclude each other: rows of a table, compared with what a config says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.plan.check.findings import CheckFinding, Remedy, Severity, releases, within
from trimtab.plan.check.setup import RunSetup


class Exclusion(Frozen):
    """When all of `when` hold, the run stops. Values are equal, one of a list, `set`, `unset`, `> n` or `not x`."""

    framework: str
    when: Mapping[str, Any]
    why: str
    cure: Mapping[str, Any]
    source: str
    dated: str
    cost: str = "nothing"
    since: str = ""
    until: str = ""
    severity: Severity = "error"


def found(run: RunSetup, exclusions: tuple[Exclusion, ...]) -> Iterator[CheckFinding]:
    for row in exclusions:
        if row.framework not in ("", run.framework) or not within(run.version, row.since, row.until):
            continue
        if all(matches(run.options.get(key), wanted) for key, wanted in row.when.items()):
            said = ", ".join(f"{key}={_shown(run.options.get(key))}" for key in row.when)
            words = ", ".join(f"{key}={_shown(value)}" for key, value in row.cure.items())
            cures = (Remedy(row.cure, row.cost, words),) if row.cure else ()
            yield CheckFinding(
                f"these options exclude each other: {said}",
                row.why,
                tuple(row.when),
                cures,
                row.severity,
                "options",
                "options",
                row.source,
                row.dated,
                releases((row.framework,), row.since, row.until),
            )


def matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(matches(value, one) for one in wanted)
    if wanted == "set":
        return value is not None
    if wanted == "unset":
        return value is None
    if isinstance(wanted, str) and wanted.startswith("> "):
        return isinstance(value, int | float) and not isinstance(value, bool) and value > float(wanted[2:])
    if isinstance(wanted, str) and wanted.startswith("not "):
        return value is not None and str(value) != wanted[4:]
    return type(value) is type(wanted) and bool(value == wanted)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
