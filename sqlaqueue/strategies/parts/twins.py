"""Statements that make jobs pending again unless a twin counts by now, see :class:`~sqlaqueue.Unique`.

A job that comes back is compared with the jobs that count, and with the others that come back in the same statement:
of several twins the newest comes back. What becomes of the others, ``Unique(on_return=...)`` says.

A twin that another transaction has inserted and not committed is not visible to the statement. Then the UPDATE waits
for that transaction, and raises an IntegrityError if it commits. Repeated in a new transaction, it finds the twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.parts.columns import same
from sqlaqueue.strategies.parts.unique_key import UniqueKey, key_text_of

TWIN = "sqlaqueue_twin"
"""The column in which a statement returns the key of the twin, as a text, for a job that does not come back."""

REASON = "twin"
"""The kind of error of a job that was cancelled because of a twin; its key follows."""

Values = Mapping[sa.Column[Any], Any]

_COUNTS, _RETURNS = "sqlaqueue_counts", "sqlaqueue_returns"


def columns_to_judge(
    spec: QueueSpec, key: UniqueKey, returns: sa.ColumnElement[bool] | None = None
) -> list[sa.ColumnElement[Any]]:
    """Return the columns, besides the key, of the rows that are given to :func:`judge`.

    :param returns: the condition that a job comes back; others are no twins. None for all.
    """
    needed = dict.fromkeys([*key.stored, *_newest(spec)])
    columns: list[sa.ColumnElement[Any]] = [column.label(column.key) for column in needed if column not in spec.keys]
    columns.append((key.counts(spec.table) if spec.has("status") else sa.false()).label(_COUNTS))
    columns.append((sa.true() if returns is None else returns).label(_RETURNS))
    return columns


def judge(spec: QueueSpec, key: UniqueKey, rows: AnySelect, *more: str) -> sa.CTE:
    """Return ``rows`` with the key of the twin for which each does not come back, in the column :data:`TWIN`.

    :param rows: a SELECT of the keys and of :func:`columns_to_judge`, with the rows locked.
    :param more: names of further columns of it that are kept.
    """
    back = rows.cte("sqlaqueue_back")
    twin = spec.table.alias("sqlaqueue_twin_row")
    another = sa.or_(*(twin.c[column.key] != back.c[column.key] for column in spec.keys))
    first_twin = sa.select(key_text_of(spec, twin)).where(key.are_twins(twin, back), key.counts(twin), another).limit(1)
    mine, values = key_text_of(spec, back), key.values(back)
    order = [back.c[_COUNTS].desc(), *(back.c[column.key].desc() for column in (*_newest(spec), *spec.keys))]
    newest = sa.func.first_value(mine).over(partition_by=[key.as_one(back), back.c[_RETURNS]], order_by=order)
    competes = sa.and_(back.c[_RETURNS], ~back.c[_COUNTS], key.is_complete(values))
    place = sa.func.coalesce(first_twin.scalar_subquery(), sa.func.nullif(newest, mine), type_=sa.Text())
    return sa.select(
        *(back.c[column.key] for column in spec.keys),
        *(back.c[name] for name in more),
        sa.case((competes, place)).label(TWIN),
    ).cte("sqlaqueue_judged")


def update_judged(
    spec: QueueSpec, judged: sa.CTE, back: Values, instead: Values, *, where: Sequence[sa.ColumnElement[bool]] = ()
) -> AnySelect:
    """Return the statement that updates judged jobs, and selects the key of each with that of its twin.

    :param back: the values for jobs that come back.
    :param instead: the values for jobs that have a twin; empty to leave them as they are.
    :param where: conditions on the jobs to update, by the columns of ``judged``.
    """
    twin = judged.c[TWIN]
    if not instead:
        where = [*where, twin.is_(None)]
    values = {
        column: sa.case((twin.is_(None), _value(column, back)), (sa.true(), _value(column, instead)), else_=column)
        for column in dict.fromkeys([*back, *instead])
    }
    mine = same(spec.keys, [judged.c[key.key] for key in spec.keys])
    update = sa.update(spec.table).where(mine, *where).values(values)
    return sa.select(*(judged.c[key.key] for key in spec.keys), twin).add_cte(update.cte("sqlaqueue_updated"))


def reason(twin: sa.ColumnElement[str], error: sa.ColumnElement[Any] | None = None) -> sa.ColumnElement[str]:
    """Return the text for ``last_error`` of a job that was cancelled because of a twin.

    :param error: the error of its last run, which follows in the next line.
    """
    parts: list[Any] = [f"{REASON}: ", twin]
    if error is not None:
        # Without the line that an earlier requeue has added.
        former = sa.func.regexp_replace(sa.cast(error, sa.Text()), f"^{REASON}: [^\n]*\n?", "", type_=sa.Text())
        parts.append(sa.literal("\n", sa.Text()) + sa.func.nullif(former, ""))
    return sa.func.concat(*parts, type_=sa.Text())


def twin_in(error: str | None) -> str | None:
    """Return the key of the twin for which a job was cancelled, as its ``last_error`` names it; None for others."""
    first, *_ = (error or "").split("\n")
    kind, colon, twin = first.partition(": ")
    return twin if kind == REASON and colon else None


def _newest(spec: QueueSpec) -> list[sa.Column[Any]]:
    """Return the columns by which the newest of several twins is found, before their keys."""
    return [spec.columns["created_at"]] if spec.has("created_at") else []


def _value(column: sa.Column[Any], values: Values) -> sa.ColumnElement[Any]:
    """Return the value of a column as SQL."""
    if column not in values:
        return column
    value = values[column]
    if value is None:
        return sa.null()
    return value if isinstance(value, sa.ColumnElement) else sa.literal(value, column.type)
