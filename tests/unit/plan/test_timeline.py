from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plans_for_pictures as samples
from trimtab.core.ranks import ranks_text
from trimtab.model.plan import Plan
from trimtab.render.html.kit.labels import duration, escape, fit, share, text_width, ticks, wrap
from trimtab.render.html.kit.timeline import (
    JOIN_PX,
    Chart,
    ChartBar,
    ChartMark,
    ChartRow,
    gaps,
    merge_bars,
    plan_chart,
    svg,
)

SVG = "{http://www.w3.org/2000/svg}"
PLANS = ["shared", "hybrid", "separate", "unlimited", "stale", "eight_components", "hostile"]


def drawn(chart: Chart, width: int = 960, *, standalone: bool = True, compact: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(svg(chart, width, standalone, compact=compact))


def rects(root: ElementTree.Element, css: str) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if css in rect.get("class", "").split()]


def box(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def words(root: ElementTree.Element) -> str:
    return " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


def one_row(*bars: ChartBar, seconds: float = 100.0) -> Chart:
    return Chart("one row", (ChartRow("row", bars),), ("a", "b"), seconds)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("width", [300, 420, 960, 1600])
@pytest.mark.parametrize("name", PLANS)
def test_every_drawing_is_well_formed_named_and_inside_its_canvas(name: str, width: int, compact: bool) -> None:
    root = drawn(plan_chart(getattr(samples, name)(), name), width, compact=compact)
    check_canvas(root, width)
    assert root.get("role") == "img"
    named_by = root.get("aria-labelledby", "").split()
    assert [
        child.get("id") for child in (root.find(f"{SVG}title"), root.find(f"{SVG}desc")) if child is not None
    ] == named_by


def check_canvas(root: ElementTree.Element, width: int) -> None:
    height = float(root.get("height", "0"))
    for rect in root.iter(f"{SVG}rect"):
        x0, y0, x1, y1 = box(rect)
        assert 0 <= x0 <= x1 <= width + 0.011
        assert 0 <= y0 <= y1 <= height + 0.011
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "-1")) <= width
        assert 0 <= float(text.get("y", "-1")) <= height


def test_a_row_stands_for_each_group_each_cpu_component_and_the_gpus_nobody_uses() -> None:
    chart = plan_chart(samples.hybrid(), "hybrid")
    assert [(row.label, row.detail, row.shaded) for row in chart.rows] == [
        ("rollout", "GPUs 0-5 · H20", True),
        ("inference, trainer", "GPUs 6-15 · H100", True),
        ("reward", "CPU", False),
    ]
    assert [row.label for row in plan_chart(samples.separate(), "").rows][-1] == "not used"
    assert plan_chart(samples.separate(), "").rows[-1].detail == "GPUs 14-15"


def test_every_bar_says_what_it_is_when_it_starts_and_ends_and_how_long_it_takes() -> None:
    root = drawn(plan_chart(samples.hybrid(), "hybrid"))
    bars = rects(root, "bar")
    tips = ["".join(bar.itertext()) for bar in bars]
    assert all(tips)
    assert "rollout\n0 s to 84.2 s: 84.2 s" in tips
    assert "trainer: weight sync\n166.3 s to 170.3 s: 4.0 s" in tips
    assert "trainer\n90.4 s to 166.3 s: 75.9 s\non 8 of 10 GPUs" in tips


def test_a_component_that_uses_part_of_its_group_takes_part_of_the_height() -> None:
    root = drawn(plan_chart(samples.hybrid(), "hybrid"))
    track = box(rects(root, "track")[1])
    trainer = next(box(bar) for bar in rects(root, "bar") if "on 8 of 10" in "".join(bar.itertext()))
    assert trainer[3] == pytest.approx(track[3], abs=0.02)
    assert trainer[3] - trainer[1] == pytest.approx(0.8 * (track[3] - track[1]), abs=0.02)


def test_switches_are_hatched_and_syncs_neutral_so_that_colour_is_not_the_only_cue() -> None:
    root = drawn(plan_chart(samples.hybrid(), "hybrid"))
    hatched = {box(rect) for rect in root.iter(f"{SVG}rect") if rect.get("fill", "").startswith("url(#")}
    switches = rects(root, "switch")
    assert len(switches) == 2
    assert all(box(switch) in hatched for switch in switches)
    assert all("k" not in {css[0] for css in bar.get("class", "").split()} for bar in rects(root, "sync"))
    assert "switch" in words(root)
    assert "weight sync" in words(root)


def test_eight_components_have_eight_colours_and_keep_them_in_every_chart_of_a_page() -> None:
    root = drawn(plan_chart(samples.eight_components(), "eight"))
    assert {css for bar in rects(root, "run") for css in bar.get("class", "").split() if css[0] == "k"} == {
        f"k{i}" for i in range(8)
    }
    keys = tuple(component.name for component in samples.hybrid().components)
    other = plan_chart(samples.unlimited(), "", keys=keys)
    assert other.keys == keys
    assert plan_chart(samples.unlimited(), "").keys != keys


def test_the_iteration_is_bracketed_and_its_end_marked() -> None:
    root = drawn(plan_chart(samples.shared(), "shared"))
    assert "one iteration · 191.4 s" in words(root)
    (end,) = [path for path in root.iter(f"{SVG}path") if path.get("class") == "end"]
    assert end.get("d", "").startswith(f"M{box(rects(root, 'track')[0])[2]:g} ")


def test_with_staleness_every_period_is_marked() -> None:
    plan = samples.stale()
    assert plan.timeline_seconds > plan.iteration_seconds
    chart = plan_chart(plan, "stale")
    assert [(span.start, span.end) for span in chart.spans] == [(0.0, 110.0), (110.0, 220.0)]
    assert "one iteration every 110.0 s" in words(drawn(chart))


def test_charts_with_one_axis_have_one_scale_and_what_is_longer_is_cut_at_it() -> None:
    short, long = samples.shared(), samples.eight_components()
    mark = ChartMark(short.iteration_seconds, "chosen")
    first = drawn(plan_chart(short, "", axis_seconds=400.0), standalone=False)
    second = drawn(plan_chart(long, "", axis_seconds=400.0, marks=(mark,)), standalone=False)
    (left, _, right, _), (_, _, edge, _) = box(rects(first, "track")[0]), box(rects(second, "track")[0])
    (line,) = [path for path in second.iter(f"{SVG}path") if path.get("class") == "mark"]
    assert float(line.get("d", "")[1:].split()[0]) == pytest.approx(right, abs=0.02)
    assert (edge - left) / (right - left) == pytest.approx(400 / short.iteration_seconds, rel=1e-3)
    assert "28 min 58 s →" in words(second)
    assert not [path for path in second.iter(f"{SVG}path") if path.get("class") == "end"]


def test_the_same_plan_gives_the_same_text() -> None:
    assert svg(plan_chart(samples.hybrid(), "a")) == svg(plan_chart(samples.hybrid(), "a"))


def test_a_plan_that_takes_no_time_is_drawn_too() -> None:
    empty = replace(samples.shared(), timeline=(), timeline_seconds=0.0, iteration_seconds=0.0)
    check_canvas(drawn(plan_chart(empty, "")), 960)
    check_canvas(drawn(Chart("", (), (), 0.0)), 960)


def test_names_never_become_markup_and_stay_readable() -> None:
    root = drawn(plan_chart(samples.hostile(), samples.HOSTILE))
    assert not list(root.iter(f"{SVG}script"))
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text is not None
    assert title.text.startswith("<script>alert(\"x\")</script> & 'q' 東京の長い名前")
    tips = ["".join(bar.itertext()) for bar in rects(root, "bar")]
    assert any(tip.startswith("]]>\n") for tip in tips)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_escaped_for_elements_and_attributes(text: str, other: str) -> None:
    root = ElementTree.fromstring(f'<a b="{escape(text)}">{escape(other)}</a>')
    assert len(root) == 0
    assert list(root.attrib) == ["b"]


@given(st.text(max_size=60), st.floats(0, 400))
def test_what_is_fitted_or_wrapped_is_never_wider_than_its_room(text: str, width: float) -> None:
    assert text_width(fit(text, width, 13), 13) <= width + 1e-6
    lines = wrap(text, width, 13, bold=True)
    assert len(lines) <= 2
    assert all(text_width(line, 13, bold=True) <= width + 1e-6 for line in lines)


def test_a_label_is_left_out_where_its_bar_is_too_small() -> None:
    wide = one_row(ChartBar(0, 60, "a"))
    thin = one_row(ChartBar(0, 2, "a"))
    assert " inside " in svg(wide).replace('"', " ").split("a · 60.0 s")[0]
    assert "a · 2.0 s" not in words(drawn(thin))
    assert "idle 98.0 s" in words(drawn(thin))


def test_the_shading_covers_exactly_the_gaps() -> None:
    chart = one_row(ChartBar(10, 30, "a"), ChartBar(30, 35, "b", "switch"), ChartBar(60, 90, "b"))
    root = drawn(chart)
    left, _, right, _ = box(rects(root, "idle")[-1])
    scale = (right - left) / 100
    shaded, free_from = [], left
    for bar in rects(root, "bar"):
        x0, _, x1, _ = box(bar)
        shaded.append((free_from, x0))
        free_from = x1
    shaded.append((free_from, right))
    seen = [((a - left) / scale, (b - left) / scale) for a, b in shaded if b > a]
    assert [pytest.approx(gap, abs=0.01) for gap in gaps(chart.rows[0], 100.0)] == seen
    assert gaps(chart.rows[0], 100.0) == [(0.0, 10), (35, 60), (90, 100.0)]


rows_of_stretches = st.lists(
    st.builds(
        lambda start, lasts, key, look: ChartBar(start, start + lasts, key, look),
        st.floats(0, 100),
        st.one_of(st.floats(0, 0.2), st.floats(0, 30)),
        st.sampled_from("ab"),
        st.sampled_from(["run", "switch", "sync"]),
    ),
    max_size=40,
).map(tuple)


@given(rows_of_stretches, st.floats(0, 5))
def test_joining_keeps_the_order_and_loses_no_work(bars: tuple[ChartBar, ...], least: float) -> None:
    end = max((bar.end for bar in bars), default=0.0)
    busy = end - sum(b - a for a, b in gaps(ChartRow("", bars), end))
    out = merge_bars(bars, least)
    assert sum((piece.end - piece.start) * piece.busy for piece in out) == pytest.approx(busy, abs=1e-6)
    assert all(first.end <= second.start for first, second in pairwise(out))
    assert all(0 < piece.busy <= 1 and piece.end > piece.start for piece in out)
    for first, second in pairwise(out):
        # What stays apart can be seen apart: there is room between the two, or the first is large enough itself.
        assert second.start - first.end >= least or first.end - first.start >= least


def test_a_joined_stretch_tells_how_much_of_it_is_work() -> None:
    chart = one_row(*(ChartBar(i * 0.01, i * 0.01 + 0.005, "a") for i in range(10_000)))
    (bar,) = rects(drawn(chart), "bar")
    assert float(bar.get("fill-opacity", "1")) == pytest.approx(0.5, abs=0.01)
    assert "of which 50.0 s busy" in "".join(bar.itertext())


@pytest.mark.parametrize("batches", [512, 8192])
def test_thousands_of_bars_stay_a_small_file(batches: int) -> None:
    text = svg(plan_chart(samples.separate(batches), "many"))
    assert len(text) < 250_000


def test_stretches_of_two_kinds_below_a_pixel_do_not_all_become_one() -> None:
    chart = one_row(*(ChartBar(i * 0.01, (i + 1) * 0.01, "ab"[i % 2]) for i in range(10_000)))
    bars = rects(drawn(chart), "bar")
    assert {"k0", "k1"} <= {css for bar in bars for css in bar.get("class", "").split()}
    assert len(bars) < 960 / JOIN_PX


names = st.one_of(st.sampled_from(["rollout", "trainer", "reward & <critic>"]), st.text(min_size=1, max_size=40))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parts = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    cut = draw(st.integers(1, len(parts)))
    cpu = parts[cut:]
    groups: list[list[str]] = []
    for name in parts[:cut]:
        if groups and draw(st.booleans()):
            groups[-1].append(name)
        else:
            groups.append([name])
    counts = [draw(st.integers(1, 64)) for _ in groups]
    times = st.one_of(st.floats(0, 1e-4), st.floats(0, 300), st.floats(0, 1e6))
    pieces: list[samples.Piece] = []
    for members in [*groups, *([name] for name in cpu)]:
        at = draw(times)
        for name in members * draw(st.integers(1, 3)):
            end = at + draw(times)
            pieces.append((name, draw(st.sampled_from(["run", "switch", "sync"])), at, end))
            at = end + draw(times)
    period = draw(st.none() | st.floats(1e-3, 1e3))
    spare = draw(st.integers(0, 3))
    return samples.make_plan(
        list(zip(groups, counts, strict=True)), pieces, cpu=cpu, period=period, total_gpus=sum(counts) + spare
    )


@settings(deadline=None, max_examples=60)
@given(plans(), st.sampled_from([320, 960]), st.booleans(), st.none() | st.floats(1e-3, 1e6))
def test_any_plan_gives_a_well_formed_picture_inside_its_canvas(
    plan: Plan, width: int, compact: bool, axis: float | None
) -> None:
    root = drawn(plan_chart(plan, "any", axis_seconds=axis), width, compact=compact)
    check_canvas(root, width)
    tracks = rects(root, "track")
    assert len(tracks) == len(plan_chart(plan, "any").rows)
    for bar in rects(root, "bar"):
        x0, y0, x1, y1 = box(bar)
        assert any(
            t[0] - 0.011 <= x0 and x1 <= t[2] + 0.011 and t[1] - 0.011 <= y0 and y1 <= t[3] + 0.011
            for t in map(box, tracks)
        )


@given(st.floats(1e-6, 1e8), st.integers(1, 12))
def test_ticks_are_round_evenly_spaced_and_inside_the_axis(seconds: float, most: int) -> None:
    marks = ticks(seconds, most)
    at = [time for time, _ in marks]
    assert at[0] == 0
    assert len(marks) - 1 <= most
    assert at[-1] <= seconds * (1 + 1e-6)
    assert len({label for _, label in marks}) == len(marks)
    if len(at) > 2:
        assert all(b - a == pytest.approx(at[1]) for a, b in pairwise(at))


@pytest.mark.parametrize(
    ("seconds", "most", "labels"),
    [
        (186.4, 8, ["0", "50 s", "100 s", "150 s"]),
        (186.4, 10, ["0", "20 s", "40 s", "60 s", "80 s", "100 s", "120 s", "140 s", "160 s", "180 s"]),
        (1_000, 8, ["0", "5 min", "10 min", "15 min"]),
        (9_000, 6, ["0", "30 min", "60 min", "90 min", "120 min", "150 min"]),
        (30_000, 5, ["0", "2 h", "4 h", "6 h", "8 h"]),
        (0.5, 5, ["0", "100 ms", "200 ms", "300 ms", "400 ms", "500 ms"]),
        (0.0, 5, ["0"]),
    ],
)
def test_ticks_use_the_unit_that_people_would(seconds: float, most: int, labels: list[str]) -> None:
    assert [label for _, label in ticks(seconds, most)] == labels


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00025, "250 µs"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (186.43, "186.4 s"),
        (599.99, "10 min 00 s"),
        (725, "12 min 05 s"),
        (7_500, "2 h 05 min"),
        (2e7, "231.5 days"),
        (-3, "-3.0 s"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_and_ranks_are_short() -> None:
    assert [share(part) for part in (0, 0.05, 0.0512, 0.1234, 1)] == ["0 %", "5 %", "5.1 %", "12 %", "100 %"]
    assert ranks_text((0, 1, 2, 5, 8, 9), ", ") == "0-2, 5, 8-9"
