from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plans_for_pictures as samples
from trimtab import __version__
from trimtab.core.errors import InputError
from trimtab.formats.files import write_text as write
from trimtab.model.plan import Alternative, PlacementAnswer, ScalingCaveat, Sensitivity
from trimtab.render.html.plan_report import plan_report

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order, and what it says is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style", "svg"} & set(self.open):
            self.words += data if "pre" in self.open else f" {data} "

    def has(self, words: str) -> bool:
        return words in " ".join(self.words.split())


def report(
    answer: PlacementAnswer, title: str = "GRPO on 16 GPUs", block: str = samples.BLOCK, command: str | None = None
) -> str:
    return plan_report(answer, title=title, source="job.yaml", block=block, command=command, search_seconds=0.043)


def test_the_headline_tells_time_throughput_idle_share_gpus_and_proof() -> None:
    page = Page(report(samples.full_answer()))
    for words in ("170.3 s", "21.1 iterations per hour", "25 % of the GPU time", "16 of 16", "Proven"):
        assert page.has(words), words
    assert page.has("rollout on 6 GPUs; inference and trainer take turns on 10 GPUs")


def test_a_plan_that_is_not_proven_shows_its_gap_and_bound() -> None:
    page = Page(report(replace(samples.full_answer(), optimal=False, lower_bound_seconds=160.0)))
    assert page.has("Within 6 %")
    assert page.has("nothing can be below 160.0 s")
    assert not page.has("Proven")


def test_the_table_has_every_component_with_its_numbers() -> None:
    page = Page(report(samples.full_answer()))
    assert page.has("rollout extrapolated 6 0-5 – 84.2 0.0 170.3 48 %")
    assert page.has("trainer 8 of 10 6-13 tp2 75.9 88.4 170.3 11 %")
    assert page.has("reward CPU – 4.0")
    assert sum(words == "extrapolated" for words in page.words.split()) == 2  # the badge, and an assumption's word


def test_runners_up_tell_their_time_and_why_they_lose() -> None:
    page = Page(report(samples.full_answer()))
    assert page.has("All shared 191.4 s 1.12× as long")
    assert page.has("nothing overlaps")
    assert page.has("Your placement 28 min 58 s 10.21× as long")


def test_a_runner_up_that_is_not_feasible_is_listed_with_its_reason() -> None:
    page = Page(report(samples.full_answer()))
    assert page.has("All separate, tp4 not feasible trainer needs 92 GB")


def test_runners_up_share_one_scale_that_no_slow_plan_can_squeeze() -> None:
    text = report(samples.full_answer())
    section = text[text.index('id="h-others"') : text.index('id="h-ties"')]
    scales = set()
    for picture in re.findall(r'<svg[^>]*class="tt wide".*?</svg>', section, re.S):
        scales.add(tuple(re.findall(r'<path class="grid" d="M([\d.]+) ', picture)))
    assert len(scales) == 1
    chosen = re.search(
        r'<svg[^>]*class="tt wide".*?class="track idle" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', section, re.S
    )
    assert chosen is not None
    assert float(chosen[2]) > 960 * 0.78 / 2.5 / 1.15 * 0.99


def test_a_component_has_one_colour_on_the_whole_page() -> None:
    text = report(samples.full_answer())
    colours: dict[str, set[str]] = {}
    for colour, tip in re.findall(r'<rect class="bar run (k\d)[^>]*><title>([^<&]*)', text):
        colours.setdefault(tip, set()).add(colour)
    assert set(colours) >= {"rollout", "inference", "trainer", "reward"}
    assert all(len(of_one) == 1 for of_one in colours.values())


def test_near_ties_sensitivity_the_unrestricted_plan_and_assumptions_are_told() -> None:
    page = Page(report(samples.full_answer()))
    assert page.has("Near ties")
    assert page.has("+12 %")
    assert page.has("Your framework cannot run this")
    assert page.has("It would save 17.9 s an iteration (10 %).")
    assert page.has("The tightest is trainer: 5 %.")
    assert page.has("20 % less : rollout, inference, trainer 16 25 % more : rollout 8 | inference, trainer 8")
    assert page.has("Holds down to half. 60 % more")
    assert page.has("Holds from half to double its cost.")
    assert page.has("trainer waits for whole mini-batches of 128")


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0, 7.0])
def test_a_range_stays_on_its_track(factor: float) -> None:
    answer = replace(samples.full_answer(), sensitivity=(Sensitivity("rollout", min(factor, 1.0), max(factor, 1.0)),))
    positions = [float(p) for p in re.findall(r'style="left:([-\d.]+)%', report(answer))]
    assert positions
    assert all(0 <= position <= 100 for position in positions)


def test_the_block_can_be_copied_as_it_is() -> None:
    block = 'a: "<&>"\n  b: [1, 2]\n\n# 東京'
    found = re.search(r"<pre[^>]*>(.*?)</pre>", report(samples.full_answer(), block=block), re.S)
    assert found is not None
    assert html.unescape(found[1]) == block


def test_the_footer_tells_version_search_and_command() -> None:
    page = Page(report(samples.full_answer(), command="trimtab plan job.yaml --report a.html"))
    assert page.has(f"trimtab {__version__}. 48,210 plans considered in 43 ms.")
    assert page.has("trimtab plan job.yaml --report a.html")


def test_an_answer_without_runners_up_has_no_empty_sections() -> None:
    text = report(PlacementAnswer(samples.shared(), 191.4, True, 1), block="")
    page = Page(text)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert headings == ["Timeline"]
    assert page.has("191.4 s")


def test_an_answer_with_only_refused_runners_up_still_says_why() -> None:
    page = Page(
        report(PlacementAnswer(samples.shared(), 191.4, True, 1, (Alternative("all separate", None, "too few GPUs"),)))
    )
    assert page.has("All separate not feasible too few GPUs")


def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_script() -> None:
    text = report(samples.full_answer())
    assert set(re.findall(r"(?:https?:)?//[\w./-]+", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    page = Page(text)
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "action", "onclick"} & set(attributes)
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes) or ""
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_ids_are_unique_and_every_reference_finds_one() -> None:
    text = report(samples.full_answer())
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    wanted = {name for names in re.findall(r'aria-labelledby="([^"]+)"', text) for name in names.split()}
    assert wanted | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_names_from_the_outside_never_become_markup() -> None:
    hostile = samples.HOSTILE
    answer = PlacementAnswer(
        samples.hostile(),
        24.0,
        False,
        1,
        (Alternative(hostile, samples.hostile(), hostile), Alternative(hostile, None, hostile)),
        (samples.hostile(),),
        (Sensitivity(hostile, 0.9, 1.1, hostile, hostile),),
        (hostile,),
        samples.hostile(),
    )
    text = plan_report(answer, title=hostile, source=hostile, block=hostile, command=hostile, search_seconds=None)
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    text.encode()


@settings(deadline=None, max_examples=20)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_title_and_block_give_a_whole_page(title: str, block: str) -> None:
    Page(report(PlacementAnswer(samples.shared(), 191.4, True, 1), title=title, block=block))


def test_a_file_is_written_whole_with_the_usual_rights_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    (tmp_path / "probe").touch()
    write(target, "ä\n")
    assert target.read_text(encoding="utf-8") == "ä\n"
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE((tmp_path / "probe").stat().st_mode)
    target.chmod(0o600)
    write(str(target), "new")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "probe"]


def test_a_link_is_followed_and_a_device_written_to(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    write(tmp_path / "link.html", "x")
    assert (tmp_path / "real.html").read_text() == "x"
    assert (tmp_path / "link.html").is_symlink()
    write(os.devnull, "x")


@pytest.mark.parametrize("name", ["missing/plan.html", ".", "file/plan.html", "x" * 300])
def test_a_target_that_cannot_be_written_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write") as error:
        write(tmp_path / name, "x")
    assert error.value.where == str(tmp_path / name)
    assert error.value.exit_status == 2


def test_a_write_that_fails_half_way_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.html"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trimtab.formats.files.os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_two_scalings_are_both_drawn_with_what_decides_and_nothing_is_proven() -> None:
    scaling = ScalingCaveat(("rollout", "trainer"), 0.8, 210.0, samples.shared(), ("rollout", 6))
    answer = replace(samples.full_answer(), optimal=False, scaling=scaling)
    text = report(answer)
    page = Page(text)
    assert not page.has("Proven")
    assert page.has("If scaling is perfect which was not measured")
    assert page.has("rollout, trainer were each measured on one number of GPUs only")
    assert page.has("it takes 210.0 s, and the plan below is best. Measure rollout on 6 GPUs: that decides.")
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_placement_that_is_kept_is_called_the_users_own() -> None:
    page = Page(report(replace(samples.full_answer(), optimal=False, kept=True)))
    assert page.has("Your placement faster than every plan found: keep it")
    assert not page.has("Proven")
