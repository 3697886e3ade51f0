"""The checks of the database that a connection leads to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.postgresql.catalog import ForeignKey, foreign_keys_to, sees_all
from sqlaqueue.postgresql.faults import (
    UPDATE_COMMAND,
    check_complete,
    check_tables,
    outdated_functions,
    outdated_triggers,
    outdated_triggers_of,
    split_schemas,
    undefined_object_advice,
)
from sqlaqueue.postgresql.faults_of_indexes import has_index, missing_index_advice, missing_indexes
from sqlaqueue.postgresql.privileges import (
    grants_for,
    missing_grants,
    missing_schema_grants,
    policies_for,
    row_security,
)
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege, Spec
from sqlaqueue.sql.engine import engine_of, engine_of_error


class Checks(Protocol):
    """What the database lacks for a queue."""

    UPDATE_COMMAND: str
    """The command that migrates a database."""

    def check_complete(self, session: Any, spec: Spec) -> None:
        """Raise DatabaseNotReadyError if the database lacks tables, columns or triggers of a queue."""
        ...

    def check_tables(self, session: Any, tables: Sequence[sa.Table], needed_by: str) -> None:
        """Raise DatabaseNotReadyError if the database lacks tables or columns of them."""
        ...

    def outdated_triggers_of(self, session: Any, table: sa.Table, needed_by: str) -> str | None:
        """Return what is wrong with the triggers of a table, and how to fix it."""
        ...

    def grants_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
        """Return the GRANTs for those of the required privileges that the role lacks."""
        ...

    def policies_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
        """Return the row-level security policies that the role lacks for the required privileges."""
        ...

    def split_schemas(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong if a queue's tables are in different schemas, or on the wrong nodes of a cluster."""
        ...

    def outdated_triggers(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong with a queue's triggers, and how to fix it."""
        ...

    def outdated_functions(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong with the functions that a queue's statements call, and how to fix it."""
        ...

    def undefined_object_advice(self, error: BaseException, spec: Spec) -> str | None:
        """Return how to fix an error about a table or a column that does not exist."""
        ...

    def missing_indexes(self, session: Any, spec: Spec) -> list[sa.Index]:
        """Return the indexes of claims and rescues, and of unique jobs, that the database lacks."""
        ...

    def missing_index_advice(self, session: Any, spec: Spec) -> str | None:
        """Return how to create the indexes that are missing."""
        ...

    def has_index(self, connection: sa.Connection, table: sa.Table, name: str) -> bool:
        """Return whether a table has a valid index of this name."""
        ...

    def foreign_keys_to(self, connection: sa.Connection, table: sa.Table) -> Iterable[ForeignKey]:
        """Return the foreign keys under which a row cannot be deleted while other rows refer to it."""
        ...

    def missing_schema_grants(self, connection: sa.Connection, spec: Spec) -> list[str]:
        """Return the GRANTs for schemas that the role lacks."""
        ...

    def missing_grants(self, connection: sa.Connection, spec: Spec) -> list[str]:
        """Return the GRANTs for tables and sequences that the role lacks."""
        ...

    def row_security(self, connection: sa.Connection, spec: Spec) -> tuple[list[str], str | None]:
        """Return the row-level security policies that the role lacks, and a warning if others hide every row."""
        ...

    def sees_all(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Return the condition that row-level security hides no row of a table from the role."""
        ...


_POSTGRESQL = SimpleNamespace(
    UPDATE_COMMAND=UPDATE_COMMAND,
    check_complete=check_complete,
    check_tables=check_tables,
    outdated_triggers_of=outdated_triggers_of,
    grants_for=grants_for,
    policies_for=policies_for,
    split_schemas=split_schemas,
    outdated_triggers=outdated_triggers,
    outdated_functions=outdated_functions,
    undefined_object_advice=undefined_object_advice,
    missing_indexes=missing_indexes,
    missing_index_advice=missing_index_advice,
    has_index=has_index,
    foreign_keys_to=foreign_keys_to,
    missing_schema_grants=missing_schema_grants,
    missing_grants=missing_grants,
    row_security=row_security,
    sees_all=sees_all,
)


def checks_of(connection: sa.Connection) -> Checks:
    """Return the checks of the database to which a connection belongs."""
    other = engine_of(connection.dialect)
    return cast("Checks", _POSTGRESQL if other is None else other.checks)


def checks_of_error(error: Any) -> Checks:
    """Return the checks of the database that raised an error."""
    other = engine_of_error(error) if isinstance(error, DBAPIError) else None
    return cast("Checks", _POSTGRESQL if other is None else other.checks)
