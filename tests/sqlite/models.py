"""The queues of these tests: some with options, and that of the tests of Consumers and of faults, in a file."""

from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import QueueConfig, QueueMixin, Schedule, Unique
from tests.consumer.bench import Bench
from tests.consumer.models import models, prepared


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    to: Mapped[str] = mapped_column(default="ada")


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    __queue__ = QueueConfig(
        unique=Unique("customer", "kind"), attempt_history=timedelta(days=3), retention={"completed": timedelta(days=1)}
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
    kind: Mapped[str] = mapped_column(default="book")


class Hourly(QueueMixin, Base):
    __tablename__ = "hourly"
    __queue__ = QueueConfig(
        unique=Unique("customer", per=timedelta(hours=1), states=("pending", "processing", "completed"))
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


class Waits(QueueMixin, Base):
    __tablename__ = "waits"
    __queue__ = QueueConfig(unique=Unique("customer", states=("pending",), on_return="wait"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


class Measured(QueueMixin, Base):
    __tablename__ = "measured"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]
    took: Mapped[timedelta] = mapped_column(default=timedelta(minutes=90))


HOURLY = Schedule("hourly", Email, every=timedelta(hours=1), values={"to": "grace"})


def do_nothing(session: Session, job: object) -> None:
    """The handler of the command line's tests."""


def made(path: Path) -> sessionmaker[Session]:
    """Return the sessions of a new file with the tables of all queues."""
    engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{path}"))
    Base.metadata.create_all(engine)
    return sessionmaker(engine)


class File:
    """A file in the place of a database of the server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def url(self, driver: str = "psycopg") -> str:
        """Return the URL for the driver that stands in the place of a driver for PostgreSQL."""
        return f"sqlite{'+aiosqlite' if driver == 'asyncpg' else ''}:///{self.path}"


class SQLiteBench(Bench):
    """The queue of ``update_status`` in a file."""

    def __init__(self, path: Path, api: str = "sync") -> None:
        self.file = File(path)
        self.database = self.file  # type: ignore[assignment] # a file has the URL alone
        self.strategy, self.api = "update_status", api
        self.models = models(self.strategy)
        self.Job, self.Owner, self.Effect = self.models.job, self.models.owner, self.models.effect
        self.held, self.has_status = False, True
        self.engine = prepared(sa.create_engine(self.file.url()))
        self.sessions = sessionmaker(self.engine)
        self.create()

    def snapshot(self) -> sa.Connection:
        """Return a connection: each transaction of SQLite reads from one snapshot."""
        return self.engine.connect()
