"""What a dashboard shows: the folder of a run as it grows, the controller of a cluster, or both.

Reads and asks, and changes something only through `change`. A controller that cannot be reached is said on the page and
tried again later; the run's own part goes on meanwhile. Called from one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.render.html.advise.panels import AdvisePanels
from trimtab.render.html.dashboard import page as dashboard
from trimtab.render.html.dashboard.board import RunBoard
from trimtab.render.html.dashboard.panels import Panels, controller_panels, fleet_panel, run_panels, workers_panel
from trimtab.render.html.dashboard.timeline import LiveTimeline
from trimtab.render.text.formatting import clock, counts
from trimtab.runtime.dashboard.tail import EventTail
from trimtab.runtime.run import control_files
from trimtab.runtime.run.engines.event_log import load_path, read_load

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
AGAIN_S = 10.0  # after a controller could not be reached
TOLD = ("arrived", "ended")  # what is read aloud beside what goes through all rows
WHY = "asked on the dashboard"
OF_RUN = ("replan", "drain-worker", "resume-worker")
SERVES = ("active", "serving", "starting")  # a worker that can be told to serve nothing new
MOST_DEADLINE_S = 86_400.0

Opens = Callable[[], "AbstractContextManager[Session]"]


class DashboardSource:
    """The source of one page."""

    def __init__(self, folder: Path | None, opens: Opens | None = None) -> None:
        if folder is None and opens is None:
            raise InputError("neither a run nor a cluster to look at", hint="name the folder of a run, or --address")
        self._folder = folder
        self._tail = EventTail(folder) if folder is not None else None
        self._title = (folder.resolve().name or "run") if folder is not None else "cluster"
        self.board: RunBoard | None = RunBoard() if folder is not None else None
        self._line = LiveTimeline(self.board.story) if self.board is not None else None
        self.advised = AdvisePanels(folder) if folder is not None else None
        self._controller = _ControllerSource(opens) if opens is not None else None
        self._shown: dict[str, Any] = {}  # all that was told, but for the timeline
        self._is_new = True

    def look(self) -> Mapping[str, Any] | None:
        """What has changed; None where nothing did."""
        new = self._read()
        asked = self._controller is not None and self._controller.look()
        busier = self._weigh()
        advised = self.advised is not None and self.advised.look()
        if not (new or asked or not self._shown):
            return self._small(busier, advised) if busier or advised else None
        line = self._line.news() if self._line is not None else {}
        before, self._shown = self._shown, self._now()
        told = {name: value for name, value in self._shown.items() if name != "panels" and before.get(name) != value}
        had = before.get("panels", {})
        panels = {name: html for name, html in self._shown["panels"].items() if had.get(name) != html}
        if self._is_new:
            self._is_new = False
            return {"whole": self.whole()}
        return told | ({"panels": panels} if panels else {}) | ({"timeline": line} if line else {})

    def _small(self, busier: bool, advised: bool) -> Mapping[str, Any]:
        """How much workers have to do changes all the time: nothing else is made anew for it."""
        panels = {"workers": workers_panel(self.board)} if busier and self.board is not None else {}
        panels |= self.advised.panels if advised and self.advised is not None else {}
        self._shown = {**self._shown, "panels": self._shown["panels"] | panels}
        return {"panels": panels}

    def whole(self) -> Mapping[str, Any]:
        """All that was told until now."""
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
                panels = self.advised.among(panels)
            if story.unclear:
                notes.append(f"{len(story.unclear)} lines of events.jsonl could not be understood")
            strong = next((one for one in reversed(story.happenings) if one.strong or one.kind in TOLD), None)
            note = f"{strong.title}. {strong.reason}".strip() if strong is not None else ""
        return {"title": self._title, "panels": panels, "note": note, "notes": notes, "changes": self._changes()}

    @property
    def status(self) -> Mapping[str, Any] | None:
        """What the controller last answered, as `trimtab status` has it; None without one."""
        return None if self._controller is None else self._controller.status

    @property
    def fault(self) -> str:
        """Why the controller cannot be asked."""
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
        before, self.board.lives = self.board.lives, control_files.is_running(self._tail.path.parent)
        return anew or bool(events) or before != self.board.lives

    def _weigh(self) -> bool:
        """See what workers have to do; whether it is more or less than before."""
        if self.board is None or self._folder is None:
            return False
        components = {one.group for one in self.board.workers.values() if "/" not in one.group}
        changed = [self.board.load(one, read_load(load_path(self._folder, one))) for one in components]
        return any(changed)

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """The page and what it needs."""
        return dashboard.files()

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """A story: by what the run wrote, and else by what the controller knows."""
        found = self.board.told(kind, name) if self.board is not None else None
        if found is None and self._controller is not None:
            found = self._controller.story(kind, name)
        return None if found is None else {**found, "offers": self._offers(found["kind"], found["name"])}

    def _changes(self) -> list[str]:
        """What can be asked for here and now."""
        found = ["replan"] if self.board is not None and self.board.goes_on else []
        if self.board is not None and self.board.goes_on and self.board.workers:
            found += ["drain-worker", "resume-worker"]
        return found + (["drain-node", "drain-pool"] if self._controller is not None else [])

    def _offers(self, kind: str, name: str) -> list[str]:
        """What can be asked for of this one."""
        wanted = f"drain-{kind}"
        if kind == "worker" and self.board is not None:
            one = self.board.workers.get(name)
            if one is None or one.is_over:
                return []
            wanted = "drain-worker" if one.state in SERVES else "resume-worker"
        return [wanted] if wanted in self._changes() else []

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Ask for another plan, drain a worker or have it serve again, empty a node, have a pool start nothing new."""
        if what in OF_RUN and self.board is not None and self.board.story.state:
            raise UnreachableError("the run has ended: there is nobody to ask")
        if what not in self._changes():
            raise InputError(f"{what} cannot be asked for here", hint=", ".join(self._changes()) or None)
        if what not in OF_RUN:
            assert self._controller is not None
            return self._controller.change(what, facts)
        assert self._folder is not None
        if what == "replan":
            control_files.send_request(self._folder, control_files.RUN, {"ask": "replan", "why": WHY})
            return "asked: the next decision says what comes of it"
        return self._change_worker(self._folder, what.partition("-")[0], facts)

    def _change_worker(self, folder: Path, what: str, facts: Mapping[str, Any]) -> str:
        assert self.board is not None
        one = self.board.workers.get(str(facts.get("worker")))
        if one is None or one.is_over:
            raise InputError("there is no such worker now")
        asked = {"ask": what, "worker": one.id, "deadline_s": _deadline_s(facts), "why": WHY}
        control_files.send_request(folder, control_files.workers_queue(one.group), asked)
        words = "serves nothing new" if what == "drain" else "may serve again"
        return f"asked: worker {one.name} {words}; its story says what comes of it"

    def close(self) -> None:
        """Leave the cluster."""
        if self._controller is not None:
            self._controller.close()


class _ControllerSource:
    """The controller of a cluster: asked once a second at most."""

    def __init__(self, opens: Opens) -> None:
        self._opens = opens
        self._ends = ExitStack()
        self._session: Session | None = None
        self._next = 0.0
        self.status: dict[str, Any] | None = None
        self.panels: Panels = {}
        self.fault = ""

    def look(self) -> bool:
        """Ask, if it is time to; whether something is new."""
        now = time.monotonic()
        if now < self._next:
            return False
        before = self.panels, self.fault
        try:
            self.status = self._asked()
            self.panels, self.fault = controller_panels(self.status), ""
            self._next = now + ASK_EVERY_S
        except Exception as error:  # of Ray as well, while it starts again or ends: the page goes on without
            if not isinstance(error, TrimtabError) and type(error).__name__ not in self.fault:
                log.warning("the controller cannot be asked", exc_info=error)
            self.close()
            self.fault = f"the controller cannot be asked: {getattr(error, 'what', type(error).__name__)}"
            self._next = now + AGAIN_S
        return before != (self.panels, self.fault)

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._ends.enter_context(self._opens())
        return self._session

    def _asked(self) -> dict[str, Any]:
        from trimtab.render.text import pool as pool_text
        from trimtab.runtime.rayapi.connect import import_ray

        session = self._open()
        none: dict[str, Any] = {"url": None, "series": 0, "why": None}
        return pool_text.status_data(session.status(), session.tasks(), import_ray().nodes(), none)

    def story(self, kind: str, name: str) -> dict[str, Any] | None:
        from trimtab.render.text import nodes as fleet_text
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
                data = fleet_text.node_data(node, story, session.status(), session.tasks())
                keys = ["state", "tasks", "groups"]
                why = f"{data['reason']['code']}: {data['reason']['sentence']}" if data["reason"] else ""
            else:
                return None
        except InputError:
            return None
        facts = [
            [key, ", ".join(data[key]) if isinstance(data[key], list) else str(data[key])] for key in keys if data[key]
        ]
        chapters = [[clock(one["at"]), one["state"], f"{one['code']}: {one['sentence']}"] for one in data["story"]]
        return {"kind": kind, "name": name, "id": name, "facts": [*facts, ["why", why]], "chapters": chapters}

    def _pool_story(self, name: str, view: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if view is None:
            return None
        facts = [
            ["state", "starts nothing new" if view["drained"] else "open"],
            ["tasks", ", ".join(f"{count} {state}" for state, count in view["tasks"].items() if count) or "none"],
            ["queue", ", ".join(view["queue"]) or "nobody waits"],
            ["slots", counts(view["slots"], view["slots"]) or "none"],
            ["evictions", ", ".join(f"{count} {code}" for code, count in view["evictions"].items()) or "none"],
        ]
        return {"kind": "pool", "name": name, "id": name, "facts": facts, "chapters": []}

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        session = self._open()
        subject = what.partition("-")[2]
        name = facts.get(subject)
        if not isinstance(name, str) or not name:
            raise InputError(f"which {subject} is not said")
        if subject == "pool":
            session.pool(name).drain()
            return f"pool {name} starts nothing new"
        session.drain_node(name, _deadline_s(facts), WHY)
        return f"node {name} is being emptied"

    def close(self) -> None:
        self._session = None
        try:
            self._ends.close()
        except UnreachableError as error:
            self.fault = error.what


def _deadline_s(facts: Mapping[str, Any]) -> float | None:
    given = facts.get("deadline_s")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= MOST_DEADLINE_S:
        raise InputError(f"deadline_s is a number of seconds, 0 to {MOST_DEADLINE_S:g}")
    return float(given)
