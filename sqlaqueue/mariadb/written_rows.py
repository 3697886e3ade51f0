"""Which rows of queues the current transaction has inserted: all but those whose keys were there before."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.engines.written_rows import note_before_inserts
from sqlaqueue.mariadb.execution import EARLIER


def note_written_rows(engine: sa.Engine) -> None:
    """Note, before the first INSERT of a transaction into the table of a queue, the keys of its rows."""
    note_before_inserts(engine, EARLIER, _keys)


def _keys(connection: sa.Connection, table: sa.Table, name: str) -> list[tuple[object, ...]]:
    quote = connection.dialect.identifier_preparer.quote
    keys = ", ".join(quote(key.name) for key in table.primary_key)
    query = f"SELECT {keys} FROM {name}"  # noqa: S608 - the names are quoted
    # As the driver has them: they are given back to it.
    return [tuple(row) for row in connection.exec_driver_sql(query)]
