"""Every RL launch script of full checkouts is read as bash runs it, and its config composes.

FRAMEWORKS_DIR names a folder with the checkouts. A script is one of RL if running it starts a trainer, or reading does.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import launch_oracle as oracle
import pytest

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import is_unknown
from trimtab.formats.launch.read import CHOICE, LaunchChoice, composed, evaluated, trainers

pytestmark = pytest.mark.frameworks

CHECKOUTS = os.environ.get("FRAMEWORKS_DIR", "")
COLUMNS = ("RL scripts", "accepted", "read right", "not run", "asked", "refused", "wrong")


def judged(name: str, root: Path, script: Path, compose: bool = True) -> tuple[str, str]:
    """The column of a script, and what to say of it; "" for one that starts no trainer."""
    environment = {key: os.environ[key] for key in ("HOME", "PATH", "USER") if key in os.environ}
    ran = oracle.started(name, script, root, environment)
    try:
        shell, _ = evaluated(script, ())
    except InputError as error:
        return ("refused" if ran else ""), str(error)
    found = trainers(shell)
    if not found:
        return ("refused", "no trainer was found") if ran else ("", "")
    for arguments in ran or ():
        if not any(oracle.agrees(launch.launch.arguments, arguments) for launch in found):
            close = max(found, key=lambda one: len(set(one.launch.arguments) & set(arguments))).launch.arguments
            return (
                "wrong",
                f"read {sorted(set(close) - set(arguments))[:4]}, is {sorted(set(arguments) - set(close))[:4]}",
            )
    for launch in found:
        if launch.fault is not None:
            return "refused", str(launch.fault)
        if compose:
            try:
                composed(launch, ()).reader.plain()
            except InputError as error:
                return ("asked" if is_unknown(" ".join(launch.launch.arguments)) else "refused"), str(error)
    return ("read right" if ran else "not run"), ""


def table_of(name: str, root: Path, compose: bool = True) -> Counter[str]:
    counts: Counter[str] = Counter()
    lines = []
    CHOICE.set(LaunchChoice())
    for script in sorted(path for path in root.rglob("*") if path.suffix in oracle.SUFFIXES and path.is_file()):
        column, why = judged(name, root, script.relative_to(root), compose)
        if not column:
            continue
        counts["RL scripts"] += 1
        counts[column] += 1
        counts["accepted"] += column in ("read right", "not run")
        if why:
            lines.append(f"  {column}: {script.relative_to(root)}: {' '.join(why.split())[:300]}")
            print(lines[-1], flush=True)
    head = f"{'':12} " + " ".join(f"{column:>12}" for column in COLUMNS)
    print("", head, f"{name:12} " + " ".join(f"{counts[column]:>12}" for column in COLUMNS), sep="\n", flush=True)
    return counts


@pytest.mark.parametrize("name", ["verl", "verl-recipe", "nemo-rl", "openrlhf", "rlinf"])
def test_launch_scripts_are_read_as_bash_runs_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not CHECKOUTS:
        pytest.skip("FRAMEWORKS_DIR is not set: it names a folder with checkouts of the frameworks")
    root = Path(CHECKOUTS, name).resolve()
    monkeypatch.chdir(root)
    with capsys.disabled():
        counts = table_of(name, root)
    assert counts["wrong"] == 0
    assert counts["accepted"] >= 0.95 * counts["RL scripts"]
