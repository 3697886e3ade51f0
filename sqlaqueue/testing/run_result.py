"""What one run made of a job: :class:`RunResult`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from sqlalchemy.orm import Session

from sqlaqueue.consumer.events import JobEvent
from sqlaqueue.exc import JobFailed, JobResult
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.waiting.wait import read_state

T = TypeVar("T")
Outcome = Literal["completed", "retried", "failed", "cancelled", "released", "lease_lost"]


@dataclass(frozen=True)
class RunResult(JobResult[T]):
    """What one run made of a job, as returned by :func:`~sqlaqueue.testing.run_job`.

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
            msg = f"{self.name}: the run ended as {self.outcome}, and the job is {self.state}: {why}"
            raise JobFailed(msg, self) from self.exception


def result_of(session: Session, spec: QueueSpec, model: type[T], event: JobEvent) -> RunResult[T]:
    """Return the result of the run that an event reports, with the present state of its job."""
    state, error, _ = read_state(session, spec, event.key)
    return RunResult(
        cast("Any", state),
        session.get(model, event.key),
        error,
        cast("Outcome", event.name),
        event.delay,
        event.error,
        f"{model.__name__} {key_text(event.key)}",
    )
