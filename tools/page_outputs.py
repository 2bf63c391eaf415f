"""Runs the commands of pages and compares what they print with the pages: `page_outputs.py [--write] PAGE...`

A ```text block after a ```bash block holds what its last command prints. `...` stands for lines that are left out.
Numbers may differ from the page, words may not; `--write` puts the lines of now into the page. Commands run in a copy
of `examples`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = "100"
BLOCK = re.compile(r"^```bash\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """Commands of a page, what it shows of the last one's output, and where that stands in the page."""

    commands: tuple[str, ...]
    shown: tuple[str, ...]
    span: tuple[int, int]


def steps(text: str) -> Iterator[Step]:
    for found in BLOCK.finditer(text):
        joined = found["commands"].replace("\\\n", " ")
        commands = tuple(line for line in joined.splitlines() if line and not line.startswith(("#", "pip ", "make ")))
        yield Step(commands, tuple((found["shown"] or "").splitlines()), found.span("shown"))


def _words(line: str) -> str:
    return " ".join(re.sub(r"\d[\d,.]*", "0", line).replace("~", "").split())


def matched(shown: tuple[str, ...], printed: str) -> tuple[list[str], list[str]]:
    """The shown lines as they are printed now, in order; and those that are not printed."""
    lines, at, now, missing = [line.rstrip() for line in printed.splitlines()], 0, [], []
    for line in shown:
        if line.strip() == "...":
            now.append(line)
            continue
        found = next((i for i in range(at, len(lines)) if _words(lines[i]) == _words(line)), None)
        if found is None:
            missing.append(line)
        else:
            now.append(lines[found])
            at = found + 1
    return now, missing


def in_shell(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "COLUMNS": WIDTH, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def follow(page: Path, folder: Path, call: Callable[[str, Path], str] = in_shell) -> tuple[str, list[str]]:
    """The page with the outputs of now, and the lines that its commands do not print."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    text = page.read_text(encoding="utf-8")
    written, at, missing = "", 0, []
    for step in steps(text):
        printed = ""
        for command in step.commands:
            printed = call(command, folder)
        if step.shown:
            now, lost = matched(step.shown, printed)
            missing += lost
            written += text[at : step.span[0]] + "".join(f"{line}\n" for line in now)
            at = step.span[1]
    return written + text[at:], missing


def main(arguments: list[str]) -> int:
    status = 0
    for name in [name for name in arguments if name != "--write"]:
        with tempfile.TemporaryDirectory() as folder:
            text, missing = follow(Path(name), Path(folder))
        for line in missing:
            print(f"{name}: not printed: {line}")
            status = 1
        if "--write" in arguments and not missing:
            Path(name).write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
