"""Rates: how many jobs of a key may begin within a period. ``Throttle``: a handler holds the key of a rate back."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Limit, Rate, Throttle
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.rates import delete_idle
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.testing import drain, travel
from tests.flow_control.models import (
    claim_and_commit,
    claimed,
    create,
    customers,
    insert,
    make_job,
    make_queue,
    of_customers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def stored(job: Any) -> sa.Table:
    table: sa.Table = job.metadata.tables[RATE]
    return table


def pass_time(engine: sa.Engine, job: Any, delta: timedelta) -> None:
    """Move the stored times back, as if so much time had passed."""
    table = stored(job)
    with engine.begin() as connection:
        connection.execute(sa.update(table).values(next_at=table.c.next_at - delta))


def test_a_burst_begins_at_once_and_then_one_job_each_interval(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(60, every=3600, per="customer_id", burst=3)])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 10, *[2] * 2, None, None))
    assert customers(claim_and_commit(engine, job)) == [1, 1, 1, 2, 2, None, None]
    assert claim_and_commit(engine, job) == []
    pass_time(engine, job, timedelta(minutes=2))
    assert customers(claim_and_commit(engine, job)) == [1, 1]
    assert claim_and_commit(engine, job) == []
    pass_time(engine, job, timedelta(hours=5))
    # A long pause gives one burst, not more.
    assert customers(claim_and_commit(engine, job)) == [1, 1, 1]


def test_a_rate_without_a_key_is_for_the_whole_queue(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 2, 3), rates=[Rate(2, every=timedelta(hours=1))])
    assert customers(claim_and_commit(engine, job)) == [1, 2]
    assert claim_and_commit(engine, job) == []


def test_only_what_is_claimed_uses_the_rate_up(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(4, every=3600, per="kind")], limits=[Limit(1, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 1, 2))
    with Session(engine) as session:
        assert customers(claimed(session, job)) == [1, 2]
        session.rollback()
    with engine.connect() as connection:
        assert connection.execute(sa.select(stored(job))).all() == []
    assert customers(claim_and_commit(engine, job)) == [1, 2]
    with engine.connect() as connection:
        table = stored(job)
        ahead = connection.scalar(sa.select(sa.extract("epoch", table.c.next_at - sa.func.now())))
        assert ahead is not None
        assert 1700 < ahead <= 1801


def test_exhausted_keys_do_not_hold_back_the_jobs_behind_them(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 500, 2), rates=[Rate(1, every=3600, per="customer_id")])
    assert customers(claim_and_commit(engine, job, 1)) == [1]
    assert customers(claim_and_commit(engine, job, 1)) == [2]
    assert claim_and_commit(engine, job, 1) == []


def test_a_clock_that_is_set_back_holds_a_key_back_for_one_burst_at_most(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 5), rates=[Rate(3, every=0.3, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 3
    pass_time(engine, job, timedelta(days=-1))
    assert claim_and_commit(engine, job) == []
    time.sleep(0.35)
    assert len(claim_and_commit(engine, job)) == 2


def test_claims_do_not_wait_for_each_other_after_a_clock_was_set_back(engine: sa.Engine) -> None:
    """Each corrects only rows of keys that it has locked."""
    job = make_queue(engine, of_customers(1, 2), rates=[Rate(3, every=3600, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 2
    insert(engine, job, of_customers(1, 2))
    pass_time(engine, job, timedelta(days=-1))
    with Session(engine) as first, Session(engine) as second:
        assert claimed(first, job) == []
        second.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
        assert claimed(second, job) == []


def test_a_rate_is_exact_over_many_claims(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 200), rates=[Rate(100, every=1, per="customer_id", burst=5)])
    began, admitted = time.monotonic(), 0
    while time.monotonic() - began < 0.5 or admitted < 10:
        admitted += len(claim_and_commit(engine, job, 10))
    took = time.monotonic() - began
    assert admitted <= 5 + 100 * took + 1


# -- ``Throttle`` --------------------------------------------------------------------------------------------------
PER_CUSTOMER = Rate(100, every=1, per="customer_id")


def throttled(engine: sa.Engine, job: Any) -> list[Any]:
    """Return in how many seconds keys may begin again, of those that are held back."""
    until = job.metadata.tables[RATE].c.throttled_until
    with engine.connect() as connection:
        seconds = sa.select(sa.extract("epoch", until - sa.func.now())).where(until > sa.func.now())
        return list(connection.execute(seconds).scalars())


@pytest.mark.parametrize("until", [3600, timedelta(hours=1), "datetime"])
def test_the_key_is_held_back_and_the_attempt_does_not_count(engine: sa.Engine, until: Any) -> None:
    job = make_queue(engine, of_customers(1, 1, 2), rates=[PER_CUSTOMER])
    called: list[Any] = []

    def handle(session: Session, one: Any) -> None:
        called.append(one.customer_id)
        if called == [1]:
            raise Throttle(datetime.now(UTC) + timedelta(hours=1) if until == "datetime" else until, rate="customer_id")

    with Session(engine) as session:
        drain(session, job, handle)
        session.commit()
        # The second job of the customer may have been claimed together with the first one.
        assert called in ([1, 2], [1, 1, 2])
        assert session.get(job, 1).status == "pending"
        assert session.get(job, 1).attempts == 0
        (left,) = throttled(engine, job)
        assert 3500 < left <= 3600
        travel(session, timedelta(hours=1, seconds=1))
        drain(session, job, handle)
        assert max(called) == 2
        assert set(session.scalars(sa.select(job.status))) == {"completed"}


def test_all_rates_of_the_key_are_held_back_and_no_others(engine: sa.Engine) -> None:
    job = make_job(rates=[PER_CUSTOMER, Rate(9, every=60, per="customer_id"), Rate(99, every=1)])
    create(engine, job)
    insert(engine, job, of_customers(1))

    def handle(session: Session, one: Any) -> None:
        raise Throttle(600, rate="customer_id")

    Consumer(job, handle, sessionmaker(engine)).drain()
    assert len(throttled(engine, job)) == 2
    insert(engine, job, of_customers(1, 2, None))
    assert customers(claim_and_commit(engine, job)) == [2, None]


@pytest.mark.parametrize("rate", [None, "kind", ("customer_id", "kind")])
def test_a_rate_that_the_queue_does_not_have_is_an_error_of_the_handler(
    engine: sa.Engine, rate: str | Sequence[str] | None
) -> None:
    job = make_queue(engine, of_customers(1), rates=[PER_CUSTOMER], max_attempts=1)

    def handle(session: Session, one: Any) -> None:
        raise Throttle(600, rate=rate)

    Consumer(job, handle, sessionmaker(engine)).drain()
    with Session(engine) as session:
        assert session.get(job, 1).status == "failed"
        assert "the queue has no rate of this key; it has 'customer_id'" in session.get(job, 1).last_error


def test_a_time_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use a datetime with a time zone"):
        Throttle(datetime(2026, 1, 1))  # noqa: DTZ001 - what is tested


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("30",), r"Throttle\('30'\): use seconds or a timedelta from now, zero or more, or a datetime"),
        ((-3,), r"Throttle\(-3\): use seconds"),
        ((timedelta(seconds=-1),), "use seconds"),
        ((True,), r"Throttle\(True\): use seconds"),
        ((None,), r"Throttle\(None\): use seconds"),
        ((float("nan"),), "use seconds"),
        ((30, 5), r"Throttle\(rate=5\): give the name of an attribute, or several"),
        ((30, ""), r"Throttle\(rate=''\): give the name"),
        ((30, ["a", 5]), "give the name of an attribute"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Throttle(*arguments)


def test_rows_that_say_nothing_are_deleted(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(10)), rates=[Rate(1, every=0.001, per="customer_id")])
    claim_and_commit(engine, job)
    table = job.metadata.tables[RATE]
    with engine.begin() as connection:
        hour = timedelta(hours=1)
        connection.execute(sa.update(table).values(next_at=sa.func.now() - hour))
        some = sa.select(table.c.key).limit(2).scalar_subquery()
        connection.execute(
            sa.update(table)
            .where(table.c.key == sa.any_(sa.func.array(some)))
            .values(throttled_until=sa.func.now() + hour)
        )
    with engine.begin() as connection:
        statement = delete_idle(spec_of(job))
        assert statement is not None
        connection.execute(statement)
        assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 2
