"""Ray's token authentication: on for a node exactly when it is on for the cluster.

Ray turns it on for a head by itself when a token lies about, but never for a worker or a driver, which then fail after
twenty seconds; so every process gets the mode explicitly. A new cluster does as Ray would. For one of ours the
environment of its head is read; any other is asked. Mode and token travel in environments only: they are not written
down and the token is not printed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.procs.processes import ProcessIdentity, environment

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ON, OFF = "token", "disabled"
_HOW_TO = "`ray get-auth-token --generate` makes a token; RAY_AUTH_MODE=disabled does without"
_PROBE_S = 10


def for_new_cluster(outside: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a new cluster need: as Ray decides for a head, told to all."""
    asked = outside.get(MODE)
    mode = (asked or (ON if has_token(outside) else OFF)).lower()
    if mode == ON and not has_token(outside):
        raise InputError("RAY_AUTH_MODE is token, but there is no token", where="environment", hint=_HOW_TO)
    return {MODE: mode, **_tokens(outside)}


def of_head(head: ProcessIdentity) -> dict[str, str]:
    """What the head of a cluster of ours was started with; empty where that cannot be read."""
    theirs = environment(head.pid) if head.alive else {}
    return {MODE: theirs[MODE], **_tokens(theirs)} if MODE in theirs else {}


def of_cluster_at(address: str, outside: Mapping[str, str]) -> dict[str, str]:
    """What a cluster of somebody else wants, by asking it: first without a token, then with."""
    adopt({MODE: OFF})
    if _accepted(address):
        return {MODE: OFF}
    if not has_token(outside):
        raise UnreachableError(
            f"the cluster at {address} wants a token, and there is none here",
            hint="put the cluster's token into ~/.ray/auth_token, or its path into RAY_AUTH_TOKEN_PATH",
        )
    wanted = {MODE: ON, **_tokens(outside)}
    adopt(wanted)
    if not _accepted(address):
        raise UnreachableError(
            f"the cluster at {address} does not take the token that is here",
            hint="the token is the one of the machine where its head was started",
        )
    return wanted


def suit(address: str) -> None:
    """Have this process speak to a cluster as that wants it; what the user has set stays where it works."""
    if os.environ.get(MODE) and _accepted(address):
        return
    of_cluster_at(address, os.environ)


def adopt(wanted: Mapping[str, str]) -> None:
    """Have this process speak to Ray so, also when it has imported Ray already."""
    for name in (MODE, TOKEN, TOKEN_PATH):
        if name in wanted:
            os.environ[name] = wanted[name]
        elif wanted.get(MODE) == ON:
            os.environ.pop(name, None)  # the cluster's token is not the one named here
    if "ray" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):
            from ray._raylet import AuthenticationTokenLoader, Config

            Config.initialize("")
            AuthenticationTokenLoader.instance().reset_cache()


def has_token(outside: Mapping[str, str]) -> bool:
    """Whether Ray would find a token."""
    if outside.get(TOKEN):
        return True
    if path := outside.get(TOKEN_PATH):
        return Path(path).is_file()
    home = outside.get("HOME")
    return (Path(home) if home else Path.home()).joinpath(".ray", "auth_token").is_file()


def _tokens(outside: Mapping[str, str]) -> dict[str, str]:
    return {name: outside[name] for name in (TOKEN, TOKEN_PATH) if outside.get(name)}


def _accepted(address: str) -> bool:
    """Whether the cluster answers us as we are; raises UnreachableError where it does not answer at all."""
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError

    try:
        with _no_words_from_ray():
            GcsClient(address=address).get_all_node_info(timeout=_PROBE_S)
    except AuthenticationError:
        return False
    except Exception as fault:
        lines = str(fault).strip().splitlines()
        raise UnreachableError(
            f"no Ray cluster answers at {address}: {lines[0] if lines else type(fault).__name__}",
            hint="`trimtab cluster start` starts one here; `ray status` on its head shows whether another runs",
        ) from None
    return True


@contextlib.contextmanager
def _no_words_from_ray() -> Iterator[None]:
    """Ray's own lines about a refusal, written past Python, say less than we do."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
