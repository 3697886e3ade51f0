"""What one thread or task has in hand: claimed jobs on their way through the handler, in one session. No I/O.

A session for every job costs more than many a job. A handler that leaves no trace in its session leaves it as good as
new, so the next job can be run in it too, of the same claim or of another. The first that does leave one ends that: its
writes are committed with the end of its run, and what is left goes on elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.executing.job_instances import adopt
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.sessions.session_usage import is_expired, was_used
from sqlaqueue.consumer.settling.outcomes import COMPLETED, Abandoned, Ended, StopRequested
from sqlaqueue.exc import JobTimeout
from sqlaqueue.keys import Key
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Run

if TYPE_CHECKING:
    from sqlaqueue.consumer.claiming.job_buffer import Crew
    from sqlaqueue.consumer.sessions.savepoint import Savepoint


def held_run(job: Any) -> Run:
    """Return the run for which a claim handed out ``job``."""
    run = run_of(job)
    if run is None:  # pragma: no cover - the claim's load event sets it
        raise RuntimeError(job)
    return run


def runs_of(jobs: Iterable[Any]) -> list[Run]:
    """Return the runs for which claims handed out ``jobs``."""
    return [held_run(job) for job in jobs]


def has_waited(unit: Iterable[Any], since: float) -> bool:
    """Return whether none of these jobs has begun, and all were claimed by that time."""
    return all(run.handler_started_at is None and run.claimed_at <= since for run in runs_of(unit))


def without(some: Iterable[Sequence[Any]], units: Iterable[Sequence[Any]]) -> deque[Sequence[Any]]:
    """Return those of ``units`` that are none of ``some``."""
    known = {id(unit) for unit in some}
    return deque(unit for unit in units if id(unit) not in known)


class Hand:
    """Claimed jobs for one call of the handler after the other.

    Its thread or task takes unit after unit out of it, while the keeper looks on: what both need is changed under the
    crew's lock.

    :param units: the jobs, in lists for one call of the handler each.
    :param ended: is told of the runs that end without a trace.
    :param enough: the seconds after which no further unit is begun.
    :param further: for jobs that are in no session yet: returns those of one more call, or none.
    """

    def __init__(
        self,
        crew: Crew,
        units: Iterable[Sequence[Any]],
        ended: Callable[[list[Ended]], object],
        *,
        enough: float | None = None,
        further: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._crew, self._plan, self._ended, self._further = crew, crew.plan, ended, further
        self._units, self._leaving = deque(units), list[Sequence[Any]]()
        self._until = None if enough is None else time.monotonic() + enough
        self.unit: Sequence[Any] = ()
        """The jobs of the call that is under way, or has ended in a way that its lane must look at."""
        self._runs: list[Run] = []
        self.error: BaseException | None = None
        """What that call came to."""
        self.session: Session | None = None
        """What the handler is given."""
        self.savepoint: Savepoint | None = None
        """By what the handler's writes are undone, where the transaction holds more than its own jobs."""
        self.was_used = False
        """Whether that call has used its session."""
        self.started = 0.0
        self._since = 0.0
        self._calls = self._jobs = 0
        self.timed_out = self.abandoned = False
        self.asked: set[Key] = set()
        """Which jobs of the call somebody asked to stop."""
        self.interrupt: Callable[[], object] = lambda: None
        """Ends the call early, where that can be done: it cancels the task of an AsyncConsumer."""

    # -- one call after the other --------------------------------------------------------------------------------

    def begin(self, session: Session) -> Any:
        """Return the argument for the next call of the handler; None when there is none to make now.

        :param session: the one that the handler is given.
        """
        if session is not self.session:
            self.session = session
            if self.savepoint is None:
                isolation_level.lock_rows_on_begin(session, self._plan, self._running)
        unit = self._next()
        if unit and self._further is not None:
            # What the last call has left there are its own jobs, at most.
            session.expunge_all()
            unit = self.unit = adopt(session, unit)
        if not unit:
            return None
        return list(unit) if self._plan.batch else unit[0]

    def _running(self) -> list[Run]:
        return runs_of(self.unit)

    def _next(self) -> Sequence[Any]:
        plan = self._plan
        with self._crew.lock:
            if self._further is not None and not (self._units or self.unit or plan.stopping):
                self._go_on(self._further())
            while self._units and not self.unit and not plan.stopping:
                now = time.monotonic()
                if self.is_over:
                    break
                unit = self._units.popleft()
                if plan.asked:
                    unit = self._without_asked(unit)
                if unit:
                    self.unit, self.error, self.started, self.timed_out = unit, None, now, False
                    self._runs = runs_of(unit)
                    for run in self._runs:
                        run.handler_started_at, run.duration = now, None
                    return unit
        return ()

    def _go_on(self, unit: Sequence[Any]) -> None:
        if unit:
            self._units.append(unit)
            self.set_pace(time.monotonic())

    def _without_asked(self, unit: Sequence[Any]) -> Sequence[Any]:
        """Return a unit without the jobs that somebody has cancelled since their claim: those have ended."""
        wanted = []
        for job, run in zip(unit, runs_of(unit), strict=True):
            if run.key in self._plan.asked:
                self._ended([Ended(run, self._plan.judge(StopRequested(), run), job)])
            else:
                wanted.append(job)
        return wanted

    def end(self, raised: BaseException | None, session: Session) -> bool:
        """Note that the call has returned or raised; return whether that is all, and the next one can be made.

        :param session: the one that the handler was given.
        """
        unit = self.unit
        if self.savepoint is None:
            trace = was_used(session, unit[0])
        else:
            trace = self.savepoint.was_used() or is_expired(unit[0])
        with self._crew.lock:
            self._calls += 1
            self._jobs += len(unit)
            took = time.monotonic() - self.started
            for run in self._runs:
                run.duration = took
            if trace or raised is not None or self.abandoned or self._plan.timeout is not None:
                self.error = self._verdict(raised)
                if trace or self.error is not None:
                    self.was_used = trace
                    return False
            self._ended([Ended(run, COMPLETED, job) for run, job in zip(self._runs, unit, strict=True)])
            self.put_down()
        return True

    def _verdict(self, raised: BaseException | None) -> BaseException | None:
        """Return what the call came to, given what it raised and what happened to it meanwhile."""
        timeout = self._plan.timeout
        if self.abandoned:
            return Abandoned()
        if timeout is not None and (self.timed_out or time.monotonic() - self.started > timeout):
            return JobTimeout(f"the handler ran for longer than {timeout:g} seconds")
        if self.asked and raised is not None:
            return StopRequested(frozenset(self.asked))
        return raised

    def set_pace(self, now: float) -> None:
        """Tell the pace how long the calls since the last time have taken; only the last may have left a trace."""
        if self._calls:
            took = (now - self._since) / max(1, self._jobs)
            self._crew.pace.ended(took, calls=self._calls, quiet=not self.was_used)
            self._calls = self._jobs = 0
            self.was_used = False
        self._since = now

    def time_left(self) -> float | None:
        """Return the seconds until the call under way runs into the Consumer's timeout; None when there is none."""
        timeout = self._plan.timeout
        if timeout is None:
            return None
        return max(0.0, self.started + timeout - time.monotonic()) if self.unit else timeout

    def put_down(self) -> None:
        """Let go of the jobs of the last call: their runs have ended, or go on elsewhere."""
        self.unit = ()
        if self.asked:
            self.asked = set()

    # -- what is left ------------------------------------------------------------------------------------------

    def held(self) -> list[Run]:
        """Return the runs that are in this hand."""
        with self._crew.lock:
            return [run for unit in (self.unit, *self._leaving, *self._units) for run in runs_of(unit)]

    @property
    def first(self) -> Sequence[Any]:
        """The jobs of the next call."""
        return self._units[0] if self._units else ()

    def left(self) -> list[Sequence[Any]]:
        """Return the units that are left."""
        return list(self._units)

    def leave(self, units: Sequence[Sequence[Any]]) -> None:
        """Do not begin these units, which have ended otherwise; the crew's lock is held."""
        self._units = without(units, self._units)

    @property
    def is_over(self) -> bool:
        """Whether the time is over in which units are begun."""
        return self._until is not None and time.monotonic() > self._until

    def leave_rest(self) -> list[Sequence[Any]]:
        """Begin no more of the units that are left, and return them; they stay in hand until :meth:`rest_has_left`."""
        with self._crew.lock:
            units = list(self._units)
            self._leaving += units
            self._units.clear()
            return units

    def rest_has_left(self) -> None:
        """Note that others have what was left."""
        with self._crew.lock:
            self._leaving.clear()

    @property
    def is_done(self) -> bool:
        """Whether no unit is left."""
        return not self._units

    def is_blocked(self, now: float, patience: float) -> bool:
        """Whether units wait behind a call that takes longer than expected."""
        return bool(self.unit and self._units) and now - self.started > patience
