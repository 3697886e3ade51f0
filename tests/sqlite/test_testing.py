"""The functions for tests in a transaction of SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.sqlite
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.testing import async_drain, drain
from tests.sqlite.features import Email, Order, made

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.once


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[sessionmaker[Session]]:
    sessions = made(tmp_path / "jobs.db")
    yield sessions
    sessions.kw["bind"].dispose()


def states(session: Session) -> list[str]:
    return list(session.scalars(sa.select(Email.status)))


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_a_handler_that_reads_leaves_the_transaction_to_the_test(
    sessions: sessionmaker[Session], *, committed: bool, writes: bool
) -> None:
    with sessions() as session:
        session.add_all([Email(), Email()])
        if committed:
            session.commit()

        def handle(own: Session, _: Email) -> None:
            number = own.scalar(sa.select(sa.func.count()).select_from(Order))
            if writes:
                own.add(Order(customer=number or 0))

        assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 2
        assert drain(session, Email, handle, check=True) == 2
        assert states(session) == ["completed"] * 2
        assert session.scalar(sa.select(sa.func.count()).select_from(Order)) == 2 * writes
        session.rollback()
        assert states(session) == (["pending"] * 2 if committed else [])


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "begin immediate transaction"])
def test_a_handler_may_begin_with_the_lock(sessions: sessionmaker[Session], begin: str) -> None:
    """As in a running Consumer, where it avoids the error of a write after a read."""

    def handle(own: Session, job: Email) -> None:
        own.execute(sa.text(begin))
        job.to = "grace"

    with sessions() as session:
        session.add(Email())
        session.commit()
        assert drain(session, Email, handle, check=True) == 1
        assert session.scalars(sa.select(Email.to)).all() == ["grace"]
        session.rollback()
        assert session.scalars(sa.select(Email.to)).all() == ["ada"]
        # Outside of the function it is SQLite's again.
        with pytest.raises(sa.exc.OperationalError, match="cannot start a transaction within a transaction"):
            session.execute(sa.text(begin))


def test_a_handler_may_not_commit(sessions: sessionmaker[Session]) -> None:
    def handle(own: Session, _: Email) -> None:
        own.execute(sa.text("COMMIT"))

    with sessions() as session:
        session.add(Email())
        session.commit()
        drain(session, Email, handle)
        assert states(session) == ["pending"]
        assert "the statement COMMIT" in (session.scalar(sa.select(Email.last_error)) or "")
        assert HandlerMisuseError.__name__ in (session.scalar(sa.select(Email.last_error)) or "")


async def test_the_same_in_async_code(tmp_path: Path) -> None:
    made(tmp_path / "jobs.db").kw["bind"].dispose()
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}")
    sqlaqueue.sqlite.prepare(engine)

    async def handle(own: AsyncSession, job: Email) -> None:
        await own.execute(sa.text("BEGIN IMMEDIATE"))
        await own.scalar(sa.select(sa.func.count()).select_from(Order))

    async with AsyncSession(engine) as session:
        session.add(Email())
        await session.commit()
        assert await async_drain(session, Email, handle, check=True) == 1
        assert await session.run_sync(states) == ["completed"]
    await engine.dispose()
