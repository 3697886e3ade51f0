"""Writes statements and tables for SQLite, the constructs of the library among them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.ext.compiler import compiles

from sqlaqueue.engines.compiler import (
    ProgramsCompiler,
    among_rows,
    arguments,
    moment_and_seconds,
    setting_as,
)
from sqlaqueue.engines.shared import TIMING, moment_text, on_prepared, undecorated
from sqlaqueue.postgresql.due_times import WrittenHere
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.sql.portable import (
    AfterEpoch,
    Among,
    AmongRows,
    Clock,
    Collected,
    Converted,
    Elapsed,
    Epoch,
    Extreme,
    Joined,
    KeyHash,
    MomentOfInsert,
    MovedMoment,
    ServerSetting,
    SetSetting,
    Span,
)
from sqlaqueue.sql.types import GivenRows, Period
from sqlaqueue.strategies.columns import AmongLocked

_CHANGED = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in TIMING)

NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
"""The present moment without a function of the library, as another program may change the row."""


def write_schedule_trigger(table: sa.Table, dialect: sa.Dialect, name: str) -> str:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    on = dialect.identifier_preparer.format_table(table)
    return (
        f"CREATE TRIGGER {name} AFTER UPDATE ON {on} WHEN {_CHANGED} BEGIN UPDATE {SCHEDULE} "  # noqa: S608 - the name is quoted
        f"SET edited_at = {NOW}, next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END "
        "WHERE name = NEW.name; END"
    )


# One parameter for all uses in a statement, so that they have the same value.
_NOW = sa.bindparam("sqlaqueue_now", callable_=lambda: moment_text(datetime.now(UTC)), type_=sa.Text(), unique=False)


# -- expressions -------------------------------------------------------------------------------------------------------
# Functions whose names begin with ``sqlaqueue_`` are those that sqlaqueue.sqlite.prepare adds to each connection.


@compiles(Clock, "sqlite")
def _clock(_: Clock, compiler: Any, **options: Any) -> str:
    """Return a parameter: the file is local, and so the clock of the database is that of this machine."""
    options.pop("add_to_result_map", None)
    # Alembic writes the defaults of columns as literals, and a moment would be that of the migration's writing.
    return f"({NOW})" if options.get("literal_binds") else str(compiler.process(_NOW, **options))


def moved(moment: str, seconds: str) -> str:
    return f"sqlaqueue_moved({moment}, {seconds})"


@compiles(MovedMoment, "sqlite")
def _moved(element: MovedMoment, compiler: Any, **options: Any) -> str:
    return moved(*moment_and_seconds(element, compiler, **options))


@compiles(AfterEpoch, "sqlite")
def _after_epoch(element: AfterEpoch, compiler: Any, **options: Any) -> str:
    return moved("'1970-01-01 00:00:00.000000'", *arguments(element, compiler, **options))


def epoch(moment: str) -> str:
    return f"sqlaqueue_epoch({moment})"


@compiles(Epoch, "sqlite")
def _epoch(element: Epoch, compiler: Any, **options: Any) -> str:
    return epoch(compiler.process(element.expr, **options))


@compiles(Elapsed, "sqlite")
def _elapsed(element: Elapsed, compiler: Any, **options: Any) -> str:
    until, since = (epoch(compiler.process(part, **options)) for part in (element.left, element.right))
    return f"({until} - {since})"


@compiles(Among, "sqlite")
def _among(element: Among, compiler: Any, **options: Any) -> str:
    value, array = (compiler.process(part, **options) for part in (element.left, element.array))
    return f"{value} IN (SELECT value FROM json_each({array}))"  # noqa: S608 - the array is a parameter


compiles(AmongRows, "sqlite")(among_rows)


@compiles(Converted, "sqlite")
def _converted(element: Converted, compiler: Any, **options: Any) -> str:
    """Leave out the casts to types that SQLite would take for numbers."""
    value, target = compiler.process(element.clause, **options), element.type.dialect_impl(compiler.dialect)
    if isinstance(target, sa.JSON):
        return f"json({value})"
    if isinstance(undecorated(target), sa.String) and isinstance(undecorated(element.clause.type), sa.Uuid):
        return f"sqlaqueue_uuid_text({value})"
    plain = undecorated(element.type)
    if isinstance(plain, sa.Integer | sa.Float | sa.String) and not isinstance(plain, sa.Enum):
        return str(compiler.visit_cast(element, **options))
    return str(value)


@compiles(Extreme, "sqlite")
def _extreme(element: Extreme, compiler: Any, **options: Any) -> str:
    """Render ``max()`` or ``min()``, which is NULL where one of its arguments is."""
    name = {"greatest": "max", "least": "min"}[element.name]
    first, *others = arguments(element, compiler, **options)
    for other in others:
        first = f"coalesce({name}({first}, {other}), {first}, {other})"
    return first


@compiles(Joined, "sqlite")
def _joined(element: Joined, compiler: Any, **options: Any) -> str:
    return "(" + " || ".join(f"coalesce({each}, '')" for each in arguments(element, compiler, **options)) + ")"


@compiles(Collected, "sqlite")
def _collected(element: Collected, compiler: Any, **options: Any) -> str:
    return f"json_group_array({', '.join(arguments(element, compiler, **options))})"


@compiles(KeyHash, "sqlite")
def _key_hash(element: KeyHash, compiler: Any, **options: Any) -> str:
    return f"sqlaqueue_key_hash({', '.join(compiler.process(each, **options) for each in element.values)})"


@compiles(ServerSetting, "sqlite")
def _setting(element: ServerSetting, compiler: Any, **options: Any) -> str:
    known = {"transaction_isolation": "'read committed'", "transaction_read_only": "'off'"}
    return setting_as(known, element, compiler, **options)


@compiles(SetSetting, "sqlite")
def _set_setting(*_: Any, **__: Any) -> str:
    return "NULL"


@compiles(Period, "sqlite")
def _period(element: Period, compiler: Any, **options: Any) -> str:
    """Render the number of a period, of functions that an index may call."""
    moment = compiler.process(element.moment, **options)
    milliseconds = f"CAST(strftime('%s', {moment}) AS INTEGER) * 1000 + CAST(substr({moment}, 21, 3) AS INTEGER)"
    return f"(({milliseconds} - {element.origin}) / {element.milliseconds})"


@compiles(WrittenHere, "sqlite")
def _written_here(element: WrittenHere, compiler: Any, **options: Any) -> str:
    name = compiler.process(sa.literal(element.table.fullname), **options)
    return f"sqlaqueue_written_here({name}, {element.rows.name}.rowid)"


@compiles(GivenRows, "sqlite")
def _given_rows(element: GivenRows, compiler: Any, **options: Any) -> str:
    if not options.get("asfrom"):
        return str(compiler.visit_table_valued_alias(element, **options))
    arrays = [compiler.process(array) for array in element.arrays]
    names = [compiler.preparer.quote(column.name) for column in element.c]
    if len(arrays) == 1:
        values, rows, end = ["value"], f"json_each({arrays[0]})", ""
    else:
        # Not a join, in which each value would meet each: SQLite gives the rows of json_each() no index.
        values = [f"max(value) FILTER (WHERE array = {number})" for number in range(len(arrays))]
        each = "SELECT {} AS array, key, value FROM json_each({})"
        parts = (each.format(number, array) for number, array in enumerate(arrays))
        rows, end = f"({' UNION ALL '.join(parts)})", " GROUP BY key"
    columns = [f"{value} AS {name}" for value, name in zip(values, names, strict=False)]
    columns += [f"key + 1 AS {name}" for name in names[len(arrays) :]]
    return f"(SELECT {', '.join(columns)} FROM {rows}{end}) AS {compiler.preparer.quote(element.name)}"  # noqa: S608 - the names are quoted


class StatementCompiler(ProgramsCompiler, SQLiteCompiler):  # type: ignore[misc] # it replaces methods on purpose
    moved, epoch = staticmethod(moved), staticmethod(epoch)


@compiles(AmongLocked, "sqlite")
def _render_among_locked(element: AmongLocked, compiler: Any, **options: Any) -> str:
    """Render a subquery: the transaction has the write lock of the database."""
    key, rows = element.clauses
    return str(compiler.process(key.in_(rows.element), **options))


# -- tables ------------------------------------------------------------------------------------------------------------


@compiles(MomentOfInsert, "sqlite")
def _render_moment(*_: Any, **__: Any) -> str:
    return f"({NOW})"


@on_prepared(sa.BigInteger, "sqlite")
@on_prepared(sa.BIGINT, "sqlite")
def _render_big_integer(_: Any, compiler: Any, __: Any) -> Any:
    """Render INTEGER, which has as many bits: a key of any other type is not generated."""
    return compiler.process(sa.Integer())


def stored_type(column: sa.Column[Any], dialect: sa.Dialect) -> Any:
    """Return the type with which a column of the library is created."""
    if isinstance(column.type, sa.JSON):
        return sa.JSON(none_as_null=column.type.none_as_null)
    return sa.Double() if isinstance(column.type, Span) else column.type
