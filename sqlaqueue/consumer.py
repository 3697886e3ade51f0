"""The long-running form for sync code: :class:`Consumer`, with a thread for each handler at work.

::

    def send(session: Session, email: Email) -> None:
        smtp.send(email.to)

    Consumer(Email, send, sessionmaker(engine)).run()

``concurrency`` is the number of threads. Under a strategy with leases the threads share the claimed jobs, one
handler call each, every call with a session of its own. Under a strategy that holds a transaction each thread claims a
batch of its own and runs its jobs one after the other in that transaction, each in a savepoint.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, Literal, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import operations as ops
from sqlaqueue.consumer_base import ConsumerBase, is_programs_fault
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.operations import Ended
from sqlaqueue.outcomes import RELEASED
from sqlaqueue.runs import Beside, Do, Report, Script, held_batch, leased_unit
from sqlaqueue.turns import Turn

logger = logging.getLogger("sqlaqueue")

T = TypeVar("T")
SessionFactory = Callable[[], Session]


class Consumer(ConsumerBase, Generic[T]):
    """Claims jobs, runs a handler for each, and settles them.

    :param model: a queue class, or ``select(Model).where(...)`` to serve some of its jobs only.
    :param handler: ``handler(session, job)``, or ``handler(session, jobs)`` with ``batch=True``. It may raise
        :class:`~sqlaqueue.Retry`, :class:`~sqlaqueue.Snooze`, :class:`~sqlaqueue.Fail` or
        :class:`~sqlaqueue.Cancel`; any other exception is a failed attempt. What it writes through ``session`` is committed
        together with the job's completion; it must not commit itself under a strategy that holds the transaction.
    :param session_factory: makes sessions, such as a ``sessionmaker(engine)``.
    :param batch_size: the most jobs that one statement claims. Under leases fewer are claimed when handlers are
        slow, about as many as are done within a second.
    :param concurrency: how many handlers run at once.
    :param poll_interval: seconds or timedelta between looks at an empty queue.
    :param lease: overrides the config's lease.
    :param timeout: seconds or timedelta after which a handler's result is refused. A thread cannot be stopped: its lease
        is no longer extended, and the run counts as a failed attempt when it returns, or when it is rescued.
    :param grace: seconds or timedelta that ``stop()`` leaves to handlers at work before their jobs are given back.
    :param retry: overrides the config's retry policy.
    :param name: added to the worker's name in ``claimed_by`` and in the log.
    :param batch: call the handler with a list of jobs. A batch that fails is tried again job by job.
    :raises ConfigurationError: when an argument cannot be meant.
    """

    @overload
    def __init__(
        self: Consumer[T],
        model: type[T],
        handler: Callable[[Session, T], object],
        session_factory: SessionFactory,
        *,
        batch: Literal[False] = False,
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[T],
        model: type[T],
        handler: Callable[[Session, list[T]], object],
        session_factory: SessionFactory,
        *,
        batch: Literal[True],
        **options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self: Consumer[Any],
        model: sa.Select[Any],
        handler: Callable[[Session, Any], object],
        session_factory: SessionFactory,
        *,
        batch: bool = False,
        **options: Any,
    ) -> None: ...
    def __init__(self, model: Any, handler: Any, session_factory: Any, **options: Any) -> None:
        super().__init__(model, handler, session_factory, **options)
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004 - asks what calling it gives
            msg = "Consumer: the handler is a coroutine function; use AsyncConsumer with an async_sessionmaker"
            raise ConfigurationError(msg)
        self._cond = threading.Condition()
        self._stop_requested = threading.Event()
        self._lanes: list[threading.Thread] = []
        self._error: BaseException | None = None

    # -- the public verbs --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the queue until :meth:`stop` is called or, in the main thread, SIGTERM or SIGINT arrives.

        A second signal ends the process at once; nothing is lost by it.

        :raises ConfigurationError: when the connection pool is too small.
        """
        self._draining = False
        self._serve()

    def drain(self) -> int:
        """Serve the queue until no job is due, and return how many runs ended.

        Jobs that others hold, and those whose time has not come, are left alone.

        :raises ConfigurationError: when the connection pool is too small.
        """
        self._draining = True
        before = self._crew.jobs_ended
        self._serve()
        return self._crew.jobs_ended - before

    def stop(self) -> None:
        """Take on no more work and let ``run()`` return, at the latest when the grace period is over.

        May be called from any thread, from a handler, and from a signal handler.
        """
        self._plan.stopping = True
        self._stop_requested.set()
        with self._cond:
            self._cond.notify_all()

    # -- serving -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._factory() as session:
            if not isinstance(session, Session):
                msg = f"Consumer: {self._factory!r} makes {type(session).__name__}; give a sessionmaker, or use AsyncConsumer"
                raise ConfigurationError(msg)
            bind = session.get_bind(self._plan.spec.mapper)
            self._check_pool(bind.engine.pool)
        self._stop_requested.clear()
        self._start_agenda()
        self._error = None
        name = f"sqlaqueue-{self.queue}"
        self._lanes = [
            threading.Thread(target=self._lane, name=f"{name}-{number}", daemon=True)
            for number in range(self._plan.concurrency)
        ]
        keeper = threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True)
        self._finished = threading.Event()
        with self._signals():
            for thread in (*self._lanes, keeper):
                thread.start()
            self._wait_for_lanes()
        self._finished.set()
        self.stop()
        keeper.join(timeout=self._grace)
        self._wind_up()
        if self._error is not None:
            raise self._error

    def _wait_for_lanes(self) -> None:
        deadline: float | None = None
        while any(lane.is_alive() for lane in self._lanes):
            if self._plan.stopping and deadline is None:
                deadline = time.monotonic() + self._grace
            if deadline is not None and time.monotonic() >= deadline:
                self._abandon()
                return
            with self._cond:
                self._cond.wait(0.2)

    def _abandon(self) -> None:
        """Give the jobs of handlers back that outlived the grace period; their results are refused."""
        running = self._crew.running()
        for one in running:
            one.abandoned = True
        logger.warning("%r: %d handlers outlived the grace period; their jobs are given back", self, len(running))
        if not self._plan.holds_transaction:
            self._crew.report(Report(unsettled=[Ended(run, RELEASED) for one in running for run in one.runs]))

    def _wind_up(self) -> None:
        """Give back what was claimed and not started, and settle what has ended."""
        unstarted = [Ended(run, RELEASED) for run in self._crew.empty_inbox()]
        self._crew.report(Report(unsettled=unstarted))
        try:
            self._settle_finished()
        except Exception:
            logger.exception("%r: could not settle at the end; the leases will expire and the jobs run again", self)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def first(number: int, _: FrameType | None) -> None:
            logger.info("%r: %s, stopping", self, signal.Signals(number).name)
            signal.signal(number, signal.SIG_DFL)
            self.stop()

        before = {number: signal.signal(number, first) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- lanes: one thread for each handler ------------------------------------------------------------------

    def _lane(self) -> None:
        take_turn = self._held_turn if self._plan.holds_transaction else self._leased_turn
        while not self._plan.stopping:
            turn = Turn(self._crew, self._notify)
            try:
                busy = take_turn(turn)
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the queue must be served on
                turn.end()
                self._trouble(error)
                continue
            turn.end()
            self._proven = True
            self._crew.pace.succeeded()
            if not busy and self._draining:
                if turn.nothing_left():
                    self.stop()
                else:
                    self._rest(0.1)
        with self._cond:
            self._cond.notify_all()

    def _trouble(self, error: Exception) -> None:
        """Wait before the next try, or end when it is the program that is wrong."""
        if not self._proven and is_programs_fault(error):
            self._error = error
            self.stop()
            return
        wait = self._crew.pace.failed()
        logger.warning("%r: %s: %s; next try in %.1f s", self, type(error).__name__, error, wait)
        self._stop_requested.wait(wait)

    def _held_turn(self, turn: Turn) -> bool:
        if not turn.to_claim():
            self._rest(0.5)
            return True
        with self._factory() as session:
            report = self._carry_out(held_batch(self._plan, self._plan.batch_size), session, turn)
        self._crew.report(report)
        if not report.claimed:
            self._idle()
        return bool(report.claimed)

    def _leased_turn(self, turn: Turn) -> bool:
        unit = turn.to_work()
        if not unit:
            if not turn.to_claim():
                self._rest(0.5)
                return True
            return self._claim_more(turn)
        with self._factory() as session:
            report = self._carry_out(leased_unit(self._plan, unit), session)
        self._crew.report(report)
        if self._crew.wants_settling(time.monotonic()):
            self._settle_finished()
        return True

    def _claim_more(self, turn: Turn) -> bool:
        self._settle_finished()
        with self._factory() as session:
            jobs = ops.claim_and_commit(session, self._plan, self._crew.pace.claim_size())
        self._crew.fill(jobs)
        turn.claimed(jobs)
        if not jobs:
            self._idle()
        return bool(jobs)

    def _idle(self) -> None:
        if not self._draining:
            self._stop_requested.wait(self._crew.pace.poll())

    def _notify(self) -> None:
        with self._cond:
            self._cond.notify_all()

    def _rest(self, wait: float) -> None:
        """Wait until another thread has found or ended something."""
        with self._cond:
            self._cond.wait(wait)

    def _settle_finished(self) -> None:
        finished = self._crew.take_finished()
        if not finished:
            return
        try:
            with self._factory() as session:
                lost = ops.settle_and_commit(session, self._plan, finished)
        except Exception:
            self._crew.give_back(finished)
            raise
        self._crew.settled(finished, lost)

    # -- carrying scripts out ------------------------------------------------------------------------------

    def _carry_out(
        self, script: Script, session: Session, turn: Turn | None = None
    ) -> Report:
        step = next(script)
        while True:
            try:
                if isinstance(step, Beside):
                    with self._factory() as other:
                        result = step(other)
                elif isinstance(step, Do):
                    result = step(session)
                    if turn is not None and step.operation in {ops.claim, ops.claim_key}:
                        turn.claimed(result)
                else:
                    result = self._call(session, step.jobs)
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

    def _call(self, session: Session, jobs: Sequence[Any]) -> BaseException | None:
        """Call the handler and return what it raised; its result counts only while nobody has given it up."""
        running = self._crew.start(jobs)
        raised: BaseException | None = None
        try:
            self._handler(session, list(jobs) if self._plan.batch else jobs[0])
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a handler must not end the worker
            raised = error
        finally:
            self._crew.stop(running)
        return running.verdict(raised, self._plan.timeout)

    # -- the keeper: one thread beside the lanes -----------------------------------------------------------

    def _keep(self) -> None:
        while not self._finished.is_set():
            try:
                self._tend(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the database may be gone for a while
                logger.warning("%r: tending the queue: %s: %s", self, type(error).__name__, error)
                self._finished.wait(self._crew.pace.failed())
            self._finished.wait(self._keeper_wait())

    def _tend(self, now: float) -> None:
        for late in self._crew.overdue(now):
            keys = [run.key for run in late.runs]
            logger.error("%r: the handler of %s ran into its timeout; its result will be refused", self, keys)
        if self._crew.wants_settling(now):
            self._settle_finished()
        if self._agenda.due("heartbeat", now):
            self._agenda.set("heartbeat", now + self._heartbeat)
            alive = self._crew.alive()
            if alive:
                with self._factory() as session:
                    ops.extend_leases(session, self._plan, alive)
        if self._agenda.due("sweep", now):
            self._sweep(now)
        if self._agenda.due("reconcile", now):
            with self._factory() as session:
                ops.reconcile_messages(session, self._plan)
            self._reconciled(now)

    def _sweep(self, now: float) -> None:
        self._agenda.set("sweep", now + self._crew.pace.sweep())
        with self._factory() as session:
            rescued, asked = ops.sweep(session, self._plan, self._crew.working_runs())
        self._crew.tell_rescued(rescued)
        self._crew.asked_to_stop(asked, now)
