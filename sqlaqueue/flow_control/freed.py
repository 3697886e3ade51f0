"""Keys in which a job may begin, as far as a Consumer knows: a claim looks there before it walks over the others.

A walk over ten thousand keys at their limit takes a second. But whoever ends a run knows its key, and when a job of a
rate has begun, the time of the next one is known as well. This is memory of one Consumer, and a hint: a key that is
missing here is found by the next walk, and one that has no room costs a look.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.flow_control.keys import FlowControl, JobKey
from sqlaqueue.sql.types import key_hash, numbered_rows

_FREED = "sqlaqueue_freed"
"""The prefix of the parameters with the freed keys, an array for each attribute."""

_MOST_PARTS = "sqlaqueue_most_parts"

MOST_PARTS: sa.ColumnElement[int] = sa.bindparam(_MOST_PARTS, 2**31 - 1, sa.Integer(), unique=False)
"""How many keys a claim walks over behind a window of jobs that are held back; by default all."""

FEW_PARTS = 64
"""How many a claim walks over that need not find every job."""

_MOST_GIVEN, _MOST_KEPT, _MOST_LATER = 100, 1_000, 10_000

_MOST_IN_ROW = 7
"""After so many claims that have found enough with freed keys, one does without: other keys with room are to have a
turn as well."""


def freed_keys(part: JobKey) -> sa.FromClause:
    """Return the keys that a claim looks at first: ``part``, the hash, and ``place``, the number from 1 on."""
    names = {f"{_FREED}_{number}": (column.type, None) for number, column in enumerate(part.columns)}
    rows = numbered_rows(names, "place", may_be_empty=True)
    return sa.select(rows.c.place, key_hash([rows.c[name] for name in names]).label("part")).subquery(_FREED)


def freed_number(part: JobKey) -> sa.ColumnElement[int]:
    """Return how many there are."""
    return sa.select(sa.func.count()).select_from(freed_keys(part)).scalar_subquery()


Part = tuple[Any, ...]
"""The values of the attributes by which jobs of a queue are held back."""


class Freed:
    """What one Consumer knows. Its methods may be called by several threads."""

    def __init__(self, flow: FlowControl | None, now: Callable[[], float] = time.monotonic) -> None:
        part = None if flow is None else flow.turn or flow.part
        columns = [] if part is None else part.columns
        self._names = [part.spec.mapper.get_property_by_column(column).key for column in columns] if part else []
        self._ends = flow is not None and bool(flow.limits or flow.order)
        self._interval = max((rate.interval for rate in flow.rates), default=None) if flow is not None else None
        self._now, self._lock = now, threading.Lock()
        self._parts: dict[Part, None] = {}
        self._later: list[tuple[float, int, Part]] = []
        self._in_row = 0

    def part_of(self, job: Any) -> Part | None:
        """Return the key of a claimed instance; None if it is not known."""
        values = job.__dict__
        try:
            part = tuple(values[name] for name in self._names)
            hash(part)
        except (KeyError, TypeError):
            # The attribute is not loaded, or is a list.
            return None
        return part or None

    def ended(self, part: Part, throttled: float | None = None) -> None:
        """Record that a run of a key has ended, and that no other one begins within ``throttled`` seconds."""
        with self._lock:
            if throttled is not None:
                self._add_later(part, throttled)
            elif self._ends:
                self._add(part)

    def _add(self, part: Part) -> None:
        # A dict keeps the place of a key that is set again.
        self._parts.pop(part, None)
        self._parts[part] = None

    def _add_later(self, part: Part, seconds: float) -> None:
        heapq.heappush(self._later, (self._now() + seconds, id(part), part))
        if len(self._later) > _MOST_LATER:
            self._later.pop()

    def take(self) -> list[Part]:
        """Return the keys for one claim, which :meth:`claimed` gets back."""
        with self._lock:
            while self._later and self._later[0][0] <= self._now():
                self._add(heapq.heappop(self._later)[2])
            for part in list(self._parts)[: max(0, len(self._parts) - _MOST_KEPT)]:
                del self._parts[part]
            return [] if self._in_row >= _MOST_IN_ROW else list(self._parts)[:_MOST_GIVEN]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def claimed(self, given: Sequence[Part], begun: Sequence[Part], *, full: bool) -> None:
        """Record the result of a claim.

        :param given: the keys that the claim was given.
        :param begun: the keys of the jobs that it has found.
        :param full: whether it may not have looked at all of these keys, as it has found enough, or another claim had
            locked one. Then those of its jobs may have more.
        """
        with self._lock:
            self._in_row = self._in_row + 1 if full and given else 0
            if full:
                for part in begun:
                    self._add(part)
            else:
                for part in given:
                    self._parts.pop(part, None)
            for part in begun if self._interval is not None else ():
                self._add_later(part, self._interval or 0.0)


def claim_parameters(given: Sequence[Part], *, most_parts: int) -> Mapping[str, Any]:
    """Return the parameters of a claim that looks at freed keys first, and then walks over ``most_parts`` others."""
    parameters: dict[str, Any] = {
        f"{_FREED}_{number}": list(each) for number, each in enumerate(zip(*given, strict=True))
    }
    return {**parameters, _MOST_PARTS: most_parts}
