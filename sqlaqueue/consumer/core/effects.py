"""The steps of a script, which is how the work of both Consumers is written down.

A script is a generator. It yields what is to be done, an operation in its session, a handler's call, a pause, and is
sent the result, so that the order of things, which is where the guarantees are, stands in one place;
:mod:`sqlaqueue.consumer.sync` and :mod:`sqlaqueue.consumer.aio` only carry the steps out, each in its own colour.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue.consumer.executing.executor import Hand
from sqlaqueue.consumer.sessions.write_routing import has_own_routing, routing_to_primary
from sqlaqueue.consumer.settling.outcomes import Ended

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out an operation in the script's own session; send its result."""

    operation: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, session: Session) -> Any:
        """Carry it out."""
        if has_own_routing(session):
            with routing_to_primary(session):
                return self.operation(session, *self.arguments)
        return self.operation(session, *self.arguments)


@dataclass(frozen=True, slots=True)
class Beside(Do):
    """Carry out an operation in a session of its own; send its result."""

    patience: float | None = None
    """Seconds after which it is broken off, and raises; None to wait for ever."""


@dataclass(frozen=True, slots=True)
class InSession:
    """Carry out a script in a new session, which is closed when it ends; send what it returns."""

    script: Script


@dataclass(frozen=True, slots=True)
class Handle:
    """Call the handler for one unit of a hand after the other, until one is to be looked at, or none is to be begun."""

    hand: Hand


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some seconds, but not past the stop of the shift."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Doze:
    """Wait for some seconds, but not past the end of the shift, nor when there is something for the keeper to do."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Wait until somebody calls, or for some seconds, but not past the stop of the shift; hardly ever two at a time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait until another thread or task has changed something, or for some seconds."""

    seen: int
    """The version of the crew's state on which the decision to wait was based."""
    seconds: float


def needed(session: S | None) -> S:
    """Return the session of a script whose steps need one."""
    if session is None:
        msg = "this script has no session of its own; carry it out by InSession"
        raise RuntimeError(msg)
    return session


Step = Do | InSession | Handle | Pause | Doze | Watch | Rest
Script = Generator[Step, Any, Any]


@dataclass(slots=True)
class Report:
    """What has been done with some jobs."""

    settled: Sequence[Ended] = ()
    """Runs whose end is committed."""
    unsettled: Sequence[Ended] = ()
    """Runs that ended without a commit of their own, to be settled together with others."""
    lost: Sequence[Ended] = ()
    """Runs whose result was refused."""
    apart: Sequence[Any] = ()
    """Jobs of a batch that failed as a whole, detached, each to be tried by itself."""
    claimed: int = 0
