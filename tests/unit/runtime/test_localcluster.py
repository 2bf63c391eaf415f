"""Starting nodes of a local cluster, with a view of Ray that is a stand-in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.core.errors import UnreachableError
from trimtab.runtime.localcluster import nodes
from trimtab.runtime.localcluster.ledger import NodePhase


def test_a_view_of_ray_that_ended_while_the_head_was_slow_to_start_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views: list[View] = []

    class View:
        def __init__(self, address: str) -> None:
            views.append(self)
            self.address, self.is_alive, self.closed = address, len(views) > 1, False

        def nodes(self, wait_s: float) -> list[Any]:
            if not self.is_alive:
                raise UnreachableError("it stopped answering")
            return [SimpleNamespace(node_id="abc")]

        def close(self) -> None:
            self.closed = True

    head: Any = SimpleNamespace(name="head", mark="m", node_id="abc", phase=NodePhase.starting, log="", cause="")
    cluster: Any = SimpleNamespace(address="10.0.0.1:6379", nodes=(head,), temp_dir="/nowhere")
    ledger: Any = SimpleNamespace(read=lambda: {"one": cluster}, update=lambda mark, **facts: head)
    monkeypatch.setattr(nodes, "RayViewProcess", View)
    monkeypatch.setattr(nodes, "start_error", lambda *_: "nothing said")
    assert nodes.settle(ledger, cluster, [head], time.monotonic() + 2, lambda _: None) == [head]
    assert [(view.address, view.closed) for view in views] == [("10.0.0.1:6379", True)] * 2
