"""The database objects of a queue beside its tables: trigger functions, triggers and storage parameters."""

from __future__ import annotations

from sqlaqueue.postgresql.ddl import rendering as rendering
from sqlaqueue.postgresql.ddl.attach import objects_of, queue_of, set_queue
from sqlaqueue.postgresql.ddl.message_triggers import attach_message_triggers
from sqlaqueue.postgresql.ddl.wake_triggers import attach_wake_triggers, wakes

__all__ = [
    "attach_message_triggers",
    "attach_wake_triggers",
    "objects_of",
    "queue_of",
    "set_queue",
    "wakes",
]
