"""The RLHF demo: it runs in both languages and any size, and its exit status tells whether all it said is true."""

from __future__ import annotations

import contextlib
import re
import string
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.demos import rlhf as rlhf_demo
from trimtab.demos.rlhf import fitting_shares, main, run_demo, texts
from trimtab.runtime.rayapi.connect import RayConnection, connected
from waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "pg_pool_rlhf_full_demo.py"


@pytest.fixture(scope="module")
def small_ray() -> Iterator[Any]:
    with connected(cpus=2) as ray:
        yield ray


def left_in(ray: Any) -> list[str]:
    groups = [one["name"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
    return groups + [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]


@pytest.mark.long
def test_the_example_says_in_chinese_what_the_guide_says() -> None:
    command = [sys.executable, str(EXAMPLE), "--lang", "zh", "--address", "local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for line in (
        "=== 场景 1: Rollout 角色启动（动态 PG） ===",
        "提交 rollout-00: success=True",
        "提交 rollout-01: success=True",
        "=== 场景 2: Reward 角色到达（高优运行） ===",
        "提交 reward-00: success=True",
        "提交 train-00 (PG 优先): success=False",
        "提交 train-00 (传统抢占): success=True",
        "total_preemptions = 1",
        "提交 rollout-extra-00 (传统抢占): success=True",
        "total_preemptions = 2",
        "为什么不是原场景中的 reward-00",
        "跨池抢占开启：urgent-00 运行；被抢占：batch-00 (跨池抢占)",
    ):
        assert line in said, line
    assert not re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", said)  # no sentence is English
    assert "✗" not in said
    assert done.stderr == ""


@pytest.mark.long
def test_it_shrinks_to_a_small_cluster_and_leaves_nothing_there(small_ray: Any) -> None:
    said: list[str] = []
    assert run_demo("en", say=said.append) == 0
    text = "\n".join(said)
    assert "sizes shrink to 28%" in text
    assert "a warm host cannot honour these Ray options: name" in text  # both kinds of actors are shown
    assert "runs in a warm host" in text or "runs in a host" in text
    assert "rollout-00 has the 3 steps it had done before" in text
    assert left_in(small_ray) == []


@pytest.mark.long
def test_its_exit_status_tells_that_something_did_not_happen(
    small_ray: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = rlhf_demo._Demo
    monkeypatch.setattr(demo, "one_pool", lambda self: self._statistics("after_train", preemptions=1))
    monkeypatch.setattr(demo, "two_pools", lambda self: None)
    assert main([]) == rlhf_demo.NOT_DONE
    said = capsys.readouterr().out
    assert "✗ total_preemptions = 0" in said
    assert "1 checks failed" in said


@pytest.mark.long
def test_it_cleans_up_after_ctrl_c(small_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> None:
        assert self._scheduler.submit(**self._task("rollout-00", rlhf_demo.ROLLOUT))["success"]
        raise KeyboardInterrupt

    monkeypatch.setattr(rlhf_demo._Demo, "one_pool", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["--lang", "zh"])
    assert ended.value.code == 130
    assert left_in(small_ray) == []


def test_what_cannot_be_reached_is_said_in_a_line(small_ray: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small_ray.shutdown()
    with pytest.raises(SystemExit) as ended:
        main(["--address", "127.0.0.1:1"])
    assert ended.value.code == 4
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().err


def test_sizes_are_full_where_they_fit_and_shrink_in_proportion() -> None:
    def node(cpu: float, memory: float = 100_000.0) -> dict[str, float]:
        return {"cpu": cpu, "memory": memory}

    assert fitting_shares([node(8)]) == (1.0, 1.0)
    assert fitting_shares([node(7, 6144.0)]) == (1.0, 1.0)
    assert fitting_shares([node(3.5)]) == (0.5, 1.0)
    assert fitting_shares([node(64, 3072.0)]) == (1.0, 0.5)
    assert fitting_shares([node(2), node(2), node(2), node(2)]) == (1.0, 1.0)
    cpu, memory = fitting_shares([node(1)] * 8)  # enough in all, but no node takes two
    assert 0.4 < cpu <= 0.5
    assert memory == 1.0


def test_a_cluster_without_room_is_told_so() -> None:
    with pytest.raises(InfeasibleError, match="too little free"):
        fitting_shares([{"cpu": 0.05, "memory": 4096.0}])
    with pytest.raises(InfeasibleError, match="no node"):
        fitting_shares([])


def test_both_languages_say_the_same_things() -> None:
    def values(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    for key, text in texts().items():
        if key != "reasons":
            assert values(text["zh"]) <= values(text["en"]) | {"kind", "address"}, key
            assert values(text["en"]) - values(text["zh"]) <= {"how", "reason"}, key


def test_ray_s_dashboard_is_started_where_it_is_asked_for_and_its_absence_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(RayConnection("local", cpus=1, dashboard=True)) as link:
        assert link.dashboard_url
        until(lambda: b"<title>" in fetched(link.dashboard_url or ""))
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    with pytest.raises(InputError, match=r"Ray's dashboard needs .*, which is missing") as refused:
        RayConnection("local", dashboard=True)
    assert refused.value.hint == "pip install 'ray[default]'"


def fetched(url: str) -> bytes:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())
    return b""
