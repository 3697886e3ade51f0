"""Run one job in a test's transaction: :func:`run_job`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key
from sqlaqueue.testing._types import AnySession, Handler
from sqlaqueue.testing.in_transaction.claimable import flushed_key, not_claimable
from sqlaqueue.testing.in_transaction.joined_sessions import resolve_session
from sqlaqueue.testing.in_transaction.worker import WorkerInTest
from sqlaqueue.testing.run_result import RunResult, result_of
from sqlaqueue.write_routing import execute

if TYPE_CHECKING:
    from sqlaqueue.testing._types import AnyAsyncSession, AsyncHandler

T = TypeVar("T")


def run_job(session: AnySession, job: T, handler: Handler[T], *, check: bool = False) -> RunResult[T]:
    """Claim a job, run its handler and settle the run, all in the transaction of ``session``.

    What a worker does is done by the same code: the claim with its statement, the savepoint, the outcome, the count of
    attempts, the delay of the retry policy, the fence, and the undoing of a failed handler's writes. The handler has a
    session of its own, of the same class and in the same transaction; under a lease it may commit.

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param job: an instance in this session.
    :param handler: as a :class:`~sqlaqueue.Consumer` takes it, a dict of handlers by class, or a Consumer: then its
        select, retry policy, timeout, ``batch`` and event listeners are used.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed`, caused by the handler's exception, unless the job is
        completed.
    :raises NotClaimableError: if no worker would claim the job now, such as one that is not due.
    """
    own = resolve_session(session, "run_job", is_async=False)
    run: _OneRun = execute(own, _begin, (job, handler, "run_job"))
    run.worker.run(own, run.worker.run_one)
    result: RunResult[T] = execute(own, run.end)
    if check:
        result.raise_unless_completed()
    return result


async def async_run_job(
    session: AnyAsyncSession, job: T, handler: AsyncHandler[T] | Handler[T], *, check: bool = False
) -> RunResult[T]:
    """Do what :func:`run_job` does, with a coroutine function as the handler, or an AsyncConsumer.

    A function or a Consumer works as well; it gets a ``Session``.
    """
    own = resolve_session(session, "async_run_job", is_async=True)
    run: _OneRun = await own.run_sync(execute, _begin, (job, handler, "async_run_job"))
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


def _begin(session: Session, job: Any, handler: Any, function: str) -> _OneRun:
    key, model = flushed_key(session, job, function), type(job)
    spec = spec_of(model)

    def only_this(select: AnySelect) -> AnySelect:
        return select.where(spec.key_in(spec.keys, [key]))

    worker = WorkerInTest(function, spec.model, handler, narrow=only_this)
    worker.begin(session, key, is_async=function.startswith("async_"))
    return _OneRun(function, model, key, worker)
