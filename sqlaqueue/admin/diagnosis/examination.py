"""What the checks of one examination share: the connection, the queues and the thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

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


Check = Callable[[Examination], Iterator[Finding]]
"""A check yields what it finds. It executes each statement by ``examination.connection``; if one fails, the examination
rolls back to the savepoint before the check, and reports that the check could not be made."""
