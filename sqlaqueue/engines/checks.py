"""What a database lacks for a queue: tables, columns and indexes; the same for all engines but PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.queue.strategy_protocol import Spec
from sqlaqueue.sql.engine import engine_of, engine_of_error, exists_on, schema_of
from sqlaqueue.sql.types import object_name
from sqlaqueue.texts import older_models

_UNDEFINED = {"42P01", "42703", "42P10"}


def check_complete(session: Any, spec: Spec) -> None:
    name, connection = spec.model.__name__, _connection(session)
    check_tables(session, [spec.table, *spec.side_tables.values()], name)
    engine = _engine(connection)
    _refuse_lack(session, name, [f"the trigger {each}" for each in missing_triggers(connection, spec)])
    if engine.needs_indexes:
        _refuse_lack(session, name, [f"the index {index.name}" for index in missing_indexes(session, spec)])
    engine.check_storage(connection, spec)


def check_tables(session: Any, tables: Sequence[sa.Table], needed_by: str) -> None:
    lacking = [
        f"the table {part.fullname}" if isinstance(part, sa.Table) else f"the column {part.table.fullname}.{part.name}"
        for part in lacking_parts(_connection(session), tables)
    ]
    _refuse_lack(session, needed_by, lacking)


def lacking_parts(connection: sa.Connection, tables: Iterable[sa.Table]) -> Iterator[sa.Table | sa.Column[Any]]:
    """Yield the tables that the database lacks, and the columns that the others lack."""
    inspector = sa.inspect(connection)
    for table in tables:
        schema = schema_of(connection, table)
        if not inspector.has_table(table.name, schema):
            yield table
            continue
        known = {column["name"] for column in inspector.get_columns(table.name, schema)}
        yield from (column for column in table.c if column.name not in known)


def table_comments(session: Any, tables: Sequence[sa.Table]) -> dict[sa.Table, str | None]:
    """Return the comments of tables by one query; nothing on SQLite, which has none."""
    connection, found = _connection(session), dict[sa.Table, str | None]()
    if not connection.dialect.supports_comments:
        return found
    catalog = sa.table("tables", *map(_column, _TABLE_COLUMNS), schema="information_schema")
    by_schema: dict[str | None, list[sa.Table]] = {}
    for table in tables:
        by_schema.setdefault(schema_of(connection, table), []).append(table)
    for schema, several in by_schema.items():
        query = sa.select(catalog.c.table_name, catalog.c.table_comment).where(
            catalog.c.table_schema == (schema or sa.func.database()),
            catalog.c.table_name.in_([table.name for table in several]),
        )
        comments: dict[str, str | None] = dict(map(tuple, connection.execute(query)))
        found |= {table: comments.get(table.name) for table in several}
    return found


_TABLE_COLUMNS = ("table_schema", "table_name", "table_comment")


def _refuse_lack(session: Any, needed_by: str, lacking: Sequence[str]) -> None:
    if lacking:
        msg = (
            f"the database lacks what {needed_by} needs: {', '.join(lacking)}; create it with "
            f"Base.metadata.create_all(engine), or {_engine(_connection(session)).migrating}. If a newer version of "
            "the program has dropped it, start that version"
        )
        raise DatabaseNotReadyError(msg)


def missing_indexes(session: Any, spec: Spec) -> list[sa.Index]:
    known = _index_names(_connection(session), spec.table)
    unique = _unique_index(spec)
    needed = [*spec.claim_indexes, *([] if unique is None else [unique])]
    return [index for index in needed if index.name not in known and exists_on(index, _connection(session).dialect)]


def missing_triggers(connection: sa.Connection, spec: Spec) -> list[str]:
    """Return the triggers that are missing, of a queue whose jobs wait for others, and of the members of batches.

    A user of MariaDB without the privilege TRIGGER sees none, so there they are missing only if others are seen.
    """
    engine, lacking = _engine(connection), list[str]()
    for table in dict.fromkeys([spec.table, *(wait.awaited.table for wait in spec.waits)]):
        wanted = engine.triggers(table, connection) if spec.waits else {}
        if wanted:
            known = _trigger_names(connection, table)
            lacking += [name for name in wanted if name not in known and (known or connection.dialect.name == "sqlite")]
    return lacking


def _trigger_names(connection: sa.Connection, table: sa.Table) -> set[str]:
    schema = schema_of(connection, table)
    if connection.dialect.name == "sqlite":
        return _names_in_catalog(connection, table, "trigger")
    catalog = sa.table("triggers", *map(_column, _TRIGGER_COLUMNS), schema="information_schema")
    where = [catalog.c.event_object_table == table.name, catalog.c.trigger_schema == (schema or sa.func.database())]
    return set(connection.execute(sa.select(catalog.c.trigger_name).where(*where)).scalars())


_TRIGGER_COLUMNS = ("trigger_name", "trigger_schema", "event_object_table")


def _names_in_catalog(connection: sa.Connection, table: sa.Table, kind: str) -> set[str]:
    schema = schema_of(connection, table)
    catalog = sa.table("sqlite_master", *map(_column, ("name", "tbl_name", "type")), schema=schema)
    names = sa.select(catalog.c.name).where(catalog.c.type == kind, catalog.c.tbl_name == table.name)
    return set(connection.execute(names).scalars())


def _column(name: str) -> sa.ColumnClause[Any]:
    return sa.column(name)


def missing_index_advice(session: Any, spec: Spec) -> str | None:
    missing = missing_indexes(session, spec)
    if not missing:
        return None
    unique, names = _unique_index(spec), ", ".join(str(index.name) for index in missing)
    consequences = [
        *(["claims are slow"] if any(index is not unique for index in missing) else []),
        *(["jobs are not unique, and enqueue() fails"] if unique in missing else []),
    ]
    what = f"{', and '.join(consequences)}, without the indexes {names}"
    return f"{spec.model.__name__}: {what}; {_engine(_connection(session)).migrating}"


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    return name in _index_names(connection, table)


def _index_names(connection: Any, table: sa.Table) -> set[str | None]:
    schema = schema_of(connection, table)
    if connection.dialect.name != "sqlite":
        return {index["name"] for index in sa.inspect(connection).get_indexes(table.name, schema)}
    # SQLAlchemy passes over indexes of expressions there.
    return {*_names_in_catalog(connection, table, "index")}


def _unique_index(spec: Spec) -> sa.Index | None:
    name = object_name("ix", spec.table.name, "queue", "unique")
    unique = (index for index in spec.table.indexes if index.name == name)
    return None if spec.config.unique is None else next(unique, None)


def undefined_object_advice(error: BaseException, spec: Spec, *, worked: bool = False) -> str | None:
    """Return how to fix an error about a table, a column or an index that does not exist."""
    other: Any = engine_of_error(error) if isinstance(error, DBAPIError) else None
    if not isinstance(error, DBAPIError) or other is None or other.sqlstate(error) not in _UNDEFINED:
        return None
    # Drivers whose errors have a number give it before the text.
    text = error.orig.args[-1] if error.orig is not None else error
    if worked:
        return f"{spec.model.__name__}: {text}; {older_models(worked=True)}"
    return (
        f"{text}, which {spec.model.__name__} needs; create it with Base.metadata.create_all(engine), or "
        f"{other.migrating}"
    )


def _nothing(*_: Any) -> None:
    return None


outdated_triggers_of = outdated_functions = split_schemas = _nothing
"""There are no triggers, no functions and no search path."""


def _none(*_: Any) -> list[Any]:
    return []


missing_schema_grants = missing_grants = grants_for = policies_for = foreign_keys_to = _none
"""A role that lacks a privilege, and a deletion under a foreign key, find out by the error of a statement."""


def row_security(*_: Any) -> tuple[list[str], str | None]:
    return [], None


def _engine(connection: Any) -> Any:
    return engine_of(connection.dialect)


def _connection(session: Any) -> Any:
    return session.connection() if isinstance(session, Session) else session
