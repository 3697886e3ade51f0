"""The two drivers: they send a routine the results of its effects, in threads and in tasks.

A driver catches the exceptions of an effect and throws them into the routine, which decides what follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any, TypeVar

E = TypeVar("E")
R = TypeVar("R")


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
