"""Which engine executes a statement: what a database other than PostgreSQL gives, how it is prepared, its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool
from sqlalchemy.sql.base import Executable

OURS = "sqlaqueue_statement"
"""The execution option of statements of the library."""

STEPS = "sqlaqueue_steps"
"""The execution option of a statement that engines other than PostgreSQL carry out in several steps: :class:`Steps`."""

PLAIN = "sqlaqueue_plain"
"""The entry in the ``info`` of an index of the library with its :class:`PlainIndex`."""

ONLY = "sqlaqueue_only"
"""The entry in the ``info`` of an index with the names of the dialects that have it; without it, all have."""


def exists_on(index: sa.Index, dialect: sa.Dialect) -> bool:
    """Return whether an index of the library is created on a database."""
    only: Sequence[str] | None = index.info.get(ONLY)
    return only is None or dialect.name in only


class PlainIndex(NamedTuple):
    """An index on databases other than PostgreSQL, which cannot index the hash of a key."""

    columns: Sequence[Any] | None
    """The columns; None for those of the index itself."""
    where: Any
    """The condition, on a database with partial indexes; None without one."""
    leading: Sequence[Any]
    """The columns of the condition, with which the index begins on a database without partial indexes."""


WRITES_LATER = "sqlaqueue_writes_later"
"""The execution option of a query of the library whose transaction writes later.

A transaction that it begins takes the write lock of SQLite, as one that begins with a write does.
"""

OF_TEST = "sqlaqueue_of_test"
"""The key in the ``info`` of a connection whose transaction is that of a test, in which handlers run."""

OWN_WORK: ContextVar[bool] = ContextVar("sqlaqueue_own_work", default=False)
"""Whether the library executes statements for itself: in a transaction of its own, or as the steps of a statement.

All of them are the library's, marked or not. A transaction that one of them begins takes the write lock of SQLite, even
if it reads first, as it writes later.
"""

SETTLES: ContextVar[bool] = ContextVar("sqlaqueue_settles", default=False)
"""Whether a Consumer settles a run in the transaction of its handler, whose own writes have been flushed.

A settlement compares the token of the claim, and depends on nothing else that the transaction has read. So an engine
may let it see what others have committed since.
"""

PREPARED = ("sqlite", "mariadb", "mysql")
"""The dialects whose engines ``sqlaqueue.prepare(engine)`` has to prepare."""

_PREPARED = "_sqlaqueue_engine"


class OtherEngine(Protocol):
    """A database other than PostgreSQL.

    Its compiler, types and transactions belong to the dialect of the engine that is prepared for it.
    """

    name: str
    """The name of SQLAlchemy's dialect."""
    title: str
    """The name for people."""
    migrating: str
    """How an existing table gets what it lacks, as an advice to people."""

    @property
    def checks(self) -> Any:
        """The module of checks, see :class:`~sqlaqueue.postgresql.checks_of.Checks`."""
        ...

    def check_supported(self, spec: Any) -> None:
        """Raise ConfigurationError for a queue with options that the database cannot carry."""
        ...

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Raise DatabaseNotReadyError if the tables of a queue, which exist, are stored so that claims cannot work."""
        ...

    def check_connection(self, connection: sa.Connection, who: str) -> str | None:
        """Return what a program has changed on a connection that has begun a transaction and executed nothing.

        :raises ConfigurationError: for a change with which claims would not be safe.
        """
        ...

    def stored_type(self, column: sa.Column[Any], dialect: sa.Dialect) -> Any:
        """Return the type of SQLAlchemy or of its dialect with which a column of the library is created."""
        ...

    def created(self, table: sa.Table, connection: sa.Connection) -> None:
        """Create what belongs to a table of the library that has just been created."""
        ...

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        """Raise ConfigurationError for an engine whose connections a Consumer cannot use."""
        ...

    def subscribe(
        self, engine: sa.Engine, deliver: Callable[[str, str], None], watched: Any = None
    ) -> Callable[[], Any]:
        """Call ``deliver(channel, text)`` for notifications that are sent in this process; return what ends this.

        :param watched: the queue and the Consumer, if idle Consumers are also to be notified of what other processes
            commit: a :class:`~sqlaqueue.queue.spec.QueueSpec`, and an object with ``waits``, ``found`` and
            ``has_polled`` of a :class:`~sqlaqueue.consumer.notifications.polls.PollSchedule`.
        :return: a function that ends it, and returns what has a ``thread`` that is ending; None without an error.
        """
        ...

    def locked(self, rows: Any, *, waits: bool = False) -> Any:
        """Return a SELECT of rows of a queue that locks them.

        :param waits: whether it waits for those that others have locked; otherwise it passes over them.
        """
        ...

    has_one_writer: bool
    """Whether only one transaction writes at a time, so that none can change what another one has read for its write.
    """

    def lock_keys(self, connection: sa.Connection, table: sa.Table, names: Any) -> Any:
        """Lock what has these names, of a table, until the end of the transaction; return those that it has locked."""
        ...

    def begin_steps(self, connection: sa.Connection, statement: Any) -> None:
        """Raise StatementError if each step would be a transaction of its own."""
        ...

    def sqlstate(self, error: DBAPIError) -> str | None:
        """Return the SQLSTATE that PostgreSQL would have raised; None for an error without a counterpart."""
        ...

    def violated_constraint(self, error: DBAPIError) -> str | None:
        """Return the name of the constraint or unique index that a statement has violated; None for other errors."""
        ...

    def violated_column(self, error: DBAPIError) -> str | None:
        """Return the name of the column that may not be NULL; None for other errors."""
        ...

    def violated_table(self, error: DBAPIError) -> str | None:
        """Return the name of the table whose constraint was violated; None for other errors."""
        ...


_drivers: dict[str, OtherEngine] = {}


def mark_prepared(dialect: sa.Dialect, engine: OtherEngine, drivers: tuple[str, ...]) -> bool:
    """Mark a dialect as prepared; return False if it has been before.

    :param drivers: the modules whose errors are those of this database.
    """
    known = _PREPARED in dialect.__dict__
    dialect.__dict__[_PREPARED] = engine
    _drivers.update(dict.fromkeys(drivers, engine))
    return not known


def engine_of(dialect: sa.Dialect) -> OtherEngine | None:
    """Return the engine for which a dialect is prepared; None for PostgreSQL, and for one that is not prepared."""
    found: OtherEngine | None = dialect.__dict__.get(_PREPARED)
    return found


def whole_engine(engine: Any) -> sa.Engine:
    """Return the Engine of an AsyncEngine, and that from which ``execution_options()`` has made another one.

    These share dialect and pool, so one of them cannot be prepared without the others.
    """
    found = getattr(engine, "sync_engine", engine)
    while (before := getattr(found, "_proxied", None)) is not None:
        found = before
    whole: sa.Engine = found
    return whole


def engine_of_error(error: DBAPIError) -> OtherEngine | None:
    """Return the engine whose driver raised an error; None for PostgreSQL."""
    return _drivers.get(type(error.orig).__module__.partition(".")[0]) if _drivers else None


def schema_of(connection: Any, table: sa.Table) -> str | None:
    """Return the schema of a table, with the ``schema_translate_map`` of the connection."""
    translated = connection.get_execution_options().get("schema_translate_map") or {}
    schema: str | None = translated.get(table.schema, table.schema)
    return schema


def pool_limit(pool: Pool) -> int | None:
    """Return how many connections a pool allows at once; None if there is no limit."""
    size: Callable[[], int] | None = getattr(pool, "size", None)
    overflow = getattr(pool, "_max_overflow", None)
    return None if size is None or overflow is None or overflow < 0 else size() + overflow


def may_be_other_engine() -> bool:
    """Return whether any engine of this process is prepared for another database than PostgreSQL."""
    return bool(_drivers)


_noting: list[bool] = []


def note_written_rows() -> None:
    """Let engines without transaction numbers note which rows a transaction writes, as functions for tests need."""
    _noting[:] = [True]


def notes_written_rows() -> bool:
    """Return whether engines note which rows a transaction writes."""
    return bool(_noting)


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Execute the statements of the block as the library's own work; see :data:`OWN_WORK`."""
    token = OWN_WORK.set(True)
    try:
        yield
    finally:
        OWN_WORK.reset(token)


def mark_of(statement: Any, options: Mapping[str, Any]) -> Any:
    """Return how a statement that is executed is marked as one of the library's: True, or the queue of a claim.

    None for a statement of the program.
    """
    return _option(OURS, statement, options) or OWN_WORK.get() or None


class Steps(NamedTuple):
    """What engines other than PostgreSQL do before a statement, or in its place."""

    each: tuple[Any, ...]
    """One of the classes ``..Steps`` of :mod:`sqlaqueue.queue.strategy_protocol` for each of them."""
    shown: Callable[[Any], Any] | None = None
    """Makes the statement that is executed at the end from a SELECT of what is returned."""


_Executable = TypeVar("_Executable", bound=Executable)


def in_steps(statement: _Executable, *steps: Any) -> _Executable:
    """Return a statement with what other engines do before it, or in its place."""
    before = steps_of(statement)
    return statement.execution_options(**{STEPS: Steps((*steps, *(before.each if before else ())))})


def steps_of(statement: Executable) -> Steps | None:
    """Return what :func:`in_steps` has added to a statement."""
    found: Steps | None = statement.get_execution_options().get(STEPS)
    return found


def steps_for(statement: Any, options: Mapping[str, Any]) -> Steps | None:
    """Return what other engines do before a statement that is executed; None for a statement without."""
    found: Steps | None = _option(STEPS, statement, options)
    return found


def _option(name: str, statement: Any, options: Mapping[str, Any]) -> Any:
    value, inner = options.get(name), getattr(statement, "element", None)
    # As often as a program has wrapped a claim by from_statement().
    while value is None and isinstance(inner, Executable):
        value, inner = inner.get_execution_options().get(name), getattr(inner, "element", None)
    return value


# -- errors ------------------------------------------------------------------------------------------------------------
# The SQLSTATE of a database error, whichever driver raised it.


INSUFFICIENT_PRIVILEGE = "42501"
NOT_NULL_VIOLATION = "23502"
UNIQUE_VIOLATION = "23505"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, None if the error did not come from the server."""
    other = engine_of_error(error)
    if other is not None:
        return other.sqlstate(error)
    # psycopg and asyncpg name it sqlstate, psycopg2 names it pgcode.
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the constraint or unique index that a statement has violated; None for other errors."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_constraint(error)
    return _said(error, "constraint_name")


def violated_table(error: DBAPIError) -> str | None:
    """Return the name of the table whose constraint was violated, by a statement or at a commit; None otherwise."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_table(error)
    is_violation = violated_constraint(error) is not None or violated_column(error) is not None
    return _said(error, "table_name") if is_violation else None


def violated_column(error: DBAPIError) -> str | None:
    """Return the name of the column that a statement has set to NULL and that may not be; None for other errors."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_column(error)
    return _said(error, "column_name") if sqlstate(error) == NOT_NULL_VIOLATION else None


def _said(error: DBAPIError, what: str) -> str | None:
    driver: Any = error.orig
    # psycopg and psycopg2 have a diag. SQLAlchemy wraps the error of asyncpg, which has the names itself.
    for place in (getattr(driver, "diag", None), getattr(driver, "__cause__", None)):
        name = getattr(place, what, None)
        if isinstance(name, str):
            return name
    return None
