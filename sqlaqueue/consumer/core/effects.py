"""Effects: the data that a routine yields to say what is to be done.

A routine is a generator. It yields an effect (execute an operation, call the handler, wait) and is sent the result, so
the order of operations, on which the guarantees rest, is written once for threads and tasks. Two drivers,
:func:`drive` for threads and :func:`adrive` for tasks, carry effects out and send their results. An exception of an
effect is thrown into the routine, which decides what follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass
from types import coroutine
from typing import Any, Literal, NamedTuple, TypeVar

S = TypeVar("S")
E = TypeVar("E")
R = TypeVar("R")


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


# -- drivers -----------------------------------------------------------------------------------------------------------


def drive(routine: Generator[E, Any, R], perform: Callable[[E], Any]) -> R:
    """Run a routine to its end and return what it returns; ``perform`` carries one effect out."""
    result: Any = None
    raised: Exception | None = None
    while True:
        try:
            effect = routine.send(result) if raised is None else routine.throw(raised)
        except StopIteration as end:
            returned: R = end.value
            return returned
        result = raised = None
        try:
            result = perform(effect)
        except Exception as error:  # noqa: BLE001 - the routine decides what an error means
            raised = error


async def adrive(routine: Generator[E, Any, R], perform: Callable[[E], Awaitable[Any]]) -> R:
    """Run a routine to its end in a task, like :func:`drive` in a thread, and return what it returns."""
    result: Any = None
    raised: Exception | None = None
    while True:
        try:
            effect = routine.send(result) if raised is None else routine.throw(raised)
        except StopIteration as end:
            returned: R = end.value
            return returned
        result = raised = None
        try:
            result = await perform(effect)
        except Exception as error:  # noqa: BLE001 - the routine decides what an error means
            raised = error


@coroutine
def await_in(variables: Context, awaited: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
    """Await a coroutine with context variables of its own, in the task of the caller.

    A task of its own would cost more than most of what a quick handler does.
    """
    step, value = awaited.send, None
    try:
        while True:
            try:
                waits_for = variables.run(step, value)
            except StopIteration as end:
                returned: R = end.value
                return returned
            try:
                step, value = awaited.send, (yield waits_for)
            except GeneratorExit:
                variables.run(awaited.close)
                raise
            except BaseException as error:  # noqa: BLE001 - such as a cancellation, which is the coroutine's
                step, value = awaited.throw, error
    finally:
        # The traceback of an exception that was thrown refers to this frame.
        value = None
