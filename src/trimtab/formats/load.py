"""Reads job files: detects the format of a file and calls its reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import job, yaml_text
from trimtab.formats.frameworks import not_rl
from trimtab.formats.loaded import LoadedJob
from trimtab.model.profile import Profile


def load(path: str | Path, overrides: Sequence[str] = (), profile: Profile | None = None) -> LoadedJob:
    """Read a job file or framework config, with `key=value` overrides and a measured profile."""
    path = Path(path)
    text = yaml_text.read_text(path)
    if path.suffix == ".sh" or text.startswith("#!"):
        raise InputError(
            "this is a launch script, not a config",
            where=str(path),
            hint="give the config that the run resolved: outputs/DATE/TIME/.hydra/config.yaml where it was started, or "
            "the config that the script names, with the script's overrides",
        )
    data = yaml_text.parse(text, str(path))
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InputError(
            f"a job file is a mapping of keys, this one holds {found}",
            where=str(path),
            hint="see `trimtab plan --help` for a whole example",
        )
    if job.matches(data) and "${" not in text:
        return job.read(overridden(data, overrides), path, profile)
    # Framework configs need OmegaConf and Hydra, whose import takes longer than planning.
    from trimtab.formats.frameworks.hydra_config import compose
    from trimtab.formats.frameworks.nemo_rl import config as nemo_rl
    from trimtab.formats.frameworks.openrlhf import config as openrlhf
    from trimtab.formats.frameworks.rlinf import config as rlinf
    from trimtab.formats.frameworks.verl import config as verl

    try:
        composed = compose(path, overrides)
    except InputError:
        if not overrides:
            not_rl.refuse(data, str(path))
        raise
    not_rl.refuse(composed.config, str(path))
    known = ((rlinf.matches, rlinf.read), (verl.matches, verl.read), (nemo_rl.matches, nemo_rl.read))
    for matches, read in (*known, (openrlhf.matches, openrlhf.read)):
        if matches(composed.reader):
            try:
                loaded = read(composed, profile)
            except InputError as error:
                error.where = error.where or str(path)
                raise
            staleness = loaded.job.workflow.staleness
            if staleness > job.MAX_STALENESS:
                raise InputError(f"staleness is {staleness}: at most {job.MAX_STALENESS} is planned", where=str(path))
            return loaded
    if job.matches(composed.config):
        return job.read(composed.config, path, profile)
    raise InputError(
        "unknown job file format",
        where=str(path),
        hint="known are trimtab's job file (cluster, workflow) and the configs of RLinf, verl, NeMo RL and OpenRLHF",
    )


def overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The data with `a.b=value` overrides applied; values are YAML."""
    result = dict(data)
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.strip().lstrip("+").split(".")
        if not equals or not all(parts):
            raise InputError(
                f"this override cannot be understood: {override}",
                where="command line",
                hint="write key=value, for example workflow.batches=256",
            )
        place = result
        for part in parts[:-1]:
            child = place.get(part, {})
            if not isinstance(child, Mapping):
                raise InputError(f"{key} cannot be set: {part} is no mapping", where="command line")
            # Only the path is copied: YAML aliases may make the whole data infinite.
            place[part] = place = dict(child)
        place[parts[-1]] = yaml_text.parse(value, f"command line: {override}")
    return result
