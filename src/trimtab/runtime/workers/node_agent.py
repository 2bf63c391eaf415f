"""One process per node that knows the members there by pid: tells them to stop, ends them for certain, sees them die.

Everything it knows can be found again (records and saved states in the run directory, /proc), so it may be killed and
made again at any time without losing a member. A state that a member saved is kept until the controller has
acknowledged it (`drop`), for the one that asked for it may be dead by then. It never ends a process whose start time is
not the one it was told, and it decides nothing. The controller's Members ask it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.controller.heartbeats import AgentAddress, serve_heartbeats
from trimtab.runtime.controller.leases import ClientProcess, is_alive_here
from trimtab.runtime.procs import nvml
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, RestartPolicy
from trimtab.runtime.workers.environments import MARK
from trimtab.runtime.workers.worker_process import FRAME, born, frame, make_run_dir, stat, write_whole

log = logging.getLogger(__name__)

NAMESPACE = "trimtab"  # of Ray, where all that has no user's name is
_POLL_S = 20.0
EXIT_WAIT_S = 10.0  # for a killed process to vanish; more only where the kernel itself hangs
_LEAVE_S = 3.0  # for a process to leave as Ray tells it, before it is killed
_TIDY_AFTER_S = 600.0
WATCH_POLICY = RestartPolicy(max_failures=None, max_backoff_s=5.0)
_ANSWER_SLACK_S = 0.02  # what an answer within its time-out may be late by


class NodeAgent:
    """An async actor, pinned to its node."""

    def __init__(self, controller: str, node: str) -> None:
        self._where = make_run_dir(controller, node)
        self._node = node
        _remove_stale_dirs(self._where.parent)
        self._epoch = uuid.uuid4().hex  # a warden made anew counts deaths from nothing
        self._deaths: list[tuple[int, float]] = []
        self._news = asyncio.Event()
        self._watched: dict[tuple[int, float], asyncio.Task[None]] = {}
        self._background = Background(WATCH_POLICY)
        self._heartbeat: tuple[asyncio.Server, AgentAddress] | None = None
        self._stopping: dict[tuple[int, float], asyncio.Task[tuple[str, bool, bytes | None, str]]] = {}  # under way
        self._fence: asyncio.Task[None] | None = None
        self._unwritten_states: dict[str, bytes] = {}  # saved states that this node's disk has no room for

    async def hello(self) -> dict[str, Any]:
        """Facts of this node."""
        if self._fence is None:
            self._fence = asyncio.create_task(self._exit_with_raylet(os.getppid()))
        if self._heartbeat is None:
            self._heartbeat = await serve_heartbeats(_address())
        facts = {"epoch": self._epoch, "pid": os.getpid(), "born": born(os.getpid()), "cores": os.cpu_count() or 1}
        return {**facts, "link": self._heartbeat[1], "gpus": _gpu_ids(self._node)}

    async def watch(self, processes: list[tuple[int, float]]) -> None:
        """Report when these die; at once, where they have."""
        for pid, start in processes:
            if (pid, start) not in self._watched:
                watch = functools.partial(self._watch, pid, start)
                self._watched[pid, start] = self._background.start(f"process {pid}", watch)

    async def deaths(self, epoch: str, known: int, wait_s: float) -> tuple[str, list[tuple[int, float]]]:
        """Deaths after the first `known` ones of this epoch, as soon as there are any, or none after the wait."""
        if epoch != self._epoch:
            return self._epoch, self._deaths[:]
        deadline = time.monotonic() + wait_s
        while len(self._deaths) <= known and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        return self._epoch, self._deaths[known:]

    async def records(self) -> list[dict[str, Any]]:
        """What every living process of this controller here says of itself; records of dead ones are removed."""
        found = []
        for path in self._where.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_text())
                if "pid" not in record or born(record["pid"]) == record["born"]:
                    found.append({**record, "file": path.name})
                else:
                    self._forget(record["pid"])
        return found

    async def process_alive(self, process: ClientProcess) -> bool | None:
        """Whether a client's process is alive; None where that cannot be seen from here."""
        return is_alive_here(process)

    async def stop(
        self, pid: int, start: float, tell_s: float, notice: bool, save_s: float, path: str | None, keep_as: str
    ) -> tuple[str, bool, bytes | None, str]:
        """Tell it, save it, end it: how `cancel` went, whether its state is saved, the state, a note.

        Asked again (by the next controller, of the next warden) it is stopped once. The state is kept as `keep_as`.
        """
        key = (pid, start)
        if key not in self._stopping:
            self._stopping[key] = asyncio.create_task(self._stop(pid, start, tell_s, notice, save_s, path, keep_as))
            self._stopping[key].add_done_callback(lambda _: self._stopping.pop(key, None))
        return await asyncio.shield(self._stopping[key])

    async def _stop(
        self, pid: int, start: float, tell_s: float, notice: bool, save_s: float, path: str | None, keep_as: str
    ) -> tuple[str, bool, bytes | None, str]:
        cancel, state, saved, notes = "not called", b"", False, []
        if tell_s > 0:
            answer, _ = await self._request(pid, start, tell_s, {"do": "cancel", "notice": notice, "seconds": tell_s})
            cancel = answer["word"]
            notes.append(answer.get("note", ""))
        if save_s > 0 and cancel != "timed out":
            answer, state = await self._request(pid, start, save_s, {"do": "save", "path": path})
            saved = answer["word"] == "returned"
            if answer["word"] in ("raised", "timed out"):
                notes.append(f"save() {answer['word']}: {answer.get('note', '')}".rstrip(": "))
            if saved and state:
                await asyncio.to_thread(self._save_state, keep_as, state)
        notes.append(await self.end(pid, start))
        if not saved and (saved_states := await self.saved_state(keep_as)) is not None:  # for one that asked before
            saved, state = True, saved_states
        return cancel, saved, state or None, "; ".join(note for note in notes if note)

    async def saved_states(self) -> list[str]:
        """The states that were saved here and that no controller has acknowledged."""
        return sorted({*(path.name for path in self._where.glob("*.state")), *self._unwritten_states})

    async def saved_state(self, name: str) -> bytes | None:
        """One of them."""
        if name in self._unwritten_states:
            return self._unwritten_states[name]
        try:
            return await asyncio.to_thread((self._where / name).read_bytes)
        except FileNotFoundError:
            return None

    def _save_state(self, name: str, state: bytes) -> None:
        try:
            write_whole(self._where / name, state, durable=False)  # it is to outlive processes, not the machine
        except OSError as fault:
            log.error("the state %s is kept in memory: %s: %s", name, self._where, fault.strerror)
            self._unwritten_states[name] = state

    async def call_hook(self, pid: int, start: float, do: str, timeout_s: float) -> tuple[str, str]:
        """Have it park or unpark: returned, raised, timed out or not called, and a note."""
        answer, _ = await self._request(pid, start, timeout_s, {"do": do})
        return answer["word"], answer.get("note", "")

    async def ready(self, pid: int, start: float, timeout_s: float) -> bool:
        """Wait until it is constructed; whether it is."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answer, _ = await self._request(pid, start, left, {"do": "probe"})
            phase = answer.get("phase")
            if phase not in ("warm", "constructing"):
                return phase in ("ready", "running", "ended")
            await asyncio.sleep(0.02)
        return False

    async def begin(self, pid: int, start: float, timeout_s: float) -> None:
        """All members are constructed: the entry may run."""
        await self._request(pid, start, timeout_s, {"do": "begin"})

    async def outcome(self, pid: int, start: float) -> tuple[bytes | None, str | None, str] | None:
        """What the entry came to, however long it takes; None where the process is gone."""
        answer, value = await self._request(pid, start, None, {"do": "outcome"})
        if "error" not in answer:
            return None
        return (value if answer["error"] is None else None), answer["error"], answer["trace"]

    async def end(self, pid: int, start: float) -> str:
        """Kill the process and all that it started, and wait until they are gone. A note where that did not work."""
        task = self._watched.pop((pid, start), None)
        if task is not None:
            task.cancel()
        record = self._record(pid)
        devices, mark = record.get("devices", []), record.get("mark", "")
        family = _family(pid) if born(pid) == start else _orphans(pid)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_end_by_ray(pid, start, record), _LEAVE_S)
        try:
            await asyncio.gather(_kill(pid, start), *(_kill(one, since) for one, since in family))
            await _reaped(pid, start)
            for one, since in _orphans(pid):  # what was started while it was being killed
                await _kill(one, since)
            family += await _end_marked(mark)
            if devices:
                await _gpus_released({pid, *(one for one, _ in family)})
        except asyncio.TimeoutError:
            return f"process {pid} was killed, but is still there after {EXIT_WAIT_S:g} s"
        self._forget(pid)
        return ""

    async def end_marked(self, mark: str) -> None:
        """Kill all that a member started on this node, through Ray or not."""
        with contextlib.suppress(asyncio.TimeoutError):
            await _end_marked(mark)

    async def drop(self, file: str) -> None:
        """Remove a record that stands for no process any more, or a state that the controller has."""
        self._unwritten_states.pop(file, None)
        (self._where / file).unlink(missing_ok=True)

    async def leave(self) -> None:
        """Remove everything this controller keeps on the node; its processes have been ended."""
        shutil.rmtree(self._where, ignore_errors=True)

    async def _exit_with_raylet(self, raylet: int) -> None:
        """When the raylet is gone, so is the node: end every process here, then this one, which the controller hears.

        Ray's own processes notice it a second or two later; by then their tasks may have begun elsewhere.
        """
        await _exited(raylet, born(raylet) or 0.0, None)
        for task in self._watched.values():
            task.cancel()  # a node that is lost, not processes that died
        there = [(one["pid"], one["born"]) for one in await self.records() if "pid" in one]
        families = [one for pid, _ in there for one in _family(pid)]
        await asyncio.gather(*(_kill(pid, start) for pid, start in (*there, *families)), return_exceptions=True)
        os._exit(1)

    async def _watch(self, pid: int, start: float) -> None:
        await _exited(pid, start, None)
        await _reaped(pid, start)
        killed = await asyncio.gather(*(_kill(*one) for one in _orphans(pid)), return_exceptions=True)
        for fault in killed:
            if fault is not None:  # the death is told all the same
                log.error("a process of the group of %d could not be ended: %r", pid, fault)
        await self.end_marked(self._record(pid).get("mark", ""))
        self._forget(pid)
        self._deaths.append((pid, start))
        self._watched.pop((pid, start), None)
        self._news.set()

    async def _request(
        self, pid: int, start: float, timeout_s: float | None, request: dict[str, Any]
    ) -> tuple[dict[str, Any], bytes]:
        """One question to a process's control door; a process that is gone or has no door was not called."""
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
        reader, writer = await asyncio.open_unix_connection(str(self._where / f"{pid}.sock"))
        try:
            writer.write(frame(request))
            size, more = FRAME.unpack(await reader.readexactly(FRAME.size))
            return json.loads(await reader.readexactly(size)), await reader.readexactly(more)
        finally:
            writer.close()

    def _record(self, pid: int) -> dict[str, Any]:
        """What a process said of itself, also when it is gone."""
        try:
            record: dict[str, Any] = json.loads((self._where / f"{pid}.json").read_text())
        except (OSError, ValueError):
            return {}
        return record

    def _forget(self, pid: int) -> None:
        for suffix in (".json", ".sock"):
            (self._where / f"{pid}{suffix}").unlink(missing_ok=True)


def _address() -> str:
    """Where others reach this node."""
    import ray

    return str(ray.util.get_node_ip_address())


def _gpu_ids(node: str) -> list[str]:
    """Ids of all GPUs that this node has, as Ray gives them out: those that its raylet sees, else counted from 0.

    Empty where that is not certain.
    """
    import ray

    try:
        amounts = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node)
        settings = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except (OSError, StopIteration):
        return []
    count = int(amounts.get("GPU", 0))
    seen = next((one.decode() for one in settings if one.startswith(b"CUDA_VISIBLE_DEVICES=")), None)
    if seen is None:
        return [str(index) for index in range(count)]
    ids = [one for one in seen.removeprefix("CUDA_VISIBLE_DEVICES=").split(",") if one]
    return ids[:count] if len(ids) >= count else []


def _remove_stale_dirs(place: Path) -> None:
    """Remove what nodes left that were lost: directories in which no process is alive. Who lives makes its own anew."""
    for left in place.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            records = [json.loads(path.read_text()) for path in left.glob("[0-9]*.json")]
            if time.time() - left.lstat().st_mtime > _TIDY_AFTER_S and not any(
                born(record["pid"]) == record["born"] for record in records
            ):
                shutil.rmtree(left, ignore_errors=True)


async def _end_by_ray(pid: int, start: float, record: dict[str, Any]) -> None:
    """Have Ray end an actor's process, so that it does not speak of a crash; one that is stopped could not hear it."""
    if born(pid) == start and record.get("id") and not _is_stopped(pid):
        await asyncio.to_thread(_end_actor, record)
        await _exited(pid, start, None)


def _end_actor(record: dict[str, Any]) -> None:
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # Ray has forgotten it
        actor = ray.get_actor(record["actor"], record["namespace"])
        if actor._actor_id.hex() == record["id"]:  # else another has its name by now
            ray.kill(actor)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


async def _kill(pid: int, start: float) -> None:
    """SIGKILL, through a handle on this very process, and wait until it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if born(pid) == start:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            await _readable(handle, EXIT_WAIT_S)
    finally:
        os.close(handle)


async def _exited(pid: int, start: float, timeout_s: float | None) -> None:
    """Wait until this process has exited."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if born(pid) == start:
            await _readable(handle, timeout_s)
    finally:
        os.close(handle)


async def _readable(handle: int, timeout_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    loop.add_reader(handle, exited.set)
    try:
        await asyncio.wait_for(exited.wait(), timeout_s)
    finally:
        loop.remove_reader(handle)


async def _reaped(pid: int, start: float) -> None:
    """At its exit its memory is free; its number goes when its parent takes note, which is not waited for long."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists() and born(pid) in (None, start):
        await asyncio.sleep(0.001)


def _processes() -> dict[int, tuple[int, int, float]]:
    """Parent, group and start of every process here."""
    return {int(one): known for one in os.listdir("/proc") if one.isdecimal() and (known := stat(int(one)))}


def _family(pid: int) -> list[tuple[int, float]]:
    """All that a living process started, as far as it is of its group or below it."""
    known = _processes()
    below = {pid}
    for _ in range(len(known)):
        more = {one for one, (parent, _, _) in known.items() if parent in below} - below
        if not more:
            break
        below |= more
    return [(one, start) for one, (_, group, start) in known.items() if one != pid and (group == pid or one in below)]


def _orphans(pid: int) -> list[tuple[int, float]]:
    """What is left of the group of a process that is gone. Its number is not given anew while there is any."""
    if Path(f"/proc/{pid}").exists():
        return []
    return [(one, start) for one, (_, group, start) in _processes().items() if group == pid]


async def _end_marked(mark: str) -> list[tuple[int, float]]:
    """Kill every process with this mark in its environment, and what those started meanwhile; which they were."""
    ended: list[tuple[int, float]] = []
    deadline = time.monotonic() + EXIT_WAIT_S
    while mark and (marked := await asyncio.to_thread(_marked, mark)) and time.monotonic() < deadline:
        await asyncio.gather(*(_kill(*one) for one in marked))
        ended += marked
    return ended


def _marked(mark: str) -> list[tuple[int, float]]:
    line = f"{MARK}={mark}".encode()
    found = []
    for pid in [int(one) for one in os.listdir("/proc") if one.isdecimal()]:
        with contextlib.suppress(OSError):  # gone, or another user's
            if line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and (start := born(pid)) is not None:
                found.append((pid, start))
    return found


async def _gpus_released(pids: set[int]) -> None:
    """Wait (a little) until the driver lists none of these processes."""
    deadline = time.monotonic() + EXIT_WAIT_S
    while pids & await asyncio.to_thread(nvml.users) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


# ---- the controller's side


class NodeAgents:
    """The wardens of a controller: made where a node joins, made again where one died, asked with a deadline."""

    def __init__(self, controller: str, on_death: Callable[[str, int, float], None], background: Background) -> None:
        self._controller = controller
        self._on_death = on_death
        self._background = background
        self._actors: dict[str, Any] = {}  # node -> handle; nodes that joined and are not lost
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._watched: dict[str, set[tuple[int, float]]] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # what hello() said

    @property
    def nodes(self) -> list[str]:
        """Nodes that have one."""
        return list(self._actors)

    async def join(self, node: str, timeout_s: float = 60.0) -> bool:
        """Have a warden on the node; whether it is a new one to us."""
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
        """The node is gone, and its warden with it."""
        self._actors.pop(node, None)
        self._watched.pop(node, None)
        self.facts.pop(node, None)
        poll = self._polls.pop(node, None)
        if poll is not None:
            poll.cancel()

    async def request(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Ask the warden of a node; one that died is made again, until the time is up."""
        from ray.exceptions import ActorUnschedulableError, RayError

        deadline = time.monotonic() + timeout_s
        why, pause_s = "", 0.1
        while node in self._actors and (left := deadline - time.monotonic()) > 0:
            try:
                return await asyncio.wait_for(self._request(node, method, *arguments), left)
            except asyncio.TimeoutError:
                break
            except ActorUnschedulableError as fault:  # nobody can be made there: it is on its way out
                self._actors[node] = None
                raise UnreachableError(f"node {node[:12]} takes nothing new: {first_line(fault)}") from None
            except (RayError, ValueError) as fault:  # ValueError: its name is held by one that is dying
                why = first_line(fault)
            if node in self._actors:
                self._actors[node] = None
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, 2 * pause_s)
        if node not in self._actors:
            raise UnreachableError(f"node {node[:12]} is gone")
        raise UnreachableError(
            f"the warden of node {node[:12]} did not answer within {timeout_s:g} s", where=why or None
        )

    async def watch(self, node: str, pid: int, start: float, timeout_s: float = 30.0) -> None:
        """From now on the death of this process is reported, once."""
        if node in self._watched:
            self._watched[node].add((pid, start))
            await self.request(node, "watch", [(pid, start)], timeout_s=timeout_s)

    def unwatch(self, node: str, pid: int, start: float) -> None:
        """Its end is expected."""
        self._watched.get(node, set()).discard((pid, start))

    async def renew(self, node: str) -> None:
        """Have another warden where this one hangs."""
        actor = self._actors.get(node)
        if actor is not None:
            self._actors[node] = None
            await _ended(actor, self.facts.get(node))

    def all_gpus(self, node: str) -> tuple[str, ...]:
        """Ids of all GPUs of a node; none where that is not known."""
        return tuple(self.facts.get(node, {}).get("gpus", ()))

    async def heartbeat_address(self, node: str) -> AgentAddress | None:
        """Where the warden of a node sends its beats; asked anew, for it may be another one by now."""
        if node in self._actors:
            self.facts[node] = await self.request(node, "hello", timeout_s=5.0)
        known = self.facts.get(node)
        return None if known is None else (str(known["link"][0]), int(known["link"][1]))

    async def process_alive(self, process: ClientProcess | None) -> bool | None:
        """Whether a client's process is alive; None where its node does not say."""
        if process is None:
            return None
        try:
            alive: bool | None = await self.request(process.node, "process_alive", process, timeout_s=5.0)
        except UnreachableError:
            return None
        return alive

    async def close(self) -> None:
        """End all wardens, and what they keep on their nodes."""
        await asyncio.gather(*(self.leave(node) for node in self.nodes))

    async def _request(self, node: str, method: str, *arguments: Any) -> Any:
        actor = self._actors.get(node) or await self._create(node)
        return await getattr(actor, method).remote(*arguments)

    async def leave(self, node: str) -> None:
        """End the warden of a node, and what it keeps there."""
        with contextlib.suppress(UnreachableError):
            await self.request(node, "leave", timeout_s=10.0)
        actor, facts = self._actors.get(node), self.facts.get(node)
        self.lost(node)  # first, so that nobody makes it again
        await _ended(actor, facts)

    async def _create(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        import ray

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
        """Hear of deaths, as long as the node is there."""
        epoch, known = "", 0
        while node in self._actors:
            try:
                answered, deaths = await self.request(node, "deaths", epoch, known, _POLL_S, timeout_s=_POLL_S + 10.0)
                if answered != epoch:  # another one: it knows what to watch before its count is believed
                    self.facts[node] = await self.request(node, "hello", timeout_s=30.0)
                    await self.request(node, "watch", list(self._watched.get(node, ())), timeout_s=30.0)
                    epoch, known = answered, 0
            except UnreachableError:
                await self.renew(node)  # it may hang; a fresh one will not
                await asyncio.sleep(1.0)
                continue
            known += len(deaths)
            for pid, start in deaths:
                if (pid, start) in self._watched.get(node, ()):
                    self._watched[node].discard((pid, start))
                    try:
                        self._on_death(node, pid, start)
                    except Exception:  # a listener's fault must not make us deaf
                        log.exception("the death of process %s on node %s", pid, node[:12])


async def _ended(actor: Any, facts: dict[str, Any] | None) -> None:
    """Kill a warden's actor and wait until its process is gone, as far as that can be seen from here."""
    import ray

    if actor is not None:
        await asyncio.to_thread(ray.kill, actor)
    deadline = time.monotonic() + EXIT_WAIT_S
    while facts and born(facts["pid"]) == facts["born"] and time.monotonic() < deadline:
        await asyncio.sleep(0.005)


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]


def node_agent_name(controller: str, node: str) -> str:
    """The name of a warden's actor."""
    return f"trimtab:{controller}:warden:{node[:12]}"
