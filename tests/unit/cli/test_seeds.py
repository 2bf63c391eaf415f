"""The table of the five documents: every row names a test that exists; and the rows that no other file holds."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.cluster import commands as cluster_commands
from trimtab.core.errors import UnreachableError
from trimtab.runtime.rayapi import connect

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "seeds.md"
TEST = r"`(?P<test>[^`|]+)`(?: \((?P<mark>\w+)\))?"
ROW = re.compile(rf"^\| (?P<promise>.+?) \| (?P<where>.+?) \| {TEST} \| (?P<state>.+?) \|$")
LATER = r"pytest\.mark\.(long|engines|frameworks)"
COSTS = {"trainer_cost": 95.7, "inference_cost": 30.8, "rollout_cost": 59.9}


def rows() -> list[dict[str, Any]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    kept = [line for line in lines if not line.startswith("| what is promised")]
    found = [ROW.match(line) for line in kept]
    assert [line for line, match in zip(kept, found, strict=True) if match is None] == []
    return [match.groupdict() for match in found if match is not None]


def marks_in(path: Path) -> dict[str, str | None]:
    """The tests of a file, each with the mark that keeps it out of `make test`."""
    text = path.read_text(encoding="utf-8")
    whole = re.search(rf"^pytestmark = {LATER}", text, re.MULTILINE)
    found: dict[str, str | None] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            own = [re.match(LATER, ast.unparse(one)) for one in node.decorator_list]
            mark = next((one for one in own if one), whole)
            found[node.name] = mark.group(1) if mark else None
    return found


def test_every_row_names_a_test_that_exists_and_says_that_it_works_or_why_ours_is_better() -> None:
    table = rows()
    assert len(table) >= 139
    known: dict[str, dict[str, str | None]] = {}
    wrong = []
    for row in table:
        file, _, name = row["test"].partition("::")
        if file not in known:
            known[file] = marks_in(ROOT / "tests" / file) if (ROOT / "tests" / file).is_file() else {}
        if name not in known[file] or known[file][name] != row["mark"]:
            wrong.append((row["test"], row["mark"], known[file].get(name, "there is no such test")))
    assert wrong == []
    assert [row for row in table if not re.match(r"works|better: .", row["state"])] == []
    assert len({row["promise"] for row in table}) == len(table)


def test_every_document_has_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = text.split("\n## ")[1:]
    assert len(sections) == 5
    assert all(section.count("\n| ") > 10 for section in sections)


def test_the_placement_documents_workflow_runs_to_its_end(tmp_path: Path) -> None:
    """One cost each in, the block out, the block into the file; and the file is then planned as the best."""
    shutil.copytree(ROOT / "examples" / "math", tmp_path / "math")
    script, config = tmp_path / "math" / "run_placement_autotune.sh", "qwen2.5-1.5b-grpo-megatron"
    file = tmp_path / "math" / "config" / f"{config}.yaml"
    given = file.read_text(encoding="utf-8").replace("rollout,trainer: all", 'rollout: "0-3"\n    trainer: "4-7"')
    assert all(f"{name}: {cost}" in given for name, cost in COSTS.items())
    file.write_text(given, encoding="utf-8")

    def run(*options: str) -> str:
        path = f"{ROOT / '.venv' / 'bin'}:/usr/bin:/bin"
        command = [str(script), config, *options]
        done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run()
    assert said.startswith(f"{sum(COSTS.values()):.1f} s per iteration")
    before, _, block = said.partition("Best placement for this task is:\n\n")
    assert before
    assert block.strip() == (
        "cluster:\n  num_nodes: 1\n  num_gpus_per_node: 8\n  component_placement:\n    rollout,trainer: all"
    )
    run("--apply")
    assert "rollout,trainer: all" in file.read_text(encoding="utf-8")
    assert "it is as fast as" in run()


@pytest.mark.parametrize(
    ("environment", "here", "joined"),
    [
        ("10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.1:6379"),
        (None, "10.0.0.2:6379", "10.0.0.2:6379"),
        (None, None, None),
        ("10.0.0.9:6379", None, None),
    ],
)
def test_ray_is_that_of_the_environment_then_one_that_runs_here_then_a_new_one_of_eight_cpus(
    environment: str | None, here: str | None, joined: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    def answers(address: str) -> None:
        if address == "10.0.0.9:6379":
            raise UnreachableError("nothing answers at 10.0.0.9:6379")

    def running_here() -> str:
        if here is None:
            raise UnreachableError("no Ray runs on this machine")
        return here

    ray = type("Ray", (), {"is_initialized": lambda self: False, "shutdown": lambda self: None})()
    monkeypatch.setattr(connect, "import_ray", lambda: ray)
    monkeypatch.setattr(connect, "init", lambda _, **settings: started.append(settings))
    monkeypatch.setattr(connect, "answers", answers)
    monkeypatch.setattr(connect, "running_here", running_here)
    monkeypatch.setattr(connect.auth, "match_cluster", lambda _: None)
    monkeypatch.setattr(connect.os, "cpu_count", lambda: 2)
    if environment is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    link = connect.RayConnection(None)
    [settings] = started
    assert settings["address"] == (joined or "local")
    assert link.embedded == (joined is None)
    if joined is None:
        assert settings["num_cpus"] == 8
        assert "no Ray runs on this machine" in link.how
        assert (environment or "RAY_ADDRESS is not set") in link.how


def test_a_local_cluster_has_the_ports_of_the_document_unless_others_are_given() -> None:
    options = inspect.signature(cluster_commands.start).parameters
    defaults = {name: options[name].default for name in ("workers", "port", "dashboard_port", "ports_from")}
    assert defaults == {"workers": 0, "port": 6379, "dashboard_port": 8265, "ports_from": 6380}
    assert (options["gpus_per_node"].default, options["cpus_per_node"].default) == (1, 1)


def test_the_elastic_schedulers_logger_is_found_by_the_name_on_the_page() -> None:
    from trimtab.compat.elastic_scheduler import scheduler

    named = re.search(r"getLogger\(\"([\w.]+)\"\)", (ROOT / "docs" / "guides" / "migrate-verl.md").read_text("utf-8"))
    assert named is not None
    above = logging.getLogger(named.group(1))
    assert scheduler.log.name.startswith(above.name)


def test_metric_names_of_the_migration_page_are_those_that_are_exported() -> None:
    page = (ROOT / "docs" / "guides" / "migrate-schedulemesh.md").read_text("utf-8")
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    pools = (ROOT / "docs" / "guides" / "pools.md").read_text("utf-8")
    named = re.findall(r"`(ray_trimtab_\w+)`", page)
    assert len(named) >= 3
    assert [name for name in named if name not in known + pools] == []
