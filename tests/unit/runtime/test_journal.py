"""The journal on real files: what is written is read, what is torn is said, what is damaged is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import (
    CancelRequested,
    NodeJoined,
    PoolEnsured,
    PoolEvent,
    PoolTick,
    TaskStarted,
    TaskStopped,
    TaskSubmitted,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import BundlePlacement, PoolSpec, TaskSpec
from trimtab.runtime.procs import locks
from trimtab.runtime.store.blobs import BlobStore, file_name, header_of, pack, unpack
from trimtab.runtime.store.journal import (
    NODE_EVENTS,
    POOL_EVENTS,
    ROLLOUT_EVENTS,
    VERSION,
    EventKinds,
    Journal,
    JournalVersionError,
    read_journal,
)
from waiting import until

EVENTS: list[PoolEvent] = [
    NodeJoined("n0", Resources.of(cpu=8, memory=2**33), Resources.of(cpu=0.5), (("zone", "a"),)),
    PoolEnsured(PoolSpec("p", Resources.of(cpu=4), reserved=(Resources.of(cpu=1),))),
    TaskSubmitted(TaskSpec("täsk 1", "p", (Resources.of(cpu=1), Resources.of(gpu=0.25)), labels=(("role", "train"),))),
    TaskStarted("täsk 1", 1, "a warm host"),
    CancelRequested("täsk 1", keep_slot=False, code=ReasonCode.client_died),
    TaskStopped("täsk 1", 1, "timed out", saved=True, note="line\nbreak"),
    PoolTick(),
]


def written(directory: Path, events: list[PoolEvent] = EVENTS, start: float = 100.0) -> None:
    journal = Journal(directory)
    for number, event in enumerate(events):
        journal.append(start + number, event)
    journal.close()


def segment(directory: Path, number: int = 0) -> Path:
    return directory / f"journal-{number:08d}.jsonl"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    found = read_journal(tmp_path)
    assert [event for _, event in found.events] == EVENTS
    assert [now for now, _ in found.events] == [100.0 + number for number in range(len(EVENTS))]
    assert found.snapshot is None
    assert found.torn is None
    assert found.last_time == 106.0


def test_an_empty_directory_is_an_empty_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "nothing").empty
    written(tmp_path, [])
    assert read_journal(tmp_path).empty


def test_it_is_plain_json_lines_with_a_header(tmp_path: Path) -> None:
    written(tmp_path)
    lines = [json.loads(line) for line in segment(tmp_path).read_text().splitlines()]
    assert lines[0]["version"] == VERSION
    assert lines[4] == [103.0, "TaskStarted", {"task": "täsk 1", "attempt": 1, "how": "a warm host"}]


@pytest.mark.parametrize("tail", [b'[107.0,"PoolTick"', b'[107.0,"PoolTick",{}]', b"\0\0\0\0", b'[107.0,"Ti\n'])
def test_a_torn_last_line_is_dropped_said_and_written_over(tmp_path: Path, tail: bytes) -> None:
    written(tmp_path)
    with open(segment(tmp_path), "ab") as file:
        file.write(tail)
    found = read_journal(tmp_path)
    assert len(found.events) == len(EVENTS)
    assert found.torn is not None
    assert "line 9" in found.torn
    written(tmp_path, [PoolTick()], start=200.0)
    again = read_journal(tmp_path)
    assert again.torn is None
    assert again.events[-1] == (200.0, PoolTick())
    assert len(again.events) == len(EVENTS) + 1


def test_a_torn_header_is_an_empty_journal(tmp_path: Path) -> None:
    segment(tmp_path).write_bytes(b'{"format": "trimtab-j')
    written(tmp_path)
    assert len(read_journal(tmp_path).events) == len(EVENTS)


@pytest.mark.parametrize(
    "damage", [b"garbage\n", b'[1.0,"NoSuchEvent",{}]\n', b'[1.0,"TaskStarted",{"no_such":1}]\n', b"{}\n"]
)
def test_a_damaged_line_in_the_middle_is_refused_with_file_and_line(tmp_path: Path, damage: bytes) -> None:
    written(tmp_path)
    lines = segment(tmp_path).read_bytes().splitlines(keepends=True)
    lines[3] = damage
    segment(tmp_path).write_bytes(b"".join(lines))
    with pytest.raises(InputError) as refused:
        Journal(tmp_path)
    assert refused.value.where == f"{segment(tmp_path)}, line 4"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    segment(tmp_path).write_text('{"format":"trimtab-journal","version":99}\n')
    with pytest.raises(InputError, match="format 99"):
        Journal(tmp_path)
    (tmp_path / "snapshot-00000001.json").write_text('{"format":"trimtab-journal","version":99}\n')
    with pytest.raises(InputError, match="format 99"):
        read_journal(tmp_path)


@pytest.mark.parametrize("kinds", [POOL_EVENTS, ROLLOUT_EVENTS, NODE_EVENTS], ids=["pool", "rollout", "nodes"])
def test_an_older_format_is_refused_and_left_as_it_is(tmp_path: Path, kinds: EventKinds) -> None:
    text = f'{{"format":"trimtab-journal","version":{VERSION - 1}}}\n[1.0,"Old",{{}}]\n'
    segment(tmp_path).write_text(text)
    with pytest.raises(JournalVersionError, match=f"format {VERSION - 1}, older than {VERSION}") as refused:
        Journal(tmp_path, kinds=kinds)
    assert refused.value.where == str(segment(tmp_path))
    assert segment(tmp_path).read_text() == text


def test_after_a_snapshot_only_what_followed_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(50):
        journal.append(float(number), PoolTick())
    journal.note("history was lost")
    journal.snapshot(50.0, {"tasks": ["a"]})
    journal.append(51.0, PoolTick())
    journal.close()
    found = read_journal(tmp_path)
    assert found.snapshot == {"tasks": ["a"]}
    assert found.last_time == 51.0
    assert found.events == ((51.0, PoolTick()),)
    assert found.notes == ("history was lost",)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "journal-00000001.jsonl",
        "lock",
        "snapshot-00000001.json",
    ]


def test_a_crash_before_a_snapshot_stands_loses_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(1.0, PoolTick())
    assert journal.rotate() == 1
    journal.append(3.0, PoolTick())
    journal.close()
    found = read_journal(tmp_path)
    assert found.snapshot is None
    assert [now for now, _ in found.events] == [1.0, 3.0]
    assert [now for now, _ in read_journal(tmp_path, before=1).events] == [1.0]


def test_compacting_gives_the_state_that_replaying_gives_and_the_writer_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    live = PoolMachine()
    for number, event in enumerate(EVENTS):
        journal.append(100.0 + number, event)
        live.handle(event, 100.0 + number)
    before = journal.rotate()
    state = live.dump()
    last = CancelRequested("täsk 1")
    journal.append(200.0, last)
    live.handle(last, 200.0)
    compact = [sys.executable, "-m", "trimtab.runtime.store.journal", str(tmp_path), str(before)]
    subprocess.run(compact, check=True, timeout=60)
    journal.close()
    assert not segment(tmp_path).exists()
    found = read_journal(tmp_path)
    assert found.snapshot == json.loads(json.dumps(state))
    replayed = PoolMachine.load(found.snapshot)
    for now, event in found.events:
        replayed.handle(event, now)
    assert replayed.dump() == live.dump()


def test_a_full_disk_keeps_the_segment_that_it_could_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal.append(1.0, PoolTick())
        assert journal.rotate() == 0
    journal.close()
    assert read_journal(tmp_path).events == ((1.0, PoolTick()),)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    segment(tmp_path).rename(segment(tmp_path, 2))
    with pytest.raises(InputError, match="missing: journal-00000000"):
        read_journal(tmp_path)


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000003.json").write_text('{"format":"trimtab-journal","version":2,"ti')
    with pytest.raises(InputError, match="snapshot is damaged"):
        read_journal(tmp_path)


def test_a_deleted_journal_is_noticed_and_made_whole_by_a_snapshot(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(1.0, PoolTick())
    assert not journal.vanished
    segment(tmp_path / "j").unlink()
    assert journal.vanished
    journal.snapshot(2.0, {"tasks": ["a"]})
    assert not journal.vanished
    journal.append(3.0, PoolTick())
    journal.close()
    assert read_journal(tmp_path / "j").snapshot == {"tasks": ["a"]}


def test_a_full_disk_is_said_and_nothing_is_lost_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 5:
            return write(descriptor, bytes(data)[:5])  # half a line fits
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal.append(1.0, PoolTick())
        assert journal.fault is not None
        assert "No space left" in journal.fault
    journal.append(2.0, PoolTick())
    assert journal.fault is None
    journal.close()
    assert read_journal(tmp_path).events == ((1.0, PoolTick()), (2.0, PoolTick()))


def test_a_disk_that_dropped_what_it_was_forced_to_keep_is_a_fault_until_all_of_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append(1.0, PoolTick())
    until(lambda: journal.synced)
    kept = segment(tmp_path).stat().st_size
    beside = tmp_path / "payload"
    beside.write_text("whole")

    def lost(descriptor: int) -> None:  # as a kernel does it: an error once, and the pages count as clean
        size = os.fstat(descriptor).st_size
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(segment(tmp_path)) and size > kept:
            os.pwrite(descriptor, b"\0" * (size - kept), kept)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lost)
        journal.sync_first(beside)
        journal.append(2.0, PoolTick())
        until(lambda: journal.fault is not None and "forced to disk" in journal.fault)
        journal.append(3.0, PoolTick())
        assert journal.fault is not None
        assert journal.rotate() == 0  # what the disk does not have cannot be left behind
        assert not journal.synced
    until(lambda: journal.fault is None and journal.synced)
    assert read_journal(tmp_path).events == ((1.0, PoolTick()), (2.0, PoolTick()), (3.0, PoolTick()))
    assert beside.read_text() == "whole"
    assert journal.rotate() == 1
    journal.close()


def test_a_snapshot_that_cannot_be_written_loses_nothing_of_what_waits_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal.append(1.0, PoolTick())
        with monkeypatch.context() as worse:
            worse.setattr("trimtab.runtime.store.journal.write_file", lambda *_, **__: full(0, b""))
            journal.snapshot(2.0, {"tasks": []})
    journal.append(3.0, PoolTick())
    journal.close()
    assert read_journal(tmp_path).events == ((1.0, PoolTick()), (3.0, PoolTick()))


def test_killed_in_the_middle_of_writing_every_appended_event_is_there(tmp_path: Path) -> None:
    script = (
        "import sys; from trimtab.runtime.store.journal import Journal\n"
        "from trimtab.machines.pool.events import PoolTick\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(10**9):\n"
        "    journal.append(float(number), PoolTick()); print(number, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(500):
        said = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split("\n")
    writer.stdout.close()
    writer.wait(timeout=10)
    said = max([said, *(int(one) for one in rest[:-1])])
    assert read_journal(tmp_path).last_time >= said
    Journal(tmp_path).close()  # the lock died with its owner


def test_two_controllers_cannot_write_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, owner="first")
    with pytest.raises(InputError, match=f"first, process {os.getpid()}"):
        Journal(tmp_path, lock_wait_s=0.1)
    first.close()
    Journal(tmp_path, lock_wait_s=0).close()


def test_without_flock_a_claim_file_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", none)
    first = Journal(tmp_path, owner="first")
    with pytest.raises(InputError, match="first, process"):
        Journal(tmp_path, lock_wait_s=0.1)
    first.close()
    claim = tmp_path / "lock.owner"
    gone = {"owner": "dead", "host": locks.socket.gethostname(), "pid": os.getpid(), "born": 1}
    claim.write_text(json.dumps(gone))
    Journal(tmp_path, lock_wait_s=1).close()
    claim.write_text(json.dumps({**gone, "host": "elsewhere"}))
    with pytest.raises(InputError, match="on elsewhere"):
        Journal(tmp_path, lock_wait_s=0.1)
    long_ago = time.time() - 3600
    os.utime(claim, (long_ago, long_ago))
    Journal(tmp_path, lock_wait_s=1).close()


def test_files_of_tasks_are_whole_or_not_there_and_go_with_their_task(tmp_path: Path) -> None:
    shelf = BlobStore(tmp_path)
    staged = shelf.stage("payloads", "a", b"class")
    assert shelf.get("payloads", "a") is None
    staged.commit()
    assert shelf.get("payloads", "a") == b"class"
    shelf.stage("payloads", "a", b"refused").discard()
    shelf.put("results", "a", b"42")
    shelf.put("payloads", "b", b"other")
    shelf.put_state("a", 1, 0, b"s")
    shelf.keep_only(["b"])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]
    shelf.keep_only([])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_gang_returns_with_the_newest_state_that_every_member_saved(tmp_path: Path) -> None:
    shelf = BlobStore(tmp_path, str(tmp_path / "elsewhere"))
    assert shelf.latest_state("g", 2) is None
    for attempt, rank in ((1, 0), (1, 1), (2, 0)):  # in its second life only one member got its state out
        shelf.put_state("g", attempt, rank, b"")
    assert shelf.latest_state("g", 2) == [shelf.state_path("g", 1, 0), shelf.state_path("g", 1, 1)]
    shelf.put_state("g", 2, 1, b"")
    shelf.drop_old_states("g", 2)
    assert shelf.latest_state("g", 2) == [shelf.state_path("g", 2, 0), shelf.state_path("g", 2, 1)]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_every_id_is_a_file_name_of_its_own() -> None:
    ids = ["a", "a b", "ä", "..", ".hidden", "x" * 500, "x" * 499 + "y", "%2e", "a:b", "CON", "~"]
    names = [file_name(one) for one in ids]
    assert len(set(names)) == len(ids)
    assert all(len(name) <= 140 and not name.startswith(".") and "/" not in name for name in names)


def test_parts_are_packed_with_a_header_and_come_out_as_they_were() -> None:
    header, parts = (
        {"entry": "run", "place": list(BundlePlacement("g", 0, "n").__dict__.values())},
        [b"a\nb", None, b"", b"\0c"],
    )
    assert unpack(pack(header, parts)) == (header, parts)
    assert header_of(pack(header, parts))["entry"] == "run"


@pytest.mark.parametrize(
    ("at", "odd", "why"),
    [
        (1, '[NaN,"PoolTick",{}]', "NaN is no number"),
        (1, '[1e999,"PoolTick",{}]', "not finite"),
        (1, '[1e300,"PoolTick",{}]', "beyond 1e"),
        (1, '["soon","PoolTick",{}]', "a finite number is expected"),
        (1, f'[{"9" * 400},"PoolTick",{{}}]', "400 digits"),
        (1, '[1.0,"PoolTick",[]]', "keys with values are expected"),
        (1, '[1.0,"TaskStarted",{"task":["a"],"attempt":1}]', "str is expected"),
        (1, '[1.0,"TaskStarted",{"task":"a","attempt":"1"}]', "int is expected"),
        (1, '[1.0,"TaskStarted",{"task":"a","attempt":1.5}]', "int is expected"),
        (1, '[1.0,"NodeJoined",{"node":"n","total":{"cpu":"8"}}]', "amounts of resources"),
        (1, '[1.0,"NodeJoined",{"node":"n","total":{"cpu":-8}}]', "amounts of resources"),
        (
            1,
            '[1.0,"TaskSubmitted",{"spec":{"id":"a","pool":"p","bundles":[{"cpu":1}],"priority":null}}]',
            "a finite number",
        ),
        (1, '[1.0,"PoolTick",{},"make"]', "a list is expected"),
        (1, '[1.0,"PoolTick",{},[1]]', "str is expected"),
        (1, '[1.0,"Trick",{}]', "'Trick' is not known"),
        (1, '[1.0,"TaskStarted",{"task":"\\ud800","attempt":1}]', "lone surrogate"),
        (1, "[" * 100_000, "nested too deeply"),
        (0, '{"format":"trimtab-journal","version":"1"}', "int is expected"),
        (0, '{"format":"trimtab-journal","version":2,"notes":7}', "a list is expected"),
    ],
    ids=lambda one: f"{one!s:.40}",
)
def test_a_value_of_a_wrong_type_or_a_number_that_is_none_is_refused_with_its_line(
    tmp_path: Path, at: int, odd: str, why: str
) -> None:
    written(tmp_path)
    lines = segment(tmp_path).read_text(encoding="utf-8").splitlines()
    lines[at] = odd
    segment(tmp_path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(InputError, match="the journal is damaged") as refused:
        read_journal(tmp_path)
    assert why in refused.value.what
    assert refused.value.where == f"{segment(tmp_path)}, line {at + 1}"


def test_what_callers_in_python_write_for_a_yes_or_half_a_character_is_read_again(tmp_path: Path) -> None:
    one = TaskSpec("a", "p", (Resources.of(cpu=1),), restarts=2, saves=1)  # type: ignore[arg-type]
    half = TaskSpec("b\ud800", "p", (Resources.of(cpu=1),))
    written(tmp_path, [TaskSubmitted(one), TaskSubmitted(half)])
    specs = [event.spec for _, event in read_journal(tmp_path).events]
    assert specs[0] == one
    assert specs[1].id == "b?"


@pytest.mark.parametrize("time", ["NaN", '"now"', "null", "1e999", "true"])
def test_a_snapshot_whose_time_is_none_is_refused(tmp_path: Path, time: str) -> None:
    text = f'{{"format":"trimtab-journal","version":2,"time":{time},"machine":{{}}}}'
    (tmp_path / "snapshot-00000001.json").write_text(text)
    with pytest.raises(InputError, match="the snapshot is damaged"):
        read_journal(tmp_path)
