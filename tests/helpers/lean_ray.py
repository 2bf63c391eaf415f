"""A Ray without the parts that no test needs, for Rays that a test starts in its own process, and quiet agents for all.

A test on a real Ray spends more CPU on Ray's helpers than on what is tested: the log monitor, the API server that is
started for usage statistics even without a dashboard, and agents that read /proc every 2.5 s.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from waiting import GUARD_S

QUIET = {
    "RAY_prestart_worker_first_driver": "0",  # a worker process costs half a second of CPU
    "RAY_worker_niceness": "0",  # 15 by default: beside busy processes a worker then needs a minute to start
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_agent_register_timeout_ms": "180000",  # 15 s by default, then the raylet ends: agents import for longer there
    "RAY_USAGE_STATS_ENABLED": "0",
}


def make_lean() -> None:
    """For this process and all that it starts."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from ray._private import services
        from ray._private.node import Node
        from ray._private.parameter import RayParams
    except ImportError:  # environments of engines have none
        return
    fill, serve = RayParams.update_if_absent, Node.start_api_server

    def update_if_absent(self: Any, **settings: Any) -> None:
        fill(self, **(settings | ({"include_log_monitor": False} if "include_log_monitor" in settings else {})))

    def start_api_server(self: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard is False:
            self._webui_url = None
        else:
            serve(self, include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)

    def get_node(*arguments: Any) -> Any:
        """As Ray's, but for the raylet of a starting node, which Ray gives 30 s to register."""
        end = time.monotonic() + GUARD_S
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                return look(*arguments)
            time.sleep(0.1)
        return look(*arguments)

    look, services.get_node = services.get_node, get_node
    RayParams.update_if_absent, Node.start_api_server = update_if_absent, start_api_server
