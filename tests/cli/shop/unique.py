"""A queue of unique jobs, which some commands report on in other words."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique


class Base(DeclarativeBase):
    pass


class Sync(QueueMixin, Base):
    __tablename__ = "sync"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
