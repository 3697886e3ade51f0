"""Which ticks of a schedule are fired at a moment: those on time, and of the missed ones as many as are caught up."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlaqueue.schedules.recurrence import Recurrence

MOST = 1000
"""How many ticks of a schedule are fired at once, at most."""


class DueTicks(NamedTuple):
    """The result of a look at a schedule."""

    fired: list[datetime]
    """The ticks to fire, in order."""
    last: datetime | None
    """The newest tick that has passed, fired or not; None if none has."""
    next: datetime | None
    """The tick after it; None if there is none."""
    missed: datetime | None
    """The first tick that is passed over; None if none is."""


def due_ticks(recurrence: Recurrence, first: datetime, now: datetime, *, grace: timedelta, catch_up: int) -> DueTicks:
    """Return what to do about the ticks from ``first``, the next one of a schedule, until now.

    A tick older than ``grace`` was missed. All others are fired, and of the newest ``catch_up`` ticks also those that
    were missed.
    """
    if first > now:
        return DueTicks([], None, first, None)
    on_time = now - grace
    ticks = recurrence.newest(first, now, on_time, max(catch_up, 1), MOST)
    number = max(sum(tick >= on_time for tick in ticks), min(catch_up, len(ticks)))
    fired = ticks[len(ticks) - number :]
    missed = None if fired and fired[0] == first else first
    return DueTicks(fired, ticks[-1], recurrence.after(ticks[-1]), missed)
