"""A run as lines of text: one per event worth showing, its progress, and its result.

Pure: events of `events.jsonl` in, lines out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab.model.ledger import BUCKETS, LedgerSummary
from trimtab.plan.placement.compare import DOUBLING
from trimtab.render.html.kit.labels import counted, ledger_text, share
from trimtab.render.output import span

EventFacts = Mapping[str, Any]

RECENT = 8  # iterations that the remaining time is estimated from
METRICS_SHOWN = 4
STAYS_UNSAID = ("TOO_FEW", "COSTS_STEADY")  # routine reasons to stay, not printed
SAID_BY_MOVES = ("ARRIVED", "STAGE_FAILED", "ROLLED_BACK", "STUCK", "MOVING")


def seconds(value: float) -> str:
    return f"{1e3 * value:.0f} ms" if value < 0.9995 else f"{value:.1f} s" if value < 600 else span(value)


PASSING = ("starting", "cancelling")
"""Transient states of a task."""

NEWS = ("TAKEN", "RETURNED", "PROCESS_DIED", "NODE_LOST")
"""Reasons for a worker's change of state that the run did not cause itself."""


class RunNarrator:
    """Follows a run by its events: `on_event` returns the lines to print."""

    def __init__(self, iterations: int, *, measuring: bool = False) -> None:
        self.iterations = iterations
        self.measuring = measuring  # the first plan only measures costs: its prediction means nothing
        self.done = 0
        self.plan = ""
        self.predicted_s: float | None = None  # by the plan, and from then on by the present costs
        self.groups: Sequence[EventFacts] = ()
        self.costs_s: Mapping[str, float] = {}
        self.components: Sequence[EventFacts] = ()  # as measured in the last iteration
        self.wall_s: float | None = None
        self.metrics: dict[str, float] = {}
        self.move: str | None = None  # the current move and its stage
        self.counts = {"moves": 0, "rolled back": 0, "lost": 0, "advice": 0}
        self._stay_code = ""
        self._advised = ""
        self._print_next = False
        self._move_s = 0.0  # of the finished stages
        self._is_warm = False
        self._here_s: deque[float] = deque(maxlen=RECENT)

    def on_event(self, event: str, facts: EventFacts) -> list[str]:
        handler = getattr(self, f"_on_{event}", None)
        return list(handler(facts)) if handler is not None else []

    def report_next_decision(self) -> None:
        self._print_next = True

    @property
    def left_s(self) -> float | None:
        """Estimated remaining time, from the median of recent iterations."""
        if not self._here_s:
            return None
        return statistics.median(self._here_s) * max(0, self.iterations - self.done)

    def line(self) -> str:
        if self.wall_s is None:
            return f"iteration 1 of {self.iterations}"
        parts = [f"iteration {self.done} of {self.iterations}", self.times()]
        if self.metrics:
            parts.append(self.figures())
        if self.left_s and self.left_s >= 1:
            parts.append(f"about {span(self.left_s)} left")
        return "  ".join(parts)

    def times(self) -> str:
        if self.wall_s is None:
            return ""
        if self.measuring or not self.predicted_s:
            return f"{seconds(self.wall_s)} (measuring)" if self.measuring else seconds(self.wall_s)
        return f"{seconds(self.wall_s)} (predicted {seconds(self.predicted_s)})"

    def figures(self, limit: int = METRICS_SHOWN) -> str:
        names = sorted(self.metrics, key=lambda name: "reward" not in name)
        return ", ".join(f"{name} {self.metrics[name]:.4g}" for name in names[:limit])

    # ---- one event each --------------------------------------------------------------------------------------------

    def _on_starting(self, facts: EventFacts) -> Iterator[str]:
        yield f"on {facts['on']}"
        yield f"folder {facts['folder']}"

    def _on_resumed(self, facts: EventFacts) -> Iterator[str]:
        self.done = int(facts["after"])
        void = int(facts.get("void", 0))
        again = f"; {counted(void, 'iteration')} after that had no checkpoint and will run again" if void else ""
        yield f"continues after iteration {facts['after']}{again}" if self.done else f"starts over{again}"

    def _on_plan(self, facts: EventFacts) -> Iterator[str]:
        why = facts.get("why")
        self.plan, self.predicted_s = str(facts["plan"]), facts.get("predicted_s")
        self.groups, self.costs_s = facts.get("groups", ()), facts.get("costs_s", {})
        if why == "first" and self.measuring:
            yield f"no costs are given: measured first, with {self.plan} GPU{'s' * (not self.plan.endswith(' 1'))}"
            return
        self.measuring = False
        words = {"measured": f"measured; from iteration {facts['iteration']} on", "lost": "after the loss"}
        at = words.get(str(why), "")
        if why == "move":
            return  # printed by the move
        yield f"plan{f' ({at})' if at else ''}: {self.plan} GPUs, {seconds(self.predicted_s or 0.0)} an iteration"
        if why == "measured":
            yield f"scaling is assumed: each doubling of GPUs gives {DOUBLING:.0%} of a perfect speed-up"

    def _on_iteration(self, facts: EventFacts) -> Iterator[str]:
        iteration = facts["iteration"]
        self.done, self.wall_s = int(iteration["number"]), float(iteration["wall_s"])
        self.components = iteration.get("components", ())
        self.predicted_s = facts.get("expected_s") or self.predicted_s
        if self._is_warm:  # the first iteration is not typical
            self._here_s.append(float(facts.get("here_s") or self.wall_s))
        self._is_warm = True
        self.metrics = flat(facts.get("metrics", {}))
        yield self.line()

    def _on_decided(self, facts: EventFacts) -> Iterator[str]:
        if facts["what"] == "advise":
            to = _target(facts)
            if to != self._advised or self._print_next:  # print the same advice once
                self.counts["advice"] += 1
                yield f"would move{to}: {facts['reason']}{gain_words(facts.get('numbers', {}))}"
            self._advised, self._print_next = to, False
            return
        is_new = facts["code"] != self._stay_code and facts["code"] not in STAYS_UNSAID
        if is_new or self._print_next:
            yield f"stays: {facts['reason']}"
        self._stay_code, self._advised, self._print_next = str(facts["code"]), "", False

    def _on_move(self, facts: EventFacts) -> Iterator[str]:
        state, name = facts["state"], f"move {facts['move']}"
        why = facts.get("reason") or "no reason was given"
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

    def _on_judged(self, facts: EventFacts) -> Iterator[str]:
        promised, realised = (share(float(facts[key])) for key in ("promised", "realised"))
        yield f"move {facts['move']} promised {promised} less an iteration; {realised} came, at the present costs"

    def _on_cluster(self, facts: EventFacts) -> Iterator[str]:
        why = facts.get("why")
        if why == "first":
            return
        nodes = facts.get("nodes", ())
        gpus = sum(int(node[1]) for node in nodes)
        leaving = facts.get("leaving") or ()
        draining = f"; {', '.join(map(str, leaving))} draining" if leaving else ""
        yield f"nodes changed ({why}): {counted(len(nodes), 'node')} with {counted(gpus, 'GPU')} now{draining}"

    def _on_range(self, facts: EventFacts) -> Iterator[str]:
        yield f"{facts['component']} may use {facts['least']} to {facts['most']} GPUs"

    def _on_told(self, facts: EventFacts) -> Iterator[str]:
        if facts.get("reason") and facts.get("code") not in SAID_BY_MOVES:
            yield str(facts["reason"])

    def _on_task(self, facts: EventFacts) -> Iterator[str]:
        """A task of another client in the run's slots: print when it waits, runs and ends."""
        if facts["what"] in PASSING:
            return
        why = facts.get("reason")
        yield f"task {facts['task']}: {facts['what']}{f', {why}' if why else ''}"

    def _on_worker(self, facts: EventFacts) -> Iterator[str]:
        """Print only changes that the run did not cause itself."""
        if facts.get("code") not in NEWS and facts["state"] != "lost":
            return
        why = facts.get("reason")
        yield f"{facts['component']}: worker {facts['worker']} is {facts['state']}{f' ({why})' if why else ''}"

    def _on_lost(self, facts: EventFacts) -> Iterator[str]:
        self.counts["lost"] += 1
        yield f"{facts['component']} is lost: {facts['why']}"


def gain_words(numbers: EventFacts) -> str:
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
    """Metrics by name; by component and name where two components use the same name."""
    names = [key for values in metrics.values() for key in values]
    return {
        key if names.count(key) == 1 else f"{component}.{key}": value
        for component, values in metrics.items()
        for key, value in values.items()
        if value is not None
    }


def last_lines(data: EventFacts) -> list[str]:
    """The last lines of a run: its result, its folder, and the next commands."""
    reason = str(data["reason"])
    lines = [reason if reason.startswith(f"{data['state']} ") else f"{data['state']}: {reason}"]
    if data["iterations"]:
        took, predicted = data["measured_s"], data["predicted_s"]
        times = "" if took is None else f", {seconds(took)} an iteration (promised {seconds(predicted)})"
        if (off := data.get("current_prediction_error")) is not None:
            times += f"; by the costs measured just before, predicted within {share(off)}"
        lines.append(f"plan: {data['plan']} GPUs{times}")
    if (shares := data.get("ledger")) is not None:
        ledger = LedgerSummary({name: part for name, part in shares.items() if name in BUCKETS}, shares["unbooked"])
        lines.append(f"an iteration's time: {ledger_text(ledger)}")
        if ledger.warns:
            lines.append(f"warning: {share(ledger.unbooked)} of an iteration is unbooked: its cause is unknown")
    courses = [
        f"{name} {course['first']:.4g} to {course['last']:.4g}"
        for name, course in sorted(data["metrics"].items(), key=lambda item: "reward" not in item[0])
        if course["first"] is not None
    ]
    if courses:
        lines.append(f"first to last tenth: {', '.join(courses[:METRICS_SHOWN])}")
    happened = [f"{word}: {count}" for word, count in data["happened"].items() if count]
    if happened:
        lines.append(f"during the run, {', '.join(happened)}")
    if data.get("fault"):
        lines.append(f"the folder is incomplete: {data['fault']}")
    folder = data["folder"]
    state = f"checkpoint after iteration {data['saved']}" if data["saved"] else "no checkpoint"
    lines.append(f"folder: {folder} ({state})")
    if data["state"] == "done":
        lines.append(f"resume: trimtab run --resume {folder}{data['again']} --iterations {2 * data['asked']}")
    else:
        word = "resume: " if data["saved"] else "start over: "
        lines.append(f"{word}trimtab run --resume {folder}{data['again']}")
    if data["iterations"]:
        lines.append(f"report: trimtab show {folder} --report report.html")
        lines.append(f"plan with measured costs: trimtab plan --from-run {folder}")
    return lines
