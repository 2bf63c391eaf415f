"""A real run on a real Ray, watched in a real browser from its beginning to its end, and asked for changes there.

The run is `trimtab run --dashboard`, a process of its own. What happens to it comes from outside, by doors that anybody
has: an evaluation that takes a GPU from a rollout engine, and a node that joins. The page is opened once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from dashboard_pages import TOKEN
from trimtab.demos.run import EvaluationStub
from trimtab.model.workflow import Cluster, Node
from trimtab.runtime.client.session import connect
from trimtab.runtime.rayapi.embedded import EmbeddedRay
from waiting import until

WAIT_MS = 240_000
WORKERS = ("rollout-1", "rollout-2")
ROOT = Path(__file__).parents[2]
JOB = f"""
cluster: {{nodes: 1, gpus_per_node: 3}}
workflow:
  batches: 2
  components:
    rollout:
      use: trimtab.rollout:EngineRollout
      settings: {{ask: "engines_for_runs:Asking", engine: "engines_for_runs:Slow", gpus_each: 1, capacity: 8}}
      seconds: {{1: 1.6, 2: 0.9, 4: 0.45}}
      engine: engines
      switch_seconds: 5
      emulate: {{noise: 0.02}}
    trainer: {{after: rollout, seconds: {{1: 0.4, 2: 0.25}}, engine: fsdp, switch_seconds: 5, emulate: {{noise: 0.02}}}}
run:
  iterations: 100000
  save_every: 5
  modules_from: {Path(__file__).parents[1] / "helpers"}
  loop: {{mode: auto, assumed_move_s: 0.5, least_iterations: 2, dwell_iterations: 1}}
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[EmbeddedRay]:
    other: subprocess.Popen[bytes] | None = None
    try:
        with EmbeddedRay(Cluster((Node("node0", 3),))) as ray, connect() as session:
            other = subprocess.Popen(["sleep", "600"])
            session.preemption(same_pool=True, same_pool_gap=1.0)
            yield ray
            session.shutdown()
        assert other.poll() is None, "what is not Ray's is left alone"
    finally:
        if other is not None:
            other.kill()
            other.wait()


class Command:
    """A command of ours that goes on; what it says is kept."""

    def __init__(self, *words: str) -> None:
        self.said: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trimtab", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TRIMTAB_DASHBOARD_TOKEN": TOKEN},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.said += self._process.stdout

    def url(self) -> str:
        def found() -> str:
            assert self._process.poll() is None, "".join(self.said)
            return next((one.split()[1].rstrip(";") for one in self.said if "dashboard: http" in one), "")

        return str(until(found))

    def end(self) -> int:
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(90)
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def state(page: Page, worker: str) -> Locator:
    return page.locator("#p-workers tbody tr", has_text=worker).locator("td").first


def told(page: Page, kind: str, name: str) -> str:
    """Click on somebody, read their story, and close it again."""
    page.locator(f'.panel button[data-kind="{kind}"][data-name="{name}"]').first.click()
    story = page.get_by_role("dialog", name=f"{kind} {name}")
    expect(story).to_be_visible()
    words = story.inner_text()
    page.keyboard.press("Escape")
    return words


def asked(page: Page, kind: str, name: str, wanted: str) -> None:
    """Open a story, ask for what it offers, and confirm it; the token is typed where the page does not know it yet."""
    page.locator(f'.panel button[data-kind="{kind}"][data-name="{name}"]').first.click()
    page.locator("dialog[open]").get_by_role("button", name=wanted).click()
    confirm(page, wanted)


def confirm(page: Page, wanted: str) -> None:
    dialog = page.get_by_role("dialog", name=wanted)
    if dialog.get_by_role("textbox").is_visible():
        dialog.get_by_role("textbox").fill(TOKEN)
    dialog.get_by_role("button", name="Apply", exact=True).click()


@pytest.mark.long
def test_a_real_run_is_watched_with_a_preemption_a_node_that_joins_and_a_move_and_asked_for_changes(
    browser: Browser, ray: EmbeddedRay, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    folder = str(tmp_path / "live")
    where = ("--address", ray.address, "--folder", folder)
    run = Command("run", str(tmp_path / "job.yaml"), *where, "--dashboard", "--port", "0")
    again: Command | None = None
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        url = run.url()
        page.goto(url)
        expect(page.locator("header .lede")).to_have_text("Running.")
        page.evaluate("window.opened = 'once'")
        workers, moves, nodes = (page.locator(f"#p-{name} tbody tr") for name in ("workers", "moves", "nodes"))
        expect(workers).to_have_count(2)
        for worker in WORKERS:
            expect(state(page, worker)).to_have_text("active")
        expect(page.locator("#p-workers")).to_contain_text(re.compile(r"[1-9] of 8"))

        # A preemption: an evaluation takes the slot of an engine, and gives it back.
        with connect() as session:
            pool = next(name for name in session.status()["pools"] if name.startswith("run-live"))
            session.pool(pool).submit(
                EvaluationStub, resources={"gpu": 1.0, "cpu": 0.01}, id="evaluation", priority=9.5, run="run",
                run_args=(1.0,), preemptible=False, wait_s=60.0,
            )  # fmt: skip
        expect(page.locator("#p-tasks")).to_contain_text("evaluation")
        expect(page.locator("#p-evictions")).to_contain_text("evaluation")
        expect(page.locator("#p-tasks")).to_contain_text("COMPLETED")
        assert "left for it" in told(page, "task", "evaluation")
        victim = until(lambda: next((one for one in WORKERS if "makes room" in told(page, "worker", one)), ""))
        expect(state(page, victim)).to_have_text("active")

        # A worker is drained by hand, and serves again.
        asked(page, "worker", "rollout-1", "Drain this worker")
        expect(page.locator("#notes")).to_contain_text("requested: worker rollout-1 takes no new requests")
        expect(state(page, "rollout-1")).to_have_text("inactive")
        assert "asked on the dashboard" in told(page, "worker", "rollout-1")
        asked(page, "worker", "rollout-1", "Resume this worker")
        expect(state(page, "rollout-1")).to_have_text("active")

        # A node joins, and the run moves onto it.
        ray.add(Node("node1", 3))
        expect(nodes).to_have_count(2)
        expect(moves.first).to_contain_text("arrived")
        expect(workers.nth(2)).to_be_visible()
        assert page.evaluate("trimtabTimeline.first.nodes.map((one) => one.name)") == ["node0", "node1"]

        # Whether the plan is still right, and a node that is emptied.
        page.get_by_role("button", name="Replan").click()
        confirm(page, "Replan")
        expect(page.locator("#p-events")).to_contain_text("is the plan still right? (asked on the dashboard)")
        asked(page, "node", "node1", "Drain this node")
        expect(page.locator("#notes")).to_contain_text("node node1 is draining")
        expect(moves.filter(has_text="node1").first).to_contain_text("arrived")

        # The server ends with the run; the page finds the next one by itself.
        assert run.end() == 130
        expect(page.locator("#link")).to_contain_text("not connected")
        expect(page.locator("header .lede")).to_contain_text("Stopped")
        again = Command("show", "--dashboard", folder, "--port", url.rpartition(":")[2].rstrip("/"))
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("button", name="Replan")).to_be_hidden()
        assert page.evaluate("window.opened") == "once"
        assert faults == []
    finally:
        for command in (run, again):
            if command is not None:
                command.kill()
                print("".join(command.said))
        page.close()
