"""The statement that tells why a claim under flow control found nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.controls import FlowControl, KeyRate
from sqlaqueue.queue.backend import RATE, backend
from sqlaqueue.statements.selection import JobSelection


def held_back(selection: JobSelection, flow: FlowControl) -> AnySelect:
    """Return a SELECT for the transaction of a claim that found nothing.

    Its columns: whether another transaction had locked a key; whether a job is due; in how many seconds the next job of
    a rate may begin, NULL if no rate is used up.
    """
    spec = selection.spec
    run_at = spec.columns.get("run_at")
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    due: Any = sa.select(sa.literal_column("1")).select_from(spec.table).where(*waiting, *spec.due(run_at)).limit(1)
    waits = [_next_beginning(rate) for rate in flow.rates]
    next_rate: Any = sa.func.least(*waits, type_=sa.Double()) if waits else sa.cast(sa.null(), sa.Double())
    return sa.select(backend().claims.was_contended(), sa.exists(due), next_rate)


def _next_beginning(rate: KeyRate) -> sa.ColumnElement[float]:
    """Return in how many seconds the next job of a key may begin, of those that are used up."""
    table = rate.spec.side_tables[RATE]
    now = sa.func.clock_timestamp(type_=sa.DateTime(timezone=True))
    free_at = rate.free_at(table)
    seconds = sa.extract("epoch", sa.func.min(free_at) - now)
    # Later than the beginning of the transaction, and so of the claim: a job may have become free since.
    mine = sa.and_(table.c.queue == rate.spec.name, table.c.rate == rate.name, free_at > sa.func.now())
    return sa.cast(sa.select(seconds).where(mine).scalar_subquery(), sa.Double())
