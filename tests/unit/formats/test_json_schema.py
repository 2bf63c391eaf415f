"""JSON Schemas for editors: what trimtab reads is right by them, and what it refuses is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from trimtab.cli.app import run
from trimtab.core.errors import InputError
from trimtab.formats import job, yaml_text

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft202012Validator]:
    found = {}
    for kind in ("job", "scenario", "profile"):
        path = tmp_path_factory.mktemp("schemas") / f"{kind}.json"
        assert run(["schema", kind, "--output", str(path)]) == 0
        schema = json.loads(path.read_text())
        Draft202012Validator.check_schema(schema)
        found[kind] = Draft202012Validator(schema)
    return found


def texts() -> Iterator[tuple[str, str]]:
    """YAML files of the examples, and blocks of the docs."""
    for folder in (ROOT / "examples", ROOT / "src" / "trimtab" / "examples"):
        for path in sorted(folder.rglob("*.yaml")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for at, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            yield f"{page.name}, block {at + 1}", block


def kind_of(data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    rollout = data.get("rollout")
    if {"cluster", "workflow"} <= set(data) or (isinstance(rollout, dict) and {"engines", "gateway"} & set(rollout)):
        return "job"
    if "tasks" in data or "job" in data or (isinstance(rollout, dict) and {"profile", "trace"} & set(rollout)):
        return "scenario"
    return "profile" if "profile" in data else None


def as_json(text: str) -> Any:
    """Data as an editor sees them; None for several documents in one text."""
    try:
        return json.loads(json.dumps(yaml_text.parse(text, "text"), default=str))
    except InputError:
        return None


FILES = [(name, text, kind) for name, text in texts() if (kind := kind_of(as_json(text)))]


@pytest.mark.parametrize(("name", "text", "kind"), FILES, ids=[name for name, _, _ in FILES])
def test_files_of_the_examples_and_the_docs_are_right_by_their_schema(
    schemas: dict[str, Draft202012Validator], name: str, text: str, kind: str
) -> None:
    assert [error.message for error in schemas[kind].iter_errors(as_json(text))] == []


SMALL = {
    "cluster": {"nodes": 1, "gpus_per_node": 2},
    "workflow": {"components": {"a": {"seconds": {"1": 2.0}}, "b": {"after": "a", "seconds": {"1": 1.0}}}},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"clutser": {}},
        {"cluster": {"gpus_per_node": -1}},
        {"workflow": {"components": {"a": {"secs": 1}}}},
        {"run": {"iterations": 0}},
        {"run": {"loop": {"mode": "car"}}},
        {"rollout": {"engines": [{"kind": "vlm"}]}},
        {"rollout": {"rules": {"min_workers": 1}}},
        {"elastic_config": {"max_workers": 0}},
    ],
)
def test_what_is_refused_is_wrong_by_the_schema_too(
    schemas: dict[str, Draft202012Validator], wrong: dict[str, Any]
) -> None:
    assert schemas["job"].is_valid(SMALL)
    job.read(SMALL, Path("job.yaml"))
    assert not schemas["job"].is_valid({**SMALL, **wrong})
    with pytest.raises(InputError):
        job.read({**SMALL, **wrong}, Path("job.yaml"))


def test_a_file_without_a_section_of_its_kind_is_wrong(schemas: dict[str, Draft202012Validator]) -> None:
    assert not any(schema.is_valid({"name": "x"}) for schema in schemas.values())


def test_keys_are_described_as_in_the_models(schemas: dict[str, Draft202012Validator]) -> None:
    sections: Any = schemas["job"].schema["$defs"]
    assert sections["WorkflowSection"]["properties"]["batches"] == {
        "default": 1, "description": "of an iteration", "maximum": 65_536, "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert sections["RolloutRules"]["properties"]["stall_s"]["description"].startswith("without a token")
    assert sections["ReplanRules"]["description"].startswith("When a run is moved to another plan")


def test_the_schema_goes_to_standard_output_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "scenario"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
