"""What a run's config states, under trimtab's names; None is what it leaves open.

Rules ask only for what they need: a rule whose values are not known says nothing. Sizes that several rules share
(replicas, sequences of an engine, tokens of a micro-batch) are properties here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind

MEAN_OF_LONGEST, DEVIATION_OF_LONGEST = 0.4, 0.3
"""Mean and standard deviation of sequences by the longest allowed, where no lengths are given."""


class RunSetup(Frozen):
    """One run. `rollout_gpus` 0 means that rollout and training share all GPUs; batches count samples, not prompts."""

    framework: str = ""
    version: str = ""
    model_name: str = ""
    model: Architecture | None = None
    positions: int | None = None
    gpu: GpuKind | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    host_memory: float | None = None
    rollout_gpus: int = 0
    shared: bool = True
    algorithm: str = ""
    critic: bool = False
    reference: bool = False
    reference_offload: bool = True

    prompts: int | None = None
    group: int | None = None
    samples_of_generation: int | None = None
    engines: int | None = None
    mini_batch: int | None = None
    micro_batch: int | None = None
    logprob_batch: int | None = None
    dynamic: bool = False
    packed: bool = True
    micro_tokens: int | None = None
    logprob_tokens: int | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    max_tokens: int | None = None
    mean_tokens: float | None = None

    rollout_backend: str = "vllm"
    rollout_tp: int = 1
    rollout_pp: int = 1
    rollout_dp: int = 1
    rollout_ep: int = 1
    rollout_precision: str = "bf16"
    rollout_kv: str = "bf16"
    rollout_memory: float | None = None
    rollout_sequences: int | None = None
    rollout_batched_tokens: int | None = None
    rollout_max_length: int | None = None
    rollout_chunked: bool = True
    rollout_eager: bool = False
    rollout_sleeps: bool = True
    rollout_wakes_whole: bool = False
    rollout_backup: bool = False
    rollout_swap: float = 0.0
    rollout_full_copy: bool = False
    rollout_whole_context: bool = False
    """An engine whose context is not stated takes the model's positions."""

    train_backend: str = "fsdp"
    train_tp: int = 1
    train_pp: int = 1
    train_cp: int = 1
    train_ep: int = 1
    train_etp: int = 1
    train_sp: int = 1
    train_zero: int = 3
    train_shards: int | None = None
    train_lora: int = 0
    train_recompute: bool = True
    train_fused_logits: bool = False
    train_logit_bytes: float = 12.0
    train_entropy: float = 0.0
    train_weight_bytes: float = 2.0
    train_gradient_bytes: float = 4.0
    train_optimizer_bytes: float = 12.0
    train_offload_weights: bool = False
    train_offload_optimizer: bool = False
    train_offload_gradients: bool = False
    train_cpu_optimizer: bool = False
    train_uneven_stages: bool = False
    train_loads_everywhere: bool = False
    train_save_copies: bool = False

    in_part: bool = False
    """The config is read in part: what a memory rule misses may be stated in keys that are not read."""
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """The framework's own key of a value."""
        return self.keys.get(name, name.replace("_", ".", 1) if name.startswith(("rollout_", "train_")) else name)

    @property
    def train_gpus(self) -> int:
        return (self.gpus or 1) - self.rollout_gpus

    @property
    def engine_gpus(self) -> int:
        """All GPUs with engines."""
        return self.rollout_gpus or self.gpus or 1

    @property
    def engine_size(self) -> int:
        return self.rollout_tp * self.rollout_pp * self.rollout_dp

    @property
    def node_gpus(self) -> int:
        return min(self.gpus_per_node or (self.gpu.gpus_per_node if self.gpu else 8), self.gpus or 10**9)

    @property
    def model_parallel(self) -> int:
        return self.train_tp * self.train_pp * self.train_cp * self.train_sp

    @property
    def replicas(self) -> int:
        """Data-parallel size of training."""
        return max(1, self.train_gpus // self.model_parallel)

    @property
    def shards(self) -> int:
        """GPUs over which optimiser state is divided."""
        return self.train_shards or max(1, self.train_gpus)

    @property
    def samples(self) -> int | None:
        return self.prompts * (self.group or 1) if self.prompts else None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt and answer."""
        if self.prompt_tokens and self.answer_tokens:
            return self.prompt_tokens + self.answer_tokens
        return self.max_tokens

    @property
    def reached(self) -> int | None:
        """Tokens of the longest sequences that occur: answers reach their limit, prompts are filtered by theirs."""
        if self.prompt_tokens and self.answer_tokens:
            return self.prompt_tokens // 2 + self.answer_tokens
        return self.max_tokens

    @property
    def mean(self) -> float | None:
        """Mean tokens of prompt and answer, as given or assumed."""
        return self.mean_tokens or (MEAN_OF_LONGEST * self.longest if self.longest else None)

    @property
    def held_tokens(self) -> int | None:
        """Tokens that an engine is asked to hold for one sequence; SGLang starts with less than its context."""
        if self.rollout_backend == "sglang":
            return self.longest
        whole = self.positions if self.rollout_whole_context else None
        return self.rollout_max_length or whole or self.longest

    def together(self, sequences: int) -> float | None:
        """Tokens of the fullest of many micro-batches of so many sequences; padded ones are all as the longest."""
        longest = self.reached
        if not longest:
            return None
        if not self.packed:
            return float(sequences * longest)
        mean = self.mean or 0.0
        spread = min(DEVIATION_OF_LONGEST * longest, mean)
        return min(sequences * mean + 2 * math.sqrt(sequences) * spread, float(sequences * longest))

    def _tokens(self, tokens: int | None, sequences: int | None) -> float | None:
        """Tokens of a micro-batch on each GPU: a limit of tokens never cuts a sequence."""
        divided = self.train_cp * self.train_sp
        if self.dynamic and tokens:
            return max(float(tokens), float(self.longest or 0) / divided)
        found = self.together(sequences) if sequences else None
        return found / divided if found else None

    @property
    def update_tokens(self) -> float | None:
        return self._tokens(self.micro_tokens, self.micro_batch)

    @property
    def forward_tokens(self) -> float | None:
        return self._tokens(self.logprob_tokens or self.micro_tokens, self.logprob_batch or self.micro_batch)
