"""The indexes of a table, and whether they are valid.

CREATE INDEX CONCURRENTLY leaves an invalid index behind when it is interrupted.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table

_INDEX = system_table("pg_index", "indexrelid", "indrelid", "indkey", "indisvalid")
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


def valid_indexes(session: Session | sa.Connection, table: sa.Table) -> list[tuple[str, list[str]]]:
    """Return the valid indexes of a table: the name of each, and the names of its columns in order."""
    attribute = system_table("pg_attribute", "attname", "attrelid", "attnum")
    position = sa.func.array_position(sa.cast(_INDEX.c.indkey, ARRAY(sa.SmallInteger())), attribute.c.attnum)
    names = sa.func.array_agg(
        aggregate_order_by(sa.cast(attribute.c.attname, sa.Text), position), type_=ARRAY(sa.Text())
    )
    indexed = sa.and_(attribute.c.attrelid == _INDEX.c.indrelid, position.is_not(None))
    columns = sa.select(names).select_from(attribute).where(indexed).correlate(_INDEX).scalar_subquery()
    rows: Any = session.execute(
        sa.select(sa.cast(_RELATION.c.relname, sa.Text), sa.func.coalesce(columns, sa.cast([], ARRAY(sa.Text()))))
        .join_from(_INDEX, _RELATION, _RELATION.c.oid == _INDEX.c.indexrelid)
        .where(_INDEX.c.indrelid == TableId(table), _INDEX.c.indisvalid)
    ).all()
    return [(name, indexed_columns) for name, indexed_columns in rows]
