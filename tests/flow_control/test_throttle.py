"""``Throttle``: a handler holds the key of a rate back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Rate, Throttle
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.rates import delete_idle
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.testing import drain, travel
from tests.flow_control.models import claim_and_commit, create, customers, insert, make_job, of_customers

PER_CUSTOMER = Rate(100, every=1, per="customer_id")


def throttled(engine: sa.Engine, job: Any) -> list[Any]:
    """Return in how many seconds keys may begin again, of those that are held back."""
    until = job.metadata.tables[RATE].c.throttled_until
    with engine.connect() as connection:
        seconds = sa.select(sa.extract("epoch", until - sa.func.now())).where(until > sa.func.now())
        return list(connection.execute(seconds).scalars())


@pytest.mark.parametrize("until", [3600, timedelta(hours=1), "datetime"])
def test_the_key_is_held_back_and_the_attempt_does_not_count(engine: sa.Engine, until: Any) -> None:
    job = make_job(rates=[PER_CUSTOMER])
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 2))
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
    job = make_job(rates=[PER_CUSTOMER], max_attempts=1)
    create(engine, job)
    insert(engine, job, of_customers(1))

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
    job = make_job(rates=[Rate(1, every=0.001, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(*range(10)))
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
