"""The spans of a Consumer: ``receive`` for a claim, ``process`` for a handler's call, and one for the settlement."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakSet

import sqlalchemy as sa
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session, object_session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue._version import __version__
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.errors import kind_of
from sqlaqueue.consumer.core.events import EventName, JobEvent, PollEvent, is_attempt
from sqlaqueue.exc import Cancel, ConfigurationError, Snooze, Throttle
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.roles import current_traceparent, made_in
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import primary_bind
from sqlaqueue.telemetry.around import Attempt, attempt_of, note, waits_of

# -- conventions -------------------------------------------------------------------------------------------------------
# Names and attributes of OpenTelemetry's conventions for messaging (version 1.44, status Development).


SYSTEM = "sqlaqueue"
SCOPE = "sqlaqueue"
"""The name of the tracer and of the meter."""
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

BATCH_COUNT = "messaging.batch.message_count"

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Seconds; the boundaries that the conventions recommend for durations."""

OperationType = Literal["send", "receive", "process", "settle"]

_PROPAGATOR = TraceContextTextMapPropagator()


def attributes(queue: str, operation: str, kind: OperationType, **others: Any) -> dict[str, Any]:
    """Return the attributes of a span or a measurement.

    :param operation: the name of the operation, such as ``process`` or ``retry``.
    :param others: further attributes, with ``__`` in place of a dot; those that are None are left out.
    """
    given = {name.replace("__", "."): value for name, value in others.items() if value is not None}
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        **given,
    }


def context_of(traceparent: str | None) -> Context:
    """Return the context of a job's trace, an empty one without a trace.

    The context of the thread or task that runs the job is not used: it may be that of the program's start.
    """
    return Context() if traceparent is None else _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def links_to(contexts: Iterable[Context]) -> list[Link]:
    spans = [trace.get_current_span(context).get_span_context() for context in contexts]
    return [Link(span) for span in spans if span.is_valid]


SPAN_NOTE = "sqlaqueue.otel.span"
"""The note with the span of the handler's call, which is the parent of the span of its settlement."""

MOST_LINKS = 128
"""Links of a span; the SDK of OpenTelemetry keeps as many by default."""

_OPERATIONS: dict[EventName, str] = {
    "completed": "complete",
    "retried": "retry",
    "failed": "fail",
    "cancelled": "cancel",
    "released": "release",
    "lease_lost": "settle",
}
_NANOSECONDS = 1_000_000_000


class ConsumerSpans:
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def call(self, jobs: Sequence[Any]) -> Iterator[None]:
        """Make the span of a handler's call: in the trace of its job, or for a batch with links to all traces."""
        attempts = [attempt_of(job) for job in jobs]
        contexts = _contexts([each.traceparent for each in attempts])
        span = self._tracer.start_span(
            f"process {attempts[0].queue}",
            context=contexts[0] if contexts and len(jobs) == 1 else Context(),
            kind=SpanKind.CONSUMER,
            attributes=_call_attributes(attempts),
            links=links_to(contexts),
        )
        for job in jobs:
            note(job, {SPAN_NOTE: span})
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            _record(span, error)
            raise
        finally:
            span.end()

    def polled(self, event: PollEvent) -> None:
        """Make the span of a claim that has found jobs; polls of an empty queue have none."""
        if event.jobs:
            end = time.time_ns()
            self._tracer.start_span(
                f"receive {event.queue}",
                context=Context(),
                kind=SpanKind.CLIENT,
                attributes=attributes(event.queue, "receive", "receive", messaging__batch__message_count=event.jobs),
                links=links_to(_contexts(event.traceparents)),
                start_time=end - round(event.duration * _NANOSECONDS),
            ).end(end)

    def ended(self, event: JobEvent) -> None:
        """Make the span of a settlement: from the end of the handler's call to the commit."""
        operation = _OPERATIONS.get(event.name)
        if operation is None:
            return
        called: Span | None = event.notes.get(SPAN_NOTE)
        if called is not None and not called.get_span_context().trace_flags.sampled:
            # No sampler that follows its parent would record it.
            return
        end = start = time.time_ns()
        if event.started_at is not None and event.duration is not None:
            start = min(end, round((event.started_at.timestamp() + event.duration) * _NANOSECONDS))
        error_type = None if event.error is None or _is_no_error(event.error) else kind_of(event.error)
        span = self._tracer.start_span(
            f"{operation} {event.queue}",
            context=context_of(event.traceparent) if called is None else trace.set_span_in_context(called, Context()),
            kind=SpanKind.CLIENT,
            attributes=attributes(
                event.queue,
                operation,
                "settle",
                messaging__message__id=key_text(event.key),
                sqlaqueue__attempt=event.attempt,
                sqlaqueue__delay=event.delay,
                error__type=error_type,
            ),
            start_time=start,
        )
        if event.name == "lease_lost":
            span.set_status(Status(StatusCode.ERROR, str(event.error)))
        span.end(end)


def _contexts(traceparents: Iterable[str | None]) -> list[Context]:
    """Return the context of each trace, once, of as many as a span can have links to."""
    known = [each for each in dict.fromkeys(traceparents) if each is not None]
    return [context_of(each) for each in known[:MOST_LINKS]]


def _call_attributes(attempts: Sequence[Attempt]) -> dict[str, Any]:
    first = attempts[0]
    if len(attempts) > 1:
        return attributes(first.queue, "process", "process", messaging__batch__message_count=len(attempts))
    return attributes(
        first.queue,
        "process",
        "process",
        messaging__message__id=key_text(first.key),
        sqlaqueue__attempt=first.number,
        sqlaqueue__max_attempts=first.max_attempts,
    )


def _record(span: Span, error: BaseException) -> None:
    """Record the error of a handler; a signal that postpones or cancels the job is no error."""
    if _is_no_error(error):
        span.set_attribute("sqlaqueue.signal", type(error).__name__)
        return
    span.set_attribute("error.type", kind_of(error))
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


# -- what a job has waited for ---------------------------------------------------------------------------------------

MOST_AWAITED = 100
"""Links to the members of a batch, or to the parents of a job, beside those to the trace of the job itself."""

_MOST_READ = 1000
"""The number of members of which the traces are read: many have the same one."""


def link_awaited(consumer: ConsumerBase) -> None:
    """Give the spans of handlers' calls links to the jobs for which theirs have waited.

    It is a middleware, as an AsyncConsumer awaits what it reads. Add it before the one that makes the spans, so that it
    runs inside of that.
    """
    spec, queue = consumer.settings.spec, consumer.queue
    if not spec.config.waits:
        return

    def call_inside(argument: Any, call: Callable[[], Any]) -> Any:
        jobs = argument if isinstance(argument, list) else [argument]
        span, session = _recording(jobs), object_session(jobs[0])
        if span is not None and session is not None:
            with _harmless(queue, "links"):
                _add_links(span, _awaited_traces(session, spec, jobs))
        return call()

    async def await_inside(argument: Any, call: Callable[[], Awaitable[Any]]) -> Any:
        # It needs greenlet, which sync code may lack.
        from sqlalchemy.ext.asyncio import async_object_session  # noqa: PLC0415 - see above

        jobs = argument if isinstance(argument, list) else [argument]
        span, session = _recording(jobs), async_object_session(jobs[0])
        if span is not None and session is not None:
            with _harmless(queue, "links"):
                _add_links(span, await session.run_sync(_awaited_traces, spec, jobs))
        return await call()

    consumer.add_middleware(await_inside if consumer.is_async else call_inside)


def _recording(jobs: Sequence[Any]) -> Span | None:
    """Return the span of a handler's call; None if nothing records it."""
    run = run_of(jobs[0])
    span: Span | None = None if run is None else (run.notes or {}).get(SPAN_NOTE)
    return span if span is not None and span.is_recording() else None


def _add_links(span: Span, traces: Iterable[tuple[str, str]]) -> None:
    for name, traceparent in traces:
        for link in links_to([context_of(traceparent)]):
            span.add_link(link.context, {"sqlaqueue.waits_for": name})


def _awaited_traces(session: Session, spec: QueueSpec, jobs: Sequence[Any]) -> Sequence[tuple[str, str]]:
    """Return the traces of the transactions that enqueued what jobs have waited for, with the relationships' names."""
    traced = [wait for wait in spec.waits if wait.awaited.has("traceparent")]
    if not traced:
        return []
    keys = [attempt_of(job).key for job in jobs]
    parts = []
    for wait in traced:
        other = wait.awaited.table.alias("sqlaqueue_awaited")
        same = sa.and_(*(other.c[there.key] == here for here, there in wait.pairs))
        trace_of = other.c[wait.awaited.columns["traceparent"].key].label("traceparent")
        name = sa.literal(wait.name, sa.Text()).label("name")
        some = sa.select(name, trace_of).select_from(spec.table.join(other, same)).where(spec.key_in(spec.keys, keys))
        parts.append(sa.select(some.limit(_MOST_READ).subquery()))
    found = sa.union_all(*parts).subquery("sqlaqueue_traces")
    known = sa.select(found.c.name, found.c.traceparent).where(found.c.traceparent.is_not(None))
    statement = known.distinct().limit(MOST_AWAITED)
    if spec.strategy.holds_transaction:
        # An error, such as a missing privilege, must not end the transaction that holds the job.
        connection = session.connection(bind_arguments={"mapper": spec.mapper})
        with connection.begin_nested():
            return [(row[0], row[1]) for row in connection.execute(statement)]
    # Not in the session: its transaction would begin before the handler, with a connection that that may never need.
    engine = primary_bind(session, spec.mapper).engine
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as own:
        return [(row[0], row[1]) for row in own.execute(statement)]


def _is_no_error(error: BaseException) -> bool:
    return isinstance(error, Snooze | Throttle | Cancel)


class ConsumerMetrics:
    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, description: str) -> Any:
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=list(DURATION_BUCKETS)
            )

        self._operations = seconds("messaging.client.operation.duration", "Duration of claims and of ending jobs.")
        self._process = seconds("messaging.process.duration", "Duration of a handler's call.")
        self._waits = seconds("sqlaqueue.job.wait.duration", "Time from when a job was due to its handler's call.")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Claimed jobs.")
        self._attempts = meter.create_counter("sqlaqueue.job.attempts", "{attempt}", "Ended attempts, by outcome.")
        self._polls = meter.create_counter("sqlaqueue.polls", "{poll}", "Polls, by whether they found jobs.")
        self._rescued = meter.create_counter("sqlaqueue.jobs.rescued", "{job}", "Jobs whose lease had expired.")
        self._lost = meter.create_counter("sqlaqueue.leases.lost", "{job}", "Refused results of expired leases.")
        self._running = meter.create_up_down_counter("sqlaqueue.jobs.running", "{job}", "Jobs whose handler runs.")

    @contextmanager
    def call(self, jobs: Sequence[Any]) -> Iterator[None]:
        queue, error = attempt_of(jobs[0]).queue, None
        destination = {"messaging.destination.name": queue}
        for waited in waits_of(jobs):
            self._waits.record(waited, destination)
        self._running.add(len(jobs), destination)
        began = time.perf_counter()
        try:
            yield
        except BaseException as raised:
            error = kind_of(raised)
            raise
        finally:
            took = time.perf_counter() - began
            self._running.add(-len(jobs), destination)
            self._process.record(took, attributes(queue, "process", "process", error__type=error))

    def polled(self, event: PollEvent) -> None:
        destination = {"messaging.destination.name": event.queue}
        self._polls.add(1, {**destination, "sqlaqueue.poll.result": "found" if event.jobs else "empty"})
        self._operations.record(event.duration, attributes(event.queue, "receive", "receive"))
        if event.jobs:
            self._consumed.add(event.jobs, attributes(event.queue, "receive", "receive"))

    def ended(self, event: JobEvent) -> None:
        destination = {"messaging.destination.name": event.queue}
        if event.name == "rescued":
            self._rescued.add(1, destination)
        elif event.name == "lease_lost":
            self._lost.add(1, destination)
        elif is_attempt(event):
            self._attempts.add(1, {**destination, "sqlaqueue.outcome": event.name})


# -- sessions ----------------------------------------------------------------------------------------------------------
# The jobs of the flush get the trace of this span, so that it is their parent in the trace.


_SENDS = "sqlaqueue_sends"
"""The key in ``Session.info`` of what a flush that has not ended sends."""

_SENDER = "sqlaqueue_sender"
"""The key in ``Session.info`` of what makes its spans: its factory and its class may both be instrumented."""


_instrumented: WeakSet[Any] = WeakSet()


def instrument_sessions(
    sessions: Any,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Make a span, and count messages, when sessions insert jobs; a second call for them has no effect.

    ::

        instrument_sessions(sessions)
        with sessions() as session:
            session.add(Email(to="ada@example.com"))
            session.commit()  # within the span "send email"

    :param sessions: a ``sessionmaker``, an ``async_sessionmaker``, or a subclass of Session.
    :param tracer_provider: makes the tracer; the global one by default.
    :param meter_provider: makes the meter; the global one by default.
    :raises ConfigurationError: for anything else.
    """
    if sessions in _instrumented:
        return
    target = _event_target(sessions)
    _instrumented.add(sessions)
    sender = _Sender(
        trace.get_tracer(SCOPE, __version__, tracer_provider, SCHEMA_URL),
        metrics.get_meter(SCOPE, __version__, meter_provider, SCHEMA_URL),
    )
    event.listen(target, "before_flush", sender.before_flush)
    event.listen(target, "after_flush", sender.after_flush)
    event.listen(target, "after_soft_rollback", sender.after_rollback)
    event.listen(target, "do_orm_execute", sender.execute)


def _event_target(sessions: Any) -> Any:
    """Return what SQLAlchemy's events of sessions are for."""
    made: Any = getattr(sessions, "class_", None)
    if hasattr(made, "sync_session_class"):
        # The events of an AsyncSession are those of the Session that it wraps. That is a class of its own from now on,
        # as the sessions of other factories wrap that one.
        wrapped = sessions.kw.get("sync_session_class", made.sync_session_class)
        own = type(wrapped.__name__, (wrapped,), {})
        sessions.configure(sync_session_class=own)
        return own
    if made is not None or (isinstance(sessions, type) and issubclass(sessions, Session)):
        return sessions
    msg = f"instrument_sessions({sessions!r}): give a sessionmaker, an async_sessionmaker, or a subclass of Session"
    raise ConfigurationError(msg)


@dataclass
class _Send:
    span: Span
    queue: str
    jobs: int
    attribute: str | None = None
    """The attribute that stores the trace; None without one."""
    traced: list[Any] = field(default_factory=list)
    """The jobs that have got the trace of the span."""

    def fail(self) -> None:
        """End the span of a failed flush, to which jobs that are added again do not belong."""
        if self.attribute is not None:
            for job in self.traced:
                setattr(job, self.attribute, None)
        _fail(self.span, self.queue, "the flush has failed")


class _Sender:
    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Enqueued jobs.")

    def _is_for(self, session: Session) -> bool:
        return session.info.setdefault(_SENDER, self) is self

    def before_flush(self, session: Session, *_: object) -> None:
        """Begin a span for each queue of which the flush inserts jobs."""
        if not self._is_for(session):
            return
        # An earlier flush may have been given up by another listener.
        self.after_rollback(session)
        current = current_traceparent()
        groups: dict[tuple[str, str | None], tuple[QueueSpec, list[Any]]] = {}
        for instance in session.new:
            spec = queue_spec(type(instance))
            if spec is not None:
                # The span in which the jobs were made may have ended, such as that of a handler's call.
                parent = current or made_in(instance_state(instance))
                groups.setdefault((spec.name, parent), (spec, []))[1].append(instance)
        for (queue, parent), (spec, jobs) in groups.items():
            span = self._begin(queue, len(jobs), None if current is not None else context_of(parent))
            if span is None:
                continue
            send = _Send(span, queue, len(jobs), spec.attributes.get("traceparent"))
            session.info.setdefault(_SENDS, []).append(send)
            if send.attribute is None:
                continue
            with trace.use_span(span):
                traceparent = current_traceparent()
            for job in jobs:
                if job.__dict__.get(send.attribute) is None:
                    setattr(job, send.attribute, traceparent)
                    send.traced.append(job)

    def after_flush(self, session: Session, *_: object) -> None:
        if self._is_for(session):
            for send in session.info.pop(_SENDS, ()):
                self._end(send.span, send.queue, send.jobs)

    def after_rollback(self, session: Session, *_: object) -> None:
        if self._is_for(session):
            for send in session.info.pop(_SENDS, ()):
                send.fail()

    def execute(self, state: ORMExecuteState) -> Any:
        """Execute an INSERT of jobs in a span, so that it is the current one for the default of their traceparent."""
        mapper = state.bind_mapper if state.is_insert else None
        spec = None if mapper is None else queue_spec(mapper.class_)
        if spec is None or not self._is_for(state.session):
            return None
        jobs = _number_of_rows(state.parameters)
        span = self._begin(spec.name, jobs)
        if span is None:
            return None
        with trace.use_span(span):
            try:
                with _counting(state, spec.table) as counts:
                    result = state.invoke_statement()
            except BaseException:
                _fail(span, spec.name, "the INSERT has failed")
                raise
        if counts and min(counts) >= 0 and sum(counts) != jobs:
            jobs = sum(counts)
            with _harmless(spec.name):
                span.set_attribute(BATCH_COUNT, jobs)
        self._end(span, spec.name, jobs)
        return result

    def _begin(self, queue: str, jobs: int, context: Context | None = None) -> Span | None:
        """Return a span; None if that fails."""
        count = jobs if jobs > 1 else None
        given = attributes(queue, "send", "send", messaging__batch__message_count=count)
        with _harmless(queue):
            return self._tracer.start_span(f"send {queue}", context, kind=SpanKind.PRODUCER, attributes=given)
        return None

    def _end(self, span: Span, queue: str, jobs: int) -> None:
        with _harmless(queue):
            span.end()
        with _harmless(queue):
            if jobs:
                self._sent.add(jobs, attributes(queue, "send", "send"))


def _fail(span: Span, queue: str, description: str) -> None:
    with _harmless(queue):
        span.set_status(trace.Status(trace.StatusCode.ERROR, description))
        span.end()


@contextmanager
def _harmless(queue: str, what: str = "enqueued jobs") -> Iterator[None]:
    """Log an error of the block, such as one of a span processor: the jobs are enqueued or run all the same."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        extra = fields("telemetry_failed", queue=queue, error_kind=kind)
        logger.exception("queue %s: telemetry of %s raised; the jobs are not affected", queue, what, extra=extra)


@contextmanager
def _counting(state: ORMExecuteState, table: Any) -> Iterator[list[int]]:
    """Return the number of rows of each INSERT into a table that the statement of the block executes.

    The result of the ORM does not have it. A driver that does not know a number gives -1.
    """
    counts = list[int]()

    def count(_: Any, cursor: Any, __: Any, ___: Any, context: Any, ____: Any) -> None:
        # The ORM annotates the table, which stays equal. A flush that the statement has caused counts its jobs itself.
        if getattr(context.invoked_statement, "table", None) == table and not state.session.info.get(_SENDS):
            counts.append(cursor.rowcount)

    connection = state.session.connection(bind_arguments=state.bind_arguments)
    event.listen(connection, "after_cursor_execute", count)
    try:
        yield counts
    finally:
        event.remove(connection, "after_cursor_execute", count)


def _number_of_rows(parameters: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None) -> int:
    return len(parameters) if isinstance(parameters, Sequence) else 1
