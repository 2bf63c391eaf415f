"""Connections to nodes are held whatever goes wrong while they are listened to."""

from __future__ import annotations

import asyncio
from typing import Any

from trimtab.machines.nodes.events import HeartbeatReceived, NodeEvent
from trimtab.runtime.controller.clients import ClientRegistry
from trimtab.runtime.controller.heartbeats import AgentAddress, NodeHeartbeats, serve_heartbeats
from trimtab.runtime.procs.background import Background


async def test_beats_are_heard_after_an_event_that_could_not_be_told() -> None:
    background, told, heard = Background(), [], asyncio.Event()

    def tell(event: NodeEvent) -> None:
        told.append(event)
        if len(told) == 1:
            raise ValueError("odd")
        heard.set()

    server, place = await serve_heartbeats("127.0.0.1")

    async def where(node: str) -> AgentAddress:
        return place

    links = NodeHeartbeats(tell, where, 60.0, background)
    links.open("node", place)
    await asyncio.wait_for(heard.wait(), 60)
    assert told == [HeartbeatReceived("node")] * 2
    assert [row["failures"] for row in background.status() if row["name"] == "heartbeats of node node"] == [1]
    links.close()
    server.close()
    await background.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}  # of the server: each holds a connection
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(10):
        await asyncio.sleep(0)  # in which connections close


async def test_the_autoscaler_is_asked_again_when_it_could_not_be(monkeypatch: Any) -> None:
    from ray.autoscaler import sdk

    asked, answered = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def request(bundles: list[dict[str, float]]) -> None:
        asked.append(bundles)
        if len(asked) == 1:
            raise ConnectionError("no head node")
        loop.call_soon_threadsafe(answered.set)

    monkeypatch.setattr(sdk, "request_resources", request)
    background = Background()
    board = ClientRegistry(background)
    board.want("client", [{"gpu": 2}])
    await asyncio.wait_for(answered.wait(), 60)
    assert asked == [[{"GPU": 2}], [{"GPU": 2}]]
    assert board._requesting is not None
    await asyncio.wait_for(board._requesting, 60)
    assert board.fault is None
    await background.close()
