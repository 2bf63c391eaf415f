"""Refuses unknown names and keys of scenario files, with the nearest known one as a hint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.core.errors import InputError
from trimtab.formats.files import meant


def check_name(name: str, known: Iterable[str], where: str, what: str = "{} is not known here") -> None:
    if name not in known:
        raise InputError(what.format(name), where=where, hint=meant(name, known, "known: " + ", ".join(known)))


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    for key in given:
        check_name(str(key), known, where)


def check_unique(names: Sequence[str], where: str) -> None:
    """Policies of a scenario must have different names."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two policies are named {name}", where=where, hint="give one a `name`")
