"""Indexes of a queue in the database: those without which its statements read whole tables."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.indexes import index_validity, valid_indexes
from sqlaqueue.postgresql.checks.missing_objects import UPDATE_COMMAND
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.spec import QueueSpec


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues that the database lacks, or that are invalid.

    An index of another name counts if it begins with the same columns.
    """
    own = {str(index.name) for index in spec.claim_indexes}
    tables = {index.table for index in spec.claim_indexes if index.table is not None}
    existing: dict[sa.Table | None, list[tuple[str, list[str]]]] = {
        table: valid_indexes(session, table) for table in tables
    }

    def serves(index: sa.Index, name: str, columns: list[str]) -> bool:
        wanted = [column.name for column in index.columns]
        return name == index.name or (name not in own and columns[: len(wanted)] == wanted)

    return [
        index
        for index in spec.claim_indexes
        if not any(serves(index, name, columns) for name, columns in existing.get(index.table, []))
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
