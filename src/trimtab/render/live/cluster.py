"""The display of `trimtab cluster start`. It only reads: it changes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.render.live.view import LiveView
from trimtab.render.text import cluster as cluster_text
from trimtab.runtime.localcluster import nodes as local
from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger
from trimtab.runtime.procs import gpus
from trimtab.runtime.rayapi.node_view import FIRST_ANSWER_S, RayViewProcess

REFRESH_EVERY_S = 1.0
GPUS_EVERY_S = 10.0
LIVE_ANSWER_S = 3.0  # timeout for Ray per refresh; after it the status is shown without Ray's part


class ClusterStatusLoop:
    """Collects the status of a cluster repeatedly; a separate process queries Ray."""

    def __init__(self, ledger: Ledger, cluster: ClusterRecord) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._ray_view: RayViewProcess | None = None
        self._gpus: Any = None
        self._gpus_at = -math.inf

    def now(self, timeout_s: float = FIRST_ANSWER_S) -> dict[str, Any]:
        """The status; without Ray's part where Ray does not answer in time."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        ray_nodes, notes = None, []
        try:
            if self._ray_view is None:
                local.auth_of(cluster)
                self._ray_view = RayViewProcess(cluster.address, REFRESH_EVERY_S)
            ray_nodes = self._ray_view.nodes(timeout_s)
        except UnreachableError as fault:
            if self._ray_view is not None and not self._ray_view.is_alive:
                self.close()
            if not cluster.live_nodes:
                raise
            notes.append(fault.what)
        local_gpus, gpu_processes = self._gpus_now(cluster)
        return cluster_text.status_data(cluster, ray_nodes, local_gpus, gpu_processes, notes)

    def status_while_alive(self) -> dict[str, Any] | None:
        """The status; None when the head process has ended."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        if cluster.head is None or not cluster.head.alive:
            return None
        try:
            return self.now(timeout_s=LIVE_ANSWER_S)
        except UnreachableError:  # it has just ended
            return None

    def _gpus_now(self, cluster: ClusterRecord) -> Any:
        """GPUs and the processes on them, cached for GPUS_EVERY_S: querying the driver is slow."""
        if time.monotonic() - self._gpus_at > GPUS_EVERY_S:
            is_local = cluster.head_here or cluster.nodes
            local_gpus = gpus.local_gpus(cluster.fake_gpus) if is_local else gpus.LocalGpus(())
            self._gpus = local_gpus, {} if local_gpus.fake else gpus.pids_by_gpu()
            self._gpus_at = time.monotonic()
        return self._gpus

    def close(self) -> None:
        if self._ray_view is not None:
            self._ray_view.close()
            self._ray_view = None


def watch(read_status: Callable[[], dict[str, Any] | None], hints: Sequence[str]) -> None:
    """Show the cluster until `read_status` returns None: it has ended."""
    below = [*hints, "", "Ctrl-C ends the cluster"]
    with LiveView(lambda data: cluster_text.picture(data, below), cluster_text.change_lines, stays=True) as view:
        while (data := read_status()) is not None:
            view.show(data)
            time.sleep(REFRESH_EVERY_S)
