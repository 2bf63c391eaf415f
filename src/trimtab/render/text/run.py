"""A run in words: each thing that happens as a line, where it stands, and what came of it.

Pure: events of `events.jsonl` in, lines out. It counts nothing that the run does not tell, and changes nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimtab.render.text.formatting import of, span

EventFacts = Mapping[str, Any]

RECENT = 8  # iterations that say how long the rest will take
METRICS_SHOWN = 4
STAYS_UNSAID = ("TOO_FEW", "COSTS_STEADY")  # reasons to stay that are nothing new
SAID_BY_MOVES = ("ARRIVED", "STAGE_FAILED", "ROLLED_BACK", "STUCK", "MOVING")


def seconds(value: float) -> str:
    """A time of an iteration, short or long."""
    return f"{1e3 * value:.0f} ms" if value < 0.9995 else f"{value:.1f} s" if value < 600 else span(value)


PASSING = ("starting", "cancelling")
"""States of a task that are left by themselves."""

NEWS = ("TAKEN", "RETURNED", "PROCESS_DIED", "NODE_LOST")
"""Why a worker is in another state, where that is not the run's own doing."""


class RunNarrator:
    """Follows a run by its events: `on_event` gives the lines that are worth a line of their own."""

    def __init__(self, iterations: int, *, measuring: bool = False) -> None:
        self.iterations = iterations
        self.measuring = measuring  # its first plan is there to measure: what that predicts says nothing
        self.done = 0
        self.plan = ""
        self.predicted_s: float | None = None
        self.groups: Sequence[EventFacts] = ()
        self.costs_s: Mapping[str, float] = {}
        self.components: Sequence[EventFacts] = ()  # as measured in the last iteration
        self.wall_s: float | None = None
        self.metrics: dict[str, float] = {}
        self.move: str | None = None  # the one under way, and its stage
        self.counts = {"moves": 0, "rolled back": 0, "lost": 0, "advice": 0}
        self._stays = ""
        self._advised = ""
        self._is_asked = False
        self._move_s = 0.0  # of the stages that are done
        self._is_warm = False
        self._here_s: deque[float] = deque(maxlen=RECENT)
        self._tellers: dict[str, Callable[[EventFacts], Iterator[str]]] = {
            "starting": self._starting,
            "resumed": self._resumed,
            "plan": self._planned,
            "iteration": self._iterated,
            "decided": self._decided,
            "move": self._moved,
            "cluster": self._nodes,
            "range": self._range,
            "told": self._told,
            "task": self._task,
            "worker": self._worker,
            "lost": self._lost,
        }

    def on_event(self, event: str, facts: EventFacts) -> list[str]:
        """Take an event; the lines that it is worth, none for most."""
        teller = self._tellers.get(event)
        return list(teller(facts)) if teller is not None else []

    def report_next_decision(self) -> None:
        """Somebody asked: the next decision is worth a line, whatever it is."""
        self._is_asked = True

    @property
    def left_s(self) -> float | None:
        """How long the rest will take, as the last iterations went."""
        if not self._here_s:
            return None
        return statistics.median(self._here_s) * max(0, self.iterations - self.done)

    def line(self) -> str:
        """Where it stands."""
        if self.wall_s is None:
            return f"iteration 1 of {self.iterations}"
        parts = [f"iteration {self.done} of {self.iterations}", self.times()]
        if self.metrics:
            parts.append(self.figures())
        if self.left_s and self.left_s >= 1:
            parts.append(f"about {span(self.left_s)} left")
        return "  ".join(parts)

    def times(self) -> str:
        """What the last iteration took, and what was predicted."""
        if self.wall_s is None:
            return ""
        if self.measuring or not self.predicted_s:
            return f"{seconds(self.wall_s)} (measuring)" if self.measuring else seconds(self.wall_s)
        return f"{seconds(self.wall_s)} (predicted {seconds(self.predicted_s)})"

    def figures(self, most: int = METRICS_SHOWN) -> str:
        """What components have to show, rewards first."""
        names = sorted(self.metrics, key=lambda name: "reward" not in name)
        return ", ".join(f"{name} {self.metrics[name]:.4g}" for name in names[:most])

    # ---- one event each --------------------------------------------------------------------------------------------

    def _starting(self, facts: EventFacts) -> Iterator[str]:
        yield f"on {facts['on']}"
        yield f"folder {facts['folder']}"

    def _resumed(self, facts: EventFacts) -> Iterator[str]:
        self.done = int(facts["after"])
        void = int(facts.get("void", 0))
        again = f"; {of(void, 'iteration')} after that had no state saved and will run again" if void else ""
        yield f"goes on after iteration {facts['after']}{again}" if self.done else f"begins again{again}"

    def _planned(self, facts: EventFacts) -> Iterator[str]:
        why = facts.get("why")
        self.plan, self.predicted_s = str(facts["plan"]), facts.get("predicted_s")
        self.groups, self.costs_s = facts.get("groups", ()), facts.get("costs_s", {})
        if why == "first" and self.measuring:
            yield f"costs are not stated: measured first, with {self.plan} GPU{'s' * (not self.plan.endswith(' 1'))}"
            return
        self.measuring = False
        words = {"measured": f"measured; from iteration {facts['iteration']} on", "lost": "after the loss"}
        at = words.get(str(why), "")
        if why == "move":
            return  # the move has said so
        yield f"plan{f' ({at})' if at else ''}: {self.plan} GPUs, {seconds(self.predicted_s or 0.0)} an iteration"

    def _iterated(self, facts: EventFacts) -> Iterator[str]:
        iteration = facts["iteration"]
        self.done, self.wall_s = int(iteration["number"]), float(iteration["wall_s"])
        self.components = iteration.get("components", ())
        if self._is_warm:  # the first one says little of the rest
            self._here_s.append(float(facts.get("here_s") or self.wall_s))
        self._is_warm = True
        self.metrics = flat(facts.get("metrics", {}))
        yield self.line()

    def _decided(self, facts: EventFacts) -> Iterator[str]:
        if facts["what"] == "advise":
            to = _target(facts)
            if to != self._advised or self._is_asked:  # the same advice again is nothing new
                self.counts["advice"] += 1
                yield f"would move{to}: {facts['reason']}{gain_words(facts.get('numbers', {}))}"
            self._advised, self._is_asked = to, False
            return
        is_new = facts["code"] != self._stays and facts["code"] not in STAYS_UNSAID
        if is_new or self._is_asked:
            yield f"stays: {facts['reason']}"
        self._stays, self._advised, self._is_asked = str(facts["code"]), "", False

    def _moved(self, facts: EventFacts) -> Iterator[str]:
        state, name = facts["state"], f"move {facts['move']}"
        why = facts.get("reason") or "no reason was told"
        if state == "begun":
            self.move, self._move_s = name, 0.0
            yield f"{name}{_target(facts)}: {why}{gain_words(facts.get('numbers', {}))}"
        elif state == "stage":
            self.move = f"{name}: {facts.get('stage', '')}"
            self._move_s += float(facts.get("took_s") or 0.0)
        elif state == "arrived":
            self.move = None
            self.counts["moves"] += 1
            took = facts.get("took_s") or self._move_s
            yield f"{name} is done{f' after {seconds(took)}' if took else ''}"
        elif state == "rolling back":
            self.move = f"{name}: rolling back"
            stage = facts.get("stage")
            yield f"{name} failed{f' ({stage})' if stage else ''}: {why}; back to the plan before"
        elif state == "rolled back":
            self.move = None
            self.counts["rolled back"] += 1
            yield f"{name} is rolled back: the plan before runs again"
        else:
            self.move = None
            yield f"{name} is {state}: {why}"

    def _nodes(self, facts: EventFacts) -> Iterator[str]:
        why = facts.get("why")
        if why == "first":
            return
        nodes = facts.get("nodes", ())
        gpus = sum(int(node[1]) for node in nodes)
        leaving = facts.get("leaving") or ()
        goes = f"; {', '.join(map(str, leaving))} will go" if leaving else ""
        yield f"nodes have changed ({why}): {of(len(nodes), 'node')} with {of(gpus, 'GPU')} now{goes}"

    def _range(self, facts: EventFacts) -> Iterator[str]:
        yield f"{facts['component']} may have {facts['least']} to {facts['most']} GPUs"

    def _told(self, facts: EventFacts) -> Iterator[str]:
        if facts.get("reason") and facts.get("code") not in SAID_BY_MOVES:
            yield str(facts["reason"])

    def _task(self, facts: EventFacts) -> Iterator[str]:
        """Somebody else's, in the run's slots: when it waits, runs and ends, and not each step of the way."""
        if facts["what"] in PASSING:
            return
        why = facts.get("reason")
        yield f"task {facts['task']}: {facts['what']}{f', {why}' if why else ''}"

    def _worker(self, facts: EventFacts) -> Iterator[str]:
        """What others did to it: that it starts, sleeps and gets weights as the run has it is no news."""
        if facts.get("code") not in NEWS and facts["state"] != "lost":
            return
        why = facts.get("reason")
        yield f"{facts['component']}: worker {facts['worker']} is {facts['state']}{f' ({why})' if why else ''}"

    def _lost(self, facts: EventFacts) -> Iterator[str]:
        self.counts["lost"] += 1
        yield f"{facts['component']} is lost: {facts['why']}"


def gain_words(numbers: EventFacts) -> str:
    """What a decision rests on, in a clause."""
    now, gain, cost = (numbers.get(key) for key in ("iteration_s", "gain_s", "cost_s"))
    words = []
    if now and gain is not None:
        words.append(f"{gain / now:.0%} less an iteration")
    if cost is not None:
        words.append(f"the move costs {seconds(cost)}{'' if numbers.get('cost_measured') else ', assumed'}")
    return f" ({'; '.join(words)})" if words else ""


def _target(facts: EventFacts) -> str:
    target = facts.get("plan")
    return f" to {target['plan']}" if isinstance(target, Mapping) else ""


def flat(metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Figures by their name; by component and name where two components use the same one."""
    names = [key for values in metrics.values() for key in values]
    return {
        key if names.count(key) == 1 else f"{component}.{key}": value
        for component, values in metrics.items()
        for key, value in values.items()
        if value is not None
    }


def last_lines(data: EventFacts) -> list[str]:
    """What came of a run, where it is, and what to do next: the last block that is shown."""
    reason = str(data["reason"])
    lines = [reason if reason.startswith(f"{data['state']} ") else f"{data['state']}: {reason}"]
    if data["iterations"]:
        lines.append(f"plan: {data['plan']} GPUs{_prediction(data)}")
    courses = [
        f"{name} {course['first']:.4g} to {course['last']:.4g}"
        for name, course in _rewards_first(data["metrics"])
        if course["first"] is not None
    ]
    if courses:
        lines.append(f"from the first to the last tenth: {', '.join(courses[:METRICS_SHOWN])}")
    happened = [f"{word}: {count}" for word, count in data["happened"].items() if count]
    if happened:
        lines.append(f"on the way, {', '.join(happened)}")
    if data.get("fault"):
        lines.append(f"not all of it is in the folder: {data['fault']}")
    folder = data["folder"]
    state = f"a state after iteration {data['saved']}" if data["saved"] else "no state to go on from"
    lines.append(f"folder: {folder} ({state})")
    if data["state"] == "done":
        lines.append(f"go on:  trimtab run --resume {folder}{data['again']} --iterations {2 * data['asked']}")
    else:
        word = "go on:  " if data["saved"] else "begin again: "
        lines.append(f"{word}trimtab run --resume {folder}{data['again']}")
    if data["iterations"]:
        lines.append(f"report: trimtab report {folder}")
        lines.append(f"plan with what was measured: trimtab plan --from-run {folder}")
    return lines


def _prediction(data: EventFacts) -> str:
    if data["measured_s"] is None:
        return ""
    return f", {seconds(data['measured_s'])} an iteration (predicted {seconds(data['predicted_s'])})"


def _rewards_first(metrics: Mapping[str, EventFacts]) -> list[tuple[str, EventFacts]]:
    return sorted(metrics.items(), key=lambda item: "reward" not in item[0])
