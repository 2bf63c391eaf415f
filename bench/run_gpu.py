"""`python -m bench.run_gpu`: how well a run on one GPU is predicted, and where its time goes.

GRPO with real torch models of random weights (of transformers where it is installed, else a plain decoder), all
components shared on one GPU on a real Ray, 30 iterations. Iterations 2 to 4 measure the costs, the plan made with them
predicts, and the median of iterations 6 to 30 is what came. The ledger says what the run adds to computing, switches
and the weight sync. `--tiny` runs everything with small models, also without a GPU; `--out FILE` writes each iteration
and each model as a line of JSON as soon as it is over.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.model.ledger import ledger_summary

ITERATIONS, MEASURED, FIRST = 30, 4, 6
GOAL_UNBOOKED, GOAL_ERROR, GOAL_ADDED = 0.02, 0.05, 0.03
OWN = ("compute", "onload", "offload", "sync_pack", "sync_move", "sync_unpack", "sync_load", "save")
"""What belongs to the job; all else is added by the run."""


@dataclass(frozen=True)
class Size:
    """A decoder, and how much it is given to do in an iteration."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    prompts: int  # of a batch; each is answered `group` times
    group: int
    tokens: int
    batches: int


SIZES = {
    "tiny": Size(64, 256, 2, 4, 512, 2, 4, 8, 2),
    "151m": Size(768, 3456, 12, 12, 50_257, 8, 8, 128, 2),
    "1.5b": Size(1536, 8960, 28, 12, 151_936, 4, 8, 96, 2),
}


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def decoder(size: Size) -> Any:
    """A causal language model with random weights: tokens in, logits out."""
    import torch

    try:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
            num_key_value_heads=max(1, size.heads // 6), intermediate_size=size.inner,
            vocab_size=size.vocabulary, tie_word_embeddings=True,
        )  # fmt: skip
        return Qwen2ForCausalLM(config)
    except ImportError:
        pass

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(size.vocabulary, size.hidden)
            layer = torch.nn.TransformerEncoderLayer(size.hidden, size.heads, size.inner, batch_first=True, dropout=0.0)
            self.layers = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)

        def forward(self, tokens: Any) -> Any:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            mask = mask.to(self.embedding.weight.dtype)
            hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
            return hidden @ self.embedding.weight.t()

    return Decoder()


def logits_of(model: Any, tokens: Any) -> Any:
    found = model(tokens)
    return getattr(found, "logits", found)


def log_probabilities(model: Any, tokens: Any) -> Any:
    """Of each token after the first."""
    logits = logits_of(model, tokens)[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class OnGpu:
    """A model that leaves the GPU when others have it, to pinned memory that is used again."""

    def __init__(self, *, size: str, place: Any) -> None:
        import torch

        torch.manual_seed(place.seed)
        self.torch, self.size, self.place, self.device = torch, SIZES[size], place, device()
        self.kind = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.hosts: dict[Any, list[Any]] = {}  # free ones by type and shape
        with torch.device(self.device):
            self.model = decoder(self.size).to(self.device, self.kind)

    def offload(self) -> None:
        self._move("cpu")

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, to: str) -> None:
        left: list[Any] = []
        self._each_tensor(lambda tensor: self._moved(tensor, to, left))
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            for host in left:
                self.hosts.setdefault((host.dtype, host.shape), []).append(host)
            if to == "cpu":
                gc.collect()
                self.torch.cuda.empty_cache()

    def _each_tensor(self, change: Callable[[Any], Any]) -> None:
        self.model._apply(change)

    def _moved(self, tensor: Any, to: str, left: list[Any]) -> Any:
        if tensor.device.type == to:
            return tensor
        if to == "cpu":
            free = self.hosts.get((tensor.dtype, tensor.shape))
            host = free.pop() if free else self.torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)
        left.append(tensor.detach())  # a parameter is changed in place
        return tensor.to(to, non_blocking=True)

    def health(self) -> bool:
        return True


class Rollout(OnGpu):
    """Samples answers."""

    def step(self, batch: Any) -> Any:
        torch, size = self.torch, self.size
        generator = torch.Generator().manual_seed(batch.iteration * 1000 + batch.index)
        prompts = torch.randint(0, size.vocabulary, (size.prompts, 8), generator=generator)
        tokens = prompts.repeat_interleave(size.group, 0).to(self.device)
        with torch.no_grad():
            if hasattr(self.model, "generate"):
                tokens = self.model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=size.tokens,
                    min_new_tokens=size.tokens, do_sample=True, pad_token_id=0,
                )  # fmt: skip
            else:
                for _ in range(size.tokens):
                    chances = logits_of(self.model, tokens)[:, -1].float().softmax(-1)
                    tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
        rewards = (tokens[:, 8:] % 2 == 0).float().mean(1)
        return {"tokens": tokens.cpu(), "rewards": rewards.cpu()}

    def sync(self, weights: dict[str, Any], version: int) -> None:
        with self.torch.no_grad():
            for name, mine in self.model.state_dict().items():
                mine.copy_(weights[name])
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class Reference(OnGpu):
    """Log probabilities under the first weights."""

    def step(self, batch: Any) -> Any:
        with self.torch.no_grad():
            found = log_probabilities(self.model, batch.data["tokens"].to(self.device))
        return {**batch.data, "reference": found.cpu()}


class Trainer(OnGpu):
    """A policy gradient step with Adam; its state is written from a snapshot."""

    def __init__(self, *, size: str, place: Any) -> None:
        super().__init__(size=size, place=place)
        self.optimizer = self.torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def step(self, batch: Any) -> Any:
        from trimtab.runtime.run.component import Result

        data, torch = batch.data, self.torch
        rewards = data["rewards"].reshape(-1, self.size.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)).reshape(-1, 1).to(self.device)
        ours = log_probabilities(self.model, data["tokens"].to(self.device))
        gap = data["reference"].to(self.device) - ours
        loss = -(advantages * ours).mean() + 0.01 * (gap.exp() - gap - 1).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return Result(None, {"loss": float(loss.detach()), "reward": float(rewards.mean())})

    def _each_tensor(self, change: Callable[[Any], Any]) -> None:
        super()._each_tensor(change)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if hasattr(value, "to") and value.ndim:
                    state[name] = change(value)

    def weights(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def snapshot(self) -> Callable[[Path], None]:
        copied = {name: value.detach().to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        return lambda path: self.torch.save(copied, path / "model.pt")

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def load(self, path: Path) -> None:
        self.model.load_state_dict(self.torch.load(path / "model.pt"))


@dataclass(frozen=True)
class Row:
    """A model that was trained."""

    name: str
    parameters: int
    predicted_s: float
    measured_s: float
    error: float
    current_error: float | None  # of predictions by the costs measured just before
    unbooked: float
    added: float  # by the run, as a share of the wall time
    shares: dict[str, float]
    said: list[str]
    load: float


def parameters(name: str) -> int:
    import torch

    with torch.device("meta"):
        return sum(value.numel() for value in decoder(SIZES[name]).parameters())


def run(name: str, iterations: int, folder: Path, write: Callable[[Any], None]) -> Row:
    from trimtab import Job

    said: list[str] = []

    def on_event(event: str, facts: dict[str, Any]) -> None:
        if event == "told":
            said.append(str(facts["reason"]))
            print(f"{name}: {said[-1]}", flush=True)
        if event == "iteration":
            one = facts["iteration"]
            write({"model": name, **one})
            print(f"{name} {one['number']:>3}/{iterations}: {one['wall_s']:.3f} s {one['booked']}", flush=True)

    batches = SIZES[name].batches
    parts = {"rollout": (Rollout, ()), "reference": (Reference, ("rollout",)), "trainer": (Trainer, ("reference",))}
    job = Job(
        {
            part: {"use": kind, "settings": {"size": name}, "engine": part, **({"after": list(after)} if after else {})}
            for part, (kind, after) in parts.items()
        },
        cluster=1,
        batches=batches,
        weight_sync=("trainer", "rollout"),
        run={"iterations": iterations, "profile_iterations": MEASURED, "save_every": 10},
    )
    end = job.run(folder=folder, on_event=on_event)
    if end.state != "done":
        sys.exit(f"{name} is {end.state}: {end.reason.sentence}")
    usual = [one for one in end.iterations if one.number >= min(FIRST, iterations) and not one.extra]
    ledger = ledger_summary([(one.wall_s, one.booked) for one in usual])
    assert ledger is not None
    measured_s = statistics.median(one.wall_s for one in usual)
    added = ledger.unbooked + sum(part for bucket, part in ledger.shares.items() if bucket not in OWN)
    off = [abs(error) for error in end.expected_errors]
    return Row(
        name,
        parameters(name),
        end.plan.iteration_seconds,
        measured_s,
        measured_s / end.plan.iteration_seconds - 1,
        statistics.median(off) if off else None,
        ledger.unbooked,
        added,
        dict(ledger.shares),
        said,
        os.getloadavg()[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run_gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models, also without a GPU")
    parser.add_argument("--only", choices=[name for name in SIZES if name != "tiny"], help="one of the models")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--out", type=Path, help="a file for iterations and models as lines of JSON, written at once")
    asked = parser.parse_args()
    names = ["tiny"] if asked.tiny else [asked.only] if asked.only else [name for name in SIZES if name != "tiny"]

    def write(line: Any) -> None:
        if asked.out is not None:
            with asked.out.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    if not asked.json:
        print(f"GRPO, all components shared on one {device()} device, {asked.iterations} iterations")
        print(f"{'model':<8}{'predicted':>10}{'measured':>10}{'error':>8}{'current':>9}{'unbooked':>10}{'added':>8}")
    with tempfile.TemporaryDirectory(prefix="bench-run-gpu-") as folder:
        for name in names:
            with contextlib.redirect_stdout(sys.stderr):
                row = run(name, asked.iterations, Path(folder) / name, write)
            write(asdict(row))
            if asked.json:
                print(json.dumps(asdict(row)), flush=True)
                continue
            current = "-" if row.current_error is None else f"{row.current_error:.1%}"
            print(
                f"{row.name:<8}{row.predicted_s:>9.3f}s{row.measured_s:>9.3f}s{row.error:>8.1%}{current:>9}"
                f"{row.unbooked:>10.1%}{row.added:>8.1%}   load {row.load:.1f}",
                flush=True,
            )
            for bucket, part in row.shares.items():
                print(f"  {bucket:<12}{part:>7.1%}", flush=True)
    if not asked.json:
        print(f"goals: error {GOAL_ERROR:.0%}, unbooked {GOAL_UNBOOKED:.0%}, added by the run {GOAL_ADDED:.0%}")


if __name__ == "__main__":
    main()
