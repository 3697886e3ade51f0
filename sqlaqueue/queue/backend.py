"""What the library needs from the database beyond plain SQLAlchemy, as one protocol.

:func:`backend` returns its implementation, :mod:`sqlaqueue.postgresql`, which registers itself when :mod:`sqlaqueue` is
imported. That folder alone imports SQLAlchemy's PostgreSQL dialect. No other folder imports it, except
:mod:`sqlaqueue.alembic`, which writes PostgreSQL's DDL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.selectable import HasPrefixes, NamedFromClause
from sqlalchemy.types import TypeEngine

from sqlaqueue._typing import AnySelect
from sqlaqueue.notify_payloads import Payload
from sqlaqueue.queue.claims_protocol import Claims as Claims  # noqa: PLC0414 - an explicit export
from sqlaqueue.queue.diagnosis_protocol import Diagnosis as Diagnosis  # noqa: PLC0414 - as above
from sqlaqueue.queue.listing_protocol import Listing as Listing  # noqa: PLC0414 - as above
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege, Spec

CONTROL = "sqlaqueue_control"
"""The side table of cancellation requests, and of paused queues."""
CONSUMERS = "sqlaqueue_consumer"
"""The side table of Consumers that are alive."""
CRASH_JOURNAL = "sqlaqueue_crash_journal"
"""The side table of batches that are about to run in a held transaction."""
DEAD_LETTER = "sqlaqueue_dead_letter"
"""The side table of jobs that failed for good in a queue whose claims delete rows."""
ATTEMPT = "sqlaqueue_attempt"
"""The side table of ended attempts, of queues with ``QueueConfig(attempt_history=...)``."""
SCHEDULE = "sqlaqueue_schedule"
"""The table of schedules; it belongs to no queue, but to all of a MetaData and schema."""
TICK = "sqlaqueue_tick"
"""The table of the ticks that schedules have fired."""

RATE = "sqlaqueue_rate"
"""The side table of when the next job of each key of a rate may begin."""

BEGUN = "sqlaqueue_begun"
"""The parameter with the hash of the key of each job that begins, see ``backend().claims.reservation()``."""

TURN = "sqlaqueue_turn"
"""The column of the rows that a claim takes with their number, where keys take turns."""

Prefixed = TypeVar("Prefixed", bound=HasPrefixes)
Rows = Mapping[str, Any] | tuple[Sequence[str], AnySelect]


class ForeignKey(Protocol):
    """A foreign key in the database."""

    @property
    def name(self) -> str:
        """Its own name and that of its table."""
        ...

    @property
    def schema(self) -> str:
        """The schema of the table that has it."""
        ...

    @property
    def table(self) -> str:
        """The table that has it."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """The referring columns."""
        ...

    @property
    def referred(self) -> Sequence[str]:
        """The columns that they refer to."""
        ...

    @property
    def is_to_itself(self) -> bool:
        """Whether it refers to its own table."""
        ...


class Triggers(Protocol):
    """Database objects that are created and dropped with a queue's table."""

    def set_queue(self, table: sa.Table, spec: Spec) -> None:
        """Register the queue of a table."""
        ...

    def attach_wake_triggers(self, spec: Spec) -> None:
        """Attach the triggers that notify idle Consumers of pending jobs."""
        ...

    def attach_message_triggers(self, spec: Spec, messages: sa.Table) -> None:
        """Attach the triggers that keep a message table in step with the job table."""
        ...

    def attach_admission(self, flow: Any, rates: sa.Table | None) -> None:
        """Attach the functions and triggers of flow control; ``rates`` is the side table of rates, if any."""
        ...

    def wakes(self, spec: Spec) -> bool:
        """Return whether a queue's table has the triggers that wake idle Consumers."""
        ...


class SideTables(Protocol):
    """The library's own tables; the first six methods add one to the model's MetaData and ``spec.side_tables``."""

    PAUSE: sa.ColumnElement[Any]
    """The key of the row that pauses a queue; no job has it."""
    SCHEDULE_CHANNEL: str
    """The channel on which changes of schedules are announced."""

    def control(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above
    def consumers(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above
    def crash_journal(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above
    def dead_letter(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above
    def rate(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above
    def attempt(self, spec: Spec) -> sa.Table: ...  # noqa: D102 - as above

    def schedule_tables(self, metadata: sa.MetaData, schema: str | None) -> tuple[sa.Table, sa.Table]:
        """Return the tables of schedules and of ticks of a MetaData and schema."""
        ...

    def schedule_notification(self, payload: Payload) -> sa.ColumnElement[str]:
        """Return the call that sends ``payload`` to the processes that fire schedules."""
        ...

    def as_json(self, text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
        """Return JSON in a text as a value of a side table."""
        ...

    def key_json(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
        """Return the key in ``columns`` as side tables store it."""
        ...

    def key_text(self, columns: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]: ...  # noqa: D102 - the same as a text

    def pause(self, spec: Spec) -> sa.Insert:
        """Return the statement that pauses a queue."""
        ...

    def is_paused(self, spec: Spec) -> sa.ColumnElement[bool]:
        """Return the condition that a queue is paused."""
        ...

    def request_cancellation(self, spec: Spec, running: sa.FromClause) -> sa.Insert:
        """Return the statement that requests the cancellation of the jobs whose keys are in ``running``."""
        ...

    def bury(self, spec: Spec, rows: NamedFromClause, state: str, error: Any) -> sa.Insert:
        """Return the statement that stores rows of the model's table as dead letters."""
        ...

    def stored_rows(self, row: sa.ColumnElement[Any], columns: Sequence[sa.Column[Any]]) -> sa.TableValuedAlias:
        """Return the stored row of each dead letter, in its column ``row``, as a table, to be joined on true."""
        ...


class Checks(Protocol):
    """What the database lacks for a queue."""

    UPDATE_COMMAND: str
    """The command that migrates a database."""

    def check_complete(self, session: Any, spec: Spec) -> None:
        """Raise DatabaseNotReadyError if the database lacks tables, columns or triggers of a queue."""
        ...

    def check_tables(self, session: Any, tables: Sequence[sa.Table], needed_by: str) -> None:
        """Raise DatabaseNotReadyError if the database lacks tables or columns of them."""
        ...

    def outdated_triggers_of(self, session: Any, table: sa.Table, needed_by: str) -> str | None:
        """Return what is wrong with the triggers of a table, and how to fix it."""
        ...

    def grants_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
        """Return the GRANTs for those of the required privileges that the role lacks."""
        ...

    def policies_for(self, connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
        """Return the row-level security policies that the role lacks for the required privileges."""
        ...

    def split_schemas(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong if a queue's tables are in different schemas, or on the wrong nodes of a cluster."""
        ...

    def outdated_triggers(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong with a queue's triggers, and how to fix it."""
        ...

    def outdated_functions(self, session: Any, spec: Spec) -> str | None:
        """Return what is wrong with the functions that a queue's statements call, and how to fix it."""
        ...

    def undefined_object_advice(self, error: BaseException, spec: Spec) -> str | None:
        """Return how to fix an error about a table or a column that does not exist."""
        ...

    def missing_indexes(self, session: Any, spec: Spec) -> list[sa.Index]:
        """Return the indexes of claims and rescues, and of unique jobs, that the database lacks."""
        ...

    def missing_index_advice(self, session: Any, spec: Spec) -> str | None:
        """Return how to create the indexes that are missing."""
        ...

    def has_index(self, connection: sa.Connection, table: sa.Table, name: str) -> bool:
        """Return whether a table has a valid index of this name."""
        ...

    def foreign_keys_to(self, connection: sa.Connection, table: sa.Table) -> Iterable[ForeignKey]:
        """Return the foreign keys under which a row cannot be deleted while other rows refer to it."""
        ...

    def missing_schema_grants(self, connection: sa.Connection, spec: Spec) -> list[str]:
        """Return the GRANTs for schemas that the role lacks."""
        ...

    def missing_grants(self, connection: sa.Connection, spec: Spec) -> list[str]:
        """Return the GRANTs for tables and sequences that the role lacks."""
        ...

    def row_security(self, connection: sa.Connection, spec: Spec) -> tuple[list[str], str | None]:
        """Return the row-level security policies that the role lacks, and a warning if others hide every row."""
        ...

    def held_slots(self) -> sa.FromClause:
        """Return the slots that transactions hold under held strategies: ``slot``, and ``number`` of transactions."""
        ...

    def slot_of(self, key: Any, hashed: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        """Return the slot in :meth:`held_slots` of a key of a limit or an order, from its hash."""
        ...

    def sees_all(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Return the condition that row-level security hides no row of a table from the role."""
        ...


class Backend(Protocol):
    """The database. Its statements are SQLAlchemy constructs; it keeps no connection."""

    @property
    def dialect(self) -> sa.Dialect:
        """Renders SQL that is kept as text, with no driver's escapes."""
        ...

    @property
    def claims(self) -> Claims: ...  # noqa: D102 - the class says it
    @property
    def triggers(self) -> Triggers: ...  # noqa: D102 - as above
    @property
    def side_tables(self) -> SideTables: ...  # noqa: D102 - as above
    @property
    def checks(self) -> Checks: ...  # noqa: D102 - as above
    @property
    def diagnosis(self) -> Diagnosis: ...  # noqa: D102 - as above
    @property
    def listing(self) -> Listing: ...  # noqa: D102 - as above

    def check_dialect(self, dialect: sa.Dialect, what: str) -> None:
        """Raise ConfigurationError for an engine of another database.

        :param what: the user of the engine, for the error's text.
        """
        ...

    def guarded(self, statement: Prefixed) -> Prefixed:
        """Return ``statement`` with a marker that refuses its execution on another database."""
        ...

    def channel_of(self, spec: Spec) -> str:
        """Return the channel on which a queue's Consumers listen."""
        ...

    def notification(self, spec: Spec, payload: Payload | sa.ColumnElement[str]) -> sa.ColumnElement[str]:
        """Return the call that sends ``payload`` to a queue's Consumers when the transaction commits."""
        ...

    def object_name(self, *parts: str) -> str:
        """Return ``parts`` as one identifier, cut to the length that the database allows."""
        ...

    def key_array(self, element: TypeEngine[Any]) -> TypeEngine[Any]:
        """Return the type of an array of keys, for ``key = ANY(array)``."""
        ...

    def key_hash(self, columns: Sequence[sa.ColumnElement[Any]], only: Any = None) -> sa.ColumnElement[int]:
        """Return a 64-bit hash of a key, or NULL for rows that do not meet ``only``, for an index and statements."""
        ...

    def session_setting(self, name: str) -> sa.ColumnElement[Any]:
        """Return a setting of the transaction or session as a text, NULL if it is not set."""
        ...

    def period(self, length: timedelta, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Return the beginning of the period to which ``moment`` belongs, for an index and for statements."""
        ...

    def numbered_rows(
        self, columns: Mapping[str, tuple[TypeEngine[Any], Sequence[Any] | None]], number: str
    ) -> sa.TableValuedAlias:
        """Return given values as a table.

        :param columns: the name of each column with its type and its values; None for a parameter of the same name,
            whose values are given when the statement is executed.
        :param number: the name of the column with the number of each row, from 1.
        """
        ...

    def insert_or_ignore(self, table: sa.Table, rows: Rows) -> sa.Insert:
        """Return an INSERT that leaves rows of the same primary key as they are."""
        ...

    def insert_unless(
        self,
        table: sa.Table,
        rows: Rows | None,
        *,
        unique: Sequence[sa.ColumnElement[Any]],
        where: sa.ColumnElement[bool] | None,
    ) -> sa.Insert:
        """Return an INSERT that inserts no row whose values in a unique index exist already.

        :param rows: None for values that are given when it is executed.
        :param unique: the expressions of the index.
        :param where: its predicate.
        """
        ...

    def insert_or_replace(
        self, table: sa.Table, rows: Rows, *, replaced: Sequence[str] = (), raised: Sequence[str] = ()
    ) -> sa.Insert:
        """Return an INSERT that writes the columns ``replaced`` of rows of the same key."""
        ...

    def sqlstate(self, error: DBAPIError) -> str | None:
        """Return the SQLSTATE of an error that the server raised; None for any other error."""
        ...

    def violated_constraint(self, error: DBAPIError) -> str | None:
        """Return the name of the constraint or unique index that a statement has violated; None for other errors."""
        ...

    def violated_column(self, error: DBAPIError) -> str | None:
        """Return the name of the column that a statement has set to NULL and that may not be; None for other errors."""
        ...

    def violated_table(self, error: DBAPIError) -> str | None:
        """Return the name of the table whose constraint was violated, by a statement or at a commit; None otherwise."""
        ...


_registered: list[Backend] = []


def register_backend(implementation: Backend) -> None:
    """Make ``implementation`` the one that :func:`backend` returns. Importing :mod:`sqlaqueue` registers PostgreSQL."""
    _registered[:] = [implementation]


def backend() -> Backend:
    """Return the database's implementation."""
    return _registered[0]
