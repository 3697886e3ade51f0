"""One process of ``sqlaqueue worker``: its options, its Consumers, and what it reports to a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from sqlaqueue.admin import Finding, state
from sqlaqueue.cli import http as http_module
from sqlaqueue.cli.database import Target, TargetDatabase, engine_for, load, load_targets, parse_url, session_factory_of
from sqlaqueue.cli.doctor import worst_finding, worst_finding_text, worst_of
from sqlaqueue.cli.http import serving_http
from sqlaqueue.cli.output import FailedError, InputError, command_errors, first_line
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.consumer import Consumer, ConsumerGroup
from sqlaqueue.consumer.context import Health
from sqlaqueue.consumer.core.signals import signal_handlers
from sqlaqueue.consumer.sessions import check_shared_pool
from sqlaqueue.consumer.settings import function_of
from sqlaqueue.consumer.worker import check_ready
from sqlaqueue.exc import DatabaseNotReadyError, HandlerNotStopped, SqlaqueueError
from sqlaqueue.log import JobLogFilter, JSONFormatter, fields, logger
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import primary_bind
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.telemetry.asgi import healths_of
from sqlaqueue.texts import printable

if TYPE_CHECKING:
    from sqlaqueue.consumer.async_consumer import AsyncConsumer

# -- process settings --------------------------------------------------------------------------------------------------
# Settings of a whole process: logging, garbage collection, thread switching.
#
# Only the command line sets them, because the whole process is its own. A Consumer runs in an application's process.


_YOUNGEST_GENERATION = 50_000
"""Allocations before the garbage collector runs: more than the jobs of a few batches need."""

_SWITCH_INTERVAL = 0.001
"""Seconds a thread may run while another one, which has its reply from the database, waits for the interpreter."""


class PlainFormatter(logging.Formatter):
    """Records whose lines cannot be taken for others: keys, errors and names are input of others.

    The first line of a record is the only one that is not indented, and nothing is left that a terminal would obey.
    """

    def __init__(self, *, colored: bool) -> None:
        super().__init__("%(asctime)s [%(process)d] %(levelname)s %(message)s")
        self._colored = colored

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        key = getattr(record, "job_key", None)
        if record.name != logger.name and key is not None:
            # The library's own records name the job in their text.
            keys = ", ".join(map(key_text, key)) if isinstance(key, list) else key_text(key)
            record.message = f"queue {record.__dict__['queue']}: job {keys}: {record.message}"
        text = printable(super().formatMessage(record))
        color = _COLORS.get(record.levelno) if self._colored else None
        return text if color is None else f"\x1b[{color}m{text}\x1b[0m"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in logging
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the name in logging
        return _indented(super().formatStack(stack_info))


_COLORS = {logging.DEBUG: 2, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
"""The codes for a terminal: dimmed, yellow and red."""


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.split("\n"))


_FORMATS: dict[str, type[logging.Formatter]] = {"text": logging.Formatter, "json": JSONFormatter}


def configure_logging(level: str | None, log_format: str | None = None) -> None:
    """Log to standard error, unless the application has configured logging; None: INFO, or what that has configured."""
    number = logging.getLevelNamesMapping()[(level or "info").upper()]
    configured = logging.getLogger().handlers  # the list itself, to which basicConfig() adds
    if not configured:
        # Other libraries log no more than INFO.
        root = max(number, logging.INFO)
        handler = logging.StreamHandler()
        handler.addFilter(JobLogFilter())
        colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        handler.setFormatter(JSONFormatter() if log_format == "json" else PlainFormatter(colored=colored))
        logging.basicConfig(level=root, handlers=[handler])
        logging.getLogger("sqlaqueue").setLevel(number)
    elif level is not None:
        logging.getLogger("sqlaqueue").setLevel(number)
    if log_format is not None and not any(isinstance(each.formatter, _FORMATS[log_format]) for each in configured):
        text = "--log-format has no effect: the application has configured logging; give its handler a JSONFormatter"
        logger.warning(text, extra=fields("log_format_ignored"))


def tune_interpreter() -> None:
    """Run the garbage collector less often, and switch threads more often.

    A job is about ten objects, which are freed when it is settled. With Python's default threshold most of them are
    scanned before that, moved to an older generation, and scanned again together with the application.
    """
    gc.freeze()
    youngest, *older = gc.get_threshold()
    # 0 means that the application has disabled the collector.
    if 0 < youngest < _YOUNGEST_GENERATION:
        gc.set_threshold(_YOUNGEST_GENERATION, *older)
    sys.setswitchinterval(_SWITCH_INTERVAL)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    targets: list[str]
    handlers: list[str] = field(default_factory=list)
    """``--handler``: the handlers of the queue classes among the targets, in order."""
    url: str | None = None
    consumer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the Consumers of queue classes; durations in seconds."""
    from_command_line: list[str] = field(default_factory=list)
    """The options given on the command line. It is an error if they have no effect; a setting may have none."""
    drain: bool = False
    http: str | None = None
    """``--http``: the address of the endpoint; of several processes, the supervisor's."""
    otel: bool = False
    measured: bool = False
    """Whether to measure the Consumers: there is an endpoint, in this process or in the supervisor."""
    log_level: str | None = None
    log_format: str | None = None
    isolate: bool = False
    """Whether each process runs one handler at a time, and is killed if that exceeds a limit."""
    max_memory: int | None = None
    """``--max-memory`` in bytes."""
    max_jobs: int | None = None
    """``--max-jobs``: the number of jobs after which a process is replaced."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def make_consumers(options: WorkerOptions) -> list[ConsumerBase]:
    """Return a Consumer for each target: the application's own, or a new one for a queue class."""
    pairs = [text.partition("=") for text in options.targets]
    loaded = [(target, handler) for text, _, handler in pairs for target in load_targets([text], to_run=True)]
    targets = [target for target, _ in loaded]
    classes = [target for target in targets if target.consumer is None]
    names = _handler_names(options, loaded)
    _check_options(options, targets, classes)
    handlers = [load(name) for name in names]
    made = iter(_consumers_of_classes(options, classes, handlers))
    consumers = [target.consumer or next(made) for target in targets]
    repeated = next((each for each in consumers if consumers.count(each) > 1), None)
    if repeated is not None:
        raise InputError(f"{repeated!r} is named twice; raise its concurrency instead")
    return consumers


def _handler_names(options: WorkerOptions, loaded: Sequence[tuple[Target, str]]) -> list[str]:
    """Return the handler of each queue class: the one in its target, or the next ``--handler``."""
    classes = [(target, handler) for target, handler in loaded if target.consumer is None]
    needless = next((target.text for target, handler in loaded if target.consumer is not None and handler), None)
    if needless is not None:
        raise InputError(f"{needless}: your Consumer has a handler already; remove the one given here")
    unbound = [target.text for target, handler in classes if not handler]
    if unbound and not options.handlers:
        raise InputError(
            f"{unbound[0]}: its handler is missing; write {unbound[0]}=module:function, or give "
            "--handler module:function"
        )
    # A handler from the settings is ignored if each class has one in its target.
    if classes and len(options.handlers) != len(unbound) and (unbound or "handler" in options.from_command_line):
        raise InputError(
            f"queue classes without a handler: {len(unbound)} ({', '.join(unbound) or 'none'}), --handler: "
            f"{len(options.handlers)}; give one --handler for each, in the same order, or write "
            "module:Class=module:function"
        )
    others = iter(options.handlers)
    return [handler or next(others) for _, handler in classes]


def _check_options(options: WorkerOptions, targets: Sequence[Target], classes: Sequence[Target]) -> None:
    if not classes:
        if options.from_command_line:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options.from_command_line)
            raise InputError(f"{names}: no effect on {targets[0].text}, your own Consumer; set it there")
        return
    if options.url is None:
        raise InputError(
            f"{classes[0].text}: the database is missing; give --url "
            "postgresql+psycopg://user:password@host/database, or set SQLAQUEUE_URL"
        )


def _consumers_of_classes(
    options: WorkerOptions, classes: Sequence[Target], handlers: Sequence[Any]
) -> list[ConsumerBase]:
    kinds = [inspect.iscoroutinefunction(function_of(handler)) for handler in handlers]
    factories: dict[bool, Any] = {}
    for is_async in set(kinds):
        # For each Consumer one per handler call and one for maintenance; one listening connection for all of them.
        connections = 1 + kinds.count(is_async) * (1 + options.consumer_options.get("concurrency", 1))
        engine = engine_for(parse_url(options.url or ""), needs_async=is_async, connections=connections)
        factories[is_async] = session_factory_of(engine)
    made = []
    for target, handler, is_async in zip(classes, handlers, kinds, strict=True):
        kind: Any = Consumer
        if is_async:
            from sqlaqueue.consumer.async_consumer import AsyncConsumer as kind  # noqa: PLC0415, N813 - it needs greenlet
        with command_errors(target.spec):
            made.append(kind(target.model, handler, factories[is_async], **options.consumer_options))
    return made


# -- worker process ----------------------------------------------------------------------------------------------------
# Run the Consumers of one worker process.
#
# Each Consumer has a thread, all AsyncConsumers share an event loop in a thread of its own, and the main thread
# handles signals.


_DISPOSAL = 5.0
"""Seconds for the connections of an engine to be closed."""


class WorkerProcess:
    """The Consumers of this process.

    :param on_start: called when the database was checked, and they start.
    :param prepare: called with them when they were made.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_start: Callable[[], object],
        prepare: Callable[[Sequence[ConsumerBase]], object] = lambda _: None,
    ) -> None:
        self._options, self._on_start, self._prepare = options, on_start, prepare
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
        with signal_handlers.stop_on_signal(self.stop):
            consumers = make_consumers(self._options)
            configure_logging(self._options.log_level, self._options.log_format)
            try:
                if self._options.otel:
                    _instrument_for_otel(consumers)
                if self._options.measured:
                    http_module.instrument_all(consumers)
                self._prepare(consumers)
                self._consumers = consumers
                with serving_http(self._options.http, self.healths, http_module.of_this_process()):
                    _check_pools(consumers)
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
        if self._options.drain and not self._stopping:
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
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
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
        except Exception as error:  # noqa: BLE001 - the main thread raises it
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
                if logged[1] is error and isinstance(error.__cause__, Exception):
                    # Why its Consumer has stopped.
                    logged = consumer, error.__cause__
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
    # Where a database that is not ready was found out says nothing; the text has the fix.
    trace = None if isinstance(error, DatabaseNotReadyError) else error
    logger.error("queue %s: %s: %s", consumer.queue, kind, first_line(error), exc_info=trace, extra=extra)


def _raise(consumer: ConsumerBase, error: BaseException) -> None:
    extra = fields("consumer_failed", queue=consumer.queue, error_kind=type(error).__name__)
    logger.debug("queue %s: the Consumer failed", consumer.queue, exc_info=error, extra=extra)
    with command_errors():
        if isinstance(error, SqlaqueueError | SQLAlchemyError):
            raise error
    raise FailedError(f"{consumer!r}: {type(error).__name__}: {first_line(error)}") from error


def _check_database(consumer: ConsumerBase) -> Finding | None:
    """Check that the queue can run; return the worst of what else is wrong with its objects or the server."""

    def check(session: Session, spec: QueueSpec) -> Finding | None:
        connection = session.connection(bind_arguments={"mapper": spec.mapper})
        check_dialect(connection.dialect, repr(consumer))
        check_ready(connection, consumer.settings.spec_of_shard)
        # Here, since an engine of another event loop could not be used once the Consumers run.
        return worst_finding(session, spec.model)

    target = Target(consumer.queue, consumer.model, consumer)
    with TargetDatabase(consumer.session_factory) as database, command_errors(target.spec):
        return database.run(check, target.spec)


def _check_pools(consumers: Sequence[ConsumerBase]) -> None:
    """Refuse a pool that is too small for the Consumers that share it, as ``run_all()`` does."""
    sharing: dict[Any, list[ConsumerBase]] = {}
    for consumer in consumers:
        session = consumer.session_factory()
        # A session that has executed nothing has nothing to close.
        sync: Session = session if isinstance(session, Session) else session.sync_session
        bind = primary_bind(sync, consumer.settings.spec.mapper)
        sharing.setdefault(bind, []).append(consumer)
    with command_errors():
        for bind, several in sharing.items():
            # One Consumer checks its pool itself.
            if isinstance(bind, sa.Engine) and len(several) > 1:
                check_shared_pool(bind, several, "the Consumers of this process")


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
        with TargetDatabase(consumer.session_factory) as database, command_errors(spec):
            paused = database.run(state.paused, consumer.model)
        if paused:
            text = "queue %s: paused, so none of its jobs is claimed; `sqlaqueue resume` ends that"
            logger.warning(text, consumer.queue, extra=fields("paused", queue=consumer.queue))


def _dispose_engines(consumers: Sequence[ConsumerBase]) -> None:
    for consumer in consumers:
        session = consumer.session_factory()
        if isinstance(session, Session):
            with session:
                session.get_bind(sa.inspect(consumer.model)).engine.dispose()


# -- worker reports ----------------------------------------------------------------------------------------------------
# What a worker process sends to its supervisor, in lines: its health again and again, and that it has started, or why
# it cannot.
#
# A module of its own, as the module that a worker process executes must not have been imported before.


STARTED = b"!"
"""The line that is sent to the supervisor when the Consumers start."""

REPORT_INTERVAL = 1.0
"""Seconds between two reports of the health."""


def health_report(healths: Mapping[str, Health]) -> bytes:
    several = len(healths) > 1
    problems = [f"{name}: {text}" if several else text for name, each in healths.items() for text in each.problems]
    health = Health(
        alive=all(each.alive for each in healths.values()),
        ready=bool(healths) and all(each.ready for each in healths.values()),
        problems=tuple(problems) if healths else ("it is starting",),
    )
    return json.dumps(asdict(health)).encode()


def read_report(line: bytes) -> Health | None:
    values = json.loads(line) if line.startswith(b"{") else None
    if values is None:
        return None
    return Health(alive=values["alive"], ready=values["ready"], problems=tuple(values["problems"]))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the handler that begins in an isolated process."""

    jobs: str
    """The jobs in words, for the log."""
    limit: float | None
    """The seconds after which the process is killed."""
    run: dict[str, Any] | None
    """The run of the only job; None for several, of which none is known to be responsible for a death."""


@dataclass(frozen=True, kw_only=True)
class LeftRun:
    """A run whose process has died, for the process that takes its place."""

    run: dict[str, Any]
    seconds: float
    """How long the handler had run."""
    kind: str | None
    """The class of the error in :mod:`sqlaqueue.exc`; None if the job is not the reason."""
    error: str


CALL_ENDED = b"-"
"""The line that is sent when the handler has returned."""


def call_report(call: Call) -> bytes:
    return b"+" + json.dumps(asdict(call)).encode()


def read_call(line: bytes) -> Call | None:
    return Call(**json.loads(line[1:])) if line.startswith(b"+") else None


def leaving_report(why: str) -> bytes:
    """Return the line that says that the process ends after its current job, to be replaced."""
    return b"." + why.encode()


def read_leaving(line: bytes) -> str | None:
    return line[1:].decode() if line.startswith(b".") else None


def note_report(text: str) -> bytes:
    """Return the line with a text that the supervisor logs once, however many processes send it."""
    return b"~" + text.encode()


def read_note(line: bytes) -> str | None:
    return line[1:].decode() if line.startswith(b"~") else None


def left_line(left: Sequence[LeftRun]) -> bytes:
    """Return the line with runs that processes have left behind.

    The first such line, after the options, lets the Consumers of a process start, and they settle its runs. Those of
    later lines are settled if the process claims their jobs.
    """
    return json.dumps([asdict(one) for one in left]).encode() + b"\n"


def read_left(line: bytes) -> list[LeftRun]:
    return [LeftRun(**one) for one in json.loads(line)]


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has resident, from ``/proc``; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def memory_text(size: int) -> str:
    return f"{size / 2**20:.0f}M"


OUTDATED = b"*"
"""The line that is sent before an error that would come again at each start."""


def error_report(text: str) -> bytes:
    return json.dumps(text).encode()


def read_error(line: bytes) -> str | None:
    return str(json.loads(line)) if line.startswith(b'"') else None
