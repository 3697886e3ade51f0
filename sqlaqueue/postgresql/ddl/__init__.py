"""The database objects of a queue beside its tables: functions, triggers and storage parameters."""

from __future__ import annotations

from sqlaqueue.postgresql.ddl import rendering as rendering
from sqlaqueue.postgresql.ddl.admission import attach_admission
from sqlaqueue.postgresql.ddl.attach import attach, called_functions, objects_of, queue_of, set_queue
from sqlaqueue.postgresql.ddl.message_triggers import attach_message_triggers
from sqlaqueue.postgresql.ddl.objects import Function, version_comment
from sqlaqueue.postgresql.ddl.wake_triggers import attach_wake_triggers, wakes

__all__ = [
    "Function",
    "attach",
    "attach_admission",
    "attach_message_triggers",
    "attach_wake_triggers",
    "called_functions",
    "objects_of",
    "queue_of",
    "set_queue",
    "version_comment",
    "wakes",
]
