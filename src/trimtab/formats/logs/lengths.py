"""Computes the completion curve of a rollout from the response lengths of its samples.

All responses of a step start together and a decode step takes the same time for few and for many, so a response is done
after a share of the time that equals its share of the longest response. A prompt group is done with its longest sample.
Lengths are token counts where the dump has them, else characters, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.logs.records import LogLine, read_lines

TOKEN_KEYS = ("response_tokens", "response_length", "output_tokens", "completion_tokens", "num_tokens")
TEXT_KEYS = ("output", "response", "completion")
MAX_TOKENS = 1e12
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

CompletionCurve = tuple[tuple[float, float], ...]


_Answer = tuple[float, str | None]  # length and prompt


def looks_like_dump(path: Path) -> bool:
    """Whether the first line of a file is a sample rather than a log line."""
    try:
        first = next(iter(read_lines(path)), None)
    except InputError:
        return False
    return first is not None and _answer(_json(first), set()) is not None


def read(paths: Sequence[Path], group_size: int | None = None) -> tuple[CompletionCurve, tuple[str, ...]]:
    """The completion curve [share of batches done, share of time] of dumps, and notes.

    Without a group size, samples of a step with the same prompt are a group; without prompts each sample is its own.
    """
    if group_size is not None and group_size < 1:
        raise InputError("--group-size is 1 or more")
    files = [file for path in paths for file in _dump_files(path)]
    units: set[str] = set()
    steps: dict[tuple[str, str], list[_Answer]] = {}
    skipped = 0
    for file in files:
        for line in read_lines(file):
            if not line.text.strip():
                continue
            data = _json(line)
            answer = _answer(data, units)
            if answer is None or data is None:
                skipped += 1
                continue
            # Every step is a rollout; a dump without steps is a rollout per file.
            steps.setdefault((str(file), str(data.get("step", ""))), []).append(answer)
    if not steps:
        named = ", ".join(str(path) for path in paths)
        raise InputError(
            "no answer's length is in the dump",
            where=named,
            hint=f"JSON lines with one of {', '.join(TOKEN_KEYS)} (a number) or {', '.join(TEXT_KEYS)} (text) are read",
        )
    if len(units) > 1:
        raise InputError("some answers have token counts and some only text", hint="give dumps of one kind")
    rollouts = [_group_lengths(answers, group_size) for answers in steps.values()]
    rollouts = [lengths for lengths in rollouts if len(lengths) > 1 and lengths[-1] > 0]
    if not rollouts:
        raise InputError("every step of the dump holds a single group: a curve needs two", hint="check --group-size")
    answers = sum(len(found) for found in steps.values())
    notes = [
        f"completion from {answers} answers in {sum(map(len, rollouts))} groups, rollouts: {len(rollouts)}, "
        f"by their {units.pop()}"
    ]
    if skipped:
        notes.append(f"{skipped} lines of the dump hold no answer and are left out")
    return curve(rollouts), tuple(notes)


def curve(rollouts: Sequence[Sequence[float]]) -> CompletionCurve:
    """The mean curve of rollouts, each the ascending lengths of its groups: monotonic, ending in (1, 1)."""
    points: list[tuple[float, float]] = []
    for share in SHARES:
        times = [_time_of(share, lengths) for lengths in rollouts]
        points.append((share, round(min(1.0, sum(times) / len(times)), 4)))
    points[-1] = (1.0, 1.0)
    return tuple(points)


def _time_of(share: float, lengths: Sequence[float]) -> float:
    """The share of the longest response's time by which a share of the groups is done; interpolated."""
    position = share * len(lengths)
    whole = min(int(position), len(lengths) - 1)
    below = lengths[whole - 1] if whole else 0.0
    return (below + (lengths[whole] - below) * (position - whole)) / lengths[-1]


def _group_lengths(answers: Sequence[_Answer], group_size: int | None) -> list[float]:
    if group_size is None and all(prompt is not None for _, prompt in answers):
        by_prompt: dict[str | None, float] = {}
        for length, prompt in answers:
            by_prompt[prompt] = max(length, by_prompt.get(prompt, 0.0))
        return sorted(by_prompt.values())
    size = group_size or 1
    return sorted(max(length for length, _ in answers[at : at + size]) for at in range(0, len(answers), size))


def _dump_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    inside = sorted(path.glob("*.jsonl"))
    if not inside:
        raise InputError(f"the folder {path} holds no .jsonl dump", hint="name the dump itself")
    yield from inside


def _json(line: LogLine) -> Mapping[str, Any] | None:
    if not line.text.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(line.text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _answer(data: Mapping[str, Any] | None, units: set[str]) -> _Answer | None:
    if data is None or isinstance(data.get("data"), dict):
        return None
    prompt = data.get("input", data.get("prompt"))
    prompt = prompt if isinstance(prompt, str) else None
    for key in TOKEN_KEYS:
        value = data.get(key)
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_TOKENS:
            units.add("tokens")
            return (float(value), prompt)
    for key in TEXT_KEYS:
        value = data.get(key)
        if isinstance(value, str):
            units.add("characters, as the dump has no token counts")
            return (float(len(value)), prompt)
    return None
