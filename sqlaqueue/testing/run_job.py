"""Run one job in a test's transaction: :func:`run_job`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.core.events import JobEvent
from sqlaqueue.consumer.sessions.write_routing import execute
from sqlaqueue.keys import Key
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.results import JobResult
from sqlaqueue.testing._types import AnySession, Handler
from sqlaqueue.testing.claimable import flushed_key, not_claimable
from sqlaqueue.testing.joined_sessions import resolve_session
from sqlaqueue.testing.transaction_view import remember_earlier_jobs, show_changes
from sqlaqueue.testing.worker import WorkerInTest
from sqlaqueue.waiting.job_end import read_state

if TYPE_CHECKING:
    from sqlaqueue.testing._types import AnyAsyncSession, AsyncHandler

T = TypeVar("T")
Outcome = Literal["completed", "retried", "failed", "cancelled", "released", "lease_lost"]


@dataclass(frozen=True)
class RunResult(JobResult[T]):
    """What one run made of a job, as returned by :func:`run_job`.

    ``state`` and ``error`` are what the database says now; ``job`` is the instance of the test's session, or None if
    its row is gone.
    """

    outcome: Outcome = "completed"
    """How the run ended, by the name of the Consumer's event: ``retried`` is a failed attempt with another one to
    follow, ``released`` a snooze."""
    delay: float | None = None
    """Seconds until the job is due again; None if its due time is unchanged, or it is finished."""
    exception: BaseException | None = None
    """The exception of the handler, with its traceback; None if it raised none."""


def run_job(session: AnySession, job: T, handler: Handler[T]) -> RunResult[T]:
    """Claim a job, run its handler and settle the run, all in the transaction of ``session``.

    What a worker does is done by the same code: the claim with its statement, the savepoint, the outcome, the count of
    attempts, the delay of the retry policy, the fence, and the undoing of a failed handler's writes. The handler has a
    session of its own, of the same class and in the same transaction; under a lease it may commit.

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param job: an instance in this session.
    :param handler: as a :class:`~sqlaqueue.Consumer` takes it, a dict of handlers by class, or a Consumer, whose
        handler, retry policy, timeout and ``batch`` are used.
    :raises NotClaimableError: if no worker would claim the job now, such as one that is not due.
    """
    own = resolve_session(session, "run_job", is_async=False)
    run: _OneRun = execute(own, _begin, (job, handler, "run_job"))
    run.worker.run(own, run.worker.run_one)
    return cast("RunResult[T]", execute(own, run.end))


async def async_run_job(session: AnyAsyncSession, job: T, handler: AsyncHandler[T]) -> RunResult[T]:
    """Do what :func:`run_job` does, with a coroutine function as the handler, or an AsyncConsumer."""
    own = resolve_session(session, "async_run_job", is_async=True)
    run: _OneRun = await own.run_sync(execute, partial(_begin, is_async=True), (job, handler, "async_run_job"))
    await run.worker.run_async(own, run.worker.run_one)
    return cast("RunResult[T]", await own.run_sync(execute, run.end))


@dataclass(eq=False)
class _OneRun:
    function: str
    model: type[Any]
    key: Key
    worker: WorkerInTest
    is_async: bool

    def end(self, session: Session) -> RunResult[Any]:
        spec = self.worker.spec
        ended = [event for event in self.worker.events if event.key == self.key and event.name != "claimed"]
        state, error, _ = read_state(session, spec, self.key)
        # A rescue may have failed the job: then there was no attempt left, and nothing to run.
        if not ended or (ended[-1].name == "rescued" and state == "pending"):
            raise not_claimable(session, self.model, self.key, self.function)
        show_changes(session, is_async=self.is_async)
        event = ended[-1]
        return RunResult(
            cast("Any", state),
            session.get(self.model, self.key),
            error,
            _outcome(event),
            event.delay,
            event.error,
        )


def _outcome(event: JobEvent) -> Outcome:
    return "failed" if event.name == "rescued" else cast("Outcome", event.name)


def _begin(session: Session, job: Any, handler: Any, function: str, *, is_async: bool = False) -> _OneRun:
    key, model = flushed_key(session, job, function), type(job)
    spec = spec_of(model)

    def only_this(select: AnySelect) -> AnySelect:
        return select.where(spec.key_in(spec.keys, [key]))

    worker = WorkerInTest(function, spec.model, handler, is_async=is_async, narrow=only_this)
    remember_earlier_jobs(session, spec)
    return _OneRun(function, model, key, worker, is_async)
