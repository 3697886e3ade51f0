"""Jobs of every kind of mapping can be run in a test."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, States
from sqlaqueue.exc import NotClaimableError
from sqlaqueue.testing import crash, drain, enqueued, run_job, travel


class Base(DeclarativeBase):
    pass


class Message(QueueMixin, Base):
    """Single-table and joined inheritance."""

    __tablename__ = "message"
    __queue__ = QueueConfig(strategy="update_status")
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "kind", "polymorphic_identity": "message"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    done: Mapped[str | None]


class Text(Message):
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "text"}


class Letter(Message):
    __tablename__ = "letter"
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "letter"}
    id: Mapped[int] = mapped_column(sa.ForeignKey(Message.id), primary_key=True)
    street: Mapped[str]


class Parcel(QueueMixin, Base):
    """A composite key, other names and values, its own version, in a schema of its own."""

    __tablename__ = "parcel"
    __table_args__: ClassVar[dict[str, Any]] = {"schema": "depot"}
    __queue__ = QueueConfig(
        strategy="batch_select",
        columns={"status": "state", "run_at": "due", "attempts": "tries"},
        states=States(pending="waiting", processing="moving", completed="there"),
    )
    country: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version}


class Legacy(QueueMixin, Base):
    """An adopted table, with times without a zone and no count of attempts."""

    __tablename__ = "legacy"
    __queue__ = QueueConfig(strategy="batch_select", adopt={"status": "state", "run_at": "due"})
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(sa.String(20), default="pending")
    due: Mapped[datetime] = mapped_column(sa.DateTime(), server_default=sa.func.now())


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(sa.text("CREATE SCHEMA depot"))
        Base.metadata.create_all(connection)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


def mark(session: Session, message: Message) -> None:
    message.done = type(message).__name__


def test_inheritance(session: Session) -> None:
    jobs: list[Message] = [Message(), Text(), Letter(street="Main")]
    session.add_all(jobs)
    assert enqueued(session, Message) == jobs
    assert enqueued(session, Text) == jobs[1:2]
    for job in jobs:
        assert run_job(session, job, mark).state == "completed"
    assert [job.done for job in jobs] == ["Message", "Text", "Letter"]


def test_handlers_by_class(session: Session) -> None:
    handlers = {Message: mark, Letter: lambda session, letter: setattr(letter, "done", letter.street)}
    session.add_all([text := Text(), letter := Letter(street="Main")])
    assert run_job(session, letter, handlers).state == "completed"
    assert drain(session, Message, handlers) == 1
    assert (text.done, letter.done) == ("Text", "Main")


def test_composite_keys_and_other_names(session: Session) -> None:
    def fail(own: Session, parcel: Parcel) -> None:
        raise ValueError

    session.add_all([first := Parcel(country="de", number=1), second := Parcel(country="fr", number=1)])
    assert enqueued(session, Parcel, country="fr") == [second]
    result = run_job(session, first, fail)
    assert (result.state, first.state, first.tries) == ("pending", "waiting", 1)
    assert enqueued(session, Parcel) == [first, second]
    crash(session, second)
    travel(session, timedelta(hours=1))
    assert drain(session, Parcel, lambda own, parcel: None) == 2
    assert (first.state, second.state) == ("there", "there")


def test_an_adopted_table(session: Session) -> None:
    later = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    session.add(job := Legacy(due=later))
    with pytest.raises(NotClaimableError, match="is not due"):
        run_job(session, job, lambda own, legacy: None)
    travel(session, timedelta(hours=1))
    assert drain(session, Legacy, lambda own, legacy: None) == 1
    assert job.state == "completed"


def test_a_handler_that_deletes_its_job(session: Session) -> None:
    session.add(text := Text())
    result = run_job(session, text, lambda own, job: own.delete(job))
    assert (result.outcome, result.state, result.job) == ("completed", "gone", None)
