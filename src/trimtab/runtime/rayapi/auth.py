"""Ray's token authentication: on for a node exactly if it is on for the cluster.

Ray turns it on for a head by itself if it finds a token, but never for a worker or a driver, which then fail after 20
s; so every process gets the mode explicitly. A new cluster does as Ray would. For a cluster of trimtab the environment
of its head is read; any other is probed. Mode and token are passed in environments only: they are never written down,
and the token is not printed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.procs.processes import ProcessIdentity, environment
from trimtab.runtime.rayapi.private import gcs_client

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ON, OFF = "token", "disabled"
_HOW_TO = "`ray get-auth-token --generate` makes a token; RAY_AUTH_MODE=disabled does without"
_PROBE_S = 10


def new_cluster_auth(env: Mapping[str, str]) -> dict[str, str]:
    """Environment for the processes of a new cluster: the mode that Ray would choose for a head."""
    requested = env.get(MODE)
    mode = (requested or (ON if has_token(env) else OFF)).lower()
    if mode == ON and not has_token(env):
        raise InputError("RAY_AUTH_MODE is token, but there is no token", where="environment", hint=_HOW_TO)
    return {MODE: mode, **_tokens(env)}


def head_auth(head: ProcessIdentity) -> dict[str, str]:
    """Mode and token that a head of trimtab was started with; empty if that cannot be read."""
    head_env = environment(head.pid) if head.alive else {}
    return {MODE: head_env[MODE], **_tokens(head_env)} if MODE in head_env else {}


def cluster_auth(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Mode and token that another cluster requires, by probing: first without a token, then with."""
    adopt({MODE: OFF})
    if _is_accepted(address):
        return {MODE: OFF}
    if not has_token(env):
        raise UnreachableError(
            f"the cluster at {address} requires a token, and there is none here",
            hint="put the cluster's token into ~/.ray/auth_token, or its path into RAY_AUTH_TOKEN_PATH",
        )
    wanted = {MODE: ON, **_tokens(env)}
    adopt(wanted)
    if not _is_accepted(address):
        raise UnreachableError(
            f"the cluster at {address} does not accept the token that is here",
            hint="the token is the one of the machine where its head was started",
        )
    return wanted


def match_cluster(address: str) -> None:
    """Set this process's mode to that of a cluster; what the user has set stays if it works."""
    if os.environ.get(MODE) and _is_accepted(address):
        return
    cluster_auth(address, os.environ)


def adopt(wanted: Mapping[str, str]) -> None:
    """Set this process's mode and token, also if Ray is imported already (seen with Ray 2.60)."""
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


def has_token(env: Mapping[str, str]) -> bool:
    """Whether Ray would find a token."""
    if env.get(TOKEN):
        return True
    if path := env.get(TOKEN_PATH):
        return Path(path).is_file()
    home = env.get("HOME")
    return (Path(home) if home else Path.home()).joinpath(".ray", "auth_token").is_file()


def _tokens(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in (TOKEN, TOKEN_PATH) if env.get(name)}


def _is_accepted(address: str) -> bool:
    """Whether the cluster accepts this process's mode; UnreachableError if it does not answer."""
    from ray.exceptions import AuthenticationError

    try:
        with _silence_ray():
            gcs_client(address).get_all_node_info(timeout=_PROBE_S)
    except AuthenticationError:
        return False
    except Exception as fault:
        raise UnreachableError(
            f"no Ray cluster answers at {address}: {first_line(fault)}",
            hint="`trimtab cluster start` starts one here; `ray status` on its head shows whether another runs",
        ) from None
    return True


@contextlib.contextmanager
def _silence_ray() -> Iterator[None]:
    """Suppress Ray's own messages about a refusal, which bypass Python's stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
