"""Small PyTorch models for the layer profiler and the pipeline: chains of every shape, and some that are none."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
TOKENS = 5


def mlp() -> nn.Sequential:
    """Four layers whose outputs differ in size."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 2))


def as_list() -> list[nn.Module]:
    """The same as a plain list."""
    return list(mlp())


class Attention(nn.Module):
    """A block that takes hidden states and, by keyword, a mask that every block takes."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        hidden = hidden + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return (hidden, "weights") if self.gives == "tuple" else hidden


class Decoder(nn.Module):
    """An embedding, a block list at `body.layers`, and a head."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.embedding = nn.Embedding(50, WIDTH)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Attention(gives) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=tokens.device).tril()
        for layer in self.body.layers:
            hidden = layer(hidden, mask=mask)
            if self.gives == "tuple":
                hidden = hidden[0]
        logits: Tensor = self.head(hidden)
        return logits


def decoder() -> Decoder:
    torch.manual_seed(2)
    return Decoder("tensor")


def decoder_of_tuples() -> Decoder:
    torch.manual_seed(2)
    return Decoder("tuple")


def tokens(batch_size: int) -> Tensor:
    return torch.randint(0, 50, (batch_size, TOKENS))


class Pair(nn.Module):
    """Takes and gives a pair of tensors and a mapping with a third."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, more = given
        return self.mix(hidden), {"skip": more["skip"] + hidden, "scale": more["scale"] * 2}


def pairs() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Pair(), Pair(), Pair())


def pair(batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.randn(batch_size, WIDTH), {"skip": torch.randn(batch_size, WIDTH), "scale": torch.ones(batch_size, 1)}


class Spread(nn.Module):
    """Takes two arguments and gives two results."""

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return one + other, one - other


class TwoLanes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lanes = nn.ModuleList(Spread() for _ in range(3))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        for lane in self.lanes:
            one, other = lane(one, other)
        return one * other


def two_lanes() -> TwoLanes:
    return TwoLanes()


def two_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 4), torch.randn(batch_size, 4)


class Branches(nn.Module):
    """A block list that is no chain: both blocks take the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.layers[0](x) + self.layers[1](x)
        return joined


def branches() -> Branches:
    return Branches()


class Fails(nn.Module):
    """Fails on its second microbatch, in a process of Ray's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and "RAY_RAYLET_PID" in os.environ:
            raise ValueError("this block is broken")
        return x


def breaks_in_a_stage() -> nn.Sequential:
    return nn.Sequential(Fails(), nn.Identity())


class Dies(Fails):
    """Takes its process with it."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and "RAY_RAYLET_PID" in os.environ:
            os._exit(1)
        return x


def dies_in_a_stage() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Dies())


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def random() -> nn.Sequential:
    return nn.Sequential(Random(), nn.Identity())


def broken() -> nn.Sequential:
    raise RuntimeError("no weights here")


def no_model() -> int:
    return 7
