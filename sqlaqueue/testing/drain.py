"""Run all due jobs of a queue in a test's transaction: :func:`drain`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.keys import KeyRate, flow_control
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.testing._types import AnySession, Handler, Jobs
from sqlaqueue.testing.in_transaction.claimable import queue_is_paused
from sqlaqueue.testing.in_transaction.joined_sessions import resolve_session
from sqlaqueue.testing.in_transaction.worker import WorkerInTest
from sqlaqueue.testing.run_result import result_of
from sqlaqueue.testing.travel import LONGEST, travel
from sqlaqueue.write_routing import execute

if TYPE_CHECKING:
    from sqlaqueue.testing._types import AnyAsyncSession, AsyncHandler

T = TypeVar("T")

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

    Each job runs as by :func:`run_job`, in claim order.

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param model: the queue class, or ``select(Model).where(...)`` for some of its jobs.
    :param handler: as a :class:`~sqlaqueue.Consumer` takes it, a dict of handlers by class, or a Consumer.
    :param scheduled: also run jobs that are due later, such as retries, and those that a rate holds back: whenever no
        job may begin, :func:`travel` moves to when the next one may.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed`, caused by a handler's exception, if a run does not complete
        its job.
    :param limit: the most runs: a handler that always enqueues a successor would keep the test running for ever.
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
    """Do what :func:`drain` does, with a coroutine function as the handler, or an AsyncConsumer.

    A function or a Consumer works as well; it gets a ``Session``.
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
    session.flush()
    worker = WorkerInTest(function, model, handler, limit=limit)
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
    wait = later.with_only_columns(sa.func.min(run_at) - clock(), maintain_column_froms=True)
    yield from _delays(session, worker.spec, wait)


def _until_begun(session: Session, spec: QueueSpec, waiting: AnySelect) -> Iterator[timedelta]:
    """Yield the time until all rates of a job let it begin, of the first job that they hold back."""
    flow = flow_control(spec)
    if flow is None or not flow.rates:
        return
    due = waiting.where(*spec.due(spec.columns.get("run_at")))
    # In a subquery: a select of the user may have joins, in which the rates could not refer to the jobs.
    keys = spec.strategy.pick(spec, due, *spec.keys).correlate(None)
    moments = sa.func.greatest(*(_free_at(rate) for rate in flow.rates), type_=sa.DateTime(timezone=True))
    jobs = sa.select(moments.label("free_at")).where(sa.tuple_(*spec.keys).in_(keys)).subquery("sqlaqueue_jobs")
    yield from _delays(session, spec, sa.select(sa.func.min(jobs.c.free_at) - clock()).where(*_within_reach(jobs.c[0])))


def _free_at(rate: KeyRate) -> sa.ScalarSelect[Any]:
    """Return when the next job of a job's key may begin; NULL if it may begin at any time."""
    table = rate.spec.side_tables[RATE]
    mine = sa.and_(table.c.queue == rate.spec.name, table.c.rate == rate.name, table.c.key == rate.of(rate.spec.table))
    return sa.select(rate.free_at(table)).where(mine).correlate(rate.spec.table).scalar_subquery()


def _within_reach(moment: Any) -> list[sa.ColumnElement[bool]]:
    # Jobs whose moment has come and that were not claimed are locked or held back. Those that are parked, such as in
    # the year 9999, never run.
    return [moment > clock(), moment < clock() + sa.literal(LONGEST, sa.Interval())]


def _delays(session: Session, spec: QueueSpec, wait: AnySelect) -> Iterator[timedelta]:
    delay: timedelta | None = session.execute(wait, bind_arguments={"mapper": spec.mapper}).scalar_one()
    if delay is not None:
        yield delay
