"""Requests to cancel jobs that run, which the maintenance of their Consumer takes."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

import sqlaqueue.sqlite
from sqlaqueue import QueueConfig, QueueMixin, cancel, claim
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance.handlers_running import _take
from sqlaqueue.mapping.mixin import spec_of
from tests.programs import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sqlite.bench import SQLiteBench

pytestmark = pytest.mark.once


def test_a_running_job_is_cancelled(
    bench: SQLiteBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task ends at once; a thread runs on, and its failure is not tried again."""
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    caplog.set_level(logging.WARNING, "sqlaqueue")
    good, bad = bench.enqueue(2)
    running: set[int] = set()

    async def handle(io: Any, job: Any) -> None:
        running.add(job.id)
        if job.id == bad:
            # In a task this is where it is cancelled.
            await io.wait_for(lambda: all(one.cancelled for one in server.consumer._context.in_flight.busy()))
            raise ValueError

    server = bench.consumer(handle, concurrency=2, batch_size=1)
    with server.running():
        wait_until(lambda: bad in running, "the handler runs")
        with bench.sessions.begin() as session:
            session.execute(cancel(sa.select(bench.Job).where(bench.Job.id == bad)))
        wait_until(lambda: bench.states() == {"cancelled": 1, "completed": 1}, "the job is cancelled")
    assert server.told("cancelled") == [bad]
    assert bench.attempts() == {good: 1, bad: 1}
    assert bench.execute("SELECT count(*) FROM sqlaqueue_control") == 0
    assert "OperationalError" not in caplog.text


def test_requests_are_taken_by_keys_of_any_type(tmp_path: Path) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy="update_status")
        tenant = mapped_column(sa.String(10), primary_key=True)
        id = mapped_column(sa.Uuid(), primary_key=True)

    engine = sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    sqlaqueue.sqlite.prepare(engine)
    Base.metadata.create_all(engine)
    keys = [("a", uuid.UUID(int=1)), ("a", uuid.UUID(int=2)), ("b", uuid.UUID(int=1))]
    with Session(engine) as session:
        session.add_all([Job(tenant=tenant, id=key) for tenant, key in keys])
        session.commit()
        assert len(session.scalars(claim(Job, 3)).all()) == 3
        session.commit()
        session.execute(cancel(sa.select(Job).where(Job.id == keys[0][1])))
        session.commit()
        rows = session.execute(_take(spec_of(Job), keys[:2])).all()
        assert [tuple(row[:2]) for row in rows] == [keys[0]]
        assert 0 <= rows[0][2] < 60
        assert session.execute(_take(spec_of(Job), keys[:2])).all() == []
        # The request for the job of another Consumer is left.
        assert [tuple(row[:2]) for row in session.execute(_take(spec_of(Job), keys[2:]))] == [keys[2]]
        session.commit()
    engine.dispose()
