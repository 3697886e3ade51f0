"""Tables, indexes and types of MariaDB, the column of unique jobs, and the trigger of the table of schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql.base import MySQLDDLCompiler, MySQLTypeCompiler
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, Grouping, True_

from sqlaqueue.engines.compiler import TranslatingTableCompiler, TranslatingTypeCompiler, has_spans, is_moment_of_insert
from sqlaqueue.engines.shared import TIMING, plain_index, translated_check
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mariadb.base import MICROSECONDS, binary_collation
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.sql.engine import plain_form
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.unique_key import SameUniqueValues, UniqueValues

# -- unique jobs -------------------------------------------------------------------------------------------------------
# Unique jobs: a generated column where PostgreSQL has a partial index.
#
# The column has a digest of the unique values of a job that counts, and is NULL for any other job, which a unique index
# passes over. Texts are compared in it byte by byte, and may be of any length.


COLUMN = "sqlaqueue_unique"
"""The generated column. It is invisible, so that ``SELECT *`` does not return it."""
_TYPE = "BINARY(32)"
_TEXT = "CHAR CHARACTER SET utf8mb4"
_NULL = f"X'{'00' * 32}'"
"""What stands for NULL: as long as a digest, since BINARY is compared with all its bytes."""

Process = Callable[..., str]


def index_name(table: sa.Table) -> str:
    return object_name("ix", table.name, "queue", "unique")


def is_unique_index(index: sa.Index) -> bool:
    """Return whether an index makes the jobs of a queue unique; refuse one of a migration, which tells no types."""
    if index.table is None or index.name != index_name(index.table):
        return False
    if queue_of(index.table) is None:
        msg = (
            f"the index {index.name} on MariaDB is one of a generated column, which depends on the types of the "
            "attributes in Unique(...); let `alembic revision --autogenerate` write it, with `import "
            "sqlaqueue.alembic` in env.py"
        )
        raise ConfigurationError(msg)
    return True


def digest(values: Sequence[Any], process: Process, dialect: sa.Dialect, *, nulls_distinct: bool) -> str:
    """Return the SQL of the digest of some values; NULL if one of them is, unless two NULLs are equal.

    :param process: returns the SQL of an expression.
    """
    parts = []
    for value in values:
        text = process(value)
        # A text that is the same for values of a column that are equal, and for no others. A period is a number here.
        written = None if plain_form(value) is not None else comparable_text(value.type, text, dialect)
        parts.append(f"UNHEX(SHA2({f'CAST({text} AS {_TEXT})' if written is None else written}, 256))")
    if not nulls_distinct:
        parts = [f"COALESCE({part}, {_NULL})" for part in parts]
    return parts[0] if len(parts) == 1 else f"UNHEX(SHA2(CONCAT({', '.join(parts)}), 256))"


def comparable_text(type_: Any, text: str, dialect: sa.Dialect) -> str | None:
    """Return the SQL of a text for a value of a type; None for a type by which jobs cannot be unique."""
    kind = type_.dialect_impl(dialect)
    while hasattr(kind, "impl_instance") and kind.impl_instance is not kind:
        kind = kind.impl_instance.dialect_impl(dialect)
    if isinstance(type_, sa.Interval) or isinstance(kind, sa.Float):
        return None
    if isinstance(type_, sa.Uuid) or isinstance(kind, sa.Uuid):
        return f"LOWER(REPLACE(CAST(RTRIM({text}) AS {_TEXT}), '-', ''))"
    if isinstance(kind, sa.String):
        # A setting of the session says whether spaces follow a CHAR, so the server requires RTRIM.
        return f"CONVERT({f'RTRIM({text})' if isinstance(kind, sa.CHAR) else text} USING utf8mb4)"
    # A given value may have more digits than the column.
    if isinstance(kind, sa.DateTime):
        text = f"CAST({text} AS DATETIME({getattr(kind, 'fsp', None) or 0}))"
    elif isinstance(kind, sa.Numeric):
        text = f"CAST({text} AS DECIMAL({kind.precision or 10}, {kind.scale or 0}))"
    elif not isinstance(kind, sa.Integer | sa.Boolean | sa.Date):
        return None
    return f"CAST({text} AS {_TEXT})"


def check_comparable(spec: Any, dialect: sa.Dialect) -> None:
    """Refuse attributes by which jobs cannot be unique here."""
    for name in spec.config.unique.attributes:
        type_ = spec.mapper.columns[name].type
        if comparable_text(type_, "", dialect) is None:
            msg = (
                f"{spec.model.__name__}: Unique({name!r}) is not available on MariaDB, where values of type "
                f"{type_!r} that are equal may be stored in several ways; use a text, a whole number, a Numeric, a "
                f"moment, a date or a UUID for {spec.model.__name__}.{name}"
            )
            raise ConfigurationError(msg)


def create_index(index: sa.Index, compiler: Any, *, if_not_exists: bool) -> str:
    def process(value: Any) -> str:
        return str(compiler.sql_compiler.process(value, include_table=False, literal_binds=True))

    options = index.dialect_options["postgresql"]
    nulls_distinct = not options["nulls_not_distinct"]
    value = digest([*index.expressions], process, compiler.dialect, nulls_distinct=nulls_distinct)
    value = f"CASE WHEN {process(options['where'])} THEN {value} END"
    table, name = compiler.preparer.format_table(index.table), compiler.preparer.format_index(index)
    unless = "IF NOT EXISTS " if if_not_exists else ""
    return (
        f"ALTER TABLE {table} ADD COLUMN {unless}{COLUMN} {_TYPE} GENERATED ALWAYS AS ({value}) VIRTUAL INVISIBLE, "
        f"ADD UNIQUE INDEX {unless}{name} ({COLUMN})"
    )


def definition(connection: sa.Connection, table: str) -> list[str]:
    """Return the lines of the column and its index in the definition of a table, as the server prints it.

    :param table: the name of the table, quoted.
    """
    (text,) = connection.exec_driver_sql(f"SHOW CREATE TABLE {table}").scalars("Create Table")
    return [line.strip().rstrip(",") for line in text.splitlines() if f"`{COLUMN}`" in line]


_COMPARED = "sqlaqueue_compared"


def same_definition(connection: sa.Connection, table: str, drop: str, create: str) -> bool:
    """Return whether column and index are as the text of ``create_index()`` makes them.

    The server prints an expression in another way than it was written, so the wanted one is created on an empty
    temporary copy of the table, and read back.

    :param table: the name of the table, quoted.
    :param drop: the statement that drops both.
    :param create: the statement that creates both.
    """
    statements = [f"CREATE TEMPORARY TABLE {_COMPARED} LIKE {table}", drop, create]
    try:
        for statement in statements:
            copied = statement.replace(f"ALTER TABLE {table} ", f"ALTER TABLE {_COMPARED} ", 1)
            connection.execute(sa.text(copied.replace(":", "\\:")))
        return definition(connection, _COMPARED) == definition(connection, table)
    finally:
        connection.exec_driver_sql(f"DROP TEMPORARY TABLE IF EXISTS {_COMPARED}")


def drop_index(index: sa.Index, compiler: Any, *, if_exists: bool) -> str:
    table, name = compiler.preparer.format_table(index.table), compiler.preparer.format_index(index)
    only = "IF EXISTS " if if_exists else ""
    return f"ALTER TABLE {table} DROP INDEX {only}{name}, DROP COLUMN {only}{COLUMN}"


class UniqueStatements:
    """What the compiler of statements does about unique jobs."""

    dialect: Any
    process: Any

    def visit_sqlaqueue_same_unique_values(self, element: SameUniqueValues, **options: Any) -> str:
        """Compare the digest of a row with that of other values."""
        _, key, *others = element.clauses
        mine: Any = sa.column(COLUMN)
        mine.table = key.table
        return f"{self.process(mine, **options)} = {self._digest(element, others, **options)}"

    def visit_sqlaqueue_unique_values(self, element: UniqueValues, **options: Any) -> str:
        """Order and group by the digest: of a long text, only the beginning would count."""
        return self._digest(element, [*element.clauses], **options)

    def _digest(self, element: Any, values: Sequence[Any], **options: Any) -> str:
        def process(value: Any) -> str:
            return str(self.process(value, **options))

        return digest(values, process, self.dialect, nulls_distinct=element.nulls_distinct)

    def visit_sqlaqueue_period_func(self, function: Any, **options: Any) -> str:
        """Render the number of a period: one before the origin is negative, and DIV would cut it off upwards."""
        moment, milliseconds, origin = (self.process(argument, **options) for argument in function.clauses)
        since = f"(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {moment}) - {origin} * 1000)"
        length = f"({milliseconds} * 1000)"
        return f"({since} DIV {length} - ({since} MOD {length} < 0))"


# -- tables ------------------------------------------------------------------------------------------------------------
# Tables, indexes and types of MariaDB, and the trigger of the table of schedules.


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


def _conjuncts(criteria: Sequence[Any]) -> Iterator[Any]:
    """Return the conditions that are all to be met, without those that are always true."""
    for each in criteria:
        plain: Any = plain_form(each)
        condition = each if plain is None else plain
        if isinstance(condition, BooleanClauseList) and condition.operator is operators.and_:
            yield from _conjuncts([*condition.clauses])
        elif isinstance(condition, Grouping):
            yield from _conjuncts([condition.element])
        elif not isinstance(condition, True_):
            yield condition


def _columns_of(where: Any) -> Iterator[Any]:
    """Return the columns of the predicate of a partial index: those that are equal to constants first."""
    for each in _conjuncts([where]):
        parts = each.clauses if isinstance(each, BooleanClauseList) else [each]
        for part in parts:
            if isinstance(part, BinaryExpression) and part.operator in _EQUALITIES and isinstance(part.left, sa.Column):
                yield part.left


def leading_columns(index: sa.Index) -> list[Any]:
    """Return the columns of the predicate of a partial index, with which the index begins here."""
    columns, where = plain_index(index)
    known = {getattr(each, "key", None) for each in columns}
    return [] if where is None else [each for each in dict.fromkeys(_columns_of(where)) if each.key not in known]


_EQUALITIES = {operators.eq, operators.in_op, operators.is_not}

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
