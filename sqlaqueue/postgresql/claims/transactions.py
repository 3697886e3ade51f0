"""Transaction identities: of the claim that deleted a row, and of the writer of a row."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.selectable import NamedFromClause

from sqlaqueue.queue.portable import with_plain_form

WRITTEN_ROWS = "_sqlaqueue_written_rows"
"""The attribute of the call of ``sqlaqueue_written_here()`` with the rows that are asked for."""


class _TransactionId(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


_WRAP = 2**32
"""After so many transactions ``xmin`` begins again."""


def transaction_id() -> sa.ColumnElement[str]:
    """Return the identity of the current transaction."""
    return sa.cast(sa.func.pg_current_xact_id(), sa.Text())


def was_committed(transaction: Any) -> sa.ColumnElement[bool]:
    """Return the condition that the transaction of this identity was committed."""
    number = sa.cast(sa.literal(transaction, sa.Text()), _TransactionId())
    committed: sa.ColumnElement[bool] = sa.func.pg_xact_status(number, type_=sa.Text()) == "committed"
    return committed


def row_version(rows: NamedFromClause) -> sa.ColumnElement[str]:
    """Return a text that changes whenever a row of a table is written; locking the row does not change it.

    :param rows: the table, or an alias of it.
    """
    # As a column of the table, so that the name is quoted as the table's is.
    version = sa.cast(sa.column("xmin", _selectable=rows), sa.Text())
    return with_plain_form(version, lambda: sa.func.sqlaqueue_digest(*rows.c, type_=sa.Text()))


def written_here(rows: NamedFromClause) -> sa.ColumnElement[bool]:
    """Return the condition that the current transaction, or a savepoint in it, has written a row.

    A savepoint has an identity of its own, which the row then carries. But a row that can be seen while its writer is
    still in progress is this transaction's: those of others are invisible.

    ``xmin`` has the last 32 bits of the writer's identity. Its distance from the present transaction gives the others.

    :param rows: an alias of the table, under a name that needs no quotes.
    """
    xmin: sa.ColumnElement[Any] = sa.literal_column(f"{rows.name}.xmin")
    mine = sa.func.pg_current_xact_id_if_assigned(type_=_TransactionId())
    number = sa.cast(sa.cast(mine, sa.Text()), sa.BigInteger())
    distance = sa.cast(sa.cast(xmin, sa.Text()), sa.BigInteger()) - number % _WRAP
    # From minus 2^31 to 2^31, as transactions are compared; the remainder of a negative number would be negative.
    distance = (distance + _WRAP + _WRAP // 2) % _WRAP - _WRAP // 2
    writer = sa.cast(sa.cast(number + distance, sa.Text()), _TransactionId())
    in_progress = sa.func.pg_xact_status(writer, type_=sa.Text()) == "in progress"
    # Writers that are older than this transaction are not looked up.
    written: sa.ColumnElement[bool] = sa.case(
        (mine.is_(None), sa.false()), (distance < 0, sa.false()), else_=in_progress
    )
    return with_plain_form(written, lambda: _inserted_here(rows))


def _inserted_here(rows: NamedFromClause) -> sa.ColumnElement[bool]:
    table: Any = getattr(rows, "element", rows)
    rowid: sa.ColumnElement[int] = sa.literal_column(f"{rows.name}.rowid")
    written = sa.func.sqlaqueue_written_here(sa.literal(table.fullname), rowid, type_=sa.Boolean())
    # For an engine that knows rows by their keys.
    written.__dict__[WRITTEN_ROWS] = rows
    return written == sa.true()
