"""The documentation is true: its commands run, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SETS_UP = re.compile(r"^(make|pip install|git clone|cd)\b")


def blocks(page: Path) -> list[str]:
    """The ```bash blocks of a page, without the commands that set up or test the project itself."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    kept = ("\n".join(line for line in block.splitlines() if not SETS_UP.match(line)).strip() for block in found)
    return [block for block in kept if block]


COMMANDS = [(page.relative_to(ROOT), number, block) for page in PAGES for number, block in enumerate(blocks(page))]


@pytest.mark.parametrize(("page", "number", "block"), COMMANDS, ids=[f"{p}-{n}" for p, n, _ in COMMANDS])
def test_the_commands_of_a_page_run(page: Path, number: int, block: str, tmp_path: Path) -> None:
    # A copy of what the commands may touch, so that running the docs changes nothing in the checkout.
    for name in ("examples", "src"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        # A Ray of their own, where they need one: other tests have clusters on this machine.
        env={**os.environ, "PATH": path, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_the_two_commands_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make demo") < 1200
    assert text.index("make test") < 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
