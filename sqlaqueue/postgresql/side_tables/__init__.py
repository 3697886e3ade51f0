"""The library's own tables and the statements on them that only PostgreSQL has."""

from __future__ import annotations

from sqlaqueue.postgresql.side_tables.control import (
    PAUSE,
    as_json,
    is_paused,
    key_json,
    key_text,
    pause,
    request_cancellation,
)
from sqlaqueue.postgresql.side_tables.dead_letters import bury, stored_rows
from sqlaqueue.postgresql.side_tables.schedules import SCHEDULE_CHANNEL, schedule_notification, schedule_tables
from sqlaqueue.postgresql.side_tables.tables import attempt, consumers, control, crash_journal, dead_letter, rate

__all__ = [
    "PAUSE",
    "SCHEDULE_CHANNEL",
    "as_json",
    "attempt",
    "bury",
    "consumers",
    "control",
    "crash_journal",
    "dead_letter",
    "is_paused",
    "key_json",
    "key_text",
    "pause",
    "rate",
    "request_cancellation",
    "schedule_notification",
    "schedule_tables",
    "stored_rows",
]
