"""How many jobs to claim at once, and how many of them one worker runs in a row. Pure, no I/O.

A :class:`BatchSizer` is told how long handlers and claims took, and answers with numbers: about a second's work is
claimed, so that no job waits in a busy process while another process is idle.
"""

from __future__ import annotations

from sqlaqueue.postgresql.claim_scan import FEW

FLUSH_AFTER = 0.05
"""Seconds that a finished run may wait to be settled together with others."""

BLOCKED = 0.1
"""Seconds after which a handler is so slow that other workers should take the jobs behind it."""

LONGEST_WAIT = 1.0
"""Seconds that a claimed job waits while all handlers are busy with other jobs, before it is released."""

LATE = 2.0
"""Seconds after its claim at which a job that has not begun is released. Claims are sized for one second's work."""

_BUFFERED_WORK = 1.0
_SMOOTHING = 0.2

_PROMPT_WORK = 0.02
"""Seconds of work for which jobs are claimed that count as running from their claim on, for limits of flow control."""

_IN_ROW_ALONE, _IN_ROW_AMONG_OTHERS = 0.1, 0.01
"""Seconds for which a worker may run the jobs of its claim without sharing them: as the only worker, or with others."""

_CALLS_IN_ROW = 20

_GROWTH = 4
"""Limits a claim whose jobs cannot be released: to this multiple of the calls since the last slow one."""

_SLOW_HANDLERS_PER_BUFFERED_JOB = 10


class BatchSizer:
    """The sizes of one consumer's claims.

    :param batch_size: the most jobs to claim at once.
    :param concurrency: how many handlers run at once.
    :param fixed: whether each claim has the full size, however long its jobs take.
    :param cautious: whether claimed jobs cannot be released while a handler runs.
    :param prompt: whether claimed jobs have to begin at once, as they count as running.
    """

    def __init__(
        self, batch_size: int, concurrency: int, *, fixed: bool = False, cautious: bool = False, prompt: bool = False
    ) -> None:
        self._batch_size, self._concurrency = batch_size, concurrency
        self._fixed, self._cautious = fixed, cautious
        self._work = _PROMPT_WORK if prompt else _BUFFERED_WORK
        self._duration: float | None = None
        self._claim_took = 0.0
        self._unused_in_row = self._quick_in_row = 0

    def claim_size(self, *, plenty: bool = True, idle: int | None = None, slow_handlers: int = 0) -> int:
        """Return how many jobs to claim: about a second's work.

        Before the first job has ended nothing is known, and one job for each handler is a safe start.

        :param plenty: whether many jobs may be pending. If not, the claim stays small, so that the server may reuse its
            plan; see :mod:`sqlaqueue.postgresql.claim_scan`.
        :param idle: how many handlers are idle; None for all.
        :param slow_handlers: how many handlers will not take another job soon, see :meth:`is_slower_than_usual`.
        """
        if self._fixed:
            return self._batch_size
        few = FEW
        free = self._concurrency if idle is None else max(1, idle)
        if self._duration is None:
            return min(self._batch_size, free)
        fitting = max(1, self._concurrency - slow_handlers) * self._work / max(self._duration, 1e-6)
        if self._duration > self._work / 2:
            # Handlers that began together end together: a job claimed ahead may wait for a whole one.
            fitting = min(fitting, self._concurrency / _SLOW_HANDLERS_PER_BUFFERED_JOB)
        if self._cautious:
            fitting = min(fitting, max(few, _GROWTH * self._quick_in_row))
        size = max(1, min(self._batch_size, int(max(fitting, free))))
        return size if plenty else min(size, max(few, self._concurrency))

    def is_slower_than_usual(self, seconds: float) -> bool:
        """Return whether a handler that has run for so many seconds takes longer than usual."""
        return seconds > max(LONGEST_WAIT, 2 * (self._duration or 0.0))

    def time_in_transaction(self) -> float | None:
        """Return for how many seconds jobs of one held transaction may be begun; None for all of them."""
        return None if self._fixed else LATE

    def record_calls(self, duration: float, *, calls: int = 1, unused: bool) -> None:
        """Record that a handler was called ``calls`` times and took ``duration`` seconds a job.

        :param unused: whether the handler did not use its session.
        """
        known = duration if self._duration is None else self._duration
        self._duration = known + (1 - (1 - _SMOOTHING) ** calls) * (duration - known)
        self._unused_in_row = self._unused_in_row + calls if unused else 0
        self._quick_in_row = self._quick_in_row + calls if duration * calls <= LATE else 0

    def time_in_row(self, calls: int) -> float | None:
        """Return the seconds for which a worker may make ``calls`` calls in a row; None if it should share the jobs.

        A worker keeps its jobs only if handlers are quick and the last ones did not use their session. Then the next
        ones are expected not to use it either, and all calls can be made in one session.
        """
        longest = min(_IN_ROW_ALONE if self._concurrency == 1 else _IN_ROW_AMONG_OTHERS, self._work)
        if calls == 1:
            return longest
        least = min(calls, _CALLS_IN_ROW)
        # Jobs that are left then go to other workers: passing a job on costs more than many a handler.
        return longest if self._unused_in_row >= least and least * (self._duration or longest) <= longest else None

    def record_claim(self, took: float) -> None:
        """Record that a claim took so many seconds."""
        self._claim_took += _SMOOTHING * (took - self._claim_took)

    def jobs_during_claim(self) -> int:
        """Return how many jobs end while a claim is executed.

        When no more than these are left it is time for the next claim; else all handlers are idle meanwhile.
        """
        if self._fixed or self._concurrency == 1 or self._duration is None:
            return 0
        return min(self._batch_size, int(self._concurrency / max(self._duration, 1e-6) * self._claim_took))

    @property
    def is_quick(self) -> bool:
        """Whether handlers take so little time that claiming is most of the work."""
        return self._duration is not None and self._duration * self._batch_size <= _IN_ROW_ALONE

    @property
    def is_slow(self) -> bool:
        """Whether runs end so rarely that a finished run must not wait to be settled with the next one."""
        if self._work < FLUSH_AFTER:
            return self._duration is None or self._duration > self._work / 2
        return self._duration is not None and self._duration / self._concurrency > FLUSH_AFTER
