"""Beside pyproject.toml: a wheel has a copy of examples/grpo, which `trimtab demo` runs where there is no checkout."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithExamples(build_py):  # noqa: D101
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib, "trimtab", "demos", "checkout", "examples", "grpo")
            shutil.copytree("examples/grpo", copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithExamples})
