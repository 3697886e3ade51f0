"""A queue with a schedule, in a MetaData of its own: it has the tables of schedules."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Schedule


class Base(DeclarativeBase):
    pass


class Report(QueueMixin, Base):
    __tablename__ = "report"
    __queue__ = QueueConfig(strategy="update_status")

    id: Mapped[int] = mapped_column(primary_key=True)


SCHEDULES = [Schedule("weekly", Report, every=timedelta(days=7))]
