"""``wait_all()`` and ``async_wait_all()`` on each database: results in order, one listener, one query a look."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    Fail,
    JobFailed,
    JobResult,
    QueueConfig,
    QueueMixin,
    WaitTimeout,
    async_wait_all,
    cancel,
    prepare,
    wait_all,
)
from sqlaqueue.exc import NotAQueueError, StatementError
from tests.servers import Server


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email_to_await"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(sa.String(50), default="ada")


class Letter(QueueMixin, Base):
    __tablename__ = "letter_to_await"
    __queue__ = QueueConfig(strategy="update_status", on_complete="delete")

    year: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[str] = mapped_column(sa.String(20), primary_key=True)


class MessageBase(DeclarativeBase):
    pass


class Message(QueueMixin, MessageBase):
    __tablename__ = "message_to_await"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)


class Place:
    def __init__(self, url: str, async_url: str) -> None:
        self.async_url = async_url
        self.engine = prepare(sa.create_engine(url))
        self.sessions = sessionmaker(self.engine)
        Base.metadata.create_all(self.engine)

    def add(self, *jobs: Any) -> list[Any]:
        with self.sessions(expire_on_commit=False) as session:
            session.add_all(jobs)
            session.commit()
        return [*jobs]

    def wait(self, api: str, jobs: Any, **options: Any) -> list[JobResult[Any]]:
        return wait_all(self.sessions, jobs, **options) if api == "sync" else asyncio.run(self._wait(jobs, **options))

    async def _wait(self, jobs: Any, **options: Any) -> list[JobResult[Any]]:
        engine = prepare(create_async_engine(self.async_url))
        try:
            return await async_wait_all(async_sessionmaker(engine), jobs, **options)
        finally:
            await engine.dispose()


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[Place]:
    if request.param == "postgresql":
        with server.database() as database:
            place = Place(database.url(), database.url("asyncpg"))
            yield place
            place.engine.dispose()
    elif request.param == "sqlite":
        place = Place(f"sqlite:///{tmp_path}/jobs.db", f"sqlite+aiosqlite:///{tmp_path}/jobs.db")
        yield place
        place.engine.dispose()
    else:
        mariadb = request.getfixturevalue("mariadb")
        with mariadb.database() as name:
            place = Place(mariadb.url(name), mariadb.url(name, "mariadb+asyncmy"))
            yield place
            place.engine.dispose()


def send(session: Session, job: Any) -> None:
    if getattr(job, "to", "") == "nobody":
        raise Fail("no address")


@pytest.mark.parametrize("api", ["sync", "async"])
def test_results_are_in_the_order_of_the_jobs(place: Place, api: str) -> None:
    """Of several queues, with composite keys, and with jobs that vanish or were never there."""
    failing, first, second = place.add(Email(to="nobody"), Email(), Email())
    letter, cancelled = place.add(Letter(year=2030, number="a,b"), Email())
    with place.sessions() as session:
        session.execute(cancel([session.get_one(Email, cancelled.id)]))
        session.commit()
    jobs = [second, (Letter, (2030, "a,b")), failing, first, (Email, 99), second, cancelled]
    with Consumer(Letter, send, place.sessions, poll_interval=0.05), Consumer(Email, send, place.sessions):
        found = place.wait(api, jobs, timeout=30)
    states = ["completed", "completed", "failed", "completed", "gone", "completed", "cancelled"]
    assert [each.state for each in found] == states
    assert [None if each.job is None else each.job.id for each in found] == [3, None, 1, 2, None, 3, 4]
    assert (found[2].error, found[0].error) == ("Fail: no address", None)
    assert letter.number == "a,b"
    assert place.wait(api, iter([])) == []


@pytest.mark.parametrize("api", ["sync", "async"])
def test_the_error_names_the_jobs_that_have_not_ended(place: Place, api: str) -> None:
    jobs = place.add(*(Email() for _ in range(14)), Email(to="nobody"))
    with Consumer(Email, send, place.sessions):
        wait_all(place.sessions, jobs[-2:], timeout=30)
        wait_all(place.sessions, jobs, timeout=30)
    late = place.add(*(Email() for _ in range(12)))
    with pytest.raises(WaitTimeout) as caught:
        place.wait(api, [*jobs, *late], timeout=0.2)
    names = ", ".join(f"Email {number}" for number in range(16, 26))
    function = "wait_all" if api == "sync" else "async_wait_all"
    assert str(caught.value) == (
        f"12 of 27 jobs have not finished within 0.2 s: {names} and 2 more; they are not cancelled. To wait longer, "
        f"give {function}(..., timeout=...) more seconds, or None for no limit"
    )
    with pytest.raises(JobFailed, match="Email 15 has failed: Fail: no address") as failed:
        place.wait(api, jobs, timeout=0, check=True)
    assert failed.value.result.state == "failed"


def test_a_look_is_one_query(place: Place) -> None:
    jobs = place.add(*(Email() for _ in range(50)))
    looks: list[str] = []

    @event.listens_for(place.engine, "before_cursor_execute")
    def note(*arguments: Any) -> None:
        if re.search("SELECT.*email_to_await", arguments[2], re.DOTALL):
            looks.append(arguments[2])

    with pytest.raises(WaitTimeout):
        wait_all(place.sessions, jobs, timeout=0)
    assert len(looks) == 1
    with place.sessions() as session:
        session.execute(sa.text("UPDATE email_to_await SET status = 'completed'"))
        session.commit()
    looks.clear()
    assert {each.state for each in wait_all(place.sessions, jobs)} == {"completed"}
    assert len(looks) == 2  # their states, and their rows


@pytest.mark.few(1)
def test_one_listener_hears_of_the_last_job(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the Consumer's too, ends with the last of both, and sends several announcements if one is too short."""
    jobs = place.add(*(Email(id=10**8 + number) for number in range(1500)))
    with place.sessions() as session:
        session.execute(sa.text("UPDATE email_to_await SET status = 'completed' WHERE id < 100001498"))
        session.execute(sa.text("UPDATE email_to_await SET status = 'cancelled' WHERE id = 100000003"))
        session.commit()
    counted: list[int] = []

    def listeners() -> int:
        return sum(thread.name in ("sqlaqueue-listener", "sqlaqueue-watcher") for thread in threading.enumerate())

    def count(session: Session, job: Email) -> None:
        counted.append(listeners())

    with Consumer(Email, count, place.sessions):
        found = wait_all(place.sessions, jobs, timeout=60)
    assert [each.state for each in found].count("completed") == 1499
    assert found[3].state == "cancelled"
    assert counted == [1, 1]
    assert not listeners()


def test_jobs_without_a_status(server: Server) -> None:
    """Their rows are deleted by the claim; those that have failed are dead letters."""
    with server.database() as database:
        engine = sa.create_engine(database.url())
        MessageBase.metadata.create_all(engine)
        sessions = sessionmaker(engine)
        with sessions.begin() as session:
            session.add_all([Message(id=number) for number in range(1, 5)])

        def fail_even(session: Session, job: Message) -> None:
            if job.id % 2 == 0:
                raise Fail("even")

        jobs = [(Message, number) for number in range(1, 5)]
        with Consumer(Message, fail_even, sessions):
            found = wait_all(sessions, jobs, timeout=30)
        assert [each.state for each in found] == ["completed", "failed", "completed", "failed"]
        # A job that is enqueued again under the key of a dead letter is pending.
        with sessions.begin() as session:
            session.add(Message(id=2))
        with pytest.raises(WaitTimeout, match="1 of 4 jobs have not finished within 0 s: Message 2; they"):
            wait_all(sessions, jobs, timeout=0)
        engine.dispose()


def test_wrong_jobs(place: Place) -> None:
    (email,) = place.add(Email())
    for jobs in (email, Email, "emails", 5):
        with pytest.raises(
            StatementError, match=re.escape("give a list of jobs: instances, or pairs of a class and a")
        ):
            wait_all(place.sessions, jobs)  # type: ignore[call-overload] # that is wrong
    with pytest.raises(StatementError, match="this Email is not in the database; add it to a session and commit"):
        wait_all(place.sessions, [email, Email()])
    with pytest.raises(NotAQueueError):
        wait_all(place.sessions, [(Base, 5)])
    with pytest.raises(StatementError, match="this is not a primary key"):
        wait_all(place.sessions, [(Letter, 5)])
