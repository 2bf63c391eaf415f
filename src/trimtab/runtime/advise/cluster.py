"""What the run's Ray cluster does: nodes, GPUs given away and free, and how busy each GPU is.

Only looks. A process of its own asks Ray (whose client ends the whole process when a cluster vanishes), so that the
loss of the cluster is something to be told and not the end of the command. How busy GPUs are comes from the figures
that every Ray node exports. What is not known is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.runtime.localcluster import auth
from trimtab.runtime.localcluster.ray_status import RayView
from trimtab.runtime.procs.background import Background, RestartPolicy

METRICS_S = 2.0
STALE_S = 60.0  # a look that is older than this is not shown
_UTILISATION = "ray_node_gpus_utilization"


@dataclass(frozen=True)
class NodeUtilization:
    """One node. `busy` are the shares of time in which its GPUs computed lately, by index, where it tells."""

    name: str
    gpus: float
    free: float
    draining: bool = False
    busy: tuple[tuple[int, float], ...] = ()


class ClusterWatch:
    """Has another process look again and again; asking it never waits."""

    def __init__(self, address: str, every_s: float, stale_s: float = STALE_S) -> None:
        self.address = address
        self._stale_s = stale_s
        self._child = subprocess.Popen(
            [sys.executable, "-m", "trimtab.runtime.advise.cluster", address, str(every_s)],
            stdin=subprocess.PIPE,  # its end is the child's
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        self._latest: tuple[NodeUtilization, ...] | str = "it has not answered yet"
        self._at = time.monotonic()
        # A line that makes no sense is logged, and the next one is read.
        self._reader = Background(RestartPolicy(max_failures=None, max_backoff_s=1.0)).start_thread(
            "advise", self._read
        )

    def seen(self) -> tuple[NodeUtilization, ...] | str:
        """The nodes, or why nothing is known of them."""
        if self._child.poll() is not None:
            return f"the Ray cluster at {self.address} is not looked at any more: it went away"
        if not isinstance(self._latest, str) and time.monotonic() - self._at > self._stale_s:
            return f"the Ray cluster at {self.address} has not answered for {self._stale_s:g} s"
        return self._latest

    def close(self) -> None:
        """Look no more."""
        self._child.kill()
        self._child.wait()
        self._reader.join(5)
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            told = json.loads(line)
            if isinstance(told, str):
                self._latest = told
            else:
                self._latest = tuple(
                    NodeUtilization(**{**node, "busy": tuple((int(at), float(share)) for at, share in node["busy"])})
                    for node in told
                )
            self._at = time.monotonic()


# ---- the process that looks ------------------------------------------------------------------------------------------


class _View(RayView):
    """Also knows where every node exports its figures."""

    def exports(self) -> dict[str, str]:
        """Where to read the figures of each node."""
        rows = self._asked(self._state.node_table)
        return {
            row["NodeID"]: f"http://{row['NodeManagerAddress']}:{row['MetricsExportPort']}/metrics"
            for row in rows
            if row.get("Alive") and row.get("MetricsExportPort")
        }


def busy_in(page: str) -> list[tuple[int, float]]:
    """How busy the GPUs of a node are, by its exported figures."""
    found: dict[int, float] = {}
    for line in page.splitlines():
        if line.startswith(_UTILISATION):
            labels, _, value = line.rpartition(" ")
            _, _, index = labels.partition('GpuIndex="')
            with contextlib.suppress(ValueError):
                found[int(index.partition('"')[0])] = min(1.0, float(value) / 100)
    return sorted(found.items())


def _page(url: str | None) -> str:
    """A node's figures; nothing where it exports none or does not answer."""
    if url is None:
        return ""
    try:
        with urllib.request.urlopen(url, timeout=METRICS_S) as answer:
            return str(answer.read(8 << 20).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""


def _look(view: _View) -> list[dict[str, Any]]:
    exports = view.exports()
    found = []
    for node in view.nodes():
        total, free = dict(node.total).get("gpu", 0.0), dict(node.free).get("gpu", 0.0)
        busy = busy_in(_page(exports.get(node.node_id))) if total else []
        found.append({"name": node.name, "gpus": total, "free": free, "draining": node.draining, "busy": busy})
    return found


def main() -> None:
    """Print what is seen, a line each time, until whoever asked is gone."""
    address, every_s = sys.argv[1], float(sys.argv[2])

    def leave() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    view: _View | None = None
    while True:
        try:
            if view is None:
                auth.match_cluster(address)
                view = _View(address)
            told: Any = _look(view)
        except TrimtabError as fault:
            view, told = None, fault.what
        print(json.dumps(told), flush=True)
        time.sleep(every_s)


if __name__ == "__main__":
    main()
