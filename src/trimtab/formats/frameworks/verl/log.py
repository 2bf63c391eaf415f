"""Parses verl's logs: console lines `step:3 - timing_s/gen:12.3 - ...`, its file logger's JSON lines, TensorBoard.

Early releases wrote `timing/gen`, and no total of a step.

In verl's synchronous trainers `timing_s/gen` is the cost of generation. In the asynchronous ones (one_step_off,
fully_async, separate_async) the same timer is the trainer's wait for samples and must never count as a cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, number, step_number, tokens_of

_STEP = re.compile(r"(?:^|[^\w:])step:(\d{1,12}) - ")
_CONSOLE_OR_JSON = re.compile(r"step:\d{1,12} - .*\btiming(?:_s)?/|^\s*\{\s*\"step\":\s*\d+,\s*\"data\":\s*\{")

_OLD_TIMERS = "timing/"

_ASYNCHRONOUS = {
    "timing_s/generate_async": "one_step_off",
    "timing_s/sync_rollout_weights": "one_step_off",
    "timing_s/wait_for_enough_samples": "fully_async",
    "timing_s/param_sync": "fully_async",
    "timing_s/timing_s/param_sync": "fully_async",
    "timing_s/switch_wait": "separate_async",
    "timing_s/switch_to_trainer": "separate_async",
    "timing_s/switch_to_rollout": "separate_async",
}


class _Parser:
    """Each line is a record or none."""

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text.strip()
        if text.startswith("{"):
            record = _json_record(text)
        elif found := _STEP.search(text):
            record = _console_record(int(found[1]), text[found.end() :], line.whole)
        else:
            record = None
        if record is not None:
            yield record

    def end(self) -> tuple[StepRecord, ...]:
        return ()


def _json_record(text: str) -> StepRecord | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        # A cut-off last line is no JSON: marked, not guessed.
        return StepRecord(step=-1, whole=False) if text.startswith('{"step"') else None
    if not isinstance(data, dict) or not isinstance(data.get("data"), dict):
        return None
    step = step_number(str(data.get("step")))
    if step is None:
        return None
    values = {}
    for name, value in data["data"].items():
        key = _named(name)
        if VERL.keeps(key) and isinstance(value, int | float) and not isinstance(value, bool):
            read = number(repr(value))
            if read is not None:
                values[key] = read
    return StepRecord(step, values)


def _console_record(step: int, text: str, whole: bool) -> StepRecord:
    record = StepRecord(step, whole=whole)
    for item in text.split(" - "):
        name, colon, value = item.rpartition(":")
        key = _named(name.strip())
        if colon and VERL.keeps(key) and (read := number(value)) is not None:
            record.values[key] = read
    return record


def _named(name: str) -> str:
    """A metric's current name: timers were `timing/gen` once."""
    return f"timing_s/{name.removeprefix(_OLD_TIMERS)}" if name.startswith(_OLD_TIMERS) else name


def _waiting(names: frozenset[str]) -> dict[str, str]:
    modes = sorted({mode for name, mode in _ASYNCHRONOUS.items() if name in names})
    if not modes and any(name.startswith("fully_async/") for name in names):
        modes = ["fully_async"]
    if not modes:
        return {}
    return {"rollout": f"in verl's {modes[0]} mode timing_s/gen is the trainer's wait for samples"}


def _token_counts(values: Mapping[str, float]) -> tuple[float | None, float | None]:
    length = values.get("response_length/mean")
    prompt = values.get("prompt_length/mean")
    total = values.get("perf/total_num_tokens")
    if length and total and prompt is not None and length + prompt > 0:
        return total * length / (length + prompt), length
    generation, per_token_ms = values.get("timing_s/gen"), values.get("timing_per_token_ms/gen")
    if generation and per_token_ms and per_token_ms > 0:
        return 1000 * generation / per_token_ms, length
    return tokens_of(length, None)


VERL = LogFramework(
    name="verl",
    supported_logs="verl: console lines `step:1 - timing_s/gen:...`, the file logger's JSON lines, TensorBoard",
    prefix="timing_s/",
    kept_prefixes=(
        "timing_s/",
        "timing_per_token_ms/gen",
        "perf/total_num_tokens",
        "response_length/mean",
        "prompt_length/mean",
        "fully_async/",
        "critic/rewards/mean",
    ),
    marker=_CONSOLE_OR_JSON,
    parser=_Parser,
    needles=(b"step",),
    parts={
        "rollout": (("gen", "gen_max"),),
        "reward": (("reward",),),
        "old_log_prob": (("old_log_prob",),),
        "ref": (("ref",),),
        "values": (("values",),),
        "update_critic": (("update_critic",),),
        "update_actor": (("update_actor", "adv"),),
        "weight_sync": (
            ("update_weights",),
            ("sync_rollout_weights",),
            ("param_sync",),
            ("timing_s/param_sync",),
        ),
    },
    total="step",
    periodic=("save_checkpoint", "testing", "start_profile", "stop_profile"),
    idle=("generate_async", "wait_for_enough_samples", "switch_wait"),
    waiting=_waiting,
    token_counts=_token_counts,
    reward="critic/rewards/mean",
    other_timers=("dump_rollout_generations",),
    line_start=_STEP,
)
