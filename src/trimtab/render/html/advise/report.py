"""A followed run as an HTML page: its steps, the current plan and the advised plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.formats.logs.follow import LoggedStep
from trimtab.model.plan import Plan
from trimtab.render.html.kit import timeline
from trimtab.render.html.kit.chart import Chart, ChartBar, ChartRow
from trimtab.render.html.kit.labels import duration, escape, escape_block, share
from trimtab.render.html.kit.page import both, list_section, page_foot, page_head, page_header
from trimtab.render.text.advise import gpus_text
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
        page_head(title),
        _headline(seen, title),
        _advice(follower, seen, names),
        _steps(follower, seen),
        list_section("history", "What happened", history),
        list_section("notes", "What was assumed and left out", seen.notes),
        page_foot(),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _headline(seen: RunPicture, title: str) -> str:
    advice = seen.advice
    step = "–" if seen.step_s is None else duration(seen.step_s)
    drift = "" if seen.length_drift is None else f"{seen.length_drift:+.0%} since the beginning"
    numbers = [
        ("A step takes", f"<dd>{step}<small>{seen.counted} of {seen.steps} steps count</small></dd>"),
        ("GPUs idle", f"<dd>{'–' if seen.idle is None else share(seen.idle)}<small>of their time</small></dd>"),
        ("Answers", f"<dd>{'–' if seen.length is None else f'{seen.length:,.0f}'}<small>tokens {drift}</small></dd>"),
    ]
    if advice is None:
        numbers.append(("Advice", f"<dd>None<small>{escape(seen.reason.code.value)}</small></dd>"))
    else:
        band = f"{share(max(advice.low, 0.0))} to {share(advice.high)}"
        numbers.append(("To be gained", f'<dd class="good">{share(advice.gain)}<small>{band} of a step</small></dd>'))
    now = " | ".join(f"{', '.join(group.components)} on {group.gpus} GPUs" for group in seen.sharing)
    return page_header(f"trimtab advise · {seen.framework}", title, now, numbers)


def _advice(follower: Follower, seen: RunPicture, names: tuple[str, ...]) -> str:
    advice, adviser = seen.advice, follower.advising.adviser
    if advice is None or adviser is None:
        return (
            '<section aria-labelledby="h-advice">\n<h2 id="h-advice">No advice</h2>\n'
            f"<p>{escape(seen.reason.sentence)}</p>\n</section>"
        )
    now, then = adviser.at_current_costs(adviser.plan), adviser.at_current_costs(advice.plan)
    axis = max(now.timeline_seconds, then.timeline_seconds)
    plans = (("Current plan", now, advice.iteration_s), ("Advised plan", then, advice.new_iteration_s))
    pictures = "".join(
        f'<li class="card"><h3>{title}<span class="time">{duration(seconds)}</span></h3>'
        f"<p>{escape(plan.describe())} GPUs</p><figure>{_chart(plan, title, f'plan{at}', names, axis)}</figure></li>\n"
        for at, (title, plan, seconds) in enumerate(plans)
    )
    return (
        '<section aria-labelledby="h-advice">\n<h2 id="h-advice">Advice</h2>\n'
        f'<p>{escape(_sentence(advice))}</p>\n<ul class="plans">\n{pictures}</ul>\n</section>\n'
        '<section aria-labelledby="h-apply">\n<h2 id="h-apply">What to apply</h2>\n'
        "<p>Add to the run's command line.</p>\n"
        f'<div class="copy"><pre tabindex="0" aria-label="Overrides">{_words(advice)}</pre></div>\n</section>'
    )


def _sentence(advice: Advice) -> str:
    extrapolated = f" Not measured on that many GPUs: {', '.join(advice.extrapolated)}." if advice.extrapolated else ""
    more = "".join(f" {sentence}." for sentence in advice.settings.advice)
    return f"Since step {advice.since}: {advice.reason.sentence}.{extrapolated}{more}"


def _words(advice: Advice) -> str:
    from trimtab.formats.write_back import shell_words

    return escape_block("\n".join(shell_words(advice.settings)))


def _chart(plan: Plan, title: str, prefix: str, keys: tuple[str, ...], axis: float) -> str:
    return _drawn(timeline.plan_chart(plan, title, keys=keys, axis_seconds=axis), prefix, compact=True)


def _drawn(chart: Chart, prefix: str, *, compact: bool) -> str:
    return both(lambda width, name: timeline.svg(chart, width, standalone=False, compact=compact, prefix=name), prefix)


def _steps(follower: Follower, seen: RunPicture) -> str:
    if not seen.parts:
        return ""
    rows = "\n".join(_row(at, part) for at, part in enumerate(seen.parts))
    heads = ("Component", "GPUs", "Seconds", "Of the step", "Spread", "Drift", "")
    numeric = ' class="number"'
    columns = "".join(f'<th scope="col"{numeric if 0 < i < 6 else ""}>{head}</th>' for i, head in enumerate(heads))
    return (
        '<section aria-labelledby="h-steps">\n<h2 id="h-steps">Where each step goes</h2>\n'
        f'<div class="card"><figure>{_drawn(_step_chart(follower, seen.parts), "steps", compact=False)}</figure>\n'
        '<div class="scroll" role="region" aria-labelledby="h-steps" tabindex="0"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div></div>\n</section>"
    )


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


def _row(index: int, part: ComponentSummary) -> str:
    spread = "" if part.spread is None else f"±{part.spread:.0%}"
    drift = "" if part.drift is None else f"{part.drift:+.0%}"
    note = f"waiting, not a cost: {escape(part.wait)}" if part.wait else "has drifted" if part.drifted else ""
    numbers = (gpus_text(part), f"{part.seconds:,.1f}", "" if part.share is None else share(part.share))
    cells = "".join(f'<td class="number">{cell}</td>' for cell in (*numbers, spread, drift))
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{index % timeline.COLOURS}"></span>'
        f"<span>{escape(part.name)}</span></span></th>{cells}<td>{note}</td></tr>"
    )
