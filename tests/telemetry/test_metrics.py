"""The metrics of a Consumer, and the events and notes of which telemetry is made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, JobEvent, PollEvent, Snooze
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.otel import instrument
from sqlaqueue.telemetry import attempt_of, note, seconds_waited, surround
from tests.servers import Database
from tests.telemetry.conftest import Recorded
from tests.telemetry.models import MODELS, Base, Leased

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def sessions(database: Database) -> Iterator[sessionmaker[Session]]:
    engine = sa.create_engine(database.url("psycopg"))
    Base.metadata.create_all(engine)
    yield sessionmaker(engine)
    engine.dispose()


def add(sessions: Any, model: Any, *texts: str, **values: Any) -> None:
    with sessions() as session:
        session.add_all([model(text=text, **values) for text in texts])
        session.commit()


def behave(session: Session, job: Any) -> None:
    if job.text == "fail":
        raise ValueError(job.text)
    if job.text == "snooze":
        raise Snooze(60)


@pytest.mark.parametrize("model", MODELS)
def test_what_a_consumer_did(sessions: sessionmaker[Session], recorded: Recorded, model: Any) -> None:
    queue = {"messaging__destination__name": model.__tablename__}
    add(sessions, model, "good", "good", "fail", "snooze")
    consumer = Consumer(model, behave, sessions)
    instrument(consumer, **recorded.providers)
    consumer.drain()
    outcomes = {
        outcome: recorded.total("sqlaqueue.job.attempts", sqlaqueue__outcome=outcome, **queue)
        for outcome in ("completed", "retried", "failed", "released")
    }
    assert outcomes == {"completed": 2, "retried": 2, "failed": 1, "released": 1}
    assert recorded.total("messaging.process.duration", error__type="ValueError", **queue) == 3
    assert recorded.total("messaging.process.duration", **queue) == 6
    assert recorded.total("messaging.client.consumed.messages", **queue) == 6
    assert recorded.total("sqlaqueue.job.wait.duration", **queue) == 6
    assert recorded.total("sqlaqueue.jobs.running", **queue) == 0
    empty = recorded.total("sqlaqueue.polls", sqlaqueue__poll__result="empty", **queue)
    found = recorded.total("sqlaqueue.polls", sqlaqueue__poll__result="found", **queue)
    assert empty >= 1
    assert found >= 1
    assert recorded.total("messaging.client.operation.duration", **queue) == empty + found


def test_rescues_and_lost_leases(sessions: sessionmaker[Session], recorded: Recorded) -> None:
    add(sessions, Leased, "slow")

    calls: list[int] = []

    def lose_the_lease(session: Session, job: Any) -> None:
        calls.append(job.id)
        if len(calls) == 1:
            with sessions() as other:
                other.execute(sa.update(Leased).values(lease_expires_at=sa.func.now()))
                other.commit()
            deadline = time.monotonic() + 30
            with sessions() as other:
                while other.scalar(sa.select(Leased.status)) != "pending" and time.monotonic() < deadline:
                    other.rollback()
                    time.sleep(0.05)

    consumer = Consumer(Leased, lose_the_lease, sessions, concurrency=2)
    instrument(consumer, **recorded.providers)
    with consumer:
        deadline = time.monotonic() + 60
        with sessions() as session:
            while session.scalar(sa.select(Leased.status)) != "completed" and time.monotonic() < deadline:
                session.rollback()
                time.sleep(0.05)
    assert recorded.total("sqlaqueue.jobs.rescued") == 1
    assert recorded.total("sqlaqueue.leases.lost") == 1
    [lost] = recorded.spans("settle leased")
    assert lost.attributes["error.type"] == "LeaseLost"


@pytest.mark.parametrize("model", MODELS)
def test_notes_reach_the_events_of_their_attempt(sessions: sessionmaker[Session], model: Any) -> None:
    add(sessions, model, "fail")
    events: list[JobEvent] = []

    @contextmanager
    def remember(job: Any) -> Iterator[None]:
        attempt = attempt_of(job)
        assert (attempt.queue, attempt.key, attempt.max_attempts) == (model.__tablename__, (1,), 3)
        note(job, {"number": attempt.number})
        note(job, {"more": True})
        yield

    consumer = Consumer(model, behave, sessions)
    surround(consumer, remember)
    for name in ("retried", "failed"):
        consumer.on(name, events.append)
    consumer.drain()
    assert [dict(event.notes) for event in events] == [{"number": number, "more": True} for number in (1, 2, 3)]


@pytest.mark.parametrize("model", MODELS)
def test_each_poll_has_an_event(sessions: sessionmaker[Session], model: Any) -> None:
    add(sessions, model, "a", "b", "c")
    polls: list[PollEvent] = []
    consumer = Consumer(model, behave, sessions)
    consumer.on("polled", polls.append)
    consumer.drain()
    assert sum(poll.jobs for poll in polls) == 3
    assert polls[-1].jobs == 0
    assert {poll.queue for poll in polls} == {model.__tablename__}
    assert all(poll.duration > 0 for poll in polls)


def test_added_middleware_is_outermost_and_checked(sessions: sessionmaker[Session]) -> None:
    add(sessions, Leased, "a")
    seen: list[str] = []

    def named(name: str) -> Any:
        def middleware(job: Any, call: Any) -> None:
            seen.append(name)
            call()

        return middleware

    consumer = Consumer(Leased, behave, sessions, around=[named("given")])
    consumer.add_middleware(named("added"))
    consumer.drain()
    assert seen == ["added", "given"]

    async def coroutine(job: Any, call: Any) -> None:
        await call()

    with pytest.raises(ConfigurationError, match="coroutine is a coroutine function; define it with `def`"):
        consumer.add_middleware(coroutine)


def test_the_seconds_that_a_job_waited() -> None:
    """From its due time or its insertion, the later of both; and not below zero, if the clocks differ."""
    now = datetime.now(UTC)
    assert seconds_waited(Leased()) is None
    assert seconds_waited(Leased(run_at=now - timedelta(hours=1))) >= 3600
    job = Leased(run_at=now - timedelta(hours=1))
    job.created_at = now - timedelta(minutes=1)
    assert 60 <= seconds_waited(job) < 3600
    assert seconds_waited(Leased(run_at=now + timedelta(hours=1))) == 0
    # A column without a time zone, which the server has written in that of some session.
    job.__dict__["run_at"] = job.__dict__["created_at"] = datetime(2024, 1, 1)  # noqa: DTZ001 - as above
    assert seconds_waited(job) is None


def test_a_job_that_was_not_claimed_has_no_attempt() -> None:
    for call in (attempt_of, lambda job: note(job, {})):
        with pytest.raises(StatementError, match=r"\(Leased\): the job was not claimed; give the job"):
            call(Leased())
