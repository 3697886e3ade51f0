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
import contextlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer import lifecycle
from sqlaqueue.consumer.background import RunsInTask
from sqlaqueue.consumer.base import function_of
from sqlaqueue.consumer.context import Shift
from sqlaqueue.consumer.core.effects import Beside, Do, Doze, Handle, InSession, Pause, Rest, Script, Watch, needed
from sqlaqueue.consumer.executing.executor import Hand
from sqlaqueue.consumer.executing.worker import lane, wind_up
from sqlaqueue.consumer.group import ConsumerGroup
from sqlaqueue.consumer.maintenance.loop import keep
from sqlaqueue.consumer.notifications.async_listener import async_listener_of
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.settling.outcomes import caught
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend

_LAST_WORDS = 5.0
"""Seconds that a handler has for what it does when it is cancelled."""

T = TypeVar("T")
S = TypeVar("S", bound=AsyncSession)


class AsyncConsumer(RunsInTask, Generic[T]):
    """Claims jobs, runs a coroutine for each, and settles them; see :class:`~sqlaqueue.Consumer` for the parameters.

    ``timeout`` cancels the handler, and the run counts as a failed attempt. A handler that outlives ``grace`` is
    cancelled too, and its job goes back with the attempt.

    ``async with AsyncConsumer(...):`` serves the queue in a task until the block ends, for a program with another main
    duty, such as a web server, whose signals stay its own.

    :raises ConfigurationError: when an argument cannot be meant.
    """

    _is_async = True

    @overload
    def __init__(
        self: AsyncConsumer[T],
        model: type[T],
        handler: Callable[[S, T], Awaitable[object]],
        session_factory: Callable[[], S],
        *,
        batch: Literal[False] = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[T],
        model: type[T],
        handler: Callable[[S, list[T]], Awaitable[object]],
        session_factory: Callable[[], S],
        *,
        batch: Literal[True],
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[Any],
        model: AnySelect,
        handler: Callable[[S, Any], Awaitable[object]],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[T],
        model: type[T],
        handler: Mapping[type[T], Callable[[S, Any], Awaitable[object]]],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncConsumer[Any],
        model: AnySelect,
        handler: Mapping[Any, Callable[[S, Any], Awaitable[object]]],
        session_factory: Callable[[], S],
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    def __init__(self, model: Any, handler: Any, session_factory: Any, **options: Any) -> None:
        super().__init__(model, handler, session_factory, **options)
        functions = [function_of(each) for each in self._handlers]
        if any(inspect.isroutine(each) and not inspect.iscoroutinefunction(each) for each in functions):
            msg = "AsyncConsumer: the handler is not a coroutine function; define it with `async def`, or use Consumer"
            raise ConfigurationError(msg)

    async def run(self) -> None:
        """Serve the queue until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A signal stops every Consumer of the process, and a handler that the program had set for it is called as well.
        A second one is left to that handler; where there is none, it ends the process at once, and nothing is lost.
        Cancelling the task that runs this ends it as well: the handlers are cancelled, and their jobs given back.

        :raises ConfigurationError: when the connection pool is too small.
        """
        await self._serve(draining=False)

    @staticmethod
    async def run_all(*consumers: AsyncConsumer[Any]) -> None:
        """Run several AsyncConsumers in this event loop, each in a task of its own, until all have ended.

        In the main thread a signal stops all of them. When one ends with an error the others are stopped, in order, and
        the error is raised; further ones are logged. Cancelling the task that runs this ends all of them as well.

        :raises ConfigurationError: when there is none, one is given twice, or they share a pool that is too small for
            all.
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
        """Serve the queue until no job is due, and return how many runs ended.

        Jobs that others hold, and those whose time has not come, are left alone. Signals are answered as by
        :meth:`run`.

        :raises ConfigurationError: when the connection pool is too small.
        """
        return await self._serve(draining=True)

    async def _serve(self, *, draining: bool) -> int:
        shift = _Tasks(self, draining=draining)
        self._begin(shift)
        try:
            shift.engine = await self._check_factory()
            await shift.serve()
        finally:
            self._shift = None
        return shift.crew.jobs_ended

    async def _check_factory(self) -> sa.Engine:
        session: AsyncSession = self._factory()
        self._check_maker(session)
        async with session:
            return self._engine_of(session.sync_session)


class _Tasks(Shift):
    """A run with a task for each lane and one for the keeper."""

    interrupts = True
    engine: sa.Engine

    def __init__(self, consumer: AsyncConsumer[Any], *, draining: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._called = asyncio.Event()
        self._stopped, self._attended = asyncio.Event(), asyncio.Event()
        self._resting: dict[asyncio.Event, None] = {}
        """What wakes the lanes that rest; the first one has rested longest."""
        self._handler, self.factory, self._grace = consumer._handler, consumer._factory, consumer._grace  # noqa: SLF001 - its other half
        super().__init__(repr(consumer), consumer._plan, consumer._pace, consumer._emitter, draining=draining)  # noqa: SLF001 - as above

    def listen(self) -> None:
        self.calls.listens = True
        async_listener_of(self.engine).add(backend().channel_of(self.plan.spec), self.calls)

    def reconnect(self) -> None:
        async_listener_of(self.engine).reconnect()

    def stop(self) -> None:
        self.plan.stopping = True
        # To another thread the loop may have ended a moment ago: then there is nobody left to wake. It is told once,
        # since the run may end between two calls.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake_all)

    def call(self) -> None:
        self._called.set()

    def attend(self) -> None:
        self._attended.set()

    def _wake_all(self) -> None:
        self._stopped.set()
        self.call()
        self.wake(self.plan.concurrency)

    def wake(self, lanes: int) -> None:
        for changed in [*itertools.islice(self._resting, lanes)]:
            del self._resting[changed]
            changed.set()

    async def serve(self) -> None:
        """Run until the lanes have ended, or have been given up."""
        self.forks.watch(self.engine, self._loop)
        lanes = [asyncio.create_task(self._task(lane(self))) for _ in range(self.plan.concurrency)]
        keeper = asyncio.create_task(self._task(keep(self)))
        with signal_handlers.stop_on_signal(self.stop, wanted=self.handles_signals):
            try:
                await self._wait_for(lanes)
            except asyncio.CancelledError:
                # This run is cancelled, so its handlers are; then their jobs go back as at the end of a grace period.
                self.stop()
                lifecycle.log_shutdown(self, self._grace)
                await self._abandon(lanes)
                raise
            finally:
                self.stop()
                lifecycle.log_shutdown(self, self._grace)
                self.over = True
                self.attend()
                await _end([*lanes, keeper], max(self._grace, 5.0))
                await self._carry_out(wind_up(self))
                if self.calls.listens:
                    await async_listener_of(self.engine).remove(self.calls)
                lifecycle.log_stopped(self)
        if self.error is not None:
            raise self.error

    async def _task(self, script: Script) -> None:
        try:
            await self._carry_out(script)
        except Exception as error:  # noqa: BLE001 - a lane must not end without anybody noticing
            self.fail(error)

    async def _wait_for(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            working = set(lanes)
            while working and not stopped.done():
                await asyncio.wait({*working, stopped}, return_when=asyncio.FIRST_COMPLETED)
                working = {one for one in working if not one.done()}
            lifecycle.log_shutdown(self, self._grace)
        finally:
            stopped.cancel()
        if working:
            _, working = await asyncio.wait(working, timeout=self._grace)
        if working:
            await self._abandon(lanes)

    async def _abandon(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the handlers at work; their results are refused."""
        lifecycle.log_grace_period_over(self, self._grace)
        for one in self.crew.at_work():
            one.abandoned = True
            one.interrupt()
        await asyncio.wait(lanes, timeout=_LAST_WORDS)

    # -- carrying scripts out ------------------------------------------------------------------------------

    async def _carry_out(self, script: Script, session: AsyncSession | None = None) -> Any:
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
                        async with self.open() as other, asyncio.timeout(step.patience):
                            result = await other.run_sync(isolation_level.run_read_committed, self.plan, step)
                    case Do():
                        result = await needed(session).run_sync(step)
                    case InSession():
                        async with self.open() as own:
                            result = await self._carry_out(step.script, own)
                    case Handle():
                        await self._call(needed(session), step.hand)
                    case Pause() | Doze() | Watch() | Rest():
                        await self._pass_time(step)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised = error

    async def _pass_time(self, step: Pause | Doze | Watch | Rest) -> None:
        match step:
            case Pause():
                await wait_for_event(self._stopped, step.seconds)
            case Doze():
                await wait_for_event(self._attended, step.seconds)
                self._attended.clear()
            case Watch():
                await wait_for_event(self._called, step.seconds)
                self._called.clear()
                if self.plan.stopping:
                    # Another lane may be on its way here, and nobody will call again.
                    self._called.set()
            case Rest() if self.crew.version == step.seen and not self.plan.stopping:
                changed = asyncio.Event()
                self._resting[changed] = None
                try:
                    await wait_for_event(changed, step.seconds)
                finally:
                    self._resting.pop(changed, None)

    async def _call(self, session: AsyncSession, hand: Hand) -> None:
        """Call the handler in a task of its own, which can be cancelled."""
        with self.crew.calling(hand):
            task = asyncio.create_task(self._work_through(session, hand))
            hand.interrupt = task.cancel
            try:
                while not (await asyncio.wait([task], timeout=hand.time_left()))[0]:
                    if hand.time_left() == 0:
                        self.crew.time_out(hand)
                        task.cancel()
                        await asyncio.wait([task])
            except asyncio.CancelledError:
                # Somebody cancels every task there is: the handler goes as well, before its session is closed.
                task.cancel()
                await asyncio.wait([task], timeout=_LAST_WORDS)
                raise

    async def _work_through(self, session: AsyncSession, hand: Hand) -> None:
        """Make one call after the other, as long as nobody cancels this task, who may have meant the last one."""
        cancelled = getattr(asyncio.current_task(), "cancelling", int)
        while not cancelled() and (argument := hand.begin(session.sync_session)) is not None:
            raised: BaseException | None = None
            try:
                await self._handler(session, argument)
            except BaseException as error:  # noqa: BLE001 - SystemExit would end the event loop with the task
                raised = caught(error)
            if self.forks.is_child:
                self.forks.end_child(raised)
            if not hand.end(raised, session.sync_session):
                return


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _end(tasks: Sequence[asyncio.Task[None]], patience: float) -> None:
    """Wait for tasks that have been told to end; cancel those that do not."""
    _, pending = await asyncio.wait(tasks, timeout=patience)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=_LAST_WORDS)
