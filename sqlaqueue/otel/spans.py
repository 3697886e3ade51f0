"""The spans of a Consumer: ``receive`` for a claim, ``process`` for a handler's call, and one for the settlement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from sqlaqueue.consumer.errors import kind_of
from sqlaqueue.consumer.events import EventName, JobEvent, PollEvent
from sqlaqueue.exc import Cancel, Snooze, Throttle
from sqlaqueue.otel.conventions import attributes, context_of, links_to
from sqlaqueue.queue.run import key_text
from sqlaqueue.telemetry.attempts import Attempt, attempt_of, note

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
    """Makes the spans of Consumers.

    :param tracer: the tracer of OpenTelemetry.
    """

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


def _is_no_error(error: BaseException) -> bool:
    return isinstance(error, Snooze | Throttle | Cancel)
