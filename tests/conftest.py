"""One browser for each file of tests that looks at pages, and an order of files that suits two cores.

Without chromium such tests fail. A file runs in one process from its beginning to its end, and the longest begin first,
so that none of them is left alone at the end.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from playwright.sync_api import Browser, sync_playwright

from faults import Faults
from lean_ray import make_lean
from pages import ARGUMENTS

# Files that have a Ray of their own, the longest first. They mostly wait, so one of them runs beside two that compute.
ON_RAY = (
    "test_run_kills.py",
    "test_controller.py",
    "test_pool_storm.py",
    "test_members.py",
    "test_cluster.py",
    "test_elastic.py",
    "test_docs.py",
    "test_run_engines.py",
    "test_dashboard_live.py",
    "test_run_commands.py",
    "test_rollout_slots.py",
    "test_cluster_workflows.py",
    "test_nodes.py",
    "test_environments.py",
    "test_nested_actors.py",
    "test_pool_faults.py",
    "test_run_cluster.py",
    "test_integrations_verl.py",
    "test_integrations_loop.py",
    "test_simple_scheduler.py",
    "test_dashboard_cluster.py",
    "test_advise_cluster.py",
    "test_why_cluster.py",
    "test_leases.py",
    "test_pipeline_run.py",
    "test_hook.py",
    "test_rlhf_demo.py",
    "test_pool_commands.py",
    "test_members_nodes.py",
    "test_replay_live.py",
    "test_metrics.py",
    "test_exports.py",
    "test_engines_actor.py",
    "test_roles.py",
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whoever starts us in the background has Ctrl-C ignored, and so would every child that a test sends it to.
    signal.signal(signal.SIGINT, signal.default_int_handler)

make_lean()

hypothesis.settings.register_profile("trimtab", deadline=None)  # a crowded machine is no failure
hypothesis.settings.load_profile("trimtab")
# What hypothesis draws depends on the test alone, not on the constants of every module imported so far.
assert callable(providers._get_local_constants)
providers._get_local_constants = providers.Constants  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = list(dict.fromkeys(item.path.name for item in items))
    others = [name for name in names if name not in ON_RAY]
    places = {name: 3.0 * at for at, name in enumerate(ON_RAY)} | {name: 1.5 * at + 1 for at, name in enumerate(others)}
    items.sort(key=lambda item: places[item.path.name])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_...` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its counts of faults to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["faults"] = [(one.where, dict(one.counts)) for one in Faults.everywhere]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    for where, counts in getattr(node, "workeroutput", {}).get("faults", ()):
        Faults(where).take(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which faults were put in, by test and kind, and how many in all."""
    for faults in Faults.everywhere:
        terminalreporter.write_line(str(faults))
    if Faults.everywhere:
        terminalreporter.write_line(f"faults in all: {sum(one.total for one in Faults.everywhere):,}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "no chromium here; run tools/install-browser"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()
