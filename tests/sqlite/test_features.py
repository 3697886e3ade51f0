"""Unique jobs, schedules, histories, waiting, and the functions for operators and tests work in a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.sqlite
from sqlaqueue import Constant, Consumer, Tick, admin, claim, complete, enqueue, fail, requeue, rescue, tick_of, wait
from sqlaqueue.exc import ConfigurationError, JobExists
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.testing import crash, drain, enqueued, fire_schedules, run_job, travel
from sqlaqueue.web import Access, Dashboard
from tests.sqlite.features import HOURLY, Email, Hourly, Measured, Order, Waits, do_nothing, made

pytestmark = pytest.mark.once

Sessions = sessionmaker[Session]


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    sessions = made(tmp_path / "jobs.db")
    yield sessions
    sessions.kw["bind"].dispose()


def states(sessions: Sessions, model: Any) -> dict[Any, str]:
    with sessions() as session:
        rows = session.execute(sa.select(model.id, model.status))
        return {row.id: row.status for row in rows}


# -- unique jobs ---------------------------------------------------------------------------------------------------


def test_a_twin_is_returned_and_not_inserted(sessions: Sessions) -> None:
    with sessions() as session:
        first, twin, other = enqueue(session, [Order(customer=1), Order(customer=1), Order(customer=2)])
        session.commit()
        again = enqueue(session, [Order(customer=1)])
        assert [each.created for each in (first, twin, other, *again)] == [True, False, True, False]
        assert again[0].job.id == first.job.id
        with pytest.raises(JobExists):
            enqueue(session, [Order(customer=1)], on_twin="raise")


def test_a_twin_is_replaced(sessions: Sessions) -> None:
    with sessions() as session:
        enqueue(session, [Order(customer=1, priority=5)])
        session.commit()
        (replaced,) = enqueue(session, [Order(customer=1, priority=2)], on_twin="replace")
        session.commit()
        assert not replaced.created
        assert session.execute(sa.select(Order.priority, Order.run_at <= sa.func.now())).all() == [(2, True)]


def test_the_index_refuses_a_twin_that_is_added(sessions: Sessions) -> None:
    with sessions() as session:
        session.add_all([Order(customer=1), Order(customer=1)])
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()


def test_one_job_in_a_period(sessions: Sessions) -> None:
    with sessions() as session:
        noon = datetime(2026, 1, 5, 12, 30, tzinfo=timezone(timedelta(hours=2)))
        made = [noon, noon + timedelta(minutes=29, seconds=59), noon + timedelta(minutes=30)]
        jobs = [Hourly(customer=1, created_at=moment) for moment in made]
        assert [each.created for each in enqueue(session, jobs)] == [True, False, True]
        session.commit()


def test_a_job_that_comes_back_waits_for_its_twin(sessions: Sessions) -> None:
    ran: list[int] = []

    def handle(_: Session, job: Waits) -> None:
        ran.append(job.id)
        if ran == [1]:
            with sessions() as session:
                enqueue(session, [Waits(customer=1)])
                session.commit()
            raise ValueError("come back")

    with sessions() as session:
        enqueue(session, [Waits(customer=1)])
        session.commit()
    Consumer(Waits, handle, sessions, retry=Constant(0)).drain()
    # The first waits until a rescue finds that its twin has gone, which may be before the end or at the end.
    assert states(sessions, Waits) in [{1: state, 2: "completed"} for state in ("processing", "pending", "completed")]
    with sessions() as session:
        session.execute(rescue(Waits))
        session.commit()
    Consumer(Waits, handle, sessions).drain()
    assert (ran, states(sessions, Waits)) == ([1, 2, 1], {1: "completed", 2: "completed"})


def test_a_finished_job_with_a_twin_is_not_requeued(sessions: Sessions) -> None:
    with sessions() as session:
        enqueue(session, [Order(customer=1)])
        session.commit()
        session.execute(fail(session.scalars(claim(Order, 1)).all(), error="paper jam"))
        session.commit()
        enqueue(session, [Order(customer=1)])
        session.commit()
        (row,) = session.execute(requeue(sa.select(Order).where(Order.id == 1))).all()
        session.commit()
        assert (row[0], row[1] is not None) == (1, True)
    assert states(sessions, Order) == {1: "cancelled", 2: "pending"}


# -- histories and retention ---------------------------------------------------------------------------------------


def test_attempts_are_kept_and_finished_jobs_deleted(sessions: Sessions) -> None:
    def handle(_: Session, job: Order) -> None:
        if job.attempts == 1:
            raise ValueError("not yet")

    with sessions() as session:
        enqueue(session, [Order(customer=1)])
        session.commit()
    Consumer(Order, handle, sessions, retry=Constant(0)).drain()
    with sessions() as session:
        attempts = admin.attempts(session, Order, 1)
        assert [(each.attempt, each.outcome) for each in attempts] == [(2, "completed"), (1, "retried")]
        travel(session, timedelta(days=2))
        session.commit()
    with Consumer(Order, handle, sessions):
        _until(lambda: not states(sessions, Order))


# -- schedules -----------------------------------------------------------------------------------------------------


def test_a_schedule_is_fired_once_for_each_tick(sessions: Sessions) -> None:
    ticks: list[Tick | None] = []
    with Consumer(Email, lambda session, job: ticks.append(tick_of(session, job)), sessions, schedules=[HOURLY]):
        _until(lambda: _schedule(sessions) is not None)
    with sessions() as session:
        travel(session, timedelta(hours=3))
        session.commit()
    with Consumer(Email, lambda session, job: ticks.append(tick_of(session, job)), sessions, schedules=[HOURLY]):
        _until(lambda: bool(ticks))
    assert [tick is not None and tick.schedule for tick in ticks] == ["hourly"]


def test_schedules_are_changed_by_operators(sessions: Sessions) -> None:
    with sessions() as session:
        fire_schedules(session, [HOURLY])
        session.commit()
        before = _schedule(sessions)
        admin.pause_schedule(session, Email, "hourly")
        session.commit()
        assert _schedule(sessions).next_tick is None
        admin.resume_schedule(session, Email, "hourly")
        admin.edit_schedule(session, Email, "hourly", every=timedelta(minutes=5))
        session.commit()
        assert (before.every, _schedule(sessions).every) == (timedelta(hours=1), timedelta(minutes=5))
        with pytest.raises(sa.exc.IntegrityError):
            session.execute(sa.text("UPDATE sqlaqueue_schedule SET every = 0.5"))


def test_another_program_changes_a_schedule(sessions: Sessions) -> None:
    """The file has a trigger that records when, without a function of the library."""
    with sessions() as session:
        fire_schedules(session, [HOURLY])
        session.commit()
    plain = sa.create_engine(sessions.kw["bind"].url)
    with plain.begin() as connection:
        connection.execute(sa.text("UPDATE sqlaqueue_schedule SET every = 60"))
        (edited,) = connection.execute(sa.text("SELECT edited_at IS NOT NULL FROM sqlaqueue_schedule")).one()
    plain.dispose()
    assert edited == 1


# -- waiting, operators ---------------------------------------------------------------------------------------------


def test_a_caller_waits_for_its_job(sessions: Sessions) -> None:
    with sessions() as session:
        job = Email()
        session.add(job)
        session.commit()
    with Consumer(Email, do_nothing, sessions):
        assert wait(sessions, job, timeout=20).state == "completed"


def test_operators_see_and_change_jobs(sessions: Sessions) -> None:
    with sessions() as session:
        session.add_all(Email(to=str(number)) for number in range(3))
        session.commit()
        stats = admin.stats(session, Email)
        assert (stats.states["pending"], stats.due, stats.missing_indexes) == (3, 3, [])
        assert [job.state for job in admin.jobs(session, Email)] == ["pending"] * 3
        assert [reason.code for reason in admin.explain_job(session, Email, 1).reasons] != []
        admin.pause(session, Email)
        session.commit()
        assert session.scalars(claim(Email, 1)).all() == []
        admin.resume(session, Email)
        assert admin.cancel(session, Email).cancelled == [1, 2, 3]
        session.commit()


def test_what_reads_the_catalogs_of_postgresql_is_refused(sessions: Sessions) -> None:
    with sessions() as session, pytest.raises(ConfigurationError, match=r"doctor\(\) reads .* not available on SQLite"):
        admin.doctor(session, Email)
    with pytest.raises(ConfigurationError, match="Dashboard reads .* not available on SQLite"):
        Dashboard([Email], sessions, access=lambda _: Access(read=True))


# -- tests of an application ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite://", "file"])
def test_an_application_tests_its_jobs(url: str, sessions: Sessions, tmp_path: Path) -> None:
    """In a transaction that is rolled back, in a file or in memory."""
    if url == "sqlite://":
        sessions = made(Path(":memory:"))
    with sessions() as session:
        session.add(Email(id=100, to="before"))
        session.commit()
        session.add_all([Email(id=7, to="new"), job := Email(to="other")])
        session.flush()
        assert [each.to for each in enqueued(session, Email)] == ["new", "other"]
        assert run_job(session, job, do_nothing).outcome == "completed"
        assert drain(session, Email, do_nothing) == 2
        session.rollback()
        assert [each.to for each in session.scalars(sa.select(Email))] == ["before"]
        crash(session, session.scalars(sa.select(Email)).one())
        session.execute(rescue(Email))
        assert session.scalars(sa.select(Email.status)).all() == ["pending"]
    if url == "sqlite://":
        sessions.kw["bind"].dispose()


def _schedule(sessions: Sessions) -> Any:
    with sessions() as session:
        return next(iter(admin.schedules(session, Email)), None)


def _until(condition: Any, seconds: float = 20) -> None:

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_plain_forms_have_the_values_of_each_call(sessions: Sessions) -> None:
    """SQLAlchemy caches a statement by its form for PostgreSQL."""
    with sessions() as session:
        session.add_all(Email() for _ in range(10))
        session.commit()
        assert [admin.depth(session, Email, limit=limit).due for limit in (2, 100, 5)] == [2, 10, 5]
        before = session.scalars(sa.select(Email.run_at)).first()
        for hours in (1, 5):
            travel(session, timedelta(hours=hours))
        after = session.scalars(sa.select(Email.run_at)).first()
        assert before is not None
        assert after is not None
        assert before - after == timedelta(hours=6)


def test_an_infinite_number_does_not_block_the_queue(sessions: Sessions) -> None:
    with sessions() as session:
        session.add(Measured(value=float("inf")))
        session.commit()
        (job,) = session.scalars(claim(Measured, 1)).all()
        assert job.value == float("inf")


def test_an_explicit_lock_is_kept(sessions: Sessions) -> None:
    with sessions() as session:
        session.add(Email())
        session.commit()
        (job,) = session.scalars(claim(Email, 1)).all()
        session.commit()
        session.scalars(sa.select(Email)).all()
        session.rollback()
        sent: list[str] = []
        sa.event.listen(session.get_bind(), "before_cursor_execute", lambda *event: sent.append(event[2]))
        session.execute(sa.text("BEGIN IMMEDIATE"))
        session.scalars(sa.select(Email)).all()
        session.execute(complete([job]))
        assert "COMMIT" not in sent


def test_comments_before_a_statement(sessions: Sessions) -> None:
    with sessions() as session:
        session.execute(sa.text("/* of this function */\n-- and why\nBEGIN IMMEDIATE"))
        session.execute(sa.text("/* * / */PRAGMA user_version"))
        session.rollback()
        session.execute(sa.text("-- a read\nSELECT 1"))
        with sessions() as other:
            other.add(Email())
            other.commit()


def test_a_program_may_commit_each_statement(tmp_path: Path) -> None:
    made(tmp_path / "jobs.db").kw["bind"].dispose()
    engine = sa.create_engine(f"sqlite:///{tmp_path}/jobs.db", isolation_level="AUTOCOMMIT")
    sqlaqueue.sqlite.prepare(engine)
    with engine.connect() as connection:
        connection.execute(sa.insert(Email).values(to="kept"))
    with engine.connect() as connection:
        assert connection.scalars(sa.select(Email.to)).all() == ["kept"]
    engine.dispose()


def test_a_programs_any_of_rows_is_not_translated(sessions: Sessions) -> None:
    """SQLite has no ANY, and refuses it as it always does."""
    with sessions() as session, pytest.raises(sa.exc.OperationalError):
        session.execute(sa.select(Email.id).where(Email.id != sa.all_(sa.select(Email.id).scalar_subquery())))


def test_missing_indexes_are_named(sessions: Sessions) -> None:
    with sessions() as session:
        connection = session.connection()
        for model in (Order, Hourly):
            assert checks_of(connection).missing_indexes(connection, spec_of(model)) == []
        session.execute(sa.text("DROP INDEX ix_hourly_queue_unique"))
        session.execute(sa.text("DROP INDEX ix_orders_queue_unique"))
        session.execute(sa.text("DROP INDEX ix_orders_queue_claim"))
        [missing] = checks_of(connection).missing_indexes(connection, spec_of(Hourly))
        assert missing.name == "ix_hourly_queue_unique"
        advice = checks_of(connection).missing_index_advice(connection, spec_of(Order))
        assert advice is not None
        assert "claims are slow, and jobs are not unique, and enqueue() fails, without the indexes" in advice
        assert {"ix_orders_queue_claim,", "ix_orders_queue_unique;"} < set(advice.split())


def test_rows_of_a_test_are_known_in_another_schema(tmp_path: Path) -> None:
    """An attached file is a schema; both have a table of this name."""
    made(tmp_path / "tenant.db").kw["bind"].dispose()
    sessions = made(tmp_path / "jobs.db")
    engine = sessions.kw["bind"]

    @event.listens_for(engine, "begin")
    def attach(connection: sa.Connection) -> None:
        databases = {row[1] for row in connection.exec_driver_sql("PRAGMA database_list")}
        if "tenant" not in databases:
            driver: Any = connection.connection.driver_connection
            driver.execute(f"ATTACH '{tmp_path}/tenant.db' AS tenant")

    with sessions() as session:
        session.add_all([Email(), Email()])
        session.commit()
    tenant = engine.execution_options(schema_translate_map={None: "tenant"})
    with Session(tenant) as session:
        session.add(Email())
        session.flush()
        assert [job.id for job in enqueued(session, Email)] == [1]
    tenant.dispose()


class Wrapped(sa.types.TypeDecorator[datetime]):
    """A type of the application."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True


def test_moments_of_an_applications_type_are_calculated_with(sessions: Sessions) -> None:
    with sessions() as session:
        session.add(Email())
        session.commit()
        run_at = sa.type_coerce(Email.run_at, Wrapped())
        hour = sa.literal(timedelta(hours=1), sa.Interval())
        later = session.scalar(sa.select(sa.type_coerce(run_at + hour, sa.DateTime(timezone=True))))
        assert later == session.scalars(sa.select(Email.run_at)).one() + timedelta(hours=1)
        assert session.scalar(sa.select(sa.extract("epoch", (run_at + hour) - run_at))) == 3600


def test_a_span_in_a_column_of_the_program_is_as_sqlalchemy_has_it(sessions: Sessions) -> None:
    """The library's own spans are numbers of seconds, and so are those that are added to moments."""
    took = timedelta(minutes=90)
    with sessions() as session:
        session.add_all([Measured(value=1.0), Measured(value=2.0, took=timedelta(0))])
        session.commit()
        assert session.scalars(sa.text("SELECT took FROM measured")).first() == "1970-01-01 01:30:00.000000"
        [job] = session.scalars(claim(sa.select(Measured).where(Measured.took > timedelta(hours=1)), 5)).all()
        assert (job.value, job.took) == (1.0, took)
        mine = Measured.id == job.id
        assert session.scalars(sa.select(Measured.took).where(mine)).one() == took
        later = session.scalars(sa.select(Measured.run_at + Measured.took).where(mine)).one()
        assert later == job.run_at + took
        assert session.scalars(sa.select((Measured.run_at + took) - Measured.run_at).where(mine)).one() == took
        assert session.scalars(sa.select(sa.extract("epoch", Measured.took)).where(mine)).one() == 5400
        assert session.scalars(sa.select(Measured.id).where(Measured.run_at < sa.func.now() - took)).all() == []
