"""The threads of one run of a Consumer: one for each worker, and one for maintenance."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

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
from sqlaqueue.consumer.core.statement_deadline import StatementDeadlines
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.worker import work
from sqlaqueue.consumer.maintenance.loop import maintain
from sqlaqueue.consumer.maintenance.reconcile import reconcile_all
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.notifications.in_process import woken_by
from sqlaqueue.consumer.runners.shutdown import GracePeriod, shut_down
from sqlaqueue.consumer.schedules.fire_schedules import fire_schedules
from sqlaqueue.consumer.schedules.firing_process import FiringProcess, GroupState
from sqlaqueue.consumer.settling.outcomes import handler_exception
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.engine import own_work
from sqlaqueue.write_routing import execute

LONGEST_WAIT = 600.0
"""Seconds for which the main thread waits at most: not every system interrupts a wait for a signal."""

_LONGEST_STATEMENT = 5.0


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
        self._deadlines = StatementDeadlines(self._waker.wake)
        self._working: set[threading.Thread] = set()
        self.context = ConsumerContext(name, parts, factory, self, draining=draining)
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
        listener.listen(context.engine, backend().channel_of(context.spec), context.polls)

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
        with (
            signal_handlers.stop_on_signal(context.stop, wanted=context.handles_signals),
            woken_by(context.engine, backend().channel_of(context.spec), context.polls),
        ):
            context.fork_guard.watch(context.engine)
            self._working.update(workers)
            for thread in (*workers, *beside):
                thread.start()
            try:
                self._wait_for(workers)
            finally:
                context.stop()
                self._grace.begin()
                context.workers_ended = True
                self.wake_maintenance()
                for thread in beside:
                    # It ends with its last statement, in a moment, or the database does not answer.
                    thread.join(timeout=max(context.settings.grace, _LONGEST_STATEMENT))
                self._drive(shut_down(context))
                if context.polls.peers.subscribed:
                    listener.unlisten(context.engine, context.polls)
                for engine, state in self._schedule_subscribers:
                    listener.unlisten(engine, state)
                self._grace.log_stopped()
        if context.error is not None:
            raise context.error

    def execute(self, routine: Routine) -> Any:
        """Run one routine in the caller's thread, as a worker does, and return what it returns."""
        return self._drive(routine)

    def close(self) -> None:
        """Free what only a running consumer needs."""
        self._waker.close()

    def _listen_to_schedules(self, engine: sa.Engine, state: GroupState) -> None:
        self._schedule_subscribers.append((engine, state))
        listener.listen(engine, backend().side_tables.SCHEDULE_CHANNEL, state)

    def _thread(self, routine: Routine, name: str) -> threading.Thread:
        def run() -> None:
            try:
                self._drive(routine)
            except BaseException as error:  # noqa: BLE001 - a worker must not end unnoticed
                self.context.fail(error)
            finally:
                self._working.discard(thread)
                self._waker.wake()

        thread = threading.Thread(target=run, name=name, daemon=True)
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
            self._waker.wait(min(left, self._deadlines.until_check(), LONGEST_WAIT))
            if context.fork_guard.is_child:
                # A signal handler of the program has forked while this thread waited, and this process is the child.
                context.fork_guard.end_child()
            self._deadlines.cancel_overdue()

    # -- effects ---------------------------------------------------------------------------------------------------

    def _drive(self, routine: Routine, session: Session | None = None) -> Any:
        return drive(routine, lambda effect: self._perform(effect, session))

    def _perform(self, effect: Effect, session: Session | None) -> Any:
        context = self.context
        if context.fork_guard.is_child:
            context.fork_guard.end_child()
        match effect:
            case ExecuteInOwnSession():
                bind = context.settings.bind_arguments
                with context.open_session() as own, own_work():
                    context.isolation.begin(own)
                    with self._deadlines.limit(effect.deadline, own, bind):
                        return execute(own, effect.operation, effect.arguments)
            case Execute():
                return execute(require_session(session), effect.operation, effect.arguments)
            case WithSession():
                with context.open_session() as own:
                    return self._drive(effect.routine, own)
            case CallHandler():
                self._call(require_session(session), effect.executor)
            case Wait():
                self._wait(effect)
        return None

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
                    result = self._handler(session, argument)
                    if result is not None and (inspect.isawaitable(result) or inspect.isgenerator(result)):
                        raised = _not_run(result)
                except BaseException as error:  # noqa: BLE001 - sys.exit() in a handler must not end the worker
                    raised = handler_exception(error)
                if context.fork_guard.is_child:
                    context.fork_guard.end_child(raised)
                if not executor.end_call(raised, session):
                    return


def _not_run(result: Any) -> HandlerMisuseError:
    if hasattr(result, "close"):
        result.close()
    kind = type(result).__name__
    return HandlerMisuseError(
        f"the handler returned a {kind}, and nothing of it has been run; use AsyncConsumer for coroutines"
    )
