"""What the tests about lists of jobs share: models, rows, and walks over all pages."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web.data import job_orders
from sqlaqueue.web.data.job_columns import JobColumns, columns_of
from sqlaqueue.web.data.job_pages import JobPage, parse_request, read_page
from tests.models import shared

Pairs = Sequence[tuple[str, str]]


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class Cents(sa.types.TypeDecorator[Decimal]):
    """Stores an amount as an integer."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return None if value is None else int(value * 100)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        raise AssertionError("a list must not call the types of the application")


@shared
def make_wide(**options: Any) -> Any:
    """Return a queue with columns of many types, whose real names differ from those of the attributes."""

    class Base(DeclarativeBase):
        type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - as SQLAlchemy wants it

    class Wide(QueueMixin, Base):
        __tablename__ = "Wide table"
        __queue__ = QueueConfig(columns={"priority": "rank", "last_error": "problem"}, **options)
        number: Mapped[int] = mapped_column("The Number", sa.BigInteger, primary_key=True)
        name: Mapped[str | None] = mapped_column('na"me %s', index=True)
        amount: Mapped[Decimal | None] = mapped_column("Amount", Cents)
        exact: Mapped[Decimal | None] = mapped_column(sa.Numeric(40, 10), index=True)
        ratio: Mapped[float | None] = mapped_column(sa.Float)
        mood: Mapped[Mood | None] = mapped_column(index=True)
        flag: Mapped[bool | None]
        day: Mapped[date | None] = mapped_column(index=True)
        at: Mapped[datetime | None] = mapped_column(index=True)
        naive: Mapped[datetime | None] = mapped_column(sa.DateTime())
        reference: Mapped[uuid.UUID | None] = mapped_column(index=True)
        document: Mapped[Any | None] = mapped_column(postgresql.JSONB)
        plain_json: Mapped[Any | None] = mapped_column(sa.JSON)
        tags: Mapped[list[str] | None] = mapped_column(postgresql.ARRAY(sa.Text))
        pause: Mapped[timedelta | None] = mapped_column(sa.Interval)
        address: Mapped[Any | None] = mapped_column(postgresql.INET)
        blob: Mapped[bytes | None]
        body: Mapped[str | None] = mapped_column(sa.Text)
        doubled: Mapped[int | None] = mapped_column(sa.BigInteger, sa.Computed('"The Number" * 2', persisted=True))

    return Wide


@shared
def make_rows(strategy: str = "update_status", **options: Any) -> Any:
    """Return a queue with columns of which many rows have the same value, or none."""

    class Base(DeclarativeBase):
        pass

    class Row(QueueMixin, Base):
        __tablename__ = "row"
        __queue__ = QueueConfig(strategy=strategy, **options)
        id: Mapped[int] = mapped_column(primary_key=True)
        few: Mapped[int | None] = mapped_column(index=True)
        many: Mapped[int | None] = mapped_column(index=True)
        other: Mapped[int | None]
        __table_args__ = (
            sa.Index("both", "few", sa.text("many DESC NULLS LAST")),
            sa.Index("whole", "other", "id"),
        )

    return Row


@shared
def make_pairs() -> Any:
    """Return a queue with a composite key."""

    class Base(DeclarativeBase):
        pass

    class Pair(QueueMixin, Base):
        __tablename__ = "pair"
        __queue__ = QueueConfig(strategy="delete_returning")
        tenant: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        value: Mapped[int | None]

    return Pair


@shared
def make_messages() -> Any:
    """Return a queue whose rows are deleted by claims."""

    class Base(DeclarativeBase):
        pass

    class Note(QueueMixin, Base):
        __tablename__ = "note"
        __queue__ = QueueConfig(
            strategy="delete_returning",
            rows_are_messages=True,
            adopt={"attempts": "attempts", "last_error": "last_error", "run_at": "run_at"},
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str | None]
        mood: Mapped[Mood | None]
        amount: Mapped[Decimal | None] = mapped_column("Amount", sa.Numeric(20, 2))
        attempts: Mapped[int] = mapped_column(server_default="0")
        last_error: Mapped[str | None]
        run_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())

    return Note


def create(engine: sa.Engine, model: Any) -> None:
    model.metadata.create_all(engine)


def columns(model: Any, *redacted: str) -> JobColumns:
    return columns_of(spec_of(model), lambda _, name: name in redacted)


def page(
    engine: sa.Engine, model: Any, *pairs: tuple[str, str], size: int = 50, redacted: Iterable[str] = ()
) -> JobPage:
    job_orders._known.clear()
    with Session(engine) as session:
        return read_page(session, parse_request(columns(model, *redacted), pairs), size)


def pages(
    engine: sa.Engine,
    model: Any,
    *pairs: tuple[str, str],
    size: int = 50,
    before: str | None = None,
    backwards: bool = False,
) -> Iterator[JobPage]:
    """Walk over all pages of a list, from its beginning or backwards from a cursor."""
    cursor = before
    for _ in range(10_000):
        at = [] if cursor is None else [("before" if backwards else "after", cursor)]
        found = page(engine, model, *pairs, *at, size=size)
        yield found
        cursor = found.previous if backwards else found.next
        if cursor is None:
            return
    raise AssertionError("the list has no end")


def keys(found: Iterable[JobPage]) -> list[str]:
    return [job.key for each in found for job in each.jobs]


def make_window_small(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Let lists examine fewer rows at once."""
    for module in ("job_windows", "job_pages"):
        monkeypatch.setattr(f"sqlaqueue.web.data.{module}.WINDOW", window)
