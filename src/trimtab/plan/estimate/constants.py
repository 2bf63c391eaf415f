"""The fitted numbers of the estimates, with nothing fitted to one row: `python tools/calibrate.py` writes this file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares of peak rates, seconds, and bytes; `*_error` are spreads of log(measured / estimated)."""

    # Decoding and prefill, on serving points.
    weight_share: float = 0.75
    expert_share: float = 0.6
    cache_share: float = 0.6
    compute_share: float = 0.5
    overlap: float = 0.5
    layer_us: float = 8.0
    moe_layer_us: float = 8.0
    step_ms: float = 2.0
    sequence_us: float = 10.0
    hop_us: float = 12.0
    link_share: float = 0.5

    # Training passes, on trainers' micro-batches and steps.
    train_share: float = 0.55
    narrow_hidden: float = 500.0
    expert_train_share: float = 0.4
    attention_share: float = 0.7
    train_link_share: float = 0.6

    # Weight syncs, by transport.
    broadcast_s: float = 1.0
    broadcast_s_per_gb: float = 0.3
    packed_s: float = 2.0
    packed_s_per_gb: float = 0.02
    ipc_s: float = 2.0
    ipc_s_per_gb: float = 0.05
    delta_s: float = 1.0
    delta_s_per_gb: float = 0.05

    # Steps of RL.
    rollout_factor: float = 1.2
    async_steady: float = 0.5
    forward_factor: float = 1.3
    update_s: float = 0.5
    host_share: float = 0.3
    fixed_s: float = 5.0
    sample_ms: float = 4.0
    token_us: float = 2.0
    releases: tuple[tuple[str, float], ...] = ()

    def release(self, name: str) -> float:
        """Factor of a framework's release; 1 for one that was never compared."""
        return dict(self.releases).get(name, 1.0)


CONSTANTS = Constants()
