"""Schedules, waits, cancellations, retention and the functions for operators on MariaDB."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, admin, cancel, wait
from sqlaqueue.consumer.core import intervals
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


def test_wait_and_cancel(engine: sa.Engine, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process a cancellation is announced to the Consumer when it is committed."""
    begun, cancelled = threading.Event(), threading.Event()

    def handle(session: Session, job: Job) -> None:
        if job.payload == "long":
            begun.set()
            assert cancelled.wait(DEADLINE)

    consumer = Consumer(Job, handle, sessions, poll_interval=0.1)
    consumer.on("cancelled", lambda _: None)
    with running(consumer):
        with sessions() as session:
            short, long = Job(id=1), Job(id=2, payload="long")
            session.add(short)
            session.commit()
            assert wait(sessions, short, timeout=DEADLINE).state == "completed"
            session.add(long)
            session.commit()
            assert begun.wait(DEADLINE)
            session.execute(cancel(sa.select(Job).where(Job.id == 2)))
            session.commit()
        cancelled.set()
        assert wait(sessions, Job, 2, timeout=DEADLINE).state in {"completed", "cancelled"}


def test_retention_deletes_what_is_old(
    engine: sa.Engine, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervals, "RETENTION", 0.2)
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 21)])
        session.commit()
        Consumer(Job, lambda *_: None, sessions).drain()
        session.execute(
            sa.update(Job)
            .where(Job.id > 5)
            .values(finished_at=sa.func.now() - sa.literal(timedelta(days=2), sa.Interval()))
        )
        session.commit()
        with running(Consumer(Job, lambda *_: None, sessions, poll_interval=0.1)):
            wait_until(lambda: (session.rollback(), session.scalar(sa.select(sa.func.count(Job.id))))[1] == 5)


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
