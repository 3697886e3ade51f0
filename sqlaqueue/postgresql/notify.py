"""NOTIFY: the channel of a queue, and the function call that sends a payload."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.notify_payloads import Payload
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.spec import QueueSpec


def channel_of(spec: QueueSpec) -> str:
    """Return the channel on which a queue's Consumers listen."""
    return object_name("sqlaqueue", spec.table.fullname, spec.name)


def notification(spec: QueueSpec, payload: Payload | sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return the call that sends ``payload`` to the Consumers of a queue when the transaction commits."""
    text = payload if isinstance(payload, sa.ColumnElement) else str(payload)
    sent: sa.ColumnElement[str] = sa.func.pg_notify(channel_of(spec), text, type_=sa.Text())
    return sent
