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
