"""From which values on something is a finding: :class:`Thresholds`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import timedelta

from sqlaqueue.exc import ConfigurationError

_LONGEST_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits of an examination; each check names those that it uses.

    :raises ConfigurationError: if a duration is no timedelta, or a number no number; if one is negative; and for a
        timeout of more than a day.
    """

    statement_timeout: timedelta = timedelta(seconds=5)
    """The longest time for one statement of the examination."""
    lock_timeout: timedelta = timedelta(milliseconds=500)
    """For how long a statement of the examination waits for a lock."""
    blocked_for: timedelta = timedelta(seconds=5)
    """For how long a session has to have waited for a lock of a queue's table."""
    small_table: int = field(default=1000, metadata={"unit": "rows"})
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
    horizon_age: int = field(default=100_000, metadata={"unit": "transactions"})
    """For how many later transactions a session, a slot or a standby may keep dead rows."""
    slot_inactive: timedelta = timedelta(hours=1)
    """For how long a slot that keeps dead rows may have no client; known from PostgreSQL 17 on."""

    dead_rows: int = field(default=10_000, metadata={"unit": "rows"})
    """How many dead rows a table may have, however small its threshold of autovacuum."""
    dead_rows_factor: float = field(default=2.0, metadata={"unit": "times"})
    """How many times the dead rows at which autovacuum begins a table may have."""
    dead_rows_kept: int = field(default=100_000, metadata={"unit": "rows"})
    """How many dead rows a table may have soon after a VACUUM."""
    vacuum_overdue: timedelta = timedelta(minutes=5)
    """How long ago the last VACUUM of a table with too many dead rows may be."""
    changed_rows: int = field(default=10_000, metadata={"unit": "rows"})
    """How many rows may have changed since the last ANALYZE, however small the table."""
    changed_share: float = field(default=0.5, metadata={"unit": "share"})
    """The same as a share of the rows that the table had then."""
    row_count_factor: float = field(default=10.0, metadata={"unit": "times"})
    """How many times more or fewer rows a table may have than the planner expects."""
    analyze_overdue: timedelta = timedelta(minutes=10)
    """How long ago the last ANALYZE of a table with too many changed rows may be."""
    new_table_rows: int = field(default=100_000, metadata={"unit": "rows"})
    """How many dead or changed rows a table may have before its first VACUUM or ANALYZE: it may have been created since
    autovacuum last looked."""
    freeze_factor: float = field(default=1.5, metadata={"unit": "times"})
    """How many times the age at which autovacuum freezes a table its oldest transaction id may have."""
    freeze_critical: int = field(default=1_600_000_000, metadata={"unit": "transactions"})
    """The age of the oldest transaction id that is critical; at 2.1 billion the server refuses to write."""
    index_bloat_factor: float = field(default=10.0, metadata={"unit": "times"})
    """How many times the size that its entries need a claim index may have."""
    index_bloat_size: int = field(default=64 * 1024 * 1024, metadata={"unit": "bytes"})
    """The bytes that a claim index may have in any case."""

    clock_difference: timedelta = timedelta(seconds=2)
    """How much the clock of this machine may differ from the server's."""
    clock_difference_critical: timedelta = timedelta(minutes=1)
    """The same for a critical finding."""
    notification_queue: float = field(default=0.5, metadata={"unit": "share"})
    """Which share of the notification queue may be in use."""
    notification_queue_critical: float = field(default=0.9, metadata={"unit": "share"})
    """The same for a critical finding."""
    oldest_server: int = field(default=15, metadata={"unit": "version"})
    """The oldest major version of PostgreSQL."""
    claims_at_once: int = field(default=10, metadata={"unit": "claims"})
    """How many claims of a full batch must fit into the server's lock table."""

    keys_used: float = field(default=0.7, metadata={"unit": "share"})
    """Which share of the numbers of an integer key may be used."""
    keys_used_critical: float = field(default=0.9, metadata={"unit": "share"})
    """The same for a critical finding."""

    connections_used: float = field(default=0.9, metadata={"unit": "share"})
    """Which share of the server's connections may be in use."""
    connection_idle: timedelta = timedelta(minutes=10)
    """From when on a session counts as idle, for the fix that ends such sessions."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, what = getattr(self, each.name), f"Thresholds({each.name}={getattr(self, each.name)!r})"
            if isinstance(each.default, timedelta):
                if not isinstance(value, timedelta):
                    msg = f"{what}: give a timedelta, such as timedelta(minutes=10)"
                    raise ConfigurationError(msg)
                is_negative = value < timedelta(0)
            else:
                kinds = (int,) if isinstance(each.default, int) else (int, float)
                if isinstance(value, bool) or not isinstance(value, kinds) or math.isnan(value):
                    kind = "an integer" if isinstance(each.default, int) else "a number"
                    msg = f"{what}: give {kind} ({each.metadata['unit']})"
                    raise ConfigurationError(msg)
                is_negative = value < 0
            if is_negative:
                msg = f"{what}: give zero or more"
                raise ConfigurationError(msg)
        for name in ("statement_timeout", "lock_timeout"):
            if getattr(self, name) > _LONGEST_TIMEOUT:
                msg = f"Thresholds({name}={getattr(self, name)!r}): give at most a day"
                raise ConfigurationError(msg)
