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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer import lifecycle
from sqlaqueue.consumer.background import RunsInThread
from sqlaqueue.consumer.base import function_of
from sqlaqueue.consumer.context import Shift
from sqlaqueue.consumer.core.effects import Beside, Do, Doze, Handle, InSession, Pause, Rest, Script, Watch, needed
from sqlaqueue.consumer.core.statement_deadline import StatementDeadlines
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.executing.executor import Hand
from sqlaqueue.consumer.executing.worker import lane, wind_up
from sqlaqueue.consumer.group import ConsumerGroup
from sqlaqueue.consumer.maintenance.loop import keep
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.sessions.write_routing import routing_to_primary
from sqlaqueue.consumer.settling.outcomes import caught
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError
from sqlaqueue.queue.backend import backend

_LONGEST_WAIT = 600.0
"""Seconds for which the main thread waits at most: not every system breaks off a wait for a signal."""

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
        with contextlib.closing(_Threads(self, draining=draining)) as shift:
            self._begin(shift)
            try:
                shift.engine = self._check_factory()
                shift.serve()
            finally:
                self._shift = None
        return shift.crew.jobs_ended

    def _check_factory(self) -> sa.Engine:
        session: Session = self._factory()
        self._check_maker(session)
        with session:
            return self._engine_of(session)


class _Threads(Shift):
    """A run with a thread for each lane and one for the keeper."""

    engine: sa.Engine

    def __init__(self, consumer: Consumer[Any], *, draining: bool) -> None:
        self._changed = threading.Condition()
        self._called = threading.Event()
        self._stopped, self._attended = threading.Event(), threading.Event()
        self._waker = Waker()
        self._deadlines = StatementDeadlines(self._waker.wake)
        self._working: set[threading.Thread] = set()
        self._handler, self.factory, self._grace = consumer._handler, consumer._factory, consumer._grace  # noqa: SLF001 - its other half
        super().__init__(repr(consumer), consumer._plan, consumer._pace, consumer._emitter, draining=draining)  # noqa: SLF001 - as above

    def listen(self) -> None:
        self.calls.listens = True
        listener.listen(self.engine, backend().channel_of(self.plan.spec), self.calls)

    def reconnect(self) -> None:
        listener.reconnect(self.engine)

    def call(self) -> None:
        self._called.set()

    def attend(self) -> None:
        self._attended.set()

    def stop(self) -> None:
        self.plan.stopping = True
        self._stopped.set()
        self.call()
        self.wake(self.plan.concurrency)
        self._waker.wake()

    def wake(self, lanes: int) -> None:
        with self._changed:
            self._changed.notify(lanes)

    def close(self) -> None:
        """Give back what only a shift that goes on needs."""
        self._waker.close()

    def serve(self) -> None:
        """Run until the lanes have ended, or have been given up."""
        name = f"sqlaqueue-{self.plan.spec.name}"
        lanes = [self._thread(lane(self), f"{name}-{number}") for number in range(self.plan.concurrency)]
        keeper = self._thread(keep(self), f"{name}-keeper")
        with signal_handlers.stop_on_signal(self.stop, wanted=self.handles_signals):
            self.forks.watch(self.engine)
            self._working.update(lanes)
            for thread in (*lanes, keeper):
                thread.start()
            try:
                self._wait_for(lanes)
            finally:
                self.stop()
                lifecycle.log_shutdown(self, self._grace)
                self.over = True
                self.attend()
                # It is done with its last statement in a moment, or the database does not answer.
                keeper.join(timeout=max(self._grace, 5.0))
                self._carry_out(wind_up(self))
                if self.calls.listens:
                    listener.unlisten(self.engine, self.calls)
                lifecycle.log_stopped(self)
        if self.error is not None:
            raise self.error

    def _thread(self, script: Script, name: str) -> threading.Thread:
        def work() -> None:
            try:
                self._carry_out(script)
            except BaseException as error:  # noqa: BLE001 - a lane must not end without anybody noticing
                self.fail(error)
            finally:
                self._working.discard(thread)
                self._waker.wake()

        thread = threading.Thread(target=work, name=name, daemon=True)
        return thread

    def _wait_for(self, lanes: Sequence[threading.Thread]) -> None:
        deadline = float("inf")
        while not self._working.isdisjoint(lanes):
            if self.plan.stopping and deadline == float("inf"):
                lifecycle.log_shutdown(self, self._grace)
                deadline = time.monotonic() + self._grace
            left = deadline - time.monotonic()
            if left <= 0:
                self._abandon()
                return
            self._waker.wait(min(left, self._deadlines.until_check(), _LONGEST_WAIT))
            if self.forks.is_child:
                # By a signal's handler.
                self.forks.end_child()
            self._deadlines.cancel_overdue()

    def _abandon(self) -> None:
        """Give up handlers that outlived the grace period; their results are refused."""
        lifecycle.log_grace_period_over(self, self._grace)
        for one in self.crew.at_work():
            one.abandoned = True

    # -- carrying scripts out ------------------------------------------------------------------------------

    def _carry_out(self, script: Script, session: Session | None = None) -> Any:
        """Carry out a script, whose operations take place in ``session``."""
        raised: Exception | None = None
        result: Any = None
        while True:
            try:
                step = script.send(result) if raised is None else script.throw(raised)
            except StopIteration as end:
                return end.value
            if self.forks.is_child:
                self.forks.end_child()
            result = raised = None
            try:
                match step:
                    case Beside():
                        with self.open() as other, routing_to_primary(other):
                            isolation_level.begin_read_committed(other, self.plan)
                            with self._deadlines.limit(step.patience, other, self.plan.bind):
                                result = step(other)
                    case Do():
                        result = step(needed(session))
                    case InSession():
                        with self.open() as own:
                            result = self._carry_out(step.script, own)
                    case Handle():
                        self._call(needed(session), step.hand)
                    case Pause() | Doze() | Watch() | Rest():
                        self._pass_time(step)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised = error

    def _pass_time(self, step: Pause | Doze | Watch | Rest) -> None:
        match step:
            case Pause():
                self._stopped.wait(step.seconds)
            case Doze():
                self._attended.wait(step.seconds)
                self._attended.clear()
            case Watch():
                self._called.wait(step.seconds)
                self._called.clear()
                if self.plan.stopping:
                    # Another lane may be on its way here, and nobody will call again.
                    self._called.set()
            case Rest():
                with self._changed:
                    self._changed.wait_for(lambda: self.crew.version != step.seen or self.plan.stopping, step.seconds)

    def _call(self, session: Session, hand: Hand) -> None:
        """Call the handler; a result counts only while nobody has given the call up."""
        with self.crew.calling(hand):
            while (argument := hand.begin(session)) is not None:
                raised: BaseException | None = None
                try:
                    result = self._handler(session, argument)
                    if result is not None and (inspect.isawaitable(result) or inspect.isgenerator(result)):
                        raised = _not_run(result)
                except BaseException as error:  # noqa: BLE001 - sys.exit() in a handler must not end the worker
                    raised = caught(error)
                if self.forks.is_child:
                    self.forks.end_child(raised)
                if not hand.end(raised, session):
                    return


def _not_run(result: Any) -> HandlerMisuseError:
    if hasattr(result, "close"):
        result.close()
    what = type(result).__name__
    msg = f"the handler returned a {what}, and nothing of it has been run; use AsyncConsumer for coroutines"
    return HandlerMisuseError(msg)
