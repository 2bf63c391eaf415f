"""Decoders in plain PyTorch as one row of blocks: embedding, transformer blocks, head. Weights are random.

`large` is of the size of a 1.3-billion-parameter language model; `small` runs anywhere in a moment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

TOKENS = 128
VOCABULARY = 32000


class Block(nn.Module):
    """One transformer block: attention, then a feed-forward layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states in, hidden states of the same shape out."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.feed_norm(x))))
        return hidden


def decoder(blocks: int, width: int, heads: int, vocabulary: int) -> nn.Sequential:
    """A decoder of so many blocks: the same weights each time, so that two processes build the same model."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(nn.Embedding(vocabulary, width), *(Block(width, heads) for _ in range(blocks)), head)


def large() -> nn.Sequential:
    """24 blocks of width 2,048."""
    return decoder(24, 2048, 16, VOCABULARY)


def small() -> nn.Sequential:
    """6 blocks of width 128."""
    return decoder(6, 128, 4, 1000)


def tokens(batch_size: int) -> Tensor:
    """Token ids for either model."""
    return torch.randint(0, 1000, (batch_size, TOKENS))
