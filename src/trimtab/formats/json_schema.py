"""JSON Schemas (draft 2020-12) of users' files, from the models that read them; descriptions are the fields' comments.

An editor checks and completes a file by the schema; a comment in the file names it:
`# yaml-language-server: $schema=job.schema.json`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from trimtab.formats.sections import Section

_FIELD = re.compile(r"^    (\w+): [^#\n]*  # (?!type:|fmt:)(.+)$", re.MULTILINE)


class _WithComments(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Only defaults that a file could state as well."""
        default = schema.get("default")
        plain = default is not None and isinstance(default, str | int | float)
        return super().default_schema(schema) if plain else self.generate_inner(schema["schema"])

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made, kind = super().model_schema(schema), schema["cls"]
        comments = _comments(getattr(kind, "ORIGIN", None) or kind)
        for name, field in kind.model_fields.items():
            property_ = made.get("properties", {}).get(field.alias or name)
            if property_ is not None and name in comments:
                property_.setdefault("description", comments[name])
        made.pop("title", None)
        return made


@cache
def _comments(kind: Any) -> Mapping[str, str]:
    """The comments behind the fields of a class, by name."""
    try:
        own = dict(_FIELD.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        own = {}  # without its source, or a builtin
    return {name: text for base in kind.__bases__ for name, text in _comments(base).items()} | own


def file_schema(title: str, by_key: Mapping[str, type[Section]]) -> dict[str, Any]:
    """The schema of a file: that of the section of the first of these keys which the file has."""
    named, definitions = models_json_schema(
        [(kind, "validation") for kind in by_key.values()], schema_generator=_WithComments
    )
    found: Any = {"required": [next(iter(by_key))]}
    for key, kind in reversed([*by_key.items()]):
        found = {"if": {"required": [key]}, "then": named[kind, "validation"], "else": found}
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": title, **found, **definitions}
