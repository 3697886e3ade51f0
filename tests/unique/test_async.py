"""``async_enqueue()``, with asyncpg and psycopg."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import Unique, async_enqueue, enqueue
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.unique.models import create, make_job

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tests.servers import Database


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_async_enqueue(shared: Database, engine: sa.Engine, driver: Any) -> None:
    job = make_job("update_status", Unique("key", nulls_distinct=False))
    create(engine, job)

    async def run() -> None:
        of_driver = create_async_engine(shared.url(driver))
        async with AsyncSession(of_driver) as session:
            jobs = [job(key="a"), job(key="b"), job(key="a"), job()]
            first, second, third, fourth = await async_enqueue(session, jobs)
            assert [first.created, second.created, third.created, fourth.created] == [True, True, False, True]
            assert third.job is first.job
            # No attribute is left to be loaded, which would need an await.
            assert [each.attempts for each in jobs[:2]] == [0, 0]
            await session.commit()
            [again] = await async_enqueue(session, job(key="b", note="new"), on_twin="replace")
            assert (again.job, again.job.note, again.created) == (second.job, "new", False)
            same = await async_enqueue(session, [job(key="c"), job(key="c", note="last")], on_twin="replace")
            assert same[0].job.note == "last"
            await session.commit()
        scoped = async_scoped_session(async_sessionmaker(of_driver), asyncio.current_task)
        assert not (await async_enqueue(scoped, job()))[0].created
        await scoped.remove()
        await of_driver.dispose()

    asyncio.run(run())


def test_the_wrong_kind_of_session(engine: sa.Engine) -> None:
    job = make_job("update_status")
    with pytest.raises(ConfigurationError, match=r"enqueue\(\): this is an AsyncSession; use async_enqueue\(\)"):
        enqueue(AsyncSession(), job(key="a"))  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ConfigurationError, match=r"this is an Engine; give a Session"):
        enqueue(engine, job(key="a"))  # type: ignore[arg-type] # wrong on purpose
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"use enqueue\(\)"):
        asyncio.run(async_enqueue(session, job(key="a")))  # type: ignore[arg-type] # wrong on purpose


def test_wrong_jobs(engine: sa.Engine) -> None:
    job, plain, held = make_job("update_status"), make_job("update_status", None), make_job("batch_select")
    create(engine, job)
    with Session(engine) as session, Session(engine) as other:
        one = job(key="a")
        with pytest.raises(StatementError, match="the same Job is given twice"):
            enqueue(session, [one, one])
        with pytest.raises(StatementError, match="on_twin='update'.*use one of 'skip', 'raise', 'replace'"):
            enqueue(session, one, on_twin="update")  # type: ignore[arg-type] # wrong on purpose
        with pytest.raises(StatementError, match="Job is not unique, so its jobs have no twins"):
            enqueue(session, plain(key="a"), on_twin="replace")
        with pytest.raises(
            StatementError, match='under the strategy "batch_select" a running job still reads as pending'
        ):
            enqueue(session, held(key="a"), on_twin="replace")
        other.add(one)
        with pytest.raises(StatementError, match="was added to another session"):
            enqueue(session, one)
        other.expunge(one)
        enqueue(session, one)
        with pytest.raises(StatementError, match="is in the database already"):
            enqueue(session, one)
        assert [each.created for each in enqueue(session, [plain(key="x"), plain(key="y")])] == [True, True]
        assert enqueue(session, []) == []


def test_a_database_without_the_index(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX ix_job_queue_unique")
    with (
        Session(engine) as session,
        pytest.raises(ConfigurationError, match="lacks the index ix_job_queue_unique.*Run `alembic"),
    ):
        enqueue(session, job(key="a"))
