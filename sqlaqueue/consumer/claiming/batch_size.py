"""When to claim how much, when to poll, when to try again, when to tend the queue. Pure, no I/O.

Both consumers ask one :class:`Pace`; it is told what happened and answers with numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from sqlaqueue.queue.backend import backend

HEARTBEATS_A_LEASE = 3
"""A lease is extended this often before it would expire: one lost heartbeat does no harm."""

SWEEP = 3.0
"""Seconds between looks for expired leases; a job whose worker died waits for its lease and one of these."""

RECONCILE = 30.0
"""Seconds between comparisons of a message table with its job table, at least."""

CHECK_IN = 10.0
"""Seconds between signs of life of a Consumer, at least."""

RETENTION = 60.0
"""Seconds between looks for finished jobs whose time is over."""

FLUSH_AFTER = 0.05
"""Seconds that a finished run may wait to be settled together with others."""

BLOCKED = 0.1
"""Seconds after which a handler is so slow that others should have the jobs behind it."""

LONGEST_WAIT = 1.0
"""Seconds that a claimed job waits while all handlers are at work with something else, before it is given back."""

LATE = 2.0
"""Seconds after its claim at which a job that has not begun is given back: it was to begin within half of that."""

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 3.0
_IN_HAND = 1.0
_SHORTEST_PAUSE = 0.05
_SMOOTHING = 0.2

_ALONE, _AMONG_OTHERS = 0.1, 0.01
"""Seconds for which one thread or task may work through a claim: where there are others, they could help."""

_CALLS_AT_ONE_GO = 20

_GROWTH = 4
"""By how much a claim that cannot be given back may be larger than what was done in a row without a slow job."""

_SHARE_AHEAD = 10
"""Of so many slow handlers one may have a job that waits for it."""


class Pace:
    """The timing of one Consumer.

    :param batch_size: the most jobs to claim at once.
    :param concurrency: how many handlers run at once.
    :param poll_interval: seconds between looks at an empty queue.
    :param whole: whether each claim is as large as may be, however long its jobs take.
    :param cautious: whether what is claimed cannot be given back while a handler is at work.
    :param draw: returns numbers from [0, 1), for jitter.
    """

    def __init__(
        self,
        batch_size: int,
        concurrency: int,
        poll_interval: float,
        *,
        whole: bool = False,
        cautious: bool = False,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._batch_size, self._concurrency, self._poll = batch_size, concurrency, poll_interval
        self.poll_interval = poll_interval
        self._whole, self._cautious, self._draw = whole, cautious, draw
        self._failures = 0
        self._duration: float | None = None
        self._claim_took = 0.0
        self._quiet = self._in_a_row = 0

    def claim_size(self, *, plenty: bool = True, idle: int | None = None, stuck: int = 0) -> int:
        """Return how many jobs to claim: about a second's work, so that none waits here while others are idle.

        Before the first job has ended nothing is known, and one for each handler is a safe start.

        :param plenty: whether there may be many. A few are claimed by a plan that the server keeps, which is no good
            for many; see :mod:`sqlaqueue.postgresql.claims.planner`.
        :param idle: how many handlers have nothing to do; None for all.
        :param stuck: how many handlers will not take a further job soon, see :meth:`is_stuck`.
        """
        if self._whole:
            return self._batch_size
        free = self._concurrency if idle is None else max(1, idle)
        if self._duration is None:
            return min(self._batch_size, free)
        fitting = max(1, self._concurrency - stuck) * _IN_HAND / max(self._duration, 1e-6)
        if self._duration > _IN_HAND / 2:
            # Handlers that began together are done together: a job claimed ahead may wait for a whole one.
            fitting = min(fitting, self._concurrency / _SHARE_AHEAD)
        if self._cautious:
            fitting = min(fitting, max(backend().claims.FEW, _GROWTH * self._in_a_row))
        size = max(1, min(self._batch_size, int(max(fitting, free))))
        return size if plenty else min(size, max(backend().claims.FEW, self._concurrency))

    def is_stuck(self, since: float) -> bool:
        """Return whether a call of the handler that has taken so many seconds takes longer than is usual."""
        return since > max(LONGEST_WAIT, 2 * (self._duration or 0.0))

    def enough(self) -> float | None:
        """Return for how many seconds jobs of one transaction may be begun; None if all of them are, in any case."""
        return None if self._whole else LATE

    def ended(self, duration: float, *, calls: int = 1, quiet: bool) -> None:
        """Note that a handler was called, and took ``duration`` seconds for a job.

        :param calls: how often it was called, one time after the other.
        :param quiet: whether it left no trace in its session.
        """
        known = duration if self._duration is None else self._duration
        self._duration = known + (1 - (1 - _SMOOTHING) ** calls) * (duration - known)
        self._quiet = self._quiet + calls if quiet else 0
        self._in_a_row = self._in_a_row + calls if duration * calls <= LATE else 0

    def at_one_go(self, calls: int) -> float | None:
        """Return for how many seconds one thread or task should make so many calls by itself; None when it should not.

        Calls in one session and without sharing them with the others are for what is over in a moment. A handler that
        has left no trace for a while is taken to go on like that.
        """
        longest = _ALONE if self._concurrency == 1 else _AMONG_OTHERS
        if calls == 1:
            return longest
        least = min(calls, _CALLS_AT_ONE_GO)
        # What is not done by then goes to the others after all: to hand a job over costs more than many a handler.
        return longest if self._quiet >= least and least * (self._duration or longest) <= longest else None

    def claimed(self, took: float) -> None:
        """Note that a claim took so many seconds."""
        self._claim_took += _SMOOTHING * (took - self._claim_took)

    def ahead(self) -> int:
        """Return how many jobs are done while a claim is under way.

        When there are no more than these, it is time for the next one; else all handlers have nothing to do meanwhile.
        """
        if self._whole or self._concurrency == 1 or self._duration is None:
            return 0
        return min(self._batch_size, int(self._concurrency / max(self._duration, 1e-6) * self._claim_took))

    @property
    def is_quick(self) -> bool:
        """Whether handlers take no time, so that to claim is most of the work."""
        return self._duration is not None and self._duration * self._batch_size <= _ALONE

    @property
    def is_slow(self) -> bool:
        """Whether it takes so long until the next run has ended that a finished one must not wait for it."""
        return self._duration is not None and self._duration / self._concurrency > FLUSH_AFTER

    def poll(self) -> float:
        """Return the seconds until the next look at an empty queue, spread so that consumers do not march in step."""
        return self._poll * (0.9 + 0.2 * self._draw())

    def failed(self) -> float:
        """Note that the database did not answer; return the seconds until the next try.

        The cap bounds how long a consumer stays away after the database is back.
        """
        self._failures += 1
        longest: float = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(self._failures, 10))
        return longest * (0.5 + 0.5 * self._draw())

    def succeeded(self) -> None:
        """Note that the database answered."""
        self._failures = 0

    def check_in(self, crowd: int) -> float:
        """Return the seconds until the next check-in: the more consumers there are, the less often each."""
        return max(CHECK_IN, float(crowd)) * (0.8 + 0.4 * self._draw())

    def sweep(self, rank: int) -> float:
        """Return the seconds until the next look for expired leases, if nobody else looks before.

        :param rank: the place among the consumers that hear each other: one after the other, and the last ones not
            much later, for those before them may have died, and with them the workers that are to be noticed.
        """
        return SWEEP * (1 + min(rank, 15) * 0.02 + 0.01 * self._draw())

    def requests(self) -> float:
        """Return the seconds until the next look which running jobs somebody has asked to stop."""
        return SWEEP * (0.8 + 0.4 * self._draw())

    def reconcile(self, took: float) -> float:
        """Return the seconds until the next reconciliation, which may take one hundredth of the time."""
        return max(RECONCILE, 100 * took) * (0.9 + 0.2 * self._draw())

    def look_for_old(self) -> float:
        """Return the seconds until the next look for finished jobs whose time is over."""
        return RETENTION * (0.9 + 0.2 * self._draw())

    def between_batches(self, took: float) -> float:
        """Return the seconds until more of them are deleted: that may take a fifth of the time."""
        return max(_SHORTEST_PAUSE, 4 * took)

    def between_parts(self, took: float, *, found: bool) -> float:
        """Return the seconds until the next part of the tables is compared.

        That may take a twentieth of the time: it begins when a Consumer does, and jobs that wait should not notice.

        :param found: whether something was wrong: then jobs that nobody finds may wait in the next part as well.
        """
        return self.between_batches(took) if found else max(_SHORTEST_PAUSE, 19 * took)


class Agenda:
    """What is due when, by name, on a monotonic clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def set(self, what: str, at: float) -> None:
        """Make ``what`` due at the time ``at``."""
        self._due[what] = at

    def begin(self, what: str, at: float) -> None:
        """Make ``what`` due at the time ``at``, unless it has a time already."""
        self._due.setdefault(what, at)

    def drop(self, what: str) -> None:
        """Let ``what`` not be due at all."""
        self._due.pop(what, None)

    def due(self, what: str, now: float) -> bool:
        """Return whether the time of ``what`` has come."""
        return what in self._due and self._due[what] <= now

    def wait(self, now: float) -> float:
        """Return the seconds until something is due."""
        return max(0.0, min(self._due.values(), default=now + 60.0) - now)
