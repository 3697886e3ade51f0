"""When one consumer looks for expired leases. Pure, no I/O.

One of the listening consumers does so for all of them, and notifies the others, which then postpone their own turn. A
fixed order, as by rank, would not do: the consumers that come first may have died, together with the workers whose jobs
are to be rescued.

While notifications arrive, the listener watches the rescue timer, so that the maintenance loop need not wake up.
"""

from __future__ import annotations

from collections.abc import Callable

_NEVER = float("inf")

_LONGEST, _MOST_INTERVALS = 60.0, 10
"""A consumer rescues after so many seconds and intervals, even if others say that they have."""


class RescueTimer:
    """The turns of one consumer.

    :param interval: returns the seconds until the turn of a consumer of this rank, if no other one rescues before; None
        where there are no leases.
    :param now: the clock.
    """

    def __init__(self, interval: Callable[[int], float] | None, now: Callable[[], float]) -> None:
        self._interval, self._now = interval, now
        self._at = _NEVER if interval is None else now()
        self._last = now()
        self._is_overdue = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to rescue."""
        return self._at <= self._now()

    def begin(self, rank: int) -> None:
        """Record that this consumer rescues.

        Until its own notification arrives, its maintenance loop does not rely on the listener: the rescue may fail, or
        the connection be half open.
        """
        self._last = self._now()
        if self._interval is not None:
            self._at = self._now() + self._interval(rank)

    def received(self, rank: int) -> None:
        """Record the notification that a consumer rescues."""
        if self._interval is not None:
            interval = self._interval(rank)
            # Any role of the database can send it, and whoever did may have found nothing by a mistake of its own.
            latest = self._last + max(_LONGEST, _MOST_INTERVALS * interval)
            self._at = max(min(self._now() + interval, latest), self._now())
        self._is_overdue = False

    def until_due(self, *, listening: bool) -> float:
        """Return the seconds until the maintenance loop has to check; inf if the listener will wake it."""
        return _NEVER if listening and not self._is_overdue else self._at - self._now()

    def until_overdue(self) -> float:
        """Return the seconds until the listener has to wake the maintenance loop; inf if it has done so."""
        return _NEVER if self._is_overdue else self._at - self._now()

    def set_overdue(self) -> None:
        """Record that the listener has woken the maintenance loop."""
        self._is_overdue = True
