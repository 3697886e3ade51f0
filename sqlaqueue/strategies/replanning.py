"""What keeps the server from using a plan again that it made when the table was a small one.

Drivers prepare a statement that comes again and again, and PostgreSQL then keeps a plan of it, unless that looks more
expensive than to plan each execution anew. Made for a table of one page, such a plan reads the table and compares each
of its rows with each key; an idle queue is such a table. With a hundred thousand jobs enqueued since, the next claim
takes half a minute, and so does each one after it, until the table is analysed.
"""

from __future__ import annotations

import sqlalchemy as sa


def planned_anew() -> sa.ColumnElement[bool]:
    """Return a condition that always holds, and has a prepared statement planned for each execution.

    It goes once through one row, as the planner sees if it knows the parameter. In a plan for any parameter it goes
    through a million rows, for all that the planner knows.
    """
    return _CONDITION


def _condition() -> sa.ColumnElement[bool]:
    first = sa.literal_column("1", sa.Integer())
    last = sa.bindparam("sqlaqueue_just_one", 1, sa.Integer(), unique=False)
    series = sa.func.generate_series(first, last, type_=sa.Integer())
    once, again = (
        series.table_valued(sa.column(name, sa.Integer()), name=name) for name in ("sqlaqueue_once", "sqlaqueue_again")
    )
    rows = sa.select(sa.func.count()).select_from(once.join(again, sa.true()))
    # Not "> 0", of which the planner would expect that it holds in one case out of three.
    return rows.scalar_subquery().is_not(None)


_CONDITION = _condition()
