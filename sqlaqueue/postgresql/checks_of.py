"""The checks of the database that a connection leads to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.postgresql.catalog import ForeignKey
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege, Spec
from sqlaqueue.queue.versions import too_new, too_old
from sqlaqueue.sql.engine import engine_of, engine_of_error


class Checks(Protocol):
    """What the database lacks for a queue: a module of each database has these functions.

    Those that return a text return None if nothing is wrong; those that return statements return what an owner has to
    execute. The first two raise DatabaseNotReadyError.
    """

    def check_complete(self, session: Any, spec: Spec) -> None: ...
    def check_tables(self, session: Any, tables: Sequence[sa.Table], needed_by: str) -> None: ...
    def table_comments(self, session: Any, tables: Sequence[sa.Table]) -> dict[sa.Table, str | None]: ...
    def split_schemas(self, session: Any, spec: Spec) -> str | None: ...
    def outdated_triggers_of(self, session: Any, table: sa.Table, needed_by: str) -> str | None: ...
    def outdated_functions(self, session: Any, spec: Spec) -> str | None: ...
    def undefined_object_advice(self, error: BaseException, spec: Spec, *, worked: bool = False) -> str | None: ...
    def missing_indexes(self, session: Any, spec: Spec) -> list[sa.Index]: ...
    def missing_index_advice(self, session: Any, spec: Spec) -> str | None: ...
    def has_index(self, connection: sa.Connection, table: sa.Table, name: str) -> bool: ...
    def foreign_keys_to(self, connection: sa.Connection, table: sa.Table) -> Iterable[ForeignKey]: ...
    def missing_schema_grants(self, connection: sa.Connection, spec: Spec) -> list[str]: ...
    def missing_grants(self, connection: sa.Connection, spec: Spec) -> list[str]: ...
    def grants_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]: ...
    def policies_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]: ...
    def row_security(self, connection: sa.Connection, spec: Spec) -> tuple[list[str], str | None]: ...


def checks_of(connection: sa.Connection) -> Checks:
    return _checks(engine_of(connection.dialect))


def checks_of_error(error: Any) -> Checks:
    return _checks(engine_of_error(error) if isinstance(error, DBAPIError) else None)


def _checks(other: Any) -> Checks:
    if other is not None:
        return cast("Checks", other.checks)
    from sqlaqueue.postgresql import start_checks  # noqa: PLC0415 - reads the catalog, which enqueue() does not need

    return cast("Checks", start_checks)


class OutdatedError(DatabaseNotReadyError):
    """A newer version has changed the tables so that this one must not use them: another start would not help."""


def refuse_newer(connection: sa.Connection, tables: Iterable[sa.Table], needed_by: str) -> None:
    """Refuse side tables that a newer version has changed so that this one must not use them any more.

    :raises OutdatedError: with both versions, and what to do.
    """
    text = too_new(checks_of(connection).table_comments(connection, [*tables]))
    if text is not None:
        raise OutdatedError(f"{needed_by}: {text}")


def refuse_older(connection: sa.Connection, tables: Iterable[sa.Table], needed_by: str) -> None:
    """Refuse side tables that have not been migrated for this version yet.

    :raises DatabaseNotReadyError: with both versions, and the command that migrates.
    """
    text = too_old(checks_of(connection).table_comments(connection, [*tables]))
    if text is not None:
        raise DatabaseNotReadyError(f"{needed_by}: {text}. Run {UPDATE_COMMAND}")
