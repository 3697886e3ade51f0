"""Moments of the program: what was stored before the engine was prepared is read, and stored in the same way."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

import sqlaqueue.sqlite
from sqlaqueue.queue.spec import clock

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=5)))
PLAIN = LOCAL.replace(tzinfo=None)
COMPACT = sqlite.DATETIME(
    storage_format="%(year)04d%(month)02d%(day)02d%(hour)02d%(minute)02d%(second)02d",
    regexp=r"(\d{4})(\d{2})(\d{2})(\d{2})(\d{2})(\d{2})",
)
TYPES: list[tuple[Any, Any]] = [
    (sa.DateTime(), PLAIN),
    (sa.DateTime(), LOCAL),
    (sa.DateTime(), date(2026, 1, 2)),
    (sa.TIMESTAMP(), LOCAL),
    (sqlite.DATETIME(truncate_microseconds=True), PLAIN),
    (COMPACT, PLAIN),
]


@pytest.mark.once
@pytest.mark.parametrize(("type_", "value"), TYPES, ids=repr)
def test_a_moment_of_the_program_is_stored_and_read_as_before(type_: Any, value: Any, tmp_path: Path) -> None:
    table = sa.Table("note", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("at", type_))
    engines = [sa.create_engine(f"sqlite:///{tmp_path / 'notes.db'}") for _ in range(2)]
    sqlaqueue.sqlite.prepare(engines[1])
    table.create(engines[0])
    for engine in engines:
        with engine.begin() as connection:
            connection.execute(sa.insert(table).values(at=value))
    for engine in engines:
        with engine.connect() as connection:
            stored = connection.exec_driver_sql("SELECT DISTINCT at FROM note").all()
            assert len(stored) == 1
            found = connection.scalars(sa.select(table.c.at)).all()
            assert found[0] == found[1]
            if isinstance(value, datetime):
                literal = sa.select(table.c.id).where(table.c.at == value)
                text = str(literal.compile(engine, compile_kwargs={"literal_binds": True}))
                assert len(connection.exec_driver_sql(text).all()) == 2
        engine.dispose()


@pytest.mark.once
def test_the_distance_to_utc_that_another_program_has_written(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'notes.db'}")
    sqlaqueue.sqlite.prepare(engine)
    table = sa.Table("note", sa.MetaData(), sa.Column("at", sa.DateTime(timezone=True)))
    with engine.begin() as connection:
        table.create(connection)
        connection.exec_driver_sql("INSERT INTO note VALUES ('2026-01-02 12:00:00+02:00'), ('2026-01-02 10:00:00')")
        assert connection.scalars(sa.select(table.c.at)).all() == [datetime(2026, 1, 2, 10, tzinfo=UTC)] * 2
    engine.dispose()


@pytest.mark.once
def test_the_clock_of_the_library_in_a_statement_without_tables() -> None:
    """It has the arithmetic of moments as well, though nothing else tells such a statement from a program's."""
    engine = sa.create_engine("sqlite://")
    sqlaqueue.sqlite.prepare(engine)
    day = timedelta(days=1)
    query = sa.select(clock(), sa.cast(clock() - day, sa.DateTime(timezone=True)))
    with engine.connect() as connection:
        now, before = connection.execute(query).one()
    assert abs(now - day - before) < timedelta(seconds=1)
    engine.dispose()
