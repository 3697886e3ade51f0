"""The long-running form for async code: :class:`AsyncConsumer`, with a task for each handler at work.

It executes the same routines as :class:`~sqlaqueue.Consumer` and makes the same promises. A handler is a task, so it
can be cancelled: at its timeout, on a request to cancel its job, and at the end of the grace period.
"""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from sqlaqueue.consumer.base import RunsInTask, T
from sqlaqueue.consumer.consumer import ConsumerGroup
from sqlaqueue.consumer.tasks import TaskRunner


class AsyncConsumer(RunsInTask[T]):
    """Claims jobs, awaits a coroutine for each, and ends them; :class:`~sqlaqueue.Consumer` has the parameters.

    ``timeout`` cancels the handler, and the run counts as a failed attempt. A handler that exceeds ``grace`` is
    cancelled too, and its job is released.

    ``async with AsyncConsumer(...):`` runs it in a background task until the block ends, and leaves signals to the
    program, such as a web server.

    ::

        async def send(session: AsyncSession, email: Email) -> None:
            print("to", email.to)

        await AsyncConsumer(Email, send, async_sessionmaker(async_engine)).run()

    :raises ConfigurationError: for an invalid argument.
    """

    is_async = True

    async def run(self) -> None:
        """Run jobs until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A signal stops every Consumer of the process, and then calls the signal handler that the program had set. A
        second signal goes to that handler; without one it ends the process immediately, and no job is lost. Cancelling
        the task that runs this stops it as well: the handlers are cancelled, and their jobs released.

        :raises ConfigurationError: if the connection pool is too small.
        :raises HandlerNotStopped: if a handler still runs after the grace period.
        """
        await self._serve(draining=False)

    @staticmethod
    async def run_all(*consumers: AsyncConsumer[Any]) -> None:
        """Run several AsyncConsumers in this event loop, each in its own task, until all have ended.

        In the main thread a signal stops all of them. If one ends with an error, the other Consumers are stopped
        gracefully and the error is raised; further errors are logged. Cancelling the task that runs this stops all of
        them as well.

        :raises ConfigurationError: without Consumers, if one is given twice, or if they share a pool that is too small
            for all.
        """
        group = ConsumerGroup.of(AsyncConsumer, consumers)
        group.check_pools([await consumer._check_factory() for consumer in consumers])  # noqa: SLF001 - its own kind

        async def run(consumer: AsyncConsumer[Any]) -> None:
            try:
                await consumer.run()
            except asyncio.CancelledError:
                group.stop()
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised in the task that waits for all
                group.failed(consumer, error)

        with group.running(signals=consumers[0].handles_signals):
            tasks = [asyncio.create_task(run(consumer)) for consumer in consumers]
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                raise

    async def drain(self) -> int:
        """Run jobs until none is due, and return the number of runs that ended.

        Jobs that other workers hold and jobs that are not due yet are left alone. Signals are handled as by
        :meth:`run`.

        :raises ConfigurationError: if the connection pool is too small.
        :raises DBAPIError: if the database cannot be reached for about ten seconds at the start. After the first
            claim it is waited for, as by :meth:`run`.
        :raises HandlerNotStopped: if a handler still runs after the grace period.
        """
        return await self._serve(draining=True)

    async def _serve(self, *, draining: bool) -> int:
        runner = TaskRunner(repr(self), self._parts, self.session_factory, self.handler_call, draining=draining)
        self._begin(runner.context)
        try:
            runner.context.engine = await self._check_factory()
            await runner.run()
        finally:
            self._context = None
        return runner.context.runs_ended

    async def _check_factory(self) -> sa.Engine:
        session: AsyncSession = self.session_factory()
        self._check_maker(session)
        async with session:
            return self._engine_of(session.sync_session)
