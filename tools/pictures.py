"""Makes the pictures of the docs anew, and looks at every page: `python tools/pictures.py [--demo DIR] [--look DIR]`

Pictures come from the project's own commands: a plan, the advice on the example log, and a run of `trimtab demo`, whose
folder `--demo` names where there is one already (two minutes otherwise). `--look DIR` also writes every page and report
there, light and dark, at 400 and 1,400 pixels. An error in a console, a failed request or a page that is wider than its
window ends with status 1. It needs chromium (tools/install-browser).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
TRIMTAB = Path(sys.executable).parent / "trimtab"
LOGS = "examples/logs/drifting"
ADVISE = ("advise", f"{LOGS}/config.yaml", "--follow", f"{LOGS}/run.log", "--profile", f"{LOGS}/profile.yaml", "--once")
WIDTHS, SCHEMES = (400, 1400), ("light", "dark")


def trimtab(*words: object) -> None:
    subprocess.run([TRIMTAB, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """The address of a dashboard of a run's folder."""
    command = [TRIMTAB, "show", folder, "--dashboard"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as serving:
        assert serving.stdout
        try:
            yield next(found[0] for line in serving.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            serving.terminate()


class Looking:
    """Pages in a browser; what they complain about is collected."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.faults: list[str] = []

    @contextlib.contextmanager
    def page(self, address: str, width: int, height: int, scheme: Any = "light") -> Iterator[Page]:
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda said: self._fault(address, said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self._fault(address, str(error)))
        page.on("requestfailed", lambda request: self._fault(address, f"{request.url} failed"))
        page.goto(address)
        page.wait_for_timeout(600)
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            self._fault(address, f"is {wide} pixels wide in a window of {width}")
        yield page
        context.close()

    def _fault(self, address: str, what: str) -> None:
        if "/events" not in what:  # a dashboard's stream ends with its page
            self.faults.append(f"{address}: {what}")

    def picture(self, address: str, name: str, height: int, scheme: str = "light") -> None:
        with self.page(address, 1180, height, scheme) as page:
            page.screenshot(path=PICTURES / name, timeout=120_000)

    def look(self, address: str, name: str, into: Path) -> None:
        for width in WIDTHS:
            for scheme in SCHEMES:
                with self.page(address, width, 1000, scheme) as page:
                    path = into / f"{name}-{width}-{scheme}.png"
                    page.screenshot(path=path, full_page=not address.startswith("http"), timeout=120_000)


def reports(folder: Path, demo: Path, advised: Path) -> dict[str, Path]:
    """Every kind of report, written into a folder."""
    made = {name: folder / f"{name}.html" for name in ("plan", "advise", "run", "simulate", "pipeline", "estimate")}
    trimtab("plan", "src/trimtab/examples/grpo.yaml", "--report", made["plan"])
    trimtab(*ADVISE, "--folder", advised, "--report", made["advise"])
    trimtab("show", demo, "--report", made["run"])
    trimtab("simulate", "examples/simulate/small.yaml", "--seed", 1, "--policy", "fifo", "--report", made["simulate"])
    trimtab(
        "estimate",
        "examples/quickstart/verl.yaml",
        "--gpu",
        "h100",
        "--mean-tokens",
        1700,
        "--report",
        made["estimate"],
    )
    pipeline = ROOT / "examples" / "pipeline"
    command = [TRIMTAB, "pipeline", "--frontier", "--report", made["pipeline"]]
    subprocess.run(command, cwd=pipeline, check=True, stdout=subprocess.DEVNULL)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="folder of a run of `trimtab demo`")
    parser.add_argument("--look", type=Path, help="write every page here")
    asked = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no chromium here: run tools/install-browser")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        if asked.demo is None:
            trimtab("demo", "--folder", folder / "demo")
        demo = asked.demo or next(path.parent for path in folder.glob("demo/**/events.jsonl"))
        advised = folder / "advise-run"
        trimtab("plan", "src/trimtab/examples/grpo.yaml", "--svg", PICTURES / "plan.svg")
        made = reports(folder, demo, advised)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        looking = Looking(browser)
        with dashboard(advised) as address:
            looking.picture(address, "advise.png", 1420)
            if asked.look:
                looking.look(address, "dashboard-advise", asked.look)
        with dashboard(demo) as address:
            looking.picture(address, "dashboard-light.png", 1130)
            looking.picture(address, "dashboard-dark.png", 1130, "dark")
            with looking.page(address, 1180, 760) as page:
                page.locator("button[data-kind=worker]").first.click()
                page.wait_for_selector("dialog[open]")
                page.screenshot(path=PICTURES / "dashboard-story.png", timeout=120_000)
            if asked.look:
                looking.look(address, "dashboard-demo", asked.look)
        if asked.look:
            for kind, path in made.items():
                looking.look(path.as_uri(), kind, asked.look)
            site = ROOT / "out" / "site"
            for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # its links begin at the server's root
                kind = str(path.relative_to(site).with_suffix("")).replace("/", "-")
                looking.look(path.as_uri(), f"site-{kind}", asked.look)
        browser.close()
    for fault in looking.faults:
        print(fault, file=sys.stderr)
    return 1 if looking.faults else 0


if __name__ == "__main__":
    sys.exit(main())
