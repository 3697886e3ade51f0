"""Which jobs this process cannot claim, and the search for them. Pure, no I/O.

A claim of several jobs fails as a whole if one row cannot be loaded, such as an enum value of a newer version of the
program, or if the database refuses to change one row. Then the jobs that the claim would have taken are *suspects*:
they are claimed by their keys, and a part that fails is divided, until one job is left that fails by itself. A claim of
the first half that succeeds shows that the second half contains it, so the search takes one claim for each halving.

A job that is found is left out of other claims, and tried again now and then: somebody may have changed its row, or the
constraint that refuses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlaqueue.queue.run import Key

TRY_AGAIN_AFTER = 60.0
"""Seconds between two tries to claim an unclaimable job, as long as there are few."""

_FEW, _MOST = 100, 10_000
_FAILURES_IN_ROW = 50
"""So many jobs in a row that cannot be claimed are probably no matter of these jobs, and the search slows down."""

Cause: TypeAlias = Literal["refused", "unchanged", "held up"]
"""Why a job is unclaimable: its claim fails; its claim leaves its row as it is, which a look finds out again and again;
or something else keeps it from being claimed, rescued or settled, which would be told again."""


@dataclass(frozen=True, slots=True)
class UnclaimableJob:
    """A job that this process cannot claim."""

    key: Key
    error: str
    """What is wrong, as text."""
    next_try: float
    """By the monotonic clock. A job that is held up is left out of claims until then."""
    cause: Cause = "refused"
    quarantined: bool = False


@dataclass(slots=True, eq=False)
class Suspects:
    """Jobs that are claimed together by their keys, since one of them could not be claimed."""

    keys: Sequence[Key]
    other_half: Suspects | None = None
    """If these can be claimed, one of those cannot."""
    quarantined: bool = False
    """They are claimed one at a time, while no other quarantined job runs."""


class Unclaimable:
    """The unclaimable jobs of one run of a Consumer.

    :param now: the clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._jobs: dict[Key, UnclaimableJob] = {}
        self._waiting: list[Suspects] = []
        self._taken: list[Suspects] = []
        """Suspects that a worker claims at the moment."""
        self._in_row, self._tried_again = 0, False
        self.changes = 0
        """How many times a job was added or removed."""
        self.settles_apart = False
        """A claim has failed, so the next ones are executed without settlements, which may be what failed."""

    def __bool__(self) -> bool:
        return bool(self._jobs or self._waiting or self._taken)

    @property
    def is_searching(self) -> bool:
        """Whether suspects wait to be claimed, or are being claimed."""
        return bool(self._waiting or self._taken)

    @property
    def slows_down(self) -> bool:
        """Whether so many jobs in a row were unclaimable that the next try has to wait."""
        return self._in_row >= _FAILURES_IN_ROW

    def jobs(self) -> list[UnclaimableJob]:
        """Return the unclaimable jobs."""
        with self._lock:
            return list(self._jobs.values())

    def excluded(self) -> list[Key]:
        """Return the keys that other claims leave out: of unclaimable jobs, and of suspects."""
        with self._lock:
            now = self._now()
            left_out = (key for key, job in self._jobs.items() if job.cause != "held up" or job.next_try > now)
            return list({*left_out, *self._suspected()})

    def _suspected(self) -> Iterator[Key]:
        return (key for suspects in (*self._waiting, *self._taken) for key in suspects.keys)

    def suspect(self, keys: Iterable[Key], *, quarantined: bool = False) -> bool:
        """Begin to search among the jobs that a failed claim would have taken; return whether there are any new ones.

        :param quarantined: whether the claim was one of quarantined jobs.
        """
        with self._lock:
            known = {*self._suspected(), *self._jobs}
            fresh = [key for key in keys if key not in known]
            if quarantined:
                self._waiting += [Suspects([key], quarantined=True) for key in reversed(fresh)]
            elif fresh:
                # The claim of all has failed already.
                self._divide(fresh)
            return bool(fresh)

    def _divide(self, keys: Sequence[Key]) -> None:
        half = (len(keys) + 1) // 2
        second = Suspects(keys[half:])
        self._waiting += [second, Suspects(keys[:half], second)] if second.keys else [Suspects(keys)]

    def take(self, *, quarantined: bool = False) -> Suspects | None:
        """Return suspects to claim now, or an unclaimable job whose next try is due; None if there are none.

        They belong to the caller until it calls :meth:`end`. Between two tries of known jobs there is a usual claim, so
        that many of them do not keep the others waiting.

        :param quarantined: whether they may be quarantined jobs.
        """
        with self._lock:
            found = next((one for one in reversed(self._waiting) if quarantined or not one.quarantined), None)
            if found is not None:
                self._waiting.remove(found)
            else:
                job = None if self._tried_again else self._next_due(quarantined=quarantined)
                self._tried_again = job is not None
                if job is None:
                    return None
                found = Suspects([job.key], quarantined=job.quarantined)
            self._taken.append(found)
            return found

    def _next_due(self, *, quarantined: bool) -> UnclaimableJob | None:
        now, taken = self._now(), {*self._suspected()}
        for job in [one for one in self._jobs.values() if one.next_try <= now]:
            if job.cause == "refused":
                if (quarantined or not job.quarantined) and job.key not in taken:
                    return job
            elif job.next_try + TRY_AGAIN_AFTER <= now:
                # Otherwise it would have been added again.
                self._remove(job.key)
        return None

    def end(self, suspects: Suspects | None) -> None:
        """Take suspects back, if it is still unknown whether they can be claimed: the claim has failed otherwise."""
        with self._lock:
            if suspects in self._taken:
                self._taken.remove(suspects)
                self._waiting.insert(0, suspects)

    def succeeded(self, suspects: Suspects | None, *, found: bool) -> None:
        """Record that a claim has been committed.

        :param suspects: the jobs that it was to claim; None if it has taken those that are due.
        :param found: whether it has returned jobs. If it has not, suspects are not pending any more.
        """
        if found:
            self._in_row, self.settles_apart = 0, False
        if suspects is None:
            return
        with self._lock:
            self._taken.remove(suspects)
            for key in suspects.keys:
                self._remove(key)
            other = suspects.other_half
            if found and other in self._waiting and len(other.keys) > 1:
                self._waiting.remove(other)
                self._divide(other.keys)

    def failed(self, suspects: Suspects, error: str) -> UnclaimableJob | None:
        """Record that suspects cannot be claimed; return the job if it is only one that was not known."""
        with self._lock:
            if suspects in self._taken:
                self._taken.remove(suspects)
            if len(suspects.keys) > 1:
                self._divide(suspects.keys)
                return None
            job = self._add(suspects.keys[0], error, quarantined=suspects.quarantined)
            self._in_row += job is not None
            return job

    def add(self, key: Key, error: str, cause: Cause = "held up") -> UnclaimableJob | None:
        """Record that a job cannot be claimed, rescued or settled; return it if it was not known."""
        with self._lock:
            return self._add(key, error, cause)

    def _add(
        self, key: Key, error: str, cause: Cause = "refused", *, quarantined: bool = False
    ) -> UnclaimableJob | None:
        known = self._jobs.pop(key, None)
        if len(self._jobs) * len(key) >= _MOST:
            del self._jobs[next(iter(self._jobs))]
        next_try = self._now() + TRY_AGAIN_AFTER * (1 + len(self._jobs) // _FEW)
        # The order is that of the next tries.
        job = self._jobs[key] = UnclaimableJob(key, error, next_try, cause, quarantined)
        if known is not None and known.error == error:
            return None
        self.changes += 1
        return job

    def unchanged(self) -> list[Key]:
        """Return the jobs of which a claim leaves the rows as they are."""
        with self._lock:
            return [key for key, job in self._jobs.items() if job.cause == "unchanged"]

    def remove(self, key: Key) -> None:
        """Forget a job that has ended, or can be claimed."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self.changes += self._jobs.pop(key, None) is not None
