"""An engine that is not prepared is refused by every entry point, with the line that is missing."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import (
    AsyncConsumer,
    AsyncScheduler,
    Consumer,
    QueueConfig,
    QueueMixin,
    Schedule,
    Scheduler,
    Unique,
    async_copy_in,
    async_enqueue,
    async_wait,
    cancel,
    claim,
    complete,
    consumers,
    copy_in,
    enqueue,
    extend,
    fail,
    is_paused,
    pause,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    resume,
    retry,
    wait,
)
from sqlaqueue.admin import AsyncQueueAdmin, AsyncScheduleAdmin, QueueAdmin, ScheduleAdmin, doctor
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.testing import async_drain, crash, drain, enqueued, fire_schedules, run_job, travel

# It compiles the types of PostgreSQL before it comes to what refuses the statement.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:Datatype .* does not support CAST")]


class Base(DeclarativeBase):
    pass


class Plain(QueueMixin, Base):
    __tablename__ = "plain"

    id: Mapped[int] = mapped_column(primary_key=True)


class Single(QueueMixin, Base):
    __tablename__ = "single"
    __queue__ = QueueConfig(unique=Unique("number"))

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


HOURLY = Schedule("hourly", Plain, every=3600)


def handle(session: Session, job: Any) -> None:
    pytest.fail("a handler was called")


async def handle_async(session: AsyncSession, job: Any) -> None:
    pytest.fail("a handler was called")


@pytest.fixture
def unprepared(place: str) -> Iterator[sa.Engine]:
    """An engine on a database that has all tables, with one claimed job."""
    prepared = sqlaqueue.prepare(sa.create_engine(place))
    Base.metadata.create_all(prepared)
    with Session(prepared) as session:
        session.add(Plain(id=1))
        session.commit()
    prepared.dispose()
    engine = sa.create_engine(place)
    yield engine
    engine.dispose()


def claimed(session: Session) -> Plain:
    """Return a job that a prepared engine has claimed, in a session of the other one."""
    prepared = sqlaqueue.prepare(sa.create_engine(session.get_bind().engine.url))
    with Session(prepared, expire_on_commit=False) as own:
        (job,) = own.scalars(claim(Plain, 1))
        own.commit()
    prepared.dispose()
    return job


def stored(session: Session) -> Plain:
    return session.scalars(sa.select(Plain)).one()


def factory(session: Session) -> sessionmaker[Session]:
    return sessionmaker(session.get_bind().engine)


Call = Callable[[Session], object]
CALLS: dict[str, Call] = {
    "create_all": lambda session: Base.metadata.create_all(session.connection(), checkfirst=False),
    "Table.create": lambda session: Plain.__table__.create(session.connection()),
    "create the table of schedules": lambda session: Base.metadata.tables["sqlaqueue_schedule"].create(
        session.connection()
    ),
    "enqueue": lambda session: enqueue(session, Plain()),
    "enqueue a unique job": lambda session: enqueue(session, Single(number=1)),
    "copy_in": lambda session: copy_in(session, Plain, [{"id": 1}]),
    "claim": lambda session: session.execute(claim(Plain, 1)),
    "complete": lambda session: session.execute(complete(claimed(session))),
    "retry": lambda session: session.execute(retry(claimed(session))),
    "fail": lambda session: session.execute(fail(claimed(session))),
    "release": lambda session: session.execute(release(claimed(session))),
    "extend": lambda session: session.execute(extend(claimed(session))),
    "cancel": lambda session: session.execute(cancel(Plain)),
    "requeue": lambda session: session.execute(requeue(Plain)),
    "purge": lambda session: session.execute(purge(Plain)),
    "rescue": lambda session: session.execute(rescue(Plain)),
    "reconcile": lambda session: session.execute(reconcile(Plain)),
    "pause": lambda session: session.execute(pause(Plain)),
    "resume": lambda session: session.execute(resume(Plain)),
    "is_paused": lambda session: session.scalar(is_paused(Plain)),
    "consumers": lambda session: session.execute(consumers(Plain)),
    "wait": lambda session: wait(factory(session), Plain, 1, timeout=5),
    "Consumer.run": lambda session: Consumer(Plain, handle, factory(session)).run(),
    "Consumer.drain": lambda session: Consumer(Plain, handle, factory(session)).drain(),
    "Consumer with schedules": lambda session: Consumer(Plain, handle, factory(session), schedules=[HOURLY]).run(),
    "Scheduler.run": lambda session: Scheduler(factory(session), [HOURLY]).run(),
    "QueueAdmin": lambda session: QueueAdmin(session, Plain),
    "ScheduleAdmin": lambda session: ScheduleAdmin(session, Plain),
    "doctor": lambda session: doctor(session, Plain),
    "testing.drain": lambda session: drain(session, Plain, handle),
    "testing.run_job": lambda session: run_job(session, stored(session), handle),
    "testing.crash": lambda session: crash(session, stored(session)),
    "testing.enqueued": lambda session: enqueued(session, Plain),
    "testing.travel": lambda session: travel(session, 60),
    "testing.fire_schedules": lambda session: fire_schedules(session, [HOURLY]),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_with_the_line_that_is_missing(unprepared: sa.Engine, name: str) -> None:
    said = rf"is for {unprepared.dialect.name}, and is not prepared; use engine = sqlaqueue\.prepare\(create_engine\("
    with Session(unprepared) as session, pytest.raises(ConfigurationError, match=said):
        CALLS[name](session)


AsyncCall = Callable[[AsyncSession, async_sessionmaker[AsyncSession]], Any]


async def run_sync(session: AsyncSession, function: Callable[[Session], object]) -> None:
    await session.run_sync(function)


async def admin(session: AsyncSession, kind: Any) -> None:
    kind(session, Plain)


ASYNC_CALLS: dict[str, AsyncCall] = {
    "create_all": lambda session, _: run_sync(session, CALLS["create_all"]),
    "async_enqueue": lambda session, _: async_enqueue(session, Plain()),
    "async_copy_in": lambda session, _: async_copy_in(session, Plain, [{"id": 1}]),
    "claim": lambda session, _: session.execute(claim(Plain, 1)),
    "pause": lambda session, _: session.execute(pause(Plain)),
    "async_wait": lambda _, sessions: async_wait(sessions, Plain, 1, timeout=5),
    "AsyncConsumer.run": lambda _, sessions: AsyncConsumer(Plain, handle_async, sessions).run(),
    "AsyncScheduler.run": lambda _, sessions: AsyncScheduler(sessions, [HOURLY]).run(),
    "AsyncQueueAdmin": lambda session, _: admin(session, AsyncQueueAdmin),
    "AsyncScheduleAdmin": lambda session, _: admin(session, AsyncScheduleAdmin),
    "testing.async_drain": lambda session, _: async_drain(session, Plain, handle_async),
}
DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+asyncmy"}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ASYNC_CALLS)
def test_an_async_engine_is_refused_with_its_own_line(unprepared: sa.Engine, name: str) -> None:
    said = r"is not prepared; use engine = sqlaqueue\.prepare\(create_async_engine\("

    async def call() -> None:
        engine = create_async_engine(unprepared.url.set(drivername=DRIVERS[unprepared.dialect.name]))
        sessions = async_sessionmaker(engine)
        try:
            async with sessions() as session:
                with pytest.raises(ConfigurationError, match=said):
                    await ASYNC_CALLS[name](session, sessions)
        finally:
            await engine.dispose()

    asyncio.run(call())
