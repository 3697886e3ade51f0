"""Whether an index exists and is valid."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.table_id import TableId


def index_validity(connection: sa.Connection, table: sa.Table, name: str) -> bool | None:
    """Return whether an index of a table is valid, None if the table has no index of this name.

    CREATE INDEX CONCURRENTLY leaves an invalid index behind when it is interrupted.
    """
    index = sa.table("pg_index", *map(sa.column, ("indexrelid", "indrelid", "indisvalid")))
    relation = sa.table("pg_class", *map(sa.column, ("oid", "relname")))
    found: sa.Select[Any] = (
        sa.select(index.c.indisvalid)
        .join_from(index, relation, relation.c.oid == index.c.indexrelid)
        .where(index.c.indrelid == TableId(table), relation.c.relname == name)
    )
    valid: bool | None = connection.scalar(found)
    return valid
