"""Configs that the frameworks publish with their hardware are not alarmed at.

FRAMEWORKS_DIR names a folder with a checkout `nemo-rl`, whose recipes name nodes and GPUs in their file names: eight of
a node are H100-80, four are GB200. A recipe whose model is not in the table of models is not counted.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from trimtab.core.errors import TrimtabError
from trimtab.formats import check_settings
from trimtab.plan.check.check import check

pytestmark = pytest.mark.frameworks

CHECKOUTS = os.environ.get("FRAMEWORKS_DIR", "")
TRAINS = re.compile(r"(grpo|dapo|ppo|prorl|gspo|gdpo)")
AT_LEAST, ALARMS = 100, 3


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
