"""When a consumer polls, tries again and runs its maintenance tasks, without a database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue.consumer.maintenance.state import Timers
from sqlaqueue.consumer.pace import EXTENSIONS_PER_LEASE, RECONCILE, RESCUE, Intervals

pytestmark = pytest.mark.once


def make_intervals(draw: float = 0.5) -> Intervals:
    return Intervals(1.0, draw=lambda: draw)


@given(st.floats(0, 0.999), st.integers(1, 5000))
def test_a_consumer_tries_again_within_three_seconds(draw: float, failures: int) -> None:
    """However long the database was away; and the delays never become shorter meanwhile."""
    intervals = make_intervals(draw)
    delays = [intervals.failed() for _ in range(min(failures, 50))]
    assert all(0.1 <= delay <= 3.0 for delay in delays)
    assert delays == sorted(delays)
    intervals.succeeded()
    assert intervals.failed() <= 0.2


def test_consumers_do_not_run_in_step() -> None:
    early, late = make_intervals(0), make_intervals(0.999)
    for _ in range(20):
        assert late.failed() > early.failed() * 1.5
    assert late.poll() > early.poll()
    assert late.rescue(1) > early.rescue(1)
    assert late.heartbeat(1) > early.heartbeat(1)


@given(st.floats(0, 0.999), st.integers(0, 10_000))
def test_an_expired_lease_is_rescued_within_four_seconds(draw: float, rank: int) -> None:
    """However many consumers are before this one, and if all of them have died."""
    assert RESCUE <= make_intervals(draw).rescue(rank) < 4


@given(st.floats(0, 0.999), st.integers(0, 14))
def test_a_consumer_rescues_later_than_those_before_it(draw: float, rank: int) -> None:
    assert make_intervals(0.999).rescue(rank) < make_intervals(draw).rescue(rank + 1)


@given(st.floats(0, 0.999), st.floats(0, 1000))
def test_reconciling_takes_a_hundredth_of_the_time(draw: float, took: float) -> None:
    wait = make_intervals(draw).reconcile(took)
    assert wait >= 0.9 * RECONCILE
    assert wait >= 89 * took


@given(st.floats(0, 1000))
def test_a_range_takes_a_twentieth_of_the_time_if_nothing_was_repaired(took: float) -> None:
    intervals = make_intervals()
    assert took <= (intervals.between_ranges(took, found=False) + took) / 19.99
    assert intervals.between_ranges(took, found=True) == intervals.between_batches(took) >= 4 * took


def test_one_heartbeat_may_be_lost() -> None:
    assert EXTENSIONS_PER_LEASE >= 3


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)), st.floats(0, 100))
def test_timers_return_which_tasks_are_due(due: dict[str, float], now: float) -> None:
    timers = Timers()
    for task, at in due.items():
        timers.set(task, at)
    for task in "abc":
        assert timers.is_due(task, now) == (task in due and due[task] <= now)
    wait = timers.until_next(now)
    assert wait >= 0
    assert (wait == 0) == any(timers.is_due(task, now) for task in "abc")
