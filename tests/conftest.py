"""One browser for each file of tests that looks at pages, and an order of files that suits two cores.

Without chromium such tests fail. A file runs on one core from its beginning to its end: a long one that begins last
leaves the other core idle, and two that start clusters all the time are in each other's way.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from pages import ARGUMENTS

FIRST = "test_pool_storm.py"  # minutes on one core, beside all that needs no cluster
LAST = (  # these need one, and are kept off the storm; the longest begin first
    "test_run_kills.py",
    "test_cluster.py",
    "test_elastic.py",
    "test_run_engines.py",
    "test_dashboard_live.py",
    "test_run_commands.py",
    "test_rollout_slots.py",
    "test_run_cluster.py",
    "test_integrations_verl.py",
    "test_integrations_loop.py",
    "test_nested_actors.py",
    "test_environments.py",
    "test_controller.py",
    "test_members.py",
    "test_dashboard_cluster.py",
    "test_advise_cluster.py",
    "test_why_cluster.py",
    "test_nodes.py",
    "test_cluster_workflows.py",
    "test_docs.py",
    "test_simple_scheduler.py",
    "test_pipeline_run.py",
    "test_hook.py",
    "test_rlhf_demo.py",
    "test_pool_commands.py",
    "test_members_nodes.py",
    "test_replay_live.py",
    "test_metrics.py",
    "test_exports.py",
    "test_engines_actor.py",
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whoever starts us in the background has Ctrl-C ignored, and so would every child that a test sends it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {FIRST: -1, **{name: 1 + at for at, name in enumerate(LAST)}}
    items.sort(key=lambda item: places.get(item.path.name, 0))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "no chromium here; run tools/install-browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()
