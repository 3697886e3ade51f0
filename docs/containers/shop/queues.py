"""The queues of the shop: what a job is, what runs it, and when."""

import os
from datetime import timedelta

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Schedule, Scheduler


class Base(DeclarativeBase):
    pass


class Invoice(QueueMixin, Base):
    __tablename__ = "invoice"
    __queue__ = QueueConfig(strategy="update_status", retention={"completed": timedelta(days=30)})

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    number: Mapped[str | None]


def write_invoice(_session: Session, invoice: Invoice) -> None:
    invoice.number = f"{invoice.customer}-{invoice.id}"


engine = create_engine(os.environ["SQLAQUEUE_URL"], pool_pre_ping=True)
sessions = sessionmaker(engine)
consumer = Consumer(Invoice, write_invoice, sessions, concurrency=4, grace=20)
monthly = Schedule("monthly", Invoice, cron="0 6 1 * *", timezone="Europe/Berlin", values={"customer": "the landlord"})
scheduler = Scheduler(sessions, [monthly])
