"""Effects: the data that a routine yields to say what is to be done.

A routine is a generator. It yields an effect (execute an operation, call the handler, wait) and is sent the result, so
the order of operations, on which the guarantees rest, is written once for threads and tasks. The two drivers in
:mod:`sqlaqueue.consumer.core.driver` carry effects out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute an operation in the routine's session, and send its result."""

    operation: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    variables: Context | None = None
    """The context variables of the handler whose changes are flushed by it; None for those of the program."""


@dataclass(frozen=True, slots=True)
class ExecuteInOwnSession(Execute):
    """Execute an operation in a session of its own, and send its result."""

    deadline: float | None = None
    """Seconds after which its statements are cancelled and the effect raises; None for as long as anything may take."""

    slow: bool = False
    """Whether it may take long on a large table: once the server has cancelled it, it has longer the next time."""


class WithSession(NamedTuple):
    """Run a routine with a new session, close the session, and send what the routine returns."""

    routine: Routine


class CallHandler(NamedTuple):
    """Call the handler for one call group of an executor after the other, until the routine has to look at a result."""

    executor: Any
    """An :class:`~sqlaqueue.consumer.executor.Executor`."""


WaitFor = Literal["stop", "maintenance", "schedules", "poll", "change"]


class Wait(NamedTuple):
    """Wait until something happens, the consumer stops, or a number of seconds has passed.

    ``"stop"`` waits for the stop only, ``"maintenance"`` for a maintenance task that is due, ``"schedules"`` for a
    change of the schedules, ``"poll"`` for a poll that is due, and ``"change"`` for a change of the shared state by
    another worker.
    """

    on: WaitFor
    seconds: float
    version: int = 0
    """For ``"change"``: the version of the state on which the decision to wait was based."""


Effect = Execute | WithSession | CallHandler | Wait
Routine = Generator[Effect, Any, Any]


def require_session(session: S | None) -> S:
    """Return the session of a routine whose effects need one."""
    if session is None:
        msg = "this routine has no session of its own; run it by WithSession"
        raise RuntimeError(msg)
    return session
