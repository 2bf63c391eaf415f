"""The example of generators that scale, with real vLLM servers on CPUs."""

from __future__ import annotations

import shlex

import pytest
from engine_processes import ROOT, vllm_command

from generator_group import EXAMPLES, follow

pytestmark = pytest.mark.engines


def test_vllm_servers_answer_every_prompt_alike_while_nodes_join_leave_and_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "auto_scaling"))
    from generators import Generator

    venv = ROOT / ".venv-engines-vllm"
    assert (venv / ".ready").exists(), "tools/make-engine-envs makes it"
    command, environment = vllm_command(venv, 0)
    command[command.index("--port") + 1] = "{port}"
    settings = [f"{name}={value}" for name, value in environment.items()]
    engine = shlex.join(["env", *settings, *command]).replace("'{port}'", "{port}")
    follow(engine, f"{venv / 'bin' / 'vllm'} serve", Generator)
