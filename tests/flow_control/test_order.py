"""Order: within a key, jobs run strictly one after the other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Order, cancel, complete, fail, purge, release, requeue, rescue, retry
from tests.flow_control.models import (
    claim_and_commit,
    claimed,
    create,
    ids,
    insert,
    make_job,
    of_customers,
    set_status,
)

LATER = timedelta(hours=1)


def ordered(engine: sa.Engine, *customers: int | None, **options: Any) -> Any:
    """Create a queue with jobs of some customers, in their order."""
    job = make_job(order=Order("customer_id", **options))
    create(engine, job)
    insert(engine, job, of_customers(*customers))
    return job


def end(engine: sa.Engine, job: Any, verb: Any, *keys: int, **options: Any) -> None:
    """Settle claimed jobs by a verb."""
    with Session(engine) as session, session.begin():
        jobs = session.scalars(sa.select(job).where(job.id.in_(keys))).all()
        session.execute(verb(jobs, **options))


def settle(engine: sa.Engine, job: Any, verb: Any, **options: Any) -> list[int]:
    """Claim everything, settle it by a verb, and return the keys."""
    with Session(engine) as session, session.begin():
        jobs = claimed(session, job)
        keys = ids(jobs)
        session.execute(verb(jobs, **options))
        return keys


def test_only_the_head_of_each_key_is_admitted(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 2, 2, 1, None, None)
    assert settle(engine, job, complete) == [1, 3, 6, 7]
    assert settle(engine, job, complete) == [2, 4]
    assert ids(claim_and_commit(engine, job)) == [5]
    insert(engine, job, of_customers(1))
    assert claim_and_commit(engine, job) == []


def test_the_order_is_that_of_the_attribute_and_not_of_the_claim(engine: sa.Engine) -> None:
    job = make_job(order=Order("customer_id", by="document_id"))
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "document_id": number, "priority": number} for number in (3, 1, 2)])
    assert [settle(engine, job, complete) for _ in range(3)] == [[2], [3], [1]]


@pytest.mark.parametrize(("verb", "options"), [(retry, {"delay": 3600}), (release, {})])
def test_a_job_that_has_begun_and_waits_holds_the_others_back(
    engine: sa.Engine, verb: Any, options: dict[str, Any]
) -> None:
    job = ordered(engine, 1, 1, 2)
    assert settle(engine, job, verb, **options) == [1, 3]
    expected = [1, 3] if verb is release else []
    assert ids(claim_and_commit(engine, job)) == expected


def test_a_job_that_is_not_due_and_has_never_begun_is_passed_over(engine: sa.Engine) -> None:
    job = make_job(order=Order("customer_id"))
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "run_at": datetime.now(UTC) + LATER}])
    insert(engine, job, of_customers(1))
    assert ids(claim_and_commit(engine, job)) == [2]


def test_a_failed_head_blocks_its_key_until_it_is_requeued_or_deleted(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 2, 2)
    assert settle(engine, job, fail, error="no") == [1, 3]
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session, session.begin():
        session.execute(requeue(session.get(job, 1)))
        session.delete(session.get(job, 3))
    assert sorted(settle(engine, job, complete)) == [1, 4]
    assert ids(claim_and_commit(engine, job)) == [2]


def test_a_failed_head_may_let_the_rest_go_on(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, on_failure="continue")
    assert settle(engine, job, fail, error="no") == [1]
    assert ids(claim_and_commit(engine, job)) == [2]


def test_a_failed_head_may_cancel_the_rest(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 1, 2, 2, on_failure="cancel")
    with Session(engine) as session, session.begin():
        session.execute(fail(next(each for each in claimed(session, job) if each.customer_id == 1), error="no"))
    with Session(engine) as session:
        found = session.scalars(sa.select(job).order_by(job.id)).all()
        assert [each.status for each in found] == ["failed", "cancelled", "cancelled", "processing", "pending"]
        assert found[1].finished_at is not None
    insert(engine, job, of_customers(1))
    assert ids(claim_and_commit(engine, job)) == [6]


def test_jobs_that_fail_by_plain_sql_cancel_the_rest_as_well(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, on_failure="cancel")
    set_status(engine, job, "failed", 1)
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session:
        assert session.get(job, 2).status == "cancelled"


def test_a_cancelled_head_lets_the_next_one_begin(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1)
    with Session(engine) as session, session.begin():
        session.execute(cancel(session.get(job, 1)))
    assert ids(claim_and_commit(engine, job)) == [2]


def test_a_rescued_head_is_the_head_again(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1)
    assert ids(claim_and_commit(engine, job)) == [1]
    with engine.begin() as connection:
        connection.execute(sa.update(job.__table__).values(lease_expires_at=sa.func.now()))
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session, session.begin():
        session.execute(rescue(job))
    assert ids(claim_and_commit(engine, job)) == [1]


def test_nothing_runs_beside_a_job_that_was_requeued_late(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 1, on_failure="continue")
    assert settle(engine, job, fail, error="no") == [1]
    assert ids(claim_and_commit(engine, job)) == [2]
    with Session(engine) as session, session.begin():
        session.execute(requeue(session.get(job, 1)))
    # It is the first unfinished one, but another one runs.
    assert claim_and_commit(engine, job) == []


def test_a_head_that_another_transaction_has_locked_is_not_passed_by(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 2)
    with Session(engine) as session, session.begin():
        session.execute(sa.select(job).where(job.id == 1).with_for_update())
        assert ids(claim_and_commit(engine, job)) == [3]
    assert ids(claim_and_commit(engine, job)) == [1]


def test_a_head_behind_many_others_of_its_key_in_the_claim_order_is_found(engine: sa.Engine) -> None:
    job = make_job(order=Order("customer_id"))
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "run_at": datetime.now(UTC)}])
    insert(engine, job, [{"customer_id": 1, "run_at": datetime.now(UTC) - LATER} for _ in range(500)])
    assert ids(claim_and_commit(engine, job, 5)) == [1]


def test_a_failed_head_that_blocks_is_not_purged(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 2)
    assert settle(engine, job, fail, error="no") == [1, 3]
    with Session(engine) as session, session.begin():
        assert session.scalars(purge(job, states=["failed"])).all() == [3]
        session.execute(cancel(session.get(job, 2)))
    with Session(engine) as session, session.begin():
        assert session.scalars(purge(job, states=["failed"])).all() == [1]
