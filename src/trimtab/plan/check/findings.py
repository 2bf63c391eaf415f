"""What a check answers: findings with their cause, the keys they are about, and cures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from trimtab.core.frozen import Frozen
from trimtab.plan.check.setup import RunSetup

Cause = Literal[
    "gpu memory", "sleep and wake", "kv cache", "host memory", "sizes", "nodes", "context", "options", "ray"
]
Severity = Literal["error", "warning"]


class Remedy(Frozen):
    """Values that cure a finding, by trimtab's names, and what they cost."""

    values: Mapping[str, Any]
    cost: str
    words: str = ""

    def text(self, run: RunSetup) -> str:
        """`key=value` in the framework's keys."""
        return self.words or ", ".join(_setting(run, name, value) for name, value in self.values.items())


class CheckFinding(Frozen):
    """One thing that is wrong: what happens, why, the values it is about, and cures with the cheapest first."""

    what: str
    why: str
    names: tuple[str, ...]
    cures: tuple[Remedy, ...] = ()
    severity: Severity = "error"
    rule: str = ""
    cause: Cause = "sizes"
    source: str = ""
    dated: str = ""
    releases: str = ""
    """Of which framework the rule holds."""


class CheckRule(Frozen):
    """A rule: its cause, for which frameworks and versions it holds, when that was seen, and a thread or file."""

    name: str
    cause: Cause
    find: Callable[[RunSetup], Iterable[CheckFinding]]
    source: str
    dated: str
    frameworks: tuple[str, ...] = ()
    since: str = ""
    until: str = ""

    def holds(self, run: RunSetup) -> bool:
        """Whether it is about this framework and version; an unknown version is a current one."""
        if self.frameworks and run.framework not in self.frameworks:
            return False
        return within(run.version, self.since, self.until)


def releases(frameworks: tuple[str, ...], since: str, until: str) -> str:
    """`verl from 0.7`, `any framework`."""
    named = " and ".join(name for name in frameworks if name) or "any framework"
    bounds = [f"from {since}"] * bool(since) + [f"before {until}"] * bool(until)
    return " ".join([named, *bounds])


def within(version: str, since: str, until: str) -> bool:
    """Whether a version is in [since, until); an unknown one is the newest."""
    if not version:
        return not until
    found = parts(version)
    return (not since or found >= parts(since)) and (not until or found < parts(until))


def parts(version: str) -> tuple[int, ...]:
    """`v0.8.5.post1` as (0, 8, 5)."""
    numbers: list[int] = []
    for word in version.lstrip("v").split("."):
        if not word.isdigit():
            digits = word[: next((at for at, char in enumerate(word) if not char.isdigit()), 0)]
            return (*numbers, int(digits)) if digits else tuple(numbers)
        numbers.append(int(word))
    return tuple(numbers)


def _setting(run: RunSetup, name: str, value: Any) -> str:
    if name in ("gpus", "host_memory"):
        return f"{value:,} {'GPUs' if name == 'gpus' else 'GB of host memory'}"
    if name == "mini_batch" and run.framework == "verl":  # counts prompts
        value = value // (run.group or 1)
    return f"{run.key(name)}={_word(value)}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
