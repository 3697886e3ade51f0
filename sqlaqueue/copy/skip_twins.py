"""COPY of jobs of which some have a twin: into a temporary table first, since COPY cannot skip rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.copy.column_plan import translated_name
from sqlaqueue.copy.drivers import Copy, send
from sqlaqueue.copy.rows import RowStream
from sqlaqueue.sql.inserts import insert_unless
from sqlaqueue.sql.types import NEUTRAL, guarded
from sqlaqueue.strategies.twins import UniqueKey, explaining_missing_index

_STAGING = "sqlaqueue_copy"


def copy_without_twins(connection: sa.Connection, key: UniqueKey, rows: RowStream) -> int:
    """Copy rows, insert those that have no twin, and return their number.

    The rows are inserted in the order of the unique values, so that two transactions that insert the same ones do not
    wait for each other in a circle.
    """
    spec, columns = key.spec, rows.plan.columns
    # With the schema of temporary tables, which no schema_translate_map changes.
    copied = (sa.Column(column.name, column.type, key=column.key) for column in columns)
    staging = sa.Table(_STAGING, sa.MetaData(), *copied, schema="pg_temp")
    connection.execute(_create(staging, spec.table, connection))
    send(Copy(connection, staging, rows))
    order = [staging.c[column.key] for column in key.columns if column.key in staging.c]
    insert = insert_unless(
        spec.table,
        ([column.key for column in columns], sa.select(*staging.c).order_by(*order)),
        unique=key.values(spec.table),
        where=key.counts(spec.table) if spec.has("status") else None,
    )
    counted = guarded(insert).execution_options(preserve_rowcount=True)
    with explaining_missing_index(spec):
        number: int = connection.execute(counted).rowcount
    connection.execute(sa.text(f"DROP TABLE pg_temp.{_STAGING}"))
    return number


def _create(staging: sa.Table, table: sa.Table, connection: sa.Connection) -> sa.TextClause:
    """Return the statement that creates a temporary table with some columns of a table, without its constraints."""
    quote: Any = NEUTRAL.identifier_preparer
    schema, name = translated_name(table, connection)
    source = quote.quote(name) if schema is None else f"{quote.quote_schema(schema)}.{quote.quote(name)}"
    names = ", ".join(quote.quote(column.name) for column in staging.c)
    command = f"CREATE TEMPORARY TABLE {_STAGING} ON COMMIT DROP AS SELECT {names} FROM {source} WITH NO DATA"  # noqa: S608 - the names are quoted
    return sa.text(command.replace(":", "\\:"))
