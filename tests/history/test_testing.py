"""The functions of ``sqlaqueue.testing`` write the history in the test's transaction."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Snooze, admin
from sqlaqueue.testing import crash, drain, run_job, travel
from tests.history.queues import KINDS, HistoryQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Database


def work(_: Session, job: Any) -> None:
    match job.payload:
        case "raise":
            raise ValueError("no address")
        case "snooze":
            raise Snooze(60)


@pytest.fixture(params=KINDS)
def queue(database: Database, request: pytest.FixtureRequest) -> Iterator[HistoryQueue]:
    queue = HistoryQueue(database, request.param)
    yield queue
    queue.engine.dispose()


@pytest.fixture
def session(queue: HistoryQueue) -> Iterator[Session]:
    with queue.sessions() as session:
        yield session
        session.rollback()
    assert queue.history() == []


def outcomes(session: Session, model: Any, key: Any) -> list[tuple[int, str]]:
    return [(one.attempt, one.outcome) for one in reversed(admin.attempts(session, model, key))]


def enqueue(session: Session, queue: HistoryQueue, *payloads: str | None) -> list[Any]:
    jobs = [queue.Job(payload=payload) for payload in payloads]
    session.add_all(jobs)
    session.flush()
    return jobs


def test_run_job_and_drain(queue: HistoryQueue, session: Session) -> None:
    first, second, third = enqueue(session, queue, "raise", None, "snooze")
    keys = [first.id, second.id, third.id]
    run_job(session, first, work)
    assert outcomes(session, queue.Job, keys[0]) == [(1, "retried")]
    drain(session, queue.Job, work)
    assert [outcomes(session, queue.Job, key) for key in keys] == [
        [(1, "retried"), (2, "failed")],
        [(1, "completed")],
        [(1, "released")],
    ]


def test_crash(queue: HistoryQueue, session: Session) -> None:
    [job] = enqueue(session, queue, None)
    key = job.id
    crash(session, job)
    drain(session, queue.Job, work)
    rescued = [(1, "rescued")] if queue.kind == "update_status" else []
    assert outcomes(session, queue.Job, key) == [*rescued, (2, "completed")]


def test_travel_moves_attempts(queue: HistoryQueue, session: Session) -> None:
    [job] = enqueue(session, queue, None)
    key = job.id
    drain(session, queue.Job, work)
    (before,) = admin.attempts(session, queue.Job, key)
    travel(session, timedelta(days=3))
    (after,) = admin.attempts(session, queue.Job, key)
    assert before.ended_at - after.ended_at == timedelta(days=3)
    assert before.seconds == after.seconds
    assert session.scalar(sa.select(sa.func.count()).select_from(queue.attempt)) == 1
