"""Rates: how many jobs of a key may begin within a period, by the clock of the database."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Limit, Rate
from sqlaqueue.queue.names import RATE
from tests.flow_control.models import claim_and_commit, claimed, create, customers, insert, make_job, of_customers


def stored(job: Any) -> sa.Table:
    """Return the table of the rates."""
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
    job = make_job(rates=[Rate(2, every=timedelta(hours=1))])
    create(engine, job)
    insert(engine, job, of_customers(1, 2, 3))
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
    job = make_job(rates=[Rate(1, every=3600, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 500, 2))
    assert customers(claim_and_commit(engine, job, 1)) == [1]
    assert customers(claim_and_commit(engine, job, 1)) == [2]
    assert claim_and_commit(engine, job, 1) == []


def test_a_clock_that_is_set_back_holds_a_key_back_for_one_burst_at_most(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(3, every=0.3, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 5))
    assert len(claim_and_commit(engine, job)) == 3
    pass_time(engine, job, timedelta(days=-1))
    assert claim_and_commit(engine, job) == []
    time.sleep(0.35)
    assert len(claim_and_commit(engine, job)) == 2


def test_claims_do_not_wait_for_each_other_after_a_clock_was_set_back(engine: sa.Engine) -> None:
    """Each corrects only rows of keys that it has locked."""
    job = make_job(rates=[Rate(3, every=3600, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 2))
    assert len(claim_and_commit(engine, job)) == 2
    insert(engine, job, of_customers(1, 2))
    pass_time(engine, job, timedelta(days=-1))
    with Session(engine) as first, Session(engine) as second:
        assert claimed(first, job) == []
        second.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
        assert claimed(second, job) == []


def test_a_rate_is_exact_over_many_claims(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(100, every=1, per="customer_id", burst=5)])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 200))
    began, admitted = time.monotonic(), 0
    while time.monotonic() - began < 0.5 or admitted < 10:
        admitted += len(claim_and_commit(engine, job, 10))
    took = time.monotonic() - began
    assert admitted <= 5 + 100 * took + 1
