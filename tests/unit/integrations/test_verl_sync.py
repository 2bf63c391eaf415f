"""Early sleep in verl's synchronous trainer, against stand-ins with verl's signatures."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trimtab.core.errors import InputError
from trimtab.integrations.verl_sync import EarlySleep, sleep_early

BLOCK = {
    "min_workers": 1,
    "requests_per_worker_capacity": 4,
    "monitoring_interval": 1.0,
    "min_stable_period": 1.0,
    "scale_down_cooldown": 1.0,
    "scale_up_cooldown": 1.0,
    "policy": "threshold",
}


class Call:
    def __init__(self, method: Any) -> None:
        self.remote = method


class Balancer:
    def __init__(self, servers: dict[str, Any]) -> None:
        self.loads = dict.fromkeys(servers, 4)
        self.handles = dict(servers)
        self.get_status = Call(lambda: {"servers": {name: self.loads[name] for name in self.handles}})
        self.remove_servers = Call(lambda server_ids: [self.handles.pop(name) for name in server_ids])
        self.add_servers = Call(lambda servers: self.handles.update(servers))


class Replica:
    def __init__(self, address: str, log: list[str]) -> None:
        self._server_address, self._server_handle, self._log = address, f"handle of {address}", log

    async def sleep(self) -> None:
        self._log.append(self._server_address)


class Trainer:
    """verl's `RayPPOTrainer` with its workers made."""

    def __init__(self, engine: str = "vllm") -> None:
        self.log: list[str] = []
        replicas = [Replica(f"s{at}", self.log) for at in range(3)]
        self.balancer = Balancer({replica._server_address: replica._server_handle for replica in replicas})
        self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=engine)))
        self.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas, global_load_balancer=self.balancer)
        self.checkpoint_manager: Any = SimpleNamespace(
            update_weights=lambda step: self.log.append(f"weights {step}"), sleep_replicas=lambda: None
        )
        self.async_rollout_manager: Any = SimpleNamespace(generate_sequences=lambda prompts: "answers", other=7)
        self.now = 0.0

    def watched(self, block: dict[str, Any]) -> EarlySleep | None:
        return sleep_early(self, block, "0.9.1", get=lambda value: value, clock=lambda: self.now)

    def looks(self, early: EarlySleep, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            early.look()


def test_replicas_that_run_empty_sleep_and_serve_again_after_the_next_weights() -> None:
    trainer = Trainer()
    early = trainer.watched(BLOCK)
    assert early is not None
    trainer.looks(early, 5)
    assert trainer.log == []
    trainer.balancer.loads |= {"s0": 1, "s1": 0, "s2": 0}
    trainer.looks(early, 10)
    assert sorted(trainer.log) == ["s1", "s2"]
    assert set(trainer.balancer.handles) == {"s0"}
    trainer.checkpoint_manager.update_weights(4)
    assert trainer.log[-1] == "weights 4"
    assert trainer.balancer.handles == {f"s{at}": f"handle of s{at}" for at in range(3)}


def test_a_replica_with_a_request_never_sleeps() -> None:
    trainer = Trainer()
    early = trainer.watched(BLOCK)
    assert early is not None
    trainer.balancer.loads = dict.fromkeys(trainer.balancer.loads, 1)
    trainer.looks(early, 10)
    assert trainer.log == []


def test_it_looks_only_while_a_batch_is_generated_and_everything_else_is_verls() -> None:
    trainer = Trainer()
    early = trainer.watched(BLOCK)
    assert early is not None
    assert trainer.async_rollout_manager.generate_sequences(SimpleNamespace(meta_info={})) == "answers"
    assert trainer.async_rollout_manager.generate_sequences(SimpleNamespace(meta_info={"validate": True})) == "answers"
    assert early._background is None
    assert trainer.async_rollout_manager.other == 7
    assert trainer.checkpoint_manager.sleep_replicas() is None


def test_engines_whose_sleep_does_not_wait_are_refused_and_off_is_off() -> None:
    with pytest.raises(InputError, match="sglang"):
        Trainer("sglang").watched(BLOCK)
    assert Trainer().watched({"enable_elastic": False}) is None


def test_the_documents_trainer_takes_elastic_config(monkeypatch: Any) -> None:
    class Theirs(Trainer):
        def __init__(self, config: Any, tokenizer: Any) -> None:
            super().__init__()
            self.rollout, self.config = self.config, config

        def init_workers(self) -> None:
            self.config = self.rollout

    packages = {name: ModuleType(name) for name in ("verl", "verl.trainer", "verl.trainer.ppo")}
    packages["verl"].__version__ = "0.9.1"  # type: ignore[attr-defined]
    ours = ModuleType("verl.trainer.ppo.ray_trainer")
    ours.RayPPOTrainer = Theirs  # type: ignore[attr-defined]
    packages["verl.trainer.ppo"].ray_trainer = ours  # type: ignore[attr-defined]
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "trimtab.compat.verl.trainer.ppo.ray_trainer", raising=False)
    from trimtab.compat.verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer(config={}, tokenizer=None, elastic_config=BLOCK)
    trainer.init_workers()
    assert type(trainer.checkpoint_manager).__name__ == "Watched"
    plain = RayPPOTrainer(config={}, tokenizer=None)
    plain.init_workers()
    assert type(plain.checkpoint_manager).__name__ == "SimpleNamespace"
    monkeypatch.delitem(sys.modules, "trimtab.compat.verl.trainer.ppo.ray_trainer")
