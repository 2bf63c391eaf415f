"""Every RL config of full checkouts of AReaL and ROLL is read as it is meant; what is written they take themselves.

FRAMEWORKS_DIR names a folder with the checkouts `areal` and `roll`.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from pathlib import Path

import config_oracle as oracle
import pytest
import yaml
from corpus_oracle import Case, Says
from test_corpus import EXTRA, checkout, held, profile_for, table_of
from test_own_placement_code import ask

from dialect_plans import DATA
from real_launches import read
from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.trl import Trl
from trimtab.formats.load import load
from trimtab.formats.modes import plan_modes
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

pytestmark = pytest.mark.frameworks

EXTRA.update(areal=("old_log_prob",), roll=("old_log_prob",))
TWO = Says({"rollout": frozenset(range(8)), "update_actor": frozenset(range(8))}, 1, 0)


@pytest.mark.parametrize(
    ("name", "title", "cases", "says"),
    [
        ("areal", "AReaL", oracle.areal_cases, oracle.areal_says),
        ("roll", "ROLL", oracle.roll_cases, oracle.roll_says),
    ],
)
def test_configs_are_read_as_they_are_meant(
    name: str, title: str, cases, says, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout(name)
    counts = table_of(title, cases(root), says, name, monkeypatch)
    with capsys.disabled():
        print(capsys.readouterr().out, end="")
    held(counts)


def test_rolls_scripts_are_read_or_refused_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts are read, never run; a script is right where its GPUs are those of the config that it names."""
    root = checkout("roll")
    counts: Counter[str] = Counter()
    for path in sorted((root / "examples").rglob("*.sh")):
        counts["scripts"] += 1
        try:
            loaded = load(path, (), profile_for(TWO, "roll"))
        except InputError as error:
            counts["refused"] += 1
            counts["refused: " + error.what.split("examples")[0][:60]] += 1
            continue
        says = oracle.roll_says(Case(Path(loaded.path)))
        assert isinstance(says, Says)
        assert loaded.current is not None
        read = {name: len(loaded.current.ranks[name]) for name in says.places}
        right = read == {name: len(gpus) for name, gpus in says.places.items()}
        counts["read right" if right else "wrong"] += 1
    with capsys.disabled():
        print("", *(f"{count:>5} {what}" for what, count in counts.items()), sep="\n")
    assert counts["wrong"] == 0
    assert (
        counts["read right"] >= 0.65 * counts["scripts"]
    )  # the others train without RL, or name files that are not there


@pytest.mark.parametrize(
    ("name", "cases", "says", "least"),
    [("areal", oracle.areal_cases, oracle.areal_says, 20), ("roll", oracle.roll_cases, oracle.roll_says, 15)],
)
def test_what_is_written_is_taken_by_their_own_config_classes(name: str, cases, says, least: int) -> None:
    """A file that its own classes do not take as it is (extra keys of an example, removed ones) is left out."""
    asked, planned = [], []
    found = [case for case in cases(checkout(name)) if "tests" not in case.path.parts]
    for case in found[:: 1 if name == "areal" else 4]:
        with contextlib.suppress(Exception):  # what does not compose
            answer = says(case)
            if not isinstance(answer, Says):
                continue
            loaded = load(case.path, (), profile_for(answer, name))
            space, outcome = best_plan(loaded.job, loaded.rules)
            assert outcome.best is not None
            best = to_plan(space, outcome.best)
            words = write_back.overrides(loaded.settings(best))
            asked += [{"framework": name, "file": str(case.path), "overrides": some} for some in ([], words)]
            planned.append({placed.name: len(placed.gpus) for placed in best.components})
    answers = ask(".venv-areal", "own_config_checks.py", asked, str(checkout("roll")))
    taken = 0
    for own, written, plan in zip(answers[::2], answers[1::2], planned, strict=True):
        if "gpus" in own:
            assert written == {"gpus": {role: plan[role] for role in written.get("gpus", own["gpus"])}}
            taken += 1
    assert taken >= least


def test_rolls_own_config_classes_take_its_other_modes() -> None:
    """Of configs that they take as they are."""
    asked: list[dict[str, object]] = []
    for case in [case for case in oracle.roll_cases(checkout("roll")) if "tests" not in case.path.parts][::3]:
        with contextlib.suppress(Exception):  # what does not compose
            answer = oracle.roll_says(case)
            if not isinstance(answer, Says):
                continue
            profile = profile_for(answer, "roll")
            loaded = load(case.path, (), profile)
            space, outcome = best_plan(loaded.job, loaded.rules)
            assert outcome.best is not None
            plan = to_plan(space, outcome.best)
            read_in = lambda words, path=case.path, costs=profile: (load(path, words, costs), None)  # noqa: E731
            words = [mode.words for mode in plan_modes((loaded, None), plan, read_in)[1:] if not mode.reason]
            file = {"framework": "roll", "file": str(case.path)}
            asked += [{**file, "overrides": own} for more in words for own in ([], shlex.split(" ".join(more)))]
    answers = ask(".venv-areal", "own_config_checks.py", asked, str(checkout("roll")))
    taken = [written for own, written in zip(answers[::2], answers[1::2], strict=True) if "gpus" in own]
    assert len(taken) >= 3
    assert not [written for written in taken if "gpus" not in written]


def test_trls_own_parsers_take_its_launches_and_what_is_written(tmp_path: Path) -> None:
    """The flags of every launch of the corpus, as they are and as planned: the samples of a step stay."""
    asked, kept = [], []
    for at, case in enumerate(yaml.safe_load((DATA / "real" / "trl" / "launches.yaml").read_text())):
        folder = tmp_path / str(at)
        folder.mkdir()
        if "reads" not in case:
            continue
        loaded = read(Trl, case, folder)
        space, outcome = best_plan(loaded.job, loaded.rules)
        assert outcome.best is not None
        values = loaded.settings(to_plan(space, outcome.best)).values
        assert loaded.current is not None
        own = {"num_processes": len(loaded.current.ranks["update_actor"])}
        program = " ".join((*case["program"], *case["arguments"][:1]))
        trainer = next((name for name in ("rloo", "async_grpo") if name in program), "grpo")
        words = case["arguments"][1:] if case["program"] == ["trl"] else case["arguments"]
        for written in (own, values):
            server = [f"--{k.partition('.')[2]}={v}" for k, v in written.items() if k.startswith("vllm_serve.")]
            flags = [f"--{k}={v}" for k, v in written.items() if "." not in k and not k.startswith("num_")]
            kept.append(case["reads"]["batch"])
            asked.append({
                "framework": "trl", "trainer": trainer, "folder": str(folder), "words": [*words, *flags],
                "server": server or case.get("beside"), "processes": written["num_processes"],
            })  # fmt: skip
    answers = ask(".venv-areal", "own_config_checks.py", asked)
    assert len(answers) >= 40
    assert not [answer for answer in answers if "gpus" not in answer]
    found = [answer["gpus"] for answer in answers]
    assert [each.get("batch", batch) for each, batch in zip(found, kept, strict=True)] == kept
    assert [each["step"] for each in found[::2]] == [each["step"] for each in found[1::2]]
