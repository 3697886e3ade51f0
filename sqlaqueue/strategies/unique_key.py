"""Statements that make jobs pending again unless a duplicate counts by now, see :class:`~sqlaqueue.Unique`.

A job that comes back is compared with the jobs that count, and with the others that come back in the same statement:
of several duplicates the newest comes back. What becomes of the others, ``Unique(on_return=...)`` says.

A duplicate that another transaction has inserted and not committed is not visible to the statement. Then the UPDATE
waits for that transaction, and raises an IntegrityError if it commits. Repeated in a new transaction, it finds the
duplicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import conv
from sqlalchemy.sql.functions import FunctionElement

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND
from sqlaqueue.queue.options import COUNTED, FINISHED, Unique
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.queue.strategy_protocol import ChangeIfUnique, Strategy
from sqlaqueue.sql.engine import engine_of_error, sqlstate
from sqlaqueue.sql.portable import converted, joined
from sqlaqueue.sql.types import object_name, period
from sqlaqueue.strategies.columns import add_index, by_index, index_for, key_column, same

# -- comparison of jobs ------------------------------------------------------------------------------------------------
# Comparisons of jobs by their unique values, which another engine may write by one column instead.
#
# PostgreSQL compares the columns of a partial index. An engine without such an index keeps a digest of these columns
# in a column of its own, and its compiler compares that.


SAME, VALUES = "sqlaqueue_same_unique_values", "sqlaqueue_unique_values"
"""The names of the two elements: a compiler with a method for one of them renders it in its own way."""
_WITH_NULLS = "_with_nulls"


class SameUniqueValues(FunctionElement[bool]):
    """The condition that a row of a queue's table and another row have the same values.

    :param condition: as PostgreSQL has it.
    :param key: a column of the row's key, by whose table the compiler knows the row.
    :param others: the values of the other row.
    """

    name = SAME
    inherit_cache = True
    type = sa.Boolean()
    nulls_distinct = True

    def __init__(self, condition: sa.ColumnElement[bool], key: Any, others: Sequence[Any]) -> None:
        # It is one of several conditions.
        super().__init__(condition.self_group(against=operators.and_), key, *others)

    def self_group(self, against: Any = None) -> Any:
        """Return the condition as it is: the base class adds ``= 1`` for databases without booleans."""
        return self


class SameUniqueValuesOrNulls(SameUniqueValues):
    """The comparison under ``Unique(nulls_distinct=False)``: two NULLs are equal."""

    name = SAME + _WITH_NULLS
    inherit_cache = True
    nulls_distinct = False


class UniqueValues(FunctionElement[Any]):
    """The values of a row, to order and to group by.

    The order is that of the index, so that two transactions that insert rows lock its entries in one order.

    :param values: the values of a row.
    """

    name = VALUES
    inherit_cache = True
    nulls_distinct = True


class UniqueValuesOrNulls(UniqueValues):
    """The values under ``Unique(nulls_distinct=False)``: two NULLs are equal."""

    name = VALUES + _WITH_NULLS
    inherit_cache = True
    nulls_distinct = False


def same_unique_values(
    condition: sa.ColumnElement[bool], key: Any, others: Sequence[Any], *, nulls_distinct: bool
) -> sa.ColumnElement[bool]:
    """Return the condition that two rows have the same values, see :class:`SameUniqueValues`."""
    made = SameUniqueValues if nulls_distinct else SameUniqueValuesOrNulls
    return made(condition, key, others)


def unique_values(values: Sequence[Any], *, nulls_distinct: bool) -> sa.ColumnElement[Any]:
    """Return what to order and to group by, see :class:`UniqueValues`."""
    made = UniqueValues if nulls_distinct else UniqueValuesOrNulls
    return made(*values)


@compiles(SameUniqueValues)
def _render_condition(element: SameUniqueValues, compiler: Any, **options: Any) -> str:
    own = getattr(compiler, f"visit_{SAME}", None)
    condition, *_ = element.clauses
    return str(compiler.process(condition, **options) if own is None else own(element, **options))


@compiles(UniqueValues)
def _render_values(element: UniqueValues, compiler: Any, **options: Any) -> str:
    own = getattr(compiler, f"visit_{VALUES}", None)
    if own is not None:
        return str(own(element, **options))
    return ", ".join(compiler.process(value, **options) for value in element.clauses)


# -- unique key --------------------------------------------------------------------------------------------------------
# The columns and conditions by which jobs are unique, for statements and for the index.


@dataclass(frozen=True, eq=False)
class UniqueKey:
    """What makes two jobs of a queue duplicates."""

    spec: QueueSpec
    config: Unique

    @property
    def columns(self) -> list[sa.Column[Any]]:
        return [self.spec.mapper.columns[name] for name in self.config.attributes]

    @property
    def stored(self) -> list[sa.Column[Any]]:
        """All columns that are compared, with the time of creation if jobs are unique for a period."""
        times = [] if self.config.within is None else [self.spec.columns["created_at"]]
        return list(dict.fromkeys([*self.columns, *times]))

    @property
    def states(self) -> tuple[str, ...]:
        """The states in which jobs count and for which the status column has a value."""
        values = self.spec.config.states
        # A job that waits for others counts as a pending one.
        return tuple(state for state in ("waiting", *self.config.states) if getattr(values, state) is not None)

    def values(self, rows: sa.FromClause) -> list[sa.ColumnElement[Any]]:
        """Return what is compared of the jobs in ``rows``, which has the columns :attr:`stored` by their keys."""
        values: list[sa.ColumnElement[Any]] = [rows.c[column.key] for column in self.columns]
        if self.config.within is not None:
            values.append(period(self.config.within, rows.c[self.spec.columns["created_at"].key]))
        return values

    def counts(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that jobs in ``rows``, the table or an alias of it, count."""
        if not self.spec.has("status"):
            return sa.true()
        status = rows.c[self.spec.columns["status"].key]
        # Not IN: the server prints it in another form, and that form in yet another one when it parses it again.
        return sa.or_(*(status == self.spec.literal(state) for state in self.states))

    def is_complete(self, values: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that a job with these values can have a duplicate."""
        if not self.config.nulls_distinct:
            return sa.true()
        return sa.and_(*(value.is_not(None) for value in values))

    def are_duplicates(self, rows: sa.FromClause, others: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that jobs of two tables have the same values."""
        pairs = zip(self.values(rows), self.values(others), strict=True)
        if self.config.nulls_distinct:
            same = sa.and_(*(one == other for one, other in pairs))
        else:
            # Not IS NOT DISTINCT FROM, which cannot use an index.
            same = sa.and_(*(sa.or_(one == other, sa.and_(one.is_(None), other.is_(None))) for one, other in pairs))
        key, nulls_distinct = rows.c[self.spec.keys[0].key], self.config.nulls_distinct
        return same_unique_values(same, key, self.values(others), nulls_distinct=nulls_distinct)

    def as_one(self, rows: sa.FromClause) -> sa.ColumnElement[Any]:
        """Return the values of the jobs in ``rows``, to order and to group by."""
        return unique_values(self.values(rows), nulls_distinct=self.config.nulls_distinct)

    def searched(self, rows: AnySelect, table: sa.FromClause) -> AnySelect:
        """Return a SELECT that looks for duplicates in a table; MariaDB raises an error if the unique index is missing.

        PostgreSQL finds that out by :func:`~sqlaqueue.unique.existing.check_index`.
        """
        return by_index(rows, table, index_for(self.spec, "unique"))

    @property
    def returns_from_runs(self) -> bool:
        """Whether a run may end in a state in which its job meets a duplicate: it does not count while it runs."""
        return "processing" not in self.config.states


def unique_key(spec: QueueSpec) -> UniqueKey | None:
    """Return what makes jobs of a queue unique; None for a queue without ``QueueConfig(unique=...)``."""
    return None if spec.config.unique is None else UniqueKey(spec, spec.config.unique)


def key_text_of(spec: QueueSpec, rows: sa.FromClause) -> sa.ColumnElement[str]:
    """Return the key of a job in ``rows`` as a text: the parts of a composite key are separated by commas."""
    parts = [converted(rows.c[key.key], sa.Text()) for key in spec.keys]
    return parts[0] if len(parts) == 1 else sa.func.concat_ws(",", *parts, type_=sa.Text())


DUPLICATE = "sqlaqueue_duplicate"
"""The column in which a statement returns the key of the duplicate, as a text, for a job that does not come back."""

REASON = "duplicate of job "
"""The beginning of the error of a job that was cancelled because of a duplicate, whose key follows."""

Values = Mapping[sa.Column[Any], Any]

_COUNTS, _RETURNS = "sqlaqueue_counts", "sqlaqueue_returns"


def columns_to_judge(
    spec: QueueSpec, key: UniqueKey, returns: sa.ColumnElement[bool] | None = None
) -> list[sa.ColumnElement[Any]]:
    """Return the columns, besides the key, of the rows that are given to :func:`judge`.

    :param returns: the condition that a job comes back; the others are duplicates of none. None for all.
    """
    needed = dict.fromkeys([*key.stored, *_newest(spec)])
    columns: list[sa.ColumnElement[Any]] = [column.label(column.key) for column in needed if column not in spec.keys]
    columns.append((key.counts(spec.table) if spec.has("status") else sa.false()).label(_COUNTS))
    columns.append((sa.true() if returns is None else returns).label(_RETURNS))
    return columns


def judge(spec: QueueSpec, key: UniqueKey, rows: AnySelect, *more: str) -> sa.CTE:
    """Return ``rows`` with the column :data:`DUPLICATE`, the key of the duplicate because of which one stays away.

    :param rows: a SELECT of the keys and of :func:`columns_to_judge`, with the rows locked.
    :param more: names of further columns of it that are kept.
    """
    back = rows.cte("sqlaqueue_back")
    duplicate = spec.table.alias("sqlaqueue_duplicate_row")
    another = sa.or_(*(duplicate.c[column.key] != back.c[column.key] for column in spec.keys))
    counting = key.are_duplicates(duplicate, back), key.counts(duplicate), another
    first = key.searched(sa.select(key_text_of(spec, duplicate)).where(*counting).limit(1), duplicate)
    mine, values = key_text_of(spec, back), key.values(back)
    order = [back.c[_COUNTS].desc(), *(back.c[column.key].desc() for column in (*_newest(spec), *spec.keys))]
    newest = sa.func.first_value(mine).over(partition_by=[key.as_one(back), back.c[_RETURNS]], order_by=order)
    competes = sa.and_(back.c[_RETURNS], ~back.c[_COUNTS], key.is_complete(values))
    place = sa.func.coalesce(first.scalar_subquery(), sa.func.nullif(newest, mine), type_=sa.Text())
    return sa.select(
        *(back.c[column.key] for column in spec.keys),
        *(back.c[name] for name in more),
        sa.case((competes, place)).label(DUPLICATE),
    ).cte("sqlaqueue_judged")


def update_judged(spec: QueueSpec, judged: sa.CTE, change: ChangeIfUnique) -> AnySelect:
    """Return the statement that updates judged jobs, and selects the key of each with that of its duplicate."""
    duplicate = judged.c[DUPLICATE]
    back, instead, where = change
    if not instead:
        where = [*where, duplicate.is_(None)]
    values = {
        column: sa.case((duplicate.is_(None), _value(column, back)), (sa.true(), _value(column, instead)), else_=column)
        for column in dict.fromkeys([*back, *instead])
    }
    mine = same(spec.keys, [judged.c[key.key] for key in spec.keys])
    update = sa.update(spec.table).where(mine, *where).values(values)
    return sa.select(*(judged.c[key.key] for key in spec.keys), duplicate).add_cte(update.cte("sqlaqueue_updated"))


def reason(duplicate: sa.ColumnElement[str], error: sa.ColumnElement[Any] | None = None) -> sa.ColumnElement[str]:
    """Return the text for ``last_error`` of a job that was cancelled because of a duplicate.

    :param error: the error of its last run, which follows in the next line.
    """
    parts: list[Any] = [REASON, duplicate]
    if error is not None:
        # Without the line that an earlier requeue has added.
        former = sa.func.regexp_replace(converted(error, sa.Text()), f"^{REASON}[^\n]*\n?", "", type_=sa.Text())
        parts.append(sa.literal("\n", sa.Text()) + sa.func.nullif(former, ""))
    return joined(*parts)


def duplicate_in(error: str | None) -> str | None:
    """Return the key of the duplicate for which a job was cancelled, as ``last_error`` names it; None for others."""
    first, *_ = (error or "").split("\n")
    return first.removeprefix(REASON) if first.startswith(REASON) else None


def _newest(spec: QueueSpec) -> list[sa.Column[Any]]:
    """Return the columns by which the newest of several duplicates is found, before their keys."""
    return [spec.columns["created_at"]] if spec.has("created_at") else []


def _value(column: sa.Column[Any], values: Values) -> sa.ColumnElement[Any]:
    if column not in values:
        return column
    value = values[column]
    if value is None:
        return sa.null()
    return value if isinstance(value, sa.ColumnElement) else sa.literal(value, column.type)


# -- unique index ------------------------------------------------------------------------------------------------------
# The unique index of ``QueueConfig(unique=...)``, and the checks of its configuration when a class is mapped.


PURPOSE = "unique"
_NO_SUCH_INDEX = "42P10"


def attach_unique(spec: QueueSpec, strategy: Strategy) -> None:
    """Add the unique index to the model's table.

    :raises ConfigurationError: with the class, the attribute and the fix, if the index would not do what is configured.
    """
    key = unique_key(spec)
    if key is None:
        return
    for name in key.config.attributes:
        _check_attribute(spec, name)
    for reason in _reasons_against(spec, key.config, strategy):
        raise ConfigurationError(f"{spec.model.__name__}: {reason}")
    if key.config.within is not None:
        check_roles(spec.model.__name__, {"created_at": "Unique(within=...)"}, spec.columns, spec.config)
    where = key.counts(spec.table) if spec.has("status") else None
    index = add_index(spec, PURPOSE, key.values(spec.table), where=where, unique=True)
    if not key.config.nulls_distinct:
        index.dialect_options["postgresql"]["nulls_not_distinct"] = True


def index_name(table: sa.Table) -> str:
    """Return the name of the unique index of a queue's table."""
    return conv(object_name("ix", table.name, "queue", PURPOSE))


def names_unique_index(spec: QueueSpec, constraint: str) -> bool:
    """Return whether a violated constraint is the index that makes jobs unique.

    :param constraint: its name or, from a database that does not name it, its columns.
    """
    name = index_name(spec.table)
    # A migration that replaces the index builds the new one under a longer name.
    if constraint.startswith(name):
        return True
    index = next((each for each in spec.table.indexes if each.name == name), None)
    return index is not None and constraint == ", ".join(f"{spec.table.name}.{column.name}" for column in index.columns)


@contextlib.contextmanager
def explaining_missing_index(spec: QueueSpec) -> Iterator[None]:
    """Explain the error of a statement that names the index, if the database lacks it.

    :raises DatabaseNotReadyError: with the fix.
    """
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) != _NO_SUCH_INDEX:
            raise
        other = engine_of_error(error)
        by_alembic = f". Run {UPDATE_COMMAND}, where env.py has the plug-in sqlaqueue.alembic"
        msg = (
            f"{spec.model.__name__}: the database lacks the index {index_name(spec.table)}, which makes jobs unique"
            f"{by_alembic if other is None else f'; {other.migrating}'}"
        )
        raise DatabaseNotReadyError(msg) from error


def _check_attribute(spec: QueueSpec, name: str) -> None:
    what = f"{spec.model.__name__}: Unique({name!r})"
    column = key_column(spec, name, what)
    if isinstance(getattr(column.type, "impl_instance", column.type), sa.ARRAY):
        msg = (
            f"{what}: enqueue() cannot look for values of type ARRAY; use a text or JSONB for "
            f"{spec.model.__name__}.{name}"
        )
        raise ConfigurationError(msg)


def _reasons_against(spec: QueueSpec, unique: Unique, strategy: Strategy) -> Iterator[str]:
    """Yield what is wrong with the states for this queue."""
    what, states = f"Unique(states={unique.states!r})", spec.config.states
    if not spec.has("status"):
        if unique.states != COUNTED:
            yield (
                f"{what}: with rows_are_messages=True the claim deletes the row of a job, and nothing is left of a "
                "finished one to count; a duplicate of a running job waits for the end of its transaction. Leave out "
                "states"
            )
        if unique.on_return == "wait":
            yield (
                'Unique(on_return="wait"): with rows_are_messages=True a job has no row in which it could wait; use '
                '"cancel", which moves it to the dead letters'
            )
        return
    yield from _reasons_against_running(spec, unique, strategy)
    yield from _reasons_against_finished(spec, unique)
    if unique.on_return == "cancel" and set(FINISHED) - set(unique.states):
        if "cancelled" in unique.states:
            yield (
                f"{what}: a cancelled job counts as well, so a duplicate cannot be cancelled; use "
                'Unique(on_return="wait")'
            )
        if states.cancelled is None:
            yield (
                "Unique(...): a job that meets a duplicate is cancelled, and there is no status value for that; set "
                'States(cancelled=...), or use Unique(on_return="wait")'
            )


def _reasons_against_running(spec: QueueSpec, unique: Unique, strategy: Strategy) -> Iterator[str]:
    """Yield why pending and running jobs cannot be told apart."""
    if "processing" in unique.states:
        return
    what = f"Unique(states={unique.states!r})"
    if not strategy.tells_running_apart:
        yield (
            f'{what}: under the strategy "{strategy.name}" a running job still reads as pending, so it cannot be '
            'unique only while it waits; add "processing", or use strategy="update_status"'
        )
    elif unique.on_return == "wait" and not spec.has("lease_expires_at"):
        yield (
            'Unique(on_return="wait"): a run that ends while a duplicate exists waits with an expired lease, and '
            f"{spec.model.__name__} leaves out lease_expires_at; {spec.config.fix_for('lease_expires_at')}, or use "
            '"cancel"'
        )


def _reasons_against_finished(spec: QueueSpec, unique: Unique) -> Iterator[str]:
    """Yield why finished jobs would not be there to count."""
    what, within = f"Unique(states={unique.states!r})", unique.within
    for state in unique.finished:
        if getattr(spec.config.states, state) is None:
            yield f"{what}: there is no status value for {state!r}; leave it out, or set States({state}=...)"
        if state == "completed" and spec.config.on_complete == "delete":
            yield (
                f'{what}: on_complete="delete" deletes the row of a completed job, so it cannot count; leave out '
                '"completed" or on_complete="delete"'
            )
        kept = spec.config.retention.get(state)
        if kept is not None and (within is None or seconds(kept) < within.total_seconds()):
            period = "jobs count indefinitely without within=" if within is None else f"within= is {within}"
            yield (
                f"{what}: QueueConfig(retention={{{state!r}: {kept}}}) deletes jobs that still count, as {period}; "
                f"keep them for at least as long, or leave {state!r} out of one of the two"
            )
