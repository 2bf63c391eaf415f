"""The ledger: every instant of an iteration is booked once, or is unbooked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.errors import InputError
from trimtab.model.ledger import BUCKETS, TimedSpan, booked_seconds, ledger_summary
from trimtab.model.run import Iteration

NAMES = tuple(BUCKETS)
SPANS = st.lists(
    st.builds(
        lambda bucket, start, length: TimedSpan(bucket, float(start), float(start + length)),
        st.sampled_from(NAMES), st.integers(-20, 120), st.integers(0, 60),
    ),
    max_size=25,
)  # fmt: skip


def instants(spans: list[TimedSpan], wall: int) -> dict[str, int]:
    """The slow, obvious ledger of whole seconds."""
    found: dict[str, int] = {}
    for second in range(wall):
        here = [span.bucket for span in spans if span.start_s <= second < span.end_s]
        if here:
            first = min(here, key=NAMES.index)
            found[first] = found.get(first, 0) + 1
    return found


@given(SPANS, st.integers(0, 100))
def test_every_second_is_booked_once_to_the_first_bucket_that_has_it(spans: list[TimedSpan], wall: int) -> None:
    booked = booked_seconds(spans, 0.0, float(wall))
    assert {bucket: seconds for bucket, seconds in booked.items() if seconds} == instants(spans, wall)


@given(SPANS, st.integers(0, 100))
def test_what_is_booked_and_what_is_not_make_the_wall_time(spans: list[TimedSpan], wall: int) -> None:
    iteration = Iteration(1, float(wall), booked=booked_seconds(spans, 0.0, float(wall)))
    assert iteration.unbooked_s is not None
    assert iteration.booked is not None
    assert sum(iteration.booked.values()) + iteration.unbooked_s == pytest.approx(wall)
    assert 0 <= iteration.unbooked_s <= wall


@given(SPANS, st.integers(0, 50), st.integers(0, 50))
def test_two_iterations_book_what_their_sum_books(spans: list[TimedSpan], first: int, second: int) -> None:
    parts = booked_seconds(spans, 0.0, first), booked_seconds(spans, first, first + second)
    whole = booked_seconds(spans, 0.0, first + second)
    for bucket in NAMES:
        assert sum(part.get(bucket, 0.0) for part in parts) == pytest.approx(whole.get(bucket, 0.0))


def test_work_beside_a_step_costs_nothing_and_waiting_is_booked_last() -> None:
    spans = [
        TimedSpan("compute", 0, 4),
        TimedSpan("save", 2, 5),
        TimedSpan("wait_turn", 0, 8),
        TimedSpan("onload", 6, 7),
    ]
    assert booked_seconds(spans, 0, 10) == {"compute": 4, "onload": 1, "save": 1, "wait_turn": 2}


@pytest.mark.parametrize("booked", [{"lunch": 1.0}, {"compute": -1.0}, {"compute": 3.0}, {"compute": float("nan")}])
def test_a_ledger_that_no_iteration_can_have_is_refused(booked: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Iteration(1, 2.0, booked=booked)


def test_a_summary_is_of_medians_and_warns_above_three_percent() -> None:
    found = ledger_summary([(2.0, {"compute": 1.8}), (2.0, {"compute": 1.9}), (2.0, {"compute": 1.99}), (1.0, None)])
    assert found is not None
    assert found.shares == {"compute": pytest.approx(0.95)}
    assert found.unbooked == pytest.approx(0.05)
    assert found.warns
    assert ledger_summary([(1.0, None)]) is None
