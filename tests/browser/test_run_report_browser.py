"""The report of a run in a real browser: looked at, zoomed into, read by keyboard, and fed while it is open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

import run_report_samples as samples
from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.render.html.run.report import run_report
from trimtab.render.html.run.story import read_story

VIEW = "() => { const t = trimtabTimeline.first; return [t.from, t.to, t.end]; }"
PAINTED = """() => {
  const canvas = trimtabTimeline.first.canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let at = 0; at < data.length; at += 4 * 17) if (data[at + 3]) colours.add(data.slice(at, at + 3).join());
  return [...colours];
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    hostile = samples.Writing(folder / "hostile")
    name = "<b>&\"'" + "w" * 70
    hostile.begin([[name, 4, name], ["", 2, ""]], job=name)
    hostile.plan(
        "first", 1, samples.plan_of(((name, "trainer"), "0-5"), costs={name: 1.0, "trainer": 0.5}, predicted=2.0)
    )
    for number in range(1, 6):
        hostile.iteration(number)
        hostile.tell("told", code=name, reason=name)
    hostile.write()
    (folder / "empty").mkdir()
    (folder / "empty" / "events.jsonl").write_text("")
    samples.eventful(folder / "eventful")
    samples.eventful(folder / "going", ends=False)
    samples.large(folder / "large")
    for run in ("eventful", "going", "hostile", "empty", "large"):
        page = run_report(read_story(folder / run), title=run, command="trimtab show --report " + "a-long-folder/" * 12)
        made[run] = folder / f"{run}.html"
        made[run].write_text(page, encoding="utf-8")
    return made


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def open_one(name: str, width: int = 1100, scheme: Literal["light", "dark"] = "light", **more: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.said = []  # type: ignore[attr-defined]
        page.asked = []  # type: ignore[attr-defined]
        page.on("console", lambda message: page.said.append(message.text))  # type: ignore[attr-defined]
        page.on("pageerror", lambda error: page.said.append(str(error)))  # type: ignore[attr-defined]
        page.on("request", lambda request: page.asked.append(request.url))  # type: ignore[attr-defined]
        page.goto(pages[name].as_uri())
        return page

    yield open_one
    for context in contexts:
        context.close()


def until(page: Page, expression: str) -> None:
    """Wait until it holds. (What waits inside of the page would need `eval`, which the page forbids.)"""
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def view(page: Page) -> tuple[float, float, float]:
    start, end, whole = page.evaluate(VIEW)
    return start, end, whole


@pytest.mark.parametrize("name", ["eventful", "going", "hostile", "empty", "large"])
def test_the_report_opens_without_errors_and_without_asking_anybody_for_anything(
    opened: Any, pages: dict[str, Path], name: str
) -> None:
    page = opened(name)
    page.wait_for_load_state("networkidle")
    assert page.said == []
    assert page.asked == [pages[name].as_uri()]
    assert page.get_by_role("heading", level=1).inner_text() == name


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["eventful", "hostile"])
def test_nothing_sticks_out_at_any_width(opened: Any, name: str, width: int, scripts: bool) -> None:
    page = opened(name, width, java_script_enabled=scripts)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [400, 1100])
def test_all_text_is_readable_in_dark_and_light(opened: Any, width: int, scheme: Literal["light", "dark"]) -> None:
    page = opened("eventful", width, scheme)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
    assert len(contrasts) > 300
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_without_scripts_the_timeline_stands_still_and_is_whole(opened: Any) -> None:
    page = opened("eventful", java_script_enabled=False)
    assert page.locator(".rt-view").count() == 0
    still = page.locator(".still svg.wide")
    assert still.is_visible()
    assert still.locator("path.bar").count() > 200
    assert page.get_by_role("img", name="The run over time").first.is_visible()


def test_on_paper_the_still_picture_stands_in_for_the_live_one(opened: Any) -> None:
    page = opened("eventful", scheme="dark")
    assert page.locator(".rt-view").is_visible()
    assert not page.locator(".still svg.wide").is_visible()
    page.emulate_media(media="print")
    assert not page.locator(".rt-view").is_visible()
    assert page.locator(".still svg.wide").is_visible()


def test_buttons_keys_wheel_and_dragging_zoom_and_move(opened: Any) -> None:
    page = opened("eventful")
    start, end, whole = view(page)
    assert (start, end) == (0, whole)
    page.get_by_role("button", name="Zoom in").click()
    assert view(page)[1] - view(page)[0] == pytest.approx(whole / 2)
    page.get_by_role("button", name="Later", exact=True).click()
    assert view(page)[0] == pytest.approx(whole / 2)
    page.get_by_role("button", name="Earlier", exact=True).click()
    page.locator(".rt-view").focus()
    before = view(page)
    page.keyboard.press("ArrowRight")
    assert view(page)[0] == pytest.approx(before[0] + (before[1] - before[0]) / 10)
    page.keyboard.press("+")
    assert view(page)[1] - view(page)[0] == pytest.approx((before[1] - before[0]) / 1.5)
    page.keyboard.press("Home")
    assert view(page)[0] == 0
    page.keyboard.press("End")
    assert view(page)[1] == pytest.approx(whole)
    page.keyboard.press("0")
    assert view(page)[:2] == (0, whole)
    box = page.locator(".rt-canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    until(page, "trimtabTimeline.first.to - trimtabTimeline.first.from < trimtabTimeline.first.end * 0.6")
    before = view(page)
    page.mouse.down()
    page.mouse.move(middle[0] - 200, middle[1], steps=4)
    page.mouse.up()
    assert view(page)[0] > before[0]
    assert view(page)[1] - view(page)[0] == pytest.approx(before[1] - before[0])
    page.get_by_role("button", name="Show all").click()
    assert view(page)[:2] == (0, whole)
    assert page.said == []


def test_a_wheel_without_a_key_scrolls_the_page_and_not_the_timeline(opened: Any) -> None:
    page = opened("eventful")
    box = page.locator(".rt-canvas").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.wheel(0, 300)
    until(page, "scrollY > 100")
    assert view(page)[:2] == (0, view(page)[2])


def test_all_of_it_is_reached_by_keyboard_and_marks_are_read_out(opened: Any) -> None:
    page = opened("eventful")
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
    assert {"Zoom in", "Zoom out", "Earlier", "Later", "Show all", "Next mark", "Previous mark"} <= set(reached)
    assert any("Arrows left and right move" in words for words in reached)
    page.locator(".rt-view").focus()
    page.keyboard.press("n")
    page.keyboard.press("n")
    said = [page.locator(".rt-where").inner_text()]
    for _ in range(30):
        page.keyboard.press("n")
        said.append(page.locator(".rt-where").inner_text())
    assert any("evicted. PRIORITY: eval-1 of priority 12" in words for words in said)
    assert any("node gamma joined" in words for words in said)
    assert any("move 2: rollout 4" in words for words in said)
    assert page.locator("tr.picked").count() == 1


def test_the_list_of_what_happened_leads_to_the_timeline_and_back(opened: Any) -> None:
    page = opened("eventful")
    row = page.locator("tr", has=page.get_by_role("rowheader", name="node gamma joined"))
    row.get_by_role("button").click()
    start, end, whole = view(page)
    at = 39.9
    assert start < at < end < whole
    page.evaluate("trimtabTimeline.first.show(0, trimtabTimeline.first.end)")
    place = page.evaluate(
        """() => { const t = trimtabTimeline.first, mark = t.marks.find((one) => one[2] === "evicted");
             const box = t.canvas.getBoundingClientRect();
             const lane = t.lanes.findIndex((one) => one[0] === "tasks");
             return [box.left + t.x(mark[0]), box.top + 20 + 20 * lane + 10]; }"""
    )
    page.mouse.click(*place)
    assert "rollout-w1" in page.locator("tr.picked").inner_text()


def test_whatever_the_pointer_is_over_is_named(opened: Any) -> None:
    page = opened("eventful")
    page.locator(".rt-view").scroll_into_view_if_needed()
    where = """([node, gpu, share]) => { const t = trimtabTimeline.first, box = t.canvas.getBoundingClientRect();
      return [box.left + t.x(t.end * share), box.top + t.head + t.tops[node] + (gpu + 0.5) * t.row]; }"""
    page.mouse.move(*page.evaluate(where, [0, 2, 0.8]))
    tip = page.locator(".rt-tip")
    assert tip.is_visible()
    assert "iteration" in tip.inner_text()
    assert "alpha, GPU 2" in tip.inner_text()
    page.mouse.move(*page.evaluate(where, [2, 0, 0.05]))
    assert "idle or absent" in tip.inner_text()
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_picture_follows_dark_and_light(opened: Any) -> None:
    page = opened("eventful")
    light = set(page.evaluate(PAINTED))
    page.emulate_media(color_scheme="dark")
    until(page, "trimtabTimeline.first.colour.surface === '#15191e'")
    page.evaluate("trimtabTimeline.first.draw()")
    dark = set(page.evaluate(PAINTED))
    assert "66,80,189" in light  # rollout
    assert "95,132,228" in dark
    assert "66,80,189" not in dark


def test_rows_and_lanes_fit_any_width_of_window(opened: Any) -> None:
    page = opened("eventful", 400)
    narrow = page.evaluate("trimtabTimeline.first.width")
    page.set_viewport_size({"width": 1200, "height": 900})
    until(page, f"trimtabTimeline.first.width > {narrow + 300}")
    page.set_viewport_size({"width": 400, "height": 900})
    until(page, f"trimtabTimeline.first.width === {narrow}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_of_many_bars_only_what_the_eye_can_tell_apart_is_drawn(opened: Any) -> None:
    page = opened("large")
    counted = page.evaluate(
        """() => { const t = trimtabTimeline.first;
             const bars = [...t.tracks.values()].reduce((n, track) => n + track.starts.length, 0);
             const drawn = [1, 0.3, 0.1, 0.01, 0.001].map((part) => {
               t.show(t.end * 0.4, t.end * (0.4 + part)); t.draw(); return t.drawn; });
             return [bars, t.nodes.reduce((n, one) => n + one.gpus, 0), t.width, drawn]; }"""
    )
    bars, gpus, width, drawn = counted
    assert (bars, gpus) == (10_000, 256)
    # Three plans, two groups each, at most one stroke per pixel; and fewer the closer one looks.
    assert max(drawn) < 6 * width
    assert drawn[-1] < 40
    page.locator(".rt-view").hover()
    page.mouse.wheel(0, 800)
    until(page, "trimtabTimeline.first.view.scrollTop > 400")
    assert page.said == []


def test_a_run_that_goes_on_is_fed_and_its_end_is_followed_unless_one_looks_elsewhere(opened: Any) -> None:
    page = opened("going")
    add = """(end) => { const t = trimtabTimeline.first, rows = [[0, 0, 3]];
      t.add({tracks: [{rows, bars: [end - 4, end - 1, 0, 0, 41]}], end,
             marks: [[end - 1, "moves", "move", "a move that came live", "", 1, 99]]}); return t.drawn; }"""
    whole = view(page)[2]
    page.evaluate(add, whole + 5)
    assert view(page) == (0, whole + 5, whole + 5)
    page.evaluate("trimtabTimeline.first.show(trimtabTimeline.first.end - 20, trimtabTimeline.first.end)")
    page.evaluate(add, whole + 10)
    assert view(page)[:2] == pytest.approx((whole - 10, whole + 10))
    page.evaluate("trimtabTimeline.first.show(10, 30)")
    page.evaluate(add, whole + 15)
    assert view(page) == pytest.approx((10, 30, whole + 15))
    page.evaluate("(nodes) => trimtabTimeline.first.add({nodes: [...trimtabTimeline.first.nodes, ...nodes]})", [
        {"name": "late", "kind": "H200", "gpus": 4, "lives": [[50, None]]}
    ])  # fmt: skip
    assert page.evaluate("trimtabTimeline.first.tops.length") == 4
    assert page.evaluate("trimtabTimeline.first.marks.filter((mark) => mark[6] === 99).length") == 3
    assert page.said == []
