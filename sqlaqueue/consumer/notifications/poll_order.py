"""Which consumer polls first for an announcement of pending jobs, and when the others follow. Pure, no I/O.

Every consumer receives each announcement, and one should poll. All agree on an order for it: the first consumer polls
at once, the next one a moment later unless the jobs have been claimed meanwhile. A consumer that is busy, frozen or
dead costs that moment. No notification decides anything: only a claim does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlaqueue.consumer.notifications.peers import Peers
from sqlaqueue.notify_payloads import Pending

STAGGER = 0.02
"""Seconds by which one consumer after the other polls for a job that has not been claimed."""

MOST_LATER = 10_000
"""How many announcements of later jobs are kept: when the last of them is due, the database is asked for more."""

MOST_OPEN = 1_000
"""How many announcements may be open before one poll answers all of them."""

_CLOCK_SKEW = 0.5


@dataclass(order=True, slots=True)
class _Later:
    due: float
    id: str
    count: int
    more: bool


@dataclass(slots=True)
class _Open:
    count: int
    due: float
    poll_at: float


class Announcements:
    """The announcements that one consumer has received and no consumer has answered. Methods need the caller's lock.

    :param share: returns how many jobs one consumer claims at once.
    :param now: the clock.
    """

    def __init__(self, peers: Peers, share: Callable[[], int], now: Callable[[], float]) -> None:
        self._peers, self._share, self._now = peers, share, now
        self._later: list[_Later] = []
        self._open: dict[str, _Open] = {}
        self.known_until = now()
        """Up to when all jobs that become due are known; inf for all of them."""
        self.clock_ahead = 0.0
        """By how many seconds the database's clock is ahead of this process's."""

    def add(self, announcement: Pending) -> bool:
        """Add an announcement; return whether there may now be jobs whose time is unknown."""
        if announcement.due == 0:
            return self._add_open(announcement.id, announcement.count, self._now(), more=announcement.more)
        # One transaction may insert jobs for many times.
        id_ = f"{announcement.id}@{announcement.due}"
        return self._add_later(_Later(announcement.due - self.clock_ahead, id_, announcement.count, announcement.more))

    def add_upcoming(self, times: Sequence[float], *, complete: bool) -> None:
        """Add the times at which jobs will be due.

        :param times: in seconds of the database's clock since the epoch, in order.
        :param complete: whether there are no others.
        """
        for moment in times:
            self._add_later(_Later(moment - self.clock_ahead, f"@{moment:.3f}", 1, more=False))
        self.known_until = float("inf") if complete or not times else times[-1] - self.clock_ahead

    def _add_later(self, later: _Later) -> bool:
        heapq.heappush(self._later, later)
        if len(self._later) <= MOST_LATER:
            return False
        # Half of them, or each further one would come here.
        self._later.sort()
        self.known_until = min(self.known_until, self._later[MOST_LATER // 2].due)
        del self._later[MOST_LATER // 2 :]
        return True

    def _add_open(self, id_: str, count: int, due: float, *, more: bool) -> bool:
        known = self._open.get(id_)
        count += known.count if known else 0
        place = self._peers.place_for(id_)
        self._open[id_] = _Open(count, due, due + place // max(-(-count // self._share()), 1) * STAGGER)
        if more:
            # The other jobs of that statement are due at times of their own, which were not announced.
            self.known_until = min(self.known_until, due)
        return more

    def open_due(self, ahead: float = 0.0) -> bool:
        """Open the announcements whose jobs are due; return whether there may be jobs whose time is unknown.

        :param ahead: seconds, for clocks that differ.
        """
        now, unknown = self._now(), False
        while self._later and self._later[0].due <= now + ahead:
            later = heapq.heappop(self._later)
            unknown |= self._add_open(later.id, later.count, later.due, more=later.more)
        return unknown

    def claimed(self, count: int, ids: Sequence[str]) -> bool:
        """Record that so many jobs of these announcements are claimed; return as :meth:`open_due`."""
        unknown = self.open_due(ahead=_CLOCK_SKEW)
        for id_ in ids:
            announcement = self._open.get(id_)
            if announcement is None:
                continue
            count, announcement.count = count - announcement.count, announcement.count - count
            if announcement.count <= 0:
                del self._open[id_]
            if count <= 0:
                break
        return unknown

    def take_too_many(self) -> bool:
        """Forget the open announcements if there are too many; return whether there were, so that a poll is due."""
        if len(self._open) <= MOST_OPEN:
            return False
        self._open.clear()
        return True

    def take_due(self) -> list[str]:
        """Return the ids of the open announcements that a poll answers now, and forget them."""
        now = self._now()
        ids = [id_ for id_, announcement in self._open.items() if announcement.due <= now]
        for id_ in ids:
            del self._open[id_]
        return ids

    def next_poll(self) -> float:
        """Return when the next poll for an announcement is due; inf for none."""
        later = [self._later[0].due] if self._later else []
        return min([*later, *(announcement.poll_at for announcement in self._open.values())], default=float("inf"))
