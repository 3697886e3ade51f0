"""What :mod:`sqlaqueue.admin.diagnosis` needs from the database, a part of :mod:`sqlaqueue.queue.backend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

import sqlalchemy as sa

from sqlaqueue.queue.executed_plan import StatementPlan
from sqlaqueue.queue.server_facts import Blocker, OpenTransaction, ServerFacts
from sqlaqueue.queue.strategy_protocol import Spec


@dataclass(frozen=True, kw_only=True)
class MissingObject:
    """A table or a column that the database lacks."""

    name: str
    """With its schema or its table, quoted."""
    create: str
    """The SQL that creates it, one statement a line."""
    hint: str = ""
    """Where else a table of this name is."""


@dataclass(frozen=True, kw_only=True)
class IndexFault:
    """An index of a queue that is not as the model declares it."""

    state: Literal["missing", "invalid", "building", "altered", "leftover"]
    name: str
    table: str
    repair: str
    """SQL, one statement a line."""
    is_of_claims: bool = False
    is_unique: bool = False
    found: str = ""
    """How an altered index is defined."""
    wanted: str = ""
    """How the model declares it."""
    is_of_queue: bool = True
    """Whether this library has added it; otherwise it is the application's own."""
    waits_for: OpenTransaction | None = None
    """The session whose transaction has to end before the building of the index goes on."""


@dataclass(frozen=True, kw_only=True)
class MissingDefault:
    """A column without the DEFAULT that the model declares."""

    name: str
    """With its table, quoted."""
    is_of_queue: bool
    """Whether this library has added the column; otherwise it is the application's own."""
    repair: str


@dataclass(frozen=True, kw_only=True)
class RefusedState:
    """A state of jobs whose status value the database refuses."""

    state: str
    by: str
    """What refuses it, such as ``the CHECK constraint c``."""
    repair: str
    """SQL, one statement a line; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class TriggerFault:
    """A trigger that does not fire."""

    state: Literal["missing", "disabled"]
    name: str
    table: str
    wakes: bool
    """Whether it only wakes idle Consumers."""
    repair: str


@dataclass(frozen=True, kw_only=True)
class FunctionFault:
    """A function that is missing, or of another version."""

    state: Literal["missing", "outdated", "newer"]
    kind: str
    """What messages call it."""
    name: str
    found: int
    """The version in the database."""
    wanted: int
    wakes: bool
    """Whether its triggers only wake idle Consumers."""
    repair: str


@dataclass(frozen=True, kw_only=True)
class AlteredObject:
    """A trigger or function that is there, in the right version, and not as the model declares it."""

    kind: str
    """What messages call it."""
    name: str
    table: str
    """The table of a trigger; empty for a function."""
    wakes: bool
    """Whether it only wakes idle Consumers."""
    repair: str


@dataclass(frozen=True, kw_only=True)
class SplitSchemas:
    """The search path finds the tables of a queue in several schemas."""

    home: str
    """The schema of the jobs."""
    others: Sequence[str]
    """The tables elsewhere, each with its schema."""
    repair: str


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


class Diagnosis(ServerFacts, Protocol):
    """Facts for the doctor. Each function sends a few short statements that change nothing."""

    def sql_text(self, connection: sa.Connection, statement: Any) -> str:
        """Return a statement as text with its values, which ends with a semicolon."""
        ...

    def read_only(self, connection: sa.Connection, *, statement_timeout: str, lock_timeout: str) -> None:
        """Make the transaction read-only and limit its statements, until the savepoint is rolled back.

        :param statement_timeout: milliseconds, as a text.
        :param lock_timeout: the same.
        """
        ...

    def missing_tables(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[MissingObject]:
        """Return the tables that do not exist."""
        ...

    def missing_columns(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[MissingObject]:
        """Return the columns that do not exist."""
        ...

    def missing_defaults(self, connection: sa.Connection, spec: Spec) -> Sequence[MissingDefault]:
        """Return the columns without the DEFAULT that the model declares."""
        ...

    def refused_states(self, connection: sa.Connection, spec: Spec) -> Sequence[RefusedState]:
        """Return the states that a constraint or the type of the status column refuses."""
        ...

    def index_faults(self, connection: sa.Connection, spec: Spec) -> Sequence[IndexFault]:
        """Return the indexes of a queue that are missing, invalid or altered, and those that are left over."""
        ...

    def trigger_faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[TriggerFault]:
        """Return the triggers that are missing or disabled."""
        ...

    def function_faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[FunctionFault]:
        """Return the functions that are missing or of another version."""
        ...

    def blockers(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[Blocker]:
        """Return the sessions that hold locks of tables for which others wait; those that wait are left out."""
        ...

    def altered_objects(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> Sequence[AlteredObject]:
        """Return the triggers and functions that are not as the model declares them; versions are not compared."""
        ...

    def split_schemas(self, connection: sa.Connection, spec: Spec) -> SplitSchemas | None:
        """Return the schemas in which the search path finds a queue's tables, if there are several."""
        ...

    def on_shards(self, connection: sa.Connection, spec: Spec) -> bool:
        """Return whether the rows of a queue are on shards, of which this server knows neither plans nor statistics."""
        ...

    def shard_column(self, connection: sa.Connection, spec: Spec) -> sa.Column[Any] | None:
        """Return the column of the key that distributes a queue's rows over shards; None if none does."""
        ...

    def whole_reads(self, connection: sa.Connection, claim: Any, tables: Sequence[sa.Table]) -> Sequence[TableRead]:
        """Return which of the tables a claim would read or sort whole, by its plan; nothing is executed."""
        ...

    def explain(self, connection: sa.Connection, statement: Any, *, execute: bool = False) -> StatementPlan:
        """Return the plan of a statement.

        :param execute: whether to execute it as well. The caller rolls back what it changes.
        """
        ...

    def disabled_plans(self, connection: sa.Connection) -> Sequence[PlannerSetting]:
        """Return the settings that keep the planner from using indexes."""
        ...
