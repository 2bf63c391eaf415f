"""The report of a partition: what it says, and how it looks in a real browser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.formats.pipeline.pipeedge import PartitionRequest, load
from trimtab.model.pipeline import DeviceType, Host, ModelChain, PartitionAnswer, PipelineJob
from trimtab.plan.partition.planner import plan_partition
from trimtab.render.html.kit.timeline import gaps
from trimtab.render.html.partition_report import PERIODS, partition_report, stages_svg, steady_chart

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"


def vit() -> PartitionAnswer:
    names = ("models.yml", "device_types.yml", "devices.yml")
    request = PartitionRequest("google/vit-base-patch16-224", source="rcc-3", sink="mb-0")
    return plan_partition(load(*(EXAMPLE / name for name in names), request).job, frontier=True)


def synthetic(stages: int, name: str = "host") -> PartitionAnswer:
    """So many stages of unlike types, all with slow links."""
    model = ModelChain(name, (10.0,) * stages, 5000, (50_000,) * stages)
    kinds = tuple(
        DeviceType(f"{name}-kind-{t}", 10.0, 19.0 + 8, tuple(0.2 + 0.01 * (i % 7) + t / 100 for i in range(stages)))
        for t in range(3)
    )
    hosts = tuple(Host(f"{name}-{i}", f"{name}-kind-{i % 3}") for i in range(stages))
    return plan_partition(PipelineJob(model, kinds, hosts), frontier=True)


ANSWERS = {
    "vit": vit,
    "one": lambda: synthetic(1),
    "many": lambda: synthetic(40),
    "hostile": lambda: synthetic(5, "<script>alert(1)</script>&\"'" + "w" * 60),
}


def page_of(name: str, folder: Path) -> Path:
    path = folder / f"{name}.html"
    path.write_text(partition_report(ANSWERS[name](), command="trimtab pipeline", search_seconds=0.05))
    return path


def test_the_page_says_the_numbers_and_what_to_improve() -> None:
    page = partition_report(vit(), command="trimtab pipeline", search_seconds=0.05)
    assert "1.54 s" in page
    assert "Improve first: stage" in page
    assert "no schedule has a lower bottleneck" in page
    assert "forward pass" in page
    assert "How many devices are worth it" in page


def test_names_never_become_markup() -> None:
    page = partition_report(ANSWERS["hostile"](), command="<b>", search_seconds=None)
    assert "<script>alert" not in page
    assert "<b>" not in page.replace("<body>", "")


def test_in_the_steady_state_every_stage_is_busy_for_its_share() -> None:
    answer = vit()
    chart = steady_chart(answer)
    period = answer.schedule.bottleneck_seconds
    assert chart.seconds == pytest.approx(PERIODS * period)
    rows = {row.label: row for row in chart.rows}
    for stage in answer.schedule.stages:
        idle = sum(end - start for start, end in gaps(rows[stage.host], chart.seconds))
        assert idle == pytest.approx(PERIODS * (period - stage.compute_seconds), abs=1e-6)


def test_a_microbatch_is_on_a_later_stage_only_after_the_one_before() -> None:
    rows = [row for row in steady_chart(vit()).rows if row.shaded]
    for earlier, later in pairwise(rows):
        began = {bar.key: bar.start for bar in later.bars if bar.start > 0}
        for bar in earlier.bars:
            if bar.key in began:
                assert began[bar.key] >= bar.end - 1e-9


def test_every_stage_has_a_box() -> None:
    answer = synthetic(40)
    drawn = stages_svg(answer, 960, "p")
    assert drawn.count('class="name"') == len(answer.schedule.stages)


def test_an_answer_without_stages_is_a_page_too() -> None:
    model = ModelChain("empty", (), 0, ())
    page = partition_report(plan_partition(PipelineJob(model, (), ())), command=None, search_seconds=None)
    assert "[]" in page


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_sticks_out_at_any_width(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(page_of(name, tmp_path).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    assert said == []
    page.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_text_is_readable_in_dark_and_light(
    browser: Browser, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 900}, color_scheme=scheme)
    page.goto(page_of("vit", tmp_path).as_uri())
    contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert [found for found in contrasts if found[0] < 4.5] == []
    page.close()
