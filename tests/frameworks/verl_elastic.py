"""Runs inside .venv-verl: verl's fully-async training on CPUs, with one of its dynamic schedule policies.

verl's own: the rollouter with its data loading, its server manager, load balancer and client, the message queue, the
trainer's loop, checkpoint managers with their sync groups, and the resource controller. Each replica is a llama.cpp
server on a tiny model. Stand-ins, because they need a GPU: the training (a pause), the weights (a number that is sent
to each engine), the agent loop (one call of verl's client per answer).

Arguments: the policy, the number of steps, faults or not. Standard output: a line that begins with SEEN, then JSON.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from torch.utils.data import Dataset
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.experimental.fully_async_policy import fully_async_trainer
from verl.experimental.fully_async_policy.fully_async_rollouter import (
    FullyAsyncLLMServerManager,
    FullyAsyncRollouter,
)
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry
from verl_elastic_engines import HELPERS, PYTHON, Engine, SyncWorker, TrainWorker, length, prompt_ids

HERE = "verl_elastic"  # this module, as the actors import it
REQUIRED, COLLECTIONS = 16, 2
DEDICATED, SHARED = 2, 2
CAPACITY = 4  # samples at a time per replica
TRAIN_S = 0.3


# ---- replicas ------------------------------------------------------------------------------------------------------


class CpuReplica(RolloutReplica):
    async def init_standalone(self):
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()
        self.workers = [SyncWorker.remote(self._server_handle)]

    async def launch_servers(self):
        name = f"engine_{self.replica_rank}"
        self._server_handle = Engine.options(name=name).remote(name)
        self.servers = [self._server_handle]
        self._server_address = f"127.0.0.1:{8000 + self.replica_rank}"


RolloutReplicaRegistry.register("cpu", lambda: CpuReplica)


@CheckpointEngineRegistry.register("cpu")
class CpuCheckpointEngine(CheckpointEngine):
    """Sync groups as verl builds them, without a transport."""

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        def ranks(first, count):
            return {"rank": list(range(first, first + count)), "of": [len(metadata)] * count}

        return ranks(0, actor_wg_world_size), ranks(actor_wg_world_size, rollout_world_size)

    def prepare(self): ...

    def init_process_group(self, **kwargs): ...

    def finalize(self): ...

    async def send_weights(self, weights, global_steps=None): ...

    async def receive_weights(self, global_steps=None): ...


# ---- the trainer's side --------------------------------------------------------------------------------------------


class TrainGroup:
    def __init__(self, workers):
        self.workers, self.world_size = workers, len(workers)

    def init_model(self): ...

    def update_weights(self, **given):
        return [worker.update_weights.remote(**given) for worker in self.workers]

    def execute_checkpoint_engine(self, method, **given):
        return [
            worker.execute_checkpoint_engine.remote(method[at], **{name: values[at] for name, values in given.items()})
            for at, worker in enumerate(self.workers)
        ]


class Trainer(FullyAsyncTrainer.__ray_metadata__.modified_class):
    """verl's trainer: its loop, syncs and scheduling. Computing on a batch is a pause; what it got is kept."""

    async def init_workers(self):
        self.actor_wg = self.actor_rollout_wg = TrainGroup([TrainWorker.remote(rank) for rank in range(SHARED)])
        self.got, self.answers, self.short, self.steps_s, self.syncs = [], {}, [], [], []
        self.killed = None

    def plan(self, faults, last_step):
        self.faults_left, self.last_step = faults, last_step

    async def fit_step(self, batch_dict=None):
        if self.current_param_version >= self.last_step:
            raise fully_async_trainer.TrainingStopException
        await super().fit_step(batch_dict)

    def _fit_compute_reward(self, batch):
        for prompt, tokens, count in zip(
            batch.batch["prompts"][:, 0].tolist(),
            batch.batch["responses"].tolist(),
            batch.batch["response_mask"].sum(-1).tolist(),
            strict=True,
        ):
            self.got.append(prompt)
            self.answers[prompt] = tokens[:count]
            if count != length(prompt):
                self.short.append(prompt)
        return batch

    def _same(self, batch):
        return batch

    _fit_compute_log_prob = _fit_compute_ref_log_prob = _fit_compute_critic = _same
    _fit_compute_advantage = _fit_update_critic = _same

    def _fit_update_actor(self, batch):
        time.sleep(TRAIN_S)
        return batch

    def _nothing(self, *args, **kwargs): ...

    _fit_dump_data = _fit_save_checkpoint = _fit_start_profile = _fit_stop_profile = _fit_collect_metrics = _nothing
    _fit_log_aggregated_training_metrics = _nothing

    async def _fit_validate(self, val_before_train=False): ...

    async def _fit_update_weights(self):
        due = [fault for fault in self.faults_left if fault[0] == self.current_param_version]
        if self.local_trigger_step == 1:
            self.faults_left = [fault for fault in self.faults_left if fault not in due]
            for _, what, who in due:
                if what == "kill":
                    actor, self.killed = ray.get(ray.get_actor(who).pids.remote())
                    os.kill(actor, signal.SIGKILL)
                elif what == "drain":  # while the sync runs
                    policy = self.dynamic_resource_controller.policy
                    asyncio.get_running_loop().run_in_executor(None, self._later, policy.drain, who, "by the test")
                elif what == "give back":
                    self.dynamic_resource_controller.policy.give_back(who)
        found = await super()._fit_update_weights()
        if found is not None:
            self.syncs.append((time.time(), self.current_param_version))
            self.steps_s.append(found)
        return found

    def _later(self, call, *given):
        policy, until = self.dynamic_resource_controller.policy, time.monotonic() + 60
        while not policy._syncing and time.monotonic() < until:
            time.sleep(0.001)
        self.drained_while = policy._syncing
        call(*given)

    async def seen(self):
        controller = self.dynamic_resource_controller
        policy = controller.policy
        status = policy.status() if hasattr(policy, "status") else {}
        return {
            "got": self.got,
            "answers": self.answers,
            "short": self.short,
            "killed_server_lives": self.killed is not None and Path(f"/proc/{self.killed}").exists(),
            "syncs": self.syncs,
            "activated": controller.activate_count,
            "deactivated": controller.deactivate_count,
            "status": status,
            "groups": await self.actor_wg.workers[0].seen.remote(),
            "drained_while_syncing": getattr(self, "drained_while", None),
            "utilization": [found["dynamic_resource/rollout_resource_utilization"] for found in self.steps_s],
        }


# ---- the rollouter's side ------------------------------------------------------------------------------------------


class Prompts(Dataset):
    def __init__(self, data_files=None, tokenizer=None, config=None, processor=None, max_samples=-1, **others):
        self.count = int(os.environ["PROMPTS"])

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        return {"prompts": torch.tensor([at]), "index": at}


class AgentLoop:
    """One call of verl's client for each answer."""

    def __init__(self, client):
        self.client = client

    async def generate_sequences_single(self, batch):
        prompts = batch.batch["prompts"][:, 0].tolist()
        began = time.time()
        outputs = await asyncio.gather(
            *(
                self.client.generate(uuid4().hex, prompt_ids=prompt_ids(prompt), sampling_params={"max_tokens": 400})
                for prompt in prompts
            )
        )
        responses = torch.zeros((len(prompts), 400), dtype=torch.long)
        mask = torch.zeros((len(prompts), 400), dtype=torch.long)
        for row, output in enumerate(outputs):
            responses[row, : len(output.token_ids)] = torch.tensor(output.token_ids)
            mask[row, : len(output.token_ids)] = 1
        both = torch.cat([torch.ones((len(prompts), 1), dtype=torch.long), mask], dim=-1)
        tensors = {"prompts": batch.batch["prompts"], "responses": responses, "response_mask": mask}
        steps = [output.extra_fields[f"{end}_global_steps"] for output in outputs for end in ("min", "max")]
        made = DataProto.from_single_dict(
            tensors
            | {
                "attention_mask": both,
                "min_global_steps": np.array(steps[::2], dtype=object),
                "max_global_steps": np.array(steps[1::2], dtype=object),
            }
        )
        made.meta_info["metrics"] = [{"generate_sequences": time.time() - began, "tool_calls": 0.0}] * len(prompts)
        return made


class Rollouter(FullyAsyncRollouter.__ray_metadata__.modified_class):
    def _create_worker_classes(self): ...

    async def _create_reward_loop_manager(self): ...

    async def _init_async_rollout_manager(self):
        self.llm_server_manager = await FullyAsyncLLMServerManager.create(
            config=self.config, worker_group=self.get_hybrid_worker_group()
        )
        client = self.llm_server_manager.get_client(client_cls=FullyAsyncLLMServerClient)
        self.async_rollout_manager = AgentLoop(client)

    def load_checkpoint(self):
        return 0


# ---- a run ---------------------------------------------------------------------------------------------------------


def configured(policy, steps):
    folder = Path(fully_async_trainer.__file__).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(
            "fully_async_ppo_trainer",
            overrides=[
                "async_training.staleness_threshold=0.5",
                f"async_training.trigger_parameter_sync_step={COLLECTIONS}",
                "async_training.use_dynamic_resource_scheduling=True",
                f"async_training.dynamic_schedule_policy={policy}",
                f"async_training.concurrent_samples_per_replica={CAPACITY}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={REQUIRED}",
                "actor_rollout_ref.hybrid_engine=False",
                "actor_rollout_ref.rollout.name=cpu",
                "actor_rollout_ref.rollout.n=1",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu",
                f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={HERE}",
                "actor_rollout_ref.rollout.response_length=400",
                "actor_rollout_ref.rollout.nnodes=1",
                f"actor_rollout_ref.rollout.n_gpus_per_node={DEDICATED}",
                f"rollout.n_gpus_per_node={DEDICATED}",
                f"rollout.total_rollout_steps={steps * REQUIRED * COLLECTIONS}",
                f"trainer.n_gpus_per_node={SHARED}",
                "trainer.logger=[console]",
                "trainer.balance_batch=False",
                "trainer.resume_mode=disable",
                "trainer.total_epochs=1",
                "data.train_batch_size=0",
                "data.dataloader_num_workers=0",
                "data.shuffle=False",
                f"data.custom_cls.path={Path(__file__).resolve()}",
                "data.custom_cls.name=Prompts",
                "+elastic_config.monitoring_interval=0.25",
                "+elastic_config.min_stable_period=0.5",
                "+elastic_config.scale_down_cooldown=1",
                "+elastic_config.scale_up_cooldown=1",
            ],
        )
    with open_dict(config):
        config.rollout.n = 1
    return config


def engine_seen(name):
    try:
        return ray.get(ray.get_actor(name).seen.remote())
    except (ray.exceptions.RayActorError, ValueError):
        return None


def run(policy, steps, faults):
    config = configured(policy, steps)
    began = time.time()
    trainer = ray.remote(num_cpus=1)(Trainer).remote(
        config=config, tokenizer=None, role_worker_mapping={}, resource_pool_manager=None, device_name="cpu"
    )
    ray.get(trainer.init_workers.remote())
    rollouter = ray.remote(num_cpus=1, max_concurrency=100)(Rollouter).remote(
        config=config, tokenizer=None, device_name="cpu"
    )
    ray.get(rollouter.set_hybrid_worker_group.remote(ray.get(trainer.get_actor_wg.remote())))
    ray.get(rollouter.init_workers.remote())
    ray.get(rollouter.set_max_required_samples.remote())
    ray.get(trainer.set_rollouter.remote(rollouter))
    ray.get(trainer.set_total_train_steps.remote(ray.get(rollouter.get_total_train_steps.remote())))
    # A sample that is begun while verl counts goes uncounted, and its full queue then drops the oldest one.
    places = ray.get(rollouter.get_max_queue_size.remote()) + CAPACITY
    queue = MessageQueue.options(num_cpus=0).remote(config, places)
    client = MessageQueueClient(queue)
    ray.get([actor.set_message_queue_client.remote(client) for actor in (rollouter, trainer)])
    # verl's own policies wait for ever for samples of a step that does not come.
    ray.get(trainer.plan.remote(faults, steps if policy != "trimtab" else steps + 1))
    ray.get(trainer._fit_update_weights.remote())
    started = time.time()
    ray.get([rollouter.fit.remote(), trainer.fit.remote()], timeout=1800)
    seen = ray.get(trainer.seen.remote())
    engines = {f"engine_{rank}": engine_seen(f"engine_{rank}") for rank in range(SHARED + DEDICATED)}
    dead = [name for name, found in engines.items() if found is None]
    return seen | {"engines": engines, "dead": dead, "start_s": started - began, "run_s": time.time() - started}


def main():
    import verl_elastic  # what the actors import: pickled by reference

    policy, steps, with_faults = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "faults"
    os.environ["PROMPTS"] = str(steps * REQUIRED * COLLECTIONS)
    made = "from tiny_gguf import tiny_gguf; print(tiny_gguf())"
    os.environ["MODEL"] = subprocess.check_output([PYTHON, "-c", made], text=True, cwd=HELPERS).strip()
    faults = []
    if with_faults:
        half = steps // 2
        faults = [(steps // 5, "drain", "standalone_0"), (steps // 5 + 4, "give back", "standalone_0")]
        faults += [(half, "kill", f"engine_{SHARED + DEDICATED - 1}")]
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver="LOG" in os.environ)
    try:
        print("SEEN" + json.dumps(verl_elastic.run(policy, steps, faults), default=str))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
