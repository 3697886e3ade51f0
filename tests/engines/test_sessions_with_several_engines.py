"""A session with an engine for each class: what is refused or checked depends on the class, not on the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue.sqlite
from sqlaqueue import Consumer, QueueConfig, QueueMixin, admin
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.web import Access, Dashboard
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    """A queue on PostgreSQL."""

    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


class Thumbnail(QueueMixin, Base):
    """A queue in a file."""

    __tablename__ = "thumbnail"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def file(tmp_path: Any) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path}/jobs.db")
    sqlaqueue.sqlite.prepare(made)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture(params=["binds", "another_default"])
def sessions(engine: sa.Engine, file: sa.Engine, request: pytest.FixtureRequest) -> sessionmaker[Session]:
    Base.metadata.create_all(engine)
    if request.param == "binds":
        return sessionmaker(binds={Email: engine, Thumbnail: file})
    return sessionmaker(file, binds={Email: engine})


def test_a_doctor_examines_the_queue_on_postgresql(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        # The server itself is one for tests.
        assert [found for found in admin.doctor(session, Email) if found.queue is not None] == []
        with pytest.raises(ConfigurationError, match=r"doctor\(\) reads .* not available on SQLite"):
            admin.doctor(session, Email, Thumbnail)


def test_a_dashboard_shows_the_queue_on_postgresql(sessions: sessionmaker[Session]) -> None:
    Dashboard([Email], sessions, access=lambda _: Access(read=True))
    with pytest.raises(ConfigurationError, match="Dashboard reads .* not available on SQLite"):
        Dashboard([Email, Thumbnail], sessions, access=lambda _: Access(read=True))


def test_a_dashboard_with_an_engine_that_is_configured_later(sessions: sessionmaker[Session]) -> None:
    Dashboard([Email], sessionmaker(), access=lambda _: Access(read=True))


@pytest.mark.parametrize("model", [Email, Thumbnail])
def test_statistics_of_each(sessions: sessionmaker[Session], file: sa.Engine, model: Any) -> None:
    index = next(index for index in model.__table__.indexes if str(index.name).endswith("_claim"))
    with sessions() as session:
        session.add(model(id=1))
        session.commit()
        assert admin.stats(session, model).states["pending"] == 1
        assert admin.stats(session, model).missing_indexes == []
        session.rollback()
        index.drop(session.get_bind(sa.inspect(model)))
        assert admin.stats(session, model).missing_indexes == [index.name]


@pytest.mark.parametrize("model", [Email, Thumbnail])
def test_a_consumer_of_each(sessions: sessionmaker[Session], model: Any) -> None:
    with sessions.begin() as session:
        session.add_all(model(id=number) for number in range(3))
    Consumer(model, lambda session, job: None, sessions).drain()
    with sessions() as session:
        assert session.scalars(sa.select(model.status)).all() == ["completed"] * 3
