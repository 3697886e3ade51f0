"""The identity of transactions, by which a run is known whose claim has deleted its row."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


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
