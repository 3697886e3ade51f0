"""Queues with columns of many types in a database of SQLite and of MariaDB, and a dashboard of them."""

import asyncio
import enum
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import (
    QueueConfig,
    QueueMixin,
    claim,
    prepare,
)
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.queue.run import key_text
from sqlaqueue.web import Dashboard
from tests.models import shared
from tests.servers import Database
from tests.web.conftest import client, everything

ASYNC = {"sqlite": "sqlite+aiosqlite", "mariadb": "mariadb+asyncmy", "postgresql": "postgresql+asyncpg"}


class Kind(enum.Enum):
    WELCOME = "welcome"
    RECEIPT = "receipt"


@shared
def make_queues() -> Any:
    class Base(DeclarativeBase):
        type_annotation_map = {str: sa.String(100), datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - SQLAlchemy's form

    class Email(QueueMixin, Base):
        __tablename__ = "email"
        __queue__ = QueueConfig(extra_columns=("started_at",))
        id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
        recipient: Mapped[str] = mapped_column(index=True)
        subject: Mapped[str | None]
        secret: Mapped[str | None]
        kind: Mapped[Kind | None]
        payload: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
        total: Mapped[Decimal | None] = mapped_column(sa.Numeric(20, 4))
        weight: Mapped[float | None] = mapped_column(sa.Double)
        urgent: Mapped[bool | None]
        day: Mapped[date | None] = mapped_column(index=True)
        at: Mapped[datetime | None]
        reference: Mapped[uuid.UUID | None]
        blob: Mapped[bytes | None]

    class Letter(QueueMixin, Base):
        __tablename__ = "letter"
        __queue__ = QueueConfig(attempt_history=timedelta(days=14), statistics=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    class Page(QueueMixin, Base):
        __tablename__ = "page"
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
        batch_id: Mapped[uuid.UUID | None] = mapped_column(sa.ForeignKey("book.id"), index=True)
        batch: Mapped["Book | None"] = relationship(back_populates="pages")

    class Book(QueueMixin, Base):
        __tablename__ = "book"
        __queue__ = QueueConfig(waits_for="pages")
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
        pages: Mapped[list["Page"]] = relationship(back_populates="batch")

    # The annotations name classes of this function.
    Base.registry._class_registry |= {"Book": Book, "Page": Page}
    return Email, Letter, Page, Book


class Place:
    """A database of one engine with the tables of the queues, and a dashboard of them."""

    def __init__(self, url: str) -> None:
        self.engine = prepare(sa.create_engine(url))
        self.url, self.name = self.engine.url, self.engine.dialect.name
        self.Email, self.Letter, self.Page, self.Book = self.models = make_queues()
        self.metadata: sa.MetaData = self.Email.metadata
        self.metadata.create_all(self.engine)

    def client(self, *models: Any, access: Any = everything, **options: Any) -> httpx.AsyncClient:
        return client(Dashboard(models or self.models, sessionmaker(self.engine), access=access, **options))

    @asynccontextmanager
    async def browser(self, api: str, *models: Any, access: Any = everything, **options: Any) -> AsyncIterator[Any]:
        """Give a client of a dashboard whose sessions are those of threads, or of asyncio."""
        if api == "sync":
            async with self.client(*models, access=access, **options) as browser:
                yield browser
            return
        engine = prepare(create_async_engine(self.url.set(drivername=ASYNC[self.name])))
        made = Dashboard(models or self.models, async_sessionmaker(engine), access=access, **options)
        try:
            async with client(made) as browser:
                yield browser
        finally:
            await engine.dispose()

    def add(self, *jobs: Any) -> list[Any]:
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()
            return [job.id for job in jobs]

    def email(self, number: int, **values: Any) -> Any:
        given: dict[str, Any] = {"recipient": f"ada{number}@example.com", "subject": f"Hello {number}"}
        return self.Email(id=number, **(given | values))

    def settle(self, verb: Callable[..., Any], number: int = 1, **options: Any) -> None:
        with Session(self.engine) as session:
            jobs = session.scalars(claim(self.Email, number)).all()
            assert len(jobs) == number
            session.commit()
            session.execute(verb(jobs, **options))
            session.commit()

    def states(self) -> dict[int, str]:
        with Session(self.engine) as session:
            return {int(key_text(job.key)): job.state for job in QueueAdmin(session, self.Email).jobs(limit=1000)}

    def get(self, path: str, params: Any = None, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with self.client(**options) as browser:
                return await browser.get(path, params=params)

        return asyncio.run(ask())

    def text(self, path: str, params: Any = None, **options: Any) -> str:
        response = self.get(path, params, **options)
        assert response.status_code == 200, response.text
        for broken in ("cannot be read", "took too long", "This page cannot", "internal error"):
            assert broken not in response.text, around(response.text, broken)
        return response.text


def around(text: str, words: str) -> str:
    place = text.index(words)
    return re.sub(r"\s+", " ", text[max(0, place - 300) : place + 300])


@pytest.fixture(params=["sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with contextmanager(_url)(request, tmp_path) as url:
        found = Place(url)
        yield found
        found.engine.dispose()


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def each_place(request: pytest.FixtureRequest, shared: Database, tmp_path: Path) -> Iterator[Place]:
    """A place of PostgreSQL as well, where both are to be the same."""
    if request.param != "postgresql":
        with contextmanager(_url)(request, tmp_path) as url:
            found = Place(url)
            yield found
            found.engine.dispose()
        return
    found = Place(shared.url())
    yield found
    with found.engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    found.engine.dispose()


def _url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.db'}"
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        yield server.url(name)


FULL: dict[str, Any] = {
    "kind": Kind.RECEIPT,
    "payload": {"order": {"number": 5}, "name": "Ada", "done": True, "items": ["a", "b"]},
    "total": Decimal("12.5"),
    "weight": 0.25,
    "urgent": True,
    "day": date(2030, 12, 31),
    "at": datetime(2030, 12, 31, 8, 30, 15, 123456, tzinfo=UTC),
    "reference": uuid.UUID("12345678-1234-5678-1234-567812345678"),
    "blob": b"\x00\xff",
}
"""A value of each type."""
