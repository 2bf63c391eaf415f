"""What a process of a Ray cluster has written, read through the log agents of Ray's dashboard."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.core.errors import UnreachableError

ANSWER_S = 30


def log_lines(node: str, pid: int, *, tail: int, follow: bool, errors: bool) -> Iterator[str]:
    """Pieces of a worker's log. Raises UnreachableError where the dashboard does not answer."""
    from ray.util.state import get_log

    try:
        yield from get_log(
            node_id=node, pid=pid, tail=tail, follow=follow, suffix="err" if errors else "out", timeout=ANSWER_S
        )
    except Exception as fault:
        first = str(fault).strip().split("\n", 1)[0] or type(fault).__name__
        raise UnreachableError(
            f"the log of process {pid} cannot be read: {first}",
            hint="logs are served by Ray's dashboard: `ray[default]`, not started with --dashboard-port 0",
        ) from None
