"""What was seen of a followed run as a page to look at: one HTML file, in the look of every report.

The steps are drawn as they went, beside the plan in place and the one that is advised, by the code that draws every
timeline. Whole by itself: it loads nothing and sends nothing. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab import __version__
from trimtab.formats.logs.follow import LoggedStep
from trimtab.model.plan import Plan
from trimtab.render.html.kit import timeline
from trimtab.render.html.kit.chart import Chart, ChartBar, ChartRow
from trimtab.render.html.kit.labels import duration, escape, escape_block, share
from trimtab.render.html.plan_report import COPY_SCRIPT, NARROW_PX, WIDE_PX, page_head
from trimtab.render.text.advise import gpus_text
from trimtab.runtime.advise.analysis import ComponentSummary, FollowEvent, RunPicture
from trimtab.runtime.advise.follower import Follower, FollowFrame
from trimtab.runtime.advise.replanner import Advice

STEPS_DRAWN = 14


def advise_report(follower: Follower, frame: FollowFrame) -> str:
    """The report as HTML."""
    seen = frame.picture
    title = ", ".join(Path(path).name for path in follower.tail.paths)
    names = tuple(part.name for part in seen.parts)
    parts = [
        page_head(title),
        _headline(seen, title),
        _advice(follower, seen, names),
        _steps(follower, seen),
        _history(follower.history),
        _notes(seen.notes),
        f"</main>\n<footer><p>trimtab {escape(__version__)}.</p></footer>",
        f"<script>{COPY_SCRIPT}</script>\n</body>\n</html>",
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
    tiles = "".join(f"<div><dt>{name}</dt>{value}</div>" for name, value in numbers)
    now = " | ".join(f"{', '.join(one.components)} on {one.gpus} GPUs" for one in seen.sharing)
    return (
        f'<header>\n<p class="eyebrow">trimtab advise · {escape(seen.framework)}</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lede">{escape(now)}</p>\n<dl class="numbers">{tiles}</dl>\n</header>'
    )


def _advice(follower: Follower, seen: RunPicture, names: tuple[str, ...]) -> str:
    advice, adviser = seen.advice, follower.advising.adviser
    if advice is None or adviser is None:
        return (
            '<section aria-labelledby="h-advice">\n<h2 id="h-advice">No advice</h2>\n'
            f"<p>{escape(seen.reason.sentence)}</p>\n</section>"
        )
    now, then = adviser.at_current_costs(adviser.plan), adviser.at_current_costs(advice.plan)
    axis = max(now.timeline_seconds, then.timeline_seconds)
    plans = (("The plan in place", now, advice.iteration_s), ("The plan that is advised", then, advice.new_iteration_s))
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
    far = f" Nobody measured {', '.join(advice.extrapolated)} on so many GPUs." if advice.extrapolated else ""
    more = "".join(f" {sentence}." for sentence in advice.settings.advice)
    return f"Since step {advice.since}: {advice.reason.sentence}.{far}{more}"


def _words(advice: Advice) -> str:
    from trimtab.formats.write_back import shell_words

    return escape_block("\n".join(shell_words(advice.settings)))


def _chart(plan: Plan, title: str, prefix: str, keys: tuple[str, ...], axis: float) -> str:
    return _drawn(timeline.plan_chart(plan, title, keys=keys, axis_seconds=axis), prefix, compact=True)


def _drawn(chart: Chart, prefix: str, *, compact: bool) -> str:
    """The same chart for a wide and for a narrow page; the style sheet shows one of them."""
    found = ""
    for name, width in (("wide", WIDE_PX), ("narrow", NARROW_PX)):
        drawn = timeline.svg(chart, width, standalone=False, compact=compact, prefix=f"{prefix}-{name}")
        found += drawn.replace('class="tt"', f'class="tt {name}"', 1)
    return found


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
    """Some steps from the first to the last, each as its components one after another."""
    notes = {part.name: ", a wait" if part.wait else "" for part in parts}
    steps = _some(follower.advising.counted)
    rows, longest = [], 0.0
    for step in steps:
        at, stretches = 0.0, []
        for name, seconds in follower.advising.seconds(step).items():
            if name in notes and seconds > 0:
                stretches.append(ChartBar(at, at + seconds, name, note=f"{seconds:.1f} s{notes[name]}"))
                at += seconds
        longest = max(longest, at)
        rows.append(ChartRow(f"step {step.number}", tuple(stretches), shaded=False))
    return Chart("Steps of the run", tuple(rows), tuple(notes), max(longest, 1e-9))


def _some(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    if len(steps) <= STEPS_DRAWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(at * last / (STEPS_DRAWN - 1))] for at in range(STEPS_DRAWN)]


def _row(index: int, part: ComponentSummary) -> str:
    spread = "" if part.spread is None else f"±{part.spread:.0%}"
    drift = "" if part.drift is None else f"{part.drift:+.0%}"
    said = f"a wait, no cost: {escape(part.wait)}" if part.wait else "has drifted" if part.drifted else ""
    numbers = (gpus_text(part), f"{part.seconds:,.1f}", "" if part.share is None else share(part.share))
    cells = "".join(f'<td class="number">{cell}</td>' for cell in (*numbers, spread, drift))
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{index % timeline.COLOURS}"></span>'
        f"<span>{escape(part.name)}</span></span></th>{cells}<td>{said}</td></tr>"
    )


def _history(history: Sequence[FollowEvent]) -> str:
    if not history:
        return ""
    items = "".join(f"<li>step {one.step}: {escape(one.what)}: {escape(one.sentence)}</li>" for one in history)
    return (
        '<section aria-labelledby="h-history">\n<h2 id="h-history">What happened</h2>\n'
        f'<ul class="plain">{items}</ul>\n</section>'
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        '<section aria-labelledby="h-notes">\n<h2 id="h-notes">What was assumed and left out</h2>\n'
        f'<ul class="plain">{items}</ul>\n</section>'
    )
