"""Every RL config of full checkouts of AReaL and ROLL is read as it is meant; what is written they take themselves.

FRAMEWORKS_DIR names a folder with the checkouts `areal` and `roll`.
"""

from __future__ import annotations

import launch_oracle as oracle
import pytest
from test_corpus import EXTRA, checkout, held, table_of

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    ("name", "title", "cases", "says"),
    [
        ("areal", "AReaL", oracle.areal_cases, oracle.areal_says),
        ("roll", "ROLL", oracle.roll_cases, oracle.roll_says),
    ],
)
def test_configs_are_read_as_they_are_meant(
    name: str, title: str, cases, says, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout(name)
    monkeypatch.setitem(EXTRA, name, ("old_log_prob",))
    counts = table_of(title, cases(root), says, name, monkeypatch)
    with capsys.disabled():
        print(capsys.readouterr().out, end="")
    held(counts)
