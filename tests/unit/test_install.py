"""A wheel of the checkout, installed into an empty environment: the planners work there, with no checkout around."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """
cluster: {nodes: 2, gpus_per_node: 8}
workflow:
  batches: 512
  components:
    rollout: {seconds: {16: 59.9}}
    trainer: {seconds: {16: 95.7}, after: [rollout], granularity: 128}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "examples" / "grpo", folder / "examples" / "grpo")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w"]
    subprocess.run([*command, str(folder / "dist"), str(folder)], check=True, timeout=300)
    return next((folder / "dist").glob("trimtab-*.whl"))


class Installed:
    """An environment with the wheel alone, used from a folder outside the checkout."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        venv.create(folder / "env", with_pip=True)
        self.bin, self.folder = folder / "env" / "bin", folder
        install = [str(ROOT / "tools" / "install-packages"), str(self.bin / "python"), "-c", "constraints.txt"]
        subprocess.run([*install, f"trimtab{extra} @ {wheel.as_uri()}"], cwd=ROOT, check=True, timeout=600)

    def __call__(self, program: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "RAY"))}
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder,
            env={**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("empty"), wheel)


def test_the_package_is_that_of_the_wheel_with_all_its_files(installed: Installed) -> None:
    done = installed("python", "-c", "import trimtab; print(trimtab.__file__)")
    package = Path(done.stdout.strip()).parent
    assert str(package).startswith(str(installed.folder))
    ours = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "trimtab").rglob("*")}
    kept = {path for path in ours if path.suffix in (".py", ".csv", ".yaml", ".css", ".mjs", ".html", ".json", ".sh")}
    assert sorted(str(path) for path in kept if not (package.parent / path).exists()) == []


def test_it_plans_estimates_and_writes_a_page(installed: Installed) -> None:
    (installed.folder / "job.yaml").write_text(JOB)
    for command, words in (
        (("trimtab", "plan", "job.yaml", "--report", "plan.html"), "proven optimal"),
        (("trimtab", "estimate", "--model", "qwen2.5-7b", "--gpu", "h100", "--mean-tokens", "1700"), "limited by"),
        (("trimtab", "demo", "plan"), "proven optimal"),
        (("sched-pipeline", "--help"), "sched-pipeline"),
    ):
        done = installed(*command)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
    assert "<script>" in (installed.folder / "plan.html").read_text(encoding="utf-8")


def test_what_needs_ray_says_how_to_get_it(installed: Installed) -> None:
    done = installed("trimtab", "demo")
    assert done.returncode == 2
    assert "pip install 'trimtab[ray]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_demo_runs_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    done = Installed(tmp_path, wheel, "[ray]")("trimtab", "demo", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("**/report.html"))
