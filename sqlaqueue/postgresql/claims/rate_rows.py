"""The rows of rates: when the next job of each key may begin.

A rate is a GCRA (generic cell rate algorithm): one time for each key, which each beginning moves by the interval
between two. How far it is ahead of the clock tells how much of the burst is used.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from sqlaqueue.postgresql.claims.checks import RateCheck
from sqlaqueue.queue.backend import RATE


def begin_jobs(check: RateCheck, rows: sa.FromClause, after: sa.CTE | None = None) -> sa.Insert:
    """Return the statement that moves the times of the keys of jobs that begin.

    The keys are locked, so the newest rows are those that the claim has read.

    :param rows: the jobs that are admitted, with the hashes of their keys.
    :param after: the statement that is executed first. Each transaction writes the rates in the same order, so that no
        two of them wait for each other.
    """
    rate, table = check.job_key, check.spec.side_tables[RATE]
    key, moment = rows.c[check.name("key")], sa.DateTime(timezone=True)
    now: sa.ColumnElement[Any] = sa.func.clock_timestamp(type_=moment)
    named = [sa.literal(text, sa.Text()) for text in (check.spec.name, rate.name)]
    # One reading for both uses: between two of them, the row may have been waited for.
    clock = sa.select(now.label("now")).cte(check.name("clock"))
    read: Any = sa.select(clock.c.now).scalar_subquery()
    moved = read + _seconds(sa.func.count() * sa.literal(rate.interval, sa.Double()))
    begun = sa.select(*named, key, moved).where(key.is_not(None)).group_by(key).order_by(key)
    if after is not None:
        begun = begun.where(sa.select(sa.func.count()).select_from(after).scalar_subquery() >= _ZERO)
    inserted = insert(table).from_select(["queue", "rate", "key", "next_at"], begun)
    # The difference to the reading is how many intervals these jobs take.
    taken = inserted.excluded.next_at - read
    most = now + _seconds(sa.literal(rate.interval * rate.config.burst, sa.Double()))
    base = sa.func.least(sa.func.greatest(table.c.next_at, now), most, type_=moment)
    keys = list(table.primary_key)
    return inserted.on_conflict_do_update(index_elements=keys, set_={"next_at": base + taken})


_ZERO = sa.literal_column("0", sa.Integer())


def _seconds(number: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.make_interval(0, 0, 0, 0, 0, 0, number, type_=sa.Interval())
