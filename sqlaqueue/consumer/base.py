"""The base of Consumer and AsyncConsumer: arguments, event listeners, ``stop()``, and the run of a ``with`` block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.citus import Distribution
from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts, Health, health_of
from sqlaqueue.consumer.core.events import EventEmitter, EventListener, EventName, PollListener
from sqlaqueue.consumer.in_flight import Deaths
from sqlaqueue.consumer.sessions import check_engine, check_pool, check_shared_pool, check_two_phase
from sqlaqueue.consumer.settings import (
    ConsumerSettings,
    check_annotations,
    check_handler,
    check_kind,
    check_middleware,
    kind_of_function,
    make_settings,
    surround,
)
from sqlaqueue.consumer.statements import ConsumerStatements
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.options import naming_options
from sqlaqueue.queue.retry_policies import Delay, RetryPolicy
from sqlaqueue.schedules.schedule import Schedule
from sqlaqueue.sessions import check_session_class, resolve_factory

if TYPE_CHECKING:
    # It needs greenlet, which sync code may lack.
    from sqlalchemy.ext.asyncio import AsyncSession

T = TypeVar("T")
Result = TypeVar("Result")
"""What a handler returns: anything, or an awaitable."""
SessionT = TypeVar("SessionT", bound="Session | AsyncSession")


class ConsumerBase:
    """The part of a Consumer that needs no I/O."""

    is_async = False
    """Whether its handlers and middleware are coroutine functions."""

    def __init__(
        self,
        settings: ConsumerSettings,
        handler: Any,
        session_factory: Any,
        *,
        middleware: Sequence[Callable[..., Any]],
        signals: bool,
    ) -> None:
        self._settings = settings
        self._parts = ConsumerParts(settings, ConsumerStatements(settings))
        self._handler: Any = handler if settings.dispatch is None else settings.dispatch
        self._middleware = check_middleware(middleware, type(self).__name__, is_async=self.is_async)
        self.session_factory = resolve_factory(session_factory, self._kind, is_async=self.is_async)
        """The factory of its sessions."""
        check_kind(self._handlers, is_async=self.is_async)
        self.handles_signals = signals
        self._context: ConsumerContext | None = None
        self.stop_requested: Callable[[], bool] | None = None

    @overload
    def on(self, event: EventName, listener: EventListener) -> None: ...
    @overload
    def on(self, event: Literal["polled"], listener: PollListener) -> None: ...
    def on(self, event: Any, listener: Callable[[Any], object]) -> None:
        """Call ``listener`` with a :class:`~sqlaqueue.JobEvent` after each event of this name.

        The event ``polled`` is no event of a job: its listeners get a :class:`~sqlaqueue.telemetry.PollEvent` for each
        claim.
        Listeners run in the Consumer's threads or tasks, so keep them short. An exception of a listener is logged.

        :raises ConfigurationError: if there is no event of this name, or the listener cannot be called, or is a
            coroutine function: nothing would await it.
        """
        kind = kind_of_function(listener)
        if kind is not None:
            msg = f"on({event!r}, {listener!r}): this is {kind}, and a call of it runs nothing; give a plain function"
            raise ConfigurationError(msg)
        self._parts.events.add(event, listener)

    def add_middleware(self, middleware: Callable[..., Any]) -> None:
        """Add a middleware outside of those that the Consumer has, as if it stood first in its list.

        It has no effect on a run that has started.

        :raises ConfigurationError: if it cannot be called with a job and a callable, or is of the other kind.
        """
        added = check_middleware([middleware], type(self).__name__, is_async=self.is_async)
        self._middleware = (*added, *self._middleware)

    def isolate(self, deaths: Deaths) -> None:
        """Run one job at a time, and claim none ahead, as ``sqlaqueue worker --isolate`` does. It must not be running.

        The timeout of a thread is dropped: the supervisor kills the process, and nothing is settled beside a handler
        that goes on. A task is cancelled at its timeout as usual.

        :param deaths: says which other processes have died, from now on or before.
        """
        given = self._settings
        settings = self._settings = given._replace(
            concurrency=1,
            batch_size=given.batch_size if given.batch else 1,
            fixed_batch_size=given.fixed_batch_size or not given.batch,
            timeout=given.timeout if self.is_async else None,
        )
        listeners, self._parts = self._parts.events, ConsumerParts(settings, ConsumerStatements(settings))
        self._parts.events, self._parts.deaths = listeners, deaths

    def stop(self) -> None:
        """Claim no more jobs, and make ``run()`` or ``drain()`` return after the grace period at the latest.

        If the database does not answer, that takes up to 30 seconds more.

        It can be called from any thread, from a handler and from a signal handler. It has no effect on a Consumer that
        is not running.
        """
        context = self._context
        if context is not None:
            context.stop()

    def health(self) -> Health:
        """Return whether it is alive and ready. It reads no database, and can be called from any thread."""
        return health_of(self._context)

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._settings.spec.name

    @property
    def model(self) -> type[Any]:
        """The mapped class of the queue."""
        return self._settings.spec.model

    @property
    def settings(self) -> ConsumerSettings:
        """Its arguments, checked and completed."""
        return self._settings

    @property
    def handler(self) -> Callable[..., Any]:
        """The callable that runs a job: the handler, or what chooses one by the class of the job."""
        handler: Callable[..., Any] = self._handler
        return handler

    @property
    def handler_call(self) -> Callable[..., Any]:
        """The callable that runs a job, inside the middleware."""
        return surround(self._handler, self._middleware, is_async=self.is_async)

    def record_stops(self, stops: list[tuple[str, int, int]] | None) -> None:
        """Record there how each run ends, instead of a line in the log; None ends that."""
        self._parts.stops = stops

    @property
    def events(self) -> EventEmitter:
        """Calls the listeners that :meth:`on` has added."""
        return self._parts.events

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.queue!r}, {self._settings.spec.config.strategy!r}>"

    def _begin(self, context: ConsumerContext) -> None:
        if self._context is not None:
            msg = f"{self!r} is running already; make another Consumer, or raise its concurrency"
            raise ConfigurationError(msg)
        if self._settings.dispatch is not None:
            self._settings.dispatch.check()
        context.handles_signals &= self.handles_signals
        self._context = context
        context.fork_guard.handlers = self._handlers
        if self.stop_requested is not None and self.stop_requested():
            context.stop()

    @property
    def connections(self) -> int:
        """The most connections it has at a time: for each handler, for its maintenance, and for its schedules."""
        return self._settings.connections

    @property
    def _handlers(self) -> Sequence[Callable[..., Any]]:
        return [self._handler] if self._settings.dispatch is None else self._settings.dispatch.handlers

    @property
    def _kind(self) -> str:
        return "AsyncConsumer" if self.is_async else "Consumer"

    def _check_maker(self, session: Any) -> None:
        """Refuse a factory that makes the other kind of sessions, or returns one twice: several are used at once."""
        check_session_class(type(session), self.session_factory, self._kind, is_async=self.is_async)
        if self.session_factory() is session:
            msg = (
                f"{type(self).__name__}({self._settings.spec.model.__name__}, ...): {self.session_factory!r} "
                "returns the same session each time; give a sessionmaker, which makes a new one"
            )
            raise ConfigurationError(msg)

    def _engine_of(self, session: Session) -> sa.Engine:
        """Return the engine to which a session writes the queue's jobs, if a Consumer can work with it."""
        spec, name = self._settings.spec, type(self).__name__
        engine = check_engine(session, spec.mapper, f"{name}({spec.model.__name__}, ...)", spec)
        if self._settings.notifies:
            check_two_phase(session, spec.model.__name__)
        check_pool(engine.pool, self, f"{name}(concurrency={self._settings.concurrency})")
        return engine


START_TIMEOUT = 10.0
"""Seconds to wait for the first claim. A host must be able to start without its database."""

_pools: dict[ConsumerBase, sa.Engine] = {}
"""The engines of the Consumers that run in the background of this process."""
_pools_lock = threading.Lock()


# -- in the background -------------------------------------------------------------------------------------------------
# ``with Consumer(...)`` is for a host program such as a web server, which handles signals itself.


class _Background:
    """A run in the background; ``on_start_known`` is called when its first claim has worked, failed, or is repeated."""

    def __init__(self, on_start_known: Callable[[], object]) -> None:
        self.on_start_known = on_start_known
        self.entered, self.stopping = False, False
        self.worker: Any = None


class _InBackground(ConsumerBase, Generic[T, Result]):
    """What both kinds of Consumers share: their arguments, and a run in the background."""

    _background: _Background | None = None
    _error: BaseException | None = None

    @naming_options
    def __init__(
        self,
        model: type[T] | AnySelect,
        handler: Callable[[SessionT, T], Result]
        | Callable[[SessionT, list[T]], Result]
        | Mapping[type[T], Callable[[SessionT, Any], Result]],
        session_factory: Callable[[], SessionT],
        *,
        batch_size: int | None = None,
        concurrency: int = 1,
        poll_interval: Delay = 1.0,
        lease: Delay | None = None,
        timeout: Delay | None = None,
        grace: Delay = 30.0,
        retry: RetryPolicy | None = None,
        worker_name: str | None = None,
        batch: bool = False,
        signals: bool = True,
        schedules: Sequence[Schedule[Any] | type[Any]] = (),
        middleware: Sequence[Callable[[Any, Callable[[], Any]], Any]] = (),
        distribution: Distribution | None = None,
    ) -> None:
        by_class: dict[Any, Any] | None = dict(handler) if isinstance(handler, Mapping) else None
        for each in [handler] if by_class is None else by_class.values():
            check_handler(each, type(self).__name__, batch=batch)
        settings = make_settings(
            model,
            handlers=by_class,
            batch_size=batch_size,
            concurrency=concurrency,
            poll_interval=poll_interval,
            lease=lease,
            timeout=timeout,
            grace=grace,
            retry=retry,
            worker_name=worker_name,
            batch=batch,
            schedules=schedules,
            distribution=distribution,
        )
        for cls, each in (by_class or {settings.selection.entity: handler}).items():
            check_annotations(each, cls, type(self).__name__)
        super().__init__(settings, handler, session_factory, middleware=middleware, signals=signals)

    @property
    def running(self) -> bool:
        """Whether it works for its queue, in ``run()``, ``drain()`` or a ``with`` block.

        If it is False within the block, the Consumer has ended; :attr:`error` contains the reason.
        """
        return self._context is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the Consumer of a ``with`` block; None without an error."""
        return self._error

    def _begin(self, context: ConsumerContext) -> None:
        background = self._background
        if background is not None:
            context.handles_signals, context.on_start_known = False, background.on_start_known
        super()._begin(context)

    def _engine_of(self, session: Session) -> sa.Engine:
        engine = super()._engine_of(session)
        if self._background is not None:
            with _pools_lock:
                sharing = [*(other for other, used in _pools.items() if used is engine), self]
                check_shared_pool(engine, sharing, "the Consumers of this process")
                _pools[self] = engine
        return engine

    def _new_background(self, on_start_known: Callable[[], object]) -> _Background:
        if self._background is not None or self._context is not None:
            msg = f"{self!r} is running already; make another Consumer, or raise its concurrency"
            raise ConfigurationError(msg)
        background = self._background = _Background(on_start_known)
        self._error = None
        # A stop before the run begins would have no effect.
        self.stop_requested = lambda: background.stopping
        return background

    def _enter(self, background: _Background) -> None:
        """Begin the block, or raise the error that ended the Consumer."""
        # Set first: an error that occurs now is either raised here, or logged.
        background.entered = True
        if self._error is not None:
            raise self._error

    def _stop_background(self) -> _Background:
        background = self._background
        if background is None:
            msg = f"{self!r} has not been entered; use it in a `with` statement"
            raise ConfigurationError(msg)
        background.stopping = True
        self.stop()
        return background

    def _failed_in_background(self, background: _Background, error: BaseException) -> None:
        self._error = error
        if background.entered:
            text = "queue %s: the Consumer raised %s: %s; it no longer works for its queue, and the program continues"
            kind = type(error).__name__
            extra = fields("consumer_failed", queue=self.queue, worker=self._settings.worker(), error_kind=kind)
            # Where a database that is not ready was found out says nothing; the text has the fix.
            trace = None if isinstance(error, DatabaseNotReadyError) else error
            logger.error(text, self.queue, kind, error, exc_info=trace, extra=extra)

    def _ended_in_background(self, background: _Background) -> None:
        with _pools_lock:
            _pools.pop(self, None)
        background.on_start_known()

    def _left_background(self) -> None:
        self._background = self.stop_requested = None


class RunsInThread(_InBackground[T, object]):
    def __enter__(self) -> Self:
        """Serve the queue in a background thread until the block ends; signals are left to the host.

        :raises ConfigurationError: if the pool is too small for the Consumers of this process that share it, or the
            database lacks something. If the database does not answer within ten seconds, the block begins.
        """
        known = threading.Event()
        background = self._new_background(known.set)
        thread = threading.Thread(
            # Handlers see the variables of the program, as they do in a task.
            target=copy_context().run,
            args=(self._run_in_background, background),
            name=f"sqlaqueue-{self.queue}",
            daemon=True,
        )
        background.worker = thread
        thread.start()
        try:
            known.wait(START_TIMEOUT)
            self._enter(background)
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop the Consumer, wait for its end, and raise the error that ended it, unless the block raised one."""
        self._end_thread()
        if error is None and self._error is not None:
            raise self._error

    def _end_thread(self) -> None:
        background = self._stop_background()
        try:
            background.worker.join()
        finally:
            self._left_background()

    def _run_in_background(self, background: _Background) -> None:
        try:
            self._serve(draining=False)
        except BaseException as error:  # noqa: BLE001 - it is raised in the host's thread
            self._failed_in_background(background, error)
        finally:
            self._ended_in_background(background)

    def _serve(self, *, draining: bool) -> int:
        raise NotImplementedError


class RunsInTask(_InBackground[T, Awaitable[object]]):
    async def __aenter__(self) -> Self:
        """Serve the queue in a task until the block ends; signals are left to the host.

        :raises ConfigurationError: if the pool is too small for the Consumers of this process that share it, or the
            database lacks something. If the database does not answer within ten seconds, the block begins.
        """
        known = asyncio.Event()
        background = self._new_background(known.set)
        background.worker = asyncio.create_task(self._run_in_background(background), name=f"sqlaqueue-{self.queue}")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT):
                    await known.wait()
            self._enter(background)
        except BaseException:
            await self._end_task()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop the Consumer, wait for its end, and raise the error that ended it, unless the block raised one.

        Cancelling this cancels the handlers, whose jobs are released.
        """
        await self._end_task()
        if error is None and self._error is not None:
            raise self._error

    async def _end_task(self) -> None:
        background = self._stop_background()
        try:
            await asyncio.wait([background.worker])
        except asyncio.CancelledError:
            background.worker.cancel()
            await asyncio.wait([background.worker])
            raise
        finally:
            self._left_background()

    async def _run_in_background(self, background: _Background) -> None:
        try:
            await self._serve(draining=False)
        except asyncio.CancelledError as error:
            if not background.stopping:
                self._failed_in_background(background, error)
            raise
        except Exception as error:  # noqa: BLE001 - it is raised in the host's task
            self._failed_in_background(background, error)
        finally:
            self._ended_in_background(background)

    async def _serve(self, *, draining: bool) -> int:
        raise NotImplementedError
