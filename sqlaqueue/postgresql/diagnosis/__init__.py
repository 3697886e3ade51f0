"""Reads what a live server reports about itself: statistics, settings, sessions and locks, for ``sqlaqueue doctor``."""

from __future__ import annotations

from sqlaqueue.postgresql.diagnosis.connections import announced_pid, backend_pid, connections, probe_backends
from sqlaqueue.postgresql.diagnosis.horizon import horizon_holders
from sqlaqueue.postgresql.diagnosis.keys import key_sequences
from sqlaqueue.postgresql.diagnosis.relations import literal, quoted, table_name
from sqlaqueue.postgresql.diagnosis.server import notification_queue, server_state, server_time
from sqlaqueue.postgresql.diagnosis.tables import common_values, index_sizes, table_statistics

__all__ = [
    "announced_pid",
    "backend_pid",
    "common_values",
    "connections",
    "horizon_holders",
    "index_sizes",
    "key_sequences",
    "literal",
    "notification_queue",
    "probe_backends",
    "quoted",
    "server_state",
    "server_time",
    "table_name",
    "table_statistics",
]
