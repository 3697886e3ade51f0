"""To which columns a violated constraint belongs, by the mapped table, and what it says about their values.

The database's own text is not used: it repeats values, which may be redacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.consumer.errors import is_twin
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.errors import violated_column, violated_constraint, violated_table

Element = sa.Constraint | sa.Index


@dataclass(frozen=True)
class Violation:
    """A constraint that values of a row violate."""

    columns: Sequence[sa.Column[Any]]
    text: str


def violation_of(error: DBAPIError, spec: QueueSpec) -> Violation | None:
    """Return the constraint of the queue's table that a statement has violated; None if it is none that is mapped."""
    if violated_table(error) != spec.table.name:
        return None
    column = violated_column(error)
    if column is not None:
        return Violation([each for each in spec.table.c if each.name == column], "A value is required.")
    name = violated_constraint(error) or ""
    if is_twin(error, spec) and spec.config.unique is not None:
        names = spec.config.unique.attributes
        columns = [spec.mapper.columns[each] for each in names if each in spec.mapper.columns]
        return Violation(columns, "It would have a twin: another job has the same values of the unique columns.")
    indexes = [index for index in spec.table.indexes if index.unique]
    elements: list[Element] = [*spec.table.constraints, *indexes]
    found = next((each for each in elements if name in _names(each, spec.table)), None)
    return None if found is None else Violation(_columns(found, spec.table), _text(found, name))


def _columns(element: Element, table: sa.Table) -> list[sa.Column[Any]]:
    if isinstance(element, sa.CheckConstraint):
        return _in_check(element, table)
    if isinstance(element, sa.Index | sa.UniqueConstraint | sa.PrimaryKeyConstraint | sa.ForeignKeyConstraint):
        return [table.c[each.key] for each in element.columns if each.key in table.c]
    return []


def _in_check(check: sa.CheckConstraint, table: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns of a check, which may be written as a text."""
    known = [*check.columns]
    words = {*re.findall(r"\w+", re.sub(r"'[^']*'", "", str(check.sqltext)))}
    return known or [column for column in table.c if column.name in words]


def _names(element: Element, table: sa.Table) -> Iterable[str]:
    """Return the name of a constraint; for one without a name, those that the database may have given it."""
    if isinstance(element.name, str):
        return [str(element.name)]
    columns = [column.name for column in _columns(element, table)]
    joined = "_".join([table.name, *columns])
    if isinstance(element, sa.ForeignKeyConstraint):
        return [f"{joined}_fkey"]
    if isinstance(element, sa.UniqueConstraint):
        return [f"{joined}_key"]
    if isinstance(element, sa.CheckConstraint):
        return [f"{joined}_check"] if len(columns) == 1 else [f"{table.name}_check"]
    return [f"{table.name}_pkey"]


def _text(element: Element, name: str) -> str:
    if isinstance(element, sa.ForeignKeyConstraint):
        return f"No row of {element.referred_table.name} has this value ({name})."
    if isinstance(element, sa.CheckConstraint):
        return f"The check {name} does not allow this value."
    several = len(list(element.columns)) > 1 if isinstance(element, sa.Index | sa.UniqueConstraint) else False
    return f"Another row has {'these values together' if several else 'this value'} already ({name})."
