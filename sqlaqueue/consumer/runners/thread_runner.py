"""The threads of one run of a Consumer: one for each worker, and one for maintenance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.job_buffer import runs_of
from sqlaqueue.consumer.configuration.handlers import refused_result
from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts
from sqlaqueue.consumer.core.driver import drive
from sqlaqueue.consumer.core.effects import (
    CallHandler,
    Effect,
    Execute,
    ExecuteInOwnSession,
    Routine,
    Wait,
    WithSession,
    require_session,
)
from sqlaqueue.consumer.core.intervals import longest_wait
from sqlaqueue.consumer.core.statement_deadline import Deadlines, limit_connects
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.worker import work
from sqlaqueue.consumer.maintenance.loop import maintain
from sqlaqueue.consumer.maintenance.reconcile import reconcile_all
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.notifications.in_process import woken_by
from sqlaqueue.consumer.runners.shutdown import (
    HURRY,
    LONGEST_END,
    SHUTDOWN,
    GracePeriod,
    not_stopped_error,
    shut_down,
)
from sqlaqueue.consumer.schedules.fire_schedules import fire_schedules
from sqlaqueue.consumer.schedules.firing_process import FiringProcess, GroupState
from sqlaqueue.consumer.settling.outcomes import handler_exception
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.log import logger
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.sql.engine import own_work
from sqlaqueue.write_routing import execute

_MOMENT = 0.02

LONGEST_WAIT = 10.0
"""Seconds for which the main thread waits at most: not every system interrupts a wait for a signal, and nothing can
wake it after a handler has closed its descriptors."""


class ThreadRunner:
    """Runs the routines of one ``run()`` or ``drain()`` in threads."""

    can_interrupt = False

    def __init__(
        self, name: str, parts: ConsumerParts, factory: Any, handler: Callable[..., Any], *, draining: bool
    ) -> None:
        self._handler = handler
        self._changed = threading.Condition()
        self._poll, self._stopped, self._maintenance = threading.Event(), threading.Event(), threading.Event()
        self._schedules = threading.Event()
        self._schedule_subscribers: list[tuple[sa.Engine, GroupState]] = []
        self._waker = Waker()
        self._working: set[threading.Thread] = set()
        context = self.context = ConsumerContext(name, parts, factory, self, draining=draining)
        lease = parts.settings.lease.total_seconds()
        self._deadlines = context.deadlines = Deadlines(longest_wait(lease), name, context.log_fields)
        self._grace = GracePeriod(self.context)
        self._firing: FiringProcess | None = None
        """Fires the schedules; None without any, and while a queue is drained."""
        schedules = parts.settings.schedules
        if schedules and not draining:
            self._firing = FiringProcess(schedules, self._schedules.set, self._listen_to_schedules)

    # -- what routines ask for -------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Begin to listen for notifications."""
        context = self.context
        context.polls.peers.subscribed = True
        listener.listen(context.engine, channel_of(context.spec), context.polls)

    def reconnect(self) -> None:
        """Listen on another connection."""
        listener.reconnect(self.context.engine)

    def wake_workers(self, number: int) -> None:
        """Wake some of the workers that wait for a change."""
        with self._changed:
            self._changed.notify(number)

    def wake_poller(self) -> None:
        """Wake the worker that waits for the next poll."""
        self._poll.set()

    def wake_maintenance(self) -> None:
        """Wake the maintenance loop."""
        self._maintenance.set()

    def stop(self) -> None:
        """Wake everything that waits."""
        self._stopped.set()
        self.wake_poller()
        if self._firing is not None:
            self._firing.stop()
        self.wake_workers(self.context.settings.concurrency)
        self._waker.wake()

    # -- threads ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the workers have ended, or are abandoned."""
        context = self.context
        name = f"sqlaqueue-{context.spec.name}"
        workers = [
            self._thread(work(context, reconcile_all), f"{name}-{number}")
            for number in range(context.settings.concurrency)
        ]
        beside = [self._thread(maintain(context), f"{name}-maintenance")]
        if self._firing is not None:
            beside.append(self._thread(fire_schedules(self._firing), f"{name}-schedules"))
        limit_connects(context.engine)
        self._deadlines.engine = context.engine
        with (
            self._deadlines.watched(),
            signal_handlers.stop_on_signal(context.stop, wanted=context.handles_signals),
            woken_by(context.engine, channel_of(context.spec), context.polls),
        ):
            context.fork_guard.watch(context.engine)
            self._working.update(workers)
            for thread in (*workers, *beside):
                thread.start()
            try:
                self._wait_for(workers)
                self._waker.check()
            finally:
                context.stop()
                if self._waker.is_intact:
                    self._end(workers, beside)
        left = not_stopped_error(context, context.in_flight.busy())
        if left is not None:
            # Also after an error: the caller must not wait for what goes on.
            raise left from context.error
        if context.error is not None:
            raise context.error

    def _end(self, workers: Sequence[threading.Thread], beside: Sequence[threading.Thread]) -> None:
        """Wait for the threads that are not in a handler, and shut down; whatever the database does, not for long."""
        context = self.context
        self._grace.begin()
        context.workers_ended = True
        self.wake_maintenance()
        self._deadlines.hurry(HURRY)
        until = time.monotonic() + max(self._grace.left(), LONGEST_END)
        for thread in beside:
            thread.join(max(0.0, until - time.monotonic()))
        until = time.monotonic() + LONGEST_END
        # A worker that waits for a silent connection is about to give it up. One in a handler may never end.
        while time.monotonic() < until and len(self._working.intersection(workers)) > len(context.in_flight.busy()):
            time.sleep(_MOMENT)
        last = self._thread(shut_down(context), "sqlaqueue-shutdown")
        last.start()
        last.join(SHUTDOWN)
        if context.polls.peers.subscribed:
            listener.unlisten(context.engine, context.polls)
        for engine, state in self._schedule_subscribers:
            listener.unlisten(engine, state)
        self._grace.log_stopped()

    def execute(self, routine: Routine) -> Any:
        """Run one routine in the caller's thread, as a worker does, and return what it returns."""
        return self._drive(routine)

    def close(self) -> None:
        """Free what only a running consumer needs."""
        self._waker.close()

    def _listen_to_schedules(self, engine: sa.Engine, state: GroupState) -> None:
        self._schedule_subscribers.append((engine, state))
        listener.listen(engine, SCHEDULE_CHANNEL, state)

    def _thread(self, routine: Routine, name: str) -> threading.Thread:
        def run() -> None:
            try:
                self._drive(routine)
            except BaseException as error:  # noqa: BLE001 - a worker must not end unnoticed
                self.context.fail(error)
            finally:
                self._working.discard(thread)
                self._waker.wake()

        # Listeners and functions of schedules see the program's variables as well, as in tasks.
        thread = threading.Thread(target=self.context.variables.copy().run, args=(run,), name=name, daemon=True)
        return thread

    def _wait_for(self, workers: Sequence[threading.Thread]) -> None:
        context = self.context
        while not self._working.isdisjoint(workers):
            if context.stopping:
                self._grace.begin()
            left = self._grace.left()
            if left <= 0:
                self._grace.end()
                return
            self._waker.wait(min(left, LONGEST_WAIT))
            if context.fork_guard.is_child:
                # A signal handler of the program has forked while this thread waited, and this process is the child.
                context.fork_guard.end_child()

    # -- effects ---------------------------------------------------------------------------------------------------

    def _drive(self, routine: Routine, session: Session | None = None) -> Any:
        return drive(routine, lambda effect: self._perform(effect, session))

    def _perform(self, effect: Effect, session: Session | None) -> Any:
        context = self.context
        if context.fork_guard.is_child:
            context.fork_guard.end_child()
        match effect:
            case ExecuteInOwnSession():
                own, slow = context.open_session(), effect.operation if effect.slow else None
                try:
                    with own_work(), self._deadlines.limit(own, effect.deadline, slow):
                        context.isolation.begin(own)
                        return execute(own, effect.operation, effect.arguments)
                finally:
                    self._close(own)
            case Execute():
                wait = self._deadlines.begin(require_session(session))
                try:
                    if effect.variables is None:
                        return execute(wait.session, effect.operation, effect.arguments)
                    return effect.variables.run(execute, wait.session, effect.operation, effect.arguments)
                finally:
                    self._deadlines.end(wait)
            case WithSession():
                own = context.open_session()
                try:
                    return self._drive(effect.routine, own)
                finally:
                    self._close(own)
            case CallHandler():
                self._call(require_session(session), effect.executor)
            case Wait():
                self._wait(effect)
        return None

    def _close(self, session: Session) -> None:
        """Close a session; the rollback of its transaction has a deadline as well."""
        with self._deadlines.limit(session):
            session.close()

    def _wait(self, effect: Wait) -> None:
        context = self.context
        match effect.on:
            case "stop":
                self._stopped.wait(effect.seconds)
            case "maintenance":
                self._maintenance.wait(effect.seconds)
                self._maintenance.clear()
            case "schedules":
                self._schedules.wait(effect.seconds)
                self._schedules.clear()
            case "poll":
                self._poll.wait(effect.seconds)
                self._poll.clear()
                if context.stopping:
                    # Another worker may be about to wait, and will not be woken again.
                    self._poll.set()
            case "change":
                with self._changed:
                    self._changed.wait_for(
                        lambda: context.version != effect.version or context.stopping, effect.seconds
                    )

    def _call(self, session: Session, executor: Executor) -> None:
        """Call the handler; a result counts only while the call has not been abandoned."""
        context = self.context
        with context.in_flight.calling(executor):
            while (argument := executor.begin_call(session)) is not None:
                raised: BaseException | None = None
                try:
                    result = executor.variables.run(self._handler, session, argument)
                    if result is not None:
                        raised = refused_result(result, is_async=False)
                except BaseException as error:  # noqa: BLE001 - sys.exit() in a handler must not end the worker
                    raised = handler_exception(error)
                if context.fork_guard.is_child:
                    context.fork_guard.end_child(raised)
                if not executor.end_call(raised, session):
                    break
            self._check_descriptors(executor)

    def _check_descriptors(self, executor: Executor) -> None:
        """End this run, without a further statement, if the handler has closed descriptors.

        :raises HandlerMisuseError: if it has.
        """
        try:
            self._waker.check()
        except HandlerMisuseError as error:
            context = self.context
            keys = ", ".join(f"job {key_text(run.key)}" for run in runs_of(executor.group)) or "one of the last jobs"
            extra = context.log_fields("descriptors_closed")
            logger.critical("queue %s: %s: %s", context.spec.name, keys, error, extra=extra)
            context.fail(error)
            raise
