"""The identity of transactions, by which a run is known whose claim has deleted its row, and who has written a row."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.selectable import NamedFromClause


class _TransactionId(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


def transaction_id() -> sa.ColumnElement[str]:
    """Return the identity of the current transaction."""
    return sa.cast(sa.func.pg_current_xact_id(), sa.Text())


def was_committed(transaction: Any) -> sa.ColumnElement[bool]:
    """Return the condition that the transaction of this identity was committed."""
    number = sa.cast(sa.literal(transaction, sa.Text()), _TransactionId())
    committed: sa.ColumnElement[bool] = sa.func.pg_xact_status(number, type_=sa.Text()) == "committed"
    return committed


def written_here(rows: NamedFromClause) -> sa.ColumnElement[bool]:
    """Return the condition that the current transaction, or a savepoint in it, has written a row.

    A savepoint has an identity of its own, which the row then carries. But a row that can be seen while its writer is
    still in progress is this transaction's: those of others are invisible. ``age()`` is zero or less for writers that
    are not older than this transaction, and turns the 32 bits of ``xmin`` into the 64 of an identity.
    """
    xmin: sa.ColumnElement[Any] = sa.literal_column(f"{rows.name}.xmin")
    mine = sa.func.pg_current_xact_id_if_assigned(type_=_TransactionId())
    age = sa.func.age(xmin, type_=sa.Integer())
    writer = sa.cast(sa.cast(sa.cast(mine, sa.Text()), sa.BigInteger()) - age, sa.Text())
    in_progress = sa.func.pg_xact_status(sa.cast(writer, _TransactionId()), type_=sa.Text()) == "in progress"
    return sa.case((mine.is_(None), sa.false()), (age > 0, sa.false()), else_=in_progress)
