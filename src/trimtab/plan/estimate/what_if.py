"""What a switch would give: each is a change of the run's inputs, a term of the model, and what it depends on.

`spec-decode:0.77:3` has its acceptance and draft tokens after colons; `async+partial` turns both at once. A gain is the
ratio of two estimates, so that much of what the model gets wrong in both falls out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trimtab.core.errors import InputError, unknown
from trimtab.core.frozen import Frozen
from trimtab.plan.estimate.choose import Freedom, choose, splits, whole
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.phases import phases
from trimtab.plan.estimate.step import SEPARATE_FRACTION, RunInputs, StepTime, step_time

ACCEPTED, DRAFTED = 0.6, 3.0
LORA_RANK = 16.0
LAST = ("partial", "lend", "sync-every")
"""Switches of asynchronous runs, after the one that makes a run asynchronous."""

Change = Callable[[RunInputs, Sequence[float], Constants], RunInputs]


class Switch(Frozen):
    """A change, when it pays, and its numbers with their ranges."""

    change: Change
    condition: str
    numbers: tuple[tuple[str, float, float, float], ...] = ()
    """(name, default, least, most)"""


class WhatIf(Frozen):
    """A step with a switch beside one without it; `fits` says whether every phase fits with it."""

    switch: str
    before: StepTime
    after: StepTime
    run: RunInputs
    fits: bool
    conditions: tuple[str, ...]

    @property
    def speedup(self) -> float:
        return self.before.seconds / self.after.seconds

    def stage_speedup(self, stage: str) -> float:
        """Of a stage, or of the whole step."""
        return self.speedup if stage == "step" else self.before.stage(stage) / self.after.stage(stage)


def _engine(**changes: str) -> Change:
    return lambda run, _, __: replace(run, engine=replace(run.engine, **changes))  # type: ignore[arg-type]


def _speculate(run: RunInputs, numbers: Sequence[float], c: Constants) -> RunInputs:
    accepted, drafted = numbers
    return replace(run, engine=replace(run.engine, draft_tokens=drafted, accepted=accepted))


def _asynchronous(run: RunInputs, numbers: Sequence[float], c: Constants) -> RunInputs:
    """Rollout on GPUs of its own: as many as given, or the fastest split that the parallelism divides."""
    staleness, wanted = numbers
    run = replace(run, mode="async", staleness=staleness)
    if run.rollout_gpus:
        return run
    sizes = [int(wanted)] if wanted else splits(run)
    found = [_split(run, apart) for apart in sizes if 0 < apart < run.gpus]
    own = [each for each in found if whole(each)]
    if not own:
        chosen = (choose(each, Freedom(engine=True, fraction=True, trainer=True), "all", c) for each in found)
        own = [each for each in chosen if each is not None]
    if not own:
        raise InputError("no split of the GPUs into rollout and training fits", where="--what-if", hint="add --gpus")
    return min(own, key=lambda each: step_time(each, c).seconds)


def _split(run: RunInputs, apart: int) -> RunInputs:
    trainer = replace(run.trainer, gpus=run.gpus - apart)
    return replace(run, rollout_gpus=apart, trainer=trainer, memory_fraction=SEPARATE_FRACTION)


def _partial(run: RunInputs, _: Sequence[float], c: Constants) -> RunInputs:
    """A synchronous run has nothing that could go on: it becomes asynchronous."""
    return replace(_asynchronous(run, (1.0, 0.0), c) if run.mode == "sync" else run, partial=True)


def _lend(run: RunInputs, _: Sequence[float], c: Constants) -> RunInputs:
    return replace(_asynchronous(run, (1.0, 0.0), c) if run.mode == "sync" else run, lend=True)


def _sync_every(run: RunInputs, numbers: Sequence[float], c: Constants) -> RunInputs:
    if run.mode == "sync":
        raise InputError("a synchronous run sends weights in each step", where="--what-if", hint="write async:1+...")
    return replace(run, sync_every=numbers[0], staleness=max(run.staleness, numbers[0] - 1))


def _on_shared_gpus(run: RunInputs, numbers: Sequence[float], c: Constants) -> RunInputs:
    if run.rollout_gpus:
        raise InputError("rollout has GPUs of its own in this run", where="--what-if", hint="write async:1+partial")
    return replace(run, mode="async", partial=True, staleness=numbers[0])


def _without(name: str) -> Change:
    return lambda run, _, __: replace(run, passes=tuple(each for each in run.passes if each != name))


def _transport(name: str) -> Switch:
    return Switch(lambda run, *_: replace(run, transport=name), "with GPUs of rollout alone; others copy within a GPU")


SWITCHES: Mapping[str, Switch] = {
    "fp8-rollout": Switch(
        _engine(precision="fp8"), "pays where reading weights bounds decoding; correct for the mismatch of log-probs"
    ),
    "fp8-kv": Switch(_engine(kv_precision="fp8"), "pays where the cache bounds decoding, or answers wait for slots"),
    "fp8": Switch(
        lambda run, _, __: replace(
            run, engine=replace(run.engine, precision="fp8"), trainer=replace(run.trainer, precision="fp8")
        ),
        "rollout and training; not on GPUs without FP8",
    ),
    "spec-decode": Switch(
        _speculate,
        "pays while bandwidth bounds decoding (few sequences, fast arithmetic); costs where arithmetic does",
        (("acceptance", ACCEPTED, 0.0, 1.0), ("draft tokens", DRAFTED, 1.0, 16.0)),
    ),
    "delta-sync": _transport("delta"),
    "packed-sync": _transport("packed"),
    "async": Switch(
        _asynchronous,
        "pays where rollout and training take about as long, each on its GPUs; samples are that many steps old",
        (("staleness", 1.0, 0.0, 64.0), ("rollout GPUs", 0.0, 0.0, 1e6)),
    ),
    "colocate-async": Switch(
        _on_shared_gpus,
        "pays where the longest answers hold a step up; they go on after the update, with new weights",
        (("staleness", 1.0, 0.0, 64.0),),
    ),
    "partial": Switch(_partial, "with async, which it turns on: pays where the longest answers hold a step up"),
    "lend": Switch(
        _lend,
        "with async, which it turns on: pays where trainers wait for samples longer than two switches take; "
        "the trainer's GPUs hold an engine too",
    ),
    "sync-every": Switch(
        _sync_every,
        "with async: pays where weight syncs are a large part of a step, as with small models; samples are older",
        (("steps", 2.0, 1.0, 64.0),),
    ),
    "lora": Switch(
        lambda run, numbers, _: replace(run, trainer=replace(run.trainer, lora_rank=int(numbers[0]))),
        "less memory, one of three products less in an update; rollout stays",
        (("rank", LORA_RANK, 1.0, 4096.0),),
    ),
    "no-recompute": Switch(
        lambda run, _, __: replace(run, trainer=replace(run.trainer, recompute=False)), "where activations fit"
    ),
    "no-reference": Switch(_without("reference"), "without a KL term"),
    "no-old-log-probs": Switch(_without("old"), "log-probs of the engine, or approximated ones, in place of a pass"),
}


def changed(run: RunInputs, text: str, c: Constants) -> tuple[RunInputs, tuple[str, ...]]:
    """(the run with the switches of `a:1+b`, their conditions)."""
    conditions = []
    for part in sorted(text.split("+"), key=lambda part: part.strip().split(":")[0] in LAST):
        name, *given = part.strip().split(":")
        if name not in SWITCHES:
            raise unknown(name, SWITCHES, where="--what-if", what="unknown switch {}")
        switch = SWITCHES[name]
        run = switch.change(run, _numbers(name, given, switch), c)
        conditions.append(switch.condition)
    return run, tuple(conditions)


def _numbers(name: str, given: Sequence[str], switch: Switch) -> list[float]:
    if len(given) > len(switch.numbers):
        raise InputError(f"{name} takes {len(switch.numbers)} numbers, not {len(given)}", where="--what-if")
    found = []
    for i, (what, default, least, most) in enumerate(switch.numbers):
        try:
            value = float(given[i]) if i < len(given) else default
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise InputError(
                f"the {what} of {name} is {given[i]:.40}, not from {least:g} to {most:g}", where="--what-if"
            )
        found.append(value)
    return found


def what_if(run: RunInputs, text: str, c: Constants, offload: str = "all") -> WhatIf:
    """The step with the switches of `text` beside the step without them."""
    other, conditions = changed(run, text, c)
    before, after = step_time(run, c), step_time(other, c)
    room = all(phase.gb <= phase.gpu_gb for phase in phases(other, c, offload)[0]) and after.slots >= 1
    return WhatIf(text, before, after, other, room, conditions)
