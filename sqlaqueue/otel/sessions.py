"""Instrument the sessions that enqueue jobs: a ``send`` span for each queue of a flush or a bulk insert.

The jobs of the flush get the trace of this span, so that it is their parent in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue._version import __version__
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.otel.conventions import BATCH_COUNT, SCHEMA_URL, SCOPE, attributes, context_of
from sqlaqueue.queue.roles import current_traceparent, made_in
from sqlaqueue.queue.spec import QueueSpec

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
    """Make a span, and count messages, when sessions insert jobs; a second call for the same has no effect.

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
        # as the sessions of other factories wrap the same.
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
    """The jobs of one queue in a flush."""

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
        """End the spans of a flush."""
        if self._is_for(session):
            for send in session.info.pop(_SENDS, ()):
                self._end(send.span, send.queue, send.jobs)

    def after_rollback(self, session: Session, *_: object) -> None:
        """End the spans of a flush that has failed."""
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
def _harmless(queue: str) -> Iterator[None]:
    """Log an error of the block, such as one of a span processor: the program enqueues all the same."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        extra = fields("telemetry_failed", queue=queue, error_kind=kind)
        logger.exception("queue %s: telemetry of enqueued jobs raised; the jobs are not affected", queue, extra=extra)


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
    """Return the number of rows for which there are parameters; 1 for a statement that contains its values."""
    return len(parameters) if isinstance(parameters, Sequence) else 1
