"""Flow control under strategies whose transaction holds the jobs, and changes that are committed during a claim.

A claim does not decide by what it has read before.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column

from sqlaqueue import (
    ConcurrencyLimit,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    claim,
    complete,
    fail,
    release,
    retry,
)
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.flow_control.models import (
    HELD,
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

_GATE = 77
_WAIT = f"PERFORM pg_catalog.pg_advisory_xact_lock({_GATE});"


def pause_before(engine: sa.Engine, function: str, when: str = "true") -> None:
    """Let a function of a claim wait when it is called.

    :param when: the condition of the calls that wait, with the arguments of the function.
    """
    described = sa.text(
        "SELECT pg_get_function_arguments(oid), pg_get_function_result(oid), pronargs "
        "FROM pg_catalog.pg_proc WHERE proname = :name"
    )
    with engine.begin() as connection:
        arguments, result, number = connection.execute(described, {"name": function}).one()
        given = ", ".join(f"${each + 1}" for each in range(number))
        connection.exec_driver_sql(f"ALTER FUNCTION {function} RENAME TO quick")
        connection.exec_driver_sql(
            f"CREATE FUNCTION {function}({arguments}) RETURNS {result} LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {when} THEN {_WAIT} END IF; RETURN quick({given}); END $$"
        )


def pause_inside(engine: sa.Engine, function: str, before: str) -> None:
    """Let a function of a claim wait each time it comes to a statement, which its text has once."""
    defined = sa.text("SELECT pg_get_functiondef(oid) FROM pg_catalog.pg_proc WHERE proname = :name")
    with engine.begin() as connection:
        definition: str = connection.execute(defined, {"name": function}).scalar_one()
        assert definition.count(before) == 1
        connection.exec_driver_sql(definition.replace(before, f"{_WAIT} {before}").replace("%", "%%"))


def claimed_with_change(engine: sa.Engine, model: Any, n: int, change: Callable[[], object]) -> list[int]:
    """Claim, make a change while the claim waits, and return the keys of the jobs."""
    waits = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = {_GATE} AND NOT granted"
    with engine.connect() as gate, Session(engine) as session, ThreadPoolExecutor(1) as pool:
        gate.exec_driver_sql(f"SELECT pg_advisory_lock({_GATE})")
        late = pool.submit(claimed, session, model, n)
        while not gate.exec_driver_sql(waits).first():
            assert not late.done()
        change()
        gate.exec_driver_sql(f"SELECT pg_advisory_unlock({_GATE})")
        return ids(late.result())


# -- limits, order, turns and rates --------------------------------------------------------------------------------


@pytest.fixture
def sessions(engine: sa.Engine) -> Iterator[list[Session]]:
    """Three transactions."""
    opened = [Session(engine) for _ in range(3)]
    yield opened
    for session in opened:
        session.close()


def test_a_slot_belongs_to_a_transaction(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = make_queue(engine, of_customers(*[1] * 6, 2), flow_control=[ConcurrencyLimit(2, per="customer_id")], **held)
    first, second, third = sessions
    assert customers(claimed(first, job, 2)) == [1, 1]
    assert customers(claimed(second, job, 2)) == [1, 1]
    assert customers(claimed(third, job, 2)) == [2]
    third.rollback()
    first.rollback()
    assert ids(claimed(third, job, 9)) == [1, 2, 5, 6, 7]


def test_a_claim_of_a_transaction_that_has_a_slot_takes_no_other(
    engine: sa.Engine, held: Any, sessions: list[Session]
) -> None:
    job = make_queue(engine, of_customers(1, 1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")], **held)
    first, second, _ = sessions
    (mine,) = claimed(first, job, 1)
    assert claimed(second, job) == []
    first.execute(complete(mine))
    jobs = claimed(first, job, 1)
    assert ids(jobs) == [2]
    assert claimed(second, job) == []
    first.execute(complete(jobs))
    first.commit()
    assert ids(claimed(second, job, 1)) == [3]


def test_a_job_that_a_filter_finds_twice_is_claimed_once(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = make_queue(engine, of_customers(1, 1, 1, 2), flow_control=[ConcurrencyLimit(2, per="customer_id")], **held)
    other = aliased(job)
    twice = sa.select(job).join(other, other.kind == job.kind)
    assert ids(sessions[0].scalars(claim(twice, 10)).all()) == [1, 2, 3, 4]


def test_a_savepoint_that_is_rolled_back_frees_its_slots(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = make_queue(engine, of_customers(1, 2), flow_control=[ConcurrencyLimit(1)], **held)
    first, second, _ = sessions
    with first.begin_nested() as savepoint:
        assert len(claimed(first, job, 1)) == 1
        savepoint.rollback()
    assert len(claimed(second, job, 1)) == 1


def test_several_limits_are_taken_together_or_not_at_all(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = create(
        engine, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id"), ConcurrencyLimit(1, per="kind")], **held)
    )
    insert(engine, job, [*of_customers(1, kind="a"), *of_customers(2, kind="a"), *of_customers(2, kind="b")])
    first, second, third = sessions
    assert ids(claimed(first, job, 1)) == [1]
    # The slot of customer 2 is not kept for the job that kind "a" holds back.
    assert claimed(second, sa.select(job).where(job.kind == "a"), 1) == []
    assert ids(claimed(third, job, 1)) == [3]
    assert claimed(second, job) == []


def test_a_job_that_cannot_be_locked_takes_no_slot(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = make_queue(engine, of_customers(1, 2, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")], **held)
    first, second, third = sessions
    third.execute(sa.select(job.__table__.c.id).where(job.__table__.c.id == 1).with_for_update())
    third.execute(sa.select(job.__table__.c.id).where(job.__table__.c.id == 3).with_for_update())
    assert ids(claimed(first, job)) == [2]
    third.rollback()
    assert ids(claimed(second, job, 1)) == [1]


def test_keys_at_their_limit_do_not_hold_back_the_jobs_behind_them(
    engine: sa.Engine, held: Any, sessions: list[Session]
) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")], **held))
    insert(engine, job, [*of_customers(*[1] * 1000), *of_customers(*[2] * 1000), *of_customers(3, priority=5)])
    first, second, third = sessions
    assert customers(claimed(first, job, 1)) == [1]
    assert customers(claimed(second, job, 1)) == [2]
    assert customers(claimed(third, job, 1)) == [3]


@pytest.mark.parametrize("kind", HELD)
def test_a_limit_that_was_lowered_counts_the_slots_beyond_it(
    engine: sa.Engine, sessions: list[Session], kind: str
) -> None:
    class Base(DeclarativeBase):
        pass

    class Tenant(Base):
        __tablename__ = "tenant"
        id: Mapped[int] = mapped_column(primary_key=True)
        most: Mapped[int]

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(
            flow_control=[
                ConcurrencyLimit(lambda job: sa.select(Tenant.most).where(Tenant.id == job.tenant_id), per="tenant_id")
            ],
            **HELD[kind],
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant_id: Mapped[int]

    create(engine, Job)
    insert(engine, Tenant, [{"id": 1, "most": 3}])
    insert(engine, Job, [{"tenant_id": 1}] * 9)
    first, second, third = sessions
    assert len(claimed(first, Job, 1)) == len(claimed(second, Job, 1)) == len(claimed(third, Job, 1)) == 1
    execute(engine, sa.update(Tenant).values(most=2))
    first.rollback()
    # Slots 1 and 2 are held, and slot 0 is free.
    assert claimed(first, Job, 1) == []
    first.rollback()
    second.rollback()
    assert len(claimed(first, Job, 1)) == 1


def test_a_job_takes_a_slot_behind_one_of_its_key_without_a_limit(
    engine: sa.Engine, held: Any, sessions: list[Session]
) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")], **held))
    insert(engine, job, [*of_customers(1), *of_customers(1, 1, most=1)])
    first, second = sessions[:2]
    assert ids(claimed(first, job, 2)) == [1, 2]
    assert claimed(second, job) == []
    first.rollback()
    assert ids(claimed(second, job)) == [1, 2, 3]


def test_a_transaction_with_a_slot_claims_no_job_whose_own_limit_is_reached(
    engine: sa.Engine, held: Any, sessions: list[Session]
) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")], **held))
    insert(engine, job, [*of_customers(1, 1, most=2), *of_customers(1, most=1), *of_customers(2, most=1)])
    first, second = sessions[:2]
    assert ids(claimed(first, job, 1)) == [1]
    assert ids(claimed(second, job)) == [2, 4]


def test_a_job_with_a_higher_limit_is_found_behind_one_whose_limit_is_reached(
    engine: sa.Engine, held: Any, sessions: list[Session]
) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit("most", per="customer_id")], **held))
    insert(engine, job, [{"customer_id": 1, "most": most} for most in (0, 0, 1, None)])
    assert ids(claimed(sessions[0], job)) == [3, 4]
    assert ids(claimed(sessions[1], job)) == []


def test_a_stricter_isolation_level_is_refused(engine: sa.Engine, held: Any) -> None:
    job = make_queue(engine, of_customers(1), flow_control=[ConcurrencyLimit(1)], **held)
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(strict) as session, pytest.raises(DBAPIError, match="this transaction is REPEATABLE READ"):
        claimed(session, job)


def test_one_transaction_runs_the_jobs_of_a_key_in_order(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = create(engine, make_job(flow_control=[InOrder("customer_id", on_failure="continue")], **held))
    insert(engine, job, of_customers(1, 1, 2, None, None))
    first, second, _ = sessions
    jobs = claimed(first, job)
    assert ids(jobs) == [1, 3, 4, 5]
    assert claimed(second, job) == []
    first.execute(complete(jobs))
    first.commit()
    assert ids(claimed(second, job)) == [2]


@pytest.mark.parametrize("verb", [retry, release])
def test_a_job_that_has_begun_and_waits_holds_the_others_back(engine: sa.Engine, held: Any, verb: Any) -> None:
    job = make_queue(
        engine, of_customers(1, 1, 2), flow_control=[InOrder("customer_id", on_failure="continue")], **held
    )
    with Session(engine) as session:
        jobs = claimed(session, job, 1)
        session.execute(verb(jobs, delay=100))
        session.commit()
        assert ids(claimed(session, job)) == [3]


def test_a_job_that_is_not_due_and_has_never_begun_is_passed_over(engine: sa.Engine, held: Any) -> None:
    job = create(engine, make_job(flow_control=[InOrder("customer_id", on_failure="continue")], **held))
    later = sa.func.now() + timedelta(hours=1)
    with Session(engine) as session:
        session.execute(sa.insert(job).values(customer_id=1, run_at=later))
        session.execute(sa.insert(job).values(customer_id=1))
        session.commit()
        assert ids(claimed(session, job)) == [2]


@pytest.mark.parametrize("kind", ["batch_select", "delete_returning"])
def test_a_failed_head_blocks_its_key(engine: sa.Engine, kind: str) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[InOrder("customer_id")], **HELD[kind])
    with Session(engine) as session:
        session.execute(fail(claimed(session, job), error="no"))
        session.commit()
        assert claimed(session, job) == []
        session.execute(sa.delete(job).where(job.id == 1))
        assert ids(claimed(session, job)) == [2]


@pytest.mark.parametrize("kind", ["batch_select", "delete_returning"])
def test_a_failed_head_may_cancel_the_rest(engine: sa.Engine, kind: str) -> None:
    job = make_queue(
        engine, of_customers(1, 1, 2), flow_control=[InOrder("customer_id", on_failure="cancel")], **HELD[kind]
    )
    with Session(engine) as session:
        session.execute(fail(claimed(session, job, 1), error="no"))
        session.commit()
        assert session.scalars(sa.select(job.status).order_by(job.id)).all() == ["failed", "cancelled", "pending"]


def test_keys_take_turns(engine: sa.Engine, held: Any) -> None:
    job = make_queue(engine, of_customers(*[1] * 50, *[2] * 3, 3), flow_control=[FairShare("customer_id")], **held)
    taken = []
    for _ in range(6):
        with Session(engine) as session:
            jobs = claimed(session, job, 1)
            taken += customers(jobs)
            session.execute(complete(jobs))
            session.commit()
    assert sorted(taken[:3]) == sorted([1, 2, 3])
    assert sorted(taken) == [1, 1, 1, 2, 2, 3] or sorted(taken) == [1, 1, 2, 2, 2, 3]
    with Session(engine) as session:
        turns = customers(claimed(session, job, 4))
    assert set(turns[:2]) == {1, 2} or turns == [1, 1, 1, 1]


def test_a_bare_claim_with_a_rate_is_refused(engine: sa.Engine, held: Any) -> None:
    job = make_job(flow_control=[RateLimit(1, every=timedelta(seconds=1))], **held)
    with pytest.raises(StatementError, match=r"claim\(Job\): .*Rate.*Consumer"):
        claim(job, 1)


def test_a_strategy_that_does_not_support_it_says_so() -> None:
    for kind in ("block", "cancel"):
        with pytest.raises(ConfigurationError, match='use on_failure="continue"'):
            make_job(flow_control=[InOrder("customer_id", on_failure=kind)], **HELD["rows_are_messages"])


def test_a_limit_says_how_many_transactions_hold_it(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = create(
        engine,
        make_job(flow_control=[ConcurrencyLimit(2, per="customer_id"), ConcurrencyLimit("most", per="kind")], **held),
    )
    insert(engine, job, [*of_customers(*[1] * 3, 2, most=None), *of_customers(3, most=0)])
    first, second, third = sessions
    claimed(first, job, 1)
    claimed(second, job, 1)
    admin = QueueAdmin(third, job)
    reasons = admin.explain(3).reasons
    assert [reason.code for reason in reasons if reason.code == "limit"] == ["limit"]
    assert "limit of 2 jobs of customer_id 1 is reached, held by 2 transactions" in str(reasons)
    assert "limit" not in [reason.code for reason in admin.explain(4).reasons]
    assert "limit" in [reason.code for reason in admin.explain(5).reasons]
    (full,) = admin.stats().at_limit
    assert (full.key, full.running, full.most) == ({"customer_id": 1}, 2, 2)


def test_an_order_names_the_job_that_comes_first(engine: sa.Engine, held: Any, sessions: list[Session]) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[InOrder("customer_id", on_failure="continue")], **held)
    reasons = {one.code: str(one.text) for one in QueueAdmin(sessions[0], job).explain(2).reasons}
    assert "Job 1 of customer_id 1 comes first" in reasons["order"]


# -- changes while a claim waits in the middle ---------------------------------------------------------------------


def change(engine: sa.Engine, job: Any, key: int, **values: Any) -> None:
    execute(engine, sa.update(job.__table__).where(job.__table__.c.id == key).values(**values))


def test_the_count_is_newer_than_the_statement_that_locks_the_key(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    pause_before(engine, "sqlaqueue_capacity_job_customer_id")
    assert claimed_with_change(engine, job, 1, lambda: set_status(engine, job, "processing", 2)) == []


def test_a_job_whose_key_has_changed_is_left_to_the_next_claim(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")]))
    insert(engine, job, [*of_customers(1), *of_customers(2, status="processing")])
    pause_before(engine, "sqlaqueue_capacity_job_customer_id")
    # Customer 1 has room, and customer 2 has none.
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 1, customer_id=2)) == []


def test_a_held_job_whose_key_has_changed_is_left_to_the_next_claim(engine: sa.Engine, held: Any) -> None:
    job = make_queue(engine, of_customers(1), flow_control=[ConcurrencyLimit(1, per="customer_id")], **held)
    pause_before(engine, "sqlaqueue_hold_job")
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 1, customer_id=2)) == []


def test_a_claim_has_one_job_of_an_order_though_another_one_becomes_the_head(engine: sa.Engine) -> None:
    job = create(engine, make_job(flow_control=[InOrder("customer_id", by="document_id")]))
    insert(engine, job, [{"customer_id": 1, "document_id": number} for number in (5, 6)])
    # The first job is admitted already, but its row still reads as pending.
    pause_before(engine, "sqlaqueue_head_job_customer_id", "sqlaqueue_job = '[2]'")
    assert claimed_with_change(engine, job, 9, lambda: change(engine, job, 2, document_id=1)) == [1]


def test_a_held_claim_has_one_job_of_an_order_though_another_one_becomes_the_head(engine: sa.Engine, held: Any) -> None:
    job = create(
        engine, make_job(flow_control=[InOrder("customer_id", by="document_id", on_failure="continue")], **held)
    )
    insert(engine, job, [{"customer_id": 1, "document_id": number} for number in (5, 6, 7)])

    def another_head() -> None:
        change(engine, job, 3, document_id=2)
        change(engine, job, 2, document_id=1)

    pause_before(engine, "sqlaqueue_hold_job", "sqlaqueue_job = '[2]'")
    assert claimed_with_change(engine, job, 9, another_head) == [1]


def test_a_job_that_has_begun_meanwhile_and_waits_holds_back_the_one_that_was_the_head(
    engine: sa.Engine, held: Any
) -> None:
    job = create(
        engine, make_job(flow_control=[InOrder("customer_id", by="document_id", on_failure="continue")], **held)
    )
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
