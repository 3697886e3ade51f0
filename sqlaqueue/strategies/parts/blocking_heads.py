"""Failed jobs that hold the others of their key back, as ``Order(on_failure="block")`` says."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.queue.spec import QueueSpec


def holds_none_back(spec: QueueSpec) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a job is no failed one with pending jobs behind it, for statements that delete jobs.

    Deleting it would let those run.
    """
    flow = flow_control(spec)
    if flow is None or flow.order is None or flow.order.config.on_failure != "block":
        return []
    order, other = flow.order, spec.table.alias("sqlaqueue_behind")
    mine, theirs = (sa.tuple_(*(rows.c[column.key] for column in order.by)) for rows in (spec.table, other))
    behind = sa.exists().where(
        order.hashed(other) == order.of(spec.table),
        other.c[spec.columns["status"].key] == spec.literal("pending"),
        theirs > mine,
    )
    return [~sa.and_(spec.in_state("failed"), behind.correlate(spec.table))]
