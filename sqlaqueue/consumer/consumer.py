"""The long-running form for sync code, :class:`Consumer`, and several of them in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.base import ConsumerBase, RunsInThread, T
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.sessions import check_shared_pool
from sqlaqueue.consumer.threads import ThreadRunner, log_all_stopped
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError, HandlerNotStopped
from sqlaqueue.log import fields, logger

_LONGEST_WAIT = 10.0
"""Seconds between two checks of the threads: not every system interrupts a wait when a signal arrives."""


class ConsumerGroup:
    """Consumers of one process that stop together."""

    def __init__(self, consumers: Sequence[Any]) -> None:
        self.consumers: Sequence[Any] = consumers
        self.error: BaseException | None = None
        self._stopped = False

    @classmethod
    def of(cls, kind: type[ConsumerBase], consumers: Sequence[Any]) -> Self:
        """Return the group that one call of ``run_all()`` runs, after checking its arguments."""
        name = kind.__name__
        for consumer in consumers:
            if not isinstance(consumer, kind):
                msg = f"{name}.run_all({consumer!r}): give {name}s as separate arguments: {name}.run_all(one, other)"
                raise ConfigurationError(msg)
        if not consumers:
            msg = f"{name}.run_all(): give at least one {name}"
            raise ConfigurationError(msg)
        if len({id(consumer) for consumer in consumers}) < len(consumers):
            msg = f"{name}.run_all(): one of the {name}s is given twice; make another one, or raise its concurrency"
            raise ConfigurationError(msg)
        if len({consumer.handles_signals for consumer in consumers}) > 1:
            msg = f"{name}.run_all(): signals=False is given to some only; a signal stops all of them or none"
            raise ConfigurationError(msg)
        return cls(consumers)

    def check_pools(self, engines: Sequence[sa.Engine]) -> None:
        """Refuse a pool that is too small for the Consumers that share it; their engines are in the same order."""
        for engine in dict.fromkeys(engines):
            sharing = [one for one, used in zip(self.consumers, engines, strict=True) if used is engine]
            check_shared_pool(engine, sharing, "the Consumers of run_all()")

    def stop(self) -> None:
        """Stop all Consumers, including those that have not started yet."""
        # Set first: a Consumer that is starting either sees this value, or is running and can be stopped.
        self._stopped = True
        for consumer in self.consumers:
            consumer.stop()

    @contextmanager
    def running(self, *, signals: bool) -> Iterator[None]:
        """End Consumers that start after :meth:`stop` at once; at the end of the block, raise the first error."""
        # One line for all of them: the log of a process with many queues would end with as many lines.
        stops: list[tuple[str, int, int]] = []
        for consumer in self.consumers:
            consumer.stop_requested = lambda: self._stopped
            if len(self.consumers) > 1:
                consumer.record_stops(stops)
        try:
            with signal_handlers.stop_on_signal(self.stop, wanted=signals):
                yield
        finally:
            for consumer in self.consumers:
                consumer.stop_requested = None
                consumer.record_stops(None)
            if stops:
                log_all_stopped(stops)
        if self.error is not None:
            raise self.error

    def run_in_threads(self, runs: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Run functions, which must not raise, each in a thread of this name, until all have returned."""
        waker, running = Waker(), set(range(len(runs)))

        def run(number: int, function: Callable[[], object]) -> None:
            try:
                function()
            finally:
                running.discard(number)
                waker.wake()

        threads = [
            threading.Thread(target=copy_context().run, args=[run, number, function], name=name, daemon=True)
            for number, (name, function) in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        try:
            while running:
                waker.wait(_LONGEST_WAIT)
        except BaseException:
            self.stop()
            raise
        finally:
            for thread in threads:
                thread.join()
            waker.close()

    def failed(self, consumer: ConsumerBase, error: BaseException) -> None:
        kind = type(error).__name__
        extra = fields("consumer_failed", queue=consumer.queue, error_kind=kind)
        if self.error is None:
            self.error = error
            text = "queue %s: the Consumer raised %s: %s; stopping the other Consumers"
            logger.error(text, consumer.queue, kind, error, extra=extra)
        else:
            text = "queue %s: the Consumer raised %s as well: %s"
            # Where a database that is not ready was found out says nothing; the text has the fix.
            trace = None if isinstance(error, DatabaseNotReadyError) else error
            logger.error(text, consumer.queue, kind, error, exc_info=trace, extra=extra)
            if isinstance(error, HandlerNotStopped):
                # The caller has to know, whatever else has failed.
                self.error = error
        self.stop()


# ``concurrency`` is the number of threads. Under a strategy with leases the threads share the claimed jobs, one
# handler call each; every call that uses its session has it for itself, and commits by itself. Under a strategy that
# holds a transaction each thread claims a batch of its own and runs its jobs one after the other in that transaction;
# what each of them writes is in a savepoint.


class Consumer(RunsInThread[T]):
    """Claims jobs, calls a handler for each, and stores how it ended.

    :param model: a queue class, or ``select(Model).where(...)`` to run only some of its jobs.
    :param handler: ``handler(session, job)``, or ``handler(session, jobs)`` with ``batch=True``; or a dict of handlers
        by class, ``{Email: send_email, Text: send_text}``, for single-table subclasses of ``model``. A handler may
        raise :class:`~sqlaqueue.Retry`, :class:`~sqlaqueue.Snooze`, :class:`~sqlaqueue.Fail` or
        :class:`~sqlaqueue.Cancel`; any other exception is a failed attempt. Its writes through ``session`` are
        committed together with the end of the run. Under a strategy that holds a transaction it must not commit.
    :param session_factory: creates sessions, such as a ``sessionmaker(engine)``. Of a ``scoped_session`` its
        ``session_factory`` is used.
    :param batch_size: the most jobs of one claim. By default a claim takes about as many jobs as run within a second,
        and at most 500, or ``concurrency`` if that is larger; of large rows it takes fewer, about 32 MB. If it is given
        with ``batch=True`` or under a strategy that holds a transaction, a claim takes the whole number, regardless of
        how long the jobs take and how large they are.
    :param concurrency: the number of handlers that run at the same time.
    :param poll_interval: seconds or a timedelta between polls of an empty queue.
    :param lease: replaces the lease of the queue's config.
    :param timeout: seconds or a timedelta after which the attempt has failed and a handler's result is refused. A
        thread cannot be stopped, so under a lease the run ends in the database while the handler continues. If the
        handler has locked the job's row, or a transaction holds the job, the run ends when the handler returns.
    :param grace: seconds or a timedelta for which running handlers may continue after ``stop()`` before their jobs are
        released.
    :param retry: replaces the retry policy of the queue's config.
    :param worker_name: added to the name of the process in ``claimed_by`` and in the log.
    :param batch: whether the handler receives a list of jobs. A batch that fails is retried job by job.
    :param signals: whether SIGTERM and SIGINT stop it while it runs in the main thread. False leaves both to the
        program.
    :param schedules: the :class:`~sqlaqueue.Schedule` objects that it fires while it runs, of any queues. A queue class
        in the list stands for schedules that are only added at run time.
    :param middleware: callables around each call of a handler, outermost first: ``function(job, call)`` calls
        ``call()`` once and sees its result or exception. With ``batch=True`` it receives the list of jobs.
    :param distribution: the :class:`~sqlaqueue.citus.Distribution` of a table that Citus distributes by a column: the
        shards that it works on in rotation.
    :raises ConfigurationError: for an invalid argument.

    ``with Consumer(...):`` runs it in a background thread until the block ends, and leaves signals to the program.

    ::

        def send(session: Session, email: Email) -> None:
            print("to", email.to)

        Consumer(Email, send, sessionmaker(engine)).run()
    """

    def run(self) -> None:
        """Run jobs until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A signal stops every Consumer of the process, and then calls the signal handler that the program had set. A
        second signal goes to that handler; without one it ends the process immediately, and no job is lost.

        :raises ConfigurationError: if the connection pool is too small.
        :raises HandlerNotStopped: if a handler still runs after the grace period.
        """
        self._serve(draining=False)

    @staticmethod
    def run_all(*consumers: Consumer[Any]) -> None:
        """Run several Consumers in this process, each in its own thread, until all have ended.

        In the main thread a signal stops all of them. If one ends with an error, the other Consumers are stopped
        gracefully and the error is raised; further errors are logged.

        :raises ConfigurationError: without Consumers, if one is given twice, or if they share a pool that is too small
            for all.
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
        """Run jobs until none is due, and return the number of runs that ended.

        Jobs that other workers hold and jobs that are not due yet are left alone. Signals are handled as by
        :meth:`run`.

        :raises ConfigurationError: if the connection pool is too small.
        :raises DBAPIError: if the database cannot be reached for about ten seconds at the start. After the first
            claim it is waited for, as by :meth:`run`.
        :raises HandlerNotStopped: if a handler still runs after the grace period.
        """
        return self._serve(draining=True)

    def _serve(self, *, draining: bool) -> int:
        runner = ThreadRunner(repr(self), self._parts, self.session_factory, self.handler_call, draining=draining)
        with contextlib.closing(runner):
            self._begin(runner.context)
            try:
                runner.context.engine = self._check_factory()
                runner.run()
            finally:
                self._context = None
        return runner.context.runs_ended

    def _check_factory(self) -> sa.Engine:
        session: Session = self.session_factory()
        self._check_maker(session)
        with session:
            return self._engine_of(session)
