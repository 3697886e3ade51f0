"""What is read from a live server: facts about it, about a queue's tables, and about plans.

They say what the server reports, not whether that is good or bad. Names of tables and indexes are quoted and have their
schema, so that they can be pasted into SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Severity = Literal["critical", "warning", "notice"]
"""``critical``: jobs do not run, are lost or run twice, now or soon. ``warning``: the queue is slower than it should
be, or will be critical if nothing is done. ``notice``: worth knowing."""


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
        return self.state is None and self.since is None


@dataclass(frozen=True, kw_only=True)
class Blocker:
    session: OpenTransaction
    waiting: int
    """How many sessions wait."""
    seconds: float
    """For how long the first of them has waited."""
    tables: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PreparedTransaction:
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
    """The age of the oldest one whose rows it keeps in the system catalogs."""
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
    name: str
    value: str
    source: str
    """Where it was set, as in pg_settings: ``configuration file``, ``database``, ``user`` ..."""


@dataclass(frozen=True, kw_only=True)
class ServerState:
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


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """How many pages of 8 kB a statement, or a part of its plan, has used."""

    hit: int = 0
    """Found in the server's memory."""
    read: int = 0
    """Read from the operating system or the disk."""
    dirtied: int = 0
    """Changed for the first time since they were written."""
    written: int = 0
    """Written, since memory was needed for other pages."""

    @property
    def used(self) -> int:
        return self.hit + self.read


@dataclass(frozen=True, kw_only=True)
class PlanNode:
    """A step of a plan, with the steps from which it receives rows."""

    kind: str
    """Such as ``Index Scan``."""
    relation: str | None
    """The table that it reads or changes, without its schema."""
    index: str | None
    name: str
    """The name of the subplan or CTE that it belongs to; empty for none."""
    condition: str
    """By which entries of an index are found, or rows are joined; empty for none."""
    filtered: str
    """By which rows are left out after they were read; empty for none."""
    planned_rows: float
    """How many rows the planner expects, for each loop."""
    rows: float | None
    """How many rows it has returned, for each loop; None if the plan was not executed."""
    loops: float | None
    """How often it was executed; None if the plan was not."""
    removed: float
    """How many rows the filter has left out, for each loop."""
    milliseconds: float | None
    """For how long it ran, with the steps below, in all loops; None if the plan was not executed."""
    buffers: Buffers
    """With those of the steps below."""
    parts: Sequence[PlanNode]

    def nodes(self) -> Iterator[PlanNode]:
        yield self
        for part in self.parts:
            yield from part.nodes()


@dataclass(frozen=True, kw_only=True)
class StatementPlan:
    sql: str
    """The statement, with its values."""
    root: PlanNode
    planning_milliseconds: float | None
    """None if the plan was not executed."""
    execution_milliseconds: float | None
    """None if the plan was not executed."""


@dataclass(frozen=True, kw_only=True)
class TableRead:
    """A table of which a claim reads or sorts all rows."""

    how: Literal["scan", "sort"]
    table: str
    rows: int
    """About how many rows it has."""
    analyzed_at: datetime | None
    """When its statistics were made; None for never."""
    changed: int
    """How many of its rows were written since."""


@dataclass(frozen=True, kw_only=True)
class PlannerSetting:
    """A planner method that is switched off for this session."""

    name: str
    repair: str
    """The SQL that removes it where it is set; empty for a setting of the session."""


Form = Literal["short", "text", "bytes", "moment", "large"]
"""How a value becomes a text: ``short`` for values that are never long, ``moment`` for dates and times, ``large`` for
values that have to be read whole to be converted."""


@dataclass(frozen=True, kw_only=True)
class OrderedIndex:
    """A valid index whose entries are in order."""

    name: str
    columns: Sequence[str]
    """The names of its first columns, as far as these are columns in their default order, not expressions."""
    is_whole: bool
    """Whether these are all of its columns."""
    descending: Sequence[bool]
    """Whether each column is in descending order."""
    nulls_first: Sequence[bool]
    """Whether nulls come first in each column."""
    nullable: Sequence[bool]
    """Whether each column may be null."""
    is_unique: bool
    is_partial: bool
