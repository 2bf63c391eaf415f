"""YAML files of the checkouts are the same data from the fast loader of these tests as from OmegaConf's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SLOW_LOADER, FastLoader

pytestmark = pytest.mark.frameworks

EVERY = 40


def data_of(text: str, loader: Any) -> Any:
    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        return type(error)


def test_the_loader_in_c_reads_what_omegaconfs_reads() -> None:
    root = Path(os.environ.get("FRAMEWORKS_DIR", ""))
    files = sorted(root.rglob("*.yaml"))[::EVERY] if os.environ.get("FRAMEWORKS_DIR") else []
    if not files:
        pytest.skip("FRAMEWORKS_DIR is not set: it names a folder with checkouts of the frameworks")
    for file in files:
        text = file.read_text()
        assert repr(data_of(text, FastLoader)) == repr(data_of(text, SLOW_LOADER)), file
