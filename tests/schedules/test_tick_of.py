"""The tick of a job."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueMixin, Schedule, Tick, tick_of
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from tests.schedules.models import (
    HOUR,
    create,
    execute,
    fire_due,
    hourly,
    make_report,
    pass_time,
    start,
)


def test_a_job_of_no_schedule_has_no_tick(engine: sa.Engine) -> None:
    report = make_report()
    hourly(report)
    create(engine, report)
    with Session(engine) as session:
        job = report(kind="x")
        with pytest.raises(StatementError, match="is not in the database"):
            tick_of(session, job)
        session.add(job)
        session.flush()
        assert tick_of(session, job) is None
        with pytest.raises(NotAQueueError):
            tick_of(session, object())
        with pytest.raises(ConfigurationError, match="an Engine"):
            tick_of(engine, job)  # type: ignore[arg-type] # the point of the test


def test_a_process_that_knows_no_schedule_finds_the_tick(engine: sa.Engine) -> None:
    scheduled, report = make_report(), make_report()
    schedules = [hourly(scheduled)]
    create(engine, scheduled)
    start(engine, schedules)
    pass_time(engine, HOUR)
    fire_due(engine, schedules)
    with Session(engine) as session:
        assert isinstance(tick_of(session, session.scalars(sa.select(report)).one()), Tick)
    assert "sqlaqueue_tick" not in report.metadata.tables


def test_a_key_that_is_used_again_has_the_newest_tick(engine: sa.Engine) -> None:
    report = make_report()
    schedules = [hourly(report)]
    create(engine, report)
    start(engine, schedules)
    ticks = []
    for _ in range(2):
        pass_time(engine, HOUR)
        ticks += [fired.tick for fired in fire_due(engine, schedules)]
        if len(ticks) == 1:
            execute(engine, "TRUNCATE report RESTART IDENTITY")
    with Session(engine) as session:
        tick = tick_of(session, session.scalars(sa.select(report)).one())
        assert tick is not None
        assert tick.at == ticks[1]


def test_a_key_with_a_moment_is_found_from_any_time_zone(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Slot(QueueMixin, Base):
        __tablename__ = "slot"
        at: Mapped[datetime] = mapped_column(
            sa.DateTime(timezone=True), primary_key=True, default=lambda: datetime.now(UTC)
        )
        part: Mapped[int] = mapped_column(primary_key=True, default=1)

    schedules = [Schedule("hourly", Slot, every=HOUR, skip_unfinished=True)]
    create(engine, Slot)
    start(engine, schedules)
    pass_time(engine, HOUR)
    fire_due(engine, schedules)
    abroad = sa.create_engine(engine.url, connect_args={"options": "-c timezone=Asia/Kolkata"})
    with Session(abroad) as session:
        assert tick_of(session, session.scalars(sa.select(Slot)).one()) is not None
    pass_time(engine, HOUR)
    assert [fired.key for fired in fire_due(abroad, schedules)] == [None]
    abroad.dispose()
