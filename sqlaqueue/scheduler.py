"""A process that only fires schedules: :class:`Scheduler`.

::

    Scheduler(sessionmaker(engine), [nightly, hourly]).run()

Consumers fire schedules as well: ``Consumer(..., schedules=[nightly])``. Any number of both may run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait, drive
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import Deadlines, Waker, limit_connects
from sqlaqueue.consumer.maintenance.firing import FiringProcess, GroupState, fire_schedules
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.sessions import check_engine
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import database_text, fields, logger
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.schedules.schedule import Schedule, schedule_groups
from sqlaqueue.sessions import check_session_class, execute, open_session, resolve_factory
from sqlaqueue.sql.engine import own_work

Subscription = tuple[sa.Engine, GroupState]

LONGEST_STOP = 30.0
"""Seconds for which the end of a block waits for the thread: the database may not answer."""


class SchedulerBase:
    """The part of a Scheduler that needs no I/O."""

    _is_async = False

    def __init__(
        self,
        session_factory: Any,
        schedules: Iterable[Schedule[Any] | type[Any]],
        *,
        reset: bool = False,
        signals: bool = True,
    ) -> None:
        kind = type(self).__name__
        self.groups = schedule_groups(schedules, kind)
        if not self.groups:
            msg = f"{kind}: schedules=[]: give at least one Schedule, or a queue class for those added at run time"
            raise ConfigurationError(msg)
        self.session_factory: Any = resolve_factory(session_factory, kind, is_async=self._is_async)
        self.reset, self.handles_signals = reset, signals
        self._process: FiringProcess | None = None

    def stop(self) -> None:
        """Fire no more, and make ``run()`` return; may be called from any thread and from a signal handler.

        It has no effect on a Scheduler that is not running.
        """
        if self._process is not None:
            self._process.stop()

    def __repr__(self) -> str:
        number = sum(len(group.declared) for group in self.groups)
        return f"<{type(self).__name__} of {number} schedules>"

    def _check_not_running(self) -> None:
        if self._process is not None:
            msg = f"{self!r} is running already"
            raise ConfigurationError(msg)

    def _begin(self, wake: Callable[[], object], listen: Callable[[sa.Engine, GroupState], object]) -> FiringProcess:
        self._process = FiringProcess(self.groups, wake, listen, reset=self.reset)
        return self._process

    def _check(self, made: Any, session: Session) -> None:
        """Refuse sessions and engines with which schedules cannot be fired, and log the start.

        :param made: a session of the factory.
        :param session: the sync session in it.
        """
        check_session_class(type(made), self.session_factory, type(self).__name__, is_async=self._is_async)
        for group in self.groups:
            engine = check_engine(session, group.spec.mapper, type(self).__name__)
            limit_connects(engine)
            names = ", ".join(repr(name) for name in sorted(group.declared)) or "those of the database"
            where = database_text(engine)
            logger.info(
                "schedules: started, %s, fires %s", where, names, extra=fields("scheduler_started", database=where)
            )

    def _log_end(self) -> None:
        logger.info("schedules: stopped", extra=fields("scheduler_stopped"))

    def _log_failure(self, error: BaseException) -> None:
        kind = type(error).__name__
        extra = fields("scheduler_failed", error_kind=kind)
        logger.error("%r raised %s: %s; it fires no more", self, kind, error, extra=extra)


class Scheduler(SchedulerBase):
    """Fires schedules, in a process or a thread of its own.

    ::

        with Scheduler(sessions, [daily]):
            session.execute(select(Email))  # the program goes on

    :param session_factory: creates sessions, such as a ``sessionmaker(engine)``.
    :param schedules: the Schedules of the program. They are written into the database at the start. Those that other
        programs have stored are fired as well, if this process has imported the classes of their jobs. A queue class
        in the list stands for schedules that are only added at run time.
    :param reset: write the program's definitions even where they were changed at run time.
    :param signals: whether SIGTERM and SIGINT stop it while it runs in the main thread.
    :raises ConfigurationError: for an invalid argument.

    ``with Scheduler(...):`` runs it in a background thread until the block ends, and leaves signals to the program.
    """

    def run(self) -> None:
        """Fire schedules until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        While the database is unavailable, it tries again.

        :raises ConfigurationError: if the database lacks the tables of schedules, or privileges on them.
        """
        self._serve(*self._start(), signals=self.handles_signals)

    def _start(self) -> tuple[FiringProcess, Waker, list[Subscription]]:
        self._check_not_running()
        woken, subscriptions = Waker(), list[Subscription]()

        def listen(engine: sa.Engine, state: GroupState) -> None:
            subscriptions.append((engine, state))
            listener.listen(engine, SCHEDULE_CHANNEL, state)

        return self._begin(woken.wake, listen), woken, subscriptions

    def _serve(self, process: FiringProcess, woken: Waker, subscriptions: list[Subscription], *, signals: bool) -> None:
        deadlines = Deadlines(pace.LONGEST_WAIT, repr(self))

        def perform(effect: Any) -> Any:
            match effect:
                case ExecuteInOwnSession():
                    with open_session(self.session_factory) as session, own_work(), deadlines.limit(session):
                        return execute(session, effect.operation, effect.arguments)
                case Wait():
                    woken.wait(effect.seconds)
            return None

        try:
            with signal_handlers.stop_on_signal(process.stop, wanted=signals):
                with open_session(self.session_factory) as session:
                    self._check(session, session)
                with deadlines.watched():
                    drive(fire_schedules(process), perform)
            self._log_end()
        finally:
            self._process = None
            for engine, state in subscriptions:
                listener.unlisten(engine, state)
            woken.close()

    def __enter__(self) -> Self:
        """Fire schedules in a background thread until the block ends."""
        started = self._start()
        self._error: BaseException | None = None

        def serve_in_background() -> None:
            try:
                self._serve(*started, signals=False)
            except BaseException as error:  # noqa: BLE001 - it is raised in the program's thread
                self._error = error
                self._log_failure(error)

        self._thread = threading.Thread(
            target=copy_context().run, args=(serve_in_background,), name="sqlaqueue-scheduler", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and raise the error that ended it, unless the block raised one.

        If the database does not answer, the thread is left behind after half a minute.
        """
        self.stop()
        self._thread.join(LONGEST_STOP)
        if error is None and self._error is not None:
            raise self._error
