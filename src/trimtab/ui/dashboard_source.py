"""What a dashboard shows: the folder of a run as it grows, the controller of a cluster, or both.

Reads and asks, and changes something only through `change`. A controller that cannot be reached is said on the page and
tried again later; the run's own part goes on meanwhile. Called from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.model.errors import InputError, TrimtabError, UnreachableError
from trimtab.runtime.dashboard.tail import Tail
from trimtab.ui import dashboard
from trimtab.ui.dashboard_board import Board
from trimtab.ui.dashboard_panels import Panels, controller_panels, run_panels
from trimtab.ui.dashboard_timeline import LiveTimeline
from trimtab.ui.printing import clock, counts

if TYPE_CHECKING:
    from trimtab.runtime.ray.client import Session

ASK_EVERY_S = 1.0
AGAIN_S = 10.0  # after a controller could not be reached
TOLD = ("arrived", "ended")  # what is read aloud beside what goes through all rows

Opens = Callable[[], "AbstractContextManager[Session]"]


class DashboardSource:
    """The source of one page. `replan` asks the run for another plan, where somebody can."""

    def __init__(
        self, folder: Path | None, opens: Opens | None = None, *, replan: Callable[[str], object] | None = None
    ) -> None:
        if folder is None and opens is None:
            raise InputError("neither a run nor a cluster to look at", hint="name the folder of a run, or --address")
        self._tail = Tail(folder) if folder is not None else None
        self._title = (folder.resolve().name or "run") if folder is not None else "cluster"
        self.board: Board | None = Board() if folder is not None else None
        self._line = LiveTimeline(self.board.story) if self.board is not None else None
        self._replan = replan
        self._controller = _Controller(opens) if opens is not None else None
        self._shown: dict[str, Any] = {}  # all that was told, but for the timeline
        self._is_new = True

    def look(self) -> Mapping[str, Any] | None:
        """What has changed; None where nothing did."""
        new = self._read()
        asked = self._controller is not None and self._controller.look()
        if not (new or asked or not self._shown):
            return None
        line = self._line.news() if self._line is not None else {}
        before, self._shown = self._shown, self._now()
        told = {name: value for name, value in self._shown.items() if name != "panels" and before.get(name) != value}
        had = before.get("panels", {})
        panels = {name: html for name, html in self._shown["panels"].items() if had.get(name) != html}
        if self._is_new:
            self._is_new = False
            return {"whole": self.whole()}
        return told | ({"panels": panels} if panels else {}) | ({"timeline": line} if line else {})

    def whole(self) -> Mapping[str, Any]:
        """All that was told until now."""
        return {**self._shown, "timeline": self._line.whole() if self._line is not None else None}

    def _now(self) -> dict[str, Any]:
        panels: Panels = {} if self._controller is None else dict(self._controller.panels)
        notes, note = [self.fault] if self.fault else [], ""
        if self.board is not None and self._line is not None:
            story = self.board.story
            panels |= run_panels(self.board, self._line)
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
            self.board = Board()
            self._line = LiveTimeline(self.board.story)
            self._is_new = True
        for event in events:
            self.board.take(event)
        return anew or bool(events)

    def files(self) -> Mapping[str, tuple[str, bytes]]:
        """The page and what it needs."""
        return dashboard.files()

    def story(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """A story: by what the run wrote, and else by what the controller knows."""
        found = self.board.told(kind, name) if self.board is not None else None
        if found is None and self._controller is not None:
            found = self._controller.story(kind, name)
        return found

    def _changes(self) -> list[str]:
        over = self.board is not None and bool(self.board.story.state)
        asks = ["replan"] if self._replan is not None and not over else []
        return asks + (["drain-node", "drain-pool"] if self._controller is not None else [])

    def change(self, what: str, facts: Mapping[str, Any]) -> str:
        """Ask for another plan, empty a node, or have a pool start nothing new."""
        if what not in self._changes():
            raise InputError(f"{what} cannot be asked for here", hint=", ".join(self._changes()) or None)
        if what == "replan":
            assert self._replan is not None
            self._replan("asked on the dashboard")
            return "asked: the next decision says what comes of it"
        assert self._controller is not None
        return self._controller.change(what, facts)

    def close(self) -> None:
        """Leave the cluster."""
        if self._controller is not None:
            self._controller.close()


class _Controller:
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
        except TrimtabError as error:
            self.close()
            self.fault = f"the controller cannot be asked: {error.what}"
            self._next = now + AGAIN_S
        return before != (self.panels, self.fault)

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._ends.enter_context(self._opens())
        return self._session

    def _asked(self) -> dict[str, Any]:
        from trimtab.runtime.ray.cluster import import_ray
        from trimtab.ui import pool_text

        session = self._open()
        none: dict[str, Any] = {"url": None, "series": 0, "why": None}
        return pool_text.status_data(session.status(), session.tasks(), import_ray().nodes(), none)

    def story(self, kind: str, name: str) -> dict[str, Any] | None:
        from trimtab.ui import fleet_text, pool_text

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
        deadline_s = facts.get("deadline_s")
        if deadline_s is not None and (isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float))):
            raise InputError("deadline_s is a number of seconds")
        session.drain_node(name, deadline_s, "asked on the dashboard")
        return f"node {name} is being emptied"

    def close(self) -> None:
        self._session = None
        try:
            self._ends.close()
        except UnreachableError as error:
            self.fault = error.what
