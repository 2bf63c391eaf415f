"""The HTTP hook: who may ask, what is refused and how, and one drain of a real node from a request to its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.client.session import connect
from trimtab.runtime.hook import server as hook
from trimtab.runtime.hook.server import NodeHookCalls, NodeHookServer, WantedNodes
from trimtab.runtime.http import tokens
from trimtab.runtime.http.listening import listening
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.draining import HeadNodeError, PastDeadlineError, UnknownNodeError
from trimtab.runtime.rayapi.nodes import HEAD

TOKEN = "a-token-of-the-tests"
DEADLINE = 240.0


class Served:
    """A hook on a free port, in a thread, and a way to ask it."""

    def __init__(self, drain: Any, look: Any, host: str = "127.0.0.1", names: tuple[str, ...] = ()) -> None:
        self.socket = listening(host, 0)
        self.hook = NodeHookServer(drain, look, token=TOKEN, listening=self.socket, names=names)
        self.thread = threading.Thread(target=self.hook.serve)
        self.thread.start()

    def ask(
        self, method: str, path: str, body: bytes | None = None, token: str | None = TOKEN, **headers: str
    ) -> tuple[int, Any, Mapping[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.hook.port, timeout=DEADLINE)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            if token is not None:
                given["Authorization"] = f"Bearer {token}"
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers["content-type"].startswith("application/json")
            return answer.status, json.loads(text) if is_json else text, dict(answer.headers)
        finally:
            connection.close()

    def close(self) -> None:
        self.hook.stop()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        self.socket.close()


class World:
    """What the hook calls, with faults to order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float | None, str]] = []
        self.fault: Exception | None = None

    def drain(self, node: str, deadline_s: float | None, cause: str) -> Mapping[str, Any]:
        if self.fault is not None:
            raise self.fault
        self.asked.append((node, deadline_s, cause))
        return {"node_id": "ab" * 28, "through": "ray"}

    def look(self) -> WantedNodes:
        if self.fault is not None:
            raise self.fault
        return WantedNodes(5, {"ready": 3, "draining": 1})


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    served = Served(world.drain, world.look)
    yield served
    served.close()


@pytest.fixture(autouse=True)
def calm(world: World) -> None:
    world.asked.clear()
    world.fault = None


# ---- who may ask --------------------------------------------------------------------------------------------------


def test_a_drain_is_handed_on_and_the_answer_says_what_was_done(served: Served, world: World) -> None:
    status, said, _ = served.ask("POST", "/nodes/10.0.0.7/drain", b'{"deadline_s": 120, "cause": "spot"}')
    assert status == 200
    assert said == {
        "node": "10.0.0.7", "deadline_s": 120.0, "cause": "spot", "node_id": "ab" * 28, "through": "ray",
    }  # fmt: skip
    assert world.asked == [("10.0.0.7", 120.0, "spot")]


def test_without_a_body_the_node_goes_whenever_it_is_empty(served: Served, world: World) -> None:
    assert served.ask("POST", "/nodes/w1/drain")[0] == 200
    assert world.asked == [("w1", None, "asked over HTTP")]


@pytest.mark.parametrize("token", [None, "", "another-token-of-tests", TOKEN + "x", "é"])
def test_a_drain_without_the_right_token_is_refused_on_loopback_too(
    served: Served, world: World, token: str | None
) -> None:
    status, said, headers = served.ask("POST", "/nodes/w1/drain", b"{}", token=token)
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert TOKEN not in json.dumps(said)
    assert world.asked == []


def test_a_token_in_another_scheme_is_no_token(served: Served) -> None:
    assert served.ask("POST", "/nodes/w1/drain", token=None, Authorization=f"Basic {TOKEN}")[0] == 401


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1].evil.example", "localhost:x.evil.example", ""],
)
def test_a_host_header_that_names_another_machine_is_refused_even_with_the_token(
    served: Served, world: World, name: str
) -> None:
    assert served.ask("POST", "/nodes/w1/drain", b"{}", Host=name)[0] == 421
    assert served.ask("GET", "/metrics", Host=name)[0] == 421
    assert world.asked == []


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8267"])
def test_names_of_loopback_are_served(served: Served, name: str) -> None:
    assert served.ask("POST", "/nodes/w1/drain", b"{}", Host=name)[0] == 200


def test_reading_needs_no_token_on_loopback_and_one_elsewhere(served: Served, world: World) -> None:
    assert served.ask("GET", "/desired", token=None)[0] == 200
    elsewhere = Served(world.drain, world.look, host="0.0.0.0", names=("hook.example",))
    try:
        assert elsewhere.ask("GET", "/desired", token=None, Host="hook.example")[0] == 401
        assert elsewhere.ask("GET", "/desired", Host="hook.example")[0] == 200
    finally:
        elsewhere.close()


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"deadline_s": -5}', "passed already"),
        (b'{"deadline_s": 0}', "passed already"),
        (b'{"deadline_s": "soon"}', "seconds"),
        (b'{"deadline_s": true}', "seconds"),
        (b'{"deadline_s": NaN}', "seconds"),
        (b'{"deadline_s": 1e999}', "seconds"),
        (b'{"deadline": 5}', "deadline_s"),
        (b'{"cause": 5}', "cause"),
        (b'{"cause": "two\\nlines"}', "cause"),
        (b"[1]", "deadline_s"),
        (b"\xff", "JSON"),
        (b"[" * 4000, "JSON"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_with_what_is_expected(
    served: Served, world: World, body: bytes, word: str
) -> None:
    status, said, _ = served.ask("POST", "/nodes/w1/drain", body)
    assert status == 422
    assert word in said["error"]
    assert world.asked == []


def test_a_body_that_is_too_large_is_refused_unread(served: Served, world: World) -> None:
    assert served.ask("POST", "/nodes/w1/drain", b" " * (hook.MAX_BODY_BYTES + 1))[0] == 413
    assert world.asked == []


def test_a_body_that_does_not_come_is_not_waited_for(
    served: Served, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "BODY_S", 0.1)
    assert served.ask("POST", "/nodes/w1/drain", None, Content_Length="2")[0] == 408
    assert world.asked == []


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (UnknownNodeError("there is no node w9", hint="`trimtab cluster show`"), 404),
        (HeadNodeError("w0 is the head"), 409),
        (PastDeadlineError("a deadline 0 s from now has passed already"), 422),
        (UnreachableError("the controller trimtab did not answer within 20 s"), 503),
        (RuntimeError("surprise"), 500),
    ],
)
def test_faults_of_a_drain_have_a_status_each(served: Served, world: World, fault: Exception, status: int) -> None:
    world.fault = fault
    answered, said, _ = served.ask("POST", "/nodes/w9/drain", b"{}")
    assert answered == status
    assert said["error"]


def test_other_paths_and_methods_do_nothing(served: Served, world: World) -> None:
    assert served.ask("GET", "/nodes/w1/drain")[0] == 405
    assert served.ask("POST", "/nodes/w1/undrain")[0] == 404
    assert served.ask("POST", "/nodes/a%2Fb/drain")[0] == 404
    assert world.asked == []


# ---- what autoscalers read ----------------------------------------------------------------------------------------


def test_desired_and_metrics_say_how_many_workers_are_wanted(served: Served) -> None:
    assert served.ask("GET", "/desired")[1] == {"desired_workers": 5, "nodes": {"ready": 3, "draining": 1}}
    status, text, headers = served.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "trimtab_desired_workers 5\n" in text
    assert 'trimtab_nodes{state="draining"} 1\n' in text
    assert re.search(r'^trimtab_hook_drains_total\{status="401"\}', text, re.MULTILINE) is None
    assert re.search(r'^trimtab_hook_drains_total\{status="200"\} \d+$', text, re.MULTILINE)


def test_without_a_controller_nobody_says_how_many_are_wanted() -> None:
    assert "trimtab_desired_workers" not in hook.metrics_text(WantedNodes(None, {"ready": 1}), {})


def test_a_controller_that_does_not_answer_is_said_to_readers_too(served: Served, world: World) -> None:
    world.fault = UnreachableError("Ray is gone")
    assert served.ask("GET", "/desired")[0] == 503


# ---- the token and the port ---------------------------------------------------------------------------------------


def test_a_token_that_is_made_is_in_a_file_of_its_owner_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("left behind")
    path.chmod(0o644)
    with tokens.token({}, tokens.HOOK, path, "hook-1") as (token, kept_in):
        told = tokens.told(kept_in, tokens.HOOK)
        assert path.read_text().strip() == token
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(path) in told
        assert token not in told
    assert not path.exists()


def test_a_token_of_the_environment_is_taken_and_written_nowhere(tmp_path: Path) -> None:
    with tokens.token({tokens.HOOK: TOKEN}, tokens.HOOK, tmp_path / "token", "hook-1") as (token, kept_in):
        assert token == TOKEN
        assert tokens.told(kept_in, tokens.HOOK) == f"the token is {tokens.HOOK}"
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_the_token_is_in_a_folder_of_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens.tempfile, "tempdir", str(tmp_path))
    with tokens.token({}, tokens.HOOK, None, "hook-8267"):
        [folder] = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [one.name for one in folder.iterdir()] == ["hook-8267.token"]
    folder.chmod(0o777)
    with pytest.raises(InputError, match="others can write"), tokens.token({}, tokens.HOOK, None, "hook-8267"):
        pass
    nowhere = tmp_path / "no" / "token"
    with pytest.raises(InputError, match="cannot be written"), tokens.token({}, tokens.HOOK, nowhere, "hook-1"):
        pass


def test_a_short_token_and_a_port_in_use_are_said() -> None:
    with listening("127.0.0.1", 0) as taken:
        with pytest.raises(InputError, match="16 characters"):
            NodeHookServer(World().drain, World().look, token="short", listening=taken)
        with pytest.raises(InputError, match="cannot listen on"):
            listening("127.0.0.1", taken.getsockname()[1])


# ---- on a real Ray ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two workers."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for number in (1, 2):
        cluster.add_node(wait=False, num_cpus=1, node_name=f"spot-{number}", resources={f"spot-{number}": 1})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes(DEADLINE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_head_an_unknown_node_and_a_past_deadline_are_refused_before_ray_is_asked(cluster: Any) -> None:
    import ray

    doors = NodeHookCalls(ray)
    head = next(one["NodeID"] for one in ray.nodes() if HEAD in one["Resources"])
    with pytest.raises(HeadNodeError, match="is the head"):
        doors.drain(head, 60, "spot")
    with pytest.raises(UnknownNodeError, match="there is no node ffff"):
        doors.drain("ffff" * 14, 60, "spot")
    with pytest.raises(PastDeadlineError, match="passed already"):
        doors.drain("spot-1", -1, "spot")
    with pytest.raises(UnknownNodeError, match="several nodes are called"):
        doors.drain(ray.nodes()[0]["NodeManagerAddress"], 60, "spot")
    assert draining.draining(ray) == {}


def test_without_a_controller_a_drain_goes_to_ray_and_an_empty_node_goes_at_once(cluster: Any) -> None:
    import ray

    doors = NodeHookCalls(ray)
    assert doors.how() == "no controller runs: drains go to Ray"
    assert doors.look() == WantedNodes(None, {"ready": 3})
    done = doors.drain("spot-2", 300, "spot")
    assert done["through"] == "ray"
    assert goes(ray, done["node_id"])


def test_a_post_drains_a_real_node_through_the_controller(cluster: Any, tmp_path: Path) -> None:
    """The command as users run it, in a process of its own, from the request to the node's end; then Ctrl-C."""
    import ray

    @ray.remote(num_cpus=0, resources={"spot-1": 1})
    class Busy:
        def ready(self) -> bool:
            return True

    busy = Busy.remote()
    session = connect(name="hooked")
    token_file = tmp_path / "token"
    code = "import sys; from trimtab.cli.app import run; sys.exit(run(sys.argv[1:]))"
    command = ["cluster", "hook", "--port", "0", "--address", cluster.address, "--token-file", str(token_file)]
    environment = {name: value for name, value in os.environ.items() if name != tokens.HOOK}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert ray.get(busy.ready.remote(), timeout=DEADLINE)
        assert process.stderr is not None
        said = "".join(process.stderr.readline() for _ in range(4))
        [port] = re.findall(r"listening on http://127\.0\.0\.1:(\d+)", said)
        assert "drains go through the controller hooked" in said
        token = token_file.read_text().strip()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE)
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/nodes/spot-1/drain", b'{"deadline_s": 300, "cause": "spot"}', headers)
        answer = connection.getresponse()
        done = json.loads(answer.read())
        assert (answer.status, done["through"]) == (200, "controller hooked")
        assert list(draining.draining(ray)) == [done["node_id"]]
        connection.request("GET", "/desired")
        wanted = json.loads(connection.getresponse().read())
        assert wanted["nodes"]["draining"] == 1
        assert isinstance(wanted["desired_workers"], int)
        connection.close()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(DEADLINE) == 0
        assert rest.splitlines()[-1] == "stopped"
        assert token not in said + rest
        assert not token_file.exists()
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stderr.close()  # type: ignore[union-attr]
        session.shutdown()
    ray.kill(busy)
    assert goes(ray, done["node_id"])


def goes(ray: Any, node: str) -> bool:
    waiting = threading.Event()
    for _ in range(int(DEADLINE * 10)):
        if node not in [one["NodeID"] for one in ray.nodes() if one["Alive"]]:
            return True
        waiting.wait(0.1)
    return False
