"""Values that never change: equal ones have one hash; messages refuse assignments in the development mode alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.rollout import RolloutRules

ASSIGNS = "from trimtab.core.reasons import Reason\nReason('a', 'b').code = 'c'"


def test_equal_values_are_one_in_a_set() -> None:
    assert len({Reason(ReasonCode.queued, "it arrived"), Reason(ReasonCode.queued, "it arrived")}) == 1


def test_settings_refuse_an_assignment() -> None:
    with pytest.raises(FrozenInstanceError):
        RolloutRules().resume_every = 1  # type: ignore[misc]


def test_the_development_mode_refuses_an_assignment() -> None:
    ran = subprocess.run([sys.executable, "-X", "dev", "-c", ASSIGNS], capture_output=True, text=True, check=False)
    assert "FrozenInstanceError" in ran.stderr
