"""What looks at a cluster for advice is read on after a line that makes no sense."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from trimtab.runtime.advise.samples import ClusterWatch, NodeUtilization


def test_a_line_that_makes_no_sense_is_logged_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = json.dumps([{"name": "n0", "gpus": 2, "free": 1, "draining": False, "busy": [[0, 0.5]]}])
    looker = tmp_path / "looker"
    looker.write_text(f"#!/bin/sh\necho nonsense\necho '{node}'\nexec sleep 600\n")
    looker.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(looker))
        watch = ClusterWatch("somewhere", every_s=1.0)
    try:
        for _ in range(6000):
            if not isinstance(watch.seen(), str):
                break
            time.sleep(0.01)
        assert watch.seen() == (NodeUtilization("n0", 2, 1, False, ((0, 0.5),)),)
        assert "JSONDecodeError" in caplog.text
    finally:
        watch.close()
