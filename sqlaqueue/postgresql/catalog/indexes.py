"""The indexes of a table, and whether they are valid.

CREATE INDEX CONCURRENTLY leaves an invalid index behind when it is interrupted.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table

_INDEX = system_table("pg_index", "indexrelid", "indrelid", "indisvalid")
_RELATION = system_table("pg_class", "oid", "relname")


def index_validity(session: Session | sa.Connection, table: sa.Table, name: str) -> bool | None:
    """Return whether an index of a table is valid, None if the table has no index of this name."""
    found: sa.Select[Any] = (
        sa.select(_INDEX.c.indisvalid)
        .join_from(_INDEX, _RELATION, _RELATION.c.oid == _INDEX.c.indexrelid)
        .where(_INDEX.c.indrelid == TableId(table), _RELATION.c.relname == name)
    )
    valid: bool | None = session.scalar(found)
    return valid
