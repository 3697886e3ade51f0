"""Limits: how many jobs of a key may run at once. Rates: how many may begin within a period, and ``Throttle``."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, sessionmaker

from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    States,
    Throttle,
    claim,
    complete,
    rescue,
    retry,
)
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.flow_control.held_back import held_back
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.flow_control.rates import delete_idle
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.options import FlowRule
from sqlaqueue.sql.portable import seconds_between
from sqlaqueue.testing import drain, travel
from tests.flow_control.models import (
    HELD,
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
from tests.models import execute, new_base


def test_a_claim_admits_no_more_than_the_limit_of_each_key(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 5, *[2] * 3, 3), flow_control=[ConcurrencyLimit(2, per="customer_id")])
    assert customers(claim_and_commit(engine, job)) == [1, 1, 2, 2, 3]
    assert claim_and_commit(engine, job) == []


def test_a_limit_without_a_key_is_for_the_whole_queue(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(10)), flow_control=[ConcurrencyLimit(3)])
    assert len(claim_and_commit(engine, job, 2)) == 2
    assert len(claim_and_commit(engine, job)) == 1
    assert claim_and_commit(engine, job) == []


def test_the_end_of_a_run_frees_its_place(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")])
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
    execute(engine, sa.delete(job).where(job.id == 3))
    assert ids(claim_and_commit(engine, job)) == [4]


def test_rows_set_by_plain_sql_and_expired_leases_count_until_they_are_rescued(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 2, 2), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    set_status(engine, job, "processing", 1)
    assert ids(claim_and_commit(engine, job)) == [3]
    execute(engine, sa.update(job.__table__).values(lease_expires_at=sa.func.now()))
    assert claim_and_commit(engine, job) == []
    execute(engine, rescue(job))
    # The rescued ones are pending again, and come first.
    assert ids(claim_and_commit(engine, job)) == [1, 3]


def test_a_job_without_a_value_of_the_key_has_no_limit(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit(1, per=("customer_id", "kind"))]))
    insert(engine, job, [*of_customers(None, None, 1, 1), *of_customers(1, kind="b")])
    assert ids(claim_and_commit(engine, job)) == [1, 2, 3, 5]


def test_running_jobs_without_a_value_of_the_key_hold_no_other_back(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(None, None), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 2
    insert(engine, job, of_customers(1, None))
    assert customers(claim_and_commit(engine, job)) == [1, None]


def test_each_job_may_have_its_own_limit_and_null_is_none(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, most=2), flow_control=[ConcurrencyLimit("most", per="customer_id")])
    insert(engine, job, of_customers(2, 2, 2, most=None))
    insert(engine, job, of_customers(3, most=0))
    assert ids(claim_and_commit(engine, job)) == [1, 2, 4, 5, 6]


def test_a_job_without_a_limit_counts_for_those_of_its_key_in_the_same_claim(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")]))
    insert(engine, job, [{"customer_id": 1, "most": most} for most in (None, 1, 2, 2)])
    assert ids(claim_and_commit(engine, job)) == [1, 3]


def test_a_job_with_a_higher_limit_is_found_behind_one_whose_limit_is_reached(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")]))
    insert(engine, job, [{"customer_id": 1, "most": most} for most in (0, 1)])
    assert ids(claim_and_commit(engine, job)) == [2]


def test_it_is_found_behind_many_jobs_of_its_key(engine: sa.Engine) -> None:
    """More than a claim looks at in order, and more than it looks at of one key."""
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")]))
    insert(engine, job, [{"customer_id": 1, "most": most} for most in [0] * 200 + [1]])
    assert ids(claim_and_commit(engine, job, 3)) == [201]


def test_a_function_may_return_a_number(engine: sa.Engine) -> None:
    job = make_queue(
        engine, of_customers(1, 1, 1), flow_control=[ConcurrencyLimit(lambda model: len(model.__name__) - 1)]
    )
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
        __queue__ = QueueConfig(flow_control=[ConcurrencyLimit(most, per="tenant_id")])
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant_id: Mapped[int]

    create(engine, Job)
    with Session(engine) as session, session.begin():
        session.add_all([Tenant(id=1, most=1), Tenant(id=2, most=2)])
        session.add_all([Job(tenant_id=tenant) for tenant in (1, 1, 1, 2, 2, 2)])
    assert ids(claim_and_commit(engine, Job)) == [1, 4, 5]
    execute(engine, sa.update(Tenant).values(most=2))
    assert ids(claim_and_commit(engine, Job)) == [2]
    with Session(engine) as session, session.begin():
        session.execute(sa.update(Tenant).values(most=1))
        session.execute(sa.update(Job).where(Job.id == 1).values(status="completed"))
    # Lowering the limit stops no job that runs, and admits none until there is room.
    assert claim_and_commit(engine, Job) == []


def test_several_limits_compose(engine: sa.Engine) -> None:
    job = create(
        engine,
        make_job(
            flow_control=[ConcurrencyLimit(2, per="customer_id"), ConcurrencyLimit(1, per="kind"), ConcurrencyLimit(4)]
        ),
    )
    insert(engine, job, [*of_customers(1, 1, 1), *of_customers(1, 1, 1, kind="b"), *of_customers(2, kind="c")])
    insert(engine, job, [*of_customers(3, 4, 5, kind="d"), *of_customers(6, kind="e")])
    assert ids(claim_and_commit(engine, job)) == [1, 4, 7, 8]


def test_keys_at_their_limit_do_not_hold_back_the_jobs_behind_them(engine: sa.Engine) -> None:
    job = create(
        engine, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id"), ConcurrencyLimit(1, per="kind")])
    )
    insert(engine, job, of_customers(*[1] * 2000, kind="a"))
    insert(engine, job, of_customers(*range(100, 1100), kind="b"))
    insert(engine, job, [{"customer_id": 9, "kind": "c"}, {"customer_id": None, "kind": "d"}])
    first, second = claim_and_commit(engine, job, 2)
    # Behind a window of jobs that are held back, keys are visited in no certain order.
    assert (first.id, second.kind) == (1, "b")
    assert sorted(ids(claim_and_commit(engine, job, 10))) == [3001, 3002]
    assert claim_and_commit(engine, job, 10) == []


def test_the_next_priority_is_reached_when_the_first_one_is_held_back(engine: sa.Engine) -> None:
    job = make_queue(
        engine, of_customers(*[1] * 300, priority=-5), flow_control=[ConcurrencyLimit(1, per="customer_id")]
    )
    insert(engine, job, of_customers(1, 2, priority=0))
    insert(engine, job, of_customers(3, priority=7))
    assert ids(claim_and_commit(engine, job, 10)) == [1, 302, 303]


@pytest.mark.postgresql("the levels and the error are its own")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_is_refused(engine: sa.Engine, level: str) -> None:
    job = make_queue(engine, of_customers(1), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    refused = pytest.raises(DBAPIError, match="needs READ COMMITTED; this transaction is " + level)
    with Session(engine.execution_options(isolation_level=level)) as session, refused:
        claimed(session, job)


def test_a_claim_with_a_filter_obeys(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 200), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    insert(engine, job, of_customers(1, 1, 2, 2, kind="b"))
    with Session(engine) as session, session.begin():
        found = session.scalars(claim(sa.select(job).where(job.kind == "b"), 10)).all()
        assert ids(found) == [201, 203]
    assert claim_and_commit(engine, job) == []


def claimed_by_a_join(session: Session, job: Any, n: int = 10) -> list[int]:
    """Claim jobs by a filter that finds each as often as there are jobs of its kind."""
    other = aliased(job)
    return ids(session.scalars(claim(sa.select(job).join(other, other.kind == job.kind), n)).all())


def test_a_job_that_a_filter_finds_twice_has_one_place(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 2), flow_control=[ConcurrencyLimit(2, per="customer_id")])
    with Session(engine) as session, session.begin():
        assert claimed_by_a_join(session, job) == [1, 2, 4]


def test_a_job_that_a_filter_finds_twice_begins_once(engine: sa.Engine) -> None:
    job = make_queue(
        engine, of_customers(1, 1, 1, 2), flow_control=[RateLimit(2, every=3600, per="customer_id"), FairShare("kind")]
    )
    with Session(engine) as session, session.begin():
        assert claimed_by_a_join(session, job, 1) == [1]
        assert claimed_by_a_join(session, job) == [2, 4]


@pytest.mark.postgresql("SQLite has one writer")
def test_a_key_that_another_claim_has_locked_is_passed_over(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 2, 2), flow_control=[ConcurrencyLimit(2, per="customer_id")])
    with Session(engine) as one, Session(engine) as other:
        assert ids(claimed(one, job, 1)) == [1]
        assert customers(claimed(other, job, 10)) == [2, 2]
        one.commit()
        assert ids(claimed(other, job, 10)) == [2]
        other.commit()
    assert claim_and_commit(engine, job) == []


@pytest.mark.postgresql("SQLite has one writer")
def test_a_claim_that_has_passed_over_a_locked_key_knows_it(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[ConcurrencyLimit(2, per="customer_id")])
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


@pytest.mark.postgresql("elsewhere the locks of keys last until the end of the transaction")
def test_a_claim_that_is_rolled_back_frees_its_place(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            assert ids(claimed(session, job)) == [1]
            savepoint.rollback()
        with Session(engine) as other, other.begin():
            assert ids(claimed(other, job)) == [1]


@pytest.mark.postgresql("it reads the locks of the server")
def test_keys_without_room_are_not_locked(engine: sa.Engine) -> None:
    """A lock takes a place in a table of the server, and there may be thousands of such keys."""
    job = make_job(
        flow_control=[ConcurrencyLimit(1, per="customer_id"), ConcurrencyLimit(1, per="kind"), InOrder("document_id")]
    )
    create(engine, job)
    insert(engine, job, [{"customer_id": number, "document_id": number, "kind": "b"} for number in range(300)])
    set_status(engine, job, "processing")
    insert(engine, job, [{"customer_id": number, "document_id": -number, "kind": "c"} for number in range(300)])
    insert(engine, job, [{"customer_id": 301, "document_id": 1, "kind": "d"}, {"customer_id": 302, "kind": "b"}])
    with Session(engine) as session:
        assert claimed(session, job) == []
        locks = sa.text(
            "SELECT count(*) FROM pg_locks WHERE objsubid = 1 AND locktype = 'advisory' AND pid = pg_backend_pid()"
        )
        assert session.scalar(locks) == 0
        insert(engine, job, [{"customer_id": 303, "document_id": 303, "kind": "e"}])
        assert len(claimed(session, job)) == 1
        assert session.scalar(locks) == 3


@pytest.mark.postgresql("it reads the locks of the server")
def test_at_most_one_key_without_room_is_locked_after_keys_with_room(engine: sa.Engine) -> None:
    """While keys have room, the next one is locked before it is looked at."""
    job = make_queue(engine, of_customers(*range(1, 200)), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    set_status(engine, job, "processing")
    insert(engine, job, of_customers(0, *range(1, 200)))
    with Session(engine) as session:
        assert ids(claimed(session, job, 400)) == [200]
        locks = sa.text(
            "SELECT count(*) FROM pg_locks WHERE objsubid = 1 AND locktype = 'advisory' AND pid = pg_backend_pid()"
        )
        assert session.execute(locks).scalar_one() <= 2


def test_a_select_of_two_columns_is_refused() -> None:
    job = make_job(flow_control=[ConcurrencyLimit(lambda job: sa.select(job.id, job.most), per="customer_id")])
    with pytest.raises(ConfigurationError, match="Job: the select of a limit or weight has 2 columns"):
        claim(job, 1).compile(dialect=postgresql.dialect())


@pytest.mark.postgresql("it counts the calls of functions")
@pytest.mark.parametrize("limits", [["customer_id"], ["customer_id", "kind"]])
def test_each_key_is_looked_at_once_while_keys_have_room(engine: sa.Engine, limits: list[str]) -> None:
    job = create(engine, make_job(flow_control=[*[ConcurrencyLimit(2, per=per) for per in limits]]))
    insert(engine, job, [{"customer_id": number, "kind": str(number)} for number in range(60)])
    with Session(engine) as session:
        assert len(claimed(session, job)) == 60
        scans = sa.text("SELECT idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'job'")
        # One for each limit and one for the row. A look before the lock would be another one for each limit.
        assert session.scalars(scans).one() < 60 * (len(limits) + 1) + 30


@pytest.mark.postgresql("it counts the calls of functions")
def test_a_claim_looks_at_few_jobs_when_the_whole_queue_has_no_room(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(1000)), flow_control=[ConcurrencyLimit(2)])
    set_status(engine, job, "processing", 1, 2)
    with Session(engine) as session:
        # A function is called for each job that the claim looks at.
        session.execute(sa.text("SET LOCAL track_functions = 'pl'"))
        assert claimed(session, job, 500) == []
        calls = sa.text("SELECT sum(calls) FROM pg_stat_xact_user_functions WHERE funcname LIKE 'sqlaqueue_capacity%'")
        assert 0 < session.execute(calls).scalar_one() < 100


# -- rates ---------------------------------------------------------------------------------------------------------


def stored(job: Any) -> sa.Table:
    table: sa.Table = job.metadata.tables[RATE]
    return table


def pass_time(engine: sa.Engine, job: Any, delta: timedelta) -> None:
    """Move the stored times back, as if so much time had passed."""
    table = stored(job)
    execute(engine, sa.update(table).values(next_at=table.c.next_at - delta))


def test_a_burst_begins_at_once_and_then_one_job_each_interval(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[RateLimit(60, every=3600, per="customer_id", burst=3)]))
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
    job = make_queue(engine, of_customers(1, 2, 3), flow_control=[RateLimit(2, every=timedelta(hours=1))])
    assert customers(claim_and_commit(engine, job)) == [1, 2]
    assert claim_and_commit(engine, job) == []


def test_only_what_is_claimed_uses_the_rate_up(engine: sa.Engine) -> None:
    job = create(
        engine, make_job(flow_control=[RateLimit(4, every=3600, per="kind"), ConcurrencyLimit(1, per="customer_id")])
    )
    insert(engine, job, of_customers(1, 1, 1, 2))
    with Session(engine) as session:
        assert customers(claimed(session, job)) == [1, 2]
        session.rollback()
    with engine.connect() as connection:
        assert connection.execute(sa.select(stored(job))).all() == []
    assert customers(claim_and_commit(engine, job)) == [1, 2]
    with engine.connect() as connection:
        table = stored(job)
        ahead = connection.scalar(sa.select(seconds_between(sa.func.now(), table.c.next_at)))
        assert ahead is not None
        assert 1700 < ahead <= 1801


def test_exhausted_keys_do_not_hold_back_the_jobs_behind_them(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 500, 2), flow_control=[RateLimit(1, every=3600, per="customer_id")])
    assert customers(claim_and_commit(engine, job, 1)) == [1]
    assert customers(claim_and_commit(engine, job, 1)) == [2]
    assert claim_and_commit(engine, job, 1) == []


def test_a_clock_that_is_set_back_holds_a_key_back_for_one_burst_at_most(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*[1] * 5), flow_control=[RateLimit(3, every=0.3, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 3
    pass_time(engine, job, timedelta(days=-1))
    assert claim_and_commit(engine, job) == []
    time.sleep(0.35)
    assert len(claim_and_commit(engine, job)) == 2


@pytest.mark.postgresql("SQLite has one writer")
def test_claims_do_not_wait_for_each_other_after_a_clock_was_set_back(engine: sa.Engine) -> None:
    """Each corrects only rows of keys that it has locked."""
    job = make_queue(engine, of_customers(1, 2), flow_control=[RateLimit(3, every=3600, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 2
    insert(engine, job, of_customers(1, 2))
    pass_time(engine, job, timedelta(days=-1))
    with Session(engine) as first, Session(engine) as second:
        assert claimed(first, job) == []
        second.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
        assert claimed(second, job) == []


def test_a_rate_is_exact_over_many_claims(engine: sa.Engine) -> None:
    job = make_queue(
        engine, of_customers(*[1] * 200), flow_control=[RateLimit(100, every=1, per="customer_id", burst=5)]
    )
    began, admitted = time.monotonic(), 0
    while time.monotonic() - began < 0.5 or admitted < 10:
        admitted += len(claim_and_commit(engine, job, 10))
    took = time.monotonic() - began
    assert admitted <= 5 + 100 * took + 1


# -- ``Throttle`` --------------------------------------------------------------------------------------------------
PER_CUSTOMER = RateLimit(100, every=1, per="customer_id")


def throttled(engine: sa.Engine, job: Any) -> list[Any]:
    """Return in how many seconds keys may begin again, of those that are held back."""
    until = job.metadata.tables[RATE].c.throttled_until
    with engine.connect() as connection:
        seconds = sa.select(seconds_between(sa.func.now(), until)).where(until > sa.func.now())
        return list(connection.execute(seconds).scalars())


@pytest.mark.few(1)
@pytest.mark.parametrize("until", [3600, timedelta(hours=1), "datetime"])
def test_the_key_is_held_back_and_the_attempt_does_not_count(engine: sa.Engine, travelling: Any, until: Any) -> None:
    job = travelling(flow_control=[PER_CUSTOMER])
    insert(engine, job, of_customers(1, 1, 2))
    called: list[Any] = []

    def handle(session: Session, one: Any) -> None:
        called.append(one.customer_id)
        if called == [1]:
            raise Throttle(datetime.now(UTC) + timedelta(hours=1) if until == "datetime" else until, per="customer_id")

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
    job = create(
        engine, make_job(flow_control=[PER_CUSTOMER, RateLimit(9, every=60, per="customer_id"), RateLimit(99, every=1)])
    )
    insert(engine, job, of_customers(1))

    def handle(session: Session, one: Any) -> None:
        raise Throttle(600, per="customer_id")

    Consumer(job, handle, sessionmaker(engine)).drain()
    assert len(throttled(engine, job)) == 2
    insert(engine, job, of_customers(1, 2, None))
    assert customers(claim_and_commit(engine, job)) == [2, None]


@pytest.mark.few(1)
def test_without_attributes_the_rates_of_the_whole_queue_are_held_back(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[RateLimit(100, every=1), RateLimit(9, every=60), PER_CUSTOMER]))
    insert(engine, job, of_customers(1))

    def handle(session: Session, one: Any) -> None:
        raise Throttle(600)

    Consumer(job, handle, sessionmaker(engine)).drain()
    assert len(throttled(engine, job)) == 2
    insert(engine, job, of_customers(1, 2, None))
    assert claim_and_commit(engine, job) == []
    with Session(engine) as session:
        assert session.get(job, 1).status == "pending"
        assert session.get(job, 1).attempts == 0


@pytest.mark.parametrize("rate", [None, "kind", ("customer_id", "kind")])
def test_a_rate_that_the_queue_does_not_have_is_an_error_of_the_handler(
    engine: sa.Engine, rate: str | Sequence[str] | None
) -> None:
    job = make_queue(engine, of_customers(1), flow_control=[PER_CUSTOMER], max_attempts=1)

    def handle(session: Session, one: Any) -> None:
        raise Throttle(600, per=rate)

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
        ((30, 5), r"Throttle\(per=5\): give the name of an attribute, or several"),
        ((30, ""), r"Throttle\(per=''\): give the name"),
        ((30, ["a", 5]), "give the name of an attribute"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Throttle(*arguments)


def test_rows_that_say_nothing_are_deleted(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(*range(10)), flow_control=[RateLimit(1, every=0.001, per="customer_id")])
    claim_and_commit(engine, job)
    table = job.metadata.tables[RATE]
    with engine.begin() as connection:
        hour = timedelta(hours=1)
        connection.execute(sa.update(table).values(next_at=sa.func.now() - hour))
        some = connection.scalars(sa.select(table.c.key).limit(2)).all()
        connection.execute(sa.update(table).where(table.c.key.in_(some)).values(throttled_until=sa.func.now() + hour))
    with engine.begin() as connection:
        statement = delete_idle(spec_of(job))
        assert statement is not None
        connection.execute(statement)
        assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 2


# -- the configuration of flow control: what is refused, and how ---------------------------------------------------
REFUSED: list[tuple[Any, str]] = [
    (lambda: ConcurrencyLimit(-1), r"ConcurrencyLimit\(-1\): use an integer of 0 or more"),
    (lambda: ConcurrencyLimit(most=True), r"ConcurrencyLimit\(True\): use an integer"),
    (lambda: ConcurrencyLimit(1.5), r"ConcurrencyLimit\(1.5\): use an integer"),
    (lambda: ConcurrencyLimit(None), r"ConcurrencyLimit\(None\): use an integer"),
    (lambda: ConcurrencyLimit(2**31), "use an integer"),
    (
        lambda: ConcurrencyLimit("2"),
        r"ConcurrencyLimit\('2'\): use an integer of 0 or more, the name of an attribute, or a scalar select",
    ),
    (lambda: ConcurrencyLimit(1, per=()), r"ConcurrencyLimit\(per=\(\)\): name at least one attribute"),
    (lambda: ConcurrencyLimit(1, per=("a", "a")), "the attribute 'a' is named twice"),
    (lambda: ConcurrencyLimit(1, per=3), r"ConcurrencyLimit\(per=3\): use the name of an attribute"),  # type: ignore[arg-type] # what is tested
    (lambda: RateLimit(0, every=1), r"RateLimit\(0\): use an integer of 1 or more"),
    (lambda: RateLimit(1, every=1, burst=0), r"RateLimit\(burst=0\): use an integer of 1 or more"),
    (lambda: RateLimit(1, every=0), r"RateLimit\(every=0\): use from one millisecond to one year"),
    (lambda: RateLimit(1, every=timedelta(days=400)), "use from one millisecond to one year"),
    (InOrder, r"InOrder\(\): give the name of an attribute"),
    (lambda: InOrder("a", by=""), r"InOrder\(by=''\): use the name of an attribute"),
    (lambda: InOrder("a", on_failure="stop"), r"InOrder\(on_failure='stop'\): use \"block\""),  # type: ignore[arg-type] # what is tested
    (FairShare, r"FairShare\(\): give the name of an attribute"),
    (lambda: FairShare("a", weight=None), r"FairShare\(weight=None\): use an integer of 1 or more"),
    (lambda: FairShare("a", weight=0), r"FairShare\(weight=0\): use an integer of 1 or more"),
    (lambda: QueueConfig(flow_control="a"), r"QueueConfig\(flow_control='a'\): use a list of rules"),  # type: ignore[arg-type] # what is tested
    (lambda: QueueConfig(flow_control=None), r"QueueConfig\(flow_control=None\): use a list of rules"),  # type: ignore[arg-type] # what is tested
    (
        lambda: QueueConfig(flow_control=ConcurrencyLimit(1)),  # type: ignore[arg-type] # what is tested
        r"put it in a list, as in flow_control=\[ConcurrencyLimit\(\.\.\.\)\]",
    ),
    (
        lambda: QueueConfig(flow_control=[ConcurrencyLimit(1), States()]),  # type: ignore[list-item] # what is tested
        r"States\(.*\) is not an instance of ConcurrencyLimit, .*, FairShare; write for example \[Conc",
    ),
    (lambda: QueueConfig(flow_control=[InOrder]), r"<class .*InOrder.*> is not an instance of"),  # type: ignore[list-item] # what is tested
    (lambda: QueueConfig(flow_control=[FlowRule()]), r"<.*FlowRule object .*> is not an instance of ConcurrencyLimit"),
    (
        lambda: QueueConfig(flow_control=[InOrder("a"), ConcurrencyLimit(1), InOrder("b")]),
        r"QueueConfig\(flow_control=\[InOrder\(...\), InOrder\(...\)\]\): a queue has one; leave one of them out",
    ),
    (
        lambda: QueueConfig(flow_control=[FairShare("a"), FairShare("a", weight=2)]),
        r"\[FairShare\(...\), FairShare\(...\)\]\): a queue has one",
    ),
    (lambda: QueueConfig(flow_control=[FairShare("a"), FairShare("b")]), "a queue has one; leave one of them out"),
    (
        lambda: QueueConfig(flow_control=[ConcurrencyLimit(1, per="a"), InOrder("a"), ConcurrencyLimit(2, per="a")]),
        r"\[ConcurrencyLimit\(...\), ConcurrencyLimit\(...\)\]\): two of them have the same key; leave one of them out",
    ),
    (
        lambda: QueueConfig(flow_control=[RateLimit(1, every=1), RateLimit(5, every=9), RateLimit(2, every=1)]),
        "two of them have the same key",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_invalid_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


RULES: list[FlowRule] = [
    ConcurrencyLimit(2, per="customer_id"),
    ConcurrencyLimit(3, per="kind"),
    ConcurrencyLimit(9),
    RateLimit(5, every=60, per="kind"),
    RateLimit(50, every=3600, per="kind"),
    InOrder("document_id", on_failure="continue"),
    FairShare("customer_id", weight=2),
]


def sql_of(rules: list[FlowRule], **config: Any) -> list[str]:
    """Return the DDL of a class, and the statement of a claim."""
    texts: list[str] = []
    engine = sa.create_mock_engine(
        "postgresql+psycopg://", lambda sql, *_, **__: texts.append(str(sql.compile(dialect=engine.dialect)))
    )
    job = make_job(flow_control=rules, **config)
    # The indexes of a table have no fixed order.
    job.metadata.create_all(engine, checkfirst=False)
    claims = [] if config else [str(claim(job, 5).compile(dialect=postgresql.dialect()))]
    return [*sorted(texts), *claims]


@pytest.mark.parametrize("kind", ["update_status", *HELD])
def test_the_order_of_the_list_changes_nothing(kind: str) -> None:
    config = HELD.get(kind, {})
    assert QueueConfig(flow_control=RULES[::-1]).flow_control == tuple(RULES)
    expected = sql_of(RULES, **config)
    for first in range(1, len(RULES)):
        rules = [*RULES[first:], *RULES[:first]]
        assert sql_of(rules, **config) == expected
        assert sql_of(rules[::-1], **config) == expected


def test_a_list_that_is_changed_later_changes_nothing() -> None:
    rules = [InOrder("customer_id"), ConcurrencyLimit(1)]
    config = QueueConfig(flow_control=rules)
    rules.clear()
    assert config.flow_control == (config.limits[0], config.order)
    assert replace(config, lease=5).flow_control == config.flow_control


@pytest.mark.parametrize("columns", [{}, {"started_at": "begun_at"}])
@pytest.mark.parametrize("kind", ["update_status", *HELD])
def test_an_order_adds_its_column(kind: str, columns: dict[str, str]) -> None:
    config = HELD.get(kind, {})
    job = make_job(
        **config
        | {"flow_control": [InOrder("customer_id", on_failure="continue")]}
        | {"columns": config.get("columns", {}) | columns}
    )
    assert spec_of(job).columns["started_at"] is job.__table__.c[columns.get("started_at", "started_at")]
    assert not spec_of(make_job(**config)).has("started_at")


def test_an_order_of_an_adopted_table_names_its_column() -> None:
    def adopt(**more: str) -> Any:
        class Job(QueueMixin, new_base()):
            __tablename__ = "job"
            __queue__ = QueueConfig(
                flow_control=[InOrder("customer_id")], strategy="batch_select", adopt={"status": "state", **more}
            )
            id: Mapped[int] = mapped_column(primary_key=True)
            customer_id: Mapped[int]
            state: Mapped[str]
            begun_at: Mapped[datetime | None]

        return Job

    with pytest.raises(ConfigurationError, match=r"QueueConfig\(adopt=\{'started_at': \.\.\.\}\)"):
        adopt()
    assert "started_at" not in adopt(started_at="begun_at").__table__.c


UNFIT: list[tuple[dict[str, Any], str]] = [
    (
        {"flow_control": [ConcurrencyLimit(1, per="custmer_id")]},
        r"Job: ConcurrencyLimit\(1, per='custmer_id'\): there is no such attribute.*customer_id",
    ),
    ({"flow_control": [ConcurrencyLimit(1, per="status")]}, "Job.status is the status of the queue, which changes"),
    (
        {"flow_control": [ConcurrencyLimit("mst", per="kind")]},
        r"Job: ConcurrencyLimit\('mst'\): there is no such attribute.*'most'",
    ),
    ({"flow_control": [ConcurrencyLimit("kind")]}, r"Job: ConcurrencyLimit\('kind'\): Job.kind is no integer column"),
    ({"flow_control": [InOrder("customer_id", by="most")]}, "Job.most may be NULL, which has no place in an order"),
    ({"flow_control": [InOrder("customer_id", by="run_at")]}, "Job.run_at is the run_at of the queue, which changes"),
    (
        {"flow_control": [InOrder("customer_id")], "columns": {"started_at": None}},
        r"Job: InOrder\(\.\.\.\), .*needs the queue attribute 'started_at'; remove 'started_at': None from",
    ),
    (
        {"flow_control": [InOrder("customer_id", on_failure="cancel")], "states": States(cancelled=None)},
        "needs a status value for cancelled jobs",
    ),
    (
        {"flow_control": [FairShare("customer_id", weight="kind")]},
        r"Job: FairShare\(weight='kind'\): Job.kind is no integer column",
    ),
]


@pytest.mark.parametrize(("config", "message"), UNFIT)
def test_what_the_class_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_job(**config)


def test_a_priority_that_may_be_null_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="needs a priority that is never NULL"):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(flow_control=[ConcurrencyLimit(1)], columns={"priority": "urgency"})
            id: Mapped[int] = mapped_column(primary_key=True)
            urgency: Mapped[int | None]


def test_a_key_of_type_json_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="PostgreSQL compares no values of type JSON"):

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(flow_control=[ConcurrencyLimit(1, per="payload")])
            id: Mapped[int] = mapped_column(primary_key=True)
            payload: Mapped[Any] = mapped_column(sa.JSON)
