"""Writes the schedules of a program into the database when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
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
    failed: list[str]
    """Those that another transaction has locked or changed meanwhile; they are to be tried again."""


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
    """Write those schedules of the program that differ from what a program last wrote, and commit each.

    A schedule that was changed at run time is left as it is. None is deleted: it may belong to another program.

    :param reset: overwrite what was changed at run time as well.
    """
    table = group.tables.schedules
    names = sa.any_(sa.bindparam(None, list(group.declared), backend().key_array(sa.Text())))
    columns = [table.c.name, table.c.code, *(table.c[name] for name in DEFINITION)]
    rows = session.execute(sa.select(*columns).where(table.c.name == names), bind_arguments=group.bind).mappings()
    stored = {row["name"]: row for row in rows}
    session.commit()
    result = Declared([], [], [])
    for name, schedule in sorted(group.declared.items()):
        statement, outcome = _write(table, stored.get(name), schedule, result, reset=reset)
        if statement is None:
            continue
        try:
            # Another transaction has changed the row since it was read, or has locked it.
            written = session.execute(statement.returning(table.c.name), bind_arguments=group.bind).all()
            session.commit()
        except OperationalError:
            session.rollback()
            written = []
        (outcome if written else result.failed).append(name)
    return result


def _write(
    table: sa.Table, row: Mapping[Any, Any] | None, schedule: Schedule[Any], result: Declared, *, reset: bool
) -> tuple[Any, list[str]]:
    """Return the statement that writes a schedule, None if nothing is to be written, and the list for its name."""
    columns = schedule.columns()
    wanted = as_json(columns)
    values = {"name": schedule.name, **columns, "code": wanted}
    if row is None:
        return backend().insert_or_ignore(table, values), result.written
    edited = is_edited(row)
    if row["code"] == wanted and not (reset and edited):
        return None, result.written
    unchanged = [table.c[name].is_not_distinct_from(sa.literal(row[name], table.c[name].type)) for name in DEFINITION]
    update = sa.update(table).where(table.c.name == schedule.name, *unchanged)
    if edited and as_json(row) != wanted and not reset:
        # The new definition is stored beside the edited one, for a reset.
        return update.values(code=wanted), result.kept
    return update.values(values), result.written
