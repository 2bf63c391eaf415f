"""Real engines have their own command (make test-engines): elsewhere these tests are left out."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "engines: needs vLLM and SGLang in environments of their own (make test-engines)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr.strip() == "engines":
        return
    here = Path(__file__).parent
    left_out = [item for item in items if here in item.path.parents]
    items[:] = [item for item in items if here not in item.path.parents]
    config.hook.pytest_deselected(items=left_out)
