"""Order: within a key, jobs run strictly one after the other. Turns: among jobs of one priority, keys take turns."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import (
    ConcurrencyLimit,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    cancel,
    complete,
    fail,
    purge,
    release,
    requeue,
    rescue,
    retry,
)
from tests.flow_control.models import (
    claim_and_commit,
    claimed,
    create,
    customers,
    ids,
    insert,
    make_job,
    make_queue,
    of_customers,
    set_status,
)
from tests.models import execute

LATER = timedelta(hours=1)


def ordered(engine: sa.Engine, *customers: int | None, **options: Any) -> Any:
    return make_queue(engine, of_customers(*customers), flow_control=[InOrder("customer_id", **options)])


def end(engine: sa.Engine, job: Any, verb: Any, *keys: int, **options: Any) -> None:
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
    job = create(engine, make_job(flow_control=[InOrder("customer_id", by="document_id")]))
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
    job = make_queue(
        engine, [{"customer_id": 1, "run_at": datetime.now(UTC) + LATER}], flow_control=[InOrder("customer_id")]
    )
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


def test_a_failed_job_without_a_key_cancels_no_other(engine: sa.Engine) -> None:
    job = ordered(engine, None, None, on_failure="cancel")
    with Session(engine) as session, session.begin():
        session.execute(fail(claimed(session, job, 1), error="no"))
    assert ids(claim_and_commit(engine, job)) == [2]


@pytest.mark.postgresql("elsewhere no trigger cancels them")
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
    execute(engine, sa.update(job.__table__).values(lease_expires_at=sa.func.now()))
    assert claim_and_commit(engine, job) == []
    execute(engine, rescue(job))
    assert ids(claim_and_commit(engine, job)) == [1]


def test_nothing_runs_beside_a_job_that_was_requeued_late(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 1, on_failure="continue")
    assert settle(engine, job, fail, error="no") == [1]
    assert ids(claim_and_commit(engine, job)) == [2]
    with Session(engine) as session, session.begin():
        session.execute(requeue(session.get(job, 1)))
    # It is the first unfinished one, but another one runs.
    assert claim_and_commit(engine, job) == []


@pytest.mark.postgresql("SQLite has one writer")
def test_a_head_that_another_transaction_has_locked_is_not_passed_by(engine: sa.Engine) -> None:
    job = ordered(engine, 1, 1, 2)
    with Session(engine) as session, session.begin():
        session.execute(sa.select(job).where(job.id == 1).with_for_update())
        assert ids(claim_and_commit(engine, job)) == [3]
    assert ids(claim_and_commit(engine, job)) == [1]


def test_a_head_behind_many_others_of_its_key_in_the_claim_order_is_found(engine: sa.Engine) -> None:
    job = make_queue(engine, [{"customer_id": 1, "run_at": datetime.now(UTC)}], flow_control=[InOrder("customer_id")])
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


# -- turns ---------------------------------------------------------------------------------------------------------


def turns(engine: sa.Engine, job: Any, number: int, n: int = 1) -> list[Any]:
    """Claim several times, and return the customers in the order of the claims."""
    return [customer for _ in range(number) for customer in customers(claim_and_commit(engine, job, n))]


def test_keys_take_turns_whatever_the_number_of_their_jobs(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 1000, *[2] * 3, 3, None), flow_control=[FairShare("customer_id")])
    order = turns(engine, job, 10)
    assert sorted(order[:4], key=str) == [1, 2, 3, None]
    assert sorted(order[4:6]) == [1, 2]
    assert sorted(order[6:8]) == [1, 2]
    assert order[8:] == [1, 1]


def test_a_key_that_arrives_waits_for_one_turn_of_each_other_at_most(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[FairShare("customer_id")]))
    insert(engine, job, of_customers(*[customer for customer in range(20) for _ in range(30)]))
    turns(engine, job, 7)
    insert(engine, job, of_customers(99))
    assert 99 in turns(engine, job, 21)


def test_a_claim_of_several_gives_each_key_a_turn_and_the_rest_to_those_that_have_more(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 50, *[2] * 50, 3), flow_control=[FairShare("customer_id")])
    first = customers(claim_and_commit(engine, job, 10))
    assert sorted(first[:3]) == [1, 2, 3]
    assert len(first) == 10
    second = turns(engine, job, 4, 10)
    # What is left over goes to another key each time.
    assert min(second.count(1), second.count(2)) >= 12


def test_a_turn_has_as_many_jobs_as_the_weight(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(flow_control=[FairShare("customer_id", weight="weight")])
        id: Mapped[int] = mapped_column(primary_key=True)
        customer_id: Mapped[int]
        weight: Mapped[int]

    create(engine, Job)
    insert(engine, Job, [{"customer_id": customer, "weight": customer} for customer in (1, 2, 3) for _ in range(60)])
    for n in (1, 2, 5):
        found = turns(engine, Job, 30 // n, n)
        assert [found.count(customer) for customer in (1, 2, 3)] == [5, 10, 15], (n, found)


def test_priorities_come_before_turns(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 20, *[2] * 20, priority=5), flow_control=[FairShare("customer_id")])
    insert(engine, job, of_customers(1, 1, 1))
    assert turns(engine, job, 3) == [1, 1, 1]
    assert turns(engine, job, 2) in ([1, 2], [2, 1])
    # The turns of one priority go on where they were, whatever another one has had meanwhile.
    for _ in range(5):
        insert(engine, job, of_customers(3))
        assert turns(engine, job, 1) == [3]
        assert sorted(turns(engine, job, 2)) == [1, 2]


def test_a_key_at_its_limit_is_passed_over(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[FairShare("customer_id"), ConcurrencyLimit(2, per="customer_id")]))
    insert(engine, job, of_customers(*[1] * 50, *[2] * 50, *[3] * 50))
    assert sorted(turns(engine, job, 6)) == [1, 1, 2, 2, 3, 3]
    assert claim_and_commit(engine, job) == []


def test_a_turn_reaches_behind_jobs_that_are_held_back(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[FairShare("customer_id"), ConcurrencyLimit(1, per="kind")]))
    insert(engine, job, of_customers(*[1] * 500, kind="a"))
    insert(engine, job, [*of_customers(1, kind="b"), *of_customers(2, 2, kind="c")])
    with Session(engine) as session:
        found = claim_and_commit(engine, job, 10)
        assert sorted((each.customer_id, each.kind) for each in found) == [(1, "a"), (1, "b"), (2, "c")]
        session.rollback()


@pytest.mark.postgresql("it reads the plan")
def test_ten_thousand_keys_cost_a_claim_a_bounded_number_of_buffers(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(10_000), *range(10_000)), flow_control=[FairShare("customer_id")])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE job")
    statements: list[tuple[str, Any]] = []

    def keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        statements.append((statement, parameters))

    claim_and_commit(engine, job, 1)
    sa.event.listen(engine, "before_cursor_execute", keep)
    claim_and_commit(engine, job, 1)
    sa.event.remove(engine, "before_cursor_execute", keep)
    statement, parameters = next(each for each in statements if "sqlaqueue_group" in each[0])
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters).scalar()
        connection.rollback()
    assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 150
