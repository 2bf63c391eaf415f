"""Modules of the pages, joined into one script."""

from __future__ import annotations

import re

import pytest

from trimtab.render.html.kit import assets


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    texts: dict[str, str] = {}
    monkeypatch.setattr(assets, "asset", lambda name: texts[name.removeprefix("js/").removesuffix(".mjs")])
    assets.script.cache_clear()
    return texts


def test_a_module_comes_once_and_after_what_it_imports(modules: dict[str, str]) -> None:
    modules["page"] = 'import {a} from "./left.mjs";\nimport {b} from "./right.mjs";\na(b);\n'
    modules["left"] = 'import {c} from "./base.mjs";\nexport const a = (x) => c + x;\n'
    modules["right"] = 'import {c} from "./base.mjs";\nexport function* b() { yield c; }\n'
    modules["base"] = "/* Says nothing in a page. */\nexport const c = 1, D = 2;\nconst hidden = 3;\n"
    made = assets.script("page")
    assert re.findall(r"const (\w+)_module", made) == ["base", "left", "right", "page"]
    assert re.findall(r"return \{(.*?)\};\n\}\)", made) == ["c, D", "a", "b", ""]
    assert "import" not in made
    assert "export" not in made
    assert "Says nothing" not in made


@pytest.mark.parametrize("name", ["copy", "run_report", "dashboard"])
def test_the_scripts_of_the_pages_hold_no_import_and_no_other_address(name: str) -> None:
    assets.script.cache_clear()
    made = assets.script(name)
    assert not re.search(r"^\s*(import|export)\b", made, re.MULTILINE)
    assert "http" not in made
