"""Operations on the rows of a queue: its locks, its running jobs and its messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from alembic.operations import MigrateOperation

from sqlaqueue.alembic.operations.base import OperationList, QueueOp, registered_as
from sqlaqueue.alembic.operations.lock_retries import ATTEMPTS, LOCK_TIMEOUT


@registered_as("lock_queue_tables")
@dataclass(eq=False)
class LockTables(QueueOp):
    """Locks tables in ACCESS EXCLUSIVE mode until the migration commits, in many short attempts.

    A consumer may hold a batch in an open transaction. A plain LOCK would wait for it, and every other statement on the
    table would wait behind the LOCK.

    :param lock_timeout: the duration of one attempt, in seconds.
    :param attempts: the number of attempts before the migration fails.
    """

    tables: list[str]
    schema: str | None = field(default=None, kw_only=True)
    lock_timeout: float = field(default=LOCK_TIMEOUT, kw_only=True)
    attempts: int = field(default=ATTEMPTS, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the lock ends with the transaction."""
        return OperationList()


@registered_as("release_queue_jobs")
@dataclass(eq=False)
class ReleaseJobs(QueueOp):
    """Releases jobs that run under a lease, for a strategy that has no leases and would never rescue them.

    The consumers that hold them can no longer settle these runs; the writes of their handlers are rolled back.

    :param where: the condition that a job runs under a lease.
    :param values: column to SQL expression.
    """

    table: str
    values: dict[str, str]
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: a pending job is pending under every strategy."""
        return OperationList()


@registered_as("empty_queue_messages")
@dataclass(eq=False)
class EmptyMessages(QueueOp):
    """Deletes all messages of a queue before their table gets other columns; they are written again afterwards."""

    messages: str
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the messages are written again in both directions."""
        return OperationList()


@registered_as("fill_queue_messages")
@dataclass(eq=False)
class FillMessages(QueueOp):
    """Writes a message for each pending job that has none.

    :param messages: the message table.
    :param keys: the columns of the primary key.
    :param order: the columns by which claims are ordered.
    :param where: the condition that a job is pending.
    :param live: the table is in use. Write the messages in batches, each in a transaction of its own.
    """

    table: str
    messages: str
    keys: list[str] = field(kw_only=True)
    order: list[str] = field(kw_only=True)
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the messages are dropped with their table."""
        return OperationList()
