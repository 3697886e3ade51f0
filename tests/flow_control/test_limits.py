"""Limits: how many jobs of a key may run at once, whichever way they are claimed or set to running."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Limit, Order, QueueConfig, QueueMixin, claim, complete, rescue, retry
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.held_back import held_back
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.mapping.mixin import spec_of
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


def test_a_claim_admits_no_more_than_the_limit_of_each_key(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 5, *[2] * 3, 3), limits=[Limit(2, per="customer_id")])
    assert customers(claim_and_commit(engine, job)) == [1, 1, 2, 2, 3]
    assert claim_and_commit(engine, job) == []


def test_a_limit_without_a_key_is_for_the_whole_queue(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(10)), limits=[Limit(3)])
    assert len(claim_and_commit(engine, job, 2)) == 2
    assert len(claim_and_commit(engine, job)) == 1
    assert claim_and_commit(engine, job) == []


def test_the_end_of_a_run_frees_its_place(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 1), limits=[Limit(1, per="customer_id")])
    with Session(engine) as session:
        (first,) = claimed(session, job)
        session.execute(complete(first))
        # The same transaction sees its own settlement.
        (second,) = claimed(session, job)
        session.execute(retry(second, delay=100))
        (third,) = claimed(session, job)
        session.commit()
        assert (first.id, second.id, third.id) == (1, 2, 3)
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session, session.begin():
        session.execute(sa.delete(job).where(job.id == 3))
    assert ids(claim_and_commit(engine, job)) == [4]


def test_rows_set_by_plain_sql_and_expired_leases_count_until_they_are_rescued(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 2, 2), limits=[Limit(1, per="customer_id")])
    set_status(engine, job, "processing", 1)
    assert ids(claim_and_commit(engine, job)) == [3]
    with engine.begin() as connection:
        connection.execute(sa.update(job.__table__).values(lease_expires_at=sa.func.now()))
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session, session.begin():
        session.execute(rescue(job))
    # The rescued ones are pending again, and come first.
    assert ids(claim_and_commit(engine, job)) == [1, 3]


def test_a_job_without_a_value_of_the_key_has_no_limit(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(1, per=("customer_id", "kind"))])
    create(engine, job)
    insert(engine, job, [*of_customers(None, None, 1, 1), *of_customers(1, kind="b")])
    assert ids(claim_and_commit(engine, job)) == [1, 2, 3, 5]


def test_each_job_may_have_its_own_limit_and_null_is_none(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, most=2), limits=[Limit("most", per="customer_id")])
    insert(engine, job, of_customers(2, 2, 2, most=None))
    insert(engine, job, of_customers(3, most=0))
    assert ids(claim_and_commit(engine, job)) == [1, 2, 4, 5, 6]


def test_a_job_without_a_limit_counts_for_those_of_its_key_in_the_same_claim(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit("most", per="customer_id")])
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "most": most} for most in (None, 1, 2, 2)])
    assert ids(claim_and_commit(engine, job)) == [1, 3]


def test_a_job_with_a_higher_limit_is_found_behind_one_whose_limit_is_reached(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit("most", per="customer_id")])
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "most": most} for most in (0, 1)])
    assert ids(claim_and_commit(engine, job)) == [2]


def test_it_is_found_behind_many_jobs_of_its_key(engine: sa.Engine) -> None:
    """More than a claim looks at in order, and more than it looks at of one key."""
    job = make_job(limits=[Limit("most", per="customer_id")])
    create(engine, job)
    insert(engine, job, [{"customer_id": 1, "most": most} for most in [0] * 200 + [1]])
    assert ids(claim_and_commit(engine, job, 3)) == [201]


def test_a_function_may_return_a_number(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1), limits=[Limit(lambda model: len(model.__name__) - 1)])
    assert ids(claim_and_commit(engine, job)) == [1, 2]


def test_a_limit_by_a_scalar_select_is_changed_at_run_time(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Tenant(Base):
        __tablename__ = "tenant"
        id: Mapped[int] = mapped_column(primary_key=True)
        most: Mapped[int]

    def most(model: Any) -> sa.Select[tuple[int]]:
        return sa.select(Tenant.most).where(Tenant.id == model.tenant_id)

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(limits=[Limit(most, per="tenant_id")])
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant_id: Mapped[int]

    create(engine, Job)
    with Session(engine) as session, session.begin():
        session.add_all([Tenant(id=1, most=1), Tenant(id=2, most=2)])
        session.add_all([Job(tenant_id=tenant) for tenant in (1, 1, 1, 2, 2, 2)])
    assert ids(claim_and_commit(engine, Job)) == [1, 4, 5]
    with Session(engine) as session, session.begin():
        session.execute(sa.update(Tenant).values(most=2))
    assert ids(claim_and_commit(engine, Job)) == [2]
    with Session(engine) as session, session.begin():
        session.execute(sa.update(Tenant).values(most=1))
        session.execute(sa.update(Job).where(Job.id == 1).values(status="completed"))
    # Lowering the limit stops no job that runs, and admits none until there is room.
    assert claim_and_commit(engine, Job) == []


def test_several_limits_compose(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(2, per="customer_id"), Limit(1, per="kind"), Limit(4)])
    create(engine, job)
    insert(engine, job, [*of_customers(1, 1, 1), *of_customers(1, 1, 1, kind="b"), *of_customers(2, kind="c")])
    insert(engine, job, [*of_customers(3, 4, 5, kind="d"), *of_customers(6, kind="e")])
    assert ids(claim_and_commit(engine, job)) == [1, 4, 7, 8]


def test_keys_at_their_limit_do_not_hold_back_the_jobs_behind_them(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(1, per="customer_id"), Limit(1, per="kind")])
    create(engine, job)
    insert(engine, job, of_customers(*[1] * 2000, kind="a"))
    insert(engine, job, of_customers(*range(100, 1100), kind="b"))
    insert(engine, job, [{"customer_id": 9, "kind": "c"}, {"customer_id": None, "kind": "d"}])
    first, second = claim_and_commit(engine, job, 2)
    # Behind a window of jobs that are held back, keys are visited in no certain order.
    assert (first.id, second.kind) == (1, "b")
    assert sorted(ids(claim_and_commit(engine, job, 10))) == [3001, 3002]
    assert claim_and_commit(engine, job, 10) == []


def test_the_next_priority_is_reached_when_the_first_one_is_held_back(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 300, priority=-5), limits=[Limit(1, per="customer_id")])
    insert(engine, job, of_customers(1, 2, priority=0))
    insert(engine, job, of_customers(3, priority=7))
    assert ids(claim_and_commit(engine, job, 10)) == [1, 302, 303]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_is_refused(engine: sa.Engine, level: str) -> None:
    job = make_queue(engine, of_customers(1), limits=[Limit(1, per="customer_id")])
    refused = pytest.raises(DBAPIError, match="needs READ COMMITTED; this transaction is " + level)
    with Session(engine.execution_options(isolation_level=level)) as session, refused:
        claimed(session, job)


def test_a_claim_with_a_filter_obeys(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 200), limits=[Limit(1, per="customer_id")])
    insert(engine, job, of_customers(1, 1, 2, 2, kind="b"))
    with Session(engine) as session, session.begin():
        found = session.scalars(claim(sa.select(job).where(job.kind == "b"), 10)).all()
        assert ids(found) == [201, 203]
    assert claim_and_commit(engine, job) == []


def test_a_key_that_another_claim_has_locked_is_passed_over(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 2, 2), limits=[Limit(2, per="customer_id")])
    with Session(engine) as one, Session(engine) as other:
        assert ids(claimed(one, job, 1)) == [1]
        assert customers(claimed(other, job, 10)) == [2, 2]
        one.commit()
        assert ids(claimed(other, job, 10)) == [2]
        other.commit()
    assert claim_and_commit(engine, job) == []


def test_a_claim_that_has_passed_over_a_locked_key_knows_it(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), limits=[Limit(2, per="customer_id")])
    flow = flow_control(spec_of(job))
    assert flow is not None
    why = held_back(flow)
    with Session(engine) as one, Session(engine) as other:
        assert len(claimed(one, job, 1)) == 1
        assert claimed(other, job, 1) == []
        assert tuple(other.execute(why).one()) == (True, True, None)
        one.commit()
        other.rollback()
        assert len(claimed(other, job)) == 1
        assert claimed(other, job) == []
        assert tuple(other.execute(why).one()) == (False, False, None)


def test_a_claim_that_is_rolled_back_frees_its_place(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), limits=[Limit(1, per="customer_id")])
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            assert ids(claimed(session, job)) == [1]
            savepoint.rollback()
        with Session(engine) as other, other.begin():
            assert ids(claimed(other, job)) == [1]


def test_keys_without_room_are_not_locked(engine: sa.Engine) -> None:
    """A lock takes a place in a table of the server, and there may be thousands of such keys."""
    job = make_job(limits=[Limit(1, per="customer_id"), Limit(1, per="kind")], order=Order("document_id"))
    create(engine, job)
    insert(engine, job, [{"customer_id": number, "document_id": number, "kind": "b"} for number in range(300)])
    set_status(engine, job, "processing")
    insert(engine, job, [{"customer_id": number, "document_id": -number, "kind": "c"} for number in range(300)])
    insert(engine, job, [{"customer_id": 301, "document_id": 1, "kind": "d"}, {"customer_id": 302, "kind": "b"}])
    with Session(engine) as session:
        assert claimed(session, job) == []
        locks = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
        assert session.scalar(locks) == 0
        insert(engine, job, [{"customer_id": 303, "document_id": 303, "kind": "e"}])
        assert len(claimed(session, job)) == 1
        assert session.scalar(locks) == 3


def test_at_most_one_key_without_room_is_locked_after_keys_with_room(engine: sa.Engine) -> None:
    """While keys have room, the next one is locked before it is looked at."""
    job = make_queue(engine, of_customers(*range(1, 200)), limits=[Limit(1, per="customer_id")])
    set_status(engine, job, "processing")
    insert(engine, job, of_customers(0, *range(1, 200)))
    with Session(engine) as session:
        assert ids(claimed(session, job, 400)) == [200]
        locks = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
        assert session.execute(locks).scalar_one() <= 2


def test_a_select_of_two_columns_is_refused() -> None:
    job = make_job(limits=[Limit(lambda job: sa.select(job.id, job.most), per="customer_id")])
    with pytest.raises(ConfigurationError, match="Job: the select of a limit or weight has 2 columns"):
        claim(job, 1).compile(dialect=postgresql.dialect())


@pytest.mark.parametrize("limits", [["customer_id"], ["customer_id", "kind"]])
def test_each_key_is_looked_at_once_while_keys_have_room(engine: sa.Engine, limits: list[str]) -> None:
    job = make_job(limits=[Limit(2, per=per) for per in limits])
    create(engine, job)
    insert(engine, job, [{"customer_id": number, "kind": str(number)} for number in range(60)])
    with Session(engine) as session:
        assert len(claimed(session, job)) == 60
        scans = sa.text("SELECT idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'job'")
        # One for each limit and one for the row. A look before the lock would be another one for each limit.
        assert session.scalars(scans).one() < 60 * (len(limits) + 1) + 30


def test_a_claim_looks_at_few_jobs_when_the_whole_queue_has_no_room(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(1000)), limits=[Limit(2)])
    set_status(engine, job, "processing", 1, 2)
    with Session(engine) as session:
        # A function is called for each job that the claim looks at.
        session.execute(sa.text("SET LOCAL track_functions = 'pl'"))
        assert claimed(session, job, 500) == []
        calls = sa.text("SELECT sum(calls) FROM pg_stat_xact_user_functions WHERE funcname LIKE 'sqlaqueue_capacity%'")
        assert 0 < session.execute(calls).scalar_one() < 100
