"""Figures of the package: modules, lines, class names defined twice, long files, crowded folders.

`python tools/house.py` prints them and fails if one is above its limit in `tools/house_limits.json`. Limits only fall:
`--accept` lowers them to the figures of now, `--list` names the offenders. Every test named in `tools/test_map.csv`
(where each test went, or which test replaces it) must exist. `lint-imports` checks the import layers.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trimtab"
LIMITS = Path(__file__).with_name("house_limits.json")
TEST_MAP = Path(__file__).with_name("test_map.csv")
LONG_FILE, CROWDED_FOLDER = 600, 20


def main(arguments: list[str]) -> int:
    """Print the figures; 1 where one is above its limit."""
    modules = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    long_files = [(path, lines) for path, text in modules.items() if (lines := len(text.splitlines())) > LONG_FILE]
    crowded = [(folder, count) for folder, count in _folders(modules).items() if count > CROWDED_FOLDER]
    twice = {name: places for name, places in _classes(modules).items() if len(places) > 1}
    figures = {
        "modules": len(modules),
        "lines": sum(len(text.splitlines()) for text in modules.values()),
        "code_lines": sum(_code_lines(text) for text in modules.values()),
        "public_class_names_defined_twice": len(twice),
        f"files_over_{LONG_FILE}_lines": len(long_files),
        f"folders_over_{CROWDED_FOLDER}_modules": len(crowded),
    }
    limits: dict[str, int] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    for name, figure in figures.items():
        print(f"{name:36} {figure:7,}" + (f"  (at most {limits[name]:,})" if name in limits else ""))
    if "--list" in arguments:
        _list(twice, long_files, crowded)
    if "--accept" in arguments:
        lowered = {name: min(limit, figures[name]) for name, limit in limits.items()}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n")
        return 0
    above = [name for name, limit in limits.items() if figures[name] > limit]
    for name in above:
        print(f"{name} has grown to {figures[name]:,}, above its limit of {limits[name]:,}; --list names them")
    missing = _missing_tests()
    for name in missing:
        print(f"{TEST_MAP.name} names {name}, which does not exist")
    return 1 if above or missing else 0


def _missing_tests() -> list[str]:
    """Tests named as the successor of another test that are not there."""
    with TEST_MAP.open(newline="") as file:
        wanted = {row["now"] for row in csv.DictReader(file)}
    there: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= {f"{path.relative_to(ROOT)}::{name}" for name in _tests(ast.parse(path.read_text()).body)}
    return sorted(wanted - there)


def _tests(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}::{name}" for name in _tests(node.body))


def _list(twice: dict[str, list[Path]], long_files: list[tuple[Path, int]], crowded: list[tuple[Path, int]]) -> None:
    for name, places in sorted(twice.items()):
        print(f"  {name}: {', '.join(str(path.relative_to(PACKAGE)) for path in places)}")
    for path, count in [*long_files, *crowded]:
        print(f"  {path.relative_to(PACKAGE)}: {count}")


def _folders(modules: dict[Path, str]) -> Counter[Path]:
    return Counter(path.parent for path in modules if path.name != "__init__.py")


def _classes(modules: dict[Path, str]) -> dict[str, list[Path]]:
    """Public classes at the top of a module, by name."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path, text in modules.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return found


def _code_lines(text: str) -> int:
    """Lines that are neither blank nor only a comment or a docstring."""
    counted = set(_lines_of_tokens(text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                counted -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(counted)


def _lines_of_tokens(text: str) -> Iterator[int]:
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            yield from range(token.start[0], token.end[0] + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
