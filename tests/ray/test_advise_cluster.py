"""The cluster of a followed run is looked at and never touched; that it goes away is told."""

from __future__ import annotations

import http.server
import os
import threading
from typing import Any, cast

import pytest
from ray.cluster_utils import Cluster

from trimtab.core.errors import UnreachableError
from trimtab.runtime.advise.samples import ClusterWatch, _sample, busy_in
from trimtab.runtime.rayapi.gcs_snapshot import find
from trimtab.runtime.rayapi.nodes import RayNode
from waiting import until

WAIT_S = 240.0


def test_nodes_and_gpus_are_seen_and_the_end_of_the_cluster_is_told() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    head = {"num_cpus": 1, "num_gpus": 2, "node_name": "one", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    watch = ClusterWatch(find(cluster.address), every_s=0.2, stale_s=8.0)
    try:
        until(lambda: not isinstance(watch.seen(), str))
        seen = watch.seen()
        assert not isinstance(seen, str)
        assert [(one.name, one.gpus, one.free, one.draining) for one in seen] == [("one", 2.0, 2.0, False)]
        cluster.add_node(num_cpus=1, num_gpus=4, node_name="two")
        until(lambda: len(watch.seen()) == 2 and not isinstance(watch.seen(), str))
    finally:
        cluster.shutdown()
    until(lambda: isinstance(watch.seen(), str))
    watch.close()


def test_a_cluster_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(UnreachableError):
        find("127.0.0.1:9")


def test_how_busy_gpus_are_is_read_from_a_nodes_figures() -> None:
    page = (
        "# HELP ray_node_gpus_utilization Total GPU usage.\n"
        'ray_node_gpus_utilization{GpuDeviceName="H200",GpuIndex="1",ip="10.0.0.1"} 40.0\n'
        'ray_node_gpus_utilization{GpuDeviceName="H200",GpuIndex="0",ip="10.0.0.1"} 97.0\n'
        'ray_node_gpus_utilization{ip="10.0.0.1"} 3.0\nray_node_gpus_available{GpuIndex="0"} 8\n'
    )
    assert busy_in(page) == [(0, 0.97), (1, 0.4)]
    assert busy_in("<html>no figures</html>") == []


class _Figures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'ray_node_gpus_utilization{GpuIndex="0"} 97.0\nray_node_gpus_utilization{GpuIndex="1"} 3.0\n')

    def log_message(self, *_: Any) -> None:
        pass


def test_nodes_are_asked_for_their_figures_and_one_that_does_not_answer_is_shown_without() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Figures)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    class View:
        def nodes(self) -> list[Any]:
            ports = {"a": server.server_port, "b": 9}
            return [
                RayNode(name, name=name, address="127.0.0.1", metrics_port=port, resources={"GPU": 2.0})
                for name, port in ports.items()
            ]

    found = _sample(cast(Any, View()))
    server.shutdown()
    server.server_close()
    thread.join(5)
    assert [(one.name, one.busy) for one in found] == [("a", ((0, 0.97), (1, 0.03))), ("b", ())]
