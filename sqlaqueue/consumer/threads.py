"""The threads of one run of a Consumer, and its shutdown: the grace period, then what is settled and released."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts, Runner
from sqlaqueue.consumer.core.effects import (
    CallHandler,
    Effect,
    Execute,
    ExecuteInOwnSession,
    Routine,
    Wait,
    WithSession,
    drive,
    require_session,
)
from sqlaqueue.consumer.core.errors import is_connection_lost
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import Deadlines, Waker, limit_connects
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.held import discard_entries
from sqlaqueue.consumer.leased import release, settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.firing import FiringProcess, GroupState, fire_schedules
from sqlaqueue.consumer.maintenance.leases import deregister
from sqlaqueue.consumer.maintenance.minutes import write_last_counts
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.notifications.listener import woken_by
from sqlaqueue.consumer.outcomes import handler_exception
from sqlaqueue.consumer.pace import longest_wait
from sqlaqueue.consumer.settings import refused_result
from sqlaqueue.consumer.worker import maintain, work
from sqlaqueue.exc import HandlerMisuseError, HandlerNotStopped
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.runs import runs_of
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.sessions import execute
from sqlaqueue.sql.engine import own_work

HURRY = 5.0
"""Seconds for which anything waits for the database once the grace period is over, or all handlers have ended."""

LONGEST_END = 6.0
"""Seconds for the library's own threads or tasks to end then."""

SHUTDOWN = 8.0
"""Seconds for what is settled and released last. If the database does not answer, leases give the jobs back."""

_MOST_NAMED = 3


class GracePeriod:
    """The time for which the running handlers of a stopping consumer may continue."""

    def __init__(self, context: ConsumerContext) -> None:
        self._context, self._seconds = context, context.settings.grace
        self._deadline: float | None = None
        self._ended_before = self._released_before = 0

    def begin(self) -> None:
        if self._deadline is None:
            context = self._context
            self._deadline = time.monotonic() + self._seconds
            self._ended_before, self._released_before = context.runs_ended, context.runs_released
            self._log_shutdown()

    def _log_shutdown(self) -> None:
        """Log how many jobs the shutdown waits for, and how long; nothing after a completed ``drain()``."""
        context, grace = self._context, self._seconds
        if context.drained:
            return
        running = len(context.in_flight.running())
        waiting = max(0, len(context.claimed_runs()) - running)
        # Without handling signals, this run was not stopped by the one that was received.
        signal = signal_handlers.received if context.handles_signals else None
        reason = signal or ("stop requested" if context.error is None else type(context.error).__name__)
        aborts = "; a second signal aborts" if signal and signal_handlers.next_signal_aborts else ""
        numbers = {"count": running, "running": running, "waiting": waiting}
        extra = context.log_fields("shutdown_started", signal=signal, grace=grace, **numbers)
        values = (context.spec.name, reason, _running(running), grace, _jobs(waiting), aborts)
        # Without jobs it takes a moment, of which the end is logged.
        level = logging.INFO if running or waiting else logging.DEBUG
        logger.log(level, "queue %s: %s: stopping, %s to finish within %g s, %s to release%s", *values, extra=extra)

    def left(self) -> float:
        """Return the seconds until it ends; inf before it begins."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    def end(self) -> None:
        """Abandon the handlers that still run: they are interrupted if that is possible, and their results refused."""
        context, running = self._context, len(self._context.in_flight.running())
        if running:
            text, grace = "queue %s: the grace period of %g s has passed, releasing %s", self._seconds
            extra = context.log_fields("grace_period_over", count=running, running=running, grace=grace)
            logger.warning(text, context.spec.name, grace, _running(running), extra=extra)
        for executor in context.in_flight.busy():
            executor.abandoned = True
            executor.interrupt()

    def log_stopped(self) -> None:
        """Log how many runs have ended since it began, and how many jobs were released."""
        context = self._context
        if context.drained:
            return
        finished = context.runs_ended - self._ended_before
        # A transaction that a handler keeps open releases its jobs when it ends, at the latest with the process.
        held = len(context.claimed_runs()) if context.settings.holds_transaction else 0
        released = context.runs_released - self._released_before + held
        extra = context.log_fields("consumer_stopped", count=finished, finished=finished, released=released)
        level = logging.INFO if context.stops is None else logging.DEBUG
        logger.log(level, "queue %s: stopped%s", context.spec.name, _stop_text(finished, released), extra=extra)
        if context.stops is not None:
            context.stops.append((context.spec.name, finished, released))


def log_all_stopped(stops: Sequence[tuple[str, int, int]]) -> None:
    """Log the end of the Consumers of a process, given as their queues, runs that have ended, and released jobs."""
    finished, released = sum(one[1] for one in stops), sum(one[2] for one in stops)
    extra = fields("consumers_stopped", count=len(stops), finished=finished, released=released)
    queues = [*dict.fromkeys(one[0] for one in stops)]
    names = f"queue {queues[0]}" if len(queues) == 1 else f"queues {', '.join(queues)}"
    logger.info("%s: stopped%s", names, _stop_text(finished, released), extra=extra)


def _stop_text(finished: int, released: int) -> str:
    if not (finished or released):
        return ""
    runs, were = "1 run" if finished == 1 else f"{finished} runs", "was" if released == 1 else "were"
    return f"; during the stop {runs} ended, and {_jobs(released)} {were} released"


def _deregister(context: ConsumerContext) -> Routine:
    yield ExecuteInOwnSession(deregister, (context,))


def shut_down(context: ConsumerContext) -> Routine:
    """Settle finished runs, release the others, and deregister; the workers have ended, or are abandoned."""
    steps: list[Callable[[], Routine]] = []
    if context.settings.holds_transaction:
        # Their transactions end when their handlers do, or the process; these jobs must not look as if they had killed
        # it.
        context.journal.discard_all()
        steps.append(partial(discard_entries, context))
    else:
        release(context, context.forget_claimed())
    steps += [partial(settle_finished, context), partial(settle_postponed, context, last=True)]
    steps.append(partial(write_last_counts, context))
    if context.registered:
        steps.append(partial(_deregister, context))
    for step in steps:
        try:
            try:
                yield from step()
            except Exception as error:
                if not is_connection_lost(error):
                    raise
                # That of the pool may have been lost long before, and the next one is new.
                yield from step()
        except Exception:
            logger.exception(
                "queue %s: could not store how its last jobs ended; they run again when their leases have expired",
                context.spec.name,
                extra=context.log_fields("not_settled"),
            )


def not_stopped_error(context: ConsumerContext, left: Sequence[Executor]) -> HandlerNotStopped | None:
    """Return the error of a run that ends although these handlers go on; None if all have ended."""
    calls = [(list(one.group), time.monotonic() - one.started) for one in left]
    names = [
        f"{context.handler_name(jobs[0])} (job {', '.join(key_text(run.key) for run in runs_of(jobs)[:_MOST_NAMED])}, "
        f"for {seconds:.0f} s)"
        for jobs, seconds in calls
        if jobs
    ]
    if not names:
        return None
    kind = "AsyncConsumer" if context.runner.can_interrupt else "Consumer"
    msg = (
        f"{kind}({context.spec.model.__name__}, ...): stopped, but {', '.join(names)} still runs after the grace "
        f"period of {context.settings.grace:g} s, until the process ends; its jobs are released. Give what it calls a "
        f"timeout, or {kind}(grace=...) more seconds"
    )
    return HandlerNotStopped(msg, names)


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _running(number: int) -> str:
    return "1 running job" if number == 1 else f"{number} running jobs"


_MOMENT = 0.02

LONGEST_WAIT = 10.0
"""Seconds for which the main thread waits at most: not every system interrupts a wait for a signal, and nothing can
wake it after a handler has closed its descriptors."""


class BaseRunner(Runner):
    """What the threads and the tasks of one run share."""

    _in_loop = False
    _poll: Any
    """An event of threading or of asyncio, as the next two."""
    _maintenance: Any
    _schedules: Any

    def __init__(
        self, name: str, parts: ConsumerParts, factory: Any, handler: Callable[..., Any], *, draining: bool
    ) -> None:
        self._handler = handler
        self._schedule_subscribers: list[tuple[sa.Engine, GroupState]] = []
        context = self.context = ConsumerContext(name, parts, factory, self, draining=draining)
        longest = longest_wait(parts.settings.lease.total_seconds())
        who = f"queue {context.spec.name}"
        self._deadlines = context.deadlines = Deadlines(longest, who, context.log_fields, in_loop=self._in_loop)
        self._grace = GracePeriod(context)
        self._firing: FiringProcess | None = None
        """Fires the schedules; None without any, and while a queue is drained."""
        schedules = parts.settings.schedules
        if schedules and not draining:
            self._firing = FiringProcess(schedules, self._schedules.set, self._listen_to_schedules)

    def wake_poller(self) -> None:
        self._poll.set()

    def wake_maintenance(self) -> None:
        self._maintenance.set()

    def _listen_to_schedules(self, engine: sa.Engine, state: GroupState) -> None:
        raise NotImplementedError

    def _raise_error(self, going_on: Sequence[Executor]) -> None:
        """Raise the error with which the run ends, if any.

        :param going_on: the executors whose handlers go on.
        """
        left, error = not_stopped_error(self.context, going_on), self.context.error
        if left is not None:
            # Also after an error: the caller must not wait for what goes on.
            raise left from error
        if error is not None:
            raise error


class ThreadRunner(BaseRunner):
    """Runs the routines of one ``run()`` or ``drain()`` in threads."""

    can_interrupt = False

    def __init__(
        self, name: str, parts: ConsumerParts, factory: Any, handler: Callable[..., Any], *, draining: bool
    ) -> None:
        self._changed = threading.Condition()
        self._poll, self._stopped, self._maintenance = threading.Event(), threading.Event(), threading.Event()
        self._schedules = threading.Event()
        self._waker = Waker()
        self._working: set[threading.Thread] = set()
        super().__init__(name, parts, factory, handler, draining=draining)

    def listen(self) -> None:
        context = self.context
        context.polls.peers.subscribed = True
        listener.listen(context.engine, channel_of(context.spec), context.polls, context.serves)

    def reconnect(self) -> None:
        listener.reconnect(self.context.engine)

    def wake_workers(self, number: int) -> None:
        with self._changed:
            self._changed.notify(number)

    def stop(self) -> None:
        self._stopped.set()
        self.wake_poller()
        if self._firing is not None:
            self._firing.stop()
        self.wake_workers(self.context.settings.concurrency)
        self._waker.wake()

    def run(self) -> None:
        context = self.context
        name = f"sqlaqueue-{context.spec.name}"
        workers = [self._thread(work(context), f"{name}-{number}") for number in range(context.settings.concurrency)]
        beside = [self._thread(maintain(context), f"{name}-maintenance")]
        if self._firing is not None:
            beside.append(self._thread(fire_schedules(self._firing), f"{name}-schedules"))
        limit_connects(context.engine)
        self._deadlines.engine = context.engine
        with (
            self._deadlines.watched(),
            signal_handlers.stop_on_signal(context.stop, wanted=context.handles_signals),
            woken_by(context.engine, context.polls, context.watched, channel_of(context.spec)),
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
        self._raise_error(context.in_flight.busy())

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
        return self._drive(routine)

    def close(self) -> None:
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

    def _drive(self, routine: Routine, session: Session | None = None) -> Any:
        return drive(routine, partial(self._perform, session))

    def _perform(self, session: Session | None, effect: Effect) -> Any:
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
        if not session.in_transaction():
            session.close()
            return
        wait = self._deadlines.begin(session)
        try:
            session.close()
        finally:
            self._deadlines.end(wait)

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
        context.in_flight.calls_begin(executor)
        try:
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
            if not self._waker.is_intact:
                self._end_without_descriptors(executor)
        finally:
            context.in_flight.calls_end(executor)

    def _end_without_descriptors(self, executor: Executor) -> None:
        """End this run, without a further statement: the handler has closed descriptors."""
        try:
            self._waker.check()
        except HandlerMisuseError as error:
            context = self.context
            keys = ", ".join(f"job {key_text(run.key)}" for run in runs_of(executor.group)) or "one of the last jobs"
            extra = context.log_fields("descriptors_closed")
            logger.critical("queue %s: %s: %s", context.spec.name, keys, error, extra=extra)
            context.fail(error)
            raise
