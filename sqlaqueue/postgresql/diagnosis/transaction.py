"""The transaction of an examination: nothing in it can write, and nothing in it takes long."""

from __future__ import annotations

import sqlalchemy as sa


def read_only(connection: sa.Connection, *, statement_timeout: str, lock_timeout: str) -> None:
    """Make the transaction read-only and limit its statements, until the savepoint is rolled back."""
    settings = {
        "transaction_read_only": "on",
        "statement_timeout": statement_timeout,
        "lock_timeout": lock_timeout,
    }
    connection.execute(sa.select(*(sa.func.set_config(name, value, sa.true()) for name, value in settings.items())))
