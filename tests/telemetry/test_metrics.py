"""The metrics of a Consumer, and the events and notes of which telemetry is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import SpanProcessor
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, JobEvent, PollEvent, Snooze
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.otel import instrument
from sqlaqueue.prometheus import instrument as instrument_for_prometheus
from sqlaqueue.telemetry import attempt_of, note, seconds_waited, surround
from tests.servers import Database
from tests.telemetry.conftest import Recorded
from tests.telemetry.models import MODELS, Base, Held, Leased, Message

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


def broken_before(job: Any) -> Any:
    raise RuntimeError("before the handler")


@contextmanager
def broken_after(job: Any) -> Iterator[None]:
    try:
        yield
    finally:
        raise RuntimeError("after the handler")


@pytest.mark.each_value
@pytest.mark.parametrize("manager", [broken_before, contextmanager(broken_before), broken_after])
@pytest.mark.parametrize("api", ["sync", "async"])
def test_telemetry_that_raises_costs_no_attempt(
    database: Database, sessions: sessionmaker[Session], caplog: pytest.LogCaptureFixture, manager: Any, api: str
) -> None:
    add(sessions, Leased, "good", "fail")
    ended: list[tuple[str, str]] = []
    consumer: Any
    if api == "sync":
        consumer = Consumer(Leased, behave, sessions, retry=lambda *_: None)
    else:

        async def handler(session: Any, job: Any) -> None:
            behave(session, job)

        engine = create_async_engine(database.url("asyncpg"), poolclass=sa.NullPool)
        consumer = AsyncConsumer(Leased, handler, async_sessionmaker(engine), retry=lambda *_: None)
    for name in ("completed", "retried", "failed"):
        consumer.on(name, lambda event: ended.append((event.name, type(event.error).__name__)))
    surround(consumer, manager)
    asyncio.run(consumer.drain()) if api == "async" else consumer.drain()
    assert sorted(ended) == [("completed", "NoneType"), ("failed", "ValueError")]
    assert [record.error_kind for record in caplog.records if record.event == "telemetry_failed"] == [
        "RuntimeError"
    ] * 2


def test_a_span_processor_that_raises_costs_no_attempt(sessions: sessionmaker[Session], recorded: Recorded) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("on_start")

    add(sessions, Leased, "good")
    recorded.tracer_provider.add_span_processor(Broken())
    consumer = Consumer(Leased, behave, sessions)
    instrument(consumer, **recorded.providers)
    consumer.drain()
    assert recorded.total("sqlaqueue.job.attempts", sqlaqueue__outcome="completed") == 1
    assert recorded.total("sqlaqueue.jobs.running") == 0


def test_a_manager_may_postpone_a_job(sessions: sessionmaker[Session]) -> None:
    def postpone(job: Any) -> Any:
        raise Snooze(60)

    add(sessions, Leased, "good")
    consumer, released = Consumer(Leased, behave, sessions), list[JobEvent]()
    surround(consumer, postpone)
    consumer.on("released", released.append)
    consumer.drain()
    assert [event.delay for event in released] == [60]


@pytest.mark.parametrize("model", [Held, Message])
def test_a_job_that_was_released_before_its_handler_is_no_attempt(
    sessions: sessionmaker[Session], recorded: Recorded, model: Any
) -> None:
    """Such as the jobs that wait when a Consumer stops."""
    registry = CollectorRegistry()
    add(sessions, model, *["good"] * 5)

    def handler(session: Session, job: Any) -> None:
        consumer.stop()

    consumer = Consumer(model, handler, sessions, concurrency=1, batch_size=5)
    released: list[JobEvent] = []
    consumer.on("released", released.append)
    instrument(consumer, **recorded.providers)
    instrument_for_prometheus(consumer, registry=registry)
    consumer.run()
    assert released
    assert recorded.total("sqlaqueue.job.attempts") == 1
    counted = registry.get_sample_value(
        "sqlaqueue_worker_jobs_total", {"queue": model.__tablename__, "outcome": "released"}
    )
    assert counted == 0


@pytest.mark.parametrize("model", MODELS)
def test_jobs_of_a_failed_batch_have_waited_once(
    sessions: sessionmaker[Session], recorded: Recorded, model: Any
) -> None:
    """They are tried again, each by itself, in the same attempt."""
    registry = CollectorRegistry()
    add(sessions, model, "good", "good", "fail")

    def handler(session: Session, jobs: list[Any]) -> None:
        for job in jobs:
            behave(session, job)

    consumer = Consumer(model, handler, sessions, batch=True, batch_size=10, retry=lambda *_: None)
    instrument(consumer, **recorded.providers)
    instrument_for_prometheus(consumer, registry=registry)
    consumer.drain()
    assert recorded.total("messaging.process.duration") == 4
    assert recorded.total("sqlaqueue.job.wait.duration") == 3
    labels = {"queue": model.__tablename__}
    assert registry.get_sample_value("sqlaqueue_worker_job_wait_seconds_count", labels) == 3


def test_a_batch_is_noted_as_a_whole(sessions: sessionmaker[Session]) -> None:
    add(sessions, Leased, "good", "good")
    events: list[JobEvent] = []

    @contextmanager
    def remember(jobs: Any) -> Iterator[None]:
        note(jobs, {"size": len(jobs)})
        for call in (attempt_of, seconds_waited):
            with pytest.raises(StatementError, match=r"\(list\): give one job; with batch=True"):
                call(jobs)
        yield

    consumer = Consumer(Leased, lambda session, jobs: None, sessions, batch=True, batch_size=10)
    surround(consumer, remember)
    consumer.on("completed", events.append)
    consumer.drain()
    assert [event.notes["size"] for event in events] == [2, 2]


def test_wrong_arguments(sessions: sessionmaker[Session]) -> None:
    consumer: Any = Consumer(Leased, behave, sessions)
    for wrong in (None, Leased, Consumer):
        for call in (instrument, instrument_for_prometheus, lambda given: surround(given, broken_before)):
            with pytest.raises(ConfigurationError, match="give a Consumer or an AsyncConsumer"):
                call(wrong)
    with pytest.raises(ConfigurationError, match=r"surround\(consumer, 3\): give a function"):
        surround(consumer, 3)  # type: ignore[arg-type] # that is the mistake
    with pytest.raises(ConfigurationError, match=r"on\('polled', 3\): give a function"):
        consumer.on("polled", 3)
    for call in (attempt_of, seconds_waited):
        with pytest.raises(StatementError, match=r"\('text'\): give a job"):
            call("text")


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
