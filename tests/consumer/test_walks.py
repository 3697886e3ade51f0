"""How the walk over finished jobs goes on, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sqlaqueue.consumer.maintenance.retention import BATCH, MOST_LEFT, WALK, Walk

pytestmark = pytest.mark.once

DAY = timedelta(days=1)


def test_a_walk_comes_to_its_end_and_begins_again() -> None:
    walk = Walk("completed", DAY)
    now, first, last = 100.0, datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC)
    assert walk.begins_at <= now
    walk.begin(now)
    assert walk.went(BATCH, first, last, 0.01)
    assert walk.since == first, "there may be more that are as old"
    assert not walk.went(BATCH - 1, first, last, 0.01)
    assert walk.since == last, "all that were old enough have been looked at"
    assert walk.ends()
    assert not walk.ends(), "what stays is told once in a walk"
    assert walk.begins_at == now + WALK
    walk.begin(now + WALK)
    assert walk.since is None
    assert walk.ends()


def test_batches_that_take_long_or_fail_become_smaller() -> None:
    walk = Walk("completed", DAY)
    walk.went(BATCH, None, None, 10.0)
    assert walk.limit == BATCH // 2
    walk.went(BATCH, None, None, 0.01)
    assert walk.limit == BATCH
    failures = 0
    while not walk.failed():
        failures += 1
    assert walk.limit == 1
    assert 2**failures <= BATCH
    walk.went(1, None, None, 0.01)
    assert walk.limit == 2


def test_more_than_can_be_remembered_are_passed_over() -> None:
    walk = Walk("completed", DAY)
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    for number in range(MOST_LEFT - 1):
        assert not walk.leave((number,), moment)
    assert walk.leave((MOST_LEFT,), moment), "a pause"
    assert walk.left == []
    assert walk.since is not None
    assert walk.since > moment
