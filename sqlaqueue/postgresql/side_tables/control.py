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
from sqlaqueue.queue.portable import with_plain_form
from sqlaqueue.queue.spec import QueueSpec, clock

PAUSE: sa.ColumnElement[Any] = sa.cast(sa.literal_column("'[]'"), JSONB())
"""The key of the row that pauses a queue; no job has it."""

_LONGEST, _SHOWN = 2000, 100
"""The bytes of the longest key that a side table has as a whole, and the characters that it has of a longer one.

An entry of an index has 2,704 bytes at most, and that of a side table contains the name of the queue as well.
"""

_SHORT = (sa.Boolean, sa.Date, sa.DateTime, sa.Double, sa.Integer, sa.Interval, sa.Time, sa.Uuid)
"""Types whose values are never long. The statements of queues with such keys stay as simple as they are."""


def as_json(text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
    """Return JSON in a text as a value of a side table.

    SQLAlchemy cannot write a parameter of type JSONB as a literal, which some applications do to log statements.
    """
    return sa.cast(text, JSONB())


def key_json(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the key in ``columns`` as the JSON array that identifies a job in side tables.

    A key that is too long for their indexes, though the index of the primary key has it, is replaced by its beginning
    and a digest.
    """
    whole = _whole_key(columns)
    if all(isinstance(column.type, _SHORT) for column in columns):
        return whole
    text = sa.cast(whole, sa.Text())
    encoded = sa.func.convert_to(text, sa.func.getdatabaseencoding())
    digest = sa.func.encode(sa.func.sha256(encoded), _text("hex"), type_=sa.Text())
    short = sa.func.left(text, _integer(_SHOWN), type_=sa.Text()) + _text("... sha256:") + digest
    too_long = sa.func.octet_length(text, type_=sa.Integer()) > _integer(_LONGEST)
    replaced = sa.case((too_long, _whole_key([short])), else_=whole)
    return with_plain_form(replaced, lambda: whole)


def _whole_key(columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    return sa.func.jsonb_build_array(*columns, type_=JSONB())


def _text(text: str) -> sa.ColumnElement[str]:
    return sa.literal_column(f"'{text}'", sa.Text())


def _integer(number: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(number), sa.Integer())


def key_text(columns: Iterable[sa.ColumnElement[Any]]) -> sa.ColumnElement[str]:
    """Return the whole key as a text, in which two keys are never equal."""
    return sa.cast(_whole_key([*columns]), sa.Text())


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
