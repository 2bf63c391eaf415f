"""The report in a real browser. Without chromium these tests fail: a report that nobody looked at is not done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import plans_for_pictures as samples
from trimtab.formats.files import write_text as write
from trimtab.model.plan import Answer
from trimtab.ui.report import plan_report
from trimtab.ui.timeline import plan_chart, svg

WIDTHS = [400, 960, 1600]
SCHEMES: list[Literal["light", "dark"]] = ["light", "dark"]
ARGUMENTS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

# For each text: its colour against the nearest opaque thing painted behind it, as WCAG computes contrast.
CONTRASTS = """() => {
  const channels = (css) => (css.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (css) => {
    const [r, g, b] = channels(css).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const at = element.getBoundingClientRect();
    if (element.closest("svg")) {
      // The rectangle painted last among those that hold the text's middle.
      const [x, y] = [at.x + at.width / 2, at.y + at.height / 2];
      const under = [...element.closest("svg").querySelectorAll("rect.bar, rect.idle")].filter((rect) => {
        const box = rect.getBoundingClientRect();
        return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
      });
      if (under.length) return getComputedStyle(under[under.length - 1]).fill;
    }
    for (let up = element; up; up = up.parentElement) {
      const css = getComputedStyle(up).backgroundColor;
      if (channels(css)[3] !== 0) return css;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, title, desc, .unseen")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const [a, b] = [luminance(element.closest("svg") ? style.fill : style.color), luminance(behind(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.trim()]);
  }
  return found;
}"""

# Labels that leave the bar or the gap they stand in, and texts that leave their picture.
OUTSIDE = """() => {
  const out = [];
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect();
    if (!box.width) continue;
    const picture = text.closest("svg");
    const page = picture.getBoundingClientRect();
    const leaves = box.left < page.left - 1 || box.right > page.right + 1 || box.bottom > page.bottom + 1;
    if (leaves) out.push(text.textContent);
    if (!text.classList.contains("inside")) continue;
    const homes = [...picture.querySelectorAll("rect.bar, rect.track")].map((r) => r.getBoundingClientRect());
    const bars = [...picture.querySelectorAll("rect.bar")].map((r) => r.getBoundingClientRect());
    const holds = (r) => r.left - 0.5 <= box.left && box.right <= r.right + 0.5;
    const level = (r) => r.top < box.bottom && box.top < r.bottom;
    const meets = (r) => r.left < box.right - 0.5 && box.left + 0.5 < r.right;
    const crossed = bars.filter((r) => level(r) && meets(r));
    if (!homes.some((r) => level(r) && holds(r)) || crossed.some((r) => !holds(r))) out.push(text.textContent);
  }
  return out;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "no chromium here; install it (apt-get install chromium)"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()


def report_of(name: str, folder: Path) -> Path:
    answer = samples.full_answer() if name == "full" else Answer(getattr(samples, name)(), 1.0, False, 1)
    path = folder / f"{name}.html"
    command = "trimtab plan examples/job.yaml --report " + "a-long-folder/" * 12
    write(
        path,
        plan_report(answer, title=name, source="job.yaml", block=samples.BLOCK, command=command, search_seconds=0.1),
    )
    return path


def opened(browser: Browser, path: Path, width: int = 960, scheme: Literal["light", "dark"] = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    return page


def test_the_report_opens_without_errors_and_without_asking_anybody_for_anything(
    browser: Browser, tmp_path: Path
) -> None:
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    path = report_of("full", tmp_path)
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    assert said == []
    assert asked == [path.as_uri()]
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["full", "hostile", "eight_components"])
def test_nothing_sticks_out_at_any_width(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    page = opened(browser, report_of(name, tmp_path), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_bar_is_visible_in_one_picture_of_each_plan(browser: Browser, tmp_path: Path, width: int) -> None:
    page = opened(browser, report_of("full", tmp_path), width)
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("svg")].filter((svg) => svg.getClientRects().length).map((svg) =>
             [...svg.querySelectorAll("rect.bar")].map((bar) => {
               const box = bar.getBoundingClientRect();
               return Math.min(box.width, box.height);
             }))"""
    )
    # The chosen plan twice (large, and among the runners-up), three runners-up, and the unrestricted plan.
    assert len(sizes) == 6
    assert all(bars and min(bars) > 0 for bars in sizes)
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "width"), [("full", 400), ("full", 960), ("eight_components", 960), ("stale", 960)])
def test_all_text_is_readable_in_dark_and_light(
    browser: Browser, tmp_path: Path, name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = opened(browser, report_of(name, tmp_path), width, scheme)
    contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert [found for found in contrasts if found[0] < 4.5] == []
    page.close()


def test_dark_and_light_differ_and_paper_is_light(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, report_of("full", tmp_path), scheme="dark")

    def background() -> Any:
        return page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")

    dark = background()
    page.emulate_media(color_scheme="light")
    light = background()
    page.emulate_media(color_scheme="dark", media="print")
    assert dark != light
    assert background() == light
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert not page.locator(".copy button").is_visible()
    page.close()


def test_text_in_pictures_stays_large_enough_to_read(browser: Browser, tmp_path: Path) -> None:
    for width in WIDTHS:
        page = opened(browser, report_of("full", tmp_path), width)
        heights = page.evaluate(
            """() => [...document.querySelectorAll("svg text")].filter((t) => t.getBoundingClientRect().width)
                 .map((t) => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a)"""
        )
        assert min(heights) >= 9.5
        page.close()


def test_the_block_is_copied_by_its_button_and_reached_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    path = report_of("full", tmp_path)
    page = opened(browser, path)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent.trim()")
        )
    assert any(words.startswith("PRE ") for words in reached)
    assert "BUTTON Copy" in reached
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".copy button").click()
    page.wait_for_function("document.querySelector('.copy button').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == samples.BLOCK.rstrip()
    page.close()


def test_a_screen_reader_hears_the_pictures_names_the_table_and_the_sections(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, report_of("full", tmp_path))
    assert page.get_by_role("img", name="The chosen plan").first.is_visible()
    assert page.get_by_role("rowheader", name="trainer", exact=True).is_visible()
    assert page.get_by_role("region", name="How sure the choice is").is_visible()
    assert page.get_by_role("heading", level=1).count() == 1
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["hybrid", "separate", "stale", "hostile"])
def test_a_picture_of_its_own_is_readable_too(
    browser: Browser, tmp_path: Path, name: str, scheme: Literal["light", "dark"]
) -> None:
    inline = svg(plan_chart(getattr(samples, name)(), name))
    (tmp_path / "picture.svg").write_text(inline, encoding="utf-8")
    alone = opened(browser, tmp_path / "picture.svg", 1000, scheme)
    assert alone.evaluate("document.documentElement.tagName") == "svg"
    assert alone.evaluate(OUTSIDE) == []
    surface = alone.evaluate("getComputedStyle(document.querySelector('.surface')).fill")
    assert surface == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 25, 30)")
    alone.close()
