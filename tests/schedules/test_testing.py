"""fire_schedules() fires in the test's transaction, and travel() lets time pass for schedules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import Tick, tick_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.testing import async_fire_schedules, async_travel, drain, enqueued, fire_schedules, travel
from tests.schedules.models import DAY, HOUR, KINDS, hourly, make_report
from tests.servers import Database


@pytest.fixture(params=["update_status", "delete_returning", "rows_are_messages"])
def report(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Any]:
    assert request.param in KINDS
    report = make_report(request.param)
    hourly(report)
    report.metadata.create_all(engine)
    yield report
    with engine.connect() as connection:
        for table in report.metadata.sorted_tables:
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0


def test_a_schedule_fires_when_its_time_has_come(engine: sa.Engine, report: Any) -> None:
    def make(tick: Tick) -> Any:
        return report(kind="made", day=tick.at.date())

    far = (datetime.now(UTC).hour + 12) % 24
    schedules = [
        hourly(report, catch_up="all"),
        hourly(report, "daily", every=None, cron=f"0 {far} * * *", make=make, values={}),
    ]
    with Session(engine) as session:
        assert fire_schedules(session, schedules) == []
        travel(session, 59 * timedelta(minutes=1))
        assert fire_schedules(session, schedules) == []
        travel(session, 61)
        [job] = fire_schedules(session, schedules)
        assert job.kind == "sales"
        tick = tick_of(session, job)
        assert tick is not None
        assert (tick.schedule, tick.late < timedelta(minutes=2)) == ("hourly", True)
        assert enqueued(session, report) == [job]
        travel(session, DAY)
        kinds = [each.kind for each in fire_schedules(session, schedules)]
        assert sorted(kinds) == ["made"] + ["sales"] * 24
        assert drain(session, report, lambda own, job: None) == 26


def test_settings_of_the_transaction_are_left_alone(engine: sa.Engine, report: Any) -> None:
    with Session(engine) as session:
        session.execute(sa.text("SET LOCAL lock_timeout = '77s'"))
        fire_schedules(session, [hourly(report)])
        assert session.scalar(sa.text("SHOW lock_timeout")) == "77s"
        assert session.scalar(sa.text("SHOW idle_in_transaction_session_timeout")) == "0"


def test_what_is_stored_is_fired_as_well(engine: sa.Engine, report: Any) -> None:
    with Session(engine) as session:
        session.execute(
            sa.text(
                "INSERT INTO sqlaqueue_schedule (name, queue, every, values, run_requested_at) "
                """VALUES ('x', 'report', '1 hour', '{"kind": "stored"}', now())"""
            )
        )
        assert [job.kind for job in fire_schedules(session, [report])] == ["stored"]


def test_anything_else_is_refused(engine: sa.Engine, report: Any) -> None:
    with pytest.raises(ConfigurationError, match="fire_schedules"):
        fire_schedules(engine, [hourly(report)])  # type: ignore[arg-type] # the point of the test
    with Session(engine) as session, pytest.raises(ConfigurationError, match="this is no Schedule"):
        fire_schedules(session, [5])  # type: ignore[list-item] # the point of the test


async def test_in_async_code(engine: sa.Engine, shared: Database, report: Any) -> None:
    own = create_async_engine(shared.url("asyncpg"))
    async with AsyncSession(own) as session:
        assert await async_fire_schedules(session, [hourly(report)]) == []
        await async_travel(session, HOUR)
        [job] = await async_fire_schedules(session, [hourly(report)])
        assert job.kind == "sales"
    await own.dispose()
