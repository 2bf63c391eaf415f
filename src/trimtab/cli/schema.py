"""`trimtab schema`: JSON Schemas of the files that users write, for editors."""

from __future__ import annotations

import enum
import json
import sys
from typing import Annotated

from typer import Argument

from trimtab.cli.options import OutputOption
from trimtab.formats.files import write_text


class SchemaKind(str, enum.Enum):
    """Files with a schema."""

    job = "job"
    scenario = "scenario"
    profile = "profile"


def schema(
    kind: Annotated[SchemaKind, Argument(help="File: job, scenario (of `simulate`) or profile.")] = SchemaKind.job,
    output: OutputOption = None,
) -> None:
    """Print the JSON Schema of a file, for completion and checks in an editor.

    Name it in the first line of a file: # yaml-language-server: $schema=job.schema.json

    Examples:

        trimtab schema --output job.schema.json
        trimtab schema scenario
    """
    from trimtab.formats.sections import file_schema

    if kind is SchemaKind.job:
        from trimtab.formats.job import JobFile
        from trimtab.formats.rollout.schema import ServedFile

        made = file_schema("trimtab job file", {"workflow": JobFile, "rollout": ServedFile})
    elif kind is SchemaKind.profile:
        from trimtab.formats.profile_file import ProfileFile

        made = file_schema("trimtab profile", {"profile": ProfileFile})
    else:
        from trimtab.replay.pool.scenario import FILE
        from trimtab.replay.replan.scenario import ReplanScenarioFile
        from trimtab.replay.rollout.scenario import RolloutScenarioFile

        made = file_schema(
            "trimtab scenario", {"job": ReplanScenarioFile, "rollout": RolloutScenarioFile, "tasks": FILE.section}
        )
    text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
