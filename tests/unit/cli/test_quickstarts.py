"""Every quickstart is followed word for word, in this process: its commands run and print what the page shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from page_outputs import ROOT, WIDTH, follow, in_shell, steps

from trimtab.cli.app import run
from trimtab.render import output

PAGES = sorted(page for page in (ROOT / "docs" / "quickstart").glob("*.md") if page.stem != "index")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_quickstart_shows_is_what_its_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.setattr(output.out, "_width", None)  # it keeps what COLUMNS was when it was made
    monkeypatch.chdir(tmp_path)

    def call(command: str, folder: Path) -> str:
        words = shlex.split(command, comments=True)
        if words[0] != "trimtab":
            return in_shell(command, folder)
        status = run(words[1:])
        printed = capsys.readouterr()
        assert status == 0, f"{command}\n{printed.out}{printed.err}"
        return printed.out

    _, missing = follow(page, tmp_path, call)
    assert missing == [], "see tools/page_outputs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_quickstart_goes_from_a_model_to_a_plan_and_then_to_a_log(page: Path) -> None:
    commands = [
        command.split()[1] for step in steps(page.read_text()) for command in step.commands if "trimtab" in command
    ]
    assert commands.index("estimate") < commands.index("plan")
