"""Gateways of one process, and of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway_scenes import PROCESSES


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    token = PROCESSES.set(request.param)
    yield request.param
    PROCESSES.reset(token)
