"""The compiler of a prepared engine, which translates statements that are written for PostgreSQL, and its tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.ext.compiler import compiles

from sqlaqueue.engines.compiler import TranslatingCompiler
from sqlaqueue.engines.shared import TIMING, moment_text, on_prepared, undecorated
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.sql.engine import plain_form
from sqlaqueue.sql.types import MomentOfInsert, Span
from sqlaqueue.strategies.columns import AmongLocked

_CHANGED = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in TIMING)

NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
"""The present moment without a function of the library, as another program may change the row."""


def create_trigger(table: sa.Table, connection: sa.Connection) -> None:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    if table.name != SCHEDULE:
        return
    name = connection.dialect.identifier_preparer.format_table(table)
    connection.exec_driver_sql(
        f"CREATE TRIGGER {SCHEDULE}_changed AFTER UPDATE ON {name} WHEN {_CHANGED} BEGIN UPDATE {SCHEDULE} "  # noqa: S608 - the name is quoted
        f"SET edited_at = {NOW}, next_tick = CASE WHEN NEW.paused_at IS NULL THEN next_tick END "
        "WHERE name = NEW.name; END"
    )


# One parameter for all uses in a statement, so that they have the same value.
_NOW = sa.bindparam("sqlaqueue_now", callable_=lambda: moment_text(datetime.now(UTC)), type_=sa.Text(), unique=False)


class StatementCompiler(TranslatingCompiler, SQLiteCompiler):  # type: ignore[misc] # it replaces methods on purpose
    def now(self, **options: Any) -> str:
        """Return a parameter: the file is local, and so the clock of the database is that of this machine."""
        options.pop("add_to_result_map", None)
        if options.get("literal_binds"):
            # Alembic writes the defaults of columns so, and a moment would be that of the migration's writing.
            return f"({NOW})"
        return self.process(_NOW, **options)

    def moved(self, moment: str, seconds: str) -> str:
        """Return the call of a function that :mod:`sqlaqueue.sqlite.prepare` adds to each connection."""
        return f"sqlaqueue_moved({moment}, {seconds})"

    def epoch(self, moment: str) -> str:
        return f"sqlaqueue_epoch({moment})"

    def key_hash(self, values: list[str]) -> str:
        return f"sqlaqueue_key_hash({', '.join(values)})"

    def each_value(self, array: str) -> str:
        return f"SELECT value FROM json_each({array})"  # noqa: S608 - the array is a parameter

    def visit_insert(self, insert_stmt: Any, visited_bindparam: Any = None, visiting_cte: Any = None, **kw: Any) -> str:
        """Give a SELECT a WHERE, without which SQLite takes ON CONFLICT for the condition of a join."""
        if self.translates and insert_stmt.select is not None and insert_stmt._post_values_clause is not None:  # noqa: SLF001 - not public
            rows = insert_stmt.select
            if not isinstance(rows, sa.Select):
                rows = sa.select(rows.subquery("sqlaqueue_inserted"))
            insert_stmt = insert_stmt._clone()  # noqa: SLF001 - SQLAlchemy has no public name for it
            insert_stmt.select = rows.where(sa.literal_column("1 = 1"))
        return str(super().visit_insert(insert_stmt, visited_bindparam, visiting_cte, **kw))

    def visit_delete(self, delete_stmt: Any, visiting_cte: Any = None, **kw: Any) -> str:
        """Render the plain form; name the rows by their keys, if other tables choose them: SQLite has no USING."""
        plain = plain_form(delete_stmt)
        delete_stmt = delete_stmt if plain is None else plain
        table, criteria = delete_stmt.table, delete_stmt._where_criteria  # noqa: SLF001 - not public
        others = {each for part in criteria for each in part._from_objects if each is not table}  # noqa: SLF001 - SQLAlchemy has no public name for it
        if others:
            keys = sa.select(*table.primary_key).select_from(table, *others).where(*criteria).correlate(None)
            delete_stmt = delete_stmt._clone()  # noqa: SLF001 - SQLAlchemy has no public name for it
            delete_stmt._where_criteria = (sa.tuple_(*table.primary_key).in_(keys),)  # noqa: SLF001 - SQLAlchemy has no public name for it
        return str(super().visit_delete(delete_stmt, visiting_cte, **kw))

    def cast_to(self, cast: Any, **options: Any) -> str:
        """Leave out the casts to types that SQLite would take for numbers."""
        target = cast.type.dialect_impl(self.dialect)
        if isinstance(target, sa.JSON):
            return f"json({self.process(cast.clause, **options)})"
        target = undecorated(target)
        if isinstance(target, sa.String) and isinstance(undecorated(cast.clause.type), sa.Uuid):
            return f"sqlaqueue_uuid_text({self.process(cast.clause, **options)})"
        plain = undecorated(cast.type)
        if isinstance(plain, sa.Integer | sa.Float | sa.String) and not isinstance(plain, sa.Enum):
            return str(SQLiteCompiler.visit_cast(self, cast, **options))
        return self.process(cast.clause, **options)

    def visit_greatest_func(self, function: Any, **options: Any) -> str:
        """Render ``max()``, which is NULL where one of its arguments is; PostgreSQL passes over those."""
        return self._extreme("max", function, **options)

    def visit_least_func(self, function: Any, **options: Any) -> str:
        return self._extreme("min", function, **options)

    def _extreme(self, name: str, function: Any, **options: Any) -> str:
        first, *others = self._arguments(function, **options)
        for other in others:
            first = f"coalesce({name}({first}, {other}), {first}, {other})"
        return first

    def visit_sqlaqueue_period_func(self, function: Any, **options: Any) -> str:
        """Render the number of a period, of functions that an index may call."""
        moment, length, origin = self._arguments(function, **options)
        seconds = f"CAST(strftime('%s', {moment}) AS INTEGER)"
        return f"(({seconds} * 1000 + CAST(substr({moment}, 21, 3) AS INTEGER) - {origin}) / {length})"

    def visit_array_agg_func(self, function: Any, **options: Any) -> str:
        return f"json_group_array({', '.join(self._arguments(function, **options))})"

    def visit_concat_func(self, function: Any, **options: Any) -> str:
        """Render the operator; a missing argument is an empty text."""
        if not self.translates:
            return self._as_before(function, **options)
        return "(" + " || ".join(f"coalesce({each}, '')" for each in self._arguments(function, **options)) + ")"

    def visit_table_valued_alias(self, element: Any, **options: Any) -> str:
        """Translate ``unnest()`` of several arrays, with the number of each row."""
        function = element.element
        if getattr(function, "name", None) != "unnest" or not options.get("asfrom"):
            return str(super().visit_table_valued_alias(element, **options))
        arrays = self._arguments(function)
        names = [self.preparer.quote(column.name) for column in element.c]
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
        return f"(SELECT {', '.join(columns)} FROM {rows}{end}) AS {self.alias_of(element)}"  # noqa: S608 - the names are quoted


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
