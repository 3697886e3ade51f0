"""What a transaction has read stays true until it ends, also for the statements of the library in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Retry, Scheduler, admin, claim, complete, enqueue, fail
from tests.programs import wait_until
from tests.sqlite.features import HOURLY, Email, Order, Waits, made

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.once

Sessions = sessionmaker[Session]


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    sessions = made(tmp_path / "jobs.db")
    yield sessions
    sessions.kw["bind"].dispose()


def commit_beside(sessions: Sessions) -> None:
    with sessions() as other:
        other.execute(sa.insert(Email).values(to="beside"))
        other.commit()


def run_to_the_end(sessions: Sessions, handle: Callable[[Session, Email], object]) -> None:
    """Run the jobs until all have ended: one that was refused the lock becomes due again after a moment."""
    consumer = Consumer(Email, handle, sessions)
    unfinished = sa.select(sa.func.count()).select_from(Email).where(Email.status.in_(["pending", "processing"]))

    def ended() -> bool:
        consumer.drain()
        with sessions() as session:
            return session.scalar(unfinished) == 0

    wait_until(ended, "the jobs have ended")


@pytest.mark.parametrize(
    "verb",
    [
        lambda session, job: session.execute(complete(job)),
        lambda session, job: session.execute(fail(job, error="no")),
        lambda session, _: enqueue(session, Order(customer=1)),
    ],
    ids=["complete", "fail", "enqueue"],
)
def test_a_verb_after_a_read_is_refused_once_another_transaction_has_committed(
    sessions: Sessions, verb: Callable[[Session, Any], object]
) -> None:
    """What the program has read decides what it writes, so it must not be outdated when it commits."""
    with sessions() as session:
        session.add(Email())
        session.commit()
    with sessions() as session:
        job = session.execute(claim(Email, 1)).scalar_one()
        session.commit()
        session.scalar(sa.select(sa.func.count()).select_from(Order))
        commit_beside(sessions)
        with pytest.raises(sa.exc.OperationalError, match="database is locked"):
            verb(session, job)
        session.rollback()
        verb(session, job)
        session.commit()


def test_what_a_handler_writes_by_the_orm_is_not_based_on_an_outdated_read(sessions: Sessions) -> None:
    """The flush comes with the settlement, which alone may see what others have committed since."""
    with sessions() as session:
        session.add_all([Order(customer=0), Email(max_attempts=1)])
        session.commit()
    calls: list[int] = []

    def handle(session: Session, _: Email) -> None:
        order = session.scalars(sa.select(Order)).one()
        calls.append(order.customer)
        if len(calls) == 1:
            with sessions() as other:
                other.execute(sa.update(Order).values(customer=Order.customer + 10))
                other.commit()
        order.customer += 1

    run_to_the_end(sessions, handle)
    with sessions() as session:
        assert session.scalar(sa.select(Order.customer)) == 11
        assert session.execute(sa.select(Email.status, Email.attempts)).all() == [("completed", 1)]
    # A heartbeat of the Consumer is a commit as well, so there may be one more.
    assert calls[0] == 0
    assert set(calls[1:]) == {10}


def test_a_job_that_its_handler_deletes_is_settled_as_the_handlers_write(sessions: Sessions) -> None:
    with sessions() as session:
        session.add(Email(to="first"))
        session.commit()
    calls: list[int] = []

    def handle(session: Session, job: Email) -> None:
        calls.append(session.scalars(sa.select(sa.func.count()).select_from(Email)).one())
        if len(calls) == 1:
            with sessions() as other:
                other.execute(sa.insert(Order).values(customer=1))
                other.commit()
        session.delete(job)

    run_to_the_end(sessions, handle)
    with sessions() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 0
    assert len(calls) > 1


def test_a_transaction_that_claims_first_is_never_refused(sessions: Sessions) -> None:
    with sessions() as session:
        session.add(Email())
        session.commit()
    with sessions() as session, sessions() as other:
        jobs = session.scalars(claim(Email, 5)).all()
        assert session.scalar(sa.select(sa.func.count()).select_from(Order)) == 0
        other.execute(sa.text("PRAGMA busy_timeout = 0"))
        with pytest.raises(sa.exc.OperationalError, match="database is locked"):
            other.execute(sa.insert(Order).values(customer=1))
        session.execute(complete(jobs))
        session.commit()


def _fire(sessions: Sessions) -> None:
    def fired() -> bool:
        with sessions() as session:
            return bool(session.scalar(sa.select(sa.func.count()).select_from(Email).where(Email.to == "grace")))

    with sessions() as session:
        admin.add_schedule(session, HOURLY)
    with Scheduler(sessions, [HOURLY]):
        with sessions() as session:
            admin.run_schedule(session, Email, "hourly")
        wait_until(fired, "the schedule is fired")


def _edit(session: Session) -> None:
    admin.edit_schedule(session, Email, "hourly", catch_up=2)
    admin.remove_schedule(session, Email, "hourly")


@pytest.mark.parametrize(
    "operation",
    [
        lambda session: admin.requeue(session, Email),
        lambda session: admin.requeue(session, Order),
        lambda session: admin.purge(session, Email),
        lambda session: admin.cancel(session, Email),
        lambda session: admin.cancel(session, Email, admin.JobFilter(keys=("1",))),
        _edit,
    ],
    ids=["requeue", "requeue-unique", "purge", "cancel", "cancel-keys", "schedule"],
)
def test_operations_that_read_first_begin_with_the_lock(
    sessions: Sessions, operation: Callable[[Session], object]
) -> None:
    with sessions() as session:
        session.add_all([Email(), Email(), Order(customer=1), Email(status="failed")])
        session.commit()
        admin.add_schedule(session, HOURLY)
    begun = _transactions(sessions)
    with sessions() as session:
        operation(session)
    assert _writes_after_reads(begun) == []
    assert any("BEGIN IMMEDIATE" in each for each in begun)


def test_a_scheduler_begins_with_the_lock(sessions: Sessions) -> None:
    begun = _transactions(sessions)
    _fire(sessions)
    assert _writes_after_reads(begun) == []


def test_a_consumer_that_settles_before_it_claims_begins_with_the_lock(sessions: Sessions) -> None:
    """A run of this queue that becomes pending looks for a twin first."""
    with sessions() as session:
        session.add(Waits(customer=1))
        session.commit()
    begun = _transactions(sessions)

    def handle(_: Session, job: Waits) -> None:
        if job.attempts < 2:
            raise Retry(delay=0)

    Consumer(Waits, handle, sessions).drain()
    assert _writes_after_reads(begun) == []
    with sessions() as session:
        assert session.execute(sa.select(Waits.status, Waits.attempts)).all() == [("completed", 2)]


def _transactions(sessions: Sessions) -> list[list[str]]:
    """Return the statements of each transaction from now on."""
    begun: dict[int, list[list[str]]] = {}
    all_of_them: list[list[str]] = []

    @event.listens_for(sessions.kw["bind"], "before_cursor_execute")
    def note(connection: sa.Connection, _: Any, statement: str, *__: Any) -> None:
        mine = begun.setdefault(id(connection.connection.dbapi_connection), [])
        if statement.startswith("BEGIN"):
            mine.append([])
            all_of_them.append(mine[-1])
        if mine:
            mine[-1].append(statement)

    return all_of_them


def _writes_after_reads(transactions: list[list[str]]) -> list[list[str]]:
    """Return the transactions that write and have begun with a read."""
    writes = re.compile(r"\b(INSERT|UPDATE|DELETE)\b")
    return [each for each in transactions if each[0] == "BEGIN" and any(writes.search(text) for text in each)]
