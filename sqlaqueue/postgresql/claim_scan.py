"""Where in the claim order a claim begins to scan, and how it skips jobs that are not due.

In an index of ``(priority, run_at, key)`` the jobs of a high priority that are not due yet come before the due jobs of
a lower one, and a plain scan walks over all of them. With :func:`by_priority` a claim scans one priority after another,
each from its first job to the last that is due, until it has enough. Each priority costs one descent of the index.

An index keeps the entries of finished jobs for as long as a snapshot may need them, and a scan from the head walks over
those as well. With :func:`from_cursor` a claim begins where the one before it ended. It finds nothing before that
position, nor in another priority, so its caller has to scan from the head now and then.

All comparisons are of rows, ``(priority, run_at) >= (..)``, which bound a scan of the index. The planner has no
statistics for rows and assumes a fixed part of the table for each, however few jobs are pending. If it expected fewer
rows than are to be claimed, it would read and sort all that are due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.selectable import Lateral, NamedFromClause, SelectBase

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.catalog import TableId, system_table
from sqlaqueue.postgresql.side_tables import PAUSE
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimRequest, ScanRange
from sqlaqueue.sql.portable import clock, for_effect
from sqlaqueue.sql.types import refused_elsewhere

CURSOR = "sqlaqueue_cursor"
"""The prefix of the parameters of a claim from a cursor, one for each column of the claim order."""

# A generic plan assumes a tenth of the table for a bound LIMIT. Over several steps that makes the query look so
# expensive that the server compiles it first (JIT).
_ONE = sa.literal_column("1", sa.Integer())

Lock = Callable[[AnySelect], AnySelect]


class _Each(Lateral):
    """A LATERAL of several tables that SQLAlchemy's linter of cartesian products passes over.

    The linter attributes the joins inside a LATERAL to the query around it, and so warns about unconnected tables.
    """

    inherit_cache = True


@compiles(_Each)
def _render(each: _Each, compiler: Any, **options: Any) -> str:
    options.pop("from_linter", None)
    rendered: str = compiler.visit_lateral(each, **options)
    return rendered


def lateral_each(rows: SelectBase, name: str) -> _Each:
    return _Each._construct(rows.self_group(), name=name)  # noqa: SLF001 - lateral() makes no other class


def by_priority(_: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
    """The scan range of a claim that scans one priority after another. As a condition it is true.

    A strategy that does not support it scans the claim order from its head, with the same result.
    """
    return sa.true()


def from_cursor(spec: QueueSpec) -> ScanRange:
    """Return the scan range of due jobs from a cursor on, in its priority; :func:`cursor_at` makes its parameters."""
    cursor = _cursor(spec)

    def scan_range(order: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        behind = _at_least(order, cursor)
        if spec.has("priority"):
            return sa.and_(behind, _up_to(spec, order, cursor[0]))
        # Where a missing time counts as due, the strategy's own condition does not bound the scan; this one does.
        return sa.and_(behind, order[0] <= clock()) if spec.has("run_at") else behind

    return scan_range


def _cursor(spec: QueueSpec) -> list[sa.BindParameter[Any]]:
    return [
        sa.bindparam(f"{CURSOR}_{number}", type_=column.type, unique=False)
        for number, column in enumerate(spec.claim_order)
    ]


def cursor_priority(spec: QueueSpec) -> sa.ColumnElement[Any]:
    """Return the priority of the cursor, of a queue that has priorities."""
    return _cursor(spec)[0]


def first_pending(spec: QueueSpec) -> AnySelect:
    """Return a SELECT of the position of the first pending job in the claim order, for :func:`cursor_from`."""
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    return sa.select(*spec.claim_order).where(*waiting).order_by(*spec.claim_order).limit(_ONE)


def cursor_from(values: Sequence[Any]) -> Mapping[str, Any] | None:
    """Return the parameters of a claim that begins at a position; None without a priority or a time."""
    return None if None in values else {f"{CURSOR}_{number}": value for number, value in enumerate(values)}


def cursor_at(spec: QueueSpec, job: Any) -> Mapping[str, Any] | None:
    """Return the parameters of a claim that begins at ``job``, a claimed instance.

    None for a job without a priority or a time, and for one whose attributes are not loaded.
    """
    names = [spec.mapper.get_property_by_column(column).key for column in spec.claim_order]
    return cursor_from([job.__dict__.get(name) for name in names])


def queue_paused(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a queue is paused. It names no column of the job, so it runs once a statement."""
    table = spec.side_tables[CONTROL]
    paused = sa.and_(table.c.queue == spec.name, table.c.key == PAUSE)
    return sa.exists(sa.select(sa.literal_column("1")).select_from(table).where(paused).correlate(None))


def take_first(request: ClaimRequest, waiting: AnySelect, scanned: sa.FromClause, *others: sa.FromClause) -> sa.CTE:
    """Return the first due rows of ``waiting`` in claim order, locked together with those of ``others``.

    The planner expects one row or a few, so it looks up by key whatever is joined to them, in a small table as in a
    large one.
    """
    spec: QueueSpec = request.spec
    limit, scan_range = request.limit, request.scan_range

    def lock(rows: AnySelect) -> AnySelect:
        return spec.strategy.lock(spec, rows, *others)

    if scan_range is by_priority and spec.has("priority"):
        return _first_by_priority(spec, waiting, scanned, limit, lock).cte("sqlaqueue_picked")
    first = spec.strategy.first_due(spec, waiting, scanned, limit, scan_range)
    return _first_of(spec, first, scanned, limit, lock).cte("sqlaqueue_picked")


def _first_of(spec: QueueSpec, rows: AnySelect, scanned: sa.FromClause, limit: Any, lock: Lock) -> AnySelect:
    """Return the first ``limit`` of ``rows``, locked, in claim order by the columns of ``scanned``."""
    order = [scanned.c[column.key] for column in spec.claim_order]
    # The planner assumes that all rows of a LATERAL are fetched. Without it, it would prefer a plan that returns the
    # first rows at once, such as one scan of a table for each row of another.
    start = _series(_ONE, "sqlaqueue_start")
    found = lock(first_in_order(rows.where(start.c[0].is_not(None)), order, limit))
    each = lateral_each(found.correlate(start), "sqlaqueue_each")
    return few_rows(each, limit, start.join(each, sa.true()))


def _first_by_priority(
    spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, lock: Lock
) -> AnySelect:
    """Return the first ``limit`` due rows of ``waiting``, locked, from one priority of ``scanned`` after another.

    A priority is scanned only when those before it had too few rows; rows are locked as they are found.
    """
    order = [scanned.c[column.key] for column in spec.claim_order]
    levels = _levels(spec, scanned, order)
    parts = [lock(first_in_order(waiting.where(part), order, limit)) for part in _parts(spec, order, levels)]
    if len(parts) == 1:
        each = lateral_each(parts[0].correlate(levels), "sqlaqueue_each")
    else:
        laterals = [
            lateral_each(part.correlate(levels), f"sqlaqueue_part_{number}") for number, part in enumerate(parts)
        ]
        each = lateral_each(sa.union_all(*(sa.select(*part.c) for part in laterals)), "sqlaqueue_each")
    return few_rows(each, limit, levels.join(each, _may_be_due(spec, levels)))


def _levels(spec: QueueSpec, scanned: sa.FromClause, order: Sequence[sa.ColumnElement[Any]]) -> NamedFromClause:
    """Return the priorities that occur, in claim order, each with the earliest time of its jobs.

    Where the priority is nullable, jobs without one come last, under a level that is null.
    """
    waiting = [spec.in_state("pending")] if scanned is spec.table and spec.has("status") else []
    waiting += spec.on_shard(scanned)
    priority, may_be_missing = order[0], spec.columns["priority"].nullable
    if may_be_missing:
        waiting.append(priority.is_not(None))
    first = order[1].label("first") if spec.has("run_at") else sa.null().label("first")
    head = sa.select(priority.label("level"), first).where(*waiting).order_by(*order[:2]).limit(_ONE)
    levels = head.cte("sqlaqueue_level", recursive=True)
    above = head.where(priority > levels.c.level).correlate(levels).lateral("sqlaqueue_above")
    levels = levels.union_all(sa.select(*above.c).select_from(levels.join(above, sa.true())))
    if not may_be_missing:
        return levels
    return sa.union_all(sa.select(*levels.c), sa.select(sa.null(), sa.null())).subquery("sqlaqueue_any_level")


def _parts(
    spec: QueueSpec, order: Sequence[sa.ColumnElement[Any]], levels: sa.FromClause
) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of the due rows of one level, part by part in the claim order."""
    level, priority = levels.c.level, order[0]
    if not spec.has("run_at"):
        parts = [sa.and_(_at_least([priority, priority], [level, level]), _up_to(spec, order, level))]
        return [*parts, sa.and_(level.is_(None), priority.is_(None))] if spec.columns["priority"].nullable else parts
    run_at = order[1]
    # No visible row comes before the first, but entries of finished jobs may.
    parts = [sa.and_(_at_least([priority, run_at], [level, levels.c.first]), _up_to(spec, order, level))]
    timeless = spec.columns["run_at"].nullable
    if timeless:
        parts.append(sa.and_(priority == level, run_at.is_(None)))
    if spec.columns["priority"].nullable:
        last = sa.and_(level.is_(None), priority.is_(None))
        parts.append(sa.and_(last, run_at <= clock()))
        if timeless:
            parts.append(sa.and_(last, run_at.is_(None)))
    return parts


def _may_be_due(spec: QueueSpec, levels: sa.FromClause) -> sa.ColumnElement[bool]:
    if not spec.has("run_at") or spec.columns["run_at"].nullable:
        return sa.true()
    due = levels.c.first <= clock()
    return sa.or_(due, levels.c.level.is_(None)) if spec.columns["priority"].nullable else due


def _at_least(
    columns: Sequence[sa.ColumnElement[Any]], bounds: Sequence[sa.ColumnElement[Any]]
) -> sa.ColumnElement[bool]:
    return columns[0] >= bounds[0] if len(columns) == 1 else sa.tuple_(*columns) >= sa.tuple_(*bounds)


def _up_to(spec: QueueSpec, order: Sequence[sa.ColumnElement[Any]], level: Any) -> sa.ColumnElement[bool]:
    """Return the condition that a row's priority is below ``level``, or that it has that priority and is due."""
    last = (order[1], clock()) if spec.has("run_at") else (order[0], level)
    return sa.tuple_(order[0], last[0]) <= sa.tuple_(level, last[1])


def first_in_order(rows: AnySelect, order: Sequence[sa.ColumnElement[Any]], limit: Any) -> AnySelect:
    """Return the first ``limit`` of ``rows`` in a form for which the server scans the index of their order.

    A subquery hides the value of the LIMIT. The planner then assumes a tenth of the rows, and does not sort all rows.
    If there are few, it would round a tenth up to all of them, so ``rows`` is joined to a series of one row that the
    planner counts as a thousand.
    """
    thousand = _series(sa.select(_ONE).scalar_subquery(), "sqlaqueue_thousand")
    limit = sa.select(limit).scalar_subquery()
    return rows.where(thousand.c[0].is_not(None)).order_by(*order).limit(limit)


def _series(end: Any, name: str) -> sa.TableValuedAlias:
    """Return the numbers from 1 to ``end``, which is 1; where the planner does not see that, it assumes a thousand."""
    series = sa.func.generate_series(_ONE, end, type_=sa.Integer())
    return series.table_valued(sa.column(name, sa.Integer()), name=name, joins_implicitly=True)


def few_rows(each: sa.FromClause, limit: Any, source: sa.FromClause) -> AnySelect:
    """Return up to ``limit`` rows of ``source`` with the columns of ``each``, under a condition that is always true.

    The planner cannot estimate the condition, so it assumes one row in a hundred or two.
    """
    one = sa.literal_column("1", sa.Integer()).label("sqlaqueue_one")
    found = sa.select(*each.c, one).select_from(source).limit(limit)
    rows = found.subquery("sqlaqueue_found")
    *columns, all_ones = rows.c
    return sa.select(*columns).where(all_ones == _ONE)


# -- planner -----------------------------------------------------------------------------------------------------------
# Conditions that keep the server from reusing a plan that it made while a table was small.
#
# Drivers prepare statements that repeat, and PostgreSQL then keeps a generic plan, unless that looks more expensive
# than planning each execution. Made for a table of one page, as an idle queue is, such a plan reads the whole table
# and compares each row with each key. With a hundred thousand jobs enqueued since, each claim would take half a
# minute, until the table is analysed.
#
# For a few jobs such a plan does no lasting harm and is worth keeping: planning a claim takes as long as executing
# it.


FEW: int = 15
"""The server may keep the plan of a claim of up to this many jobs."""

_MANY = sa.literal_column("100", sa.Integer())
_SHARE = sa.literal_column(str(FEW + 1), sa.Integer())


def planned_anew() -> sa.ColumnElement[bool]:
    """Return a condition that is always true, and makes the server plan each execution of a prepared statement.

    It scans a few rows, which the planner sees when it knows the parameter. For a generic plan it assumes a thousand
    times as many.
    """
    return _ANEW


def planned_anew_for_many(limit: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return :func:`planned_anew` for a claim of more than :data:`FEW` jobs; a claim of fewer may keep its plan.

    The server adds the cost of planning to the cost of a custom plan. For a query with as many tables as a claim,
    planning costs more than scanning a thousand rows, and less than scanning several thousand.

    :param limit: the most jobs to claim, as a parameter that is rendered into the text.
    """
    return _goes_through(sa.func.least(_ONE + limit // _SHARE, _MANY, type_=sa.Integer()))


LARGE_FOR_ONE, LARGE_FOR_MANY = 32, 512
"""From how many pages on the server may keep the plan of a statement that finds rows by a key, or by an array of keys.

Such a plan is right for as long as it is kept. It is made anew whenever VACUUM, ANALYZE or TRUNCATE sets the size in
the catalog, and between these a table only grows. For a smaller one the planner may read all rows instead of an index,
and would do so when there are many. Whatever the length of an array, a kept plan is made for ten keys.
"""


def pages(table: sa.Table) -> AnySelect:
    """Return a SELECT of the size of a table in the catalog; no row without the table."""
    relation = system_table("pg_class", "oid", "relpages")
    return sa.select(relation.c.relpages).where(relation.c.oid == TableId(table))


def _goes_through(rows: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    just_one = sa.bindparam("sqlaqueue_just_one", 1, sa.Integer(), unique=False)
    each, once = _numbers(rows, "sqlaqueue_each_row"), _numbers(just_one, "sqlaqueue_once")
    # Refused here as well: for MariaDB, SQLAlchemy executes a SELECT with the conditions of an UPDATE before it.
    counted = refused_elsewhere(sa.select(sa.func.count()).select_from(each.join(once, sa.true())))
    # Not "> 0": the planner would assume that it is true in one case of three.
    return for_effect(counted.scalar_subquery())


def _numbers(end: sa.ColumnElement[Any], name: str) -> sa.TableValuedAlias:
    numbers = sa.func.generate_series(_ONE, end, type_=sa.Integer())
    return numbers.table_valued(sa.column(name, sa.Integer()), name=name)


_ANEW = _goes_through(_MANY)
