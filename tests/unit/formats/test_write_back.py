"""Plans go into the user's file without touching anything else, or are said as overrides that Hydra understands."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dialect_plans import DATA, composed
from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.yaml_text import parse

FILE = """\
# head comment
cluster:   # odd   spacing kept
    num_nodes: 2          # machines
    component_placement:  # where
        # all share
        actor,rollout,reward: all   # for now
    "quoted key": 'single'

# tail of cluster

list:
- a
-   b
algorithm: {group_size: 8, n:   4}
empty:
last: "x"    # end
"""
SHARED = {"cluster.component_placement": {"actor,rollout,reward": "all"}}
APART = {"cluster.component_placement": {"rollout": "0-3", "inference": "4:0", "actor": "5-7", "reward": "0-3"}}


def settings_of(values: dict[str, Any]) -> PlanSettings:
    return PlanSettings(values=values, block="")


def test_only_the_changed_values_change() -> None:
    text = write_back.edited(FILE, {"cluster.num_nodes": 3, "algorithm.n": 5, "last": "y z"})
    expected = FILE.replace("num_nodes: 2 ", "num_nodes: 3 ").replace("n:   4}", "n:   5}").replace('"x"', '"y z"')
    assert text == expected


def test_a_placement_is_replaced_with_quoted_ranks_and_keeps_its_comments() -> None:
    text = write_back.edited(FILE, APART)
    before, after = FILE.split("        # all share\n        actor,rollout,reward: all   # for now\n")
    block = (
        '        rollout: "0-3"\n        inference: "4:0"\n        actor: "5-7"\n        reward: "0-3"   # for now\n'
    )
    assert text == before + "        # all share\n" + block + after
    back = write_back.edited(text, SHARED)
    assert parse(back, "t") == parse(FILE, "t")


def test_comments_beside_entries_stay_with_their_key_or_move_above() -> None:
    text = 'p:\n  a: "0"  # first\n  # between\n  b: "1"  # second\nq: 1\n'
    assert write_back.edited(text, {"p": {"b": "0-1", "c": "2"}}) == (
        'p:\n  # first\n  # between\n  b: "0-1"\n  c: "2"  # second\nq: 1\n'
    )


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("a: {p: {'x,y': all}, q: 1}\n", {"a.p": {"x,y": "0-3"}}, 'a: {p: {"x,y": "0-3"}, q: 1}\n'),
        ("a:\n  p: {x: 1}\n", {"a.p": {"x,y": "all"}}, 'a:\n  p: {"x,y": all}\n'),
        ("a:\n  b: 1\nc: 2\n", {"a.new": "0-3"}, 'a:\n  b: 1\n  new: "0-3"\nc: 2\n'),
        ("a:\n  b: 1\nc: 2\n", {"a.p": {"x": "0-3"}}, 'a:\n  b: 1\n  p:\n    x: "0-3"\nc: 2\n'),
        ("a: {b: 1}\n", {"a.c": True}, "a: {b: 1, c: true}\n"),
        ("a:\n  b:\nc: 2\n", {"a.b": 4}, "a:\n  b: 4\nc: 2\n"),
        ("a:\n  b: null # none\n", {"a.b": 4}, "a:\n  b: 4 # none\n"),
        ("a:\n  b: 1\n  c: 2\n", {"a.b": None}, "a:\n  c: 2\n"),
        ("a: 1\r\nb: 2\r\n", {"a": 3}, "a: 3\r\nb: 2\r\n"),
        ("a: 1", {"b": 2}, "a: 1\nb: 2\n"),
        ("a: |\n  text\n  more\nb: 1\n", {"b": 2}, "a: |\n  text\n  more\nb: 2\n"),
    ],
)
def test_layouts_of_all_kinds_are_edited(text: str, values: dict[str, Any], expected: str) -> None:
    assert write_back.edited(text, values) == expected


def test_an_edit_that_would_change_anything_else_is_refused() -> None:
    with pytest.raises(InputError, match="not written"):
        write_back.edited("a: &x {b: 1}\nc: *x\n", {"a.b": 2})


@pytest.mark.parametrize(
    ("text", "key", "standing"),
    [
        ("a: {b: 1}\n", "a.b", "literal"),
        ("a: {b: '${c}'}\nc: 1\n", "a.b", "indirect"),
        ("a: &x 1\nb: *x\n", "a", "indirect"),
        ("a: &x 1\nb: *x\n", "b", "indirect"),
        ("d: &d {k: 1}\na:\n  <<: *d\n  b: 1\n", "a.k", "indirect"),
        ("a: {b: 1}\n", "a.c", "absent"),
        ("a:\n  b: ???\n", "a.b", "indirect"),
        ("a: {b: ???}\n", "a.b", "indirect"),
        ("a: 1\n", "a.b", "indirect"),
    ],
)
def test_what_stands_literally_is_told_from_what_refers_elsewhere(text: str, key: str, standing: str) -> None:
    assert write_back.key_standing(text, key) == standing


def test_a_file_is_replaced_with_a_backup_and_keeps_its_mode(tmp_path: Path) -> None:
    job = composed(tmp_path, FILE)
    job.path.chmod(0o640)
    backup = write_back.apply(job.path, settings_of(APART), job.literal, job.states)
    assert backup == tmp_path / "job.yaml.bak"
    assert backup.read_text() == FILE
    assert stat.S_IMODE(job.path.stat().st_mode) == 0o640
    assert compose(job.path).reader.get("cluster.component_placement") == APART["cluster.component_placement"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.yaml", "job.yaml.bak"]


def test_an_older_backup_is_never_overwritten(tmp_path: Path) -> None:
    for number, nodes in enumerate((3, 4, 5)):
        job = composed(tmp_path, FILE)
        backup = write_back.apply(job.path, settings_of({"cluster.num_nodes": nodes}), job.literal, job.states)
        assert backup == tmp_path / f"job.yaml.bak{number or ''}"


def test_nothing_is_written_where_the_file_says_it_already(tmp_path: Path) -> None:
    job = composed(tmp_path, FILE)
    assert write_back.apply(job.path, settings_of(SHARED), job.literal, job.states) is None
    assert list(tmp_path.iterdir()) == [job.path]


def test_values_from_a_parent_an_interpolation_or_the_command_line_are_not_edited() -> None:
    child = compose(DATA / "nemo" / "child.yaml", ["cluster.num_nodes=8"])
    wanted = settings_of(
        {"cluster.num_nodes": 2, "cluster.gpus_per_node": 4, "policy.generation.colocated.enabled": True}
    )
    assert write_back.uneditable_keys(wanted, child.literal, child.states) == (
        "cluster.num_nodes",
        "cluster.gpus_per_node",
    )
    with pytest.raises(InputError, match=r"cluster.num_nodes, cluster.gpus_per_node is not set") as caught:
        write_back.apply(child.path, wanted, child.literal, child.states)
    assert "overrides" in str(caught.value.hint)


def test_a_failure_while_replacing_leaves_the_file_and_the_folder_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = composed(tmp_path, FILE)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left"):
        write_back.apply(job.path, settings_of(APART), job.literal, job.states)
    assert job.path.read_text() == FILE
    assert list(tmp_path.iterdir()) == [job.path]


def test_an_unwritable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = composed(tmp_path, FILE)
    job.path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anything
    with pytest.raises(InputError, match="cannot be written: Permission denied"):
        write_back.apply(job.path, settings_of(APART), job.literal, job.states)
    assert list(tmp_path.iterdir()) == [job.path]


def test_a_link_stays_a_link_and_its_target_is_edited(tmp_path: Path) -> None:
    target = tmp_path / "target.yaml"
    target.write_text(FILE)
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    job = compose(link)
    write_back.apply(link, settings_of({"cluster.num_nodes": 7}), job.literal, job.states)
    assert link.is_symlink()
    assert "num_nodes: 7" in target.read_text()


@pytest.mark.parametrize(
    "values",
    [
        SHARED,
        APART,
        {"cluster.num_nodes": 4, "cluster.brand.new": True, "last": "it's \\ odd"},
        {"cluster.component_placement": {"a b": "0-3,4-7", "c": 1}},
        {"last": None},
    ],
)
@pytest.mark.parametrize("defaults", ["", "defaults:\n  - _self_\n"])
def test_overrides_say_the_same_to_hydra_itself(tmp_path: Path, values: dict[str, Any], defaults: str) -> None:
    reader = composed(tmp_path, defaults + FILE, *write_back.overrides(settings_of(values))).reader
    for key, value in values.items():
        assert reader.get(key) == value


def test_words_for_a_shell_are_quoted() -> None:
    words = " ".join(write_back.shell_words(settings_of(SHARED)))
    assert words == (
        "'~cluster.component_placement' '+cluster.component_placement={actor\\,rollout\\,reward:'\"'\"'all'\"'\"'}'"
    )


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    value=st.one_of(st.booleans(), st.integers(-9, 10**6), st.text(st.characters(min_codepoint=32, max_codepoint=126)))
)
def test_any_value_is_read_back_as_it_was_written(value: object) -> None:
    assert parse(f"k: {write_back.scalar_text(value)}\n", "t") == {"k": value}
