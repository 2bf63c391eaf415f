"""A log that is being written is read as a finished one would be, however its bytes arrive and whoever writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advise_world import (
    CASES,
    NEMO,
    VERL,
    Told,
    event_file,
    nemo_blocks,
    openrlhf_lines,
    rlinf_bar,
    verl_console,
    verl_data,
    verl_jsonl,
)
from trimtab.core.errors import InputError
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep, RunLog
from trimtab.formats.logs.follow_costs import reading_of
from trimtab.formats.logs.gpus import RunFacts
from trimtab.runtime.advise.follower import LogTail, first_ranks, open_tail

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parents[2] / "data" / "logs"
SAMPLES = [
    ROOT / "examples/logs/verl.jsonl",
    ROOT / "examples/logs/rlinf.log",
    ROOT / "examples/logs/nemo_rl.log",
    ROOT / "examples/logs/openrlhf.log",
    DATA / "verl_console.log",
    DATA / "rlinf_metrics.log",
    DATA / "nemo_async.log",
    DATA / "nemo_tensorboard/events.out.tfevents.1760000000.example",
]
SHORT = Told(VERL.seconds, steps=6)


def log_of(framework: str) -> RunLog:
    return RunLog(logs.FRAMEWORKS[framework])


def steps_of(log: RunLog, *pieces: bytes | str) -> list[LoggedStep]:
    found: list[LoggedStep] = []
    for piece in pieces:
        found += log.take("run.log", piece if isinstance(piece, bytes) else piece.encode())
    return found + log.end()


def short(framework: str) -> bytes:
    """Six steps in a framework's own form."""
    writes = {"verl": verl_console, "nemo_rl": nemo_blocks, "rlinf": rlinf_bar, "openrlhf": openrlhf_lines}
    case = next(case for case in CASES if case.framework == framework)
    return writes[framework](Told(case.seconds, steps=6)).encode()


def numbers(steps: Iterable[LoggedStep]) -> list[int]:
    return [step.number for step in steps]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name[:20])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_bytes_in_any_pieces_give_what_the_whole_file_gives(path: Path, size: int) -> None:
    framework = logs.detect([path])
    data = path.read_bytes()
    size = max(size, len(data) // 4000)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    found = steps_of(RunLog(framework), *parts)
    assert found == steps_of(RunLog(framework), data)
    whole = logs.join(framework, [path])
    assert [dict(step.values) for step in found] == [record.values for record in whole.steps(0)]
    assert sum(step.restart for step in found) == len(whole.pieces) - 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4000), max_size=12), st.sampled_from(["verl", "nemo_rl", "rlinf", "openrlhf"]))
def test_no_cut_makes_another_step(cuts: list[int], framework: str) -> None:
    text = short(framework)
    log, given_out, at = log_of(framework), [], 0
    for cut in [*cuts, len(text)]:
        given_out += log.take("run.log", text[at : at + cut])
        given_out += log.settle()
        at += cut
    given_out += log.take("run.log", text[at:])
    assert given_out + log.end() == steps_of(log_of(framework), text)


def test_a_half_line_waits_for_its_other_half() -> None:
    log = log_of("verl")
    text = verl_console(SHORT).encode()
    assert numbers(log.take("run.log", text[: len(text) // 2 + 40])) == [1, 2]
    assert numbers(log.settle()) == []  # more of step 3 may come
    assert numbers(log.settle()) == [3]
    assert numbers(log.take("run.log", text[len(text) // 2 + 40 :])) == [4, 5]
    assert numbers(log.settle() + log.settle()) == [6]


def test_a_line_that_was_cut_off_for_good_is_left_out_and_counted() -> None:
    log = log_of("verl")
    assert numbers(steps_of(log, verl_console(SHORT)[:-40])) == [1, 2, 3, 4, 5]
    assert log.joined.cut_off == 1


def test_lines_of_several_processes_never_make_one_step() -> None:
    ours = nemo_blocks(Told(NEMO.seconds, steps=5), mark="(Driver pid=7) ").splitlines(keepends=True)
    theirs = nemo_blocks(Told(NEMO.seconds, steps=5, seed=9), mark="(Shadow pid=8, ip=10.0.0.2) ").splitlines(True)
    mixed = "".join(a + b + "(Noise pid=9)   • generation: 99.00s (1.0%)\n" for a, b in zip(ours, theirs, strict=True))
    log = log_of("nemo_rl")
    assert steps_of(log, mixed) == steps_of(log_of("nemo_rl"), "".join(ours))
    assert log.duplicates == 5


def test_ranks_that_log_the_same_steps_count_once() -> None:
    ranks = [verl_console(Told(VERL.seconds, steps=6, seed=seed), pid=None).splitlines(True) for seed in (1, 2, 3)]
    plain = "".join("".join(lines) for lines in zip(*ranks, strict=True))
    marked = "".join(
        "".join(f"[rank{at}]:{line}" for at, line in enumerate(lines)) for lines in zip(*ranks, strict=True)
    )
    for text in (plain, marked):
        log = log_of("verl")
        steps = steps_of(log, text)
        assert numbers(steps) == [1, 2, 3, 4, 5, 6]
        assert not any(step.restart for step in steps)
        assert log.duplicates == 12


def test_a_process_that_begins_again_further_back_is_a_restart() -> None:
    first, again = verl_console(Told(VERL.seconds, steps=8), 1), verl_console(Told(VERL.seconds, steps=8, seed=3), 2)
    again = "".join(line for line in again.splitlines(True) if "step:4 " in line or "step:5 " in line)
    steps = steps_of(log_of("verl"), first + "worker died\n" + again)
    assert numbers(steps) == [1, 2, 3, 4, 5, 6, 7, 8, 4, 5]
    assert [step.number for step in steps if step.restart] == [4]


def test_checkpoints_and_validation_are_told_with_their_step() -> None:
    steps = steps_of(log_of("verl"), verl_jsonl(Told(VERL.seconds, steps=6, saves=3)))
    assert [step.number for step in steps if step.saved] == [3, 6]
    assert [step.number for step in steps_of(log_of("nemo_rl"), nemo_blocks(Told(NEMO.seconds, steps=4, saves=2)))
            if step.saved] == [2, 4]  # fmt: skip


def test_a_profiler_that_is_off_takes_no_step_its_total() -> None:
    line = (
        "(TaskRunner pid=4242) step:{} - timing_s/start_profile:0.000213 - timing_s/gen:41.5 - timing_s/reward:0.8 - "
        "timing_s/old_log_prob:6.1 - timing_s/adv:0.04 - timing_s/update_actor:22.4 - "
        "timing_s/dump_rollout_generations:0.31 - timing_s/step:71.4 - timing_s/stop_profile:0.000187\n"
    )
    steps = steps_of(log_of("verl"), "".join(line.format(n) for n in range(1, 5)))
    reading = reading_of(logs.FRAMEWORKS["verl"], steps, RunFacts())
    assert [step.extra for step in steps] == [()] * 4
    assert [reading.total(step) for step in steps] == [71.4] * 4


def test_an_event_file_is_read_while_it_grows() -> None:
    data = event_file(verl_data(SHORT))
    log, found = log_of("verl"), []
    for at in range(0, len(data), 13):
        found += log.take("events.out.tfevents.1", data[at : at + 13])
    found += log.end()
    assert numbers(found) == [1, 2, 3, 4, 5, 6]
    assert found[2].values["timing_s/gen"] == pytest.approx(verl_data(SHORT)[2][1]["timing_s/gen"], rel=1e-6)


def test_an_event_file_that_turns_to_garbage_keeps_what_was_before() -> None:
    data = event_file(verl_data(SHORT))
    log = log_of("verl")
    assert numbers(steps_of(log, data + b"\xff" * 64)) == [1, 2, 3, 4, 5, 6]
    assert log.joined.cut_off == 1


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    log = log_of("verl")
    for _ in range(6):
        log.take("run.log", b"x" * (1 << 19))
    assert numbers(steps_of(log, "\n" + verl_console(SHORT))) == [1, 2, 3, 4, 5, 6]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=200), st.integers(0, 2000)), max_size=20),
    st.sampled_from(["verl", "nemo_rl", "rlinf", "openrlhf"]),
    st.booleans(),
)
def test_garbage_is_never_an_error(pieces: list[bytes | int], framework: str, events: bool) -> None:
    good = short(framework)
    good = event_file(verl_data(SHORT)) if events else good
    log = log_of(framework)
    for piece in pieces:
        log.take("run.log", piece if isinstance(piece, bytes) else good[piece : piece + 700])
        log.settle()
    log.file_replaced("run.log")
    log.end()


# ---- files ---------------------------------------------------------------------------------------------------------


class Reader:
    """Follows one path and gathers the steps."""

    def __init__(self, path: Path, framework: str = "verl") -> None:
        self.tail, self.log = LogTail([path]), log_of(framework)
        self.steps: list[LoggedStep] = []

    def look(self) -> list[int]:
        before = len(self.steps)
        for name, data in self.tail.read():
            if data is None:
                self.log.file_replaced(name)
            else:
                self.steps += self.log.take(name, data)
        self.steps += self.log.settle() + self.log.settle()
        return numbers(self.steps[before:])

    def close(self) -> None:
        self.tail.close()


def rows(count: int, seed: int = 1, first: int = 1) -> list[str]:
    return verl_jsonl(Told(VERL.seconds, steps=count, seed=seed)).splitlines(True)[first - 1 :]


def test_a_log_that_is_renamed_away_and_made_again_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = rows(9)
    with path.open("w") as file:
        file.write("".join(lines[:3]))
    reader = Reader(path)
    assert reader.look() == [1, 2, 3]
    with path.open("a") as file:
        file.write(lines[3])
    path.rename(tmp_path / "run.jsonl.1")
    path.write_text("".join(lines[4:6]))
    assert reader.look() == [4, 5, 6]
    path.unlink()
    assert reader.look() == []
    assert reader.tail.gone == {path}
    path.write_text("".join(lines[6:9]))
    assert reader.look() == [7, 8, 9]
    assert not reader.tail.gone
    assert not any(step.restart for step in reader.steps)
    reader.close()


def test_a_log_that_is_truncated_by_a_restart_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(rows(5)))
    reader = Reader(path)
    assert reader.look() == [1, 2, 3, 4, 5]
    with path.open("w") as file:
        file.write("".join(rows(2, seed=4)))
    assert reader.look() == [1, 2]
    assert reader.steps[5].restart
    # It has grown past where the old one ended before anybody looked again: its first bytes tell.
    with path.open("w") as file:
        file.write("".join(rows(9, seed=5)))
    assert reader.look() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [step.number for step in reader.steps if step.restart] == [1, 1]
    reader.close()


def test_a_log_that_is_copied_and_truncated_under_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = rows(6)
    with path.open("w") as file:  # not in append mode: what follows lies behind a hole of zeros
        file.write("".join(lines[:4]))
        file.flush()
        reader = Reader(path)
        assert reader.look() == [1, 2, 3, 4]
        os.truncate(path, 0)
        assert reader.look() == []
        file.write("".join(lines[4:]))
        file.flush()
        assert reader.look() == [5, 6]
    assert not any(step.restart for step in reader.steps)
    reader.close()


def test_new_event_files_of_a_folder_are_found(tmp_path: Path) -> None:
    data = verl_data(Told(VERL.seconds, steps=6))
    (tmp_path / "events.out.tfevents.1.a").write_bytes(event_file(data[:4]))
    reader = Reader(tmp_path)
    assert reader.look() == [1, 2, 3]  # of the newest one scalars may still come
    (tmp_path / "events.out.tfevents.2.a").write_bytes(event_file(data[3:]))
    reader.look()
    assert sorted(set(numbers([*reader.steps, *reader.log.end()]))) == [1, 2, 3, 4, 5, 6]
    reader.close()


def test_of_several_ranks_logs_the_first_is_read() -> None:
    names = [Path(f"rank_{at}.log") for at in (0, 1, 2)] + [Path("other.log")]
    assert first_ranks(names) == [Path("rank_0.log"), Path("other.log")]
    assert first_ranks([Path("step1.log"), Path("step2.log")]) == [Path("step1.log"), Path("step2.log")]


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "none.log", "cannot be read"), (tmp_path / "pipe", "no file"), (tmp_path, "no log")):
        with pytest.raises(InputError, match=said), open_tail([path]):
            pass
