"""`trimtab advise --dashboard` in a real browser: a run that is not ours, watched while its log grows."""

from __future__ import annotations

import http.server
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from advise_world import VERL, profile, verl_jsonl
from pages import CONTRASTS, OUTSIDE, SCHEMES, WIDTHS

PATIENCE_S = 240.0
expect.set_options(timeout=30_000)
PAGE = 'vllm:num_requests_running{engine="0"} 12.0\nvllm:num_requests_waiting{engine="0"} 3.0\n'


class _Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def started(folder: Path, log: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """The command beside a log, and where its page is."""
    words = [
        sys.executable, "-m", "trimtab", "advise", str(VERL.path(folder)), *VERL.overrides, "--follow", str(log),
        "--profile", str(profile(folder, VERL.points or {})), "--restart-s", "120", "--every", "0.1", "-f", "json",
        "--folder", str(folder / "seen"), "--dashboard", "--port", "0", *more,
    ]  # fmt: skip
    errors = folder / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, cwd=folder, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/", errors.read_text())):
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, found[0]


def test_a_run_that_is_not_ours_is_watched_and_its_advice_is_read(
    browser: Browser, engine: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    rows = verl_jsonl(VERL.told(saves=20)).splitlines(keepends=True)
    log.write_text("".join(rows[:14]))
    url = f"http://127.0.0.1:{engine.server_port}"
    process, page_url = started(tmp_path, log, "--engine", url)
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(page_url)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator('[data-panel="tiles"]')).to_contain_text("14")
        expect(page.locator("#p-timeline canvas.rt-canvas")).to_be_visible()
        expect(page.locator("#p-advice")).to_contain_text("COSTS_STEADY")
        expect(page.locator("#p-around")).to_contain_text("12")
        expect(page.locator("#p-workers")).to_contain_text("serving")
        with log.open("a") as file:
            file.write("".join(rows[14:]))
        expect(page.locator("#p-advice")).to_contain_text("reward 8, since step")
        expect(page.locator("#p-advice pre")).to_contain_text("++trainer.nnodes=2")
        expect(page.locator("#p-events")).to_contain_text("advice: ")
        page.locator("#p-components").get_by_role("button", name="reward", exact=True).click()
        expect(page.locator("dialog[open]")).to_contain_text("drift")
        page.keyboard.press("Escape")
        engine.shutdown()
        engine.server_close()
        expect(page.locator("#p-around")).to_contain_text("does not answer for")
        expect(page.locator("#p-workers")).to_contain_text("lost")
        assert page.locator("#ask button").count() == 0  # nothing of it can be changed from here
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
                assert page.evaluate(OUTSIDE) == []
            low = [one for one in page.evaluate(CONTRASTS) if one[0] < 4.5]
            assert low == []
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        expect(page.locator("#link")).to_contain_text("not connected")
        assert all(one.startswith(page_url) for one in asked)
        assert [one for one in said if "ERR_CONNECTION" not in one and "ERR_INCOMPLETE" not in one] == []
    finally:
        page.close()
        if process.poll() is None:
            process.kill()
        process.wait()
