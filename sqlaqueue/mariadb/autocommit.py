"""Refuses statements of several parts on a connection that commits each part by itself."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.exc import StatementError


def refuse_autocommit(connection: sa.Connection, statement: Any) -> None:
    """Refuse to execute a statement in parts if each of them would be a transaction.

    The lock of a row ends with its transaction: another worker could take the row before it is changed.

    :param statement: the statement or the first part of it, whose table the error names.
    :raises StatementError: if the connection has AUTOCOMMIT, and the program has not begun a transaction.
    """
    driver = connection.connection.driver_connection
    # What the driver knows costs nothing. But asyncmy does not notice that AUTOCOMMIT was switched off by a statement.
    if driver is None or not driver.get_autocommit():
        return
    cursor = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@autocommit AND NOT @@in_transaction")
        each_by_itself = cursor.fetchall()[0][0]
    finally:
        cursor.close()
    if each_by_itself:
        msg = (
            f"{_table_of(statement)}: MariaDB needs several statements for a claim, a settlement and a change with "
            "returning(), and this connection commits each of them by itself (AUTOCOMMIT), so others could change the "
            "rows in between; use a session or connection whose isolation_level is not AUTOCOMMIT, as those of "
            "create_engine() and prepare() are by default"
        )
        raise StatementError(msg)


def _table_of(statement: Any) -> str:
    found = (
        [statement.table] if statement.is_dml else [each for each in iterate(statement) if isinstance(each, sa.Table)]
    )
    return str(found[0].name) if found else "this statement"
