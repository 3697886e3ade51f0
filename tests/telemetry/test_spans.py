"""Traces, by OpenTelemetry's conventions: the spans of jobs, and the attribute ``traceparent`` that stores theirs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    Cancel,
    Consumer,
    Fail,
    QueueConfig,
    QueueMixin,
    Retry,
    Snooze,
    Unique,
    claim,
    copy_in,
    enqueue,
    queue_column,
    requeue,
    retry,
)
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.otel import instrument, instrument_sessions
from sqlaqueue.queue.roles import current_traceparent
from tests.servers import Database
from tests.telemetry.conftest import MODELS, TRACED, Held, Leased, Message, Recorded, Sessions


def enqueue_in_span(sessions: Any, recorded: Recorded, model: Any, number: int = 1) -> ReadableSpan:
    """Enqueue jobs in a span, and return it."""
    tracer = recorded.tracer_provider.get_tracer("application")
    with tracer.start_as_current_span("request") as span, sessions() as session:
        session.add_all([model(text=f"{n}") for n in range(number)])
        session.commit()
    return span  # type: ignore[return-value] # the SDK's spans are readable


def trace_id(span: Any) -> int:
    return int(span.get_span_context().trace_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def instrumented(consumer: Any, recorded: Recorded) -> Any:
    instrument(consumer, **recorded.providers)
    return consumer


def fail_once(seen: list[int]) -> Any:
    def handler(session: Session, job: Any) -> None:
        seen.append(trace_id(trace.get_current_span()))
        if len(seen) == 1:
            msg = "the mail server does not answer"
            raise ConnectionError(msg)

    return handler


@pytest.mark.parametrize("model", MODELS)
def test_enqueueing_failure_retry_and_success_are_one_trace(sessions: Sessions, recorded: Recorded, model: Any) -> None:
    request, seen = enqueue_in_span(sessions, recorded, model), list[int]()
    consumer = instrumented(Consumer(model, fail_once(seen), sessions, concurrency=1), recorded)
    assert consumer.drain() == 2
    queue = model.__tablename__
    first, second = recorded.spans(f"process {queue}")
    [retried], [completed] = recorded.spans(f"retry {queue}"), recorded.spans(f"complete {queue}")
    for span in (first, second, retried, completed):
        assert trace_id(span) == trace_id(request)
    assert seen == [trace_id(request)] * 2, "the handler's own spans belong to it as well"
    assert parent_of(first) == parent_of(second) == request.get_span_context().span_id
    assert [link.context.span_id for link in first.links] == [request.get_span_context().span_id]
    assert parent_of(retried) == first.get_span_context().span_id
    assert parent_of(completed) == second.get_span_context().span_id
    assert (first.kind, retried.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT)
    assert dict(first.attributes) == {
        "messaging.system": "sqlaqueue",
        "messaging.destination.name": queue,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": "1",
        "sqlaqueue.attempt": 1,
        "sqlaqueue.max_attempts": 3,
        "error.type": "ConnectionError",
    }
    assert first.status.status_code is StatusCode.ERROR
    assert first.events[0].attributes["exception.message"] == "the mail server does not answer"
    assert second.status.is_ok
    assert second.attributes["sqlaqueue.attempt"] == 2
    assert retried.attributes["messaging.operation.type"] == "settle"
    assert retried.attributes["error.type"] == "ConnectionError"
    assert retried.attributes["messaging.operation.name"] == "retry"
    assert retried.start_time >= first.end_time - 5_000_000


@pytest.mark.parametrize("model", MODELS)
def test_claims_have_a_span_of_their_own_and_empty_polls_have_none(
    sessions: Sessions, recorded: Recorded, model: Any
) -> None:
    requests = [enqueue_in_span(sessions, recorded, model) for _ in range(3)]
    consumer = Consumer(model, lambda session, job: None, sessions)
    polls: list[Any] = []
    consumer.on("polled", polls.append)
    instrumented(consumer, recorded).drain()
    received = recorded.spans(f"receive {model.__tablename__}")
    assert sum(span.attributes["messaging.batch.message_count"] for span in received) == 3
    assert len(received) == sum(bool(poll.jobs) for poll in polls) < len(polls)
    assert {link.context.trace_id for span in received for link in span.links} == {*map(trace_id, requests)}
    assert all(span.parent is None and span.kind is SpanKind.CLIENT for span in received)


def test_a_batch_has_links_instead_of_a_parent(sessions: Sessions, recorded: Recorded) -> None:
    requests = [enqueue_in_span(sessions, recorded, Leased) for _ in range(3)]
    with sessions.begin() as session:
        session.add(Leased())
    consumer = Consumer(Leased, lambda session, jobs: None, sessions, batch=True, batch_size=10)
    instrumented(consumer, recorded).drain()
    [span] = recorded.spans("process leased")
    assert span.parent is None
    assert {link.context.trace_id for link in span.links} == {*map(trace_id, requests)}
    assert span.attributes["messaging.batch.message_count"] == 4
    assert len(recorded.spans("complete leased")) == 4


def test_a_job_without_a_trace_begins_one(sessions: Sessions, recorded: Recorded) -> None:
    """Also in a program that starts its Consumer within a span, which would never end otherwise."""
    with sessions.begin() as session:
        session.add_all([Leased(), Leased(traceparent="no trace")])
    consumer = instrumented(Consumer(Leased, lambda session, job: None, sessions), recorded)
    with recorded.tracer_provider.get_tracer("application").start_as_current_span("startup") as startup:
        consumer.drain()
    spans = recorded.spans("process leased")
    assert [span.parent for span in spans] == [None, None]
    assert trace_id(startup) not in {trace_id(span) for span in spans}


@pytest.mark.parametrize(
    ("error", "operation", "error_type"),
    [
        (Snooze(60), "release", None),
        (Cancel("no longer wanted"), "cancel", None),
        (Fail("no stock", kind="no_stock"), "fail", "no_stock"),
        (Retry(60, error="busy"), "retry", "Retry"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_signals(
    sessions: Sessions, recorded: Recorded, error: Exception, operation: str, error_type: str | None
) -> None:
    def handler(session: Session, job: Any) -> None:
        raise error

    enqueue_in_span(sessions, recorded, Leased)
    instrumented(Consumer(Leased, handler, sessions), recorded).drain()
    [span], [settled] = recorded.spans("process leased"), recorded.spans(f"{operation} leased")
    assert span.attributes.get("error.type") == settled.attributes.get("error.type") == error_type
    assert span.status.status_code is (StatusCode.UNSET if error_type is None else StatusCode.ERROR)


def test_an_error_of_the_commit_is_in_the_span_of_the_settlement(sessions: Sessions, recorded: Recorded) -> None:
    def handler(session: Session, job: Any) -> None:
        session.add(Held(id=1))

    enqueue_in_span(sessions, recorded, Leased)
    enqueue_in_span(sessions, recorded, Held)
    instrumented(Consumer(Leased, handler, sessions, retry=lambda attempt, error: None), recorded).drain()
    [span], [settled] = recorded.spans("process leased"), recorded.spans("fail leased")
    assert span.status.is_ok
    assert settled.attributes["error.type"] == "IntegrityError"


async def test_async_consumers(database: Database, sessions: Sessions, recorded: Recorded) -> None:
    engine = create_async_engine(database.url("asyncpg"))
    factory = async_sessionmaker(engine)
    instrument_sessions(factory, **recorded.providers)
    tracer = recorded.tracer_provider.get_tracer("application")
    with tracer.start_as_current_span("request") as request:
        async with factory() as session:
            session.add(Leased(text="a"))
            await session.commit()
    seen: list[int] = []

    async def handler(session: Any, job: Any) -> None:
        seen.append(trace_id(trace.get_current_span()))
        if len(seen) == 1:
            raise ConnectionError

    with tracer.start_as_current_span("startup"):
        await instrumented(AsyncConsumer(Leased, handler, factory), recorded).drain()
    await engine.dispose()
    assert seen == [trace_id(request)] * 2
    [sent], [first, second] = recorded.spans("send leased"), recorded.spans("process leased")
    assert parent_of(sent) == request.get_span_context().span_id
    assert parent_of(first) == parent_of(second) == sent.get_span_context().span_id
    assert [span.name for span in recorded.spans() if trace_id(span) == trace_id(request)] == [
        "request",
        "send leased",
        "process leased",
        "retry leased",
        "process leased",
        "complete leased",
    ]


def test_a_flush_sends_in_a_span_for_each_queue(sessions: Sessions, recorded: Recorded) -> None:
    for _ in range(2):
        instrument_sessions(sessions, **recorded.providers)
    request = enqueue_in_span(sessions, recorded, Leased, 3)
    [sent] = recorded.spans("send leased")
    assert parent_of(sent) == request.get_span_context().span_id
    assert sent.kind is SpanKind.PRODUCER
    assert sent.attributes["messaging.batch.message_count"] == 3
    with sessions() as session:
        [traceparent] = session.scalars(sa.select(Leased.traceparent).distinct())
        assert traceparent.split("-")[2] == f"{sent.get_span_context().span_id:016x}"
        session.execute(sa.insert(Leased), [{"text": f"{n}"} for n in range(5)])
        copy_in(session, Leased, [{"text": "copied"}])
        bulk = recorded.spans("send leased")[1]
        found = session.scalars(sa.select(Leased.traceparent).where(Leased.id > 3, Leased.text != "copied").distinct())
        assert [each.split("-")[2] for each in found] == [f"{bulk.get_span_context().span_id:016x}"]
    assert recorded.total("messaging.client.sent.messages") == 8
    with Session(sessions.kw["bind"]) as other:
        other.add(Leased())
        other.flush()
    assert len(recorded.spans("send leased")) == 2, "other sessions are not instrumented"


@pytest.mark.parametrize("model", [Leased, Held])
@pytest.mark.parametrize("sends", [False, True])
def test_what_a_handler_adds_belongs_to_its_attempt(
    sessions: Sessions, recorded: Recorded, model: Any, *, sends: bool
) -> None:
    """It is flushed when the run is settled, after the span of the handler's call."""
    if sends:
        instrument_sessions(sessions, **recorded.providers)
    request = enqueue_in_span(sessions, recorded, model)

    def handler(session: Session, job: Any) -> None:
        session.add(Message(text="follows"))

    instrumented(Consumer(model, handler, sessions), recorded).drain()
    [call] = recorded.spans(f"process {model.__tablename__}")
    parent = call
    if sends:
        [parent] = recorded.spans("send message")
        assert parent_of(parent) == call.get_span_context().span_id
    with sessions() as session:
        traceparent = session.scalars(sa.select(Message.traceparent)).one()
    assert traceparent.split("-")[1:3] == [f"{trace_id(request):032x}", f"{parent.get_span_context().span_id:016x}"]


def test_a_failed_flush_ends_its_span(sessions: Sessions, recorded: Recorded) -> None:
    instrument_sessions(sessions, **recorded.providers)
    enqueue_in_span(sessions, recorded, Leased)
    with sessions() as session:
        session.add(Leased(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        session.rollback()
        with pytest.raises(sa.exc.IntegrityError):
            session.execute(sa.insert(Leased), [{"id": 1}])
    first, *failed = recorded.spans("send leased")
    assert first.status.is_ok
    assert [span.status.status_code for span in failed] == [StatusCode.ERROR] * 2
    assert recorded.total("messaging.client.sent.messages") == 1


@pytest.mark.parametrize("place", ["on_start", "on_end"])
def test_a_span_processor_that_raises_fails_no_flush(
    sessions: Sessions, recorded: Recorded, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(place)

    recorded.tracer_provider.add_span_processor(type("Broken", (SpanProcessor,), {place: broken})())
    instrument_sessions(sessions, **recorded.providers)
    with sessions() as session:
        session.add(Leased(id=1))
        session.commit()
        session.execute(sa.insert(Leased), [{"id": 2}, {"id": 3}])
        session.commit()
        with pytest.raises(sa.exc.IntegrityError):
            session.execute(sa.insert(Leased), [{"id": 1}])
        session.rollback()
        assert session.scalar(sa.select(sa.func.count()).select_from(Leased)) == 3
    failed = [record for record in caplog.records if record.event == "telemetry_failed"]
    assert [(record.error_kind, record.queue) for record in failed] == [("RuntimeError", "leased")] * 3


def test_jobs_of_a_failed_flush_belong_to_the_next_one(sessions: Sessions, recorded: Recorded) -> None:
    instrument_sessions(sessions, **recorded.providers)
    enqueue_in_span(sessions, recorded, Leased)
    with sessions() as session:
        job = Leased(id=1)
        session.add(job)
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        session.rollback()
        job.id = 2
        session.add(job)
        session.flush()
        _, failed, sent = recorded.spans("send leased")
        assert job.traceparent.split("-")[2] == f"{sent.get_span_context().span_id:016x}"
        assert failed.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("first", ["class", "factory"])
def test_a_class_and_a_factory_of_it_make_one_span(sessions: Sessions, recorded: Recorded, first: str) -> None:
    class Own(Session):
        pass

    factory = sessionmaker(sessions.kw["bind"], class_=Own)
    for each in (Own, factory) if first == "class" else (factory, Own):
        instrument_sessions(each, **recorded.providers)
    enqueue_in_span(factory, recorded, Leased)
    with Own(sessions.kw["bind"]) as session:
        session.execute(sa.insert(Leased), [{"text": "a"}, {"text": "b"}])
        session.commit()
    assert [span.status.is_ok for span in recorded.spans("send leased")] == [True, True]
    assert recorded.total("messaging.client.sent.messages") == 3


SENT: dict[str, tuple[Any, Any, int]] = {
    "values": (sa.insert(Leased).values([{"text": "a"}, {"text": "b"}]), None, 2),
    "values, returning": (sa.insert(Leased).values([{"text": "a"}, {"text": "b"}]).returning(Leased.id), None, 2),
    "select": (sa.insert(Leased).from_select(["text"], sa.select(Held.text)), None, 3),
    "on conflict": (insert(Leased).values([{"id": -1}, {"id": -2}]).on_conflict_do_nothing(), None, 1),
    "on conflict, bulk": (insert(Leased).on_conflict_do_nothing().returning(Leased.id), [{"id": -1}, {"id": -2}], 1),
    "nothing": (insert(Leased).values(id=-1).on_conflict_do_nothing(), None, 0),
    "many": (sa.insert(Leased).returning(Leased.id), [{"text": f"{n}"} for n in range(1200)], 1200),
    "one": (sa.insert(Leased).values(text="a"), None, 1),
}


@pytest.mark.parametrize("statement", SENT)
async def test_an_insert_counts_its_rows(
    database: Database, sessions: Sessions, recorded: Recorded, statement: str
) -> None:
    given, parameters, number = SENT[statement]
    with sessions.begin() as session:
        session.add_all([Leased(id=-1), *(Held() for _ in range(3))])
    engine = create_async_engine(database.url("asyncpg"))
    asynchronous = async_sessionmaker(engine)
    for factory in (sessions, asynchronous):
        instrument_sessions(factory, **recorded.providers)
    with sessions() as session:
        session.execute(given, parameters)
    assert recorded.total("messaging.client.sent.messages") == number
    async with asynchronous() as other:
        await other.execute(given, parameters)
    await engine.dispose()
    assert recorded.total("messaging.client.sent.messages") == 2 * number
    for span in recorded.spans("send leased"):
        assert span.attributes.get("messaging.batch.message_count", 1) == number


def test_a_flush_that_a_listener_gives_up_counts_nothing(sessions: Sessions, recorded: Recorded) -> None:
    instrument_sessions(sessions, **recorded.providers)

    def give_up(*_: Any) -> None:
        raise RuntimeError

    with sessions() as session:
        sa.event.listen(session, "before_flush", give_up)
        session.add(Leased())
        with pytest.raises(RuntimeError):
            session.flush()
        sa.event.remove(session, "before_flush", give_up)
        session.flush()
    assert recorded.total("messaging.client.sent.messages") == 1


def test_only_sessions_are_instrumented() -> None:
    with pytest.raises(ConfigurationError, match="give a sessionmaker, an async_sessionmaker, or a subclass"):
        instrument_sessions(sa.create_engine("postgresql+psycopg://"))


# -- the opt-in attribute ``traceparent``: each way to insert a job stores the trace of its transaction ------------

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traced(DeclarativeBase):
    pass


class Email(QueueMixin, Traced):
    __tablename__ = "email"
    __queue__ = QueueConfig(extra_columns=TRACED, unique=Unique("to"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


class Letter(QueueMixin, Traced):
    __tablename__ = "letter"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, extra_columns=TRACED)

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


class Own(QueueMixin, Traced):
    __tablename__ = "own"
    __queue__ = QueueConfig(extra_columns=("traceparent",), columns={"traceparent": "trace"})

    id: Mapped[int] = mapped_column(primary_key=True)
    trace: Mapped[str | None] = mapped_column(sa.Text, default=lambda: GIVEN)


class Field(MappedAsDataclass, DeclarativeBase):
    pass


class AsField(QueueMixin, Field):
    __tablename__ = "field"
    __queue__ = QueueConfig(extra_columns=TRACED)

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    to: Mapped[str]


@pytest.fixture(scope="module")
def template(template: Database) -> Database:
    """The same, with the tables of these queues."""
    engine = sa.create_engine(template.url(), poolclass=sa.NullPool)
    for base in (Traced, Field):
        base.metadata.create_all(engine)
    return template


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def span() -> Iterator[str]:
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        context = span.get_span_context()
        yield f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _stored(session: Session, model: Any = Email) -> set[str | None]:
    return set(session.scalars(sa.select(model.traceparent)))


INSERTS: dict[str, Callable[[Session], object]] = {
    "one instance": lambda session: session.add(Email(to="a")),
    "instances": lambda session: session.add_all([Email(to=f"{n}") for n in range(5)]),
    "instances with keys": lambda session: session.add_all([Email(id=n, to=f"{n}") for n in range(5)]),
    "bulk": lambda session: session.execute(sa.insert(Email), [{"to": f"{n}"} for n in range(5)]),
    "bulk, returning": lambda session: session.scalars(
        sa.insert(Email).returning(Email), [{"to": f"{n}"} for n in range(5)]
    ).all(),
    "values": lambda session: session.execute(sa.insert(Email).values([{"to": "a"}, {"to": "b"}])),
    "select": lambda session: session.execute(
        sa.insert(Email).from_select(["to"], sa.select(sa.literal("a").label("to")))
    ),
    "core": lambda session: session.connection().execute(sa.insert(Email.__table__), [{"to": "a"}, {"to": "b"}]),
    "copy_in": lambda session: copy_in(session, Email, [{"to": f"{n}"} for n in range(5)]),
    "enqueue": lambda session: enqueue(session, [Email(to=f"{n}") for n in range(5)]),
}


@pytest.mark.parametrize("insert", INSERTS)
def test_it_is_the_current_span(session: Session, insert: str, span: str) -> None:
    INSERTS[insert](session)
    session.flush()
    assert _stored(session) == {span}


@pytest.mark.parametrize("insert", INSERTS)
def test_it_is_the_setting_without_a_span(session: Session, insert: str) -> None:
    session.execute(sa.text(f"SET LOCAL sqlaqueue.traceparent = '{GIVEN}'"))
    INSERTS[insert](session)
    session.flush()
    assert _stored(session) == {GIVEN}


@pytest.mark.parametrize("insert", INSERTS)
def test_it_is_null_without_either(session: Session, insert: str) -> None:
    """Also after a transaction with a setting, when the setting of the session is an empty text."""
    session.execute(sa.text(f"SET LOCAL sqlaqueue.traceparent = '{GIVEN}'"))
    session.rollback()
    INSERTS[insert](session)
    session.flush()
    assert _stored(session) == {None}


def test_each_execution_has_its_own(session: Session) -> None:
    """The statement is cached with its function, not with the value of the first execution."""
    tracer, expected = TracerProvider().get_tracer("test"), set()
    for number in range(3):
        with tracer.start_as_current_span("request"):
            expected.add(current_traceparent())
            session.add(Email(to=f"{number}"))
            session.flush()
    assert len(expected) == 3
    assert _stored(session) == expected


def test_plain_sql_and_copy_take_the_setting(database: Database, session: Session) -> None:
    with psycopg.connect(database.dsn) as connection, connection.transaction():
        connection.execute(f"SET LOCAL sqlaqueue.traceparent = '{GIVEN}'")
        connection.execute("INSERT INTO email (\"to\") VALUES ('a'), ('b')")
        with connection.cursor().copy('COPY email ("to") FROM STDIN') as copy:
            copy.write_row(["c"])
    assert _stored(session) == {GIVEN}
    assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 3


async def test_async_sessions(database: Database, engine: sa.Engine, span: str) -> None:
    async_engine = create_async_engine(database.url("asyncpg"))
    async with AsyncSession(async_engine) as session:
        session.add_all([Email(to=f"{number}") for number in range(3)])
        await session.flush()
        assert set(await session.scalars(sa.select(Email.traceparent))) == {span}
    await async_engine.dispose()


def test_dataclasses(session: Session, span: str) -> None:
    assert "traceparent" in {field.name for field in dataclasses.fields(AsField)}
    session.add_all([AsField(to="a"), AsField(to="b", traceparent=GIVEN)])
    session.flush()
    assert _stored(session, AsField) == {span, GIVEN}


def test_a_given_value_is_kept(session: Session, span: str) -> None:
    session.add(Email(to="a", traceparent=GIVEN))
    session.flush()
    assert _stored(session) == {GIVEN}


def test_copy_in_keeps_a_default_of_its_own(session: Session, span: str) -> None:
    copy_in(session, Own, [{}, {}])
    copy_in(session, Own, [{"trace": span}])
    assert sorted(session.scalars(sa.select(Own.trace))) == sorted([GIVEN, GIVEN, span])


def test_the_run_has_it_and_retries_keep_it(engine: sa.Engine, span: str) -> None:
    for model in (Email, Letter):
        with Session(engine) as session:
            session.add(model(to="a"))
            session.commit()
            [job] = session.scalars(claim(model, 1))
            assert run_of(job).traceparent == span
            session.execute(retry(job))
            session.commit()
            [job] = session.scalars(claim(model, 1))
            assert run_of(job).traceparent == span
            session.rollback()


def test_a_requeued_job_keeps_it(session: Session, span: str) -> None:
    session.add(Email(to="a", status="failed"))
    session.flush()
    session.execute(requeue(sa.select(Email)))
    assert _stored(session) == {span}


def test_a_replaced_job_keeps_its_trace(session: Session, span: str) -> None:
    enqueue(session, Email(to="a"))
    with trace.use_span(trace.INVALID_SPAN):
        enqueue(session, Email(to="a"), on_duplicate="replace")
    assert _stored(session) == {span}


@pytest.mark.everywhere
def test_migrations_find_no_change(engine: sa.Engine) -> None:
    """Also with ``compare_server_default``: the server prints the default as the model has it."""
    options = {"compare_server_default": True, "compare_type": True, "include_object": _is_email}
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Traced.metadata) == []


def _is_email(element: Any, name: str, kind: str, *_: Any) -> bool:
    return kind != "table" or name == "email"


@pytest.mark.parametrize("type_", [sa.Integer(), sa.String(20), sa.LargeBinary()], ids=repr)
def test_a_column_that_cannot_store_it_is_refused(type_: Any) -> None:
    class Other(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Wrong\.trace: the role 'traceparent' stores texts of 55 characters"):

        class Wrong(QueueMixin, Other):
            __tablename__ = "wrong"
            __queue__ = QueueConfig(extra_columns=("traceparent",), columns={"traceparent": "trace"})

            id: Mapped[int] = mapped_column(primary_key=True)
            trace: Mapped[Any] = mapped_column(type_)


def test_queues_have_it_only_if_it_is_named() -> None:
    class Plain(QueueMixin, Traced):
        __tablename__ = "plain"

        id: Mapped[int] = mapped_column(primary_key=True)

    class Declared(QueueMixin, Traced):
        __tablename__ = "declared"

        id: Mapped[int] = mapped_column(primary_key=True)
        trace: Mapped[str | None] = queue_column("traceparent")

    assert "traceparent" not in Plain.__table__.c
    column = spec_of(Declared).columns["traceparent"]
    assert column.name == "trace"
    assert column.server_default is not None
    assert column.default is not None
