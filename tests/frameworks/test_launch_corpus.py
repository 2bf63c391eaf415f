"""Every RL launch script of full checkouts is read as bash runs it and planned, no slower than its own placement.

FRAMEWORKS_DIR names a folder with the checkouts. A script is one of RL if running it starts a trainer, or reading does.
What a script asks for (variables of its user's, the name of a config as its argument, the model where its name is none
of the table, GPUs per node where no key says them) is given, to bash and to the reader alike. A script is broken where
it is refused and a file that bash would give to its trainer is not in the checkout.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import launch_oracle as oracle
import pytest
from conftest import row

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.estimated_costs import with_estimates
from trimtab.formats.launch.read import CHOICE, LaunchChoice, composed, evaluated, trainers
from trimtab.formats.launch.shell import Shell
from trimtab.formats.load import OpenedFile
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan, explain

pytestmark = pytest.mark.frameworks

CHECKOUTS = os.environ.get("FRAMEWORKS_DIR", "")
COUNTS = re.compile(r"NUM|NODE|GPU|SIZE|STEP|PORT|RANK|WORLD|COUNT|BATCH|EPOCH")
NAMES = {"INFER_BACKEND": "vllm", "USE_DUMMY_MODEL": "False"}
GPU, MODEL = "b300", "qwen2.5-7b"


def value_of(name: str) -> str:
    return NAMES.get(name) or ("8" if COUNTS.search(name) else f"/given/{name}")


def asked(error: InputError) -> str:
    """The override or variable that an error asks for."""
    text = str(error)
    if found := re.search(r"\b([A-Z]\w*)(?:, which)? is not set|the variable (\w+)", text):
        return f"{found[1] or found[2]}={value_of(found[1] or found[2])}"
    return next(iter(re.findall(r"\+\+cluster\.num_gpus_per_node=8", text)), "")


@dataclass
class Script:
    """A script of a checkout, and what it has been given: variables, overrides and arguments."""

    path: Path
    given: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] = ()

    def words(self, given: Sequence[str]) -> tuple[Path, list[str]]:
        """As the command line of trimtab takes it: arguments only stand in a whole command."""
        if not self.arguments:
            return self.path, list(given)
        variables = [word for word in given if not word.startswith("+")]
        overrides = [word for word in given if word.startswith("+")]
        return Path("env"), [*variables, "bash", str(self.path), *self.arguments, *overrides]


def read(script: Script) -> Shell:
    """The evaluated script, with all that it asks for given."""
    while True:
        shell, _ = evaluated(*script.words(script.given))
        found = trainers(shell)
        words = " ".join(word for one in found for word in (*one.launch.arguments, *one.launch.program))
        fault = next((one.fault for one in found if one.fault is not None), None)
        if not found and shell.failed and shell.not_set:
            fault = InputError(f"{shell.not_set[-1]} is not set")
        elif name := re.search(r"\w+, which is not set", words):
            fault = InputError(name[0])
        if fault is not None and "--config-name has no value" in fault.what and not script.arguments:
            kind = script.path.stem.removeprefix("run").strip("_")  # run_async.sh: a config that says so
            configs = sorted(script.path.parent.glob("*.yaml"), key=lambda path: (kind not in path.stem, path))
            script.arguments = (configs[0].stem,)
            continue
        wanted = asked(fault) if fault is not None else ""
        if not wanted or wanted in script.given or wanted.startswith("+"):
            return shell
        script.given.append(wanted)


def judged(name: str, root: Path, path: Path) -> Iterator[tuple[str, str]]:
    """The columns of a script, and what to say of each; none for one that starts no trainer."""
    environment = {key: os.environ[key] for key in ("HOME", "PATH", "USER") if key in os.environ}
    script = Script(path)
    found, fault = [], "no trainer was found"
    try:
        found = trainers(read(script))
    except InputError as error:
        fault = str(error)
    environment |= dict(word.split("=", 1) for word in script.given)
    ran = oracle.started(name, path, root, environment, script.arguments)
    if not found:
        if ran:
            yield "found", ""
            yield "refused", fault
        return
    yield "found", ""
    for start in ran or ():
        if not any(oracle.agrees(launch.launch.arguments, start.arguments) for launch in found):
            theirs = set(start.arguments)
            mine = max((set(one.launch.arguments) for one in found), key=lambda words: len(words & theirs))
            yield "wrong", f"read {sorted(mine - theirs)[:4]}, is {sorted(theirs - mine)[:4]}"
            return
    outcomes = [outcome(script, number) for number in range(1, len(found) + 1)]
    refused = [why for column, why in outcomes if column == "refused"]
    if refused:
        gone = next((why for start in ran or () if (why := oracle.missing(start, root))), "")
        yield ("broken", gone) if gone else ("refused", refused[0])
        return
    if all(column == "not RL" for column, _ in outcomes):
        yield "not RL", ""
        return
    given = [*script.given, *script.arguments]
    yield "with NAME=" if given else "accepted", " ".join(given)
    yield ("read right" if ran else "not compared"), "" if ran else "bash did not come to its trainer"
    yield from (found for found in outcomes if found[0] != "not RL")


def outcome(script: Script, number: int) -> tuple[str, str]:
    """Read one launch of a script, and plan it from estimated costs beside its own placement."""
    CHOICE.set(LaunchChoice(number))
    sizes, words = {"gpu": GPU}, list(script.given)
    file: OpenedFile | None = None
    try:
        while True:
            try:
                file = file or OpenedFile(*script.words(words))
                loaded = with_estimates(file, None, sizes, CONSTANTS).loaded
                break
            except InputError as error:
                if (
                    "not an RL job" in error.what
                    or "this is no RL training" in error.what
                    or "only evaluates" in error.what
                ):
                    return "not RL", ""
                if re.search(r"unknown model|no model is given", error.what) and "model" not in sizes:
                    sizes["model"] = MODEL
                elif (wanted := asked(error)) and wanted not in words:
                    words.append(wanted)
                    file = None
                else:
                    raise
        space, found = best_plan(loaded.job, loaded.rules)
    except InfeasibleError as error:
        return "no plan", str(error)
    except InputError as error:
        return plain(script, number, words, error)
    assert found.best is not None
    if loaded.current is None:
        return "no plan", "its own placement is not read"
    own = current_plan(space, loaded.current, found.best).plan
    best = explain(space, found, current=loaded.current, with_sensitivity=False).best
    if own is not None and best.iteration_seconds > own.iteration_seconds * (1 + 1e-9):
        return "slower", f"{best.describe()}: {best.iteration_seconds:.1f} s, own {own.iteration_seconds:.1f} s"
    return "planned", ""


def plain(script: Script, number: int, words: list[str], error: InputError) -> tuple[str, str]:
    """What is not planned from estimates may still be read: its config composes."""
    try:
        shell, overrides = evaluated(*script.words(words))
        chosen = trainers(shell)[number - 1]
        if chosen.fault is not None:
            return "refused", str(chosen.fault)
        composed(chosen, overrides).reader.plain()
    except InputError as refused:
        return "refused", str(refused)
    return "no plan", str(error)


def table_of(name: str, root: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    lines = []
    began = time.monotonic()
    for script in sorted(path for path in root.rglob("*") if path.suffix in oracle.SUFFIXES and path.is_file()):
        CHOICE.set(None)
        for column, why in judged(name, root, script.relative_to(root)):
            counts[column] += 1
            if why:
                lines.append(f"  {column}: {script.relative_to(root)}: {' '.join(why.split())[:300]}")
    CHOICE.set(None)
    row(name, "scripts", counts, began, lines)
    return counts


@pytest.mark.parametrize(
    "name", ["nemo-rl", "verl", "skyrl", "verl-recipe", "slime", "rlinf", "roll", "openrlhf", "areal"]
)
def test_launch_scripts_are_read_as_bash_runs_them_and_no_plan_is_slower(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CHECKOUTS:
        pytest.skip("FRAMEWORKS_DIR is not set: it names a folder with checkouts of the frameworks")
    root = Path(CHECKOUTS, name).resolve()
    monkeypatch.chdir(root)
    counts = table_of(name, root)
    scripts = counts["found"] - counts["not RL"] - counts["broken"]
    assert counts["wrong"] == counts["slower"] == 0
    assert counts["accepted"] + counts["with NAME="] >= 0.95 * scripts
    assert counts["refused"] <= 0.05 * scripts
