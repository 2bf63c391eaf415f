"""The report of an estimate: what it says, and how it looks in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.cli.app import run

RUN = ("estimate", "--model", "qwen3-8b", "--gpu", "h100", "--samples", "1024", "--mean-tokens", "2500", "--max-tokens",
       "8192", "--price", "2.5")  # fmt: skip
KINDS = {
    "sync": ("--gpus", "8"),
    "sizes": (),
    "async": ("--gpus", "16", "--mode", "async", "--what-if", "fp8-rollout,spec-decode:0.77,async+partial,lora"),
}


def page_of(name: str, folder: Path) -> Path:
    path = folder / f"{name}.html"
    assert run([*RUN, *KINDS[name], "--report", str(path)]) == 0
    return path


def test_the_page_says_what_the_answer_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of("async", tmp_path).read_text()
    step = re.search(r"^step +\S+ +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert step is not None
    assert f"{float(step[1]):.0f}" in text
    for words in ("Staleness", "Cost", "Memory of a GPU", "spec-decode:0.77", "Public steps near it", "rollout"):
        assert words in text
    assert "How many GPUs" in page_of("sizes", tmp_path).read_text()


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out_at_any_width(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(page_of(name, tmp_path).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    assert page.locator("svg:visible").count() == 2
    assert said == []
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_text_is_readable_in_dark_and_light(
    browser: Browser, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 900}, color_scheme=scheme)
    page.goto(page_of("async", tmp_path).as_uri())
    contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert min(contrasts)[0] >= 4.5
    page.close()
