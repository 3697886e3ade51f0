"""The keys of a queue that have as many running jobs as their limit is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.flow_control.controls import KeyLimit, flow_control
from sqlaqueue.queue.spec import QueueSpec

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
    """Yield the keys at their limit. Only the indexes of running jobs are read."""
    flow = flow_control(spec)
    for limit in [] if flow is None else flow.limits:
        yield from _of_limit(session, limit)


def _of_limit(session: Session, limit: KeyLimit) -> Iterator[KeyAtLimit]:
    spec = limit.spec
    number: Any = sa.func.count()
    # Jobs of a key may differ in it; a claim compares with that of the job it is about to admit.
    most: Any = sa.func.min(limit.most)
    runs = limit.running(spec.table).is_not(None) if limit.names else spec.in_state("processing")
    counted = sa.select(*limit.columns, number, most).where(runs, *(column.is_not(None) for column in limit.columns))
    full = counted.group_by(*limit.columns).having(number >= most).order_by(number.desc()).limit(_MOST_KEYS)
    for *values, running, least in session.execute(full, bind_arguments=bind_arguments(spec.model)):
        yield KeyAtLimit(key=dict(zip(limit.names, values, strict=True)), running=running, most=least)
