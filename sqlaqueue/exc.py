"""The errors that sqlaqueue raises, and the signals that a handler raises to end its run.

All of them derive from :class:`SqlaqueueError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Literal, TypeVar

# -- results -----------------------------------------------------------------------------------------------------------
# The result of waiting for a job: :class:`JobResult`.


T = TypeVar("T")


@dataclass(frozen=True)
class JobResult(Generic[T]):
    """The state of a job, as returned by ``wait()``.

    ::

        with Consumer(Email, send, sessions):
            result = wait(sessions, Email, 1)
        print(result.state, result.job, result.error)
    """

    state: Literal["waiting", "pending", "processing", "completed", "failed", "cancelled", "gone"]
    """``gone``: the row does not exist, or its status is not a value of the queue's states. If the queue deletes
    completed jobs, a job without a row counts as completed. ``wait()`` returns no job that is pending or processing."""
    job: T | None
    """The job, loaded again and detached; None if its row does not exist."""
    error: str | None = None
    """The last error, without its traceback. A completed job has one if an earlier attempt failed."""

    @property
    def value(self) -> Any:
        """What the function of a completed job has returned, see :class:`~sqlaqueue.FunctionMixin`; otherwise None."""
        attribute = getattr(self.job, "__returned__", None)
        return getattr(self.job, attribute) if attribute and self.state == "completed" else None


class SqlaqueueError(Exception):
    """Base class of all errors and signals of sqlaqueue."""


class ConfigurationError(SqlaqueueError):
    """A model, its :class:`~sqlaqueue.QueueConfig`, a Consumer or an argument of either is configured wrongly.

    It is raised as early as the mistake can be found: usually when the class is mapped.
    """


class DatabaseNotReadyError(ConfigurationError):
    """The database lacks a table, trigger or privilege that a queue needs; the message names the fix."""


class UnknownStrategyError(ConfigurationError):
    """``QueueConfig.strategy`` names a strategy that is not registered."""


class WrongArguments(SqlaqueueError, TypeError):
    """A function of a :class:`~sqlaqueue.FunctionMixin` cannot be called so, or JSON cannot hold an argument."""


class NotAQueueError(SqlaqueueError):
    """The class or instance that was given is not mapped with :class:`~sqlaqueue.QueueMixin`."""


class StatementError(SqlaqueueError):
    """The arguments do not make a correct statement."""


class NotClaimedError(SqlaqueueError):
    """A statement that ends or extends a run was given a job that this process does not hold.

    The instance was not returned by a claim, its run has ended already, or the transaction that held it has ended.
    """


class NotClaimableError(SqlaqueueError, AssertionError):
    """A function of :mod:`sqlaqueue.testing` cannot claim the job that it was given; the message says why."""


class TransactionLostError(SqlaqueueError):
    """The connection of a test's transaction was lost while a handler ran, and with it all that the test had done."""


class JobExists(SqlaqueueError):
    """A job was not enqueued because it is a duplicate, and the caller had passed ``on_duplicate="raise"``.

    :param job: the job that was given.
    :param existing: the job with the same values that exists, or an earlier one of the same call.
    """

    def __init__(self, message: str, job: Any, existing: Any) -> None:
        super().__init__(message)
        self.job, self.existing = job, existing


class LeaseLost(SqlaqueueError):
    """The lease of a run expired before its result arrived, and another run may have the job.

    The late result changes nothing. A Consumer emits the event ``lease_lost`` with this error.
    """


class HandlerMisuseError(SqlaqueueError):
    """A handler did what only its Consumer may do, such as to end its job or to commit a held transaction."""


class JobTimeout(SqlaqueueError):
    """A handler ran for longer than the Consumer's ``timeout``; its result is refused, and the attempt has failed.

    With ``sqlaqueue worker --isolate`` its process was killed.
    """


class HandlerNotStopped(SqlaqueueError):
    """A Consumer has stopped, but a handler still runs after the grace period.

    A thread cannot be ended, and a task may swallow its cancellation. The job has been released, or is when its lease
    expires, and the handler's result is refused; but what it does outside the database continues until the process
    ends.

    :param handlers: for each such call the handler with its module, the keys of its jobs, and how long it has run.
    """

    def __init__(self, message: str, handlers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.handlers = handlers


class WorkerDied(SqlaqueueError):
    """The error in ``last_error`` of a job whose worker died while it ran only this job.

    The worker may have been killed by ``sqlaqueue worker --isolate --max-memory``, as the text says then.
    """


class WaitTimeout(SqlaqueueError, TimeoutError):
    """The job has not ended within the timeout of :func:`~sqlaqueue.wait`; it continues."""


class JobFailed(SqlaqueueError):
    """A job did not complete, and the caller had passed ``check=True``.

    :param result: its :class:`~sqlaqueue.JobResult`.
    """

    def __init__(self, message: str, result: JobResult[Any]) -> None:
        super().__init__(message)
        self.result = result


class HandlerSignal(SqlaqueueError):
    """Base class of what a handler raises to end its run in another way than as completed."""


class Retry(HandlerSignal):
    """Run the job again later; the attempt counts, and after the last one the job has failed.

    ::

        def send(session: Session, email: Email) -> None:
            if email.attempts == 1:
                raise Retry(timedelta(minutes=5), error="the server is busy")

        Consumer(Email, send, sessions).run()

    :func:`~sqlaqueue.retry` is the statement for jobs that a program has claimed itself.

    :param delay: seconds or :class:`~datetime.timedelta` from now; None uses the delay of the retry policy.
    :param error: the text for ``last_error``; None leaves it unchanged.
    """

    def __init__(self, delay: float | timedelta | None = None, error: str | None = None) -> None:
        super().__init__(error or "retry requested by the handler")
        self.delay = delay
        self.error = error


class Snooze(HandlerSignal):
    """Run the job again later; the attempt does not count.

    ::

        def send(session: Session, email: Email) -> None:
            if datetime.now(UTC).hour < 8:
                raise Snooze(timedelta(hours=1))

        Consumer(Email, send, sessions).run()

    :param delay: seconds or :class:`~datetime.timedelta` from now.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__("snoozed by the handler")
        self.delay = delay


class Throttle(HandlerSignal):
    """Hold the key of a rate back, and run the job again then; the attempt does not count.

    This is the answer to a service that has refused a call for some time, such as with the HTTP status 429::

        def send(session: Session, email: Email) -> None:
            response = httpx.post("https://mail.example/send", json={"to": email.to})
            if response.status_code == 429:
                raise Throttle(int(response.headers["Retry-After"]), per="customer_id")

    :param until: until when no job of the key starts: seconds or :class:`~datetime.timedelta` from now, or a
        :class:`~datetime.datetime` with a time zone.
    :param per: the attributes of a :class:`~sqlaqueue.RateLimit` of the queue, as its ``per`` names them. All rates
        with this key are blocked. None means those of the whole queue.
    :raises ConfigurationError: if ``until`` is no such time, below zero or without a time zone, or ``per`` is neither
        a name nor several. If the queue has no such rate, the attempt fails with this error.
    """

    def __init__(self, until: float | timedelta | datetime, per: str | Sequence[str] | None = None) -> None:
        super().__init__("throttled by the handler")
        _check_until(until)
        names: object = () if per is None else (per,) if isinstance(per, str) else per
        if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
            msg = f"Throttle(per={per!r}): give the name of an attribute, or several, as in the per of the RateLimit"
            raise ConfigurationError(msg)
        self.until = until
        self.per: tuple[str, ...] = tuple(names)

    @property
    def delay(self) -> float | timedelta:
        """The time from now on; not below zero."""
        if isinstance(self.until, datetime):
            return max(self.until - datetime.now(UTC), timedelta(0))
        return self.until


def _check_until(until: object) -> None:
    if isinstance(until, datetime):
        if until.tzinfo is None:
            msg = f"Throttle({until!r}): use a datetime with a time zone, or the time from now"
            raise ConfigurationError(msg)
        return
    seconds = until.total_seconds() if isinstance(until, timedelta) else until
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        msg = f"Throttle({until!r}): use seconds or a timedelta from now, zero or more, or a datetime with a time zone"
        raise ConfigurationError(msg)


class Fail(HandlerSignal):
    """The job has failed, and is not retried.

    ``last_error`` becomes ``kind: reason``. Failed jobs are counted by kind, so put details into the reason:
    ``Fail("order 1: no stock", kind="no_stock")``::

        def send(session: Session, email: Email) -> None:
            if "@" not in email.to:
                raise Fail(f"{email.to} is no address", kind="bad_address")

        Consumer(Email, send, sessions).run()

    :func:`~sqlaqueue.fail` is the statement for jobs that a program has claimed itself.

    :param reason: the text for ``last_error``.
    :param kind: the kind of failure: letters, digits, underscores and dots. By default the name of the class, ``Fail``.
    :raises ConfigurationError: if ``kind`` contains anything else.
    """

    def __init__(self, reason: str = "failed by the handler", *, kind: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = type(self).__name__ if kind is None else kind
        given: object = self.kind  # without a type checker a caller may pass anything
        # Statistics read the kind up to its colon, so it must not contain one.
        if not isinstance(given, str) or not all(part.isidentifier() for part in given.split(".")):
            msg = f"Fail(kind={kind!r}): give letters, digits, underscores and dots, such as 'no_stock'"
            raise ConfigurationError(msg)


class UnknownFunction(Fail):
    """A job of a :class:`~sqlaqueue.FunctionMixin` calls a function that its worker does not have; it is not retried.

    Import the module that registers the function in the worker, and requeue the job.
    """


class Cancel(HandlerSignal):
    """The job is not needed any more, and ends as cancelled.

    ::

        def send(session: Session, email: Email) -> None:
            if email.customer_id is None:
                raise Cancel("the customer is gone")

        Consumer(Email, send, sessions).run()

    :func:`~sqlaqueue.cancel` is the statement for other jobs than that of the handler.

    :param reason: the text for ``last_error``.
    """

    def __init__(self, reason: str = "cancelled by the handler") -> None:
        super().__init__(reason)
        self.reason = reason
