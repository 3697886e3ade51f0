"""Claim by SELECT: the rows are locked, and the transaction that locked them runs the jobs.

* **Stores** nothing but the status; other transactions still read a claimed job as pending.
* **Claims** by ``SELECT .. FOR NO KEY UPDATE SKIP LOCKED LIMIT n``, which writes no row.
* **While a job runs** its transaction stays open. The handler's writes, the settlement and the claim commit together.
* **When a worker dies** its transaction ends, and the rows are free at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimRequest
from sqlaqueue.strategies.base import HeldStrategy
from sqlaqueue.strategies.columns import add_index


class BatchSelect(HeldStrategy):
    """The strategy for short work in the same database."""

    name: ClassVar[str] = "batch_select"
    supports_scan_range: ClassVar[bool] = True
    supports_flow_control: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {"status": 'strategy "batch_select"'}

    def attach(self, spec: QueueSpec) -> None:
        """Add the claim's index, which contains pending rows only."""
        super().attach(spec)
        add_index(spec, "claim", spec.claim_order, where=spec.in_state("pending"))

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first due rows; the lock is the claim."""
        return self.in_claim_order(request.spec, self.once_each(request.spec, request.candidates, self.picked(request)))

    def claim_in_steps(self, request: ClaimRequest) -> tuple[AnySelect, None]:
        """Return a SELECT of the keys of pending rows; the lock is the claim."""
        waiting = self.pick(request.spec, request.candidates, *request.spec.keys)
        return waiting.where(request.spec.in_state("pending")), None

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the first due rows, locked."""
        spec = request.spec
        waiting = self.pick(spec, request.candidates, *spec.table.c).where(spec.in_state("pending"))
        return self.take(request, waiting, spec.table)
