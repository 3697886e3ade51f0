"""Changes that other transactions commit while a claim is executed: it does not decide by what it has read before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Limit, Order
from tests.flow_control.models import HELD, create, insert, make_job, of_customers, set_status
from tests.flow_control.paused import claimed_with_change, pause_before, pause_inside


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a strategy whose transaction holds the jobs."""
    return HELD[request.param]


def change(engine: sa.Engine, job: Any, key: int, **values: Any) -> None:
    """Change a job by plain SQL."""
    with engine.begin() as connection:
        connection.execute(sa.update(job.__table__).where(job.__table__.c.id == key).values(**values))


def test_the_count_is_newer_than_the_statement_that_locks_the_key(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(1, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 1))
    pause_before(engine, "sqlaqueue_capacity_job_customer_id")
    assert claimed_with_change(engine, job, 1, lambda: set_status(engine, job, "processing", 2)) == []


def test_a_job_whose_key_has_changed_is_left_to_the_next_claim(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(1, per="customer_id")])
    create(engine, job)
    insert(engine, job, [*of_customers(1), *of_customers(2, status="processing")])
    pause_before(engine, "sqlaqueue_capacity_job_customer_id")
    # Customer 1 has room, and customer 2 has none.
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 1, customer_id=2)) == []


def test_a_held_job_whose_key_has_changed_is_left_to_the_next_claim(engine: sa.Engine, held: Any) -> None:
    job = make_job(limits=[Limit(1, per="customer_id")], **held)
    create(engine, job)
    insert(engine, job, of_customers(1))
    pause_before(engine, "sqlaqueue_hold_job")
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 1, customer_id=2)) == []


def test_a_claim_has_one_job_of_an_order_though_another_one_becomes_the_head(engine: sa.Engine) -> None:
    job = make_job(order=Order("customer_id", by="document_id"))
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "document_id": number} for number in (5, 6)])
    # The first job is admitted already, but its row still reads as pending.
    pause_before(engine, "sqlaqueue_head_job_customer_id", "sqlaqueue_job = '[2]'")
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 2, document_id=1)) == [1]


def test_a_held_claim_has_one_job_of_an_order_though_another_one_becomes_the_head(engine: sa.Engine, held: Any) -> None:
    job = make_job(order=Order("customer_id", by="document_id", on_failure="continue"), **held)
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "document_id": number} for number in (5, 6, 7)])

    def another_head() -> None:
        change(engine, job, 3, document_id=2)
        change(engine, job, 2, document_id=1)

    pause_before(engine, "sqlaqueue_hold_job", "sqlaqueue_job = '[2]'")
    assert claimed_with_change(engine, job, 9, another_head) == [1]


def test_a_job_that_has_begun_meanwhile_and_waits_holds_back_the_one_that_was_the_head(
    engine: sa.Engine, held: Any
) -> None:
    job = make_job(order=Order("customer_id", by="document_id", on_failure="continue"), **held)
    create(engine, job)
    insert(engine, job, of_customers(1, document_id=5))

    def begin_another() -> None:
        # As another transaction leaves it that has claimed the job and retries it later.
        later = sa.func.now() + timedelta(hours=1)
        with engine.begin() as connection:
            values = {"customer_id": 1, "document_id": 1, "started_at": sa.func.now(), "run_at": later}
            connection.execute(sa.insert(job).values(values))

    # Between the first look at the head and the slot of the key.
    pause_inside(engine, "sqlaqueue_hold_job", "sqlaqueue_slot := ")
    assert claimed_with_change(engine, job, 9, begin_another) == []
