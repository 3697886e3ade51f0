"""What the checks of one examination share: the connection, the queues and the thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.diagnosis.thresholds import Thresholds
from sqlaqueue.queue.spec import QueueSpec


@dataclass(frozen=True)
class Examination:
    """One examination of some queues in one database."""

    connection: sa.Connection
    """A connection in a read-only transaction with a statement timeout."""
    specs: Sequence[QueueSpec]
    """The queues; all of them are in the database of the connection."""
    thresholds: Thresholds
    deep: bool
    """Whether checks may read rows of jobs, not only catalogs, statistics and a few pages."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Return a session on the connection, for functions that need one."""
        # A savepoint of its own: closing the session must not end the caller's transaction.
        with Session(self.connection, autoflush=False, join_transaction_mode="create_savepoint") as session:
            yield session


Check = Callable[[Examination], Iterator[Finding]]
"""A check yields what it finds. It executes each statement by ``examination.connection``; if one fails, the examination
rolls back to the savepoint before the check, and reports that the check could not be made."""


def target_of(spec: QueueSpec) -> str:
    """Return a queue as commands name it."""
    return f"{spec.model.__module__}:{spec.model.__qualname__}"
