"""``sqlaqueue.admin``: the functions behind the command line, and their async versions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import admin, claim
from sqlaqueue.exc import ConfigurationError
from tests.cli.conftest import Shop
from tests.cli.shop.models import Email, Letter, Row, Task

pytestmark = pytest.mark.once


@pytest.mark.parametrize("model", [Email, Letter, Row, Task])
def test_cancel_returns_the_outcome_of_each_job(shop: Shop, model: Any) -> None:
    """A running job is held by another worker, by a lease or its transaction."""
    new: Any = (lambda number: Row(year=1, number=str(number))) if model is Row else (lambda _: model())
    with Session(shop.engine) as session, Session(shop.engine) as worker:
        jobs = [new(number) for number in range(4)]
        session.add_all(jobs)
        session.commit()
        keys = [sa.inspect(job).identity for job in jobs]
        keys = [key if len(key) > 1 else key[0] for key in keys]
        [held] = worker.scalars(claim(model, 1)).all()
        if model is Email:
            worker.commit()
        running = sa.inspect(held).identity
        running = running if len(running) > 1 else running[0]
        waiting = [key for key in keys if key != running]
        session.delete(jobs[keys.index(waiting[0])])
        session.commit()
        done = admin.cancel(session, jobs)
        assert done == admin.Cancelled(cancelled=waiting[1:], asked=[running], missing=[waiting[0]])
        # Of a class or a select no job is missing.
        assert admin.cancel(session, model) == admin.Cancelled(asked=[running])
        unknown = "9,9" if model is Row else "99"
        named = admin.JobFilter(states=("pending", "processing"), keys=(unknown,))
        assert admin.cancel(session, sa.select(model), named) == admin.Cancelled(missing=[unknown])
        worker.rollback()


@pytest.mark.parametrize("size", [1, 1000])
def test_cancel_in_batches(shop: Shop, size: int) -> None:
    shop.add(*(Email() for _ in range(5)), Email(status="processing"), Email(status="completed"))
    with Session(shop.engine) as session:
        done = admin.cancel(session, sa.select(Email).where(Email.id != 2), batch_size=size)
        assert done == admin.Cancelled(cancelled=[1, 3, 4, 5], asked=[6])
        jobs = session.scalars(sa.select(Email).order_by(Email.id)).all()
        done = admin.cancel(session, jobs, batch_size=size)
        assert done == admin.Cancelled(cancelled=[2], asked=[6], missing=[1, 3, 4, 5, 7])


async def test_other_objects_than_sessions_are_refused() -> None:
    engine: Any = sa.create_engine("postgresql+psycopg://")
    async_engine: Any = create_async_engine("postgresql+psycopg://")
    async_session: Any = AsyncSession(async_engine)
    for given, said in [
        (engine, r"stats\(\): this is an Engine; give a Session, as in `with Session\(engine\) as session`"),
        (async_engine, "this is an AsyncEngine; give a Session"),
        (sessionmaker(engine), "this is a sessionmaker; give a Session"),
        (async_session, r"this is an AsyncSession; use `await session.run_sync\(stats, ...\)`"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            admin.stats(given, Email)
    with pytest.raises(ConfigurationError, match=r"in_batches\(\): this is an Engine"):
        admin.in_batches(engine, Email, admin.JobFilter(), admin.requeue_some)
    for given, said in [
        (
            async_engine,
            r"async_stats\(\): this is an AsyncEngine; give an AsyncSession, as in `async with ",
        ),
        (Session(engine), r"this is a Session; use stats\(\)$"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            await admin.async_stats(given, Email)


def test_every_function_has_an_async_version() -> None:
    plain = {name for name in admin.__all__ if name.islower() and not name.startswith("async_")}
    primitive = {"cancel_some", "requeue_some", "purge_some", "in_batches", "execute", "preview"}
    assert {name.removeprefix("async_") for name in admin.__all__ if name.startswith("async_")} == plain - primitive
    for name in plain - primitive:
        assert inspect.iscoroutinefunction(getattr(admin, f"async_{name}"))


async def test_the_async_versions(shop: Shop) -> None:
    shop.add(*(Email(status="failed", last_error="ValueError: a") for _ in range(3)), Email())
    engine = create_async_engine(shop.database.url("asyncpg"))
    async with AsyncSession(engine) as session:
        assert (await admin.async_stats(session, Email)).states["failed"] == 3
        [group] = await admin.async_failures(session, Email)
        assert (group.kind, group.count) == ("ValueError", 3)
        assert await admin.async_requeue(session, Email, limit=1) == 1
        assert await admin.async_purge(session, Email) == 2
        found = await admin.async_jobs(session, Email)
        assert sorted(info.key for info in found) == [(1,), (4,)]
        info, row = await admin.async_job(session, Email, 1) or (None, {})
        assert info is not None
        assert (info.state, row["to"]) == ("pending", "ada@example.com")
        assert await admin.async_job(session, Email, 99) is None
        await admin.async_pause(session, Email)
        assert await admin.async_paused(session, Email)
        await admin.async_resume(session, Email)
        assert not await admin.async_paused(session, Email)
        assert list(await admin.async_consumers(session, Email)) == []
        assert await admin.async_rescue(session, Email) == await admin.async_reconcile(session, Letter) == 0
        assert await admin.async_count(session, Email, admin.JobFilter()) == {"pending": 2}
        assert (await admin.async_cancel(session, Email)).cancelled == [1, 4]
    await engine.dispose()


def test_a_job_with_a_dead_letter_is_shown(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.add(Task())
        session.commit()
        assert admin.cancel(session, Task).cancelled == [1]
        info, row = admin.job(session, Task, 1) or (None, {})
        assert info is not None
        assert (info.state, row["id"]) == ("cancelled", 1)
