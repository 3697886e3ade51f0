"""Consumers of queues with limits, rates, an order or turns under strategies whose transaction holds the jobs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Constant, Consumer, Limit, Order, Rate, Retry, admin, complete
from sqlaqueue.consumer import claim
from sqlaqueue.consumer import held as held_module
from tests.flow_control.models import HELD, claimed, create, customers, insert, make_job, of_customers
from tests.flow_control.running import Handlers, consumers, looks, unfinished, wait_for


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a strategy."""
    return HELD[request.param]


def test_workers_of_one_thread_run_as_many_jobs_as_the_limit_is(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(4)], **held), Handlers(wait=True)
    create(pool, job)
    insert(pool, job, of_customers(*range(12)))
    with consumers(pool, job, handlers, 5, concurrency=1):
        wait_for(lambda: len(handlers.begun) == 4)
        handlers.let_go()
        wait_for(lambda: not unfinished(pool, job))
    assert max(handlers.most.values()) == 1


def test_a_job_that_runs_holds_no_slot_for_another_one(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")], **held), Handlers()
    slow = Handlers(wait=True)
    create(pool, job)

    def handle(session: Session, one: Any) -> None:
        (handlers if one.customer_id is None else slow)(session, one)

    with consumers(pool, job, handle, 1, concurrency=1):
        # After quick handlers a Consumer without flow control claims several jobs at once.
        insert(pool, job, of_customers(*[None] * 50))
        wait_for(lambda: not unfinished(pool, job))
        insert(pool, job, of_customers(1, 2))
        wait_for(lambda: slow.begun[1])
        with Session(pool) as session:
            assert customers(claimed(session, job)) == [2]
        slow.let_go()
        wait_for(lambda: not unfinished(pool, job))


@pytest.mark.parametrize(
    "values",
    [
        {"status": "failed"},
        {"attempts": 1},
        {"run_at": sa.func.now() + timedelta(hours=1)},
        {"started_at": sa.func.now()},
        None,
    ],
    ids=["status", "attempts", "run_at", "started_at", "deleted"],
)
def test_a_slot_that_plain_sql_frees_is_taken_without_polling(pool: sa.Engine, values: Any) -> None:
    job = make_job(limits=[Limit(1)], columns={"started_at": "started_at"}, **HELD["batch_select"])
    handlers = Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, 2))
    with Session(pool) as other, looks(pool) as looked:
        (mine,) = claimed(other, job, 1)
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_for(looked.is_idle)
            mine = job.__table__.c.id == mine.id
            other.execute(sa.delete(job).where(mine) if values is None else sa.update(job).where(mine).values(values))
            other.commit()
            wait_for(lambda: handlers.begun[2])


def test_a_slot_that_a_settlement_frees_is_taken_without_polling(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(1)], **held), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, 2))
    with Session(pool) as other, looks(pool) as looked:
        mine = claimed(other, job, 1)
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_for(looked.is_idle)
            other.execute(complete(mine))
            other.commit()
            wait_for(lambda: handlers.begun[2])


def test_freed_slots_are_taken_without_polling(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")], **held), Handlers()
    create(pool, job)
    with consumers(pool, job, handlers, 2, concurrency=2, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 10, *[2] * 10))
        wait_for(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 1, 2: 1}


def test_jobs_of_a_key_run_in_order_with_retries_and_several_consumers(pool: sa.Engine, held: Any) -> None:
    job = make_job(order=Order("customer_id", on_failure="continue"), retry=lambda *_: timedelta(seconds=0.02), **held)
    handlers = Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*list(range(4)) * 5))
    seen: set[int] = set()

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.id % 6 == 0 and one.id not in seen:
            seen.add(one.id)
            raise Retry

    with consumers(pool, job, handle, 3, concurrency=2, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    assert set(handlers.most.values()) == {1}
    for keys in handlers.begun.values():
        assert keys == sorted(keys)
        assert len(set(keys)) == 5


def test_a_rate_spreads_the_beginnings_over_all_consumers(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(rates=[Rate(50, every=1, burst=1)], **held), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*range(20)))
    with consumers(pool, job, handlers, 3, concurrency=2, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    moments = sorted(handlers.moments)
    assert len(moments) == 20
    assert moments[-1] - moments[0] > 19 / 50 - 0.1


def test_a_batch_begins_with_the_jobs_that_the_rate_allows(engine: sa.Engine, held: Any) -> None:
    job = make_job(rates=[Rate(3, every=3600, burst=3)], **held)
    create(engine, job)
    insert(engine, job, of_customers(*range(5)))
    called: list[int] = []

    def handle(session: Session, jobs: Any) -> None:
        called.extend(one.customer_id for one in jobs)

    with Consumer(job, handle, sessionmaker(engine), batch=True, batch_size=5, signals=False):
        wait_for(lambda: unfinished(engine, job) == 2)
    assert sorted(called) == [0, 1, 2]


def test_a_beginning_stays_used_when_the_transaction_is_rolled_back(engine: sa.Engine, held: Any) -> None:
    job = make_job(rates=[Rate(2, every=3600, burst=2)], retry=Constant(0), **held)
    create(engine, job)
    insert(engine, job, of_customers(1))
    called: list[int] = []

    def handle(session: Session, one: Any) -> None:
        called.append(one.customer_id)
        raise Retry

    with Consumer(job, handle, sessionmaker(engine), signals=False, poll_interval=0.05):
        wait_for(lambda: len(called) == 2)
        time.sleep(0.3)
    assert len(called) == 2


def test_an_attempt_counts_though_the_rate_is_used_up(engine: sa.Engine, held: Any) -> None:
    # The first loss of the connection counts no attempt, and the job runs once more by itself.
    job = make_job(rates=[Rate(2, every=3600, burst=2)], max_attempts=1, **held)
    create(engine, job)
    insert(engine, job, of_customers(1))

    def handle(session: Session, one: Any) -> None:
        session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def failed() -> int:
        with Session(engine) as session:
            return admin.stats(session, job).states.get("failed", 0)

    with Consumer(job, handle, sessionmaker(engine), signals=False):
        wait_for(lambda: failed() == 1)


def test_jobs_are_released_when_another_claim_has_reserved_their_beginnings(
    pool: sa.Engine, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both claims saw the same room."""
    job, handlers = make_job(rates=[Rate(5, every=3600, burst=5)], **held), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*range(5)))
    reserve, calls = held_module.reserve_rates, list[int]()

    def after_another_one(session: Session, context: Any, keys: Any) -> Any:
        if not calls:
            with Session(pool) as other, other.begin():
                calls.append(len(reserve(other, context, keys[:3])))
        return reserve(session, context, keys)

    monkeypatch.setattr(held_module, "reserve_rates", after_another_one)
    with Consumer(job, handlers, sessionmaker(pool), batch_size=5, signals=False):
        wait_for(lambda: unfinished(pool, job) == 3)
    assert calls == [3]
    assert len(handlers.begun) == 2
    with Session(pool) as session:
        left = session.scalars(sa.select(job.attempts).where(job.id > 2)).all()
    assert left == [0, 0, 0]


def test_a_consumer_looks_again_for_a_slot_that_was_taken_for_a_moment(
    pool: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a claim that another limit refuses afterwards: no run ends when it releases the slot."""
    monkeypatch.setattr(claim, "_CONTENDED", (2.0, 2.0))
    job, handlers = make_job(limits=[Limit(1, per="customer_id")], **HELD["batch_select"]), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(1, 1))
    with Session(pool) as other, looks(pool) as looked:
        assert len(claimed(other, job)) == 2
        with consumers(pool, job, handlers, 1, concurrency=1, poll_interval=600):
            wait_for(looked.is_idle)
            other.rollback()
            wait_for(lambda: not unfinished(pool, job))
