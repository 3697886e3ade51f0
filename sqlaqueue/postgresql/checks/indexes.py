"""Indexes of a queue in the database: those without which its statements read whole tables, or jobs are not unique."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.index_definitions import (
    StoredIndex,
    comparable,
    partitioned_tables,
    stored_indexes,
)
from sqlaqueue.postgresql.catalog.indexes import index_validity
from sqlaqueue.postgresql.checks.missing_objects import UPDATE_COMMAND
from sqlaqueue.postgresql.ddl.sql_template import literal_sql
from sqlaqueue.postgresql.identifiers import is_name_of, object_name
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.texts import states_text


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues, and of unique jobs, that the database lacks, or that are invalid.

    For claims and rescues an index of the application counts if it begins with the same columns, and has all rows or
    the same ones.
    """
    tables = list(dict.fromkeys(index.table for index in spec.claim_indexes if index.table is not None))
    existing = [stored for stored in stored_indexes(session, tables) if stored.is_valid] if tables else []
    unique = _unique_index(spec)
    return [
        *(
            index
            for index in spec.claim_indexes
            if not any(each.table is index.table and _serves(session, each, index) for each in existing)
        ),
        *([] if unique is None or _validity(session, unique) else [unique]),
    ]


def _serves(session: Session | sa.Connection, stored: StoredIndex, index: sa.Index) -> bool:
    """Return whether an index of the database has what a claim or a rescue reads."""
    if stored.name == index.name:
        return True
    # What the library has added beside it is for something else, even where it begins with the same columns.
    is_own = is_name_of(stored.name, "ix", stored.table.name, "queue")
    columns = [each.name for each in index.expressions if isinstance(each, sa.Column)]
    first = [each.strip('"').replace('""', '"') for each in stored.elements[: len(columns)]]
    if is_own or len(columns) < len(index.expressions) or not stored.is_plain or first != columns:
        return False
    if stored.predicate is None:
        # These have few of the rows: among all they would be searched for.
        few = (object_name("ix", stored.table.name, "queue", purpose) for purpose in ("quarantined", "running"))
        return str(index.name) not in few
    where = index.dialect_options["postgresql"]["where"]
    if where is None:
        return False
    found, wanted = comparable(session, stored.table, [stored.predicate, literal_sql(where)])
    return found == wanted


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
