"""The library's own tables, kept in the model's MetaData and schema under names that begin ``sqlaqueue_``.

* ``sqlaqueue_control`` holds requests to running jobs, and which queues pause. A running row may be locked for as long
  as its handler runs, so a request cannot be written into it.
* ``sqlaqueue_crash_journal`` holds the batches that strategies with a held transaction are about to run. When a worker
  dies, the database forgets its claim; the ledger remembers whom it was holding.
* ``sqlaqueue_consumer`` holds the Consumers that are alive: they check in now and then.
* ``sqlaqueue_dead_letter`` holds what failed for good in a queue whose rows are deleted by the claim.

None of them refers to the user's tables: a foreign key from a second connection would wait for the very
rows that the batch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import JSONB

from sqlaqueue.payloads import Payload, Signal
from sqlaqueue.postgresql.wake_triggers import channel_of, wakes
from sqlaqueue.queue.spec import QueueSpec, clock

CONTROL = "sqlaqueue_control"
CONSUMERS = "sqlaqueue_consumer"
CRASH_JOURNAL = "sqlaqueue_crash_journal"
DEAD_LETTER = "sqlaqueue_dead_letter"

PAUSE: sa.ColumnElement[Any] = sa.cast(sa.literal_column("'[]'"), JSONB())
"""The key in the table of requests that no job has: the whole queue is to pause."""


def _table(spec: QueueSpec, name: str, *columns: sa.Column[Any]) -> sa.Table:
    metadata, schema = spec.table.metadata, spec.table.schema
    known = metadata.tables.get(f"{schema}.{name}" if schema else name)
    table = sa.Table(name, metadata, *columns, schema=schema or sa.BLANK_SCHEMA) if known is None else known
    spec.side_tables[name] = table
    return table


def _now() -> sa.Column[Any]:
    return sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now())


def control(spec: QueueSpec) -> sa.Table:
    """Return the table of requests, made on first use in this MetaData and schema."""
    return _table(
        spec,
        CONTROL,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        _now(),
    )


def consumers(spec: QueueSpec) -> sa.Table:
    """Return the table of the Consumers that are alive, made on first use in this MetaData and schema."""
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        CONSUMERS,
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("listening", sa.Boolean(), nullable=False),
        sa.Column("running", JSONB(), nullable=False),
        # With a default, for Consumers of before this column that are still at work when it is added.
        sa.Column("claimed", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("heartbeat_at", moment, nullable=False),
        sa.Column("expires_at", moment, nullable=False),
        _now(),
    )


def crash_journal(spec: QueueSpec) -> sa.Table:
    """Return the table of batches that are about to run, made on first use in this MetaData and schema."""
    return _table(
        spec,
        CRASH_JOURNAL,
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("keys", JSONB(), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text()),
        _now(),
    )


def dead_letter(spec: QueueSpec) -> sa.Table:
    """Return the table of rows that failed for good, made on first use in this MetaData and schema."""
    return _table(
        spec,
        DEAD_LETTER,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        sa.Column("row", JSONB(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        _now(),
    )


def as_json(text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return a text with JSON in it as a value of a side table.

    A parameter of the type JSONB cannot be written as a literal, which is how some applications log what their sessions
    execute.
    """
    return sa.cast(text, JSONB())


def key_json(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the key in ``columns`` as the JSON array by which side tables know a job."""
    return sa.func.jsonb_build_array(*columns, type_=JSONB())


def request_cancellation(spec: QueueSpec, running: sa.FromClause) -> sa.Insert:
    """Return the statement that asks the jobs whose keys are in ``running`` to stop."""
    table = spec.side_tables[CONTROL]
    keys = [running.corresponding_column(column) for column in spec.keys]
    rows = sa.select(sa.literal(spec.name), key_json([key for key in keys if key is not None]), clock())
    insert = postgresql.insert(table).from_select(["queue", "key", "created_at"], rows.select_from(running))
    asked = insert.on_conflict_do_update(
        index_elements=[table.c.queue, table.c.key],
        set_={"created_at": insert.excluded.created_at},
    )
    return asked.returning(notification(spec, Signal.CANCEL_REQUESTED)) if wakes(spec) else asked


def notification(spec: QueueSpec, payload: Payload | sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return the function call that notifies the Consumers of a queue when the transaction commits."""
    text = payload if isinstance(payload, sa.ColumnElement) else str(payload)
    notify: sa.ColumnElement[str] = sa.func.pg_notify(channel_of(spec), text, type_=sa.Text())
    return notify


def is_paused(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a queue is paused; it names no column of the job, so it is asked once a statement."""
    table = spec.side_tables[CONTROL]
    here = sa.and_(table.c.queue == spec.name, table.c.key == PAUSE)
    return sa.exists(sa.select(sa.literal_column("1")).select_from(table).where(here).correlate(None))
