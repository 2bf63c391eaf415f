"""The report in a real browser. Without chromium these tests fail: a report that nobody looked at is not done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

import plans_for_pictures as samples
from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.formats.files import write_text as write
from trimtab.model.plan import PlacementAnswer
from trimtab.render.html.kit.timeline import plan_chart, svg
from trimtab.render.html.plan_report import plan_report


def report_of(name: str, folder: Path) -> Path:
    answer = samples.full_answer() if name == "full" else PlacementAnswer(getattr(samples, name)(), 1.0, False, 1)
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
