"""The tasks of one run of an AsyncConsumer: one for each worker, and one for maintenance."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerParts
from sqlaqueue.consumer.core.effects import (
    CallHandler,
    Effect,
    Execute,
    ExecuteInOwnSession,
    Routine,
    Wait,
    WithSession,
    adrive,
    await_in,
    require_session,
)
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import limit_connects
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.maintenance.firing import GroupState, fire_schedules
from sqlaqueue.consumer.maintenance.handlers_running import record_timeout
from sqlaqueue.consumer.notifications.async_listener import async_listener_of, woken_in_loop
from sqlaqueue.consumer.outcomes import handler_exception
from sqlaqueue.consumer.settings import refused_result
from sqlaqueue.consumer.threads import HURRY, LONGEST_END, SHUTDOWN, BaseRunner, shut_down
from sqlaqueue.consumer.worker import maintain, work
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.sessions import execute
from sqlaqueue.sql.engine import own_work

_CANCELLATION = 5.0
"""Seconds that a handler has for its clean-up when it is cancelled."""


class TaskRunner(BaseRunner):
    """Runs the routines of one ``run()`` or ``drain()`` in tasks."""

    can_interrupt = _in_loop = True

    def __init__(
        self, name: str, parts: ConsumerParts, factory: Any, handler: Callable[..., Any], *, draining: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._poll, self._stopped, self._maintenance = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._schedules = asyncio.Event()
        self._waiting: dict[asyncio.Event, None] = {}
        """What wakes the workers that wait for a change; the first one has waited longest."""
        self._left: list[Executor] = []
        """The executors whose handlers go on, although they were cancelled."""
        super().__init__(name, parts, factory, handler, draining=draining)

    def listen(self) -> None:
        context = self.context
        context.polls.peers.subscribed = True
        async_listener_of(context.engine).add(channel_of(context.spec), context.polls, context.serves)

    def reconnect(self) -> None:
        async_listener_of(self.context.engine).reconnect()

    def wake_workers(self, number: int) -> None:
        for changed in [*itertools.islice(self._waiting, number)]:
            del self._waiting[changed]
            changed.set()

    def stop(self) -> None:
        """Wake everything that waits; may be called from any thread."""
        # The loop may have ended a moment ago: then there is nothing left to wake. One call, since the run may end
        # between two.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._stopped.set()
        self.wake_poller()
        if self._firing is not None:
            self._firing.stop()
        self.wake_workers(self.context.settings.concurrency)

    async def run(self) -> None:
        context = self.context
        context.fork_guard.watch(context.engine, self._loop)
        workers = [asyncio.create_task(self._task(work(context))) for _ in range(context.settings.concurrency)]
        limit_connects(context.engine)
        self._deadlines.engine = context.engine
        beside = [asyncio.create_task(self._task(maintain(context)))]
        if self._firing is not None:
            beside.append(asyncio.create_task(self._task(fire_schedules(self._firing))))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._deadlines.watched_in_task())
            stack.enter_context(signal_handlers.stop_on_signal(context.stop, wanted=context.handles_signals))
            channel = channel_of(context.spec)
            await stack.enter_async_context(woken_in_loop(context.engine, context.polls, context.watched, channel))
            try:
                await self._wait_for(workers)
            except asyncio.CancelledError:
                # This run is cancelled, so its handlers are; then their jobs are released as after a grace period.
                context.stop()
                self._grace.begin()
                await self._abandon(workers)
                raise
            finally:
                context.stop()
                self._grace.begin()
                context.workers_ended = True
                self.wake_maintenance()
                self._deadlines.hurry(HURRY)
                await _end([*workers, *beside], max(self._grace.left(), LONGEST_END))
                await _end([asyncio.create_task(self._drive(shut_down(context)))], SHUTDOWN)
                if context.polls.peers.subscribed:
                    await async_listener_of(context.engine).remove(context.polls)
                for engine, state in self._schedule_subscribers:
                    await async_listener_of(engine).remove(state)
                self._grace.log_stopped()
        self._raise_error(self._left)

    async def execute(self, routine: Routine) -> Any:
        return await self._drive(routine)

    def _listen_to_schedules(self, engine: sa.Engine, state: GroupState) -> None:
        self._schedule_subscribers.append((engine, state))
        async_listener_of(engine).add(SCHEDULE_CHANNEL, state)

    async def _task(self, routine: Routine) -> None:
        try:
            await self._drive(routine)
        except Exception as error:  # noqa: BLE001 - a worker must not end unnoticed
            self.context.fail(error)

    async def _wait_for(self, workers: Sequence[asyncio.Task[None]]) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            working = set(workers)
            while working and not stopped.done():
                await asyncio.wait({*working, stopped}, return_when=asyncio.FIRST_COMPLETED)
                working = {one for one in working if not one.done()}
            self._grace.begin()
        finally:
            stopped.cancel()
        if working:
            _, working = await asyncio.wait(working, timeout=self._grace.left())
        if working:
            await self._abandon(workers)

    async def _abandon(self, workers: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the handlers that run; their results are refused."""
        self._grace.end()
        self._deadlines.hurry(HURRY)
        await asyncio.wait(workers, timeout=_CANCELLATION)

    async def _drive(self, routine: Routine, session: AsyncSession | None = None) -> Any:
        return await adrive(routine, lambda effect: self._perform(effect, session))

    async def _perform(self, effect: Effect, session: AsyncSession | None) -> Any:
        context = self.context
        if context.fork_guard.is_child:
            context.fork_guard.end_child()
        match effect:
            case ExecuteInOwnSession():
                own: AsyncSession = context.open_session()
                wait = self._deadlines.begin(own.sync_session, slow=effect.operation if effect.slow else None)
                try:
                    async with asyncio.timeout(effect.deadline):
                        return await own.run_sync(self._execute_in, effect)
                finally:
                    await self._deadlines.end_in_task(wait, own)
                    await self._close(own)
            case Execute():
                used = require_session(session)
                wait = self._deadlines.begin(used.sync_session)
                executed = used.run_sync(execute, effect.operation, effect.arguments)
                try:
                    return await (executed if effect.variables is None else await_in(effect.variables, executed))
                finally:
                    await self._deadlines.end_in_task(wait, used)
            case WithSession():
                own = context.open_session()
                try:
                    return await self._drive(effect.routine, own)
                finally:
                    await self._close(own)
            case CallHandler():
                await self._call(require_session(session), effect.executor)
            case Wait():
                await self._wait(effect)
        return None

    async def _close(self, session: AsyncSession) -> None:
        wait = self._deadlines.begin(session.sync_session)
        try:
            # close() is not shielded from a cancellation, by which the pool would lose the connection.
            await session.__aexit__(None, None, None)
        finally:
            await self._deadlines.end_in_task(wait, session)

    @own_work()
    def _execute_in(self, session: Session, effect: ExecuteInOwnSession) -> Any:
        self.context.isolation.begin(session)
        return execute(session, effect.operation, effect.arguments)

    async def _wait(self, effect: Wait) -> None:
        context = self.context
        match effect.on:
            case "stop":
                await wait_for_event(self._stopped, effect.seconds)
            case "maintenance":
                await wait_for_event(self._maintenance, effect.seconds)
                self._maintenance.clear()
            case "schedules":
                await wait_for_event(self._schedules, effect.seconds)
                self._schedules.clear()
            case "poll":
                await wait_for_event(self._poll, effect.seconds)
                self._poll.clear()
                if context.stopping:
                    # Another worker may be about to wait, and will not be woken again.
                    self._poll.set()
            case "change" if context.version == effect.version and not context.stopping:
                changed = asyncio.Event()
                self._waiting[changed] = None
                try:
                    await wait_for_event(changed, effect.seconds)
                finally:
                    self._waiting.pop(changed, None)

    async def _call(self, session: AsyncSession, executor: Executor) -> None:
        """Call the handler in a task of its own, which can be cancelled."""
        self.context.in_flight.calls_begin(executor)
        try:
            task = asyncio.create_task(self._call_in_row(session, executor))
            executor.interrupt = task.cancel
            try:
                seconds = executor.time_left()
                while not (await asyncio.wait([task], timeout=seconds))[0]:
                    seconds = executor.time_left()
                    if seconds == 0:
                        # A handler that swallows this goes on, and has failed when it ends.
                        seconds = max(_CANCELLATION, executor.timeout)
                        record_timeout(self.context, executor)
                        task.cancel()
            except asyncio.CancelledError:
                # All tasks of the process are being cancelled: the handler ends before its session is closed.
                task.cancel()
                _, going_on = await asyncio.wait([task], timeout=_CANCELLATION)
                if going_on:
                    self._left.append(executor)
                raise
        finally:
            self.context.in_flight.calls_end(executor)

    async def _call_in_row(self, session: AsyncSession, executor: Executor) -> None:
        """Make one call after the other, until this task is cancelled: that may have been meant for the last one."""
        guard = self.context.fork_guard
        cancelled = getattr(asyncio.current_task(), "cancelling", int)
        while not cancelled() and (argument := executor.begin_call(session.sync_session)) is not None:
            raised: BaseException | None = None
            try:
                result = await await_in(executor.variables, self._handle(session, argument))
                if result is not None:
                    raised = refused_result(result, is_async=True)
            except BaseException as error:  # noqa: BLE001 - SystemExit would end the event loop with the task
                raised = handler_exception(error)
            if guard.is_child:
                guard.end_child(raised)
            if not executor.end_call(raised, session.sync_session):
                return

    async def _handle(self, session: AsyncSession, argument: Any) -> Any:
        return await self._handler(session, argument)


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _end(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait for tasks that have been told to end; cancel those that do not."""
    _, pending = await asyncio.wait(tasks, timeout=seconds)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=_CANCELLATION)
