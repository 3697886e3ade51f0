"""From which values on something is a finding: :class:`Thresholds`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits of an examination; each check names those that it uses."""

    statement_timeout: timedelta = timedelta(seconds=5)
    """The longest time for one statement of the examination."""
    lock_timeout: timedelta = timedelta(milliseconds=500)
    """For how long a statement of the examination waits for a lock."""
    blocked_for: timedelta = timedelta(seconds=5)
    """For how long a session has to have waited for a lock of a queue's table."""
    small_table: int = 1000
    """Number of rows up to which a claim may read a whole table."""
    lease_expired_for: timedelta = timedelta(seconds=30)
    """How long ago a lease must have expired; Consumers rescue within a few seconds."""
    unserved_for: timedelta = timedelta(seconds=30)
    """For how long the oldest job of a queue without live Consumers must have been due."""
    oldest_due: timedelta = timedelta(minutes=5)
    """For how long the oldest job of a queue with live Consumers must have been due."""
    not_listening_for: timedelta = timedelta(minutes=1)
    """How long ago a Consumer that receives no notifications must have started."""
    leftover_age: timedelta = timedelta(hours=25)
    """The age from which on entries of the crash journal, and requests to cancel jobs, are left over. Consumers delete
    those of more than a day."""

    transaction_open: timedelta = timedelta(minutes=5)
    """For how long a transaction, prepared or not, may keep dead rows."""
    horizon_age: int = 100_000
    """For how many later transactions a session, a slot or a standby may keep dead rows."""
    slot_inactive: timedelta = timedelta(hours=1)
    """For how long a slot that keeps dead rows may have no client; known from PostgreSQL 17 on."""

    dead_rows: int = 10_000
    """How many dead rows a table may have, however small its threshold of autovacuum."""
    dead_rows_factor: float = 2.0
    """How many times the dead rows at which autovacuum begins a table may have."""
    dead_rows_kept: int = 100_000
    """How many dead rows a table may have soon after a VACUUM."""
    vacuum_overdue: timedelta = timedelta(minutes=5)
    """How long ago the last VACUUM of a table with too many dead rows may be."""
    changed_rows: int = 10_000
    """How many rows may have changed since the last ANALYZE, however small the table."""
    changed_share: float = 0.5
    """The same as a share of the rows that the table had then."""
    row_count_factor: float = 10.0
    """How many times more or fewer rows a table may have than the planner expects."""
    analyze_overdue: timedelta = timedelta(minutes=10)
    """How long ago the last ANALYZE of a table with too many changed rows may be."""
    new_table_rows: int = 100_000
    """How many dead or changed rows a table may have before its first VACUUM or ANALYZE: it may have been created since
    autovacuum last looked."""
    freeze_factor: float = 1.5
    """How many times the age at which autovacuum freezes a table its oldest transaction id may have."""
    freeze_critical: int = 1_600_000_000
    """The age of the oldest transaction id that is critical; at 2.1 billion the server refuses to write."""
    index_bloat_factor: float = 10.0
    """How many times the size that its entries need a claim index may have."""
    index_bloat_size: int = 64 * 1024 * 1024
    """The bytes that a claim index may have in any case."""

    clock_difference: timedelta = timedelta(seconds=2)
    """How much the clock of this machine may differ from the server's."""
    clock_difference_critical: timedelta = timedelta(minutes=1)
    """The same for a critical finding."""
    notification_queue: float = 0.5
    """Which share of the notification queue may be in use."""
    notification_queue_critical: float = 0.9
    """The same for a critical finding."""
    oldest_server: int = 15
    """The oldest major version of PostgreSQL."""
    claims_at_once: int = 10
    """How many claims of a full batch must fit into the server's lock table."""

    keys_used: float = 0.7
    """Which share of the numbers of an integer key may be used."""
    keys_used_critical: float = 0.9
    """The same for a critical finding."""

    connections_used: float = 0.9
    """Which share of the server's connections may be in use."""
    connection_idle: timedelta = timedelta(minutes=10)
    """From when on a session counts as idle, for the fix that ends such sessions."""
