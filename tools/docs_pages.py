"""Hooks of the site (mkdocs.yml): reference pages filled from the code, and copies of the files that pages link to.

A page with `<!-- generated: NAME -->` gets what the function of that name returns. Links to files outside docs/
(examples, ops, CONTRIBUTING.md) lead to copies of these files in the site.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import os
import pkgutil
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "docs"
REASONS = {
    "Tasks, nodes, groups, rollout and runs": "trimtab.core.reasons:ReasonCode",
    "What waits on a Ray cluster": "trimtab.machines.diagnose.findings:WaitCause",
    "What is wrong with a rollout pool": "trimtab.machines.diagnose.rollout_findings:RolloutIssue",
}
SETTINGS = {
    "Pools": "trimtab.model.pool:PoolSpec",
    "Tasks": "trimtab.model.pool:TaskSpec",
    "Preemption": "trimtab.model.pool:PreemptionPolicy",
    "Controller": "trimtab.runtime.controller.rpc:ControllerSettings",
    "Nodes": "trimtab.model.nodes:NodePolicy",
    "Elastic groups": "trimtab.model.nodes:ElasticSpec",
    "Scaling of rollout workers": "trimtab.model.elastic_config:ElasticConfig",
    "Rollout pools": "trimtab.model.rollout:RolloutRules",
    "Gateway": "trimtab.runtime.gateway.settings:GatewaySettings",
    "Re-planning": "trimtab.model.run:ReplanRules",
}
FIELD = re.compile(r"^ {4}(\w+)(?:: [^#\n]*?| = [^#\n]*?)(?:  # (.*))?$", re.MULTILINE)
SECTION = re.compile(r"^ {4}# (.+)\n((?: {4}\w+ = .*\n)+)", re.MULTILINE)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _comments(kind: Any) -> dict[str, str]:
    return {name: comment for name, comment in FIELD.findall(inspect.getsource(kind)) if comment}


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _table(heads: tuple[str, ...], rows: Iterator[tuple[object, ...]] | list[tuple[object, ...]]) -> Iterator[str]:
    yield ""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"
    yield ""


def reasons() -> Iterator[str]:
    for title, name in REASONS.items():
        kind: type[enum.Enum] = _named(name)
        comments = _comments(kind)
        groups = dict(re.findall(r"^ {4}# (.+)\n {4}(\w+) = ", inspect.getsource(kind), re.MULTILINE))
        begins = {member: group for group, member in groups.items()}
        yield f"## {title}"
        rows: list[tuple[object, ...]] = []
        for member in kind:
            if member.name in begins and rows:
                yield from _table(("code", "meaning"), rows)
                rows = []
            if member.name in begins:
                yield f"### {begins[member.name].capitalize()}"
            rows.append((f"`{member.value}`", comments.get(member.name, "")))
        yield from _table(("code", "meaning"), rows)


def settings() -> Iterator[str]:
    from trimtab.core.numbers import ranges_of

    for title, name in SETTINGS.items():
        kind = _named(name)
        comments, ranges = _comments(kind), ranges_of(kind)
        yield f"## {title}\n\n`{kind.__name__}`: {(inspect.getdoc(kind) or '').splitlines()[0]}"
        rows = []
        for field in dataclasses.fields(kind):
            default = "" if field.default is dataclasses.MISSING else f"`{_default(field.default)}`"
            if field.default_factory is not dataclasses.MISSING:
                default = f"`{_default(field.default_factory())}`"
            limits = ranges.get(field.name)
            allowed = str(limits) if limits else f"`{field.type}`"
            rows.append((f"`{field.name}`", default or "required", allowed, comments.get(field.name, "")))
        yield from _table(("field", "default", "range or type", ""), rows)


def _default(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else '""' if value == "" else value


def metrics() -> Iterator[str]:
    from trimtab.runtime.controller import metrics as of_controller

    yield "## Controller\n\nThe label `controller` is added to all."
    rows = [
        (f"`{m.exported}`", m.kind, ", ".join(m.labels), m.meaning)
        for m in (*of_controller.METRICS, *of_controller.NODE_METRICS)
    ]
    yield from _table(("metric", "kind", "labels", "meaning"), rows)
    source = inspect.getsource(importlib.import_module("trimtab.runtime.gateway.metrics"))
    prefix = _named("trimtab.runtime.gateway.metrics:PREFIX")
    found = re.findall(
        r"(Counter|Histogram|Gauge)(?:MetricFamily)?\(\s*f\"\{PREFIX\}(\w+)\",\s*\"([^\"]+)\"(?:,\s*(?:labels=)?\(([^)]*)\))?",
        source,
    )
    yield "## Gateway"
    yield from _table(
        ("metric", "kind", "labels", "meaning"),
        [
            (f"`{prefix}{n}{'_total' if k == 'Counter' else ''}`", k.lower(), labels.replace('"', "").rstrip(","), what)
            for k, n, what, labels in found
        ],
    )


def cli() -> Iterator[str]:
    from typer.main import get_command

    from trimtab.cli.app import app

    yield from _command(get_command(app), "trimtab")


def _command(command: Any, path: str) -> Iterator[str]:
    nested = getattr(command, "commands", None)
    text = re.sub(r"\[/?(?:bold|dim|italic|cyan|green|yellow|red)\]", "", inspect.cleandoc(command.help or ""))
    first, _, rest = text.partition("\n")
    yield f"{'##' if path.count(' ') <= 1 else '###'} {path}\n\n{first}\n"
    if rest.strip():
        yield "```text"
        yield re.sub(r"\n{2,}", "\n", rest.replace("\b", "")).strip()
        yield "```"
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name in ("help", "install_completion", "show_completion"):
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default if isinstance(parameter.default, str | int | float) else ""
        default = "" if isinstance(default, bool) or default == "" else f"Default: {_default(default)}."
        kind = parameter.metavar or parameter.name.upper() if parameter.param_type_name == "argument" else names
        rows.append((f"`{kind}`", f"{getattr(parameter, 'help', '') or ''} {default}".strip()))
    if rows:
        yield from _table(("", ""), rows)
    for name, child in (nested or {}).items():
        if not child.hidden:
            yield from _command(child, f"{path} {name}")


def job_file() -> Iterator[str]:
    from trimtab.cli.schema import SchemaKind, schema

    for kind in SchemaKind:
        with tempfile.TemporaryDirectory() as folder:
            schema(kind, Path(folder, "schema.json"))
            data = json.loads(Path(folder, "schema.json").read_text(encoding="utf-8"))
        yield f"## {kind.value.capitalize()} files"
        for name, section in data["$defs"].items():
            if "properties" not in section:
                continue
            yield f"### {name}\n\n{section.get('description', '')}"
            required = section.get("required", ())
            yield from _table(
                ("key", "type", "default", ""),
                [
                    (
                        f"`{key}`",
                        _type(value),
                        "required"
                        if key in required
                        else f"`{_default(value['default'])}`"
                        if "default" in value
                        else "",
                        value.get("description", ""),
                    )
                    for key, value in section["properties"].items()
                ],
            )


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    for key in ("anyOf", "oneOf"):
        if key in value:
            return " or ".join(dict.fromkeys(_type(kind) for kind in value[key]))
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    kind = value.get("type", "")
    if kind == "array":
        return f"list of {_type(value.get('items', {}))}".strip()
    low, high = value.get("minimum", value.get("exclusiveMinimum")), value.get("maximum")
    return f"{kind} {low:,} to {high:,}" if low is not None and high is not None else str(kind)


def api() -> Iterator[str]:
    for package in ("trimtab", "trimtab.rollout"):
        module = importlib.import_module(package)
        yield f"## {package}\n\n{inspect.getdoc(module)}\n"
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"::: {found.__module__}.{found.__qualname__}\n    options: {{heading_level: 3}}\n"
    yield "## trimtab.profile\n\n::: trimtab.profile\n    options: {heading_level: 3, show_root_heading: false}\n"
    package = importlib.import_module("trimtab.integrations")
    yield f"## trimtab.integrations\n\n{inspect.getdoc(package)}\n"
    for info in pkgutil.iter_modules(package.__path__):
        yield f"::: trimtab.integrations.{info.name}\n    options: {{heading_level: 3}}\n"


PAGES = {"cli": cli, "job-file": job_file, "settings": settings, "metrics": metrics, "reasons": reasons, "api": api}


LINK = re.compile(r"\]\(([^)#\s:]+)")


def _linked(source: Path) -> Iterator[tuple[str, Path]]:
    """Links of a page that lead to a file outside docs/: as written, and the file."""
    for target in LINK.findall(re.sub(r"```.*?```", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)):
        path = Path(os.path.normpath(source.parent / target))
        path = path / "README.md" if path.is_dir() else path
        if path.is_file() and not (FILES in source.parents and FILES in path.parents):
            yield target, path


def _site_path(path: Path) -> str:
    inside = path.is_relative_to(FILES)
    return path.relative_to(FILES).as_posix() if inside else "files/" + path.relative_to(ROOT).as_posix()


def on_files(files: Any, config: Any) -> Any:
    """Adds the files of the repository that pages link to, and those that these link to."""
    from mkdocs.structure.files import File

    waiting = [Path(file.abs_src_path) for file in files if file.src_uri.endswith(".md")]
    while waiting:
        for _, path in _linked(waiting.pop()):
            uri = _site_path(path)
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
                waiting += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills the generated parts of a page; links to files of the repository lead to their copies."""
    markdown = re.sub(r"<!-- generated: (\S+) -->", lambda found: "\n".join(PAGES[found[1]]()), markdown)
    here = os.path.dirname(page.file.src_uri)
    for target, path in dict(_linked(Path(page.file.abs_src_path))).items():
        markdown = markdown.replace(f"]({target}", f"]({os.path.relpath(_site_path(path), here or '.')}")
    return markdown
