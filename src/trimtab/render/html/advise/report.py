"""A followed run as an HTML page: its steps, the current plan and the advised plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.write_back import shell_words
from trimtab.render.html.kit import page
from trimtab.render.html.kit.chart import Chart, ChartBar, ChartRow
from trimtab.render.html.kit.labels import duration, escape, known, share
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.kit.timeline import plan_chart
from trimtab.render.text.advise import drift_text, gpus_text, mark_text, spread_text
from trimtab.runtime.advise.analysis import ComponentSummary, RunPicture
from trimtab.runtime.advise.follower import Follower, FollowFrame
from trimtab.runtime.advise.replanner import Advice

STEPS_DRAWN = 14


def advise_report(follower: Follower, frame: FollowFrame) -> str:
    seen = frame.picture
    title = ", ".join(Path(path).name for path in follower.tail.paths)
    names = tuple(part.name for part in seen.parts)
    history = [f"step {event.step}: {event.what}: {event.sentence}" for event in follower.history]
    parts = [
        _headline(seen, title),
        _advice(follower, seen, names),
        _steps(follower, seen),
        page.list_section("history", "What happened", history),
        page.list_section("notes", "What was assumed and left out", seen.notes),
    ]
    return page.document(title, parts)


def _headline(seen: RunPicture, title: str) -> str:
    advice = seen.advice
    drift = "" if seen.length_drift is None else f"{seen.length_drift:+.0%} since the beginning"
    tiles = [
        Tile("A step takes", known(seen.step_s), f"{seen.counted} of {seen.steps} steps count"),
        Tile("GPUs idle", known(seen.idle, share), "of their time"),
        Tile("Answers", known(seen.length, "{:,.0f}".format), f"tokens {drift}"),
    ]
    if advice is None:
        tiles.append(Tile("Advice", "None", seen.reason.code.value))
    else:
        band = f"{share(max(advice.low, 0.0))} to {share(advice.high)} of a step"
        tiles.append(Tile("To be gained", share(advice.gain), band, "good"))
    now = " | ".join(f"{', '.join(group.components)} on {group.gpus} GPUs" for group in seen.sharing)
    return page.header(f"trimtab advise · {seen.framework}", title, now, tiles)


def _advice(follower: Follower, seen: RunPicture, names: tuple[str, ...]) -> str:
    advice, adviser = seen.advice, follower.advising.adviser
    if advice is None or adviser is None:
        return page.section("advice", "No advice", escape(seen.reason.sentence), "")
    now, then = adviser.at_current_costs(adviser.plan), adviser.at_current_costs(advice.plan)
    axis = max(now.timeline_seconds, then.timeline_seconds)
    plans = (("Current plan", now, advice.iteration_s), ("Advised plan", then, advice.new_iteration_s))
    items = []
    for at, (title, plan, seconds) in enumerate(plans):
        chart = plan_chart(plan, title, keys=names, axis_seconds=axis)
        body = f"<p>{escape(plan.describe())} GPUs</p>{page.chart_picture(chart, f'plan{at}', compact=True)}"
        items.append(page.card_item(title, duration(seconds), body))
    overrides = "\n".join(shell_words(advice.settings))
    return (
        page.section("advice", "Advice", escape(_sentence(advice)), page.cards(items, ordered=False))
        + "\n"
        + page.copy_section("apply", "What to apply", "Add to the run's command line.", "Overrides", overrides)
    )


def _sentence(advice: Advice) -> str:
    extrapolated = f" Not measured on that many GPUs: {', '.join(advice.extrapolated)}." if advice.extrapolated else ""
    more = "".join(f" {sentence}." for sentence in advice.settings.advice)
    return f"Since step {advice.since}: {advice.reason.sentence}.{extrapolated}{more}"


def _steps(follower: Follower, seen: RunPicture) -> str:
    if not seen.parts:
        return ""
    title = "Where each step goes"
    drawn = page.chart_picture(_step_chart(follower, seen.parts), "steps")
    heads = ("Component", "GPUs", "Seconds", "Of the step", "Spread", "Drift", "")
    rows = [
        [
            page.keyed(at, escape(part.name)),
            gpus_text(part),
            f"{part.seconds:,.1f}",
            known(part.share, share, ""),
            spread_text(part),
            drift_text(part),
            escape(mark_text(part)),
        ]
        for at, part in enumerate(seen.parts)
    ]
    body = page.card(f"{drawn}\n{page.table(title, heads, rows, numeric=range(1, 6))}")
    return page.section("steps", title, "", body)


def _step_chart(follower: Follower, parts: Sequence[ComponentSummary]) -> Chart:
    """A sample of steps from the first to the last, each as its components in sequence."""
    notes = {part.name: ", a wait" if part.wait else "" for part in parts}
    steps = _some(follower.advising.counted)
    rows, longest = [], 0.0
    for step in steps:
        at, bars = 0.0, []
        for name, seconds in follower.advising.seconds(step).items():
            if name in notes and seconds > 0:
                bars.append(ChartBar(at, at + seconds, name, note=f"{seconds:.1f} s{notes[name]}"))
                at += seconds
        longest = max(longest, at)
        rows.append(ChartRow(f"step {step.number}", tuple(bars), shaded=False))
    return Chart("Steps of the run", tuple(rows), tuple(notes), max(longest, 1e-9))


def _some(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    if len(steps) <= STEPS_DRAWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(at * last / (STEPS_DRAWN - 1))] for at in range(STEPS_DRAWN)]
