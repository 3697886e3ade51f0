"""Which jobs are due, since when, and when the next ones will be. All read the index priority by priority."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.selectable import NamedFromClause

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.sql.portable import clock, converted, epoch, seconds_between

_MOST_PRIORITIES = 100
"""The number of priorities whose due jobs are read: some programs give each job a priority of its own."""


def upcoming_times(
    spec: QueueSpec,
    scanned: sa.FromClause,
    conditions: Sequence[sa.ColumnElement[bool]],
    limit: int,
    *,
    by_priority: bool,
) -> AnySelect:
    """Return when the next ``limit`` rows of ``scanned`` that meet ``conditions`` will be due, in epoch seconds."""
    run_at = scanned.c[spec.columns["run_at"].key]
    moment = epoch(converted(run_at, sa.DateTime(timezone=True))).label("moment")
    later = sa.select(moment).where(*conditions, run_at > clock()).order_by(run_at).limit(limit)
    if not (by_priority and spec.has("priority")):
        return later
    priority = scanned.c[spec.columns["priority"].key]
    levels = _priorities(priority, conditions)
    each = later.where(priority == levels.c.level).correlate(levels).lateral("sqlaqueue_each")
    return sa.select(each.c.moment).select_from(levels.join(each, sa.true())).order_by(each.c.moment).limit(limit)


def count_waiting(spec: QueueSpec, limit: int, *, by_priority: bool) -> tuple[sa.ColumnElement[int], sa.Subquery]:
    """Return how many jobs are pending, up to ``limit``; and a row of how many are due, and the age of the oldest.

    The number of due jobs may be higher than ``limit``, as so many of each priority are counted. The age is in seconds.
    """
    jobs = spec.strategy.pending_jobs(spec, limit)
    first = jobs.limit(limit).subquery("sqlaqueue_first_pending")
    pending = sa.select(sa.func.count()).select_from(first).scalar_subquery().label("pending")
    waiting_jobs = jobs.order_by(None).subquery("sqlaqueue_pending_jobs")
    since = due_since(spec, waiting_jobs, limit, by_priority=by_priority).subquery("sqlaqueue_due_since")
    age = seconds_between(within_calendar(sa.func.min(since.c.since)), clock()).label("age")
    due = sa.select(sa.func.count().label("due"), age).select_from(since).subquery("sqlaqueue_counted_due")
    return pending, due


def due_since(
    spec: QueueSpec, pending: sa.FromClause, limit: int, *, by_priority: bool
) -> AnySelect | sa.CompoundSelect[Any]:
    """Return since when the due ones of ``pending`` have been due: up to ``limit`` of each priority, the first ones.

    :param pending: what :meth:`~sqlaqueue.strategies.ClaimStrategy.pending_jobs` selects.
    """
    if not by_priority:
        return _one_after_another(_due(spec, pending), limit)
    if "priority" not in pending.c:
        return sa.union_all(*(each.limit(limit) for each in _due(spec, pending)))
    priority = pending.c.priority
    levels = _priorities(priority, ())
    first = (
        sa.select(levels.c.level).where(levels.c.level.is_not(None)).limit(_MOST_PRIORITIES).subquery("sqlaqueue_first")
    )
    return sa.union_all(*_by_level(spec, _due(spec, pending), priority, first, limit, "sqlaqueue_each"))


def due_keys(
    spec: QueueSpec,
    scanned: sa.FromClause,
    keys: Sequence[sa.ColumnElement[Any]],
    conditions: Sequence[sa.ColumnElement[bool]],
    *,
    at: sa.ColumnElement[Any],
    limit: int,
) -> tuple[AnySelect, AnySelect]:
    """Return the keys of up to ``limit`` due rows of ``scanned``, and whether priorities are left that were not read.

    :param scanned: the table of the claim's index, or an alias of it.
    :param keys: columns of ``scanned``.
    :param conditions: those of the claim's index.
    """
    run_at = scanned.c[spec.columns["run_at"].key]
    named = [key.label(f"due_key_{number}") for number, key in enumerate(keys)]
    ranges = [sa.select(*named).where(*conditions, run_at <= at).order_by(run_at)]
    if spec.columns["run_at"].nullable:
        ranges.append(sa.select(*named).where(*conditions, run_at.is_(None)))
    none_left = sa.select(sa.false())
    if not spec.has("priority"):
        return _first(ranges, limit), none_left
    priority = scanned.c[spec.columns["priority"].key]
    levels = _priorities(priority, conditions)
    known = sa.select(levels.c.level).where(levels.c.level.is_not(None))
    first = known.limit(_MOST_PRIORITIES).subquery("sqlaqueue_first_levels")
    parts = _by_level(spec, ranges, priority, first, limit, "sqlaqueue_due")
    some = known.limit(_MOST_PRIORITIES + 1).subquery("sqlaqueue_some_levels")
    any_left = sa.select(sa.func.count() > _MOST_PRIORITIES).select_from(some)
    return _first(parts, limit), any_left


def _first(parts: Sequence[AnySelect], limit: int) -> AnySelect:
    if len(parts) == 1:
        return parts[0].limit(limit)
    rows = sa.union_all(*(each.limit(limit) for each in parts)).subquery("sqlaqueue_due_parts")
    return sa.select(*rows.c).limit(limit)


def _by_level(  # noqa: PLR0917 - both callers give all of them
    spec: QueueSpec,
    ranges: Sequence[AnySelect],
    priority: sa.ColumnElement[Any],
    first: sa.FromClause,
    limit: int,
    name: str,
) -> list[AnySelect]:
    """Return a SELECT of up to ``limit`` rows of each priority for each range.

    :param first: the priorities, in the column ``level``.
    :param name: the beginning of the names of the subqueries.
    """
    parts: list[AnySelect] = []
    for number, due in enumerate(ranges):
        of_level = due.where(priority == first.c.level).limit(limit)
        each = of_level.correlate(first).lateral(f"{name}_{number}")
        parts.append(sa.select(*each.c).select_from(first.join(each, sa.true())))
        if spec.columns["priority"].nullable:
            parts.append(due.where(priority.is_(None)).limit(limit))
    return parts


def _one_after_another(parts: Sequence[AnySelect], limit: int) -> AnySelect:
    """Return up to ``limit`` rows of each part, without a LIMIT in a UNION, which SQLite does not have."""
    limited = [each.limit(limit).subquery(f"sqlaqueue_part_{number}") for number, each in enumerate(parts)]
    rows = sa.union_all(*(sa.select(*each.c) for each in limited)).subquery("sqlaqueue_parts")
    return sa.select(*rows.c)


def _due(spec: QueueSpec, pending: sa.FromClause) -> list[AnySelect]:
    """Return a SELECT of the due jobs, or one for each range of the claim's index that contains some."""
    time = sa.DateTime(timezone=True)
    created = converted(pending.c.get("created_at", sa.null()), time).label("since")
    if "run_at" not in pending.c:
        return [sa.select(created).select_from(pending)]
    run_at = pending.c.run_at
    due = [sa.select(converted(run_at, time).label("since")).where(run_at <= clock()).order_by(run_at)]
    if spec.columns["run_at"].nullable:
        due.append(sa.select(created).select_from(pending).where(run_at.is_(None)))
    return due


def _priorities(priority: sa.ColumnElement[Any], conditions: Sequence[sa.ColumnElement[bool]]) -> sa.CTE:
    """Return the priorities in ascending order, each found by one look into the index; the last row is null."""
    least = sa.select(sa.func.min(priority).label("level")).where(*conditions)
    levels = least.cte("sqlaqueue_levels", recursive=True)
    above = least.where(priority > levels.c.level).correlate(levels).scalar_subquery()
    return levels.union_all(sa.select(above).where(levels.c.level.is_not(None)))


class _TransactionId(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


_WRAP = 2**32
"""After so many transactions ``xmin`` begins again."""


def transaction_id() -> sa.ColumnElement[str]:
    return sa.cast(sa.func.pg_current_xact_id(), sa.Text())


def was_committed(transaction: Any) -> sa.ColumnElement[bool]:
    number = sa.cast(sa.literal(transaction, sa.Text()), _TransactionId())
    committed: sa.ColumnElement[bool] = sa.func.pg_xact_status(number, type_=sa.Text()) == "committed"
    return committed


def row_version(rows: NamedFromClause) -> sa.ColumnElement[str]:
    """Return a text that changes whenever a row of a table is written; locking the row does not change it.

    :param rows: the table, or an alias of it.
    """
    # As a column of the table, so that the name is quoted as the table's is.
    return sa.cast(sa.column("xmin", _selectable=rows), sa.Text())


class WrittenHere(sa.Case[bool]):
    """The condition that the current transaction has written a row; other engines know which ones it has inserted."""

    inherit_cache = True
    rows: NamedFromClause
    """The table, or an alias of it, whose name is in the conditions as well."""

    @property
    def table(self) -> sa.Table:
        rows: Any = self.rows
        table: sa.Table = getattr(rows, "element", rows)
        return table


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
    written = WrittenHere((mine.is_(None), sa.false()), (distance < 0, sa.false()), else_=in_progress)
    written.rows = rows
    return written
