"""Every error that sqlaqueue raises, and the signals that a handler may raise.

All of them derive from :class:`SqlaqueueError`, so that one ``except`` catches what the library
itself has to say and nothing else.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlaqueue.results import JobResult


class SqlaqueueError(Exception):
    """Base of every error and signal of sqlaqueue."""


class ConfigurationError(SqlaqueueError):
    """A model, its :class:`~sqlaqueue.QueueConfig` or a Consumer is set up wrongly.

    Raised when the class is mapped wherever that is early enough to know.
    """


class DatabaseNotReadyError(ConfigurationError):
    """The database lacks what a queue needs, or the role may not do it; the message says what makes or grants it."""


class UnknownStrategyError(ConfigurationError):
    """``QueueConfig.strategy`` names a strategy that nobody registered."""


class NotAQueueError(SqlaqueueError):
    """A verb was given something that is not a mapped class with :class:`~sqlaqueue.QueueMixin`."""


class StatementError(SqlaqueueError):
    """A verb was given arguments from which no correct statement can be built."""


class NotClaimedError(SqlaqueueError):
    """A verb that ends or extends a run was given a job that this process does not hold.

    No claim handed the instance out, its run has been settled already, or the transaction that
    held it is over.
    """


class LeaseLost(SqlaqueueError):
    """The run of a job was over before its result arrived: the lease had passed to another run.

    Nothing was changed by the late result. The Consumer reports it as the event ``lease_lost``.
    """


class HandlerMisuseError(SqlaqueueError):
    """A handler ended the transaction that holds its batch (commit, rollback or close)."""


class JobTimeout(SqlaqueueError):
    """A handler ran for longer than the Consumer's ``timeout``; its result is refused."""


class WorkerDied(SqlaqueueError):
    """The error stored with a job whose worker died while running it alone."""


class WaitTimeout(SqlaqueueError, TimeoutError):
    """The time to wait for the end of a job is over, and the job is not."""


class JobFailed(SqlaqueueError):
    """A job that was waited for has ended otherwise than by success.

    :param result: how it ended, a :class:`~sqlaqueue.JobResult`.
    """

    def __init__(self, message: str, result: JobResult[Any]) -> None:
        super().__init__(message)
        self.result = result


class HandlerSignal(SqlaqueueError):
    """Base of what a handler raises to say how its run ends, other than by success."""


class Retry(HandlerSignal):
    """Run this job again later; the attempt counts.

    :param delay: seconds or :class:`~datetime.timedelta` from now; None lets the retry policy decide.
    :param error: the text to store in ``last_error``; None stores nothing new.
    """

    def __init__(self, delay: float | timedelta | None = None, error: str | None = None) -> None:
        super().__init__(error or "retry requested by the handler")
        self.delay = delay
        self.error = error


class Snooze(HandlerSignal):
    """Put this job back for later; the attempt does not count.

    :param delay: seconds or :class:`~datetime.timedelta` from now.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__("snoozed by the handler")
        self.delay = delay


class Fail(HandlerSignal):
    """This job failed for good: no attempt is left for it, whatever ``max_attempts`` says.

    ``last_error`` becomes ``kind: reason``, and failed jobs are counted by their kinds, so the kind says what went
    wrong and the reason with which job: ``Fail("order 1: no stock", kind="no_stock")``.

    :param reason: the text to store in ``last_error``.
    :param kind: a word for this kind of failure, made of letters, digits, underscores and dots; by default the name
        of the class, ``Fail``.
    :raises ConfigurationError: when ``kind`` is something else.
    """

    def __init__(self, reason: str = "failed by the handler", *, kind: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = type(self).__name__ if kind is None else kind
        given: object = self.kind  # what a caller without a type checker passes may be anything
        # A query reads the kind up to its colon, and must not take part of another text for one.
        if not isinstance(given, str) or not all(part.isidentifier() for part in given.split(".")):
            msg = f"Fail(kind={kind!r}): give a word of letters, digits, underscores and dots, such as 'no_stock'"
            raise ConfigurationError(msg)


class Cancel(HandlerSignal):
    """This job need not be done any more: its run ends as cancelled.

    :param reason: the text to store in ``last_error``.
    """

    def __init__(self, reason: str = "cancelled by the handler") -> None:
        super().__init__(reason)
        self.reason = reason
