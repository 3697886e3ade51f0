"""The models of the tests, and what they do with schedules."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import Schedule
from sqlaqueue.queue.names import SCHEDULE, TICK
from sqlaqueue.schedules.fire import Fired, fire
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from tests.models import KINDS, execute, make_job, shared

__all__ = ["KINDS", "execute"]

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@shared
def make_report(kind: str = "update_status", **options: Any) -> Any:
    """Return a class of jobs whose table is ``report``."""
    attributes = {
        "__tablename__": "report",
        "kind": mapped_column(sa.String, nullable=False),
        "day": mapped_column(sa.Date),
        "token": mapped_column(sa.Uuid),
    }
    return make_job(kind, attributes, **options)


def hourly(model: Any, name: str = "hourly", **options: Any) -> Schedule[Any]:
    options = {"every": HOUR, "values": {"kind": "sales"}, **options}
    return Schedule(name, model, **options)


def start(engine: sa.Engine, schedules: Sequence[Any], *, reset: bool = False) -> Any:
    """Do what a process does when it starts with schedules of one MetaData; return what was written and kept."""
    [group] = schedule_groups(schedules, "the test")
    with Session(engine) as session:
        written, kept, changed = declare(session, group, reset=reset)
    assert not changed
    return written, kept


def prepared(engine: sa.Engine, *schedules: Any) -> list[Any]:
    """Create the tables of schedules and their jobs, and return the schedules."""
    schedules[0].model.metadata.create_all(engine)
    return [*schedules]


def started(engine: sa.Engine, *schedules: Any) -> list[Any]:
    """The same, and do what a process does when it starts."""
    start(engine, prepared(engine, *schedules))
    return [*schedules]


def fire_due(engine: sa.Engine, schedules: Sequence[Any], **options: Any) -> list[Fired]:
    """Fire what is due, as a process with these schedules does."""
    [group] = schedule_groups(schedules, "the test")
    fired: list[Fired] = []
    while True:
        with Session(engine, expire_on_commit=False) as session:
            firing = fire(session, group, **options)
        fired += firing.fired
        for _, error in firing.failed:
            raise error
        if not firing.more:
            return fired


def pass_time(engine: sa.Engine, span: timedelta) -> None:
    """Make all moments in the tables of schedules earlier, as if time had passed."""
    moments = {
        SCHEDULE: ("created_at", "last_tick", "next_tick", "paused_at", "run_requested_at", "edited_at", "planned_at"),
        TICK: ("tick", "fired_at"),
    }
    with engine.begin() as connection:
        for table, columns in moments.items():
            # Away and back, as the key of ticks contains a moment.
            for sign, extra in (("-", timedelta(days=9999)), ("+", timedelta(days=9999))):
                moved = -span - extra if sign == "-" else extra
                values = ", ".join(f"{name} = {name} + :moved" for name in columns)
                connection.execute(sa.text(f"UPDATE {table} SET {values}"), {"moved": moved})


def stored(engine: sa.Engine, name: str = "hourly") -> dict[str, Any]:
    """Return the row of a schedule, with its moments in UTC."""
    with engine.connect() as connection:
        rows = connection.execute(sa.text(f"SELECT * FROM {SCHEDULE} WHERE name = :name"), {"name": name})
        row = rows.mappings().one()
    return {key: value.astimezone(UTC) if isinstance(value, datetime) else value for key, value in row.items()}


def ticks_in(engine: sa.Engine, name: str = "hourly") -> list[tuple[datetime, Any]]:
    with engine.connect() as connection:
        rows = connection.execute(
            sa.text(f"SELECT tick, key FROM {TICK} WHERE schedule = :name ORDER BY tick"), {"name": name}
        )
        return [(tick.astimezone(UTC), key) for tick, key in rows]


def count_jobs(engine: sa.Engine, model: Any) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(model.__table__)) or 0
