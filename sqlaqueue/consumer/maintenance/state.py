"""What the maintenance tasks of one run share: their timers, and the state that they keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.intervals import EXTENSIONS_PER_LEASE
from sqlaqueue.consumer.maintenance.retention_walk import BATCH, Retention, Walk
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.run import Key, Run

MAINTAINERS = 3
"""How many of the listening consumers do what one has to do for all; more than one, since one may be dead."""

_PAUSE_BUSY, _LONGEST_SLEEP = 0.25, 60.0
"""Seconds between two executions of the loop: while there are claimed jobs, and without any."""

_SECOND_LOOK = 1.0
"""Seconds between the two looks of a rescue, at most."""

_SLEEPS_AFTER = 1.0
"""Seconds without claimed jobs after which the loop sleeps: being woken costs more than executing it."""


class Timers:
    """When each of several tasks is due, by name, on a monotonic clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def set(self, task: str, at: float) -> None:
        """Make ``task`` due at the time ``at``."""
        self._due[task] = at

    def start(self, task: str, at: float) -> None:
        """Make ``task`` due at the time ``at``, unless its timer runs already."""
        self._due.setdefault(task, at)

    def cancel(self, task: str) -> None:
        """Stop the timer of ``task``."""
        self._due.pop(task, None)

    def is_due(self, task: str, now: float) -> bool:
        """Return whether ``task`` is due."""
        return task in self._due and self._due[task] <= now

    def until_next(self, now: float) -> float:
        """Return the seconds until the first task is due; 60 without any."""
        return max(0.0, min(self._due.values(), default=now + 60.0) - now)


class Maintenance:
    """The maintenance of a queue by one consumer."""

    def __init__(self, context: ConsumerContext) -> None:
        self.context, self.timers = context, Timers()
        self.retention = Retention(context.spec)
        kept = context.spec.config.attempt_history
        self.history = None if kept is None else Walk("attempt", timedelta(seconds=seconds(kept)), BATCH)
        """The walk through old attempts; None without an attempt history."""
        self.expired: Sequence[Key] = ()
        """The jobs that a rescue has found once, with an expired lease; it looks for them again."""
        self.locked: Sequence[Run] = ()
        """The runs whose leases were not extended, probably since a transaction has locked their rows."""
        self.sent_listening: bool | None = None
        """The ``listening`` of the last heartbeat; None before the first."""
        self.sent_changes = 0
        """The changes of the unclaimable jobs up to the last heartbeat."""
        self.missed_proofs = 0
        """How many heartbeats in a row were not received back."""
        self.logged_missed = False
        self.reconciled_upto: Key | None = None
        """Up to which job messages have been compared with jobs; None between two rounds."""
        self.reconciling_took = 0.0
        """The seconds of this round so far."""
        self._busy_at = time.monotonic()
        """When there were claimed jobs last."""
        optional = {"retention": self.retention.walks, "history": self.history}
        for task in ("heartbeat", "reconcile", "unchanged", *(name for name, needed in optional.items() if needed)):
            self.timers.set(task, time.monotonic())

    @property
    def extension(self) -> float:
        """The seconds between extensions of the leases."""
        return self.context.settings.lease.total_seconds() / EXTENSIONS_PER_LEASE

    @property
    def second_look(self) -> float:
        """The seconds between the two looks of a rescue; in between, each live worker tries to extend four times."""
        return min(_SECOND_LOOK, self.context.settings.lease.total_seconds() / 2)

    def until_next(self) -> float:
        """Return the seconds until a task may be due, unless the loop is woken before."""
        context = self.context
        if not context.has_claimed:
            return _PAUSE_BUSY
        now, polls = time.monotonic(), context.polls
        # Set before it is asked whether there is work: a worker that begins some after that wakes the loop.
        context.maintenance_sleeps = now - self._busy_at >= _SLEEPS_AFTER
        rescue = polls.rescues.until_due(listening=polls.peers.listening)
        notified = min(polls.until_upcoming(), polls.peers.until_proof(), polls.peers.until_look(), rescue)
        wait = min(self.timers.until_next(now), notified, _LONGEST_SLEEP)
        busy = context.busy_since is not None
        if not context.check_idle() or busy:
            self._busy_at = now
        elif context.maintenance_sleeps:
            return max(wait, 0.02)
        timeout = context.settings.timeout
        if timeout is not None:
            wait = min(wait, timeout / 4)
        return max(min(wait, _PAUSE_BUSY), 0.02)
