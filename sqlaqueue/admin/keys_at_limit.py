"""The keys of a queue that have as many running jobs as their limit is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.flow_control.held_back import held_slots, slot_of
from sqlaqueue.flow_control.keys import KeyLimit, flow_control
from sqlaqueue.queue.spec import QueueSpec

_FIRST_JOBS = 10_000
"""Number of pending jobs among which the running ones of a held strategy are looked for."""

_MOST_KEYS = 10
"""Number of keys that are returned for each limit, those with the most running jobs."""


@dataclass(frozen=True, kw_only=True)
class KeyAtLimit:
    """A key that has as many running jobs as its limit is, or more."""

    key: dict[str, Any]
    """The values by attribute; empty for a limit of the whole queue."""
    running: int
    most: int

    def __str__(self) -> str:
        """Return it in a few words."""
        of_key = ", ".join(f"{name} {value!r}" for name, value in self.key.items()) or "the queue"
        return f"{of_key} ({self.running} of {self.most})"


def keys_at_limit(session: Session, spec: QueueSpec) -> Iterator[KeyAtLimit]:
    """Yield the keys at their limit. Only the indexes of running jobs are read, or the first pending jobs."""
    flow = flow_control(spec)
    for limit in [] if flow is None else flow.limits:
        full = _held(limit) if spec.strategy.holds_transaction else _running(limit)
        rows: Any = session.execute(full, bind_arguments=bind_arguments(spec.model))
        for *values, running, least in rows:
            yield KeyAtLimit(key=dict(zip(limit.names, values, strict=True)), running=running, most=least)


def _running(limit: KeyLimit) -> AnySelect:
    spec = limit.spec
    number: Any = sa.func.count()
    # Jobs of a key may differ in it; a claim compares with that of the job it is about to admit.
    most: Any = sa.func.min(limit.most)
    runs = limit.running(spec.table).is_not(None) if limit.names else spec.in_state("processing")
    counted = sa.select(*limit.columns, number, most).where(runs, *(column.is_not(None) for column in limit.columns))
    return counted.group_by(*limit.columns).having(number >= most).order_by(number.desc()).limit(_MOST_KEYS)


def _held(limit: KeyLimit) -> AnySelect:
    """Return the same for a held strategy, under which running jobs read as pending: they are among the first ones."""
    spec, slots = limit.spec, held_slots()
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    first = sa.select(*limit.columns, limit.of(spec.table).label("sqlaqueue_key"), limit.most.label("sqlaqueue_most"))
    jobs = first.where(*waiting).order_by(*spec.claim_order).limit(_FIRST_JOBS).subquery("sqlaqueue_first")
    columns = [jobs.c[column.key] for column in limit.columns]
    keys = sa.select(*columns, jobs.c.sqlaqueue_key, sa.func.min(jobs.c.sqlaqueue_most).label("sqlaqueue_least"))
    grouped = keys.group_by(*columns, jobs.c.sqlaqueue_key).subquery("sqlaqueue_keys")
    same = slots.c.slot == slot_of(limit, grouped.c.sqlaqueue_key)
    found = sa.select(*(grouped.c[column.key] for column in limit.columns), slots.c.number, grouped.c.sqlaqueue_least)
    full = found.select_from(grouped.join(slots, same)).where(slots.c.number >= grouped.c.sqlaqueue_least)
    return full.order_by(slots.c.number.desc()).limit(_MOST_KEYS)
