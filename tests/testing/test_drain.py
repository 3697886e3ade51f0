"""drain() runs all due jobs, travel() lets time pass for what is stored, and wait_until() sees what workers commit."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    Constant,
    Consumer,
    JobFailed,
    QueueConfig,
    QueueMixin,
    Snooze,
    WaitTimeout,
    claim,
    pause,
    purge,
    rescue,
)
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.testing import async_wait_until, crash, drain, travel, wait_until
from tests.servers import Database
from tests.testing.app import (
    App,
    Base,
    DeletedWhenDone,
    Email,
    HeldEmail,
    LeasedEmail,
    MessageEmail,
    OwnMessage,
    Sent,
    send,
)

# Of the applications of `app`: sync and async, each with three strategies.
pytestmark = pytest.mark.few(3)


def test_all_due_jobs_run(app: App) -> None:
    for number in range(5):
        app.add(f"{number}@example.com")
    app.add("nobody")
    app.add("later@example.com", run_at=datetime.now(UTC) + timedelta(hours=1))
    assert app.drain() == 6
    assert app.sent == [f"{number}@example.com" for number in range(5)]
    assert {email.to for email in app.enqueued()} == {"nobody", "later@example.com"}
    assert app.drain() == 0


def test_scheduled_jobs_run_as_well(app: App) -> None:
    app.add("nobody")
    app.add("later@example.com", run_at=datetime.now(UTC) + timedelta(hours=1))
    app.add()
    assert app.drain(scheduled=True) == 4
    assert app.sent == ["ada@example.com", "later@example.com"]
    assert app.enqueued() == []


def test_jobs_that_a_handler_enqueues(app: App) -> None:
    def follow(session: Session, email: Email) -> None:
        session.add(Sent(to=email.to))
        if email.to == "first":
            session.add(type(email)(to="second"))

    app.add("first")
    assert app.drain(follow) == 2
    assert app.sent == ["first", "second"]


def test_some_jobs_of_a_queue(app: App) -> None:
    app.add()
    app.add("bob@example.com")
    assert app.drain(model=sa.select(app.model).where(app.model.to == "bob@example.com")) == 1
    assert app.sent == ["bob@example.com"]


def test_a_batch(app: App) -> None:
    sizes = []

    def batch(session: Session, emails: list[Email]) -> None:
        sizes.append(len(emails))
        session.add_all([Sent(to=email.to) for email in emails])

    for number in range(3):
        app.add(str(number))
    assert app.drain(app.consumer(batch, batch=True)) == 3
    assert sum(sizes) == 3
    assert max(sizes) > 1
    assert app.sent == ["0", "1", "2"]


def test_one_bad_job_of_a_batch(app: App) -> None:
    def batch(session: Session, emails: list[Email]) -> None:
        session.add_all([Sent(to=email.to) for email in emails])
        session.flush()
        if any(email.to == "bad" for email in emails):
            raise ValueError

    for to in ("a", "bad", "c"):
        app.add(to)
    app.drain(app.consumer(batch, batch=True))
    assert sorted(app.sent) == ["a", "c"]
    assert [email.to for email in app.enqueued()] == ["bad"]


def test_a_paused_queue_is_left_alone(app: App) -> None:
    app.add()
    app.call(lambda session: session.execute(pause(app.model)))
    assert app.drain(scheduled=True) == 0


def test_a_handler_without_an_end_is_an_error(leased: App) -> None:
    def snooze(session: Session, email: Email) -> None:
        raise Snooze(0)

    email = leased.add()
    before = email.run_at
    with pytest.raises(AssertionError, match=r"6 runs have come to no end, 6 of them of LeasedEmail \d+; does a h"):
        leased.drain(snooze, limit=5)
    assert email.run_at > before


def test_a_handler_that_enqueues_its_successor_is_an_error(leased: App) -> None:
    def follow(session: Session, email: Email) -> None:
        session.add(LeasedEmail(to="next", run_at=datetime.now(UTC) + timedelta(days=1)))

    leased.add()
    assert leased.drain(follow) == 1
    with pytest.raises(AssertionError, match=r"For more than 3 runs give (async_)?drain\(\.\.\., limit=\.\.\.\)"):
        leased.drain(follow, scheduled=True, limit=3)


def test_failures_can_be_raised(app: App) -> None:
    app.add()
    assert app.drain(check=True) == 1
    app.add("nobody")
    with pytest.raises(JobFailed, match="the run ended as retried, and the job is pending: ValueError") as raised:
        app.drain(check=True)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.result.state == "pending"


def test_a_rescued_job_that_completes_is_no_failure(leased: App) -> None:
    leased.crash(leased.add())
    assert leased.drain(check=True) == 1
    email = leased.add()
    for _ in range(2):
        leased.crash(email)
    with pytest.raises(JobFailed, match="the lease expired: its worker died"):
        leased.drain(check=True)


def test_an_interrupt_ends_it(app: App) -> None:
    calls: list[Any] = []

    def interrupt(session: Session, email: Email) -> None:
        calls.append(email)
        raise KeyboardInterrupt

    app.add()
    with pytest.raises(KeyboardInterrupt):
        app.drain(interrupt)
    assert len(calls) == 1


def test_each_class_has_its_handler(leased: App) -> None:
    leased.add()
    assert leased.drain({LeasedEmail: send}) == 1
    assert leased.sent == ["ada@example.com"]


def test_a_job_whose_lease_has_expired_is_rescued(leased: App) -> None:
    email = leased.add()
    leased.crash(email)
    assert leased.drain() == 1
    assert email.attempts == 2


def test_instances_whose_rows_are_gone_do_not_disturb(app: App) -> None:
    emails = [app.add(), app.add(run_at=datetime.now(UTC) + timedelta(days=1))]
    assert app.drain(scheduled=True) == 2
    assert [email.to for email in emails] == ["ada@example.com"] * 2


def test_a_job_that_no_handler_takes_does_not_hide_later_ones(app: App) -> None:
    """Of a select, as a worker of a newer version leaves other classes alone."""
    app.add("left", run_at=datetime.now(UTC) + timedelta(hours=1))
    app.add("taken@b", run_at=datetime.now(UTC) + timedelta(hours=2))
    assert app.drain(model=sa.select(app.model).where(app.model.to == "taken@b"), scheduled=True) == 1
    assert [email.to for email in app.enqueued()] == ["left"]


def test_a_parked_job_is_never_due(app: App) -> None:
    app.add(run_at=datetime(9999, 12, 31, tzinfo=UTC))
    app.add()
    assert app.drain(scheduled=True) == 1
    assert len(app.enqueued()) == 1


# -- travel() ------------------------------------------------------------------------------------------------------


class Elsewhere(DeclarativeBase):
    """Models whose tables are not in the database."""


class Unmade(QueueMixin, Elsewhere):
    __tablename__ = "unmade"
    id: Mapped[int] = mapped_column(primary_key=True)


class Likeness(QueueMixin, Elsewhere):
    """Mapped to a table of the database, as by the models of another test."""

    __tablename__ = "leased_email"
    id: Mapped[int] = mapped_column(primary_key=True)


class Stranger(QueueMixin, Elsewhere):
    """Mapped to a table of the same name with other columns."""

    __tablename__ = "held_email"
    __queue__ = QueueConfig(columns={"run_at": "due"})
    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_table_of_several_classes_travels_once(engine: sa.Engine) -> None:
    now = datetime.now(UTC)
    with Session(engine) as session:
        session.add_all([one := LeasedEmail(to="a@b", run_at=now), two := HeldEmail(to="a@b", run_at=now)])
        travel(session, 60)
        assert (now - one.run_at, now - two.run_at) == (timedelta(minutes=1), timedelta(minutes=1))


def test_a_job_becomes_due(app: App) -> None:
    email = app.add(run_at=datetime.now(UTC) + timedelta(hours=1))
    assert app.drain() == 0
    before = email.run_at
    app.travel(timedelta(minutes=59))
    assert before - email.run_at == timedelta(minutes=59)
    assert app.drain() == 0
    app.travel(60)
    assert app.drain() == 1


def test_pending_changes_are_kept(leased: App) -> None:
    email = leased.add()
    email.to = "bob@example.com"
    leased.travel(60)
    assert email.to == "bob@example.com"


def test_all_queues_travel(engine: sa.Engine) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with Session(engine) as session:
        session.add_all([model(to="a@b", run_at=later) for model in (LeasedEmail, HeldEmail, MessageEmail, OwnMessage)])
        travel(session, timedelta(hours=1))
        assert sum(drain(session, model, send) for model in (LeasedEmail, HeldEmail, MessageEmail, OwnMessage)) == 4


def test_a_lease_expires(session: Session) -> None:
    session.add(LeasedEmail(to="a@b"))
    assert len(session.scalars(claim(LeasedEmail, 1)).all()) == 1
    travel(session, timedelta(minutes=4))
    assert session.scalars(rescue(LeasedEmail)).all() == []
    travel(session, timedelta(minutes=1))
    assert len(session.scalars(rescue(LeasedEmail)).all()) == 1


def test_finished_jobs_grow_old(app: App) -> None:
    def fail(session: Session, email: object) -> None:
        raise ValueError

    app.add()
    assert app.drain(fail, scheduled=True) == 2
    day = timedelta(days=1)
    purged = purge(app.model, states=["failed"], older_than=day)
    assert app.scalars(purged) == []
    app.travel(day)
    assert len(app.scalars(purged)) == 1


def test_the_librarys_own_tables_travel(engine: sa.Engine) -> None:
    now = sa.func.now()
    control, consumer, journal = (Base.metadata.tables[name] for name in (CONTROL, CONSUMERS, CRASH_JOURNAL))
    with Session(engine) as session:
        session.execute(pause(LeasedEmail))
        session.add(email := HeldEmail(to="a@b"))
        crash(session, email)
        session.execute(
            sa.insert(consumer).values(
                id="1",
                queue="q",
                host="h",
                pid=1,
                version="1",
                listening=False,
                running=[],
                heartbeat_at=now,
                expires_at=now,
            )
        )
        travel(session, timedelta(hours=2))
        for column in (control.c.created_at, journal.c.created_at, consumer.c.heartbeat_at, consumer.c.expires_at):
            (moment,) = session.scalars(sa.select(column)).all()
            assert timedelta(hours=2) <= datetime.now(UTC) - moment < timedelta(hours=3)


def test_instances_of_other_transactions_are_not_read(engine: sa.Engine) -> None:
    sessions = sessionmaker(engine)
    with sessions() as session, sessions() as other:
        mine = LeasedEmail(to="a@b")
        session.add(mine)
        travel(session, 60)
        assert other.scalars(sa.select(LeasedEmail)).all() == []


def test_a_unique_constraint_with_a_time(engine: sa.Engine) -> None:
    now = datetime.now(UTC)
    with Session(engine) as session:
        session.execute(sa.text('CREATE UNIQUE INDEX one_per_hour ON leased_email ("to", run_at)'))
        for hours in range(3):
            session.add(LeasedEmail(to="a@b", run_at=now - timedelta(hours=hours)))
            session.flush()
        travel(session, timedelta(hours=1))
        moved = session.scalars(sa.select(LeasedEmail.run_at).order_by(LeasedEmail.run_at.desc())).all()
        assert moved == [now - timedelta(hours=hours) for hours in (1, 2, 3)]


def test_a_week_has_as_many_hours_when_the_clocks_change(engine: sa.Engine) -> None:
    run_at = datetime(2027, 3, 30, tzinfo=UTC)
    with Session(engine) as session:
        session.execute(sa.text("SET LOCAL timezone = 'Europe/Berlin'"))
        session.add(email := LeasedEmail(to="a@b", run_at=run_at))
        travel(session, timedelta(days=7))
        assert run_at - email.run_at == timedelta(hours=168)


def test_an_instance_that_a_statement_has_deleted(session: Session) -> None:
    session.add(email := LeasedEmail(to="a@b"))
    session.flush()
    session.execute(sa.delete(LeasedEmail).execution_options(synchronize_session=False))
    travel(session, 5)
    assert email.to == "a@b"
    assert email not in session


def test_more_than_a_hundred_years(engine: sa.Engine) -> None:
    with Session(engine) as session, pytest.raises(ConfigurationError, match="moves at most a hundred years at a time"):
        travel(session, timedelta(days=36526))


@pytest.mark.parametrize("delta", [-1, timedelta(seconds=-1), "1 hour"])
def test_time_cannot_go_back(engine: sa.Engine, delta: object) -> None:
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"travel\(delta\) must be seconds"):
        travel(session, delta)  # type: ignore[arg-type]  # that is the mistake


# -- wait_until() --------------------------------------------------------------------------------------------------

Sessions = sessionmaker[Session]


@pytest.fixture
def sessions(engine: sa.Engine) -> Iterator[Sessions]:
    """Sessions that really commit; their rows are deleted."""
    yield sessionmaker(engine)
    with engine.begin() as connection:
        for table in [LeasedEmail, DeletedWhenDone, HeldEmail, Sent]:
            connection.execute(sa.delete(table))


def enqueue(sessions: Sessions, email: Email) -> None:
    with sessions() as session:
        session.add(email)
        session.commit()
        session.refresh(email)


def test_from_state_to_state(sessions: Sessions) -> None:
    goes_on = threading.Event()

    def wait(session: Session, email: Email) -> None:
        assert goes_on.wait(30)

    enqueue(sessions, email := LeasedEmail(to="ada@example.com"))
    assert wait_until(sessions, email, "pending").job.to == "ada@example.com"
    with Consumer(LeasedEmail, wait, sessions):
        assert wait_until(sessions, email, "processing").job.attempts == 1
        goes_on.set()
        result = wait_until(sessions, (LeasedEmail, email.id), "completed")
    assert result.job.status == "completed"


def test_a_job_that_ends_otherwise(sessions: Sessions) -> None:
    enqueue(sessions, email := LeasedEmail(to="nobody"))
    with (
        Consumer(LeasedEmail, send, sessions, retry=Constant(0)),
        pytest.raises(AssertionError, match=r"LeasedEmail \d+ is failed: ValueError: nobody; it does not become comp"),
    ):
        wait_until(sessions, email, "completed")
    assert wait_until(sessions, email, "failed").error == "ValueError: nobody"


def test_a_deleted_job_has_completed(sessions: Sessions) -> None:
    enqueue(sessions, email := DeletedWhenDone(to="ada@example.com"))
    with Consumer(DeletedWhenDone, send, sessions):
        assert wait_until(sessions, email, "completed").job is None


def test_a_job_that_is_not_there(sessions: Sessions) -> None:
    with pytest.raises(AssertionError, match=r"LeasedEmail 5 is not in the database: it was deleted, or has not been"):
        wait_until(sessions, (LeasedEmail, 5), "completed")
    assert wait_until(sessions, (LeasedEmail, 5), "gone").job is None


def test_a_timeout_says_what_the_job_is_instead(sessions: Sessions) -> None:
    enqueue(sessions, email := LeasedEmail(to="ada@example.com"))
    with pytest.raises(WaitTimeout, match=r"LeasedEmail \d+ is pending, and not completed, after 0\.1 s"):
        wait_until(sessions, email, "completed", timeout=0.1)


def test_wrong_arguments(sessions: Sessions) -> None:
    enqueue(sessions, held := HeldEmail(to="ada@example.com"))
    with pytest.raises(ConfigurationError, match="under batch_select other sessions see a running job as pending"):
        wait_until(sessions, held, "processing")
    with pytest.raises(ConfigurationError, match=r"'done'\): there is no such state; give one of waiting, pending"):
        wait_until(sessions, held, "done")  # type: ignore[arg-type]  # that is the mistake
    with sessions() as session, pytest.raises(StatementError, match="commit its session first"):
        session.add(email := LeasedEmail(to="ada@example.com"))
        session.flush()
        wait_until(sessions, email, "completed")
    with pytest.raises(ConfigurationError, match="makes AsyncSession; give a sessionmaker, or use async_wait_until"):
        wait_until(async_sessionmaker(), held, "completed")  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ConfigurationError, match=r"give sessionmaker\(engine\)"):
        wait_until(sessions.kw["bind"], held, "completed")


def test_async(sessions: Sessions, shared_database: Database) -> None:
    enqueue(sessions, email := LeasedEmail(to="ada@example.com"))
    enqueue(sessions, bad := LeasedEmail(to="nobody"))

    async def asend(session: object, email: Email) -> None:
        await asyncio.sleep(0)
        if email.to == "nobody":
            raise ValueError

    async def main() -> None:
        engine = create_async_engine(shared_database.url("asyncpg"))
        factory = async_sessionmaker(engine)
        async with AsyncConsumer(LeasedEmail, asend, factory, retry=Constant(0)):
            assert (await async_wait_until(factory, email, "completed")).job.status == "completed"
            with pytest.raises(AssertionError, match="it does not become completed"):
                await async_wait_until(factory, bad, "completed")
        await engine.dispose()

    asyncio.run(main())
