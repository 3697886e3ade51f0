"""The long-running form for sync code: :class:`Consumer`, with a thread for each handler at work.

::

    def send(session: Session, email: Email) -> None:
        smtp.send(email.to)

    Consumer(Email, send, sessionmaker(engine)).run()

``concurrency`` is the number of threads. Under a strategy with leases the threads share the claimed jobs, one
handler call each; every call that uses its session has it for itself, and commits by itself. Under a strategy that
holds a transaction each thread claims a batch of its own and runs its jobs one after the other in that transaction;
what each of them writes is in a savepoint.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.background import RunsInThread
from sqlaqueue.consumer.base import function_of
from sqlaqueue.consumer.group import ConsumerGroup
from sqlaqueue.consumer.thread_runner import ThreadRunner
from sqlaqueue.exc import ConfigurationError

T = TypeVar("T")
S = TypeVar("S", bound=Session)


class Consumer(RunsInThread, Generic[T]):
    """Claims jobs, runs a handler for each, and settles them.

    :param model: a queue class, or ``select(Model).where(...)`` to serve some of its jobs only.
    :param handler: ``handler(session, job)``, or ``handler(session, jobs)`` with ``batch=True``; or a dict of them by
        class, ``{Email: send_email, Text: send_text}``, for subclasses of ``model`` in its table. It may raise
        :class:`~sqlaqueue.Retry`, :class:`~sqlaqueue.Snooze`, :class:`~sqlaqueue.Fail` or
        :class:`~sqlaqueue.Cancel`; any other exception is a failed attempt. What it writes through ``session`` is
        committed together with the job's completion; it must not commit itself under a strategy that holds the
        transaction.
    :param session_factory: makes sessions, such as a ``sessionmaker(engine)``; of a ``scoped_session`` that which it
        is made of.
    :param batch_size: the most jobs that one statement claims. By default it claims about as many as are done within a
        second, and at most 500, or one for each handler if these are more. With ``batch=True``, and where it is given
        under a strategy that holds a transaction, the whole number is claimed, however long that takes.
    :param concurrency: how many handlers run at once.
    :param poll_interval: seconds or timedelta between looks at an empty queue.
    :param lease: overrides the config's lease.
    :param timeout: seconds or timedelta after which a handler's result is refused. A thread cannot be stopped: its
        lease is no longer extended, and the run counts as a failed attempt when it returns, or when it is rescued.
    :param grace: seconds or timedelta that ``stop()`` leaves to handlers at work before their jobs are given back.
    :param retry: overrides the config's retry policy.
    :param name: added to the worker's name in ``claimed_by`` and in the log.
    :param batch: call the handler with a list of jobs. A batch that fails is tried again job by job.
    :param signals: whether SIGTERM and SIGINT stop it while it runs in the main thread; False leaves them to the host.
    :raises ConfigurationError: when an argument cannot be meant.

    ``with Consumer(...):`` serves the queue in a background thread until the block ends, for a program with another
    main duty, whose signals stay its own.
    """

    @overload
    def __init__(
        self: Consumer[T],
        model: type[T],
        handler: Callable[[S, T], object],
        session_factory: Callable[[], S],
        *,
        batch: Literal[False] = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[T],
        model: type[T],
        handler: Callable[[S, list[T]], object],
        session_factory: Callable[[], S],
        *,
        batch: Literal[True],
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[Any],
        model: AnySelect,
        handler: Callable[[S, Any], object],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[T],
        model: type[T],
        handler: Mapping[type[T], Callable[[S, Any], object]],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[Any],
        model: AnySelect,
        handler: Mapping[Any, Callable[[S, Any], object]],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    def __init__(self, model: Any, handler: Any, session_factory: Any, **options: Any) -> None:
        super().__init__(model, handler, session_factory, **options)
        if any(inspect.iscoroutinefunction(function_of(each)) for each in self._handlers):
            msg = "Consumer: the handler is a coroutine function; use AsyncConsumer with an async_sessionmaker"
            raise ConfigurationError(msg)

    def run(self) -> None:
        """Serve the queue until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A signal stops every Consumer of the process, and a handler that the program had set for it is called as well.
        A second one is left to that handler; where there is none, it ends the process at once, and nothing is lost.

        :raises ConfigurationError: when the connection pool is too small.
        """
        self._serve(draining=False)

    @staticmethod
    def run_all(*consumers: Consumer[Any]) -> None:
        """Run several Consumers in this process, each in a thread of its own, until all have ended.

        In the main thread a signal stops all of them. When one ends with an error the others are stopped, in order, and
        the error is raised; further ones are logged.

        :raises ConfigurationError: when there is none, one is given twice, or they share a pool that is too small for
            all.
        """
        group = ConsumerGroup.of(Consumer, consumers)
        group.check_pools([consumer._check_factory() for consumer in consumers])  # noqa: SLF001 - its own kind

        def run(consumer: Consumer[Any]) -> None:
            try:
                consumer.run()
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for all
                group.failed(consumer, error)

        with group.running(signals=consumers[0].handles_signals):
            group.run_in_threads([(f"sqlaqueue-{each.queue}", partial(run, each)) for each in consumers])

    def drain(self) -> int:
        """Serve the queue until no job is due, and return how many runs ended.

        Jobs that others hold, and those whose time has not come, are left alone. Signals are answered as by
        :meth:`run`.

        :raises ConfigurationError: when the connection pool is too small.
        """
        return self._serve(draining=True)

    def _serve(self, *, draining: bool) -> int:
        runner = ThreadRunner(repr(self), self._parts, self._factory, self._handler, draining=draining)
        with contextlib.closing(runner):
            self._begin(runner.context)
            try:
                runner.context.engine = self._check_factory()
                runner.run()
            finally:
                self._context = None
        return runner.context.runs_ended

    def _check_factory(self) -> sa.Engine:
        session: Session = self._factory()
        self._check_maker(session)
        with session:
            return self._engine_of(session)
