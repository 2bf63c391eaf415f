"""What all machines share: dispatch, clock, timers, stories, snapshots."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Literal

import pytest

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.machine import Machine, Timers, earliest, on
from trimtab.core.reasons import STORY_KEPT, Reason, ReasonCode, StoryEntry, record


class TallyEvent:
    pass


@dataclass(frozen=True)
class Added(TallyEvent):
    count: int


@dataclass(frozen=True)
class Ticked(TallyEvent):
    pass


@dataclass
class Tally:
    now: float = 0.0
    total: int = 0
    mode: Literal["slow", "fast"] = "slow"
    seen: list[float] = field(default_factory=list)


class Adder:
    def __init__(self, state: Tally, out: list[str]) -> None:
        self._state, self._out = state, out

    @on(Added)
    def added(self, event: Added) -> None:
        if event.count < 0:
            raise InputError("a count is 0 or more")
        if event.count > 9:
            raise InfeasibleError("too many")
        self._state.total += event.count
        self._out.append(f"{event.count} at {self._state.now:g}")


class TallyMachine(Machine[Tally, TallyEvent, str]):
    EVENTS = TallyEvent

    def __init__(self, state: Tally) -> None:
        out: list[str] = []
        super().__init__(state, state, out, Adder(state, out))

    @on(Ticked)
    def _on_ticked(self, event: Ticked) -> None:
        self.state.seen.append(self.state.now)

    def settle(self) -> None:
        if self.state.total >= 10:
            self.state.total -= 10
            self._out.append("ten")


def test_events_go_to_the_handlers_of_the_machine_and_of_its_parts() -> None:
    machine = TallyMachine(Tally())
    assert machine.handle(Added(3), 5) == ["3 at 5"]
    assert machine.handle(Ticked(), 6.0) == []
    assert (machine.state.total, machine.state.seen) == (3, [6.0])


def test_what_follows_from_the_state_comes_after_every_handler() -> None:
    machine = TallyMachine(Tally(total=8))
    first = machine.handle(Added(2), 1.0)
    assert first == ["2 at 1", "ten"]
    machine.handle(Added(1), 2.0)
    assert first == ["2 at 1", "ten"], "instructions that were given out do not change"


def test_time_never_goes_back() -> None:
    machine = TallyMachine(Tally())
    machine.handle(Ticked(), 9.0)
    assert machine.handle(Added(1), 4.0) == ["1 at 9"]


@pytest.mark.parametrize("count", [-1, 10])
def test_a_refused_event_changes_nothing_not_even_the_clock(count: int) -> None:
    machine = TallyMachine(Tally())
    machine.handle(Added(1), 2.0)
    before = machine.dump()
    with pytest.raises((InputError, InfeasibleError)):
        machine.handle(Added(count), 7.0)
    assert machine.dump() == before
    assert machine.handle(Added(1), 3.0) == ["1 at 3"]


def test_each_event_type_has_exactly_one_handler() -> None:
    class SpokenEvent:
        pass

    class Called(SpokenEvent):
        pass

    class Whispered(SpokenEvent):
        pass

    class Deaf(Machine[Tally, SpokenEvent, str]):
        EVENTS = SpokenEvent

        def __init__(self, state: Tally) -> None:
            super().__init__(state, state, [])

        @on(Called)
        def _on_called(self, event: Called) -> None: ...

    class Torn(TallyMachine):
        @on(Added)
        def _on_added(self, event: Added) -> None: ...

    for wrong in (Deaf, Torn):
        with pytest.raises(TypeError, match=f"{wrong.__name__}: exactly one handler"):
            wrong(Tally())


def test_a_state_is_written_and_read_by_the_codec() -> None:
    machine = TallyMachine(Tally(mode="fast"))
    machine.handle(Ticked(), 4.0)
    data = json.loads(json.dumps(machine.dump()))
    assert data == {"now": 4.0, "mode": "fast", "seen": [4.0]}
    assert decode(Tally, data) == machine.state


def test_a_literal_is_one_of_its_values() -> None:
    assert encode(Tally(mode="fast"))["mode"] == "fast"
    with pytest.raises(ValueError, match="'slow' or 'fast' is expected, not 'faster'"):
        decode(Tally, {"mode": "faster"})


def test_timers_follow_what_is_due_and_forget_the_rest() -> None:
    dues: dict[str, float] = {"a": 5.0, "b": 3.0, "c": 3.0}
    timers = Timers[str](dues.get)
    for key in dues:
        timers.arm(key)
        timers.arm(key)
    assert timers.next() == 3.0
    del dues["b"]
    assert (timers.pop_due(2.9), timers.pop_due(3.0)) == (None, "c")
    dues["c"], dues["a"] = 8.0, 9.0
    timers.arm("a")
    assert timers.missing(dues) == ["c"]
    timers.arm("c")
    assert timers.missing(dues) == []
    assert (timers.pop_due(100.0), timers.next()) == ("c", 9.0)


@pytest.mark.parametrize("seed", range(20))
def test_timers_say_what_a_scan_would_say(seed: int) -> None:
    chance, dues = random.Random(seed), dict[str, float]()
    timers = Timers[str](dues.get)
    for now in range(200):
        key = chance.choice("abcdef")
        if chance.random() < 0.3:
            dues.pop(key, None)
        else:
            dues[key] = float(now + chance.randrange(30))
        timers.arm(key)
        assert timers.missing(dues) == []
        assert timers.next() == earliest(*dues.values())
        while (late := timers.pop_due(float(now))) is not None:
            assert dues.pop(late) <= min(dues.values(), default=now)
        assert all(due > now for due in dues.values())


def test_stories_keep_their_first_entry_and_the_subjects_that_matter() -> None:
    stories: dict[str, list[StoryEntry]] = {}
    for at in range(STORY_KEPT + 5):
        entry = StoryEntry(float(at), "on", Reason(ReasonCode.stay, "as it is"))
        record(stories, "run", entry, 3, ("run",))
    for name in ("x", "y", "z"):
        record(stories, name, StoryEntry(0.0, "on", Reason(ReasonCode.stay, "as it is")), 3, ("run",))
    assert list(stories) == ["run", "y", "z"]
    assert len(stories["run"]) == STORY_KEPT
    assert [entry.at for entry in stories["run"]][:2] == [0.0, 6.0]
