"""The base of strategies whose claim is a transaction: it holds the jobs until it commits or is rolled back."""

from __future__ import annotations

from typing import ClassVar

import sqlalchemy as sa

from sqlaqueue.postgresql.side_tables import crash_journal
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimedJobs
from sqlaqueue.strategies.base import ClaimStrategy


class HeldStrategy(ClaimStrategy):
    """A strategy whose runs belong to the transaction that claimed the jobs.

    The database rolls back the claim of a worker that dies, so the crash journal stores which jobs it was running.
    """

    holds_transaction: ClassVar[bool] = True

    def attach(self, spec: QueueSpec) -> None:
        """Add the crash journal."""
        super().attach(spec)
        crash_journal(spec)

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """Return the condition that a row is not settled yet; the transaction's lock excludes all others.

        Rows without a status are deleted by the claim.
        """
        held_rows = super().fence(spec, held)
        return sa.and_(held_rows, spec.in_state("pending")) if spec.has("status") else held_rows
