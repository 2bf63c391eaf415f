"""What ends with a client ends when the client is dead, and not while it is busy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from trimtab.core.errors import InputError
from trimtab.runtime.client.connection import ControllerConnection
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.controller.clients import LEASE_S, ClientLeases, ClientProcess, is_alive_here, this_process
from trimtab.runtime.procs.processes import born
from trimtab.runtime.rayapi.connect import RayConnection, connected
from waiting import until

HERE = ClientProcess("node", "boot", 1, 10, 1.0)


class Scene:
    """Leases under a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.leases = ClientLeases(lambda: self.now)

    def client(self, process: ClientProcess | None = HERE, lease_s: float = 60.0) -> str:
        self.leases.touch("client")
        assert self.leases.renew("client", lease_s, process)
        return "client"


def test_a_client_is_looked_for_after_a_sixth_of_its_lease() -> None:
    scene = Scene()
    client = scene.client()
    scene.now += 9.9
    assert scene.leases.silent() == {}
    scene.now += 0.2
    assert scene.leases.silent() == {client: HERE}


def test_a_silent_client_that_its_node_sees_alive_is_never_given_up() -> None:
    scene = Scene()
    client = scene.client()
    scene.now += 86_400
    assert not scene.leases.is_dead(client, True)
    [row] = scene.leases.status()
    assert (row["client"], row["alive"], row["silent_s"]) == (client, True, 86_400)


def test_a_client_that_its_node_sees_dead_is_given_up_at_once() -> None:
    scene = Scene()
    client = scene.client()
    scene.now += 10.1
    assert scene.leases.is_dead(client, False)


def test_where_nothing_is_known_of_a_client_its_lease_counts() -> None:
    scene = Scene()
    client = scene.client(process=None, lease_s=30.0)
    scene.now += 30.0
    assert not scene.leases.is_dead(client, None)
    scene.now += 0.1
    assert scene.leases.is_dead(client, None)


def test_a_client_that_was_heard_of_while_its_node_was_asked_is_not_given_up() -> None:
    scene = Scene()
    client = scene.client()
    scene.now += 61
    assert client in scene.leases.silent()
    assert scene.leases.renew(client, 60.0, HERE)
    assert not scene.leases.is_dead(client, False)


def test_a_client_of_before_a_restart_has_the_default_lease_until_it_renews() -> None:
    scene = Scene()
    scene.leases.touch("client")
    scene.now += LEASE_S + 0.1
    assert scene.leases.is_dead("client", None)


def test_a_client_that_was_given_up_is_told_so() -> None:
    scene = Scene()
    client = scene.client()
    scene.leases.end(client)
    assert not scene.leases.renew(client, 60.0, HERE)


def test_a_process_is_seen_only_on_its_own_machine_and_in_its_own_namespace() -> None:
    fake = types.SimpleNamespace(get_runtime_context=lambda: types.SimpleNamespace(get_node_id=lambda: "node"))
    own = this_process(fake)
    assert own is not None
    assert (own.node, own.pid, own.born) == ("node", os.getpid(), born(os.getpid()))
    assert is_alive_here(own) is True
    assert is_alive_here(replace(own, born=own.born - 1)) is False
    assert is_alive_here(replace(own, boot="another machine")) is None
    assert is_alive_here(replace(own, namespace=1)) is None


def test_a_lease_of_no_length_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(InputError, match="lease_s must be more than 0"):
        connect(lease_s=0.0)


def test_a_renewal_that_fails_in_an_unknown_way_is_tried_again() -> None:
    asked, often = [], threading.Event()

    def ask(method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        asked.append(method)
        if len(asked) == 1:
            raise ValueError("odd answer")
        if len(asked) >= 4:
            often.set()
        return True

    fake = types.SimpleNamespace(get_runtime_context=lambda: types.SimpleNamespace(get_node_id=lambda: "node"))
    link = types.SimpleNamespace(ray=fake, how="", embedded=False, close=lambda: None)
    controller = types.SimpleNamespace(name="c", ask=ask, facts={"notes": []})
    session = Session(cast(RayConnection, link), cast(ControllerConnection, controller), lease_s=0.1)
    session._keep_lease()
    assert often.wait(60)
    assert set(asked) == {"renew"}
    session.close()


# ---- with processes ---------------------------------------------------------------------------------------------

CLIENT = """
import ctypes, sys
from trimtab.runtime.client.session import connect
class Own:
    pass
session = connect(sys.argv[1], name=sys.argv[2], lease_s=0.6)
task = session.pool("p", {"cpu": 2}).submit(Own, resources={"cpu": 1}, id="own", ends_with_me=True)
print(task.wait("running", 60).value, session.client, flush=True)
libc = ctypes.PyDLL(None)  # whose calls hold the GIL
libc.sleep(600)
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with connected(cpus=4):
        session = connect(name="leases")
        yield session
        session.shutdown()


def test_a_client_that_holds_the_gil_for_many_leases_keeps_its_tasks_until_it_dies(session: Session) -> None:
    address = session._ray.get_runtime_context().gcs_address
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, address, session.name], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert client.stdout is not None
        state, id = client.stdout.readline().split()
        assert state == "running"

        def row() -> dict[str, Any]:
            return next((one for one in session.status()["silent_clients"] if one["client"] == id), {"silent_s": 0.0})

        until(lambda: row()["silent_s"] > 6.0 and row()["alive"])
        assert session.task("own").state.value == "running"
    finally:
        client.kill()
        client.communicate(timeout=60)
    assert session.task("own").wait("cancelled", timeout=60).value == "cancelled"
    assert "CLIENT_DIED" in str(session.explain("own").reason)
