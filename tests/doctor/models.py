"""Queues of each strategy, in a module, so that commands can name them."""

import os
from datetime import timedelta

from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    FairShare,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Schedule,
    Unique,
)
from sqlaqueue.strategies.existing_messages import ExistingMessages


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=5, unique=Unique("to"), retention={"completed": 60})

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str | None]


class Letter(QueueMixin, Base):
    __tablename__ = "letter"
    __queue__ = QueueConfig(strategy="delete_returning")

    id: Mapped[int] = mapped_column(primary_key=True)


class Entry(QueueMixin, Base):
    __tablename__ = "Entry of a book"
    __queue__ = QueueConfig(strategy="batch_select")

    id: Mapped[int] = mapped_column(primary_key=True)


class Task(QueueMixin, Base):
    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, retention={"failed": 60})

    id: Mapped[int] = mapped_column(primary_key=True)


class Note(Base):
    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


class Delivery(QueueMixin, Base):
    """Its messages are the application's own."""

    __tablename__ = "delivery"
    __queue__ = QueueConfig(strategy=ExistingMessages(Note, job="order_id", order_by="id"), columns={"priority": None})

    id: Mapped[int] = mapped_column(primary_key=True)


class Export(QueueMixin, Base):
    """A queue with limits, a rate and an order."""

    __tablename__ = "export"
    __queue__ = QueueConfig(
        flow_control=[
            ConcurrencyLimit(40, per="customer_id"),
            ConcurrencyLimit(50),
            RateLimit(1000, every=1, per="customer_id"),
            InOrder("document_id", by="id"),
        ],
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(default=1)
    document_id: Mapped[int] = mapped_column(default=1)


class Import(QueueMixin, Base):
    """A held strategy with flow control, whose keys take turns."""

    __tablename__ = "import"
    __queue__ = QueueConfig(
        strategy="batch_select", flow_control=[ConcurrencyLimit(40, per="customer_id"), FairShare("customer_id")]
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(default=1)


SOME = (Email, Letter, Delivery)
"""For what differs with the strategy in few points."""
MODELS = (Email, Letter, Entry, Task, Delivery, Export, Import)


def handle(session: Session, job: QueueMixin) -> None:
    """Run a job."""


async def handle_async(session: object, job: QueueMixin) -> None:
    """Run a job."""


def make_consumer() -> Consumer[Email]:
    return Consumer(Email, handle, sessionmaker(create_engine(os.environ["SQLAQUEUE_URL"], poolclass=NullPool)))


# -- a queue with a schedule, in a MetaData of its own: it has the tables of schedules -----------------------------


class ReportBase(DeclarativeBase):
    pass


class Report(QueueMixin, ReportBase):
    __tablename__ = "report"
    __queue__ = QueueConfig(strategy="update_status")

    id: Mapped[int] = mapped_column(primary_key=True)


SCHEDULES = [Schedule("weekly", Report, every=timedelta(days=7))]
