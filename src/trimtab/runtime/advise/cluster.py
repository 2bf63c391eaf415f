"""Watches the run's Ray cluster: nodes, allocated and free GPUs, GPU utilization.

Read-only. Ray is queried in a child process, because Ray's client ends its process when the cluster vanishes; so the
loss of the cluster is reported and does not end the command. Utilization comes from the metrics that every Ray node
exports. What is not known is left out.
"""

from __future__ import annotations

import contextlib
import sys
import urllib.request
from dataclasses import dataclass

from trimtab.core.codec import decode, encode
from trimtab.runtime.procs.sampler import ChildSampler, print_samples
from trimtab.runtime.rayapi import auth
from trimtab.runtime.rayapi.node_view import RayView

METRICS_S = 2.0
STALE_S = 60.0  # older samples are not shown
_UTILISATION = "ray_node_gpus_utilization"


@dataclass(frozen=True)
class NodeUtilization:
    """One node. `busy` is the recent utilization of its GPUs by index, if it exports that."""

    name: str
    gpus: float
    free: float
    draining: bool = False
    busy: tuple[tuple[int, float], ...] = ()


class ClusterWatch(ChildSampler[tuple[NodeUtilization, ...]]):
    """Samples the cluster in a child process; reading the latest sample never blocks."""

    def __init__(self, address: str, every_s: float, stale_s: float = STALE_S) -> None:
        self.address = address
        self._stale_s = stale_s
        super().__init__(
            "trimtab.runtime.advise.cluster",
            address,
            str(every_s),
            parse=lambda rows: tuple(decode(NodeUtilization, row) for row in rows),
        )

    def seen(self) -> tuple[NodeUtilization, ...] | str:
        """The nodes, or why they are not known."""
        sample, age_s = self.latest()
        if not self.is_alive:
            return f"the Ray cluster at {self.address} is not watched any more: it is gone"
        if not isinstance(sample, str) and age_s > self._stale_s:
            return f"the Ray cluster at {self.address} has not answered for {self._stale_s:g} s"
        return sample


# ---- the child process -----------------------------------------------------------------------------------------------


def busy_in(page: str) -> list[tuple[int, float]]:
    """GPU utilization by index, from a node's metrics page."""
    found: dict[int, float] = {}
    for line in page.splitlines():
        if line.startswith(_UTILISATION):
            labels, _, value = line.rpartition(" ")
            _, _, index = labels.partition('GpuIndex="')
            with contextlib.suppress(ValueError):
                found[int(index.partition('"')[0])] = min(1.0, float(value) / 100)
    return sorted(found.items())


def _metrics_page(url: str | None) -> str:
    """A node's metrics; empty if it exports none or does not answer."""
    if url is None:
        return ""
    try:
        with urllib.request.urlopen(url, timeout=METRICS_S) as answer:
            return str(answer.read(8 << 20).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""


def _sample(view: RayView) -> list[NodeUtilization]:
    found = []
    for node in view.nodes():
        busy = tuple(busy_in(_metrics_page(node.metrics_url))) if node.gpus else ()
        found.append(NodeUtilization(node.name, node.gpus, node.free.get("GPU", 0.0), node.draining, busy))
    return found


def _connect(address: str) -> RayView:
    auth.match_cluster(address)
    return RayView(address)


if __name__ == "__main__":
    print_samples(lambda: _connect(sys.argv[1]), lambda view: encode(_sample(view)), float(sys.argv[2]))
