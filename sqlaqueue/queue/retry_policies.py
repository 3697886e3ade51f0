"""Retry policies: the delay before the next attempt of a failed job.

A policy is a callable ``policy(attempt, error)`` that returns seconds, a :class:`~datetime.timedelta`, or None to give
up. ``attempt`` counts from 1. The policies in this module are frozen, so one instance can be used for several queues.
Their first argument is a delay, as in ``Constant(0.3)``; all other arguments are keyword-only.

``jitter`` draws each delay uniformly from ``[(1 - jitter) * delay, delay]``, so that jobs that failed at the same time
are not repeated at the same time. ``cap`` is the maximum delay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from sqlaqueue.exc import ConfigurationError

Delay = float | timedelta
"""A duration: seconds, or a :class:`~datetime.timedelta`."""


class RetryPolicy(Protocol):
    """The type of ``QueueConfig.retry`` and ``Consumer(retry=...)``: a function of the attempt and its error.

    ::

        def soon_after_a_timeout(attempt: int, error: BaseException) -> float | None:
            return 1 if isinstance(error, TimeoutError) else 60 * attempt

        QueueConfig(retry=soon_after_a_timeout)
    """

    def __call__(self, attempt: int, error: BaseException, /) -> Delay | None:
        """Return the delay before the next attempt, in seconds or as a timedelta, or None to give up.

        :param attempt: the number of the attempt that failed, 1 for the first.
        :param error: what the handler raised.
        """


def seconds(span: Delay, what: str = "delay") -> float:
    """Return a duration in seconds.

    :param what: the name of the argument, for the error.
    :raises ConfigurationError: unless ``span`` is a finite duration of zero or more.
    """
    if isinstance(span, timedelta):
        span = span.total_seconds()
    given: object = span  # without a type checker, callers may pass any object
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
        msg = f"{what} must be seconds or a timedelta, zero or more, not {span!r}"
        raise ConfigurationError(msg)
    return float(given)


@dataclass(frozen=True, kw_only=True)
class _Backoff:
    jitter: float = 0.1
    cap: Delay = timedelta(hours=1)

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            msg = f"{type(self).__name__}(jitter={self.jitter!r}): jitter must be between 0 and 1"
            raise ConfigurationError(msg)
        seconds(self.cap, f"{type(self).__name__}(cap=...)")

    def _spread(self, delay: Callable[[], float]) -> float:
        cap = seconds(self.cap)
        try:
            capped = min(delay(), cap)
        except OverflowError:
            capped = cap
        return capped * (1 - self.jitter * random.random())  # noqa: S311 - no secret depends on it


@dataclass(frozen=True)
class Constant(_Backoff):
    """The same ``delay`` before every attempt.

    ::

        QueueConfig(retry=Constant(30))

    :param delay: seconds or a timedelta.
    :param jitter: the part of the delay, from 0 to 1, by which it may be shorter, at random.
    :param cap: the longest delay, in seconds or as a timedelta.
    :raises ConfigurationError: for a number out of range.
    """

    delay: Delay = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.delay, "Constant(delay=...)")

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay after a failed attempt, in seconds."""
        return self._spread(lambda: seconds(self.delay))


@dataclass(frozen=True)
class Linear(_Backoff):
    """A delay of ``step`` after the first failure, twice ``step`` after the second, and so on, up to ``cap``.

    ::

        QueueConfig(retry=Linear(timedelta(minutes=1), cap=timedelta(hours=1)))

    :param step: seconds or a timedelta.
    :param jitter: the part of the delay, from 0 to 1, by which it may be shorter, at random.
    :param cap: the longest delay, in seconds or as a timedelta.
    :raises ConfigurationError: for a number out of range.
    """

    step: Delay = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.step, "Linear(step=...)")

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay after a failed attempt, in seconds."""
        return self._spread(lambda: seconds(self.step) * attempt)


@dataclass(frozen=True)
class Exponential(_Backoff):
    """A delay of ``base`` after the first failure, multiplied by ``factor`` after each further one, up to ``cap``.

    ::

        QueueConfig(retry=Exponential(5, factor=2, cap=timedelta(hours=1)))

    :param base: seconds or a timedelta.
    :param jitter: the part of the delay, from 0 to 1, by which it may be shorter, at random.
    :param cap: the longest delay, in seconds or as a timedelta.
    :param factor: by how much a delay is longer than the one before.
    :raises ConfigurationError: for a number out of range.
    """

    base: Delay = 5.0
    factor: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.base, "Exponential(base=...)")
        if not self.factor >= 1:
            msg = f"Exponential(factor={self.factor!r}): factor must be 1 or more"
            raise ConfigurationError(msg)

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay after a failed attempt, in seconds."""
        base = seconds(self.base)
        return self._spread(lambda: base and base * self.factor ** (attempt - 1))
