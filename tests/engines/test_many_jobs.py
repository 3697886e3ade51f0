"""What one call does for many jobs takes time in proportion to their number."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique, enqueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.conftest import Place


class Base(DeclarativeBase):
    pass


class Reminder(QueueMixin, Base):
    __tablename__ = "reminder"
    __queue__ = QueueConfig(unique=Unique("customer", "day", "kind"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(sa.String(20))
    day: Mapped[int]
    kind: Mapped[str] = mapped_column(sa.String(20))


@contextmanager
def counted_work(session: Session) -> Iterator[list[int]]:
    """Count the steps of SQLite's machine, or the rows that MariaDB reads one after another."""
    counts = [0]
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        driver = connection.connection.driver_connection
        assert driver is not None

        def step() -> int:
            counts[0] += 1
            return 0

        driver.set_progress_handler(step, 1000)
        yield counts
        driver.set_progress_handler(None, 0)
        return
    status = sa.text("SHOW SESSION STATUS LIKE 'Handler_read_rnd_next'")
    before = int(session.execute(status).one()[1])
    yield counts
    counts[0] = int(session.execute(status).one()[1]) - before


@pytest.mark.once
def test_twins_are_looked_for_by_several_attributes(place: Place) -> None:
    engine = place.engine()
    Base.metadata.create_all(engine)
    work: list[int] = []
    for number in (500, 2000):
        with Session(engine) as session, counted_work(session) as counts:
            jobs = [Reminder(customer=f"c{n}", day=n, kind="call") for n in range(number)]
            assert all(each.created for each in enqueue(session, jobs))
        work += counts
    assert work[1] < 6 * work[0]
    engine.dispose()
