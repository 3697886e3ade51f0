"""The rows that a claim takes: the first due ones, or the first that flow control admits."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.controls import flow_control
from sqlaqueue.postgresql.claims.admitted import Admitted
from sqlaqueue.postgresql.claims.claim_scan import take_first
from sqlaqueue.postgresql.claims.held_admitted import HeldAdmitted
from sqlaqueue.queue.strategy_protocol import ClaimRequest


def take(
    request: ClaimRequest,
    waiting: AnySelect,
    scanned: sa.FromClause,
    *others: sa.FromClause,
    lock_rows: Any,
    first_due: Any,
) -> sa.CTE:
    """Return the first due rows of ``waiting`` in claim order, locked together with those of ``others``.

    :param lock_rows: locks rows as the strategy does, see ``ClaimStrategy.lock()``.
    :param first_due: narrows and orders rows as the strategy does, see ``ClaimStrategy.first_due()``.
    """
    flow = None if request.admits_all else flow_control(request.spec)
    if flow is None:
        return take_first(request, waiting, scanned, *others, lock_rows=lock_rows, first_due=first_due)
    admitted = HeldAdmitted if request.spec.strategy.holds_transaction else Admitted
    return admitted(request, flow, waiting, lambda rows: lock_rows(request.spec, rows, *others)).rows()
