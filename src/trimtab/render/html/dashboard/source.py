"""The source of a dashboard: the folder of a run as it grows, the controller of a cluster, or both.

Only `change` changes anything. An unreachable controller is shown on the page and retried; the run's part continues
meanwhile. Called from one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.render.html.advise_report import AdvisePanels
from trimtab.render.html.dashboard import panels as dashboard
from trimtab.render.html.dashboard.board import LiveTimeline, RunBoard
from trimtab.render.html.dashboard.panels import Panels, controller_panels, fleet_panel, run_panels, workers_panel
from trimtab.render.output import clock, counts
from trimtab.runtime.run import folder as run_folder
from trimtab.runtime.run.folder import EventTail, load_path, read_load

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
RETRY_S = 10.0  # after a controller could not be reached
ANNOUNCED = ("arrived", "ended")  # kinds announced to screen readers besides strong events
WHY = "asked on the dashboard"
OF_RUN = ("replan", "drain-worker", "resume-worker")
SERVES = ("active", "serving", "starting")  # states in which a worker can be drained
MAX_DEADLINE_S = 86_400.0

Connect = Callable[[], "AbstractContextManager[Session]"]


class DashboardSource:
    """The source of one page."""

    def __init__(self, folder: Path | None, connect: Connect | None = None) -> None:
        if folder is None and connect is None:
            raise InputError("neither a run nor a cluster is given", hint="name the folder of a run, or --address")
        self._folder = folder
        self._tail = EventTail(folder) if folder is not None else None
        self._title = (folder.resolve().name or "run") if folder is not None else "cluster"
        self.board: RunBoard | None = RunBoard() if folder is not None else None
        self._line = LiveTimeline(self.board.story) if self.board is not None else None
        self.advised = AdvisePanels(folder) if folder is not None else None
        self._controller = _ControllerSource(connect) if connect is not None else None
        self._shown: dict[str, Any] = {}  # all that was sent, except the timeline
        self._is_new = True

    def look(self) -> Mapping[str, Any] | None:
        """What has changed; None if nothing did."""
        new = self._read()
        controller_changed = self._controller is not None and self._controller.refresh()
        loads_changed = self._read_loads()
        advised = self.advised is not None and self.advised.refresh()
        if not (new or controller_changed or not self._shown):
            return self._small(loads_changed, advised) if loads_changed or advised else None
        line = self._line.news() if self._line is not None else {}
        before, self._shown = self._shown, self._now()
        changes = {name: value for name, value in self._shown.items() if name != "panels" and before.get(name) != value}
        had = before.get("panels", {})
        panels = {name: html for name, html in self._shown["panels"].items() if had.get(name) != html}
        if self._is_new:
            self._is_new = False
            return {"whole": self.whole()}
        return changes | ({"panels": panels} if panels else {}) | ({"timeline": line} if line else {})

    def _small(self, loads_changed: bool, advised: bool) -> Mapping[str, Any]:
        """Loads change all the time: only their panel is made anew."""
        panels = {"workers": workers_panel(self.board)} if loads_changed and self.board is not None else {}
        panels |= self.advised.panels if advised and self.advised is not None else {}
        self._shown = {**self._shown, "panels": self._shown["panels"] | panels}
        return {"panels": panels}

    def whole(self) -> Mapping[str, Any]:
        return {**self._shown, "timeline": self._line.whole() if self._line is not None else None}

    def _now(self) -> dict[str, Any]:
        panels: Panels = {} if self._controller is None else dict(self._controller.panels)
        notes, note = [self.fault] if self.fault else [], ""
        if self.board is not None and self._line is not None:
            story = self.board.story
            panels |= run_panels(self.board, self._line)
            if self.status is not None:
                panels["fleet"] = fleet_panel(self.status["nodes"], without=[node.name for node in story.nodes])
            if story.is_advised and self.advised is not None:
                panels = self.advised.merge(panels)
            if story.unparsed_lines:
                notes.append(f"{len(story.unparsed_lines)} lines of events.jsonl could not be parsed")
            strong = next(
                (event for event in reversed(story.timeline_events) if event.strong or event.kind in ANNOUNCED), None
            )
            note = f"{strong.title}. {strong.reason}".strip() if strong is not None else ""
        return {"title": self._title, "panels": panels, "note": note, "notes": notes, "changes": self._changes()}

    @property
    def status(self) -> Mapping[str, Any] | None:
        """The controller's last status, as `trimtab pool show` has it; None without a controller."""
        return None if self._controller is None else self._controller.status

    @property
    def fault(self) -> str:
        return "" if self._controller is None else self._controller.fault

    def _read(self) -> bool:
        if self._tail is None:
            return False
        anew, events = self._tail.read()
        if anew or self.board is None:
            self.board = RunBoard()
            self._line = LiveTimeline(self.board.story)
            self._is_new = True
        for event in events:
            self.board.take(event)
        before, self.board.is_alive = self.board.is_alive, run_folder.is_running(self._tail.path.parent)
        return anew or bool(events) or before != self.board.is_alive

    def _read_loads(self) -> bool:
        """Read the loads of workers; whether they changed."""
        if self.board is None or self._folder is None:
            return False
        components = {worker.group for worker in self.board.workers.values() if "/" not in worker.group}
        changed = [
            self.board.load(component, read_load(load_path(self._folder, component))) for component in components
        ]
        return any(changed)

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        return dashboard.files()

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """A story: from the run's events, otherwise from the controller."""
        found = self.board.story_of(kind, name) if self.board is not None else None
        if found is None and self._controller is not None:
            found = self._controller.story(kind, name)
        return None if found is None else {**found, "offers": self._offers(found["kind"], found["name"])}

    def _changes(self) -> list[str]:
        found = ["replan"] if self.board is not None and self.board.is_active else []
        if self.board is not None and self.board.is_active and self.board.workers:
            found += ["drain-worker", "resume-worker"]
        return found + (["drain-node", "drain-pool"] if self._controller is not None else [])

    def _offers(self, kind: str, name: str) -> list[str]:
        wanted = f"drain-{kind}"
        if kind == "worker" and self.board is not None:
            worker = self.board.workers.get(name)
            if worker is None or worker.is_over:
                return []
            wanted = "drain-worker" if worker.state in SERVES else "resume-worker"
        return [wanted] if wanted in self._changes() else []

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Request a new plan, drain or resume a worker, drain a node, or drain a pool."""
        if what in OF_RUN and self.board is not None and self.board.story.state:
            raise UnreachableError("the run has ended")
        if what not in self._changes():
            raise InputError(f"{what} is not available here", hint=", ".join(self._changes()) or None)
        if what not in OF_RUN:
            assert self._controller is not None
            return self._controller.change(what, facts)
        assert self._folder is not None
        if what == "replan":
            run_folder.send_request(self._folder, run_folder.RUN_QUEUE, {"ask": "replan", "why": WHY})
            return "requested: the next decision shows the result"
        return self._change_worker(self._folder, what.partition("-")[0], facts)

    def _change_worker(self, folder: Path, what: str, facts: Mapping[str, Any]) -> str:
        assert self.board is not None
        worker = self.board.workers.get(str(facts.get("worker")))
        if worker is None or worker.is_over:
            raise InputError("there is no such worker")
        request = {"ask": what, "worker": worker.id, "deadline_s": _deadline_s(facts), "why": WHY}
        run_folder.send_request(folder, run_folder.workers_queue(worker.group), request)
        words = "takes no new requests" if what == "drain" else "takes requests again"
        return f"requested: worker {worker.name} {words}; its story shows the result"

    def close(self) -> None:
        if self._controller is not None:
            self._controller.close()


class _ControllerSource:
    """The controller of a cluster: queried at most once a second."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._exit_stack = ExitStack()
        self._session: Session | None = None
        self._next = 0.0
        self.status: dict[str, Any] | None = None
        self.panels: Panels = {}
        self.fault = ""

    def refresh(self) -> bool:
        """Query the controller if it is time; whether anything changed."""
        now = time.monotonic()
        if now < self._next:
            return False
        before = self.panels, self.fault
        try:
            self.status = self._query()
            self.panels, self.fault = controller_panels(self.status), ""
            self._next = now + ASK_EVERY_S
        except Exception as error:  # also of Ray, while it restarts or ends: the page continues without it
            if not isinstance(error, TrimtabError) and type(error).__name__ not in self.fault:
                log.warning("the controller cannot be reached", exc_info=error)
            self.close()
            self.fault = f"the controller cannot be reached: {getattr(error, 'what', type(error).__name__)}"
            self._next = now + RETRY_S
        return before != (self.panels, self.fault)

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._exit_stack.enter_context(self._connect())
        return self._session

    def _query(self) -> dict[str, Any]:
        from trimtab.render.text import pool as pool_text
        from trimtab.runtime.rayapi.connect import import_ray
        from trimtab.runtime.rayapi.nodes import ray_nodes

        session = self._open()
        none: dict[str, Any] = {"url": None, "series": 0, "why": None}
        return pool_text.status_data(session.status(), session.tasks(), ray_nodes(import_ray()), none)

    def story(self, kind: str, name: str) -> dict[str, Any] | None:
        from trimtab.render.text import pool as pool_text

        session = self._open()
        if kind == "pool":
            return self._pool_story(name, session.status()["pools"].get(name))
        try:
            if kind == "task":
                data = pool_text.explanation_data(session.explain(name), session.status())
                keys = ["state", "pool", "priority", "position", "evictions", "attempts", "how"]
                why = f"{data['reason']['code']}: {data['reason']['sentence']}"
            elif kind == "node":
                node, story = session.ask("node_story", name)
                data = pool_text.node_data(node, story, session.status(), session.tasks())
                keys = ["state", "tasks", "groups"]
                why = f"{data['reason']['code']}: {data['reason']['sentence']}" if data["reason"] else ""
            else:
                return None
        except InputError:
            return None
        facts = [
            [key, ", ".join(data[key]) if isinstance(data[key], list) else str(data[key])] for key in keys if data[key]
        ]
        chapters = [
            [clock(entry["at"]), entry["state"], f"{entry['code']}: {entry['sentence']}"] for entry in data["story"]
        ]
        return {"kind": kind, "name": name, "id": name, "facts": [*facts, ["why", why]], "chapters": chapters}

    def _pool_story(self, name: str, view: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if view is None:
            return None
        facts = [
            ["state", "drained: starts nothing new" if view["drained"] else "open"],
            ["tasks", ", ".join(f"{count} {state}" for state, count in view["tasks"].items() if count) or "none"],
            ["queue", ", ".join(view["queue"]) or "empty"],
            ["slots", counts(view["slots"], view["slots"]) or "none"],
            ["evictions", ", ".join(f"{count} {code}" for code, count in view["evictions"].items()) or "none"],
        ]
        return {"kind": "pool", "name": name, "id": name, "facts": facts, "chapters": []}

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        session = self._open()
        subject = what.partition("-")[2]
        name = facts.get(subject)
        if not isinstance(name, str) or not name:
            raise InputError(f"no {subject} is given")
        if subject == "pool":
            session.pool(name).drain()
            return f"pool {name} starts nothing new"
        session.drain_node(name, _deadline_s(facts), WHY)
        return f"node {name} is draining"

    def close(self) -> None:
        self._session = None
        try:
            self._exit_stack.close()
        except UnreachableError as error:
            self.fault = error.what


def _deadline_s(facts: Mapping[str, Any]) -> float | None:
    given = facts.get("deadline_s")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= MAX_DEADLINE_S:
        raise InputError(f"deadline_s is a number of seconds, 0 to {MAX_DEADLINE_S:g}")
    return float(given)
