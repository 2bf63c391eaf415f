"""The dashboard of a cluster: pools, queue with reasons, evictions and stories of a real controller."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dashboard_pages import TOKEN
from trimtab.cli.options import controller_session
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.dashboard.server import DashboardServer
from trimtab.runtime.rayapi.connect import connected


class Actor:
    def save(self) -> int:
        return 1


@pytest.fixture
def session() -> Iterator[Session]:
    with connected(cpus=4):
        session = connect(name="shown")
        yield session
        session.shutdown()


@pytest.fixture
def server(session: Session) -> Iterator[DashboardServer]:
    source = DashboardSource(None, lambda: controller_session(None, "shown"))
    with DashboardServer(source, 0, environment={"TRIMTAB_DASHBOARD_TOKEN": TOKEN}) as server:
        yield server
    source.close()


def got(server: DashboardServer, path: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(server.url + path, body, {"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def until(server: DashboardServer, so: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    end = time.monotonic() + 60
    while not so(panels := got(server, "state")["panels"]):
        assert time.monotonic() < end, panels
        time.sleep(0.1)
    return dict(panels)


@pytest.mark.long
def test_a_cluster_is_shown_with_its_queue_and_evictions_and_changed_only_by_asking(
    session: Session, server: DashboardServer
) -> None:
    session.preemption(label_rules={"role": {"train": ["rollout"]}})
    pool = session.pool("train", quota={"cpu": 2})
    for number in range(2):
        name, labels = f"low-{number}", {"role": "rollout"}
        pool.submit(Actor, resources={"cpu": 1}, id=name, labels=labels, priority=1.0).wait("running", timeout=60)
    pool.submit(Actor, resources={"cpu": 1}, id="high", labels={"role": "train"}, priority=9.0).wait(timeout=60)
    shown = until(server, lambda panels: "high" in panels["evictions"])
    assert "2 cpu of 2 cpu" in shown["pools"]
    assert "low-" in shown["queue"]
    evicted = next(name for name in ("low-0", "low-1") if f'data-name="{name}"' in shown["queue"])
    story = got(server, f"story?kind=task&name={evicted}")
    assert dict(story["facts"])["state"] == "evicted"
    assert any("high" in chapter[2] for chapter in story["chapters"])
    assert dict(got(server, "story?kind=pool&name=train")["facts"])["state"] == "open"
    node = got(server, f"story?kind=node&name={session.status()['nodes'][0]['node']}")
    assert "high" in dict(node["facts"])["tasks"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        got(server, "story?kind=pool&name=nobody")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        got(server, "change/drain-pool", b'{"pool": "nobody"}')
    assert not session.status()["pools"]["train"]["drained"]
    assert got(server, "change/drain-pool", b'{"pool": "train"}') == {"said": "pool train starts nothing new"}
    assert session.status()["pools"]["train"]["drained"]
