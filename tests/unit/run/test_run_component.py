"""What a component must be, what it may give, and how it is told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab.core.errors import InputError
from trimtab.runtime.run.component import Batch, ComponentError, Place, Result, checked, find_class, make_component

PLACE = Place("rollout", gpus=2, devices=(0, 1), seed=7)


def test_a_component_is_made_with_its_settings_and_its_place() -> None:
    made = make_component("run_parts:Noting", {"pause_s": 0.0}, PLACE)
    assert made.place == PLACE
    assert made.step(Batch(1, 0, 1)).metrics == {"total": 1}


@pytest.mark.parametrize(
    ("use", "settings", "what", "hint"),
    [
        ("run_parts", {}, "names no class", "package.module:Class"),
        ("run_parts:Noting()", {}, "names no class", "package.module:Class"),
        ("no_such_module:Class", {}, "no module no_such_module", "PYTHONPATH"),
        ("run_parts.inner:Class", {}, "no module run_parts.inner", "PYTHONPATH"),
        ("run_parts:Notign", {}, "has no Notign", "did you mean Noting"),
        ("run_parts:NUMBER", {}, "is a int, not a class", ""),
        ("run_parts:NoStep", {}, "has no step", "step(self, batch)"),
        ("run_parts:WrongStep", {}, "does not take one batch", "step(self, batch)"),
        ("run_parts:Later", {}, "asynchronous", "return the result"),
        ("run_parts:NoPlace", {}, "takes no place", "place"),
        ("run_parts:Noting", {"paus_s": 1}, "cannot be made with these settings", "it takes fail, pause_s"),
        ("run_parts:Broken", {}, "cannot be made with these settings", "it takes size"),
        ("run_parts:Noting", {"place": 1}, "gets its place from the run", "remove `place`"),
    ],
)
def test_what_cannot_be_a_component_is_refused_before_anything_is_made(use, settings, what, hint) -> None:
    with pytest.raises(InputError) as refused:
        make_component(use, settings, PLACE)
    assert what in refused.value.what
    assert hint in (refused.value.hint or "")
    assert refused.value.where == "workflow.components.rollout.use"


def test_a_constructor_that_raises_names_the_component_and_the_line() -> None:
    with pytest.raises(ComponentError, match="rollout could not be made: ValueError: size 3 is odd") as fault:
        make_component("run_parts:Broken", {"size": 3}, PLACE)
    assert fault.value.exit_status == 4
    assert "run_parts.py:" in fault.value.where


def test_a_module_that_needs_what_is_not_installed_says_so(tmp_path: Path) -> None:
    (tmp_path / "needs_much.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "is_broken.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match="needs_much needs a_library_that_is_not_there"):
        find_class("needs_much:Class", tmp_path)
    with pytest.raises(InputError, match="cannot be imported: ZeroDivisionError"):
        find_class("is_broken:Class", tmp_path)


def test_a_module_is_found_beside_the_job_file_and_above_it(tmp_path: Path) -> None:
    deep = tmp_path / "one_package" / "inner"
    deep.mkdir(parents=True)
    (deep / "parts.py").write_text("class Part:\n    def __init__(self, place): ...\n    def step(self, batch): ...\n")
    assert find_class("one_package.inner.parts:Part", deep).__name__ == "Part"


@pytest.mark.parametrize("data", [1, "text", b"bytes", [1, 2], {"a": np.zeros(3)}, np.ones(2), PLACE, None, (1,)])
def test_data_of_any_kind_may_be_passed_on(data) -> None:
    assert checked(data).data is data
    assert checked(Result(data, {"reward": np.float32(0.5)})).metrics == {"reward": 0.5}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ((x for x in ()), "a generator"),
        ([1, (x for x in ())], r"a generator: make a list of it in \[1\]"),
        ({"f": lambda: 0}, r"a function in \['f'\]"),
        (Place, "a class"),
        (np, "a module"),
        (iter([1]), "an iterator"),
        (Result(1, {"loss": "low"}), "the metric loss of rollout is a str"),
        (Result(1, 3), "no mapping"),
    ],
)
def test_what_lives_in_one_process_only_is_refused(data, what) -> None:
    with pytest.raises(ComponentError, match=what) as fault:
        checked(data, "rollout")
    assert fault.value.fault_kind == "wrong type"
    assert fault.value.component == "rollout"


def test_an_open_file_and_a_coroutine_are_refused() -> None:
    async def later() -> None: ...

    waiting = later()
    with pytest.raises(ComponentError, match="coroutine"):
        checked(waiting, "rollout")
    waiting.close()
    with Path(__file__).open() as file, pytest.raises(ComponentError, match="an open file"):
        checked(file, "rollout")


def test_nothing_may_be_returned_only_where_nobody_waits_for_it() -> None:
    assert checked(None, "trainer").data is None
    with pytest.raises(ComponentError, match="rollout returned nothing, and reward needs its output"):
        checked(None, "rollout", wanted_by=("reward",))
