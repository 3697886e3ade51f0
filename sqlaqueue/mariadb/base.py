"""What MariaDB has in a form of its own: errors, inserts that may conflict, lock timeouts, moments, autocommit."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.engines.shared import moment_text, undecorated
from sqlaqueue.exc import StatementError
from sqlaqueue.sql.engine import schema_of


def refuse_autocommit(connection: sa.Connection, statement: Any) -> None:
    """Refuse to execute a statement in parts if each of them would be a transaction.

    The lock of a row ends with its transaction: another worker could take the row before it is changed.

    :param statement: the statement or the first part of it, whose table the error names.
    """
    driver = connection.connection.driver_connection
    # What the driver knows costs nothing. But asyncmy does not notice that AUTOCOMMIT was switched off by a statement.
    if driver is None or not driver.get_autocommit():
        return
    cursor = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@autocommit AND NOT @@in_transaction")
        each_by_itself = cursor.fetchall()[0][0]
    finally:
        cursor.close()
    if each_by_itself:
        tables = (each.name for each in iterate(statement) if isinstance(each, sa.Table))
        table = statement.table.name if statement.is_dml else next(tables, "this statement")
        msg = (
            f"{table}: MariaDB needs several statements for a claim, for the end of a job and for a change with "
            "returning(), and this connection commits each of them by itself (AUTOCOMMIT), so other sessions could "
            "change the rows in between; use a session or connection whose isolation_level is not AUTOCOMMIT, as those "
            "of create_engine() and prepare() are by default"
        )
        raise StatementError(msg)


# -- errors ------------------------------------------------------------------------------------------------------------

DUPLICATES = (1062, 1586)
_STATES = {
    "08006": (2006, 2013, 2055, 4031),  # the connection is lost
    "08001": (2002, 2003, 2005),  # it cannot be made
    "22001": (1406,),
    "22003": (1264, 1690),
    "23502": (1048, 1364),
    "23503": (1216, 1217, 1451, 1452),
    "23505": DUPLICATES,
    "23514": (4025, 3819),
    "25006": (1290, 1792, 1836),
    "25P03": (1967,),
    "28P01": (1045,),
    "3B001": (1305,),
    "3D000": (1049,),
    "40001": (1020,),
    "40P01": (1213,),
    "42501": (1044, 1142, 1143, 1227, 1370),
    "42703": (1054,),
    "42P10": (1176,),  # an index that a statement names does not exist
    "42P01": (1051, 1146),
    "53100": (1021, 1114, 3675),
    "53200": (1037, 1038, 1041),
    "53300": (1040, 1203, 1226),
    "55P03": (1205, 3572),
    "57014": (1317, 1969, 3024),
    "57P01": (1053, 1077, 1079, 1927),
    "58030": (3, 5, 28, 1026, 1030),
    "P0001": (1644,),  # SIGNAL in a trigger of the application
}
_BY_NUMBER = {number: state for state, numbers in _STATES.items() for number in numbers}
_DUPLICATE = re.compile(r"Duplicate entry '.*' for key '(?P<name>.*)'$", re.DOTALL)
_NOT_NULL = re.compile(r"(?:Column '(?P<column>[^']*)' cannot be null|Field '(?P<field>[^']*)' doesn't have a default)")
_CHECK = re.compile(r"CONSTRAINT `(?P<name>[^`]*)` failed for `[^`]*`\.`(?P<table>[^`]*)`")
_FOREIGN = re.compile(r"`[^`]*`\.`(?P<table>[^`]*)`, CONSTRAINT `(?P<name>[^`]*)`")


def number_of(error: Any) -> int | None:
    """Return the number of an error; None if it did not come from the driver."""
    arguments: Any = getattr(getattr(error, "orig", error), "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def text_of(error: Any) -> str:
    arguments: Any = getattr(getattr(error, "orig", error), "args", ())
    return str(arguments[1]) if len(arguments) > 1 else str(error)


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE; None for an error without a counterpart."""
    number = number_of(error)
    return None if number is None else _BY_NUMBER.get(number)


def violated_key(text: str) -> str | None:
    """Return the name of the unique index in the text of an error about a duplicate."""
    duplicate = _DUPLICATE.search(text)
    return None if duplicate is None else duplicate["name"]


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the violated index or constraint; None for other errors."""
    text = text_of(error)
    duplicate = violated_key(text)
    if duplicate is not None:
        return duplicate
    found = _FOREIGN.search(text) or _CHECK.search(text)
    return None if found is None else found["name"]


def violated_column(error: DBAPIError) -> str | None:
    """Return the name of the column that may not be NULL; None for other errors."""
    found = _NOT_NULL.search(text_of(error))
    return None if found is None else found["column"] or found["field"]


def violated_table(error: DBAPIError) -> str | None:
    """Return the table of a violated constraint, where the server names it; None otherwise."""
    text = text_of(error)
    found = _FOREIGN.search(text) or _CHECK.search(text)
    return None if found is None else found["table"]


# -- inserts -----------------------------------------------------------------------------------------------------------
# INSERT .. ON CONFLICT, as INSERT .. ON DUPLICATE KEY UPDATE or as INSERT IGNORE.
#
# With DO NOTHING and RETURNING, the rows are returned that were not there before. Only INSERT IGNORE does so, but
# makes warnings of all errors: it cuts texts that are too long, and leaves out rows whose foreign key refers to
# nothing. So the warnings are read, and all but those about duplicates become errors.

_IGNORES = re.compile(r"/\*sqlaqueue ignores (?P<key>\w*)\*/ ")
_SAVEPOINT = "sqlaqueue_insert"
_INTEGRITY = {1048, 1216, 1364, 1452}


def is_ignoring(insert: Any) -> bool:
    """Return whether an INSERT with DO NOTHING becomes an INSERT IGNORE, and not ON DUPLICATE KEY UPDATE.

    One with RETURNING does, as the other form returns the existing rows as well. So does one of a SELECT, as the other
    form needs a column of the table, whose name the SELECT may have too.
    """
    return len(insert.exported_columns) > 0 or insert.select is not None


def in_order_of_assignment(values: Mapping[Any, Any], table: sa.Table) -> list[Any]:
    """Return the columns of DO UPDATE, each behind those that are computed from it.

    MariaDB assigns one column after another, so a value or condition would read what has been assigned before.
    """
    readers: dict[Any, set[Any]] = {column: set() for column in values}
    for column, value in values.items():
        parts: Any = iterate(value)
        for part in parts:
            read = table.c.get(part.key) if isinstance(part, sa.ColumnClause) and part.table is not None else None
            if read is not None and read is not column and read in readers and part.shares_lineage(read):
                readers[read].add(column)
    try:
        return [*TopologicalSorter(readers).static_order()]
    except CycleError as error:
        names = " and ".join(dict.fromkeys(each.key for each in error.args[1]))
        msg = (
            f"{table.name}: on_conflict_do_update() computes {names} from the old values of each other, in set_ or "
            "where, and MariaDB assigns one after the other; update one of them by a statement of its own"
        )
        raise StatementError(msg) from None


def ignoring_duplicates(statement: str, clause: Any, table: Any) -> str:
    """Return an INSERT IGNORE whose other errors are raised when it is executed.

    :param statement: the INSERT IGNORE.
    :param clause: ON CONFLICT DO NOTHING. If it names the primary key, duplicates in another index are errors.
    """
    names = {getattr(each, "name", each) for each in clause.inferred_target_elements or ()}
    key = "PRIMARY" if names and names == {column.name for column in table.primary_key} else ""
    return f"/*sqlaqueue ignores {key}*/ {statement}"


@contextlib.contextmanager
def errors_of_ignored_rows(cursor: Any, statement: str, context: Any) -> Iterator[None]:
    """Execute a statement; if it is such an INSERT and has ignored another error, undo it and raise the error."""
    head = _IGNORES.match(statement)
    if head is None:
        yield
        return
    table = context.compiled.statement.table
    if context.execution_options.get("stream_results") or context.execution_options.get("yield_per"):
        msg = (
            f"{table.name}: on_conflict_do_nothing() with returning() or a SELECT reads the warnings of the server "
            "before the rows, so these cannot be streamed; leave out stream(), stream_results and yield_per"
        )
        raise StatementError(msg)
    connection = context.root_connection.connection
    refuse_autocommit(context.root_connection, context.compiled.statement)
    # By a cursor of its own: the other one has the rows that are returned.
    own = connection.cursor()
    try:
        own.execute(f"SAVEPOINT {_SAVEPOINT}")
        yield
        own.execute("SHOW WARNINGS")
        warnings = own.fetchall()
        for level, number, text in warnings:
            if level == "Note" or (number in DUPLICATES and head["key"] in {"", violated_key(text)}):
                continue
            own.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            integrity = number in _INTEGRITY or number in DUPLICATES
            raised = context.dialect.dbapi.IntegrityError if integrity else context.dialect.dbapi.DataError
            # As the server's errors would be that it has made warnings of.
            raise raised(_ERROR_OF_WARNING.get(number, number), text)
        if warnings:
            own.execute("SELECT @@warning_count")
            number = own.fetchall()[0][0]
            if number > len(warnings):
                own.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                msg = (
                    f"{table.name}: on_conflict_do_nothing() has skipped {number} rows, and MariaDB gives the "
                    f"reason for {len(warnings)} of them only, as max_error_count says; insert fewer rows by one "
                    "statement"
                )
                raise StatementError(msg)
    finally:
        own.close()


_ERROR_OF_WARNING = {1265: 1406}
"""A text that was cut has another number as an error."""


# -- lock timeout ------------------------------------------------------------------------------------------------------
# How long a transaction waits for locks, where the library sets ``lock_timeout`` on PostgreSQL.
#
# The setting of MariaDB belongs to the session and counts whole seconds. It is set before the statement that names
# it, and restored when the transaction ends.

LOCK_TIMEOUT = "sqlaqueue_lock_timeout"
"""The attribute of a compiled statement with the names of the parameters that hold a setting's name and its value."""
_FORMER = "sqlaqueue_former_lock_timeout"
"""The entry in the ``info`` of a connection with the setting of the program."""
_TIME = re.compile(r"(?P<number>\d+)(?P<unit>ms|s|)$")
_AT_ONCE = 0.1
"""The seconds below which a statement does not wait at all."""


def seconds_of(time: str | None) -> int | None:
    """Return a time of PostgreSQL in whole seconds; None for no limit."""
    found = _TIME.match(time or "")
    if found is None or int(found["number"]) == 0:
        return None
    seconds = int(found["number"]) / (1 if found["unit"] == "s" else 1000)
    return 0 if seconds < _AT_ONCE else math.ceil(seconds)


def limit_lock_waits(engine: sa.Engine) -> None:
    """Set the session's setting before a statement that names ``lock_timeout``."""

    @event.listens_for(engine, "before_cursor_execute")
    def limit(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        names = getattr(getattr(context, "compiled", None), LOCK_TIMEOUT, None)
        if names is None:
            return
        setting, time = (context.compiled_parameters[0].get(name) for name in names)
        if setting != "lock_timeout":
            return
        info, wanted = connection.connection.info, seconds_of(time)
        # By the connection, which knows the errors of the driver.
        if _FORMER not in info:
            info[_FORMER] = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar()
        former = info[_FORMER]
        seconds = former if wanted is None else min(wanted, former)
        connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {seconds}")

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    # Once a transaction is prepared, the server accepts no other statement.
    @event.listens_for(engine, "prepare_twophase")
    @event.listens_for(engine, "rollback_twophase")
    def restore(connection: sa.Connection, *_: Any) -> None:
        former = None if connection.invalidated else connection.connection.info.pop(_FORMER, None)
        if former is None:
            return
        # If the connection is lost, so is the setting; the statement that follows finds out.
        with contextlib.suppress(Exception):
            own: Any = connection.connection.cursor()
            own.execute(f"SET SESSION innodb_lock_wait_timeout = {former}")
            own.close()


# -- locks of keys -----------------------------------------------------------------------------------------------------
# A claim under flow control locks the keys of its jobs by GET_LOCK until its transaction ends.
#
# A row for each key would do as well. But a claim would have to insert the rows that are missing, and the INSERT of a
# row that another claim has inserted and not committed waits for that claim. GET_LOCK does not wait, leaves nothing
# behind, and the server releases the lock of a connection that is lost.


_LOCKED = "sqlaqueue_locked_keys"
"""The entry in the ``info`` of a connection with the names that its transaction has locked."""
_NAME = "LEFT(SHA2(CONCAT_WS(' ', 'sqlaqueue', COALESCE(%s, DATABASE()), %s), 256), 60)"


def lock_keys(connection: sa.Connection, table: sa.Table, names: Sequence[str]) -> Mapping[str, str]:
    """Lock what has these names, of a table, until the end of the transaction.

    :return: all names that the transaction has locked so far, with the names by which the server knows them.
    """
    locked: dict[str, str] = connection.connection.info.setdefault(_LOCKED, {})
    texts = {f"{table.name} {name}": name for name in names if name not in locked}
    if not texts:
        return locked
    schema = schema_of(connection, table)
    each = " UNION ALL ".join(f"SELECT %s AS text, {_NAME} AS name" for _ in texts)
    given = tuple(part for text in texts for part in (text, schema, text))
    asked = f"SELECT text, name, GET_LOCK(name, 0), @@tx_isolation FROM ({each}) AS sqlaqueue_names"  # noqa: S608 - the names are parameters
    level = _LEVEL
    for text, name, is_locked, level in connection.exec_driver_sql(asked, given).all():  # noqa: B007 - each row has it
        if is_locked:
            locked[texts[text]] = name
    if level != _LEVEL:
        msg = (
            "a claim of a queue with limits, rates or an order needs READ COMMITTED; this transaction is "
            f"{level.replace('-', ' ')}: make the engine without isolation_level="
        )
        raise StatementError(msg)
    if not locked.keys() >= set(texts.values()):
        connection.exec_driver_sql("SET @sqlaqueue_contended = 'on'")
    return locked


_LEVEL = "READ-COMMITTED"


def release_keys_at_end(engine: sa.Engine) -> None:
    """Release the keys when the transaction has ended: the next claim of a key must see what it has committed."""
    dialect: Any = engine.dialect

    def then_release(end: Callable[..., None]) -> Callable[..., None]:
        def ended(connection: Any, *arguments: Any, **options: Any) -> None:
            pooled = connection.connection if isinstance(connection, sa.Connection) else connection
            names: dict[str, str] | None = None
            # A connection that the pool has never given out has no info.
            with contextlib.suppress(NotImplementedError):
                names = pooled.info.pop(_LOCKED, None)
            try:
                end(connection, *arguments, **options)
            finally:
                # The server releases the locks of a connection that is lost.
                with contextlib.suppress(Exception):
                    if names is not None:
                        released = ", ".join(["@sqlaqueue_contended := NULL", *["RELEASE_LOCK(%s)"] * len(names)])
                        own = pooled.cursor()
                        own.execute(f"SELECT {released}", tuple(names.values()))
                        own.close()

        return ended

    for name in ("do_commit", "do_rollback", "do_commit_twophase", "do_rollback_twophase"):
        setattr(dialect, name, then_release(getattr(dialect, name)))


MICROSECONDS = 6
"""The digits after the second that the database stores."""

JSON_TEXT = "LONGTEXT CHARACTER SET utf8mb4"
"""The type of texts in JSON; without a character set it would have that of the database."""
_JSON_TYPES = {
    sa.Boolean: "TINYINT",
    sa.Integer: "BIGINT",
    sa.Float: "DOUBLE",
    sa.Interval: "DOUBLE",
    sa.Numeric: "DECIMAL(65,30)",
    sa.DateTime: "DATETIME(6)",
    sa.Date: "DATE",
}


def json_type(type_: Any) -> str:
    """Return the SQL of the type by which a value is read from JSON."""
    plain = undecorated(type_)
    return next((rendered for known, rendered in _JSON_TYPES.items() if isinstance(plain, known)), JSON_TEXT)


def letter_type(type_: Any, dialect: sa.Dialect) -> str:
    """Return the SQL of the type by which a value of a column is read from the JSON of a dead letter."""
    plain = undecorated(type_.dialect_impl(dialect))
    if isinstance(plain, _BYTES):
        return BYTES_IN_JSON
    if isinstance(plain, sa.Numeric) and not isinstance(plain, sa.Float):
        return f"DECIMAL({plain.precision or 10}, {plain.scale or 0})"
    if isinstance(plain, mysql.BIT):
        return UNSIGNED
    if isinstance(plain, sa.Interval):
        # Of a column of the program: SQLAlchemy stores a moment.
        return JSON_TEXT
    return UNSIGNED if isinstance(plain, sa.Integer) and getattr(plain, "unsigned", False) else json_type(plain)


UNSIGNED = "BIGINT UNSIGNED"
_BYTES = (sa.LargeBinary, sa.BINARY, sa.VARBINARY, mysql.TINYBLOB, mysql.MEDIUMBLOB, mysql.LONGBLOB)
BYTES_IN_JSON = "LONGTEXT CHARACTER SET latin1"
"""A text with a character for each byte."""


def binary_collation(dialect: Any) -> str:
    """Return the collation by which texts of the library are compared: "a", "A" and "a " differ."""
    return "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"


class Moment(mysql.DATETIME):
    """A moment; with a time zone it is stored in UTC, and returned in UTC."""

    def __init__(self, timezone: bool = False, fsp: int | None = MICROSECONDS) -> None:  # noqa: FBT002 - SQLAlchemy's signature
        super().__init__(fsp=fsp)
        self.timezone = timezone

    def bind_processor(self, dialect: sa.Dialect) -> Any:
        def process(value: Any) -> Any:
            if not isinstance(value, datetime):
                return value
            # Without a time zone as the drivers do, which leave out that of the value.
            return moment_text(value if self.timezone else value.replace(tzinfo=None))

        return process

    def literal_processor(self, dialect: sa.Dialect) -> Any:
        process = self.bind_processor(dialect)
        return lambda value: f"'{process(value)}'"

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:
        zone = UTC if self.timezone else None

        def process(value: Any) -> Any:
            # An expression, such as a sum with a span, may be a text for the driver.
            moment = datetime.fromisoformat(value) if isinstance(value, str) else value
            return moment.replace(tzinfo=zone) if isinstance(moment, datetime) else moment

        return process
