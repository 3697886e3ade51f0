"""Fires schedules in async code: :class:`AsyncScheduler`, with the same routine as :class:`~sqlaqueue.Scheduler`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa

from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait, adrive
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.core.waker import Deadlines
from sqlaqueue.consumer.maintenance.firing import FiringProcess, GroupState, fire_schedules
from sqlaqueue.consumer.notifications.async_listener import async_listener_of
from sqlaqueue.consumer.tasks import wait_for_event
from sqlaqueue.postgresql.schedule_tables import SCHEDULE_CHANNEL
from sqlaqueue.scheduler import LONGEST_STOP, SchedulerBase, Subscription
from sqlaqueue.sessions import execute, open_session
from sqlaqueue.sql.engine import own_work


class AsyncScheduler(SchedulerBase):
    """Fires schedules in an event loop; :class:`~sqlaqueue.Scheduler` has the parameters.

    ::

        async with AsyncScheduler(async_sessions, [daily]):
            await async_session.execute(select(Email))  # the program goes on

    ``async with AsyncScheduler(...):`` runs it in a task until the block ends, and leaves signals to the program.

    :raises ConfigurationError: for an invalid argument.
    """

    _is_async = True

    async def run(self) -> None:
        """Fire schedules until :meth:`stop` is called, the task is cancelled, or a signal arrives.

        :raises ConfigurationError: if the database lacks the tables of schedules, or privileges on them.
        """
        await self._serve(*self._start(), signals=self.handles_signals)

    def _start(self) -> tuple[FiringProcess, asyncio.Event, list[Subscription]]:
        self._check_not_running()
        woken, subscriptions, loop = asyncio.Event(), list[Subscription](), asyncio.get_running_loop()

        def listen(engine: sa.Engine, state: GroupState) -> None:
            subscriptions.append((engine, state))
            async_listener_of(engine).add(SCHEDULE_CHANNEL, state)

        # stop() may be called from another thread or a signal handler.
        return self._begin(lambda: loop.call_soon_threadsafe(woken.set), listen), woken, subscriptions

    async def _serve(
        self, process: FiringProcess, woken: asyncio.Event, subscriptions: list[Subscription], *, signals: bool
    ) -> None:
        deadlines = Deadlines(pace.LONGEST_WAIT, repr(self), in_loop=True)

        async def perform(effect: Any) -> Any:
            match effect:
                case ExecuteInOwnSession():
                    async with open_session(self.session_factory) as session, deadlines.limit_in_task(session):
                        return await session.run_sync(own_work()(execute), effect.operation, effect.arguments)
                case Wait():
                    await wait_for_event(woken, effect.seconds)
                    woken.clear()
            return None

        try:
            with signal_handlers.stop_on_signal(process.stop, wanted=signals):
                async with open_session(self.session_factory) as session:
                    self._check(session, session.sync_session)
                async with deadlines.watched_in_task():
                    await adrive(fire_schedules(process), perform)
            self._log_end()
        finally:
            self._process = None
            for engine, state in subscriptions:
                await async_listener_of(engine).remove(state)

    async def __aenter__(self) -> Self:
        """Fire schedules in a task until the block ends."""
        self._task = asyncio.create_task(self._serve(*self._start(), signals=False), name="sqlaqueue-scheduler")
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and raise the error that ended it, unless the block raised one."""
        self.stop()
        try:
            await asyncio.wait([self._task], timeout=LONGEST_STOP)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._task.done():
            self._task.cancel()
        elif error is None:
            self._task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._log_failure(failure)
