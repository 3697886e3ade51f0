"""Consumers of queues with limits, rates, an order or turns: several at once, in threads, each with its connections."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Limit, Order, Rate, Retry
from sqlaqueue.consumer.maintenance import handlers_running
from tests.flow_control.models import claimed, create, insert, make_job, of_customers
from tests.flow_control.running import LONG, Handlers, consumers, looks, unfinished, wait_for


def test_ten_workers_of_one_thread_run_the_ten_jobs_of_a_limit(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(10)]), Handlers(wait=True)
    create(pool, job)
    insert(pool, job, of_customers(*range(40)))
    with consumers(pool, job, handlers, 10, concurrency=1):
        wait_for(lambda: len(handlers.begun) == 10)
        handlers.let_go()
        wait_for(lambda: not unfinished(pool, job))


def test_workers_of_several_threads_share_the_places_of_a_key(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(3, per="customer_id")]), Handlers(wait=True)
    create(pool, job)
    insert(pool, job, of_customers(*[1] * 20, *[2] * 20))
    with consumers(pool, job, handlers, 3, concurrency=4):
        wait_for(lambda: handlers.running == {1: 3, 2: 3})
        handlers.let_go()
        wait_for(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 3, 2: 3}


def test_jobs_behind_a_handler_that_turns_out_slow_run_elsewhere(
    pool: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as jobs may wait that hold no places.
    monkeypatch.setattr(handlers_running, "LONGEST_IN_BUFFER", 600)
    monkeypatch.setattr(handlers_running, "LATE", 600)
    job, handlers = make_job(limits=[Limit(2)]), Handlers()
    create(pool, job)
    gate, slow = threading.Event(), set[int]()

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.customer_id == 2:
            slow.add(one.id)
            gate.wait(LONG)

    # After quick handlers each Consumer claims several jobs ahead.
    with consumers(pool, job, handle, 2, concurrency=1, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 100))
        wait_for(lambda: not unfinished(pool, job))
        insert(pool, job, of_customers(2, 2, 2))
        # The limit allows two, and neither Consumer may keep the second place for a job that waits.
        wait_for(lambda: len(slow) == 2)
        gate.set()
        wait_for(lambda: not unfinished(pool, job))


def test_a_consumer_claims_no_job_that_has_to_wait_for_a_handler(pool: sa.Engine) -> None:
    job, counted = make_job(limits=[Limit(50)]), list[int]()
    create(pool, job)
    insert(pool, job, of_customers(*range(12)))

    def handle(session: Session, one: Any) -> None:
        counted.append(session.scalars(sa.select(sa.func.count()).where(job.status == "processing")).one())
        # A claim ahead would be for 0.02 seconds.
        time.sleep(0.03)

    with consumers(pool, job, handle, 1, concurrency=1):
        wait_for(lambda: not unfinished(pool, job))
    assert counted == [1] * 12


@pytest.mark.parametrize("number", [1, 2])
def test_freed_places_are_taken_without_polling(pool: sa.Engine, number: int) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")]), Handlers()
    create(pool, job)
    with consumers(pool, job, handlers, number, concurrency=2, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 10, *[2] * 10))
        wait_for(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 1, 2: 1}


def test_a_place_that_plain_sql_frees_is_taken_without_polling(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")]), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, status="processing"))
    insert(pool, job, of_customers(1))
    with looks(pool) as looked, consumers(pool, job, handlers, 1, poll_interval=600):
        wait_for(looked.is_idle)
        with pool.begin() as connection:
            connection.execute(sa.delete(job.__table__).where(job.__table__.c.id == 1))
        wait_for(lambda: not unfinished(pool, job))


def test_a_quarantined_job_that_its_limit_holds_back_runs_later(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")]), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, status="processing"))
    # Its last worker died: a rescued job keeps the token of the claim.
    insert(pool, job, of_customers(1, lease_token=uuid.uuid4()))
    with consumers(pool, job, handlers, 1, poll_interval=0.05):
        insert(pool, job, of_customers(2))
        wait_for(lambda: handlers.begun[2])
        time.sleep(0.2)
        with pool.begin() as connection:
            connection.execute(sa.delete(job.__table__).where(job.__table__.c.id == 1))
        # Without waiting for the rescue that looks for such jobs now and then.
        wait_for(lambda: not unfinished(pool, job), seconds=15)


def test_without_notifications_a_consumer_takes_the_places_that_it_frees(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")], notify=False), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*[1] * 10))
    with consumers(pool, job, handlers, 1, concurrency=3, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))


def test_a_run_that_ends_while_a_claim_finds_nothing_is_noticed(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(1)], notify=False), Handlers(wait=True)
    create(pool, job)
    insert(pool, job, of_customers(1, 1))

    def handle(session: Session, one: Any) -> None:
        session.execute(sa.text("SELECT 1"))  # so that its own transaction completes it
        handlers(session, one)

    @event.listens_for(pool, "after_cursor_execute")
    def end_the_run(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        # The statement that tells why the other worker's claim has found nothing.
        if statement.startswith("SELECT coalesce(current_setting(") and unfinished(pool, job) == 2:
            wait_for(lambda: handlers.running[1])
            handlers.let_go()
            wait_for(lambda: unfinished(pool, job) == 1)
            time.sleep(0.2)

    with consumers(pool, job, handle, 1, concurrency=2, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))


def test_a_consumer_claims_again_when_a_transaction_had_locked_the_key_and_is_rolled_back(pool: sa.Engine) -> None:
    job, handlers = make_job(limits=[Limit(2, per="customer_id")]), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, 1))
    with Session(pool) as other, looks(pool) as looked:
        assert len(claimed(other, job, 1)) == 1
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_for(lambda: looked.number > 20)
            # Nothing announces it.
            other.rollback()
            wait_for(lambda: not unfinished(pool, job))


def test_jobs_of_a_key_run_in_order_with_retries_and_several_consumers(pool: sa.Engine) -> None:
    job, handlers = make_job(order=Order("customer_id"), retry=lambda *_: timedelta(seconds=0.02)), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*list(range(5)) * 12))
    seen: set[int] = set()

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.id % 7 == 0 and one.id not in seen:
            seen.add(one.id)
            raise Retry

    with consumers(pool, job, handle, 3, concurrency=3, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    assert set(handlers.most.values()) == {1}
    for keys in handlers.begun.values():
        assert keys == sorted(keys)
        assert len(set(keys)) == 12


def test_a_rate_spreads_the_beginnings_over_all_consumers(pool: sa.Engine) -> None:
    job, handlers = make_job(rates=[Rate(50, every=1, burst=1)]), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*range(30)))
    with consumers(pool, job, handlers, 3, concurrency=3, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    # The promise is about the claims; a handler begins a moment after its claim.
    moments = sorted(handlers.moments)
    assert moments[-1] - moments[0] > 29 / 50 - 0.1


def test_a_drain_waits_for_a_rate_and_ends_beside_a_failed_head(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(20, every=1, burst=1)], order=Order("customer_id"), max_attempts=1)
    create(engine, job)
    insert(engine, job, of_customers(1, 2, 2, 3, 4))

    def handle(session: Session, one: Any) -> None:
        if one.id == 2:
            raise ValueError

    Consumer(job, handle, sessionmaker(engine), concurrency=2).drain()
    with engine.connect() as connection:
        statuses = connection.execute(sa.select(job.__table__.c.status).order_by(job.__table__.c.id)).scalars().all()
    assert statuses == ["completed", "failed", "pending", "completed", "completed"]
