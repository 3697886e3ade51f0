"""Schedules, waits, cancellations, retention and the functions for operators on MariaDB."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import AsyncConsumer, Consumer, admin, async_wait, cancel, wait
from sqlaqueue.consumer import pace
from tests.mariadb.models import REPORTS, Job, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE = 60.0


@contextmanager
def running(consumer: Consumer[Any]) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(DEADLINE)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_schedule_fires_and_follows_a_change(engine: sa.Engine, sessions: sessionmaker[Session]) -> None:
    titles: list[str | None] = []
    consumer = Consumer(Report, lambda _, job: titles.append(job.title), sessions, schedules=[REPORTS])
    with running(consumer):
        wait_until(lambda: len(titles) >= 2)
        with sessions() as session:
            admin.pause_schedule(session, Report, "reports")
            session.commit()
            stored = session.execute(sa.text("SELECT edited_at, next_tick, paused_at FROM sqlaqueue_schedule")).one()
            assert stored.next_tick is None
            assert None not in {stored.edited_at, stored.paused_at}
    assert {*titles} == {"due"}


def test_wait(engine: sa.Engine, sessions: sessionmaker[Session]) -> None:
    with running(Consumer(Job, lambda *_: None, sessions, poll_interval=0.1)), sessions() as session:
        job = Job(id=1)
        session.add(job)
        session.commit()
        assert wait(sessions, job, timeout=DEADLINE).state == "completed"


def test_a_cancellation_is_announced_within_the_process(
    url: Callable[[str], str], engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the announcement, the Consumer would look for requests after the deadline of the test."""
    for interval in ("HEARTBEAT", "RESCUE"):
        monkeypatch.setattr(pace, interval, 10 * DEADLINE)

    async def check() -> None:
        begun = asyncio.Event()

        async def handle(_: AsyncSession, __: Job) -> None:
            begun.set()
            await asyncio.sleep(10 * DEADLINE)

        own = create_async_engine(url("mariadb+asyncmy"))
        sqlaqueue.mariadb.prepare(own)
        sessions = async_sessionmaker(own)
        consumer = AsyncConsumer(Job, handle, sessions, lease=30 * DEADLINE, poll_interval=10 * DEADLINE)
        run = asyncio.create_task(consumer.run())
        async with sessions() as session:
            session.add(Job(id=1))
            await session.commit()
            await asyncio.wait_for(begun.wait(), DEADLINE)
            await session.execute(cancel(sa.select(Job).where(Job.id == 1)))
            await session.commit()
        result = await async_wait(sessions, Job, 1, timeout=DEADLINE)
        assert result.state == "cancelled"
        consumer.stop()
        await run
        await own.dispose()

    asyncio.run(check())


def test_retention_deletes_what_is_old(
    engine: sa.Engine, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing younger, not even by an hour; the next batch begins with what has become old since."""
    monkeypatch.setattr(pace, "RETENTION", 0.2)
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 21)])
        session.commit()
        Consumer(Job, lambda *_: None, sessions).drain()
        becomes_old = timedelta(hours=24) - timedelta(seconds=2)
        age = sa.case((Job.id > 5, timedelta(hours=25)), (Job.id == 1, becomes_old), else_=timedelta(hours=23))
        session.execute(sa.update(Job).values(finished_at=sa.func.now() - age))
        session.commit()
        with running(Consumer(Job, lambda *_: None, sessions, poll_interval=0.1)):
            wait_until(lambda: (session.rollback(), session.scalar(sa.select(sa.func.count(Job.id))))[1] == 4)
        assert session.scalars(sa.select(Job.id)).all() == [2, 3, 4, 5]


def test_what_operators_read(engine: sa.Engine, sessions: sessionmaker[Session]) -> None:
    def handle(_: Session, job: Job) -> None:
        if job.id % 2:
            raise ValueError(f"{job.id} is odd")

    with sessions() as session:
        session.add_all([Job(id=n, max_attempts=1) for n in range(1, 7)])
        session.commit()
        Consumer(Job, handle, sessions).drain()
        session.add(Job(id=7))
        session.commit()
        stats = admin.stats(session, Job)
        assert (stats.due, stats.states["failed"], stats.states["completed"]) == (1, 3, 3)
        assert not stats.missing_indexes
        assert [group.count for group in admin.failures(session, Job)] == [3]
        assert {job.state for job in admin.jobs(session, Job)} == {"pending", "failed", "completed"}
        assert "pending" in str(admin.explain_job(session, Job, 7))
        assert admin.requeue(session, sa.select(Job).where(Job.id == 1))
        assert admin.cancel(session, sa.select(Job).where(Job.id == 7)).cancelled
