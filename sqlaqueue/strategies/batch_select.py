"""Claim by SELECT: the rows are locked, and the transaction that locked them runs the jobs.

* **Stores** nothing but the state; a held job still reads as pending to everybody else.
* **Claims** by ``SELECT .. FOR NO KEY UPDATE SKIP LOCKED LIMIT n``, which writes no row.
* **While a job runs** its transaction stays open. The handler's writes, the settling and the claim commit together.
* **When a worker dies** its transaction ends and the rows are free at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy import ClaimedJobs, ClaimRequest
from sqlaqueue.strategies.base import ClaimStrategy
from sqlaqueue.strategies.indexes import add_index


class BatchSelect(ClaimStrategy):
    """The strategy for short work in the same database."""

    name: ClassVar[str] = "batch_select"
    holds_transaction: ClassVar[bool] = True
    supports_scan_range: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {"status": 'strategy "batch_select"'}

    def attach(self, spec: QueueSpec) -> None:
        """Add the claim's index, which holds waiting rows only, and the ledger."""
        super().attach(spec)
        backend().side_tables.crash_journal(spec)
        add_index(spec, "claim", spec.claim_order, where=spec.in_state("pending"))

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the best waiting rows; the lock is the claim."""
        spec, candidates = request.spec, request.candidates
        waiting = self.pick(spec, candidates, *spec.table.c).where(spec.in_state("pending"))
        picked = backend().claims.take(request, waiting, spec.table, lock_rows=self.lock, first_due=self.best)
        return self.in_claim_order(spec, self.once_each(spec, candidates, picked))

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """The rows are locked by this transaction; one that it has settled already is left as it is."""
        return sa.and_(super().fence(spec, held), spec.in_state("pending"))
