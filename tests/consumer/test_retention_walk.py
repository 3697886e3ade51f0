"""The walk over finished jobs, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sqlaqueue.consumer.maintenance.state import BATCH, MOST_SKIPPED, WALK, Walk

pytestmark = pytest.mark.once

DAY = timedelta(days=1)


def test_a_walk_ends_and_begins_again() -> None:
    walk = Walk("completed", DAY)
    now, first, last = 100.0, datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC)
    assert walk.begins_at <= now
    walk.begin(now)
    walk.record_batch(first, last, 0.01, more=True)
    assert walk.since == first, "there may be more jobs of the same age"
    walk.record_batch(first, last, 0.01, more=False)
    assert walk.since == last, "all jobs that were old enough have been processed"
    assert walk.end()
    assert not walk.end(), "references are logged once in a walk"
    assert walk.begins_at == now + WALK
    walk.begin(now + WALK)
    assert walk.since is None
    assert walk.end()


def test_batches_that_take_long_or_fail_become_smaller() -> None:
    walk = Walk("completed", DAY)
    walk.record_batch(None, None, 10.0, more=True)
    assert walk.limit == BATCH // 2
    walk.record_batch(None, None, 0.01, more=True)
    assert walk.limit == BATCH
    failures = 0
    while not walk.record_error():
        failures += 1
    assert walk.limit == 1
    assert 2**failures <= BATCH
    walk.record_batch(None, None, 0.01, more=True)
    assert walk.limit == 2


def test_more_jobs_than_can_be_remembered_are_skipped() -> None:
    walk = Walk("completed", DAY)
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(MOST_SKIPPED - 1):
        assert not walk.skip((number,), moment)
    assert walk.skip((MOST_SKIPPED,), moment), "a pause"
    assert walk.skipped == []
    assert walk.since is not None
    assert walk.since > moment
