"""Node agent: one process per node that stops and ends workers by pid and reports their deaths; and its callers.

All its state can be rebuilt (records and saved states in the run directory, /proc), so it may be killed and created
again at any time without losing a worker. A saved state is kept until the controller acknowledges it (`drop`), as the
controller that requested it may be dead by then. It must never end a process whose start time is not the given one. It
decides nothing. `NodeAgents` is the controller's side: it creates agents, calls them with a deadline, and reports the
deaths of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.controller.clients import ClientProcess, is_alive_here
from trimtab.runtime.controller.heartbeats import AgentAddress, serve_heartbeats
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, RestartPolicy, first_line
from trimtab.runtime.procs.gpus import gpu_processes
from trimtab.runtime.procs.processes import (
    ProcessIdentity,
    born,
    descendants,
    environment,
    exists,
    exited,
    marked,
    row,
)  # fmt: skip
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.rayapi.nodes import ray_nodes
from trimtab.runtime.rayapi.private import actor_id
from trimtab.runtime.store.files import write_file
from trimtab.runtime.workers.environments import MARK
from trimtab.runtime.workers.worker_process import FRAME, frame, make_run_dir

log = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0  # for a killed process to exit; longer only if the kernel hangs
_LEAVE_S = 3.0  # for ray.kill to end a process, before SIGKILL
_STALE_AFTER_S = 600.0
WATCH_POLICY = RestartPolicy(max_failures=None, max_backoff_s=5.0)
_ANSWER_SLACK_S = 0.02  # added to the timeout of a request


class NodeAgent:
    """Async Ray actor, pinned to its node."""

    def __init__(self, controller: str, node: str) -> None:
        self._directory = make_run_dir(controller, node)
        self._node = node
        _remove_stale_dirs(self._directory.parent)
        self._epoch = uuid.uuid4().hex  # a new agent counts deaths from 0
        self._deaths: list[tuple[int, float]] = []
        self._news = asyncio.Event()
        self._watched: dict[tuple[int, float], asyncio.Task[None]] = {}
        self._background = Background(WATCH_POLICY)
        self._heartbeat: tuple[asyncio.Server, AgentAddress] | None = None
        self._stopping: dict[tuple[int, float], asyncio.Task[tuple[str, bool, bytes | None, str]]] = {}  # in progress
        self._fence: asyncio.Task[None] | None = None
        self._unwritten_states: dict[str, bytes] = {}  # saved states that this node's disk refused

    async def hello(self) -> dict[str, Any]:
        """Facts of this agent and its node."""
        if self._fence is None:
            self._fence = self._background.start("raylet", functools.partial(self._exit_with_raylet, os.getppid()))
        if self._heartbeat is None:
            self._heartbeat = await serve_heartbeats(_address())
        facts = {"epoch": self._epoch, "pid": os.getpid(), "born": born(os.getpid()), "cores": os.cpu_count() or 1}
        return {**facts, "link": self._heartbeat[1], "gpus": _gpu_ids(self._node)}

    async def watch(self, processes: list[tuple[int, float]]) -> None:
        """Report the deaths of these processes, also past ones."""
        for pid, start in processes:
            if (pid, start) not in self._watched:
                watch = functools.partial(self._watch, pid, start)
                self._watched[pid, start] = self._background.start(f"process {pid}", watch)

    async def deaths(self, epoch: str, known: int, wait_s: float) -> tuple[str, list[tuple[int, float]]]:
        """Long poll: deaths after the first `known` ones of this epoch."""
        if epoch != self._epoch:
            return self._epoch, self._deaths[:]
        deadline = time.monotonic() + wait_s
        while len(self._deaths) <= known and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        return self._epoch, self._deaths[known:]

    async def records(self) -> list[dict[str, Any]]:
        """Records of all alive processes of this controller here; those of dead ones are deleted."""
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_text())
                if "pid" not in record or born(record["pid"]) == record["born"]:
                    found.append({**record, "file": path.name})
                else:
                    self._forget(record["pid"])
        return found

    async def process_alive(self, process: ClientProcess) -> bool | None:
        """Whether a client's process is alive; None if it cannot be seen from here."""
        return is_alive_here(process)

    async def stop(
        self,
        pid: int,
        start: float,
        cancel_grace_s: float,
        notice: bool,
        checkpoint_timeout_s: float,
        path: str | None,
        keep_as: str,
    ) -> tuple[str, bool, bytes | None, str]:
        """Cancel, save and end a process: (how cancel() went, saved, state, note).

        Repeated calls (of the next controller) share one stop. The state is kept as `keep_as`.
        """
        key = (pid, start)
        if key not in self._stopping:
            self._stopping[key] = asyncio.create_task(
                self._stop(pid, start, cancel_grace_s, notice, checkpoint_timeout_s, path, keep_as)
            )
            self._stopping[key].add_done_callback(lambda _: self._stopping.pop(key, None))
        return await asyncio.shield(self._stopping[key])

    async def _stop(
        self,
        pid: int,
        start: float,
        cancel_grace_s: float,
        notice: bool,
        checkpoint_timeout_s: float,
        path: str | None,
        keep_as: str,
    ) -> tuple[str, bool, bytes | None, str]:
        cancel, state, saved, notes = "not called", b"", False, []
        if cancel_grace_s > 0:
            answer, _ = await self._request(
                pid, start, cancel_grace_s, {"do": "cancel", "notice": notice, "seconds": cancel_grace_s}
            )
            cancel = answer["word"]
            notes.append(answer.get("note", ""))
        if checkpoint_timeout_s > 0 and cancel != "timed out":
            answer, state = await self._request(pid, start, checkpoint_timeout_s, {"do": "save", "path": path})
            saved = answer["word"] == "returned"
            if answer["word"] in ("raised", "timed out"):
                notes.append(f"save() {answer['word']}: {answer.get('note', '')}".rstrip(": "))
            if saved and state:
                await asyncio.to_thread(self._save_state, keep_as, state)
        notes.append(await self.end(pid, start))
        if not saved and (saved_states := await self.saved_state(keep_as)) is not None:  # for an earlier stop
            saved, state = True, saved_states
        return cancel, saved, state or None, "; ".join(note for note in notes if note)

    async def saved_states(self) -> list[str]:
        return sorted({*(path.name for path in self._directory.glob("*.state")), *self._unwritten_states})

    async def saved_state(self, name: str) -> bytes | None:
        if name in self._unwritten_states:
            return self._unwritten_states[name]
        try:
            return await asyncio.to_thread((self._directory / name).read_bytes)
        except FileNotFoundError:
            return None

    def _save_state(self, name: str, state: bytes) -> None:
        try:
            write_file(self._directory / name, state)  # must survive processes, not a reboot
        except OSError as fault:
            log.error("the state %s is kept in memory: %s: %s", name, self._directory, fault.strerror)
            self._unwritten_states[name] = state

    async def call_hook(self, pid: int, start: float, do: str, timeout_s: float) -> tuple[str, str]:
        """Call a method on the control thread: (returned|raised|timed out|not called, note)."""
        answer, _ = await self._request(pid, start, timeout_s, {"do": do})
        return answer["word"], answer.get("note", "")

    async def ready(self, pid: int, start: float, timeout_s: float) -> bool:
        """Wait until the object is constructed; whether it is."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answer, _ = await self._request(pid, start, left, {"do": "probe"})
            phase = answer.get("phase")
            if phase not in ("warm", "constructing"):
                return phase in ("ready", "running", "ended")
            await asyncio.sleep(0.02)
        return False

    async def begin(self, pid: int, start: float, timeout_s: float) -> None:
        await self._request(pid, start, timeout_s, {"do": "begin"})

    async def outcome(self, pid: int, start: float) -> tuple[bytes | None, str | None, str] | None:
        """Wait for the result of the entry method, without limit; None if the process is gone."""
        answer, value = await self._request(pid, start, None, {"do": "outcome"})
        if "error" not in answer:
            return None
        return (value if answer["error"] is None else None), answer["error"], answer["trace"]

    async def end(self, pid: int, start: float) -> str:
        """Kill a process and all it started, and wait until they are gone. Returns a note if that failed."""
        task = self._watched.pop((pid, start), None)
        if task is not None:
            task.cancel()
        record = self._record(pid)
        devices, mark = record.get("devices", []), record.get("mark", "")
        process = ProcessIdentity(pid, start)
        family = descendants(pid, groups=True) if process.alive else _orphans(pid)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_end_by_ray(pid, start, record), _LEAVE_S)
        try:
            await asyncio.gather(_kill(process), *map(_kill, family))
            await _reaped(process)
            for child in _orphans(pid):  # started while it was being killed
                await _kill(child)
            family += await _end_marked(mark)
            if devices:
                await _gpus_released({pid, *(child.pid for child in family)})
        except asyncio.TimeoutError:
            return f"process {pid} was killed, but is still there after {EXIT_WAIT_S:g} s"
        self._forget(pid)
        return ""

    async def end_marked(self, mark: str) -> None:
        """Kill all that a worker started on this node, through Ray or not."""
        with contextlib.suppress(asyncio.TimeoutError):
            await _end_marked(mark)

    async def drop(self, file: str) -> None:
        """Delete a record without a process, or a saved state that the controller has."""
        self._unwritten_states.pop(file, None)
        (self._directory / file).unlink(missing_ok=True)

    async def leave(self) -> None:
        """Delete the run directory; the processes of the controller here have ended."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _exit_with_raylet(self, raylet: int) -> None:
        """After the death of the raylet: kill every worker here, then this process, which closes the heartbeat
        connection.

        Ray's own processes notice it a second or two later; their tasks may have been restarted elsewhere by then.
        """
        await exited(ProcessIdentity(raylet, born(raylet) or 0.0))
        for task in self._watched.values():
            task.cancel()  # the node is lost: no single deaths are reported
        records = [record for record in await self.records() if "pid" in record]
        workers = [ProcessIdentity(record["pid"], record["born"]) for record in records]
        families = descendants(*(worker.pid for worker in workers), groups=True)
        await asyncio.gather(*map(_kill, (*workers, *families)), return_exceptions=True)
        os._exit(1)

    async def _watch(self, pid: int, start: float) -> None:
        process = ProcessIdentity(pid, start)
        await exited(process)
        await _reaped(process)
        killed = await asyncio.gather(*map(_kill, _orphans(pid)), return_exceptions=True)
        for fault in killed:
            if fault is not None:  # the death is reported anyway
                log.error("a process of the group of %d could not be killed: %r", pid, fault)
        await self.end_marked(self._record(pid).get("mark", ""))
        self._forget(pid)
        self._deaths.append((pid, start))
        self._watched.pop((pid, start), None)
        self._news.set()

    async def _request(
        self, pid: int, start: float, timeout_s: float | None, request: dict[str, Any]
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to a process's control socket; "not called" if the process or the socket is gone."""
        if born(pid) != start:
            return {"word": "not called", "note": "its process was gone already"}, b""
        try:
            wait_s = None if timeout_s is None else timeout_s + _ANSWER_SLACK_S
            return await asyncio.wait_for(self._exchange(pid, request), wait_s)
        except asyncio.TimeoutError:
            return {"word": "timed out"}, b""
        except (OSError, EOFError) as fault:
            return {"word": "not called", "note": f"it cannot be reached: {type(fault).__name__}"}, b""

    async def _exchange(self, pid: int, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        reader, writer = await asyncio.open_unix_connection(str(self._directory / f"{pid}.sock"))
        try:
            writer.write(frame(request))
            size, more = FRAME.unpack(await reader.readexactly(FRAME.size))
            return json.loads(await reader.readexactly(size)), await reader.readexactly(more)
        finally:
            writer.close()

    def _record(self, pid: int) -> dict[str, Any]:
        """The record of a process, also of a dead one."""
        try:
            record: dict[str, Any] = json.loads((self._directory / f"{pid}.json").read_text())
        except (OSError, ValueError):
            return {}
        return record

    def _forget(self, pid: int) -> None:
        for suffix in (".json", ".sock"):
            (self._directory / f"{pid}{suffix}").unlink(missing_ok=True)


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _gpu_ids(node: str) -> list[str]:
    """Ids of all GPUs of this node, as Ray assigns them: those visible to its raylet, else counted from 0.

    Empty if unknown.
    """
    import ray

    try:
        count = next(int(each.gpus) for each in ray_nodes(ray) if each.node_id == node)
    except StopIteration:
        return []
    settings = environment(os.getppid())
    if not settings:
        return []
    if "CUDA_VISIBLE_DEVICES" not in settings:
        return [str(index) for index in range(count)]
    ids = [id for id in settings["CUDA_VISIBLE_DEVICES"].split(",") if id]
    return ids[:count] if len(ids) >= count else []


def _remove_stale_dirs(parent: Path) -> None:
    """Delete stale run directories of lost nodes: those without an alive process."""
    for left in parent.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            records = [json.loads(path.read_text()) for path in left.glob("[0-9]*.json")]
            if time.time() - left.lstat().st_mtime > _STALE_AFTER_S and not any(
                born(record["pid"]) == record["born"] for record in records
            ):
                shutil.rmtree(left, ignore_errors=True)


async def _end_by_ray(pid: int, start: float, record: dict[str, Any]) -> None:
    """End an actor through Ray, so that Ray reports no crash; not possible for a stopped process."""
    found = row(pid)
    if found is not None and found.born == start and record.get("id") and found.state not in "Tt":
        await asyncio.to_thread(_end_actor, record)
        await exited(ProcessIdentity(pid, start))


def _end_actor(record: dict[str, Any]) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # unknown to Ray
        actor = ray.get_actor(record["actor"], record["namespace"])
        if actor_id(actor) == record["id"]:  # else another actor has its name
            ray.kill(actor)


async def _reaped(process: ProcessIdentity) -> None:
    """Wait briefly until its parent has reaped it; its memory is free at exit."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and exists(process.pid) and born(process.pid) in (None, process.born):
        await asyncio.sleep(0.001)


def _orphans(pid: int) -> list[ProcessIdentity]:
    """The rest of a dead process's group. The pid is not reused while there is any."""
    return [] if exists(pid) else descendants(pid, groups=True)


async def _kill(process: ProcessIdentity) -> None:
    await exited(process, EXIT_WAIT_S, kill=True)


async def _end_marked(mark: str) -> list[ProcessIdentity]:
    """Kill every process with this mark in its environment, and their children; returns them."""
    ended: list[ProcessIdentity] = []
    deadline = time.monotonic() + EXIT_WAIT_S
    while mark and (found := await asyncio.to_thread(marked, MARK, mark)) and time.monotonic() < deadline:
        await asyncio.gather(*map(_kill, found))
        ended += found
    return ended


async def _gpus_released(pids: set[int]) -> None:
    """Wait up to EXIT_WAIT_S until the GPU driver lists none of these processes."""
    deadline = time.monotonic() + EXIT_WAIT_S
    while time.monotonic() < deadline:
        listed = await asyncio.to_thread(gpu_processes)
        if listed is None or pids.isdisjoint(process.pid for process in listed):
            return
        await asyncio.sleep(0.01)


_POLL_S = 20.0


class NodeAgents:
    """The node agents of a controller. A dead agent is created again."""

    def __init__(self, controller: str, on_death: Callable[[str, int, float], None], background: Background) -> None:
        self._controller = controller
        self._on_death = on_death
        self._background = background
        self._actors: dict[str, Any] = {}  # by joined node: its handle
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._watched: dict[str, set[tuple[int, float]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # results of hello()

    @property
    def nodes(self) -> list[str]:
        return list(self._actors)

    async def join(self, node: str, timeout_s: float = 60.0) -> bool:
        """Create an agent on the node; false if there is one."""
        if node in self._actors:
            return False
        self._actors[node] = None
        self._watched.setdefault(node, set())
        try:
            self.facts[node] = await self.request(node, "hello", timeout_s=timeout_s)
        except BaseException:
            self.lost(node)
            raise
        if node in self._actors and node not in self._polls:
            self._polls[node] = self._background.start(
                f"deaths on node {node[:12]}", lambda: self._poll(node), policy=NEVER_GIVE_UP
            )
        return True

    def lost(self, node: str) -> None:
        self._actors.pop(node, None)
        self._watched.pop(node, None)
        self.facts.pop(node, None)
        poll = self._polls.pop(node, None)
        if poll is not None:
            poll.cancel()

    async def request(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the agent of a node; a dead one is created again, until the timeout."""
        from ray.exceptions import ActorUnschedulableError, RayError

        deadline = time.monotonic() + timeout_s
        why, pause_s = "", 0.1
        while node in self._actors and (left := deadline - time.monotonic()) > 0:
            try:
                return await asyncio.wait_for(self._request(node, method, *arguments), left)
            except asyncio.TimeoutError:
                break
            except ActorUnschedulableError as fault:  # the node is leaving
                self._actors[node] = None
                raise UnreachableError(f"node {node[:12]} accepts no new actors: {first_line(fault)}") from None
            except (RayError, ValueError) as fault:  # ValueError: a dying actor holds its name
                why = first_line(fault)
            if node in self._actors:
                self._actors[node] = None
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)
        if node not in self._actors:
            raise UnreachableError(f"node {node[:12]} is gone")
        raise UnreachableError(
            f"the agent of node {node[:12]} did not answer within {timeout_s:g} s", where=why or None
        )

    async def watch(self, node: str, pid: int, start: float, timeout_s: float = 30.0) -> None:
        """Report the death of this process, once."""
        if node in self._watched:
            self._watched[node].add((pid, start))
            await self.request(node, "watch", [(pid, start)], timeout_s=timeout_s)

    def unwatch(self, node: str, pid: int, start: float) -> None:
        self._watched.get(node, set()).discard((pid, start))

    async def renew(self, node: str) -> None:
        """Replace an agent that hangs."""
        actor = self._actors.get(node)
        if actor is not None:
            self._actors[node] = None
            await _ended(actor, self.facts.get(node))

    def all_gpus(self, node: str) -> tuple[str, ...]:
        return tuple(self.facts.get(node, {}).get("gpus", ()))

    async def heartbeat_address(self, node: str) -> AgentAddress | None:
        """Heartbeat address of a node's agent; read again each time, as it may be a new agent."""
        if node in self._actors:
            self.facts[node] = await self.request(node, "hello", timeout_s=5.0)
        known = self.facts.get(node)
        return None if known is None else (str(known["link"][0]), int(known["link"][1]))

    async def process_alive(self, process: ClientProcess | None) -> bool | None:
        """Whether a client's process is alive; None if its node does not answer."""
        if process is None:
            return None
        try:
            alive: bool | None = await self.request(process.node, "process_alive", process, timeout_s=5.0)
        except UnreachableError:
            return None
        return alive

    async def close(self) -> None:
        await asyncio.gather(*(self.leave(node) for node in self.nodes))

    async def _request(self, node: str, method: str, *arguments: Any) -> Any:
        actor = self._actors.get(node) or await self._create(node)
        return await getattr(actor, method).remote(*arguments)

    async def leave(self, node: str) -> None:
        """End the agent of a node, and its run directory."""
        with contextlib.suppress(UnreachableError):
            await self.request(node, "leave", timeout_s=10.0)
        actor, facts = self._actors.get(node), self.facts.get(node)
        self.lost(node)  # first, so that it is not created again
        await _ended(actor, facts)

    async def _create(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = ray.remote(NodeAgent).options(
            name=node_agent_name(self._controller, node),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        actor = await asyncio.to_thread(kind.remote, self._controller, node)
        if node not in self._actors:
            ray.kill(actor)
            raise UnreachableError(f"node {node[:12]} is gone")
        self._actors[node] = actor
        return actor

    async def _poll(self, node: str) -> None:
        """Poll for deaths until the node is lost."""
        epoch, known = "", 0
        while node in self._actors:
            try:
                answered, deaths = await self.request(node, "deaths", epoch, known, _POLL_S, timeout_s=_POLL_S + 10.0)
                if answered != epoch:  # a new agent: set its watches before its count is used
                    self.facts[node] = await self.request(node, "hello", timeout_s=30.0)
                    await self.request(node, "watch", list(self._watched.get(node, ())), timeout_s=30.0)
                    epoch, known = answered, 0
            except UnreachableError:
                await self.renew(node)  # it may hang
                await asyncio.sleep(1.0)
                continue
            known += len(deaths)
            for pid, start in deaths:
                if (pid, start) in self._watched.get(node, ()):
                    self._watched[node].discard((pid, start))
                    try:
                        self._on_death(node, pid, start)
                    except Exception:  # must not end the polling
                        log.exception("the death of process %s on node %s", pid, node[:12])


async def _ended(actor: Any, facts: dict[str, Any] | None) -> None:
    """Kill an agent's actor, and wait until its process is gone if it is on this machine."""
    import ray

    if actor is not None:
        await asyncio.to_thread(ray.kill, actor)
    deadline = time.monotonic() + EXIT_WAIT_S
    while facts and born(facts["pid"]) == facts["born"] and time.monotonic() < deadline:
        await asyncio.sleep(0.005)


def node_agent_name(controller: str, node: str) -> str:
    return f"trimtab:{controller}:node-agent:{node[:12]}"
