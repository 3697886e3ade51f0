"""Where in the claim order a claim begins, and how it passes over what is not due.

In an index of ``(priority, run_at, key)`` the jobs of a better priority that are not due yet stand before those of a
worse one that are: a plain scan walks over all of them. By :func:`by_priority` a claim takes one priority after the
other, from its first job to the last that is due, until it has enough. Each priority on the way costs one look into the
index.

An index holds the entries of jobs that are done for as long as anybody's snapshot may see them, and a scan from the
head walks over those as well. By :func:`from_mark` a claim begins where another one has ended. It finds nothing before
that, nor in another priority: whoever claims so has to look from the head now and then.

All comparisons are of rows, ``(priority, run_at) >= (..)``: for the index they are boundaries, and the planner, which
knows nothing of rows, expects a part of the table from each, however few it takes to be waiting. Where it expects fewer
rows than are to be claimed, it would read all that are due and sort them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.selectable import Lateral, NamedFromClause, SelectBase

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.queue.strategy import ClaimRequest, ScanRange

MARK = "sqlaqueue_mark"
"""How the parameters of a claim begin that starts at a mark, one for each column of the claim order."""

# A bound LIMIT may be a tenth of the table, for all that a generic plan knows: guessed from step to step, that adds up
# to a query which the server takes to be so expensive that it compiles it first (JIT).
_ONE = sa.literal_column("1", sa.Integer())

Lock = Callable[[AnySelect], AnySelect]


class _Each(Lateral):
    """A LATERAL of several tables.

    SQLAlchemy notes what ties the tables in a LATERAL for the query around it, and then warns that within it they are
    not connected. Of this one the query around it notes nothing.
    """

    inherit_cache = True


@compiles(_Each)
def _render(each: _Each, compiler: Any, **options: Any) -> str:
    options.pop("from_linter", None)
    rendered: str = compiler.visit_lateral(each, **options)
    return rendered


def _each(rows: SelectBase, name: str) -> _Each:
    return _Each._construct(rows.self_group(), name=name)  # noqa: SLF001 - lateral() makes no other class


def by_priority(_: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
    """Narrow nothing: as ``within``, this asks a strategy to take one priority after the other.

    A strategy that does not know of it scans the claim order from its head, with the same result.
    """
    return sa.true()


def from_mark(spec: QueueSpec) -> ScanRange:
    """Return what narrows a claim to due jobs from a mark on, in the mark's priority; see :func:`mark_of`."""
    mark = [
        sa.bindparam(f"{MARK}_{number}", type_=column.type, unique=False)
        for number, column in enumerate(spec.claim_order)
    ]

    def scan_range(order: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        behind = _at_least(order, mark)
        if spec.has("priority"):
            return sa.and_(behind, _up_to(spec, order, mark[0]))
        # Said once more where a missing time counts as due: such a condition is no boundary, and this one is.
        return sa.and_(behind, order[0] <= clock()) if spec.has("run_at") else behind

    return scan_range


def mark_of(spec: QueueSpec, job: Any) -> Mapping[str, Any] | None:
    """Return the parameters of a claim that begins at ``job``, as it was handed out; None when no claim can.

    That is so for a job without a priority or a time, and for one whose attributes are not loaded.
    """
    names = [spec.mapper.get_property_by_column(column).key for column in spec.claim_order]
    values = [job.__dict__.get(name) for name in names]
    if None in values:
        return None
    return {f"{MARK}_{number}": value for number, value in enumerate(values)}


class _LockRows(Protocol):
    def __call__(self, spec: QueueSpec, rows: AnySelect, *others: sa.FromClause) -> AnySelect: ...


class _FirstDue(Protocol):
    def __call__(
        self, spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, scan_range: ScanRange | None
    ) -> AnySelect: ...


def take(
    request: ClaimRequest,
    waiting: AnySelect,
    scanned: sa.FromClause,
    *others: sa.FromClause,
    lock_rows: _LockRows,
    first_due: _FirstDue,
) -> sa.CTE:
    """Return the first due rows of ``waiting`` in claim order, locked together with those of ``others``.

    The planner expects one row or a few, so it looks up by key whatever is joined to them, in a small table as in a
    large one.

    :param lock_rows: locks rows as the strategy does, see ``ClaimStrategy.lock()``.
    :param first_due: narrows and orders rows as the strategy does, see ``ClaimStrategy.best()``.
    """
    spec, limit, scan_range = request.spec, request.limit, request.scan_range

    def lock(rows: AnySelect) -> AnySelect:
        return lock_rows(spec, rows, *others)

    if scan_range is by_priority and spec.has("priority"):
        return _first_by_priority(spec, waiting, scanned, limit, lock).cte("picked")
    best = first_due(spec, waiting, scanned, limit, scan_range)
    return _first_of(spec, best, scanned, limit, lock).cte("picked")


def _first_of(spec: QueueSpec, rows: AnySelect, scanned: sa.FromClause, limit: Any, lock: Lock) -> AnySelect:
    """Return the first ``limit`` of ``rows``, locked, in the order that ``scanned`` knows of them."""
    order = [scanned.c[column.key] for column in spec.claim_order]
    # What is LATERAL is planned as if all of its rows were fetched; else the planner prefers for a few of them what it
    # can begin with at once, such as to go through one table for each row of another.
    start = _series(_ONE, "sqlaqueue_start")
    found = lock(_sorted(rows.where(start.c[0].is_not(None)), order, limit))
    each = _each(found.correlate(start), "sqlaqueue_each")
    return _few(each, limit, start.join(each, sa.true()))


def _first_by_priority(
    spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, lock: Lock
) -> AnySelect:
    """Return the first ``limit`` due rows of ``waiting``, locked, from one priority of ``scanned`` after the other.

    The rows of a priority are looked for when those of the ones before were not enough, and locked as they are found.
    """
    order = [scanned.c[column.key] for column in spec.claim_order]
    levels = _levels(spec, scanned, order)
    parts = [lock(_sorted(waiting.where(part), order, limit)) for part in _parts(spec, order, levels)]
    if len(parts) == 1:
        each = _each(parts[0].correlate(levels), "sqlaqueue_each")
    else:
        laterals = [_each(part.correlate(levels), f"sqlaqueue_part_{number}") for number, part in enumerate(parts)]
        each = _each(sa.union_all(*(sa.select(*part.c) for part in laterals)), "sqlaqueue_each")
    return _few(each, limit, levels.join(each, _may_be_due(spec, levels)))


def _levels(spec: QueueSpec, scanned: sa.FromClause, order: Sequence[sa.ColumnElement[Any]]) -> NamedFromClause:
    """Return the priorities that occur, best first, each with the least time of its jobs.

    Where a priority may be missing, such jobs come last, under a level that is null.
    """
    waiting = [spec.in_state("pending")] if scanned is spec.table and spec.has("status") else []
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
    # Nothing that this statement sees stands before the first, but the entries of jobs that are done may.
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
    """Return the condition that a row's priority is at most ``level``, and that one of that level is due."""
    last = (order[1], clock()) if spec.has("run_at") else (order[0], level)
    return sa.tuple_(order[0], last[0]) <= sa.tuple_(level, last[1])


def _sorted(rows: AnySelect, order: Sequence[sa.ColumnElement[Any]], limit: Any) -> AnySelect:
    """Return the first ``limit`` of ``rows``, which the server finds by walking along the index of their order.

    Of a LIMIT whose number it does not see, the planner expects a tenth of the rows, and for a tenth of them it does
    not read and sort all. A tenth of a few rows it takes for all of them, though. So each row is joined to a single
    one, of which it believes that there are a thousand.
    """
    thousand = _series(sa.select(_ONE).scalar_subquery(), "sqlaqueue_thousand")
    limit = sa.select(limit).scalar_subquery()
    return rows.where(thousand.c[0].is_not(None)).order_by(*order).limit(limit)


def _series(end: Any, name: str) -> sa.TableValuedAlias:
    """Return the numbers from 1 to ``end``, which is 1: the planner expects a thousand, unless it sees that."""
    series = sa.func.generate_series(_ONE, end, type_=sa.Integer())
    return series.table_valued(sa.column(name, sa.Integer()), name=name, joins_implicitly=True)


def _few(each: sa.FromClause, limit: Any, source: sa.FromClause) -> AnySelect:
    """Return up to ``limit`` rows of ``source`` with the columns of ``each``, under a condition that holds for all.

    Of the condition the planner knows nothing, so it expects one row in a hundred or two.
    """
    one = sa.literal_column("1", sa.Integer()).label("sqlaqueue_one")
    found = sa.select(*each.c, one).select_from(source).limit(limit)
    rows = found.subquery("sqlaqueue_found")
    *columns, all_ones = rows.c
    return sa.select(*columns).where(all_ones == _ONE)
