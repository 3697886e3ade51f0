"""When a transaction takes the write lock, and what a handler, a cancelled task and a test see that is refused it."""

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import Consumer, Retry, Scheduler, claim, complete, enqueue, fail
from sqlaqueue.admin import JobFilter, QueueAdmin, ScheduleAdmin
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.sql.engine import WRITES_LATER
from sqlaqueue.testing import async_drain, drain
from tests.models import add
from tests.programs import wait_until
from tests.sqlite.models import HOURLY, Base, Email, Order, SQLiteBench, Waits, made

pytestmark = pytest.mark.once


def commit_an_email(sessions: sessionmaker[Session]) -> None:
    with sessions() as other:
        other.execute(sa.insert(Email).values(to="beside"))
        other.commit()


def run_to_the_end(sessions: sessionmaker[Session], handle: Callable[[Session, Email], object]) -> None:
    """Run all jobs by one drain, which runs one again at once that was refused the lock."""
    Consumer(Email, handle, sessions).drain()
    unfinished = sa.select(sa.func.count()).select_from(Email).where(Email.status.in_(["pending", "processing"]))
    with sessions() as session:
        assert session.scalar(unfinished) == 0


@pytest.mark.parametrize(
    "verb",
    [
        lambda session, job: session.execute(complete(job)),
        lambda session, job: session.execute(fail(job, error="no")),
        lambda session, _: enqueue(session, Order(customer=1)),
    ],
    ids=["complete", "fail", "enqueue"],
)
def test_a_verb_after_a_read_is_refused_once_another_transaction_has_committed(
    sessions: sessionmaker[Session], verb: Callable[[Session, Any], object]
) -> None:
    """What the program has read decides what it writes, so it must not be outdated when it commits."""
    add(sessions, Email())
    with sessions() as session:
        job = session.execute(claim(Email, 1)).scalar_one()
        session.commit()
        session.scalar(sa.select(sa.func.count()).select_from(Order))
        commit_an_email(sessions)
        with pytest.raises(sa.exc.OperationalError, match="database is locked"):
            verb(session, job)
        session.rollback()
        verb(session, job)
        session.commit()


def test_what_a_handler_writes_by_the_orm_is_not_based_on_an_outdated_read(sessions: sessionmaker[Session]) -> None:
    """The flush comes with the settlement, which alone may see what others have committed since."""
    add(sessions, Order(customer=0), Email(max_attempts=1))
    calls: list[int] = []

    def handle(session: Session, _: Email) -> None:
        order = session.scalars(sa.select(Order)).one()
        calls.append(order.customer)
        if len(calls) == 1:
            with sessions() as other:
                other.execute(sa.update(Order).values(customer=Order.customer + 10))
                other.commit()
        order.customer += 1

    run_to_the_end(sessions, handle)
    with sessions() as session:
        assert session.scalar(sa.select(Order.customer)) == 11
        assert session.execute(sa.select(Email.status, Email.attempts)).all() == [("completed", 1)]
    # A heartbeat of the Consumer is a commit as well, so there may be one more.
    assert calls[0] == 0
    assert set(calls[1:]) == {10}


def test_a_job_that_its_handler_deletes_is_settled_as_the_handlers_write(sessions: sessionmaker[Session]) -> None:
    add(sessions, Email(to="first"))
    calls: list[int] = []

    def handle(session: Session, job: Email) -> None:
        calls.append(session.scalars(sa.select(sa.func.count()).select_from(Email)).one())
        if len(calls) == 1:
            with sessions() as other:
                other.execute(sa.insert(Order).values(customer=1))
                other.commit()
        session.delete(job)

    run_to_the_end(sessions, handle)
    with sessions() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 0
    assert len(calls) > 1


def test_a_transaction_that_claims_first_is_never_refused(sessions: sessionmaker[Session]) -> None:
    add(sessions, Email())
    with sessions() as session, sessions() as other:
        jobs = session.scalars(claim(Email, 5)).all()
        assert session.scalar(sa.select(sa.func.count()).select_from(Order)) == 0
        other.execute(sa.text("PRAGMA busy_timeout = 0"))
        with pytest.raises(sa.exc.OperationalError, match="database is locked"):
            other.execute(sa.insert(Order).values(customer=1))
        session.execute(complete(jobs))
        session.commit()


def _fire(sessions: sessionmaker[Session]) -> None:
    def fired() -> bool:
        with sessions() as session:
            return bool(session.scalar(sa.select(sa.func.count()).select_from(Email).where(Email.to == "grace")))

    with sessions() as session:
        ScheduleAdmin(session, Email).add(HOURLY)
    with Scheduler(sessions, [HOURLY]):
        with sessions() as session:
            ScheduleAdmin(session, Email).run("hourly")
        wait_until(fired, "the schedule is fired")


def _edit(session: Session) -> None:
    ScheduleAdmin(session, Email).edit("hourly", catch_up=2)
    ScheduleAdmin(session, Email).remove("hourly")


def _enqueue(session: Session) -> None:
    """The first transaction of an engine looks for the unique index before it searches."""
    for _ in range(2):
        enqueue(session, [Order(customer=1), Order(customer=2)])
        session.rollback()


@pytest.mark.parametrize(
    "operation",
    [
        lambda session: QueueAdmin(session, Email).requeue(),
        lambda session: QueueAdmin(session, Order).requeue(),
        lambda session: QueueAdmin(session, Email).purge(),
        lambda session: QueueAdmin(session, Email).cancel(),
        lambda session: QueueAdmin(session, Email).cancel(JobFilter(keys=("1",))),
        _edit,
        _enqueue,
    ],
    ids=["requeue", "requeue-unique", "purge", "cancel", "cancel-keys", "schedule", "enqueue"],
)
def test_operations_that_read_first_begin_with_the_lock(
    sessions: sessionmaker[Session], operation: Callable[[Session], object]
) -> None:
    with sessions() as session:
        session.add_all([Email(), Email(), Order(customer=1), Email(status="failed")])
        session.commit()
        ScheduleAdmin(session, Email).add(HOURLY)
    begun = _transactions(sessions)
    with sessions() as session:
        operation(session)
    assert _writes_after_reads(begun) == []
    assert any("BEGIN IMMEDIATE" in each for each in begun)


def test_a_scheduler_begins_with_the_lock(sessions: sessionmaker[Session]) -> None:
    begun = _transactions(sessions)
    _fire(sessions)
    assert _writes_after_reads(begun) == []


def test_a_consumer_that_settles_before_it_claims_begins_with_the_lock(sessions: sessionmaker[Session]) -> None:
    """A run of this queue that becomes pending looks for a duplicate first."""
    add(sessions, Waits(customer=1))
    begun = _transactions(sessions)

    def handle(_: Session, job: Waits) -> None:
        if job.attempts < 2:
            raise Retry(delay=0)

    Consumer(Waits, handle, sessions).drain()
    assert _writes_after_reads(begun) == []
    with sessions() as session:
        assert session.execute(sa.select(Waits.status, Waits.attempts)).all() == [("completed", 2)]


def _transactions(sessions: sessionmaker[Session]) -> list[list[str]]:
    """Return the statements of each transaction from now on."""
    begun: dict[int, list[list[str]]] = {}
    all_of_them: list[list[str]] = []

    @event.listens_for(sessions.kw["bind"], "before_cursor_execute")
    def note(connection: sa.Connection, _: Any, statement: str, *__: Any) -> None:
        mine = begun.setdefault(id(connection.connection.dbapi_connection), [])
        if statement.startswith("BEGIN"):
            mine.append([])
            all_of_them.append(mine[-1])
        if mine:
            mine[-1].append(statement)

    return all_of_them


def _writes_after_reads(transactions: list[list[str]]) -> list[list[str]]:
    """Return the transactions that write and have begun with a read."""
    writes = re.compile(r"\b(INSERT|UPDATE|DELETE)\b")
    return [each for each in transactions if each[0] == "BEGIN" and any(writes.search(text) for text in each)]


# -- handlers that are refused the lock --------------------------------------------------------------------------------


async def commit_beside(bench: SQLiteBench, io: Any, key: int) -> None:
    """Commit something in a thread of its own: the event loop has to go on, as others may have the lock."""
    thread = threading.Thread(target=bench.execute, args=(bench.effect(key),))
    thread.start()
    await io.wait_for(lambda: not thread.is_alive())


def test_a_handler_that_is_refused_the_lock_runs_again_without_an_attempt(bench: SQLiteBench) -> None:
    """It reads, another transaction commits, it writes: SQLite refuses that at once, however long the timeout is.

    Another Consumer's heartbeat or the test's own queries may do the same to a later run.
    """
    [key] = bench.enqueue(max_attempts=1)
    errors: list[str] = []

    async def handle(io: Any, job: Any) -> None:
        await io.scalar(sa.select(sa.func.count()).select_from(bench.Effect))
        if not errors:
            await commit_beside(bench, io, 0)
        try:
            await io.execute(bench.effect(job.id))
        except sa.exc.OperationalError as error:
            errors.append(str(error))
            raise

    server = bench.consumer(handle)
    with server.running():
        wait_until(lambda: bench.states() == Counter(completed=1), "the job is completed")
    assert errors
    assert all("database is locked" in error for error in errors)
    assert bench.attempts() == {key: 1}
    assert bench.effects() == {0: 1, key: 1}
    assert server.told("failed") == []


def test_a_handler_that_only_reads_is_settled_beside_other_commits(bench: SQLiteBench) -> None:
    """The settlement needs nothing that the handler has read, so its transaction begins anew."""
    keys = bench.enqueue(3)
    calls: list[int] = []

    async def handle(io: Any, job: Any) -> None:
        calls.append(job.id)
        await io.scalar(sa.select(sa.func.count()).select_from(bench.Effect))
        await commit_beside(bench, io, job.id)

    server = bench.consumer(handle)
    with server.running():
        wait_until(
            lambda: bench.states() == Counter(completed=3) or len(calls) > len(keys),
            "the jobs are completed, or run again",
        )
    assert sorted(calls) == keys, "a settlement was refused the lock, so the handler ran again"
    assert bench.states() == Counter(completed=3)
    assert bench.effects() == dict.fromkeys(keys, 1)


def test_a_handler_that_has_looked_for_rows_to_change_in_vain_is_settled_beside_other_commits(
    bench: SQLiteBench,
) -> None:
    """Such a query takes the lock where it begins a transaction. After a read it is another read."""
    [key] = bench.enqueue(1)
    calls: list[int] = []
    effects = sa.select(sa.func.count()).select_from(bench.Effect)

    async def handle(io: Any, job: Any) -> None:
        calls.append(job.id)
        await io.scalar(effects)
        await io.scalar(effects.execution_options(**{WRITES_LATER: True}))
        await commit_beside(bench, io, job.id)

    server = bench.consumer(handle)
    with server.running():
        wait_until(
            lambda: bench.states() == Counter(completed=1) or len(calls) > 1, "the job is completed, or runs again"
        )
    assert calls == [key], "the settlement was refused the lock, so the handler ran again"
    assert bench.states() == Counter(completed=1)


@pytest.mark.parametrize("api", ["sync"])
def test_transactions_of_consumers_take_the_lock_when_they_begin(bench: SQLiteBench) -> None:
    """A transaction that read first could not write after the commit of another process."""
    bench.enqueue(5)
    server = bench.consumer()
    begun: list[str] = []

    @event.listens_for(server.sync_engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        begun.append(statement)

    server.drain()
    first = {begun[at + 1].split()[0] for at, text in enumerate(begun[:-1]) if text == "BEGIN"}
    assert "BEGIN IMMEDIATE" in begun
    # What begins otherwise only reads.
    writes = [
        text
        for at, text in enumerate(begun)
        if text.split()[0] in {"UPDATE", "INSERT", "DELETE"} and _beginning(begun, at) != "BEGIN IMMEDIATE"
    ]
    assert writes == []
    assert first <= {"SELECT", "WITH", "SAVEPOINT"}


def _beginning(statements: list[str], at: int) -> str:
    return next(text for text in reversed(statements[:at]) if text.startswith("BEGIN"))


# -- cancelled tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_cancelled_claim_releases_the_write_lock(tmp_path: Path) -> None:
    """Also between the UPDATE and the read of what it returns, when the traceback has the cursor."""
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    sqlaqueue.prepare(async_engine)
    sqlaqueue.prepare(engine, busy_timeout=0.1)
    Base.metadata.create_all(engine)

    async def claim_for_ever() -> None:
        async with AsyncSession(async_engine) as session:
            # aiosqlite leaves a connection open whose task is cancelled while it is made.
            await session.connection()
            connected.set()
            while True:
                session.add(Email())
                await session.flush()
                await session.scalars(claim(Email, 1))
                await session.rollback()

    kept: list[BaseException] = []
    for number in range(60):
        connected = asyncio.Event()
        task = asyncio.create_task(claim_for_ever())
        await connected.wait()
        await asyncio.sleep(0.001 + number * 0.0003)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as cancelled:
            kept.append(cancelled)
        with engine.begin() as connection:
            connection.execute(sa.text("BEGIN IMMEDIATE"))
    assert len(kept) == 60
    await async_engine.dispose()
    engine.dispose()


# -- the functions for tests -------------------------------------------------------------------------------------------


def states(session: Session) -> list[str]:
    return list(session.scalars(sa.select(Email.status)))


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_a_handler_that_reads_leaves_the_transaction_to_the_test(
    sessions: sessionmaker[Session], *, committed: bool, writes: bool
) -> None:
    with sessions() as session:
        session.add_all([Email(), Email()])
        if committed:
            session.commit()

        def handle(own: Session, _: Email) -> None:
            number = own.scalar(sa.select(sa.func.count()).select_from(Order))
            if writes:
                own.add(Order(customer=number or 0))

        assert session.scalar(sa.select(sa.func.count()).select_from(Email)) == 2
        assert drain(session, Email, handle, check=True) == 2
        assert states(session) == ["completed"] * 2
        assert session.scalar(sa.select(sa.func.count()).select_from(Order)) == 2 * writes
        session.rollback()
        assert states(session) == (["pending"] * 2 if committed else [])


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "begin immediate transaction"])
def test_a_handler_may_begin_with_the_lock(sessions: sessionmaker[Session], begin: str) -> None:
    """As in a running Consumer, where it avoids the error of a write after a read."""

    def handle(own: Session, job: Email) -> None:
        own.execute(sa.text(begin))
        job.to = "grace"

    with sessions() as session:
        session.add(Email())
        session.commit()
        assert drain(session, Email, handle, check=True) == 1
        assert session.scalars(sa.select(Email.to)).all() == ["grace"]
        session.rollback()
        assert session.scalars(sa.select(Email.to)).all() == ["ada"]
        # Outside of the function it is SQLite's again.
        with pytest.raises(sa.exc.OperationalError, match="cannot start a transaction within a transaction"):
            session.execute(sa.text(begin))


def test_a_handler_may_not_commit(sessions: sessionmaker[Session]) -> None:
    def handle(own: Session, _: Email) -> None:
        own.execute(sa.text("COMMIT"))

    with sessions() as session:
        session.add(Email())
        session.commit()
        drain(session, Email, handle)
        assert states(session) == ["pending"]
        assert "the statement COMMIT" in (session.scalar(sa.select(Email.last_error)) or "")
        assert HandlerMisuseError.__name__ in (session.scalar(sa.select(Email.last_error)) or "")


async def test_the_same_in_async_code(tmp_path: Path) -> None:
    made(tmp_path / "jobs.db").kw["bind"].dispose()
    engine = sqlaqueue.prepare(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"))

    async def handle(own: AsyncSession, job: Email) -> None:
        await own.execute(sa.text("BEGIN IMMEDIATE"))
        await own.scalar(sa.select(sa.func.count()).select_from(Order))

    async with AsyncSession(engine) as session:
        session.add(Email())
        await session.commit()
        assert await async_drain(session, Email, handle, check=True) == 1
        assert await session.run_sync(states) == ["completed"]
    await engine.dispose()
