"""When the next jobs will be due. A Consumer asks for it instead of polling."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import QueueSpec, clock


def upcoming_times(
    spec: QueueSpec, scanned: sa.FromClause, conditions: Sequence[sa.ColumnElement[bool]], limit: int
) -> AnySelect:
    """Return when the next ``limit`` rows of ``scanned`` that meet ``conditions`` will be due, in epoch seconds."""
    run_at = scanned.c[spec.columns["run_at"].key]
    moment = sa.extract("epoch", sa.cast(run_at, sa.DateTime(timezone=True))).label("moment")
    later = sa.select(moment).where(*conditions, run_at > clock()).order_by(run_at).limit(limit)
    if not spec.has("priority"):
        return later
    priority = scanned.c[spec.columns["priority"].key]
    least = sa.select(sa.func.min(priority).label("level")).where(*conditions)
    levels = least.cte("levels", recursive=True)
    above = least.where(priority > levels.c.level).correlate(levels).scalar_subquery()
    levels = levels.union_all(sa.select(above).where(levels.c.level.is_not(None)))
    each = later.where(priority == levels.c.level).correlate(levels).lateral("each")
    return sa.select(each.c.moment).select_from(levels.join(each, sa.true())).order_by(each.c.moment).limit(limit)
