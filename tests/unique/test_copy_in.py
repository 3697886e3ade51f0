"""``copy_in(on_twin="skip")``: COPY of rows of which some have a twin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import async_copy_in, claim, copy_in
from sqlaqueue.exc import StatementError
from tests.unique.models import KINDS, create, make_job

if TYPE_CHECKING:
    from tests.servers import Database

ROWS = [{"key": "a"}, {"key": None}, {"key": "b"}, {"key": "a"}, {"key": None}]


@pytest.mark.parametrize("kind", KINDS)
def test_twins_are_left_out(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind)
    create(engine, job)
    with Session(engine) as session:
        session.add(job(key="b"))
        assert copy_in(session, job, ROWS, on_twin="skip") == 3
        assert copy_in(session, job, [{"key": "a"}, {"key": "z"}], on_twin="skip") == 1
        session.commit()
        assert sorted(str(key) for key in session.scalars(sa.select(job.key))) == ["None", "None", "a", "b", "z"]
        if kind != "existing_messages":
            assert len(session.scalars(claim(job, 9)).all()) == 5
        session.rollback()
        with pytest.raises(sa.exc.IntegrityError, match="ix_job_queue_unique"):
            copy_in(session, job, ROWS)


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
def test_other_drivers(shared: Database, engine: sa.Engine, driver: Any) -> None:
    job = make_job("update_status")
    job.metadata.create_all(engine)
    if driver == "psycopg2":
        with Session(sa.create_engine(shared.url(driver))) as session:
            assert copy_in(session, job, ROWS, on_twin="skip") == 4
            session.rollback()
        return

    async def copy() -> int:
        of_driver = create_async_engine(shared.url(driver))
        async with AsyncSession(of_driver) as session:
            number = await async_copy_in(session, job, ROWS, on_twin="skip")
            await session.rollback()
        await of_driver.dispose()
        return number

    assert asyncio.run(copy()) == 4


def test_a_translated_schema(engine: sa.Engine) -> None:
    job = make_job("update_status")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    translated = engine.execution_options(schema_translate_map={None: "tenant"})
    job.metadata.create_all(translated)
    with Session(translated) as session:
        assert copy_in(session, job, ROWS, on_twin="skip") == 4
        session.commit()
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tenant.job").scalar() == 4
        connection.exec_driver_sql("DROP SCHEMA tenant CASCADE")


def test_wrong_values(engine: sa.Engine) -> None:
    plain, job = make_job("update_status", unique=None), make_job("update_status")
    with Session(engine) as session:
        with pytest.raises(StatementError, match="use 'raise' or 'skip'"):
            copy_in(session, job, ROWS, on_twin="replace")  # type: ignore[arg-type] # wrong on purpose
        with pytest.raises(StatementError, match=r"copy_in\(Job\): on_twin='skip': Job is not unique; set QueueConfig"):
            copy_in(session, plain, ROWS, on_twin="skip")
