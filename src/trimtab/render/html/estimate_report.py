"""An estimate as an HTML page: a step as a timeline, memory of each phase, sizes, switches, and what it rests on.

Made of the data of `render/text/estimate.py`. Everything drawn is in tables too; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.plan.estimate.step import ALONE
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import duration, escape, fit, share
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.kit.svg import px, rect, svg_document, text_at
from trimtab.render.html.kit.timeline import COLOURS, Chart, ChartBar, ChartRow
from trimtab.render.text.estimate import apart, figure

_ROW = 40.0
SHOWN = 3
"""Public rows of a switch; all are in the data."""
Data = Mapping[str, Any]


def estimate_report(data: Data, *, command: str | None) -> str:
    """The page of an estimate's data."""
    parts = [
        _headline(data),
        _stages(data),
        _memory(data),
        _sizes(data),
        _what_if(data),
        page.list_section("measured", "What was measured", data["measured"]),
        page.list_section("assumed", "What was assumed", data["assumed"]),
        page.list_section("care", "Take care", data["warnings"]),
        _near(data),
    ]
    return page.document(f"Estimate of {data['model']}", parts, command=command)


def _span(values: Mapping[str, float], unit: str = "") -> str:
    return f"{figure(values['low'])} to {figure(values['high'])}{unit}"


def _headline(data: Data) -> str:
    step, steps = data["step_seconds"], data["steps"]
    hours = data["hours"]
    tiles = [
        Tile("A step", duration(step["likely"]), f"{_span(step)} s"),
        Tile(f"{steps:,} steps", f"{figure(hours['likely'])} h", f"{_span(hours)} hours"),
        Tile("GPU-hours", figure(data["gpu_hours"]["likely"]), _span(data["gpu_hours"])),
    ]
    if "cost" in data:
        tiles.append(Tile("Cost", figure(data["cost"]["likely"]), _span(data["cost"])))
    css, word = ("good", "Yes") if data["fits"] else ("warn", "No")
    fullest = max(data["memory_gb"].items(), key=lambda phase: phase[1]["likely"] / phase[1]["gpu"])
    full = f"{fullest[0]}: {fullest[1]['likely']:.0f} of {fullest[1]['gpu']:g} GB"
    tiles.append(Tile("Fits", word, full, css))
    tiles.append(
        Tile("Throughput", f"{data['tokens_per_second_and_gpu']:,.0f}", f"tokens/s/GPU, MFU {share(data['mfu'])}")
    )
    if data["mode"] == "async":
        stale = data["staleness"]
        tiles.append(Tile("Staleness", f"{stale['mean']:g}", f"steps on average, {stale['greatest']:g} at most"))
    lede = (
        f"{data['parameters'] / 1e9:.1f}B parameters on {data['gpus']} {data['gpu']}{apart(data)}, {data['mode']}. "
        f"Low and high are meant to hold nine of ten measured values; {data['host_memory_gb']:g} GB of host memory per "
        "node."
    )
    return page.header("trimtab estimate", str(data["model"]), lede, tiles)


def _stages(data: Data) -> str:
    colours = {name: number % COLOURS for number, name in enumerate(data["stages"])}
    rows = [
        (
            page.keyed(colours[name], escape(name)),
            *(figure(stage[key]) for key in ("low", "likely", "high")),
            escape("measured" if stage["measured"] else stage["limit"]),
        )
        for name, stage in data["stages"].items()
    ]
    heads = ("stage", "low", "likely", "high", "limited by")
    table = page.table("Seconds of each stage", heads, rows, numeric=(1, 2, 3))
    drawn = page.chart_picture(step_chart(data), "step")
    lede = "Seconds of a step, stage by stage, and what limits each."
    return page.section("stages", "Where a step goes", lede, page.card(drawn) + table)


def step_chart(data: Data) -> Chart:
    """A step as a timeline: one row, or rollout beside training in asynchronous runs."""
    seconds = data["step_seconds"]["likely"]
    beside = data["mode"] == "async" and data["rollout_gpus"]
    rows: dict[str, list[ChartBar]] = {}
    at = 0.0
    stages = data["stages"]
    alone = sum(stages[name]["likely"] for name in ALONE if name in stages)
    for name in sorted(stages, key=lambda name: name in ALONE):
        stage = stages[name]
        early = beside and name in ("generate", "judge")
        if name in ALONE:
            at = max(at, seconds - alone)
            alone -= stage["likely"]
        start = stages["generate"]["likely"] if name == "judge" else 0.0 if early else at
        end = min(start + stage["likely"], seconds)
        row = "rollout" if early else "training" if beside else "all GPUs"
        rows.setdefault(row, []).append(ChartBar(start, end, name))
        at = at if early else end
    gpus = {"rollout": data["rollout_gpus"], "training": data["gpus"] - data["rollout_gpus"]}
    charted = tuple(ChartRow(n, tuple(bars), f"{gpus.get(n, data['gpus'])} GPUs") for n, bars in rows.items())
    words = "; ".join(f"{name} {figure(stage['likely'])} s" for name, stage in stages.items())
    return Chart("A step", charted, tuple(stages), seconds, description=words)


def _memory(data: Data) -> str:
    rows = []
    for name, phase in data["memory_gb"].items():
        terms = ", ".join(f"{term} {size:.1f}" for term, size in phase["terms"].items())
        numbers = (f"{phase['likely']:.1f}", f"{phase['high']:.1f}", f"{phase['gpu']:g}")
        rows.append((escape(name), *numbers, escape(terms)))
    heads = ("phase", "likely GB", "high GB", "GPU has", "of which")
    table = page.table("Memory of each phase", heads, rows, numeric=(1, 2, 3))
    names = _terms(data)
    keys = page.legend((page.key_of(number % COLOURS), name) for name, number in names.items())
    drawn = page.picture(lambda width, prefix: memory_svg(data, width, prefix), "memory")
    return page.section("memory", "Memory of a GPU", "The line is what a GPU has.", page.card(keys + drawn) + table)


def _terms(data: Data) -> dict[str, int]:
    names = dict.fromkeys(term for phase in data["memory_gb"].values() for term in phase["terms"])
    return {name: number for number, name in enumerate(names)}


def memory_svg(data: Data, width: int, prefix: str) -> str:
    """A bar for each phase, its terms one after another, with a line at the GPU's memory."""
    phases, names = data["memory_gb"], _terms(data)
    most = max(max(phase["likely"], phase["gpu"]) for phase in phases.values()) * 1.04
    scale = (width - 2) / most
    out: list[str] = []
    for at, (name, phase) in enumerate(phases.items()):
        y, x = at * _ROW, 1.0
        words = f"{name}: {phase['likely']:.1f} of {phase['gpu']:g} GB"
        out.append(text_at(1, y + 12, fit(words, width - 2, 12), "small"))
        for term, size in phase["terms"].items():
            wide = size * scale
            css = f"inside k{names[term] % COLOURS}"
            out.append(rect(x, y + 18, max(0.5, wide), 14, css, f"{name}\n{term}: {size:.1f} GB"))
            x += wide
        limit = 1 + phase["gpu"] * scale
        out.append(f'<path class="bracket" d="M{px(limit)} {px(y + 15)}V{px(y + 35)}"/>')
    listed = "; ".join(f"{name} {phase['likely']:.1f} of {phase['gpu']:g} GB" for name, phase in phases.items())
    return svg_document("".join(out), width, len(phases) * _ROW, prefix, "Memory of each phase", listed)


def _sizes(data: Data) -> str:
    if "sizes" not in data:
        return ""
    rows = [
        (
            str(size["gpus"]),
            figure(size["step_seconds"]["likely"]),
            _span(size["step_seconds"]),
            figure(size["hours"]["likely"]),
            figure(size["gpu_hours"]["likely"]),
            escape(f"{size['rollout']}; {size['train']}"),
        )
        for size in data["sizes"]
    ]
    heads = ("GPUs", "seconds", "low to high", "hours", "GPU-hours", "rollout; training")
    table = page.table("Numbers of GPUs", heads, rows, numeric=range(5))
    return page.section(
        "sizes", "How many GPUs", "The smallest number on which it fits, twice and four times it.", table
    )


def _what_if(data: Data) -> str:
    if "what_if" not in data:
        return ""
    rows = []
    for each in data["what_if"]:
        public = "<br>".join(
            escape("{system} {date}, {model}, {gpu}: {stage} {speedup:g}x, {source}".format(**row))
            for row in each["evidence"][:SHOWN]
        )
        fit_words = "" if each["fits"] else " (does not fit)"
        rows.append(
            (
                f"<code>{escape(each['switch'])}</code>",
                figure(each["step_seconds"]),
                f"{each['speedup']:.2f}x{fit_words}",
                escape("; ".join(each["conditions"])),
                public or "none",
            )
        )
    heads = ("switch", "seconds", "faster", "when it pays", "public rows")
    table = page.table("Switches", heads, rows, numeric=(1, 2))
    return page.section("what-if", "What if", "Each switch by itself, beside what it gave in public.", table)


def _near(data: Data) -> str:
    rows = [
        (
            escape(f"{row['framework']}, {row['model']}"),
            *(escape(str(row[key])) for key in ("gpus", "gpu", "mode")),
            figure(row["step_seconds"]),
            escape(row["source"]),
        )
        for row in data["near"]
    ]
    heads = ("run", "GPUs", "kind", "mode", "seconds", "source")
    table = page.table("Public steps", heads, rows, numeric=(1, 4))
    return page.section("near", "Public steps near it", "What was published of runs like this one.", table)
