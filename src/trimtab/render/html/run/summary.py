"""A run in at most ten lines: what it did, what it decided, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from trimtab.render.html.kit.labels import counted, duration, share
from trimtab.render.html.run import figures
from trimtab.render.html.run.facts import ReportMigration
from trimtab.render.html.run.story import RunStory
from trimtab.render.html.run.timeline import RunChart, run_chart

MAX_LINES = 10
_UNLIKE = 0.1  # process clock and timeline differ by more than this share
_DRIFTED = 0.1


def summary_lines(story: RunStory, chart: RunChart, costs: list[figures.ReportCost], metrics: list[str]) -> list[str]:
    """The summary, the most important line first."""
    lines = [
        _length(story),
        _clock(story),
        _plans(story),
        _moves(story.moves),
        _decisions(story),
        _prediction(story),
        _drift(costs),
        _idle(chart, costs),
        _others(story),
        _losses(story),
        _rewards(story, metrics),
    ]
    return [line for line in lines if line][:MAX_LINES]


def story_lines(story: RunStory, metrics: Sequence[str] = ()) -> list[str]:
    """The summary of a story by itself."""
    spent = figures.costs(story, figures.idle_shares(story))
    return summary_lines(story, run_chart(story), spent, figures.metric_names(story, metrics))


def status_sentence(story: RunStory) -> str:
    """The state of the run as a sentence."""
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


def _moves(moves: list[ReportMigration]) -> str:
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
    others = len(moves) - len(arrived) - len(back)
    if others:
        parts.append(f"{others} unfinished")
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
    found = [error for _, error in figures.errors(story)]
    if not found:
        return ""
    middle = median(found)
    side = "longer than" if middle > 0 else "shorter than"
    how = f"{share(abs(middle))} {side}" if abs(middle) >= 0.0005 else "as long as"
    off = share(median(abs(error) for error in found))
    spread = "" if off == share(abs(middle)) else f", with an absolute error of {off}"
    now = [abs(error) for error in figures.expected_errors(story)]
    current = f"; by the costs measured just before, off by {share(median(now))}" if now else ""
    return f"Iterations were {how} predicted (median){spread}{current}."


def _drift(costs: list[figures.ReportCost]) -> str:
    drifted = [cost for cost in costs if cost.drift is not None and abs(cost.drift - 1) >= _DRIFTED]
    if not drifted:
        return ""
    worst = max(drifted, key=lambda cost: abs(1 - 1 / (cost.drift or 1.0)) * (cost.busy_s or 0.0))
    drift = worst.drift or 1.0
    change = f"{drift:.2f}x slower" if drift > 1 else f"{1 / drift:.2f}x faster"
    return f"{worst.component} is {change} than at first, on the same GPUs."


def _idle(chart: RunChart, costs: list[figures.ReportCost]) -> str:
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
        values = [value for _, value in figures.course(story.iterations, name)]
        if values:
            first, last = figures.ends_of(values)
            way = "rose" if last > first else "fell" if last < first else "stayed"
            return f"{name} {way} from {first:.3g} to {last:.3g}."
    return ""
