"""The metrics of a Consumer, for OpenTelemetry and Prometheus, and the events and notes of which telemetry is made."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import SpanProcessor
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import AsyncConsumer, Consumer, JobEvent, Snooze
from sqlaqueue.consumer import pace
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.otel import instrument
from sqlaqueue.prometheus import instrument as instrument_for_prometheus
from sqlaqueue.telemetry import PollEvent, attempt_of, note, seconds_waited, surround
from tests.programs import wait_until
from tests.servers import Database
from tests.telemetry.conftest import MODELS, Held, Leased, Message, Recorded, Sessions, add, behave


@pytest.mark.parametrize("model", MODELS)
def test_what_a_consumer_did(sessions: Sessions, recorded: Recorded, model: Any) -> None:
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


def test_rescues_and_lost_leases(sessions: Sessions, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    add(sessions, Leased, "slow")
    calls: list[int] = []

    def status() -> Any:
        with sessions() as session:
            return session.scalar(sa.select(Leased.status))

    def lose_the_lease(session: Session, job: Any) -> None:
        calls.append(job.id)
        if len(calls) == 1:
            with sessions.begin() as other:
                other.execute(sa.update(Leased).values(lease_expires_at=sa.func.now()))
            # Not for "pending": the other worker claims it at once.
            wait_until(lambda: len(calls) == 2)

    consumer = Consumer(Leased, lose_the_lease, sessions, concurrency=2)
    instrument(consumer, **recorded.providers)
    with consumer:
        wait_until(lambda: status() == "completed")
    assert recorded.total("sqlaqueue.jobs.rescued") == 1
    assert recorded.total("sqlaqueue.leases.lost") == 1
    [lost] = recorded.spans("settle leased")
    assert lost.attributes["error.type"] == "LeaseLost"


@pytest.mark.parametrize("model", MODELS)
def test_notes_reach_the_events_of_their_attempt(sessions: Sessions, model: Any) -> None:
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


@pytest.mark.parametrize("manager", [broken_before, contextmanager(broken_before), broken_after])
@pytest.mark.parametrize("api", ["sync", "async"])
def test_telemetry_that_raises_costs_no_attempt(
    database: Database, sessions: Sessions, caplog: pytest.LogCaptureFixture, manager: Any, api: str
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


def test_a_span_processor_that_raises_costs_no_attempt(sessions: Sessions, recorded: Recorded) -> None:
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


def test_a_manager_may_postpone_a_job(sessions: Sessions) -> None:
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
    sessions: Sessions, recorded: Recorded, model: Any
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
def test_jobs_of_a_failed_batch_have_waited_once(sessions: Sessions, recorded: Recorded, model: Any) -> None:
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


def test_a_batch_is_noted_as_a_whole(sessions: Sessions) -> None:
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


def test_wrong_arguments(sessions: Sessions) -> None:
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
def test_each_poll_has_an_event(sessions: Sessions, model: Any) -> None:
    add(sessions, model, "a", "b", "c")
    polls: list[PollEvent] = []
    consumer = Consumer(model, behave, sessions)
    consumer.on("polled", polls.append)
    consumer.drain()
    assert sum(poll.jobs for poll in polls) == 3
    assert polls[-1].jobs == 0
    assert {poll.queue for poll in polls} == {model.__tablename__}
    assert all(poll.duration > 0 for poll in polls)


def test_added_middleware_is_outermost_and_checked(sessions: Sessions) -> None:
    add(sessions, Leased, "a")
    seen: list[str] = []

    def named(name: str) -> Any:
        def middleware(job: Any, call: Any) -> None:
            seen.append(name)
            call()

        return middleware

    consumer = Consumer(Leased, behave, sessions, middleware=[named("given")])
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


# -- the metrics of workers for Prometheus --------------------------------------------------------------------------


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return the samples of a metric by its labels other than the queue."""
    return {
        ",".join(value for label, value in sample.labels.items() if label != "queue"): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


EXPECTED = {"completed": 2, "retried": 2, "failed": 1, "cancelled": 0, "released": 1}


@pytest.mark.parametrize("model", MODELS)
def test_what_prometheus_is_told_of_a_consumer(sessions: Sessions, model: Any) -> None:
    registry = CollectorRegistry()
    consumer = Consumer(model, behave, sessions)
    instrument_for_prometheus(consumer, registry=registry)
    instrument_for_prometheus(consumer, registry=registry)
    assert values(registry, "sqlaqueue_worker_jobs_total") == dict.fromkeys(EXPECTED, 0), "exported from the start"
    add(sessions, model, "good", "good", "fail", "snooze")
    consumer.drain()
    assert values(registry, "sqlaqueue_worker_jobs_total") == EXPECTED
    assert values(registry, "sqlaqueue_worker_job_duration_seconds_count") == {"": 6}
    assert values(registry, "sqlaqueue_worker_job_wait_seconds_count") == {"": 6}
    assert values(registry, "sqlaqueue_worker_jobs_in_flight") == {"": 0}
    claims = values(registry, "sqlaqueue_worker_claims_total")
    assert claims["found"] >= 1
    assert claims["empty"] >= 1
    assert values(registry, "sqlaqueue_worker_claim_duration_seconds_count") == {"": sum(claims.values())}


async def test_an_async_consumer_and_another_queue_share_a_registry(database: Database, sessions: Sessions) -> None:
    registry, engine = CollectorRegistry(), create_async_engine(database.url("asyncpg"))

    async def handler(session: Any, job: Any) -> None:
        behave(session, job)

    for model in MODELS:
        add(sessions, model, "good", "good", "fail", "snooze")
        consumer = AsyncConsumer(model, handler, async_sessionmaker(engine))
        instrument_for_prometheus(consumer, registry=registry)
        await consumer.drain()
    await engine.dispose()
    text = generate_latest(registry).decode()
    for model in MODELS:
        queue = model.__tablename__
        for outcome, number in EXPECTED.items():
            assert f'sqlaqueue_worker_jobs_total{{outcome="{outcome}",queue="{queue}"}} {number:.1f}\n' in text


def test_a_batch_counts_each_of_its_jobs(sessions: Sessions) -> None:
    registry, seen = CollectorRegistry(), list[float]()
    add(sessions, Leased, *"abc")

    def handler(session: Session, jobs: list[Any]) -> None:
        seen.extend(values(registry, "sqlaqueue_worker_jobs_in_flight").values())

    consumer = Consumer(Leased, handler, sessions, batch=True, batch_size=10)
    instrument_for_prometheus(consumer, registry=registry)
    consumer.drain()
    assert seen == [3]
    assert values(registry, "sqlaqueue_worker_jobs_total")["completed"] == 3
    assert values(registry, "sqlaqueue_worker_job_duration_seconds_count") == {"": 1}
