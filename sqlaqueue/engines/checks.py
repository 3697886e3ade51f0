"""What a database lacks for a queue: tables, columns and indexes; the same for all engines but PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.queue.backend import ForeignKey
from sqlaqueue.queue.engine import engine_of, engine_of_error
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege, Spec

_UNDEFINED = {"42P01", "42703", "42P10"}


def check_complete(session: Any, spec: Spec) -> None:
    """Raise DatabaseNotReadyError if tables or columns of a queue are missing, or indexes without which it fails."""
    name = spec.model.__name__
    check_tables(session, [spec.table, *spec.side_tables.values()], name)
    if _engine(_connection(session)).needs_indexes:
        _refuse_lack(session, name, [f"the index {index.name}" for index in missing_indexes(session, spec)])


def check_tables(session: Any, tables: Sequence[sa.Table], needed_by: str) -> None:
    """Raise DatabaseNotReadyError if some of the tables are missing, or columns of them."""
    connection = _connection(session)
    inspector = sa.inspect(connection)
    lacking = []
    for table in tables:
        schema = _schema(connection, table)
        if not inspector.has_table(table.name, schema):
            lacking.append(f"the table {table.fullname}")
            continue
        known = {column["name"] for column in inspector.get_columns(table.name, schema)}
        lacking += [f"the column {table.fullname}.{column.name}" for column in table.c if column.name not in known]
    _refuse_lack(session, needed_by, lacking)


def _refuse_lack(session: Any, needed_by: str, lacking: Sequence[str]) -> None:
    if lacking:
        msg = (
            f"the database lacks what {needed_by} needs: {', '.join(lacking)}; create it with "
            f"Base.metadata.create_all(engine), or {_engine(_connection(session)).migrating}"
        )
        raise DatabaseNotReadyError(msg)


def missing_indexes(session: Any, spec: Spec) -> list[sa.Index]:
    """Return the indexes of claims and rescues that are missing."""
    connection = _connection(session)
    indexes = sa.inspect(connection).get_indexes(spec.table.name, _schema(connection, spec.table))
    known = {index["name"] for index in indexes}
    return [index for index in spec.claim_indexes if index.name not in known]


def missing_index_advice(session: Any, spec: Spec) -> str | None:
    """Return how to create the indexes that are missing."""
    missing = missing_indexes(session, spec)
    if not missing:
        return None
    names = ", ".join(str(index.name) for index in missing)
    return (
        f"{spec.model.__name__}: claims are slow without the indexes {names}; {_engine(_connection(session)).migrating}"
    )


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    """Return whether a table has an index of this name."""
    indexes = sa.inspect(connection).get_indexes(table.name, _schema(connection, table))
    return any(index["name"] == name for index in indexes)


def foreign_keys_to(connection: sa.Connection, table: sa.Table) -> Iterable[ForeignKey]:
    """Return none: deletions find out by their error what refers to a table."""
    return ()


def undefined_object_advice(error: BaseException, spec: Spec) -> str | None:
    """Return how to fix an error about a table, a column or an index that does not exist."""
    other: Any = engine_of_error(error) if isinstance(error, DBAPIError) else None
    if not isinstance(error, DBAPIError) or other is None or other.sqlstate(error) not in _UNDEFINED:
        return None
    # Drivers whose errors have a number give it before the text.
    text = error.orig.args[-1] if error.orig is not None else error
    return (
        f"{text}, which {spec.model.__name__} needs; create it with Base.metadata.create_all(engine), or "
        f"{other.migrating}"
    )


def outdated_triggers(session: Any, spec: Spec) -> str | None:
    """Return None: there are no triggers."""
    return None


def outdated_triggers_of(session: Any, table: sa.Table, needed_by: str) -> str | None:
    """Return None, as above."""
    return None


def outdated_functions(session: Any, spec: Spec) -> str | None:
    """Return None: there are no functions in the database."""
    return None


def split_schemas(session: Any, spec: Spec) -> str | None:
    """Return None: there is no search path."""
    return None


def missing_schema_grants(connection: sa.Connection, spec: Spec) -> list[str]:
    """Return none: a role that lacks a privilege finds out by the error of a statement."""
    return []


missing_grants = missing_policies = missing_schema_grants


def grants_for(connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
    """Return none, as above."""
    return []


policies_for = grants_for


def _schema(connection: Any, table: sa.Table) -> str | None:
    """Return the schema of a table, as the connection translates it."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    schema: str | None = translated.get(table.schema, table.schema)
    return schema


def _engine(connection: Any) -> Any:
    return engine_of(connection.dialect)


def _connection(session: Any) -> Any:
    return session.connection() if isinstance(session, Session) else session
