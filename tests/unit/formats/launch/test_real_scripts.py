"""Scripts in the forms of public ones, with their values (tests/data/real): read as bash gives them to the trainer."""

from pathlib import Path

import pytest
import yaml

from trimtab.formats.launch.read import composed, evaluated, trainers

REAL = Path(__file__).parents[3] / "data" / "real"
EXPECTED = {path.parent.name: yaml.safe_load(path.read_text()) for path in sorted(REAL.glob("*/expected.yaml"))}
SCRIPTS = [(folder, name) for folder, scripts in EXPECTED.items() for name in scripts]


def test_there_are_twenty_of_each_framework() -> None:
    assert {"verl", "verl-recipe", "nemo-rl", "openrlhf"} <= set(EXPECTED)
    for folder, scripts in EXPECTED.items():
        assert len(scripts) >= 20, folder
        assert sorted(scripts) == sorted(path.name for path in (REAL / folder).glob("*.sh"))


@pytest.mark.parametrize(("folder", "name"), SCRIPTS)
def test_a_real_script_is_read_right(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REAL / folder)
    shell, _ = evaluated(Path(name), ())
    (trainer,) = trainers(shell)
    assert trainer.framework.NAME.replace("_", "-") == folder.replace("verl-recipe", "verl")
    reader = composed(trainer, ()).reader
    expected = EXPECTED[folder][name]
    assert {key: reader.get(key) for key in expected} == expected
