"""The statements that hold the keys of rates back, see :class:`sqlaqueue.Throttle`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import sqlalchemy as sa

from sqlaqueue.flow_control.controls import KeyRate, flow_control
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import RATE, backend
from sqlaqueue.queue.spec import QueueSpec, clock


def hold_back(spec: QueueSpec, per: Sequence[str], jobs: Sequence[Key], delay: float) -> Iterator[sa.Insert]:
    """Yield the statements that hold back the keys of some jobs in all rates of these attributes.

    :param delay: seconds until when no job of the keys begins.
    """
    flow = flow_control(spec)
    for rate in [] if flow is None else flow.rates:
        if tuple(rate.names) == tuple(per):
            yield _hold_back(rate, jobs, delay)


def _hold_back(rate: KeyRate, jobs: Sequence[Key], delay: float) -> sa.Insert:
    spec, key = rate.spec, rate.of(rate.spec.table)
    until = clock() + sa.literal(timedelta(seconds=delay), sa.Interval())
    keys = (
        sa.select(key.label("key"))
        .where(spec.key_in(spec.keys, jobs), key.is_not(None))
        .distinct()
        .subquery("sqlaqueue_keys")
    )
    # In the order in which claims write them, or the two could wait for each other.
    rows = sa.select(sa.literal(spec.name), sa.literal(rate.name), keys.c.key, clock(), until).order_by(keys.c.key)
    names = ["queue", "rate", "key", "next_at", "throttled_until"]
    return backend().insert_or_replace(spec.side_tables[RATE], (names, rows), raised=["throttled_until"])


def delete_idle(spec: QueueSpec) -> sa.Delete | None:
    """Return the statement that deletes what rates no longer need; None for a queue without rates.

    A row whose time has passed says the same as none. Rows that a claim has locked stay.
    """
    table = spec.side_tables.get(RATE)
    if table is None:
        return None
    passed = sa.and_(table.c.next_at < clock(), sa.func.coalesce(table.c.throttled_until < clock(), sa.true()))
    idle = sa.select(*table.primary_key).where(table.c.queue == spec.name, passed).with_for_update(skip_locked=True)
    chosen = idle.cte("sqlaqueue_idle")
    same = [column == chosen.c[column.key] for column in table.primary_key]
    return sa.delete(table).where(*same)
