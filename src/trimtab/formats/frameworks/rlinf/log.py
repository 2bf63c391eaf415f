"""Parses RLinf's logs: the metric table of `metrics.log`, the progress bar's `<name>_time=`, TensorBoard's `time/*`.

The embodied runner prints the table; the reasoning runner shows its times behind the progress bar. Timers of workers
that exchange data while they run (environment and rollout; every pipeline stage; rewards, computed as responses come;
FSDP training, whose timer starts with the step) contain waiting. Where a timer of the computation alone exists it is
used; otherwise the time is marked as a wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trimtab.formats.logs.records import LogFramework, LogLine, StepRecord, number, tokens_of

_TABLE_STEP = re.compile(r"│\s*Global Step:\s*(\d{1,12})/\d+")
_SECTION = re.compile(r"^\s*├─+ ([^─]+?) ─+┤\s*$")
_PROGRESS = re.compile(r"(\d{1,12})/\d+ \[[^\[\]]*?[,<][^\[\]]*?, (?=\S+=)")
_BAR_OR_TABLE = re.compile(r"├─+ Metric Table ─+┤|\d/\d+ \[.*\b(?:step|rollout|actor/training)_time=")
_SECTIONS = {"Time": "time/", "Rollout": "rollout/"}


class _Parser:
    """A table over several lines, or a progress bar's state in one."""

    def __init__(self) -> None:
        self._table: StepRecord | None = None
        self._prefix: str | None = None  # of the table's section

    def take(self, line: LogLine) -> Iterator[StepRecord]:
        text = line.text
        if "│" in text or "├" in text or "╰" in text:
            if found := _TABLE_STEP.search(text):
                yield from self.end()
                self._table = StepRecord(int(found[1]), whole=False)
            elif section := _SECTION.match(text):
                self._prefix = _SECTIONS.get(section[1].strip())
            elif self._table is not None and "╰" in text:
                self._table.whole = line.whole
                yield from self.end()
            elif self._table is not None and self._prefix is not None:
                _read_row(self._table, self._prefix, text)
        elif "_time=" in text and (progress := _PROGRESS.search(text)):
            yield _progress_record(int(progress[1]), text[progress.end() :])

    def end(self) -> Iterator[StepRecord]:
        table, self._table, self._prefix = self._table, None, None
        if table is not None:
            yield table


def _read_row(table: StepRecord, prefix: str, text: str) -> None:
    for cell in text.split("│"):
        name, equals, value = cell.strip().rpartition("=")
        # A cell too narrow for its text ends in an ellipsis: no number.
        if equals and RLINF.keeps(prefix + name) and (read := number(value)) is not None:
            table.values[prefix + name] = read


def _progress_record(step: int, text: str) -> StepRecord:
    inside, bracket, _ = text.partition("]")
    record = StepRecord(step, whole=bool(bracket))
    for item in inside.split(", "):
        name, equals, value = item.strip().rpartition("=")
        if not equals or (read := number(value)) is None:
            continue
        if name.endswith("_time"):
            record.values["time/" + name[: -len("_time")]] = read
        elif RLINF.keeps("rollout/" + name):
            record.values["rollout/" + name] = read
    return record


def _waiting(names: frozenset[str]) -> dict[str, str]:
    waits: dict[str, str] = {}
    both = "environment and rollout answer each other inside this timer, so it contains waiting"
    if "time/generate_rollouts" in names and not any(
        name in names for name in ("time/rollout/predict", "time/rollout/predict_rtc")
    ):
        waits["rollout"] = both
    if "time/env/interact" in names and "time/env/env_interact_step" not in names:
        waits["env"] = both
    if "time/reward" in names:
        waits["reward"] = "the reward worker's timer runs from the step's start and contains waiting for answers"
    elif "time/reward/compute_rewards" in names and "time/reward/compute_reward" not in names:
        waits["reward"] = "the reward worker's timer contains waiting for the environment"
    if "time/actor/wait_for_rollout_store_ready" in names:
        waits["rollout"] = "in RLinf's asynchronous runners the rollout runs beside the training"
    return waits


def _token_counts(values: Mapping[str, float]) -> tuple[float | None, float | None]:
    length = values.get("rollout/response_length") or values.get("rollout/average_response_length")
    return tokens_of(length, values.get("rollout/total_num_sequence"))


RLINF = LogFramework(
    name="rlinf",
    supported_logs="RLinf: the metric table (metrics.log), the progress bar with `rollout_time=...`, TensorBoard",
    prefix="time/",
    kept_prefixes=(
        "time/",
        "rollout/response_length",
        "rollout/average_response_length",
        "rollout/total_num_sequence",
        "rollout/rewards",
    ),
    marker=_BAR_OR_TABLE,
    parser=_Parser,
    needles=("│".encode(), "├".encode(), "╰".encode(), b"_time="),
    parts={
        "rollout": (
            ("rollout",),
            ("rollout/predict",),
            ("rollout/predict_rtc",),
            ("generate_rollouts",),
            ("rollout/rollout/generate",),
        ),
        "env": (("env/env_interact_step",), ("env/interact",)),
        "reward": (("reward",), ("reward/compute_reward",), ("reward/compute_rewards",)),
        "inference": (("actor/inference",), ("inference",)),
        "critic_inference": (("critic/inference",),),
        "actor": (
            ("actor/training",),
            ("actor_training", "cal_adv_and_returns"),
            ("actor/run_training",),
        ),
        "critic": (("critic/training",),),
        "weight_sync": (("sync_weights",),),
    },
    total="step",
    periodic=("eval", "save_checkpoint", "evaluate"),
    idle=("actor/wait_for_rollout_store_ready", "actor/recv_traj"),
    waiting=_waiting,
    token_counts=_token_counts,
    reward="rollout/rewards",
    last="actor",
    other_timers=("prepare_data",),
)
