"""Pausing a queue, and cancellation requests for running jobs: rows of ``sqlaqueue_control``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.ddl.wake_triggers import wakes
from sqlaqueue.postgresql.inserts import insert_or_ignore, insert_or_replace
from sqlaqueue.postgresql.notify import notification
from sqlaqueue.queue.backend import CONTROL
from sqlaqueue.queue.spec import QueueSpec, clock

PAUSE: sa.ColumnElement[Any] = sa.cast(sa.literal_column("'[]'"), JSONB())
"""The key of the row that pauses a queue; no job has it."""


def as_json(text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return JSON in a text as a value of a side table.

    SQLAlchemy cannot write a parameter of type JSONB as a literal, which some applications do to log statements.
    """
    return sa.cast(text, JSONB())


def key_json(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the key in ``columns`` as the JSON array that identifies a job in side tables."""
    return sa.func.jsonb_build_array(*columns, type_=JSONB())


def key_text(columns: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]:
    """Return the same as a text, in which two keys are never equal."""
    return sa.cast(key_json([*columns]), sa.Text())


def pause(spec: QueueSpec) -> sa.Insert:
    """Return the statement that pauses a queue."""
    return insert_or_ignore(spec.side_tables[CONTROL], {"queue": spec.name, "key": PAUSE, "created_at": clock()})


def is_paused(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a queue is paused. It names no column of the job, so it runs once a statement."""
    table = spec.side_tables[CONTROL]
    paused = sa.and_(table.c.queue == spec.name, table.c.key == PAUSE)
    return sa.exists(sa.select(sa.literal_column("1")).select_from(table).where(paused).correlate(None))


def request_cancellation(spec: QueueSpec, running: sa.FromClause) -> sa.Insert:
    """Return the statement that requests the cancellation of the jobs whose keys are in ``running``."""
    keys = [running.corresponding_column(column) for column in spec.keys]
    rows = sa.select(sa.literal(spec.name), key_json([key for key in keys if key is not None]), clock())
    requested = insert_or_replace(
        spec.side_tables[CONTROL],
        (["queue", "key", "created_at"], rows.select_from(running)),
        replaced=["created_at"],
    )
    return requested.returning(notification(spec, Signal.CANCEL_REQUESTED)) if wakes(spec) else requested
