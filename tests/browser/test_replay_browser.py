"""Pages of `trimtab simulate` in a real browser, for every kind of scenario: whole, silent, readable, at any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.cli.app import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "simulate"
LONG = "a policy with a name that is far too long for any column of any table <b>&"
POOLS = f"""
name: pools <&> more
cluster: {{nodes: 2, gpus: 4, events: [{{at_s: 900, node: 1, what: lost}}, {{at_s: 2000, node: 1, what: joined}}]}}
tasks: {{generate: {{count: 30, per_hour: 60, duration_s: {{median: 900, p99: 9000}}, gpus: {{1: 0.8, 4: 0.2}}}}}}
policies: [trimtab, fifo, {{use: las, name: "{LONG}"}}, clairvoyant]
seeds: [1, 2]
"""
ROLLOUTS = """
engines: {count: 4, limit: 32, sleep_s: 2, wake_s: 4, refit_s: 2, training_s: 20}
rollout: {profile: short, steps: 3, prompts: 8, samples: 4}
elastic: {monitoring_interval: 1, requests_per_worker_capacity: 8}
policies: [static, threshold, predictive]
seeds: [1, 2]
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("simulated")
    loop = (EXAMPLES / "loop.yaml").read_text(encoding="utf-8")
    loop = loop.replace("iterations: 60", "iterations: 30").replace("seeds: [1, 2, 3]", "seeds: [1, 2]")
    made = {}
    for kind, text, more in (
        ("pools", POOLS, ["--sweep", "starvation_runs=0,5"]),
        ("rollouts", ROLLOUTS, []),
        ("loop", loop, []),
    ):
        (folder / f"{kind}.yaml").write_text(text, encoding="utf-8")
        made[kind] = folder / f"{kind}.html"
        asked = ["simulate", str(folder / f"{kind}.yaml"), "--report", str(made[kind]), *more]
        assert run(asked) == 0
    return made


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def open_one(name: str, width: int = 1100, scheme: Literal["light", "dark"] = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
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


KINDS = ["pools", "rollouts", "loop"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_opens_without_errors_asks_nobody_and_shows_its_plots(
    opened: Any, pages: dict[str, Path], kind: str
) -> None:
    page = opened(kind)
    page.wait_for_load_state("networkidle")
    assert page.said == []
    assert page.asked == [pages[kind].as_uri()]
    plots = [one for one in page.locator("svg").all() if one.is_visible()]
    assert len(plots) >= 2
    for one in plots:
        box = one.bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 40
        assert one.locator("rect, path, polyline").count() >= 2
        assert one.locator("text").count() >= 2
    assert page.locator("table tbody tr").count() >= 3
    if kind == "pools":
        assert page.get_by_role("heading", name="What the sweep recommends").is_visible()
        assert LONG in page.content().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_sticks_out_at_any_width(opened: Any, kind: str, width: int) -> None:
    page = opened(kind, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_text_is_readable_in_dark_and_light(opened: Any, kind: str, scheme: Literal["light", "dark"]) -> None:
    page = opened(kind, 1100, scheme)
    contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
    assert len(contrasts) > 50
    assert [found for found in contrasts if found[0] < 4.5] == []
