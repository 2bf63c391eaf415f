"""Files of `assets`, and scripts made of the modules in `assets/js`.

A page is one file, so the modules that a script imports are joined into it: each becomes a function of its own scope,
after those that it imports. Modules import by name (`import {a, b} from "./c.mjs"`) and export declarations.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.mjs";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|class|function\*?) (\w+)([^\n]*))", re.MULTILINE)
_COMMENT = re.compile(r"^[ ]*/\*(?:(?!\*/).)*\*/\n", re.MULTILINE | re.DOTALL)


@cache
def asset(name: str) -> str:
    """The text of a file in `assets`."""
    return resources.files("trimtab.render.html").joinpath(f"assets/{name}").read_text(encoding="utf-8")


@cache
def script(name: str) -> str:
    """A module and those that it imports, as one script without comments that are lines of their own."""
    made: dict[str, str] = {}
    _join(name, made)
    return f'(() => {{\n"use strict";\n{"".join(made.values())}}})();\n'


def _join(name: str, made: dict[str, str]) -> None:
    text = _COMMENT.sub("", asset(f"js/{name}.mjs"))
    for _, needed in _IMPORT.findall(text):
        if needed not in made:
            _join(needed, made)
    exported = []
    for _, first, more in _EXPORT.findall(text):
        exported += [first, *re.findall(r", ([A-Z_]+) = ", more)]
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const {\1} = \2_module;\n", text)).strip()
    made[name] = f"const {name}_module = (() => {{\n{body}\nreturn {{{', '.join(exported)}}};\n}})();\n"
