"""The library's own tables, in the model's MetaData and schema, under names that begin with ``sqlaqueue_``.

* ``sqlaqueue_control`` stores cancellation requests for running jobs, and which queues are paused. A running row may be
  locked for as long as its handler runs, so the request cannot be written into it.
* ``sqlaqueue_crash_journal`` stores the batches that are about to run under strategies with a held transaction. When a
  worker dies, the database rolls its claim back; the journal still lists the jobs.
* ``sqlaqueue_consumer`` stores the Consumers that are alive, with their last heartbeat.
* ``sqlaqueue_dead_letter`` stores the jobs that failed for good in a queue whose claims delete rows.
* ``sqlaqueue_rate`` stores when the next job of each key of a rate may begin.
* ``sqlaqueue_attempt`` stores the ended attempts of queues with an attempt history.

None has a foreign key to the user's tables: a second connection would wait for the very rows that a batch has locked.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import conv

from sqlaqueue.queue.backend import ATTEMPT, CONSUMERS, CONTROL, CRASH_JOURNAL, DEAD_LETTER, RATE
from sqlaqueue.queue.spec import QueueSpec


def _table(spec: QueueSpec, name: str, *columns: sa.Column[Any] | sa.Index) -> sa.Table:
    metadata, schema = spec.table.metadata, spec.table.schema
    known = metadata.tables.get(f"{schema}.{name}" if schema else name)
    table = sa.Table(name, metadata, *columns, schema=schema or sa.BLANK_SCHEMA) if known is None else known
    spec.side_tables[name] = table
    return table


def _created_at() -> sa.Column[Any]:
    return sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now())


def control(spec: QueueSpec) -> sa.Table:
    """Return the table of requests, which is defined once in each MetaData and schema."""
    return _table(
        spec,
        CONTROL,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        _created_at(),
    )


def consumers(spec: QueueSpec) -> sa.Table:
    """Return the table of live Consumers, which is defined once in each MetaData and schema."""
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
        # With a server default for Consumers of an older version, which do not write these columns.
        sa.Column("claimed", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("unclaimable", JSONB(), nullable=False, server_default=sa.text("'[]'")),
        sa.Column("heartbeat_at", moment, nullable=False),
        sa.Column("expires_at", moment, nullable=False),
        _created_at(),
    )


def crash_journal(spec: QueueSpec) -> sa.Table:
    """Return the table of batches that are about to run, which is defined once in each MetaData and schema."""
    return _table(
        spec,
        CRASH_JOURNAL,
        sa.Column("id", sa.Uuid(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("keys", JSONB(), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text()),
        _created_at(),
    )


def dead_letter(spec: QueueSpec) -> sa.Table:
    """Return the table of jobs that failed for good, which is defined once in each MetaData and schema."""
    return _table(
        spec,
        DEAD_LETTER,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("key", JSONB(), primary_key=True),
        sa.Column("row", JSONB(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        _created_at(),
    )


def rate(spec: QueueSpec) -> sa.Table:
    """Return the table of rates, which is defined once in each MetaData and schema."""
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        RATE,
        sa.Column("queue", sa.Text(), primary_key=True),
        sa.Column("rate", sa.Text(), primary_key=True),
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("next_at", moment, nullable=False),
        sa.Column("throttled_until", moment),
    )


def attempt(spec: QueueSpec) -> sa.Table:
    """Return the table of ended attempts, which is defined once in each MetaData and schema.

    Each index costs WAL for every run, so there are two besides the primary key: one for the attempts of a job, which
    are few and sorted when they are read, and one for the retention and for queries of a span of time.
    """
    moment = sa.DateTime(timezone=True)
    return _table(
        spec,
        ATTEMPT,
        sa.Column("id", sa.BigInteger(), sa.Identity(), primary_key=True),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("key", JSONB(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", moment),
        sa.Column("ended_at", moment, nullable=False),
        sa.Column("worker", sa.Text()),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("traceback", sa.Text()),
        # Their names are not subject to a naming convention of the MetaData.
        sa.Index(conv(f"ix_{ATTEMPT}_job"), "queue", "key"),
        sa.Index(conv(f"ix_{ATTEMPT}_ended"), "queue", "ended_at"),
    )
