"""Writes the schedules of a program into the database when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.schedules.definition import Schedule
from sqlaqueue.schedules.group import ScheduleGroup
from sqlaqueue.sql.inserts import insert_or_ignore
from sqlaqueue.sql.types import key_array

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
    changed: list[str]
    """Those that another transaction has changed meanwhile; they are to be read again."""


class Declaration(NamedTuple):
    """A schedule of the program that has to be written."""

    name: str
    statement: Any
    keeps: bool
    """Whether the stored definition is kept, since it was changed at run time."""


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
    declared = Declared([], [], [])
    found = declarations(session, group, reset=reset)
    for each, written in zip(found, write_declarations(session, group, some=found), strict=True):
        (declared.changed if not written else declared.kept if each.keeps else declared.written).append(each.name)
    return declared


def declarations(session: Session, group: ScheduleGroup, *, reset: bool = False) -> list[Declaration]:
    """Return what :func:`declare` has to write, by name."""
    table = group.tables.schedules
    names = sa.any_(sa.bindparam(None, list(group.declared), key_array(sa.Text())))
    columns = [table.c.name, table.c.code, *(table.c[name] for name in DEFINITION)]
    rows = session.execute(sa.select(*columns).where(table.c.name == names), bind_arguments=group.bind).mappings()
    stored = {row["name"]: row for row in rows}
    session.commit()
    found = (_declaration(table, stored.get(name), each, reset=reset) for name, each in sorted(group.declared.items()))
    return [each for each in found if each is not None]


def write_declarations(session: Session, group: ScheduleGroup, *, some: Sequence[Declaration]) -> list[bool]:
    """Write schedules, and commit; return for each whether it was written, and not changed since it was read."""
    name = group.tables.schedules.c.name
    written = [bool(session.execute(each.statement.returning(name), bind_arguments=group.bind).all()) for each in some]
    session.commit()
    return written


def _declaration(
    table: sa.Table, row: Mapping[Any, Any] | None, schedule: Schedule[Any], *, reset: bool
) -> Declaration | None:
    columns, name = schedule.columns(), schedule.name
    wanted = as_json(columns)
    values = {"name": name, **columns, "code": wanted}
    if row is None:
        return Declaration(name, insert_or_ignore(table, values), keeps=False)
    edited = is_edited(row)
    if row["code"] == wanted and not (reset and edited):
        return None
    unchanged = [table.c[each].is_not_distinct_from(sa.literal(row[each], table.c[each].type)) for each in DEFINITION]
    update = sa.update(table).where(table.c.name == name, *unchanged)
    if edited and as_json(row) != wanted and not reset:
        # The new definition is stored beside the edited one, for a reset.
        return Declaration(name, update.values(code=wanted), keeps=True)
    return Declaration(name, update.values(values), keeps=False)
