"""Middleware: callables around each call of a handler, which see the job and the handler's result or error.

The idea is that of WSGI's middleware and of ``River``'s worker middleware: a callable receives the next one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from sqlaqueue.consumer.configuration.handlers import function_of, is_coroutine_function, kind_of_function
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError


def check_middleware(around: object, consumer: str, *, is_async: bool) -> tuple[Callable[..., Any], ...]:
    """Return the middleware of a Consumer, outermost first.

    :param consumer: the name of the Consumer's class, for errors.
    :raises ConfigurationError: if one cannot be called with a job and a callable, or is of the other kind.
    """
    if callable(around) or not isinstance(around, Iterable):
        msg = f"{consumer}(around={around!r}): give a list of callables, around=[middleware]"
        raise ConfigurationError(msg)
    found = tuple(around)
    for each in found:
        _check(each, consumer, is_async=is_async)
    return found


def _check(each: Any, consumer: str, *, is_async: bool) -> None:
    name = str(getattr(each, "__name__", type(each).__name__))
    if not callable(each):
        msg = f"{consumer}(around=[{each!r}]): a middleware is a callable, middleware(job, call)"
        raise ConfigurationError(msg)
    try:
        signature = inspect.signature(each)
        signature.bind(None, None)
    except ValueError:
        pass  # some built-in callables have no signature
    except TypeError as error:
        msg = f"{consumer}(around=[{name}]): a middleware is called as {name}(job, call): {error}"
        raise ConfigurationError(msg) from None
    kind = kind_of_function(each)
    if kind is not None and not is_coroutine_function(each):
        msg = f"{consumer}(around=[{name}]): {name} is {kind}, and a call of it runs nothing; remove its `yield`"
        raise ConfigurationError(msg)
    if is_async and inspect.isroutine(function_of(each)) and not is_coroutine_function(each):
        msg = f"{consumer}(around=[{name}]): {name} is not a coroutine function; define it with `async def`"
        raise ConfigurationError(msg)
    if not is_async and is_coroutine_function(each):
        msg = f"{consumer}(around=[{name}]): {name} is a coroutine function; define it with `def`"
        raise ConfigurationError(msg)


def surround(
    handler: Callable[..., Any], around: Sequence[Callable[..., Any]], *, is_async: bool
) -> Callable[..., Any]:
    """Return a handler that calls ``handler`` inside the middleware."""
    if not around:
        return handler
    outwards = around[::-1]

    def call(session: Any, argument: Any) -> Any:
        innermost = _Call(handler, session, argument)
        inner: Callable[[], Any] = innermost
        for each in outwards:
            inner = partial(each, argument, inner)
        inner()
        return innermost.checked_result()

    async def call_async(session: Any, argument: Any) -> Any:
        innermost = _Call(handler, session, argument)
        inner: Callable[[], Any] = innermost.awaited
        for each in outwards:
            inner = partial(each, argument, inner)
        try:
            await inner()
        finally:
            # The attempt may have failed for another reason, and must not go on beside the next one.
            await innermost.wait()
        return innermost.checked_result()

    return call_async if is_async else call


class _Call:
    """One call of the handler, which each middleware makes once, or raises."""

    def __init__(self, handler: Callable[..., Any], session: Any, argument: Any) -> None:
        self._handler, self._session, self._argument = handler, session, argument
        self._result: Any = None
        self._begun = self._ended = self._over = self._left = False
        self._task: asyncio.Task[Any] | None = None

    def __call__(self) -> Any:
        self._begin()
        try:
            self._result = self._handler(self._session, self._argument)
        finally:
            self._ended = True
        return self._result

    async def awaited(self) -> Any:
        self._begin()
        self._task = asyncio.current_task()
        try:
            self._result = await self._handler(self._session, self._argument)
        finally:
            self._ended = True
        return self._result

    def _begin(self) -> None:
        if self._over:
            msg = "a middleware has returned before its call(); call it, or await it, in the middleware"
            raise HandlerMisuseError(msg)
        if self._begun:
            msg = "a middleware has called call() twice; the handler runs once in an attempt, raise Retry for another"
            raise HandlerMisuseError(msg)
        self._begun = True

    async def wait(self) -> None:
        """Cancel the handler if it runs in another task, and wait for its end."""
        task, self._over = self._task, True
        if task is not None and not self._ended:
            task.cancel()
            await asyncio.wait([task])
            self._left = True

    def checked_result(self) -> Any:
        """Return what the handler has returned, which the Consumer checks.

        :raises HandlerMisuseError: if it was not called, or has not ended: the job would count as completed.
        """
        self._over = True
        if not self._begun:
            msg = (
                "a middleware returned without call(), or without awaiting it, so the handler has not run; raise "
                "Cancel, Snooze or Fail to leave a job out"
            )
            raise HandlerMisuseError(msg)
        if self._left or not self._ended:
            msg = "a middleware returned before its call() had ended; wait for it in the middleware"
            raise HandlerMisuseError(msg)
        return self._result
