"""Run all due jobs of a queue in a test's transaction: :func:`drain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.core.events import JobEvent
from sqlaqueue.consumer.quarantine import JournalEntry, write_entry
from sqlaqueue.exc import JobFailed, JobResult, NotClaimableError
from sqlaqueue.flow_control.keys import KeyRate, flow_control
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import runs_of
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.fire import fire
from sqlaqueue.schedules.schedule import Schedule, ScheduleGroup, schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.sessions import execute
from sqlaqueue.sql.portable import Span, clock, earlier, elapsed, greatest, later
from sqlaqueue.statements.claim import claim_statement, worker_name
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.testing.enqueued import LONGEST, travel
from sqlaqueue.testing.in_transaction import (
    AnySession,
    Handler,
    Jobs,
    TransactionGuard,
    WorkerInTest,
    count_waiting,
    joined_session,
    rescue_expired,
    resolve_session,
)
from sqlaqueue.testing.rows import (
    check_prepared,
    flushed_key,
    not_claimable,
    queue_is_paused,
    read_settings,
    remember_earlier_jobs,
    restore_settings,
    show_changes,
)
from sqlaqueue.waiting.wait import read_states

if TYPE_CHECKING:
    from sqlaqueue.testing.in_transaction import AnyAsyncSession, AsyncHandler


def crash(session: AnySession, job: Any) -> None:
    """Leave a job in the state in which a dead worker leaves it.

    The worker had claimed only this job, and died before its handler wrote anything.

    Under a lease, the job stays claimed by the dead worker, and the lease has expired: the next worker rescues it. In
    a held transaction, the claim is rolled back and the crash journal names the job: it runs alone the next time.
    Either way the attempt counts, and :func:`run_job` or :func:`drain` shows what follows.

    ::

        email = Email(to="ada@example.com")
        session.add(email)
        crash(session, email)
        assert run_job(session, email, send).state == "completed"

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param job: an instance in this session.
    :raises NotClaimableError: if no worker would claim the job now, such as one that is not due.
    """
    execute(resolve_session(session, "crash", is_async=False), crash_in, (job, "crash"))


def crash_in(session: Session, job: Any, function: str, *, is_async: bool = False) -> None:
    """Leave a job as a dead worker does; in async code the instances are read again at once."""
    key, model = flushed_key(session, job, function), type(job)
    spec = spec_of(model)
    remember_earlier_jobs(session, spec, key)
    settings = read_settings(session, spec)
    try:
        with TransactionGuard() as guard, joined_session(session, guard, partial(count_waiting, spec)) as worker:
            _crash(worker, spec, key, lambda: not_claimable(session, model, key, function))
    finally:
        restore_settings(session, spec, settings)
        show_changes(session, is_async=is_async)


def _crash(session: Session, spec: QueueSpec, key: Key, refusal: Callable[[], NotClaimableError]) -> None:
    if spec.has("lease_expires_at"):
        rescue_expired(session, spec)
    one = select_jobs(sa.select(spec.model).where(spec.key_in(spec.keys, [key])), "crash")
    claimed = session.execute(claim_statement(one, sa.literal(1), few=True)).scalars().all()
    if not claimed:
        raise refusal()
    if spec.strategy.holds_transaction:
        _leave_journal_entry(session, spec, claimed[0])
    elif spec.has("lease_expires_at"):
        _expire_lease(session, spec, key)
    session.commit()


def _leave_journal_entry(session: Session, spec: QueueSpec, job: Any) -> None:
    (run,) = runs_of([job])
    session.rollback()
    entry = JournalEntry((key_text(run.key),), solely_responsible=True)
    write_entry(session, spec, entry, worker_name())
    if run.attempt + entry.deaths > run.max_attempts:
        session.rollback()
        raise NotClaimableError(
            f"crash(): {spec.model.__name__} {key_text(run.key)} has no attempt left: a worker that claims it "
            "stores it as failed, and calls no handler that could crash; run_job() shows that"
        )


def _expire_lease(session: Session, spec: QueueSpec, key: Key) -> None:
    expired = earlier(clock(), sa.literal(timedelta(seconds=1), Span()))
    ended = (
        sa.update(spec.table).where(spec.key_in(spec.keys, [key])).values({spec.columns["lease_expires_at"]: expired})
    )
    session.execute(ended, bind_arguments={"mapper": spec.mapper})


def fire_schedules(session: AnySession, schedules: Sequence[Schedule[Any] | type[Any]]) -> list[Any]:
    """Do once what a process with these schedules does: store them if they are new, and fire what is due.

    A schedule is created by the first call, so its first tick comes later; :func:`travel` lets time pass::

        hourly = Schedule("hourly", Email, every=timedelta(hours=1), values={"to": "ada@example.com"})
        fire_schedules(session, [hourly])
        travel(session, timedelta(hours=1))
        (email,) = fire_schedules(session, [hourly])

    :param session: the test's session. Its pending changes are flushed first.
    :param schedules: Schedules, or queue classes for those that are in the database.
    :return: the jobs, in the order of their ticks.
    """
    return fire_in(resolve_session(session, "fire_schedules", is_async=False), schedules, "fire_schedules")


def fire_in(session: Session, schedules: Sequence[Any], function: str) -> list[Any]:
    groups = schedule_groups(schedules, f"{function}()")
    for group in groups:
        check_prepared(session, group.spec, function)
    session.flush()
    jobs: list[tuple[Any, type[Any], Any]] = []
    for group in groups:
        with TransactionGuard() as guard, joined_session(session, guard, partial(count_waiting, group.spec)) as own:
            jobs += execute(own, _fire, (group,))
    return [session.get(model, key, populate_existing=True) for _, model, key in sorted(jobs, key=lambda job: job[0])]


def _fire(session: Session, group: ScheduleGroup) -> list[tuple[Any, type[Any], Any]]:
    declare(session, group)
    found: list[tuple[Any, type[Any], Any]] = []
    while True:
        firing = fire(session, group)
        for _, error in firing.failed:
            raise error
        found += [(each.tick, type(each.job), each.key) for each in firing.fired if each.key is not None]
        if not firing.more:
            return found


T = TypeVar("T")
Outcome = Literal["completed", "retried", "failed", "cancelled", "released", "lease_lost"]


@dataclass(frozen=True)
class RunResult(JobResult[T]):
    """What one run made of a job, as returned by :func:`~sqlaqueue.testing.run_job`.

    ::

        (email,) = session.scalars(select(Email).where(Email.status == "pending"))
        result = run_job(session, email, send)
        assert result.state == "completed" and result.error is None

    ``state`` and ``error`` are what the database says now; ``job`` is the instance of the test's session, or None if
    its row is gone.
    """

    outcome: Outcome = "completed"
    """How the run ended, by the name of the Consumer's event: ``retried`` is a failed attempt with another one to
    follow, ``released`` a snooze."""
    delay: float | None = None
    """Seconds until the job is due again; None if its due time is unchanged, or it is finished."""
    exception: BaseException | None = None
    """The exception of the handler, with its traceback, also Retry or Snooze; :class:`~sqlaqueue.exc.WorkerDied` if no
    attempt was left after a crash; else None."""

    name: str = ""
    """The class and the key of the job."""

    def raise_unless_completed(self) -> None:
        """Raise :class:`~sqlaqueue.exc.JobFailed`, caused by the handler's exception, if the job is not completed."""
        if self.outcome != "completed":
            why = self.error if self.exception is None else repr(self.exception)
            raise JobFailed(
                f"{self.name}: the run ended as {self.outcome}, and the job is {self.state}: {why}", self
            ) from self.exception


def result_of(session: Session, spec: QueueSpec, model: type[T], event: JobEvent) -> RunResult[T]:
    ((state, error, _),) = read_states(session, spec, [event.key])
    return RunResult(
        cast("Any", state),
        session.get(model, event.key),
        error,
        cast("Outcome", event.name),
        event.delay,
        event.error,
        f"{model.__name__} {key_text(event.key)}",
    )


MOST_RUNS = 1000
"""More runs than most tests have jobs."""


def drain(
    session: AnySession,
    model: Jobs[T],
    handler: Handler[T],
    *,
    scheduled: bool = False,
    check: bool = False,
    limit: int = MOST_RUNS,
) -> int:
    """Run jobs until none is due, in the transaction of ``session``, and return the number of runs that ended.

    As in :meth:`Consumer.drain() <sqlaqueue.Consumer.drain>`, a snooze is not counted.

    Each job runs as by :func:`run_job`, in claim order::

        session.add(Email(to="ada@example.com"))
        assert drain(session, Email, send) == 2  # with the one that waited before

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param model: the queue class, or ``select(Model).where(...)`` for some of its jobs.
    :param handler: as a :class:`~sqlaqueue.Consumer` takes it, a dict of handlers by class, or a Consumer.
    :param scheduled: also run jobs that are due later, such as retries, and those that a rate blocks: whenever no
        job may start, :func:`travel` moves to when the next one may.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed`, caused by a handler's exception, if a run does not complete
        its job.
    :param limit: the most runs: a handler that always enqueues a successor would keep the test running indefinitely.
    :raises AssertionError: after more than ``limit`` runs.
    """
    own = resolve_session(session, "drain", is_async=False)
    worker: WorkerInTest = execute(own, _begin, (model, handler, "drain", limit))
    runs: int = worker.run(own, worker.run_all)
    while scheduled and execute(own, _travel_to_next, (worker,)):
        runs += worker.run(own, worker.run_all)
    execute(own, worker.end)
    if check:
        execute(own, _check, (worker,))
    return runs


async def async_drain(
    session: AnyAsyncSession,
    model: Jobs[T],
    handler: AsyncHandler[T] | Handler[T],
    *,
    scheduled: bool = False,
    check: bool = False,
    limit: int = MOST_RUNS,
) -> int:
    """The version of :func:`drain` for a coroutine function as the handler, or an AsyncConsumer.

    A function or a Consumer works as well; it gets a ``Session``::

        async_session.add(Email(to="ada@example.com"))
        assert await async_drain(async_session, Email, async_send) == 2
    """
    own = resolve_session(session, "async_drain", is_async=True)
    worker: WorkerInTest = await own.run_sync(execute, _begin, (model, handler, "async_drain", limit))
    runs: int = await worker.run_async(own, worker.run_all)
    while scheduled and await own.run_sync(execute, _travel_to_next, (worker,)):
        runs += await worker.run_async(own, worker.run_all)
    await own.run_sync(execute, worker.end)
    if check:
        await own.run_sync(execute, _check, (worker,))
    return runs


def _begin(session: Session, model: Any, handler: Any, function: str, limit: int) -> WorkerInTest:
    worker = WorkerInTest(function, model, handler, limit=limit)
    check_prepared(session, worker.spec, function)
    session.flush()
    worker.begin(session, is_async=function.startswith("async_"))
    return worker


def _check(session: Session, worker: WorkerInTest) -> None:
    for event in worker.events:
        # A rescued job has run afterwards.
        if event.name not in {"claimed", "completed", "rescued"}:
            result_of(session, worker.spec, worker.spec.model, event).raise_unless_completed()


def _travel_to_next(session: Session, worker: WorkerInTest) -> bool:
    """Travel to when the next job is due or its rates let it begin; return whether there is one."""
    spec, selection = worker.spec, worker.selection
    waiting = selection.select.where(spec.in_state("pending")) if spec.has("status") else selection.select
    delays = [*_until_due(session, worker, waiting), *_until_begun(session, spec, waiting)]
    if not delays or queue_is_paused(session, spec):
        return False
    travel(session, min(delays))
    return True


def _until_due(session: Session, worker: WorkerInTest, waiting: AnySelect) -> Iterator[timedelta]:
    """Yield the time until the first job is due of those that are due later."""
    if not worker.spec.has("run_at"):
        return
    run_at = getattr(worker.selection.entity, worker.spec.attributes["run_at"])
    later = waiting.where(*_within_reach(run_at))
    wait = later.with_only_columns(elapsed(clock(), sa.func.min(run_at)), maintain_column_froms=True)
    yield from _delays(session, worker.spec, wait)


def _until_begun(session: Session, spec: QueueSpec, waiting: AnySelect) -> Iterator[timedelta]:
    """Yield the time until all rates of a job let it begin, of the first job that they hold back."""
    flow = flow_control(spec)
    if flow is None or not flow.rates:
        return
    due = waiting.where(*spec.due(spec.columns.get("run_at")))
    # In a subquery: a select of the user may have joins, in which the rates could not refer to the jobs.
    keys = spec.strategy.pick(spec, due, *spec.keys).correlate(None)
    moments = greatest(*(_free_at(rate) for rate in flow.rates), type_=sa.DateTime(timezone=True))
    jobs = sa.select(moments.label("free_at")).where(sa.tuple_(*spec.keys).in_(keys)).subquery("sqlaqueue_jobs")
    yield from _delays(
        session, spec, sa.select(elapsed(clock(), sa.func.min(jobs.c.free_at))).where(*_within_reach(jobs.c[0]))
    )


def _free_at(rate: KeyRate) -> sa.ScalarSelect[Any]:
    """Return when the next job of a job's key may begin; NULL if it may begin at any time."""
    table = rate.spec.side_tables[RATE]
    mine = sa.and_(table.c.queue == rate.spec.name, table.c.rate == rate.name, table.c.key == rate.of(rate.spec.table))
    return sa.select(rate.free_at(table)).where(mine).correlate(rate.spec.table).scalar_subquery()


def _within_reach(moment: Any) -> list[sa.ColumnElement[bool]]:
    # Jobs whose moment has come and that were not claimed are locked or held back. Those that are parked, such as in
    # the year 9999, never run.
    return [moment > clock(), moment < later(clock(), sa.literal(LONGEST, Span()))]


def _delays(session: Session, spec: QueueSpec, wait: AnySelect) -> Iterator[timedelta]:
    delay: timedelta | None = session.execute(wait, bind_arguments={"mapper": spec.mapper}).scalar_one()
    if delay is not None:
        yield delay


def run_job(session: AnySession, job: T, handler: Handler[T], *, check: bool = False) -> RunResult[T]:
    """Claim a job, run its handler and end the run, all in the transaction of ``session``.

    What a worker does is done by the same code: the claim with its statement, the savepoint, the outcome, the count of
    attempts, the delay of the retry policy, the fence, and the undoing of a failed handler's writes. The handler has a
    session of its own, of the same class and in the same transaction; under a lease it may commit.

    ::

        email = Email(to="ada@example.com")
        session.add(email)
        assert run_job(session, email, send).state == "completed"

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param job: an instance in this session.
    :param handler: as a :class:`~sqlaqueue.Consumer` takes it, a dict of handlers by class, or a Consumer: then its
        select, retry policy, timeout, ``batch`` and event listeners are used.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed`, caused by the handler's exception, unless the job is
        completed.
    :raises NotClaimableError: if no worker would claim the job now, such as one that is not due.
    """
    own = resolve_session(session, "run_job", is_async=False)
    run: _OneRun = execute(own, _begin_one_run, (job, handler, "run_job"))
    run.worker.run(own, run.worker.run_one)
    result: RunResult[T] = execute(own, run.end)
    if check:
        result.raise_unless_completed()
    return result


async def async_run_job(
    session: AnyAsyncSession, job: T, handler: AsyncHandler[T] | Handler[T], *, check: bool = False
) -> RunResult[T]:
    """The version of :func:`run_job` for a coroutine function as the handler, or an AsyncConsumer.

    A function or a Consumer works as well; it gets a ``Session``::

        email = Email(to="ada@example.com")
        async_session.add(email)
        assert (await async_run_job(async_session, email, async_send)).state == "completed"
    """
    own = resolve_session(session, "async_run_job", is_async=True)
    run: _OneRun = await own.run_sync(execute, _begin_one_run, (job, handler, "async_run_job"))
    await run.worker.run_async(own, run.worker.run_one)
    result: RunResult[T] = await own.run_sync(execute, run.end)
    if check:
        result.raise_unless_completed()
    return result


@dataclass(eq=False)
class _OneRun:
    function: str
    model: type[Any]
    key: Key
    worker: WorkerInTest

    def end(self, session: Session) -> RunResult[Any]:
        self.worker.end(session)
        ended = [event for event in self.worker.events if event.key == self.key and event.name != "claimed"]
        if not ended or ended[-1].name == "rescued":
            raise not_claimable(session, self.model, self.key, self.function)
        return result_of(session, self.worker.spec, self.model, ended[-1])


def _begin_one_run(session: Session, job: Any, handler: Any, function: str) -> _OneRun:
    key, model = flushed_key(session, job, function), type(job)
    spec = spec_of(model)

    def only_this(select: AnySelect) -> AnySelect:
        return select.where(spec.key_in(spec.keys, [key]))

    worker = WorkerInTest(function, spec.model, handler, narrow=only_this)
    worker.begin(session, key, is_async=function.startswith("async_"))
    return _OneRun(function, model, key, worker)
