"""Statements of several parts in transactions of each kind: without one, in savepoints and at stricter levels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import sqlaqueue.mariadb
from sqlaqueue import cancel, claim, complete, extend, purge, rescue
from sqlaqueue.exc import StatementError
from tests.mariadb.models import Job, Pair

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSED = r"several statements for a claim.*AUTOCOMMIT.*use a session or connection whose isolation_level is not"


def enqueue(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()


def states(engine: sa.Engine) -> set[str]:
    with Session(engine) as session:
        return {*session.scalars(sa.select(Job.status))}


@pytest.mark.parametrize("given_to", ["engine", "options", "statement"])
def test_autocommit_is_refused(url: Callable[[str], str], engine: sa.Engine, given_to: str) -> None:
    enqueue(engine, *(Job(id=n) for n in range(1, 4)), Pair(site="a", number=1))
    with Session(engine, expire_on_commit=False) as session:
        mine = session.scalars(claim(Job, 1)).all()
        session.commit()
    options = {"isolation_level": "AUTOCOMMIT"} if given_to == "engine" else {}
    own = sa.create_engine(url("mariadb+pymysql"), **options)
    sqlaqueue.mariadb.prepare(own)
    change = sa.update(Job).values(payload="changed")
    statements = [claim(Job, 1), claim(Pair, 1), complete(mine), extend(mine), rescue(Job), cancel(Job), purge(Job)]
    statements += [change.returning(Job.id), sa.delete(Job).returning(Job.id)]
    for statement in statements:
        bind = own.execution_options(isolation_level="AUTOCOMMIT") if given_to == "options" else own
        with Session(bind) as session:
            if given_to == "statement":
                session.execute(sa.text("SET autocommit = 1"))
            with pytest.raises(StatementError, match=rf"^(job|pair): .*{REFUSED}"):
                session.execute(statement)
    with Session(own.execution_options(isolation_level="AUTOCOMMIT")) as session:
        # One statement is one also here.
        session.execute(change)
    own.dispose()
    assert states(engine) == {"pending", "processing"}


def test_a_claim_is_refused_before_it_locks_rows(engine: sa.Engine) -> None:
    sent: list[str] = []
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        sa.event.listen(engine, "before_cursor_execute", lambda *event: sent.append(event[2]))
        with pytest.raises(StatementError, match=REFUSED):
            session.execute(claim(Pair, 1))
    assert not sent


def test_autocommit_is_refused_in_async_sessions(url: Callable[[str], str], engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))

    async def use() -> None:
        own = create_async_engine(url("mariadb+asyncmy"), isolation_level="AUTOCOMMIT")
        sqlaqueue.mariadb.prepare(own)
        async with AsyncSession(own) as session:
            for statement in (claim(Job, 1), sa.update(Job).values(payload="changed").returning(Job.id)):
                with pytest.raises(StatementError, match=rf"^job: .*{REFUSED}"):
                    await session.execute(statement)
            # The driver does not notice that it is switched off.
            await session.execute(sa.text("SET autocommit = 0"))
            assert [job.id for job in await session.scalars(claim(Job, 1))] == [1]
            await session.execute(sa.text("ROLLBACK"))
        await own.dispose()

    asyncio.run(use())
    assert states(engine) == {"pending"}


def test_a_transaction_that_the_program_has_begun_by_itself(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.execute(sa.text("START TRANSACTION"))
        assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
        session.execute(sa.text("ROLLBACK"))
    assert states(engine) == {"pending"}


def test_the_argument_of_a_driver_does_not_switch_transactions_off(
    url: Callable[[str], str], engine: sa.Engine
) -> None:
    enqueue(engine, Job(id=1))
    own = sa.create_engine(url("mariadb+pymysql"), connect_args={"autocommit": True})
    sqlaqueue.mariadb.prepare(own)
    with Session(own) as session:
        assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
        session.rollback()
    own.dispose()
    assert states(engine) == {"pending"}


def test_a_claim_in_a_savepoint_is_undone_with_it(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1), Job(id=2))
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
            savepoint.rollback()
        assert states(engine) == {"pending"}
        with session.begin_nested():
            jobs = session.scalars(claim(Job, 1)).all()
            session.execute(complete(jobs))
        session.commit()
        assert {*session.execute(sa.select(Job.id, Job.status))} == {(1, "completed"), (2, "pending")}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_what_is_returned_is_what_was_locked(engine: sa.Engine, level: str) -> None:
    """At REPEATABLE READ a SELECT without a lock reads what was there when the transaction began."""
    enqueue(engine, *(Job(id=n, payload="old") for n in range(1, 4)))
    with Session(engine.execution_options(isolation_level=level)) as session, Session(engine) as other:
        session.execute(sa.select(Job.id)).all()
        other.execute(sa.update(Job).values(payload="new"))
        other.add(Job(id=4, payload="new", priority=-1))
        other.commit()
        assert [(job.id, job.payload) for job in session.scalars(claim(Job, 2))] == [(4, "new"), (1, "new")]
        # An UPDATE that leaves a row as it is does not make it one of this transaction.
        same = sa.update(Job).where(Job.id == 2).values(priority=0).returning(Job.id, Job.payload)
        assert session.execute(same).all() == [(2, "new")]
        gone = sa.delete(Job).where(Job.id == 3).returning(Job.id, Job.payload)
        assert session.execute(gone).all() == [(3, "new")]


def test_the_rows_of_a_statement_are_forgotten_when_it_has_ended(engine: sa.Engine) -> None:
    """They would be kept as long as the connection is, however many they are."""
    enqueue(engine, *(Pair(site="a", number=n) for n in range(1, 6)))
    with Session(engine) as session:
        info = session.connection().connection.info
        kept = info.copy()
        assert len(session.scalars(claim(Pair, 2)).all()) == 2
        assert info == kept
        # Its first steps succeed, and a later one fails.
        session.execute(sa.text("RENAME TABLE sqlaqueue_control TO renamed"))
        try:
            with pytest.raises(sa.exc.DBAPIError, match="sqlaqueue_control"):
                session.execute(cancel(Pair))
            assert info == kept
        finally:
            session.execute(sa.text("RENAME TABLE renamed TO sqlaqueue_control"))
