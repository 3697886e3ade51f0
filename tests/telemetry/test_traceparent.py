"""The opt-in attribute ``traceparent``: each way to insert a job stores the trace of its transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique, claim, copy_in, enqueue, queue_column, requeue, retry
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.roles import current_traceparent
from tests.servers import Database

TRACED = {"traceparent": "traceparent"}
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(columns=TRACED, unique=Unique("to"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


class Message(QueueMixin, Base):
    __tablename__ = "message"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, columns=TRACED)

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


class Own(QueueMixin, Base):
    __tablename__ = "own"
    __queue__ = QueueConfig(columns={"traceparent": "trace"})

    id: Mapped[int] = mapped_column(primary_key=True)
    trace: Mapped[str | None] = mapped_column(sa.Text, default=lambda: GIVEN)


class Field(MappedAsDataclass, DeclarativeBase):
    pass


class AsField(QueueMixin, Field):
    __tablename__ = "field"
    __queue__ = QueueConfig(columns=TRACED)

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    to: Mapped[str]


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url("psycopg"))
    for base in (Base, Field):
        base.metadata.create_all(engine)
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
    for model in (Email, Message):
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
        enqueue(session, Email(to="a"), on_twin="replace")
    assert _stored(session) == {span}


@pytest.mark.everywhere
def test_migrations_find_no_change(engine: sa.Engine) -> None:
    """Also with ``compare_server_default``: the server prints the default as the model has it."""
    options = {"compare_server_default": True, "compare_type": True, "include_object": _is_email}
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []


def _is_email(element: Any, name: str, kind: str, *_: Any) -> bool:
    return kind != "table" or name == "email"


@pytest.mark.parametrize("type_", [sa.Integer(), sa.String(20), sa.LargeBinary()], ids=repr)
def test_a_column_that_cannot_store_it_is_refused(type_: Any) -> None:
    class Other(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Wrong\.trace: the role 'traceparent' stores texts of 55 characters"):

        class Wrong(QueueMixin, Other):
            __tablename__ = "wrong"
            __queue__ = QueueConfig(columns={"traceparent": "trace"})

            id: Mapped[int] = mapped_column(primary_key=True)
            trace: Mapped[Any] = mapped_column(type_)


def test_queues_have_it_only_if_it_is_named() -> None:
    class Plain(QueueMixin, Base):
        __tablename__ = "plain"

        id: Mapped[int] = mapped_column(primary_key=True)

    class Declared(QueueMixin, Base):
        __tablename__ = "declared"

        id: Mapped[int] = mapped_column(primary_key=True)
        trace: Mapped[str | None] = queue_column("traceparent")

    assert "traceparent" not in Plain.__table__.c
    column = spec_of(Declared).columns["traceparent"]
    assert column.name == "trace"
    assert column.server_default is not None
    assert column.default is not None
