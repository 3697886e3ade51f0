"""Sessions within limits: timeouts, read-only transactions, and how many are used at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.exc import StatementError
from sqlaqueue.web.data.reader import attempt_part
from sqlaqueue.web.database import MOST_AT_ONCE, Database
from sqlaqueue.web.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=["sync", "psycopg", "asyncpg"])
async def database(request: pytest.FixtureRequest, shared: Any, engine: sa.Engine) -> AsyncIterator[Database]:
    if request.param == "sync":
        yield Database(sessionmaker(engine), "Dashboard", [])
        return
    made = create_async_engine(shared.url(request.param), pool_size=8)
    yield Database(async_sessionmaker(made), "Dashboard", [])
    await made.dispose()


def setting(session: Session, name: str) -> Any:
    return session.scalar(sa.select(sa.func.current_setting(name)))


async def test_reading_has_a_timeout_and_writes_nothing(database: Database) -> None:
    def read(session: Session) -> tuple[Any, ...]:
        return setting(session, "statement_timeout"), setting(session, "transaction_read_only")

    assert await database.read(read, statement_timeout=1.5) == ("1500ms", "on")
    assert await database.read(read, read_only=False) == ("2s", "off")

    def create(session: Session) -> None:
        session.execute(sa.text("CREATE TABLE made (id int)"))

    with pytest.raises(sa.exc.DBAPIError, match="read-only"):
        await database.read(create)


async def test_reading_rolls_back(database: Database) -> None:
    def create(session: Session) -> None:
        session.execute(sa.text("CREATE TABLE made (id int)"))

    def exists(session: Session) -> bool:
        return bool(session.scalar(sa.text("SELECT to_regclass('made') IS NOT NULL")))

    await database.read(create, read_only=False)
    assert not await database.read(exists)


async def test_each_transaction_of_an_action_has_the_timeout(database: Database) -> None:
    def commit_twice(session: Session) -> list[Any]:
        found = []
        for _ in range(2):
            found.append(setting(session, "statement_timeout"))
            session.commit()
        return found

    assert await database.write(commit_twice, statement_timeout=7) == ["7s", "7s"]


async def test_limits_do_not_stay_on_the_connection(database: Database) -> None:
    def timeout(session: Session) -> Any:
        return setting(session, "statement_timeout")

    await database.write(timeout, statement_timeout=7)
    if database.is_async:
        async with database.sessions() as session:
            assert await session.run_sync(timeout) == "0"
    else:
        with database.sessions() as session:
            assert timeout(session) == "0"


async def test_slow_statement_is_cancelled(database: Database) -> None:
    with pytest.raises(sa.exc.DBAPIError, match="timeout"):
        await database.read(lambda session: session.execute(sa.text("SELECT pg_sleep(30)")), statement_timeout=0.2)


async def test_a_few_sessions_serve_many_requests(database: Database) -> None:
    def count(session: Session) -> int:
        session.execute(sa.text("SELECT pg_sleep(0.05)"))
        active = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle'"
        return int(session.scalar(sa.text(active)) or 0)

    counts = await asyncio.gather(*(database.read(count) for _ in range(20)))
    assert max(counts) <= MOST_AT_ONCE


async def test_connections_from_before_a_restart_are_replaced(database: Database, engine: sa.Engine) -> None:
    async def read() -> Any:
        return await database.read(lambda session: session.scalar(sa.select(1)))

    assert await read() == 1
    with engine.connect() as connection:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(sa.text(f"SELECT pg_terminate_backend(pid) {others}"))
    assert await read() == 1


async def test_database_that_cannot_be_reached() -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(ServiceUnavailable):
        await Database(sessionmaker(engine), "Dashboard", []).read(lambda session: session.scalar(sa.select(1)))


def test_a_part_that_fails_does_not_hide_the_others(engine: sa.Engine) -> None:
    def missing(session: Session) -> Any:
        return session.scalar(sa.text("SELECT 1 FROM not_there"))

    def refused(_: Session) -> Any:
        message = "needs a column"
        raise StatementError(message)

    with Session(engine) as session:
        problem = attempt_part(session, missing)
        assert (problem.value, problem.problem[:18]) == (None, "A table is missing")
        assert attempt_part(session, refused).problem == "needs a column"
        assert attempt_part(session, lambda session: session.scalar(sa.select(5))).value == 5
        secret = attempt_part(session, lambda session: session.scalar(sa.text("SELECT 'secret'::int")))
        assert "secret" not in secret.problem


@pytest.mark.parametrize("driver", ["sync", "psycopg", "asyncpg"])
async def test_sessions_without_transactions_are_refused(shared: Any, driver: str) -> None:
    ran: list[Any] = []

    def operation(session: Session) -> None:
        ran.append(session.scalar(sa.select(1)))

    async def refused(database: Database) -> None:
        for run in (database.read, database.write):
            with pytest.raises(ServiceUnavailable, match="AUTOCOMMIT"):
                await run(operation)

    if driver == "sync":
        engine = sa.create_engine(shared.url(), isolation_level="AUTOCOMMIT")
        await refused(Database(sessionmaker(engine), "Dashboard", []))
        engine.dispose()
    else:
        made = create_async_engine(shared.url(driver), isolation_level="AUTOCOMMIT")
        await refused(Database(async_sessionmaker(made), "Dashboard", []))
        await made.dispose()
    assert ran == []
