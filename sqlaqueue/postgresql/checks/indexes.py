"""Indexes of a queue in the database: those without which its statements read whole tables, or jobs are not unique."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.indexes import index_validity, valid_indexes
from sqlaqueue.postgresql.checks.missing_objects import UPDATE_COMMAND
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.spec import QueueSpec


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues, and of unique jobs, that the database lacks, or that are invalid.

    For claims and rescues an index of another name counts if it begins with the same columns.
    """
    own = {str(index.name) for index in spec.claim_indexes}
    tables = {index.table for index in spec.claim_indexes if index.table is not None}
    existing: dict[sa.Table | None, list[tuple[str, list[str]]]] = {
        table: valid_indexes(session, table) for table in tables
    }

    def serves(index: sa.Index, name: str, columns: list[str]) -> bool:
        wanted = [column.name for column in index.columns]
        return name == index.name or (name not in own and columns[: len(wanted)] == wanted)

    unique = _unique_index(spec)
    return [
        *(
            index
            for index in spec.claim_indexes
            if not any(serves(index, name, columns) for name, columns in existing.get(index.table, []))
        ),
        *([] if unique is None or _validity(session, unique) else [unique]),
    ]


def missing_index_advice(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return how to create the indexes that are missing; None when none is."""
    missing = missing_indexes(session, spec)
    if not missing:
        return None
    unique = _unique_index(spec)
    names = ", ".join(f"{index.name} of {index.table.fullname}" for index in missing if index.table is not None)
    consequences = [
        *(["claims may read the whole table"] if any(index is not unique for index in missing) else []),
        *(["jobs are not unique, and enqueue() fails"] if any(index is unique for index in missing) else []),
    ]
    elements: list[sa.schema.ExecutableDDLElement] = [sa.schema.CreateIndex(each) for each in missing]
    if unique in missing and _validity(session, unique) is False:
        elements.insert(-1, sa.schema.DropIndex(unique))
    statements = "; ".join(str(each.compile(dialect=NEUTRAL)).strip() for each in elements)
    return (
        f"{spec.model.__name__}: the database lacks {'an index' if len(missing) == 1 else 'indexes'} of this queue: "
        f"{names}, so {', '.join(consequences)}. Run {UPDATE_COMMAND}, where env.py has the plug-in "
        f"sqlaqueue.alembic, or let the owner execute: {statements}"
    )


def _unique_index(spec: QueueSpec) -> sa.Index | None:
    """Return the index of ``QueueConfig(unique=...)``."""
    name = object_name("ix", spec.table.name, "queue", "unique")
    unique = (index for index in spec.table.indexes if index.name == name)
    return None if spec.config.unique is None else next(unique, None)


def _validity(session: Session | sa.Connection, index: sa.Index) -> bool | None:
    """Return whether an index is valid, None if the database lacks it."""
    return None if index.table is None else index_validity(session, index.table, str(index.name))


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    """Return whether a table has a valid index of this name."""
    return index_validity(connection, table, name) is True
