"""Configs that the frameworks publish with their hardware are not alarmed at.

FRAMEWORKS_DIR names a folder with a checkout `nemo-rl`, whose recipes name nodes and GPUs in their file names: eight of
a node are H100-80, four are GB200. A recipe whose model is not in the table of models is not counted. Scripts of
`verl`, `verl-recipe` and `openrlhf` do not name their GPUs: the first of 80, 141 and 192 GB without alarms is taken.
Of the other frameworks sizes and options are checked, for which GPUs need not be stated; memory only warns.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.core.errors import TrimtabError
from trimtab.formats import catalogue, check_settings
from trimtab.plan.check.check import check

pytestmark = pytest.mark.frameworks

CHECKOUTS = os.environ.get("FRAMEWORKS_DIR", "")
TRAINS = re.compile(r"(grpo|dapo|ppo|prorl|gspo|gdpo)")
AT_LEAST, ALARMS = 100, 3
KINDS = ("h100", "h200", "b200")
IN_PART = ("areal", "prime-rl", "rlinf", "roll", "skyrl", "slime")
ELSEWHERE = re.compile(r"/(tests?|docker|ci|\.github)/")
LONGEST_FILE = 60_000
REFUSED_BY_CODE = {"batched-tokens", "experts", "micro-batch-tokens", "options"}
"""Rules that the frameworks' and engines' own code checks: a script that breaks them cannot start."""


def test_published_recipes_are_not_alarmed_at(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(CHECKOUTS) / "nemo-rl" / "examples" / "configs" / "recipes"
    if not CHECKOUTS or not root.is_dir():
        pytest.skip("FRAMEWORKS_DIR names no folder with a checkout nemo-rl")
    seen, rules = Counter[str](), Counter[str]()
    lines = []
    for file in sorted(root.rglob("*.yaml")):
        if not TRAINS.match(file.name):
            continue
        gpu = "gb200" if re.search(r"n4g|gb200", file.name) else "h100"
        try:
            setup = check_settings.read(file, [], {"gpu": gpu})
        except TrimtabError as error:
            seen["refused"] += 1
            lines.append(f"{file.name}: refused: {error.what}")
            continue
        answer = check(setup, check_settings.exclusions())
        counted = "checked" if setup.model else "model not known"
        seen[counted] += 1
        seen[f"{counted}, alarmed"] += bool(answer.errors)
        seen[f"{counted}, warned"] += bool(answer.findings) and not answer.errors
        rules.update(f"{finding.severity} {finding.rule}" for finding in answer.findings)
        lines += [f"{file.name}: {finding.what}" for finding in answer.errors]
    with capsys.disabled():
        print("\n" + "\n".join([*lines, *(f"{name:28} {count:4}" for name, count in [*seen.items(), *rules.items()])]))
    assert seen["checked"] >= AT_LEAST
    assert seen["checked, alarmed"] + seen["model not known, alarmed"] <= ALARMS


@pytest.mark.parametrize("scripts", ["verl/examples", "verl-recipe", "openrlhf/examples"])
def test_scripts_are_alarmed_at_only_by_what_code_refuses(scripts: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(CHECKOUTS) / scripts
    if not CHECKOUTS or not root.is_dir():
        pytest.skip(f"FRAMEWORKS_DIR names no folder with {scripts}")
    seen, lines, wrong = Counter[str](), [], 0
    for file in sorted(root.rglob("*.sh")):
        try:
            setup = check_settings.read(file, [], {"gpu": KINDS[0]})
        except TrimtabError:
            seen["refused"] += 1
            continue
        if setup.model is None:
            seen["model not known"] += 1
            continue
        seen["checked"] += 1
        for kind in KINDS:
            gpu = catalogue.gpu(kind)
            errors = check(replace(setup, gpu=gpu, host_memory=gpu.host_memory_gb), check_settings.exclusions()).errors
            if not errors:
                break
            seen[f"alarmed on {kind}"] += 1
        else:
            lines += [f"{file.relative_to(root)}: {finding.rule}: {finding.what}" for finding in errors]
            wrong += not {finding.rule for finding in errors} & REFUSED_BY_CODE
    with capsys.disabled():
        print("\n" + "\n".join([*lines, *(f"{scripts} {name:20} {count:4}" for name, count in seen.items())]))
    assert wrong <= ALARMS


def test_configs_that_are_read_in_part_are_not_alarmed_at(capsys: pytest.CaptureFixture[str]) -> None:
    roots = [root for name in IN_PART if CHECKOUTS and (root := Path(CHECKOUTS) / name).is_dir()]
    if not roots:
        pytest.skip(f"FRAMEWORKS_DIR names no folder with one of {', '.join(IN_PART)}")
    seen, lines = Counter[str](), []
    for file in sorted(file for root in roots for kind in ("sh", "yaml", "toml") for file in root.rglob(f"*.{kind}")):
        name = file.relative_to(CHECKOUTS).parts[0]
        if ELSEWHERE.search(str(file)) or not file.is_file() or file.stat().st_size > LONGEST_FILE:
            continue
        try:
            setup = check_settings.read(file, [], {"gpu": KINDS[0]})
        except TrimtabError:
            continue
        if not setup.in_part:  # of a framework that is read in full
            continue
        seen[f"{name}, checked" if setup.model else f"{name}, model not known"] += 1
        errors = check(setup, check_settings.exclusions()).errors
        lines += [f"{file.relative_to(CHECKOUTS)}: {finding.rule}: {finding.what}" for finding in errors]
    with capsys.disabled():
        print("\n" + "\n".join([*lines, *(f"{name:28} {count:4}" for name, count in sorted(seen.items()))]))
    assert sum(count for name, count in seen.items() if "checked" in name) >= AT_LEAST or len(roots) < len(IN_PART)
    assert len(lines) <= ALARMS
