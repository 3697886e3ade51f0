"""Writes the schedules of a program into the database when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.queue.backend import backend
from sqlaqueue.schedules.definition import Schedule
from sqlaqueue.schedules.group import ScheduleGroup

DEFINITION = (
    "queue",
    "model",
    "cron",
    "every",
    "timezone",
    "values",
    "factory",
    "jitter",
    "catch_up",
    "grace",
    "skip_unfinished",
)
"""The columns that a definition consists of."""

_SPANS = ("every", "jitter", "grace")


class Declared(NamedTuple):
    """What was found and written."""

    written: list[str]
    """The schedules that were new, or were changed in the program since it had last started."""
    kept: list[str]
    """Those that the program has changed, but that were changed or added at run time as well, and so are kept."""


def as_json(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a definition as JSON, to be stored as the last one of the program and compared with it."""
    spans = {name: values[name].total_seconds() for name in _SPANS if values[name] is not None}
    return {name: values[name] for name in DEFINITION} | spans


def from_code(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a definition that :func:`as_json` has written."""
    spans = {name: timedelta(seconds=code[name]) for name in _SPANS if code[name] is not None}
    return {name: code[name] for name in DEFINITION} | spans


def is_edited(row: Mapping[Any, Any]) -> bool:
    """Return whether a stored schedule differs from what a program last wrote, or comes from no program."""
    return row["code"] is None or as_json(row) != row["code"]


def declare(session: Session, group: ScheduleGroup, *, reset: bool = False) -> Declared:
    """Write those schedules of the program that differ from what a program last wrote, and commit.

    A schedule that was changed at run time is left as it is. None is deleted: it may belong to another program.

    :param reset: overwrite what was changed at run time as well.
    """
    table = group.tables.schedules
    names = sa.any_(sa.bindparam(None, list(group.declared), backend().key_array(sa.Text())))
    rows = session.execute(sa.select(table).where(table.c.name == names), bind_arguments=group.bind).mappings()
    stored = {row["name"]: row for row in rows}
    result = Declared([], [])
    # In one order, as two processes that start together write the same rows.
    for name, schedule in sorted(group.declared.items()):
        row = stored.get(name)
        if row is None:
            insert = backend().insert_or_ignore(table, _values(name, schedule))
            session.execute(insert, bind_arguments=group.bind)
            result.written.append(name)
            continue
        wanted = as_json(schedule.columns())
        if row["code"] == wanted and not (reset and is_edited(row)):
            continue
        values = _values(name, schedule)
        if is_edited(row) and as_json(row) != wanted and not reset:
            # The new definition is stored beside the edited one, for a reset.
            values = {"code": wanted}
            result.kept.append(name)
        else:
            result.written.append(name)
        _update(session, group, row, values)
    session.commit()
    return result


def _values(name: str, schedule: Schedule[Any]) -> dict[str, Any]:
    columns = schedule.columns()
    return {"name": name, **columns, "code": as_json(columns)}


def _update(session: Session, group: ScheduleGroup, row: Mapping[Any, Any], values: Mapping[str, Any]) -> None:
    table = group.tables.schedules
    # Compared once more: it may have been changed since it was read.
    unchanged = [table.c[name].is_not_distinct_from(sa.literal(row[name], table.c[name].type)) for name in DEFINITION]
    statement = sa.update(table).where(table.c.name == row["name"], *unchanged).values(values)
    session.execute(statement, bind_arguments=group.bind)
