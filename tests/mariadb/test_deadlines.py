"""Statements that take too long are cancelled, and connections that do not answer are given up."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core import waker
from sqlaqueue.consumer.core.errors import is_connection_lost
from sqlaqueue.sql.engine import sqlstate

SLEEP = sa.text("SELECT 1 FROM information_schema.tables WHERE SLEEP(60) LIMIT 1")
"""A statement that ends without an error after a minute."""


def executed(engine: sa.Engine) -> list[str]:
    """Return what the server executes for the others on this database."""
    others = sa.text(
        "SELECT info FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE() AND info <> ''"
    )
    with engine.connect() as connection:
        return [*connection.scalars(others)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """To cancel takes another connection, which a loaded machine makes in seconds."""
    monkeypatch.setattr(waker, "_GIVE_UP", 600.0)


@pytest.mark.usefixtures("patient")
def test_a_statement_that_takes_too_long_is_cancelled(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    deadlines = waker.Deadlines(600, "test")
    with deadlines.watched():
        with Session(engine) as session, pytest.raises(DBAPIError) as caught, deadlines.limit(session, 0.2):
            session.execute(SLEEP)
        assert sqlstate(caught.value) == "57014"
        # Its connection is none of the pool any more: what cancels it may come late.
        with Session(engine) as session:
            assert session.scalar(sa.text("SELECT 5")) == 5
    assert executed(engine) == []
    assert caplog.records == []


@pytest.mark.usefixtures("patient")
async def test_a_statement_of_asyncio_that_takes_too_long_is_cancelled(
    async_engine: AsyncEngine, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    deadlines = waker.Deadlines(1.0, "test", in_loop=True)
    async with deadlines.watched_in_task():
        with pytest.raises(DBAPIError) as caught:
            async with AsyncSession(async_engine) as session, deadlines.limit_in_task(session):
                await session.execute(SLEEP)
        assert sqlstate(caught.value) == "57014"
        async with AsyncSession(async_engine) as session:
            assert await session.scalar(sa.text("SELECT 5")) == 5
    assert executed(engine) == []
    assert caplog.records == []


def test_a_connection_that_does_not_answer_is_given_up(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker, "_cancel", lambda *_: None)
    deadlines = waker.Deadlines(1.0, "test")
    with deadlines.watched(), Session(engine) as session:
        with pytest.raises(DBAPIError) as caught, deadlines.limit(session):
            session.execute(SLEEP)
        assert is_connection_lost(caught.value)


async def test_a_connection_of_asyncio_that_does_not_answer_is_given_up(
    async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(*_: Any) -> None:
        pass

    monkeypatch.setattr(waker, "_cancel_in_task", cancel)
    deadlines = waker.Deadlines(1.0, "test", in_loop=True)
    async with asyncio.timeout(60), deadlines.watched_in_task():
        with pytest.raises(DBAPIError) as caught:
            async with AsyncSession(async_engine) as session, deadlines.limit_in_task(session):
                await session.execute(SLEEP)
    assert is_connection_lost(caught.value)
