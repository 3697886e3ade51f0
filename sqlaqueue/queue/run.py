"""One execution of a job: :class:`Run`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy.orm import SessionTransaction

from sqlaqueue.keys import Key


class CopiedTransaction:
    """Placeholder for a transaction in the copy of an instance, since a transaction cannot be copied."""

    is_active = False


@dataclass(slots=True, eq=False)
class Run:
    """One execution of one job, from its claim on; stored beside the instance.

    It keeps the token of the claim. The instance's own ``lease_token`` is loaded again after a commit, and would then
    be the token of the worker that has taken the job over.
    """

    key: Key
    token: UUID | str | None
    attempt: int
    """The number of the attempt, from 1; always 1 if the model does not count attempts."""
    max_attempts: int
    transaction: SessionTransaction | CopiedTransaction | None = None
    """The transaction that holds the job, under strategies that hold one."""
    by_consumer: bool = False
    """Whether a Consumer executes the job and will settle the run."""
    savepoint: SessionTransaction | None = None
    """The innermost savepoint at the time of the claim. Rolling it back undoes the claim."""
    isolated: bool = False
    """Whether the job was claimed alone, because it may have crashed a worker or a connection."""
    claimed_at: float = field(default_factory=time.monotonic)
    """The time of the claim, by the monotonic clock of this process."""
    handler_started_at: float | None = None
    """The time at which the handler was called, by the same clock; None before."""
    calls: int = 0
    """How often the handler was called: again for a job of a batch that has failed as a whole."""
    duration: float | None = None
    """The seconds that the handler took; None before it returned."""
    traceparent: str | None = None
    """The trace of the transaction that enqueued the job, see :mod:`sqlaqueue.queue.traceparent`."""
    notes: dict[str, Any] | None = None
    """What middleware has noted for event listeners; None for nothing."""

    def copied(self, *, held: bool) -> Run:
        """Return the run for a copy of the instance.

        :param held: whether a transaction, rather than a lease, holds the job.
        """
        return Run(self.key, self.token, self.attempt, self.max_attempts, CopiedTransaction() if held else None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without times of this process's clock."""
        return Run, (self.key, self.token, self.attempt, self.max_attempts, self.transaction)
