"""The documentation is true: its commands run, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SETS_UP = re.compile(r"^(make|pip install|git clone|cd)\b")


def blocks(page: Path) -> list[str]:
    """The ```bash blocks of a page, without the commands that set up or test the project itself."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    kept = ("\n".join(line for line in block.splitlines() if not SETS_UP.match(line)).strip() for block in found)
    return [block for block in kept if block]


# These start clusters and engines, and what they show is tested by its own name too.
LONG = re.compile(
    r"trimtab demo|try_it\.sh|trimtab cluster start|engines\.yaml|profile layers|layers\.py|pipeline .*--run|--emulate"
)


def commands() -> list[Any]:
    """Every block of every page once: one whose lines all stand in another block is run there."""
    found = [(page, number, block) for page in PAGES for number, block in enumerate(blocks(page))]
    kept: list[Any] = []
    lines = [{line.partition(" #")[0].strip() for line in block.splitlines()} for _, _, block in found]
    for at, (page, number, block) in enumerate(found):
        if page.parent.name == "quickstart":  # followed whole by tests/unit/cli/test_quickstarts.py
            continue
        if any(lines[at] <= other for other in lines[:at]) or any(lines[at] < other for other in lines[at + 1 :]):
            continue
        name = page.relative_to(ROOT)
        marks = [pytest.mark.long] if LONG.search(block) else []
        kept.append(pytest.param(block, id=f"{name}-{number}", marks=marks))
    return kept


@pytest.mark.parametrize("block", commands())
def test_the_commands_of_a_page_run(block: str, tmp_path: Path) -> None:
    # A copy of what the commands may touch, so that running the docs changes nothing in the checkout.
    for name in ("examples", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        # A Ray of their own, where they need one: other tests have clusters on this machine.
        env={**os.environ, "PATH": path, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=600,
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


def test_the_walks_name_files_that_are_there() -> None:
    """A path from the package's root, or the name of a file beside the one named before."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folder, missing = ROOT, []
    for name in re.findall(r"`([\w/]+\.py)`", text):
        package = ROOT / "src" / "trimtab"
        found = [path for path in (package / name, ROOT / name, folder / name) if path.exists()]
        if not found:
            missing.append(name)
        elif "/" in name:
            folder = found[0].parent
    assert missing == []
