"""What keeps the server from using a plan again that it made when the table was a small one.

Drivers prepare a statement that comes again and again, and PostgreSQL then keeps a plan of it, unless that looks more
expensive than to plan each execution anew. Made for a table of one page, such a plan reads the table and compares each
of its rows with each key; an idle queue is such a table. With a hundred thousand jobs enqueued since, the next claim
takes half a minute, and so does each one after it, until the table is analysed.

For a few jobs such a plan does no harm that lasts, and is worth having: to plan a claim takes as long as to execute it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

FEW = 15
"""Of up to so many jobs at once a plan may be kept."""

_ONE = sa.literal_column("1", sa.Integer())
_MANY = sa.literal_column("100", sa.Integer())
_SHARE = sa.literal_column(str(FEW + 1), sa.Integer())


def planned_anew() -> sa.ColumnElement[bool]:
    """Return a condition that always holds, and has a prepared statement planned for each execution.

    It goes through a few rows, as the planner sees if it knows the parameter. In a plan for any parameter it goes
    through a thousand times as many, for all that the planner knows.
    """
    return _ANEW


def planned_anew_for_many(limit: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return the same for a claim, unless it is one of a :data:`FEW` jobs.

    The planner adds to the cost of planning anew what it takes a query of so many tables to plan: more than a thousand
    rows, and less than some thousands.

    :param limit: the most jobs to claim, as a parameter that is written into the text.
    """
    # Whatever the limit is, these rows are gone through.
    return _goes_through(sa.func.least(_ONE + limit // _SHARE, _MANY, type_=sa.Integer()))


def _goes_through(rows: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    just_one = sa.bindparam("sqlaqueue_just_one", 1, sa.Integer(), unique=False)
    each, once = _series(rows, "sqlaqueue_each_row"), _series(just_one, "sqlaqueue_once")
    counted = sa.select(sa.func.count()).select_from(each.join(once, sa.true()))
    # Not "> 0", of which the planner would expect that it holds in one case out of three.
    return counted.scalar_subquery().is_not(None)


def _series(end: sa.ColumnElement[Any], name: str) -> sa.TableValuedAlias:
    numbers = sa.func.generate_series(_ONE, end, type_=sa.Integer())
    return numbers.table_valued(sa.column(name, sa.Integer()), name=name)


_ANEW = _goes_through(_MANY)
