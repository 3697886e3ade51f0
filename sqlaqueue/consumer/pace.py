"""How much and how often: sizes of batches, where a claim scans from, intervals of polls and maintenance. No I/O."""

from __future__ import annotations

import marshal
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from sys import getsizeof
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue.citus import Distribution
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.texts import duration_text

# -- batch sizer -------------------------------------------------------------------------------------------------------
# A :class:`BatchSizer` is told how long handlers and claims took, and answers with numbers: about a second's work is
# claimed, so that no job waits in a busy process while another process is idle.
#
# Where few handlers are slow, the mean of the last ones says nothing of the next ones, and jobs behind a slow handler
# are released again. So claims begin small, a release halves them, and each full claim makes the next one larger, after
# the first release by little: whatever the durations, few jobs are claimed twice.
#
# The rows of a claim are in memory together, so heavy rows are claimed in parts. What the next rows weigh is unknown:
# those of the last claims tell.

CLAIM_BYTES = 32 * 2**20
"""About how much memory the rows of one claim take, unless a single one takes more. The driver has a copy meanwhile."""

_FORGOTTEN = 0.02
"""The part of what heavier rows weighed that is forgotten with each lighter one: after some hundred rows all of it."""


FLUSH_AFTER = 0.05
"""Seconds that a finished run may wait to be settled together with others."""

BLOCKED = 0.1
"""Seconds after which a handler is so slow that other workers should take the jobs behind it."""

LONGEST_IN_BUFFER = 1.0
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
"""How much larger than the last claim the next one may be while no job had to be released. A claim whose jobs cannot be
released is limited to this multiple of the calls since the last slow one."""

_SLOW_HANDLERS_PER_BUFFERED_JOB = 10

_GROWTH_AFTER_RELEASE = 1.03
"""The same once jobs had to be released. As a release halves the claims, about one claim in twenty releases jobs."""


class BatchSizer:
    """The sizes of one consumer's claims.

    :param fixed: whether each claim has the full size, however long its jobs take.
    :param cautious: whether claimed jobs cannot be released while a handler runs.
    :param prompt: whether claimed jobs have to begin at once, as they count as running.
    :param most_bytes: how much memory the rows of a claim may take; infinite where the program has decided how many
        rows it wants.
    """

    def __init__(
        self,
        batch_size: int,
        concurrency: int,
        *,
        fixed: bool = False,
        cautious: bool = False,
        prompt: bool = False,
        most_bytes: float = CLAIM_BYTES,
    ) -> None:
        self._batch_size, self._concurrency = batch_size, concurrency
        self._fixed, self._cautious = fixed, cautious
        self._work = _PROMPT_WORK if prompt else _BUFFERED_WORK
        self._duration: float | None = None
        self._claim_took = 0.0
        self._limit = float(batch_size) if fixed or cautious else float(min(batch_size, max(FEW, concurrency)))
        """The largest claim whose jobs probably begin in time."""
        self._largest, self._growth, self._released_at = 1.0, float(_GROWTH), float("-inf")
        """The largest claim since the last release, by how much the next may be larger, and when the release was."""
        self._unused_in_row = self._quick_in_row = 0
        self._most_bytes, self._row_bytes = most_bytes, None if math.isfinite(most_bytes) else 0.0
        """The latter is what a row of the next claim probably weighs; None before the first claim."""

    def claim_size(
        self, *, plenty: bool = True, idle: int | None = None, slow_handlers: int = 0, scarce: bool = False
    ) -> int:
        """Return how many jobs to claim: about a second's work, but no more than fit into memory.

        Before the first job has ended nothing is known, and one job for each handler is a safe start.

        :param plenty: whether many jobs may be pending. If not, the claim stays small, so that the server may reuse its
        plan; see :mod:`sqlaqueue.postgresql.claim_scan`.
        :param idle: how many handlers are idle; None for all.
        :param scarce: whether flow control has held jobs back: then none may take the place of another and wait.
        """
        if self._fixed:
            return min(self._batch_size, FEW if self._row_bytes is None else self._fitting_rows)
        return min(self._timely_size(plenty, idle, slow_handlers, scarce), self._fitting_rows)

    @property
    def _fitting_rows(self) -> int:
        """The number of rows that fit into memory, as far as is known; at least one."""
        weight = self._row_bytes or 0.0
        if weight * self._batch_size <= self._most_bytes:
            return self._batch_size
        return max(1, int(self._most_bytes / weight))

    def _timely_size(self, plenty: bool, idle: int | None, slow_handlers: int, scarce: bool) -> int:  # noqa: FBT001 - as its caller
        few = FEW
        free = self._concurrency if idle is None else max(1, idle)
        if self._duration is None or scarce:
            return min(self._batch_size, free)
        fitting = max(1, self._concurrency - slow_handlers) * self._work / max(self._duration, 1e-6)
        if self._duration > self._work / 2:
            # Handlers that began together end together: a job claimed ahead may wait for a whole one.
            fitting = min(fitting, self._concurrency / _SLOW_HANDLERS_PER_BUFFERED_JOB)
        if self._cautious:
            fitting = min(fitting, max(few, _GROWTH * self._quick_in_row))
        fitting = min(fitting, self._limit)
        size = max(1, min(self._batch_size, int(max(fitting, free))))
        return size if plenty else min(size, max(few, self._concurrency))

    def is_slower_than_usual(self, seconds: float) -> bool:
        return seconds > max(LONGEST_IN_BUFFER, 2 * (self._duration or 0.0))

    def time_in_transaction(self) -> float | None:
        """Return for how many seconds jobs of one held transaction may be begun; None for all of them."""
        return None if self._fixed else LATE

    def record_calls(self, duration: float, *, calls: int = 1, unused: bool) -> None:
        """Record ``calls`` calls that took ``duration`` seconds a job; ``unused`` if none used its session."""
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

    def record_weight(self, rows: int, weight: float) -> None:
        """Record that the rows of a claim, at least one, take so many bytes of memory."""
        mean, known = weight / rows, self._row_bytes
        if known is not None and mean < known:
            # One light row does not show that the next one is light as well.
            mean += (known - mean) * (1 - _FORGOTTEN) ** rows
        self._row_bytes = mean

    def record_failed_claim(self, size: int) -> None:
        """Record that a claim of so many rows got no answer in time: they may be too heavy for the connection."""
        if math.isfinite(self._most_bytes):
            self._row_bytes = max(self._row_bytes or 0.0, 2 * self._most_bytes / size)

    def record_claim(self, took: float, size: int, *, found: int) -> None:
        """Record a claim that was to take ``size`` jobs and has ``found`` some of them, in ``took`` seconds."""
        self._claim_took += _SMOOTHING * (took - self._claim_took)
        self._largest = max(self._largest, float(size))
        if found >= size >= int(self._limit):
            self._limit = min(float(self._batch_size), self._limit * self._growth)

    def record_released(self, now: float) -> None:
        """Record that jobs were released because they would have waited here for too long."""
        # Jobs that are released soon after others were claimed before those were released.
        if now - self._released_at > LATE:
            self._limit = self._largest = max(1.0, min(self._limit, self._largest / 2))
            self._growth, self._released_at = _GROWTH_AFTER_RELEASE, now

    def jobs_during_claim(self) -> int:
        """Return how many jobs end while a claim is executed.

        When no more than these are left it is time for the next claim; else all handlers are idle meanwhile.
        """
        if self._fixed or self._concurrency == 1 or self._duration is None:
            return 0
        ending = int(self._concurrency / max(self._duration, 1e-6) * self._claim_took)
        return min(int(self._limit), self._fitting_rows, ending)

    @property
    def is_quick(self) -> bool:
        return self._duration is not None and self._duration * self._batch_size <= _IN_ROW_ALONE

    @property
    def is_slow(self) -> bool:
        """Whether runs end so rarely that a finished run must not wait to be settled with the next one."""
        if self._work < FLUSH_AFTER:
            return self._duration is None or self._duration > self._work / 2
        return self._duration is not None and self._duration / self._concurrency > FLUSH_AFTER


# -- weight of rows ----------------------------------------------------------------------------------------------------


_LIGHT = 0.02
"""Seconds in which no claim brings rows that take much memory."""

_NESTED = 4
"""How many times the bytes of a document its objects take, about."""

_LONGEST_TEXT = 10_000
_SMALL = (sa.Integer, sa.Numeric, sa.Boolean, sa.Date, sa.Time, sa.DateTime, sa.Interval, sa.Uuid, sa.Enum)


class RowScale:
    """Weighs the rows of claims by the attributes that have no limit in length.

    Many rows that came in a moment are light: where it counts, nothing is done for each job.

    :param mappers: those of the jobs' classes.
    :param roles: the attributes of the queue itself, which are small.
    """

    def __init__(self, mappers: Iterable[Any], roles: Collection[str]) -> None:
        self._names = sorted(
            {
                each.key
                for mapper in mappers
                for each in mapper.column_attrs
                if each.key not in roles and _may_be_heavy(each.columns[0].type)
            }
        )

    def weigh(self, jobs: Sequence[Any], took: float) -> int:
        """Return about how many bytes of memory claimed jobs take, or 0 if it cannot be much.

        :param took: the seconds of their claim.
        """
        if not self._names or (took < _LIGHT and len(jobs) > FEW):
            return 0
        # Not by getattr(), which would load what is deferred.
        loaded = [job.__dict__ for job in jobs]
        return sum([_weight([values.get(name) for values in loaded]) for name in self._names])


def _may_be_heavy(type_: sa.types.TypeEngine[Any]) -> bool:
    stored = type_.impl_instance if isinstance(type_, sa.TypeDecorator) else type_
    is_short = isinstance(stored, sa.String) and stored.length is not None and stored.length <= _LONGEST_TEXT
    return not (is_short or isinstance(stored, _SMALL))


def _weight(values: Sequence[Any]) -> int:
    """Return about how many bytes the values of one attribute take."""
    if not any(issubclass(each, (dict, list)) for each in set(map(type, values))):
        return sum(map(getsizeof, values))
    return sum([_document_weight(value) if isinstance(value, dict | list) else getsizeof(value) for value in values])


def _document_weight(value: dict[Any, Any] | list[Any]) -> int:
    # To visit its objects takes longer than to load it.
    try:
        return _NESTED * len(marshal.dumps(dict(value) if isinstance(value, dict) else list(value)))
    except ValueError:  # objects of types of the program
        return getsizeof(value)


# -- scan cursor -------------------------------------------------------------------------------------------------------
# Claimed jobs leave dead entries at the head of the index. As long as an old snapshot may see them they cannot be
# removed, and each scan from the head reads all of them again, so a claim may begin at a cursor, where the last one
# ended. Such a claim misses jobs before the cursor: a late commit, a retry, a more urgent job. So some claims scan
# from the head: at least every few seconds, and more often as long as reading the dead entries takes no more than a
# twentieth of the time. While the head has no dead entries, each claim scans it unless another worker is doing so.
#
# Other queues call this the low-water mark; here each consumer has its own.


LONGEST = 4.5
"""Seconds for which jobs before the cursor may be missed: one scan has just passed them, the next one finds them."""

_SHARE, _PAUSE, _SLOW_LOOK = 20.0, 1.0, 0.002
_NOISE, _SHORTEST = 1.1, 0.0005
_RISE, _RISE_AT_HEAD = 0.2, 0.005

Cursor = Mapping[str, Any]
"""The position of a job in the claim order, as the parameters of a statement."""


class ScanCursor:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._cursor: Cursor | None = None
        self._head_due = 0.0
        self._head_scan_took = 0.0
        self._found = 0
        """How many jobs the last claim found, when it found as many as it might take."""
        self._usual = 0.0
        """The seconds of a claim of so many jobs without dead entries."""

    def begin(self) -> Cursor | None:
        """Return the cursor to claim from. None means from the head; one worker at a time rescans it."""
        with self._lock:
            now = self._now()
            if self._cursor is not None and now < self._head_due:
                return self._cursor
            # Other workers use the cursor until this scan ends, as they would read the same dead entries. If it fails,
            # claimed() is not called: then the next scan is due after this time.
            self._head_due = now + min(max(_PAUSE, 3 * self._head_scan_took), LONGEST)
            return None

    def claimed(self, began_at: Cursor | None, cursor: Cursor | None, found: int, took: float) -> None:
        """Record that a claim has found jobs up to ``cursor``; None if there were fewer than it might take."""
        with self._lock:
            if began_at is None:
                self._head_scan_took = took
            if cursor is None or found != self._found:
                # It takes two full claims in a row to recognize a backlog.
                self._cursor, self._found, self._usual = None, found if cursor is not None else 0, took
                self._head_due = 0.0
                return
            self._cursor = cursor
            # A quick claim met no dead entries; a slow one may have, or the server is busy.
            rise = _RISE_AT_HEAD if began_at is None else _RISE
            self._usual += (took - self._usual) * (1.0 if took < self._usual else rise)
            if began_at is None:
                extra = took - _NOISE * self._usual - _SHORTEST
                # A scan returns what it found when it ends, and the next one takes as long again.
                longest = max(LONGEST - 2 * took, _PAUSE)
                self._head_due = self._now() + min(longest, _SHARE * max(extra, 0.0))


_LAG, _STEP, _TRAIL_SHARE, _SLOW_SCAN, _SCAN_OF_JOB = 2.0, 0.5, 10.0, 0.02, 0.0005


class Trail:
    """Where claims begin that are not full: at a job that was claimed some seconds ago.

    A consumer that keeps up has no cursor. While its scans from the head are slow they take a tenth of the time, and
    claims between them follow the trail. It lags behind, so that no commit is missed that is a little late, and has
    jobs of one priority only.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._marks, self._levels = deque[tuple[float, Cursor]](), set[Any]()
        self._head_due = self._head_took = 0.0

    @property
    def until_head(self) -> float:
        return max(self._head_due - self._now(), 0.0)

    def begin(self) -> Cursor | None:
        """Return the cursor to claim from; None means from the head, while other workers follow the trail."""
        with self._lock:
            now, marks = self._now(), self._marks
            while len(marks) > 1 and marks[1][0] <= now - _LAG:
                marks.popleft()
            if not self._head_took or not marks or marks[0][0] > now - _LAG:
                return None
            if now < self._head_due:
                return marks[0][1]
            self._head_due = now + min(max(_PAUSE, 3 * self._head_took), LONGEST)
            return None

    def claimed(self, began_at: Cursor | None, found: int, took: float) -> None:
        with self._lock:
            extra = max(took - _SLOW_SCAN - _SCAN_OF_JOB * found, 0.0)
            if began_at is None:
                self._head_took = extra
                self._head_due = self._now() + min(_TRAIL_SHARE * extra, max(LONGEST - 2 * took, _PAUSE))
            elif extra > self._head_took / 2:
                # Not dead entries make scans slow, but a busy server.
                self._head_took = self._head_due = 0.0

    def mark(self, levels: set[Any], at: Callable[[], Cursor | None]) -> None:
        """Record that jobs of these priorities were claimed, the last of them ``at`` a position."""
        with self._lock:
            if len(levels) > 1 or levels != self._levels:
                self._marks.clear()
            now, self._levels = self._now(), levels
            if len(levels) == 1 and (not self._marks or now - self._marks[-1][0] >= _STEP):
                cursor = at()
                if cursor is not None:
                    self._marks.append((now, cursor))


class DrainedCursor:
    """Where claims begin under flow control: at the first pending job, before which only dead entries are.

    It passes over no job that is held back. To find that job takes as long as to read all the dead entries, so it is
    looked for now and then, and used only if that was slow.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._due = now, now()
        self.cursor: Cursor | None = None

    @property
    def is_due(self) -> bool:
        return self._due <= self._now()

    def found(self, cursor: Cursor | None, took: float) -> None:
        """Record the position of the first pending job, and how long the look has taken."""
        self.cursor = cursor if took > _SLOW_LOOK else None
        self._due = self._now() + min(max(_PAUSE, _SHARE * took), max(LONGEST - took, _PAUSE))

    def leave(self) -> None:
        """Claim from the head until the next look, as few jobs are behind the cursor."""
        self.cursor = None


class WalkTimer:
    """When a claim walks over all keys that flow control may hold back: at most a quarter of the time.

    Used as a block around a walk, which several workers may begin at the same time.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._due, self._began = now, now(), 0.0

    @property
    def is_due(self) -> bool:
        return self._due <= self._now()

    @property
    def until_due(self) -> float:
        return max(self._due - self._now(), 0.0)

    def __enter__(self) -> None:
        self._began = self._now()
        self._due = self._began + _PAUSE

    def __exit__(self, *_: object) -> None:
        self._due = self._now() + max(_PAUSE, 3 * (self._now() - self._began))


_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""For how many seconds claims leave out a shard whose server did not answer: longer each time."""


class ShardTurns:
    """Round robin over the values of a :class:`~sqlaqueue.citus.Distribution`.

    A claim begins with the value after the last one that had jobs, and leaves out those whose server is away: their
    errors would end each claim. Threads may claim at once: each change is atomic, and two claims that begin with the
    same value leave each other's jobs alone.
    """

    def __init__(self, distribution: Distribution, now: Callable[[], float] = time.monotonic) -> None:
        self._distribution, self._now = distribution, now
        self._last: Any = None
        self._away: dict[Any, tuple[float, float]] = {}
        """By value, until when it is left out, and the length of that pause."""

    def begin(self) -> list[Any]:
        """Return the values that this claim tries, in their order; if all are away, all of them."""
        values, last = self._distribution.current_values(), self._last
        after = values.index(last) + 1 if last in values else 0
        in_turn = values[after:] + values[:after]
        if not self._away:
            return in_turn
        away, now = dict(self._away), self._now()
        return [value for value in in_turn if value not in away or away[value][0] <= now] or in_turn

    def claimed(self, value: Any, number: int) -> None:
        if self._away:
            self._away.pop(value, None)
        if number:
            self._last = value

    def failed(self, value: Any) -> None:
        _, pause = self._away.get(value, (0.0, _FIRST_PAUSE / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)
        self._away[value] = self._now() + pause, pause


EXTENSIONS_PER_LEASE = 3
"""How many times a lease is extended within its duration, so that one failed extension does no harm."""

RESCUE = 3.0
"""Seconds between rescues of expired leases; a job whose worker died waits for its lease and one of these."""

RECONCILE = 30.0
"""Seconds between comparisons of a message table with its job table, at least."""

HEARTBEAT = 10.0
"""Seconds between heartbeats of a consumer, at least."""

RETENTION = 60.0
"""Seconds between deletions of old finished jobs."""

LONGEST_WAIT, SHORTEST_WAIT = 30.0, 5.0
"""Seconds for which a Consumer waits for the database at most; with a short lease less, but not less than the second:
a busy server would lose its connections."""

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 3.0
_SHORTEST_PAUSE = 0.05


def longest_wait(lease: float) -> float:
    """Return the seconds to wait for the database at most. What takes longer than two leases comes too late."""
    return min(LONGEST_WAIT, max(SHORTEST_WAIT, 2 * lease))


_SAY_EVERY, _MOST_TEXTS = 60.0, 5

_IN_A_ROW = 3
"""So many failures are more than the end of a connection, which one claim notices and the next one survives."""


class FailingClaims(NamedTuple):
    """Several claims in a row that have failed, with the error of the last one."""

    failures: int
    seconds: float
    """For how long they have failed."""
    error: str


class FailuresInARow:
    """Which of many failures in a row deserve a warning: each new text, and once a minute how many there were."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._number, self._began, self._said_at, self._summary = 0, 0.0, 0.0, ""
        self._texts = set[str]()

    def failed(self, text: str, summary: str = "") -> str | None:
        """Record a failure; return its text as it is logged, None if it is known."""
        now, self._summary = self._now(), summary
        if self._number == 0:
            self._began = self._said_at = now
        self._number += 1
        if text not in self._texts and len(self._texts) < _MOST_TEXTS:
            # A text may have a number in it, such as a port, that differs each time.
            self._texts.add(text)
            return text
        if now - self._said_at < _SAY_EVERY:
            return None
        self._said_at = now
        return f"{text} ({self._number} failures in {duration_text(now - self._began)})"

    def streak(self) -> FailingClaims | None:
        """Return the failures; None if there are less than :data:`_IN_A_ROW`."""
        if self._number < _IN_A_ROW:
            return None
        return FailingClaims(self._number, self._now() - self._began, self._summary)

    def succeeded(self) -> tuple[int, float] | None:
        """Forget the failures; return how many there were, and for how many seconds, None without any."""
        if not self._number:
            return None
        ended = self._number, self._now() - self._began
        self._number = 0
        self._texts.clear()
        return ended


class Intervals:
    """How long a consumer waits before it polls, tries again or runs a maintenance task, with jitter.

    So consumers that started together do not run in step.
    """

    def __init__(self, poll_interval: float, draw: Callable[[], float] = random.random) -> None:
        self.poll_interval = poll_interval
        self._draw = draw
        self.failures = 0

    def poll(self) -> float:
        return self.poll_interval * (0.9 + 0.2 * self._draw())

    def failed(self) -> float:
        """Record that the database did not answer; return the seconds until the next try, which have a limit.

        It bounds how long a consumer stays away after the database is back.
        """
        self.failures += 1
        longest: float = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(self.failures, 10))
        return longest * (0.5 + 0.5 * self._draw())

    def succeeded(self) -> None:
        self.failures = 0

    def heartbeat(self, peers: int) -> float:
        """Return the seconds until the next heartbeat: the more consumers there are, the less often each sends one."""
        return max(HEARTBEAT, float(peers)) * (0.8 + 0.4 * self._draw())

    def rescue(self, rank: int) -> float:
        """Return the seconds until the next rescue of a consumer, unless another one rescues before.

        :param rank: its place among the listening consumers. The last ones follow closely after the first, since the
            first ones may have died.
        """
        return RESCUE * (1 + min(rank, 15) * 0.02 + 0.01 * self._draw())

    def cancellations(self) -> float:
        return RESCUE * (0.8 + 0.4 * self._draw())

    def reconcile(self, took: float) -> float:
        """Return the seconds until the next reconciliation, which may take one hundredth of the time."""
        return max(RECONCILE, 100 * took) * (0.9 + 0.2 * self._draw())

    def retention(self) -> float:
        return RETENTION * (0.9 + 0.2 * self._draw())

    def between_deletions(self, busy: float) -> float:
        """Return the seconds between two batches of a deletion, for which the server may be busy a tenth of the time.

        Three Consumers of a queue delete at once, and claims are to notice little of it.
        """
        return 9 * busy

    def between_batches(self, took: float) -> float:
        """Return the seconds between two ranges of which one was repaired; they may take a fifth of the time."""
        return max(_SHORTEST_PAUSE, 4 * took)

    def between_ranges(self, took: float, *, found: bool) -> float:
        """Return the seconds between two ranges of a reconciliation.

        It may take a twentieth of the time: it begins when a consumer starts, and waiting jobs should not notice it.

        :param found: whether something was repaired: then jobs without a message may wait in the next range as well.
        """
        return self.between_batches(took) if found else max(_SHORTEST_PAUSE, 19 * took)


# -- rescue timer ------------------------------------------------------------------------------------------------------
# One of the listening consumers rescues for all of them, and notifies the others, which then postpone their own turn.
# A fixed order, as by rank, would not do: the consumers that come first may have died, together with the workers
# whose jobs are to be rescued.
#
# While notifications arrive, the listener watches the rescue timer, so that the maintenance loop need not wake up.


_NEVER = float("inf")

_LONGEST_UNTIL_RESCUE, _MOST_INTERVALS = 60.0, 10
"""A consumer rescues after so many seconds and intervals, even if others say that they have."""


class RescueTimer:
    """The turns of one consumer; ``interval`` is None where there are no leases."""

    def __init__(self, interval: Callable[[int], float] | None, now: Callable[[], float]) -> None:
        self._interval, self._now = interval, now
        self._at = _NEVER if interval is None else now()
        self._last = now()
        self._is_overdue = False

    @property
    def is_due(self) -> bool:
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
        if self._interval is not None:
            interval = self._interval(rank)
            # Any role of the database can send it, and whoever did may have found nothing by a mistake of its own.
            latest = self._last + max(_LONGEST_UNTIL_RESCUE, _MOST_INTERVALS * interval)
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
