"""Facts for ``sqlaqueue doctor``: faults of a queue's objects with their repair, and what a server reports."""

from __future__ import annotations

from sqlaqueue.postgresql.diagnosis.altered import altered_objects
from sqlaqueue.postgresql.diagnosis.connections import announced_pid, backend_pid, connections, probe_backends
from sqlaqueue.postgresql.diagnosis.explain import explain
from sqlaqueue.postgresql.diagnosis.functions import function_faults, trigger_faults
from sqlaqueue.postgresql.diagnosis.horizon import horizon_holders
from sqlaqueue.postgresql.diagnosis.indexes import index_faults
from sqlaqueue.postgresql.diagnosis.keys import key_sequences
from sqlaqueue.postgresql.diagnosis.locks import blockers
from sqlaqueue.postgresql.diagnosis.missing import (
    missing_columns,
    missing_defaults,
    missing_tables,
    split_schemas,
)
from sqlaqueue.postgresql.diagnosis.plans import disabled_plans, on_shards, shard_column, whole_reads
from sqlaqueue.postgresql.diagnosis.refused import refused_states
from sqlaqueue.postgresql.diagnosis.relations import literal, quoted, table_name
from sqlaqueue.postgresql.diagnosis.server import notification_queue, server_state, server_time
from sqlaqueue.postgresql.diagnosis.sql import sql_text
from sqlaqueue.postgresql.diagnosis.tables import common_values, index_sizes, table_statistics
from sqlaqueue.postgresql.diagnosis.transaction import read_only

__all__ = [
    "altered_objects",
    "announced_pid",
    "backend_pid",
    "blockers",
    "common_values",
    "connections",
    "disabled_plans",
    "explain",
    "function_faults",
    "horizon_holders",
    "index_faults",
    "index_sizes",
    "key_sequences",
    "literal",
    "missing_columns",
    "missing_defaults",
    "missing_tables",
    "notification_queue",
    "on_shards",
    "probe_backends",
    "quoted",
    "read_only",
    "refused_states",
    "server_state",
    "server_time",
    "shard_column",
    "split_schemas",
    "sql_text",
    "table_name",
    "table_statistics",
    "trigger_faults",
    "whole_reads",
]
