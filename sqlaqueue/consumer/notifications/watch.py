"""Who watches a queue: enqueueing sends a notification only while a Consumer waits for one.

PostgreSQL lets transactions that notify commit one after the other: each of them holds a lock of the whole server until
its commit is flushed. So each queue has two advisory locks, which are tried and never waited for, as a connection that
waits receives nothing and keeps old row versions from being removed:

- Who has the *notification lock* is notified. The wake trigger takes it in shared mode until its transaction ends, and
  notifies only where that is refused. A listener takes it alone: it gets it when no transaction that has enqueued
  without a notification is open. A poll that begins after that finds all of their jobs, and of all later ones it is
  notified.
- Who has the *watch lock* tries to get the notification lock, for all Consumers of the queue, and polls until it has
  it. A Consumer that serves a part of the queue watches for itself.

A listener takes them when one of its Consumers has capacity and its last claim was short. It returns the notification
lock while many transactions notify, as polls then cost less, and both when its Consumers have no capacity any more:
then it notifies the others, and one of them watches.

Every role that may log in can hold these locks. So whoever is refused the watch lock tries again, and polls if nobody
has the notification lock.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue.consumer.notifications.polls import PollSchedule
from sqlaqueue.log import fields, logger
from sqlaqueue.notify_payloads import Payload, Pending, Signal
from sqlaqueue.postgresql.triggers import lock_numbers

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Seconds between two polls of a listener that watches without the notification lock."""

HAND_OVER_AFTER = 0.05
"""Seconds without capacity after which it lets another one watch."""

_RETRY, _LONGEST_RETRY = 0.15, 5.0
"""Seconds between two tries to get the watch lock, for each Consumer of the queue, and at most."""

FLOOD, _WINDOW = 10, 0.1
"""How many transactions may notify in so many seconds before polls cost less."""

_LOGGED_AFTER = 10.0
"""Seconds for which one transaction keeps the notification lock before that is logged."""

_HOLDERS = """
SELECT string_agg(concat_ws(' ', virtualtransaction, pid), ',') FROM pg_catalog.pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND mode = 'ShareLock' AND granted
  AND classid::bigint = :high AND objid::bigint = :low
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
"""


class Watch:
    """The locks of one queue, as the connection of a listener holds them. The listener calls its methods.

    :param part: what its Consumers serve: empty for the whole queue, else the id of the Consumer.
    """

    def __init__(self, channel: str, part: str = "", now: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._part, self._now = channel, part, now
        self._notified, self._watched = lock_numbers(channel), lock_numbers(f"{channel} watch {part}")
        self.schedules: list[PollSchedule] = []
        self.mode: Literal["away", "polling", "notified"] = "away"
        """Without locks, with the watch lock, or with both."""
        self._answer: Callable[[Any], None] = self._tried
        self.lost()

    def lost(self) -> None:
        """Record that the connection is gone, and the locks with it."""
        self.mode, self._due, self._polled_at, self._pause = "away", self._now(), float("-inf"), FIRST_PAUSE
        self._is_connected = False
        self._unanswered: dict[PollSchedule, int] = {}
        """How many polls each Consumer had made when this one began to be notified; empty once one was short since."""
        self._notifications: deque[float] = deque(maxlen=FLOOD)
        self._last_id = ""
        self._holders: set[str] = set()
        self._logged: set[str] = set()
        self._look_at = float("inf")

    def is_due(self) -> bool:
        """Return whether a Consumer that begins to wait has to wake the listener: without locks, it may try now."""
        return self._is_connected and self.mode == "away" and self._due <= self._now()

    def until_due(self) -> float:
        """Return the seconds until :meth:`statement` has something to do, if nobody wakes the listener."""
        if self.mode == "notified" and not self._unanswered:
            return float("inf")
        left = self._due - self._now()
        return left if left > 0 or self.mode != "away" or self._waiting() else float("inf")

    def received(self, payload: Payload) -> None:
        if isinstance(payload, Pending) and payload.id != self._last_id:
            self._last_id = payload.id
            self._notifications.append(self._now())
        elif payload is Signal.UNWATCHED and self.mode == "away":
            # Not all at once: the first one gets the lock.
            self._due = self._now() + 0.001 * random.random() * self._peers()  # noqa: S311 - no secret

    def _waiting(self) -> list[PollSchedule]:
        return [each for each in self.schedules if each.waits and each.peers.listening]

    def _peers(self) -> int:
        return max([each.peers.count for each in self.schedules], default=1)

    def statement(self) -> sa.Executable | None:
        """Return what the listener has to execute now; its result is for :meth:`answered`."""
        self._is_connected = True
        now, waiting = self._now(), self._waiting()
        if self.mode != "away" and not self.schedules:
            return self._unwatch()
        if self.mode == "notified":
            times = self._notifications
            if len(times) == FLOOD and times[-1] - times[0] <= _WINDOW:
                return self._become_polling(waiting)
            return self._await_poll(now, waiting) if self._unanswered else None
        if now < self._due:
            return None
        if self.mode == "away":
            return self._ask() if waiting else None
        return self._next_poll(now, waiting)

    def _await_poll(self, now: float, waiting: list[PollSchedule]) -> sa.Executable | None:
        """Wait until a poll has shown that no more jobs are there which were not announced; else let others poll."""
        if any(each.polls > self._unanswered.get(each, 0) and each.has_answered() for each in waiting):
            self._unanswered = {}
            # Of a part of the queue only: others may have missed jobs of theirs.
            return self._notify(Signal.POLL) if self._part else None
        return self._hand_over(now) if now >= self._due else None

    def _hand_over(self, now: float) -> sa.Executable | None:
        """Let another listener watch if this one has had no capacity for a moment."""
        left = HAND_OVER_AFTER - min(now - self._polled_at, *(each.busy_for() for each in self.schedules))
        if left <= 0:
            return self._unwatch()
        self._due = now + left
        return None

    def _next_poll(self, now: float, waiting: list[PollSchedule]) -> sa.Executable | None:
        if not waiting:
            return self._hand_over(now)
        if any(each.found for each in waiting):
            self._pause, self._look_at = FIRST_PAUSE, float("inf")
            if now >= self._polled_at + self._pause:
                self._poll(waiting)
            else:
                self._due = self._polled_at + self._pause
            return None
        if now < self._polled_at + self._pause:
            self._due = self._polled_at + self._pause
            return None
        if now >= self._look_at:
            self._look_at = now + _LOGGED_AFTER
            self._answer = self._looked
            high, low = (number % 2**32 for number in self._notified)
            return sa.text(_HOLDERS).bindparams(high=high, low=low)
        return self._ask()

    def answered(self, value: Any) -> None:
        self._answer(value)

    # -- statements --------------------------------------------------------------------------------------

    def _ask(self) -> sa.Executable:
        """Try the notification lock, and the watch lock before it; if another has the first one alone, none is needed.

        Who is refused the watch lock asks whether enqueueing notifies.
        """
        self._answer = self._tried
        silent = _try(self._notified, shared=True)
        watch = f"WHEN NOT {_try(self._watched)} THEN CASE WHEN {silent} THEN 'silent' ELSE 'watched' END"
        return sa.text(
            f"SELECT CASE {watch if self.mode == 'away' else ''} WHEN {_try(self._notified)} THEN 'notified'"
            f" WHEN {silent} THEN 'polling' WHEN {_unlock(self._watched)} THEN 'watched' END"
        )

    def _tried(self, value: str) -> None:
        now, waiting = self._now(), self._waiting()
        match value:
            case "notified":
                self.mode, self._pause, self._look_at = "notified", FIRST_PAUSE, float("inf")
                self._notifications.clear()
                self._unanswered = {each: each.polls for each in self.schedules}
                self._polled_at, self._due = now, now + HAND_OVER_AFTER
                for schedule in self.schedules:
                    schedule.is_notified()
            case "polling":
                self._pause = min(2 * self._pause, LONGEST_PAUSE) if self.mode == "polling" else FIRST_PAUSE
                self._look_at = min(self._look_at, now + _LOGGED_AFTER)
                self.mode = "polling"
                self._poll(waiting)
            case _:
                self.mode, self._look_at = "away", float("inf")
                self._due = now + min(_RETRY * self._peers(), _LONGEST_RETRY)
                if value == "silent":
                    self._poll(waiting, again=False)

    def _poll(self, waiting: list[PollSchedule], *, again: bool = True) -> None:
        for schedule in waiting:
            schedule.poll_with_neighbours()
        if again:
            self._polled_at = self._now()
            # A look between the polls, whether there is still capacity.
            self._due = self._polled_at + min(self._pause, HAND_OVER_AFTER)

    def _become_polling(self, waiting: list[PollSchedule]) -> sa.Executable:
        self.mode, self._answer, self._unanswered = "polling", lambda _: None, {}
        self._pause, self._due = FIRST_PAUSE, self._now()
        for schedule in waiting:
            # Until a poll finds nothing, none of the two locks is tried.
            schedule.found = True
        return sa.text(f"SELECT {_unlock(self._notified)}")

    def _unwatch(self) -> sa.Executable:
        """Return both locks, and let another listener watch."""
        held = [self._watched, *([self._notified] if self.mode == "notified" else [])]
        self.mode, self._due, self._look_at, self._unanswered = "away", self._now(), float("inf"), {}
        return self._notify(Signal.UNWATCHED, *map(_unlock, held))

    def _notify(self, signal: Signal, *before: str) -> sa.Executable:
        self._answer = lambda _: None
        columns = ", ".join([*before, f"pg_catalog.pg_notify(:channel, '{signal}')"])
        return sa.text(f"SELECT {columns}").bindparams(channel=self._channel)

    def _looked(self, holders: str | None) -> None:
        """Log transactions that have had the notification lock for long, once: they were there at the last look."""
        found = set((holders or "").split(",")) - {""}
        for each in sorted((found & self._holders) - self._logged):
            _, _, pid = each.partition(" ")
            logger.warning(
                "channel %s: %s has enqueued jobs and is open for more than %.0f s; until it ends, enqueueing sends no "
                "notifications, and a Consumer polls four times a second",
                self._channel,
                f"the transaction of server process {pid}" if pid else "a prepared transaction",
                _LOGGED_AFTER,
                extra=fields("transaction_open", pid=int(pid) if pid else None),
            )
        self._logged = found & (self._logged | self._holders)
        self._holders = found


def _try(lock: tuple[int, int], *, shared: bool = False) -> str:
    kind = "xact_lock_shared" if shared else "lock"
    return f"pg_catalog.pg_try_advisory_{kind}({lock[0]}, {lock[1]})"


def _unlock(lock: tuple[int, int]) -> str:
    return f"pg_catalog.pg_advisory_unlock({lock[0]}, {lock[1]})"
