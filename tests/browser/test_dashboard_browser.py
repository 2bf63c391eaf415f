"""The dashboard in a real browser: a run watched as it happens, stories read, the server gone and back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

import run_report_samples as samples
from dashboard_pages import TOKEN, Growing, serving
from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS
from trimtab.render.notebook import report
from trimtab.runtime.run import folder as run_folder

NAMELESS = """() => [...document.querySelectorAll("button, input, a, [role], section, dialog, table")].filter((one) => {
  const label = one.getAttribute("aria-label") || one.textContent.trim();
  const by = (one.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id));
  const named = label || by.some((other) => other && other.textContent.trim()) ||
    (one.id && document.querySelector(`label[for="${one.id}"]`));
  return !named && one.checkVisibility();
}).map((one) => one.outerHTML.slice(0, 120))"""
TWICE = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  return ids.filter((id, at) => ids.indexOf(id) !== at);
}"""
expect.set_options(timeout=20_000)
NODES = "() => trimtabTimeline.first.nodes.map((node) => node.name)"


@pytest.fixture
def run(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "run").start()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    contexts = []

    def open_one(url: str, width: int = 1400, scheme: Literal["light", "dark"] = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.said = []  # type: ignore[attr-defined]
        page.asked = []  # type: ignore[attr-defined]
        page.on("console", lambda message: page.said.append(message.text))  # type: ignore[attr-defined]
        page.on("pageerror", lambda error: page.said.append(str(error)))  # type: ignore[attr-defined]
        page.on("request", lambda request: page.asked.append(request.url))  # type: ignore[attr-defined]
        page.goto(url)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#p-timeline canvas.rt-canvas")).to_be_visible(timeout=20_000)
        return page

    yield open_one
    for context in contexts:
        context.close()


def until(page: Page, expression: str, wanted: Any) -> None:
    """Wait until it is so. (What waits inside of the page would need `eval`, which the page forbids.)"""
    end = time.monotonic() + 30
    while (found := page.evaluate(expression)) != wanted:
        assert time.monotonic() < end, found
        page.wait_for_timeout(30)


def test_a_run_is_watched_with_a_preemption_a_node_that_joins_and_a_move(opened: Any, run: Growing) -> None:
    with serving(run.folder) as server:
        page = opened(server.url)
        assert page.get_by_role("heading", level=1).inner_text() == "run"
        assert page.evaluate(NODES) == ["alpha", "beta"]
        workers = page.locator("#p-workers tbody tr")
        expect(workers).to_have_count(2)
        run.preempt()
        expect(page.locator("#p-tasks")).to_contain_text("rollout-w1")
        expect(workers.nth(1)).to_contain_text("draining")
        expect(page.locator("#said")).to_contain_text("rollout-w1 (run-grpo): evicted")
        run.join_and_move()
        until(page, NODES, ["alpha", "beta", "gamma"])
        expect(page.locator("#p-nodes")).to_contain_text("gamma")
        expect(page.locator("#p-moves tbody tr")).to_contain_text("arrived")
        expect(page.locator("#p-moves")).to_contain_text("a node joined")
        expect(page.locator('[data-panel="tiles"]')).to_contain_text("8")
        expect(page.locator("#p-predicted svg.wide")).to_be_visible()
        expect(page.locator("#p-reward")).to_contain_text("reward.reward: from 0.1 to 0.8")
        until(page, "trimtabTimeline.first.marks.filter((mark) => mark[2] === 'evicted').length", 1)
        run.tell("ended", state="done", code="COMPLETED", reason="all are done", iteration=8)
        expect(page.locator("header .lede")).to_contain_text("all are done")
        assert page.said == []
        assert all(url.startswith((server.url, "data:")) for url in page.asked)


def test_a_task_a_node_and_a_mark_are_clicked_and_their_stories_read(opened: Any, run: Growing) -> None:
    run.preempt()
    run.join_and_move()
    with serving(run.folder) as server:
        page = opened(server.url)
        task = page.locator("#p-tasks").get_by_role("button", name="rollout-w1")
        task.click()
        story = page.get_by_role("dialog", name="task rollout-w1")
        expect(story).to_be_visible()
        expect(story).to_contain_text("eval-1 of priority 12 takes its slot from priority 8")
        page.keyboard.press("Escape")
        expect(story).to_be_hidden()
        assert page.evaluate("document.activeElement.dataset.name") == "rollout-w1"
        page.locator("#p-nodes").get_by_role("button", name="gamma").press("Enter")
        expect(page.get_by_role("dialog", name="node gamma")).to_contain_text("reference on GPU 0-3")
        page.get_by_role("button", name="Close").click()
        page.locator("#p-workers").get_by_role("button", name="rollout w1").click()
        expect(page.get_by_role("dialog", name="worker rollout w1")).to_contain_text("its slot is taken")
        page.keyboard.press("Escape")
        place = page.evaluate("""() => {
          const t = trimtabTimeline.first;
          t.place.scrollIntoView();
          const box = t.canvas.getBoundingClientRect();
          const at = t.lanes.findIndex((lane) => lane[0] === "tasks");
          return [box.left + t.x(t.marks.find((mark) => mark[2] === "evicted")[0]), box.top + 20 + 20 * at + 10];
        }""")
        page.mouse.click(*place)
        expect(page.get_by_role("dialog", name="task rollout-w1")).to_be_visible()
        page.keyboard.press("Escape")
        page.locator(".rt-view").focus()
        page.keyboard.press("n")
        expect(page.locator(".rt-where")).to_contain_text("rollout")
        assert page.locator("dialog[open]").count() == 0
        page.keyboard.press("Enter")
        expect(page.locator("dialog[open]")).to_be_visible()
        assert page.said == []


def test_a_server_that_is_restarted_finds_its_page_again(opened: Any, run: Growing) -> None:
    with serving(run.folder) as server:
        port = server.port
        page = opened(server.url)
    expect(page.locator("#link")).to_contain_text("not connected")
    assert page.locator("#p-components tbody tr").count() == 4
    run.preempt()
    with serving(run.folder, port) as server:
        assert server.port == port
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#p-tasks")).to_contain_text("rollout-w1")
        until(page, "trimtabTimeline.first.marks.filter((mark) => mark[2] === 'evicted').length", 1)
        whole = page.evaluate("[...trimtabTimeline.first.tracks.values()].reduce((sum, t) => sum + t.starts.length, 0)")
        other = opened(server.url)
        until(
            other,
            "[...trimtabTimeline.first.tracks.values()].reduce((sum, t) => sum + t.starts.length, 0)",
            whole,
        )
        # The browser itself says that a server is not there; nothing else is said.
        assert [line for line in page.said if "Failed to load resource" not in line] == []


def test_a_change_is_asked_for_with_the_token_and_refused_without(opened: Any, run: Growing) -> None:
    def heard() -> int:
        return len(run_folder.take_requests(run.folder, run_folder.RUN_QUEUE))

    with serving(run.folder) as server:
        page = opened(server.url)
        page.get_by_role("button", name="Replan").click()
        page.get_by_role("textbox", name="Token").fill("not the token of this one")
        page.get_by_role("button", name="Apply", exact=True).click()
        expect(page.locator("#notes")).to_contain_text("a token is needed")
        assert heard() == 0
        page.get_by_role("button", name="Replan").click()
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#notes")).to_contain_text("requested: the next decision")
        assert heard() == 1
        # The token is known now, and it is asked all the same whether it is meant.
        page.get_by_role("button", name="Replan").click()
        expect(page.get_by_role("textbox", name="Token")).to_be_hidden()
        page.get_by_role("button", name="Cancel").click()
        page.locator("#p-workers").get_by_role("button", name="rollout w0").click()
        page.get_by_role("button", name="Drain this worker").click()
        dialog = page.get_by_role("dialog", name="Drain this worker")
        expect(dialog).to_contain_text("Worker rollout w0 takes no new requests")
        dialog.get_by_role("button", name="Apply", exact=True).click()
        expect(page.locator("#notes")).to_contain_text("requested: worker rollout w0 takes no new requests")
        assert heard() == 0
        asked = run_folder.take_requests(run.folder, run_folder.workers_queue("rollout"))
        assert [(one["ask"], one["worker"]) for one in asked] == [("drain", "w0")]
        assert [found for found in page.evaluate(CONTRASTS) if found[0] < 4.5] == []


def test_a_story_that_is_read_goes_on_while_it_is(opened: Any, run: Growing) -> None:
    with serving(run.folder) as server:
        page = opened(server.url)
        page.locator("#p-workers").get_by_role("button", name="rollout w1").click()
        story = page.get_by_role("dialog", name="worker rollout w1")
        expect(story).to_contain_text("planned")
        expect(story).not_to_contain_text("its slot is taken")
        run.preempt()
        expect(story).to_contain_text("its slot is taken")
        expect(story.get_by_role("button", name="Resume this worker")).to_be_visible()


def test_what_workers_have_to_do_is_shown_as_it_changes(opened: Any, run: Growing) -> None:
    with serving(run.folder) as server:
        page = opened(server.url)
        requests = page.locator("#p-workers tbody tr").first.locator("td.number")
        expect(requests).to_have_text("–")
        for running in (3, 5):
            (run.folder / "rollout.load.json").write_text(json.dumps({"w0": [running, 8], "w1": [0, 8]}))
            expect(requests).to_have_text(f"{running} of 8")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_can_be_read_and_has_a_name_in_dark_and_light_and_at_any_width(
    opened: Any, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    folder = samples.eventful(tmp_path / "eventful", ends=False)
    with serving(folder) as server:
        page = opened(server.url, 1400, scheme)
        contrasts: list[tuple[float, str]] = page.evaluate(CONTRASTS)
        assert len(contrasts) > 150
        assert [found for found in contrasts if found[0] < 4.5] == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(TWICE) == []
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            until(page, f"document.documentElement.scrollWidth <= {width}", True)  # the timeline follows a frame later
        assert page.evaluate(OUTSIDE) == []
        page.locator("#p-tasks").get_by_role("button", name="rollout-w1").click()
        assert [found for found in page.evaluate(CONTRASTS) if found[0] < 4.5] == []
        assert page.said == []


def test_the_longest_names_and_none_at_all_fit(opened: Any, tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    name = "<b>&\"'" + "w" * 70
    run.begin([[name, 4, name], ["", 2, ""]], job=name)
    run.plan("first", 1, samples.plan_of(((name, "trainer"), "0-5"), costs={name: 1.0, "trainer": 0.5}, predicted=2.0))
    for what in ("task", "worker"):
        run.tell(what, task=name, pool=name, what=name, component=name, worker=name, state=name, code=name, reason=name)
    run.iteration(1)
    with serving(run.folder) as server:
        page = opened(server.url)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            until(page, f"document.documentElement.scrollWidth <= {width}", True)  # the timeline follows a frame later
        assert page.evaluate(OUTSIDE) == []
        page.locator("#p-tasks").get_by_role("button").first.click()
        expect(page.locator("dialog[open]")).to_contain_text(name)
        assert page.evaluate("document.querySelector('dialog[open]').scrollWidth") <= WIDTHS[-1]
        assert page.said == []


def test_who_reads_by_keyboard_keeps_their_place_when_something_changes(opened: Any, run: Growing) -> None:
    with serving(run.folder) as server:
        page = opened(server.url)
        page.locator("#p-components").get_by_role("button", name="trainer").focus()
        run.iteration(6)
        expect(page.locator('[data-panel="tiles"]')).to_contain_text("6")
        assert page.evaluate("document.activeElement.dataset.name") == "trainer"
        page.locator(".rt-view").focus()
        page.keyboard.press("+")
        page.keyboard.press("Home")
        before = page.evaluate("[trimtabTimeline.first.from, trimtabTimeline.first.to]")
        run.iteration(7)
        expect(page.locator('[data-panel="tiles"]')).to_contain_text("7")
        assert page.evaluate("[trimtabTimeline.first.from, trimtabTimeline.first.to]") == before


def test_more_tabs_than_a_browser_has_connections_share_one_stream_and_the_next_one_takes_it_over(
    browser: Browser, run: Growing
) -> None:
    context = browser.new_context()
    with serving(run.folder) as server:
        assert server.app is not None
        clients = server.app.feed.clients
        pages = [context.new_page() for _ in range(8)]  # Chromium has six connections to one server
        for page in pages:
            page.goto(server.url)
            expect(page.locator("#link")).to_have_text("live")
            expect(page.locator("#p-workers tbody tr")).to_have_count(2)
        assert len(clients) == 1
        run.preempt()
        for page in pages:
            expect(page.locator("#p-tasks")).to_contain_text("rollout-w1")
        pages.pop(0).close()
        run.join_and_move()
        for page in pages:
            until(page, NODES, ["alpha", "beta", "gamma"])
            expect(page.locator("#p-moves")).to_contain_text("arrived")
        assert len(clients) == 1
        port = server.port
    for page in pages:
        expect(page.locator("#link")).to_contain_text("not connected")
    run.iteration(9)
    with serving(run.folder, port):
        for page in pages:
            expect(page.locator("#link")).to_have_text("live")
            expect(page.locator('[data-panel="tiles"]')).to_contain_text("9")
            until(page, "trimtabTimeline.first.marks.filter((mark) => mark[2] === 'evicted').length", 1)
    context.close()


def test_a_tab_that_nobody_looks_at_holds_no_connection(opened: Any, run: Growing) -> None:
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with serving(run.folder) as server:
        page = opened(server.url)
        page.evaluate(hide, True)
        expect(page.locator("#link")).to_contain_text("paused")
        assert server.app is not None
        end = time.monotonic() + 20
        while server.app.feed.clients:
            assert time.monotonic() < end
            page.wait_for_timeout(30)
        run.preempt()
        page.evaluate(hide, False)
        expect(page.locator("#p-tasks")).to_contain_text("rollout-w1")
        assert page.said == []


def test_a_report_shows_itself_in_a_notebook(browser: Browser, tmp_path: Path) -> None:
    made = report(samples.eventful(tmp_path / "eventful"))
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_content(f"<!doctype html><title>cell</title>{made._repr_html_()}")
    inside = page.frame_locator("iframe")
    expect(inside.get_by_role("heading", level=1)).to_have_text("eventful")
    expect(inside.locator(".rt-view")).to_be_visible()
    assert said == []
    assert repr(made).startswith("Done: all 40 iterations are done.\n40 iterations")
    assert made.save() == tmp_path / "eventful" / "report.html"
    page.close()
