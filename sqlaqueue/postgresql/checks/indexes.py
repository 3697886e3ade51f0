"""Indexes of a queue in the database: those without which its statements read whole tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.catalog.indexes import index_validity
from sqlaqueue.postgresql.catalog.table_id import TableId, system_table
from sqlaqueue.postgresql.checks.completeness import UPDATE_COMMAND
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.spec import QueueSpec


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues that the database lacks, or that are invalid.

    An index of another name counts if it begins with the same columns.
    """
    own = {str(index.name) for index in spec.claim_indexes}
    there: dict[sa.Table | None, list[tuple[str, list[str]]]] = {}
    for table in {index.table for index in spec.claim_indexes if index.table is not None}:
        rows: Any = session.execute(_indexed_columns(table)).all()
        there[table] = [(name, columns) for name, columns in rows]

    def serves(index: sa.Index, name: str, columns: list[str]) -> bool:
        wanted = [column.name for column in index.columns]
        return name == index.name or (name not in own and columns[: len(wanted)] == wanted)

    return [
        index
        for index in spec.claim_indexes
        if not any(serves(index, name, columns) for name, columns in there.get(index.table, []))
    ]


def missing_index_advice(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return how to create the indexes that are missing; None when none is."""
    missing = missing_indexes(session, spec)
    if not missing:
        return None
    names = ", ".join(f"{index.name} of {index.table.fullname}" for index in missing if index.table is not None)
    statements = "; ".join(str(sa.schema.CreateIndex(each).compile(dialect=NEUTRAL)).strip() for each in missing)
    return (
        f"{spec.model.__name__}: the database lacks {'an index' if len(missing) == 1 else 'indexes'} of this queue: "
        f"{names}, so claims may read the whole table. Run {UPDATE_COMMAND}, where env.py has the plug-in "
        f"sqlaqueue.alembic, or let the owner execute: {statements}"
    )


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    """Return whether a table has a valid index of this name."""
    return index_validity(connection, table, name) is True


def _indexed_columns(table: sa.Table) -> AnySelect:
    """Return a SELECT of the valid indexes of a table: the name of each, and its columns in order."""
    index = system_table("pg_index", "indexrelid", "indrelid", "indkey", "indisvalid")
    relation = system_table("pg_class", "oid", "relname")
    attribute = system_table("pg_attribute", "attname", "attrelid", "attnum")
    place = sa.func.array_position(sa.cast(index.c.indkey, ARRAY(sa.SmallInteger())), attribute.c.attnum)
    names = sa.func.array_agg(aggregate_order_by(sa.cast(attribute.c.attname, sa.Text), place), type_=ARRAY(sa.Text()))
    mine = sa.and_(attribute.c.attrelid == index.c.indrelid, place.is_not(None))
    listed = sa.select(names).select_from(attribute).where(mine).correlate(index).scalar_subquery()
    found: Any = (
        sa.select(sa.cast(relation.c.relname, sa.Text), sa.func.coalesce(listed, sa.cast([], ARRAY(sa.Text()))))
        .join_from(index, relation, relation.c.oid == index.c.indexrelid)
        .where(index.c.indrelid == TableId(table), index.c.indisvalid)
    )
    selected: AnySelect = found
    return selected
