"""Executes one step of a statement, and keeps its rows for the statements that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.sql.selectable import CTE

from sqlaqueue.engines.types import plain
from sqlaqueue.mariadb.autocommit import refuse_autocommit
from sqlaqueue.mariadb.execution import ROWS
from sqlaqueue.sql.engine import plain_form

_statements: WeakKeyDictionary[CTE, Any] = WeakKeyDictionary()


def run_step(connection: sa.Connection, cte: CTE, parameters: Mapping[str, Any]) -> list[list[Any]]:
    """Execute a step and return its rows, each value as JSON can represent it."""
    refuse_autocommit(connection, cte.element)
    result = connection.execute(_statement_of(cte), parameters)
    rows: list[Any] = []
    if result.returns_rows:
        # As the driver has them: the following statements give them back to it.
        cursor: Any = result.cursor
        rows = [*result.cursor_strategy.fetchall(result, cursor)]
        result.close()
    connection.connection.info.setdefault(ROWS, {})[str(cte.name)] = rows
    return [[plain(value) for value in row] for row in rows]


def forget_rows(connection: sa.Connection) -> None:
    """Drop the rows of the steps of a statement that has ended."""
    # A connection that was lost has its info no more, and one that is closed has none.
    if not (connection.invalidated or connection.closed):
        connection.connection.info.pop(ROWS, None)


def _statement_of(cte: CTE) -> Any:
    found = _statements.get(cte)
    if found is None:
        inner = plain_form(cte)
        found = _statements[cte] = _with_keys_only(cte if inner is None else inner)
    return found


def _with_keys_only(cte: Any) -> Any:
    """Return the statement of a step; an UPDATE returns keys only, by which the rows are read again."""
    statement: Any = cte.element
    if not (statement.is_dml and statement.is_update):
        return statement
    keys = [*statement.table.primary_key]
    if not statement._returning:  # noqa: SLF001 - not public
        # So that it is divided: an UPDATE of joined tables might lock every row, and computes one value after another.
        return statement.returning(*keys)
    if len(keys) >= len(cte.c) or not all(any(column.shares_lineage(key) for column in cte.c) for key in keys):
        return statement
    reduced = statement._clone()  # noqa: SLF001 - returning() only adds columns
    reduced._returning = ()  # noqa: SLF001 - as above
    return reduced.returning(*keys)
