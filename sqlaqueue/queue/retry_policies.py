"""Retry policies: how long a failed job waits before its next attempt.

A policy is any callable ``policy(attempt, error)`` that returns seconds, a
:class:`~datetime.timedelta`, or None to give up. ``attempt`` counts from 1. The three policies here
cover the usual cases and are frozen, so one instance may serve many queues. The first argument is the
delay, as in ``Constant(0.3)``; all others are given by name.

Jitter draws the delay evenly from ``[(1 - jitter) * delay, delay]``: jobs that failed together, say
because a service was down, do not all come back at the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from sqlaqueue.exc import ConfigurationError

Delay = float | timedelta
"""A span of time: seconds or :class:`~datetime.timedelta`."""


class RetryPolicy(Protocol):
    """What ``QueueConfig.retry`` and ``Consumer(retry=...)`` take."""

    def __call__(self, attempt: int, error: BaseException, /) -> Delay | None:
        """Return the delay before the next attempt, or None to give up."""


def seconds(span: Delay, what: str = "delay") -> float:
    """Return ``span`` in seconds.

    :raises ConfigurationError: for anything that is not a finite, non-negative span of time.
    """
    if isinstance(span, timedelta):
        span = span.total_seconds()
    given: object = span  # what a caller without a type checker passes may be anything
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
        return capped * (1 - self.jitter * random.random())  # noqa: S311 - spreads load, guards nothing


@dataclass(frozen=True)
class Constant(_Backoff):
    """Wait the same ``delay`` before every attempt."""

    delay: Delay = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.delay, "Constant(delay=...)")

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay before the attempt after ``attempt``, in seconds."""
        return self._spread(lambda: seconds(self.delay))


@dataclass(frozen=True)
class Linear(_Backoff):
    """Wait ``step`` after the first failure, twice as long after the second, and so on up to ``cap``."""

    step: Delay = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.step, "Linear(step=...)")

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay before the attempt after ``attempt``, in seconds."""
        return self._spread(lambda: seconds(self.step) * attempt)


@dataclass(frozen=True)
class Exponential(_Backoff):
    """Wait ``base`` after the first failure and ``factor`` times longer after each one, up to ``cap``."""

    base: Delay = 5.0
    factor: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds(self.base, "Exponential(base=...)")
        if not self.factor >= 1:
            msg = f"Exponential(factor={self.factor!r}): factor must be 1 or more"
            raise ConfigurationError(msg)

    def __call__(self, attempt: int, error: BaseException, /) -> float:
        """Return the delay before the attempt after ``attempt``, in seconds."""
        base = seconds(self.base)
        return self._spread(lambda: base and base * self.factor ** (attempt - 1))
