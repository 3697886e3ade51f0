"""Traces and metrics by OpenTelemetry, with the names of its conventions for messaging.

::

    from sqlaqueue.otel import instrument, instrument_sessions

    instrument_sessions(sessions)     # where jobs are enqueued: a span for each flush that inserts jobs
    instrument(consumer)              # where they run: a span for each claim, attempt and settlement

A queue with the attribute ``traceparent`` continues the trace of the transaction that enqueued a job::

    __queue__ = QueueConfig(extra_columns=("traceparent",))
"""

from __future__ import annotations

try:
    import opentelemetry.trace  # noqa: F401 - all modules of this package need it
except ModuleNotFoundError as missing:
    msg = f"sqlaqueue.otel needs {missing.name}: pip install 'sqlaqueue[otel]'"
    raise ImportError(msg, name=missing.name) from None

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args
from weakref import WeakSet

from opentelemetry import metrics, trace

from sqlaqueue._version import __version__
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.otel.spans import SCHEMA_URL, SCOPE, ConsumerMetrics, ConsumerSpans, instrument_sessions, link_awaited
from sqlaqueue.telemetry.around import check_consumer, surround

__all__ = ["instrument", "instrument_sessions"]


_instrumented: WeakSet[ConsumerBase] = WeakSet()


def instrument(
    consumer: ConsumerBase,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Make spans and metrics of what a Consumer or an AsyncConsumer does.

    Call it before the Consumer runs; a second call for a Consumer has no effect. The other middleware of the Consumer
    runs inside of the span.

    ::

        consumer = Consumer(Email, send, sessions)
        instrument(consumer)
        consumer.run()

    :param consumer: a Consumer or an AsyncConsumer.
    :param tracer_provider: makes the tracer; the global one by default.
    :param meter_provider: makes the meter; the global one by default.
    :raises ConfigurationError: for anything but a Consumer.
    """
    check_consumer(consumer, "instrument")
    if consumer in _instrumented:
        return
    _instrumented.add(consumer)
    spans = ConsumerSpans(trace.get_tracer(SCOPE, __version__, tracer_provider, SCHEMA_URL))
    measured = ConsumerMetrics(metrics.get_meter(SCOPE, __version__, meter_provider, SCHEMA_URL))

    @contextmanager
    def around_call(argument: Any) -> Iterator[None]:
        jobs = argument if isinstance(argument, list) else [argument]
        with measured.call(jobs), spans.call(jobs):
            yield

    link_awaited(consumer)
    surround(consumer, around_call)
    consumer.on("polled", spans.polled)
    consumer.on("polled", measured.polled)
    names: tuple[EventName, ...] = get_args(EventName)
    for name in names:
        if name != "claimed":
            consumer.on(name, spans.ended)
            consumer.on(name, measured.ended)
