"""Generation engines as members of an elastic group, as examples/auto_scaling has them, with real llama.cpp servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from generator_group import EXAMPLES, follow, tiny_command


def test_generators_answer_every_prompt_alike_while_nodes_join_leave_and_an_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "auto_scaling"))
    from generators import Generator

    follow(tiny_command(tmp_path / "tiny.gguf"), str(tmp_path / "tiny.gguf"), Generator)
