"""Conditions that keep the server from reusing a plan that it made while a table was small.

Drivers prepare statements that repeat, and PostgreSQL then keeps a generic plan, unless that looks more expensive than
planning each execution. Made for a table of one page, as an idle queue is, such a plan reads the whole table and
compares each row with each key. With a hundred thousand jobs enqueued since, each claim would take half a minute, until
the table is analysed.

For a few jobs such a plan does no lasting harm and is worth keeping: planning a claim takes as long as executing it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.portable import with_plain_form

FEW: int = 15
"""The server may keep the plan of a claim of up to this many jobs."""

_ONE = sa.literal_column("1", sa.Integer())
_MANY = sa.literal_column("100", sa.Integer())
_SHARE = sa.literal_column(str(FEW + 1), sa.Integer())


def planned_anew() -> sa.ColumnElement[bool]:
    """Return a condition that is always true, and makes the server plan each execution of a prepared statement.

    It scans a few rows, which the planner sees when it knows the parameter. For a generic plan it assumes a thousand
    times as many.
    """
    return _ANEW


def planned_anew_for_many(limit: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return the same for a claim of more than :data:`FEW` jobs; a claim of fewer may keep its plan.

    The server adds the cost of planning to the cost of a custom plan. For a query with as many tables as a claim,
    planning costs more than scanning a thousand rows, and less than scanning several thousand.

    :param limit: the most jobs to claim, as a parameter that is rendered into the text.
    """
    return _goes_through(sa.func.least(_ONE + limit // _SHARE, _MANY, type_=sa.Integer()))


def _goes_through(rows: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    just_one = sa.bindparam("sqlaqueue_just_one", 1, sa.Integer(), unique=False)
    each, once = _series(rows, "sqlaqueue_each_row"), _series(just_one, "sqlaqueue_once")
    counted = sa.select(sa.func.count()).select_from(each.join(once, sa.true()))
    # Not "> 0": the planner would assume that it is true in one case of three.
    return with_plain_form(counted.scalar_subquery().is_not(None), sa.true)


def _series(end: sa.ColumnElement[Any], name: str) -> sa.TableValuedAlias:
    numbers = sa.func.generate_series(_ONE, end, type_=sa.Integer())
    return numbers.table_valued(sa.column(name, sa.Integer()), name=name)


_ANEW = _goes_through(_MANY)
