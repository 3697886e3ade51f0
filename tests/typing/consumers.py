"""Type checks: Consumers and their handlers, waiting, bulk enqueueing, and the functions for tests."""

from datetime import timedelta
from typing import assert_type

from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlmodel import Session as SQLModelSession
from sqlmodel import select as sql_model_select
from sqlmodel.ext.asyncio.session import AsyncSession as AsyncSQLModelSession

from sqlaqueue import (
    AsyncConsumer,
    Consumer,
    Exponential,
    JobEvent,
    JobFailed,
    JobResult,
    QueueConfig,
    Retry,
    async_copy_in,
    async_wait,
    async_wait_all,
    copy_in,
    wait,
    wait_all,
)
from sqlaqueue.testing import (
    RunResult,
    async_crash,
    async_drain,
    async_enqueued,
    async_run_job,
    async_travel,
    async_wait_until,
    check_handlers,
    crash,
    drain,
    enqueued,
    run_job,
    travel,
    wait_until,
)
from tests.typing.queues import Base, Email, User

engine, async_engine = create_engine("postgresql+psycopg://"), create_async_engine("postgresql+asyncpg://")
make_session, make_async_session = sessionmaker(engine), async_sessionmaker(async_engine)


def send(session: Session, email: Email) -> None:
    if not email.to:
        raise Retry(delay=timedelta(minutes=1))


def send_all(session: Session, emails: list[Email]) -> None: ...


def greet(session: Session, user: User) -> None: ...


async def send_async(session: AsyncSession, email: Email) -> None: ...


async def send_all_async(session: AsyncSession, emails: list[Email]) -> None: ...


def policy(attempt: int, error: BaseException) -> float | None:
    return None if isinstance(error, ValueError) else 2.0 * attempt


def handlers_are_checked_against_the_model() -> None:
    Consumer(Email, send, make_session, concurrency=4, retry=Exponential(base=1)).run()
    Consumer(Email, send_all, make_session, batch=True, retry=policy).run()
    Consumer(select(Email).where(Email.to != ""), send, make_session).run()
    Consumer(Email, greet, make_session)  # type: ignore[arg-type] # what the test is about
    Consumer(Email, send_async, make_session)  # type: ignore[misc] # a coroutine function
    Consumer(Email, 3, make_session)  # type: ignore[arg-type] # nothing that can be called
    Consumer(Email, send, make_async_session)  # type: ignore[misc] # sessions of the other kind


def options_are_checked() -> None:
    Consumer(
        Email, send, make_session, lease=timedelta(minutes=5), timeout=30, grace=5.5, worker_name="a", signals=False
    )
    Consumer(Email, send, make_session, concurency=4)  # type: ignore[call-arg] # misspelt
    Consumer(Email, send, make_session, batch_size="10")  # type: ignore[arg-type] # no number
    AsyncConsumer(Email, send_async, make_async_session, retries=3)  # type: ignore[call-arg] # no such option


class Newsletter(Email):
    pass


def send_newsletter(session: Session, newsletter: Newsletter) -> None: ...


def handlers_by_class() -> None:
    Consumer(Email, {Email: send}, make_session, concurrency=4).run()
    Consumer(Email, {Email: send, Newsletter: send_newsletter}, make_session).run()
    Consumer(Email, {Email: send_all}, make_session, batch=True).run()
    Consumer(select(Email), {Email: send}, make_session).run()
    Consumer(Email, {Email: send}, make_async_session)  # type: ignore[misc] # sessions of the other kind
    Consumer.run_all(Consumer(Email, send, make_session), Consumer(User, greet, make_session))
    Consumer.run_all(AsyncConsumer(Email, send_async, make_async_session))  # type: ignore[arg-type] # of the other kind


async def async_handlers_as_well() -> None:
    await AsyncConsumer(Email, send_async, make_async_session, timeout=30).run()
    await AsyncConsumer(Email, send_all_async, make_async_session, batch=True).drain()
    await AsyncConsumer(Email, {Email: send_async}, make_async_session).run()
    await AsyncConsumer.run_all(AsyncConsumer(Email, send_async, make_async_session))
    AsyncConsumer(Email, {Email: send}, make_async_session)  # type: ignore[dict-item] # no coroutine function
    AsyncConsumer(Email, send, make_async_session)  # type: ignore[arg-type] # no coroutine function


async def blocks_give_their_consumer() -> None:
    def send(session: Session, email: Email) -> None: ...

    async def send_async(session: AsyncSession, email: Email) -> None: ...

    with Consumer(Email, send, make_session, signals=False) as consumer:
        assert_type(consumer, Consumer[Email])
        assert_type(consumer.running, bool)
        assert_type(consumer.error, BaseException | None)
    async with AsyncConsumer(Email, send_async, make_async_session) as other:
        assert_type(other, AsyncConsumer[Email])


def events_are_typed(consumer: Consumer[Email]) -> None:
    def count(event: JobEvent) -> None:
        assert_type(event.attempt, int | None)

    consumer.on("completed", count)
    consumer.on("finished", count)  # type: ignore[call-overload] # there is no such event


def results_have_the_type_of_the_job(email: Email) -> None:
    result = wait(make_session, email, timeout=timedelta(seconds=10))
    assert_type(result, JobResult[Email])
    assert_type(result.job, Email | None)
    assert_type(wait(make_session, (Email, 5), timeout=10, check=True), JobResult[Email])
    assert_type(wait(make_session, Email, 5), JobResult[Email])
    assert_type(wait_all(make_session, [email], timeout=10), list[JobResult[Email]])
    assert_type(wait_all(make_session, [(Email, 5)], check=True), list[JobResult[Email]])
    assert_type(wait(make_session, (Email, (5, "a"))).error, str | None)
    wait(make_async_session, email)  # type: ignore[arg-type] # sessions of the other kind
    assert_type(JobFailed("broken", result).result.state == "failed", bool)


async def async_results_as_well(email: Email) -> None:
    assert_type(await async_wait(make_async_session, email, timeout=10), JobResult[Email])
    assert_type(await async_wait(make_async_session, (Email, 5)), JobResult[Email])
    assert_type(await async_wait(make_async_session, Email, 5), JobResult[Email])
    assert_type(await async_wait_all(make_async_session, [email]), list[JobResult[Email]])
    assert_type(await async_wait_all(make_async_session, ((Email, 5),)), list[JobResult[Email]])


def a_retention_is_time() -> None:
    QueueConfig(retention={"completed": timedelta(days=7), "failed": 90 * 86400})
    QueueConfig(retention={"completed": "7 days"})  # type: ignore[dict-item] # not a duration


def copying(session: Session, async_session: AsyncSession) -> None:
    assert_type(copy_in(session, Email, [{"to": "a"}]), int)
    assert_type(copy_in(session, Email, ({"id": number, "to": "a"} for number in range(5))), int)
    copy_in(session, Email, [Email(to="a")])  # type: ignore[list-item] # instances are for add_all()
    copy_in(async_session, Email, [])  # type: ignore[arg-type] # a session of the other kind


async def copying_async(session: Session, async_session: AsyncSession) -> None:
    assert_type(await async_copy_in(async_session, Email, [{"to": "a"}]), int)
    await async_copy_in(session, Email, [])  # type: ignore[arg-type] # a session of the other kind


# -- type checks: handlers for sessions of a subclass of Session or AsyncSession -----------------------------------

make_own = sessionmaker(engine, class_=SQLModelSession)
make_own_async = async_sessionmaker(async_engine, class_=AsyncSQLModelSession)


def plain(session: Session, email: Email) -> None: ...


def own(session: SQLModelSession, email: Email) -> None:
    session.exec(sql_model_select(Email)).all()


def own_batch(session: SQLModelSession, emails: list[Email]) -> None: ...


async def plain_async(session: AsyncSession, email: Email) -> None: ...


async def own_async(session: AsyncSQLModelSession, email: Email) -> None: ...


async def own_async_batch(session: AsyncSQLModelSession, emails: list[Email]) -> None: ...


def handlers_take_what_the_factory_makes() -> None:
    Consumer(Email, own, make_own)
    Consumer(Email, own, lambda: SQLModelSession(engine))
    Consumer(Email, own, scoped_session(make_own))
    Consumer(Email, own_batch, make_own, batch=True)
    Consumer(select(Email), own, make_own)
    Consumer(Email, {Email: own}, make_own)
    Consumer(Email, plain, make_own)
    Consumer(Email, own, make_session)  # type: ignore[misc] # it makes sessions of another class
    Consumer(Email, own_batch, make_session, batch=True)  # type: ignore[misc] # the same


def async_handlers_take_what_the_factory_makes() -> None:
    AsyncConsumer(Email, own_async, make_own_async)
    AsyncConsumer(Email, own_async_batch, make_own_async, batch=True)
    AsyncConsumer(select(Email), own_async, make_own_async)
    AsyncConsumer(Email, {Email: own_async}, make_own_async)
    AsyncConsumer(Email, plain_async, make_own_async)
    AsyncConsumer(Email, own_async, make_async_session)  # type: ignore[misc] # it makes sessions of another class


# -- type checks: the functions for tests --------------------------------------------------------------------------


def functions_for_tests_have_the_type_of_the_job(
    session: Session, scoped: scoped_session[Session], email: Email
) -> None:
    assert_type(enqueued(session, Email, to="ada"), list[Email])
    enqueued(scoped, select(Email))
    assert_type(run_job(session, email, send), RunResult[Email])
    run_job(scoped, email, Consumer(Email, send, make_session))
    run_job(session, email, {Email: send})
    assert_type(drain(session, Email, send, scheduled=True), int)
    drain(session, select(Email), send)
    travel(session, timedelta(hours=1))
    crash(session, email)
    assert_type(wait_until(make_session, email, "completed"), JobResult[Email])
    assert_type(wait_until(make_session, (Email, 5), "failed", timeout=5), JobResult[Email])
    check_handlers(Base, {Email: send, User: greet})


def handlers_are_checked_against_the_job(session: Session, email: Email) -> None:
    run_job(session, email, greet)  # type: ignore[arg-type]  # that is the mistake
    wait_until(make_session, email, "done")  # type: ignore[call-overload]  # that is the mistake


async def async_results(session: AsyncSession, email: Email) -> None:
    assert_type(await async_enqueued(session, Email), list[Email])
    assert_type(await async_run_job(session, email, send_async), RunResult[Email])
    await async_run_job(session, email, AsyncConsumer(Email, send_async, make_async_session))
    assert_type(await async_drain(session, Email, send_async), int)
    await async_travel(session, 60)
    await async_crash(session, email)
    assert_type(await async_wait_until(make_async_session, email, "completed"), JobResult[Email])
    await async_run_job(session, email, send)
    await async_drain(session, Email, Consumer(Email, send, make_session), check=True, limit=5)
