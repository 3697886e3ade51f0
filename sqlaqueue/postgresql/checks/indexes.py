"""Indexes of a queue in the database: those without which its statements read whole tables, or jobs are not unique."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.index_definitions import partitioned_tables
from sqlaqueue.postgresql.catalog.indexes import index_validity, valid_indexes
from sqlaqueue.postgresql.checks.missing_objects import UPDATE_COMMAND
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import states_text


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
    """Return how to create the indexes that are missing, and to rebuild those that are invalid; None without any."""
    faulty = missing_indexes(session, spec)
    if not faulty:
        return None
    unique = _unique_index(spec)
    is_invalid = {index: _validity(session, index) is False for index in faulty}
    names = {index: f"{index.name} of {index.table.fullname}" for index in faulty if index.table is not None}
    missing, invalid = ([names[each] for each in names if is_invalid[each] is given] for given in (False, True))
    consequences = [
        *(["claims may read the whole table"] if any(index is not unique for index in faulty) else []),
        *(["jobs are not unique, and enqueue() fails"] if any(index is unique for index in faulty) else []),
    ]
    tables = [index.table for index in faulty if index.table is not None]
    partitioned = partitioned_tables(session, tables)
    statements = "; ".join(_repair(each, is_invalid=is_invalid[each], partitioned=partitioned) for each in faulty)
    migrate = f"Run {UPDATE_COMMAND}, where env.py has the plug-in sqlaqueue.alembic, or let" if missing else "Let"
    return (
        f"{spec.model.__name__}: {states_text('index', 'indexes', {'missing': missing, 'invalid': invalid})}, "
        f"so {', '.join(consequences)}. {migrate} the owner execute, not in a transaction: {statements}"
    )


def _repair(index: sa.Index, *, is_invalid: bool, partitioned: Collection[sa.Table]) -> str:
    element = sa.schema.DropIndex(index) if is_invalid else sa.schema.CreateIndex(index)
    statement = str(element.compile(dialect=NEUTRAL)).strip().replace("DROP INDEX", "REINDEX INDEX", 1)
    return statement if index.table in partitioned else concurrently(statement)


def concurrently(statement: str) -> str:
    """Return a statement about an index that does not keep jobs from being enqueued and claimed while it runs."""
    return statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)


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
