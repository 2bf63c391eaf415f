"""The command line as a whole: what has moved, one meaning for each flag, help of every command."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer import rich_utils
from typer.main import get_command

from trimtab.cli.app import app, new_form, run

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference" / "cli-changes.csv"
MOVED = ROOT / "src" / "trimtab" / "formats" / "data" / "moved_commands.csv"
HELP = ROOT / "tests" / "data" / "help"
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
SAMPLES = {"N": "2", "NxGPUS:KIND": "2x4:L40S", "|": "|"}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(get_command(app)))
CALLABLE = {path: command for path, command in COMMANDS.items() if path and not hasattr(command, "commands")}


def parsed(form: str) -> None:
    """Parses a form with the real parser, which refuses what it does not know; nothing is run."""
    words = form.split()
    depth = max(at for at in range(len(words) + 1) if tuple(words[:at]) in COMMANDS)
    command, rest = COMMANDS[tuple(words[:depth])], [SAMPLES.get(word, word) for word in words[depth:]]
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts)}
    if rest and rest[-1] in options and not options[rest[-1]].is_flag:
        rest.append("1")
    command.make_context("trimtab", rest, resilient_parsing=True)
    unknown = [word for word in rest if word.startswith("-") and word not in options]
    assert not unknown, f"{form}: {unknown}"
    assert depth, form


@pytest.mark.parametrize("row", rows(REFERENCE), ids=lambda row: f"{row['command']} {row['flag']}".strip())
def test_the_new_form_of_every_old_command_and_flag_parses(row: dict[str, str]) -> None:
    for form in row["new"].split(" | "):
        parsed(form if form.split()[0] in {path[0] for path in CALLABLE} else f"{row['new'].split(' --')[0]} {form}")


def test_the_table_names_every_command_and_flag_of_the_release_before() -> None:
    """A row for each command and each option; what has moved says so in both tables."""
    table = {(row["command"], row["flag"]): row["new"] for row in rows(REFERENCE)}
    assert len([key for key in table if not key[1]]) == 42
    assert len(table) == len(rows(REFERENCE)) > 340
    for row in rows(MOVED):
        if row["command"] != "rollout" and " " not in row["flag"]:
            assert any(
                command == row["command"] and (not row["flag"] or row["flag"] in flags.split())
                for command, flags in table
            ), row


@pytest.mark.parametrize("row", rows(MOVED), ids=lambda row: f"{row['command']} {row['flag']}".strip())
def test_an_old_form_prints_its_new_one_and_ends_in_2(
    row: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*row["command"].split(), *row["flag"].split()]
    if row["flag"] in ("-n", "-o", "-w", "--with", "--watch", "--kind", "--mode", "--output"):
        words.append("x")
    assert new_form(words) == (f"{row['command']} {row['flag']}".strip(), row["new"])
    assert run([*words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"is now `trimtab {row['new']}`" in said


def test_a_wrong_call_that_was_always_wrong_is_refused_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "status", "--bogus"]) == 2
    assert "--bogus" in capsys.readouterr().err
    assert run(["statuss"]) == 2
    assert "is now" not in capsys.readouterr().err


def test_a_short_flag_means_the_same_everywhere() -> None:
    long = defaultdict(set)
    for command in CALLABLE.values():
        for one in command.params:
            for name in one.opts:
                if re.fullmatch(r"-\w", name):
                    long[name].add(next(other for other in one.opts if other.startswith("--")))
    assert {name: meanings for name, meanings in long.items() if len(meanings) > 1} == {}
    assert long["-f"] == {"--format"}
    assert long["-o"] == {"--output"}


def test_format_is_text_json_or_yaml_everywhere() -> None:
    found = [one for command in CALLABLE.values() for one in command.params if "--format" in one.opts]
    assert len(found) > 25
    for one in found:
        assert "-f" in one.opts
        assert one.help == "Output format."


def test_options_of_one_name_say_the_same() -> None:
    """They are the shared types of `cli/options.py`."""
    helps = defaultdict(set)
    for command in CALLABLE.values():
        for one in command.params:
            for name in one.opts:
                if name in SHARED:
                    helps[name].add(one.help)
    assert {name: texts for name, texts in helps.items() if len(texts) != 1} == {}


SHARED = (
    "--format", "--output", "--report", "--trace", "--profile", "--name", "--url", "--token-file", "--every",
    "--at-most", "--deadline", "--reason", "--tail", "--noise", "--dashboard",
)  # fmt: skip


@pytest.mark.skipif(f"typer=={version('typer')} " not in CONSTRAINTS, reason="help looks different in other releases")
@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_help_is_as_it_was_looked_at(path: tuple[str, ...]) -> None:
    """`UPDATE_HELP=1 pytest tests/unit/cli/test_commands.py` writes it anew."""
    shown = help_of(path)
    assert max(map(len, shown.splitlines())) <= 100
    kept = HELP / f"{'-'.join(path) or 'trimtab'}.txt"
    if os.environ.get("UPDATE_HELP"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(shown, encoding="utf-8")
    assert shown == kept.read_text(encoding="utf-8")


def help_of(path: tuple[str, ...]) -> str:
    """Help as it is printed 100 columns wide, without borders."""
    page = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(page):
        patch.setenv("COLUMNS", "100")
        patch.setattr(rich_utils, "MAX_WIDTH", 100)
        run([*path, "--help"])
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from trimtab.cli.app import run; run(['--help']); "
        "print([n for n in sys.modules if n.startswith('trimtab.cli.') or n in ('pydantic', 'ruamel.yaml', 'ray')], "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "['trimtab.cli.app']"


EXAMPLES = ROOT / "examples"
TABLES = [
    ["plan", str(ROOT / "src" / "trimtab" / "examples" / "grpo.yaml"), "--no-sensitivity"],
    ["plan", str(EXAMPLES / "roles" / "trainer.yaml"), "--join", "1"],
    ["profile", "logs", str(EXAMPLES / "logs" / "verl.jsonl"), "--gpus", "16"],
    ["profile", "memory", "--model", str(EXAMPLES / "models" / "qwen2.5-1.5b")],
    ["estimate", "--model", "qwen2.5-7b", "--gpu", "h100", "--mean-tokens", "1500", "--max-tokens", "4096"],
    ["simulate", str(EXAMPLES / "simulate" / "journal"), "--policy", "fifo", "--policy", "las"],
    ["schema", "profile"],
]


@pytest.mark.parametrize("words", TABLES, ids=lambda words: " ".join(words[:2]))
def test_tables_fit_100_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\S {2,}\S.*\S {2,}\S", line)]
    assert rows or words[0] == "schema"
    assert [line for line in rows if len(line) > 100] == []
