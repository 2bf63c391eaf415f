from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats import profile_file
from trimtab.model.workflow import ComponentProfile, Profile

FULL = Profile(
    source="verl",
    notes=("12 of 14 steps count",),
    components=(
        ComponentProfile(
            name="rollout",
            seconds=((8, 110.0), (16, 59.9)),
            kind="H100",
            spread=0.05,
            drift=-0.01,
            steps=12,
            completion=((0.5, 0.3), (1.0, 1.0)),
            seconds_per_1k_tokens=0.0731,
        ),
        ComponentProfile(name="update_actor", seconds=((16, 95.7),), waits=True),
    ),
)


def one(**fields: Any) -> dict[str, Any]:
    return {"profile": {"source": "x", "components": {"rollout": {"seconds": {8: 59.9}, **fields}}}}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    profile_file.write(FULL, tmp_path / "profile.yaml")
    assert profile_file.read(tmp_path / "profile.yaml") == FULL


def test_what_was_not_measured_is_not_written() -> None:
    data = profile_file.as_data(Profile("timer", (ComponentProfile("a", ((1, 2.0),)),)))
    assert data == {"profile": {"source": "timer", "components": {"a": {"seconds": {1: 2.0}}}}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"profiles": {}}, ["no profile"]),
        ({"profile": []}, ["profile is a section of keys"]),
        ({"profile": {"source": "x"}}, ["components"]),
        ({"profile": {"source": 3, "components": {"a": {"seconds": {8: 1}}}}}, ["source"]),
        ({"profile": {"notes": "x", "components": {"a": {"seconds": {8: 1}}}}}, ["notes"]),
        ({"profile": {"source": "x", "components": {}}}, ["at least 1 item", "components"]),
        ({"profile": {"source": "x", "component": {}}}, ["unknown key component", "did you mean components?"]),
        (one(secconds=1), ["unknown key secconds", "components.rollout", "did you mean seconds?"]),
        (one(seconds={8: -1}), ["8 is not right: -1", "rollout.seconds.8"]),
        (one(seconds={8: 0}), ["8 is not right: 0"]),
        (one(seconds={8: float("nan")}), ["expected: a number"]),
        (one(seconds={8: 10**400}), ["expected: a number"]),
        (one(seconds={8: "fast"}), ["expected: a number"]),
        (one(seconds={0: 1.0}), ["1 or more"]),
        (one(seconds={8: 1.0, "8": 2.0}), ["stated twice"]),
        (one(seconds={}), ["measured points"]),
        (one(seconds=3.0), ["measured points"]),
        (one(spread=-0.1), ["spread"]),
        (one(drift=-2), ["drift"]),
        (one(steps=1.5), ["steps"]),
        (one(waits="yes"), ["waits"]),
        (one(kind=["H100"]), ["kind"]),
        (one(seconds_per_1k_tokens=0), ["seconds_per_1k_tokens is not right: 0"]),
        (one(completion=[[0.5, 0.6], [0.4, 0.7], [1, 1]]), ["completion must rise", "completion"]),
        (one(completion=[[0.5, 0.6], [0.9, 0.5], [1, 1]]), ["completion must rise"]),
        (one(completion=[[0.5, 0.6]]), ["must end at"]),
        (one(completion=[[0.5]]), ["completion[0]"]),
        (one(completion=[[0.5, 2.0], [1.0, 1.0]]), ["is not right: 2.0"]),
    ],
)
def test_a_fault_is_told_with_its_key(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        profile_file.from_data(data, "profile.yaml")
    for word in words:
        assert word in str(error.value)
    assert "profile.yaml" in str(error.value)
    assert len(error.value.lines()) <= 3


def test_digit_strings_are_gpu_counts_and_a_curve_may_start_at_nothing() -> None:
    read = profile_file.from_data(one(seconds={"16": 5}, completion=[[0, 0], [0.5, 0.5], [1, 1]]), "x")
    assert read.components[0].seconds == ((16, 5.0),)
    assert read.components[0].completion[0] == (0.0, 0.0)


def test_a_missing_file_and_a_syntax_error_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        profile_file.read(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("profile: [")
    with pytest.raises(InputError, match="not valid YAML"):
        profile_file.read(tmp_path / "bad.yaml")


def test_an_unwritable_target_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        profile_file.write(FULL, tmp_path / "no" / "such" / "folder.yaml")
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        profile_file.write(FULL, tmp_path / "taken")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["taken"]


def test_a_file_keeps_its_mode_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    profile_file.write(FULL, path)
    os.chmod(path, 0o640)
    profile_file.write(FULL, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_runs_on_different_counts_become_points() -> None:
    eight = Profile("verl", (ComponentProfile("rollout", ((8, 110.0),), spread=0.02, drift=-0.3, steps=5),))
    sixteen = Profile("verl", (ComponentProfile("rollout", ((16, 60.0),), spread=0.04, drift=0.1, steps=9),))
    merged = profile_file.merge([sixteen, eight])
    rollout = merged.components[0]
    assert rollout.seconds == ((8, 110.0), (16, 60.0))
    assert (rollout.spread, rollout.drift, rollout.steps) == (0.04, -0.3, 14)
    assert merged.source == "verl"


def test_of_two_runs_on_one_count_the_longer_is_kept_and_told() -> None:
    short = Profile("a", (ComponentProfile("x", ((8, 1.0),), steps=3),))
    long = Profile("b", (ComponentProfile("x", ((8, 2.0),), steps=30, waits=True),))
    merged = profile_file.merge([long, short])
    assert merged.components[0].seconds == ((8, 2.0),)
    assert merged.components[0].waits
    assert "measured more than once" in merged.notes[0]


def test_kinds_of_gpu_are_not_mixed() -> None:
    h100 = Profile("a", (ComponentProfile("x", ((8, 1.0),), kind="H100"),))
    h20 = Profile("a", (ComponentProfile("x", ((8, 1.0),), kind="H20"),))
    with pytest.raises(InputError, match="H100, H20"):
        profile_file.merge([h100, h20])
    with pytest.raises(InputError):
        profile_file.merge([])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=12,
)
COMPONENTS = st.dictionaries(
    st.text(max_size=4),
    st.fixed_dictionaries({}, optional=dict.fromkeys(profile_file.COMPONENT.section.model_fields, PLAIN)),
    max_size=2,
)


@given(PLAIN | st.fixed_dictionaries({"profile": st.fixed_dictionaries({"components": COMPONENTS})}))
def test_no_data_makes_a_traceback(data: Any) -> None:
    try:
        read = profile_file.from_data(data if isinstance(data, dict) else {"profile": data}, "x")
    except TrimtabError:
        return
    assert profile_file.from_data(profile_file.as_data(read), "again").source == read.source
