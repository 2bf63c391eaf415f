"""Statistics of a run's story (idle shares, medians, metric series), and the run in at most eleven lines.

`idle` is defined as in plans: the share of an iteration in which the GPUs of a component do nothing; for a CPU
component, in which it does nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby
from statistics import fmean, median

from trimtab.core.frozen import Frozen
from trimtab.model.ledger import UNBOOKED_WARNING, LedgerSummary, ledger_summary
from trimtab.render.html.kit.labels import counted, duration, ledger_text, share
from trimtab.render.html.run.story import ReportDecision, ReportIteration, ReportMigration, RunStory, finite
from trimtab.render.html.run.timeline import RunChart, run_chart

_TENTH = 10


class ReportCost(Frozen):
    """A component over the run: medians per iteration, without periodic work, and idle share."""

    component: str
    gpus: tuple[int, ...]  # GPU counts that it ran on, in sequence
    predicted_s: float | None  # of the last plan
    busy_s: float | None
    wait_s: float | None
    switch_s: float | None
    idle: float | None
    drift: float | None  # cost at the end relative to the start of the longest time on the same GPUs


def idle_shares(story: RunStory) -> dict[str, list[tuple[int, float]]]:
    """Per component and iteration that counts, the share in which its GPUs did nothing."""
    spells: dict[frozenset[str], _BusyTimes] = {}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in story.components}
    by_name: dict[str, list[tuple[float, float]]] = {}
    for bar in story.bars:
        by_name.setdefault(bar.component, []).append((bar.start, bar.end))
    for record in story.iterations:
        wall_s = record.iteration.wall_s
        if wall_s <= 0 or record.plan < 0:
            continue
        groups = {
            name: frozenset(names)
            for names, gpu_slots in story.plans[record.plan].groups
            if gpu_slots
            for name in names
        }
        for name in story.components:
            together = groups.get(name, frozenset((name,)))
            if together not in spells:
                spells[together] = _BusyTimes([interval for other in together for interval in by_name.get(other, ())])
            busy_s = spells[together].between(record.end_s - wall_s, record.end_s)
            found[name].append((record.iteration.number, min(max(1 - busy_s / wall_s, 0.0), 1.0)))
    return found


class _BusyTimes:
    """Busy intervals, merged; returns the busy time between two moments."""

    def __init__(self, spells: list[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spells):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0.0, *accumulate(end - start for start, end in zip(self._starts, self._ends, strict=True))]

    def between(self, since: float, until: float) -> float:
        return self._until(until) - self._until(since)

    def _until(self, moment: float) -> float:
        at = bisect_right(self._starts, moment)
        if not at:
            return 0.0
        return self._before[at - 1] + min(moment, self._ends[at - 1]) - self._starts[at - 1]


def costs(story: RunStory, idle: dict[str, list[tuple[int, float]]]) -> list[ReportCost]:
    counted = [record for record in story.iterations if not record.iteration.extra] or story.iterations
    found = []
    for name in story.components:
        mine = [(record, m) for record in counted for m in record.iteration.components if m.component == name]
        last = [m for record, m in mine if record.plan == len(story.plans) - 1] or [m for _, m in mine]
        shares = [value for _, value in idle.get(name, ())]
        plan = story.plans[-1] if story.plans else None
        known = plan is not None and story.prediction(plan.number) is not None
        found.append(
            ReportCost(
                name,
                tuple(gpus for gpus, _ in groupby(m.gpus for _, m in mine)),
                plan.costs_s.get(name) if plan is not None and known else None,
                _median([m.busy_s for m in last]),
                _median([m.wait_s for m in last]),
                _median([m.switch_s for m in last]),
                fmean(shares) if shares else None,
                _drift([(m.gpus, m.busy_s) for _, m in mine]),
            )
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _drift(course: list[tuple[int, float]]) -> float | None:
    """The end relative to the start, within the longest time on the same number of GPUs."""
    stays: list[list[float]] = []
    before: int | None = None
    for gpus, busy_s in course:
        if gpus != before:
            stays.append([])
            before = gpus
        stays[-1].append(busy_s)
    longest = max(stays, key=len, default=[])
    if len(longest) < _TENTH:
        return None
    count = max(3, len(longest) // _TENTH)
    start = median(longest[1 : 1 + count])  # the first iteration warms up
    return median(longest[-count:]) / start if start > 0 else None


def ledger(story: RunStory, newest: int | None = None) -> LedgerSummary | None:
    """Where the wall time of iterations went, those with periodic work left out."""
    usual = [record.iteration for record in story.iterations if not record.iteration.extra]
    return ledger_summary([(each.wall_s, each.booked) for each in usual[-(newest or len(usual)) :]])


def _ledger_words(story: RunStory) -> str:
    found = ledger(story)
    if found is None:
        return ""
    warning = f" More than {share(UNBOOKED_WARNING)} is unbooked: its cause is unknown." if found.warns else ""
    return f"An iteration's time: {ledger_text(found)}.{warning}"


PROMISED = 5  # iterations that a plan's promise is compared with, after its first one


def promise_errors(story: RunStory) -> list[tuple[int, float]]:
    """Relative error of each plan's promise: of its first iterations but one, by the plan's number."""
    found = []
    for plan in story.plans:
        under = [r.iteration for r in story.iterations if r.plan == plan.number][1:]
        walls = [iteration.wall_s for iteration in under if not iteration.extra][:PROMISED]
        if walls and (predicted := story.prediction(plan.number)):
            found.append((plan.number, median(walls) / predicted - 1))
    return found


def expected(story: RunStory) -> list[tuple[int, float]]:
    """Predicted iteration time by the costs measured just before: iteration before it, seconds."""
    stated = [(r.iteration.number - 1, r.expected_s) for r in story.iterations if r.expected_s is not None]
    if stated:
        return stated
    found = [(decision.iteration, finite(decision.numbers.get("iteration_s"))) for decision in story.decisions]
    return [(number, value) for number, value in found if value is not None]


def current_prediction(story: RunStory) -> float | None:
    """Of the newest iteration: by the costs measured just before, else the plan's promise."""
    done = story.iterations
    if done and done[-1].expected_s is not None and done[-1].plan == len(story.plans) - 1:
        return done[-1].expected_s
    return story.prediction(len(story.plans) - 1) if story.plans else None


def expected_errors(story: RunStory) -> list[float]:
    """Relative errors of the expectation after the previous iteration."""
    by_number = dict(expected(story))
    return [
        record.iteration.wall_s / by_number[before] - 1
        for record in story.iterations
        if not record.iteration.extra and by_number.get(before := record.iteration.number - 1)
    ]


def metric_names(story: RunStory, wanted: Sequence[str] = ()) -> list[str]:
    """Metrics to show, as `component.name`: those requested, or all whose own name begins with reward."""
    names = all_metrics(story)
    if not wanted:
        return [name for name in names if name.partition(".")[2].lower().startswith("reward")]
    return [name for want in wanted for name in names if name == want or name.partition(".")[2] == want]


def all_metrics(story: RunStory) -> list[str]:
    return sorted(
        {f"{name}.{key}" for record in story.done for name, values in record.metrics.items() for key in values}
    )


def course(iterations: Sequence[ReportIteration], metric: str) -> list[tuple[int, float]]:
    component, _, key = metric.partition(".")
    return [
        (record.iteration.number, value)
        for record in iterations
        if (value := record.metrics.get(component, {}).get(key)) is not None
    ]


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last tenth."""
    count = max(1, len(values) // _TENTH)
    return fmean(values[:count]), fmean(values[-count:])


def group_equal(decisions: Sequence[ReportDecision]) -> list[tuple[ReportDecision, ReportDecision, int]]:
    """Consecutive equal decisions as the first, the last and their count."""
    out: list[tuple[ReportDecision, ReportDecision, int]] = []
    for decision in decisions:
        if out and (out[-1][1].what, out[-1][1].code, out[-1][1].plan) == (decision.what, decision.code, decision.plan):
            first, _, count = out[-1]
            out[-1] = (first, decision, count + 1)
        else:
            out.append((decision, decision, 1))
    return out


MAX_LINES = 11
_UNLIKE = 0.1  # process clock and timeline differ by more than this share
_DRIFTED = 0.1


def summary_lines(story: RunStory, chart: RunChart, costs: list[ReportCost], metrics: list[str]) -> list[str]:
    """The summary, the most important line first."""
    lines = [
        _length(story),
        _clock(story),
        _plans(story),
        _moves(story, story.moves),
        _decisions(story),
        _prediction(story),
        _ledger_words(story),
        _drift_text(costs),
        _idle(chart, costs),
        _others(story),
        _losses(story),
        _rewards(story, metrics),
    ]
    return [line for line in lines if line][:MAX_LINES]


def story_lines(story: RunStory, metrics: Sequence[str] = ()) -> list[str]:
    spent = costs(story, idle_shares(story))
    return summary_lines(story, run_chart(story), spent, metric_names(story, metrics))


def status_sentence(story: RunStory) -> str:
    if not story.events:
        return "No events yet: the run has just started, or never did."
    if not story.state and story.is_advised:
        return "Followed by its log. Components are drawn in sequence."
    if not story.state:
        return "It has not ended: it is still running, or was killed."
    reason = story.end_reason or story.end_code
    return f"{story.state.capitalize()}: {reason}." if reason else f"{story.state.capitalize()}."


def has_virtual_clock(story: RunStory) -> bool:
    """Whether the timeline differs from wall-clock time: one process, timed as if components ran in parallel."""
    there_s, here_s = story.wall_s, story.here_s
    return bool(story.iterations) and here_s > 0 and abs(here_s - there_s) > _UNLIKE * max(here_s, there_s)


def _length(story: RunStory) -> str:
    count = len(story.iterations)
    of = f" of {story.wanted}" if story.wanted and story.wanted != count else ""
    if not count:
        return f"No iteration{of} has ended yet." if not story.state else f"No iteration{of} was done."
    walls = [record.iteration.wall_s for record in story.iterations]
    each = f"{duration(median(walls))} each (median)"
    return f"{count}{of} iteration{'s' if count != 1 else ''} in {duration(story.end_s)}; {each}."


def _clock(story: RunStory) -> str:
    if not has_virtual_clock(story):
        return ""
    return (
        "Times are those of the plan, as if components ran in parallel: they ran in sequence in one process, "
        f"in {duration(story.here_s)}."
    )


def _plans(story: RunStory) -> str:
    if not story.plans:
        return ""
    first, last = story.plans[0], story.plans[-1]
    promised = story.prediction(last.number)
    predicted = f", predicted {duration(promised)} an iteration" if promised is not None else ""
    if first.words == last.words:
        return f"It ran as {last.words}{predicted}."
    return f"It began as {first.words} and ended as {last.words}{predicted}."


def _moves(story: RunStory, moves: list[ReportMigration]) -> str:
    if not moves:
        return "No moves."
    arrived = [move for move in moves if move.state == "arrived"]
    back = [move for move in moves if move.state == "rolled back"]
    parts = []
    if arrived:
        took = duration(median(move.cost_s for move in arrived))
        each = f", {took} each (median)" if len(arrived) > 1 else f" in {took}"
        parts.append(f"{counted(len(arrived), 'move')} done{each}")
    if back:
        why = next((move.outcome for move in back if move.outcome), "")
        parts.append(f"{len(back)} rolled back{f' ({why})' if why else ''}")
    judged = [move for move in arrived if move.realised is not None]
    if judged:
        gains = ", ".join(f"{share(m.promised or 0.0)} and {share(m.realised or 0.0)}" for m in judged[-3:])
        parts.append(f"gain promised and realised: {gains} of an iteration")
    others = len(moves) - len(arrived) - len(back)
    if others:
        parts.append(f"{others} unfinished")
    if (gained := gain_against_staying(story)) is not None and gained[1] > 0:
        change = 1 - gained[0] / gained[1]
        less = f"{share(abs(change))} {'less' if change >= 0 else 'more'}"
        parts.append(f"{less} time than the first plan would have taken, computed from the same costs")
    return _sentence("; ".join(parts))


def _decisions(story: RunStory) -> str:
    stays = [decision for decision in story.decisions if decision.what == "stay"]
    advice = [decision for decision in story.decisions if decision.what not in ("stay", "advised")]
    parts = []
    if stays:
        common = Counter(decision.code for decision in stays).most_common(2)
        parts.append(f"{len(stays)} × stay ({', '.join(f'{code} {count}' for code, count in common)})")
    if advice:
        parts.append(f"{len(advice)} × advice, the last: {advice[-1].reason or advice[-1].plan}")
    return f"Decisions: {'; '.join(parts)}." if parts else ""


def _prediction(story: RunStory) -> str:
    promises = [abs(error) for _, error in promise_errors(story)]
    now = [abs(error) for error in expected_errors(story)]
    parts = []
    if now:
        parts.append(
            f"Iterations were predicted within {share(median(now))} (median) by the costs measured just before"
        )
    if promises:
        of = "its plan's promise" if len(promises) == 1 else f"the promises of {len(promises)} plans"
        start = "were" if now else "Iterations were"
        parts.append(f"{start} within {share(median(promises))} of {of} at their beginning")
    return f"{', and '.join(parts)}." if parts else ""


def gain_against_staying(story: RunStory) -> tuple[float, float] | None:
    """Seconds of the iterations under later plans, and what they would have taken under the first one."""
    moved = [(r.iteration.wall_s, r.stay_s) for r in story.iterations if r.stay_s is not None]
    return (sum(wall for wall, _ in moved), sum(stay for _, stay in moved)) if moved else None


def _drift_text(costs: list[ReportCost]) -> str:
    drifted = [cost for cost in costs if cost.drift is not None and abs(cost.drift - 1) >= _DRIFTED]
    if not drifted:
        return ""
    worst = max(drifted, key=lambda cost: abs(1 - 1 / (cost.drift or 1.0)) * (cost.busy_s or 0.0))
    drift = worst.drift or 1.0
    change = f"{drift:.2f}x slower" if drift > 1 else f"{1 / drift:.2f}x faster"
    return f"{worst.component} is {change} than at first, on the same GPUs."


def _idle(chart: RunChart, costs: list[ReportCost]) -> str:
    if chart.available_gpu_s <= 0:
        return ""
    whole = share(max(0.0, 1 - chart.used_gpu_s / chart.available_gpu_s))
    placed = [cost for cost in costs if cost.idle is not None and cost.component not in chart.on_cpu]
    idlest = max(placed, key=lambda cost: cost.idle or 0.0, default=None)
    worst = (
        f"; most of all those of {idlest.component} ({share(idlest.idle)} of an iteration)"
        if idlest and idlest.idle
        else ""
    )
    return f"GPUs were idle for {whole} of the time{worst}."


def _others(story: RunStory) -> str:
    kinds = Counter((event.lane, event.kind) for event in story.timeline_events)
    parts = []
    for key, words in (
        (("nodes", "joined"), "node{s} joined"),
        (("nodes", "lost"), "node{s} left"),
        (("tasks", "evicted"), "task{s} evicted"),
    ):
        if kinds[key]:
            parts.append(f"{kinds[key]} {words.format(s='s' if kinds[key] != 1 else '')}")
    started, stopped = kinds["workers", "worker"], kinds["workers", "left"]
    if started or stopped:
        parts.append(f"workers started {counted(started, 'time')} and stopped {counted(stopped, 'time')}")
    return _sentence(", ".join(parts)) if parts else ""


def _losses(story: RunStory) -> str:
    lost = [event for event in story.timeline_events if (event.lane, event.kind) == ("run", "lost")]
    void = [record for record in story.done if record.void]
    parts = []
    if lost:
        parts.append(f"{counted(len(lost), 'loss').replace('losss', 'losses')}, the last: {lost[-1].reason}")
    if story.resumes:
        parts.append(f"resumed {counted(story.resumes, 'time')}")
    if void:
        again = duration(sum(record.iteration.wall_s for record in void))
        parts.append(f"{counted(len(void), 'iteration')} run again ({again})")
    return _sentence("; ".join(parts)) if parts else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _rewards(story: RunStory, metrics: list[str]) -> str:
    for name in metrics:
        values = [value for _, value in course(story.iterations, name)]
        if values:
            first, last = ends_of(values)
            way = "rose" if last > first else "fell" if last < first else "stayed"
            return f"{name} {way} from {first:.3g} to {last:.3g}."
    return ""
