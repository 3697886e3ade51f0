"""Notes what a table had before a transaction inserted jobs: the functions of :mod:`sqlaqueue.testing` ask for it.

PostgreSQL keeps a transaction with each row, and other databases do not. The note is taken only in a program that has
imported :mod:`sqlaqueue.testing`, whose tables are those of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import notes_written_rows


def note_before_inserts(engine: sa.Engine, key: str, read: Callable[[sa.Connection, sa.Table, str], Any]) -> None:
    """Note something before the first INSERT of a transaction into the table of a queue.

    :param key: the key of the notes in the ``info`` of the connection, by the names of tables with their schemas.
    :param read: returns what is noted, given the table and its quoted name in the database.
    """

    @event.listens_for(engine, "before_cursor_execute")
    def note(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if not (notes_written_rows() and context is not None and context.isinsert):
            return
        table = getattr(getattr(context.compiled, "compile_state", None), "dml_table", None)
        if table is None or queue_of(table) is None:
            return
        notes = connection.connection.info.setdefault(key, {})
        if table.fullname not in notes:
            schemas = context.execution_options.get("schema_translate_map") or {}
            notes[table.fullname] = read(connection, table, _quoted(connection, table, schemas))

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    def forget(connection: sa.Connection) -> None:
        # A connection that was lost has its info no more.
        if not connection.invalidated:
            connection.connection.info.pop(key, None)


def _quoted(connection: sa.Connection, table: sa.Table, schemas: Mapping[str | None, str | None]) -> str:
    preparer = connection.dialect.identifier_preparer
    schema, name = schemas.get(table.schema, table.schema), preparer.quote(table.name)
    return name if schema is None else f"{preparer.quote_schema(schema)}.{name}"
