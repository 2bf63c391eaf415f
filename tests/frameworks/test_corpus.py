"""Every RL config of full checkouts is read as it is meant, and no plan is slower than what stands in the file.

FRAMEWORKS_DIR names a folder with checkouts `verl`, `verl-recipe`, `nemo-rl`, `rlinf` and `openrlhf`. What a file means
is found by `corpus_oracle`, which shares no code with the readers.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path

import corpus_oracle as oracle
import pytest
from conftest import row

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats import write_back
from trimtab.formats.load import load
from trimtab.model.workflow import ComponentProfile, Profile
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

pytestmark = pytest.mark.frameworks

CHECKOUTS = os.environ.get("FRAMEWORKS_DIR", "")
COLUMNS = ("composes", "not planned", "read right", "wrong", "wrongly refused", "slower plans", "not written")
EXTRA = {"nemo_rl": ("logprobs",), "openrlhf": ("inference",), "verl": ("old_log_prob",), "rlinf": ()}


def checkout(name: str) -> Path:
    if not CHECKOUTS:
        pytest.skip("FRAMEWORKS_DIR is not set: it names a folder with checkouts of the frameworks")
    root = Path(CHECKOUTS) / name
    if not root.is_dir():
        pytest.skip(f"there is no checkout {root}")
    return root.resolve()


def profile_for(says: oracle.Says, dialect: str) -> Profile:
    """Costs measured on the GPUs that each component has, and on twice as many."""
    points = {}
    for position, (name, gpus) in enumerate(says.places.items()):
        seconds = 30.0 + 17.0 * position
        points[name] = ((len(gpus), seconds), (2 * len(gpus), 0.6 * seconds))
    trains = next(name for name in ("update_actor", "policy", "actor") if name in points)
    for name in EXTRA[dialect]:
        points[name] = points[trains]
    return Profile(source="corpus", components=tuple(ComponentProfile(n, p) for n, p in points.items()))


def relations(places: Mapping[str, Iterable[int]]) -> dict[str, object]:
    """Sizes, and how each two components share GPUs; where exactly they lie is the framework's choice."""
    found: dict[str, object] = {name: len(set(gpus)) for name, gpus in places.items()}
    for one, other in combinations(sorted(places), 2):
        both = len(set(places[one]) & set(places[other]))
        found[f"{one} & {other}"] = both
    return found


def judge(case: oracle.Case, says: oracle.Says, dialect: str) -> tuple[str, str]:
    """The column of a case, and what to say of it."""
    profile = profile_for(says, dialect)
    try:
        loaded = load(case.path, case.overrides, profile)
        space, outcome = best_plan(loaded.job, loaded.rules)
    except (InputError, InfeasibleError) as error:
        return "wrongly refused", str(error)
    if loaded.current is None:
        return "wrong", "its placement is not read"
    read = {name: loaded.current.ranks[name] for name in says.places if name in loaded.current.ranks}
    workflow = loaded.job.workflow
    for what, mine, theirs in (
        ("GPUs", relations(read), relations(says.places)),
        ("batch", workflow.batches, says.batch),
        ("staleness", workflow.staleness, says.staleness),
        ("cluster", loaded.job.cluster.gpus, says.cluster or loaded.job.cluster.gpus),
    ):
        if mine != theirs:
            return "wrong", f"{what}: read {mine}, is {theirs}"
    assert outcome.best is not None
    own = current_plan(space, loaded.current, outcome.best).plan
    if own is None:
        return "wrong", "its placement cannot be judged"
    best = to_plan(space, outcome.best)
    if best.iteration_seconds > own.iteration_seconds * (1 + 1e-9):
        return "slower plans", f"{best.describe()}: {best.iteration_seconds:.1f} s, own {own.iteration_seconds:.1f} s"
    try:
        settings = loaded.settings(best)
        again = load(case.path, [*case.overrides, *write_back.overrides(settings)], profile)
    except (InputError, InfeasibleError) as error:
        return "not written", f"{best.describe()}: {error}"
    assert again.current is not None
    planned = {placed.name: placed.gpus for placed in best.components if placed.gpus}
    if relations(again.current.ranks) != relations({n: planned[n] for n in again.current.ranks}):
        return "not written", f"{best.describe()} was written as {relations(again.current.ranks)}"
    return "read right", ""


def table_of(
    name: str,
    cases: Iterable[oracle.Case],
    says: Callable[[oracle.Case], oracle.Answer],
    dialect: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    """Judge every case; prints the row of the table, and a line for each case that is not right."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    lines = []
    began = time.monotonic()
    for case in cases:
        for key, value in case.environment.items():
            monkeypatch.setenv(key, value)
        if case.folder is not None:
            monkeypatch.chdir(case.folder)
        try:
            answer = says(case)
        except Exception as error:  # what Hydra cannot compose, no launcher can start
            reasons[f"does not compose ({type(error).__name__})"] += 1
            counts["files"] += 1
            continue
        counts["files"] += 1
        counts["composes"] += 1
        if isinstance(answer, oracle.NotPlanned):
            reasons[answer.why] += 1
            counts["not planned"] += 1
            continue
        column, why = judge(case, answer, dialect)
        counts[column] += 1
        if why:
            lines.append(f"  {column}: {case.name or case.path}: {' '.join(why.split())[:300]}")
    right = counts["read right"]
    whole = {"found": counts["files"], "broken": counts["files"] - counts["composes"], "not RL": counts["not planned"]}
    whole |= {"accepted": right, "read right": right}
    whole |= {"refused": counts["wrongly refused"], "wrong": counts["wrong"], "planned": right}
    row(name, "configs", Counter({**whole, "slower": counts["slower plans"]}), began, lines)
    head = f"{'':12} {'files':>6} " + " ".join(f"{column:>15}" for column in COLUMNS)
    cells = f"{name:12} {counts['files']:>6} " + " ".join(f"{counts[column]:>15}" for column in COLUMNS)
    print("", head, cells, *lines, *(f"  {count} not planned: {why}" for why, count in reasons.most_common()), sep="\n")
    return counts


def held(counts: Counter[str]) -> None:
    planned = counts["composes"] - counts["not planned"]
    assert planned > 0
    assert counts["composes"] >= 0.9 * counts["files"]
    assert counts["wrong"] == 0
    assert counts["slower plans"] == 0
    assert counts["not written"] == 0
    assert counts["wrongly refused"] <= planned * 0.01


@pytest.fixture(autouse=True)
def _table_is_shown(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    table = capsys.readouterr().out
    with capsys.disabled():
        print(table, end="")


def test_nemo_rl_configs_are_read_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout("nemo-rl")
    held(table_of("NeMo RL", oracle.nemo_rl_cases(root), oracle.nemo_rl_says, "nemo_rl", monkeypatch))


def test_nemo_rls_own_loader_composes_what_is_written(tmp_path: Path) -> None:
    """Its setup needs GPUs, so it is its loader and its override parser that the settings are given to."""
    root = checkout("nemo-rl")
    spec = importlib.util.spec_from_file_location("nemo_rl_config", root / "nemo_rl" / "utils" / "config.py")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    recipes = sorted((root / "examples" / "configs" / "recipes" / "llm").glob("grpo-*.yaml"))
    assert len(recipes) > 20
    for path in recipes[:: len(recipes) // 8]:
        says = oracle.nemo_rl_says(oracle.Case(path))
        assert isinstance(says, oracle.Says)
        loaded = load(path, (), profile_for(says, "nemo_rl"))
        space, outcome = best_plan(loaded.job, loaded.rules)
        assert outcome.best is not None
        settings = loaded.settings(to_plan(space, outcome.best))
        config = own.parse_hydra_overrides(own.load_config(path), write_back.overrides(settings))
        for key, value in settings.values.items():
            assert oracle.at(config, key) == value


def test_rlinf_configs_are_read_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout("rlinf")
    held(table_of("RLinf", oracle.rlinf_cases(root), oracle.rlinf_says, "rlinf", monkeypatch))


@pytest.mark.parametrize("name", ["verl", "verl-recipe"])
def test_verl_configs_are_read_as_they_are_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, verl = checkout(name), checkout("verl")
    held(table_of(name, oracle.verl_cases(root, verl), oracle.verl_says, "verl", monkeypatch))


def test_openrlhf_flags_are_read_as_they_are_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = checkout("openrlhf")
    held(table_of("OpenRLHF", oracle.openrlhf_cases(root, tmp_path), oracle.openrlhf_says, "openrlhf", monkeypatch))
