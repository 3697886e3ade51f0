"""Prepares an engine for SQLite: its compiler, its types, its transactions."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from sqlaqueue.engines.notifications import note_before_inserts, notify_within_process, send
from sqlaqueue.engines.shared import SharedEngine, is_prepared, moment_text, replace_compiler
from sqlaqueue.engines.verbs import carry_out_statements
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sqlite.compiler import NOW, StatementCompiler, stored_type, write_schedule_trigger
from sqlaqueue.sqlite.transactions import (
    begin_when_needed,
    begins_otherwise,
    refuse_autocommit,
    refuse_files_of_parent,
    release_lock,
)

_CODES = {
    2067: "23505",  # SQLITE_CONSTRAINT_UNIQUE
    1555: "23505",  # SQLITE_CONSTRAINT_PRIMARYKEY
    1299: "23502",  # SQLITE_CONSTRAINT_NOTNULL
    787: "23503",  # SQLITE_CONSTRAINT_FOREIGNKEY
    275: "23514",  # SQLITE_CONSTRAINT_CHECK
}
_TRIGGER = 1811  # SQLITE_CONSTRAINT_TRIGGER: RAISE() in a trigger, or a foreign key with RESTRICT
_PRIMARY_CODES = {
    5: "40001",  # SQLITE_BUSY
    6: "40001",  # SQLITE_LOCKED
    7: "53200",  # SQLITE_NOMEM
    8: "25006",  # SQLITE_READONLY
    9: "57014",  # SQLITE_INTERRUPT
    10: "58030",  # SQLITE_IOERR
    13: "53100",  # SQLITE_FULL
    14: "58P01",  # SQLITE_CANTOPEN
    19: "23000",  # SQLITE_CONSTRAINT
}
_TEXTS = {
    "no such table": "42P01",
    "no such column": "42703",
    "has no column named": "42703",
    "no such savepoint": "3B001",
    "no transaction is active": "25P01",
}
_UNIQUE = re.compile(r"UNIQUE constraint failed: (?:index '(?P<index>.*)'|(?P<columns>.*))$")
_NOT_NULL = re.compile(r"NOT NULL constraint failed: (?P<table>.*)\.(?P<column>.*)$")


_NO_JOURNAL = {
    "off": "with which a transaction cannot be rolled back",
    "memory": "with which the file is damaged if a process is killed while it writes",
}
"""The journal modes that a Consumer refuses, and why."""


class SQLite(SharedEngine):
    name = "sqlite"
    title = "SQLite"
    now = NOW
    stored_type = staticmethod(stored_type)

    def __init__(self, busy_timeout: float = 30) -> None:
        self.busy_timeout = busy_timeout
        """How many seconds a transaction waits for that of another connection."""

    def schedule_trigger(self, table: sa.Table, dialect: sa.Dialect, name: str) -> str:
        return write_schedule_trigger(table, dialect, name)

    def locked(self, rows: Any, *, waits: bool = False) -> Any:
        """Return the rows as they are: the transaction has the write lock of the database."""
        return rows

    has_one_writer = True

    def lock_keys(self, connection: sa.Connection, table: sa.Table, names: Any) -> Any:
        """Return all of them: the transaction has the write lock."""
        return set(names)

    def begin_steps(self, connection: sa.Connection, statement: Any) -> None:
        """Do nothing: a transaction begins with the write lock."""

    def sqlstate(self, error: DBAPIError) -> str | None:
        code = getattr(error.orig, "sqlite_errorcode", None)
        if code is None:
            return None
        text = str(error.orig)
        if code == _TRIGGER and "FOREIGN KEY" in text:
            return "23503"
        known = _CODES.get(code) or _PRIMARY_CODES.get(code & 0xFF)
        return known or next((state for part, state in _TEXTS.items() if part in text), None)

    def violated_constraint(self, error: DBAPIError) -> str | None:
        """Return the name of the violated index of expressions, or the columns of another one."""
        found = _UNIQUE.match(str(error.orig))
        if found is not None:
            return found["index"] or found["columns"]
        return "" if self.sqlstate(error) in {"23503", "23514"} else None

    def violated_column(self, error: DBAPIError) -> str | None:
        found = _NOT_NULL.match(str(error.orig))
        return None if found is None else found["column"]

    def violated_table(self, error: DBAPIError) -> str | None:
        found = _NOT_NULL.match(str(error.orig))
        if found is not None:
            return found["table"]
        unique = _UNIQUE.match(str(error.orig))
        return unique["columns"].partition(".")[0] if unique is not None and unique["columns"] else None

    def why_no_strategy(self, strategy: Any) -> str | None:
        if strategy.holds_transaction:
            return "whose one write lock a held claim keeps until its transaction ends: nothing else could be written"
        return super().why_no_strategy(strategy)

    def check_supported(self, spec: Any) -> None:
        super().check_supported(spec)
        unique = spec.config.unique
        if unique is not None and not unique.nulls_distinct:
            msg = (
                f"{spec.model.__name__}: Unique(nulls_distinct=False) is not available on SQLite, whose unique indexes "
                "treat NULLs as different; leave it out and give the columns values"
            )
            raise ConfigurationError(msg)

    def check_connection(self, connection: sa.Connection, who: str) -> str | None:
        """Find a journal other than the write-ahead log, and transactions that a listener begins.

        The driver's ``isolation_level`` has no effect, as a transaction has begun before each statement that writes.
        """
        if begins_otherwise(connection):
            msg = (
                f"{who}: a listener to `begin` starts this engine's transactions. With BEGIN, one that reads first "
                'may fail with "database is locked"; with BEGIN IMMEDIATE, one that only reads keeps '
                "other connections from writing. Remove the listener: a prepared engine starts each transaction as "
                "its first statement needs"
            )
            raise ConfigurationError(msg)
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
        if mode in _NO_JOURNAL:
            msg = (
                f"{who}: the connections have journal_mode={mode}, {_NO_JOURNAL[mode]}; leave out PRAGMA journal_mode "
                "in listeners to `connect`: a prepared engine sets it to WAL"
            )
            raise ConfigurationError(msg)
        if mode == "wal":
            return None
        return (
            f'{who}: the connections have journal_mode={mode}, so a claim may fail with "database is locked" while '
            "another connection reads; leave out PRAGMA journal_mode in listeners to `connect`: a prepared engine sets "
            "it to WAL, which the file system has to support"
        )

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        """Refuse an engine with one connection, and one of a database in memory.

        Several connections share one in memory by ``cache=shared``, and do not wait there for the locks of each other.
        """
        in_memory = ":memory:" in (engine.url.database or "") or "mode=memory" in str(engine.url)
        if in_memory or isinstance(engine.pool, SingletonThreadPool | StaticPool):
            msg = (
                f"{who}: the engine's database is in memory, or its sessions share one connection; use a file, as in "
                "create_engine('sqlite:///jobs.db'), or run the jobs in the session that enqueued them, by "
                "sqlaqueue.testing: drain(session, Model, handler)"
            )
            raise ConfigurationError(msg)


_FORMAT = "%(year)04d-%(month)02d-%(day)02d %(hour)02d:%(minute)02d:%(second)02d.%(microsecond)06d"


class Moment(sqlite.DATETIME):
    """A moment; with a time zone it is stored in UTC, and returned in UTC.

    Without a time zone it is stored and returned as SQLAlchemy's type does, and so is one with a format of the program.
    """

    def __init__(self, timezone: bool = False, **options: Any) -> None:  # noqa: FBT002 - SQLAlchemy's signature
        super().__init__(**options)
        self.timezone = timezone
        # SQLAlchemy's type gives its own format.
        self._has_format = options.get("storage_format", _FORMAT) != _FORMAT or options.get("regexp") is not None

    def bind_processor(self, dialect: sa.Dialect) -> Any:
        if self._has_format:
            return super().bind_processor(dialect)

        def process(value: Any) -> Any:
            if isinstance(value, datetime):
                return moment_text(value if self.timezone else value.replace(tzinfo=None))
            return moment_text(datetime.combine(value, time())) if isinstance(value, date) else value

        return process

    def literal_processor(self, dialect: sa.Dialect) -> Any:
        process: Any = self.bind_processor(dialect)
        return lambda value: f"'{process(value)}'"

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:
        if self._has_format:
            return super().result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            moment = datetime.fromisoformat(value)
            if not self.timezone:
                return moment
            # Another program may have written it with its distance to UTC.
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

        return process


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _moved(moment: str | None, seconds: float | None) -> str | None:
    if moment is None or seconds is None:
        return None
    try:
        return moment_text(datetime.fromisoformat(moment) + timedelta(seconds=seconds))
    except OverflowError:
        # A moment that Python cannot represent is earlier or later than all others.
        return "0001-01-01 00:00:00.000000" if seconds < 0 else "9999-12-31 23:59:59.999999"


def _epoch(moment: str | None) -> float | None:
    return None if moment is None else (datetime.fromisoformat(moment).replace(tzinfo=UTC) - _EPOCH).total_seconds()


def _regexp_substr(text: str | None, pattern: str) -> str | None:
    found = None if text is None else re.search(pattern, text)
    return None if found is None else found[0]


def _key_hash(*values: Any) -> int:
    """Return 60 bits of a digest."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest()) >> 4


_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "sqlaqueue_moved": (2, _moved),
    "sqlaqueue_epoch": (1, _epoch),
    "sqlaqueue_uuid_text": (1, lambda text: None if text is None else str(UUID(text))),
    "regexp_replace": (3, lambda text, pattern, by: None if text is None else re.sub(pattern, by, text, count=1)),
    "sqlaqueue_replaced": (3, lambda text, pattern, by: None if text is None else re.sub(pattern, by, text)),
    "regexp_substr": (2, _regexp_substr),
    "sqlaqueue_key_hash": (-1, _key_hash),
    "concat_ws": (-1, lambda separator, *texts: separator.join(str(text) for text in texts if text is not None)),
}
"""The number of arguments of each function, -1 for any, and the function itself."""


_EARLIER = "sqlaqueue_earlier_rowids"


def add_functions(connection: Any, info: dict[str, Any]) -> None:
    """Add the functions to a driver's connection.

    :param info: the ``info`` of the connection.
    """

    def pg_notify(channel: str, text: str) -> str:
        send(info, channel, text)
        return ""

    def is_written_here(table: str, rowid: int) -> bool:
        """Return whether the current transaction has inserted a row."""
        earlier = info.get(_EARLIER, {}).get(table)
        return earlier is not None and rowid not in earlier

    driver: Any = getattr(connection, "driver_connection", connection)
    numbers = itertools.count(1)

    def txid_current() -> int:
        # Two calls in one transaction have to return the same number; outside of any they have to differ.
        return 0 if driver.in_transaction else next(numbers)

    connection.create_function("pg_notify", 2, pg_notify)
    connection.create_function("txid_current", 0, txid_current)
    connection.create_function("sqlaqueue_written_here", 2, is_written_here)
    for name, (arguments, function) in _FUNCTIONS.items():
        connection.create_function(name, arguments, function, deterministic=True)


def _rowids(connection: sa.Connection, _: sa.Table, name: str) -> frozenset[int]:
    query = f"SELECT rowid FROM {name}"  # noqa: S608 - the name is quoted
    return frozenset(connection.exec_driver_sql(query).scalars())


_OLDEST = (3, 35)

_LONGEST_WAIT = (2**31 - 1) // 1000
"""The longest ``busy_timeout`` in seconds. SQLite has milliseconds of 32 bits, and waits not at all for more."""


def prepare_sqlite(engine: sa.Engine, busy_timeout: float | None) -> None:
    """Set the file to write-ahead logging, and let transactions begin with ``BEGIN IMMEDIATE`` where they write first.

    With write-ahead logging, readers and the writer do not wait for each other.
    """
    dialect: Any = engine.dialect
    version = dialect.dbapi.sqlite_version_info
    if version < _OLDEST:
        msg = (
            f"prepare({engine!r}): SQLite {'.'.join(map(str, version))} has no UPDATE .. RETURNING; "
            "use a Python that is linked with SQLite 3.35 or newer"
        )
        raise ConfigurationError(msg)
    if is_prepared(engine):
        prepared: Any = engine_of(dialect)
        if busy_timeout not in {None, prepared.busy_timeout}:
            msg = (
                f"prepare({engine!r}, busy_timeout={busy_timeout}): the engine has been prepared with "
                f"busy_timeout={prepared.busy_timeout}; give it in the first call, and call prepare() once"
            )
            raise ConfigurationError(msg)
        return
    wanted: Any = busy_timeout
    if wanted is not None and not (isinstance(wanted, int | float) and 0 <= wanted <= _LONGEST_WAIT):
        msg = (
            f"prepare({engine!r}): busy_timeout={busy_timeout!r} must be a number of seconds from 0 to "
            f"{_LONGEST_WAIT}, for example 30"
        )
        raise ConfigurationError(msg)
    other = SQLite() if busy_timeout is None else SQLite(busy_timeout)
    replace_compiler(
        engine,
        other,
        drivers=("sqlite3", "aiosqlite"),
        compiler=StatementCompiler,
        types={sa.DateTime: Moment},
    )

    def connecting(dialect: Any, record: Any, positional: Any, arguments: dict[str, Any]) -> None:
        # See refuse_autocommit(). Without it the driver does what isolation_level says.
        arguments.pop("autocommit", None)

    def connected(connection: Any, record: Any) -> None:
        refuse_autocommit(connection)
        # The driver begins no transaction by itself.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(other.busy_timeout * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()
        add_functions(connection, record.info)

    event.listen(engine, "do_connect", connecting)
    event.listen(engine, "connect", connected)
    event.listen(engine, "close", release_lock)
    event.listen(engine, "close_detached", release_lock)
    # A listener of the program may have changed it since.
    event.listen(engine, "checkout", refuse_autocommit)
    refuse_files_of_parent(engine)
    begin_when_needed(engine)
    note_before_inserts(engine, _EARLIER, _rowids)
    notify_within_process(engine)
    carry_out_statements(engine, other)
