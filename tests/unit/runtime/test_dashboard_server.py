"""The dashboard's server over real HTTP: who may look, who may change something, and who is dropped."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard_pages import TOKEN, Growing, serving
from trimtab.cli.show import beside
from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.html.dashboard.source import DashboardSource
from trimtab.runtime.dashboard import app as dashboard_app
from trimtab.runtime.dashboard.server import DashboardServer
from trimtab.runtime.run import folder as run_folder


@pytest.fixture
def run(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "run").start()


@pytest.fixture
def server(run: Growing) -> Iterator[DashboardServer]:
    with serving(run.folder) as started:
        yield started


def asked(
    server: DashboardServer, path: str, method: str = "GET", body: bytes | None = None, **heads: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in heads.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


class Stream:
    """Somebody who looks: reads messages one by one."""

    def __init__(self, server: DashboardServer, last: str = "", *, by_header: bool = True) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        path = "/events" if by_header or not last else f"/events?after={last}"
        self._connection.request("GET", path, headers={"Last-Event-ID": last} if last and by_header else {})
        self._answer = self._connection.getresponse()
        assert self._answer.getheader("content-type") == "text/event-stream"

    def next(self) -> tuple[str, str, Any]:
        """The next message: what, its id, its data."""
        found: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\n")
            assert line or found or not self._answer.isclosed()
            if line and not line.startswith(":"):
                key, _, value = line.partition(": ")
                found[key] = value
            elif "event" in found:
                return found["event"], found.get("id", ""), json.loads(found["data"])
            elif not line:
                found = {}

    def close(self) -> None:
        self._connection.close()


def test_the_page_and_its_files_come_with_a_strict_policy(server: DashboardServer) -> None:
    status, heads, page = asked(server, "/")
    assert status == 200
    assert heads["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in heads["content-security-policy"]
    assert "unsafe" not in heads["content-security-policy"]
    assert b"<script>" not in page
    assert b"style=" not in page
    for path in (
        "/dashboard.js",
        "/dashboard.css",
        "/report.css",
        "/timeline.css",
        "/run_report.css",
    ):
        status, heads, content = asked(server, path)
        assert (status, heads["x-content-type-options"]) == (200, "nosniff")
        assert content
    assert asked(server, "/../pyproject.toml")[0] == 404
    assert asked(server, "/assets/report.css")[0] == 404


def test_a_host_or_an_origin_of_another_machine_is_refused(server: DashboardServer) -> None:
    assert asked(server, "/", Host="evil.example")[0] == 421
    assert asked(server, "/events", Host="10.0.0.1:8270")[0] == 421
    assert asked(server, "/state", Origin="http://evil.example")[0] == 403
    assert asked(server, "/", Host=f"localhost:{server.port}")[0] == 200
    assert asked(server, "/state", Origin=f"http://127.0.0.1:{server.port}")[0] == 200


def test_whatever_changes_something_needs_the_token(run: Growing) -> None:
    def heard() -> list[dict[str, Any]]:
        return run_folder.take_requests(run.folder, run_folder.RUN_QUEUE)

    with serving(run.folder) as server:
        assert json.loads(asked(server, "/state")[2])["changes"] == ["replan", "drain-worker", "resume-worker"]
        assert asked(server, "/change/replan", "POST")[0] == 401
        assert asked(server, "/change/replan", "POST", Authorization="Bearer a-token-of-somebody-else")[0] == 401
        for alien in ({"Host": "elsewhere.example"}, {"Origin": "http://elsewhere.example"}):
            assert asked(server, "/change/replan", "POST", Authorization=f"Bearer {TOKEN}", **alien)[0] in (403, 421)
        assert asked(server, "/change/replan", "GET", Authorization=f"Bearer {TOKEN}")[0] in (404, 405)
        assert heard() == []
        status, _, said = asked(server, "/change/replan", "POST", b"{}", Authorization=f"Bearer {TOKEN}")
        assert (status, heard()) == (200, [{"ask": "replan", "why": "asked on the dashboard"}])
        assert "requested" in json.loads(said)["said"]
        assert asked(server, "/change/replan", "POST", b"[1]", Authorization=f"Bearer {TOKEN}")[0] == 400
        assert asked(server, "/change/drain-node", "POST", b"{}", Authorization=f"Bearer {TOKEN}")[0] == 400
        assert asked(server, "/change/replan", "POST", b" " * 20_000, Authorization=f"Bearer {TOKEN}")[0] == 413


def test_a_port_in_use_is_said_and_the_next_one_is_taken(run: Growing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(run.folder, port) as server:
            assert server.port != port
            assert server.announcement == f"dashboard: http://127.0.0.1:{server.port}/ (port {port} is in use)"
            assert asked(server, "/")[0] == 200
    with pytest.raises(InputError, match="port is 70000"), serving(run.folder, 70_000):
        pass


def test_the_token_is_in_a_file_for_its_owner_alone_and_goes_with_the_server(run: Growing, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with DashboardServer(DashboardSource(run.folder), 0, environment={}, token_file=file) as server:
        assert file.stat().st_mode & 0o777 == 0o600
        assert server.token_source == f"the token to change something is in {file}"
        assert file.read_text() not in server.announcement + server.token_source
    assert not file.exists()
    with pytest.raises(InputError, match="16 characters"):
        DashboardServer(DashboardSource(run.folder), 0, environment={"TRIMTAB_DASHBOARD_TOKEN": "short"}).__enter__()


def test_changes_come_as_they_happen_and_whoever_comes_back_gets_what_it_missed(
    run: Growing, server: DashboardServer
) -> None:
    stream = Stream(server)
    what, _, data = stream.next()
    assert what == "whole"
    assert data["title"] == "run"
    run.preempt()
    told: list[Any] = []
    while not any("rollout-w1" in one.get("panels", {}).get("tasks", "") for one in told):
        what, last, one = stream.next()
        assert what == "change"
        told.append(one)
    stream.close()
    run.join_and_move()
    for by_header in (True, False):
        again = Stream(server, last, by_header=by_header)
        what, _, one = again.next()
        assert what == "change"
        again.close()
    other = Stream(server, "0000-3")
    assert other.next()[0] == "whole"
    other.close()


def test_how_a_run_ended_is_told_before_the_server_ends_with_it(run: Growing) -> None:
    with DashboardServer(DashboardSource(run.folder), 0, every_s=30.0, environment={}) as server:
        stream = Stream(server)
        assert stream.next()[0] == "whole"
        run.tell("ended", state="done", code="COMPLETED", reason="all are done", iteration=5)
    what, _, data = stream.next()
    assert what == "change"
    assert "all are done" in data["panels"]["standing"]
    stream.close()


def test_after_a_restart_a_client_is_told_everything_anew(run: Growing) -> None:
    with serving(run.folder) as server:
        stream = Stream(server)
        _, last, _ = stream.next()
        port = server.port
    stream.close()
    with serving(run.folder, port) as server:
        assert server.port == port
        stream = Stream(server, last)
        assert stream.next()[0] == "whole"
        stream.close()


def test_one_who_does_not_read_is_dropped_and_nobody_waits_for_it(run: Growing, server: DashboardServer) -> None:
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    quick = Stream(server)
    assert quick.next()[0] == "whole"
    app = server.app
    assert app is not None
    big = json.dumps({"note": "x" * 200_000}).encode()

    def publish() -> None:
        for _ in range(dashboard_app.MAX_WAITING + 8):
            app.feed.publish(big)

    for _ in range(3):  # the kernel takes some of it, wherever it is read or not
        told = threading.Event()
        assert server._loop is not None
        server._loop.call_soon_threadsafe(lambda told=told: (publish(), told.set()))
        assert told.wait(20)
        # The quick one may be dropped as well when all comes at once: then it comes back and is told the rest.
        while True:
            what, last, _ = quick.next()
            if what == "behind":
                quick.close()
                quick = Stream(server, "")
            if what == "whole" or last.endswith(f"-{app.feed.number}"):
                break
    assert sum(not client.behind for client in app.feed.clients) <= 1
    assert asked(server, "/state")[0] == 200
    quick.close()
    slow.close()


def test_queues_of_a_client_are_bounded_in_number_and_bytes() -> None:
    async def scene() -> None:
        client = dashboard_app.FeedClient()
        client.put(b"x" * (dashboard_app.MAX_WAITING_BYTES + 1))
        assert not client.behind
        client.put(b"y")
        assert client.behind
        assert await client.get(0.01) is None
        many = dashboard_app.FeedClient()
        for _ in range(dashboard_app.MAX_WAITING + 1):
            many.put(b"z")
        assert many.behind
        line = dashboard_app.Feed()
        for _ in range(2 * dashboard_app.MAX_KEPT):
            line.publish(b"{}")
        assert line.since(line.id(line.number)) == []
        assert len(line.since(line.id(line.number - 3)) or ()) == 3
        assert line.since(line.id(1)) is None
        assert line.since(line.id(line.number + 1)) is None
        assert line.since("nonsense") is None

    asyncio.run(scene())


def test_a_thousand_who_look_at_once_are_all_told(run: Growing, server: DashboardServer) -> None:
    async def looks() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**20)
        writer.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        await reader.readuntil(b"event: whole\n")
        ready.release()
        await go.wait()
        await reader.readuntil(b"event: change\n")
        writer.close()
        return True

    async def scene() -> int:
        nonlocal ready, go
        ready, go = asyncio.Semaphore(0), asyncio.Event()
        tasks = [asyncio.create_task(looks()) for _ in range(1_000)]
        for _ in tasks:
            await ready.acquire()
        run.preempt()
        go.set()
        return sum(await asyncio.gather(*tasks))

    ready, go = asyncio.Semaphore(0), asyncio.Event()
    assert asyncio.run(asyncio.wait_for(scene(), 90)) == 1_000
    assert asked(server, "/")[0] == 200


def test_more_who_look_than_there_is_room_for_are_asked_to_come_later(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.runtime.dashboard.app.MAX_STREAMS", 2)
    streams = [Stream(server) for _ in range(2)]
    for stream in streams:
        assert stream.next()[0] == "whole"
    status, heads, _ = asked(server, "/events")
    assert (status, heads["retry-after"]) == (503, "10")
    assert asked(server, "/state")[0] == 200
    for stream in streams:
        stream.close()


def test_stories_are_answered_and_unknown_ones_are_not_there(run: Growing, server: DashboardServer) -> None:
    run.preempt()
    stream = Stream(server)
    while "eval-1" not in json.dumps(stream.next()[2]):
        pass
    stream.close()
    status, _, told = asked(server, "/story?kind=task&name=eval-1")
    assert status == 200
    assert json.loads(told)["chapters"]
    assert asked(server, "/story?kind=task&name=nobody")[0] == 404
    assert asked(server, "/story")[0] == 404


def test_a_controller_that_cannot_be_reached_is_said_and_the_run_is_shown_all_the_same(run: Growing) -> None:
    def connect() -> Any:
        raise UnreachableError("no Ray runs here")

    with serving(run.folder, connect=connect) as server:
        state = json.loads(asked(server, "/state")[2])
        assert state["notes"] == ["the controller cannot be reached: no Ray runs here"]
        assert "rollout" in state["panels"]["components"]
        assert asked(server, "/story?kind=task&name=nobody")[0] == 502


def test_while_nobody_looks_nothing_is_read_and_whoever_comes_sees_the_newest(run: Growing) -> None:
    source = DashboardSource(run.folder)
    looks: list[None] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name == "look":
                looks.append(None)
            return getattr(source, name)

    with DashboardServer(Counting(), 0, every_s=0.02, environment={"TRIMTAB_DASHBOARD_TOKEN": TOKEN}) as server:
        asked(server, "/state")
        before = len(looks)
        run.preempt()
        threading.Event().wait(0.3)
        assert len(looks) == before
        assert "rollout-w1" in json.loads(asked(server, "/state")[2])["panels"]["tasks"]
        assert asked(server, "/story?kind=task&name=eval-1")[0] == 200


def test_a_run_whose_dashboard_cannot_start_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with beside(said.append, port=99_999)(tmp_path / "new", None):
        pass
    assert said == []
    assert "the dashboard could not start" in capsys.readouterr().err
    with beside(said.append, port=0)(tmp_path / "new", None):
        assert len(said) == 1
        assert said[0].startswith("dashboard: http://127.0.0.1:")


def test_a_look_that_fails_in_an_unknown_way_is_shown_and_the_dashboard_goes_on(run: Growing) -> None:
    source, failing = DashboardSource(run.folder), threading.Event()

    class Odd:
        def __getattr__(self, name: str) -> Any:
            if name == "look" and failing.is_set():
                raise KeyError("nonsense")
            return getattr(source, name)

    with DashboardServer(Odd(), 0, every_s=0.02, environment={"TRIMTAB_DASHBOARD_TOKEN": TOKEN}) as server:
        stream = Stream(server)
        try:
            failing.set()
            while "fault" not in (data := stream.next()[2]) or not data["fault"]:
                pass
            assert data["fault"] == "this cannot be shown: KeyError: 'nonsense'"
            failing.clear()
            run.preempt()
            while "rollout-w1" not in json.dumps(stream.next()[2]):
                pass
        finally:
            stream.close()
        assert asked(server, "/state")[0] == 200
        assert [row["failures"] > 0 for row in server.background.status()] == [True]
