"""What a live server reports about itself, for :mod:`sqlaqueue.admin.diagnosis`: facts, and the protocol to read them.

The facts say what the server reports, not whether that is good or bad. Names of tables and indexes are quoted and have
their schema, so that they can be pasted into SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import sqlalchemy as sa


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A session of this database whose transaction has a transaction id or a snapshot."""

    pid: int
    role: str | None
    application: str
    client: str | None
    """The client's address; None on a Unix socket."""
    state: str | None
    """As in pg_stat_activity; None if the current role may not see it."""
    since: datetime | None
    """When the transaction began; None if the current role may not see it."""
    seconds: float | None
    """For how long the transaction has been open."""
    age: int
    """How many transactions have begun since its oldest snapshot."""
    statement: str
    """The keyword and the table of the last statement, such as ``UPDATE email``; never its text, which may contain
    passwords. Empty if it is not known."""

    @property
    def hidden(self) -> bool:
        """Whether the current role may not see what the session does."""
        return self.state is None and self.since is None


@dataclass(frozen=True, kw_only=True)
class Blocker:
    """A session that holds locks of tables for which other sessions wait."""

    session: OpenTransaction
    waiting: int
    """How many sessions wait."""
    seconds: float
    """For how long the first of them has waited."""
    tables: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PreparedTransaction:
    """A prepared transaction of this database."""

    gid: str
    owner: str
    since: datetime
    seconds: float
    age: int


@dataclass(frozen=True, kw_only=True)
class ReplicationSlot:
    """A replication slot that keeps dead rows."""

    name: str
    kind: str
    """``physical`` or ``logical``."""
    database: str | None
    active_pid: int | None
    age: int | None
    """The age in transactions of the oldest one whose rows it keeps in all tables; None if it keeps none there."""
    catalog_age: int | None
    """The same for the system catalogs only."""
    inactive_since: datetime | None
    """None if it is active, or before PostgreSQL 17."""
    inactive_seconds: float | None
    wal_bytes: int | None
    """How much WAL the server keeps for it."""


@dataclass(frozen=True, kw_only=True)
class Standby:
    """A standby whose feedback keeps dead rows, without a slot."""

    pid: int
    application: str
    client: str | None
    age: int


@dataclass(frozen=True, kw_only=True)
class HorizonHolders:
    """All that keeps VACUUM from removing dead rows of this database."""

    sessions: Sequence[OpenTransaction]
    prepared: Sequence[PreparedTransaction]
    slots: Sequence[ReplicationSlot]
    standbys: Sequence[Standby]
    hidden: int
    """How many sessions of this database the current role may not see into."""


@dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """The counters of one table, or of one partition of it."""

    name: str
    """With its schema, quoted."""
    rows: float
    """``reltuples``; -1 before the first VACUUM or ANALYZE."""
    planned_rows: float
    """How many rows the planner expects at today's size; -1 if unknown."""
    size: int
    """In bytes."""
    options: Mapping[str, str]
    """The storage parameters."""
    live: int
    dead: int
    changed: int
    """Rows inserted, updated or deleted since the last ANALYZE."""
    last_vacuum: datetime | None
    """The later one of the last VACUUM and the last autovacuum."""
    since_vacuum: float | None
    """In seconds."""
    last_analyze: datetime | None
    since_analyze: float | None
    xid_age: int
    """The age of relfrozenxid."""
    multixact_age: int
    vacuum_pid: int | None
    """The process that vacuums it now."""
    vacuum_phase: str | None


@dataclass(frozen=True, kw_only=True)
class IndexSize:
    """The size of one index, or of one partition of it."""

    name: str
    """With its schema, quoted."""
    size: int
    """In bytes."""
    rows: float
    """The number of entries at the last VACUUM or ANALYZE; -1 before."""
    entry_width: int
    """The average bytes of an entry with its header, from the statistics of the columns."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the server for the current session."""

    name: str
    value: str
    source: str
    """Where it was set, as in pg_settings: ``configuration file``, ``database``, ``user`` ..."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The server that the connection leads to."""

    version: int
    """``server_version_num``, such as 160004."""
    in_recovery: bool
    database: str
    role: str
    address: str
    """Of the server itself; the directory of the socket if the connection does not use TCP."""
    port: int
    primary: tuple[str, int] | None
    """The address of the primary, on a standby that receives WAL from it; None if the role may not see it."""
    settings: Mapping[str, Setting]

    def number(self, name: str) -> float:
        """Return the value of a numeric setting, in the unit of pg_settings."""
        return float(self.settings[name].value)

    def is_on(self, name: str) -> bool:
        """Return whether a setting is ``on``."""
        return self.settings[name].value == "on"


@dataclass(frozen=True, kw_only=True)
class NotificationQueue:
    """The server's queue of notifications that a listener has not received."""

    usage: float
    """From 0 to 1."""
    oldest: OpenTransaction | None
    """The session of any database with the oldest transaction, in which it receives no notifications."""


@dataclass(frozen=True, kw_only=True)
class KeySequence:
    """The sequence that generates an integer key."""

    table: str
    """With its schema, quoted."""
    sequence: str
    """With its schema, quoted."""
    column: str
    """Quoted."""
    column_type: str
    """``smallint``, ``integer`` or ``bigint``."""
    sequence_type: str
    identity: bool
    """Whether the column is an identity column, whose type the sequence follows."""
    last: int | None
    """None if it has not been used, or the current role may not read it."""
    sequence_limit: int
    column_limit: int

    @property
    def limit(self) -> int:
        """The last number that both the sequence and the column take."""
        return min(self.sequence_limit, self.column_limit)


@dataclass(frozen=True, kw_only=True)
class ConnectionGroup:
    """The connections of one role and application."""

    role: str
    application: str
    number: int
    idle: int | None
    """How many of them have been idle for some time; None if the current role may not see it."""


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The connections of clients to all databases of the server."""

    used: int
    limit: int
    """``max_connections`` without those that are reserved for superusers."""
    groups: Sequence[ConnectionGroup]
    """The largest first."""


class ServerFacts(Protocol):
    """Reads the facts, without locks on tables."""

    def horizon_holders(self, connection: sa.Connection) -> HorizonHolders:
        """Return all that keeps VACUUM from removing dead rows."""
        ...

    def table_statistics(self, connection: sa.Connection, table: sa.Table) -> Sequence[TableStatistics]:
        """Return the statistics of a table, or of each of its partitions; none if the table does not exist."""
        ...

    def index_sizes(
        self, connection: sa.Connection, table: sa.Table, indexes: Iterable[sa.Index]
    ) -> Sequence[IndexSize]:
        """Return the sizes of some indexes of a table by their names, or of each of their partitions, if they exist."""
        ...

    def common_values(self, connection: sa.Connection, column: sa.Column[object]) -> Sequence[str] | None:
        """Return the most common values of a column by its statistics, as texts; None if there are no statistics."""
        ...

    def server_state(self, connection: sa.Connection) -> ServerState:
        """Return the server's version, settings and address."""
        ...

    def server_time(self, connection: sa.Connection) -> datetime:
        """Return the server's clock at this moment."""
        ...

    def notification_queue(self, connection: sa.Connection) -> NotificationQueue:
        """Return the fill of the notification queue."""
        ...

    def key_sequences(self, connection: sa.Connection, table: sa.Table) -> Sequence[KeySequence]:
        """Return the sequences of the integer columns of a table's primary key."""
        ...

    def connections(self, connection: sa.Connection, idle_for: float) -> Connections:
        """Return the connections to the server.

        :param idle_for: the seconds from which on a session counts as idle.
        """
        ...

    def backend_pid(self, connection: sa.Connection) -> int:
        """Return the process id of the server's process that executes the statements of a connection."""
        ...

    def announced_pid(self, connection: sa.Connection) -> int | None:
        """Return the process id that the driver was told when it connected; None if the driver does not say."""
        ...

    def probe_backends(self, engine: sa.Engine) -> Sequence[int]:
        """Return the process ids of three transactions, the first and the last of one further connection.

        The second transaction belongs to another connection. It begins between the two others, and takes the server
        connection that a pooler has got back from the first.
        """
        ...

    def table_name(self, connection: sa.Connection, table: sa.Table) -> str:
        """Return the name of a table with the schema in which it is found, quoted."""
        ...

    def quoted(self, name: str) -> str:
        """Return a name as an identifier in SQL."""
        ...

    def literal(self, text: str) -> str:
        """Return a text as a literal in SQL."""
        ...
