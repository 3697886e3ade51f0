"""Claims on PostgreSQL: where a scan begins, which plan the server makes for it, and when jobs are due."""

from __future__ import annotations

from sqlaqueue.postgresql.claims.claim_scan import by_priority, cursor_at, from_cursor
from sqlaqueue.postgresql.claims.contention import was_contended
from sqlaqueue.postgresql.claims.due_times import due_keys, due_since, upcoming_times
from sqlaqueue.postgresql.claims.planner import FEW, planned_anew, planned_anew_for_many
from sqlaqueue.postgresql.claims.reserve import reservation
from sqlaqueue.postgresql.claims.take import take
from sqlaqueue.postgresql.claims.transactions import row_version, transaction_id, was_committed, written_here

__all__ = [
    "FEW",
    "by_priority",
    "cursor_at",
    "due_keys",
    "due_since",
    "from_cursor",
    "planned_anew",
    "planned_anew_for_many",
    "reservation",
    "row_version",
    "take",
    "transaction_id",
    "upcoming_times",
    "was_committed",
    "was_contended",
    "written_here",
]
