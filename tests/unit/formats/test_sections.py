"""Sections of users' files: what is said where a value, a key or a form is wrong, for models and for dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, ClassVar, Literal

import pytest

from trimtab.core.errors import InputError
from trimtab.core.numbers import Ranges, check_fields
from trimtab.formats import sections, yaml_text
from trimtab.formats.load import load
from trimtab.formats.sections import (
    Count,
    Elsewhere,
    FieldsOf,
    Made,
    OneOrMore,
    OpenSection,
    Seconds,
    Section,
    Switch,
    refused,
)
from trimtab.formats.yaml_text import Source


@dataclass(frozen=True)
class Retry:
    """How a call is tried again."""

    tries: int = 3
    wait_s: float = 1.0
    label: str = ""
    share: float | None = None

    RANGES: ClassVar[Ranges] = {"tries": (1, 100, "the number of tries"), "share": (0.0, 1.0)}

    def __post_init__(self) -> None:
        check_fields(self, "the retry")
        if self.tries == 13:
            raise InputError("13 tries bring no luck", hint="12")


class Part(Section):
    """A part of a file."""

    ELSEWHERE: ClassVar[Elsewhere] = {"color": ("is set for the whole file", "use paint")}

    size: Count = 1
    kind: Literal["round", "square"] = "round"
    on: Switch = True


class Whole(Section):
    """A file."""

    parts: Annotated[tuple[Part, ...], OneOrMore] = ()
    by_count: dict[Count, Seconds] = {}  # noqa: RUF012
    pause: Seconds | Literal["never"] = 0.0
    retry: Annotated[Retry, FieldsOf(Retry, elsewhere={"label": ("comes from the name", "")})] = Retry()
    name: Annotated[str, Made(str, str.upper)] = ""


def fault(text: str) -> InputError:
    text = dedent(text)
    with pytest.raises(InputError) as caught:
        sections.read(Whole, yaml_text.parse(text, "a.yaml"), Source("a.yaml", text))
    return caught.value


def test_what_is_stated_is_read_shorthands_and_numbers_in_text_too() -> None:
    data: dict[str, Any] = {"parts": {"size": "4"}, "by_count": {"8": "2.5"}, "retry": {"tries": 5}, "name": "x"}
    found = sections.read(Whole, data, Source("a.yaml"))
    assert [part.size for part in found.parts] == [4]
    assert (found.by_count, found.retry, found.name) == ({8: 2.5}, Retry(tries=5), "X")
    assert FieldsOf(Retry).read({"wait_s": 2}, Source("a")) == {"wait_s": 2.0}


@pytest.mark.parametrize(
    ("text", "where", "what", "hint"),
    [
        ("parts:\n- size: 1\n- sise: 2\n", "a.yaml:3: parts[1].sise", "unknown key sise", "did you mean size?"),
        ("parts:\n- {color: red}\n", "a.yaml:2: parts[0].color", "color is set for the whole file", "use paint"),
        ("parts:\n- {kind: sqare}\n", "a.yaml:2: parts[0].kind", "kind is not right: 'sqare'", "did you mean square?"),
        ("parts:\n- {size: 0}\n", "a.yaml:2: parts[0].size", "size is not right: 0", "1 or more, up to 1,000,000"),
        ("parts:\n- {size: true}\n", "a.yaml:2: parts[0].size", "size is not right: True", "not true or false"),
        ("parts:\n- {on: 'yes'}\n", "a.yaml:2: parts[0].on", "on is not right: 'yes'", "true or false"),
        ("parts:\n- 3\n", "a.yaml:2: parts[0]", "parts[0] is a section of keys", "keys: size, kind, on"),
        ("by_count:\n  8: -1\n", "a.yaml:2: by_count.8", "8 is not right: -1", "a number of 0 or more"),
        ("by_count:\n  x: 1\n", "a.yaml:2: by_count.x", "x is not right: 'x'", "a whole number of 1 or more"),
        (
            "pause: soon\n",
            "a.yaml:1: pause",
            "pause is not right: 'soon'",
            "a number of 0 or more, up to 1e+09; or one",
        ),
        ("pause: .nan\n", "a.yaml:1: pause", "pause is not right: nan", "a number of 0 or more"),
        ("retry:\n  tries: 101\n", "a.yaml:2: retry.tries", "tries is not right: 101", "up to 100"),
        ("retry:\n  tries: 13\n", "a.yaml:1: retry", "13 tries bring no luck", "12"),
        ("retry:\n  label: a\n", "a.yaml:2: retry.label", "label comes from the name", ""),
        ("retry: 3\n", "a.yaml:1: retry", "retry is a section of keys", "keys: tries, wait_s, share"),
        ("- 1\n", "a.yaml", "the file is a section of keys", "keys: parts"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_what_is_allowed(text: str, where: str, what: str, hint: str) -> None:
    error = fault(text)
    assert (error.where, error.what) == (where, what)
    assert hint in (error.hint or "")


def test_an_open_section_ignores_other_keys_and_names_the_one_that_is_meant() -> None:
    class Entry(OpenSection):
        layers: Count

    assert sections.read(Entry, {"layers": 2, "more": 3}, Source("a")).layers == 2
    for data, hint in (({"layer": 2}, "there is layer"), ({"other": 2}, None)):
        with pytest.raises(InputError, match="layers is missing") as caught:
            sections.read(Entry, data, Source("a"), "m")
        assert caught.value.hint == hint


def test_an_error_of_a_later_check_gets_the_line_of_the_key_that_it_names() -> None:
    source = Source("a.yaml", "x: 1\ny:\n- z: 2\n")
    for named, where in (("y[0].z", "a.yaml:3: y[0].z"), ("elsewhere", "a.yaml:2: y"), (None, "a.yaml:2: y")):
        with pytest.raises(InputError) as caught, source.located("y"):
            raise InputError("wrong", where=named)
        assert caught.value.where == where
    assert refused("a", "b", "k").context == {"what": "a", "hint": "b", "keys": ["k"]}


def test_a_job_file_is_refused_with_its_line_unless_the_command_line_changed_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = """\
        cluster: {nodes: 1, gpus_per_node: 8}
        workflow:
          components:
            rollout: {seconds: {8: 2.0}}
            trainer: {after: rolout, seconds: {8: 1.0}}
        """
    path.write_text(dedent(text))
    with pytest.raises(InputError, match="no component named rolout") as caught:
        load(path)
    assert caught.value.where == f"{path}:5: workflow.components.trainer.after"
    with pytest.raises(InputError) as caught:
        load(path, ["workflow.batches=-1"])
    assert caught.value.where == f"{path}: workflow.batches"


def test_a_number_out_of_range_is_refused_where_a_dataclass_is_made_too() -> None:
    with pytest.raises(InputError, match="the number of tries must be a whole number of 1 or more, up to 100, not 0"):
        Retry(tries=0)
    for wrong in (-1.0, float("nan"), float("inf"), "1", True, 10**400):
        with pytest.raises(InputError, match="wait_s must be a number of 0 or more"):
            Retry(wait_s=wrong)  # type: ignore[arg-type]
    assert Retry(share=None).share is None
