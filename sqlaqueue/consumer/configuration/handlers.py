"""Handlers: the check of their signature, and the choice of one by the class of a job."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapper

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError
from sqlaqueue.statements.selection import JobSelection


def check_handler(handler: Any, consumer: str, *, batch: bool) -> None:
    """Refuse a handler that cannot be called with a session and a job, or a list of jobs.

    :param consumer: the name of the Consumer's class, for the error.
    :raises ConfigurationError: if it cannot.
    """
    call = f"(session, {'jobs' if batch else 'job'})"
    if not callable(handler):
        msg = f"{consumer}(handler={handler!r}): a handler is a callable, handler{call}"
        raise ConfigurationError(msg)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = str(getattr(handler, "__name__", type(handler).__name__))
        msg = f"{consumer}: the handler {name}{signature} is called as {name}{call}: {error}"
        raise ConfigurationError(msg) from None
    kind = kind_of_function(handler)
    if kind is not None and kind != COROUTINE_FUNCTION:
        name = str(getattr(handler, "__name__", type(handler).__name__))
        msg = f"{consumer}: the handler {name} is {kind}, and a call of it runs nothing; remove its `yield`"
        raise ConfigurationError(msg)


def function_of(handler: Any) -> Any:
    """Return the function that a call of ``handler`` executes, of a partial or a callable object as well."""
    while isinstance(handler, partial):
        handler = handler.func
    if inspect.isfunction(handler) or inspect.ismethod(handler):
        return handler
    return getattr(handler, "__call__", handler)  # noqa: B004 - it needs the method itself


def is_coroutine_function(handler: Any) -> bool:
    """Return whether a call of ``handler`` returns a coroutine; mocks say so themselves."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(function_of(handler))


COROUTINE_FUNCTION = "a coroutine function"


def kind_of_function(function: Any) -> str | None:
    """Return what a callable is, in words, if a call of it runs nothing; None for any other one."""
    own = function_of(function)
    if is_coroutine_function(function):
        return COROUTINE_FUNCTION
    if inspect.isgeneratorfunction(own):
        return "a generator function"
    return "an async generator function" if inspect.isasyncgenfunction(own) else None


def refused_result(result: Any, *, is_async: bool) -> HandlerMisuseError | None:
    """Return the error for what a handler returned, if it is work that nobody has done; None for any other result.

    Not every such handler can be refused before its call, such as ``lambda session, job: coroutine(session, job)``. Its
    job would count as completed.
    """
    kind, fix = type(result).__name__, "await it" if is_async else "use AsyncConsumer for coroutines"
    if isinstance(result, asyncio.Future | concurrent.futures.Future):
        # The job is retried, and must not run twice at once. A Future of another thread's event loop is not ours.
        if is_async or not isinstance(result, asyncio.Future):
            result.cancel()
        fix = "await it" if is_async else "call its result()"
        return HandlerMisuseError(f"the handler returned a {kind}, for which nothing waits; {fix} in the handler")
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isasyncgen(result) or isinstance(result, map | filter)):
        return None
    return HandlerMisuseError(f"the handler returned a {kind}, and nothing of it has been run; {fix}")


class Dispatch:
    """Calls the handler of a job's class: that of the class itself, or else of the nearest class that it inherits from.

    :param chosen: the jobs that the Consumer serves.
    :raises ConfigurationError: if a key of ``handlers`` is not a mapped class of these jobs, or a class has no handler.
    """

    def __init__(self, kind: str, chosen: JobSelection, handlers: Mapping[Any, Callable[..., Any]]) -> None:
        self._kind, self._chosen = kind, chosen
        self.by_class = dict(handlers)
        """The handler of each class."""
        model = chosen.entity
        for cls in self.by_class:
            if not (isinstance(cls, type) and issubclass(cls, model)):
                name = getattr(cls, "__name__", repr(cls))
                msg = f"{kind}({model.__name__}, {{{name}: ...}}): {name} is not {model.__name__} or a subclass of it"
                raise ConfigurationError(msg)
            if sa.inspect(cls, raiseerr=False) is None:
                msg = f"{kind}({model.__name__}, {{{cls.__name__}: ...}}): {cls.__name__} is not mapped"
                raise ConfigurationError(msg)
        self.check()

    def check(self) -> None:
        """Refuse to serve when some class has no handler, such as one that has been mapped in the meantime.

        :raises ConfigurationError: naming the classes.
        """
        model = self._chosen.entity
        lacking = [mapper.class_.__name__ for mapper in self._mappers() if self._nearest(mapper.class_) is None]
        if lacking:
            msg = (
                f"{self._kind}({model.__name__}, {{...}}): there is no handler for {', '.join(sorted(lacking))}; add "
                f"{min(lacking)}: handler, or {model.__name__}: handler for all classes without one of their own"
            )
            raise ConfigurationError(msg)

    def _mappers(self) -> list[Mapper[Any]]:
        """Return the mappers of the classes whose instances a claim may hand out."""
        mapper = sa.inspect(self._chosen.entity)
        if mapper.polymorphic_on is None:
            return [mapper]
        return [each for each in mapper.self_and_descendants if each.polymorphic_identity is not None]

    def _nearest(self, cls: type[Any]) -> type[Any] | None:
        return next((each for each in cls.__mro__ if each in self.by_class), None)

    def narrowed(self, select: AnySelect) -> AnySelect:
        """Return the select of those of its jobs whose classes this process knows.

        A newer version of the program may have enqueued jobs of further classes: those are left to it.
        """
        mapper = sa.inspect(self._chosen.entity)
        column = mapper.polymorphic_on
        if column is None:
            return select
        known = sorted({each.polymorphic_identity for each in self._mappers()}, key=str)
        return select.where(column.in_(known))

    def groups(self, jobs: Sequence[Any]) -> list[list[Any]]:
        """Return jobs in lists for one call each: those of one handler together, in the order of their first."""
        found: dict[Any, list[Any]] = {}
        for job in jobs:
            found.setdefault(self._nearest(type(job)), []).append(job)
        return [*found.values()]

    @property
    def handlers(self) -> list[Callable[..., Any]]:
        """All handlers."""
        return [*self.by_class.values()]

    def handler_of(self, job: Any) -> Callable[..., Any]:
        """Return the handler of a job."""
        cls = self._nearest(type(job))
        if cls is None:
            msg = f"there is no handler for {type(job).__name__}, which was mapped after this Consumer had begun"
            raise ConfigurationError(msg)
        handler: Callable[..., Any] = self.by_class[cls]
        return handler

    def __call__(self, session: Any, argument: Any) -> Any:
        """Call the handler for a job, or for a list of jobs of one group."""
        return self.handler_of(argument[0] if isinstance(argument, list) else argument)(session, argument)
