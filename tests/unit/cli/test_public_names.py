"""What user code imports: `trimtab`, `trimtab.rollout` and `trimtab.integrations`, and interfaces of other tools."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimtab
import trimtab.integrations
import trimtab.rollout

ROOT = Path(__file__).parents[3]
PUBLIC = {"trimtab": trimtab, "trimtab.rollout": trimtab.rollout, "trimtab.integrations": trimtab.integrations}
OTHERS = ("trimtab.compat", "trimtab.integrations")  # with what is below them
SHIMS = {"pg_pool_rlhf_full_demo.py", "training_loop_with_autoscaling.py"}  # names of documents; demos of the package


def python_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def sources() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "examples").rglob("*.py"):
        if path.name not in SHIMS:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")):
        if "```python" in page.read_text(encoding="utf-8"):
            yield str(page.relative_to(ROOT)), python_of(page)


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Modules of trimtab and the names that are taken from them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "trimtab")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trimtab":
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize(("name", "text"), list(sources()), ids=lambda value: value if "\n" not in value else "")
def test_examples_and_docs_import_public_names_alone(name: str, text: str) -> None:
    for module, what in imported(text):
        if module.startswith(tuple(f"{other}." for other in OTHERS)) or module == "trimtab.compat":
            continue
        assert module in PUBLIC, f"{name} imports {module}"
        assert not what or what in PUBLIC[module].__all__, f"{name}: {what} is not in {module}.__all__"


def test_job_files_of_examples_and_demos_name_public_components() -> None:
    found = []
    for folder in (ROOT / "examples", ROOT / "src" / "trimtab" / "demos", ROOT / "src" / "trimtab" / "examples"):
        for path in folder.rglob("*.yaml"):
            found += re.findall(r"\buse: *(trimtab[\w.]*):(\w+)", path.read_text(encoding="utf-8"))
    assert found
    for module, what in found:
        assert what in PUBLIC[module].__all__


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there(module: str) -> None:
    for name in PUBLIC[module].__all__:
        assert getattr(PUBLIC[module], name) is not None


def test_importing_trimtab_imports_nothing_else() -> None:
    code = "import sys, trimtab; print([n for n in sys.modules if n.startswith('trimtab') or n in ('numpy', 'ray')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['trimtab']"
