"""The policy as a small transformer in PyTorch, on CUDA where there is one. Same doors as the one in numpy.

Each place of an answer sees its digit, the token before it, and all places before it. Whatever lives on the GPU (the
weights, and the trainer's moments) leaves it by `offload` into pinned host buffers that are made once and kept: making
one takes many times as long as a copy. While off the GPU it is still whole, and takes new weights.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from examples.grpo.loss import Rules, token_slopes
from examples.grpo.task import BLANK, END, VOCABULARY, Floats, Tokens
from numpy.typing import NDArray
from torch import Tensor, nn

SEEN = BLANK + 1
TERSE = 1.5  # how much more likely END is at the start, as a logit


class Layer(nn.Module):
    """Attention to the places before, and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`kept` are keys and values of earlier places when one place is added; None for all places at once."""
        rows, places, width = x.shape
        parts = self.attend(self.before_attention(x)).view(rows, places, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if kept is not None:
            key, value = torch.cat([kept[0], key], dim=2), torch.cat([kept[1], value], dim=2)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=kept is None and places > 1)
        x = x + self.join(seen.transpose(1, 2).reshape(rows, places, width))
        return x + self.forward_part(self.before_forward(x)), (key, value)


class Transformer(nn.Module):
    """Logits of the next token."""

    def __init__(self, width: int, layers: int, heads: int, places: int) -> None:
        super().__init__()
        self.digit, self.last = nn.Embedding(SEEN, width), nn.Embedding(SEEN, width)
        self.place = nn.Embedding(places, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            for embedding in (self.digit, self.last, self.place):
                embedding.weight.normal_(0, 0.5 if embedding is not self.place else 0.1)
            self.out.weight.normal_(0, 0.5 / math.sqrt(width))
            self.out.bias.zero_()
            self.out.bias[END] = TERSE

    def forward(
        self, digit: Tensor, last: Tensor, first: int = 0, kept: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Of places from `first` on."""
        at = torch.arange(first, first + digit.shape[1], device=digit.device)
        x = self.digit(digit) + self.last(last) + self.place(at)
        now = []
        for number, layer in enumerate(self.layers):
            x, keys = layer(x, kept[number] if kept is not None else None)
            now.append(keys)
        return self.out(self.norm(x)), now


class TorchPolicy:
    """Weights, and what is done with them. `trains` is whether it needs moments."""

    def __init__(
        self,
        seed: int,
        *,
        places: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        device: str | None = None,
        trains: bool = False,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_number([seed, 2]))
            self.model = Transformer(width, layers, heads, places)  # made on the host: the same on every device
        self.model.to(self.device)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        if trains:
            self._moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in self.model.named_parameters()}
        self._updates = 0
        self._parked: dict[str, Tensor] = {}  # pinned; made when first needed, kept for good
        self._sent: dict[str, Tensor] = {}

    @torch.no_grad()
    def sample(self, asked: Tokens, seed: list[int]) -> tuple[Tokens, Floats]:
        """One answer to each question, with the log-probability of every token; ends when the longest one does."""
        luck = torch.Generator(self.device).manual_seed(_number(seed))
        digits = self._here(asked)
        count, places = digits.shape
        answered = torch.full((count, places), BLANK, device=self.device)
        chances = torch.zeros((count, places), device=self.device)
        going = torch.arange(count, device=self.device)
        last = torch.full((count, 1), BLANK, device=self.device)
        kept: list[tuple[Tensor, Tensor]] | None = None
        for place in range(places):
            logits, kept = self.model(digits[going, place : place + 1], last, place, kept)
            logs = torch.log_softmax(logits[:, 0].float(), dim=-1)
            noise = -torch.log(-torch.log(torch.rand(logs.shape, generator=luck, device=self.device).clamp_(1e-20)))
            token = (logs + noise).argmax(dim=1)
            answered[going, place] = token
            chances[going, place] = logs.gather(1, token[:, None])[:, 0]
            alive = torch.nonzero(token != END)[:, 0]
            if not len(alive):
                break
            if len(alive) < len(going):  # who has ended costs nothing any more
                going, token = going[alive], token[alive]
                kept = [(key[alive], value[alive]) for key, value in kept]
            last = token[:, None]
        return answered.cpu().numpy(), chances.double().cpu().numpy()

    @torch.no_grad()
    def log_probabilities(self, asked: Tokens, answered: Tokens) -> Floats:
        """Of every token of given answers; 0 where there is none."""
        found: Floats = self._logs(asked, answered).double().cpu().numpy()
        return found

    @torch.no_grad()
    def next_logs(self, asked: Tokens, answered: Tokens, at: Tokens) -> Floats:
        """Log-probabilities of what comes at the places `at` of answers."""
        tokens = self._here(answered)
        last = torch.cat([torch.full_like(tokens[:, :1], BLANK), tokens[:, :-1]], dim=1)
        longest = int(at.max()) + 1
        logits, _ = self.model(self._here(asked)[:, :longest], last[:, :longest])
        rows = torch.arange(len(at), device=self.device)
        found: Floats = torch.log_softmax(logits[rows, self._here(at)].float(), dim=-1).double().cpu().numpy()
        return found

    def update(
        self, asked: Tokens, answered: Tokens, old: Floats, reference: Floats, advantage: Floats, rules: Rules
    ) -> dict[str, float]:
        """One step of Adam down the loss of these answers."""
        new = self._logs(asked, answered)
        slopes, facts = token_slopes(
            new.detach().double().cpu().numpy(), old, reference, advantage, answered != BLANK, rules
        )
        (new * torch.from_numpy(slopes).to(new)).sum().backward()  # type: ignore[no-untyped-call]
        self._adam(rules.rate)
        self._wait()  # otherwise others would be charged for what is still under way
        return facts

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that training needs to go on."""
        moments = {f"{k}.{n}": m for n, pair in self._moments.items() for k, m in zip("mv", pair, strict=True)}
        tensors = {**{f"w.{n}": p.data for n, p in self.model.named_parameters()}, **moments}
        return {**{n: t.cpu().numpy() for n, t in tensors.items()}, "updates": np.array(self._updates)}

    @torch.no_grad()
    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Go on from a state."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(torch.from_numpy(state[f"w.{name}"]))
        for name, pair in self._moments.items():
            for kind, moment in zip("mv", pair, strict=True):
                moment.copy_(torch.from_numpy(state[f"{kind}.{name}"]))
        self._updates = int(state["updates"])

    @torch.no_grad()
    def copied(self) -> dict[str, Tensor]:
        """The weights, for others: in pinned buffers that hold them until the next time."""
        for name, parameter in self.model.named_parameters():
            self._buffer(self._sent, name, parameter.data).copy_(parameter.data, non_blocking=True)
        self._wait()
        return dict(self._sent)

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Work with others' weights from now on."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name], non_blocking=True)
        self._wait()

    @torch.no_grad()
    def offload(self) -> None:
        """Leave the GPU."""
        if self.device.type != "cuda":
            return
        for name, tensor in self._tensors():
            self._buffer(self._parked, name, tensor.data).copy_(tensor.data, non_blocking=True)
        self._wait()
        for name, tensor in self._tensors():
            tensor.data = self._parked[name]
            tensor.grad = None
        torch.cuda.empty_cache()  # others may be in other processes

    @torch.no_grad()
    def onload(self) -> None:
        """Come back to the GPU."""
        if self.device.type != "cuda":
            return
        for _, tensor in self._tensors():
            tensor.data = tensor.data.to(self.device, non_blocking=True)
        self._wait()

    def _logs(self, asked: Tokens, answered: Tokens) -> Tensor:
        tokens = self._here(answered)
        last = torch.cat([torch.full_like(tokens[:, :1], BLANK), tokens[:, :-1]], dim=1)
        longest = max(1, int((answered != BLANK).sum(axis=1).max()))
        logits, _ = self.model(self._here(asked)[:, :longest], last[:, :longest])
        picked = torch.log_softmax(logits.float(), dim=-1).gather(2, tokens[:, :longest, None].clamp(max=END))[..., 0]
        picked = picked * (tokens[:, :longest] != BLANK)
        return nn.functional.pad(picked, (0, tokens.shape[1] - longest))

    @torch.no_grad()
    def _adam(self, rate: float) -> None:
        self._updates += 1
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        slopes = [parameter.grad for parameter in parameters]
        m, v = ([self._moments[name][at] for name in names] for at in (0, 1))
        torch._foreach_lerp_(m, slopes, 0.1)
        torch._foreach_mul_(v, 0.99)
        torch._foreach_addcmul_(v, slopes, slopes, 0.01)
        scale = torch._foreach_sqrt(v)
        torch._foreach_div_(scale, math.sqrt(1 - 0.99**self._updates))
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_addcdiv_([p.data for p in parameters], m, scale, -rate / (1 - 0.9**self._updates))
        for parameter in parameters:
            parameter.grad = None

    def _tensors(self) -> list[tuple[str, Tensor]]:
        moments = [(f"{k}.{n}", m) for n, pair in self._moments.items() for k, m in zip("mv", pair, strict=True)]
        return [*self.model.named_parameters(), *moments]

    def _buffer(self, kept: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
        if name not in kept:
            kept[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
        return kept[name]

    def _here(self, tokens: Tokens) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _number(seed: list[int]) -> int:
    return zlib.crc32(repr(seed).encode())
