"""Insert the rows of new jobs that have no twin, and make their instances persistent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.exc import UnmappedColumnError

from sqlaqueue.queue.run import Key
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.inserts import insert_unless
from sqlaqueue.sql.types import guarded
from sqlaqueue.strategies.twins import UniqueKey
from sqlaqueue.unique.new_job import NewJob

Row = dict[sa.Column[Any], Any]
"""The columns of a row that the database has computed, and its key."""

_MOST_ROWS, _MOST_PARAMETERS = 500, 30_000
"""The size of an INSERT of an engine that inserts all rows of a statement or none."""


def insert_rows(connection: sa.Connection, key: UniqueKey, jobs: Sequence[NewJob]) -> dict[Key, Row]:
    """Insert the rows of those jobs that have no twin, and return what was inserted, by key.

    It waits for a transaction that has inserted or deleted a twin.
    """
    spec = key.spec
    where = key.counts(spec.table) if spec.has("status") else None
    insert = insert_unless(spec.table, None, unique=key.values(spec.table), where=where)
    other = engine_of(connection.dialect)
    all_or_none = other is not None and other.inserts_all_or_none
    most, options = len(jobs), {}
    if all_or_none:
        most = min(_MOST_ROWS, _MOST_PARAMETERS // len(spec.table.c))
        # Each batch is one statement, whatever the page size of the program's engine is.
        options = {"insertmanyvalues_page_size": most}
    rows: dict[Key, Row] = {}
    for given, some in _grouped(jobs, spec.table):
        for start in range(0, len(some), most):
            batch = some[start : start + most]
            found = _insert(connection, insert, spec.keys, given, batch, options=options)
            if all_or_none and not found and len(batch) > 1:
                for one in batch:
                    found |= _insert(connection, insert, spec.keys, given, [one])
            rows |= found
    return rows


def complete_rows(connection: sa.Connection, key: UniqueKey, inserted: Sequence[tuple[NewJob, Row]]) -> None:
    """Set what the database has computed, and insert the rows of other tables (joined inheritance)."""
    for job, row in inserted:
        _set_values(job, row)
    # Those of parent classes first.
    mappers = dict.fromkeys(job.mapper for job, _ in inserted)
    lines = (reversed([*mapper.iterate_to_root()]) for mapper in mappers)
    for table in dict.fromkeys(mapper.local_table for line in lines for mapper in line):
        if table is key.spec.table or not isinstance(table, sa.Table):
            continue
        keys = list(table.primary_key)
        there = [job for job, _ in inserted if table in job.mapper.tables]
        for job in there:
            _link(job, table)
        by_key = {tuple(_value(job, column) for column in keys): job for job in there}
        for given, some in _grouped(there, table):
            for found, row in _insert(connection, sa.insert(table), keys, given, some).items():
                _set_values(by_key[found], row)


def make_persistent(session: Session, jobs: Sequence[NewJob]) -> None:
    """Make the instances of inserted rows persistent, as a flush does: a rollback makes them transient again."""
    session.add_all([job.job for job in jobs])
    states = {instance_state(job.job) for job in jobs}
    session._register_persistent(states)  # noqa: SLF001 - only a flush can do it, and it would insert the rows
    for job in jobs:
        # Mutable types wrap the values that the database has computed.
        job.mapper.class_manager.dispatch.refresh_flush(instance_state(job.job), None, [*job.columns()])


def _link(job: NewJob, table: sa.Table) -> None:
    """Set the key in a subclass's table to the key in the table of its parent class."""
    for column in table.primary_key:
        for foreign in column.foreign_keys:
            if foreign.column.table in job.mapper.tables:
                job.set_value(column, _value(job, foreign.column))


def _grouped(jobs: Iterable[NewJob], table: sa.Table) -> list[tuple[tuple[sa.Column[Any], ...], list[dict[str, Any]]]]:
    """Return the values for rows of a table, in groups with the same columns."""
    groups: dict[Any, tuple[tuple[sa.Column[Any], ...], list[dict[str, Any]]]] = {}
    for number, job in enumerate(jobs):
        values = {
            column: value
            for name, value in {**dict.fromkeys(job.without_defaults()), **job.given()}.items()
            for column in job.mapper.get_property(name).columns
            if isinstance(column, sa.Column) and column.table is table
        }
        computed = any(isinstance(value, sa.ClauseElement) for value in values.values())
        # An expression is part of the statement.
        same = (number if computed else None, tuple(values))
        groups.setdefault(same, (tuple(values), []))[1].append({column.key: value for column, value in values.items()})
    return list(groups.values())


def _insert(
    connection: sa.Connection,
    insert: sa.Insert,
    keys: Sequence[sa.Column[Any]],
    given: Sequence[sa.Column[Any]],
    values: list[dict[str, Any]],
    *,
    options: Mapping[str, Any] | None = None,
) -> dict[Key, Row]:
    table: sa.Table = insert.table  # type: ignore[assignment] # the caller has given a Table
    computed = any(isinstance(value, sa.ClauseElement) for value in values[0].values())
    known = () if computed else given
    returned = [column for column in table.c if column in keys or column not in known]
    statement = guarded(insert.returning(*returned))
    # With its values in the statement one row may contain expressions.
    found = (
        connection.execute(statement.values(values[0]))
        if computed
        else connection.execute(statement, values, execution_options=options)
    )
    rows = [dict(zip(returned, row, strict=True)) for row in found]
    return {tuple(row[column] for column in keys): row for row in rows}


def _value(job: NewJob, column: sa.Column[Any]) -> Any:
    return getattr(job.job, job.mapper.get_property_by_column(column).key)


def _set_values(job: NewJob, row: Row) -> None:
    for column, value in row.items():
        # Other classes in the same table have columns of their own.
        with contextlib.suppress(UnmappedColumnError):
            job.set_value(column, value)
