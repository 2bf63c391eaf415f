"""The dashboard at 10,000 bars, and at 10,000 events, on 256 GPUs: frames, memory, bytes, and what it costs the server.

A frame is timed as a browser has it: from one animation frame to the next, while the view is zoomed, dragged and
scrolled over the whole run, and while iterations come in live. What drawing itself takes is timed as well: on a machine
without a GPU and with other work, the time between frames is the machine's.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

GPUS = 256
BARS = (10_000, 70_000)  # the second is 10,000 events
FRAMES = 120
LIVE = 30

FRAME_TIMES = """async (frames) => {
  const t = trimtabTimeline.first, gaps = [], draws = [];
  const draw = t.draw.bind(t);
  t.draw = () => { const began = performance.now(); draw(); draws.push(performance.now() - began); };
  t.show(0, t.end);
  let before = await new Promise(requestAnimationFrame);
  for (let at = 0; at < frames; at++) {
    if (at < frames / 3) t.zoom(1.1, t.end * 0.7);
    else if (at < 2 * frames / 3) t.pan(at % 20 < 10 ? 0.05 : -0.05);
    else { t.zoom(1 / 1.1); t.view.scrollTop = (at * 37) % 1500; }
    t.later();
    const now = await new Promise(requestAnimationFrame);
    gaps.push(now - before);
    before = now;
  }
  t.draw = draw;
  return {gaps, draws};
}"""


def main() -> None:
    for bars in BARS:
        _measured(bars)


def _measured(count: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from playwright.sync_api import sync_playwright

    import run_report_samples as samples
    from pages import ARGUMENTS
    from trimtab.render.html.dashboard import panels as dashboard
    from trimtab.render.html.dashboard.source import DashboardSource
    from trimtab.runtime.dashboard.server import DashboardServer

    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium here; run tools/install-browser")
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = samples.large(Path(folder) / "large", nodes=GPUS // 8, bars=count)
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
        kept = lines[: -LIVE - 2]
        (run / "events.jsonl").write_text("".join(kept))
        source = DashboardSource(run)
        began = time.process_time()
        source.look()
        read_s = time.process_time() - began
        whole = len(json.dumps(source.whole(), separators=(",", ":")))
        page_bytes = {path: len(content) for path, (_, content) in dashboard.files().items()}
        with DashboardServer(source, 0) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=[*ARGUMENTS, "--enable-precise-memory-info", "--js-flags=--expose-gc"]
            )
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            opened = time.monotonic()
            page.goto(server.url)
            page.wait_for_selector("canvas.rt-canvas")
            opened_s = time.monotonic() - opened
            marks, bars = page.evaluate(
                "[trimtabTimeline.first.marks.length,"
                " [...trimtabTimeline.first.tracks.values()].reduce((sum, t) => sum + t.starts.length, 0)]"
            )
            still = page.evaluate(FRAME_TIMES, FRAMES)
            heap = page.evaluate("(gc(), performance.memory.usedJSHeapSize)")
            feeding = threading.Thread(target=_feed, args=(run / "events.jsonl", lines[-LIVE - 2 : -2]))
            feeding.start()
            live = page.evaluate(FRAME_TIMES, 2 * FRAMES)
            feeding.join()
            page.wait_for_timeout(3_000)
            after = page.evaluate("(gc(), performance.memory.usedJSHeapSize)")
            browser.close()
        with open(run / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(lines[-2])
        again = time.process_time()
        source.look()
        look_s = time.process_time() - again
    print(f"Dashboard: {bars:,} bars and {marks:,} marks on {GPUS} GPUs, {len(lines):,} events")
    print(f"{'page':>26} {sum(page_bytes.values()):>9,} bytes, of which scripts {page_bytes['/dashboard.js']:,}")
    print(f"{'everything told at once':>26} {whole:>9,} bytes, shown {opened_s:.1f} s after it was asked for")
    print(f"{'server: all of it read':>26} {read_s:>9.3f} CPU s; one event more {look_s:.3f} CPU s")
    for name, seen in (("nothing new", still), ("iterations come in", live)):
        _say(name, seen)
    print(f"{'heap of the page':>26} {heap / 2**20:>9.1f} MiB, {after / 2**20:.1f} MiB after {LIVE} events more")
    print(f"{'memory of this process':>26} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:>9.0f} MiB")
    print(f"{'the console says':>26} {'; '.join(said) or 'nothing'}")
    print(f"{'load of the machine':>26} {before:>9.1f} before, {os.getloadavg()[0]:.1f} now")


def _feed(events: Path, lines: list[str]) -> None:
    for line in lines:
        with open(events, "a", encoding="utf-8") as file:
            file.write(line)
        time.sleep(0.1)


def _say(name: str, seen: dict[str, Any]) -> None:
    draws, gaps = sorted(seen["draws"]), sorted(seen["gaps"])
    print(
        f"{f'frame, {name}':>26} {statistics.median(draws):>9.2f} ms to draw ({draws[int(0.99 * len(draws))]:.1f} ms at"
        f" the 99th percentile), {statistics.median(gaps):.1f} ms from frame to frame"
        f" ({gaps[int(0.99 * len(gaps))]:.1f} ms)"
    )


if __name__ == "__main__":
    main()
