"""Tables, indexes and types of MariaDB, the column of unique jobs, and the trigger of the table of schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex, DropIndex

from sqlaqueue.engines.shared import TIMING, on_prepared
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mariadb.base import MICROSECONDS, binary_collation
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.sql.portable import MomentOfInsert, Span
from sqlaqueue.sql.types import Period, object_name
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

_NAMES = ("mariadb", "mysql")
"""The names of SQLAlchemy's dialect."""


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
        written = None if isinstance(value, Period) else comparable_text(value.type, text, dialect)
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


def create_unique_index(index: sa.Index, compiler: Any, *, if_not_exists: bool) -> str:
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
    """Return whether column and index are as the text of ``create_unique_index()`` makes them.

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


def drop_unique_index(index: sa.Index, compiler: Any, *, if_exists: bool) -> str:
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


@compiles(Period, *_NAMES)
def _period(element: Period, compiler: Any, **options: Any) -> str:
    """Render the number of a period: one before the origin is negative, and DIV would cut it off upwards."""
    moment = compiler.process(element.moment, **options)
    since = f"(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP '1970-01-01 00:00:00', {moment}) - {element.origin} * 1000)"
    length = f"({element.milliseconds} * 1000)"
    return f"({since} DIV {length} - ({since} MOD {length} < 0))"


# -- tables ------------------------------------------------------------------------------------------------------------
# Tables, indexes and types of MariaDB, and the trigger of the table of schedules.


@compiles(MomentOfInsert, *_NAMES)
def _render_moment(*_: Any, **__: Any) -> str:
    return "(UTC_TIMESTAMP(6))"


@on_prepared(sa.DateTime, *_NAMES)
@on_prepared(sa.DATETIME, *_NAMES)
def _render_date_time(_: Any, compiler: Any, __: Any) -> Any:
    return compiler.process(_MOMENT)


@on_prepared(CreateIndex, *_NAMES)
def _create_index(create: Any, compiler: Any, as_before: Any) -> Any:
    index = create.element
    if is_unique_index(index):
        return create_unique_index(index, compiler, if_not_exists=create.if_not_exists)
    return as_before(create)


@on_prepared(DropIndex, *_NAMES)
def _drop_index(drop: Any, compiler: Any, as_before: Any) -> Any:
    """Remove the column of unique jobs with its index."""
    if is_unique_index(drop.element):
        return drop_unique_index(drop.element, compiler, if_exists=drop.if_exists)
    return as_before(drop)


_MOMENT = mysql.DATETIME(fsp=MICROSECONDS)
_LENGTHS = {"key": 512}
"""The characters of texts that are indexed, so that a key fits into the 3072 bytes that InnoDB allows."""
_LENGTH = 191
_VARCHAR = re.compile(r"VARCHAR\((\d+)\)")


def stored_type(column: sa.Column[Any], dialect: sa.Dialect) -> Any:
    """Return the type with which a column of the library is created.

    Texts are compared byte by byte, without regard to the collation of the database, and without padding, so that
    "a" and "a " differ. They have no limit of 64 kB, but one where the column is indexed. JSON is a text, which is
    compared and mixed with others.
    """
    text = {"charset": "utf8mb4", "collation": binary_collation(dialect)}
    written = column.type.compile(dialect=dialect)
    if written in {"TEXT", "JSON"}:
        # The state of a dead letter is indexed once one of the queues has a retention.
        may_be_indexed = column.primary_key or (column.table.name, column.name) == (DEAD_LETTER, "state")
        if not (may_be_indexed or any(column in index.columns.values() for index in column.table.indexes)):
            return mysql.LONGTEXT(**text)
        return mysql.VARCHAR(_LENGTHS.get(column.name, _LENGTH), **text)
    found = _VARCHAR.fullmatch(written)
    # An Enum may have a condition that belongs to its type.
    if found is not None and not isinstance(column.type, sa.Enum):
        return mysql.VARCHAR(int(found[1]), **text)
    if isinstance(column.type, Span):
        return sa.Double()
    return _MOMENT if isinstance(column.type, sa.DateTime) else column.type


_CHANGED = " OR ".join(f"NOT (OLD.{name} <=> NEW.{name})" for name in TIMING)


def write_schedule_trigger(table: sa.Table, dialect: sa.Dialect, name: str) -> str:
    """Create the trigger that records when a definition was changed: no tick before it is fired by the new one."""
    preparer = dialect.identifier_preparer
    prefix = f"{preparer.quote_schema(table.schema)}." if table.schema else ""
    return (
        f"CREATE TRIGGER {prefix}{name} BEFORE UPDATE ON {preparer.format_table(table)} FOR EACH ROW "  # noqa: S608 - the names are quoted
        f"SET NEW.edited_at = IF({_CHANGED}, UTC_TIMESTAMP(6), NEW.edited_at), "
        f"NEW.next_tick = IF(({_CHANGED}) AND NEW.paused_at IS NOT NULL, NULL, NEW.next_tick)"
    )
