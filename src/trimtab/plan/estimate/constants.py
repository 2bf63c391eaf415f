"""The fitted numbers of the estimates, with nothing fitted to one row: `python tools/calibrate.py` writes this file."""

from __future__ import annotations

from trimtab.core.frozen import Frozen


class Constants(Frozen):
    """Shares of peak rates, seconds, and bytes; `*_error` are spreads of log(measured / estimated)."""

    # Decoding and prefill, on serving points.
    weight_share: float = 0.8961
    expert_share: float = 0.92
    cache_share: float = 0.92
    compute_share: float = 0.889
    overlap: float = 1
    layer_us: float = 23.02
    moe_layer_us: float = 20.78
    step_ms: float = 1.321
    sequence_us: float = 26.28
    hop_us: float = 15.14
    link_share: float = 0.5819

    # The same of an engine asked for whole answers, and of prompts alone, on our own points.
    quiet_step_ms: float = 0.6716
    quiet_sequence_us: float = 8.696
    prefill_share: float = 0.6993
    prefill_narrow: float = 508.5
    prefill_layer_us: float = 626.3

    # Training passes, on trainers' micro-batches and steps.
    train_share: float = 0.553
    narrow_hidden: float = 485.4
    expert_train_share: float = 0.515
    attention_share: float = 0.6536
    train_link_share: float = 0.7687
    launch_ms: float = 1.174  # of a layer and forward pass (a backward pass has two), where modules run one by one

    # Weight syncs, by transport.
    broadcast_s: float = 1.064
    broadcast_s_per_gb: float = 0.5098
    packed_s: float = 4.452
    packed_s_per_gb: float = 0.01912
    ipc_s: float = 2.045
    ipc_s_per_gb: float = 0.05756
    delta_s: float = 0.3096
    delta_s_per_gb: float = 2.033
    """Of a GB on each of the trainer's GPUs."""

    # Steps of RL.
    rollout_factor: float = 1.757
    async_steady: float = 0.4306
    forward_factor: float = 0.9398
    update_s: float = 0.5121
    host_share: float = 0.2944
    fixed_s: float = 5.345
    sample_ms: float = 4.583
    token_us: float = 2.043
    # Memory of a trainer beside a sleeping engine, on one-GPU points.
    layer_copies: float = 1.839
    expert_copies: float = 1.868
    expert_gathers: float = 4.391
    context_gb: float = 1.571
    context_exponent: float = 0.1964

    # Of a sleeping engine or trainer: 99 of 100 one-GPU points left less behind.
    residue_gb: float = 5.513

    # Half-widths of the intervals, as logarithms, on models that were left out.
    step_error: float = 0.4229
    stage_error: float = 0.5981
    measured_error: float = 0.261
    gain_over: float = 0.3297
    gain_under: float = 0.5169
    engine_memory_error: float = 0.15
    memory_error: float = 0.15

    releases: tuple[tuple[str, float], ...] = (("NeMo RL v0.4", 0.997), ("NeMo RL v0.5", 1.02))

    def release(self, name: str) -> float:
        """Factor of a framework's release; 1 for one that was never compared."""
        return dict(self.releases).get(name, 1.0)


CONSTANTS = Constants()
