"""What the checks of one examination share: the connection, the queues and the thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, get_args
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.sql.ddl import DDLElement

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.state import about_consumer, failing_consumers
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.postgresql.catalog_text import quoted, sql_text
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.postgresql.facts import ServerState, Severity
from sqlaqueue.postgresql.faults import MIGRATION
from sqlaqueue.queue.names import CONSUMERS
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.sql.engine import OtherEngine, engine_of
from sqlaqueue.sql.portable import clock, converted, earlier, later
from sqlaqueue.statements.verbs import consumers


def change_setting(server: ServerState, name: str, value: str) -> str:
    """Return the statements that give a setting another value for all new sessions like the current one."""
    database, role = quoted(server.database), quoted(server.role)
    source = server.settings[name].source
    if source in {"client", "session"}:
        return f"-- Remove it from the options of the engine.\nSET {name} = {value};"
    if source == "command line":
        return f"postgres -c {name}={value}  # with the other options with which the server was started"
    where = {
        "database": f"DATABASE {database}",
        "user": f"ROLE {role}",
        "database user": f"ROLE {role} IN DATABASE {database}",
    }.get(source)
    if where is not None:
        return f"ALTER {where} RESET {name};"
    return f"ALTER SYSTEM SET {name} = {value};\nSELECT pg_reload_conf();"


def use_server(server: ServerState, address: str, port: int) -> str:
    """Return the command that gives workers the address of a server, with the role and the database of ``server``."""
    user, name = quote(server.role, safe=""), quote(server.database, safe="")
    host, query = address, ""
    if host.startswith("/"):
        host, query = "", f"?host={quote(host)}&port={port}"
    elif ":" in host:
        host = f"[{host}]"
    place = f"{host}:{port}" if host else ""
    return f"export SQLAQUEUE_URL='postgresql+psycopg://{user}@{place}/{name}{query}'  # for workers"


SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a queue or its server.

    ::

        for finding in doctor(session, Email):
            print(finding.severity, finding.summary, *finding.fixes)
    """

    severity: Severity
    code: str
    """What was found, as a word for programs, such as ``missing_index``."""
    queue: str | None = None
    """The name of the queue; None for a finding about the server or the connection."""
    summary: str
    """What is wrong, in one sentence."""
    consequence: str = ""
    """Why it matters, in one sentence."""
    fixes: tuple[str, ...] = ()
    """What repairs it. Each one repairs it by itself, and the first is to be tried first. It is a shell command, or SQL
    statements that end with a semicolon: to be executed one by one, not in one transaction."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The values that were measured, for programs."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits of an examination; each check names those that it uses.

    ::

        found = doctor(session, Email, thresholds=Thresholds(oldest_due=timedelta(minutes=1)))

    :raises ConfigurationError: if a duration is no timedelta, or a number no number; if one is negative; and for a
        timeout of more than a day.
    """

    statement_timeout: timedelta = timedelta(seconds=5)
    """The longest time for one statement of the examination."""
    lock_timeout: timedelta = timedelta(milliseconds=500)
    """For how long a statement of the examination waits for a lock."""
    blocked_for: timedelta = timedelta(seconds=5)
    """For how long a session has to have waited for a lock of a queue's table."""
    small_table: int = field(default=1000, metadata={"unit": "rows"})
    """Number of rows up to which a claim may read a whole table."""
    lease_expired_for: timedelta = timedelta(seconds=30)
    """How long ago a lease must have expired; Consumers rescue within a few seconds."""
    lease_beyond: timedelta = timedelta(hours=1)
    """How much longer than ``QueueConfig(lease=...)`` a lease may last; Consumers and handlers may ask for more."""
    unserved_for: timedelta = timedelta(seconds=30)
    """For how long the oldest job of a queue without live Consumers must have been due."""
    oldest_due: timedelta = timedelta(minutes=5)
    """For how long the oldest job of a queue with live Consumers must have been due."""
    not_listening_for: timedelta = timedelta(minutes=1)
    """How long ago a Consumer that receives no notifications must have started."""
    leftover_age: timedelta = timedelta(hours=25)
    """The age from which on entries of the crash journal, and requests to cancel jobs, are left over. Consumers delete
    those of more than a day."""

    transaction_open: timedelta = timedelta(minutes=5)
    """For how long a transaction, prepared or not, may keep dead rows."""
    history_length: int = field(default=1_000_000, metadata={"unit": "transactions"})
    """Of how many transactions a server of MariaDB may keep old versions of rows (history list length)."""
    wal_size: int = field(default=64 * 1024 * 1024, metadata={"unit": "bytes"})
    """How large the write-ahead log of a file of SQLite may be."""
    busy_timeout: timedelta = timedelta(seconds=1)
    """How long connections to a file of SQLite must wait for the write lock, at least."""
    horizon_age: int = field(default=100_000, metadata={"unit": "transactions"})
    """For how many later transactions a session, a replication slot or a standby may keep dead rows."""
    slot_inactive: timedelta = timedelta(hours=1)
    """For how long a replication slot that keeps dead rows may have no client; known from PostgreSQL 17 on."""

    dead_rows: int = field(default=10_000, metadata={"unit": "rows"})
    """How many dead rows a table may have, however small its threshold of autovacuum."""
    dead_rows_factor: float = field(default=2.0, metadata={"unit": "times"})
    """How many times the dead rows at which autovacuum starts on a table may have."""
    dead_rows_kept: int = field(default=100_000, metadata={"unit": "rows"})
    """How many dead rows a table may have soon after a VACUUM."""
    vacuum_overdue: timedelta = timedelta(minutes=5)
    """How long ago the last VACUUM of a table with too many dead rows may be."""
    changed_rows: int = field(default=10_000, metadata={"unit": "rows"})
    """How many rows may have changed since the last ANALYZE, however small the table."""
    changed_share: float = field(default=0.5, metadata={"unit": "share"})
    """How many rows may have changed since, as a share of the rows that the table had then."""
    row_count_factor: float = field(default=10.0, metadata={"unit": "times"})
    """How many times more or fewer rows a table may have than the planner expects."""
    analyze_overdue: timedelta = timedelta(minutes=10)
    """How long ago the last ANALYZE of a table with too many changed rows may be."""
    new_table_rows: int = field(default=100_000, metadata={"unit": "rows"})
    """How many dead or changed rows a table may have before its first VACUUM or ANALYZE: it may have been created since
    autovacuum last looked."""
    freeze_factor: float = field(default=1.5, metadata={"unit": "times"})
    """How many times the age at which autovacuum freezes a table its oldest transaction id may have."""
    freeze_critical: int = field(default=1_600_000_000, metadata={"unit": "transactions"})
    """The age of the oldest transaction id that is critical; at 2.1 billion the server refuses to write."""
    index_bloat_factor: float = field(default=10.0, metadata={"unit": "times"})
    """How many times the size that its entries need a claim index may have."""
    index_bloat_size: int = field(default=64 * 1024 * 1024, metadata={"unit": "bytes"})
    """The bytes that a claim index may have in any case."""

    clock_difference: timedelta = timedelta(seconds=2)
    """How much the clock of this machine may differ from the server's."""
    clock_difference_critical: timedelta = timedelta(minutes=1)
    """How much the clock may differ before the finding is critical."""
    notification_queue: float = field(default=0.5, metadata={"unit": "share"})
    """Which share of the notification queue may be in use."""
    notification_queue_critical: float = field(default=0.9, metadata={"unit": "share"})
    """Which share of the notification queue in use is critical."""
    oldest_server: int = field(default=15, metadata={"unit": "version"})
    """The oldest major version of PostgreSQL."""
    claims_at_once: int = field(default=10, metadata={"unit": "claims"})
    """How many claims of a full batch must fit into the server's lock table."""

    keys_used: float = field(default=0.7, metadata={"unit": "share"})
    """Which share of the numbers of an integer key may be used."""
    keys_used_critical: float = field(default=0.9, metadata={"unit": "share"})
    """Which share of the numbers in use is critical."""

    connections_used: float = field(default=0.9, metadata={"unit": "share"})
    """Which share of the server's connections may be in use."""
    connection_idle: timedelta = timedelta(minutes=10)
    """From when on a session counts as idle, for the fix that ends such sessions."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value: Any = getattr(self, each.name)
            advice = None
            if isinstance(each.default, timedelta):
                if not isinstance(value, timedelta):
                    advice = "give a timedelta, such as timedelta(minutes=10)"
                elif value < timedelta(0):
                    advice = "give zero or more"
                elif each.name in {"statement_timeout", "lock_timeout"} and value > timedelta(days=1):
                    advice = "give at most a day"
            else:
                kind, kinds = ("an integer", int) if isinstance(each.default, int) else ("a number", int | float)
                if isinstance(value, bool) or not isinstance(value, kinds) or math.isnan(value):
                    advice = f"give {kind} ({each.metadata['unit']})"
                elif value < 0:
                    advice = "give zero or more"
            if advice is not None:
                raise ConfigurationError(f"Thresholds({each.name}={value!r}): {advice}")


@dataclass(frozen=True)
class Examination:
    """One examination of some queues in one database."""

    connection: sa.Connection
    """A connection in a read-only transaction with a statement timeout."""
    specs: Sequence[QueueSpec]
    """The queues; all of them are in the database of the connection."""
    thresholds: Thresholds
    deep: bool
    """Whether checks may read rows of jobs, not only catalogs, statistics and a few pages."""

    @property
    def other(self) -> OtherEngine | None:
        """The engine of the database; None for PostgreSQL."""
        return engine_of(self.connection.dialect)

    def now(self) -> datetime:
        """Return what time it is for the statements of the library."""
        now: datetime = self.connection.execute(sa.select(clock())).scalar_one()
        return now

    def ago(self, age: timedelta) -> sa.ColumnElement[Any]:
        """Return the moment that is so long ago, for a condition that a fix may repeat."""
        # A fix is executed by a client that does not know the functions of a prepared engine.
        return earlier(clock(), age) if self.other is None else sa.literal(self.now() - age, sa.DateTime(timezone=True))

    def later(self, wait: timedelta) -> sa.ColumnElement[Any]:
        """Return the moment that comes after so long a time, for a condition that a fix may repeat."""
        return later(clock(), wait) if self.other is None else self.ago(-wait)

    def moment(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Return a moment as one with a time zone, which its column may lack, that Python can load."""
        if self.other is None:
            return within_calendar(converted(moment, sa.DateTime(timezone=True)))
        # The others store moments in UTC, and none that Python does not know.
        return sa.type_coerce(moment, sa.DateTime(timezone=True))

    def text(self, statement: Any) -> str:
        """Return a statement with its values, as an operator executes it."""
        if self.other is None:
            return sql_text(self.connection, statement)
        names = self.connection.get_execution_options().get("schema_translate_map")
        options: dict[str, Any] = {} if names is None else {"schema_translate_map": names}
        if not isinstance(statement, DDLElement):
            options["compile_kwargs"] = {"literal_binds": True}
        if names is not None:
            options["render_schema_translate"] = True
        compiled = statement.compile(dialect=self.connection.dialect, **options)
        return f"{str(compiled).strip()};"


Check = Callable[[Examination], Iterator[Finding]]
"""A check yields what it finds. It executes each statement by ``examination.connection``; if one fails, the examination
rolls back to the savepoint before the check, and reports that the check could not be made."""


PLACEHOLDER = "MODULE:"
"""What the command of a fix has where the reader has to name something."""


def worker_command(examination: Examination, spec: QueueSpec, options: str = "") -> str:
    """Return the command that starts a worker of a queue, with the handler that its Consumers have or had.

    A queue whose heartbeats name no handler, or several, has a placeholder instead.
    """
    table, names = spec.side_tables.get(CONSUMERS), set[str]()
    if table is not None:
        own = sa.select(table.c.unclaimable).where(table.c.queue == spec.name).order_by(table.c.heartbeat_at.desc())
        for row in examination.connection.execute(own.limit(_HEARTBEATS)):
            names.update(about_consumer(row).handlers)
    known = [name for name in names if len(names) == 1 and _IMPORTABLE.fullmatch(name)]
    return f"sqlaqueue worker {target_of(spec)}={known[0] if known else f'{PLACEHOLDER}HANDLER'}{options}"


_HEARTBEATS = 100
"""From how many Consumers the handler is read."""

_IMPORTABLE = re.compile(r"(?!sqlaqueue\b)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
"""A handler that can be named: no function in a function, and not that of a queue of functions."""


def target_of(spec: QueueSpec) -> str:
    return f"{spec.model.__module__}:{spec.model.__qualname__}"


def queue_tables(examination: Examination) -> Iterator[tuple[str | None, sa.Table]]:
    names: dict[sa.Table, list[str]] = {}
    for spec in examination.specs:
        for table in dict.fromkeys((*spec.strategy.locked_tables(spec), *spec.side_tables.values())):
            names.setdefault(table, []).append(spec.name)
    for table, queues in names.items():
        yield queues[0] if len(queues) == 1 else None, table


MOST = 1000
"""Number of rows up to which they are counted."""


def at_most(rows: AnySelect, name: str = "sqlaqueue_first") -> sa.Subquery:
    """Return the first rows of a SELECT, one more than are counted."""
    return rows.limit(MOST + 1).subquery(name)


def counted(connection: sa.Connection, rows: AnySelect) -> int:
    """Return the number of rows of a SELECT, up to :data:`MOST` and one."""
    return connection.execute(sa.select(sa.func.count()).select_from(at_most(rows))).scalar_one()


def number_text(number: int, one: str, several: str = "") -> str:
    """Return a number of rows that was counted up to the limit, such as ``2 jobs``."""
    return f"1 {one}" if number == 1 else f"{f'more than {MOST}' if number > MOST else number} {several or f'{one}s'}"


def alive_text(consumers: int) -> str:
    return "1 Consumer is alive" if consumers == 1 else f"{consumers} Consumers are alive"


def live_consumers(examination: Examination, spec: QueueSpec) -> Sequence[Any]:
    """Return the Consumers of a queue that are alive, as ``consumers()`` does, and what time it is, as ``now``."""
    if CONSUMERS not in spec.side_tables:
        return []
    return examination.connection.execute(consumers(spec.model).add_columns(clock().label("now"))).all()


def missing_column(examination: Examination, spec: QueueSpec, name: str, add: Sequence[str]) -> Finding:
    """Return the finding for a column that the database lacks.

    :param name: the column with its table, as SQL.
    :param add: the statements that add it.
    """
    alive: Sequence[Any] = []
    registered = spec.side_tables.get(CONSUMERS)
    if registered is not None:
        connection = examination.connection
        # It may lack a column as well.
        with suppress(DatabaseNotReadyError):
            checks_of(connection).check_tables(connection, [registered], spec.name)
            alive = live_consumers(examination, spec)
    failing = failing_consumers(alive)
    works = [each.name for each in alive if not failing_consumers([each])]
    consequence = f"Statements of {spec.model.__name__} fail, and no Consumer starts."
    if works:
        # Either a newer version has dropped it, or this is the newer version, and its migration has not been run.
        # To add a column that has been dropped would be wrong, and the command of Alembic refuses that by itself.
        consequence = (
            f"Statements of {spec.model.__name__} fail in this process, whose models have the column. The Consumer "
            f"{works[0]} works without it: if it is of a newer version of the program, restart this process with that "
            "version; if this process is the newer one, run the migration."
        )
    elif failing:
        consequence = (
            f"It was there when the Consumer {failing[0].name} started, so a newer version of the program has dropped "
            "it. Restart this process, and the Consumers whose claims fail, with that version."
        )
    return Finding(
        severity="critical",
        code="missing_column",
        queue=spec.name,
        summary=f"The column {name} is missing.",
        consequence=consequence,
        fixes=("alembic upgrade head",) if works else () if failing else (MIGRATION, *add),
        facts={"column": name, "works_without": works} if works else {"column": name},
    )
