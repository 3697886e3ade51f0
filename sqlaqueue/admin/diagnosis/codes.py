"""What the doctor may find: the code of each finding, and how severe it can be."""

from __future__ import annotations

from collections.abc import Mapping

from sqlaqueue.admin.diagnosis.finding import Severity

CODES: Mapping[str, tuple[Severity, ...]] = {
    # The examination itself.
    "check_failed": ("notice",),
    "on_shards": ("notice",),
    # The server.
    "old_server": ("critical",),
    "server_in_recovery": ("critical",),
    "read_only_default": ("critical",),
    "fsync_off": ("critical",),
    "full_page_writes_off": ("critical",),
    "synchronous_commit_off": ("notice",),
    "small_lock_table": ("notice",),
    "notification_queue_full": ("critical", "warning"),
    "clock_difference": ("critical", "warning"),
    "keys_run_out": ("critical", "warning"),
    # Connections.
    "connections_used": ("warning",),
    "small_pool": ("notice",),
    "transaction_pooler": ("warning", "notice"),
    # What blocks the tables.
    "blocked_table": ("critical",),
    # What keeps dead rows.
    "idle_in_transaction": ("warning",),
    "long_transaction": ("warning",),
    "prepared_transaction": ("warning",),
    "replication_slot": ("warning",),
    "standby_feedback": ("warning",),
    "hidden_sessions": ("notice",),
    # Autovacuum and statistics.
    "track_counts_off": ("warning",),
    "autovacuum_off": ("warning",),
    "autovacuum_disabled": ("warning",),
    "dead_rows": ("warning",),
    "stale_statistics": ("warning",),
    "status_statistics": ("warning",),
    "index_bloat": ("notice",),
    "wraparound": ("critical", "warning"),
    # Objects of the database.
    "missing_table": ("critical",),
    "missing_column": ("critical",),
    "missing_default": ("critical", "warning"),
    "refused_status": ("critical", "warning"),
    "split_schemas": ("critical",),
    "missing_index": ("critical", "warning"),
    "invalid_index": ("critical", "warning"),
    "altered_index": ("critical", "warning"),
    "index_building": ("warning", "notice"),
    "leftover_index": ("warning",),
    "missing_trigger": ("critical", "warning"),
    "disabled_trigger": ("critical", "warning"),
    "altered_trigger": ("critical", "warning"),
    "missing_function": ("critical", "warning"),
    "outdated_function": ("warning",),
    "newer_function": ("warning",),
    "altered_function": ("critical", "warning"),
    # Rights of the session's role.
    "missing_schema_grant": ("critical",),
    "missing_grant": ("critical",),
    "missing_policy": ("critical",),
    "hidden_rows": ("warning",),
    # Claims.
    "claim_reads_table": ("critical", "warning"),
    # Leases.
    "expired_leases": ("critical",),
    "runs_without_lease": ("critical",),
    # Consumers and jobs.
    "no_consumer": ("critical",),
    "paused": ("warning",),
    "backlog": ("warning",),
    "unclaimable_jobs": ("critical", "warning"),
    "not_listening": ("warning",),
    "other_version": ("notice",),
    "old_journal_entries": ("notice",),
    "old_cancellations": ("notice",),
    "jobs_without_message": ("critical",),
    "messages_without_job": ("warning",),
    "unknown_status": ("warning",),
    # Schedules.
    "late_schedule": ("critical",),
    "schedule_error": ("critical",),
    "unserved_schedule": ("notice",),
}
"""By the code, the severities that a finding with it may have, the worst first."""
