"""How many jobs a consumer claims at once, and how many calls one worker makes in a row, without a database."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.pace import LATE, LONGEST_IN_BUFFER, BatchSizer
from sqlaqueue.postgresql.claim_scan import FEW
from tests.consumer.models import models
from tests.consumer.test_arguments import async_handler, async_sessions, handler, sessions

pytestmark = pytest.mark.once


# -- how many jobs one claim takes ---------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.integers(1, 64), st.lists(st.floats(0, 10_000), max_size=20))
def test_a_claim_is_never_larger_than_the_batch_size_and_never_empty(
    batch_size: int, concurrency: int, durations: list[float]
) -> None:
    sizer = BatchSizer(batch_size, concurrency)
    assert sizer.claim_size() == min(batch_size, concurrency)
    for duration in durations:
        sizer.record_calls(duration, unused=True)
        assert min(batch_size, concurrency) <= sizer.claim_size() <= batch_size


def test_for_slow_handlers_a_claim_takes_one_job_each() -> None:
    sizer = BatchSizer(100, 4)
    for _ in range(50):
        sizer.record_calls(10, unused=True)
    assert sizer.claim_size() == 4
    assert sizer.is_slow
    for _ in range(100):
        sizer.record_calls(0.001, unused=True)
    assert sizer.claim_size() == 100
    assert not sizer.is_slow


@pytest.mark.parametrize(("duration", "size"), [(10, 4), (0.1, 4), (0.01, 8), (0.001, 80)])
def test_jobs_that_count_as_running_are_claimed_when_they_can_begin(duration: float, size: int) -> None:
    sizer = BatchSizer(100, 4, prompt=True)
    assert sizer.claim_size() == 4
    for _ in range(50):
        sizer.record_calls(duration, unused=True)
    assert sizer.claim_size() == pytest.approx(size, abs=1)
    assert sizer.claim_size(idle=1) <= max(1, size)


def test_a_few_jobs_are_claimed_where_there_may_be_no_more() -> None:
    """But never fewer than there are handlers."""
    for concurrency, few in ((4, FEW), (40, 40)):
        sizer = BatchSizer(100, concurrency)
        sizer.record_calls(0.001, unused=True)
        assert (sizer.claim_size(plenty=False), sizer.claim_size()) == (few, 100)


def test_a_fixed_batch_size_is_always_claimed() -> None:
    sizer = BatchSizer(100, 1, fixed=True)
    sizer.record_calls(10, unused=True)
    assert sizer.claim_size(plenty=False) == sizer.claim_size() == 100


@pytest.mark.parametrize("concurrency", [1, 8, 500])
def test_few_jobs_are_buffered_for_slow_handlers(concurrency: int) -> None:
    """Jobs that no handler begins in time would be released again and again."""
    sizer = BatchSizer(500, concurrency)
    assert sizer.claim_size(idle=1) == 1
    sizer.record_calls(2.0, unused=True)
    assert sizer.claim_size(idle=1) == max(1, concurrency // 10)
    assert sizer.claim_size(idle=concurrency) == concurrency


def test_no_jobs_are_claimed_for_slow_handlers() -> None:
    sizer = BatchSizer(500, 4)
    sizer.record_calls(0.1, unused=True)
    assert [sizer.claim_size(idle=1, slow_handlers=slow) for slow in range(5)] == [40, 30, 20, 10, 10]
    assert not sizer.is_slower_than_usual(LONGEST_IN_BUFFER)
    assert sizer.is_slower_than_usual(1.1 * LONGEST_IN_BUFFER)
    sizer.record_calls(20.0, unused=True)
    assert not sizer.is_slower_than_usual(1.1 * LONGEST_IN_BUFFER), "usual calls take as long"


def test_claims_that_cannot_be_released_begin_small() -> None:
    """And begin again after a slow job."""
    sizer = BatchSizer(500, 1, cautious=True)
    sizes = []
    for _ in range(6):
        sizes.append(sizer.claim_size())
        sizer.record_calls(0.001, calls=sizes[-1], unused=True)
    assert sizes == [1, 15, 64, 320, 500, 500]
    sizer.record_calls(1.1 * LATE, unused=True)
    assert sizer.claim_size() <= 2
    assert sizer.time_in_transaction() == LATE
    assert BatchSizer(500, 1, fixed=True, cautious=True).time_in_transaction() is None


@pytest.mark.parametrize(
    ("strategy", "options", "first", "most"),
    [
        ("update_status", {}, 1, 500),
        ("update_status", {"concurrency": 4}, 4, 500),
        ("update_status", {"concurrency": 1000}, 1000, 1000),
        ("update_status", {"concurrency": 1000, "batch_size": 7}, 7, 7),
        ("update_status", {"batch": True}, 500, 500),
        ("delete_returning", {}, 1, 500),
        ("delete_returning", {"concurrency": 4}, 1, 500),
        ("delete_returning", {"batch_size": 7}, 7, 7),
        ("delete_returning", {"batch": True}, 500, 500),
    ],
)
def test_claims_are_large_where_handlers_are_quick(
    strategy: Any, options: dict[str, int], first: int, most: int
) -> None:
    model = models(strategy).job
    for consumer in (
        Consumer(model, handler, sessions, **options),
        AsyncConsumer(model, async_handler, async_sessions, **options),
    ):
        sizer = consumer._parts.sizer
        assert sizer.claim_size() == first
        sizer.record_calls(0.0001, calls=500, unused=True)
        assert sizer.claim_size() == most


def test_a_transaction_is_short_where_handlers_are_slow() -> None:
    """Unless the application has said how many jobs commit together."""
    model = models("batch_select").job
    usual, fixed = (
        Consumer(model, handler, sessions, concurrency=4, **options)._parts.sizer for options in ({}, {"batch_size": 7})
    )
    for sizer in (usual, fixed):
        for _ in range(50):
            sizer.record_calls(0.5, unused=True)
    assert usual.claim_size() == 2
    assert fixed.claim_size() == 7


# -- when to claim again -------------------------------------------------------------------------------------------


def test_the_next_claim_begins_with_as_many_jobs_left_as_end_during_it() -> None:
    many, one, batches = BatchSizer(100, 50), BatchSizer(100, 1), BatchSizer(100, 50, fixed=True)
    for sizer in (many, one, batches):
        assert sizer.jobs_during_claim() == 0
        for _ in range(50):
            sizer.record_calls(0.1, unused=True)
            sizer.record_claim(0.02)
    # 500 jobs per second.
    assert 8 <= many.jobs_during_claim() <= 10
    assert one.jobs_during_claim() == batches.jobs_during_claim() == 0
    for _ in range(50):
        many.record_calls(60, unused=True)
    assert many.jobs_during_claim() == 0, "a job would wait here for minutes while other consumers are idle"


# -- how many calls one worker makes in a row ----------------------------------------------------------------------


def test_a_worker_keeps_the_jobs_of_its_claim_if_handlers_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 0.1)
    sizer = BatchSizer(100, 1)
    assert sizer.time_in_row(1)
    assert sizer.time_in_row(2) is None
    for _ in range(100):
        sizer.record_calls(0.0001, unused=True)
    assert sizer.time_in_row(100)
    assert sizer.time_in_row(5000), "jobs that are not begun in time are passed on"
    sizer.record_calls(0.0001, unused=False)
    assert sizer.time_in_row(100) is None
    assert sizer.time_in_row(1)
    for _ in range(100):
        sizer.record_calls(0.02, unused=True)
    assert sizer.time_in_row(4)
    assert sizer.time_in_row(100) is None, "other workers could help"
