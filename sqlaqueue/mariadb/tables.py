"""Tables, indexes and types of MariaDB, and the trigger of the table of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql.base import MySQLDDLCompiler, MySQLTypeCompiler
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList

from sqlaqueue.engines.compiler import TranslatingTableCompiler, TranslatingTypeCompiler, has_spans, is_moment_of_insert
from sqlaqueue.engines.shared import TIMING, plain_index, translated_check
from sqlaqueue.mariadb.base import MICROSECONDS, binary_collation
from sqlaqueue.mariadb.changes import conjuncts
from sqlaqueue.mariadb.unique import create_index, drop_index, is_unique_index
from sqlaqueue.queue.names import SCHEDULE

_NOW = "(UTC_TIMESTAMP(6))"
_OURS = "sqlaqueue_"
_LENGTHS = {"key": 512}
"""The characters of texts that are indexed, so that a key fits into the 3072 bytes that InnoDB allows."""
_LENGTH = 191

_TableCompiler: Any = MySQLDDLCompiler


class TableCompiler(TranslatingTableCompiler, _TableCompiler):
    def visit_create_index(self, create: Any, **options: Any) -> str:
        """Render a partial index as one that begins with the columns of its predicate."""
        index = create.element
        if is_unique_index(index):
            return create_index(index, self, if_not_exists=create.if_not_exists)
        before = index.expressions
        index.expressions = [*leading_columns(index), *plain_index(index)[0]]
        try:
            return str(super().visit_create_index(create, **options))
        finally:
            index.expressions = before

    def visit_drop_index(self, drop: Any, **options: Any) -> str:
        """Remove the column of unique jobs with its index."""
        if is_unique_index(drop.element):
            return drop_index(drop.element, self, if_exists=drop.if_exists)
        return str(super().visit_drop_index(drop, **options))

    def get_column_default_string(self, column: sa.Column[Any]) -> str | None:
        """Render the default of a moment in UTC, and that of a span in seconds."""
        default = column.server_default
        if isinstance(default, sa.DefaultClause):
            if is_moment_of_insert(column):
                return _NOW
            if getattr(default.arg, "name", None) == "current_setting":
                # A setting of the transaction, which has no counterpart.
                return "NULL"
            if has_spans(column):
                hours, minutes, seconds = str(getattr(default.arg, "text", default.arg)).strip("'").split(":")
                span = timedelta(hours=int(hours), minutes=int(minutes), seconds=float(seconds))
                return str(span.total_seconds())
        rendered: str | None = super().get_column_default_string(column)
        return rendered

    def visit_check_constraint(self, constraint: Any, **options: Any) -> str:
        """Render the conditions of the library's own tables, in which a span is a number of seconds."""
        if not _is_ours(constraint.table):
            return str(super().visit_check_constraint(constraint, **options))
        text = translated_check(str(constraint.sqltext), self.preparer.quote)
        return f"CONSTRAINT {self.preparer.format_constraint(constraint)} CHECK ({text})"


_TypeCompiler: Any = MySQLTypeCompiler


class TypeCompiler(TranslatingTypeCompiler, _TypeCompiler):
    """Translates the types of columns.

    Texts of the library are compared byte by byte, without regard to the collation of the database.
    """

    def visit_DATETIME(self, type_: Any, **options: Any) -> str:  # noqa: N802 - the name that SQLAlchemy looks for
        digits = getattr(type_, "fsp", None)
        return f"DATETIME({MICROSECONDS if digits is None else digits})"

    def visit_JSONB(self, type_: Any, **options: Any) -> str:  # noqa: N802 - SQLAlchemy calls it by this name
        column = options.get("type_expression")
        # With the collation of other texts, which are compared and mixed with it.
        return self._text(column) if _is_text_of_ours(column) else "JSON"

    def visit_TEXT(self, type_: Any, **options: Any) -> str:  # noqa: N802 - SQLAlchemy calls it by this name
        """Render a text of the library without the limit of 64 kB, or with a limit where the column is indexed."""
        column = options.get("type_expression")
        if _is_text_of_ours(column):
            return self._text(column)
        return str(super().visit_TEXT(type_, **options))

    def visit_VARCHAR(self, type_: Any, **options: Any) -> str:  # noqa: N802 - SQLAlchemy calls it by this name
        """Render the type of a status, for which upper and lower case differ."""
        rendered: str = super().visit_VARCHAR(type_, **options)
        if _is_text_of_ours(options.get("type_expression")) and not getattr(type_, "collation", None):
            return f"VARCHAR({type_.length}) {self._binary}"
        return rendered

    @property
    def _binary(self) -> str:
        # Without padding, so that "a" and "a " differ.
        return f"CHARACTER SET utf8mb4 COLLATE {binary_collation(self.dialect)}"

    def _text(self, column: Any) -> str:
        if not (column.primary_key or any(column in index.columns.values() for index in column.table.indexes)):
            return f"LONGTEXT {self._binary}"
        return f"VARCHAR({_LENGTHS.get(column.name, _LENGTH)}) {self._binary}"


def _is_ours(table: Any) -> bool:
    return table is not None and table.name.startswith(_OURS)


def _is_text_of_ours(column: Any) -> bool:
    return isinstance(column, sa.Column) and (_is_ours(column.table) or "sqlaqueue" in column.info)


def _columns_of(where: Any) -> Iterator[Any]:
    """Return the columns of the predicate of a partial index: those that are equal to constants first."""
    for each in conjuncts([where]):
        parts = each.clauses if isinstance(each, BooleanClauseList) else [each]
        for part in parts:
            if isinstance(part, BinaryExpression) and part.operator in _COMPARED and isinstance(part.left, sa.Column):
                yield part.left


def leading_columns(index: sa.Index) -> list[Any]:
    """Return the columns of the predicate of a partial index, with which the index begins here."""
    columns, where = plain_index(index)
    known = {getattr(each, "key", None) for each in columns}
    return [] if where is None else [each for each in dict.fromkeys(_columns_of(where)) if each.key not in known]


_COMPARED = {operators.eq, operators.in_op, operators.is_not}

_CHANGED = " OR ".join(f"NOT (OLD.{name} <=> NEW.{name})" for name in TIMING)


def create_trigger(table: sa.Table, connection: sa.Connection) -> None:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    if table.name != SCHEDULE:
        return
    preparer = connection.dialect.identifier_preparer
    prefix = f"{preparer.quote_schema(table.schema)}." if table.schema else ""
    connection.exec_driver_sql(
        f"CREATE TRIGGER {prefix}{SCHEDULE}_changed BEFORE UPDATE ON {preparer.format_table(table)} FOR EACH ROW "  # noqa: S608 - the names are quoted
        f"SET NEW.edited_at = IF({_CHANGED}, UTC_TIMESTAMP(6), NEW.edited_at), "
        f"NEW.next_tick = IF(({_CHANGED}) AND NEW.paused_at IS NOT NULL, NULL, NEW.next_tick)"
    )
