"""Run the Consumers of one worker process.

Each Consumer has a thread, all AsyncConsumers share an event loop in a thread of its own, and the main thread handles
signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin import Finding
from sqlaqueue.cli.processes import worker_metrics
from sqlaqueue.cli.processes.consumers import make_consumers
from sqlaqueue.cli.processes.http_server import serving_http
from sqlaqueue.cli.processes.process_settings import configure_logging, tune_interpreter
from sqlaqueue.cli.processes.worker_options import WorkerOptions
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FailedError, InputError, command_errors, first_line
from sqlaqueue.cli.shared.targets import Target
from sqlaqueue.cli.shared.worst_finding import worst_finding, worst_finding_text, worst_of
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.consumer import Consumer, ConsumerGroup
from sqlaqueue.consumer.context import Health
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.consumer.startup import check_ready
from sqlaqueue.exc import HandlerNotStopped, SqlaqueueError
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.telemetry.health_app import healths_of

if TYPE_CHECKING:
    from sqlaqueue.consumer.async_consumer import AsyncConsumer

_DISPOSAL = 5.0
"""Seconds for the connections of an engine to be closed."""


class WorkerProcess:
    """The Consumers of this process.

    :param on_start: called when the database has been checked and the Consumers start.
    """

    def __init__(self, options: WorkerOptions, on_start: Callable[[], object]) -> None:
        self._options, self._on_start = options, on_start
        self._group: ConsumerGroup | None = None
        self._stopping = False
        self._failure: tuple[ConsumerBase, BaseException] | None = None
        self._finished_runs = 0
        self._lock = threading.Lock()
        self._consumers: Sequence[ConsumerBase] = ()

    def stop(self) -> None:
        """Stop the Consumers, including those that have not started; may be called from a signal handler."""
        self._stopping = True
        if self._group is not None:
            self._group.stop()

    def healths(self) -> dict[str, Health]:
        """Return the health of each Consumer; while they are made and checked, this process is alive and not ready."""
        starting = Health(alive=True, ready=False, problems=("it is starting",))
        if self._group is None:
            return healths_of(self._consumers, lambda _: starting)
        return healths_of(self._consumers)

    def run(self) -> None:
        """Make the Consumers and run them until a signal arrives or, with ``drain``, no job is due.

        :raises click.ClickException: if the options or the database are wrong, or a Consumer fails.
        """
        with signal_handlers.stop_on_signal(self.stop):
            consumers = make_consumers(self._options)
            configure_logging(self._options.log_level)
            try:
                if self._options.otel:
                    _instrument_for_otel(consumers)
                if self._options.measured:
                    worker_metrics.instrument_all(consumers)
                self._consumers = consumers
                with serving_http(self._options.http, self.healths, worker_metrics.of_this_process()):
                    _log_worst([(_check_database(consumer), consumer.model) for consumer in consumers])
                    self._on_start()
                    tune_interpreter()
                    self._run_consumers(consumers)
                if self._options.drain and self._failure is None:
                    _log_paused_queues(consumers)
            finally:
                _dispose_engines(consumers)
        if self._failure is not None:
            _raise(*self._failure)
        if self._options.drain:
            extra = fields("drained", count=self._finished_runs)
            logger.info("no job is left to claim; finished runs: %d", self._finished_runs, extra=extra)

    def _run_consumers(self, consumers: Sequence[ConsumerBase]) -> None:
        group = self._group = ConsumerGroup(consumers)
        runs: list[tuple[str, Callable[[], object]]] = [
            (f"sqlaqueue-{each.queue}", partial(self._run_consumer, each))
            for each in consumers
            if isinstance(each, Consumer)
        ]
        others: list[Any] = [each for each in consumers if not isinstance(each, Consumer)]
        if others:
            runs.append(("sqlaqueue-loop", partial(self._run_event_loop, others)))
        # run() has installed the signal handlers already, as importing the application may take a while.
        with group.running(signals=False):
            while not self._stopping:
                before = self._finished_runs
                group.run_in_threads(runs)
                # A job of one queue may enqueue into another queue that was drained before.
                again = self._options.drain and len(consumers) > 1 and self._finished_runs > before
                if not again or self._failure is not None:
                    break

    def _run_consumer(self, consumer: Consumer[Any]) -> None:
        try:
            if self._options.drain:
                self._count(consumer.drain())
            else:
                consumer.run()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._fail(consumer, error)

    def _run_event_loop(self, consumers: Sequence[AsyncConsumer[Any]]) -> None:
        runner = asyncio.Runner()
        try:
            runner.run(self._run_tasks(consumers))
            # Closing a loop waits for its tasks, and a handler that swallows its cancellation may never end.
            if self._failure is None or not isinstance(self._failure[1], HandlerNotStopped):
                runner.close()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(consumers[0], error)

    async def _run_tasks(self, consumers: Sequence[AsyncConsumer[Any]]) -> None:
        await asyncio.gather(*map(self._run_async_consumer, consumers))
        for consumer in consumers:
            # Its connections cannot be closed after their event loop.
            async with consumer.session_factory() as session:
                engine = session.bind
            if hasattr(engine, "dispose"):
                # asyncpg waits for the reply to a farewell, and the database may not answer any more.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DISPOSAL):
                        await engine.dispose()

    async def _run_async_consumer(self, consumer: AsyncConsumer[Any]) -> None:
        try:
            if self._options.drain:
                self._count(await consumer.drain())
            else:
                await consumer.run()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(consumer, error)

    def _count(self, finished: int) -> None:
        with self._lock:
            self._finished_runs += finished

    def _fail(self, consumer: ConsumerBase, error: BaseException) -> None:
        with self._lock:
            raised, logged = self._failure or (consumer, error), (consumer, error)
            if isinstance(error, HandlerNotStopped):
                # It decides how this process ends: what waits for the handler would wait for ever.
                raised, logged = logged, raised
            self._failure = raised
        if logged[1] is not raised[1]:
            _log_failed(*logged)
        self.stop()


def _instrument_for_otel(consumers: Sequence[ConsumerBase]) -> None:
    try:
        from sqlaqueue.otel import instrument  # noqa: PLC0415 - optional
    except ImportError as error:
        raise InputError(f"--otel: {error}") from None
    for consumer in consumers:
        instrument(consumer)


def _log_failed(consumer: ConsumerBase, error: BaseException) -> None:
    """Log an error beside the one that this process ends with."""
    kind = type(error).__name__
    extra = fields("consumer_failed", queue=consumer.queue, error_kind=kind)
    logger.error("%r: %s: %s", consumer, kind, first_line(error), exc_info=error, extra=extra)


def _raise(consumer: ConsumerBase, error: BaseException) -> None:
    extra = fields("consumer_failed", queue=consumer.queue, error_kind=type(error).__name__)
    logger.debug("%r failed", consumer, exc_info=error, extra=extra)
    with command_errors():
        if isinstance(error, SqlaqueueError | SQLAlchemyError):
            raise error
    raise FailedError(f"{consumer!r}: {type(error).__name__}: {first_line(error)}") from error


def _check_database(consumer: ConsumerBase) -> Finding | None:
    """Raise an error of the command line if the database does not answer, or lacks what the queue needs.

    :return: the worst of what else is wrong with its objects or the server.
    """

    def check(session: Session, spec: QueueSpec) -> Finding | None:
        connection = session.connection(bind_arguments={"mapper": spec.mapper})
        check_dialect(connection.dialect, repr(consumer))
        check_ready(connection, consumer.settings.spec_of_shard)
        # Here, since an engine of another event loop could not be used once the Consumers run.
        return worst_finding(session, spec.model)

    target = Target(consumer.queue, consumer.model, consumer)
    with Database(consumer.session_factory) as database, command_errors(target.spec):
        return database.run(check, target.spec)


def _log_worst(findings: Sequence[tuple[Finding | None, type[Any]]]) -> None:
    worst = worst_of(findings)
    if worst is not None:
        finding, model = worst
        extra = fields("doctor_finding", queue=finding.queue, code=finding.code, severity=finding.severity)
        logger.warning("%s", worst_finding_text(finding, model), extra=extra)


def _log_paused_queues(consumers: Sequence[ConsumerBase]) -> None:
    """Log which queues are paused: no due job was found in them, however many there are."""
    for consumer in consumers:
        spec = Target(consumer.queue, consumer.model, consumer).spec
        if CONTROL not in spec.side_tables:
            continue
        with Database(consumer.session_factory) as database, command_errors(spec):
            paused = database.run(admin.paused, consumer.model)
        if paused:
            text = "queue %s is paused, so none of its jobs is claimed; `sqlaqueue resume` ends that"
            logger.warning(text, consumer.queue, extra=fields("paused", queue=consumer.queue))


def _dispose_engines(consumers: Sequence[ConsumerBase]) -> None:
    """Close the connections of the sync engines; the event loop has closed those of the async ones."""
    for consumer in consumers:
        session = consumer.session_factory()
        if isinstance(session, Session):
            with session:
                session.get_bind(sa.inspect(consumer.model)).engine.dispose()
