"""Progress that a handler writes by a second session, as the page Consumers shows it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, prepare
from tests.servers import Server


class Base(DeclarativeBase):
    pass


class Import(QueueMixin, Base):
    __tablename__ = "import_job"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)
    progress: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None] = mapped_column(sa.String(50))


class Other(DeclarativeBase):
    pass


class Held(QueueMixin, Other):
    __tablename__ = "held_import"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)
    progress: Mapped[int] = mapped_column(default=0)


class Deleted(QueueMixin, Other):
    __tablename__ = "deleted_import"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)
    progress: Mapped[int] = mapped_column(default=0)


class Message(QueueMixin, Other):
    __tablename__ = "message_import"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, max_attempts=1)

    id: Mapped[int] = mapped_column(primary_key=True)
    progress: Mapped[int] = mapped_column(default=0)


class Progress(Other):
    __tablename__ = "progress"

    job: Mapped[str] = mapped_column(primary_key=True)
    percent: Mapped[int]


def report(engine: sa.Engine, job: Any, progress: int) -> bool:
    """Return whether the row was written: it is not if another worker has taken the job over."""
    model = type(job)
    with Session(engine) as session:
        mine = sa.update(model).where(model.id == job.id, model.attempts == job.attempts)
        written: Any = session.execute(mine.values(progress=progress))
        session.commit()
        return bool(written.rowcount)


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def engine(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "postgresql":
        with server.database() as database:
            engine = sa.create_engine(database.url())
            yield engine
            engine.dispose()
    elif request.param == "sqlite":
        engine = prepare(sa.create_engine(f"sqlite:///{tmp_path}/jobs.db"), busy_timeout=0.2)
        yield engine
        engine.dispose()
    else:
        mariadb = request.getfixturevalue("mariadb")
        with mariadb.database() as name:
            engine = prepare(sa.create_engine(mariadb.url(name)))
            yield engine
            engine.dispose()


def run(engine: sa.Engine, model: Any, handler: Callable[..., None]) -> Any:
    model.metadata.create_all(engine)
    sessions = sessionmaker(engine)
    with sessions.begin() as session:
        session.add(model(id=1))
    Consumer(model, handler, sessions).drain()
    with sessions(expire_on_commit=False) as session:
        return session.get(model, 1)


def test_others_see_it_before_the_handler_has_ended(engine: sa.Engine) -> None:
    seen = []

    def load(session: Session, job: Import) -> None:
        for percent in (10, 60):
            assert report(engine, job, percent)
            with Session(engine) as other:
                seen.append(other.scalar(sa.select(Import.progress)))
        session.add(Import(id=2, status="completed"))
        job.note = "loaded"

    job = run(engine, Import, load)
    assert seen == [10, 60]
    assert (job.status, job.progress, job.note, job.last_error) == ("completed", 60, "loaded", None)


def test_it_is_written_between_statements_of_the_handler(engine: sa.Engine) -> None:
    """But not on SQLite, where the handler's transaction has a snapshot or the write lock."""
    errors, runs = [], 0

    def load(session: Session, job: Import) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            session.scalars(sa.select(Import)).all()
            assert report(engine, job, 10)
        session.execute(sa.insert(Import).values(id=2, status="completed"))
        try:
            assert report(engine, job, 20)
        except DBAPIError as error:
            errors.append(str(error.orig))

    job = run(engine, Import, load)
    assert job.status == "completed"
    if engine.dialect.name == "sqlite":
        # The first run ended at its own write, after the report; the second one waited in vain for itself.
        assert (runs, job.progress, errors) == (2, 10, ["database is locked"])
    else:
        assert (runs, job.progress, errors) == (1, 20, [])


def test_a_worker_that_has_lost_its_job_writes_nothing(engine: sa.Engine) -> None:
    reported = []

    def load(session: Session, job: Import) -> None:
        with Session(engine) as other:
            other.execute(sa.update(Import).values(attempts=Import.attempts + 1))
            other.commit()
        reported.append(report(engine, job, 10))

    assert run(engine, Import, load).progress == 0
    assert reported == [False]


@pytest.mark.parametrize("model", [Held, Deleted, Message])
def test_a_strategy_that_holds_a_transaction(server: Server, model: Any) -> None:
    """The row cannot be written; that of another table can, also one that refers to the job without a foreign key."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), connect_args={"options": "-c lock_timeout=10s"})
        reported = []

        def load(session: Session, job: Any) -> None:
            reported.append(report(engine, job, 10))
            with Session(engine) as other:
                other.add(Progress(job=f"{model.__tablename__} {job.id}", percent=10))
                other.commit()
            with Session(engine) as other:
                reported.append(other.scalar(sa.select(Progress.percent)))

        run(engine, model, load)
        assert reported == [False, 10]
        engine.dispose()
