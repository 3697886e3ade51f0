"""Runs claimed jobs through the handler, one call group after the other, in one session. No I/O.

Opening a session for each job may take longer than the job. If a handler does not use its session, the next job can run
in the same session, also a job of another claim. Under a lease, the first handler that uses the session ends this: its
writes are committed with the settlement, and the remaining jobs return to the job buffer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.in_flight import CallGroup, groups_except, runs_in
from sqlaqueue.consumer.outcomes import COMPLETED, CancellationRequested, FinishedRun, HandlerAbandoned
from sqlaqueue.consumer.sessions import Savepoint, is_expired, was_used
from sqlaqueue.log import set_job
from sqlaqueue.mapping.runs import run_of, runs_of, set_run
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.run import Key, Run, keys_by_token
from sqlaqueue.statements.selection import without_criteria
from sqlaqueue.strategies import ClaimedJobs


def attach(session: Session, jobs: Sequence[Any]) -> list[Any]:
    """Return claimed, detached jobs as members of ``session``.

    A job that came with related objects is copied: two jobs may share one, which cannot be in two sessions.
    """
    attached = []
    for job in jobs:
        if len(jobs) > 1 or job.__dict__.keys().isdisjoint(instance_state(job).manager.mapper.relationships.keys()):
            session.add(job)
            attached.append(job)
        else:
            copy = session.merge(job, load=False)
            set_run(copy, run_of(job))
            attached.append(copy)
    return attached


def expunge(session: Session) -> None:
    session.expunge_all()


def load_again(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> list[Any]:
    """Return new, detached instances for jobs whose own are in a session in use; without those whose lease was lost."""
    spec = context.spec
    mine = spec.strategy.fence(spec, ClaimedJobs(list(keys_by_token(runs).items())))
    again = sa.select(spec.model).where(mine, planned_anew()).options(*context.settings.selection.options)
    found = {sa.inspect(job).identity: job for job in session.execute(without_criteria(again)).unique().scalars()}
    for run in runs:
        if run.key in found:
            set_run(found[run.key], run)
    session.expunge_all()
    session.rollback()
    return [found[run.key] for run in runs if run.key in found]


def reload(session: Session, context: ConsumerContext, jobs: Sequence[Any]) -> None:
    """Reset jobs to the state in which their claim returned them, after a handler's writes were undone.

    A rollback expires what was changed; in async code the next access to it would raise.
    """
    spec = context.spec
    context.isolation.begin(session)
    if not spec.strategy.keeps_rows:
        for job in jobs:
            for attribute, value in list(sa.inspect(job).committed_state.items()):
                set_committed_value(job, attribute, value)
        return
    keys = [run.key for job in jobs if (run := run_of(job)) is not None]
    again = sa.select(spec.model).where(spec.key_in(spec.keys, keys)).options(*context.settings.selection.options)
    session.execute(without_criteria(again).execution_options(populate_existing=True)).unique().scalars().all()


class Executor:
    """The claimed jobs that a worker runs in one session, one call group after the other.

    The maintenance loop reads them and takes some away meanwhile. So attributes that both use are changed under the
    lock of the context.

    :param finished: called with the runs whose handler did not use its session.
    :param time_limit: the seconds after which no further group is begun.
    :param next_group: for jobs that are in no session yet: returns one more call group, or an empty one.
    """

    def __init__(
        self,
        context: ConsumerContext,
        groups: Iterable[CallGroup],
        finished: Callable[[list[FinishedRun]], object],
        *,
        time_limit: float | None = None,
        next_group: Callable[[], CallGroup] | None = None,
    ) -> None:
        self._context, self._settings = context, context.settings
        self._finished, self._next_group = finished, next_group
        self._groups, self._leaving = deque(groups), list[CallGroup]()
        self._until = None if time_limit is None else time.monotonic() + time_limit
        self.group: CallGroup = ()
        """The jobs of the call that runs, or has ended in a way that its routine must look at."""
        self._runs: list[Run] = []
        self.error: BaseException | None = None
        """The result of that call; None for success."""
        self.session: Session | None = None
        self.savepoint: Savepoint | None = None
        """By which the handler's writes are undone, where the transaction holds more than its own jobs."""
        self.used_session = False
        self.variables = context.variables
        """The context variables of that call. What a handler sets, such as its tenant, must not reach the next job;
        listeners that flush the handler's changes see it."""
        self.started = 0.0
        self._since = 0.0
        self._calls = self._jobs = 0
        self.timed_out = self.abandoned = False
        self.cancelled: set[Key] = set()
        self.interrupt: Callable[[], object] = lambda: None
        """Ends the call early, where that is possible: it cancels the task of an AsyncConsumer."""

    def begin_call(self, session: Session) -> Any:
        """Return the argument for the next call of the handler in this session; None when there is none to make now."""
        if session is not self.session:
            self.session = session
            if self.savepoint is None:
                self._context.isolation.lock_rows_on_begin(session, self._running)
        group = self._begin_group()
        if group and self._next_group is not None:
            # Only jobs of the last call can be left in the session.
            if session.identity_map:
                session.expunge_all()
            group = self.group = attach(session, group)
        if not group:
            return None
        self.variables = self._context.variables.copy()
        set_job(self.variables, partial(self._context.job_fields, self._runs))
        return list(group) if self._settings.batch else group[0]

    def _running(self) -> list[Run]:
        return runs_of(self.group)

    def _begin_group(self) -> CallGroup:
        context = self._context
        with context.lock:
            groups = self._groups
            if self._next_group is not None and not (groups or self.group or context.stopping):
                self._add(self._next_group())
            while groups and not self.group and not context.stopping:
                now = time.monotonic()
                if self._until is not None and now > self._until:
                    break
                group = groups.popleft()
                if context.cancelled:
                    group = self._without_cancelled(group)
                if group:
                    self.group, self.error, self.started, self.timed_out = group, None, now, False
                    self._runs = runs_of(group)
                    for run in self._runs:
                        run.handler_started_at, run.duration = now, None
                        run.calls += 1
                    return group
        return ()

    def _add(self, group: CallGroup) -> None:
        if group:
            self._groups.append(group)
            self.record_pace(time.monotonic())

    def _without_cancelled(self, group: CallGroup) -> CallGroup:
        """End the runs whose jobs were cancelled since their claim, and return the other jobs."""
        wanted = []
        for job, run in zip(group, runs_of(group), strict=True):
            if run.key in self._context.cancelled:
                outcome = self._context.outcome_rules.outcome(CancellationRequested(), run)
                self._finished([FinishedRun(run, outcome, job)])
            else:
                wanted.append(job)
        return wanted

    def end_call(self, raised: BaseException | None, session: Session) -> bool:
        """Record that the call has returned or raised; return whether the next call can be made at once."""
        group = self.group
        if self.savepoint is None:
            used = was_used(session, group[0])
        else:
            used = self.savepoint.was_used() or is_expired(group[0])
        took = time.monotonic() - self.started
        with self._context.lock:
            self._calls += 1
            self._jobs += len(group)
            for run in self._runs:
                run.duration = took
            if used or raised is not None or self.abandoned or self._settings.timeout is not None:
                self.error = self._result(raised)
                if used or self.error is not None:
                    self.used_session = used
                    return False
            self._finished([FinishedRun(run, COMPLETED, job) for run, job in zip(self._runs, group, strict=True)])
            self.group = ()
            if self.cancelled:
                self.cancelled = set()
        return True

    def _result(self, raised: BaseException | None) -> BaseException | None:
        timeout = self._settings.timeout
        if self.abandoned:
            return HandlerAbandoned()
        if timeout is not None and (self.timed_out or time.monotonic() - self.started > timeout):
            return self._settings.timeout_error()
        if self.cancelled and raised is not None:
            return CancellationRequested(frozenset(self.cancelled))
        return raised

    def record_pace(self, now: float) -> None:
        """Record how long the calls since the last time have taken; only the last one may have used its session."""
        if self._calls:
            took = (now - self._since) / max(1, self._jobs)
            self._context.sizer.record_calls(took, calls=self._calls, unused=not self.used_session)
            self._calls = self._jobs = 0
            self.used_session = False
        self._since = now

    @property
    def timeout(self) -> float:
        """The seconds that a call may take; inf without a timeout."""
        return float("inf") if self._settings.timeout is None else self._settings.timeout

    def time_left(self) -> float | None:
        """Return the seconds until the running call exceeds the timeout; None without a timeout."""
        timeout = self._settings.timeout
        if timeout is None:
            return None
        return max(0.0, self.started + timeout - time.monotonic()) if self.group else timeout

    def end_group(self) -> None:
        """Forget the jobs of the last call: their runs have ended, or go on elsewhere."""
        self.group = ()
        if self.cancelled:
            self.cancelled = set()

    def runs(self) -> list[Run]:
        with self._context.lock:
            return runs_in((self.group, *self._leaving, *self._groups))

    @property
    def next_jobs(self) -> Sequence[Any]:
        return self._groups[0] if self._groups else ()

    def waiting_groups(self) -> list[CallGroup]:
        return list(self._groups)

    def remove(self, groups: Sequence[CallGroup]) -> None:
        """Remove groups that are released; the lock is held."""
        self._groups = groups_except(self._groups, groups)

    def take_waiting(self) -> list[CallGroup]:
        """Return the groups that wait, and begin none of them; they count as here until :meth:`waiting_taken`."""
        with self._context.lock:
            groups = list(self._groups)
            self._leaving += groups
            self._groups.clear()
            return groups

    def waiting_taken(self) -> None:
        """Record that the groups of :meth:`take_waiting` are elsewhere."""
        with self._context.lock:
            self._leaving.clear()

    @property
    def is_over(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    @property
    def is_done(self) -> bool:
        return not self._groups

    def blocks(self, now: float, limit: float) -> bool:
        return bool(self.group and self._groups) and now - self.started > limit
