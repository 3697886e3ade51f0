"""Expressions that engines write in their own way, each a construct with a name.

SQLAlchemy writes a construct for PostgreSQL as it writes what the construct is derived from. For SQLite and MariaDB,
``sqlaqueue.sqlite.compiler`` and ``sqlaqueue.mariadb.compiler`` register how to write it, by ``@compiles``.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import Grouping
from sqlalchemy.sql.functions import FunctionElement

from sqlaqueue._typing import AnySelect

Column = sa.ColumnElement[Any]
_Binary = TypeVar("_Binary", bound=sa.BinaryExpression[Any])
_MOMENT = sa.DateTime(timezone=True)


def _binary(kind: type[_Binary], built: Any, type_: Any = None) -> _Binary:
    """Return an expression that SQLAlchemy has built as a construct."""
    return kind(
        built.left,
        built.right,
        built.operator,
        type_=built.type if type_ is None else type_,
        negate=built.negate,
        modifiers=built.modifiers,
    )


def _ungrouped(element: Any) -> Any:
    return element.element if isinstance(element, Grouping) else element


class ByEngine(FunctionElement[Any]):
    """An expression for which each engine has one of its own, see :func:`by_engine`."""

    name = "by_engine"
    inherit_cache = True


def by_engine(postgresql: Column, sqlite: Column, mariadb: Column | None = None) -> Column:
    """Return an expression that is written as one for each engine; each of them means the same.

    :param postgresql: the expression of PostgreSQL, whose type the result has.
    :param mariadb: None for that of SQLite.
    """
    found = ByEngine(postgresql, sqlite, sqlite if mariadb is None else mariadb)
    found.type = postgresql.type
    return found


def _writes(place: int) -> Any:
    def write(element: ByEngine, compiler: Any, **options: Any) -> str:
        return str(compiler.process([*element.clauses][place], **options))

    return write


compiles(ByEngine)(_writes(0))
compiles(ByEngine, "sqlite")(_writes(1))
compiles(ByEngine, "mariadb", "mysql")(_writes(2))


class Called(sa.Function[Any]):
    """The base of constructs that PostgreSQL has as a function."""

    inherit_cache = True


# -- moments and spans -------------------------------------------------------------------------------------------------


class Span(sa.Interval):
    """A span of time: an ``interval`` on PostgreSQL, a number of seconds on other engines."""

    cache_ok = True


class Clock(Called):
    """The present moment."""

    inherit_cache = True


def clock() -> sa.Function[Any]:
    """Return the time at which the server receives the statement.

    ``now()`` would be the start of the transaction, which may be long ago. ``clock_timestamp()`` is volatile, and so
    cannot be used in index conditions.
    """
    return Clock("statement_timestamp", type_=_MOMENT)


def ticking_clock() -> sa.Function[Any]:
    """Return the time at which the server evaluates the expression; other engines return :func:`clock`."""
    return Clock("clock_timestamp", type_=_MOMENT)


class MomentOfInsert(FunctionElement[datetime]):
    """The moment at which a row is inserted, as the server default of a column."""

    name = "now"
    type = _MOMENT
    inherit_cache = True


@compiles(MomentOfInsert)
def _moment_of_insert(*_: Any, **__: Any) -> str:
    return "now()"


class MovedMoment(sa.BinaryExpression[Any]):
    """A moment plus or minus a span."""

    inherit_cache = True


def later(moment: Any, span: Any) -> Column:
    """Return the moment that is a span after another.

    :param span: a timedelta, or an expression of type :class:`Span`.
    """
    return _binary(MovedMoment, moment + _as_span(moment, span))


def earlier(moment: Any, span: Any) -> Column:
    """Return the moment that is a span before another; see :func:`later`."""
    return _binary(MovedMoment, moment - _as_span(moment, span))


def _as_span(moment: Any, span: Any) -> Any:
    # Under the name that SQLAlchemy would give the parameter.
    return sa.bindparam(moment.name, span, Span(), unique=True) if isinstance(span, timedelta) else span


class Elapsed(sa.BinaryExpression[Any]):
    """The span between two moments."""

    inherit_cache = True


def elapsed(since: Any, until: Any) -> Column:
    """Return the span from one moment to another, a timedelta; negative if ``until`` is before ``since``."""
    return _binary(Elapsed, until - since, Span())


class SecondsOf(sa.Extract):
    """The seconds of a span."""

    inherit_cache = True


def seconds_of(span: Any) -> Column:
    return SecondsOf("epoch", span)


def seconds_between(since: Any, until: Any) -> Column:
    """Return the seconds from one moment to another; negative if ``until`` is before ``since``."""
    return SecondsOf("epoch", elapsed(since, until))


class Epoch(sa.Extract):
    """The seconds since 1970 of a moment."""

    inherit_cache = True


def epoch(moment: Any) -> Column:
    return Epoch("epoch", moment)


class AfterEpoch(Called):
    """The moment some seconds after 1970."""

    inherit_cache = True


def after_epoch(seconds: Any) -> Column:
    return AfterEpoch("to_timestamp", seconds, type_=_MOMENT)


# -- keys --------------------------------------------------------------------------------------------------------------


class Among(sa.BinaryExpression[bool]):
    """The condition that a value is one of an array, which is a parameter."""

    inherit_cache = True

    @property
    def array(self) -> sa.BindParameter[Any]:
        collection: Any = self.right
        array: sa.BindParameter[Any] = _ungrouped(collection.element)
        return array


def is_among(value: Any, array: sa.BindParameter[Any]) -> Among:
    """Return the condition that a value is one of an array.

    With an array instead of IN the SQL is the same for any number of values, so the server can keep its plan.

    :param array: a parameter of the type of :func:`~sqlaqueue.sql.types.key_array`.
    """
    return _binary(Among, value == sa.any_(array))


class AmongRows(sa.BinaryExpression[bool]):
    """The condition that a value is among the rows of a SELECT of one column."""

    inherit_cache = True

    @property
    def rows(self) -> Any:
        """The SELECT, in parentheses."""
        collection: Any = self.right
        return _ungrouped(collection.element).clauses.clauses[0]


def is_among_rows(value: Any, rows: AnySelect) -> AmongRows:
    """Return the condition that a value is among the rows of a SELECT, which PostgreSQL executes exactly once."""
    return _binary(AmongRows, value == sa.any_(sa.func.array(rows.scalar_subquery())))


# -- values ------------------------------------------------------------------------------------------------------------


class Converted(sa.Cast[Any]):
    """A value as one of another type."""

    inherit_cache = True


def converted(value: Any, type_: Any) -> sa.Cast[Any]:
    """Return a value as one of another type, as ``CAST`` does; other engines leave out what they need not convert."""
    return Converted(value, type_)


class Extreme(Called):
    """The greatest or the least of some values; NULL is passed over."""

    inherit_cache = True


def greatest(*values: Any, type_: Any = None) -> sa.Function[Any]:
    """Return the greatest of some values that is not NULL; NULL if all are."""
    return Extreme("greatest", *values, type_=type_)


def least(*values: Any, type_: Any = None) -> sa.Function[Any]:
    """Return the least of some values that is not NULL; NULL if all are."""
    return Extreme("least", *values, type_=type_)


class Joined(Called):
    """Some values as one text; NULL is an empty text."""

    inherit_cache = True


def joined(*parts: Any) -> sa.Function[str]:
    """Return some values as one text; NULL is an empty text."""
    return Joined("concat", *parts, type_=sa.Text())


class JsonArray(Called):
    """Some values as one JSON array."""

    inherit_cache = True


def json_array(*values: Any) -> sa.Function[Any]:
    return JsonArray("jsonb_build_array", *values, type_=JSONB())


class Collected(Called):
    """An array of the values of all rows."""

    inherit_cache = True


def collected(value: Any) -> sa.Function[Any]:
    """Return an array of a text of all rows."""
    return Collected("array_agg", value, type_=sa.ARRAY(sa.Text()))


class Filtered(sa.FunctionFilter[Any]):
    """An aggregate of the rows that meet a condition."""

    inherit_cache = True


def filtered(aggregate: Any, condition: sa.ColumnElement[bool]) -> sa.FunctionFilter[Any]:
    """Return an aggregate of the rows that meet a condition."""
    return Filtered(aggregate, condition)


class NullsPlaced(sa.UnaryExpression[Any]):
    """An order in which NULL is before all other values, or behind them."""

    inherit_cache = True


def nulls_first(ordered: Any) -> Column:
    built: Any = ordered.nulls_first()
    return NullsPlaced(built.element, modifier=built.modifier, type_=built.type)


def nulls_last(ordered: Any) -> Column:
    built: Any = ordered.nulls_last()
    return NullsPlaced(built.element, modifier=built.modifier, type_=built.type)


class KeyHash(Called):
    """A hash of some values, a number that is not negative; NULL is a value like any other."""

    inherit_cache = True

    @property
    def values(self) -> Any:
        """The values."""
        row: Any = next(iter(self.clauses))
        return row.clauses


# -- settings, transactions, notifications -----------------------------------------------------------------------------


class ServerSetting(Called):
    """A setting of the server, by PostgreSQL's name; NULL on an engine that has none of this name."""

    inherit_cache = True


def setting(name: Any, *arguments: Any) -> sa.Function[str]:
    """Return a setting of the server as a text; NULL on an engine that has none of this name."""
    return ServerSetting("current_setting", name, *arguments, type_=sa.Text())


class SetSetting(Called):
    """The new value of a setting that ends with the transaction."""

    inherit_cache = True


def set_setting(name: Any, value: Any) -> sa.Function[Any]:
    """Return a call that changes a setting until the end of the transaction; an engine without it returns NULL."""
    return SetSetting("set_config", name, value, sa.true())


class TransactionNumber(Called):
    """A number that is the same within a transaction, and another one for each statement outside of any."""

    inherit_cache = True


def transaction_number() -> sa.Function[Any]:
    return TransactionNumber("txid_current")


class InRecovery(Called):
    """Whether the server is a replica that is known to be one."""

    inherit_cache = True


def in_recovery() -> sa.Function[Any]:
    return InRecovery("pg_is_in_recovery")


class Notification(Called):
    """The call that sends a text to all who listen on a channel, when the transaction commits."""

    inherit_cache = True


def notify(channel: Any, text: Any) -> sa.Function[str]:
    """Return the call that sends a text to all who listen on a channel, when the transaction commits."""
    return Notification("pg_notify", channel, text, type_=sa.Text())


class ForEffect(sa.BinaryExpression[bool]):
    """A condition that is always true, and that PostgreSQL evaluates for its effect; other engines leave it out."""

    inherit_cache = True


def for_effect(value: sa.ColumnElement[Any]) -> ForEffect:
    """Return the condition that a value is not NULL, which PostgreSQL evaluates for the effect of the value."""
    return _binary(ForEffect, value.is_not(None))


class ServerDefault(FunctionElement[Any]):
    """The server default of a column, as a value in an UPDATE.

    :param default: the default, for an engine that cannot name it by DEFAULT.
    """

    inherit_cache = True


@compiles(ServerDefault)
def _default(*_: Any, **__: Any) -> str:
    return "DEFAULT"
