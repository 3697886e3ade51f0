"""The long-running form for async code: :class:`AsyncConsumer`, with a task for each handler at work.

::

    async def send(session: AsyncSession, email: Email) -> None:
        await smtp.send(email.to)

    await AsyncConsumer(Email, send, async_sessionmaker(engine)).run()

It carries out the same scripts as :class:`~sqlaqueue.Consumer` and makes the same promises. A handler is a
task, so it can be cancelled: at its timeout, when somebody asks its job to stop, and at the end of the grace period.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from sqlaqueue import operations as ops
from sqlaqueue.consumer_base import ConsumerBase, is_programs_fault
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.operations import Ended
from sqlaqueue.outcomes import RELEASED
from sqlaqueue.runs import Beside, Do, Report, Script, held_batch, leased_unit
from sqlaqueue.turns import Turn

logger = logging.getLogger("sqlaqueue")

T = TypeVar("T")
AsyncSessionFactory = Callable[[], AsyncSession]


class AsyncConsumer(ConsumerBase, Generic[T]):
    """Claims jobs, runs a coroutine for each, and settles them; see :class:`~sqlaqueue.Consumer` for the parameters.

    ``timeout`` cancels the handler, and the run counts as a failed attempt. A handler that outlives ``grace`` is
    cancelled too, and its job goes back with the attempt.

    :raises ConfigurationError: when an argument cannot be meant.
    """

    @overload
    def __init__(
        self: AsyncConsumer[T],
        model: type[T],
        handler: Callable[[AsyncSession, T], Awaitable[object]],
        session_factory: AsyncSessionFactory,
        *,
        batch: Literal[False] = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[T],
        model: type[T],
        handler: Callable[[AsyncSession, list[T]], Awaitable[object]],
        session_factory: AsyncSessionFactory,
        *,
        batch: Literal[True],
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[Any],
        model: sa.Select[Any],
        handler: Callable[[AsyncSession, Any], Awaitable[object]],
        session_factory: AsyncSessionFactory,
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    def __init__(self, model: Any, handler: Any, session_factory: Any, **options: Any) -> None:
        super().__init__(model, handler, session_factory, **options)
        called = handler if inspect.isfunction(handler) or inspect.ismethod(handler) else getattr(handler, "__call__", handler)  # noqa: B004 - asks what calling it gives
        if inspect.isfunction(called) and not inspect.iscoroutinefunction(called):
            msg = "AsyncConsumer: the handler is not a coroutine function; define it with `async def`, or use Consumer"
            raise ConfigurationError(msg)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- the public verbs --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the queue until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A second signal ends the process at once; nothing is lost by it.

        :raises ConfigurationError: when the connection pool is too small.
        """
        self._draining = False
        await self._serve()

    async def drain(self) -> int:
        """Serve the queue until no job is due, and return how many runs ended.

        Jobs that others hold, and those whose time has not come, are left alone.

        :raises ConfigurationError: when the connection pool is too small.
        """
        self._draining = True
        before = self._crew.jobs_ended
        await self._serve()
        return self._crew.jobs_ended - before

    def stop(self) -> None:
        """Take on no more work and let ``run()`` return, at the latest when the grace period is over.

        May be called from any thread, from a handler, and from a signal handler.
        """
        self._plan.stopping = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_requested.set)

    # -- serving -------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        session = self._factory()
        if not isinstance(session, AsyncSession):
            msg = f"AsyncConsumer: {self._factory!r} makes {type(session).__name__}; give an async_sessionmaker, or use Consumer"
            raise ConfigurationError(msg)
        async with session:
            self._check_pool(session.get_bind(self._plan.spec.mapper).engine.pool)
        self._start_agenda()
        lanes = [asyncio.create_task(self._lane()) for _ in range(self._plan.concurrency)]
        keeper = asyncio.create_task(self._keep())
        try:
            with self._signals():
                await self._wait_for(lanes)
        finally:
            self._plan.stopping = True
            self._stop_requested.set()
            await self._end(keeper, *lanes)
        await self._wind_up()
        if self._error is not None:
            raise self._error

    async def _wait_for(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._stop_requested.wait())
        everyone = asyncio.gather(*lanes)
        try:
            await asyncio.wait([everyone, stopping], return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait([everyone], timeout=self._grace)
            if not done:
                self._abandon()
                await asyncio.wait([everyone], timeout=self._grace)
        finally:
            stopping.cancel()
            everyone.cancel()
            await asyncio.gather(everyone, return_exceptions=True)

    def _abandon(self) -> None:
        """Cancel handlers that outlived the grace period; their jobs go back."""
        running = self._crew.running()
        logger.warning("%r: %d handlers outlived the grace period; their jobs are given back", self, len(running))
        for one in running:
            one.abandoned = True
            one.task.cancel()

    @staticmethod
    async def _end(*tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wind_up(self) -> None:
        """Give back what was claimed and not started, and settle what has ended."""
        self._crew.report(Report(unsettled=[Ended(run, RELEASED) for run in self._crew.empty_inbox()]))
        try:
            await self._settle_finished()
        except Exception:
            logger.exception("%r: could not settle at the end; the leases will expire and the jobs run again", self)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def first(number: signal.Signals) -> None:
            logger.info("%r: %s, stopping", self, number.name)
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            self.stop()

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            loop.add_signal_handler(number, first, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    # -- lanes: one task for each handler --------------------------------------------------------------------

    async def _lane(self) -> None:
        take_turn = self._held_turn if self._plan.holds_transaction else self._leased_turn
        while not self._plan.stopping:
            turn = Turn(self._crew, self._notify)
            try:
                busy = await take_turn(turn)
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the queue must be served on
                turn.end()
                await self._trouble(error)
                continue
            finally:
                turn.end()
            self._proven = True
            self._crew.pace.succeeded()
            if not busy and self._draining:
                if turn.nothing_left():
                    self.stop()
                else:
                    await self._rest(0.1)

    async def _trouble(self, error: Exception) -> None:
        """Wait before the next try, or end when it is the program that is wrong."""
        if not self._proven and is_programs_fault(error):
            self._error = error
            self.stop()
            return
        wait = self._crew.pace.failed()
        logger.warning("%r: %s: %s; next try in %.1f s", self, type(error).__name__, error, wait)
        await self._pause(wait)

    async def _held_turn(self, turn: Turn) -> bool:
        if not turn.to_claim():
            await self._rest(0.5)
            return True
        async with self._factory() as session:
            report = await self._carry_out(held_batch(self._plan, self._plan.batch_size), session, turn)
        self._crew.report(report)
        if not report.claimed:
            await self._idle()
        return bool(report.claimed)

    async def _leased_turn(self, turn: Turn) -> bool:
        unit = turn.to_work()
        if not unit:
            if not turn.to_claim():
                await self._rest(0.5)
                return True
            return await self._claim_more(turn)
        async with self._factory() as session:
            report = await self._carry_out(leased_unit(self._plan, unit), session)
        self._crew.report(report)
        if self._crew.wants_settling(time.monotonic()):
            await self._settle_finished()
        return True

    async def _claim_more(self, turn: Turn) -> bool:
        await self._settle_finished()
        async with self._factory() as session:
            jobs = await session.run_sync(ops.claim_and_commit, self._plan, self._crew.pace.claim_size())
        self._crew.fill(jobs)
        turn.claimed(jobs)
        if not jobs:
            await self._idle()
        return bool(jobs)

    async def _idle(self) -> None:
        if not self._draining:
            await self._pause(self._crew.pace.poll())

    async def _pause(self, wait: float) -> None:
        """Wait, but not past a stop."""
        try:
            await asyncio.wait_for(self._stop_requested.wait(), wait)
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._changed.set()

    async def _rest(self, wait: float) -> None:
        """Wait until another lane has found or ended something."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), wait)
        except TimeoutError:
            return

    async def _settle_finished(self) -> None:
        finished = self._crew.take_finished()
        if not finished:
            return
        try:
            async with self._factory() as session:
                lost = await session.run_sync(ops.settle_and_commit, self._plan, finished)
        except BaseException:
            self._crew.give_back(finished)
            raise
        self._crew.settled(finished, lost)

    # -- carrying scripts out ------------------------------------------------------------------------------

    async def _carry_out(self, script: Script, session: AsyncSession, turn: Turn | None = None) -> Report:
        step = next(script)
        while True:
            try:
                if isinstance(step, Beside):
                    async with self._factory() as other:
                        result = await other.run_sync(step)
                elif isinstance(step, Do):
                    result = await session.run_sync(step)
                    if turn is not None and step.operation in {ops.claim, ops.claim_key}:
                        turn.claimed(result)
                else:
                    result = await self._call(session, step.jobs)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised: Exception | None = error
                result = None
            else:
                raised = None
            try:
                step = script.send(result) if raised is None else script.throw(raised)
            except StopIteration as end:
                report: Report = end.value
                return report

    async def _call(self, session: AsyncSession, jobs: Sequence[Any]) -> BaseException | None:
        """Run the handler as a task of its own and return what it raised."""
        running = self._crew.start(jobs)
        running.task = asyncio.ensure_future(self._handler(session, list(jobs) if self._plan.batch else jobs[0]))
        try:
            done, _ = await asyncio.wait([running.task], timeout=self._plan.timeout)
            if not done:
                running.timed_out = True
                running.task.cancel()
                await asyncio.wait([running.task])
        except asyncio.CancelledError:
            # The Consumer itself is being cancelled: the handler goes with it, and its job stays claimed until its
            # lease or its transaction ends.
            running.task.cancel()
            await asyncio.wait([running.task])
            raise
        finally:
            self._crew.stop(running)
        return running.verdict(_raised(running.task), self._plan.timeout)

    # -- the keeper: one task beside the lanes ---------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._tend(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the database may be gone for a while
                logger.warning("%r: tending the queue: %s: %s", self, type(error).__name__, error)
                await asyncio.sleep(self._crew.pace.failed())
            await asyncio.sleep(self._keeper_wait())

    async def _tend(self, now: float) -> None:
        if self._crew.wants_settling(now):
            await self._settle_finished()
        if self._agenda.due("heartbeat", now):
            self._agenda.set("heartbeat", now + self._heartbeat)
            alive = self._crew.alive()
            if alive:
                async with self._factory() as session:
                    await session.run_sync(ops.extend_leases, self._plan, alive)
        if self._agenda.due("sweep", now):
            await self._sweep(now)
        if self._agenda.due("reconcile", now):
            async with self._factory() as session:
                await session.run_sync(ops.reconcile_messages, self._plan)
            self._reconciled(now)

    async def _sweep(self, now: float) -> None:
        self._agenda.set("sweep", now + self._crew.pace.sweep())
        async with self._factory() as session:
            rescued, asked = await session.run_sync(ops.sweep, self._plan, self._crew.working_runs())
        self._crew.tell_rescued(rescued)
        for one in self._crew.asked_to_stop(asked, now):
            one.task.cancel()


def _raised(task: asyncio.Future[Any]) -> BaseException | None:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception()


