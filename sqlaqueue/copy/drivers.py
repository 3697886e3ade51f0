"""COPY by each driver, in the transaction of SQLAlchemy's connection."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import ColumnProperty, Mapper, RelationshipProperty
from sqlalchemy.sql import ClauseElement

from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.queue.roles import current_traceparent, is_filled_here
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import schema_of
from sqlaqueue.sql.types import NEUTRAL, check_dialect

Row = Mapping[str, Any]
Process = Callable[[Any], Any]
"""Converts a value for the driver: the bind processor of the column's type."""


@dataclass(frozen=True)
class FixedValue:
    """A default that is the same for each row."""

    value: Any


@dataclass(frozen=True)
class ColumnPlan:
    """The columns of one COPY, in this order: attributes of the rows, constant defaults, defaults that are called.

    It is determined once, from the first row.
    """

    what: str
    """The call, for errors: ``copy_in(Email)``."""
    attributes: tuple[str, ...]
    """The attribute of each column."""
    columns: tuple[sa.Column[Any], ...]
    given: int
    """The number of attributes of each row."""
    take: Callable[[Row], tuple[Any, ...]]
    """Returns the values of a row."""
    constants: tuple[Any, ...]
    """The constant defaults, converted for the driver."""
    scalars: Mapping[str, Any]
    """The constant defaults by column key, not converted."""
    calls: tuple[Callable[[Any], Any], ...]
    """The defaults that are functions of the context, see :class:`Context`."""
    processors: tuple[tuple[int, Process], ...]
    """The conversions, with the positions of their columns; most types need none."""

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]


def make_column_plan(what: str, spec: QueueSpec, mapper: Mapper[Any], first: Any, dialect: sa.Dialect) -> ColumnPlan:
    """Return the plan for rows with the attributes of ``first``; refuse rows that COPY cannot write."""
    if len(mapper.tables) > 1:
        tables = " and ".join(str(table) for table in mapper.tables)
        msg = f"{what}: its rows are in {tables}, but COPY writes to one table; use session.add_all()"
        raise StatementError(msg)
    check_mapping(what, mapper, first, 1)
    given = {key: _column(what, mapper, key) for key in first}
    constants, calls = _defaults(what, spec, mapper, given)
    columns = {**given, **{key: column for key, (column, _) in (constants | calls).items()}}
    if not columns:
        msg = f"{what}: the rows are empty, and no column has a default in Python; set at least one attribute"
        raise StatementError(msg)
    processors = [
        (place, process)
        for place, (key, column) in enumerate(columns.items())
        if key not in constants and (process := _process(what, spec, key, column, dialect)) is not None
    ]
    return ColumnPlan(
        what=what,
        attributes=tuple(columns),
        columns=tuple(columns.values()),
        given=len(given),
        # itemgetter() of one key returns the value, not a tuple.
        take=itemgetter(*given) if len(given) > 1 else lambda row: tuple(row[key] for key in given),
        constants=tuple(
            _processed(value, _type_process(what, key, column, dialect)) for key, (column, value) in constants.items()
        ),
        scalars={column.key: value for column, value in constants.values()},
        calls=tuple(call for _, call in calls.values()),
        processors=tuple(processors),
    )


def check_mapping(what: str, mapper: Mapper[Any], row: Any, number: int) -> None:
    if isinstance(row, Mapping):
        return
    if isinstance(row, mapper.class_):
        fix = "use dicts of its attributes, or session.add_all() for instances"
    else:
        fix = "use mappings from attribute names to values, such as dicts"
    msg = f"{what}: row {number} is {type(row).__name__}, not a mapping; {fix}"
    raise StatementError(msg)


def _column(what: str, mapper: Mapper[Any], key: Any) -> sa.Column[Any]:
    found = mapper.attrs.get(key) if isinstance(key, str) else None
    if isinstance(found, ColumnProperty) and isinstance(found.columns[0], sa.Column):
        return found.columns[0]
    name = f"{mapper.class_.__name__}.{key}" if isinstance(key, str) else repr(key)
    if isinstance(found, RelationshipProperty):
        names = sorted(mapper.get_property_by_column(column).key for column in found.local_columns)
        msg = f"{what}: {name} is a relationship, which COPY does not follow; set {', '.join(names)}"
    else:
        names = [each.key for each in mapper.column_attrs if isinstance(each.columns[0], sa.Column)]
        msg = f"{what}: {name} is not an attribute of a column; those are {', '.join(names)}"
    raise StatementError(msg)


# -- defaults of attributes that the rows leave out ----------------------------------------------------------------

_Constants = dict[str, tuple[sa.Column[Any], Any]]
_Calls = dict[str, tuple[sa.Column[Any], Callable[[Any], Any]]]


def _defaults(what: str, spec: QueueSpec, mapper: Mapper[Any], given: Collection[str]) -> tuple[_Constants, _Calls]:
    """Return the Python-side defaults by attribute: constants and functions."""
    constants: _Constants = {}
    calls: _Calls = {}
    for prop in mapper.column_attrs:
        column = prop.columns[0]
        if not isinstance(column, sa.Column) or prop.key in given:
            continue
        if column is spec.columns.get("traceparent") and is_filled_here(column):
            current = current_traceparent()
            # Without a span the column is left to its server default, which may be set in the transaction.
            default: FixedValue | Callable[[Any], Any] | None = None if current is None else FixedValue(current)
        else:
            default = _default(what, mapper, prop.key, column)
        if isinstance(default, FixedValue):
            constants[prop.key] = column, default.value
        elif default is not None:
            calls[prop.key] = column, default
    return constants, calls


def _default(
    what: str, mapper: Mapper[Any], key: str, column: sa.Column[Any]
) -> FixedValue | Callable[[Any], Any] | None:
    """Return the default of a column, None if the database sets it."""
    if column is mapper.polymorphic_on and mapper.polymorphic_identity is not None:
        return FixedValue(mapper.polymorphic_identity)
    if column is mapper.version_id_col and callable(generate := mapper.version_id_generator):
        return lambda context: generate(None)  # noqa: ARG005 - has the signature of a default
    default: Any = column.default
    if default is None:
        return None
    if default.is_scalar:
        return FixedValue(default.arg)
    if default.is_callable:
        call: Callable[[Any], Any] = default.arg
        return call
    kind = "a sequence" if default.is_sequence else "an SQL expression"
    msg = (
        f"{what}: the default of {mapper.class_.__name__}.{key} is {kind}, which COPY does not evaluate; "
        "use server_default=..., or set the attribute in each row"
    )
    raise StatementError(msg)


class Context:
    """The context of a default function: the values of its row and the constant defaults."""

    def __init__(self, plan: ColumnPlan) -> None:
        self._scalars = plan.scalars
        self._keys = [column.key for column in plan.columns[: plan.given]]
        self._take = plan.take
        self.row: Row = {}

    @property
    def current_parameters(self) -> dict[str, Any]:
        """The values of the row, by column key."""
        return {**self._scalars, **dict(zip(self._keys, self._take(self.row), strict=True))}

    def get_current_parameters(self, isolate_multiinsert_groups: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - the signature in SQLAlchemy
        return self.current_parameters


# -- conversion of values ------------------------------------------------------------------------------------------


def _process(what: str, spec: QueueSpec, key: str, column: sa.Column[Any], dialect: sa.Dialect) -> Process | None:
    process = _type_process(what, key, column, dialect)
    if column is not spec.columns.get("run_at") or not getattr(column.type, "timezone", False):
        return process

    def check(value: Any) -> Any:
        # The server would interpret it in the time zone of its session.
        if isinstance(value, datetime) and value.tzinfo is None:
            msg = "the column has a time zone; use a datetime with tzinfo, e.g. datetime.now(UTC)"
            raise ValueError(msg)
        return _processed(value, process)

    return check


def _type_process(what: str, key: str, column: sa.Column[Any], dialect: sa.Dialect) -> Process | None:
    type_ = column.type.dialect_impl(dialect)
    if type_.bind_expression(sa.bindparam(None, type_=column.type)) is not None:
        msg = (
            f"{what}: {column.type!r}, the type of {key}, wraps its values in SQL, which COPY does not evaluate; "
            "use session.execute(insert(...), rows)"
        )
        raise StatementError(msg)
    return type_.bind_processor(dialect)


def _processed(value: Any, process: Process | None) -> Any:
    return value if process is None else process(value)


def quoted(table: sa.Table, connection: sa.Connection, names: Iterable[str]) -> tuple[str, str]:
    """Return the SQL of a table and of some of its columns.

    Percent signs are not doubled: drivers do not look for parameters in COPY.
    """
    quote: Any = NEUTRAL.identifier_preparer
    schema, target = schema_of(connection, table), quote.quote(table.name)
    target = target if schema is None else f"{quote.quote_schema(schema)}.{target}"
    return target, ", ".join(map(quote.quote, names))


# -- errors of drivers, for a statement that bypasses SQLAlchemy -------------------------------------------------------

_ASYNCPG = {
    "IntegrityConstraintViolationError": "IntegrityError",
    "SyntaxOrAccessError": "ProgrammingError",
    "PostgresError": "Error",
}
"""Classes of asyncpg whose names differ in SQLAlchemy's DBAPI for asyncpg."""


def raise_as_sqlalchemy(connection: sa.Connection, statement: str, error: Exception) -> None:
    """Raise the error that SQLAlchemy raises for an error of the driver; return for other errors.

    A disconnect invalidates the connection.
    """
    dialect = connection.dialect
    dbapi: Any = dialect.loaded_dbapi
    known = _adapted(dbapi, error)
    if known is None:
        return
    is_lost = dialect.is_disconnect(known, connection.connection, None)
    wrapped = DBAPIError.instance(
        statement,
        None,
        known,
        dbapi.Error,
        hide_parameters=connection.engine.hide_parameters,
        connection_invalidated=is_lost,
        dialect=dialect,
    )
    if is_lost:
        connection.invalidate(error)
    raise wrapped from error


def _adapted(dbapi: Any, error: Exception) -> Any:
    """Return an error as one of SQLAlchemy's DBAPI, None if it is not an error of the driver."""
    if isinstance(error, dbapi.Error):
        return error
    if not type(error).__module__.startswith("asyncpg."):
        return None
    for base in type(error).__mro__:
        kind = getattr(dbapi, _ASYNCPG.get(base.__name__, base.__name__), None)
        if isinstance(kind, type) and issubclass(kind, dbapi.Error):
            adapted: Any = kind(f"{type(error)}: {error}")
            for name in ("sqlstate", "detail"):
                setattr(adapted, name, getattr(error, name, None))
            adapted.pgcode = adapted.sqlstate
            return adapted
    return None


class RowStream:
    """The rows of a COPY as the driver reads them: it iterates once over rows, and keeps only the current one."""

    def __init__(self, plan: ColumnPlan, mapper: Mapper[Any], rows: Iterable[Any]) -> None:
        self.plan = plan
        self.number = 0
        """The number of the current row, from 1; 0 before the first and after the last."""
        self.error: Exception | None = None
        """The error that ended the iteration; drivers raise another one instead."""
        self._mapper = mapper
        self._rows = rows
        self._row: Any = {}

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Iterate over the values of each row, in the order of the columns."""
        plan = self.plan
        take, given, constants, calls = plan.take, plan.given, plan.constants, plan.calls
        processors, context = plan.processors, Context(plan)
        must_convert = bool(calls or processors)
        try:
            for self.number, self._row in enumerate(self._rows, 1):  # noqa: B020 - explain() reads it
                row = self._row
                values: Any = take(row)
                # Afterwards, because take() adds missing keys to a defaultdict.
                if len(row) != given:
                    raise KeyError  # noqa: TRY301 - as for a missing key
                if not must_convert:
                    yield values + constants
                    continue
                values = [*values, *constants]
                if calls:
                    context.row = row
                    values += [call(context) for call in calls]
                for place, process in processors:
                    values[place] = process(values[place])
                yield values
            self.number = 0
        except Exception as error:
            self.error = error
            raise

    def explain(self) -> None:
        """Raise an error if the current row is invalid."""
        if not self.number:
            return
        plan, row = self.plan, self._row
        try:
            check_mapping(plan.what, self._mapper, row, self.number)
        except StatementError as error:
            raise StatementError(f"{error}. {UNDO}") from None
        self._check_keys(row)
        context = Context(plan)
        context.row = row
        values = [*plan.take(row), *plan.constants]
        for key, call in zip(plan.attributes[len(values) :], plan.calls, strict=True):
            try:
                values.append(call(context))
            except Exception as error:
                raise self._refusal(key, call, f"the default raised {error!r}") from error
        for place, process in plan.processors:
            try:
                values[place] = process(values[place])
            except Exception as error:
                raise self._refusal(plan.attributes[place], values[place], str(error)) from error
        for key, value in zip(plan.attributes, values, strict=True):
            if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
                why = "COPY does not evaluate SQL; use session.execute(insert(...), rows)"
                raise self._refusal(key, value, why)

    def refused(self, error: Exception) -> StatementError:
        return StatementError(f"{self.plan.what}: the driver refused row {self.number}: {error}. {UNDO}")

    def busy(self) -> StatementError:
        """Return the error for a generator of rows that uses the connection of the COPY."""
        msg = (
            f"{self.plan.what}: the generator of row {self.number + 1} uses the session, whose connection is busy with "
            "the COPY; make a list of the rows first, or read in another session"
        )
        return StatementError(f"{msg}. {UNDO}")

    def _check_keys(self, row: Mapping[str, Any]) -> None:
        first = set(self.plan.attributes[: self.plan.given])
        for differing, verb, other in ((first - set(row), "lacks", "has"), (set(row) - first, "has", "lacks")):
            if differing:
                names = ", ".join(sorted(map(str, differing)))
                msg = (
                    f"{self.plan.what}: row {self.number} {verb} {names}, which the first row {other}; use the same "
                    "keys in each row"
                )
                raise StatementError(f"{msg}. {UNDO}")

    def _refusal(self, key: str, value: Any, why: str) -> StatementError:
        name = self._mapper.class_.__name__
        return StatementError(f"{self.plan.what}: {name}.{key} = {value!r} in row {self.number}: {why}. {UNDO}")


UNDO = "No row is enqueued; roll back the transaction, or the savepoint around the call"
"""The fix after an aborted COPY, which also aborts the transaction."""


# -- text format -------------------------------------------------------------------------------------------------------
# The text format of COPY, for psycopg2, which does not write it.
#
# A value is written as PostgreSQL reads it in a string; separators in it are then escaped with a backslash.

Write = Callable[[Any], str]

_ROWS_PER_READ = 100


class TextStream:
    """A file object that formats rows when they are read."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.error: BaseException | None = None
        self._lines = _lines(rows)

    def read(self, size: int = -1) -> str:
        """Return the next rows, "" after the last; ``size`` is ignored."""
        try:
            return "".join(islice(self._lines, _ROWS_PER_READ))
        except BaseException as error:
            self.error = error
            raise


def _lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    writers: dict[type[Any], Write] = {str: escape}
    find = writers.get
    for row in rows:
        fields = []
        for value in row:
            if value is None:
                fields.append(r"\N")
                continue
            write = find(type(value))
            if write is None:
                write = writers[type(value)] = _escaped(writer_for(type(value)))
            fields.append(write(value))
        yield "\t".join(fields) + "\n"


def escape(text: str) -> str:
    """Escape the separators of values and rows in a value."""
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if "\n" in text or "\t" in text or "\r" in text:
        text = text.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")
    return text


def _escaped(write: Write) -> Write:
    return write if write in _BARE else lambda value: escape(write(value))


def writer_for(kind: type[Any]) -> Write:
    for known, write in _WRITERS:
        if issubclass(kind, known):
            return write
    if hasattr(kind, "adapted"):
        # SQLAlchemy wraps bytes in psycopg2.Binary, which can only be formatted as a literal.
        return lambda value: writer_for(type(value.adapted))(value.adapted)
    msg = (
        f"values of {kind.__name__} cannot be copied by psycopg2; use psycopg 3, or session.execute(insert(...), rows)"
    )
    raise TypeError(msg)


def _bool(value: Any) -> str:
    return "t" if value else "f"


def _timedelta(value: timedelta) -> str:
    return f"{value.days} days {value.seconds}.{value.microseconds:06} seconds"


def _bytes(value: Any) -> str:
    return "\\x" + bytes(value).hex()


def _array(value: Sequence[Any]) -> str:
    return "{" + ",".join(map(_element, value)) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = writer_for(type(value))(value)
    if isinstance(value, list | tuple):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Subclasses such as IntEnum are formatted like their base. bool is a subclass of int, and datetime of date.
_WRITERS: tuple[tuple[Any, Write], ...] = (
    (str, str.__str__),
    (bool, _bool),
    (int, int.__repr__),
    (float, float.__repr__),
    (Decimal, Decimal.__str__),
    (datetime, datetime.isoformat),
    (date, date.isoformat),
    (time, time.isoformat),
    (timedelta, _timedelta),
    (uuid.UUID, uuid.UUID.__str__),
    ((bytes, bytearray, memoryview), _bytes),
    ((list, tuple), _array),
)
_BARE = (_bool, int.__repr__, float.__repr__, Decimal.__str__, uuid.UUID.__str__)


@dataclass(frozen=True)
class Copy:
    """One COPY on one connection."""

    connection: sa.Connection
    table: sa.Table
    rows: RowStream

    @property
    def command(self) -> str:
        table, columns = quoted(self.table, self.connection, self.rows.plan.names)
        return f"COPY {table} ({columns}) FROM STDIN"

    @property
    def driver(self) -> Any:
        return self.connection.connection.driver_connection

    def run_async(self, send: Callable[[Any], Any]) -> Any:
        """Call a coroutine function with the connection of an async driver, and return its result."""
        adapted: Any = self.connection.connection.dbapi_connection
        return adapted.run_async(send)


class _Busy:
    """Replaces the lock of psycopg's connection during a COPY: waiting for the lock would never end."""

    def __init__(self, rows: RowStream) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        raise self._rows.busy()

    def __exit__(self, *_: object) -> None:
        pass


def _psycopg(copy: Copy) -> int:
    driver = copy.driver
    with driver.cursor() as cursor:
        with cursor.copy(copy.command) as stream:
            write, lock = stream.write_row, driver.lock
            driver.lock = _Busy(copy.rows)
            try:
                for values in copy.rows:
                    write(values)
            finally:
                driver.lock = lock
        return int(cursor.rowcount)


def _async_psycopg(copy: Copy) -> int:
    async def send(driver: Any) -> Any:
        async with driver.cursor() as cursor:
            async with cursor.copy(copy.command) as stream:
                write = stream.write_row
                for values in copy.rows:
                    await write(values)
            return cursor.rowcount

    return int(copy.run_async(send))


def _psycopg2(copy: Copy) -> int:
    stream = TextStream(copy.rows)
    with copy.driver.cursor() as cursor:
        try:
            cursor.copy_expert(copy.command, stream)
            return int(cursor.rowcount)
        except Exception as error:  # noqa: BLE001 - raised below, without a misleading context
            failure = stream.error or error
        # psycopg2 raises the error of the server that reading failed, and drops the cause.
        raise failure


def _asyncpg(copy: Copy) -> int:
    if not copy.driver.is_in_transaction():
        # SQLAlchemy begins the transaction with the first statement that it sends.
        copy.connection.exec_driver_sql("SELECT 1")
    schema, names = schema_of(copy.connection, copy.table), copy.rows.plan.names

    def send(driver: Any) -> Any:
        return driver.copy_records_to_table(copy.table.name, schema_name=schema, columns=names, records=copy.rows)

    return int(copy.run_async(send).rpartition(" ")[2])


_SEND: dict[tuple[str, bool], Callable[[Copy], int]] = {
    ("psycopg", False): _psycopg,
    ("psycopg", True): _async_psycopg,
    ("psycopg2", False): _psycopg2,
    ("asyncpg", True): _asyncpg,
}


def check_driver(dialect: sa.Dialect, what: str) -> None:
    """Refuse a driver without an implementation of COPY."""
    check_dialect(dialect, what)
    if (dialect.driver, dialect.is_async) not in _SEND:
        msg = (
            f"{what}: the driver {dialect.driver} is not supported; use psycopg, asyncpg or psycopg2, or "
            "session.execute(insert(...), rows)"
        )
        raise ConfigurationError(msg)


def send(copy: Copy) -> int:
    """Send all rows, and return the number of rows that the server wrote.

    :raises StatementError: if a row has other attributes than the first, or cannot be written.
    :raises sqlalchemy.exc.DBAPIError: if the server refuses a row.
    """
    dialect = copy.connection.dialect
    try:
        return _SEND[dialect.driver, dialect.is_async](copy)
    except Exception as error:
        copy.rows.explain()
        failure = copy.rows.error
        if failure is None:
            raise_as_sqlalchemy(copy.connection, copy.command, error)
            if isinstance(error, TypeError | ValueError | OverflowError):
                raise copy.rows.refused(error) from error
            raise
        if getattr(copy.driver, "closed", False):
            # psycopg2 does not prevent the generator of rows from using the connection, and then breaks it.
            copy.connection.invalidate(error)
    # The original error of the rows, rather than the errors of driver and server that follow from it.
    raise failure
