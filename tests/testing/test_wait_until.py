"""wait_until() sees what workers commit, and says at once when a job has ended otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Constant, Consumer, WaitTimeout
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.testing import async_wait_until, wait_until
from tests.servers import Database
from tests.testing.app import send
from tests.testing.models import DeletedWhenDone, Email, HeldEmail, LeasedEmail, Sent

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
    with pytest.raises(ConfigurationError, match=r"'done'\): there is no such state; give one of pending"):
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
