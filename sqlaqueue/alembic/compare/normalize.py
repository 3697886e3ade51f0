"""Comparisons with the help of PostgreSQL's own printing, on a temporary copy of a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from sqlaqueue.postgresql.catalog_schemas import ExpressionNormalizer, QualifiedName


@contextlib.contextmanager
def normalizing(connection: sa.Connection, table: QualifiedName) -> Iterator[ExpressionNormalizer]:
    """Create a temporary copy of a table, with its columns only, for as long as the block runs.

    :raises CommandError: when the role may not create it.
    """
    try:
        normalizer = ExpressionNormalizer(connection, table)
    except DBAPIError as error:
        msg = (
            f"the indexes and constraints of table {table[1]} cannot be compared: this needs the privilege to create a "
            f"temporary table (GRANT TEMPORARY ON DATABASE), and a transaction that may write ({error.orig})"
        )
        raise CommandError(msg) from error
    try:
        yield normalizer
    finally:
        normalizer.close()
